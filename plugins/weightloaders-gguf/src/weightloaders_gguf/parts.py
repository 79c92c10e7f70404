"""`Part`: one stored tensor, and the ways in which its numbers can be said to lie in a tensor of transformers'."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from weightloaders import ByteSource, Extent, TensorInfo
from weightloaders.errors import CheckpointFormatError, UnsupportedDtypeError
from weightloaders_gguf.ggml_types import HALVES_IN_BLOCK, WITHOUT_DECODER
from weightloaders_gguf.made import MadeSource, Recipe, decoder, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from weightloaders_gguf.header import Header, StoredTensor


class Part:
    """A stored tensor and where it lies.

    Args:
        source: The file.
        made: What is made of the file.
        header: The file's header.
        stored: What that says of the tensor.

    Raises:
        UnsupportedDtypeError: If its codes can't be decoded.
    """

    def __init__(self, source: ByteSource, made: MadeSource, header: Header, stored: StoredTensor) -> None:
        self.source, self.made, self.stored = source, made, stored
        self.byteorder = header.byteorder
        self.name, self.shape, self.type = stored.name, stored.shape, stored.type
        self.is_coded = not self.type.torch_name
        if self.type.name in WITHOUT_DECODER or (
            self.is_coded and self.byteorder == "big" and self.type.name not in HALVES_IN_BLOCK
        ):
            order = ", big-endian," if self.byteorder == "big" else ""
            raise UnsupportedDtypeError(
                f"tensor {self.name!r} is stored as {self.type.name}{order} which can't be decoded here",
                file=source.name,
                tensor=self.name,
                hint="llama.cpp's llama-quantize turns it into another type",
            )
        #: The dtype of the numbers as they are handed out.
        self.dtype: torch.dtype = torch.float32 if self.is_coded else getattr(torch, self.type.torch_name)

    # -- where its numbers begin, as they are or made into something else

    def numbers(self) -> Run:
        """Its numbers in the order in which they are stored."""
        if not self.is_coded:
            return Run(self.source, self.stored.offset, self.dtype, self.byteorder)
        blocks = self.stored.nbytes // self.type.nbytes
        return self._made(self.type.nbytes, 4 * self.type.elements, blocks, decoder(self.type, self.byteorder))

    def each(self, function: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Run:
        """What a function makes of each of its numbers."""
        decode, blocks = self._floats(), self.stored.nbytes // self.type.nbytes
        return self._made(
            self.type.nbytes, 4 * self.type.elements, blocks, lambda raw: function(decode(raw)), torch.float32
        )

    def computed(self, function: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Run:
        """What a function makes of its numbers, which it needs all at once; for small tensors."""
        decode = self._floats()
        return self._made(
            self.stored.nbytes, 4 * math.prod(self.shape), 1, lambda stored: function(decode(stored)[0]), torch.float32
        )

    def in_groups(self, groups: int, order: Sequence[int]) -> Run:
        """Its rows, those of each of so many groups in another order."""
        rows = self.shape[0] if self.shape else 0
        if rows != groups * len(order):
            raise CheckpointFormatError(
                f"tensor {self.name!r} has {rows} rows, which do not make up {groups} heads",
                file=self.source.name,
                tensor=self.name,
            )
        if not self.stored.nbytes:
            return self.numbers()
        if self.is_coded and math.prod(self.shape[1:]) % self.type.elements:
            raise UnsupportedDtypeError(
                f"tensor {self.name!r} of shape {list(self.shape)} is stored as {self.type.name}, in blocks of "
                f"{self.type.elements} numbers that reach across its rows, which have to be put in another order",
                file=self.source.name,
                tensor=self.name,
                hint="llama.cpp stores such a tensor as F32: convert the model again",
            )
        arrange = in_order(order)
        stored = self.stored.nbytes // groups
        if not self.is_coded:
            return self._made(stored, stored, groups, arrange)
        decode = decoder(self.type, self.byteorder)
        made = 4 * math.prod(self.shape) // groups
        return self._made(stored, made, groups, lambda raw: _decoded_rows(decode, arrange(raw)))

    def in_columns(self, order: Sequence[int]) -> Run:
        """Its numbers, those of each row in another order."""
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        if columns != len(order):
            raise CheckpointFormatError(
                f"tensor {self.name!r} has rows of {columns} numbers, not of {len(order)}",
                file=self.source.name,
                tensor=self.name,
            )
        if not rows:
            return self.numbers()
        arrange, stored = in_order(order), self.stored.nbytes // rows
        if not self.is_coded:
            return self._made(stored, stored, rows, arrange)
        decode = decoder(self.type, self.byteorder)
        return self._made(stored, 4 * columns, rows, lambda raw: decode(raw)[:, order])

    def between(self, other: Part) -> Run:
        """Its rows with those of another tensor of the same kind and file between them: one of this, one of that."""
        if (other.shape, other.type) != (self.shape, self.type):
            raise CheckpointFormatError(
                f"the tensors {self.name!r} and {other.name!r} belong together, but differ in shape or type",
                file=self.source.name,
                tensor=other.name,
            )
        rows = math.prod(self.shape[:-1]) if len(self.shape) > 2 else math.prod(self.shape)
        places, stored = (self.stored.offset, other.stored.offset), self.stored.nbytes // max(rows, 1)
        if not self.is_coded:
            return self._made(stored, 2 * stored, rows, lambda one, two: np.stack([one, two], axis=1), places=places)
        decode, made = decoder(self.type, self.byteorder), 8 * math.prod(self.shape) // max(rows, 1)
        return self._made(
            stored, made, rows, lambda one, two: np.stack([decode(one), decode(two)], axis=1), places=places
        )

    def _floats(self) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
        """What turns its bytes into numbers to reckon with."""
        if not self.dtype.is_floating_point:
            raise UnsupportedDtypeError(
                f"tensor {self.name!r} is stored as {self.type.name}, but what transformers has is reckoned from it, "
                "for which it takes floating point",
                file=self.source.name,
                tensor=self.name,
                hint="llama.cpp stores such a tensor as F32: convert the model again",
            )
        return decoder(self.type, self.byteorder)

    def _made(
        self,
        stored: int,
        made: int,
        groups: int,
        make: Callable[..., NDArray[np.generic]],
        dtype: torch.dtype | None = None,
        places: tuple[int, ...] = (),
    ) -> Run:
        if not made:
            groups = 0
        begin = self.made.add(Recipe(places or (self.stored.offset,), stored, made, groups, make))
        # Numbers that were made are in this machine's order, as are those of one that is decoded.
        plain = dtype is None and not self.is_coded
        return Run(self.made, begin, dtype or self.dtype, self.byteorder if plain else _HOST)


_HOST = "little" if np.little_endian else "big"


class Run(NamedTuple):
    """Numbers that lie side by side in a source."""

    source: ByteSource
    offset: int
    dtype: torch.dtype
    byteorder: str

    def extent(
        self,
        shape: Sequence[int],
        *,
        skip: int = 0,
        strides: Sequence[int] | None = None,
        at: Sequence[int] | None = None,
    ) -> Extent:
        """A box of a tensor that these numbers fill, behind the first few."""
        return Extent(
            self.source,
            self.offset + skip * self.dtype.itemsize,
            dtype=self.dtype,
            byteorder=self.byteorder,  # type: ignore[arg-type]
            shape=shape,
            strides=strides,
            at=at,
        )

    def whole(self, name: str, shape: Sequence[int]) -> TensorInfo:
        """A tensor that these numbers make up."""
        return TensorInfo(name, self.dtype, shape, self.extent(shape))

    def rows(self, name: str, shape: Sequence[int], moves: Iterable[tuple[int, int, int]]) -> TensorInfo:
        """A tensor made up of runs of rows.

        Args:
            name: Its name.
            shape: Its sizes.
            moves: The first row of each run as it is stored, the first in the tensor, and how many there are.
        """
        row, rest = math.prod(shape[1:]), [0] * (len(shape) - 1)
        return TensorInfo(
            name,
            self.dtype,
            shape,
            [
                self.extent((count, *shape[1:]), skip=stored * row, at=(at, *rest))
                for stored, at, count in moves
                if count
            ],
        )


def _decoded_rows(
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]], rows: NDArray[np.uint8]
) -> NDArray[np.float32]:
    # Rows are whole blocks, so it is all one whether they are decoded or moved first; their codes are the smaller.
    groups, count, nbytes = rows.shape
    return decode(np.ascontiguousarray(rows).reshape(groups * count, nbytes)).reshape(groups, -1)
