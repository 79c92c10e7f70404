"""A transformers model over several devices: which part goes where, and what moves data from one to the next.

What transformers itself calls for a ``device_map`` is called here (`transformers.integrations.accelerate`; verified
with 5.24).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from weightloaders.errors import MissingDependencyError, ModelError, summary
from weightloaders.transfer.device_map import DeviceMap

if TYPE_CHECKING:
    import torch
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
        device_map={name: _as_accelerate_says(where) for name, where in device_map.entries.items()},
        skip_keys=getattr(model, "_skip_keys_device_placement", None),
    )


def _as_accelerate_says(where: torch.device) -> str | int:
    """It compares with ``"cpu"``, and takes a number for a device of the kind that there is."""
    return "cpu" if where.type == "cpu" else where.index or 0
