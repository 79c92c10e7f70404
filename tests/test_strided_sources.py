"""Tensors in memory arrive as they are, however they lie there: with gaps, repeated, turned around."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from weightloaders import Convert, load_into, save_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BASE = torch.arange(4000.0)
LAYOUTS = {
    "every second": BASE[::2][:24],
    "a column": BASE.view(40, 100)[:24, 3],
    "a column of a matrix": BASE.view(40, 100)[:24, 3:4],
    "columns": BASE.view(40, 100)[:24, 3:6],
    "one value": torch.tensor(3.0).expand(4, 6),
    "one row": BASE[:4].expand(6, 4),
    "odd steps": BASE.as_strided((4, 6), (50, 7)),
    "by columns": BASE[:24].view(6, 4).t(),
    "not from the start": BASE[5:29],
}
RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda w: w,
    "backwards": lambda w: w.flip(0),
    "twice": lambda w: torch.cat([w, w]),
    "a part": lambda w: w[1:3],
}


def holder(like: torch.Tensor, dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(like.shape, dtype=dtype))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_in_memory_arrives_as_it_is(layout: str, rule: str, dtype: torch.dtype) -> None:
    stored = LAYOUTS[layout]
    expected = RULES[rule](stored).to(dtype)
    model = holder(expected, dtype)
    rules = [] if rule == "as it is" else [Convert("w", "w", RULES[rule])]
    load_into(model, {"w": stored}, rules=rules, progress=False)
    assert torch.equal(model.w, expected)
    again = holder(expected, dtype)
    load_into(again, iter([("w", stored)]), rules=rules, progress=False)
    assert torch.equal(again.w, expected)


@pytest.mark.parametrize("layout", [layout for layout, tensor in LAYOUTS.items() if 0 not in tensor.stride()])
def test_a_parameter_is_written_back_as_it_is(layout: str, tmp_path: Path) -> None:
    model = holder(LAYOUTS[layout], torch.float32)
    load_into(model, {"w": LAYOUTS[layout]}, progress=False)
    model.w.data = LAYOUTS[layout]
    save_weights(model, tmp_path / "model.safetensors", layout="checkpoint")
    again = holder(LAYOUTS[layout], torch.float32)
    load_into(again, tmp_path / "model.safetensors", progress=False)
    assert torch.equal(again.w, LAYOUTS[layout])
