"""Parameter memory: what is on the meta device is given real memory, keeping identity and attributes."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import ModelError
from weightloaders.weights.reading import enough_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

# Parameter memory is advised huge from this size on: first touch then costs a fault every 2 MiB instead of every 4 KiB.
_ADVISED_FROM = 4 << 20


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and of torch's own classes, so that its memory is what it seems to be."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that only looks like one tensor, and holds others."""
    disabled = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001 -- no public word for it
    return type(tensor).__torch_dispatch__ is not disabled


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether bytes may be written straight into the tensor's memory."""
    return (
        is_plain(tensor)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.numel() == 0 or tensor.data_ptr() != 0)
    )


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of its own storage; on a CPU, large pieces are advised huge before the first touch."""
    size = torch.Size(shape).numel()
    if device.type == "cpu" and size * dtype.itemsize >= _ADVISED_FROM:
        mapping = _private_mapping(size * dtype.itemsize)
        if mapping is not None:
            return torch.frombuffer(mapping, dtype=dtype, count=size).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def _private_mapping(nbytes: int) -> Any:
    """Anonymous private memory advised huge; None where the system has no such thing."""
    if sys.platform == "linux":
        # Some systems do without huge pages, and say so in one of these ways.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
            return mapping
    return None


def allocate(
    tensors: Mapping[str, torch.Tensor], device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> dict[int, torch.Tensor]:
    """Real, uninitialised memory for meta parameters and buffers. The model is not touched.

    Args:
        tensors: Name -> the meta parameter or buffer.
        device: Where the memory is to be.
        dtypes: Name -> dtype, where it differs from the meta tensor's.

    Returns:
        By the identity of the meta tensor, its twin. Views of one memory stay that.

    Raises:
        ModelError: If a tensor is of a kind that can't be made from nothing, or there is not enough memory.
    """
    distinct = {id(tensor): tensor for tensor in tensors.values()}
    sharers = Counter(_storage_of(tensor) for tensor in distinct.values() if not wraps_others(tensor))
    shared: dict[object, torch.Tensor] = {}
    twins: dict[int, torch.Tensor] = {}
    for name, old in tensors.items():
        if id(old) in twins:
            continue
        dtype = dtypes.get(name, old.dtype)
        # A parameter belongs to inference mode, or to autograd, as it did before; whoever loads does not matter.
        with torch.inference_mode(old.is_inference()), enough_memory(name, old.numel() * dtype.itemsize, ModelError):
            if wraps_others(old):
                new = _wrapper_twin(name, old, device, dtype)
            else:
                new = _twin(name, old, device, dtype, sharers, shared)
        # What a class made of its own, above all the tensors that it holds, is not overwritten.
        new.__dict__.update({**old.__dict__, **new.__dict__})
        twins[id(old)] = new
    return twins


def materialise(model: nn.Module, tensors: Mapping[str, torch.Tensor], twins: dict[int, torch.Tensor]) -> list[str]:
    """Put real memory into the place of meta parameters and buffers. Tied ones stay tied.

    Args:
        model: The model.
        tensors: Name -> the meta parameter or buffer.
        twins: What `allocate` made for them.

    Returns:
        Names whose objects had to be replaced; identity and attributes of all others were kept.
    """
    kept: dict[int, bool] = {}
    replaced: list[str] = []
    for name, old in tensors.items():
        new = twins[id(old)]
        if id(old) not in kept:
            kept[id(old)] = _swap(old, new)
        if not kept[id(old)]:
            _replace(model, name, new)
            replaced.append(name)
    return replaced


def _storage_of(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 -- meta storages have no address


def _twin(
    name: str,
    old: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    sharers: Counter[object],
    shared: dict[object, torch.Tensor],
) -> torch.Tensor:
    """A tensor like a meta tensor (its class, strides, and the memory it shares), with real memory."""
    if old.layout is not torch.strided:
        raise ModelError(f"{name} is a {old.layout} tensor on the meta device, and can't be given memory", tensor=name)
    if dtype == old.dtype and sharers[_storage_of(old)] > 1:
        count = old.untyped_storage().nbytes() // old.element_size()
        memory = shared.setdefault(_storage_of(old), empty((count,), dtype, device))
        strides, offset = old.stride(), int(old.storage_offset())
    else:
        memory = empty((old.numel(),), dtype, device)
        # As torch itself would lay it out: dense ones keep their strides (channels last, transposed), others don't.
        strides, offset = torch.empty_like(old).stride(), 0
    # `set_` rather than a view, so that it is a tensor in its own right.
    new = torch.empty(0, dtype=dtype, device=device).set_(memory.untyped_storage(), offset, old.shape, strides)
    if type(old) is torch.nn.Parameter:
        return torch.nn.Parameter(new, requires_grad=old.requires_grad)
    if isinstance(old, torch.nn.Parameter):
        # A subclass may need arguments that only its maker knows; its class and attributes are taken over instead.
        return torch.Tensor._make_subclass(type(old), new, old.requires_grad)  # noqa: SLF001 -- how Parameter is made
    return new if type(old) is torch.Tensor else new.as_subclass(type(old))


def _wrapper_twin(name: str, old: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The same for a class that holds other tensors: only it knows how to make one of its kind."""
    try:
        new = torch.empty_like(old, dtype=dtype, device=device)
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    except Exception as error:
        raise ModelError(
            f"{name} is a {type(old).__name__} on the meta device, which can't be given memory: {error}", tensor=name
        ) from error
    return new


def _swap(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Exchange what two tensor objects are, so that every reference to the old one now sees the new."""
    if type(old) is not type(new):
        return False
    hooks, after_hooks = old._backward_hooks, old._post_accumulate_grad_hooks  # noqa: SLF001 -- torch's own `swap` loses them
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Weak references (an optimizer, a hook) make a swap impossible.
        return False
    if hooks:
        old._backward_hooks = None  # noqa: SLF001 -- as above
        old._backward_hooks = hooks  # noqa: SLF001 -- as above
    if after_hooks:
        old._post_accumulate_grad_hooks = after_hooks  # noqa: SLF001 -- as above
    return True


def _replace(model: nn.Module, name: str, new: torch.Tensor) -> None:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if key in module._parameters:  # noqa: SLF001 -- assigning through setattr would refuse a buffer's or subclass's kind
        module._parameters[key] = new  # type: ignore[assignment]  # noqa: SLF001 -- as above
    else:
        module._buffers[key] = new  # noqa: SLF001 -- as above


def bump_versions(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that memory was written behind its back."""
    with torch.inference_mode(False):
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
