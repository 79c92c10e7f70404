"""The algebra of placements: compose, restrict, and prove that a target is filled exactly once.

All of it comes from one question: where are the addresses that one strided copy writes those that another reads? It is
answered one magnitude of steps at a time, from the largest down, and what is left over comes out as well.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

from weightloaders.mapping.placement import Dim, Placement, coalesce, is_empty, placement, whole
from weightloaders.weights.info import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Beyond this many placements for one tensor, they cost more than computing what they stand for.
MAX_PLACEMENTS = 1 << 16


class TooManyPlacements(Exception):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """A layout so irregular that it can't be said in a bounded number of placements."""


def compose(layers: Sequence[Placement], reading: Placement) -> tuple[list[Placement], list[Placement]]:
    """What a copy out of a space comes to, where that space was filled by others.

    Args:
        layers: How the space was filled; none is empty. Where they overlap, the last counts.
        reading: A copy out of that space; its own source does not matter.

    Returns:
        Copies from the layers' sources to where the reading writes; and what is left of the reading where no layer is.

    Raises:
        TooManyPlacements: If it can't be said in `MAX_PLACEMENTS`.
    """
    if is_empty(reading):
        return [], []
    found: list[Placement] = []
    left = [reading]
    for layer in reversed(layers):
        if not left:
            break
        remaining: list[Placement] = []
        for part in left:
            hits, rest = _compose_two(layer, part)
            found += hits
            remaining += rest
        left = remaining
        if len(found) + len(left) > MAX_PLACEMENTS:
            raise TooManyPlacements
    return found, left


def _compose_two(layer: Placement, reading: Placement) -> tuple[list[Placement], list[Placement]]:
    low, high = reading.source_range
    start, end = layer.target_start, layer.target_end
    if high <= start or low >= end:
        return [], [reading]
    if len(layer.dims) == 1 and layer.dims[0][2] == 1 and start <= low and high <= end:
        # By far the most usual: the layer is a plain run, and all that is read lies in it.
        step = layer.dims[0][1]
        first = layer.source_start + (reading.source_start - start) * step
        dims = [(count, read * step, written) for count, read, written in reading.dims]
        return [placement(layer.source, first, reading.target_start, dims)], []
    if low <= start and end <= high and reading.dims:
        count, step, written = reading.dims[0]
        if reading.is_contiguous and layer.numel == end - start:
            # What is read is a plain run, and the layer fills a part of it.
            hit = layer._replace(target_start=reading.target_start + start - low)
            return [hit], _beside(reading, start - low, end - low)
        inner = high - low - (count - 1) * step
        if 0 < inner <= step and (at := (start - low) // step) == (end - 1 - low) // step:
            # The layer lies in one round of the outermost loop.
            round_ = Placement(
                reading.source, reading.source_start + at * step, reading.target_start + at * written, reading.dims[1:]
            )
            hits, rest = _compose_two(layer, round_)
            return hits, [*rest, *_beside(reading, at, at + 1)]
    return _compose_any(layer, reading)


def _beside(reading: Placement, start: int, end: int) -> list[Placement]:
    """A copy without some rounds of its outermost loop."""
    (count, step, written), inner = reading.dims[0], reading.dims[1:]
    rest = []
    if start:
        dims = ((start, step, written), *inner) if start > 1 else inner
        rest.append(Placement(reading.source, reading.source_start, reading.target_start, dims))
    if end < count:
        dims = ((count - end, step, written), *inner) if count - end > 1 else inner
        at = reading.source_start + end * step, reading.target_start + end * written
        rest.append(Placement(reading.source, *at, dims))
    return rest


def _compose_any(layer: Placement, reading: Placement) -> tuple[list[Placement], list[Placement]]:
    # What is read backwards is written backwards instead, and what is read again and again takes no part.
    start, target, repeated, moving = reading.source_start, reading.target_start, [], []
    for count, read, written in reading.dims:
        if read == 0:
            repeated.append((count, 0, written))
        elif read < 0:
            start, target = start + (count - 1) * read, target + (count - 1) * written
            moving.append((count, -read, -written))
        else:
            moving.append((count, read, written))
    moving.sort(key=_source_step, reverse=True)
    hits, rest = _meet(start - layer.target_start, layer.dims, tuple(moving))
    return (
        [
            placement(layer.source, layer.source_start + hit.first, target + hit.second, (*hit.dims, *repeated))
            for hit in hits
        ],
        [
            placement(reading.source, start + box.first, target + box.second, (*box.dims, *repeated))
            for box in rest
        ],
    )  # fmt: skip


def _source_step(dim: Dim) -> int:
    return dim[1]


class _Box(NamedTuple):
    """A nest of loops over two address spaces, with where it starts in each."""

    first: int
    second: int
    dims: tuple[Dim, ...]

    def within(self, count: int, first_step: int, second_step: int, first: int, second: int) -> _Box:
        """The same inside another loop, which starts at these."""
        outer = ((count, first_step, second_step),) if count > 1 else ()
        return _Box(self.first + first, self.second + second, outer + self.dims)


_NOTHING = _Box(0, 0, ())


def _meet(ahead: int, layer: tuple[Dim, ...], reading: tuple[Dim, ...]) -> tuple[list[_Box], list[_Box]]:
    """Where the addresses that a layer writes are those that are read.

    It solves ``sum(a * target step) == ahead + sum(b * source step)`` for the loop counters a of the layer and b of the
    reading, one magnitude of steps at a time, from the largest down.

    Args:
        ahead: How far the reading starts behind the layer's start.
        layer: Loops of (count, source step, target step), largest target step first.
        reading: Loops of (count, source step, target step), largest source step first.

    Returns:
        Boxes of (the layer's source, the reading's target) that meet, and the boxes of (the reading's source, its
        target) that are left over.
    """
    layer_reach = sum((count - 1) * step for count, _, step in layer)
    reading_reach = sum((count - 1) * step for count, step, _ in reading)
    if ahead > layer_reach or ahead + reading_reach < 0:
        return [], [_Box(0, 0, reading)]
    if not layer and not reading:
        return [_NOTHING], []
    step = max(layer[0][2] if layer else 0, reading[0][1] if reading else 0)
    if layer and layer[0][2] != step and layer[0][0] * layer[0][2] > step:
        return _with_layer_split(ahead, layer, reading, step)
    if reading and reading[0][1] != step and reading[0][0] * reading[0][1] > step:
        return _with_reading_split(ahead, layer, reading, step)
    (n, read, _), inner_layer = (layer[0], layer[1:]) if layer and layer[0][2] == step else ((1, 0, 0), layer)
    (m, _, written), inner = (reading[0], reading[1:]) if reading and reading[0][1] == step else ((1, 0, 0), reading)
    # a - b can only be what lets the smaller steps make up the difference.
    inner_reach = layer_reach - (n - 1) * step, reading_reach - (m - 1) * step
    least = max(-((inner_reach[0] - ahead) // step), 1 - m)
    most = min((ahead + inner_reach[1]) // step, n - 1)
    if most - least > MAX_PLACEMENTS:
        raise TooManyPlacements
    shifts = range(least, most + 1)
    cuts = sorted({0, m, *(min(max(at, 0), m) for shift in shifts for at in (-shift, n - shift))})
    hits: list[_Box] = []
    rest: list[_Box] = []
    for start, end in itertools.pairwise(cuts):
        left = [_Box(0, 0, inner)]
        for shift in shifts:
            if not 0 <= start + shift < n:
                continue
            remaining = []
            for box in left:
                inner_hits, inner_rest = _meet(ahead - shift * step + box.first, inner_layer, box.dims)
                hits += [
                    hit.within(end - start, read, written, (start + shift) * read, box.second + start * written)
                    for hit in inner_hits
                ]
                remaining += [_Box(box.first + r.first, box.second + r.second, r.dims) for r in inner_rest]
            left = remaining
        rest += [box.within(end - start, step, written, start * step, start * written) for box in left]
    return hits, rest


def _with_layer_split(
    ahead: int, layer: tuple[Dim, ...], reading: tuple[Dim, ...], step: int
) -> tuple[list[_Box], list[_Box]]:
    """The layer's largest loop runs past the reading's largest step: make two of it, one of just that step."""
    (count, read, written), inner = layer[0], layer[1:]
    per, odd = divmod(step, written)
    if odd:
        return _one_by_one(ahead, layer, reading)
    rounds, over = divmod(count, per)
    hits, left = _meet(ahead, ((rounds, read * per, step), (per, read, written), *inner), reading)
    if not over:
        return hits, left
    rest = []
    for box in left:
        start = rounds * per
        more, remaining = _meet(ahead + box.first - start * written, ((over, read, written), *inner), box.dims)
        hits += [_Box(start * read + hit.first, box.second + hit.second, hit.dims) for hit in more]
        rest += [_Box(box.first + r.first, box.second + r.second, r.dims) for r in remaining]
    return hits, rest


def _with_reading_split(
    ahead: int, layer: tuple[Dim, ...], reading: tuple[Dim, ...], step: int
) -> tuple[list[_Box], list[_Box]]:
    """The reading's largest loop runs past the layer's largest step: make two of it, one of just that step."""
    (count, read, written), inner = reading[0], reading[1:]
    per, odd = divmod(step, read)
    if odd:
        return _one_by_one(ahead, layer, reading)
    rounds, over = divmod(count, per)
    hits, rest = _meet(ahead, layer, ((rounds, step, written * per), (per, read, written), *inner))
    if over:
        start = rounds * per
        more, remaining = _meet(ahead + start * read, layer, ((over, read, written), *inner))
        hits += [_Box(hit.first, start * written + hit.second, hit.dims) for hit in more]
        rest += [_Box(start * read + r.first, start * written + r.second, r.dims) for r in remaining]
    return hits, rest


def _one_by_one(ahead: int, layer: tuple[Dim, ...], reading: tuple[Dim, ...]) -> tuple[list[_Box], list[_Box]]:
    """Steps that don't divide each other: each round of the outermost loop of the reading by itself."""
    if layer and (not reading or layer[0][2] > reading[0][1]):
        return _layer_one_by_one(ahead, layer, reading)
    (count, read, written), inner = reading[0], reading[1:]
    hits: list[_Box] = []
    rest: list[_Box] = []
    _check_bound(count)
    for at in range(count):
        more, remaining = _meet(ahead + at * read, layer, inner)
        hits += [_Box(hit.first, at * written + hit.second, hit.dims) for hit in more]
        rest += [_Box(at * read + r.first, at * written + r.second, r.dims) for r in remaining]
        _check_bound(len(hits) + len(rest))
    return hits, rest


def _layer_one_by_one(ahead: int, layer: tuple[Dim, ...], reading: tuple[Dim, ...]) -> tuple[list[_Box], list[_Box]]:
    (count, read, written), inner = layer[0], layer[1:]
    hits: list[_Box] = []
    left = [_Box(0, 0, reading)]
    # Only rounds that can lie where anything is read.
    reach = sum((n - 1) * step for n, _, step in inner), sum((m - 1) * step for m, step, _ in reading)
    rounds = range(max(-((reach[0] - ahead) // written), 0), min((ahead + reach[1]) // written + 1, count))
    _check_bound(len(rounds))
    for at in rounds:
        remaining = []
        for box in left:
            more, rest = _meet(ahead + box.first - at * written, inner, box.dims)
            hits += [_Box(at * read + hit.first, box.second + hit.second, hit.dims) for hit in more]
            remaining += [_Box(box.first + r.first, box.second + r.second, r.dims) for r in rest]
        left = remaining
        _check_bound(len(hits) + len(left))
    return hits, left


def _check_bound(count: int) -> None:
    if count > MAX_PLACEMENTS:
        raise TooManyPlacements


# ------------------------------------------------------------------ restricting, proving


def restrict(
    placements: Sequence[Placement], shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> list[Placement]:
    """The copies that fill a box of a target, into a target of just that box (a rank's slice, a chunk).

    Args:
        placements: Copies into a target in row-major order.
        shape: The target's shape.
        start: Where the box starts, one index a dimension.
        size: How large it is.

    Raises:
        ValueError: If the box does not lie in the target.
    """
    if not len(shape) == len(start) == len(size) or any(
        at < 0 or count < 0 or at + count > whole_size for at, count, whole_size in zip(start, size, shape, strict=True)
    ):
        raise ValueError(f"the box of {list(size)} at {list(start)} does not lie in {list(shape)}")
    steps, box_steps = contiguous_strides(shape), contiguous_strides(size)
    offset = sum(at * step for at, step in zip(start, steps, strict=True))
    found, _ = compose(placements, placement(0, offset, 0, zip(size, steps, box_steps, strict=True)))
    return coalesce(found)


class Cover(NamedTuple):
    """What a set of copies leaves out of a target, and what it writes more than once.

    Attributes:
        never: Copies that would fill what is never written: they tell where it is.
        twice: Those among the copies that write where an earlier one does.
    """

    never: list[Placement]
    twice: list[Placement]

    @property
    def is_exact(self) -> bool:
        """Whether every element is written exactly once."""
        return not self.never and not self.twice


def cover(placements: Iterable[Placement], size: int) -> Cover:
    """Whether copies fill a target of ``size`` elements exactly once.

    Args:
        placements: The copies; none may write outside the target.
        size: How many elements the target has.
    """
    ordered = sorted((p for p in placements if not is_empty(p)), key=operator.attrgetter("target_start"))
    if len(ordered) == 1 and ordered[0].target_start == 0 and ordered[0].numel == ordered[0].target_end == size:
        # By far the most usual: one copy that fills all of it.
        return Cover([], [])
    left = [whole(0, size)] if size else []
    never: list[Placement] = []
    twice = []
    for placed in ordered:
        remaining: list[Placement] = []
        found = 0
        for part in left:
            if part.target_end <= placed.target_start:
                # What lies in front of this copy lies in front of all that follow.
                never.append(part)
                continue
            hits, rest = _compose_two(placed, part)
            found += sum(hit.numel for hit in hits)
            remaining += rest
        if found < placed.numel:
            twice.append(placed)
        left = remaining
        _check_bound(len(left) + len(never))
    return Cover([*never, *left], twice)
