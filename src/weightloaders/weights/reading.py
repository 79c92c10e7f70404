"""Reading one tensor of a catalogue into memory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoaderContractError, SourceReadError, WeightLoadersError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightloaders.weights.info import Extent, TensorInfo

_ALL_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
# How torch's allocators say it; the error is a bare RuntimeError.
_NO_MEMORY = re.compile("allocate memory|not enough memory|out of memory", re.IGNORECASE)
# A piece that stays in the processor's cache meanwhile.
_SWAPPED_AT_ONCE = 256 << 10
_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def enough_memory(
    tensor: str, nbytes: int, error: type[WeightLoadersError] = SourceReadError, file: object | None = None
) -> Iterator[None]:
    """Turn a lack of memory within the block into an error that names the tensor.

    Args:
        tensor: The tensor that memory is needed for.
        nbytes: Its size.
        error: What is raised.
        file: The file that it comes from or goes to.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as lack:
        if isinstance(lack, WeightLoadersError) or not lacks_memory(lack):
            raise
        raise error(
            f"there is not enough memory for tensor {tensor!r}, which takes {nbytes:,} bytes", file=file, tensor=tensor
        ) from lack


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception, torch's own among them, says that there is no memory to be had."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as a writable view; valid as long as the tensor lives.

    Raises:
        LoaderContractError: If the tensor has no memory of that kind.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    # Reading through a pointer that is none ends the process, so this is checked here for everybody.
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.data_ptr():
        raise LoaderContractError(
            f"a tensor on {tensor.device} with strides {tensor.stride()} has no dense memory here"
        )
    return memory_at(tensor.data_ptr(), nbytes)


def memory_at(address: int, nbytes: int) -> memoryview:
    """This many bytes from an address on. Whoever asks has to know that they are there, and stay."""
    # Slicing one view of all there is takes a tenth of the time of making a type for each length.
    return _ALL_MEMORY[address : address + nbytes]


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor, in memory that only the caller holds (for a tensor with `read`: what that returned).

    Raises:
        SourceReadError: If its bytes can't be read, or there is no memory for them.
        LoaderContractError: If ``read`` returned something else than the catalogue says.
    """
    if info.read is not None:
        return checked_read(info)
    with enough_memory(info.name, info.nbytes, file=info.extents[0].source.name if info.extents else None):
        if len(info.extents) == 1:
            return read_extent(info.extents[0]).to(info.dtype)
        result = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        for extent in info.extents:
            box_of(result, extent).copy_(read_extent(extent))
        return result


def checked_read(info: TensorInfo) -> torch.Tensor:
    """Call ``info.read`` and hold what it returned against what the catalogue says; a sparse tensor is made dense.

    Raises:
        LoaderContractError: If it is something else, or has no values.
        SourceReadError: If there is no memory for it.
    """
    if info.read is None:
        raise LoaderContractError(f"tensor {info.name!r} has no `read`", tensor=info.name)
    with enough_memory(info.name, info.nbytes):
        tensor = info.read()
        if not isinstance(tensor, torch.Tensor):
            raise LoaderContractError(
                f"`read` of tensor {info.name!r} returned a {type(tensor).__name__}, not a tensor", tensor=info.name
            )
        problem = no_plain_values(tensor)
        if problem is not None:
            raise LoaderContractError(
                f"`read` of tensor {info.name!r} returned a tensor that {problem}", tensor=info.name
            )
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise LoaderContractError(
                f"`read` of tensor {info.name!r} returned {list(tensor.shape)} {tensor.dtype}, "
                f"but the catalogue says {list(info.shape)} {info.dtype}",
                tensor=info.name,
            )
        return tensor if tensor.layout is torch.strided else tensor.detach().to_dense()


def no_plain_values(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being one box of values, as a predicate; None if nothing does."""
    if torch.nn.parameter.is_lazy(tensor):
        return "waits for its shape, and so has no values"
    if tensor.is_nested:
        return "is nested: several tensors of different shapes in one"
    if tensor.is_meta:
        return "is on the meta device, and so has no values"
    return None


def box_of(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    """The part of a tensor that an extent fills."""
    for dim, (start, size) in enumerate(zip(extent.at or (), extent.shape or (), strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def read_extent(extent: Extent) -> torch.Tensor:
    """The elements of one extent, in the dtype and shape that they are stored in, native byte order, dense."""
    shape, strides = extent.shape or (), extent.strides or ()
    dtype = extent.stored_dtype
    if extent.is_contiguous or 0 in shape:
        flat = torch.empty(shape, dtype=dtype, device="cpu")
        if not flat.numel():
            return flat
        extent.source.read_into(memory_of(flat), extent.offset)
        return native_order(flat, extent)
    span = torch.empty(extent.length // dtype.itemsize, dtype=dtype, device="cpu")
    extent.source.read_into(memory_of(span)[: span.numel() * dtype.itemsize], extent.offset)
    return native_order(span, extent).as_strided(shape, strides).contiguous()


def native_order(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    """The same values in this machine's byte order; a dense tensor, swapped in place where it was not."""
    if not extent.is_native:
        swap_bytes(tensor)
    return tensor


def swap_bytes(tensor: torch.Tensor) -> None:
    """Reverse the bytes of each number of a dense tensor, in place, and in bounded memory."""
    # A complex number is two reals, each with its own byte order.
    width = tensor.element_size() // (2 if tensor.dtype.is_complex else 1)
    if not tensor.numel() or width == 1:
        return
    spare = torch.empty(min(tensor.nbytes, _SWAPPED_AT_ONCE), dtype=torch.uint8, device=tensor.device)
    for piece in tensor.detach().view(-1).view(torch.uint8).split(_SWAPPED_AT_ONCE):  # type: ignore[no-untyped-call]
        for size, numbers in _WHOLE_NUMBERS.items():
            if size <= width:
                _swap_halves(piece.view(numbers), spare[: len(piece)].view(numbers))


def _swap_halves(numbers: torch.Tensor, spare: torch.Tensor) -> None:
    bits = numbers.element_size() * 4
    # Shifting to the right copies the sign into the upper half.
    torch.bitwise_right_shift(numbers, bits, out=spare).bitwise_and_((1 << bits) - 1)
    numbers.bitwise_left_shift_(bits).bitwise_or_(spare)


def same_values(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors hold the same values, bit for bit, compared in bounded memory."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.extents and a.extents == b.extents:
        return True
    if a.read is None and b.read is None and len(a.extents) == len(b.extents) == 1:
        one, other = a.extents[0], b.extents[0]
        if (one.stored_dtype, one.byteorder) == (other.stored_dtype, other.byteorder) and (
            one.is_contiguous and other.is_contiguous
        ):
            return _same_bytes(one, other)
    first, second = read_tensor(a).contiguous(), read_tensor(b).contiguous()
    return memory_of(first) == memory_of(second)


def _same_bytes(a: Extent, b: Extent) -> bool:
    chunk = 1 << 22
    return all(
        a.source.read(a.offset + at, min(chunk, a.length - at))
        == b.source.read(b.offset + at, min(chunk, a.length - at))
        for at in range(0, a.length, chunk)
    )
