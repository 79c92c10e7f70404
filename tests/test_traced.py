"""Conversions from end to end: what a rule's function makes of real tensors is what arrives, traced or computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders import Convert, load_into, plan_load
from weightloaders.errors import PlanError
from weightloaders.plan import ComputeStep, CopyStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def sources() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(24, 40, generator=generator) for name in "ab"}


def model_for(result: torch.Tensor, dtype: torch.dtype | None = None) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(result.shape, dtype=dtype or result.dtype), requires_grad=False)
    return model


def assigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_empty(48, 40)
    out[0::2] = a
    out[1::2] = b.flip(1)
    return out


def over_zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(30, 64)
    out[3:27, :40] = a
    out[27:, 1:25] = b[:, :3].t()
    return out


TRACED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a transpose": lambda a, b: torch.stack([a.t(), b.t()]),
    "columns with a step": lambda a, b: torch.cat([a[:, ::3], b[:, 1::4]], dim=1),
    "backwards": lambda a, b: torch.cat([a, b]).flip(0, 1),
    "padded": lambda a, b: nn.functional.pad(torch.cat([a, b], dim=1), (2, 0, 0, 5), value=1.5),
    "repeated": lambda a, b: torch.stack([a, b]).repeat_interleave(2, dim=1),
    "expanded": lambda a, b: torch.cat([a[:1].expand(5, 40), b]),
    "rows by number": lambda a, b: torch.cat([a, b])[torch.tensor([40, 3, 3, 17, 0, 47])],
    "blocks of heads": lambda a, b: torch.cat([t.view(4, 3, 2, 40).transpose(1, 2).reshape(24, 40) for t in (a, b)]),
    "assigned slices": assigned,
    "assigned over zeros": over_zeros,
    "cast once": lambda a, b: torch.cat([a, b]).to(torch.bfloat16).t(),
    "cast with one that has the dtype": lambda a, b: torch.cat([a.double(), b.double()]),
}

COMPUTED: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "arithmetic": ("aten.add.Tensor", lambda a, b: a + b),
    "a cast by way of another": ("a cast of what was cast before", lambda a, b: torch.cat([a, b]).half().float()),
    "numpy": ("numpy", lambda a, b: torch.from_numpy(a.numpy().copy())),
    "item": ("_local_scalar_dense", lambda a, b: torch.cat([a, b]) if a[0, 0].item() else b),
    "a branch on data": ("aten.gt.Scalar", lambda a, b: a if a[0, 0] > 0 else b),
    "data_ptr": ("data_ptr", lambda a, b: a if a.data_ptr() else b),
    "rows chosen by values": ("aten.sort", lambda a, b: a[b[:, 0].argsort()]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(sources(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("function", TRACED.values(), ids=TRACED)
def test_what_only_moves_is_read_and_arrives(folder: Path, function: Any) -> None:
    expected = function(**sources())
    model, rule = model_for(expected), Convert(["a", "b"], "w", function)
    (step,) = plan_load(model, folder, rules=[rule]).steps
    assert isinstance(step, CopyStep)
    load_into(model, folder, rules=[rule])
    assert torch.equal(model.w, expected)


@pytest.mark.parametrize("name", [name for name in TRACED if not name.startswith("cast")])
def test_what_only_moves_may_be_cast_on_the_way(folder: Path, name: str) -> None:
    function = TRACED[name]
    expected = function(**sources())
    model = model_for(expected, torch.bfloat16)
    load_into(model, folder, rules=[Convert(["a", "b"], "w", function)])
    assert torch.equal(model.w, expected.bfloat16())


@pytest.mark.parametrize(("reason", "function"), COMPUTED.values(), ids=COMPUTED)
def test_what_is_no_mere_move_is_computed_and_says_why(folder: Path, reason: str, function: Any) -> None:
    expected = function(**sources())
    model, rule = model_for(expected), Convert(["a", "b"], "w", function)
    (step,) = plan_load(model, folder, rules=[rule]).steps
    assert isinstance(step, ComputeStep)
    assert reason in step.reason
    load_into(model, folder, rules=[rule])
    assert torch.equal(model.w, expected)


def test_a_cast_that_is_not_to_the_models_dtype_is_computed(folder: Path) -> None:
    # Straight from float32 to float64 would keep what the function rounds away.
    model = model_for(torch.zeros(48, 40, dtype=torch.float64))
    rule = Convert(["a", "b"], "w", lambda a, b: torch.cat([a, b]).half())
    (step,) = plan_load(model, folder, rules=[rule]).steps
    assert isinstance(step, ComputeStep)
    assert "a cast to torch.float16" in step.reason
    load_into(model, folder, rules=[rule])
    assert torch.equal(model.w, torch.cat(list(sources().values())).half().double())


def test_memory_that_a_function_leaves_unwritten_is_an_error(folder: Path) -> None:
    def forgets(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(50, 40)
        out[:24], out[24:48] = a, b
        return out

    model = model_for(torch.zeros(50, 40))
    with pytest.raises(PlanError, match=r"forgets\(a, b\) -> w leaves 80 of the 2000 elements of w unwritten"):
        load_into(model, folder, rules=[Convert(["a", "b"], "w", forgets)])
    assert not model.w.any()


def test_what_a_function_makes_nothing_of_is_unexpected(folder: Path) -> None:
    model = model_for(torch.zeros(24, 40))
    plan = plan_load(model, folder, rules=[Convert(["a", "b"], "w", lambda a, b: a)])
    assert plan.unexpected == ["b"]
    assert "makes nothing of it" in plan.explain("b")
    with pytest.raises(PlanError, match="makes nothing of it"):
        load_into(model, folder, rules=[Convert(["a", "b"], "w", lambda a, b: a)], on_unexpected="error")


def test_empty_tensors_that_are_turned_are_accounted_for() -> None:
    model = model_for(torch.zeros(4, 0))
    plan = plan_load(model, {"a": torch.zeros(0, 4)}, rules=[Convert("a", "w", "transpose")])
    assert (plan.ok, plan.loaded, plan.ignored) == (True, ["w"], ["a"])
    plan.run(model)


def test_parts_that_a_function_writes_twice_are_reported(folder: Path) -> None:
    def careless(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(47, 40)
        out[:24], out[23:] = a, b
        return out

    model = model_for(torch.zeros(47, 40))
    report = load_into(model, folder, rules=[Convert(["a", "b"], "w", careless)])
    assert any("writes parts of w twice" in warning for warning in report.warnings)
    assert torch.equal(model.w, careless(**sources()))


def test_a_function_that_writes_into_what_it_was_given_changes_nothing_of_the_callers(folder: Path) -> None:
    def doubles(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a[0] = 7
        return torch.cat([a, b])

    given = sources()
    model = model_for(torch.zeros(48, 40))
    load_into(model, given, rules=[Convert(["a", "b"], "w", doubles)])
    assert torch.equal(model.w, doubles(**sources()))
    assert all(torch.equal(given[name], tensor) for name, tensor in sources().items())
