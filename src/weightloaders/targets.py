"""`Targets`: what a model wants filled: its parameters and buffers, and which of them are one and the same memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from weightloaders.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# Rotary frequencies and position numbers are computed; old checkpoints carry them, new models may not want them.
_DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|inv_freq|position_ids)$")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One parameter or buffer.

    Attributes:
        name: Its name in the model.
        tensor: The parameter or buffer itself.
        kind: ``"parameter"`` or ``"buffer"``.
        persistent: Whether it belongs into a checkpoint.
        dtype: The dtype it is to have.
    """

    name: str
    tensor: torch.Tensor
    kind: Literal["parameter", "buffer"]
    persistent: bool
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)


class Targets:
    """A model's parameters and persistent buffers by name, with their ties.

    Args:
        model: The model.
        dtypes: The dtype of parameters where it differs from what the model has now.

    Attributes:
        by_name: Every name that a checkpoint may fill.
        derived: Names of non-persistent buffers: neither wanted nor unexpected.
        canonical: Name -> the first name of the same memory (itself, where it is not tied).
        declared_ties: Tied by the model's own declaration: name -> the name it is tied to.

    Raises:
        ModelError: If the model has parameters whose shape is not known yet.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        declared_ties: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.by_name: dict[str, Target] = {}
        self.derived: set[str] = set()
        dtypes = dtypes or {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
                raise ModelError(
                    f"the parameter {name!r} has no shape yet", tensor=name,
                    hint="run one forward pass, so that lazy modules learn their shapes, and load then",
                )  # fmt: skip
            self.by_name[name] = Target(name, parameter, "parameter", True, dtypes.get(name, parameter.dtype))
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():  # noqa: SLF001 -- the only place that tells persistent ones apart
                if buffer is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if key in module._non_persistent_buffers_set:  # noqa: SLF001 -- as above
                    self.derived.add(name)
                else:
                    self.by_name[name] = Target(name, buffer, "buffer", True, dtypes.get(name, buffer.dtype))
        self.declared_ties = dict(declared_ties or {})
        self.canonical = self._canonical_names()

    def _canonical_names(self) -> dict[str, str]:
        first: dict[object, str] = {}
        return {name: first.setdefault(_region(target.tensor), name) for name, target in self.by_name.items()}

    def declared_partners(self) -> dict[str, set[str]]:
        """The names that the model declares tied to each other, seen from each."""
        partners: dict[str, set[str]] = {}
        for name, other in self.declared_ties.items():
            partners.setdefault(name, set()).add(other)
            partners.setdefault(other, set()).add(name)
        return partners

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        return {name: target.tensor for name, target in self.by_name.items()}

    def tied_to(self, name: str) -> list[str]:
        """The other names of the same memory."""
        return [other for other, first in self.canonical.items() if first == self.canonical[name] and other != name]

    def is_derived(self, name: str) -> bool:
        """Whether a tensor of this name is computed rather than learnt."""
        return name in self.derived or _DERIVED.search(name) is not None


def _region(tensor: torch.Tensor) -> object:
    """What two names share exactly when they are one tensor: the same view of the same memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    if tensor.layout is not torch.strided:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def memory_span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last address (exclusive) of a dense tensor's memory; None where that can't be said."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return None
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()
