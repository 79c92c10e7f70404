"""Loads from an iterable of pairs: no catalogue, read once, in bounded memory.

What can be decided for one tensor is decided when it comes; what needs the whole (missing parameters) at the end. A
failure then leaves a half-loaded model, and it is marked as such.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from weightloaders import hooks
from weightloaders.errors import CoverageError, LoadError
from weightloaders.loading.context import LoadContext, marking
from weightloaders.loading.preparing import allowed_gaps, mappers_for, prepare_memory, report_of, show_progress, targets_of
from weightloaders.loading.watching import raise_if_uncovered, watching
from weightloaders.mapping import suggest
from weightloaders.mapping import transformers as hf
from weightloaders.mapping.names import claim_name
from weightloaders.placing import GroupState, Placing
from weightloaders.transfer.engine import Transfer, Transferred
from weightloaders.transfer.verify import check_finite
from weightloaders.weights.info import TensorInfo

if TYPE_CHECKING:
    from torch import nn

    from weightloaders.mapping.names import Claim
    from weightloaders.report import LoadReport
    from weightloaders.weights.weights import Stream

logger = logging.getLogger(__name__)


def load_stream(model: nn.Module, stream: Stream, context: LoadContext) -> LoadReport:
    """Fill a model from pairs as they come.

    Raises:
        LoadError: If a tensor does not fit.
        CoverageError: If parameters are missing at the end.
    """
    return _StreamLoad(model, stream, context).run()


class _StreamLoad:
    def __init__(self, model: nn.Module, stream: Stream, context: LoadContext) -> None:
        self._model, self._stream, self._context = model, stream, context
        self._moved = Transferred()
        self._groups: dict[Any, GroupState] = {}
        self._held = 0

    def run(self) -> LoadReport:
        start = time.perf_counter()
        context = self._context
        gaps = allowed_gaps(self._model, context)
        prepared = prepare_memory(self._model, context, gaps, set())
        targets = targets_of(self._model, context)
        mappers, decided_by, position = mappers_for(self._model, targets, context)
        mappers.insert(
            position,
            suggest.FirstFitMapper(targets.tensors, getattr(self._model, "base_model_prefix", None) or None),
        )
        self._placing = Placing(targets, context.policies, *hf.ignored_patterns(self._model))
        plan = self._placing.plan
        plan.decided_by = decided_by
        called = {name for name, t in targets.by_name.items() if callable(getattr(t.tensor, "weight_loader", None))}
        with marking(self._model), show_progress(context), watching(self._model, context, only=called) as watch:
            infos: dict[str, TensorInfo] = {}
            for name, tensor in self._stream:
                claim = claim_name(name, mappers, targets.tensors)
                info = TensorInfo(name, tensor.dtype, tuple(tensor.shape), read=lambda tensor=tensor: tensor)  # type: ignore[misc]
                self._take(claim, info, tensor)
                # Only the name is remembered; the tensor goes.
                infos[name] = TensorInfo(name, tensor.dtype, tuple(tensor.shape), read=_gone)
                self._moved.bytes_read += tensor.nbytes
                self._moved.extra_memory = max(self._moved.extra_memory, self._held + tensor.nbytes)
                del tensor, info
            for state in self._groups.values():
                self._placing.place_group(state)
                self._move()
            self._placing.finish(infos)
            self._raise_if_errors()
        if called:
            raise_if_uncovered(watch, self._model, context, "the parameters' own weight_loader", only=called)
        if context.verify == "finite":
            with marking(self._model):
                check_finite(targets.by_name[n] for n in plan.loaded)
        plan.unfilled = [n for n in gaps if n in plan.missing]
        report = report_of(plan, self._moved, context, prepared, time.perf_counter() - start)
        report.loaded = sorted(self._moved.written)
        report.initialised = [n for n in prepared.initialised if n in plan.missing]
        hooks.after_load(report)
        return report

    def _take(self, claim: Claim, info: TensorInfo, tensor: torch.Tensor) -> None:
        plan = self._placing.plan
        if claim.dropped:
            plan.dropped.append(info.name)
        elif claim.group is not None:
            # A member waits for the others, so what may be reused by its owner is copied.
            kept = tensor.clone() if self._stream.borrowed else tensor
            held = TensorInfo(info.name, info.dtype, info.shape, read=lambda: kept)
            self._held += tensor.nbytes
            state = self._groups.setdefault(claim.group.key, GroupState.of(claim.group))
            state.members[claim.slot].append((claim.index, held))
            state.rules = claim.rules
            if not any(claim.group.lists) and all(state.members):
                self._placing.place_group(self._groups.pop(claim.group.key))
                self._held -= sum(i.nbytes for slot in state.members for _, i in slot)
        elif claim.call_loader:
            self._placing.hand_over(info, claim)
        else:
            if claim.target != info.name:
                plan.renamed[info.name] = claim.target
            self._place(claim, info, tensor)
        self._move()

    def _place(self, claim: Claim, info: TensorInfo, tensor: torch.Tensor) -> None:
        """One tensor for one target; a second one for the same memory must be equal."""
        targets = self._placing.targets
        canonical = targets.canonical.get(claim.target)
        if canonical is not None and canonical in self._placing.filled:
            target = targets.by_name[claim.target]
            there = target.tensor.detach()
            if there.shape == tensor.shape and torch.equal(there, tensor.to(there.dtype).to(there.device)):
                self._placing.plan.tied[claim.target] = canonical
                return
        self._placing.place(claim.target, info, claim.rules)
        if canonical is not None and canonical in self._placing.filled:
            self._placing.filled[canonical] = (None, info.name)

    def _move(self) -> None:
        """Carry out what has been placed since the last time, and forget the tensors."""
        self._raise_if_errors()
        plan = self._placing.plan
        moved = Transfer(plan.steps, threads=1).run()
        plan.steps.clear()
        self._moved.written |= moved.written
        self._moved.infinities.extend(moved.infinities)

    def _raise_if_errors(self) -> None:
        errors = self._placing.plan.errors
        if not errors:
            return
        first = errors[0]
        kind = CoverageError if first.kind in ("missing", "incomplete", "nothing") else LoadError
        raise kind(
            f"the stream of weights does not fit the model: {first.message}",
            written=tuple(sorted(self._moved.written)),
            tensor=first.tensors[0] if first.tensors else None,
            hint=first.hint,
        )


def _gone() -> torch.Tensor:
    raise LoadError("a tensor of a stream can be read only once")
