"""Loads from an iterable of pairs: no catalogue, read once, in bounded memory.

What can be decided for one tensor is decided when it comes; what needs the whole (missing parameters) at the end. A
failure then leaves a half-loaded model, and it is marked as such.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from weightloaders import hooks
from weightloaders.errors import (
    ConfigError,
    CoverageError,
    LoadError,
    PlanError,
    SourceError,
    WeightLoadersError,
    summary,
)
from weightloaders.loading.checking import inspection_for, parts_of, recorded
from weightloaders.loading.nesting import is_nested, watching
from weightloaders.loading.origin import Recorder
from weightloaders.loading.preparing import (
    groundwork_for_all,
    mappers_for,
    report_of,
    show_progress,
    sources_of,
    targets_of,
    warn_of,
)
from weightloaders.loading.status import Mark, marking
from weightloaders.loading.watching import settle
from weightloaders.mapping import transformers as hf
from weightloaders.mapping.automatic import Applied, FirstFitMapper, rivals, twins
from weightloaders.mapping.names import claim_name
from weightloaders.placing import GroupState, Placing
from weightloaders.plan import Finding, LoadPlan, listed
from weightloaders.transfer.coverage import Coverage
from weightloaders.transfer.engine import ProgressEvent, Transfer, Transferred, tell
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.reading import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from weightloaders.loading.context import LoadContext
    from weightloaders.loading.origin import Origin
    from weightloaders.mapping.names import Claim
    from weightloaders.provenance import Provenance
    from weightloaders.report import LoadReport
    from weightloaders.targets import Targets
    from weightloaders.weights.weights import Stream


def load_stream(model: nn.Module, stream: Stream, context: LoadContext) -> LoadReport:
    """Fill a model from pairs as they come.

    Raises:
        SourceError: If it fails at once; nothing was touched.
        PlanError: If the stream is empty; nothing was touched.
        LoadError: If a tensor does not fit, or the stream fails.
        CoverageError: If parameters are missing at the end.
    """
    start = time.perf_counter()
    if context.verify.sha256:
        raise ConfigError("verify='sha256': a stream of tensors does not say which files they come from")
    shown = LoadPlan(decided_by=["a stream of tensors, placed as they come"])
    hooks.before_load(shown)
    # The first one tells whether these are weights at all, before anything is touched.
    pairs = iter(stream)
    try:
        first = next(pairs, None)
    except (WeightLoadersError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise SourceError(f"the stream of weights failed at once: {summary(error)}") from error
    if first is None:
        raise PlanError("the source holds no tensors; nothing was changed")
    before = targets_of(model, context)
    work = groundwork_for_all(model, before, context)
    with show_progress(context) as progress, marking(model) as mark:
        prepared = work.lay(mark)
        loading = _Loading(model, targets_of(model, context, before), context, stream, mark, progress)
        watch = Coverage(loading.with_own_loader)
        with watching(model, watch) if loading.with_own_loader else contextlib.nullcontext():
            loading.take_all(itertools.chain([first], pairs), watch)
        loading.finish(work.raw)
        if loading.with_own_loader:
            settle(watch, model, context, "the parameters' own weight_loader", loading.moved)
        inspection = inspection_for(context)
        filled = [loading.placing.targets.by_name[name] for name in sorted(loading.moved.written)]
        inspection.look_at_rest(filled)
        inspection.raise_if_not_finite()
        mark.origin = loading.origin()
    plan = loading.placing.plan
    plan.findings.extend(shown.findings)
    warn_of(plan)
    report = report_of(plan, loading.moved, context, prepared, time.perf_counter() - start)
    report.loaded = sorted(loading.moved.written)
    report.sources = loading.sources
    report.provenance = recorded(inspection, loading.parts, filled) if context.verify.record else {}
    report.initialised = [name for name in prepared.initialised if name in plan.missing]
    if not is_nested(model):
        hooks.after_load(report)
    return report


class _Loading:
    """One load of a stream: what has been placed so far, and what waits for its group to be complete."""

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        context: LoadContext,
        stream: Stream,
        mark: Mark,
        progress: Callable[[ProgressEvent], object],
    ) -> None:
        mappers, decided_by, position = mappers_for(model, targets, context)
        prefix = getattr(model, "base_model_prefix", None) or None
        self._prefixes = FirstFitMapper(targets.by_name, prefix)
        if position is not None:
            mappers.insert(position, self._prefixes)
        self._applied = Applied()
        self.placing = Placing(targets, context.policies, *hf.ignored_patterns(model))
        self.placing.plan.decided_by = decided_by
        self.with_own_loader = {
            name: tensor for name, tensor in targets.tensors.items() if callable(getattr(tensor, "weight_loader", None))
        }
        self.moved = Transferred()
        mark.written = self.moved.written
        self.sources: dict[str, str] = {}
        self.parts: dict[str, Provenance] = {}
        self._is_recorded = context.verify.record
        self._mappers, self._borrowed, self._mark, self._progress = mappers, stream.borrowed, mark, progress
        self._options, self._recorder = context.transfer, Recorder()
        self._groups: dict[Any, GroupState] = {}
        self._held = 0
        # Only names, dtypes and shapes are remembered; the tensors go.
        self._seen: dict[str, TensorInfo] = {}
        self._handed: Callable[[str, torch.Tensor], object] | None = None

    def take_all(self, pairs: Iterator[tuple[str, torch.Tensor]], watch: Coverage) -> None:
        """Take every pair.

        Raises:
            LoadError: If a tensor does not fit, or the stream fails.
        """
        self._handed = watch.hand_out
        for name, tensor in self._guarded(pairs):
            claim = claim_name(name, self._mappers, self.placing.targets.by_name)
            if name in self._seen and (claim.group is not None or claim.call_loader):
                raise self._error(f"the stream has two tensors named {name!r}", name)
            self._seen[name] = TensorInfo(name, tensor.dtype, tuple(tensor.shape), read=_gone)
            self.moved.bytes_read += tensor.nbytes
            self.moved.extra_memory = max(self.moved.extra_memory, self._held + tensor.nbytes)
            self._take(claim, name, tensor)
            tell(self._progress, ProgressEvent(self.moved.bytes_read, 0))
            del tensor

    def _guarded(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The pairs; a failure of whoever yields them says how far it came."""
        try:
            yield from pairs
        except WeightLoadersError as error:
            raise self._error(error.message, error.tensor, error.hint, error.file) from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            last = next(reversed(self._seen), None)
            after = f" after {len(self._seen)} tensors, the last of them {last!r}" if last else ""
            raise self._error(f"the stream of weights failed{after}: {summary(error)}") from error

    def _error(
        self, message: str, tensor: str | None = None, hint: str | None = None, file: str | None = None
    ) -> LoadError:
        return LoadError(message, written=tuple(sorted(self.moved.written)), tensor=tensor, hint=hint, file=file)

    def _take(self, claim: Claim, name: str, tensor: torch.Tensor) -> None:
        plan = self.placing.plan
        if claim.group or claim.target in self.placing.targets.by_name:
            self._applied.note(name, claim)
        if claim.dropped:
            plan.dropped.append(name)
        elif claim.group is not None:
            self._take_part(claim, name, tensor)
        elif claim.call_loader:
            self.placing.hand_over(_held(name, tensor), claim)
            self.placing.forget(claim.target)
        else:
            if claim.target != name:
                plan.renamed[name] = claim.target
            self._place(claim, name, tensor)
        self._move()

    def _take_part(self, claim: Claim, name: str, tensor: torch.Tensor) -> None:
        """A member of a group waits for the others, so what its owner may reuse is copied."""
        group: Any = claim.group
        state = self._groups.setdefault(group.key, GroupState.of(group))
        state.members[claim.slot].append((claim.index, _held(name, tensor.clone() if self._borrowed else tensor)))
        state.rules = claim.rules
        self._held += tensor.nbytes
        if self._is_complete(state):
            self.placing.place_group(self._groups.pop(group.key))
            self._held -= sum(info.nbytes for slot in state.members for _, info in slot)

    def _is_complete(self, state: GroupState) -> bool:
        """Whether all parts are there. Of lists only the result tells: then it has its target's shape."""
        if state.group.suffices is not None:
            pairs = zip(state.group.slots, state.members, strict=True)
            if not state.group.suffices({slot: [info.dtype for _, info in members] for slot, members in pairs}):
                return False
        elif not all(state.members):
            return False
        if not any(state.group.lists):
            return True
        wanted = [self.placing.targets.by_name.get(name) for name in state.group.targets]
        count = max(len(slot) for slot in state.members)
        # Most counts can be told to be too few without trying.
        if not wanted or any(target is None or count not in target.shape for target in wanted) or state.problem():
            return False
        arguments = [[_on_meta(i) for i in a] if isinstance(a, tuple) else _on_meta(a) for a in state.arguments()]
        try:
            results = state.group.function(arguments)
        except Exception:  # noqa: BLE001 -- whatever it is, the end of the stream will tell it properly
            return False
        return all(
            target is not None and name in results and tuple(results[name].shape) == target.shape
            for name, target in zip(state.group.targets, wanted, strict=True)
        )

    def _place(self, claim: Claim, name: str, tensor: torch.Tensor) -> None:
        """One tensor for one target; a second one for the same memory must be equal."""
        placing = self.placing
        canonical = placing.targets.canonical.get(claim.target)
        if canonical in placing.filled and canonical is not None:
            there = placing.targets.by_name[claim.target].tensor.detach()
            if there.shape == tensor.shape and _same_bits(there, tensor):
                placing.plan.tied[claim.target] = canonical
                return
        placing.place(claim.target, _held(name, tensor), claim.rules)
        placing.forget(claim.target)

    def _move(self) -> None:
        """Carry out what has been placed since the last time, and forget the tensors."""
        self._raise_if_errors()
        plan = self.placing.plan
        if not plan.steps:
            return
        self._mark.touched = True
        transfer = Transfer(plan.steps, options=self._options, handed=self._handed)
        try:
            moved = transfer.run()
        except LoadError as error:
            error.written = tuple(sorted({*self.moved.written, *error.written}))
            raise
        finally:
            self.moved.written |= transfer.written
        self.sources.update(sources_of(plan))
        if self._is_recorded:
            self.parts.update(parts_of(plan))
        self._recorder.add(plan.steps)
        plan.steps.clear()
        self.moved.infinities.extend(moved.infinities)

    def origin(self) -> Origin:
        """What the model was loaded from."""
        return self._recorder.origin(self.placing.plan, self._seen.values(), self.placing.targets)

    def finish(self, raw: set[str]) -> None:
        """The stream has ended: what is incomplete or missing?

        Raises:
            CoverageError: If something is.
        """
        for state in self._groups.values():
            self.placing.place_group(state)
            self._move()
        self.placing.finish(self._seen)
        self._raise_if_errors()
        self._check_prefixes()
        plan = self.placing.plan
        plan.findings.extend(
            Finding("rename", "info", sentence, names)
            for sentence, names in self._applied.told(len(self._seen)).items()
        )
        without_value = [name for name in plan.unfilled if name in raw]
        if without_value:
            raise CoverageError(
                f"the stream does not fill {listed(without_value)}, and the model itself can't initialise it",
                missing=tuple(without_value), written=tuple(sorted(self.moved.written)), tensor=without_value[0],
                hint="build the model on a real device, or give the module a reset_parameters() that fills it",
            )  # fmt: skip

    def _check_prefixes(self) -> None:
        """Only now it can be told whether a prefix was the one that the whole stream has."""
        plan, taken = self.placing.plan, self._prefixes.taken
        if not taken:
            return
        rename, names = next(iter(taken.items()))
        candidates = [*taken, *rivals(rename, names, plan.unexpected)]
        twice = twins(names, plan.unexpected)
        if len(candidates) == 1 and not plan.missing and not twice:
            return
        rules = " or ".join(f"rules=[Rename({rename.old!r}, {rename.new!r})]" for rename in candidates)
        how = "several prefixes, of which one is right"
        if len(candidates) == 1:
            how = f"{rename}, but " + (f"{listed(twice)} would have done as well" if twice else "not all of it")
        raise CoverageError(
            f"the stream of weights was matched by {how}",
            missing=tuple(plan.missing), written=tuple(sorted(self.moved.written)),
            hint=f"nothing but what you ask for is certain here: {rules}",
        )  # fmt: skip

    def _raise_if_errors(self) -> None:
        errors = self.placing.plan.errors
        if not errors:
            return
        first = errors[0]
        message = f"the stream of weights does not fit the model: {first.message}"
        written, tensor = tuple(sorted(self.moved.written)), first.tensors[0] if first.tensors else None
        if first.kind in ("missing", "incomplete", "nothing"):
            raise CoverageError(
                message, missing=tuple(self.placing.plan.missing), written=written, tensor=tensor, hint=first.hint
            )
        raise LoadError(message, written=written, tensor=tensor, hint=first.hint)


def _held(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape), read=lambda: tensor)


def _on_meta(info: TensorInfo) -> torch.Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def _gone() -> torch.Tensor:
    raise LoadError("a tensor of a stream can be read only once")


def _same_bits(there: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor, cast and moved to where another lies, is the same; NaN is the same as NaN."""
    one, other = there.cpu().contiguous(), tensor.detach().to(there.dtype).cpu().contiguous()
    return memory_of(one) == memory_of(other)
