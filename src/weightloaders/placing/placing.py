"""`Placing`: holds tensors, one by one, against what a model wants, and keeps the account."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightloaders.errors import WeightLoadersError
from weightloaders.mapping import suggest
from weightloaders.mapping.dtypes import is_codes, may_cast
from weightloaders.placing.accounting import settle
from weightloaders.placing.causes import cause_of_dtype, cause_of_shape, is_placeholder
from weightloaders.placing.comparing import agree
from weightloaders.placing.groups import GroupState, Incomplete, Outcome, outcome_of
from weightloaders.placing.misfits import Misfit
from weightloaders.plan import CallStep, ComputeStep, CopyStep, Finding, LoadPlan, Policies

if TYPE_CHECKING:
    import re
    from collections.abc import Hashable, Mapping, Sequence

    import torch

    from weightloaders.mapping.names import Claim
    from weightloaders.targets import Target, Targets
    from weightloaders.weights.info import TensorInfo


class Placing:
    """Holds tensors, one by one, against what a model wants, and keeps the account.

    A catalogue is placed at once; a stream is placed as it comes.

    Args:
        targets: What the model wants filled.
        policies: What is done about what doesn't fit.
        ignore_missing: Names that may be missing, by the model's own word.
        ignore_unexpected: Names that may be unexpected, by the model's own word.

    Attributes:
        plan: What has been found so far.
        filled: Name of a memory (see `Targets.canonical`) -> the source that fills it, where just one does, and the
            source's name.
        fillers: Name of a memory -> the target through which it is filled.
        spoilt: Memories that something was meant for and did not fit: they are not missing a second time.
        handed: Target -> name of a part -> the source handed to the parameter's own loader for it.
        parts: Target -> the parts that its own loader is to get.
        misfits: Tensors of wrong shapes.
        futile: Source -> why a rule made nothing of it.
    """

    def __init__(
        self,
        targets: Targets,
        policies: Policies,
        ignore_missing: re.Pattern[str] | None = None,
        ignore_unexpected: re.Pattern[str] | None = None,
    ) -> None:
        self.targets = targets
        self.policies = policies
        self.ignore_missing = ignore_missing
        self.ignore_unexpected = ignore_unexpected
        self.plan = LoadPlan()
        self.filled: dict[str, tuple[TensorInfo | None, str]] = {}
        self.fillers: dict[str, str] = {}
        self.spoilt: set[str] = set()
        self.misfits: list[Misfit] = []
        self.handed: dict[str, dict[str, str]] = {}
        self.parts: dict[str, tuple[str, ...]] = {}
        self.futile: dict[str, str] = {}
        self._partners = targets.declared_partners()
        self._traces: dict[Hashable, Outcome] = {}

    def place(self, name: str, info: TensorInfo, rules: tuple[str, ...]) -> None:
        """A tensor that is to fill the target of this name as it is."""
        target = self.targets.by_name.get(name)
        if target is None:
            self._unwanted(info.name, name)
            return
        canonical = self.targets.canonical[name]
        if not self._fits(target, info.shape, info.dtype, [info]):
            self.spoilt.add(canonical)
        elif canonical in self.filled:
            self._second_source(target, info)
        elif not self._comes_with_partner(target, info):
            self._note_cast(target, info.dtype, info)
            self._fill(target, info, info.name)
            self.plan.steps.append(CopyStep.whole(target, info, rules))

    def _fill(self, target: Target, info: TensorInfo | None, source: str) -> None:
        canonical = self.targets.canonical[target.name]
        self.filled[canonical] = (info, source)
        self.fillers[canonical] = target.name

    def forget(self, name: str) -> None:
        """Let go of the source of a target: of a stream, tensors go as soon as they were moved."""
        canonical = self.targets.canonical.get(name)
        if canonical in self.filled:
            self.filled[canonical] = (None, self.filled[canonical][1])

    def _comes_with_partner(self, target: Target, info: TensorInfo) -> bool:
        """Whether a declared tie's other name is filled from the very same bytes (as torch's own files have it)."""
        for partner in self._partners.get(target.name, ()):
            other = self.filled.get(self.targets.canonical.get(partner, ""), (None, ""))[0]
            if other is not None and info.extents and (info.extents, info.dtype) == (other.extents, other.dtype):
                self.plan.tied[target.name] = partner
                self.plan.ignored.append(info.name)
                return True
        return False

    def hand_over(self, info: TensorInfo, claim: Claim) -> None:
        """A tensor that the parameter's own loader is to take, whole or as one of its parts."""
        target = self.targets.by_name[claim.target]
        part = claim.parts[claim.slot] if claim.parts else ""
        handed = self.handed.setdefault(target.name, {})
        other = handed.get(part) or handed.get("") or ("" if part else next(iter(handed.values()), ""))
        if other:
            self._conflict(target, info, other)
            return
        canonical = self.targets.canonical[target.name]
        if self.filled.get(canonical, (None, ""))[0] is not None:
            # Tied, and its other name has been placed.
            self._second_source(target, info)
            return
        handed[part] = info.name
        self.parts[target.name] = claim.parts
        self.plan.steps.append(CallStep(target, info, claim.shard_id, claim.rules))
        if canonical not in self.filled:
            self._fill(target, None if part else info, info.name)

    def _second_source(self, target: Target, info: TensorInfo) -> None:
        """One memory, two sources: fine where they are equal, an error where they are not."""
        canonical = self.targets.canonical[target.name]
        other, other_name = self.filled[canonical]
        try:
            equal = other is not None and agree(info, other, target.dtype)
        except WeightLoadersError as error:
            self.plan.findings.append(Finding("conflict", "error", error.message, (info.name,), error.file, error.hint))
            return
        if not equal:
            self._conflict(target, info, other_name, "" if other is None else ", with different values")
            return
        self.plan.ignored.append(info.name)
        if target.name != self.fillers[canonical]:
            self.plan.tied[target.name] = self.fillers[canonical]

    def _conflict(self, target: Target, info: TensorInfo, other: str, how: str = "") -> None:
        if other == info.name:
            message, hint = f"the source gives {other!r} twice{how}", "a loader has to hand out each tensor once"
            self.plan.findings.append(Finding("conflict", "error", message, (other,), file_of(info), hint))
            return
        tied = self.targets.tied_to(target.name)
        self.plan.findings.append(
            Finding(
                "conflict", "error",
                f"both {other!r} and {info.name!r} would fill {target.name!r}{how}"
                + (f" (the model ties it to {', '.join(tied)})" if tied else ""),
                (info.name, other), file_of(info),
                f"leave one out, e.g. with rules=[Drop({info.name!r})]"
                + (", or untie the model's parameters" if tied else ""),
            )
        )  # fmt: skip

    def _unwanted(self, source: str, name: str, futile: str = "") -> None:
        """A tensor that the model has no place for, under the name that it came to."""
        patterns = self.ignore_unexpected
        if any(self.targets.is_derived(n) or (patterns is not None and patterns.search(n)) for n in (source, name)):
            self.plan.ignored.append(source)
            return
        self.plan.unexpected.append(source)
        if futile:
            self.futile[source] = futile

    def _fits(
        self, target: Target, shape: Sequence[int], dtype: torch.dtype, infos: Sequence[TensorInfo], rule: str = ""
    ) -> bool:
        """Whether what comes of some sources, by a rule or as they are, fits a target; else a finding says why not."""
        if shape == target.tensor.shape and dtype is target.dtype:
            return True
        shape, wanted = tuple(shape), target.shape
        of = f" (made of {len(infos)} tensor{'s' if len(infos) > 1 else ''} by {rule})" if rule else ""
        # A scalar in a file and a parameter of one element are the same thing.
        if shape != wanted and {shape, wanted} != {(), (1,)}:
            kind, (cause, hint) = "shape", cause_of_shape(target, shape, dtype, made=bool(rule))
            message = f"{target.name}: the source has {list(shape)}{of}, the model wants {list(wanted)}{cause}"
        elif not may_cast(dtype, target.dtype):
            kind, (cause, hint) = "dtype", cause_of_dtype(dtype, target)
            message = f"{target.name}: {cause}"
        else:
            return True
        severity = self.policies.mismatched(target.name)
        if is_placeholder(shape, wanted) and 0 in shape:
            # There is nothing in it, so nothing that a policy could let pass as a tensor of another size.
            severity = "error"
        if target.name not in self.plan.mismatched:
            self.plan.mismatched.append(target.name)
        about = dict.fromkeys((target.name, *(info.name for info in infos)))
        finding = Finding(kind, severity, message, tuple(about), file_of(infos[0]), hint)
        self.plan.findings.append(finding)
        if kind == "shape":
            self.misfits.append(Misfit(target, shape, finding, made=bool(rule)))
        return False

    def _note_cast(self, target: Target, dtype: torch.dtype, info: TensorInfo) -> None:
        stored = stored_dtype(info)
        if stored is dtype is target.dtype:
            return
        # Codes that were multiplied by their scales were not cast.
        stored = dtype if is_codes(stored) else stored
        if stored != target.dtype or dtype != target.dtype:
            self.plan.cast[target.name] = (stored, target.dtype)

    # -- groups

    def place_group(self, state: GroupState) -> None:
        """Tensors that become others together."""
        members = [info for slot in state.members for _, info in slot]
        known = [name for name in state.group.targets if name in self.targets.by_name]
        if not known:
            result = state.group.targets[0] if state.group.targets else ""
            # Looking for it takes time, and layers are alike.
            near = suggest.nearest(result, list(self.targets.by_name)) if not self.futile else None
            meant = "" if near is None else f" (did you mean {near!r}?)"
            for info in members:
                futile = f"{state.group.rule} would make {result!r} of it, which the model does not have{meant}"
                self._unwanted(info.name, result, futile)
            return
        about = tuple(dict.fromkeys((*known, *(info.name for info in members))))
        try:
            outcome = outcome_of(state, self.targets.by_name, self._traces)
        except Incomplete as problem:
            if all(self.targets.canonical[name] in self.filled for name in known):
                # What these are parts of is there as a whole.
                for info in members:
                    self._unwanted(info.name, known[0], str(problem))
            else:
                self._incomplete(known, problem, members, about)
        except WeightLoadersError as error:
            message = f"{known[0]}: {error.message}"
            self.plan.findings.append(Finding("rule", "error", message, about, file_of(members[0]), error.hint))
            self.spoilt.update(self.targets.canonical[name] for name in known)
        else:
            self.plan.steps.extend(self._steps_of(state, outcome))

    def _incomplete(
        self, known: Sequence[str], problem: Incomplete, members: Sequence[TensorInfo], about: tuple[str, ...]
    ) -> None:
        severities = {self.policies.missing(name) for name in known}
        severity = next(s for s in ("error", "warning", "info") if s in severities)
        self.plan.findings.append(
            Finding(
                "incomplete", severity, str(problem), about, next(filter(None, map(file_of, members)), None),
                problem.hint,
            )
        )  # fmt: skip
        self.plan.missing.extend(known)
        self.spoilt.update(self.targets.canonical[name] for name in known)

    def _steps_of(self, state: GroupState, outcome: Outcome) -> list[CopyStep | ComputeStep]:
        infos = tuple(state.infos)
        if not outcome.results:
            for info in infos:
                self._unwanted(info.name, info.name, f"{state.group.rule} makes nothing of it")
        taken: dict[str, Target] = {}
        for name, result in outcome.results.items():
            target = self.targets.by_name.get(name)
            if target is None:
                self._unwanted(name, name, f"{state.group.rule} makes it, and the model does not have it")
            elif self._takes(target, result, infos, state.group.rule):
                taken[name] = target
        if outcome.computed:
            arguments = tuple(state.arguments())
            return [ComputeStep(taken, arguments, state.group.function, state.rules, outcome.computed)] if taken else []
        self._note_unread(infos, state, outcome)
        for name in taken:
            self._note_unwritten(name, state, outcome)
        return [CopyStep.of(target, infos, outcome.placements[name], state.rules) for name, target in taken.items()]

    def _note_unread(self, infos: Sequence[TensorInfo], state: GroupState, outcome: Outcome) -> None:
        """A function may make nothing of what it is given."""
        read = {placed.source for placements in outcome.placements.values() for placed in placements}
        for number, info in enumerate(infos):
            if number in read:
                continue
            if info.numel:
                self._unwanted(info.name, info.name, f"{state.group.rule} makes nothing of it")
            else:
                self.plan.ignored.append(info.name)

    def _note_unwritten(self, name: str, state: GroupState, outcome: Outcome) -> None:
        """A function that makes its own memory may leave parts of it unwritten, or write them twice."""
        about = (name, *(info.name for info in state.infos))
        never = sum(p.numel for p in outcome.placements[name] if p.source is None)
        if never:
            total = self.targets.by_name[name].tensor.numel()
            self.plan.findings.append(
                Finding(
                    "rule", "error", f"{state.group.rule} leaves {never} of the {total} elements of {name} unwritten",
                    about, file_of(state.infos[0]), "let the function fill all of the memory that it makes",
                )
            )  # fmt: skip
        if name in outcome.overwritten:
            self.plan.findings.append(
                Finding(
                    "rule", "warning", f"{state.group.rule} writes parts of {name} twice; what it wrote last counts",
                    about, file_of(state.infos[0]),
                )
            )  # fmt: skip

    def _takes(self, target: Target, result: torch.Tensor | None, infos: Sequence[TensorInfo], rule: str) -> bool:
        """Whether a group's result fits its target, and nothing else fills that."""
        canonical = self.targets.canonical[target.name]
        if result is not None and not self._fits(target, result.shape, result.dtype, infos, rule):
            self.spoilt.add(canonical)
            return False
        if canonical in self.filled:
            self._conflict(target, infos[0], self.filled[canonical][1])
            return False
        if result is not None:
            self._note_cast(target, result.dtype, infos[0])
        self._fill(target, None, infos[0].name)
        return True

    # -- what is left

    def finish(self, infos: Mapping[str, TensorInfo]) -> None:
        """Everything has been placed: what is missing, what is unexpected, and whether anything fitted at all.

        Args:
            infos: The catalogue.
        """
        settle(self, infos)


def file_of(info: TensorInfo) -> str | None:
    """The file a tensor lies in, if it lies in one."""
    return info.extents[0].source.name if info.extents else None


def stored_dtype(info: TensorInfo) -> torch.dtype:
    """The dtype of a tensor's bytes in its source."""
    return info.extents[0].stored_dtype if info.extents else info.dtype
