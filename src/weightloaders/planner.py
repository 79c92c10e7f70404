"""`Planner`: makes a `LoadPlan` from a catalogue, a model's wants, and those who know about names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightloaders.mapping import suggest
from weightloaders.mapping.names import Claim, Mapper, claim_name
from weightloaders.placing import GroupState, Placing
from weightloaders.plan import Finding, LoadPlan, Policies

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from weightloaders.targets import Targets
    from weightloaders.weights.info import TensorInfo


@dataclass(slots=True)
class _Draft:
    """What the names came to, before anything is held against the model."""

    singles: dict[str, list[tuple[TensorInfo, Claim]]] = field(default_factory=lambda: defaultdict(list))
    calls: list[tuple[TensorInfo, Claim]] = field(default_factory=list)
    groups: dict[Any, GroupState] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)


class Planner:
    """Plans loads into one model.

    Args:
        targets: What the model wants filled.
        mappers: Who is asked about names, in order. The known prefixes are tried in front of the ``automatic_from``-th.
        policies: What is done about what doesn't fit.
        base_model_prefix: The prefix under which the model keeps its base model, if it says so.
        ignore_missing: Names that may be missing, by the model's own word.
        ignore_unexpected: Names that may be unexpected, by the model's own word.
        automatic_from: Position among the mappers where automatic prefixes belong.
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
        self.targets = targets
        self.mappers = list(mappers)
        self.policies = policies
        self.own = targets.tensors
        self._base_model_prefix = base_model_prefix
        self._ignore_missing = ignore_missing
        self._ignore_unexpected = ignore_unexpected
        self._automatic_from = len(self.mappers) if automatic_from is None else automatic_from

    def plan(
        self, infos: Sequence[TensorInfo], *, notes: Sequence[str] = (), skipped: Mapping[str, str] | None = None
    ) -> LoadPlan:
        """The plan for a catalogue, with a known prefix stripped or added where that alone makes it whole."""
        plan = self._attempt(infos, self.mappers)
        if plan.missing:
            plan = self._with_prefix(infos, plan)
        plan.skipped_files = dict(skipped or {})
        plan.findings.extend(Finding("note", "info", note) for note in notes)
        order = {"error": 0, "warning": 1, "info": 2}
        plan.findings.sort(key=lambda finding: order[finding.severity])
        return plan

    def _with_prefix(self, infos: Sequence[TensorInfo], first: LoadPlan) -> LoadPlan:
        names = [info.name for info in infos]
        whole: list[tuple[LoadPlan, str]] = []
        for rename in suggest.known_prefixes(self._base_model_prefix):
            old, new = str(rename.old), rename.new
            # Each attempt costs a whole plan, so a prefix that can't matter is not tried.
            if not any(name.startswith(old + ".") for name in (names if old else ())) and not any(
                name.startswith(new + ".") for name in (self.own if new else ())
            ):
                continue
            mappers = [*self.mappers]
            mappers.insert(self._automatic_from, suggest.PrefixMapper(rename))
            candidate = self._attempt(infos, mappers)
            if candidate.ok and not candidate.missing and candidate.renamed:
                whole.append((candidate, str(rename)))
        if not whole:
            return first
        plans = {tuple(sorted(plan.renamed.items())) for plan, _ in whole}
        if len(plans) > 1:
            first.findings.append(
                Finding(
                    "rename", "info", f"several prefixes would make the source fit: {', '.join(text for _, text in whole)}",
                    hint="choose one with `rules=`",
                )
            )  # fmt: skip
            return first
        plan, text = whole[0]
        plan.decided_by.append(f"automatic {text}")
        plan.findings.append(
            Finding("rename", "info", f"{len(plan.renamed)} names were matched by an automatic {text}")
        )
        return plan

    # -- one attempt

    def _attempt(self, infos: Sequence[TensorInfo], mappers: Sequence[Mapper]) -> LoadPlan:
        draft = self._draft(infos, mappers)
        placing = Placing(self.targets, self.policies, self._ignore_missing, self._ignore_unexpected)
        placing.plan.dropped = draft.dropped
        placing.plan.renamed = draft.renamed
        placing.plan.findings.extend(Finding("rename", "warning", remark) for remark in draft.remarks)
        for name, sources in draft.singles.items():
            for info, claim in sources:
                placing.place(name, info, claim.rules)
        for info, claim in draft.calls:
            placing.hand_over(info, claim)
        for state in draft.groups.values():
            placing.place_group(state)
        placing.finish({info.name: info for info in infos})
        return placing.plan

    def _draft(self, infos: Sequence[TensorInfo], mappers: Sequence[Mapper]) -> _Draft:
        draft = _Draft()
        for info in infos:
            claim = claim_name(info.name, mappers, self.own)
            if claim.remark:
                draft.remarks.append(claim.remark)
            if claim.dropped:
                draft.dropped.append(info.name)
            elif claim.group is not None:
                state = draft.groups.setdefault(claim.group.key, GroupState.of(claim.group))
                state.members[claim.slot].append((claim.index, info))
                state.rules = claim.rules
            else:
                if claim.target != info.name:
                    draft.renamed[info.name] = claim.target
                if claim.call_loader:
                    draft.calls.append((info, claim))
                else:
                    draft.singles[claim.target].append((info, claim))
        return draft
