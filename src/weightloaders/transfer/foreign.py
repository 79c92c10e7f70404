"""Jobs that run code of others: a rule's function, a parameter's own ``weight_loader``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import LoaderContractError, LoadError
from weightloaders.mapping.dtypes import may_cast
from weightloaders.plan import CallStep, ComputeStep, step_infos, step_targets
from weightloaders.transfer.job import Job
from weightloaders.transfer.workspace import writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.transfer.workspace import Workspace
    from weightloaders.weights.info import TensorInfo


def compute(step: ComputeStep, space: Workspace) -> Job:
    """The job of a step that reads tensors and runs a function on them."""
    infos, targets = step_infos(step), step_targets(step)
    held = sum(info.nbytes for info in infos) + sum(target.tensor.numel() * target.dtype.itemsize for target in targets)
    nbytes = sum(info.bytes_stored for info in infos)
    work = functools.partial(_compute, step, space)
    ahead = tuple(info for info in infos if info.is_raw)
    # A rule's function may be anything; what transformers declares is known to keep to its own tensors.
    if getattr(step.function, "concurrent", False) and len(ahead) == len(infos):
        reads = sum(len(info.extents) for info in infos if info.numel)
        return Job(*place_of(infos), nbytes, tuple(targets), work, "computed", reads, held)
    return Job(*place_of(infos), nbytes, tuple(targets), work, "computed", 0, held, pooled=False, ahead=ahead)


def call(step: CallStep, space: Workspace) -> Job:
    """The job of a step that hands a tensor over."""
    work = functools.partial(_call, step, space)
    ahead, place = (step.info,) if step.info.is_raw else (), place_of([step.info])
    nbytes, held = step.info.bytes_stored, step.info.nbytes
    return Job(*place, nbytes, (step.target,), work, "handed over", 0, held, pooled=False, ahead=ahead)


def place_of(infos: Sequence[TensorInfo]) -> tuple[str, int]:
    """File and offset at which reading these tensors starts."""
    extents = infos[0].extents if infos else ()
    return (extents[0].source.name, extents[0].offset) if extents else ("", 0)


def _compute(step: ComputeStep, space: Workspace) -> None:
    rule = "; ".join(step.rules)
    arguments = [
        [space.own(info) for info in source] if isinstance(source, tuple) else space.own(source)
        for source in step.sources
    ]
    try:
        results = step.function(arguments)
    except Exception as error:
        raise LoadError(
            f"{rule} failed: {type(error).__name__}: {error}", tensor=next(iter(step.targets), None)
        ) from error
    for name, target in step.targets.items():
        result = results.get(name)
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != target.shape:
            found = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else "no tensor"
            raise LoaderContractError(
                f"{rule} returned {found} for {name}, not one of shape {list(target.shape)}", tensor=name
            )
        dtype = target.tensor.dtype
        if not may_cast(result.dtype, dtype):
            raise LoaderContractError(
                f"{rule} returned {result.dtype} values for {name}, which can't become {dtype} by a cast", tensor=name
            )
        with writing(target.tensor):
            space.store(result.detach(), target.tensor, name)


def _call(step: CallStep, space: Workspace) -> None:
    tensor = space.own(step.info)
    if space.handed is not None:
        space.handed(step.info.name, tensor)
    loader: Any = step.target.tensor.weight_loader  # type: ignore[attr-defined]
    shard = () if step.shard_id is None else (step.shard_id,)
    with writing(step.target.tensor):
        loader(step.target.tensor, tensor, *shard)
