"""What a model holds: the same that torch itself says, seen in one pass; and whether it still does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from weightloaders.errors import ModelError
from weightloaders.targets import Targets, held_by, memory_span, modules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.first = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Identity())
        # The same module at two places, a parameter at two more, and one place that is empty.
        self.second = self.first
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.first[0].weight
        self.register_module("gone", None)
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_modules_are_those_that_torch_names() -> None:
    model = Tower()
    ours = [(prefix.removesuffix("."), module) for prefix, module in modules_of(model)]
    assert ours == list(model.named_modules(remove_duplicate=False))


def test_tensors_are_those_that_torch_names_in_its_order() -> None:
    model = Tower()
    held = held_by(model)
    assert list(held.parameters) == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert all(held.parameters[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    assert {*held.buffers, *held.derived} == {name for name, _ in model.named_buffers(remove_duplicate=False)}
    assert set(held.derived) == {"cache"}
    assert {*held.parameters, *held.buffers} == set(model.state_dict())


def test_a_wrapper_that_has_names_of_its_own_is_asked_for_them() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = nn.Linear(2, 3)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            for name, parameter in super().named_parameters(*args, **kwargs):
                yield name.removeprefix("wrapped."), parameter

    assert list(Targets(Wrapper()).by_name) == ["weight", "bias"]


def test_only_one_and_the_same_view_of_one_memory_is_a_tie() -> None:
    model = nn.Module()
    memory = torch.zeros(4, 4)
    views = {
        "whole": memory, "again": memory.view(4, 4), "turned": memory.T, "rows": memory[:2], "later": memory[1:],
        "bits": memory.view(torch.int32), "apart": torch.zeros(4, 4), "none": torch.zeros(0), "nothing": torch.zeros(0),
    }  # fmt: skip
    for name, view in views.items():
        model.register_buffer(name, view)
    canonical = Targets(model).canonical
    assert canonical == {name: "whole" if name == "again" else name for name in views}
    assert Targets(model).ties() == {"whole": "whole", "again": "whole"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "own", nn.Parameter(torch.ones(3))),
        lambda m: setattr(m, "more", nn.Parameter(torch.ones(3))),
        lambda m: delattr(m, "own"),
        lambda m: setattr(m, "steps", torch.zeros(2)),
        lambda m: setattr(m, "cache", torch.zeros(2)),
        lambda m: setattr(m.own, "data", m.own.data.double()),
        lambda m: m.first.__setitem__(2, nn.Linear(1, 1)),
    ],
)  # fmt: skip
def test_a_model_that_was_changed_does_not_hold_the_same(change: Callable[[Any], object]) -> None:
    model = Tower()
    targets = Targets(model)
    assert targets.hold_in(model)
    change(model)
    assert not targets.hold_in(model)


def test_another_model_does_not_hold_the_same() -> None:
    assert not Targets(Tower()).hold_in(Tower())


def test_what_can_not_be_filled_any_more_is_an_error() -> None:
    model = Tower()
    targets = Targets(model)
    model.own.data = torch.ones(1).expand(3)
    with pytest.raises(ModelError, match="several elements in one"):
        targets.hold_in(model)


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.T, lambda t: t[:, 1:3], lambda t: t[1:], lambda t: t[::2, ::3], lambda t: t[0, 0]]
)
def test_a_span_is_the_memory_from_the_first_element_to_the_last(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.zeros(6, 5))
    addresses = [
        tensor[tuple(index)].data_ptr() for index in torch.cartesian_prod(*map(torch.arange, tensor.shape)).tolist()
    ] if tensor.dim() > 1 else [tensor.data_ptr()]  # fmt: skip
    span = memory_span(tensor)
    assert span is not None
    assert (span.start, span.end) == (min(addresses), max(addresses) + 4)
    assert span.dense == (len(addresses) * 4 == span.end - span.start)
