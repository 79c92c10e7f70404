"""What is made in a hurry is what its constructor would have made, and as frozen."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from weightloaders import Extent, TensorInfo, open_weights, plan_load
from weightloaders.plan import CopyStep
from weightloaders.targets import Target

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "m.safetensors"
    save_file({"weight": torch.ones(3, 2)}, file)
    weights = open_weights(file)
    (step,) = plan_load(torch.nn.Linear(2, 3, bias=False), weights).steps
    assert isinstance(step, CopyStep)
    info = weights.info("weight")
    by_constructor = TensorInfo("weight", torch.float32, (3, 2), Extent(file, info.extents[0].offset))
    assert info.extents[0].source.name == by_constructor.extents[0].source.name
    source = info.extents[0].source
    return {
        "info": (info, by_constructor),
        "extent": (info.extents[0], replace(by_constructor.extents[0], source=source)),
        "step": (step, CopyStep(step.target, (info,), step.placements)),
        "target": (step.target, Target("weight", step.target.tensor, "parameter", True, torch.float32)),
    }


@pytest.mark.parametrize("kind", ["info", "extent", "step", "target"])
def test_it_has_the_class_and_the_fields_that_the_constructor_gives(made: dict[str, Any], kind: str) -> None:
    quick, slow = made[kind]
    assert type(quick) is type(slow)
    for field in fields(slow):
        # Extents of two sources are two; what they hold is compared by itself.
        if field.name != "extents":
            assert getattr(quick, field.name) is getattr(slow, field.name) or getattr(quick, field.name) == getattr(
                slow, field.name
            )


@pytest.mark.parametrize("kind", ["info", "extent", "step", "target"])
def test_no_field_can_be_set(made: dict[str, Any], kind: str) -> None:
    quick, _ = made[kind]
    for field in fields(quick):
        with pytest.raises(FrozenInstanceError):
            setattr(quick, field.name, None)


def test_it_equals_what_the_constructor_makes_where_that_compares_by_fields(made: dict[str, Any]) -> None:
    for kind in ("extent", "step"):
        quick, slow = made[kind]
        assert quick == slow
        assert hash(quick) == hash(slow)


def test_it_can_be_copied_and_pickled(made: dict[str, Any]) -> None:
    info, _ = made["info"]
    assert copy.copy(info).extents == info.extents
    step, _ = made["step"]
    assert replace(step, rules=("a",)).rules == ("a",)
    again = pickle.loads(pickle.dumps(info))
    assert (type(again), again.name, again.shape) == (TensorInfo, "weight", (3, 2))
