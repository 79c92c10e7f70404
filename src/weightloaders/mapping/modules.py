"""What a model declares itself: ``packed_modules_mapping`` and a parameter's own ``weight_loader``.

Two spellings of ``packed_modules_mapping`` are in use and both are understood: fused name -> its parts
(``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``) and part -> fused name and shard id
(``{"q_proj": ("qkv_proj", "q")}``).
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import ModelError
from weightloaders.mapping.names import Claim, Group

if TYPE_CHECKING:
    from torch import nn

# The shard ids of a fused attention projection are letters by convention, those of everything else numbers.
_ATTENTION = {"q": "q", "q_proj": "q", "k": "k", "k_proj": "k", "v": "v", "v_proj": "v"}


def packed_parts(model: nn.Module) -> dict[str, tuple[str, Any, int, tuple[str, ...]]]:
    """Part name -> (fused name, shard id, position, all parts in order), from every module that declares it."""
    found: dict[str, tuple[str, Any, int, tuple[str, ...]]] = {}
    for module in model.modules():
        declared = getattr(module, "packed_modules_mapping", None)
        if not declared:
            continue
        if not isinstance(declared, Mapping):
            raise ModelError(f"packed_modules_mapping of {type(module).__name__} is no mapping: {declared!r}")
        for fused, parts in _by_fused_name(declared).items():
            letters = all(part in _ATTENTION for part, _ in parts)
            names = tuple(part for part, _ in parts)
            for position, (part, shard_id) in enumerate(parts):
                if shard_id is None:
                    shard_id = _ATTENTION[part] if letters else position
                found.setdefault(part, (fused, shard_id, position, names))
    return found


def _by_fused_name(declared: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    fused: dict[str, list[tuple[str, Any]]] = {}
    for key, value in declared.items():
        if isinstance(value, list) or (isinstance(value, tuple) and not _is_target(value)):
            fused.setdefault(key, []).extend((part, None) for part in value)
        elif isinstance(value, tuple):
            fused.setdefault(value[0], []).append((key, value[1]))
        elif isinstance(value, str):
            fused.setdefault(value, []).append((key, None))
        else:
            raise ModelError(f"packed_modules_mapping has an entry that can't be understood: {key!r}: {value!r}")
    return fused


def _is_target(value: Sequence[Any]) -> bool:
    """Whether a tuple is (fused name, shard id) rather than the names of parts."""
    return len(value) == 2 and (isinstance(value[1], int) or value[1] in ("q", "k", "v"))


def own_loaders(model: nn.Module) -> dict[str, Any]:
    """Parameter name -> its own ``weight_loader``, for parameters that carry one."""
    return {
        name: loader
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if callable(loader := getattr(parameter, "weight_loader", None))
    }


class ModuleMapper:
    """What a model declares, as a mapper.

    Args:
        model: The model.
        own: Its names.
    """

    automatic = False

    def __init__(self, model: nn.Module, own: Container[str]) -> None:
        self._own = own
        self._loaders = own_loaders(model)
        self._parts = packed_parts(model)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        if name in self._own:
            if name in self._loaders:
                return Claim(name, ("the parameter's own weight_loader",), call_loader=True)
            return None
        segments = name.split(".")
        for at, segment in enumerate(segments):
            if segment not in self._parts:
                continue
            fused, shard_id, position, parts = self._parts[segment]
            target = ".".join((*segments[:at], fused, *segments[at + 1 :]))
            if target not in self._own:
                continue
            if target in self._loaders:
                return Claim(
                    target,
                    (f"the parameter's own weight_loader, shard {shard_id!r}",),
                    call_loader=True,
                    shard_id=shard_id,
                )
            slots = tuple(".".join((*segments[:at], part, *segments[at + 1 :])) for part in parts)
            group = Group(
                key=("packed", target),
                slots=slots,
                lists=(False,) * len(parts),
                targets=(target,),
                function=functools.partial(_fuse, target=target),
                rule=f"packed_modules_mapping: {', '.join(parts)} -> {fused}",
            )
            return Claim(group=group, slot=position, rules=(group.rule,))
        return None

    @property
    def used(self) -> bool:
        """Whether the model declares anything."""
        return bool(self._loaders or self._parts)


def _fuse(tensors: Iterable[torch.Tensor], *, target: str) -> dict[str, torch.Tensor]:
    return {target: torch.cat(list(tensors))}
