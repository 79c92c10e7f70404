"""What a vLLM model needs of a checkpoint, and what a reload needs that the first load had."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from weightloaders import Weights
from weightloaders.errors import LoadError, PlanError
from weightloaders.mapping.dtypes import may_cast

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch import nn

    from weightloaders.plan import PolicyOption

    # Shape and dtype.
    Held = tuple[tuple[int, ...], torch.dtype]
    Contents = Mapping[str, Held]

_SHOWN = 8
_RELOAD = "reload from a checkpoint of the same model, by the same loader and rules"
# Computed from the quantisation's config; vLLM's own loader leaves the same one out.
_FROM_CONFIG = frozenset({"input_scale_ub"})


def missing_policy(optional: Collection[str], asked: PolicyOption) -> Any:
    """The policy for missing parameters, with all that checkpoints need not have left out of it."""
    own = asked if isinstance(asked, dict) else {}
    rest = {"**": asked} if isinstance(asked, str) else {}
    within = {re.compile(f"^({'|'.join(map(re.escape, sorted(optional)))})$"): "ignore"} if optional else {}
    return {**own, **within, **rest}


def optional(model: nn.Module) -> set[str]:
    """What checkpoints need not have: buffers, which vLLM computes, and scales of the KV cache, which have defaults."""
    found = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for prefix, module in model.named_modules(remove_duplicate=False):
        is_cache = isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for name, parameter in module.named_parameters(recurse=False):
            if is_cache or name in _FROM_CONFIG or not parameter.numel():
                found.add(f"{prefix}.{name}" if prefix else name)
    return found


def contents_of(weights: Any) -> dict[str, Held] | None:
    """What a catalogue holds; None where there is none."""
    return {info.name: (info.shape, info.dtype) for info in weights.infos()} if isinstance(weights, Weights) else None


def check_same(wanted: Contents, found: Contents, where: str) -> None:
    """Refuse a source for a reload that lacks something that the first one had.

    Raises:
        PlanError: If a tensor is not there, or has another shape or kind of dtype.
    """
    differing, said = _differences(wanted, found)
    if differing is not None:
        raise PlanError(
            f"{where} can't replace what the model was loaded from, and nothing was changed: {said}",
            tensor=differing, file=where, hint=_RELOAD,
        )  # fmt: skip


def check_came(wanted: Contents, came: Contents, where: str) -> None:
    """The same of tensors that have come one by one, and been written.

    Raises:
        LoadError: If one did not come, or had another shape or kind of dtype.
    """
    differing, said = _differences(wanted, came)
    if differing is not None:
        raise LoadError(
            f"{where} has not replaced all that the model was loaded from: {said}",
            tensor=differing, file=where, hint=_RELOAD,
        )  # fmt: skip


def _differences(wanted: Contents, found: Contents) -> tuple[str | None, str]:
    """The first tensor that is not there or not the same kind, and a phrase of all of them."""
    said = {name: f"there is no {name!r}" for name in wanted if name not in found}
    for name, (shape, dtype) in wanted.items():
        new_shape, new_dtype = found.get(name, (shape, dtype))
        if new_shape != shape:
            said[name] = f"{name!r} has shape {list(new_shape)}, not {list(shape)}"
        elif not may_cast(new_dtype, dtype):
            said[name] = f"{name!r} is of {new_dtype}, not {dtype}"
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return next(iter(said), None), "; ".join(list(said.values())[:_SHOWN]) + more
