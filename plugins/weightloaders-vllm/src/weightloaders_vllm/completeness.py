"""What a vLLM model needs of a checkpoint, and which of the checkpoint's tensors are behind a parameter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from weightloaders import Weights
from weightloaders.errors import CoverageError, LoadError, PlanError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import nn

    from weightloaders.plan import PolicyOption

_SHOWN = 8
_RELOAD = "reload from a checkpoint of the same model, by the same loader and rules"
# Computed from the quantisation's config; vLLM's own loader leaves the same one out.
_FROM_CONFIG = frozenset({"input_scale_ub"})


def missing_policy(model: nn.Module, asked: PolicyOption) -> Any:
    """The policy for missing parameters, with all that checkpoints need not have left out of it."""
    optional = sorted(_optional(model))
    own = asked if isinstance(asked, dict) else {}
    rest = {"**": asked} if isinstance(asked, str) else {}
    within = {re.compile(f"^({'|'.join(map(re.escape, optional))})$"): "ignore"} if optional else {}
    return {**own, **within, **rest}


def _optional(model: nn.Module) -> Iterator[str]:
    """Buffers, which vLLM computes, and scales of the KV cache, which have defaults."""
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        is_cache = isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for name, parameter in module.named_parameters(recurse=False):
            if is_cache or name in _FROM_CONFIG or not parameter.numel():
                yield f"{prefix}.{name}" if prefix else name


def named(error: CoverageError, model: nn.Module, weights: Any) -> CoverageError:
    """The same error with the checkpoint's tensors that are behind the parameters left unfilled, and not there."""
    if not error.missing or not isinstance(weights, Weights):
        return error
    # Where the model's mapper stacks, several names are mapped to one: their own count as well.
    there = {*weights, *(_mapped(model, name) for name in weights)}
    lines = []
    for name in error.missing[:_SHOWN]:
        parts = _parts(model, name)
        absent = [part for part in parts if part not in there]
        lines.append(f"  {name}: the checkpoint has no {', '.join(map(repr, absent)) if absent else 'whole of it'}")
    if len(error.missing) > _SHOWN:
        lines.append(f"  and {len(error.missing) - _SHOWN} more")
    first = next((p for name in error.missing for p in _parts(model, name) if p not in there), error.tensor)
    return CoverageError(
        "\n".join([error.message, *lines]),
        missing=error.missing, written=error.written, tensor=first, plugin=error.plugin, file=error.file,
        hint=error.hint,
    )  # fmt: skip


def _mapped(model: nn.Module, name: str) -> str:
    """A checkpoint's name as the model's own, where the model declares how they differ."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.apply_list([name]) if mapper is not None else [name]
    return str(mapped[0]) if mapped else name


def _parts(model: nn.Module, name: str) -> list[str]:
    """The names that are stacked in a parameter; itself where none are."""
    packed: Mapping[str, Collection[str]] = getattr(model, "packed_modules_mapping", None) or {}
    segments = name.split(".")
    for at, segment in enumerate(segments):
        if segment in packed:
            return [".".join([*segments[:at], part, *segments[at + 1 :]]) for part in packed[segment]]
    return [name]


def shapes_of(weights: Any) -> dict[str, tuple[int, ...]] | None:
    """What a catalogue holds; None where there is none."""
    return {info.name: info.shape for info in weights.infos()} if isinstance(weights, Weights) else None


def check_same(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse a source for a reload that lacks something that the first one had.

    Raises:
        PlanError: If a tensor is not there, or has another shape.
    """
    differing, said = _differences(wanted, found)
    if differing is not None:
        raise PlanError(
            f"{where} can't replace what the model was loaded from, and nothing was changed: {said}",
            tensor=differing, file=where, hint=_RELOAD,
        )  # fmt: skip


def check_came(wanted: Mapping[str, tuple[int, ...]], came: Mapping[str, tuple[int, ...]], where: str) -> None:
    """The same of tensors that have come one by one, and been written.

    Raises:
        LoadError: If one did not come, or had another shape.
    """
    differing, said = _differences(wanted, came)
    if differing is not None:
        raise LoadError(
            f"{where} has not replaced all that the model was loaded from: {said}",
            tensor=differing, file=where, hint=_RELOAD,
        )  # fmt: skip


def _differences(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> tuple[str | None, str]:
    """The first tensor that is not there or has another shape, and a phrase of all of them."""
    said = {name: f"there is no {name!r}" for name in wanted if name not in found}
    for name, shape in wanted.items():
        if found.get(name, shape) != shape:
            said[name] = f"{name!r} has shape {list(found[name])}, not {list(shape)}"
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return next(iter(said), None), "; ".join(list(said.values())[:_SHOWN]) + more
