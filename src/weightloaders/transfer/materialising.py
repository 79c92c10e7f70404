"""What is on the meta device is given real memory, keeping identity and attributes.

It is memory as torch itself gives it, one allocation for each parameter, so that whatever is done to a parameter's
storage (resizing, sharing, saving, freeing) works as it does for any other. `memory.advise` makes it fast to fill.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import ModelError
from weightloaders.transfer.devices import enough_memory_on
from weightloaders.transfer.memory import is_plain, wraps_others

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import nn

_SWAP_IMPL: Callable[[torch.Tensor, torch.Tensor], object] | None = getattr(torch._C, "_swap_tensor_impl", None)  # noqa: SLF001 -- what `torch.utils.swap_tensors` calls; where it is not, that is called


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
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    sharers: Counter[object] = Counter()
    # A parameter belongs to inference mode, or to autograd, as it did before; whoever loads does not matter.
    by_mode: dict[bool, list[tuple[str, torch.Tensor]]] = {False: [], True: []}
    for name in names.values():
        tensor = tensors[name]
        by_mode[tensor.is_inference()].append((name, tensor))
        if not wraps_others(tensor):
            sharers[_storage_of(tensor)] += 1
    twins: dict[int, torch.Tensor] = {}
    maker = _Maker(device, {storage for storage, count in sharers.items() if count > 1})
    for inference, named in by_mode.items():
        with torch.inference_mode(inference):
            for name, old in named:
                dtype = dtypes.get(name, old.dtype)
                try:
                    twins[id(old)] = maker.twin(name, old, dtype)
                except (MemoryError, RuntimeError):
                    # Entered for each tensor, this would take as long as the small ones themselves.
                    what = f"tensor {name!r}, which takes {old.numel() * dtype.itemsize:,} bytes"
                    with enough_memory_on(device, what, ModelError, name):
                        raise
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


class _Maker:
    """Makes twins of meta tensors on a device.

    Args:
        device: Where.
        shared: The storages of which several of the tensors are views.
    """

    def __init__(self, device: torch.device, shared: Collection[object]) -> None:
        self._device, self._shared = device, shared
        # What was made for these storages so far.
        self._made: dict[object, torch.Tensor] = {}

    def twin(self, name: str, old: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor like a meta tensor (its class, strides, attributes, and the memory it shares), with real memory."""
        if wraps_others(old):
            new = self._wrapper(name, old, dtype)
        else:
            new = self._memory_for(name, old, dtype)
            if isinstance(old, torch.nn.Parameter):
                # A subclass may need arguments that only its maker knows; its class and attributes are taken over
                # instead.
                new = torch.Tensor._make_subclass(type(old), new, old.requires_grad)  # noqa: SLF001 -- how Parameter is made
            elif type(old) is not torch.Tensor:
                new = new.as_subclass(type(old))
        if old.__dict__:
            # What a class made of its own, above all the tensors that it holds, is not overwritten.
            new.__dict__.update({**old.__dict__, **new.__dict__})
        return new

    def _memory_for(self, name: str, old: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        device = self._device
        if old.layout is not torch.strided:
            raise ModelError(
                f"{name} is a {old.layout} tensor on the meta device, and can't be given memory", tensor=name
            )
        if self._shared and dtype == old.dtype and (storage := _storage_of(old)) in self._shared:
            if storage not in self._made:
                count = old.untyped_storage().nbytes() // old.element_size()
                self._made[storage] = torch.empty(count, dtype=dtype, device=device)
            # `set_` rather than a view, so that it is a tensor in its own right.
            new = torch.empty(0, dtype=dtype, device=device)
            return new.set_(self._made[storage].untyped_storage(), int(old.storage_offset()), old.shape, old.stride())
        if old.is_contiguous():
            return torch.empty(old.shape, dtype=dtype, device=device)
        # As torch itself would lay it out: dense ones keep their strides (channels last, transposed), others don't.
        return torch.empty_strided(old.shape, torch.empty_like(old).stride(), dtype=dtype, device=device)

    def _wrapper(self, name: str, old: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same for a class that holds other tensors: only it knows how to make one of its kind."""
        try:
            new = torch.empty_like(old, dtype=dtype, device=self._device)
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        except Exception as error:
            raise ModelError(
                f"{name} is a {type(old).__name__} on the meta device, which can't be given memory: {error}",
                tensor=name,
            ) from error
        return new


def _swap(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Exchange what two tensor objects are, so that every reference to the old one now sees the new."""
    if type(old) is not type(new):
        return False
    hooks, after_hooks = old._backward_hooks, old._post_accumulate_grad_hooks  # noqa: SLF001 -- torch's own `swap` loses them
    if (
        _SWAP_IMPL is not None
        and is_plain(old)
        and not (hooks or after_hooks or weakref.getweakrefs(old))
        and old._use_count() == 1  # type: ignore[attr-defined]  # noqa: SLF001 -- as torch's own `swap` asks
    ):
        # What that comes to for these, in a third of its time; attributes stay where they are.
        _SWAP_IMPL(old, new)
        return True
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
