"""Loads that code of others carries out: a model's own ``load_weights``, or a loader that overrides it. We watch."""

from __future__ import annotations

import collections
import contextlib
import inspect
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weightloaders import hooks
from weightloaders.errors import (
    CoverageError,
    LoaderContractError,
    LoadError,
    SourceError,
    SourceReadError,
    WeightLoadersError,
    summary,
)
from weightloaders.loading.checking import check_files, inspection_for, recorded
from weightloaders.loading.nesting import is_nested, watching
from weightloaders.loading.preparing import groundwork_for_all, report_of, show_progress, targets_of
from weightloaders.loading.status import load_origin, marking
from weightloaders.mapping import transformers as hf
from weightloaders.plan import LoadPlan, listed
from weightloaders.report import LoadReport
from weightloaders.transfer.coverage import Coverage, Covered
from weightloaders.transfer.engine import ProgressEvent, Transferred, tell
from weightloaders.transfer.handing import HandedTensors
from weightloaders.weights.supplied import Supplied
from weightloaders.weights.weights import Stream, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from torch import nn

    from weightloaders.loading.context import LoadContext
    from weightloaders.transfer.options import TransferOptions

logger = logging.getLogger(__name__)

# Models whose own load_weights is running: when it asks for a load, it means the default one.
_inside: ContextVar[tuple[nn.Module, ...]] = ContextVar("weightloaders_inside_own_load_weights", default=())

_SHOWN = 4
# A model's load_weights of another library takes a place, not weights; its parameter says so.
_PLACES = {
    "path", "filepath", "file", "filename", "dir", "directory", "folder", "checkpoint", "ckpt", "name", "url", "uri",
}  # fmt: skip


# ------------------------------------------------------------------ a model's own load_weights


def own_load_weights(model: nn.Module) -> Callable[[Any], Any] | None:
    """The model's own ``load_weights(weights)``, if it has one that takes just the weights and isn't running."""
    method = getattr(model, "load_weights", None)
    if not inspect.isroutine(method) or inspect.iscoroutinefunction(method) or any(m is model for m in _inside.get()):
        return None
    try:
        signature = inspect.signature(method)
        signature.bind(())
    except (TypeError, ValueError):
        return None
    first = next(iter(signature.parameters.values()))
    kind = first.annotation if isinstance(first.annotation, str) else inspect.formatannotation(first.annotation)
    kinds = {part.strip().rsplit(".", 1)[-1] for part in kind.split("|")}
    is_place = not _PLACES.isdisjoint(first.name.lower().split("_")) or kinds <= {"str", "Path", "PathLike", "None"}
    return None if is_place else method


def load_by_model(
    model: nn.Module, own: Callable[[Any], Any], weights: Weights | Stream, context: LoadContext
) -> LoadReport:
    """Let a model's own ``load_weights`` fill it, and watch.

    Raises:
        CoverageError: If it left parameters unfilled, or used only a part of a tensor.
        LoadError: If it failed.
    """
    who = f"{type(model).__name__}.load_weights"
    infos = []
    plan = LoadPlan(decided_by=[f"the model's own load_weights ({who})"])
    if isinstance(weights, Weights):
        weights.check_open()
        infos = weights.infos()
        plan.skipped_files, plan.catalogue = dict(weights.skipped_files), tuple(infos)
        plan.described_by = (*weights.described_by, *context.companions)
    check_files(plan, context)
    moved = Transferred()

    def call(watch: Coverage, progress: Callable[[ProgressEvent], object]) -> None:
        watch.offer(info.name for info in infos)
        token = _inside.set((*_inside.get(), model))
        try:
            pairs = handed_pairs(weights, context.transfer, moved, progress)
            # Who stops early, or fails, leaves threads behind that read ahead.
            with contextlib.closing(pairs):
                result = own(watch.track(pairs))
                if isinstance(result, Iterator):
                    # One that yields the names it has loaded loads nothing until somebody takes them.
                    collections.deque(result, maxlen=0)
        finally:
            _inside.reset(token)

    return _by_others(model, context, who, plan, moved, call)


def handed_pairs(
    weights: Weights | Stream,
    options: TransferOptions,
    moved: Transferred,
    progress: Callable[[ProgressEvent], object],
) -> Generator[tuple[str, torch.Tensor]]:
    """All tensors of a source for code of others, read ahead; each belongs to whoever gets it.

    Args:
        weights: The source.
        options: How bytes are moved.
        moved: Told what was read.
        progress: Told how far it has come.

    Raises:
        SourceError: While it is iterated over, if the source fails.
        LoaderContractError: If a stream hands out what are no weights, or two tensors of one name.
    """
    if isinstance(weights, Stream):
        yield from _counted(weights, moved, progress)
        return
    total = sum(info.bytes_stored for info in weights.infos())
    if weights.stream is not None:
        yield from _supplied(weights, weights.stream, moved, total, progress)
        return
    handed = HandedTensors(weights.infos(), lambda info: weights[info.name], options)
    with contextlib.closing(iter(handed)) as tensors:
        for info, tensor in tensors:
            moved.bytes_read, moved.extra_memory, moved.notes = handed.bytes_read, handed.extra_memory, handed.notes
            if handed.bytes_mapped:
                moved.bytes_by_path["mapped"] = handed.bytes_mapped
            tell(progress, ProgressEvent(min(handed.bytes_read + handed.bytes_mapped, total), total))
            yield info.name, tensor
            # What the model lets go of gives its memory to the next.
            del tensor


def _supplied(
    weights: Weights,
    stream: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]],
    moved: Transferred,
    total: int,
    progress: Callable[[ProgressEvent], object],
) -> Generator[tuple[str, torch.Tensor]]:
    with contextlib.closing(iter(Supplied(weights.infos(), stream))) as tensors:
        for info, tensor in tensors:
            moved.bytes_read += info.bytes_stored
            moved.extra_memory = max(moved.extra_memory, info.nbytes)
            tell(progress, ProgressEvent(moved.bytes_read, total))
            yield info.name, tensor.clone() if weights.borrowed else tensor
            del tensor


def _counted(
    stream: Stream, moved: Transferred, progress: Callable[[ProgressEvent], object]
) -> Generator[tuple[str, torch.Tensor]]:
    """The pairs of a stream, once each; a failure of whoever yields them says how far it came."""
    names: dict[str, None] = {}
    try:
        for name, tensor in stream:
            if name in names:
                # Of two the code of others keeps either, and what it has made of the first is not seen.
                raise LoaderContractError(f"the stream has two tensors named {name!r}", tensor=name)
            names[name] = None
            moved.bytes_read += tensor.nbytes
            moved.extra_memory = max(moved.extra_memory, tensor.nbytes)
            tell(progress, ProgressEvent(moved.bytes_read, 0))
            # A model may keep what it is given; a borrowed tensor would change under it.
            yield name, tensor.clone() if stream.borrowed else tensor
            del tensor
    except (WeightLoadersError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        last = next(reversed(names), None)
        after = f" after {len(names)} tensors, the last of them {last!r}" if last is not None else ""
        raise SourceReadError(f"the stream of weights failed{after}: {summary(error)}") from error


# ------------------------------------------------------------------ a loader's own load_weights


class _Tracked(Weights):
    """Weights that tell the watch what is taken from them."""

    def __init__(self, weights: Weights, watch: Coverage, moved: Transferred) -> None:
        # The same catalogue and the same locks.
        self.__dict__.update(weights.__dict__)
        self._tracked, self._watch, self._moved = weights, watch, moved
        watch.offer(weights)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tracked[name]
        self._moved.bytes_read += tensor.nbytes
        self._watch.hand_out(name, tensor)
        return tensor

    def close(self) -> None:
        self._tracked.close()
        self._closed = True


def load_by_loader(model: nn.Module, loader: Any, weights: Any, context: LoadContext) -> LoadReport:
    """Let a loader that overrides ``load_weights`` do it its own way, and watch.

    Raises:
        CoverageError: If it left parameters unfilled, or used only a part of a tensor.
        LoadError: If it failed.
    """
    who = f"{type(loader).__name__}.load_weights"
    plan = LoadPlan(decided_by=[f"the loader's own load_weights ({who})"])
    if isinstance(weights, Weights):
        plan.skipped_files, plan.catalogue = dict(weights.skipped_files), tuple(weights.infos())
        plan.described_by = (*weights.described_by, *context.companions)
    check_files(plan, context)
    moved = Transferred()

    def call(watch: Coverage, progress: Callable[[ProgressEvent], object]) -> object:
        return loader.load_weights(model, _tracked(weights, watch, moved, progress))

    return _by_others(model, context, who, plan, moved, call)


def _tracked(weights: Any, watch: Coverage, moved: Transferred, progress: Callable[[ProgressEvent], object]) -> Any:
    """What the loader's own ``get_weights`` returned, in the same kind of container."""
    if type(weights) is Weights:
        return _Tracked(weights, watch, moved)
    if isinstance(weights, Iterator):
        return watch.track(_counted(Stream(weights), moved, progress))
    pairs: Iterable[Any] = ()
    if isinstance(weights, dict):
        pairs = weights.items()
    elif isinstance(weights, Sequence) and not isinstance(weights, str | bytes):
        pairs = (pair for pair in weights if isinstance(pair, tuple | list) and len(pair) == 2)
    for name, tensor in pairs:
        if isinstance(tensor, torch.Tensor):
            watch.hand_out(str(name), tensor)
            moved.bytes_read += tensor.nbytes
    # It is not known which of them is in use when something fails.
    watch.last_name = None
    return weights


# ------------------------------------------------------------------ both


def _by_others(
    model: nn.Module,
    context: LoadContext,
    who: str,
    plan: LoadPlan,
    moved: Transferred,
    call: Callable[[Coverage, Callable[[ProgressEvent], object]], object],
) -> LoadReport:
    """Let code of others fill a model. The plan has no steps, but hooks still see that something is about to happen."""
    start = time.perf_counter()
    hooks.before_load(plan)
    before = targets_of(model, context)
    work = groundwork_for_all(model, before, context)
    with show_progress(context) as progress, marking(model) as mark:
        prepared = work.lay(mark)
        watch = Coverage(targets_of(model, context, before).tensors)
        try:
            with watching(model, watch):
                inner = call(watch, progress)
        except BaseException as error:
            touched = tuple(watch.finish(model).touched)
            mark.touched = mark.touched or bool(touched)
            mark.written = touched
            if isinstance(error, LoadError):
                error.written = tuple(dict.fromkeys((*error.written, *touched)))
            if isinstance(error, SourceError):
                raise LoadError.of(error, touched) from error
            if isinstance(error, WeightLoadersError | KeyboardInterrupt):
                raise
            at = f" at the tensor {watch.last_name!r} of shape {list(watch.last_shape)}" if watch.last_name else ""
            raise LoadError(
                f"{who} failed{at}: {summary(error)}",
                tensor=watch.last_name,
                plugin=who,
                written=touched,
            ) from error
        mark.touched = True
        covered = settle(watch, model, context, who, moved, raw=work.raw)
        # Where the default way was called, it has said itself what it did not want.
        unused = covered.unused if isinstance(inner, LoadReport) else [*covered.unused, *covered.untaken]
        if covered.missing and not covered.touched:
            # Whatever the policy: nothing at all was loaded.
            raise _left_out(covered.missing, covered, who)
        if not covered.used:
            raise CoverageError(
                f"{who} used nothing of what the source holds: {listed([*covered.unused, *covered.untaken])}",
                written=tuple(covered.touched), plugin=who,
            )  # fmt: skip
        plan.unexpected = _unexpected(unused, covered, context, who)
        inspection, filled = inspection_for(context), []
        if inspection.is_wanted:
            by_name = targets_of(model, context).by_name
            filled = [by_name[name] for name in covered.filled if name in by_name]
            inspection.look_at_rest(filled)
        inspection.raise_if_not_finite()
        if isinstance(inner, LoadReport) and set(covered.filled) <= {*inner.loaded, *inner.tied}:
            # The default way did all of it, and knows what it was.
            mark.origin = load_origin(model)
    plan.missing = covered.missing
    report = report_of(plan, moved, context, prepared, time.perf_counter() - start)
    report.loaded = covered.filled
    if isinstance(inner, LoadReport) and set(inner.loaded) <= set(covered.filled):
        # It called the default way, which knows more; what it filled besides is added.
        inner.loaded = list(dict.fromkeys((*inner.loaded, *(n for n in covered.filled if n not in inner.tied))))
        inner.missing, inner.replaced, inner.seconds = covered.missing, report.replaced, report.seconds
        inner.warnings.extend(moved.warnings)
        inner.decided_by = [*plan.decided_by, *inner.decided_by]
        report = inner
    # What the default way has recorded says where it came from as well; but code of others had the last word.
    parts = {name: found for name, found in report.provenance.items() if name in covered.filled}
    report.provenance, report.files = recorded(inspection, parts, filled), dict(context.compared)
    report.initialised = [name for name in prepared.initialised if name in covered.missing]
    if not is_nested(model):
        hooks.after_load(report)
    return report


def settle(
    watch: Coverage,
    model: nn.Module,
    context: LoadContext,
    who: str,
    moved: Transferred,
    raw: Collection[str] = (),
) -> Covered:
    """What was filled, and what was rightly left out; an error where something was left out or cut to fit.

    Args:
        watch: The watch, ended.
        model: The model.
        context: What was asked for.
        who: Whose code it was, for messages.
        moved: Told what could not be watched.
        raw: Parameters that have no value unless they were filled.

    Raises:
        CoverageError: If something was left out or cut to fit that may not be.
    """
    covered = watch.finish(model)
    if context.unite is not None:
        covered = context.unite(covered)
    elif _is_sharded():
        covered = replace(covered, cut={})
    targets = targets_of(model, context)
    changed = [name for name in covered.changed if not targets.is_derived(name)]
    if changed:
        raise CoverageError(
            f"{who} changed what the model has: "
            + "; ".join(f"{name!r} {covered.changed[name]}" for name in changed[:_SHOWN])
            + (f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""),
            written=tuple(covered.touched), tensor=changed[0], plugin=who,
            hint="fill the parameters that are there; build the model as the checkpoint needs it",
        )  # fmt: skip
    if covered.unseen:
        moved.warnings.append(
            f"{who} filled {listed(covered.unseen)} in a way that can't be watched (on another thread, through numpy): "
            "whether all of it was filled is not known"
        )
        logger.warning("%s", moved.warnings[-1])
    ignored = hf.ignored_patterns(model)[0]
    partners = targets.declared_partners()
    missing = [name for name in covered.missing if partners.get(name, set()).isdisjoint(covered.filled)]
    missing = [
        name for name in missing
        if name in raw or not (targets.is_derived(name) or (ignored is not None and ignored.search(name)))
    ]  # fmt: skip
    fatal = [name for name in missing if name in raw or context.policies.missing(name) == "error"]
    if fatal:
        raise _left_out(fatal, covered, who)
    loud = [name for name in missing if context.policies.missing(name) == "warning"]
    if loud:
        logger.warning("%s left %d parameters unfilled: %s", who, len(loud), listed(loud))
    for name, cut in covered.cut.items():
        message = f"{who} used only a part of {name!r} of shape {list(cut.shape)}: the tensor was cut to fit"
        if context.policies.mismatched(name) == "error":
            raise CoverageError(
                message, written=tuple(covered.touched), tensor=name, plugin=who,
                hint="the checkpoint is of a larger model, or its vocabulary is padded: compare the two configs",
            )  # fmt: skip
        logger.warning("%s", message)
    for name, (stored, target) in covered.recast.items():
        message = f"{who} copied {name!r}, whose dtype is {stored}, as it is into a parameter of {target}"
        if context.policies.mismatched(name) == "error":
            raise CoverageError(
                message, written=tuple(covered.touched), tensor=name, plugin=who,
                hint="integers and 8-bit codes are usually quantised weights: the model's config must say so, or the "
                "loader must turn them into numbers",
            )  # fmt: skip
        logger.warning("%s", message)
    return replace(covered, missing=missing)


def _left_out(names: Sequence[str], covered: Covered, who: str) -> CoverageError:
    return CoverageError(
        f"{who} left {len(names)} parameters unfilled: {listed(names)}",
        missing=tuple(names), written=tuple(covered.touched), tensor=names[0], plugin=who,
        hint="the source has no tensor for them, or the code does not know their names"
        + (f"; it did not use {listed(unused)}" if (unused := [*covered.unused, *covered.untaken]) else ""),
    )  # fmt: skip


def _unexpected(unused: Sequence[str], covered: Covered, context: LoadContext, who: str) -> list[str]:
    names = [name for name in unused if name.rsplit(".", 1)[-1] not in ("inv_freq", "position_ids")]
    fatal = [name for name in names if context.policies.unexpected(name) == "error"]
    if fatal:
        raise CoverageError(
            f"{who} did not use {len(fatal)} tensors: {listed(fatal)}",
            written=tuple(covered.touched), tensor=fatal[0], plugin=who,
        )  # fmt: skip
    loud = [name for name in names if context.policies.unexpected(name) == "warning"]
    if loud:
        logger.warning("%s did not use %d tensors: %s", who, len(loud), listed(loud))
    return names


def _is_sharded() -> bool:
    """Whether this process is one of several that each take a part of every tensor."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
