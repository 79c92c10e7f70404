"""From a document back to a `LoadPlan`: to be looked at, and to be proved before it runs.

Nothing is opened, imported or run on a document's word. Its targets are on meta, its files can't be read, and its
functions are just what the document says of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from weightloaders.errors import PlanError, RuleError, WeightLoadersError
from weightloaders.mapping.placement import Constant, Placement, Source, placement
from weightloaders.plan import document as doc
from weightloaders.plan.findings import Finding
from weightloaders.plan.forecast import Forecast
from weightloaders.plan.plan import LoadPlan
from weightloaders.plan.steps import CallStep, ComputeStep, CopyStep
from weightloaders.targets import Target
from weightloaders.weights.info import MAX_TENSOR_BYTES, Extent, TensorInfo
from weightloaders.weights.source import ByteSource

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from weightloaders.plan.steps import Step

T = TypeVar("T")

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class DescribedFile(ByteSource):
    """A file that a document speaks of."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._size = size

    @property
    def size(self) -> int:
        """See `ByteSource.size`."""
        return self._size

    @property
    def identity(self) -> Hashable:
        """See `ByteSource.identity`."""
        return self.name, self._size

    def read_into(self, view: memoryview, offset: int) -> None:  # noqa: ARG002 -- what a `ByteSource` takes
        """Refuse to read."""
        _refuse()


@dataclass(frozen=True, slots=True)
class DescribedFunction:
    """A function that a document speaks of.

    Attributes:
        data: What the document says.
    """

    data: Mapping[str, Any]

    def __call__(self, tensors: Sequence[Any]) -> Mapping[str, torch.Tensor]:  # noqa: ARG002 -- as any such function
        """Refuse to run."""
        _refuse()

    def as_data(self) -> dict[str, Any]:
        """What makes it again; see `mapping.recipes`."""
        if self.data["kind"] == "unnamed":
            raise RuleError(self.data["why"], hint="make the plan again, by a function that has a name")
        return dict(self.data)


def _refuse() -> NoReturn:
    raise PlanError(
        "this plan was read back, and is not proved", hint="prove it first: plan_load(model, weights, plan=plan)"
    )


def as_plan(data: doc.PlanData) -> LoadPlan:
    """The plan that a document is of.

    Raises:
        PlanError: If the document contradicts itself.
    """
    try:
        return _as_plan(data)
    except PlanError:
        raise
    except WeightLoadersError as error:
        raise PlanError(
            f"this plan is damaged: {error.message}", file=error.file, tensor=error.tensor, hint="make the plan again"
        ) from error


def _as_plan(data: doc.PlanData) -> LoadPlan:
    targets = _by_name((target.name, _target(target)) for target in data.model.targets)
    files = [DescribedFile(data.source.root + file.name, file.size) for file in data.source.files]
    infos = _by_name((tensor.name, _info(tensor, files)) for tensor in data.source.tensors)
    ties = {t.name: t.tied_to for t in data.model.targets if t.tied_to is not None}
    return LoadPlan(
        steps=[_step(step, targets, infos) for step in data.steps],
        findings=[
            Finding(f.kind, f.severity, f.message, f.tensors, f.file, f.hint) for f in data.findings
        ],
        missing=data.missing,
        unexpected=data.unexpected,
        ignored=data.ignored,
        mismatched=data.mismatched,
        unfilled=data.unfilled,
        cast={name: (_dtype(stored), _dtype(own)) for name, (stored, own) in data.cast.items()},
        tied=data.tied,
        renamed=data.renamed,
        dropped=data.dropped,
        skipped_files=data.skipped_files,
        decided_by=data.decided_by,
        targets=targets,
        ties={**ties, **{first: first for first in ties.values()}},
        catalogue=tuple(infos.values()),
        _forecast=Forecast(**data.forecast.model_dump()),
    )  # fmt: skip


def _by_name(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    result: dict[str, T] = {}
    for name, value in pairs:
        if name in result:
            raise PlanError(f"this plan is damaged: it speaks of {name!r} twice", tensor=name)
        result[name] = value
    return result


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise PlanError(f"this plan speaks of the dtype {name!r}, which this torch does not have")
    return _DTYPES[name]


def _target(data: doc.TargetData) -> Target:
    dtype = _dtype(data.dtype)
    if math.prod(size or 1 for size in data.shape) * dtype.itemsize > MAX_TENSOR_BYTES:
        raise PlanError(f"this plan is damaged: {data.name} has the absurd shape {data.shape}", tensor=data.name)
    return Target(data.name, torch.empty(data.shape, dtype=dtype, device="meta"), data.kind, True, dtype)


def _info(data: doc.TensorData, files: Sequence[ByteSource]) -> TensorInfo:
    if data.extents is None:
        return TensorInfo(data.name, _dtype(data.dtype), data.shape, read=_refuse)
    extents = [
        Extent(
            _numbered(files, extent.file),
            extent.offset,
            extent.length,
            None if extent.dtype is None else _dtype(extent.dtype),
            extent.byteorder,
            extent.shape,
            extent.strides,
            extent.at,
        )
        for extent in data.extents
    ]
    return TensorInfo(data.name, _dtype(data.dtype), data.shape, extents)


def _numbered(things: Sequence[T], number: int) -> T:
    if number >= len(things):
        raise PlanError(f"this plan is damaged: it speaks of number {number} of {len(things)}")
    return things[number]


def _named(things: Mapping[str, T], name: str) -> T:
    if name not in things:
        raise PlanError(f"this plan is damaged: a step speaks of {name!r}, and nothing else does", tensor=name)
    return things[name]


def _step(
    step: doc.CopyData | doc.ComputeData | doc.CallData,
    targets: Mapping[str, Target],
    infos: Mapping[str, TensorInfo],
) -> Step:
    rules = step.rules
    if isinstance(step, doc.CallData):
        return CallStep(_named(targets, step.target), _named(infos, step.source), step.shard_id, rules)
    if isinstance(step, doc.CopyData):
        sources = tuple(_named(infos, name) for name in step.sources)
        placements = tuple(_placement(placed, sources) for placed in step.placements)
        return CopyStep(_named(targets, step.target), sources, placements, rules)
    return ComputeStep(
        {name: _named(targets, name) for name in step.targets},
        tuple(
            tuple(_named(infos, name) for name in source) if isinstance(source, list) else _named(infos, source)
            for source in step.sources
        ),
        DescribedFunction(step.function.model_dump()),
        rules,
        step.reason,
    )


def _placement(data: doc.PlacementData, sources: Sequence[TensorInfo]) -> Placement:
    source: Source = data.source
    if data.source is not None:
        _numbered(sources, data.source)
    elif data.constant is not None:
        source = Constant(float(data.constant) if isinstance(data.constant, str) else data.constant)
    return placement(source, data.start, data.to, data.loops)
