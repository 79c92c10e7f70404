"""Carrying a plan out: what is on meta gets memory, bytes move, and the report tells."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from weightloaders import hooks
from weightloaders.errors import LoadError, PlanError, SourceReadError
from weightloaders.loading.checking import check_files, inspection_for, parts_of, recorded
from weightloaders.loading.nesting import active_watches, is_nested, watching
from weightloaders.loading.origin import origin_of
from weightloaders.loading.preparing import groundwork, report_of, show_progress, targets_of, warn_of
from weightloaders.loading.status import marking
from weightloaders.loading.watching import settle
from weightloaders.plan import CallStep, ComputeStep, CopyStep, LoadPlan, Step, step_infos, step_targets
from weightloaders.targets import held_by
from weightloaders.transfer.coverage import Coverage
from weightloaders.transfer.engine import Transfer, Transferred
from weightloaders.transfer.mapped import Mapped, mapped
from weightloaders.transfer.memory import first_unwritable, is_plain
from weightloaders.transfer.sources import check_unchanged, sources_of
from weightloaders.transfer.streamed import StreamedTransfer
from weightloaders.weights.collector import collector_paused, collector_resumed
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.source import close_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from weightloaders.loading.context import LoadContext
    from weightloaders.loading.status import Mark
    from weightloaders.report import LoadReport
    from weightloaders.targets import Target, Targets
    from weightloaders.transfer.engine import ProgressEvent
    from weightloaders.transfer.inspecting import Inspection
    from weightloaders.weights.weights import Weights

# Moving more than this takes longer than looking through a plan, however many tensors it is of.
_MANY_BYTES = 1 << 30


def run(plan: LoadPlan, model: nn.Module, targets: Targets, context: LoadContext, weights: Weights) -> LoadReport:
    """Carry a plan out.

    Args:
        plan: What is to happen.
        model: The model it was made for.
        targets: What the model wanted filled when the plan was made.
        context: What was asked for.
        weights: What the source holds.

    Raises:
        PlanError: If the plan has errors, a hook refuses, or the model is not what it was; nothing was touched.
        LoadError: If something fails on the way; the model is marked then.
    """
    plan.raise_if_errors()
    infos = [info for step in plan.steps for info in step_infos(step)]
    extents = [extent for info in infos for extent in info.extents]
    # Other threads would miss the garbage collector, were it away for long; and code of others may leave it work.
    is_long = sum(extent.length for extent in extents) > _MANY_BYTES
    is_foreign = any(info.read is not None for info in infos) or not all(isinstance(s, CopyStep) for s in plan.steps)
    with collector_resumed() if is_long or is_foreign else collector_paused():
        try:
            return _run(plan, model, targets, context, weights)
        finally:
            # They are opened again when they are needed again.
            close_files(frozenset(extent.source.origin.name for extent in extents))


def _run(plan: LoadPlan, model: nn.Module, targets: Targets, context: LoadContext, weights: Weights) -> LoadReport:
    start = time.perf_counter()
    with context.timed("prepare"):
        now = targets if targets.hold_in(model) else targets_of(model, context, targets)
        _check_same_model(plan, targets, now)
        _check_writable(plan)
    plan.described_by = (*weights.described_by, *context.companions)
    hooks.before_load(plan)
    warn_of(plan)
    check_files(plan, context)
    _check_unchanged(plan)
    work = groundwork(model, now, context, plan.unfilled, plan.tied)
    inspection = inspection_for(context)
    with show_progress(context) as progress, marking(model) as mark:
        with context.timed("prepare"):
            maps = context.transfer.mode == "mmap" and weights.stream is None
            views = mapped(plan.steps, context.device.device_of) if maps else Mapped()
            prepared = work.lay(mark, views.twins)
            if prepared.replaced:
                plan.steps[:] = _for_new_objects(plan.steps, model)
            mark.touched = mark.touched or bool(views.names)
            views.put_in()
        try:
            with context.timed("transfer"):
                steps = _without_aliases(_besides(views, plan.steps))
                moved = _transfer(steps, model, context, progress, weights, inspection, mark)
            views.check_unchanged()
        except BaseException as error:
            # Ctrl-C does not say what was written.
            mark.touched = mark.touched or not isinstance(error, LoadError) or bool(error.written)
            mark.written = {*mark.written, *views.names}
            if isinstance(error, LoadError):
                error.written = tuple(sorted({*error.written, *views.names}))
            views.let_go()
            raise
        mark.touched = True
        mark.written = {target.name for target in _filled_by(plan)}
        _tell(views, moved)
        for watch in active_watches():
            for target in _filled_by(plan):
                watch.filled_by_us(target.tensor)
        with context.timed("verify") if inspection.is_wanted else contextlib.nullcontext():
            inspection.look_at_rest(_filled_by(plan))
        inspection.raise_if_not_finite()
        mark.origin = origin_of(plan, weights.infos(), now)
    before = context.phases.get("open", 0.0) + context.phases.get("plan", 0.0)
    report = report_of(plan, moved, context, prepared, before + time.perf_counter() - start)
    report.provenance = recorded(inspection, parts_of(plan), _filled_by(plan)) if context.verify.record else {}
    if not is_nested(model):
        hooks.after_load(report)
    return report


def _besides(views: Mapped, steps: list[Step]) -> list[Step]:
    """The steps for what is not mapped."""
    if not views.names:
        return steps
    return [step for step in steps if views.names.isdisjoint(target.name for target in step_targets(step))]


def _tell(views: Mapped, moved: Transferred) -> None:
    """Put what was mapped into the account of what was moved."""
    moved.notes.extend([views.note] if views.note else [])
    if views.names:
        moved.bytes_by_path["mapped"] = views.nbytes
        moved.written |= views.names
    moved.warnings.extend(views.warnings)


def _transfer(
    steps: list[Step],
    model: nn.Module,
    context: LoadContext,
    progress: Callable[[ProgressEvent], object],
    weights: Weights,
    inspection: Inspection,
    mark: Mark,
) -> Transferred:
    kind: Callable[..., Transfer | StreamedTransfer] = Transfer
    if inspection.is_wanted:
        kind = partial(Transfer, filled=inspection.look)
    if weights.stream is not None:
        kind = partial(StreamedTransfer, stream=weights.stream, borrowed=weights.borrowed)
    elif context.transfer.mode == "stream":
        kind = StreamedTransfer
    called = {step.target.name: step.target.tensor for step in steps if isinstance(step, CallStep)}
    if not called:
        return _moved(kind(steps, options=context.transfer, progress=progress), mark)
    watch = Coverage(called)
    with watching(model, watch):
        moved = _moved(kind(steps, options=context.transfer, progress=progress, handed=watch.hand_out), mark)
    settle(watch, model, context, "the parameters' own weight_loader", moved)
    return moved


def _moved(transfer: Transfer | StreamedTransfer, mark: Mark) -> Transferred:
    try:
        return transfer.run()
    finally:
        mark.written = transfer.written


def _filled_by(plan: LoadPlan) -> Iterator[Target]:
    return (target for step in plan.steps for target in step_targets(step))


def _check_same_model(plan: LoadPlan, then: Targets, now: Targets) -> None:
    """The plan speaks of parameters; they must still be those that the model has, and be as they were."""
    other = {
        planned.name for planned in _filled_by(plan)
        if (target := now.by_name.get(planned.name)) is not None
        and (target.tensor is not planned.tensor or target.dtype != planned.dtype)
    }  # fmt: skip
    changed = min(other | (then.by_name.keys() ^ now.by_name.keys()), default=None)
    if changed is not None:
        raise PlanError(
            f"the plan was made for another model, or the model changed since: {changed!r} is not what it was",
            plan=plan, tensor=changed, hint="make the plan again",
        )  # fmt: skip


def _check_unchanged(plan: LoadPlan) -> None:
    """A file that was exchanged or cut since it was catalogued is found before the others are written."""
    try:
        check_unchanged(sources_of(plan.steps))
    except SourceReadError as error:
        raise LoadError.of(error, ()) from error


def _check_writable(plan: LoadPlan) -> None:
    """Written to by address, read-only memory would end the process."""
    name = first_unwritable((target.name, target.tensor) for target in _filled_by(plan))
    if name is not None:
        raise LoadError(
            f"the memory of {name} can't be written; nothing was changed",
            tensor=name,
            hint="it is a read-only mapping or array; copy the parameter, so that the model has memory of its own",
        )


def _without_aliases(steps: list[Step]) -> list[Step]:
    """The same steps, where what lies in memory that another step will overwrite is copied first."""
    if all(_in_memory(info) is None for step in steps for info in step_infos(step)):
        return steps
    memory = {_address(target.tensor) for step in steps for target in step_targets(step)} - {None}
    copies: dict[int, TensorInfo] = {}
    for step in steps:
        views = {_view(t.tensor) for t in step_targets(step) if _address(t.tensor) is not None}
        for info in step_infos(step):
            tensor = _in_memory(info)
            if tensor is not None and _address(tensor) in memory and views != {_view(tensor)}:
                copy = tensor.detach().clone()
                copies[id(info)] = TensorInfo(info.name, info.dtype, info.shape, read=partial(_itself, copy))
    if not copies:
        return steps

    def free(info: TensorInfo) -> TensorInfo:
        return copies.get(id(info), info)

    result: list[Step] = []
    for step in steps:
        if isinstance(step, CopyStep):
            result.append(replace(step, sources=tuple(map(free, step.sources))))
        elif isinstance(step, CallStep):
            result.append(replace(step, info=free(step.info)))
        else:
            sources = tuple(tuple(map(free, s)) if isinstance(s, tuple) else free(s) for s in step.sources)
            result.append(replace(step, sources=sources))
    return result


def _in_memory(info: TensorInfo) -> torch.Tensor | None:
    """The tensor itself, of what is in memory already: the catalogue has it, and nothing else can lie in the model."""
    tensor = None if info.read is None else getattr(info.read, "tensor", None)
    return tensor if isinstance(tensor, torch.Tensor) else None


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _address(tensor: torch.Tensor) -> int | None:
    """Where the memory begins that a tensor is a view of; None where that can't be said."""
    return tensor.untyped_storage().data_ptr() or None if is_plain(tensor) and not tensor.is_meta else None


def _view(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _for_new_objects(steps: list[Step], model: nn.Module) -> list[Step]:
    """The steps for the objects that the model has now."""
    now = held_by(model).everything

    def current(target: Target) -> Target:
        return replace(target, tensor=now[target.name])

    return [
        replace(step, targets={name: current(target) for name, target in step.targets.items()})
        if isinstance(step, ComputeStep)
        else replace(step, target=current(step.target))
        for step in steps
    ]
