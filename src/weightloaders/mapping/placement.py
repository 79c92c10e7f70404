"""`Placement`: a strided copy between two linear address spaces.

Addresses are counted in elements: those of a source tensor in row-major order, and those of a target. A placement is a
nest of loops, each with a count and a step on either side. A reshape is no copy at all, a transpose is one placement,
so is each of q, k and v in a fused tensor: what moves a whole tensor stays a handful of numbers, whatever the tensor's
size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# One loop: how often, the step in the source, the step in the target.
Dim = tuple[int, int, int]


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
    return Placement(source, 0, 0, () if size == 1 else ((size, 1 if isinstance(source, int) else 0, 1),))


def is_empty(placed: Placement) -> bool:
    """Whether it copies nothing."""
    # A loop, for it is asked very often.
    for count, _, _ in placed.dims:  # noqa: SIM110 -- see above
        if count == 0:
            return True
    return False


def may_overlap(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether one address may be that of several elements; true of some odd steps of which it isn't."""
    reach = 0
    for step, size in sorted(zip(steps, sizes, strict=True)):
        if size > 1:
            # All that the smaller steps reach has to lie before the next of the larger ones.
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def invert(placed: Placement, target: int = 0) -> Placement:
    """The copy back, from target to source; what was read several times is written back from where it was first put.

    Args:
        placed: A copy; its source is no constant.
        target: The number that the target, now the source, is to have.
    """
    dims = [(count, written, read) for count, read, written in placed.dims if read]
    return placement(target, placed.target_start, placed.source_start, dims)


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
