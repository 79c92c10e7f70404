"""What is left once everything has been placed: missing, unexpected, tied, cast; and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weightloaders.errors import WeightLoadersError
from weightloaders.mapping import suggest
from weightloaders.mapping.dtypes import narrows
from weightloaders.placing import overlaps
from weightloaders.placing.advice import absent_part, mapping_hint, surplus_part
from weightloaders.placing.causes import cause_of_unexpected, packed_remark
from weightloaders.placing.groups import ABSENT
from weightloaders.placing.misfits import taken_together
from weightloaders.plan import Finding, Severity, listed, merged, step_infos, step_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.placing.misfits import Misfit
    from weightloaders.placing.placing import Placing
    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo


def settle(placing: Placing, infos: Mapping[str, TensorInfo]) -> None:
    """Complete a plan once everything has been placed."""
    plan = placing.plan
    plan.unexpected = list(dict.fromkeys(plan.unexpected))
    if not infos and placing.targets.by_name:
        hint = "is it the right file or folder, and was it saved whole?"
        plan.findings.append(Finding("nothing", "error", "the source holds no tensors", hint=hint))
    _settle_handed(placing)
    _settle_shared_memory(placing)
    _settle_misfits(placing)
    _settle_missing(placing, infos)
    _settle_unexpected(placing, infos)
    _settle_casts(placing)
    plan.unfilled = list(dict.fromkeys(plan.unfilled))
    plan.findings = merged(plan.findings)
    if placing.filled or not placing.targets.by_name or not plan.ok:
        return
    names, wanted = list(infos), list(placing.targets.by_name)
    hint = cause_of_unexpected(names) or mapping_hint(placing, names, wanted, infos) or (
        f"the source's names begin like {names[0]!r}, the model's like {wanted[0]!r}: is it another model's checkpoint?"
    )  # fmt: skip
    message = f"nothing in the source fits this model: none of {len(names)} tensors was matched"
    plan.findings.append(Finding("nothing", "error", message, (names[0],), _first_file(infos), hint))


def _settle_handed(placing: Placing) -> None:
    """Parameters' own loaders must get all parts."""
    for name, handed in placing.handed.items():
        absent = [part for part in placing.parts.get(name, ()) if part not in handed] if "" not in handed else []
        if not absent:
            continue
        severity = placing.policies.missing(name)
        placing.plan.findings.append(
            Finding(
                "incomplete", severity,
                f"of the parts of {name}, {listed(absent)} is missing; there is {listed(list(handed.values()))}",
                (name, *handed.values()),
                hint=ABSENT,
            )
        )  # fmt: skip
        placing.plan.missing.append(name)


def _settle_shared_memory(placing: Placing) -> None:
    """Parameters that lie in each other's memory must be meant to have the same values there."""
    by_name = placing.targets.by_name
    for cluster in overlaps.overlapping(by_name[name] for name in placing.filled):
        known = [(target, info) for target in cluster if (info := placing.filled[target.name][0]) is not None]
        try:
            found = overlaps.contradiction(known) if len(known) > 1 else None
        except WeightLoadersError as error:
            placing.plan.findings.append(
                Finding("conflict", "error", error.message, (cluster[0].name,), error.file, error.hint)
            )
            continue
        if found is not None:
            target, info = found
            placing.plan.findings.append(
                Finding(
                    "conflict", "error",
                    f"{listed([t.name for t in cluster])} share memory, but {info.name!r} has other values for it",
                    (target.name,), hint=f"leave one out, e.g. with rules=[Drop({info.name!r})]",
                )
            )  # fmt: skip


def _settle_misfits(placing: Placing) -> None:
    """Tensors of wrong shapes mostly have one cause, which is said once."""
    by_severity: dict[Severity, list[Misfit]] = defaultdict(list)
    for misfit in placing.misfits:
        by_severity[misfit.finding.severity].append(misfit)
    fitting = [placing.targets.by_name[name] for name in placing.fillers.values()] if placing.misfits else []
    alone = {id(misfit.finding) for misfit in placing.misfits}
    findings = [finding for finding in placing.plan.findings if id(finding) not in alone]
    for misfits in by_severity.values():
        findings += taken_together(misfits, fitting, getattr(placing.targets.model, "config", None))
    placing.plan.findings = _dtypes_together(findings)


def _dtypes_together(findings: Sequence[Finding]) -> list[Finding]:
    """Tensors of one dtype that can't become another are said once."""
    alike: dict[Any, list[Finding]] = defaultdict(list)
    for finding in findings:
        # What is said of one begins with its name.
        key = finding.message.partition(": ")[2] if finding.kind == "dtype" else id(finding)
        alike[key, finding.severity, finding.hint].append(finding)
    return [same[0] if len(same) == 1 else _one_dtype(said, same) for (said, _, _), same in alike.items()]


def _one_dtype(said: str, same: Sequence[Finding]) -> Finding:
    message = f"{len(same)} parameters: {said}: {listed([finding.tensors[0] for finding in same])}"
    return replace(same[0], message=message, tensors=tuple(dict.fromkeys(name for f in same for name in f.tensors)))


# ------------------------------------------------------------------ missing


def _settle_missing(placing: Placing, infos: Mapping[str, TensorInfo]) -> None:
    plan, targets, filled = placing.plan, placing.targets, placing.filled
    through_others = _filled_through_others(placing)
    spoilt_through_others = _spoilt_through_others(placing)
    computed: list[str] = []
    excused: list[str] = []
    absent: dict[Severity, list[str]] = defaultdict(list)
    for name in targets.by_name:
        canonical = targets.canonical[name]
        if canonical in filled:
            if placing.fillers[canonical] != name:
                plan.tied.setdefault(name, placing.fillers[canonical])
        elif name in plan.tied:
            continue
        elif canonical in placing.spoilt:
            plan.unfilled.append(name)
        elif name in through_others:
            plan.tied[name] = through_others[name]
        elif name in spoilt_through_others:
            plan.unfilled.append(name)
        elif targets.is_derived(name):
            computed.append(name)
        elif placing.ignore_missing is not None and placing.ignore_missing.search(name):
            excused.append(name)
        elif canonical == name:
            absent[placing.policies.missing(name)].append(name)
    for names, what in ((computed, "computed"), (excused, "initialised; the model says that this may be")):
        plan.unfilled.extend(names)
        if names:
            plan.findings.append(
                Finding("derived", "info", f"not in the source, but {what}: {listed(names)}", tuple(names))
            )
    for severity, names in absent.items():
        plan.missing.extend(names)
        plan.unfilled.extend(names)
        plan.findings.append(_missing_finding(placing, severity, names, infos))


def _filled_through_others(placing: Placing) -> dict[str, str]:
    """Names whose value comes with another's: declared ties, and views of memory that others fill entirely."""
    targets, filled = placing.targets, placing.filled
    result: dict[str, str] = {}
    both: list[str] = []
    for name, partners in targets.declared_partners().items():
        present = [p for p in sorted(partners) if targets.canonical.get(p) in filled]
        if not present or name not in targets.by_name:
            continue
        if targets.canonical[name] not in filled:
            result[name] = present[0]
        elif any(targets.canonical[p] != targets.canonical[name] for p in present):
            both.append(name)
    if both:
        placing.plan.findings.append(
            Finding(
                "tied", "info",
                f"the model ties {listed(both)}, and the source has each: they are tied if they turn out to be equal, "
                "else both are kept",
                tuple(both),
            )
        )  # fmt: skip
    rest: list[Target] = [t for name, t in targets.by_name.items() if targets.canonical[name] not in filled]
    return {**overlaps.covered(rest, (targets.by_name[name] for name in filled)), **result}


def _spoilt_through_others(placing: Placing) -> set[str]:
    """Names that would have had their value from another, had that one fitted."""
    targets, spoilt = placing.targets, placing.spoilt
    tied = {
        name
        for name, partners in targets.declared_partners().items()
        if any(targets.canonical.get(partner) in spoilt for partner in partners)
    }
    rest = [target for name, target in targets.by_name.items() if targets.canonical[name] not in spoilt]
    return tied | set(overlaps.covered(rest, (targets.by_name[name] for name in spoilt)))


def _missing_finding(
    placing: Placing, severity: Severity, names: list[str], infos: Mapping[str, TensorInfo]
) -> Finding:
    plan, everything = placing.plan, placing.targets.by_name
    groups = suggest.grouped(names, everything)
    message = (
        f"{len(names)} of {len(everything)} parameters {'is' if len(names) == 1 else 'are'} not in the source: "
        f"{listed(groups)}"
    )
    given_away = cause_of_unexpected(plan.unexpected)
    if given_away is not None:
        given_away = packed_remark(names[0], plan.unexpected) + given_away
    futile = next(iter(placing.futile.values()), "")
    hint = given_away or mapping_hint(placing, plan.unexpected, names, infos)
    if hint is None and not futile:
        hint = absent_part(placing, names)
    if hint is None:
        ways = [futile] if futile else []
        near = _namesake(placing, names[0], infos)
        if near is not None:
            ways.append(f"if {near!r} is what the model calls {names[0]!r}, rename it with a rule")
        if placing.filled:
            ways.append("the checkpoint is incomplete: fetch or export it again")
            part = groups[0].partition(".* (")[0] if len(groups) == 1 else names[0]
            ways.append(f"have it initialised instead: on_missing={{{part!r}: 'warn'}}")
        elif plan.unexpected:
            there = listed(suggest.grouped(plan.unexpected, infos))
            ways.append(f"the source holds {there}: say what it is in the model, by rules=[Rename(old, new)]")
        hint = "; or ".join(ways)
    return Finding(
        "missing",
        severity,
        message,
        tuple(names),
        _neighbours_file(placing, names[0]) or _first_file(infos),
        hint or None,
    )


def _namesake(placing: Placing, name: str, infos: Mapping[str, TensorInfo]) -> str | None:
    """Which tensor that nobody wants may be a parameter that is missing: of its shape, and called nearly the same."""
    shape = placing.targets.by_name[name].shape
    alike = [n for n in placing.plan.unexpected if n in infos and infos[n].shape == shape]
    # Whatever else it is called, it is of the same layer, the same expert.
    numbers = [part for part in name.split(".") if part.isdecimal()]
    same_place = [n for n in alike if [part for part in n.split(".") if part.isdecimal()] == numbers]
    return suggest.nearest(name, alike) or suggest.nearest(name, same_place, cutoff=0.0)


def _neighbours_file(placing: Placing, name: str) -> str | None:
    """The file that the tensors next to a missing one come from: there it should have been, too."""
    best, file = 0, None
    for step in placing.plan.steps:
        near = max(_common_segments(target.name, name) for target in step_targets(step))
        if near > best:
            found = next((info.extents[0].source.name for info in step_infos(step) if info.extents), None)
            best, file = (near, found) if found is not None else (best, file)
    return file


def _first_file(infos: Mapping[str, TensorInfo]) -> str | None:
    return next((info.extents[0].source.name for info in infos.values() if info.extents), None)


def _common_segments(a: str, b: str) -> int:
    count = 0
    for one, other in zip(a.split("."), b.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count


# ------------------------------------------------------------------ unexpected, cast


def _settle_unexpected(placing: Placing, infos: Mapping[str, TensorInfo]) -> None:
    plan = placing.plan
    by_severity: dict[Severity, list[str]] = defaultdict(list)
    for name in plan.unexpected:
        by_severity[placing.policies.unexpected(name)].append(name)
    for severity, names in by_severity.items():
        info = infos.get(names[0])
        hint = cause_of_unexpected(names) or placing.futile.get(names[0]) or surplus_part(placing, names)
        plan.findings.append(
            Finding(
                "unexpected", severity,
                f"{_counted(names, 'tensor')} of the source {'is' if len(names) == 1 else 'are'} not wanted by the "
                f"model: {listed(suggest.grouped(names, infos))}",
                tuple(names), info.extents[0].source.name if info is not None and info.extents else None, hint,
            )
        )  # fmt: skip


def _settle_casts(placing: Placing) -> None:
    by_pair: dict[tuple[Any, Any], list[str]] = defaultdict(list)
    for name, pair in placing.plan.cast.items():
        if narrows(*pair):
            by_pair[pair].append(name)
    for (stored, dtype), names in by_pair.items():
        placing.plan.findings.append(
            Finding(
                "cast", "info",
                f"{_counted(names, 'parameter')} may lose precision or range, from {stored} to {dtype}: "
                f"{listed(names)}",
                tuple(names),
            )
        )  # fmt: skip


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
