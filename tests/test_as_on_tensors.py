"""A rule's function fills a model with what it makes of real tensors, to the bit, wherever it runs."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from weightloaders import Convert, plan_load
from weightloaders.errors import PlanError
from weightloaders.mapping.spaces import Untraceable
from weightloaders.mapping.symbolic import SymbolicTensor, tracing
from weightloaders.plan import CopyStep

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def source(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def loaded(
    function: Callable[[torch.Tensor], torch.Tensor], stored: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """What is loaded by way of a function, and whether it was read to its places, without being computed."""
    model = nn.Module()
    model.register_buffer("t", torch.zeros(like.shape, dtype=like.dtype))
    plan = plan_load(model, {"s": stored}, rules=Convert("s", "t", function))
    plan.run(model)
    filled: torch.Tensor = model.t
    return filled, all(isinstance(step, CopyStep) for step in plan.steps)


def assert_as_on_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    stored: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    traced: bool | None = None,
) -> None:
    wanted = function(stored.clone())
    wanted = wanted.to(dtype or wanted.dtype)
    filled, was_traced = loaded(function, stored, wanted)
    assert torch.equal(bits(filled), bits(wanted))
    assert traced is None or was_traced == traced


# ------------------------------------------------------------------ where the code runs

REARRANGEMENTS = {
    "contiguous": lambda t: t.t().contiguous(),
    "reshape": lambda t: t.t().reshape(3, 8),
    "flatten": lambda t: t.t().flatten(),
    "ravel": lambda t: t.t().ravel(),
    "unflatten": lambda t: t.t().unflatten(0, (3, 2)).reshape(-1),
    "view_as": lambda t: t.t().view_as(torch.empty(6, 4)).reshape(4, 6),
    "to": lambda t: t.t().to(torch.float32).reshape(-1),
    "expand and reshape": lambda t: t[None].expand(3, 4, 6).reshape(-1),
    "chunks": lambda t: torch.cat(t.chunk(2)[::-1]),
    "padding": lambda t: nn.functional.pad(t, (1, 1)),
    "assignment": lambda t: torch.empty(6, 4).copy_(t.t()),
}


@pytest.mark.parametrize("function", REARRANGEMENTS.values(), ids=REARRANGEMENTS)
def test_a_load_in_inference_mode_is_traced_like_any_other(function: Any) -> None:
    stored = source(4, 6)
    wanted = function(stored)
    with torch.inference_mode():
        filled, was_traced = loaded(function, stored, wanted)
    assert torch.equal(filled, wanted)
    assert was_traced


@pytest.mark.parametrize("function", REARRANGEMENTS.values(), ids=REARRANGEMENTS)
def test_code_that_enters_inference_mode_itself_fills_the_same(function: Any) -> None:
    assert_as_on_tensors(torch.inference_mode()(function), source(4, 6))


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_contexts_of_a_load_change_nothing(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    stored = source(4, 6)
    with context():
        filled, _ = loaded(REARRANGEMENTS["reshape"], stored, stored.t().reshape(3, 8))
    assert torch.equal(filled, stored.t().reshape(3, 8))


# ------------------------------------------------------------------ constants


def joined_with(value: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: torch.cat([t, torch.full((2,), value, dtype=dtype)])


def assigned(value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty(5, dtype=tensor.dtype)
        out[:3] = tensor
        out[3:] = value
        return out

    return fill


@pytest.mark.parametrize(
    ("function", "stored", "dtype"),
    [
        (joined_with(0.1, torch.float16), torch.float32, None),
        (joined_with(0.1, torch.float32), torch.float32, torch.float64),
        (joined_with(1 / 3, torch.float32), torch.float64, torch.float32),
        (lambda t: nn.functional.pad(t, (0, 2), value=0.1), torch.float32, torch.float64),
        (lambda t: nn.functional.pad(t, (0, 2), value=0.1), torch.float16, torch.float32),
        (lambda t: torch.cat([t, torch.full((2,), 0.1, dtype=torch.float16).float()]), torch.float32, None),
        (assigned(0.1), torch.float16, torch.float64),
        (assigned(0.1), torch.float8_e4m3fn, None),
        (assigned(1.7), torch.int64, None),
        (assigned(2**53 + 1), torch.int64, None),
        (assigned(-1), torch.uint8, None),
        (assigned(5), torch.bool, None),
        (assigned(1 + 2j), torch.complex64, None),
        (assigned(float("nan")), torch.bfloat16, None),
    ],
)
def test_constants_have_the_dtype_that_they_were_written_in(
    function: Any, stored: torch.dtype, dtype: torch.dtype | None
) -> None:
    assert_as_on_tensors(function, source(3, dtype=stored), dtype)


def test_zeros_keep_their_signs() -> None:
    assert_as_on_tensors(
        lambda t: torch.cat([torch.full((2,), -0.0), torch.zeros(2), t, torch.full((1,), -0.0)]), source(3), traced=True
    )


# ------------------------------------------------------------------ memory


def exchanged(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out.data = tensor.flip(0)
    return out


def through_a_module(tensor: torch.Tensor) -> torch.Tensor:
    layer = nn.utils.skip_init(nn.Linear, 6, 4, bias=False)
    layer.load_state_dict({"weight": tensor})
    layer._apply(lambda t: t.flip(0))  # what `to`, `half` and the like call
    return layer.weight.detach()


def stepping_on_itself(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((4, 6), (1, 1)).copy_(tensor)


def joined_with_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    image = tensor.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    return torch.cat([image, image], 1).as_strided((48,), (1,))


def stacked_with_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    image = tensor.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    return torch.stack([image, image]).as_strided((48,), (1,))


@pytest.mark.parametrize(
    "function",
    [exchanged, through_a_module, stepping_on_itself, joined_with_channels_last, stacked_with_channels_last],
)
def test_what_is_done_to_memory_is_done(function: Any) -> None:
    assert_as_on_tensors(function, source(4, 6))


def test_memory_of_which_one_place_is_several_elements_is_not_written_by_symbols() -> None:
    with pytest.raises(Untraceable, match="several places"), tracing():
        stepping_on_itself(SymbolicTensor.of(0, (4, 6), torch.float32))
    with tracing():
        torch.empty(6, 6).diagonal().copy_(SymbolicTensor.of(0, (6,), torch.float32))
        torch.empty_strided((4, 6), (1, 9)).copy_(SymbolicTensor.of(0, (4, 6), torch.float32))


def test_rows_are_chosen_by_the_numbers_that_torch_takes() -> None:
    assert_as_on_tensors(lambda t: t[[-1, 0]], source(4, 6), traced=True)
    with pytest.raises(IndexError), tracing():
        SymbolicTensor.of(0, (4, 6), torch.float32).index_select(0, torch.tensor([-1]))


# ------------------------------------------------------------------ other calls, other threads


def test_what_another_thread_caught_is_known() -> None:
    def careless(tensor: torch.Tensor) -> torch.Tensor:
        found = []

        def work() -> None:
            try:
                found.append(tensor * 2)
            except Exception:
                found.append(tensor)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0]

    assert_as_on_tensors(careless, source(4, 6), traced=False)


def _two(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    model = nn.Module()
    model.register_buffer("t0", torch.zeros(3))
    model.register_buffer("t1", torch.zeros(3))
    plan = plan_load(model, {"s0": source(3), "s1": source(3) * 10}, rules=Convert("s{i}", "t{i}", function))
    plan.run(model)
    return model


@pytest.mark.parametrize("returned", [lambda first: first, lambda first: first.flip(0), lambda first: first * 2])
def test_a_tensor_kept_from_an_earlier_call_is_refused_for_the_other_layer(returned: Any) -> None:
    kept: list[torch.Tensor] = []

    def first_of_all(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return returned(kept[0])

    with pytest.raises(PlanError, match="keeps a tensor from one call to the next") as caught:
        _two(first_of_all)
    assert "no cache" in str(caught.value)


def test_a_constant_kept_from_an_earlier_call_is_the_same_in_each() -> None:
    @functools.cache
    def last(value: float) -> torch.Tensor:
        return torch.full((1,), value)

    model = _two(lambda tensor: torch.cat([tensor[:2], last(7.0)]))
    assert model.t1.tolist() == [10, 20, 7]


def test_a_function_may_make_integers_of_floats() -> None:
    assert_as_on_tensors(lambda t: (t * 2).short(), source(3), traced=False)
