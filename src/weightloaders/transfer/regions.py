"""Which parts of a memory have been touched."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch

from weightloaders.weights.reading import memory_of

# Elements that a digest looks at: reading all of a large model takes longer than loading it.
_SAMPLED = 512


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies in its storage, in elements of ``itemsize`` bytes."""

    itemsize: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that a tensor is of its storage."""
        return cls(tensor.element_size(), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the byte behind the last."""
        if math.prod(self.shape) == 0:
            return self.offset * self.itemsize, self.offset * self.itemsize
        length = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return self.offset * self.itemsize, (self.offset + length) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether it has every element of its span, in whatever order."""
        steps: list[tuple[int, int]] = sorted(
            (step, n) for n, step in zip(self.shape, self.strides, strict=True) if n != 1
        )
        expected = 1
        for step, n in steps:
            if step != expected:
                return False
            expected *= n
        return True

    def meets(self, other: View) -> bool:
        """Whether the spans of two views of one storage overlap."""
        (a, b), (c, d) = self.span, other.span
        return a < d and c < b


class Regions:
    """Which bytes of a storage have been touched: intervals, and a mask of elements for what is strided.

    Args:
        nbytes: Size of the storage.
        itemsize: Bytes an element, as most views of it will have.
    """

    def __init__(self, nbytes: int, itemsize: int) -> None:
        self._nbytes, self._itemsize = nbytes, itemsize
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._strided: set[View] = set()
        self._mask: torch.Tensor | None = None

    @property
    def pieces(self) -> list[View]:
        """Views that make it up, for another `Regions` of the same size."""
        runs = zip(self._starts, self._ends, strict=True)
        return [*(View(1, start, (end - start,), (1,)) for start, end in runs), *self._strided]

    def add(self, view: View) -> None:
        """A view was touched."""
        start, end = view.span
        if start == end:
            return
        if view.is_dense or view.itemsize != self._itemsize:
            # A strided view of another element size is too rare to be told exactly.
            self._add_interval(start, end)
        else:
            if self._mask is None:
                self._mask = torch.zeros(self._nbytes // self._itemsize, dtype=torch.bool, device="cpu")
            self._strided.add(view)
            self._mask.as_strided(view.shape, view.strides, view.offset).fill_(True)

    def _add_interval(self, start: int, end: int) -> None:
        # Those that it meets become one with it.
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def covers(self, view: View) -> bool:
        """Whether all of a view was touched."""
        start, end = view.span
        at = bisect_right(self._starts, start) - 1
        if start == end or (at >= 0 and end <= self._ends[at]):
            return True
        if self._mask is None and view.is_dense:
            return False
        mask = self._merged_mask()
        if view.itemsize != self._itemsize:
            # Its span will do, as in `add`.
            return bool(mask[start // self._itemsize : -(-end // self._itemsize)].all())
        return bool(mask.as_strided(view.shape, view.strides, view.offset).all())

    def touches(self, view: View) -> bool:
        """Whether any part of a view's span was touched."""
        start, end = view.span
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first < last:
            return True
        size = self._itemsize
        return self._mask is not None and bool(self._mask[start // size : -(-end // size)].any())

    def _merged_mask(self) -> torch.Tensor:
        if self._mask is None:
            self._mask = torch.zeros(self._nbytes // self._itemsize, dtype=torch.bool, device="cpu")
        for start, end in zip(self._starts, self._ends, strict=True):
            self._mask[-(-start // self._itemsize) : end // self._itemsize] = True
        return self._mask

    def copied(self, source: View, target: View, nbytes: int) -> Regions:
        """What is known of a copy of a view of this storage: as much of it was touched as of the original."""
        result = Regions(nbytes, target.itemsize)
        if self.covers(source):
            result.add(target)
        elif self.touches(source) and math.prod(source.shape) == math.prod(target.shape) and target.is_dense:
            mask = self._merged_mask().as_strided(source.shape, source.strides, source.offset)
            copy = torch.zeros(nbytes // target.itemsize, dtype=torch.bool, device="cpu")
            copy.as_strided(target.shape, target.strides, target.offset).copy_(mask)
            result._mask = copy
        return result


def digest(tensor: torch.Tensor) -> int:
    """A checksum of some elements of a tensor's memory, spread evenly. As long as nobody writes it stays the same."""
    start, end = View.of(tensor).span
    elements = (end - start) // tensor.element_size()
    step = max(1, elements // _SAMPLED)
    taken = tensor.detach().as_strided((-(-elements // step),), (step,), tensor.storage_offset())
    # A name of its own: the bytes are there only as long as their tensor is.
    copied = taken.cpu().contiguous()
    return zlib.crc32(memory_of(copied))
