"""`TensorInfo` and `Extent`: what is known of a tensor before any of its data is read."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from weightloaders.errors import CheckpointFormatError, LoaderContractError
from weightloaders.weights.source import ByteSource, FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ByteOrder = Literal["little", "big"]

# Far above any real tensor, far below what overflows a signed 64-bit address.
_MAX_BYTES = 1 << 60


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
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
    """

    source: ByteSource
    offset: int = 0
    length: int = -1
    dtype: torch.dtype | None = None
    byteorder: ByteOrder = "little"
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    at: tuple[int, ...] | None = None

    if TYPE_CHECKING:
        # A path is accepted and wrapped; a dataclass field can't say so by itself.
        def __init__(  # noqa: D107, PLR0913 -- the signature that users see; documented above
            self,
            source: ByteSource | str | Path,
            offset: int = 0,
            length: int = -1,
            dtype: torch.dtype | None = None,
            byteorder: ByteOrder = "little",
            shape: Sequence[int] | None = None,
            strides: Sequence[int] | None = None,
            at: Sequence[int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.source, str | Path):
            object.__setattr__(self, "source", FileSource(self.source))
        for field in ("shape", "strides", "at"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, tuple(operator.index(v) for v in value))

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
        return all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        )

    @property
    def is_native(self) -> bool:
        """Whether its bytes can be used as they lie: little-endian, or one byte an element."""
        return self.byteorder == "little" or self.stored_dtype.itemsize == 1


def _checked_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(size) for size in shape)
    except TypeError as error:
        raise LoaderContractError(f"the shape of tensor {name!r} is not a sequence of whole numbers: {shape!r}") from error
    if any(size < 0 for size in result):
        raise CheckpointFormatError(f"the shape of tensor {name!r} has a negative size: {list(result)}", tensor=name)
    return result


def _filled_in(extent: Extent, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Extent:
    """The extent with every default resolved, and every claim checked against the tensor and the source."""
    where = {"file": extent.source.name, "tensor": name}
    stored = extent.dtype or dtype
    box = shape if extent.shape is None else extent.shape
    at = (0,) * len(shape) if extent.at is None else extent.at
    strides = contiguous_strides(box) if extent.strides is None else extent.strides
    if extent.byteorder not in ("little", "big"):
        raise LoaderContractError(f"byteorder must be 'little' or 'big', not {extent.byteorder!r}", **where)
    if len(box) != len(shape) or len(at) != len(shape) or len(strides) != len(shape):
        raise LoaderContractError(f"an extent of {name!r} has another number of dimensions than its tensor", **where)
    if any(start < 0 or size < 0 or start + size > whole for start, size, whole in zip(at, box, shape, strict=True)):
        raise CheckpointFormatError(
            f"an extent of {name!r} fills {list(box)} from {list(at)}, outside the tensor's shape {list(shape)}", **where
        )
    if any(stride < 0 for stride in strides):
        raise CheckpointFormatError(f"an extent of {name!r} has negative strides {list(strides)}", **where)
    empty = 0 in box
    reach = 0 if empty else 1 + sum((size - 1) * stride for size, stride in zip(box, strides, strict=True))
    needed = reach * stored.itemsize
    length = needed if extent.length < 0 else extent.length
    contiguous = extent.strides is None or replace(extent, shape=box, strides=strides).is_contiguous
    if needed > length or (contiguous and needed != length):
        raise CheckpointFormatError(
            f"tensor {name!r} of shape {list(box)} in {stored} needs {needed} bytes, but its extent has {length}", **where
        )
    if extent.offset < 0 or extent.offset + length > extent.source.size:
        raise CheckpointFormatError(
            f"tensor {name!r} lies at bytes {extent.offset} to {extent.offset + length} of a source of "
            f"{extent.source.size} bytes",
            **where,
            hint="the file is truncated, or its header belongs to another file; fetch it again",
        )
    return replace(extent, length=length, dtype=stored, shape=box, strides=strides, at=at)


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """One tensor of a source: name, dtype, shape, and how to get at its values.

    Args:
        name: Its name in the source.
        dtype: The dtype that is handed out.
        shape: Its sizes; ``()`` for a scalar.
        extents: Where its bytes lie raw. Together they must fill the tensor.
        read: For a tensor without raw bytes (quantised, compressed): returns a tensor of that dtype and shape.

    Raises:
        CheckpointFormatError: If an extent does not fit the tensor or its source.
        LoaderContractError: If there is neither an extent nor ``read``, or a field is of the wrong type.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[Extent, ...] = ()
    read: Callable[[], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise LoaderContractError(f"a tensor's name must be a string, not {self.name!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise LoaderContractError(
                f"the dtype of tensor {self.name!r} must be a torch.dtype, not {self.dtype!r}", tensor=self.name
            )
        shape = _checked_shape(self.name, self.shape)
        if math.prod(shape) * self.dtype.itemsize > _MAX_BYTES:
            raise CheckpointFormatError(f"tensor {self.name!r} claims the absurd shape {list(shape)}", tensor=self.name)
        object.__setattr__(self, "shape", shape)
        extents = (self.extents,) if isinstance(self.extents, Extent) else tuple(self.extents)
        object.__setattr__(self, "extents", tuple(_filled_in(e, self.name, self.dtype, shape) for e in extents))
        if self.read is not None and not callable(self.read):
            raise LoaderContractError(f"`read` of tensor {self.name!r} is not callable", tensor=self.name)
        if not self.extents and self.read is None and self.numel:
            raise LoaderContractError(
                f"tensor {self.name!r} has neither extents nor `read`", tensor=self.name,
                hint="say where its bytes lie (`Extent`), or give a function that returns the tensor",
            )
        if self.extents and self.read is None:
            _check_cover(self)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, in the dtype that is handed out."""
        return self.numel * self.dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether its values are read from extents rather than by calling `read`."""
        return self.read is None

    @property
    def bytes_stored(self) -> int:
        """Bytes that reading it takes from its sources; `nbytes` where it has no extents."""
        return sum(extent.length for extent in self.extents) if self.is_raw else self.nbytes

    def renamed(self, name: str) -> TensorInfo:
        """The same tensor under another name."""
        return replace(self, name=name)


def _check_cover(info: TensorInfo) -> None:
    """Several extents must fill their tensor exactly once: boxes that don't overlap and add up to the whole."""
    if len(info.extents) == 1:
        boxes = [info.extents[0]]
    else:
        boxes = [extent for extent in info.extents if extent.shape is not None and 0 not in extent.shape]
        for i, a in enumerate(boxes):
            for b in boxes[i + 1 :]:
                if _boxes_meet(a, b):
                    raise CheckpointFormatError(
                        f"two extents of tensor {info.name!r} fill the same elements", file=b.source.name, tensor=info.name
                    )
    filled = sum(math.prod(extent.shape or ()) for extent in boxes)
    if filled != info.numel:
        raise CheckpointFormatError(
            f"the extents of tensor {info.name!r} fill {filled} of its {info.numel} elements",
            file=info.extents[0].source.name,
            tensor=info.name,
        )


def _boxes_meet(a: Extent, b: Extent) -> bool:
    if a.at is None or b.at is None or a.shape is None or b.shape is None:
        return False
    return all(
        x < y + m and y < x + n for x, n, y, m in zip(a.at, a.shape, b.at, b.shape, strict=True)
    )
