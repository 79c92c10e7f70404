"""`Origin`: how a model's parameters were made of a checkpoint's tensors, so that they can be written back.

It is numbers and names alone. It keeps neither the model nor the checkpoint's files, and has no values.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from weightloaders.mapping.placement import Placement, whole
from weightloaders.plan import CallStep, CopyStep, LoadPlan, Step, listed, step_infos, step_targets
from weightloaders.targets import held_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from weightloaders.targets import Targets
    from weightloaders.weights.info import TensorInfo


class Stored(NamedTuple):
    """A tensor as the checkpoint has it.

    Attributes:
        name: Its name there.
        shape: Its shape there.
        dtype: The dtype that it has there.
        ways: The parameters that have its elements, each with the copy that led from it into them.
        loss: Why its values are not in the model, or not to be had from there.
        derived: Whether it is computed rather than learnt, or left out by the model's own word.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ways: tuple[tuple[str, Placement], ...] = ()
    loss: str = ""
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """What a model was loaded from.

    Attributes:
        tensors: The checkpoint's, in its order.
        shapes: Parameter -> the shape that it had when it was filled.
        calls: Parameter -> what its own ``weight_loader`` was handed: a tensor's name, and which part that is.
    """

    tensors: tuple[Stored, ...]
    shapes: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, tuple[tuple[str, Any], ...]]


@dataclass(slots=True)
class Recorder:
    """Takes down what steps do; of a stream, a few at a time."""

    _ways: dict[str, list[tuple[str, Placement]]] = field(default_factory=lambda: defaultdict(list))
    _calls: dict[str, list[tuple[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _losses: dict[str, str] = field(default_factory=dict)
    _handed: set[str] = field(default_factory=set)

    def add(self, steps: Iterable[Step]) -> None:
        """Take down some steps."""
        shapes, ways = self._shapes, self._ways
        for step in steps:
            for target in step_targets(step):
                shapes[target.name] = target.tensor.shape
            if isinstance(step, CopyStep):
                name, sources = step.target.name, step.sources
                for placed in step.placements:
                    if isinstance(placed.source, int):
                        ways[sources[placed.source].name].append((name, placed))
            elif isinstance(step, CallStep):
                self._calls[step.target.name].append((step.info.name, step.shard_id))
                self._handed.add(step.info.name)
            else:
                made = listed(list(step.targets))
                reason = f"{made} was computed from it{f' ({step.reason})' if step.reason else ''}"
                self._losses.update((info.name, reason) for info in step_infos(step))

    def origin(self, plan: LoadPlan, infos: Iterable[TensorInfo], targets: Targets | None = None) -> Origin:
        """What it comes to.

        Args:
            plan: Which tensors no step reads, and why.
            infos: The checkpoint's tensors.
            targets: What the model wanted filled; None where there is no model.
        """
        unread = _Unread(plan, targets)
        tensors = []
        for info in infos:
            ways = self._ways.get(info.name, ())
            if ways or info.name in self._handed:
                stored = _stored(info, tuple(ways))
            elif info.name in self._losses:
                stored = _stored(info, (), self._losses[info.name])
            else:
                stored = unread.fate(info)
                self._shapes.update((name, unread.shape(name)) for name, _ in stored.ways)
            tensors.append(stored)
        return Origin(tuple(tensors), self._shapes, {name: tuple(handed) for name, handed in self._calls.items()})


class _Unread:
    """Tensors that no step reads."""

    def __init__(self, plan: LoadPlan, targets: Targets | None) -> None:
        self._plan, self._targets = plan, targets
        self._dropped, self._unexpected, self._ignored = set(plan.dropped), set(plan.unexpected), set(plan.ignored)
        self._mismatched = set(plan.mismatched)

    # Mostly all tensors are read, and neither is asked for.
    @functools.cached_property
    def _own(self) -> dict[str, torch.Tensor]:
        return {} if self._targets is None else self._targets.tensors

    @functools.cached_property
    def _buffers(self) -> dict[str, torch.Tensor]:
        held = None if self._targets is None else held_by(self._targets.model)
        return {} if held is None else {**held.buffers, **held.derived}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of what the model has of this name."""
        return tuple((self._own if name in self._own else self._buffers)[name].shape)

    def fate(self, info: TensorInfo) -> Stored:
        """Where its values are all the same, or why they are nowhere."""
        stored, name = _stored(info), info.name
        own = self._plan.renamed.get(name, name)
        if not info.numel:
            return stored
        if name in self._dropped:
            return stored._replace(loss="a rule drops it")
        if own in self._mismatched:
            return stored._replace(loss=f"it did not fit {own}, and was not loaded")
        if name in self._unexpected:
            return stored._replace(loss="the model did not take it")
        is_equal = name in self._ignored or own in self._plan.tied
        if is_equal and own in self._own and self._own[own].numel() == info.numel:
            # A tied name, or one of several tensors that are equal.
            return stored._replace(ways=((own, whole(0, info.numel)),))
        if own in self._buffers and tuple(self._buffers[own].shape) == info.shape:
            return stored._replace(ways=((own, whole(0, info.numel)),), derived=True)
        if name in self._ignored:
            return stored._replace(loss="it is computed rather than learnt, and not in the model", derived=True)
        return stored._replace(loss="the model did not take it")


def _stored(info: TensorInfo, ways: tuple[tuple[str, Placement], ...] = (), loss: str = "") -> Stored:
    return Stored(info.name, info.shape, info.extents[0].stored_dtype if info.extents else info.dtype, ways, loss)


def origin_of(plan: LoadPlan, infos: Iterable[TensorInfo], targets: Targets | None = None) -> Origin:
    """What a whole plan comes to; see `Recorder.origin`."""
    recorder = Recorder()
    recorder.add(plan.steps)
    return recorder.origin(plan, infos, targets)
