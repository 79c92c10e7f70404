"""Boxes of a tensor's elements: whether those that it is made of fill it, each element once."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from weightloaders.errors import CheckpointFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Box(NamedTuple):
    """A part of a tensor.

    Args:
        at: Where it begins.
        shape: Its sizes.
        file: The file that it is in, for messages.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Prove that boxes, which lie within a tensor, fill each of its elements just once.

    Raises:
        CheckpointFormatError: If two of them meet, or they leave elements out.
    """
    meeting = _first_that_meet([box for box in boxes if math.prod(box.shape)])
    if meeting is not None:
        raise CheckpointFormatError(
            f"two extents of tensor {name!r} fill the same elements", file=meeting[1].file, tensor=name
        )
    filled = sum(math.prod(box.shape) for box in boxes)
    if filled != math.prod(shape):
        raise CheckpointFormatError(
            f"the extents of tensor {name!r} fill {filled} of its {math.prod(shape)} elements",
            file=boxes[0].file if boxes else None,
            tensor=name,
        )


def _first_that_meet(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes with common elements; None if there are none.

    Thousands of ranks store thousands of slices, and pairs of these would be millions. So they are set apart where a
    cut along a dimension goes through none of them, again and again, and pairs are looked at only of what is left.
    """
    waiting = [boxes]
    while waiting:
        parts = _apart(waiting.pop())
        if len(parts) > 1:
            waiting += [part for part in parts if len(part) > 1]
            continue
        for a, b in itertools.chain.from_iterable(map(_neighbours, parts)):
            if all(x < y + m and y < x + n for x, n, y, m in zip(a.at, a.shape, b.at, b.shape, strict=True)):
                return a, b
    return None


def _apart(boxes: Sequence[Box]) -> list[Sequence[Box]]:
    """Groups of boxes that a cut along one dimension sets apart from each other; all in one if there is no such cut."""
    for dim in range(len(boxes[0].at) if boxes else 0):
        groups: list[list[Box]] = []
        end = 0
        for box in sorted(boxes, key=lambda box: box.at[dim]):
            if not groups or box.at[dim] >= end:
                groups.append([])
            groups[-1].append(box)
            end = max(end, box.at[dim] + box.shape[dim])
        if len(groups) > 1:
            return [*groups]
    return [boxes]


def _neighbours(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that meet along the dimension in which most of them begin elsewhere."""
    dims = len(boxes[0].at) if boxes else 0
    if not dims:
        yield from itertools.combinations(boxes, 2)
        return
    dim = max(range(dims), key=lambda d: len({box.at[d] for box in boxes}))
    in_order = sorted(boxes, key=lambda box: box.at[dim])
    for i, box in enumerate(in_order):
        for other in itertools.islice(in_order, i + 1, None):
            if other.at[dim] >= box.at[dim] + box.shape[dim]:
                break
            yield box, other
