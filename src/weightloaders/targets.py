"""`Targets`: what a model wants filled: its parameters and buffers, and which of them are one and the same memory."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from weightloaders.errors import ModelError
from weightloaders.mapping.placement import may_overlap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# Rotary frequencies and position numbers are computed; old checkpoints carry them, new models may not want them.
_DERIVED = re.compile(r"(^|\.)(inv_freq|position_ids|rotary_emb\.(cos|sin)_cached)$")


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
        declared_ties: Tied by the model's own declaration: name -> the name it is tied to.

    Attributes:
        model: The model.
        by_name: Every name that a checkpoint may fill.
        derived: Non-persistent buffers by name: neither wanted nor unexpected.
        canonical: Name -> the first name of the same memory (itself, where it is not tied).
        declared_ties: See above.

    Raises:
        ModelError: If the model has parameters whose shape is not known yet, or that can't be filled as they are.
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
        self.derived: dict[str, torch.Tensor] = {}
        dtypes = dtypes or {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            _check_can_be_filled(name, parameter)
            self.by_name[name] = Target(name, parameter, "parameter", True, dtypes.get(name, parameter.dtype))
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():  # noqa: SLF001 -- the only place that tells persistent ones apart
                if buffer is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if key in module._non_persistent_buffers_set:  # noqa: SLF001 -- as above
                    self.derived[name] = buffer
                else:
                    _check_can_be_filled(name, buffer)
                    self.by_name[name] = Target(name, buffer, "buffer", True, dtypes.get(name, buffer.dtype))
        self.declared_ties = dict(declared_ties or {})
        self.canonical = self._canonical_names()

    def _canonical_names(self) -> dict[str, str]:
        first: dict[object, str] = {}
        return {name: first.setdefault(_identity(target.tensor), name) for name, target in self.by_name.items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        return {name: target.tensor for name, target in self.by_name.items()}

    def declared_partners(self) -> dict[str, set[str]]:
        """The names that the model declares tied to each other, at once or by way of others, seen from each."""
        groups: dict[str, set[str]] = {}
        for name, other in self.declared_ties.items():
            joined = groups.get(name, {name}) | groups.get(other, {other})
            for member in joined:
                groups[member] = joined
        return {name: group - {name} for name, group in groups.items()}

    def ties(self) -> dict[str, str]:
        """Name -> the first of the names that are, or are declared to be, one with it; those that stand alone left out.

        A model on meta declares what a model with memory shares: for both it is the same.
        """
        partners = self.declared_partners()
        position = {name: at for at, name in enumerate(self.by_name)}
        result = {}
        for name in self.by_name:
            declared = {name, *partners.get(name, ())} & position.keys()
            tied = {twin for partner in declared for twin in (partner, *self.tied_to(partner))}
            if len(tied) > 1:
                result[name] = min(tied, key=position.__getitem__)
        return result

    def tied_to(self, name: str) -> list[str]:
        """The other names of the same memory."""
        return [other for other in self._by_canonical[self.canonical[name]] if other != name]

    @functools.cached_property
    def _by_canonical(self) -> dict[str, list[str]]:
        names = defaultdict(list)
        for name, canonical in self.canonical.items():
            names[canonical].append(name)
        return names

    def is_derived(self, name: str) -> bool:
        """Whether a tensor of this name is computed rather than learnt.

        A parameter is learnt, whatever it is called.
        """
        if name in self.derived:
            return True
        target = self.by_name.get(name)
        return (target is None or target.kind == "buffer") and _DERIVED.search(name) is not None


def check_is_module(model: object) -> None:
    """Refuse what is no model.

    Raises:
        ModelError: If it is none.
    """
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        hint = f"make one first: {model.__name__}(...)" if isinstance(model, type) else None
        raise ModelError(f"an nn.Module is expected, not {what}", hint=hint)


def _check_can_be_filled(name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise ModelError(
            f"{name!r} has no shape yet",
            tensor=name,
            hint="run one forward pass, so that lazy modules learn their shapes, and load then",
        )
    if tensor.is_nested or (type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is not torch.strided):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ModelError(
            f"{name!r} is a {kind} tensor, and weights are loaded into dense ones",
            tensor=name,
            hint="make it dense, load, and convert it then",
        )
    if _has_memory(tensor) and may_overlap(tensor.shape, tensor.stride()):
        raise ModelError(
            f"{name!r} of shape {list(tensor.shape)} and strides {list(tensor.stride())} has several elements in one "
            "place in memory, so not all of them can be filled",
            tensor=name,
            hint="give it memory of its own: .contiguous() or .clone()",
        )


def _identity(tensor: torch.Tensor) -> object:
    """What two names share exactly when they are one tensor: the same view of the same memory."""
    if not _has_memory(tensor):
        return id(tensor)
    bits = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, bits)


def _has_memory(tensor: torch.Tensor) -> bool:
    # What is asked first is what is cheapest: models on meta have a hundred thousand parameters.
    return (
        not tensor.is_meta
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
    )


class Span(NamedTuple):
    """The memory that a tensor lies in.

    Attributes:
        device: Where.
        start: The first address.
        end: The address behind the last.
        dense: Whether all that lies between belongs to the tensor.
    """

    device: str
    start: int
    end: int
    dense: bool


def memory_span(tensor: torch.Tensor) -> Span | None:
    """The memory that a tensor lies in; None where that can't be said."""
    if not _has_memory(tensor):
        return None
    start = tensor.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + elements * tensor.element_size()
    return Span(str(tensor.device), start, end, elements == tensor.numel())
