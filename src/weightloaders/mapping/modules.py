"""What a model declares itself: ``packed_modules_mapping`` and a parameter's own ``weight_loader``.

Two spellings of ``packed_modules_mapping`` are in use and both are understood: fused name -> its parts
(``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``) and part -> fused name and shard id
(``{"q_proj": ("qkv_proj", "q")}``).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import ModelError
from weightloaders.mapping.layouts import joined
from weightloaders.mapping.names import Claim, Group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from weightloaders.targets import Target

_PACKED = "packed_modules_mapping"
# The shard ids of a fused attention projection are letters by convention, those of everything else numbers.
_ATTENTION = {"q": "q", "q_proj": "q", "k": "k", "k_proj": "k", "v": "v", "v_proj": "v"}
_ORDER: dict[Any, int] = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a fused parameter.

    Attributes:
        name: Its own name.
        fused: The fused module's name.
        parts: The names of all its parts, in order.
        position: This one's place among them.
        shard_id: What a parameter's own loader knows it by.
    """

    name: str
    fused: str
    parts: tuple[str, ...]
    position: int
    shard_id: Any


def packed_parts(modules: Iterable[nn.Module]) -> dict[str, list[Part]]:
    """Part name -> what it can be a part of, from every module that declares it.

    Raises:
        ModelError: If a declaration can't be understood.
    """
    found: dict[str, list[Part]] = defaultdict(list)
    for module in _may_declare(list(modules)):
        declared = getattr(module, _PACKED, None)
        if not declared:
            continue
        if not isinstance(declared, Mapping):
            raise ModelError(f"{_PACKED} of {type(module).__name__} is no mapping: {declared!r}")
        for fused, members in _by_fused_name(declared, type(module).__name__).items():
            for part in _parts_of(fused, members):
                if part not in found[part.name]:
                    found[part.name].append(part)
    return dict(found)


def _may_declare(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that need asking: a module's own way to say that it lacks an attribute is slow, and nearly all lack it."""
    slow = torch.nn.Module.__getattr__
    kinds = {
        kind for kind in {type(module) for module in modules} if hasattr(kind, _PACKED) or kind.__getattr__ is not slow
    }
    return [module for module in modules if type(module) in kinds or _PACKED in vars(module)]


def _parts_of(fused: str, members: Sequence[tuple[str, Any]]) -> list[Part]:
    letters = all(name in _ATTENTION for name, _ in members)
    numbered = [
        (name, (_ATTENTION[name] if letters else at) if shard_id is None else shard_id)
        for at, (name, shard_id) in enumerate(members)
    ]
    if all(shard_id in _ORDER or isinstance(shard_id, int) for _, shard_id in numbered):
        # Listed part by part they may come in any order; the shard ids tell.
        numbered.sort(key=lambda pair: _ORDER.get(pair[1], pair[1]))
    names = tuple(name for name, _ in numbered)
    return [Part(name, fused, names, at, shard_id) for at, (name, shard_id) in enumerate(numbered)]


def _by_fused_name(declared: Mapping[Any, Any], owner: str) -> dict[str, list[tuple[str, Any]]]:
    fused: dict[str, list[tuple[str, Any]]] = {}
    for key, value in declared.items():
        if isinstance(value, str):
            fused.setdefault(value, []).append((key, None))
        elif _is_target(value):
            fused.setdefault(value[0], []).append((key, value[1]))
        elif isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
            fused.setdefault(key, []).extend((name, None) for name in value)
        else:
            raise ModelError(
                f"packed_modules_mapping of {owner} has an entry that can't be understood: {key!r}: {value!r}",
                hint="either a fused name with the list of its parts, or a part with (fused name, shard id)",
            )
    return fused


def _is_target(value: Any) -> bool:
    """Whether this is (fused name, shard id) rather than the names of two parts."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], str):
        return False
    fused, shard_id = value
    return isinstance(shard_id, int) or (isinstance(shard_id, str) and shard_id in _ORDER and fused not in _ATTENTION)


def own_loaders(own: Mapping[str, Target]) -> set[str]:
    """The parameters that carry a ``weight_loader`` of their own."""
    return {
        name
        for name, target in own.items()
        if target.kind == "parameter" and callable(getattr(target.tensor, "weight_loader", None))
    }


class ModuleMapper:
    """What a model declares, as a mapper.

    Args:
        modules: The modules of the model.
        own: What it has, by name.

    Raises:
        ModelError: If a declaration can't be understood.
    """

    automatic = False

    def __init__(self, modules: Iterable[nn.Module], own: Mapping[str, Target]) -> None:
        self._own = own
        self._loaders = own_loaders(own)
        self._parts = packed_parts(modules)

    @property
    def used(self) -> bool:
        """Whether the model declares anything."""
        return bool(self._loaders or self._parts)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        if name in self._own:
            if name in self._loaders:
                return Claim(name, ("the parameter's own weight_loader",), call_loader=True)
            return None
        segments = name.split(".")
        # The innermost module decides: a part may have the name of a module further out.
        for at in range(len(segments) - 1, -1, -1):
            for part in self._parts.get(segments[at], ()):
                renamed = functools.partial(_with_segment, segments, at)
                if renamed(part.fused) in self._own:
                    return self._claim_part(renamed(part.fused), tuple(map(renamed, part.parts)), part)
        return None

    def _claim_part(self, target: str, parts: tuple[str, ...], part: Part) -> Claim:
        """The claim of one part; what goes for a module's weight goes for whatever else it has (bias, scale)."""
        if target in self._loaders:
            rule = f"the parameter's own weight_loader, shard {part.shard_id!r}"
            return Claim(target, (rule,), call_loader=True, shard_id=part.shard_id, parts=parts, slot=part.position)
        group = Group(
            key=("packed", target),
            slots=parts,
            lists=(False,) * len(parts),
            targets=(target,),
            function=functools.partial(_fuse, target=target),
            rule=f"packed_modules_mapping: {', '.join(part.parts)} -> {part.fused}",
        )
        return Claim(group=group, slot=part.position, rules=(group.rule,))


def _with_segment(segments: Sequence[str], at: int, segment: str) -> str:
    return ".".join((*segments[:at], segment, *segments[at + 1 :]))


def _fuse(tensors: Sequence[torch.Tensor], *, target: str) -> dict[str, torch.Tensor]:
    return {target: joined(tensors)}
