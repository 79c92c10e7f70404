"""Symbols: what torch code does to them, held against what it does to tensors of element numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders.mapping.symbolic import MAX_RUNS, SymbolicTensor, Untraceable, tracing


def symbol(*shape: int, source: int = 0) -> SymbolicTensor:
    return SymbolicTensor.of(source, shape, torch.float32)


def numbers(shape: tuple[int, ...], first: int) -> torch.Tensor:
    """A tensor whose elements are their own numbers, counted on from `first`."""
    return torch.arange(first, first + math.prod(shape)).reshape(shape)


def elements_of(result: SymbolicTensor, firsts: list[int]) -> torch.Tensor:
    """The element numbers that a symbol says it consists of."""
    parts = [torch.arange(firsts[n] + start, firsts[n] + start + length) for n, start, length in result.runs]
    return torch.cat([*parts, torch.empty(0, dtype=torch.int64)]).reshape(result.shape)


# ------------------------------------------------------------------ random programs

sizes = st.integers(0, 4)
shapes = st.lists(sizes, min_size=0, max_size=4).map(tuple)


def _shape_of_as_many(draw: Any, numel: int) -> list[int]:
    """A shape of that many elements, sometimes with a -1 in it."""
    if numel == 0:
        return [0, *draw(st.lists(sizes, max_size=2))]
    shape, rest = [], numel
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        shape.append(size)
        rest //= size
    shape.append(draw(st.sampled_from([rest, -1])))
    return shape


def _any_dim(draw: Any, tensor: torch.Tensor) -> int:
    return draw(st.integers(-tensor.dim(), tensor.dim() - 1))


def _differ_only_along(dim: int, a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(a.shape[d] == b.shape[d] for d in range(a.dim()) if d != dim % a.dim())


def _step(draw: Any, pool: list[torch.Tensor]) -> tuple[Any, list[int]]:
    """One operation: a function of some tensors of the pool, and which these are."""
    at = draw(st.integers(0, len(pool) - 1))
    tensor = pool[at]
    free = ["reshape", "flatten", "unsqueeze", "squeeze", "permute", "stack", "clone"]
    kind = draw(
        st.sampled_from(
            free
            + (
                ["cat", "split", "chunk", "select", "slice", "transpose", "unbind", "narrow", "T"]
                if tensor.dim()
                else []
            )
        )
    )
    alike = [i for i, other in enumerate(pool) if other.shape == tensor.shape]
    if kind == "reshape":
        shape = _shape_of_as_many(draw, tensor.numel())
        return lambda t: t.reshape(shape), [at]
    if kind == "flatten":
        return torch.flatten, [at]
    if kind == "clone":
        return lambda t: t.contiguous().clone(), [at]
    if kind == "T":
        return lambda t: t.permute(*range(t.dim() - 1, -1, -1)), [at]
    if kind == "unsqueeze":
        dim = draw(st.integers(-tensor.dim() - 1, tensor.dim()))
        return lambda t: t.unsqueeze(dim), [at]
    if kind == "squeeze":
        if tensor.dim() and draw(st.booleans()):
            dim = _any_dim(draw, tensor)
            return lambda t: t.squeeze(dim), [at]
        return torch.squeeze, [at]
    if kind == "permute":
        order = draw(st.permutations(range(tensor.dim())))
        return lambda t: t.permute(order), [at]
    if kind == "stack":
        chosen = draw(st.lists(st.sampled_from(alike), min_size=1, max_size=3))
        dim = draw(st.integers(-tensor.dim() - 1, tensor.dim()))
        return lambda *ts: torch.stack(ts, dim), chosen
    dim = _any_dim(draw, tensor)
    size = tensor.shape[dim]
    if kind == "transpose":
        other = _any_dim(draw, tensor)
        return lambda t: t.transpose(dim, other), [at]
    if kind == "cat":
        fitting = [i for i, other in enumerate(pool) if _differ_only_along(dim, tensor, other)]
        chosen = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3))
        return lambda *ts: torch.cat(ts, dim), chosen
    if kind == "split":
        if draw(st.booleans()):
            cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
            sections = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
            return lambda t: t.split(sections, dim), [at]
        each = draw(st.integers(1, 3))
        return lambda t: t.split(each, dim), [at]
    if kind == "chunk":
        count = draw(st.integers(1, 3))
        return lambda t: t.chunk(count, dim), [at]
    if kind == "unbind":
        return lambda t: t.unbind(dim), [at]
    if kind == "select" and size:
        index = draw(st.integers(-size, size - 1))
        return lambda t: t.select(dim, index), [at]
    if kind == "narrow":
        start = draw(st.integers(0, size))
        length = draw(st.integers(0, size - start))
        return lambda t: t.narrow(dim, start, length), [at]
    start, stop = draw(st.integers(-5, 5)), draw(st.integers(-5, 5))
    step = draw(st.integers(1, 3))
    return lambda t: t[(slice(None),) * (dim % t.dim()) + (slice(start, stop, step),)], [at]


@settings(max_examples=400, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=3), st.data())
def test_symbols_go_where_elements_go(source_shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    firsts = [0]
    for shape in source_shapes:
        firsts.append(firsts[-1] + math.prod(shape))
    real = [numbers(shape, first) for shape, first in zip(source_shapes, firsts, strict=False)]
    symbols = [SymbolicTensor.of(i, shape, torch.float32) for i, shape in enumerate(source_shapes)]
    for _ in range(data.draw(st.integers(1, 7))):
        function, chosen = _step(data.draw, real)
        results = function(*(real[i] for i in chosen))
        traced = function(*(symbols[i] for i in chosen))
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        traced = [traced] if isinstance(traced, torch.Tensor) else list(traced)
        assert len(results) == len(traced)
        for result, trace in zip(results, traced, strict=True):
            assert isinstance(trace, SymbolicTensor)
            assert trace.shape == result.shape
            assert trace.dtype == torch.float32
            assert torch.equal(elements_of(trace, firsts), result)
        real += results
        symbols += traced


OPERATIONS = {
    "view": lambda t: t.view(2, 2, 6),
    "reshape": lambda t: t.t().reshape(8, 3),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "slice": lambda t: t[1:3],
    "slice of columns": lambda t: t[:, 2:5],
    "slice with a step": lambda t: t[::2],
    "slice of columns with a step": lambda t: t[:, 1::2],
    "slice from the end": lambda t: t[-3:-1, -4:],
    "select": lambda t: t[2],
    "select a column": lambda t: t[:, -2],
    "ellipsis and new axis": lambda t: t[..., None, :2],
    "split": lambda t: torch.cat(t.split([1, 2, 3], dim=1)[::-1], dim=1),
    "chunk": lambda t: torch.cat(t.chunk(3, dim=1)[::-1], dim=0),
    "tensor_split": lambda t: t.tensor_split(3)[1],
    "unbind": lambda t: torch.stack(t.unbind(1)[::-1], dim=1),
    "narrow": lambda t: t.narrow(1, 2, 3),
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.view(2, 2, 6).permute(2, 0, 1),
    "permute that keeps rows whole": lambda t: t.view(2, 2, 6).permute(1, 0, 2),
    "movedim": lambda t: t.view(2, 2, 6).movedim(0, -1),
    "T": lambda t: t.T,
    "mT": lambda t: t.view(2, 2, 6).mT,
    "squeeze": lambda t: t[:, None].squeeze(1),
    "hstack": lambda t: torch.hstack([t, t[:, :2]]),
    "vstack": lambda t: torch.vstack([t[1:], t]),
    "stack in the middle": lambda t: torch.stack([t, t], dim=1),
    "contiguous": lambda t: t.t().contiguous().clone(),
}


@pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS)
def test_each_operation_alone(function: Any) -> None:
    result, trace = function(numbers((4, 6), 0)), function(symbol(4, 6))
    assert torch.equal(elements_of(trace, [0]), result)


# ------------------------------------------------------------------ what the runs look like


def test_a_fused_projection_is_one_run_a_part() -> None:
    q, k, v = symbol(8, 4), symbol(2, 4, source=1), symbol(2, 4, source=2)
    assert torch.cat([q, k, v]).runs == ((0, 0, 32), (1, 0, 8), (2, 0, 8))


def test_parts_that_are_joined_again_are_one_run() -> None:
    whole = symbol(6, 5)
    assert torch.cat(whole.split(2)).runs == ((0, 0, 30),)


def test_hundreds_of_experts_joined_along_their_columns_are_one_run_each() -> None:
    gate = torch.stack([symbol(6, 4, source=i) for i in range(128)])
    up = torch.stack([symbol(6, 4, source=128 + i) for i in range(128)])
    fused = torch.cat([gate, up], dim=1)
    assert fused.shape == (128, 12, 4)
    assert fused.runs[:3] == ((0, 0, 24), (128, 0, 24), (1, 0, 24))
    assert len(fused.runs) == 256


def test_moving_dimensions_of_one_element_moves_nothing() -> None:
    large = SymbolicTensor.of(0, (1, 5000, 1, 5000), torch.float32)
    assert large.permute(1, 0, 3, 2).runs == ((0, 0, 25_000_000),)


def test_a_slice_of_everything_costs_nothing_however_large() -> None:
    large = SymbolicTensor.of(0, (10**6, 10**3), torch.float32)
    assert large[:, :].runs == ((0, 0, 10**9),)
    assert large.chunk(1, dim=1)[0].runs == ((0, 0, 10**9),)


def test_a_move_between_devices_is_no_computation() -> None:
    assert symbol(3, 2).cpu().runs == ((0, 0, 6),)
    assert symbol(3, 2).to(torch.float32).runs == ((0, 0, 6),)


# ------------------------------------------------------------------ what can't be traced


def _into(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    destination[:2] = source[:2]
    return destination


UNTRACEABLE = {
    "arithmetic": lambda s: s + 1,
    "multiplication of two sources": lambda s: s * s,
    "a norm": lambda s: s.norm(dim=1),
    "comparison": lambda s: torch.where(s > 0, s, s),
    "equality": lambda s: torch.equal(s, s),
    "a cast down": lambda s: s.to(torch.bfloat16),
    "a cast up": lambda s: s.double(),
    "other eyes on the bytes": lambda s: s.view(torch.int32),
    "item": lambda s: s[0, 0].item(),
    "float": lambda s: float(s[0, 0]),
    "truth": lambda s: bool(s[0, 0]),
    "tolist": lambda s: s.tolist(),
    "numpy": lambda s: s.numpy(),
    "numpy by itself": lambda s: __import__("numpy").asarray(s),
    "raw memory": lambda s: s.data_ptr(),
    "a foreign tensor beside it": lambda s: torch.cat([s, torch.zeros(1, 6)]),
    "a foreign tensor on meta": lambda s: torch.cat([s, torch.zeros(1, 6, device="meta")]),
    "a foreign tensor stacked": lambda s: torch.stack([s, torch.zeros(4, 6)]),
    "zeros of its own": lambda s: torch.cat([s, s.new_zeros(1, 6)]),
    "a copy into a foreign tensor": lambda s: _into(torch.zeros(4, 6), s),
    "an assignment": lambda s: _into(s, s.clone()),
    "in place": lambda s: s.mul_(2),
    "an output": lambda s: torch.cat([s, s], out=torch.empty(8, 6)),
    "an index": lambda s: s[torch.tensor([1, 0])],
    "a repetition": lambda s: s.repeat(2, 1),
    "an expansion": lambda s: s[None].expand(2, 4, 6),
    "mixed dtypes": lambda s: torch.cat([s, SymbolicTensor.of(1, (1, 6), torch.bfloat16)]),
    "random numbers": lambda s: torch.rand_like(s),
}


@pytest.mark.parametrize("function", UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_what_is_no_rearrangement_is_untraceable(function: Any) -> None:
    with pytest.raises(Untraceable):
        function(symbol(4, 6))


def test_code_that_catches_every_exception_is_found_out() -> None:
    def careless(tensor: torch.Tensor) -> torch.Tensor:
        try:
            return tensor * 2
        except Exception:
            return tensor

    with pytest.raises(Untraceable, match=r"aten\.mul"), tracing():
        careless(symbol(4, 6))
    with tracing():
        symbol(4, 6).t()
    with pytest.raises(ValueError, match="its own"), tracing():
        raise ValueError("its own")


@pytest.mark.parametrize(
    "function",
    [
        lambda: SymbolicTensor.of(0, (1000, 1000), torch.float32).t(),
        lambda: SymbolicTensor.of(0, (10**6, 8), torch.float32)[:, ::2],
        lambda: torch.cat([SymbolicTensor.of(i, (10**6, 8), torch.float32) for i in range(2)], dim=1),
        lambda: torch.stack([SymbolicTensor.of(i, (10**6, 8), torch.float32) for i in range(2)], dim=1),
        lambda: SymbolicTensor.of(0, (10**9, 3), torch.float32).select(1, 1),
    ],
)
def test_too_many_pieces_are_untraceable_and_found_so_at_once(function: Any) -> None:
    with pytest.raises(Untraceable, match=str(MAX_RUNS)):
        function()


def test_empty_tensors_of_huge_dimensions_cost_nothing() -> None:
    empty = SymbolicTensor.of(0, (10**6, 10**6, 0), torch.float32)
    assert empty.permute(1, 0, 2).runs == ()
    assert torch.cat([empty, empty], dim=1).shape == (10**6, 2 * 10**6, 0)
    assert empty[:, 1::2].runs == ()


def test_joining_many_pieces_many_times_is_linear() -> None:
    # 60,000 pieces joined with as many: quadratic work would not end within the test's patience.
    pieces = SymbolicTensor.of(0, (300, 200), torch.float32).t()
    assert len(pieces.runs) == 60_000
    with pytest.raises(Untraceable):
        torch.cat([pieces.reshape(30_000, 2), SymbolicTensor.of(1, (30_000, 1), torch.float32)], dim=1)
    columns = torch.cat([pieces.reshape(30_000, 2), SymbolicTensor.of(1, (30_000, 0), torch.float32)], dim=1)
    assert columns.runs == pieces.runs
    rows = pieces.reshape(60_000).unbind(0)
    assert rows[59_999].runs == ((0, 59_999, 1),)


def test_mistakes_are_torchs_own() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size 24"):
        symbol(4, 6).reshape(5, 5)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([symbol(4, 6), symbol(4, 5)])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([symbol(4, 6), symbol(4, 5)])
    with pytest.raises(IndexError):
        symbol(4, 6).select(0, 4)
    with pytest.raises(IndexError):
        symbol()[0:1]
