"""A load that changes nothing until all of it is there: into a copy of the model, whose values are then taken over.

It takes the model's memory once more. Whoever holds the model or a parameter keeps it, and sees the new values.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import LoadError, ModelError, summary
from weightloaders.loading.nesting import alone
from weightloaders.loading.status import load_origin, marking
from weightloaders.targets import check_is_module, held_by
from weightloaders.transfer.memory import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from weightloaders.report import LoadReport

_WITHOUT = "leave out atomic: the model is then filled in place, and a load that fails on the way marks it"


def load_aside(model: nn.Module, load: Callable[[nn.Module], LoadReport]) -> LoadReport:
    """Load into a copy, then take its values over.

    Args:
        model: The model. As long as the load runs, and if it fails, it is as it was.
        load: Fills a model.

    Raises:
        ModelError: If the model can't be copied, or is on meta and has no values to keep.
        LoadError: If the load leaves a model that holds other tensors than before.
        WeightLoadersError: As the load itself does.
    """
    check_is_module(model)
    with alone(model):
        copied = _copied(model)
        report = load(copied)
        old, new = held_by(model).everything, held_by(copied).everything
        _check_alike(old, new)
        with marking(model) as mark:
            # Memory to memory: what could still go wrong is Ctrl-C.
            mark.touched = True
            mark.written = report.loaded
            for name in {id(tensor): name for name, tensor in old.items()}.values():
                _take_over(old[name], new[name])
            mark.origin = load_origin(copied)
        report.extra_memory += sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in new.values()}.values())
        return report


def _take_over(old: torch.Tensor, new: torch.Tensor) -> None:
    with torch.inference_mode(old.is_inference()), torch.no_grad():
        old.copy_(new)


def _check_alike(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    odd = [name for name in old.keys() | new.keys() if _form(old.get(name)) != _form(new.get(name))]
    if odd:
        name = min(odd)
        raise LoadError(
            f"{name} is not what it was after the load, so its values can't be taken over; nothing was changed",
            tensor=name,
            hint=_WITHOUT,
        )


def _form(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _copied(model: nn.Module) -> nn.Module:
    """The same model with memory of its own."""
    tensors = held_by(model).everything
    meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if meta is not None:
        raise ModelError(
            f"{meta} is on the meta device, so there are no values to keep with atomic=True", hint=_WITHOUT
        )
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    try:
        for tensor in tensors.values():
            if id(tensor) not in memo and is_plain(tensor):
                memo[id(tensor)] = _twin(tensor, storages)
        # torch's own copy of a parameter leaves out what was put on it, such as its `weight_loader`.
        for tensor in tensors.values():
            if id(tensor) in memo:
                memo[id(tensor)].__dict__.update(copy.deepcopy(tensor.__dict__, memo))
        return copy.deepcopy(model, memo)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"the model can't be copied, as atomic=True needs: {summary(error)}", hint=_WITHOUT) from error


@torch.inference_mode(False)
def _twin(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """The same view of a copy of the same memory, so that what is shared stays shared."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in storages:
        storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
    own = storages[storage.data_ptr()]
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        own, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(view, requires_grad=tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)
