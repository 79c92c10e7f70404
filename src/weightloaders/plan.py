"""`LoadPlan`: every byte's way from a source to a model, and everything found wrong on the way, before any is read."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from weightloaders.errors import PlanError, RuleError, UnknownTensorError
from weightloaders.mapping.patterns import Pattern
from weightloaders.mapping.placement import Constant, Placement, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo

Severity = Literal["error", "warning", "info"]
Policy = Literal["error", "warn", "ignore"]
PolicyOption = Policy | dict[str | re.Pattern[str], Policy] | dict[str, Policy]

_SEVERITIES: dict[str, Severity] = {"error": "error", "warn": "warning", "ignore": "info"}
# A finding names this many tensors; the plan's lists have them all.
_SHOWN = 6
# The number of a layer within a name.
_NUMBER = re.compile(r"(?<![\w-])\d+(?=\.[A-Za-z_])")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the plan found.

    Attributes:
        kind: ``missing``, ``unexpected``, ``shape``, ``dtype``, ``conflict``, ``incomplete``, ``rule``, ``nothing``,
            ``cast``, ``rename``, ``tied``, ``derived`` or ``note``.
        severity: ``error`` stops the load; ``warning`` and ``info`` are reported.
        message: A sentence.
        tensors: The tensors it is about.
        file: The file at fault.
        hint: What to do.
    """

    kind: str
    severity: Severity
    message: str
    tensors: tuple[str, ...] = ()
    file: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"

    @property
    def text(self) -> str:
        """The message with the file and what to do."""
        lines = [self.message]
        if self.file and self.file not in self.message:
            lines.append(f"    file: {self.file}")
        if self.hint:
            lines.append(f"    what to do: {self.hint}")
        return "\n".join(lines)


def listed(names: Sequence[str]) -> str:
    """Some names as text, the rest as a number."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The same findings, but of those that differ only in the numbers of layers the first, about all their tensors."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        said = (_NUMBER.sub("*", text or "") for text in (finding.message, finding.hint))
        alike.setdefault((finding.kind, finding.severity, *said), []).append(finding)
    return [same[0] if len(same) == 1 else _merged(same) for same in alike.values()]


def _merged(same: Sequence[Finding]) -> Finding:
    return replace(
        same[0],
        message=f"{same[0].message} (and {len(same) - 1} more like it)",
        tensors=tuple(dict.fromkeys(name for finding in same for name in finding.tensors)),
    )


class Policies:
    """What is done about missing, unexpected and mismatched tensors.

    Args:
        missing: For parameters that the source doesn't fill.
        unexpected: For tensors that the model doesn't want.
        mismatched: For tensors of another shape or kind of number.

    Each is ``"error"``, ``"warn"`` or ``"ignore"``, or a dict of name pattern -> one of these: the first that matches
    counts; without a match the default does (error, warn, error). A pattern's segments match side by side anywhere in a
    name; a compiled regular expression is searched.

    Raises:
        RuleError: If it is anything else.
    """

    def __init__(
        self, missing: PolicyOption = "error", unexpected: PolicyOption = "warn", mismatched: PolicyOption = "error"
    ) -> None:
        self._missing = _policy("on_missing", missing, "error")
        self._unexpected = _policy("on_unexpected", unexpected, "warn")
        self._mismatched = _policy("on_mismatch", mismatched, "error")

    def missing(self, name: str) -> Severity:
        """The severity of a missing parameter."""
        return self._missing(name)

    def unexpected(self, name: str) -> Severity:
        """The severity of an unexpected tensor."""
        return self._unexpected(name)

    def mismatched(self, name: str) -> Severity:
        """The severity of a mismatch."""
        return self._mismatched(name)


def _policy(option: str, value: Any, default: Policy) -> Callable[[str], Severity]:
    if isinstance(value, str):
        return functools.partial(_always, _severity(option, value))
    if not isinstance(value, dict):
        raise _no_policy(option, value)
    compiled = [(_search(pattern), _severity(option, policy)) for pattern, policy in value.items()]

    def severity(name: str) -> Severity:
        return next((s for search, s in compiled if search(name)), _SEVERITIES[default])

    return severity


def _always(severity: Severity, _: str) -> Severity:
    return severity


def _severity(option: str, value: Any) -> Severity:
    if not isinstance(value, str) or value not in _SEVERITIES:
        raise _no_policy(option, value)
    return _SEVERITIES[value]


def _no_policy(option: str, value: Any) -> RuleError:
    return RuleError(
        f"{option} can't be {value!r}",
        hint="it is 'error', 'warn' or 'ignore', or a dict of name pattern -> one of these",
    )


def _search(pattern: Any) -> Callable[[str], object]:
    if isinstance(pattern, re.Pattern):
        return pattern.search
    anywhere = Pattern(pattern).anywhere
    return lambda name: anywhere.search(name + ".")


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Fill one target by strided copies from source tensors; nothing is computed, at most cast.

    Attributes:
        target: What is filled.
        sources: The tensors that the placements read, in the order of their numbers.
        placements: Which elements of which source go where; both sides in row-major order. A source that is no
            number is a value that is written, or None for what nothing is written to.
        rules: The rules that led here, for the report.
    """

    target: Target
    sources: tuple[TensorInfo, ...]
    placements: tuple[Placement, ...]
    rules: tuple[str, ...] = ()

    @classmethod
    def whole(cls, target: Target, info: TensorInfo, rules: tuple[str, ...] = ()) -> CopyStep:
        """A source tensor as it is."""
        return cls(target, (info,), (whole(0, info.numel),), rules)

    @classmethod
    def of(
        cls, target: Target, infos: Sequence[TensorInfo], placements: Sequence[Placement], rules: tuple[str, ...] = ()
    ) -> CopyStep:
        """Parts of some of these tensors."""
        used = dict.fromkeys(p.source for p in placements if isinstance(p.source, int))
        numbers = {source: number for number, source in enumerate(used)}
        renumbered = (p._replace(source=numbers[p.source]) if isinstance(p.source, int) else p for p in placements)
        return cls(target, tuple(infos[source] for source in used), tuple(renumbered), rules)


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Read source tensors, run a function on them, copy its results into targets."""

    targets: Mapping[str, Target]
    sources: tuple[TensorInfo | tuple[TensorInfo, ...], ...]
    function: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]
    rules: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallStep:
    """Hand a source tensor to the parameter's own ``weight_loader``."""

    target: Target
    info: TensorInfo
    shard_id: Any = None
    rules: tuple[str, ...] = ()


Step = CopyStep | ComputeStep | CallStep


def step_targets(step: Step) -> list[Target]:
    """What a step fills."""
    return list(step.targets.values()) if isinstance(step, ComputeStep) else [step.target]


def step_infos(step: Step) -> list[TensorInfo]:
    """What a step reads."""
    if isinstance(step, CopyStep):
        return list(step.sources)
    if isinstance(step, CallStep):
        return [step.info]
    return [i for s in step.sources for i in (s if isinstance(s, tuple) else (s,))]


@dataclass(slots=True)
class LoadPlan:
    """What a load would do.

    Attributes:
        steps: What is to be read, and where it goes.
        findings: Everything worth saying, errors first.
        missing: Parameters that the source doesn't fill.
        unexpected: Source tensors that the model doesn't want, and what rules make that it doesn't.
        ignored: Source tensors that nothing is lost with: computed rather than learnt, equal to another that is loaded
            in their place, or left out by the model's own word.
        mismatched: Tensors whose shape or kind of number doesn't fit.
        unfilled: Parameters left unfilled on purpose (by a policy).
        cast: Parameter -> stored dtype and its own.
        tied: Parameter -> the one whose memory or value it shares.
        renamed: Source name -> the model's name, where they differ.
        dropped: Source tensors left out by a rule.
        skipped_files: Files of the source left out, with the reason.
        decided_by: What decided about names and layouts, in order.
    """

    steps: list[Step] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    skipped_files: dict[str, str] = field(default_factory=dict)
    decided_by: list[str] = field(default_factory=list)
    runner: Callable[[LoadPlan, Any], Any] | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that stops the load."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop the load."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def loaded(self) -> list[str]:
        """Names that the steps fill."""
        return list(dict.fromkeys(target.name for step in self.steps for target in step_targets(step)))

    @property
    def bytes_to_read(self) -> int:
        """Bytes that running the plan reads from its sources."""
        return sum(_bytes_of(step) for step in self.steps)

    def raise_if_errors(self) -> None:
        """Raise what stops the load, if anything does.

        Raises:
            PlanError: With the plan and all its errors. No parameter was touched.
        """
        errors = self.errors
        if not errors:
            return
        first = errors[0]
        # A rule that matched nothing is no error by itself, but mostly why there are some.
        rules = [finding for finding in self.findings if finding.kind == "rule" and finding.severity == "warning"]
        body = "\n".join([*(f"- {finding.text}" for finding in errors), *(f"- {finding}" for finding in rules)])
        raise PlanError(
            f"the checkpoint does not fit the model; nothing was changed\n{body}",
            plan=self,
            file=first.file,
            tensor=first.tensors[0] if first.tensors else None,
        )

    def run(self, model: torch.nn.Module) -> Any:
        """Carry the plan out.

        Args:
            model: The model it was made for.

        Returns:
            A `LoadReport`.

        Raises:
            PlanError: If the plan has errors, or the model is another one.
            LoadError: If reading fails on the way.
        """
        self.raise_if_errors()
        if self.runner is None:
            raise PlanError("this plan has nothing that could run it", plan=self, hint="make it with `plan_load`")
        return self.runner(self, model)

    def explain(self, name: str) -> str:
        """How one parameter is filled, from which file and bytes, through which rules; or why it is not.

        Args:
            name: A parameter's name, or a source tensor's.

        Raises:
            UnknownTensorError: If the plan knows nothing of that name.
        """
        lines = [
            _explain_step(step, target)
            for step in self.steps
            for target in step_targets(step)
            if target.name == name or any(info.name == name for info in step_infos(step))
        ]
        lines += [finding.text for finding in self.findings if name in finding.tensors]
        if name in self.tied:
            lines.append(f"{name} shares its memory or value with {self.tied[name]}")
        lines += [
            f"{name} is {what}"
            for names, what in (
                (self.dropped, "dropped by a rule"),
                (self.ignored, "ignored: computed, equal to another, or left out by the model's own word"),
            )
            if name in names
        ]
        if lines:
            return "\n".join(lines)
        near = difflib.get_close_matches(name, [*self.loaded, *self.tied, *self.missing, *self.unexpected], n=1)
        raise UnknownTensorError(
            f"the plan has nothing named {name!r}", tensor=name, hint=f"did you mean {near[0]!r}?" if near else None
        )

    def to_json(self) -> str:
        """The plan as a JSON document: lists, findings, and every step with its files and byte ranges."""
        return json.dumps(
            {
                "ok": self.ok,
                "decided_by": self.decided_by,
                "bytes_to_read": self.bytes_to_read,
                "missing": self.missing,
                "unexpected": self.unexpected,
                "ignored": self.ignored,
                "mismatched": self.mismatched,
                "unfilled": self.unfilled,
                "dropped": self.dropped,
                "tied": self.tied,
                "renamed": self.renamed,
                "cast": {name: [str(a), str(b)] for name, (a, b) in self.cast.items()},
                "skipped_files": self.skipped_files,
                "findings": [
                    {
                        "kind": f.kind, "severity": f.severity, "message": f.message, "tensors": list(f.tensors),
                        "file": f.file, "hint": f.hint,
                    }
                    for f in self.findings
                ],
                "steps": [_step_as_data(step) for step in self.steps],
            },
            indent=2,
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{len(self.loaded)} parameters from {self.bytes_to_read:,} bytes"
            + (f", decided by {', '.join(self.decided_by)}" if self.decided_by else ""),
            *(
                f"{label}: {len(names)} ({listed(list(names))})"
                for label, names in (
                    ("missing", self.missing), ("unexpected", self.unexpected), ("mismatched", self.mismatched),
                    ("dropped", self.dropped), ("tied", list(self.tied)), ("cast", list(self.cast)),
                )
                if names
            ),
            *map(str, self.findings),
        ]  # fmt: skip
        return "\n".join(lines)


def _bytes_of(step: Step) -> int:
    if not isinstance(step, CopyStep):
        return sum(info.bytes_stored for info in step_infos(step))
    total = 0
    for number, info in enumerate(step.sources):
        # What lies scattered, or is made by its loader, is read as a whole, once.
        total += (
            sum(_elements_read(p) for p in step.placements if p.source == number)
            * info.extents[0].stored_dtype.itemsize
            if _lies_in_one_run(info)
            else info.bytes_stored
        )
    return total


def _elements_read(placed: Placement) -> int:
    """How many elements of its source a copy reads; what it repeats it reads once."""
    return math.prod(count for count, step, _ in placed.dims if step)


def _lies_in_one_run(info: TensorInfo) -> bool:
    return info.is_raw and len(info.extents) == 1 and info.extents[0].is_contiguous


def describe_source(info: TensorInfo) -> str:
    """Where a tensor lies, in words."""
    if not info.is_raw or not info.extents:
        return f"{info.name} (made by its loader)" if not info.is_raw else f"{info.name} (empty)"
    first = info.extents[0]
    more = f" and {len(info.extents) - 1} more extents" if len(info.extents) > 1 else ""
    return f"{info.name} in {first.source.name}, bytes {first.offset} to {first.offset + first.length}{more}"


def _explain_step(step: Step, target: Target) -> str:
    lines = [f"{target.name}  {list(target.shape)} {target.dtype}"]
    if isinstance(step, CopyStep):
        shown = step.placements[:_SHOWN]
        lines += [f"  {_where_to(p, step.target)} from {_where_from(p, step)}" for p in shown]
        if len(step.placements) > len(shown):
            lines.append(f"  and {len(step.placements) - len(shown)} more pieces")
    else:
        how = (
            "handed to the parameter's own weight_loader" if isinstance(step, CallStep) else f"computed ({step.reason})"
        )
        lines.append(f"  {how} from:")
        lines.extend(f"    {describe_source(info)}" for info in step_infos(step)[:_SHOWN])
    lines.extend(f"  by {rule}" for rule in step.rules)
    return "\n".join(lines)


def _where_to(placed: Placement, target: Target) -> str:
    if placed.numel == target.tensor.numel() and placed.is_contiguous:
        return "all of it"
    if placed.is_contiguous:
        return f"elements {placed.target_start} to {placed.target_start + placed.numel}"
    return f"{placed.numel} elements from {placed.target_start} on, {_loops(placed, 2)},"


def _where_from(placed: Placement, step: CopyStep) -> str:
    if not isinstance(placed.source, int):
        return "nowhere" if placed.source is None else f"the constant {placed.source.value}"
    info = step.sources[placed.source]
    described = describe_source(info)
    if placed.numel == info.numel and placed.is_contiguous:
        return described
    if placed.is_contiguous:
        return f"elements {placed.source_start} to {placed.source_start + placed.numel} of {described}"
    return f"elements from {placed.source_start} on, {_loops(placed, 1)}, of {described}"


def _loops(placed: Placement, side: Literal[1, 2]) -> str:
    """The loops of a copy on one side, in words: "512 times 64 in steps of 4,096"."""
    *outer, last = placed.dims
    inner = [f"{last[0]} in a row" if last[side] == 1 else f"{last[0]} in steps of {last[side]}"]
    return " of ".join([*(f"{dim[0]} times, in steps of {dim[side]}," for dim in outer), *inner])


def _step_as_data(step: Step) -> dict[str, Any]:
    data: dict[str, Any] = {
        "kind": {CopyStep: "copy", ComputeStep: "compute", CallStep: "call"}[type(step)],
        "targets": [target.name for target in step_targets(step)],
        "rules": list(step.rules),
    }
    if isinstance(step, CopyStep):
        data["sources"] = [
            {"name": info.name, "files": [[e.source.name, e.offset, e.length] for e in info.extents]}
            for info in step.sources
        ]
        data["pieces"] = [
            {
                **({"source": step.sources[p.source].name} if isinstance(p.source, int) else {}),
                **({"constant": p.source.value} if isinstance(p.source, Constant) else {}),
                "from": p.source_start,
                "to": p.target_start,
                "loops": [list(dim) for dim in p.dims],
            }
            for p in step.placements
        ]
    else:
        data["sources"] = [info.name for info in step_infos(step)]
    return data
