"""Parameter memory: what is on the meta device is given real memory, keeping identity and attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

# Parameter memory is advised huge from this size on: first touch then costs a fault every 2 MiB instead of every 4 KiB.
_HUGE_PAGE = 2 << 20


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether bytes may be written straight into the tensor's memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.numel() == 0 or tensor.data_ptr() != 0)
    )


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of its own storage; on a CPU, large pieces are advised huge before the first touch."""
    size = torch.Size(shape).numel()
    if device.type != "cpu" or size * dtype.itemsize < 2 * _HUGE_PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    mapping = _private_mapping(size * dtype.itemsize)
    if mapping is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mapping, dtype=dtype, count=size).view(shape)


def _private_mapping(nbytes: int) -> Any:
    """Anonymous private memory advised huge; None where the system has no such thing."""
    import mmap

    if not hasattr(mmap, "MADV_HUGEPAGE") or not hasattr(mmap, "MAP_PRIVATE"):
        return None
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError):
        return None
    return mapping


def materialise(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
) -> list[str]:
    """Give meta parameters and buffers real, uninitialised memory. Tied ones stay tied.

    Args:
        model: The model.
        tensors: Name -> the meta parameter or buffer.
        device: Where the memory is to be.
        dtypes: Name -> dtype, where it differs from the meta tensor's.

    Returns:
        Names whose objects had to be replaced; identity and attributes of all others were kept.

    Raises:
        ModelError: If a tensor is of a kind that can't be made from nothing.
    """
    replaced: list[str] = []
    made: dict[int, torch.Tensor] = {}
    swapped: set[int] = set()
    for name, old in tensors.items():
        if id(old) in swapped or old.device.type != "meta":
            continue
        new = made.get(id(old))
        if new is None:
            new = made[id(old)] = _real_twin(name, old, device, dtypes.get(name, old.dtype))
            if _swap(old, new):
                swapped.add(id(old))
                continue
        _replace(model, name, new)
        replaced.append(name)
    return replaced


def _real_twin(name: str, old: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if old.layout is not torch.strided:
        raise ModelError(
            f"{name} is a {old.layout} tensor on the meta device, which can't be materialised", tensor=name
        )
    new: torch.Tensor = empty(tuple(old.shape), dtype, device)
    if isinstance(old, torch.nn.Parameter):
        if type(old) is not torch.nn.Parameter:
            # A subclass may need arguments that only its maker knows; its own class and attributes are taken over.
            twin = torch.Tensor._make_subclass(type(old), new, old.requires_grad)  # noqa: SLF001 -- how Parameter is made
            twin.__dict__.update(old.__dict__)
            return twin
        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _swap(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Exchange what two tensor objects are, so that every reference to the old one now sees the new."""
    if type(old) is not type(new):
        return False
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        # Weak references (an optimizer, a hook) make a swap impossible.
        return False
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
