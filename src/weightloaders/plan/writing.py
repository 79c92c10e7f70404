"""From a `LoadPlan` to its document."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

from weightloaders.errors import RuleError
from weightloaders.mapping.placement import Constant
from weightloaders.mapping.recipes import Recipe
from weightloaders.plan import document as doc
from weightloaders.plan.steps import CallStep, ComputeStep, CopyStep
from weightloaders.weights.info import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from weightloaders.mapping.placement import Placement
    from weightloaders.plan.plan import LoadPlan
    from weightloaders.plan.steps import Step
    from weightloaders.targets import Target
    from weightloaders.weights.info import Extent, TensorInfo


def as_document(plan: LoadPlan, *, runnable: bool) -> doc.PlanData:
    """The document of a plan.

    Args:
        plan: The plan.
        runnable: Whether functions that can't be found again are refused, rather than marked as such.

    Raises:
        RuleError: If there is such a function.
    """
    steps = [_step(step, runnable=runnable) for step in plan.steps]
    model, source = model_data(plan.targets, plan.ties), source_data(plan.catalogue)
    return doc.PlanData(
        format="weightloaders plan",
        version=1,
        ok=plan.ok,
        runnable=not any(isinstance(s, doc.ComputeData) and isinstance(s.function, doc.UnnamedData) for s in steps),
        decided_by=plan.decided_by,
        forecast=doc.ForecastData(**dataclasses.asdict(plan.forecast)),
        missing=plan.missing,
        unexpected=plan.unexpected,
        ignored=plan.ignored,
        mismatched=plan.mismatched,
        unfilled=plan.unfilled,
        dropped=plan.dropped,
        tied=plan.tied,
        renamed=plan.renamed,
        cast={name: (dtype_name(stored), dtype_name(own)) for name, (stored, own) in plan.cast.items()},
        skipped_files=plan.skipped_files,
        findings=[
            doc.FindingData(
                kind=f.kind, severity=f.severity, message=f.message, tensors=f.tensors, file=f.file, hint=f.hint
            )
            for f in plan.findings
        ],
        fingerprint=doc.fingerprint(model, source),
        model=model,
        source=source,
        steps=steps,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def model_data(targets: Mapping[str, Target], ties: Mapping[str, str]) -> doc.ModelData:
    """What a document says of a model."""
    return doc.ModelData(
        targets=[
            doc.TargetData(
                name=name,
                kind=target.kind,
                dtype=dtype_name(target.dtype),
                shape=list(target.shape),
                tied_to=ties.get(name) if ties.get(name) != name else None,
            )
            for name, target in targets.items()
        ]
    )


# ------------------------------------------------------------------ the source


def source_data(catalogue: Sequence[TensorInfo]) -> doc.SourceData:
    """What a document says of a source."""
    sizes = {e.source.name: e.source.size for info in catalogue for e in info.extents}
    root = _common_folder(sizes)
    names = {name: name[len(root) :].replace(os.sep, "/") for name in sizes}
    # Where the source lies, and in which order it was catalogued, plays no part.
    ordered = sorted(sizes, key=names.__getitem__)
    numbers = {name: number for number, name in enumerate(ordered)}
    return doc.SourceData(
        root=root,
        files=[doc.FileData(name=names[name], size=sizes[name]) for name in ordered],
        tensors=[
            doc.TensorData(
                name=info.name,
                dtype=dtype_name(info.dtype),
                shape=list(info.shape),
                extents=[_extent(extent, info, numbers) for extent in info.extents] if info.is_raw else None,
            )
            for info in sorted(catalogue, key=_name)
        ],
    )


def _name(info: TensorInfo) -> str:
    return info.name


def _common_folder(names: Collection[str]) -> str:
    """What all names begin with, up to and with a slash; they are paths or addresses."""
    # What the first and the last in order have in common, all between them have.
    ends = min(names, default=""), max(names, default="")
    length = next((at for at, (a, b) in enumerate(zip(*ends, strict=False)) if a != b), min(map(len, ends)))
    common = ends[0][:length]
    return common[: max(common.rfind("/"), common.rfind(os.sep)) + 1]


def _extent(extent: Extent, info: TensorInfo, numbers: Mapping[str, int]) -> doc.ExtentData:
    shape = extent.shape or ()
    is_whole = shape == info.shape
    return doc.ExtentData(
        file=numbers[extent.source.name],
        offset=extent.offset,
        length=extent.length,
        dtype=None if extent.dtype in (None, info.dtype) else dtype_name(extent.stored_dtype),
        byteorder=extent.byteorder,
        shape=None if is_whole else list(shape),
        strides=None if extent.strides in (None, contiguous_strides(shape)) else list(extent.strides or ()),
        at=None if is_whole else list(extent.at or ()),
    )


# ------------------------------------------------------------------ steps


def _step(step: Step, *, runnable: bool) -> doc.CopyData | doc.ComputeData | doc.CallData:
    rules = step.rules
    if isinstance(step, CopyStep):
        return doc.CopyData(
            kind="copy",
            target=step.target.name,
            sources=[info.name for info in step.sources],
            placements=list(map(_placement, step.placements)),
            rules=rules,
        )
    if isinstance(step, CallStep):
        return doc.CallData(
            kind="call", target=step.target.name, source=step.info.name, shard_id=step.shard_id, rules=rules
        )
    return doc.ComputeData(
        kind="compute",
        targets=list(step.targets),
        sources=[[info.name for info in s] if isinstance(s, tuple) else s.name for s in step.sources],
        function=_function(step, runnable=runnable),
        reason=step.reason,
        rules=rules,
    )


def _placement(placed: Placement) -> doc.PlacementData:
    value: Any = placed.source.value if isinstance(placed.source, Constant) else None
    if value is not None and not math.isfinite(value):
        value = str(value)
    return doc.PlacementData(
        source=placed.source if isinstance(placed.source, int) else None,
        constant=int(value) if isinstance(value, bool) else value,
        start=placed.source_start,
        to=placed.target_start,
        loops=list(placed.dims),
    )


_FUNCTIONS = {"convert": doc.ConvertData, "transformers": doc.TransformersData}


def _function(step: ComputeStep, *, runnable: bool) -> Any:
    try:
        function: Any = step.function
        if not isinstance(function, Recipe):
            raise RuleError(
                f"{'; '.join(step.rules) or 'a step'} computes by a function that has no name",
                hint="say it as a rule with a function of a module",
            )
        data = function.as_data()
    except RuleError as error:
        if not runnable:
            return doc.UnnamedData(kind="unnamed", why=error.message)
        raise RuleError(
            error.message,
            tensor=next(iter(step.targets), None),
            hint=f"{error.hint}; or write the plan for reading only: to_json(runnable=False)",
        ) from error
    return _FUNCTIONS[data["kind"]](**data)
