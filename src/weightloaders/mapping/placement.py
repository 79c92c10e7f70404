"""The algebra of strided copies: compose, restrict, invert, coalesce, and prove that a target is filled exactly once.

A `Placement` copies elements between two linear address spaces, counted in elements: that of a source tensor in
row-major order, and that of a target. It is a nest of loops, each with a count and a step on either side. A reshape is
no copy at all, a transpose is one placement, so is each of q, k and v in a fused tensor: what moves a whole tensor
stays a handful of numbers, whatever the tensor's size.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Beyond this many placements for one tensor, they cost more than computing what they stand for.
MAX_PLACEMENTS = 1 << 16

# One loop: how often, the step in the source, the step in the target.
Dim = tuple[int, int, int]


class TooManyPlacements(Exception):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """A layout so irregular that it can't be said in a bounded number of placements."""


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A source that has one value everywhere.

    Two are equal if their values look alike: 0.0 and -0.0 are two, NaN is equal to NaN.

    Attributes:
        value: The value.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


# A source by its number, one value everywhere, or None: nothing was ever written there.
Source = int | Constant | None


class Placement(NamedTuple):
    """A strided copy.

    Attributes:
        source: Which source.
        source_start: Where the first element lies in the source.
        target_start: Where it goes in the target.
        dims: The loops, largest target step first. Target steps are positive; a source step of 0 repeats what it reads,
            a negative one reads backwards. Loops that are one (contiguous) are joined, so equal copies are equal.
    """

    source: Source
    source_start: int
    target_start: int
    dims: tuple[Dim, ...]

    @property
    def numel(self) -> int:
        """How many elements it copies."""
        numel = 1
        for count, _, _ in self.dims:
            numel *= count
        return numel

    @property
    def is_contiguous(self) -> bool:
        """Whether it is one run on both sides."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1:] == (1, 1))

    @property
    def target_end(self) -> int:
        """Behind the last address that it writes."""
        end = self.target_start + 1
        for count, _, step in self.dims:
            end += (count - 1) * step
        return end

    @property
    def source_range(self) -> tuple[int, int]:
        """The lowest address that it reads, and the one behind the highest."""
        low = high = self.source_start
        for count, step, _ in self.dims:
            reach = (count - 1) * step
            low, high = (low, high + reach) if reach >= 0 else (low + reach, high)
        return low, high + 1


def placement(source: Source, source_start: int, target_start: int, dims: Iterable[Dim]) -> Placement:
    """A placement in normal form, from loops in any order; steps may be negative on both sides."""
    kept = []
    for count, source_step, target_step in dims:
        if count == 1:
            continue
        if target_step < 0:
            # The same loop backwards.
            source_start += (count - 1) * source_step
            target_start += (count - 1) * target_step
            source_step, target_step = -source_step, -target_step
        kept.append((count, source_step, target_step))
    if len(kept) > 1:
        kept.sort(key=_target_step, reverse=True)
        kept = _joined(kept)
    return Placement(source, source_start, target_start, tuple(kept))


def _target_step(dim: Dim) -> int:
    return dim[2]


def _joined(dims: Sequence[Dim]) -> list[Dim]:
    """Two loops of which the outer goes on where the inner ends are one."""
    result = [dims[0]]
    for count, source_step, target_step in dims[1:]:
        outer, outer_source, outer_target = result[-1]
        if outer_source == count * source_step and outer_target == count * target_step:
            result[-1] = (outer * count, source_step, target_step)
        else:
            result.append((count, source_step, target_step))
    return result


def whole(source: Source, size: int) -> Placement:
    """All of a source of ``size`` elements, in order. What is no tensor has but one element, again and again."""
    return placement(source, 0, 0, [(size, 1 if isinstance(source, int) else 0, 1)])


def is_empty(placed: Placement) -> bool:
    """Whether it copies nothing."""
    return any(count == 0 for count, _, _ in placed.dims)


# ------------------------------------------------------------------ composing


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


# ------------------------------------------------------------------ coalescing


def coalesce(placements: Iterable[Placement]) -> list[Placement]:
    """The same copies in as few placements as regular steps allow, ordered by target; they must not overlap."""
    by_source: dict[Source, list[Placement]] = defaultdict(list)
    for placed in placements:
        if not is_empty(placed):
            by_source[placed.source].append(placed)
    result = [placed for same_source in by_source.values() for placed in _fewer(same_source)]
    result.sort(key=_target_start)
    return result


def _fewer(placements: list[Placement]) -> list[Placement]:
    """The same by steps that are regular in the order of the target, or in that of the source."""
    while len(placements) > 1:
        found = min(
            (list(_in_step(sorted(placements, key=order))) for order in (_target_start, _source_start)), key=len
        )
        if len(found) == len(placements):
            break
        placements = found
    return placements


def _target_start(placed: Placement) -> int:
    return placed.target_start


def _source_start(placed: Placement) -> int:
    return placed.source_start


def _in_step(placements: Sequence[Placement]) -> Iterator[Placement]:
    """Equal loops whose starts go on in equal steps are one, with a loop more."""
    at = 0
    while at < len(placements):
        first = placements[at]
        end = at + 1
        step = None
        while end < len(placements):
            last, following = placements[end - 1], placements[end]
            if following.dims != first.dims:
                break
            steps = following.source_start - last.source_start, following.target_start - last.target_start
            if step is not None and steps != step:
                break
            step = steps
            end += 1
        if step is None:
            at = end
            # Two runs of different lengths, one behind the other on both sides.
            grown = first
            while at < len(placements) and (longer := _one_run(grown, placements[at])) is not None:
                grown, at = longer, at + 1
            yield grown
        else:
            yield placement(first.source, first.source_start, first.target_start, ((end - at, *step), *first.dims))
            at = end


def _one_run(a: Placement, b: Placement) -> Placement | None:
    """Two copies as one, where the outer loop of the first goes on in the second."""
    if not (a.dims or b.dims):
        return None
    outer, inner = (a.dims or b.dims)[0], (a.dims or b.dims)[1:]
    counts = []
    for placed in (a, b):
        if placed.dims[:1] and placed.dims[0][1:] == outer[1:] and placed.dims[1:] == inner:
            counts.append(placed.dims[0][0])
        elif placed.dims == inner:
            counts.append(1)
        else:
            return None
    if (b.source_start - a.source_start, b.target_start - a.target_start) != (
        counts[0] * outer[1],
        counts[0] * outer[2],
    ):
        return None
    return placement(a.source, a.source_start, a.target_start, ((sum(counts), *outer[1:]), *inner))


# ------------------------------------------------------------------ restricting, inverting, proving


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
    steps, box_steps = row_major(shape), row_major(size)
    offset = sum(at * step for at, step in zip(start, steps, strict=True))
    found, _ = compose(placements, placement(0, offset, 0, zip(size, steps, box_steps, strict=True)))
    return coalesce(found)


def row_major(shape: Sequence[int]) -> list[int]:
    """Steps of a shape in row-major order, in elements."""
    steps = []
    step = 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    steps.reverse()
    return steps


def invert(placed: Placement, target: int = 0) -> Placement:
    """The copy back, from target to source; what was read several times is written back from where it was first put.

    Args:
        placed: A copy; its source is no constant.
        target: The number that the target, now the source, is to have.
    """
    dims = [(count, written, read) for count, read, written in placed.dims if read]
    return placement(target, placed.target_start, placed.source_start, dims)


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
    ordered = sorted((p for p in placements if not is_empty(p)), key=_target_start)
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
