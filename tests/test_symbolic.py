"""Symbols: what torch code does to them, held against what it does to tensors of element numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from weightloaders.mapping.composing import MAX_PLACEMENTS, cover
from weightloaders.mapping.placement import Constant, Placement
from weightloaders.mapping.spaces import Untraceable
from weightloaders.mapping.symbolic import SymbolicTensor, tracing


def symbol(*shape: int, source: int = 0) -> SymbolicTensor:
    return SymbolicTensor.of(source, shape, torch.float32)


def numbers(shape: tuple[int, ...], first: int) -> torch.Tensor:
    """A tensor whose elements are their own numbers, counted on from `first`."""
    return torch.arange(first, first + math.prod(shape)).reshape(shape)


def elements_of(result: SymbolicTensor, firsts: list[int]) -> torch.Tensor:
    """The element numbers that a symbol says it consists of; of a constant its value, of what was never written -1."""
    placements = result.placements()
    assert cover(placements, result.numel()).is_exact
    elements = torch.full((result.numel(),), -99)
    for placed in placements:
        source, target = torch.tensor([placed.source_start]), torch.tensor([placed.target_start])
        for count, source_step, target_step in placed.dims:
            source = (source[:, None] + torch.arange(count) * source_step).flatten()
            target = (target[:, None] + torch.arange(count) * target_step).flatten()
        if isinstance(placed.source, int):
            elements[target] = source + firsts[placed.source]
        else:
            elements[target] = -1 if placed.source is None else int(placed.source.value)
    return elements.reshape(result.shape)


def pieces(result: SymbolicTensor) -> list[Placement]:
    return result.placements()


def run(source: int, start: int, target: int, length: int) -> Placement:
    return Placement(source, start, target, ((length, 1, 1),))


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
    free = ["reshape", "flatten", "unsqueeze", "squeeze", "permute", "stack", "clone", "repeat", "expand", "filled"]
    kind = draw(
        st.sampled_from(
            free
            + (
                [
                    "cat",
                    "split",
                    "chunk",
                    "select",
                    "slice",
                    "transpose",
                    "unbind",
                    "narrow",
                    "T",
                    "flip",
                    "pad",
                    "chosen",
                ]
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
    if kind == "repeat":
        repeats = draw(st.lists(st.integers(1, 2), min_size=tensor.dim(), max_size=tensor.dim() + 1))
        return lambda t: t.repeat(repeats), [at]
    if kind == "expand":
        count = draw(st.integers(1, 3))
        return lambda t: t[None].expand(count, *t.shape), [at]
    if kind == "filled":
        return _filled_by_assignment(draw, tensor, alike), [at, draw(st.sampled_from(alike))]
    dim = _any_dim(draw, tensor)
    size = tensor.shape[dim]
    if kind == "flip":
        return lambda t: t.flip(dim), [at]
    if kind == "pad":
        pads = draw(st.lists(st.integers(-min(tensor.shape[-1] // 2, 2), 2), min_size=2, max_size=2))
        return lambda t: nn.functional.pad(t, pads, value=-7), [at]
    if kind == "chosen" and size:
        index = torch.tensor(draw(st.lists(st.integers(0, size - 1), max_size=6)), dtype=torch.int64)
        return lambda t: t.index_select(dim, index), [at]
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


def _filled_by_assignment(draw: Any, tensor: torch.Tensor, alike: list[int]) -> Any:
    """Two tensors side by side in memory that the code makes itself, along any dimension and in any order."""
    dim = draw(st.integers(0, tensor.dim()))
    order = draw(st.permutations([0, 1]))
    overlap = draw(st.booleans())

    def filled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a.new_full((*a.shape[:dim], 3, *a.shape[dim:]), -7)
        for place in order:
            out.select(dim, place).copy_((a, b)[place])
        if overlap:
            out.select(dim, 1)[...] = a
        return out

    return filled


@settings(max_examples=500, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=3), st.data())
def test_symbols_go_where_elements_go(source_shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    firsts = [0]
    for shape in source_shapes:
        firsts.append(firsts[-1] + math.prod(shape))
    real = [numbers(shape, first) for shape, first in zip(source_shapes, firsts, strict=False)]
    steps = []
    for _ in range(data.draw(st.integers(1, 7))):
        function, chosen = _step(data.draw, real)
        steps.append((function, chosen))
        real += _list_of(function(*(real[i] for i in chosen)))
        # Repetitions multiply.
        assume(sum(result.numel() for result in real) < 5000)
    with tracing():
        symbols = [SymbolicTensor.of(i, shape, torch.float32) for i, shape in enumerate(source_shapes)]
        for function, chosen in steps:
            symbols += _list_of(function(*(symbols[i] for i in chosen)))
    for result, trace in zip(real, symbols, strict=True):
        assert isinstance(trace, SymbolicTensor)
        assert trace.shape == result.shape
        assert trace.dtype == torch.float32
        assert torch.equal(elements_of(trace, firsts), result)


def _list_of(results: Any) -> list[Any]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


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
    "flip": lambda t: t.flip(0, 1),
    "pad": lambda t: nn.functional.pad(t, (1, 2, 3, 0), value=-7),
    "pad that cuts": lambda t: nn.functional.pad(t, (-1, 2, -2, 1), value=-7),
    "expand": lambda t: t[:, :1].expand(4, 5),
    "expand and flatten": lambda t: t[:, None, :].expand(4, 3, 6).reshape(12, 6),
    "repeat": lambda t: t.repeat(3, 1, 2),
    "tile": lambda t: t.tile(2),
    "repeat_interleave": lambda t: t.repeat_interleave(3, dim=0),
    "an index": lambda t: t[torch.tensor([2, 0, 3, 1, 1])],
    "an index from the end": lambda t: t[:, torch.tensor([-1, 0])],
    "index_select": lambda t: t.index_select(1, torch.tensor([5, 4, 1, 0])),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(1, 3, 1),
    "swapaxes": lambda t: t.reshape(2, 2, 6).swapaxes(0, 2).reshape(-1, 4),
    "transposed twice": lambda t: t.t().contiguous().view(3, 8).t().contiguous(),
    "zeros of its own": lambda t: torch.cat([t, t.new_zeros(1, 6)]),
    "zeros from nowhere": lambda t: torch.cat([torch.zeros(4, 1, dtype=t.dtype), t], dim=1),
    "ones": lambda t: torch.stack([t, torch.ones_like(t)]),
    "full": lambda t: torch.cat([t, t.new_full((2, 6), 5)]),
    "assigned slices": lambda t: _interleaved(t),
    "assigned over zeros": lambda t: _into(torch.zeros(6, 6, dtype=t.dtype), t),
    "assigned one value": lambda t: _one_row_cleared(t),
    "rolled by hand": lambda t: torch.cat([t[-1:], t[:-1]]),
}


def _interleaved(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4, 12, dtype=tensor.dtype)
    out[:, 0::2] = tensor
    out[:, 1::2] = tensor.flip(0)
    return out


def _into(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    destination[:2] = source[:2]
    return destination


def _one_row_cleared(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[1] = 0
    copy[2:, 3].fill_(9)
    copy[3].zero_()
    return copy


@pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS)
def test_each_operation_alone(function: Any) -> None:
    result = function(numbers((4, 6), 0))
    with tracing():
        trace = function(symbol(4, 6))
    assert torch.equal(elements_of(trace, [0]), result)


# ------------------------------------------------------------------ what the placements look like


def test_a_fused_projection_is_one_run_a_part() -> None:
    q, k, v = symbol(8, 4), symbol(2, 4, source=1), symbol(2, 4, source=2)
    assert pieces(torch.cat([q, k, v])) == [run(0, 0, 0, 32), run(1, 0, 32, 8), run(2, 0, 40, 8)]


def test_parts_that_are_joined_again_are_one_run() -> None:
    assert pieces(torch.cat(symbol(6, 5).split(2))) == [run(0, 0, 0, 30)]
    assert pieces(torch.cat(symbol(6, 5).split([1, 3, 2]))) == [run(0, 0, 0, 30)]
    assert pieces(torch.stack(symbol(6, 5).t().unbind(1))) == [run(0, 0, 0, 30)]


def test_hundreds_of_experts_joined_along_their_columns_are_one_run_each() -> None:
    gate = torch.stack([symbol(6, 4, source=i) for i in range(128)])
    up = torch.stack([symbol(6, 4, source=128 + i) for i in range(128)])
    fused = torch.cat([gate, up], dim=1)
    assert fused.shape == (128, 12, 4)
    assert pieces(fused)[:3] == [run(0, 0, 0, 24), run(128, 0, 24, 24), run(1, 0, 48, 24)]
    assert len(pieces(fused)) == 256


def test_what_moves_a_whole_tensor_is_one_placement_however_large() -> None:
    large = SymbolicTensor.of(0, (30_000, 40_000), torch.float32)
    assert pieces(large.t()) == [Placement(0, 0, 0, ((40_000, 1, 30_000), (30_000, 40_000, 1)))]
    assert pieces(large.t().contiguous().t()) == [run(0, 0, 0, 30_000 * 40_000)]
    assert pieces(large[:, ::2]) == [Placement(0, 0, 0, ((600_000_000, 2, 1),))]
    assert pieces(large[:, 1::2].flip(0)) == [
        Placement(0, 40_000 * 29_999 + 1, 0, ((30_000, -40_000, 20_000), (20_000, 2, 1)))
    ]
    assert len(pieces(torch.cat([large, large], dim=1))) == 1
    assert len(pieces(torch.cat([large, large.flip(0)], dim=1))) == 2
    assert pieces(large.view(100, 300, 40_000).transpose(0, 1).reshape(30_000, 40_000))[0].dims == (
        (300, 40_000, 4_000_000), (100, 12_000_000, 40_000), (40_000, 1, 1),
    )  # fmt: skip


def test_moving_dimensions_of_one_element_moves_nothing() -> None:
    large = SymbolicTensor.of(0, (1, 5000, 1, 5000), torch.float32)
    assert pieces(large.permute(1, 0, 3, 2)) == [run(0, 0, 0, 25_000_000)]


def test_a_slice_of_everything_costs_nothing_however_large() -> None:
    large = SymbolicTensor.of(0, (10**6, 10**3), torch.float32)
    assert pieces(large[:, :]) == [run(0, 0, 0, 10**9)]
    assert pieces(large.chunk(1, dim=1)[0]) == [run(0, 0, 0, 10**9)]


def test_a_move_between_devices_is_no_computation() -> None:
    assert pieces(symbol(3, 2).cpu()) == [run(0, 0, 0, 6)]
    assert pieces(symbol(3, 2).to(torch.float32)) == [run(0, 0, 0, 6)]


def test_rows_assigned_one_by_one_are_one_placement_a_side() -> None:
    with tracing():
        rows = symbol(2000, 8)
        out = torch.empty(1000, 16)
        for at in range(1000):
            out[at, :8] = rows[at]
            out[at, 8:] = rows[1999 - at]
    assert len(pieces(out)) == 2


def test_padding_is_a_constant() -> None:
    padded = nn.functional.pad(symbol(4, 6), (0, 0, 0, 2))
    assert pieces(padded) == [run(0, 0, 0, 24), Placement(Constant(0.0), 0, 24, ((12, 0, 1),))]


# ------------------------------------------------------------------ memory of its own


def test_what_is_never_written_is_known() -> None:
    with tracing():
        out = torch.empty(4, 6)
        out[:, :4] = symbol(4, 4)
    assert sum(p.numel for p in pieces(out) if p.source is None) == 8
    assert not out.space.overwritten


def test_what_is_written_twice_is_known_wherever_it_goes() -> None:
    with tracing():
        out = torch.empty(4, 6)
        out[:, :4] = symbol(4, 4)
        assert not out.space.overwritten
        out[:, 3:] = symbol(4, 3, source=1)
        joined = torch.cat([out, out.clone()])
    assert out.space.overwritten
    assert joined.space.overwritten
    with tracing():
        over_zeros = torch.zeros(4, 6)
        over_zeros[:, :4] = symbol(4, 4)
    assert not over_zeros.space.overwritten


def test_memory_that_was_read_before_it_was_written_again_keeps_what_was_read() -> None:
    def swap(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        first = out[0].clone()
        out[0] = out[1]
        out[1] = first
        return out

    with tracing():
        swapped = swap(symbol(4, 6))
    assert torch.equal(elements_of(swapped, [0]), swap(numbers((4, 6), 0)))


# ------------------------------------------------------------------ casts


@pytest.mark.parametrize("function", [
    lambda s: s.to(torch.bfloat16), lambda s: s.double(), lambda s: torch.cat([s.half(), s.half()]),
    lambda s: s.t().bfloat16().contiguous(), lambda s: torch.empty(4, 6, dtype=torch.bfloat16).copy_(s),
    lambda s: torch.cat([s, SymbolicTensor.of(1, (1, 6), torch.bfloat16)]),
])  # fmt: skip
def test_one_cast_is_recorded_as_such(function: Any) -> None:
    with tracing():
        result = function(symbol(4, 6))
    assert result.is_cast
    assert pieces(result)
    assert not symbol(4, 6).t().is_cast


@pytest.mark.parametrize("function", [
    lambda s: s.half().float(), lambda s: torch.cat([s.half(), s.half()]).double(),
    lambda s: torch.empty(4, 6).copy_(s.bfloat16()), lambda s: torch.cat([s, s.bfloat16()]).half(),
    lambda s: s.long(), lambda s: s.to(torch.float8_e4m3fn), lambda s: s.to(torch.complex64),
])  # fmt: skip
def test_two_casts_and_casts_that_change_what_values_mean_are_untraceable(function: Any) -> None:
    with pytest.raises(Untraceable, match="a cast"), tracing():
        function(symbol(4, 6))


# ------------------------------------------------------------------ what can't be traced


FOREIGN = torch.zeros(1, 6)
UNTRACEABLE = {
    "arithmetic": lambda s: s + 1,
    "multiplication of two sources": lambda s: s * s,
    "a norm": lambda s: s.norm(dim=1),
    "comparison": lambda s: torch.where(s > 0, s, s),
    "equality": lambda s: torch.equal(s, s),
    "other eyes on the bytes": lambda s: s.view(torch.int32),
    "item": lambda s: s[0, 0].item(),
    "float": lambda s: float(s[0, 0]),
    "truth": lambda s: bool(s[0, 0]),
    "tolist": lambda s: s.tolist(),
    "numpy": lambda s: s.numpy(),
    "numpy by itself": lambda s: __import__("numpy").asarray(s),
    "raw memory": lambda s: s.data_ptr(),
    "a foreign tensor beside it": lambda s: torch.cat([s, FOREIGN]),
    "a foreign tensor stacked": lambda s: torch.stack([s[0], FOREIGN[0]]),
    "a copy into a foreign tensor": lambda s: FOREIGN.copy_(s[:1]),
    "a copy of a foreign tensor": lambda s: s.clone()[:1].copy_(FOREIGN),
    "a value that is not known": lambda s: s.clone().fill_(s[0, 0]),
    "numbers made of the values": lambda s: s[s[0].argsort()],
    "several indices": lambda s: s[torch.tensor([0, 1]), torch.tensor([0, 1])],
    "a mask": lambda s: s[torch.tensor([True, False, True, False])],
    "a conjugate": lambda s: SymbolicTensor.of(0, (4,), torch.complex64).conj(),
    "a part of complex numbers": lambda s: torch.view_as_real(SymbolicTensor.of(0, (4,), torch.complex64)),
    "storage": lambda s: s.untyped_storage(),
    "a foreign tensor on meta": lambda s: torch.cat([s, torch.zeros(1, 6, device="meta")]),
    "an assignment": lambda s: _into(s, s.clone()),
    "in place": lambda s: s.mul_(2),
    "an output": lambda s: torch.cat([s, s], out=torch.empty(8, 6)),
    "random numbers": lambda s: torch.rand_like(s),
}


@pytest.mark.parametrize("function", UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_what_is_no_rearrangement_is_untraceable(function: Any) -> None:
    with pytest.raises(Untraceable), tracing():
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
        lambda: SymbolicTensor.of(0, (10**6,), torch.float32)[torch.randperm(10**6)],
        lambda: torch.stack([symbol(3) for _ in range(10)]).repeat(1, 1)[torch.randperm(70_000) % 10],
    ],
)
def test_too_many_pieces_are_untraceable_and_found_so_at_once(function: Any) -> None:
    with pytest.raises(Untraceable, match=str(MAX_PLACEMENTS)):
        pieces(function())


def test_empty_tensors_of_huge_dimensions_cost_nothing() -> None:
    empty = SymbolicTensor.of(0, (10**6, 10**6, 0), torch.float32)
    assert not elements_of(empty.permute(1, 0, 2)[:2, :2], [0]).numel()
    assert torch.cat([empty, empty], dim=1).shape == (10**6, 2 * 10**6, 0)
    assert cover(pieces(empty[:, 1::2]), 0).is_exact


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


def test_a_real_constant_among_complex_numbers_is_a_constant() -> None:
    with tracing():
        padded = nn.functional.pad(SymbolicTensor.of(0, (2,), torch.complex64), (0, 1))
        turned = torch.cat([SymbolicTensor.of(0, (2,), torch.complex64), torch.full((1,), 2.5, dtype=torch.complex64)])
    assert pieces(padded)[-1].source == Constant(0.0)
    assert pieces(turned)[-1].source == Constant(2.5)
    with pytest.raises(Untraceable, match="a complex constant"), tracing():
        torch.cat([SymbolicTensor.of(0, (2,), torch.complex64), torch.full((1,), 1j, dtype=torch.complex64)])
