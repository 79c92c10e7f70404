"""`Targets`: what a model wants filled: its parameters and buffers, and which of them are one and the same memory."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from weightloaders.errors import ModelError
from weightloaders.mapping.placement import may_overlap
from weightloaders.weights.twins import twin_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

# Rotary frequencies and position numbers are computed; old checkpoints carry them, new models may not want them.
_DERIVED = re.compile(r"(^|\.)(inv_freq|position_ids|rotary_emb\.(cos|sin)_cached)$")


Kind = Literal["parameter", "buffer"]
# torch's own classes: of all others nobody knows what their memory looks like.
_OWN = (torch.nn.Parameter, torch.Tensor)


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
    kind: Kind
    persistent: bool
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)


_TargetTwin = twin_of(Target)


def _target(name: str, tensor: torch.Tensor, kind: Kind) -> Target:
    twin = _TargetTwin()
    twin.name, twin.tensor, twin.kind, twin.persistent, twin.dtype = name, tensor, kind, True, tensor.dtype
    twin.__class__ = Target
    target: Target = twin
    return target


class Targets:
    """A model's parameters and persistent buffers by name, with their ties.

    Args:
        model: The model.
        dtypes: The dtype of parameters where it differs from what the model has now.
        declared_ties: Tied by the model's own declaration: name -> the name it is tied to.

    Attributes:
        model: The model.
        modules: See `modules_of`.
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
        self.modules = modules_of(model)
        held = held_by(model, self.modules)
        self.derived = held.derived
        wanted: tuple[tuple[Kind, Mapping[str, torch.Tensor]], ...] = (
            ("parameter", held.parameters), ("buffer", held.buffers),
        )  # fmt: skip
        for kind, tensors in wanted:
            for name, tensor in tensors.items():
                _check_can_be_filled(name, tensor)
                self.by_name[name] = _target(name, tensor, kind)
        self._dtypes = dtypes or {}
        for name, dtype in self._dtypes.items():
            if name in self.by_name:
                self.by_name[name] = replace(self.by_name[name], dtype=dtype)
        self.declared_ties = dict(declared_ties or {})
        self.canonical = self._canonical_names()

    def _canonical_names(self) -> dict[str, str]:
        # What is one memory begins at one address, and hardly any two do: the others need no closer look.
        starts = [_start(target.tensor) for target in self.by_name.values()]
        sharers = Counter(starts)
        first: dict[object, str] = {}
        return {
            name: name if sharers[start] == 1 else first.setdefault(_identity(target.tensor), name)
            for (name, target), start in zip(self.by_name.items(), starts, strict=True)
        }

    def hold_in(self, model: nn.Module) -> bool:
        """Whether a model has these very tensors still, under these names, and as they were.

        Raises:
            ModelError: If one can't be filled any more.
        """
        now = held_by(model).everything
        if len(now) != len(self.by_name) + sum(name not in self.by_name for name in self.derived):
            return False
        for name, target in self.by_name.items():
            tensor = now.get(name)
            if tensor is not target.tensor or (tensor.dtype != target.dtype and name not in self._dtypes):
                return False
            _check_can_be_filled(name, tensor)
        return all(now.get(name) is buffer for name, buffer in self.derived.items())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        return {name: target.tensor for name, target in self.by_name.items()}

    def declared_partners(self) -> dict[str, set[str]]:
        """The names that the model declares tied to each other, seen from each."""
        return declared_partners(self.declared_ties)

    def ties(self) -> dict[str, str]:
        """Name -> the first of the names that are, or are declared to be, one with it; those that stand alone left out.

        A model on meta declares what a model with memory shares: for both it is the same.
        """
        partners = self.declared_partners()
        several = {*partners, *(name for names in self._shared.values() for name in names)}
        tied_names = [name for name in self.by_name if name in several]
        position = {name: at for at, name in enumerate(tied_names)}
        result = {}
        for name in tied_names:
            declared = {name, *partners.get(name, ())} & position.keys()
            tied = {twin for partner in declared for twin in (partner, *self.tied_to(partner))}
            if len(tied) > 1:
                result[name] = min(tied, key=position.__getitem__)
        return result

    def tied_to(self, name: str) -> list[str]:
        """The other names of the same memory."""
        return [other for other in self._shared.get(self.canonical[name], ()) if other != name]

    @functools.cached_property
    def _shared(self) -> dict[str, list[str]]:
        """The first name of a memory that has several -> all of them."""
        names: dict[str, list[str]] = {}
        for name, canonical in self.canonical.items():
            if name != canonical:
                names.setdefault(canonical, [canonical]).append(name)
        return names

    def is_derived(self, name: str) -> bool:
        """Whether a tensor of this name is computed rather than learnt.

        A parameter is learnt, whatever it is called.
        """
        if name in self.derived:
            return True
        target = self.by_name.get(name)
        return (target is None or target.kind == "buffer") and _DERIVED.search(name) is not None


def declared_partners(ties: Mapping[str, str]) -> dict[str, set[str]]:
    """The names that are declared tied to each other, at once or by way of others, seen from each."""
    groups: dict[str, set[str]] = {}
    for name, other in ties.items():
        joined = groups.get(name, {name}) | groups.get(other, {other})
        for member in joined:
            groups[member] = joined
    return {name: group - {name} for name, group in groups.items()}


def check_is_module(model: object) -> None:
    """Refuse what is no model.

    Raises:
        ModelError: If it is none.
    """
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        hint = f"make one first: {model.__name__}(...)" if isinstance(model, type) else None
        raise ModelError(f"an nn.Module is expected, not {what}", hint=hint)


class Held(NamedTuple):
    """The tensors that a model holds, each under every name that it has.

    Attributes:
        parameters: Its parameters.
        buffers: Its persistent buffers.
        derived: Its other buffers.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    derived: dict[str, torch.Tensor]

    @property
    def everything(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return {**self.parameters, **self.buffers, **self.derived}


def held_by(model: nn.Module, modules: Iterable[tuple[str, nn.Module]] | None = None) -> Held:
    """The tensors that a model holds, in its own order.

    Args:
        model: The model.
        modules: What `modules_of` says of it, where that is known.
    """
    held = parameters, buffers, derived = Held({}, {}, {})
    for prefix, module in modules_of(model) if modules is None else modules:
        for key, parameter in module._parameters.items():  # noqa: SLF001 -- as torch's own state_dict() does
            if parameter is not None:
                parameters[prefix + key] = parameter
        if module._buffers:  # noqa: SLF001 -- the only place that tells persistent ones apart
            transient = module._non_persistent_buffers_set  # noqa: SLF001 -- as above
            for key, buffer in module._buffers.items():  # noqa: SLF001 -- as above
                if buffer is not None:
                    (derived if key in transient else buffers)[prefix + key] = buffer
    if type(model).named_parameters is not torch.nn.Module.named_parameters:
        # A wrapper (FSDP) that has names of its own for them.
        return held._replace(parameters=dict(model.named_parameters(remove_duplicate=False)))
    return held


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """A model and all modules in it, each at every place, with what stands before the names of what it holds.

    As ``model.named_modules(remove_duplicate=False)``, whose nested generators take most of the time that looking at a
    model of ten thousand parameters takes.
    """
    found: list[tuple[str, nn.Module]] = []
    _visit(model, "", found)
    return found


def _visit(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    found.append((prefix, module))
    for key, child in module._modules.items():  # noqa: SLF001 -- as torch's own named_modules() does
        if child is not None:
            _visit(child, f"{prefix}{key}.", found)


def _check_can_be_filled(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) in _OWN and not tensor.is_nested and tensor.layout is torch.strided and tensor.is_contiguous():
        # Nearly all are like this, and then there is nothing to find.
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise ModelError(
            f"{name!r} has no shape yet",
            tensor=name,
            hint="run one forward pass, so that lazy modules learn their shapes, and load then",
        )
    if tensor.is_nested or (type(tensor) in _OWN and tensor.layout is not torch.strided):
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


def _start(tensor: torch.Tensor) -> int:
    """An address that two tensors have in common if they are one and the same memory."""
    # What has no memory has no address.
    return (tensor.data_ptr() if _is_ordinary(tensor) else 0) or id(tensor)


def _identity(tensor: torch.Tensor) -> object:
    """What two names share exactly when they are one tensor: the same view of the same memory."""
    if not _has_memory(tensor):
        return id(tensor)
    bits = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, bits)


def _has_memory(tensor: torch.Tensor) -> bool:
    return _is_ordinary(tensor) and not tensor.is_meta and tensor.numel() > 0


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return type(tensor) in _OWN and tensor.layout is torch.strided


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
    device = "cpu" if tensor.is_cpu else str(tensor.device)
    if tensor.is_contiguous():
        return Span(device, start, start + tensor.nbytes, True)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + elements * tensor.element_size()
    return Span(device, start, end, elements == tensor.numel())
