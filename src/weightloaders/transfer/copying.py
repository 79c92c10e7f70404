"""Strided copies and casts on the processor: from a small buffer into a parameter, by way of the processor's cache.

torch copies in the order of what is written, and reads wherever that takes it. Where the source has another order (a
transpose), every element is on a cache line of its own, and lines whose distance is a power of two push each other out
of the cache. Here boxes of such a copy are put into a scratch buffer first, in the source's order and with rows at
distances that don't collide, and are copied from there.

Meant for several threads at once, each with torch's own parallelism off and a scratch buffer of its own.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from weightloaders.transfer.memory import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# What a processor's core has as its own cache; torch's calls take long enough with it that Python does not count.
SCRATCH_BYTES = 1 << 20
_LINE_BYTES = 64
# Lines that are read in turn; the innermost cache has room for them.
_LINES_AT_ONCE = 320
# Written at a stretch: a few whole lines.
_RUN_BYTES = 256
# Lines at a multiple of this distance have but a few places in the cache.
_COLLIDING_BYTES = 2 << 10
# Copies of fewer bytes stay in the cache whichever way they go, and calls are what they cost.
SMALL_BYTES = 16 << 10
_CAST_AT_ONCE = 1 << 20
_LOOKED_AT_CLOSELY = 16 << 10
# Numbers that are copied as they are, whatever they stand for, by their size in bytes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# torch converts these one by one, but to and from float32, which holds all values of the source, many at a time.
_BY_WAY_OF_FLOAT32 = frozenset({(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)})


def copy_values(destination: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor) -> bool:
    """Do what ``destination.copy_(source)`` does, for tensors of one shape.

    Args:
        destination: What is written; of any strides, but no element twice.
        source: What is read; of any strides.
        scratch: Flat, aligned memory of bytes that only this thread uses meanwhile. `SCRATCH_BYTES` make the best use
            of the cache; any size will do.

    Returns:
        Whether a cast made infinities of finite values.
    """
    casts = source.dtype != destination.dtype
    if not (_is_simple(destination) and _is_simple(source)):
        destination.copy_(source)
        return casts and made_infinities(destination, source)
    if not casts:
        # Bits are the same in any dtype, and torch doesn't copy every dtype.
        bits = BITS.get(source.element_size(), source.dtype)
        destination, source = destination.view(bits), source.view(bits)
    alike = destination.is_contiguous() and source.is_contiguous()
    if alike or source.nbytes <= SMALL_BYTES or _in_step(destination, source):
        return _cast(destination, source, scratch)
    if may_overflow(source.dtype, destination.dtype) or _collides(destination, source):
        return _by_way_of_scratch(destination, source, scratch)
    _in_strips(destination, source)
    return False


def made_infinities(result: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a cast made infinities of finite values.

    Args:
        result: What the cast made.
        source: What it made it of.
    """
    if not may_overflow(source.dtype, result.dtype):
        return False
    # Nothing is faster than a sum, and one with an infinity or NaN is never finite. It may overflow itself, and then
    # the extremes tell.
    if not result.numel() or math.isfinite(float(result.sum())):
        return False
    if all(math.isfinite(float(extreme)) for extreme in torch.aminmax(result)):
        return False
    return any(
        bool((result[box].isinf() & source[box].isfinite()).any()) for box in boxes_of(result, _LOOKED_AT_CLOSELY)
    )


def may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast between these may make infinities of finite values."""
    if source == target or not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(target).max < torch.finfo(source).max


def _is_simple(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


# ------------------------------------------------------------------ transposes


def _in_step(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether what is written side by side is read from side by side, or nearly so."""
    order = _order(destination)
    return not order or source.stride(order[0]) * source.element_size() < _LINE_BYTES


def _collides(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether lines are gone from the cache before the next of their elements is read."""
    across, *outer = _order(destination)
    goes_on = outer[:1] == _order(source)[:1]
    return not goes_on or source.stride(across) * source.element_size() % _COLLIDING_BYTES == 0


def _in_strips(destination: torch.Tensor, source: torch.Tensor) -> None:
    box = list(source.shape)
    across = _order(destination)[0]
    box[across] = evenly(box[across], _LINES_AT_ONCE)
    for part in _boxes(source.shape, box):
        destination[part].copy_(source[part])


def _by_way_of_scratch(destination: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor) -> bool:
    size = destination.element_size()
    spare = 4 if (source.dtype, destination.dtype) in _BY_WAY_OF_FLOAT32 else 0
    room = scratch.numel() * size // (size + spare) // _LINE_BYTES * _LINE_BYTES
    across = _order(destination)[0]
    rows = min(source.shape[across], _RUN_BYTES // size)
    along = [dim for dim in _order(source) if dim != across]
    box = _box(source.shape, along, (room // rows - 2 * _LINE_BYTES) // size)
    row = _without_collisions(math.prod(box) * size)
    if row > room:
        return _cast(destination, source, scratch)
    box[across] = evenly(source.shape[across], room // row)
    memory, rest = scratch[:room].view(destination.dtype), scratch[room:]
    infinite = False
    for part in _boxes(source.shape, box):
        written = destination[part]
        staged = _arranged(memory, written.shape, [*along, across], row // size)
        infinite |= _cast(staged, source[part], rest)
        written.copy_(staged)
    return infinite


def _without_collisions(nbytes: int) -> int:
    """At least as many bytes, in a distance at which lines have places all over the cache."""
    return (-(-nbytes // _LINE_BYTES) | 1) * _LINE_BYTES


def _arranged(memory: torch.Tensor, sizes: Sequence[int], order: Sequence[int], last: int = 0) -> torch.Tensor:
    """Memory as a tensor of which the dimensions have larger and larger steps; the last may be given a step."""
    strides = [0] * len(sizes)
    step = 1
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
    if last:
        strides[order[-1]] = last
    return memory.as_strided(sizes, strides, memory.storage_offset())


# ------------------------------------------------------------------ casts


def _cast(destination: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor) -> bool:
    """Copy tensors that are in step, a piece at a time, so that a piece is still in the cache when it is looked at."""
    if source.dtype == destination.dtype:
        destination.copy_(source)
        return False
    by_way = (source.dtype, destination.dtype) in _BY_WAY_OF_FLOAT32 and scratch.numel() >= _LINE_BYTES
    if not by_way and source.numel() <= _CAST_AT_ONCE:
        destination.copy_(source)
        return made_infinities(destination, source)
    single = scratch[: scratch.numel() // 4 * 4].view(torch.float32) if by_way else scratch
    order = _order(destination)
    infinite = False
    # Where torch uses several threads, they would wait for each other after every piece.
    at_once = _CAST_AT_ONCE if torch.get_num_threads() == 1 else source.numel()
    box = _box(source.shape, order, single.numel() if by_way else at_once)
    for part in _boxes(source.shape, box):
        written, read = destination[part], source[part]
        written.copy_(_arranged(single, read.shape, order).copy_(read) if by_way else read)
        infinite |= made_infinities(written, read)
    return infinite


# ------------------------------------------------------------------ boxes


def boxes_of(tensor: torch.Tensor, room: int) -> Iterator[tuple[slice, ...]]:
    """All of a tensor, in boxes of at most ``room`` elements that lie as close together as it lies in memory."""
    return _boxes(tensor.shape, _box(tensor.shape, _order(tensor), room))


def rows_of(tensor: torch.Tensor, room: int) -> Iterator[torch.Tensor]:
    """The elements of a tensor in row-major order, as boxes of at most ``room`` that follow each other."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(room) if tensor.numel() else ()  # type: ignore[no-untyped-call]
        return
    # Of a box that is no whole row, the next outer dimension has but one element.
    box = _box(tensor.shape, range(tensor.dim() - 1, -1, -1), room)
    yield from (tensor[place] for place in _boxes(tensor.shape, box))


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions that are stepped along, the smallest steps first."""
    sizes = tensor.shape
    return sorted(
        (dim for dim, stride in enumerate(tensor.stride()) if sizes[dim] > 1), key=tensor.stride().__getitem__
    )


def _box(sizes: Sequence[int], dims: Sequence[int], room: int) -> list[int]:
    """The sizes of a box of at most ``room`` elements; what comes first among ``dims`` is taken whole, if it may be."""
    box = [1] * len(sizes)
    for dim in dims:
        box[dim] = evenly(sizes[dim], room)
        room //= box[dim]
    return box


def evenly(size: int, limit: int) -> int:
    """The size of the fewest pieces that are no larger than the limit, all of about one size."""
    pieces = -(-size // max(1, limit))
    return -(-size // max(1, pieces))


def _boxes(sizes: Sequence[int], box: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """All of a tensor, in boxes."""
    return itertools.product(
        *([slice(at, at + step) for at in range(0, size, step)] for size, step in zip(sizes, box, strict=True))
    )
