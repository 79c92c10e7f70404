"""Loads that code of others carries out: a model's own ``load_weights``, or a loader that overrides it. We watch."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weightloaders import hooks
from weightloaders.errors import CoverageError, LoadError, WeightLoadersError
from weightloaders.loading.context import LoadContext, marking, within
from weightloaders.loading.preparing import allowed_gaps, prepare_memory, report_of, show_progress, targets_of
from weightloaders.mapping import transformers as hf
from weightloaders.plan import LoadPlan, listed
from weightloaders.report import LoadReport
from weightloaders.transfer.coverage import Coverage
from weightloaders.transfer.engine import ProgressEvent, Transferred
from weightloaders.transfer.verify import check_finite, check_sha256
from weightloaders.weights.weights import Stream, Weights

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------ code that is not ours


def own_load_weights(model: nn.Module) -> Callable[[Any], Any] | None:
    """The model's own ``load_weights(weights)``, if it has one that takes just the weights."""
    method = getattr(model, "load_weights", None)
    if method is None or not callable(method):
        return None
    try:
        inspect.signature(method).bind(())
    except (TypeError, ValueError):
        return None
    return method  # type: ignore[no-any-return]


def load_by_model(
    model: nn.Module, own: Callable[[Any], Any], weights: Weights | Stream, context: LoadContext
) -> LoadReport:
    start = time.perf_counter()
    name = f"{type(model).__name__}.load_weights"
    infos = weights.infos() if isinstance(weights, Weights) else []
    # The plan has no steps: what goes where is the model's affair. Hooks still see what is about to happen.
    plan = LoadPlan(decided_by=[f"the model's own load_weights ({name})"])
    if isinstance(weights, Weights):
        weights.check_open()
        plan.skipped_files = dict(weights.skipped_files)
    hooks.before_load(plan)
    sources = list({e.source.name: e.source for i in infos for e in i.extents}.values())
    if context.verify == "sha256":
        check_sha256(sources)
    prepared = prepare_memory(model, context, allowed_gaps(model, context), set())
    moved = Transferred()
    total = sum(info.bytes_stored for info in infos)
    with marking(model), show_progress(context) as progress:
        pairs = _counted(weights, moved, total, progress)
        with watching(model, context) as watch:
            _call_foreign(name, watch, lambda: own(watch.track(pairs)))
        filled = raise_if_uncovered(watch, model, context, name)
        if context.verify == "finite":
            check_finite(targets_of(model, context).by_name[n] for n in filled)
    plan.unexpected = _unexpected(watch, context, name)
    report = report_of(plan, moved, context, prepared, time.perf_counter() - start)
    report.loaded = filled
    report.missing = [n for n in watch.missing if n not in filled]
    hooks.after_load(report)
    return report


def _counted(
    weights: Weights | Stream, moved: Transferred, total: int, progress: Callable[[ProgressEvent], object] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    pairs = weights.items() if isinstance(weights, Weights) else iter(weights)
    for name, tensor in pairs:
        moved.bytes_read += tensor.nbytes
        moved.extra_memory = max(moved.extra_memory, tensor.nbytes)
        if progress is not None and total:
            progress(ProgressEvent(min(moved.bytes_read, total), total))
        # Foreign code may keep what it is given; a borrowed tensor would change under it.
        yield name, tensor.clone() if isinstance(weights, Stream) and weights.borrowed else tensor


def load_by_loader(model: nn.Module, loader: Any, weights: Any, context: LoadContext) -> LoadReport:
    """A loader that overrides ``load_weights`` does it its own way, and is watched."""
    start = time.perf_counter()
    name = f"{type(loader).__name__}.load_weights"
    prepared = prepare_memory(model, context, allowed_gaps(model, context), set())
    moved = Transferred()
    inner: Any = None
    with marking(model):
        with watching(model, context) as watch:
            if isinstance(weights, dict):
                for key, tensor in weights.items():
                    if isinstance(tensor, torch.Tensor):
                        watch.hand_out(str(key), tensor)
                        moved.bytes_read += tensor.nbytes
            handed = weights
            if not isinstance(weights, Mapping) and isinstance(weights, Iterable):
                handed = watch.track(_counted(Stream(weights, borrowed=bool(loader.borrowed)), moved, 0, None))
            with within(replace(context, coverage=watch)):
                inner = _call_foreign(name, watch, lambda: loader.load_weights(model, handed))
        filled = raise_if_uncovered(watch, model, context, name)
        if context.verify == "finite":
            check_finite(targets_of(model, context).by_name[n] for n in filled)
    if isinstance(inner, LoadReport) and set(inner.loaded) >= set(filled):
        return inner
    plan = LoadPlan(decided_by=[f"the loader's own load_weights ({name})"])
    plan.unexpected = _unexpected(watch, context, name)
    if isinstance(weights, Weights):
        plan.skipped_files = dict(weights.skipped_files)
        moved.bytes_read = moved.bytes_read or weights.nbytes
    report = report_of(plan, moved, context, prepared, time.perf_counter() - start)
    report.loaded = filled
    report.missing = [n for n in watch.missing if n not in filled]
    hooks.after_load(report)
    return report


def _call_foreign(name: str, watch: Coverage, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except WeightLoadersError:
        raise
    except Exception as error:
        at = f" at the tensor {watch.last_name!r}" if watch.last_name else ""
        raise LoadError(
            f"{name} failed{at}: {type(error).__name__}: {error}", tensor=watch.last_name, plugin=name
        ) from error


class _Watch(Coverage):
    """A coverage watch that remembers what it found missing."""

    missing: list[str]


@contextlib.contextmanager
def watching(model: nn.Module, context: LoadContext, only: set[str] | None = None) -> Iterator[_Watch]:
    targets = targets_of(model, context)
    if only is not None:
        targets.by_name = {name: target for name, target in targets.by_name.items() if name in only}
    watch = _Watch(targets)
    watch.missing = []
    with warnings.catch_warnings():
        # Making views of yielded storages inside a dispatch mode makes torch warn about typed storages.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        with watch:
            yield watch


def raise_if_uncovered(
    watch: _Watch, model: nn.Module, context: LoadContext, who: str, only: set[str] | None = None
) -> list[str]:
    """What was filled; an error where foreign code left something out, or used only part of a tensor."""
    filled, missing = watch.finish(model)
    targets = targets_of(model, context)
    ignored = hf.ignored_patterns(model)[0]
    through_ties = {n for n, partners in targets.declared_partners().items() if not partners.isdisjoint(filled)}
    watch.missing = [
        n for n in missing
        if not targets.is_derived(n) and n not in through_ties and not (ignored is not None and ignored.search(n))
    ]  # fmt: skip
    fatal = [n for n in watch.missing if context.policies.missing(n) == "error"]
    if fatal or (watch.missing and not filled):
        names = fatal or watch.missing
        raise CoverageError(
            f"{who} left {len(names)} parameters unfilled: {listed(names)}",
            missing=tuple(names), written=tuple(filled), tensor=names[0], plugin=who,
            hint="the source has no tensor for them, or the code does not know their names",
        )  # fmt: skip
    if watch.missing:
        logger.warning("%s left %d parameters unfilled: %s", who, len(watch.missing), listed(watch.missing))
    if watch.cut and not _is_sharded():
        name, shape = watch.cut[0]
        raise CoverageError(
            f"{who} used only a part of {name!r} of shape {list(shape)}: the tensor was cut to fit",
            written=tuple(filled), tensor=name, plugin=who,
            hint="the checkpoint is of a larger model, or its vocabulary is padded; compare its config with the model's",
        )  # fmt: skip
    return filled


def _unexpected(watch: Coverage, context: LoadContext, who: str) -> list[str]:
    names = [n for n in watch.unused if not _looks_derived(n)]
    fatal = [n for n in names if context.policies.unexpected(n) == "error"]
    if fatal:
        raise CoverageError(f"{who} did not use {len(fatal)} tensors: {listed(fatal)}", tensor=fatal[0], plugin=who)
    loud = [n for n in names if context.policies.unexpected(n) == "warning"]
    if loud:
        logger.warning("%s did not use %d tensors: %s", who, len(loud), listed(loud))
    return names


def _looks_derived(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("inv_freq", "position_ids")


def _is_sharded() -> bool:
    """Whether this process is one of several that each take a part of every tensor."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
