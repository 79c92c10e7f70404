"""Tensors that are views of a file's private mapping: nothing is read until it is used, and nothing is written back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef

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

    No descriptor stays open, as it would with Python's own mapping.

    Raises:
        SourceReadError: If the file is not what it was when the source was made.
    """
    source.check_unchanged()
    try:
        storage: Any = torch.UntypedStorage.from_file(source.name, shared=False, nbytes=nbytes)
    except (RuntimeError, ValueError) as error:  # a ValueError: a name that torch can't say
        why = f"{source.name} can't be mapped and is read: {str(error).splitlines()[0]}"
        logger.warning("%s", why)
        return why
    # The name may lead to another file by now.
    source.check_unchanged()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


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
