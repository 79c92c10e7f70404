"""Which of the checkpoint's tensors are behind a parameter of a vLLM model: for messages that name both.

vLLM's models say in part how they come by a parameter: ``packed_modules_mapping`` tells what is stacked in it, a layer
of experts has ``get_expert_mapping()``, and ``hf_to_vllm_mapper`` tells what is called otherwise. What they don't say,
the checkpoint's other layers do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from weightloaders.errors import CoverageError, LoadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import nn

_SHOWN = 8
# What vLLM's layers stack, where a model does not say it of its own.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def named(error: LoadError, model: nn.Module, there: Collection[str] | None) -> LoadError:
    """The same error with both names: of what the checkpoint has not, or of where a tensor was to go.

    Args:
        error: What went wrong.
        model: The model.
        there: The names of all that the checkpoint has; None where they are not known.
    """
    if not isinstance(error, CoverageError):
        return _with_place(error, model)
    if not error.missing:
        return error
    lines, first = [], None
    for name in error.missing[:_SHOWN]:
        if there is None:
            found, said = [options[0] for options in _behind(model, name)], "it is made of"
        else:
            found, said = absent_behind(model, name, there), "the checkpoint has no"
            first = first or next(iter(found), None)
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        some = f"{said} {', '.join(map(repr, found[:_SHOWN]))}{more}"
        lines.append(f"  {name}: {some if found else 'what came for it does not fill it'}")
    if len(error.missing) > _SHOWN:
        lines.append(f"  and {len(error.missing) - _SHOWN} more")
    return CoverageError(
        "\n".join([error.message, *lines]),
        missing=error.missing, written=error.written, tensor=first or error.tensor, plugin=error.plugin,
        file=error.file, hint=error.hint,
    )  # fmt: skip


def _with_place(error: LoadError, model: nn.Module) -> LoadError:
    """Of a tensor that the model's code could not take: where it was to go."""
    if error.tensor is None:
        return error
    place = place_of(model, error.tensor)
    if place is not None:
        said, hint = f"it belongs into {place!r} of shape {list(model.get_parameter(place).shape)}", error.hint
    else:
        said = "the model has no parameter for it"
        hint = error.hint or f"leave it out by rules: {{'drop': [{error.tensor!r}]}}; or the config is of another model"
    return LoadError(
        f"{error.message}\n  {error.tensor}: {said}",
        written=error.written, tensor=error.tensor, plugin=error.plugin, file=error.file, hint=hint,
    )  # fmt: skip


def place_of(model: nn.Module, tensor: str) -> str | None:
    """The parameter that a tensor of the checkpoint is a part of, as far as the model tells."""
    mapped = _mapped(model, tensor)
    for name, _ in model.named_parameters():
        if name == mapped or any(tensor in options for options in _behind(model, name)):
            return name
    return None


def absent_behind(model: nn.Module, name: str, there: Collection[str]) -> list[str]:
    """The checkpoint's tensors that would fill what is left of a parameter, and are not there.

    Args:
        model: The model.
        name: The parameter.
        there: What the checkpoint has.
    """
    # What can't be told backwards from a parameter's name can be told forwards from a tensor's.
    names = {*there, *(_mapped(model, other) for other in there)}
    parts = _behind(model, name)
    absent = [options for options in parts if names.isdisjoint(options)]
    likeliest = list(dict.fromkeys(_likeliest(model, options, there) for options in absent))
    if len(absent) < len(parts):
        return likeliest
    known = {_INDEX.sub("*", other) for other in there}
    usual = [option for options in absent for option in options if _INDEX.sub("*", option) in known]
    return list(dict.fromkeys(usual)) or _holes(name, there) or likeliest


def _likeliest(model: nn.Module, options: Sequence[str], there: Collection[str]) -> str:
    """That which begins as the checkpoint's names do, where the model maps their beginnings."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    starts = [] if mapper is None else list(mapper.orig_to_new_prefix)
    used = [start for start in starts if any(name.startswith(start) for name in there)]
    return max(
        options, key=lambda option: option.startswith(tuple(used)) if used else not option.startswith(tuple(starts))
    )


def _behind(model: nn.Module, name: str) -> list[list[str]]:
    """For each tensor that is a part of a parameter how the checkpoint may call it, the likeliest first."""
    return [_unmapped(model, part) for part in _experts(model, name) or _stacked(model, name)]


def _stacked(model: nn.Module, name: str) -> list[str]:
    """The names that are stacked in a parameter; itself where none are."""
    packed: Mapping[str, Collection[str]] = {**_STACKED, **(getattr(model, "packed_modules_mapping", None) or {})}
    segments = name.split(".")
    for at, segment in enumerate(segments):
        if segment in packed:
            return [".".join([*segments[:at], part, *segments[at + 1 :]]) for part in packed[segment]]
    return [name]


def _experts(model: nn.Module, name: str) -> list[str]:
    """The names of all experts' parts in a parameter of a layer of experts; none where it is no such."""
    owner, _, leaf = name.rpartition(".")
    above, inner, _ = owner.rpartition("experts.")
    layer: Any = model.get_submodule(owner) if inner else None
    if not hasattr(layer, "get_expert_mapping"):
        return []
    return [
        f"{above}{part}{leaf.removeprefix(start)}"
        for start, part in ((target.removeprefix("experts."), part) for target, part, *_ in layer.get_expert_mapping())
        if leaf.startswith(start)
    ]


def _mapped(model: nn.Module, name: str) -> str:
    """A checkpoint's name as the model's own, where the model declares how they differ."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.apply_list([name]) if mapper is not None else [name]
    return str(mapped[0]) if mapped else name


def _unmapped(model: nn.Module, name: str) -> list[str]:
    """The checkpoint's names that the model maps to one of its own; that one where there are none."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return [name]
    found = [name]
    for old, new in mapper.orig_to_new_substr.items():
        found += [other.replace(new, old, 1) for other in found if new and new in other]
    for old, new in mapper.orig_to_new_prefix.items():
        found += [old + other.removeprefix(new) for other in found if new is not None and other.startswith(new)]
    for old, new in mapper.orig_to_new_suffix.items():
        found += [other.removesuffix(new) + old for other in found if new and other.endswith(new)]
    return [other for other in found if other != name and _mapped(model, other) == name] or [name]


def _holes(name: str, there: Collection[str]) -> list[str]:
    """What other layers of a checkpoint have, and the layer of this parameter has not."""
    indices: dict[str, set[tuple[str, ...]]] = {}
    for other in there:
        indices.setdefault(_INDEX.sub("*", other), set()).add(tuple(_INDEX.findall(other)))
    # Tensors side by side in the same modules; each of them should have what one of them has.
    beside: dict[str, set[tuple[str, ...]]] = {}
    for pattern, found in indices.items():
        beside.setdefault(pattern.rpartition("*")[0], set()).update(found)
    wanted = tuple(_INDEX.findall(name))
    holes = [
        _filled(pattern, index)
        for pattern, found in indices.items()
        for index in beside[pattern.rpartition("*")[0]] - found
        if wanted and index[: len(wanted)] == wanted
    ]
    near = max((_in_common(name, hole) for hole in holes), default=0)
    return sorted(hole for hole in holes if _in_common(name, hole) == near)


def _filled(pattern: str, index: Iterable[str]) -> str:
    numbers = iter(index)
    return "".join(next(numbers, char) if char == "*" else char for char in pattern)


def _in_common(one: str, other: str) -> int:
    """How many segments two names begin with alike."""
    pairs = enumerate(zip(one.split("."), other.split("."), strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(one.count("."), other.count(".")) + 1)
