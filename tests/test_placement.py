"""The algebra of strided copies, held against copies of element numbers that are written out one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weightloaders.mapping.composing import MAX_PLACEMENTS, TooManyPlacements, compose, cover, restrict
from weightloaders.mapping.placement import Constant, Placement, coalesce, invert, placement, whole
from weightloaders.mapping.symbolic import SymbolicTensor
from weightloaders.weights.info import contiguous_strides


def addresses(placed: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Every element's address in the source, and in the target."""
    source, target = np.array([placed.source_start]), np.array([placed.target_start])
    for count, source_step, target_step in placed.dims:
        source = (source[:, None] + np.arange(count) * source_step).ravel()
        target = (target[:, None] + np.arange(count) * target_step).ravel()
    return source, target


def written_out(placements: list[Placement]) -> dict[int, tuple[Any, int]]:
    """Target address -> its source and the address there; none may come twice."""
    result: dict[int, tuple[Any, int]] = {}
    for placed in placements:
        for source, target in zip(*(side.tolist() for side in addresses(placed)), strict=True):
            assert target not in result
            result[target] = placed.source, source
    return result


STEPS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 12])
LOOPS = st.lists(st.tuples(st.integers(1, 5), STEPS, st.booleans()), max_size=3)


@st.composite
def readings(draw: Any, size: int) -> Placement:
    """A copy out of a space of some elements: any steps, backwards and repeated too."""
    loops = draw(LOOPS)
    steps = [(count, -step if backwards else step) for count, step, backwards in loops]
    repeats = draw(st.sampled_from([None, None, None, 2]))
    low = sum(min(0, (count - 1) * step) for count, step in steps)
    high = sum(max(0, (count - 1) * step) for count, step in steps)
    assume(high - low < size)
    start = draw(st.integers(-low, size - 1 - high))
    if repeats:
        steps.insert(draw(st.integers(0, len(steps))), (repeats, 0))
    order = draw(st.permutations(range(len(steps))))
    written = contiguous_strides([steps[at][0] for at in order])
    by_loop = dict(zip(order, written, strict=True))
    return placement(0, start, draw(st.integers(0, 3)), [(*loop, by_loop[at]) for at, loop in enumerate(steps)])


@st.composite
def layers_of(draw: Any, size: int) -> list[Placement]:
    """Copies into a space; each writes no address twice, but they may lie over each other."""
    result = []
    for number in range(draw(st.integers(0, 4))):
        steps = [(count, step) for count, step, _ in draw(LOOPS)]
        reach = sum((count - 1) * step for count, step in steps)
        if reach >= size:
            continue
        dims = [(count, draw(st.sampled_from([0, 1, 2, 7, -1])), step) for count, step in steps]
        layer = placement(number, 100, draw(st.integers(0, size - 1 - reach)), dims)
        targets = addresses(layer)[1]
        if len(np.unique(targets)) == len(targets):
            result.append(layer)
    return result


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_a_composed_copy_is_the_one_copy_after_the_other(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60))
    layers, reading = data.draw(layers_of(size)), data.draw(readings(size))
    space: dict[int, tuple[Any, int]] = {}
    for layer in layers:
        space |= written_out([layer])
    found, left = compose(layers, reading)
    wanted = dict(zip(*(side.tolist() for side in addresses(reading)[::-1]), strict=True))
    assert written_out(found) == {target: space[at] for target, at in wanted.items() if at in space}
    assert {t: at for t, (_, at) in written_out(left).items()} == {t: at for t, at in wanted.items() if at not in space}
    assert written_out(coalesce(found)) == written_out(found)
    assert len(coalesce(found)) <= len(found)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_written_never_or_twice_is_found(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60))
    layers = data.draw(layers_of(size))
    times = np.zeros(size, int)
    for layer in layers:
        times[addresses(layer)[1]] += 1
    result = cover(layers, size)
    assert set(written_out(result.never)) == set(np.flatnonzero(times == 0).tolist())
    assert bool(result.twice) == bool((times > 1).any())
    assert result.is_exact == bool((times == 1).all())


def symbol_after(draw: Any) -> tuple[SymbolicTensor, torch.Tensor]:
    """A symbol after a few operations, and the same done to element numbers."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    symbol: Any = SymbolicTensor.of(0, shape, torch.float32)
    real = torch.arange(math.prod(shape)).reshape(shape)
    for kind in draw(st.lists(st.sampled_from(["t", "halves", "slabs", "flip", "flat"]), max_size=4)):
        functions: dict[str, Any] = {
            "t": lambda t: t.transpose(0, -1),
            "halves": lambda t: torch.cat(t.chunk(2, dim=-1)[::-1], dim=-1),
            "slabs": lambda t: torch.stack(t.unbind(0)[::-1], dim=-1),
            "flip": lambda t: t.flip(-1),
            "flat": lambda t: t.reshape(-1, t.shape[-1]),
        }
        symbol, real = functions[kind](symbol), functions[kind](real)
    return symbol, real


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_box_of_a_target_gets_what_lies_in_it(data: st.DataObject) -> None:
    symbol, real = symbol_after(data.draw)
    start = [data.draw(st.integers(0, n)) for n in real.shape]
    size = [data.draw(st.integers(0, n - at)) for n, at in zip(real.shape, start, strict=True)]
    box = real[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))].reshape(-1).tolist()
    parts = restrict(symbol.placements(), real.shape, start, size)
    assert written_out(parts) == {target: (0, source) for target, source in enumerate(box)}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_inverse_takes_every_element_back(data: st.DataObject) -> None:
    symbol, real = symbol_after(data.draw)
    back = [invert(placed, target=5) for placed in symbol.placements()]
    assert cover(back, real.numel()).is_exact
    inverse = torch.argsort(real.reshape(-1)).tolist()
    assert written_out(back) == {source: (5, at) for source, at in enumerate(inverse)}
    assert coalesce(invert(placed) for placed in back) == symbol.placements()


def test_a_tensor_parallel_ranks_slice_of_a_fused_weight_is_a_placement_a_part() -> None:
    q, k, v = (SymbolicTensor.of(n, (rows, 4096), torch.bfloat16) for n, rows in enumerate((4096, 1024, 1024)))
    parts = [torch.cat([q, k, v]).view(6, 1024, 4096)[rank % 4 :: 4] for rank in range(2)]
    assert [len(part.placements()) for part in parts] == [2, 2]
    columns = restrict(torch.cat([q, k, v]).placements(), (6144, 4096), (0, 1024), (6144, 1024))
    assert columns == [
        Placement(0, 1024, 0, ((4096, 4096, 1024), (1024, 1, 1))),
        Placement(1, 1024, 4096 * 1024, ((1024, 4096, 1024), (1024, 1, 1))),
        Placement(2, 1024, 5120 * 1024, ((1024, 4096, 1024), (1024, 1, 1))),
    ]


def test_what_was_repeated_is_taken_back_once() -> None:
    repeated = SymbolicTensor.of(0, (8, 16), torch.float32).repeat_interleave(4, dim=0)
    (placed,) = repeated.placements()
    assert cover([invert(placed)], 128).is_exact


def test_boxes_outside_their_target_are_refused() -> None:
    for start, size in (((0, 3), (2, 2)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (3, 1))):
        with pytest.raises(ValueError, match="does not lie in"):
            restrict([whole(0, 8)], (2, 4), start, size)


def test_equal_copies_are_equal_however_they_are_said() -> None:
    assert placement(0, 0, 0, [(3, 8, 8), (2, 4, 4), (4, 1, 1)]) == placement(0, 0, 0, [(24, 1, 1)]) == whole(0, 24)
    assert placement(0, 23, 23, [(24, -1, -1)]) == whole(0, 24)
    assert placement(0, 5, 7, [(1, 3, 9)]) == Placement(0, 5, 7, ())
    assert coalesce([whole(0, 0), whole(Constant(1), 0)]) == []


def test_steps_that_do_not_divide_each_other_are_bounded() -> None:
    layer = placement(0, 0, 0, [(10**6, 7, 10), (3, 1, 1)])
    with pytest.raises(TooManyPlacements):
        compose([layer], placement(0, 0, 0, [(10**6, 7, 2), (2, 1, 1)]))
    found, left = compose([layer], placement(0, 0, 0, [(100, 7, 2), (2, 1, 1)]))
    assert len(found) + len(left) < MAX_PLACEMENTS
