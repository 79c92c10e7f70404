"""`TensorInfo` and `Extent`: what is known of a tensor before any of its data is read."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index as _index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightloaders.errors import CheckpointFormatError, LoaderContractError
from weightloaders.weights.boxes import Box, check_cover
from weightloaders.weights.source import ByteSource, FileSource
from weightloaders.weights.twins import twin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ByteOrder = Literal["little", "big"]

HOST_BYTEORDER: ByteOrder = sys.byteorder

# Far above any real tensor, far below what overflows a signed 64-bit address.
MAX_TENSOR_BYTES = 1 << 60

_set = object.__setattr__


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    return _row_major(tuple(shape))[0]


# Tensors are many, their shapes few.
@functools.lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The row-major strides of a shape, and where it begins: for all that have it the same objects."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    strides.reverse()
    return tuple(strides), (0,) * len(shape)


@dataclass(frozen=True, slots=True, init=False)
class Extent:
    """Where bytes of a tensor lie raw, and which box of the tensor they fill.

    The usual case is one extent for a whole tensor, and then ``Extent(source, offset)`` is enough: what is left out
    is taken from the `TensorInfo` that holds the extent.

    Args:
        source: A path, or a `ByteSource`.
        offset: First byte, counted from the start of the source.
        length: Bytes from the first to behind the last element. Default: what shape and dtype need.
        dtype: The dtype the bytes are stored in. Default: the tensor's own; where it differs, values are converted.
        byteorder: ``"little"`` or ``"big"``.
        shape: The box that the extent fills, in elements. Default: the tensor's shape.
        strides: Element steps within the source. Default: row-major.
        at: Where the box starts within the tensor. Default: at its origin.

    Raises:
        LoaderContractError: If a field is of the wrong type.
        SourceNotFoundError: If ``source`` is a path and there is no regular file.
    """

    source: ByteSource
    offset: int
    length: int
    dtype: torch.dtype | None
    byteorder: ByteOrder
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    at: tuple[int, ...] | None

    # Written out: catalogues of a hundred thousand tensors are made of these, so each field is set just once.
    def __init__(
        self,
        source: ByteSource | str | Path,
        offset: int = 0,
        length: int = -1,
        dtype: torch.dtype | None = None,
        byteorder: ByteOrder = "little",
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        at: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(source, ByteSource):
            if not isinstance(source, str | Path):
                raise LoaderContractError(
                    f"the source of an Extent is a path or a ByteSource, not a {type(source).__name__}"
                )
            source = FileSource(source)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise LoaderContractError(f"the dtype of an Extent is a torch.dtype, not {dtype!r}", file=source.name)
        if byteorder not in ("little", "big"):
            raise LoaderContractError(f"byteorder must be 'little' or 'big', not {byteorder!r}", file=source.name)
        try:
            _set(self, "offset", _index(offset))
            _set(self, "length", _index(length))
            _set(self, "shape", shape if shape is None else tuple(map(_index, shape)))
            _set(self, "strides", strides if strides is None else tuple(map(_index, strides)))
            _set(self, "at", at if at is None else tuple(map(_index, at)))
        except TypeError as error:
            raise LoaderContractError(
                f"offset, length, shape, strides and at of an Extent are whole numbers: {error}", file=source.name
            ) from error
        _set(self, "source", source)
        _set(self, "dtype", dtype)
        _set(self, "byteorder", byteorder)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the bytes; known once the extent belongs to a `TensorInfo`."""
        if self.dtype is None:
            raise LoaderContractError("an Extent has no dtype until it is part of a TensorInfo", file=self.source.name)
        return self.dtype

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the source one after the other, in row-major order."""
        if self.shape is None or self.strides is None:
            return True
        return _same_steps(self.shape, self.strides, contiguous_strides(self.shape))

    @property
    def is_native(self) -> bool:
        """Whether its bytes can be used as they lie, being in this machine's byte order or one byte an element."""
        return self.byteorder == HOST_BYTEORDER or self.stored_dtype.itemsize == 1


_ExtentTwin = twin_of(Extent)


def _resolved(
    source: ByteSource,
    offset: int,
    length: int,
    dtype: torch.dtype,
    byteorder: ByteOrder,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    at: tuple[int, ...],
) -> Extent:
    """An extent with all its fields, which are known to be right."""
    extent = _ExtentTwin()
    extent.source, extent.offset, extent.length = source, offset, length
    extent.dtype, extent.byteorder = dtype, byteorder
    extent.shape, extent.strides, extent.at = shape, strides, at
    extent.__class__ = Extent
    resolved: Extent = extent
    return resolved


def _filled_in(extent: Extent, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Extent:
    """The extent with every default resolved, and every claim checked against the tensor and the source."""
    stored = extent.dtype or dtype
    box = shape if extent.shape is None else extent.shape
    dense = contiguous_strides(box)
    strides = dense if extent.strides is None else extent.strides
    at = (0,) * len(shape) if extent.at is None else extent.at
    elements = math.prod(box)
    contiguous = True
    # Nearly every extent is a whole tensor in row-major order, and these need none of the checks of boxes and steps.
    if box is not shape or strides is not dense or extent.at is not None:
        _check_box(extent, name, box, at, strides, shape)
        contiguous = _same_steps(box, strides, dense)
        if elements and not contiguous:
            elements = 1 + sum((size - 1) * stride for size, stride in zip(box, strides, strict=True))
    needed = elements * stored.itemsize
    length = extent.length if extent.length >= 0 else needed
    if needed != length and (contiguous or needed > length):
        raise CheckpointFormatError(
            f"tensor {name!r} of shape {list(box)} in {stored} needs {needed} bytes, but its extent has {length}",
            file=extent.source.name,
            tensor=name,
        )
    size = extent.source.size
    # Where nothing is read, it does not matter where from: views of no elements may start anywhere.
    if extent.offset < 0 or (length and extent.offset + length > size):
        raise CheckpointFormatError(
            f"tensor {name!r} lies at bytes {extent.offset} to {extent.offset + length} of a source of {size} bytes",
            file=extent.source.name,
            tensor=name,
            hint="the file is truncated, or its header belongs to another file; fetch it again",
        )
    return _resolved(extent.source, extent.offset, length, stored, extent.byteorder, box, strides, at)


def _check_box(
    extent: Extent,
    name: str,
    box: tuple[int, ...],
    at: tuple[int, ...],
    strides: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    if not len(box) == len(at) == len(strides) == len(shape):
        raise LoaderContractError(
            f"an extent of {name!r} has another number of dimensions than its tensor",
            file=extent.source.name,
            tensor=name,
        )
    if any(start < 0 or size < 0 or start + size > whole for start, size, whole in zip(at, box, shape, strict=True)):
        raise CheckpointFormatError(
            f"an extent of {name!r} fills {list(box)} from {list(at)}, outside the tensor's shape {list(shape)}",
            file=extent.source.name,
            tensor=name,
        )
    if any(stride < 0 for stride in strides):
        raise CheckpointFormatError(
            f"an extent of {name!r} has negative strides {list(strides)}", file=extent.source.name, tensor=name
        )


def _as_extents(value: Any, name: str) -> tuple[Extent, ...]:
    extents = tuple(value) if isinstance(value, Iterable) else (value,)
    for extent in extents:
        if not isinstance(extent, Extent):
            raise LoaderContractError(
                f"the extents of tensor {name!r} are Extent objects, not {type(extent).__name__}", tensor=name
            )
    return extents


def _same_steps(shape: tuple[int, ...], strides: tuple[int, ...], dense: tuple[int, ...]) -> bool:
    # A stride along a dimension of one element is never stepped.
    return strides == dense or all(
        n == 1 or step == expected for n, step, expected in zip(shape, strides, dense, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False, init=False)
class TensorInfo:
    """One tensor of a source: name, dtype, shape, and how to get at its values.

    Args:
        name: Its name in the source.
        dtype: The dtype that is handed out.
        shape: Its sizes; ``()`` for a scalar.
        extents: Where its bytes lie raw. Together they must fill the tensor.
        read: For a tensor without raw bytes (quantised, compressed): returns a tensor of that dtype and shape.
        sources: What ``read`` reads, so that its files can be held against checksums.

    Raises:
        CheckpointFormatError: If an extent does not fit the tensor or its source.
        LoaderContractError: If there is neither an extent nor ``read``, or both, or a field is of the wrong type.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    read: Callable[[], torch.Tensor] | None
    sources: tuple[ByteSource, ...]

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        extents: Iterable[Extent] | Extent = (),
        read: Callable[[], torch.Tensor] | None = None,
        sources: Iterable[ByteSource] = (),
    ) -> None:
        if not isinstance(name, str):
            raise LoaderContractError(f"a tensor's name must be a string, not {name!r}")
        if not isinstance(dtype, torch.dtype):
            raise LoaderContractError(f"the dtype of tensor {name!r} must be a torch.dtype, not {dtype!r}", tensor=name)
        try:
            sizes = tuple(map(_index, shape))
        except TypeError as error:
            raise LoaderContractError(
                f"the shape of tensor {name!r} is not a sequence of whole numbers: {shape!r}", tensor=name
            ) from error
        _check_sizes(name, dtype, sizes)
        if read is not None and not callable(read):
            raise LoaderContractError(f"`read` of tensor {name!r} is not callable", tensor=name)
        _set(self, "name", name)
        _set(self, "dtype", dtype)
        _set(self, "shape", sizes)
        _set(self, "read", read)
        _set(self, "sources", tuple(sources))
        pieces = (extents,) if isinstance(extents, Extent) else _as_extents(extents, name)
        _set(self, "extents", tuple([_filled_in(extent, name, dtype, sizes) for extent in pieces]))
        if read is None:
            _check_cover(self)
        elif pieces:
            raise LoaderContractError(
                f"tensor {name!r} has both extents and `read`",
                tensor=name,
                hint="give extents where its bytes lie raw, and else a function that returns the tensor",
            )

    @classmethod
    def of_one_run(
        cls, name: str, dtype: torch.dtype, shape: tuple[int, ...], source: ByteSource, offset: int, length: int
    ) -> TensorInfo:
        """A tensor whose bytes lie in one run, row-major, little-endian and in its own dtype.

        For readers of formats that have checked all of that, of every tensor that a header has: it is taken as given.
        """
        strides, origin = _row_major(shape)
        twin = _TensorInfoTwin()
        twin.name, twin.dtype, twin.shape, twin.read, twin.sources = name, dtype, shape, None, ()
        twin.extents = (_resolved(source, offset, length, dtype, "little", shape, strides, origin),)
        twin.__class__ = cls
        info: TensorInfo = twin
        return info

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, in the dtype that is handed out."""
        return self.numel * self.dtype.itemsize

    @property
    def origins(self) -> tuple[ByteSource, ...]:
        """What reading it really reads, each once; empty where that is not known."""
        sources = (*(extent.source for extent in self.extents if extent.length), *self.sources)
        return tuple({source.origin.name: source.origin for source in sources}.values())

    @property
    def is_raw(self) -> bool:
        """Whether its values are read from extents rather than by calling ``read``."""
        return self.read is None

    @property
    def bytes_stored(self) -> int:
        """Bytes that reading it takes from its sources; `nbytes` where it has no extents."""
        return sum(extent.length for extent in self.extents) if self.is_raw else self.nbytes

    def renamed(self, name: str) -> TensorInfo:
        """The same tensor under another name."""
        return replace(self, name=name)


_TensorInfoTwin = twin_of(TensorInfo)


def _check_sizes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    nbytes = math.prod(shape) * dtype.itemsize
    if shape and min(shape) <= 0:
        if min(shape) < 0:
            raise CheckpointFormatError(f"the shape of tensor {name!r} has a negative size: {list(shape)}", tensor=name)
        # An empty tensor has strides too, which must not overflow.
        nbytes = math.prod(size or 1 for size in shape) * dtype.itemsize
    if nbytes > MAX_TENSOR_BYTES:
        raise CheckpointFormatError(f"tensor {name!r} claims the absurd shape {list(shape)}", tensor=name)


def _check_cover(info: TensorInfo) -> None:
    """The extents must fill their tensor exactly once: boxes that don't overlap and add up to the whole."""
    extents = info.extents
    if len(extents) == 1 and extents[0].shape == info.shape:
        return
    if not extents and info.numel:
        raise LoaderContractError(
            f"tensor {info.name!r} has neither extents nor `read`",
            tensor=info.name,
            hint="say where its bytes lie (`Extent`), or give a function that returns the tensor",
        )
    check_cover(info.name, info.shape, [Box(e.at or (), e.shape or (), e.source.name) for e in extents])
