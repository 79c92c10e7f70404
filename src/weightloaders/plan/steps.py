"""The steps of a plan: copy, compute, or hand over."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightloaders.mapping.composing import TooManyPlacements, cover
from weightloaders.mapping.placement import Constant, Placement, is_empty, whole
from weightloaders.weights.twins import twin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from weightloaders.targets import Target
    from weightloaders.weights.info import Extent, TensorInfo


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Fill one target by strided copies from source tensors; nothing is computed, at most cast.

    Attributes:
        target: What is filled.
        sources: The tensors that the placements read, in the order of their numbers.
        placements: Which elements of which source go where; both sides in row-major order. A source that is no
            number is a value that is written, or None for what nothing is written to.
        rules: The rules that led here, for the report.
    """

    target: Target
    sources: tuple[TensorInfo, ...]
    placements: tuple[Placement, ...]
    rules: tuple[str, ...] = ()

    @classmethod
    def whole(cls, target: Target, info: TensorInfo, rules: tuple[str, ...] = ()) -> CopyStep:
        """A source tensor as it is."""
        twin = _CopyStepTwin()
        twin.target, twin.sources, twin.placements, twin.rules = target, (info,), _as_it_is(info.numel), rules
        twin.__class__ = cls
        step: CopyStep = twin
        return step

    @classmethod
    def of(
        cls, target: Target, infos: Sequence[TensorInfo], placements: Sequence[Placement], rules: tuple[str, ...] = ()
    ) -> CopyStep:
        """Parts of some of these tensors."""
        used = dict.fromkeys(p.source for p in placements if isinstance(p.source, int))
        numbers = {source: number for number, source in enumerate(used)}
        renumbered = (p._replace(source=numbers[p.source]) if isinstance(p.source, int) else p for p in placements)
        return cls(target, tuple(infos[source] for source in used), tuple(renumbered), rules)


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Read source tensors, run a function on them, copy its results into targets."""

    targets: Mapping[str, Target]
    sources: tuple[TensorInfo | tuple[TensorInfo, ...], ...]
    function: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]
    rules: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallStep:
    """Hand a source tensor to the parameter's own ``weight_loader``."""

    target: Target
    info: TensorInfo
    shard_id: Any = None
    rules: tuple[str, ...] = ()


_CopyStepTwin = twin_of(CopyStep)


@functools.lru_cache(maxsize=4096)
def _as_it_is(size: int) -> tuple[Placement, ...]:
    # Tensors are many, their sizes few.
    return (whole(0, size),)


Step = CopyStep | ComputeStep | CallStep


def step_targets(step: Step) -> Sequence[Target]:
    """What a step fills."""
    return list(step.targets.values()) if isinstance(step, ComputeStep) else (step.target,)


def step_infos(step: Step) -> Sequence[TensorInfo]:
    """What a step reads."""
    if isinstance(step, CopyStep):
        return step.sources
    if isinstance(step, CallStep):
        return (step.info,)
    return [i for s in step.sources for i in (s if isinstance(s, tuple) else (s,))]


def single_run(info: TensorInfo) -> Extent | None:
    """The extent, where a whole tensor lies in one run in row-major order."""
    if info.is_raw and len(info.extents) == 1 and info.extents[0].is_contiguous:
        return info.extents[0]
    return None


def is_whole_copy(step: CopyStep) -> bool:
    """Whether the step takes the first elements of one source, in order: what most steps do."""
    size = step.target.tensor.numel()
    return step.placements == _as_it_is(size) and len(step.sources) == 1 and step.sources[0].numel >= size


def makes_up_its_target(step: CopyStep) -> bool:
    """Whether the copies of a step read what is in their sources, and write each element of the target exactly once."""
    size = step.target.tensor.numel()
    if is_whole_copy(step) or _is_row_of_runs(step, size):
        return True
    # By far the cheapest to tell, and true of all that is right.
    if sum(placed.numel for placed in step.placements) != size:
        return False
    try:
        return (
            all(_lies_inside(placed, step.sources, size) for placed in step.placements)
            and cover(step.placements, size).is_exact
        )
    except TooManyPlacements:
        # Nothing that is traced in bounded time leaves so many gaps on the way.
        return False


def _is_row_of_runs(step: CopyStep, size: int) -> bool:
    """Whether the copies are runs of their sources, side by side in the target: what stacking and joining comes to."""
    at = 0
    for source, source_start, target_start, dims in step.placements:
        if target_start != at or (dims and (len(dims) > 1 or dims[0][1:] != (1, 1))):
            return False
        count = dims[0][0] if dims else 1
        if not isinstance(source, int) or not 0 <= source < len(step.sources):
            return False
        if source_start < 0 or source_start + count > step.sources[source].numel:
            return False
        at += count
    return at == size


def _lies_inside(placed: Placement, sources: Sequence[TensorInfo], size: int) -> bool:
    if is_empty(placed):
        return True
    if placed.target_start < 0 or placed.target_end > size:
        return False
    if isinstance(placed.source, Constant):
        return True
    if placed.source is None or not 0 <= placed.source < len(sources):
        return False
    low, high = placed.source_range
    return low >= 0 and high <= sources[placed.source].numel
