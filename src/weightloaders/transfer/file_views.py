"""Tensors that are views of a file's private mapping: nothing is read until it is used, and nothing is written back."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef

from weightloaders.errors import WeightLoadersError
from weightloaders.weights.info import contiguous_strides

if TYPE_CHECKING:
    from weightloaders.weights.source import FileSource

logger = logging.getLogger(__name__)

# By what tells storages apart. It is not given to another one as long as there is a reference, be it a weak one.
_views: dict[int, StorageWeakRef] = {}
# What has gone is forgotten whenever there are twice as many, from this number on.
_PRUNED_FROM = 1024
_prune_at = _PRUNED_FROM


def map_file(source: FileSource, nbytes: int) -> torch.Tensor | str:
    """The first bytes of a file, mapped copy on write; or why it can't be mapped, as a sentence, which is logged.

    No descriptor stays open, as it would with Python's own mapping, or with torch's where the system refuses.

    Raises:
        SourceReadError: If the file is not what it was when the source was made.
    """
    source.check_unchanged()
    try:
        return _mapped(source, nbytes)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, WeightLoadersError):
            raise
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        why = f"{source.name} can't be mapped and is read: {reason}"
        logger.warning("%s", why)
        return why


if sys.platform == "win32":

    def _mapped(source: FileSource, nbytes: int) -> torch.Tensor:
        storage: Any = torch.UntypedStorage.from_file(source.name, shared=False, nbytes=nbytes)
        # The name may lead to another file by now.
        source.check_unchanged()
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)

else:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    _libc.mmap.restype = ctypes.c_void_p
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _FAILED = ctypes.c_void_p(-1).value

    def _mapped(source: FileSource, nbytes: int) -> torch.Tensor:
        descriptor = source.open()
        try:
            source.check_same(os.fstat(descriptor))
            address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
        finally:
            os.close(descriptor)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        # Tensors keep `memory`; with it, the mapping goes. At the end of the process nothing needs to.
        weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)


@torch.inference_mode(False)
def view_of(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with a storage of its own, of just its size, that keeps the mapping alive.

    Args:
        memory: The mapped bytes.
        offset: Where it begins; a multiple of the dtype's size.
        dtype: Its dtype.
        shape: Its shape, in row-major order; not of no elements.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    storage = torch.utils.dlpack.from_dlpack(memory[offset : offset + nbytes]).untyped_storage()
    _remember(storage)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, contiguous_strides(shape))


def is_view_of_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory came from `view_of`."""
    return tensor.untyped_storage()._cdata in _views  # noqa: SLF001 -- the only name that a storage has


def _remember(storage: torch.UntypedStorage) -> None:
    global _prune_at
    _views[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # noqa: SLF001 -- as above
    if len(_views) > _prune_at:
        for key, reference in list(_views.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                _views.pop(key, None)
        _prune_at = max(_PRUNED_FROM, 2 * len(_views))
