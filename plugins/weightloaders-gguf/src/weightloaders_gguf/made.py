"""`MadeSource`: bytes that are made from those of a file while they are read.

Coded tensors are decoded in it, and tensors that llama.cpp stores in another arrangement are arranged as transformers
has them. What comes out can be described by extents like the bytes of any file: so whoever loads reads only what it
needs, in pieces, with as many threads as it likes, and no tensor is ever held whole.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightloaders import ByteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import NDArray

    from weightloaders_gguf.ggml_types import GgmlType

# Decoders need several times what they make for themselves, and all of that should stay in the processor's cache.
_MADE_AT_ONCE = 1 << 20
# Of what is stored; a read may be a trip to somewhere far.
_READ_AT_ONCE = 16 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a run of bytes is made, group by group: so many stored bytes (of each place) become so many others.

    Attributes:
        places: Where the stored bytes begin.
        stored: Bytes of a group in each place.
        made: Bytes that become of it.
        groups: How many there are.
        make: From the stored bytes of several groups, one array of ``(groups, stored)`` a place, to an array of as many
            rows, of which each has ``made`` bytes.
    """

    places: tuple[int, ...]
    stored: int
    made: int
    groups: int
    make: Callable[..., NDArray[np.generic]]


class MadeSource(ByteSource):
    """What recipes make of a file's bytes, one behind the other.

    Args:
        origin: The file.
    """

    def __init__(self, origin: ByteSource) -> None:
        self._origin = origin
        self.name = f"{origin.name} (decoded)"
        self._recipes: list[Recipe] = []
        self._begins: list[int] = []
        self._size = 0

    def add(self, recipe: Recipe) -> int:
        """Take in a recipe; returns where the bytes that it makes begin."""
        begin = self._size
        self._recipes.append(recipe)
        self._begins.append(begin)
        self._size += recipe.groups * recipe.made
        return begin

    @property
    def origin(self) -> ByteSource:
        """The file that is really read."""
        return self._origin

    @property
    def size(self) -> int:
        """Bytes of all that is made."""
        return self._size

    @property
    def identity(self) -> Hashable:
        """The file's own."""
        return self._origin.identity, "decoded"

    def read_into(self, view: memoryview, offset: int) -> None:
        """Make the bytes from ``offset`` on. See `weightloaders.ByteSource.read_into`."""
        into = np.frombuffer(view, dtype=np.uint8)
        if offset < 0 or offset + len(into) > self._size:
            # What is asked for was described by extents, so this is a mistake of whoever asks.
            self.read(offset, len(into))
        at = bisect.bisect_right(self._begins, offset) - 1
        done = 0
        while done < len(into):
            recipe, start = self._recipes[at], offset + done - self._begins[at]
            count = min(len(into) - done, recipe.groups * recipe.made - start)
            self._make(recipe, start, into[done : done + count])
            done += count
            at += 1

    def _make(self, recipe: Recipe, start: int, into: NDArray[np.uint8]) -> None:
        end = start + len(into)
        last = -(-end // recipe.made)
        groups_read = max(1, _READ_AT_ONCE // recipe.stored)
        groups_made = max(1, _MADE_AT_ONCE // recipe.made)
        for first in range(start // recipe.made, last, groups_read):
            count = min(groups_read, last - first)
            read = [self._stored(recipe, place, first, count) for place in recipe.places]
            for at in range(0, count, groups_made):
                stored = [part[at : at + groups_made] for part in read]
                # Random bits may stand for any number, and infinities are no business of whoever reads.
                with np.errstate(all="ignore"):
                    made = np.ascontiguousarray(recipe.make(*stored)).reshape(-1).view(np.uint8)
                begin = (first + at) * recipe.made
                low, high = max(start, begin), min(end, begin + len(made))
                into[low - start : high - start] = made[low - begin : high - begin]

    def _stored(self, recipe: Recipe, place: int, first: int, groups: int) -> NDArray[np.uint8]:
        stored = np.empty((groups, recipe.stored), dtype=np.uint8)
        self._origin.read_into(stored.data.cast("B"), place + first * recipe.stored)
        return stored


# ------------------------------------------------------------------ what makes numbers of bytes


def decoder(kind: GgmlType, byteorder: str) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """What turns the bytes of groups, each of whole blocks, into float32 numbers, a row a group."""
    if kind.torch_name:
        return lambda stored: _plain(stored, kind, byteorder)
    import gguf

    code = gguf.GGMLQuantizationType[kind.name]

    def decode(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
        if byteorder == "big":
            stored = _turned(stored, kind)
        # As one row: the package goes through a few rows at a time, which are short here.
        numbers: NDArray[np.float32] = gguf.quants.dequantize(stored.reshape(1, -1), code)
        return numbers.reshape(len(stored), -1)

    return decode


def _plain(stored: NDArray[np.uint8], kind: GgmlType, byteorder: str) -> NDArray[np.float32]:
    order = ">" if byteorder == "big" else "<"
    if kind.name == "BF16":
        return (stored.view(f"{order}u2").astype(np.uint32) << 16).view(np.float32)
    return stored.view(f"{order}f{kind.nbytes}").astype(np.float32)


def _turned(stored: NDArray[np.uint8], kind: GgmlType) -> NDArray[np.uint8]:
    from weightloaders_gguf.ggml_types import HALVES_IN_BLOCK

    blocks = stored.reshape(-1, kind.nbytes)
    for at in HALVES_IN_BLOCK[kind.name]:
        blocks[:, at : at + 2] = blocks[:, [at + 1, at]]
    return blocks.reshape(stored.shape)


def in_order(order: Sequence[int]) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    """What takes the rows that each group consists of in another order."""

    def arrange(stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return stored.reshape(len(stored), len(order), -1)[:, order]

    return arrange
