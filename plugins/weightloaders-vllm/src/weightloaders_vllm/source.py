"""The weights that a vLLM model is filled from: opened by a loader, renamed by rules."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from weightloaders import Weights
from weightloaders.errors import ConfigError
from weightloaders.loading import get_weights, is_borrowed
from weightloaders.saving import arrange, rearranged
from weightloaders.weights.weights import Stream, as_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from weightloaders import BaseWeightLoader
    from weightloaders.loading import LoadContext
    from weightloaders_vllm.completeness import Held


@contextlib.contextmanager
def opened(loader: BaseWeightLoader, path: str, context: LoadContext, config: Any) -> Iterator[Weights | Stream]:
    """What a loader says that a source holds, under the names that rules give it.

    Args:
        loader: The loader.
        path: What it opens.
        context: What was asked for.
        config: The model's config, which tells the sizes that rules leave out.

    Raises:
        SourceError: If it can't be opened.
        RuleError: If a rule can't be applied.
        ConfigError: If there are rules for a source without a catalogue.
    """
    weights = as_weights(get_weights(loader, path), borrowed=is_borrowed(loader, path))
    with weights if isinstance(weights, Weights) else contextlib.nullcontext():
        if not context.rules:
            yield weights
        elif isinstance(weights, Weights):
            plan = arrange(weights.infos(), context.rules, config)
            yield Weights.describe(
                rearranged(plan), metadata=weights.metadata, skipped_files=weights.skipped_files, notes=weights.notes
            )
        else:
            raise ConfigError(
                f"{type(loader).__name__} yields tensors one by one, so there are no names to plan rules by",
                hint="let it rename them, or return weightloaders.Weights",
            )


def noted(stream: Stream) -> tuple[Stream, dict[str, Held]]:
    """The same stream, and what has come of it so far."""
    came: dict[str, Held] = {}

    def noting() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            came[name] = tuple(tensor.shape), tensor.dtype
            yield name, tensor
            del tensor

    return Stream(noting(), borrowed=stream.borrowed), came
