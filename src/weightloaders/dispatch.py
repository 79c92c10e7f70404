"""A transformers model over several devices: which part goes where, and what moves data from one to the next.

What transformers itself calls for a ``device_map`` is called here (`transformers.integrations.accelerate`; verified
with 5.24).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import MissingDependencyError, ModelError, summary
from weightloaders.transfer.device_map import DeviceMap

if TYPE_CHECKING:
    from torch import nn


def check_accelerate(purpose: str) -> None:
    """Refuse to go on without accelerate.

    Raises:
        MissingDependencyError: If it is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise MissingDependencyError(
            f"{purpose} needs accelerate, which is not installed",
            hint="pip install accelerate; or name one device for the whole model: device='cuda:0'",
        )


def inferred_map(model: nn.Module, strategy: str, quantizer: Any = None) -> DeviceMap:
    """The map that transformers finds for a model by the memory that the devices have.

    Args:
        model: The model, on meta.
        strategy: One of `weightloaders.transfer.device_map.STRATEGIES`.
        quantizer: transformers' quantizer, where the model is quantised.

    Raises:
        ModelError: If transformers can't find one, or the model does not fit into memory.
    """
    said = f"device_map={strategy!r}"
    try:
        # It honours what a model must not be split at, ties, and a quantizer; accelerate's own knows none of them here.
        from transformers.integrations.accelerate import _get_device_map

        found = _get_device_map(model, strategy, None, quantizer)
    except Exception as error:
        raise ModelError(
            f"{said}: no map can be found: {summary(error)}", hint="give a dict of module names to devices"
        ) from error
    on_disk = sorted(name for name, device in found.items() if device == "disk")
    if on_disk:
        raise ModelError(
            f"{said}: the model does not fit into memory; {on_disk[0] or 'all of it'} would have to stay on disk",
            hint="load it with transformers' own from_pretrained(offload_folder=...), or in a smaller dtype",
        )
    return DeviceMap.of(found)


def dispatch(model: Any, device_map: DeviceMap) -> None:
    """Let a model that lies on several devices move what flows from one to the next, as transformers does.

    Parts on the CPU are moved to a device whenever they are needed, if others are on one. ``model.hf_device_map`` says
    what is where, in transformers' terms.
    """
    from accelerate import dispatch_model

    dispatch_model(
        model,
        device_map={name: _as_accelerate_says(where) for name, where in _apart(model, device_map).items()},
        skip_keys=getattr(model, "_skip_keys_device_placement", None),
    )


def input_device(model: Any) -> torch.device:
    """Where a transformers model takes its inputs."""
    device: torch.device = model.device
    # What accelerate keeps on the CPU until it is needed lies on meta, and the model's first parameter may be of that.
    hook = getattr(model, "_hf_hook", None)
    return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device


def _apart(model: nn.Module, device_map: DeviceMap) -> dict[str, torch.device]:
    """The same map without entries that lie within each other: hooks are only put where there is an entry.

    With ``{"": 0, "layers.1": 1}`` nobody would move what flows from the second layer to the third back to device 0.
    """
    split = {name[:at] for name in device_map.entries for at, letter in enumerate(name) if letter == "."}
    split |= {""} if device_map.entries.keys() != {""} else set()
    found: dict[str, torch.device] = {}

    def add(module: nn.Module, name: str) -> None:
        if name not in split:
            found[name] = device_map.device_of(name)
            return
        within = f"{name}." if name else ""
        for key, child in module.named_children():
            if next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
                add(child, within + key)
        for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[within + key] = device_map.device_of(within + key)

    add(model, "")
    return found


def _as_accelerate_says(where: torch.device) -> str | int:
    """It compares with ``"cpu"``, and takes a number for a device of the kind that there is."""
    return "cpu" if where.type == "cpu" else where.index or 0
