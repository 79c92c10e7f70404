"""`Planner`: makes a `LoadPlan` from a catalogue, a model's wants, and those who know about names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from weightloaders.mapping import automatic, suggest
from weightloaders.mapping.names import Claim, Mapper, claim_name, natural_order
from weightloaders.mapping.rules import Rename, RuleMapper
from weightloaders.placing import GroupState, Placing
from weightloaders.plan import Finding, LoadPlan, Policies, Severity, listed, step_infos, step_targets
from weightloaders.weights.collector import collector_paused

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from weightloaders.targets import Targets
    from weightloaders.weights.info import TensorInfo

# So many names are tried before a whole plan is made to see whether a prefix is the right one.
_SAMPLE = 64
# More rules than this that match nothing have one cause.
_FEW = 3


@dataclass(slots=True)
class _Draft:
    """What the names came to, before anything is held against the model."""

    singles: list[tuple[TensorInfo, Claim]] = field(default_factory=list)
    calls: list[tuple[TensorInfo, Claim]] = field(default_factory=list)
    groups: dict[Any, GroupState] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    renamed: dict[str, str] = field(default_factory=dict)
    applied: automatic.Applied = field(default_factory=automatic.Applied)


class Planner:
    """Plans loads into one model.

    Args:
        targets: What the model wants filled.
        mappers: Who is asked about names, in order.
        policies: What is done about what doesn't fit.
        base_model_prefix: The prefix under which the model keeps its base model, if it says so.
        ignore_missing: Names that may be missing, by the model's own word.
        ignore_unexpected: Names that may be unexpected, by the model's own word.
        automatic_from: Position among the mappers where automatic prefixes belong; default: none are tried.
    """

    def __init__(
        self,
        targets: Targets,
        mappers: Sequence[Mapper],
        policies: Policies,
        *,
        base_model_prefix: str | None = None,
        ignore_missing: re.Pattern[str] | None = None,
        ignore_unexpected: re.Pattern[str] | None = None,
        automatic_from: int | None = None,
    ) -> None:
        self._targets = targets
        self._mappers = list(mappers)
        self._policies = policies
        self._base_model_prefix = base_model_prefix
        self._ignore_missing = ignore_missing
        self._ignore_unexpected = ignore_unexpected
        self._automatic_from = automatic_from

    @collector_paused()
    def plan(
        self, infos: Sequence[TensorInfo], *, notes: Sequence[str] = (), skipped: Mapping[str, str] | None = None
    ) -> LoadPlan:
        """The plan for a catalogue, with a known prefix stripped or added where that alone makes it whole.

        Args:
            infos: The catalogue.
            notes: What there is to say of the source.
            skipped: Files of the source left out, with the reason.
        """
        # Some mappers rely on `layers.2` coming before `layers.10`.
        infos = sorted(infos, key=lambda info: natural_order(info.name))
        plan = self._attempt(infos, self._mappers)
        if plan.missing and plan.unexpected and self._automatic_from is not None:
            plan = self._unwrapped_first(infos, plan)
        if plan.missing and plan.unexpected and self._automatic_from is not None:
            plan = self._with_prefix(infos, plan, self._automatic_from)
        plan.skipped_files = dict(skipped or {})
        _mention_left_out(plan, notes)
        _doubt_partial(plan)
        plan.targets, plan.ties, plan.catalogue = self._targets.by_name, self._targets.ties(), tuple(infos)
        plan.findings.extend(self._unused_rules(plan, infos))
        plan.findings.extend(self._left_behind(plan))
        plan.findings.extend(Finding("note", "info", note) for note in notes)
        order = {"error": 0, "warning": 1, "info": 2}
        plan.findings.sort(key=lambda finding: order[finding.severity])
        return plan

    # -- wrappers and prefixes

    def _unwrapped_first(self, infos: Sequence[TensorInfo], first: LoadPlan) -> LoadPlan:
        """The plan by rules that are written for names without wrappers, if it is whole; else the first plan."""
        has_rules = any(isinstance(mapper, RuleMapper) and not mapper.origin for mapper in self._mappers)
        if not has_rules or not any(map(automatic.is_wrapped, first.unexpected)):
            return first
        mappers = [automatic.WrapperMapper(self._targets.by_name), *self._mappers]
        if not self._may_help(first, mappers):
            return first
        plan = self._attempt(infos, mappers)
        return plan if plan.ok and not plan.missing else first

    def _with_prefix(self, infos: Sequence[TensorInfo], first: LoadPlan, position: int) -> LoadPlan:
        """The plan with the one known prefix that makes it whole; the first plan where none does, or several do."""
        whole: dict[frozenset[tuple[str, str]], tuple[Rename, LoadPlan]] = {}
        own = self._targets.by_name
        wrappers = automatic.WrapperMapper(own)
        for rename in automatic.known_prefixes(self._base_model_prefix):
            mappers: list[Mapper] = [*self._mappers]
            mappers.insert(position, automatic.PrefixMapper(rename, own, wrappers))
            if not self._may_help(first, mappers):
                continue
            plan = self._attempt(infos, mappers)
            if plan.ok and not plan.missing:
                whole.setdefault(_ways(plan), (rename, plan))
        if not whole:
            return first
        rename, plan = next(iter(whole.values()))
        candidates = [found for found, _ in whole.values()]
        if len(candidates) == 1:
            # Another copy of the model, under a prefix that nobody knows, would have done as well.
            before = {info.name for step in first.steps for info in step_infos(step)}
            taken = {info.name for step in plan.steps for info in step_infos(step)} - before
            candidates += automatic.rivals(rename, taken, plan.unexpected)
        if len(candidates) > 1:
            return _offering(first, candidates)
        plan.decided_by.append(f"automatic {rename}")
        return plan

    def _may_help(self, first: LoadPlan, mappers: Sequence[Mapper]) -> bool:
        """Whether any of some names that the model does not know would become one that it misses.

        A plan costs a second for tens of thousands of tensors, and most prefixes are plainly not the right one.
        """
        names, missing = first.unexpected, set(first.missing)
        leaf = first.missing[0].rpartition(".")[2]
        alike = [name for name in names if name.endswith(leaf)]
        sample = [*names[:: len(names) // _SAMPLE + 1], *alike[:: len(alike) // _SAMPLE + 1]]
        claims = (claim_name(name, mappers, self._targets.by_name) for name in sample)
        return any(c.target in missing or (c.group and not missing.isdisjoint(c.group.targets)) for c in claims)

    # -- one attempt

    def _attempt(self, infos: Sequence[TensorInfo], mappers: Sequence[Mapper]) -> LoadPlan:
        draft = self._draft(infos, mappers)
        placing = Placing(self._targets, self._policies, self._ignore_missing, self._ignore_unexpected)
        plan = placing.plan
        plan.dropped = draft.dropped
        plan.renamed = draft.renamed
        plan.findings.extend(
            Finding("rename", "info", sentence, names) for sentence, names in draft.applied.told(len(infos)).items()
        )
        plan.findings.extend(
            Finding("rule", "warning", f"{remark}: {listed(names)}", tuple(names))
            for remark, names in draft.remarks.items()
        )
        for info, claim in draft.singles:
            placing.place(claim.target, info, claim.rules)
        for info, claim in draft.calls:
            placing.hand_over(info, claim)
        for state in draft.groups.values():
            placing.place_group(state)
        placing.finish({info.name: info for info in infos})
        return plan

    def _draft(self, infos: Sequence[TensorInfo], mappers: Sequence[Mapper]) -> _Draft:
        draft = _Draft()
        own = self._targets.by_name
        for info in infos:
            claim = claim_name(info.name, mappers, own)
            if claim.automatic and (claim.group or claim.target in own):
                draft.applied.note(info.name, claim)
            if claim.remark:
                draft.remarks[claim.remark].append(info.name)
            if claim.dropped:
                draft.dropped.append(info.name)
            elif claim.group is not None:
                state = draft.groups.get(claim.group.key)
                if state is None:
                    state = draft.groups[claim.group.key] = GroupState.of(claim.group)
                state.members[claim.slot].append((claim.index, info))
                state.rules = claim.rules
            else:
                if claim.target != info.name and claim.target in own:
                    draft.renamed[info.name] = claim.target
                (draft.calls if claim.call_loader else draft.singles).append((info, claim))
        return draft

    def _unused_rules(self, plan: LoadPlan, infos: Sequence[TensorInfo]) -> list[Finding]:
        """Rules that match nothing are mostly mistaken."""
        if not infos:
            return []
        everything = [info.name for info in infos]
        names = plan.unexpected or everything
        found: list[Finding] = []
        for mapper in self._mappers:
            if not isinstance(mapper, RuleMapper) or not (unused := mapper.unused()):
                continue
            if mapper.origin and len(unused) == len(mapper.rules):
                # A plugin's rules are for some sources of a model, and this one is none of these.
                continue
            severity: Severity = "info" if mapper.origin else "warning"
            first = suggest.rename_before_rules(mapper.rules, everything) if len(unused) > 1 else None
            if first is not None or len(unused) > _FEW:
                message = f"{len(unused)} rules match no tensor of the source: {listed(unused)}"
                how = "" if first is None else f": {suggest.as_first_step(first)}"
                hint = f"they are written for other names than {names[0]!r}{how}"
                found.append(Finding("rule", severity, message, hint=hint))
                continue
            overtaken = mapper.overtaken(everything)
            for rule, pattern in zip(unused, mapper.sought(), strict=True):
                if rule in overtaken:
                    name, renamed = overtaken[rule]
                    message = f"{rule} comes too late: by the rules before it, {name!r} is {renamed!r} already"
                    # What a rename writes, later ones don't match.
                    found.append(Finding("rule", severity, message, (name,), hint="put it before these"))
                    continue
                near = suggest.nearest(pattern, names, cutoff=0.0) or names[0]
                message = f"{rule} matches no tensor of the source"
                found.append(Finding("rule", severity, message, hint=f"the source's names look like {near!r}"))
        return found

    def _left_behind(self, plan: LoadPlan) -> list[Finding]:
        """What would have gone with a weight, had the rule that takes the weight been written for it as well."""
        return [
            Finding(
                "rule", "warning",
                f"{rule} takes weights but leaves behind what goes with them: {listed(suggest.grouped(names, names))}",
                tuple(names), hint=hint and f"to take all of a module's tensors along: rules=[{hint}]",
            )
            for mapper in self._mappers
            if isinstance(mapper, RuleMapper)
            for rule, names, hint in mapper.left_behind(plan.unexpected)
        ]  # fmt: skip


def _doubt_partial(plan: LoadPlan) -> None:
    """What was done to some names only, where a policy lets others be missing, nothing has proved right: a warning."""
    if not plan.missing:
        return
    used = {info.name for step in plan.steps for info in step_infos(step)}
    hint = "if it is not what you mean, load with automatic=False and rules"
    plan.findings = [
        replace(finding, severity="warning", hint=hint)
        if finding.kind == "rename" and finding.tensors and not used.issubset(finding.tensors)
        else finding
        for finding in plan.findings
    ]


def _mention_left_out(plan: LoadPlan, notes: Sequence[str]) -> None:
    """Where something is missing, it may be in what the index does not name; the source's notes say so, and the way."""
    left_out = "; ".join(note for note in notes if "include_unindexed=True takes" in note)
    if left_out:
        plan.findings = [
            replace(finding, hint=f"{left_out}; or {finding.hint}")
            if finding.kind in ("missing", "incomplete", "nothing")
            else finding
            for finding in plan.findings
        ]


def _ways(plan: LoadPlan) -> frozenset[tuple[str, str]]:
    """What fills what in a plan: two prefixes that come to the same are one."""
    return frozenset(
        (target.name, info.name) for step in plan.steps for target in step_targets(step) for info in step_infos(step)
    )


def _offering(plan: LoadPlan, candidates: Sequence[Rename]) -> LoadPlan:
    """The same plan, with the prefixes that would make it whole for the caller to choose from."""
    rules = " or ".join(f"rules=[Rename({rename.old!r}, {rename.new!r})]" for rename in candidates)
    hint = f"the source holds it under several prefixes, so none was taken; choose one: {rules}"
    plan.findings = [
        replace(finding, hint=hint) if finding.kind in ("missing", "nothing") else finding for finding in plan.findings
    ]
    said = ", ".join(str(rename) for rename in candidates)
    plan.findings.append(Finding("rename", "info", f"several prefixes would make the source fit: {said}", hint=hint))
    return plan
