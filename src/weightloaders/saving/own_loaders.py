"""What a parameter's own ``weight_loader`` did, found out by running it once more, on symbols."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import summary
from weightloaders.mapping.spaces import Untraceable
from weightloaders.mapping.symbolic import SymbolicTensor, tracing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.loading.origin import Origin, Stored
    from weightloaders.mapping.placement import Placement


def with_calls(origin: Origin, parameters: Mapping[str, torch.Tensor]) -> Origin:
    """The same, with the copies that parameters' own loaders made in the place of the calls.

    Args:
        origin: What was made of what.
        parameters: The model's.
    """
    if not origin.calls:
        return origin
    stored = {tensor.name: tensor for tensor in origin.tensors}
    ways: dict[str, list[tuple[str, Placement]]] = defaultdict(list)
    losses: dict[str, str] = {}
    for name, calls in origin.calls.items():
        handed = [(stored[source], shard) for source, shard in calls]
        try:
            placements = _traced(parameters[name], handed)
        except Exception as error:  # noqa: BLE001 -- whatever code of others does with a symbol, it can't be inverted
            reason = f"{name}'s own weight_loader took it, and does what can't be inverted: {summary(error)}"
            losses.update((tensor.name, reason) for tensor, _ in handed)
        else:
            for placed in placements:
                if isinstance(placed.source, int):
                    ways[handed[placed.source][0].name].append((name, placed))
    tensors = (
        tensor._replace(ways=(*tensor.ways, *ways.get(tensor.name, ())), loss=losses.get(tensor.name, tensor.loss))
        for tensor in origin.tensors
    )
    return replace(origin, tensors=tuple(tensors), calls={})


def _traced(parameter: torch.Tensor, handed: Sequence[tuple[Stored, Any]]) -> list[Placement]:
    """Where a loader puts what it is handed."""
    with tracing():
        symbols = [SymbolicTensor.of(number, tensor.shape, tensor.dtype) for number, (tensor, _) in enumerate(handed)]
        memory = torch.empty(parameter.shape, dtype=parameter.dtype)
        if not isinstance(memory, SymbolicTensor):
            raise Untraceable("memory that can't be traced")
        # Loaders find in the parameter's attributes what to do.
        vars(memory).update(vars(parameter))
        loader: Any = parameter.weight_loader  # type: ignore[attr-defined]
        for symbol, (_, shard) in zip(symbols, handed, strict=True):
            loader(memory, symbol, *(() if shard is None else (shard,)))
    return memory.placements()
