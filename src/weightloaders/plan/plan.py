"""`LoadPlan`: every byte's way from a source to a model, and everything found wrong on the way, before any is read."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightloaders.errors import PlanError, UnknownTensorError
from weightloaders.plan.explaining import explain_step
from weightloaders.plan.findings import listed
from weightloaders.plan.forecast import Forecast
from weightloaders.plan.steps import step_infos, step_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from weightloaders.plan.findings import Finding
    from weightloaders.plan.steps import Step
    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource

_UNFILLED = "not filled from the source: it keeps the value that it has, or is initialised"


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
        targets: Everything that the model wants filled, by name.
        ties: Name -> the first of the names that are, or are declared to be, one with it. Those that stand alone are
            left out.
        catalogue: Everything that the source holds.
        described_by: The files that say what the source holds, once the plan runs; see `Weights.describe`.
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
    targets: Mapping[str, Target] = field(default_factory=dict, repr=False)
    ties: Mapping[str, str] = field(default_factory=dict, repr=False)
    catalogue: Sequence[TensorInfo] = field(default=(), repr=False)
    described_by: Sequence[ByteSource] = field(default=(), repr=False, compare=False)
    runner: Callable[[LoadPlan, Any], Any] | None = field(default=None, repr=False)
    forecaster: Callable[[Sequence[Step]], Forecast] | None = field(default=None, repr=False)
    _forecast: Forecast | None = field(default=None, repr=False, compare=False)

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
    def tensors_read(self) -> list[TensorInfo]:
        """The source's tensors that running the plan reads; where code of others does the load, all that there are."""
        if not self.steps:
            return list(self.catalogue)
        return list({id(info): info for step in self.steps for info in step_infos(step)}.values())

    @property
    def forecast(self) -> Forecast:
        """Bytes, reads and memory that running the plan will take. What is on meta is thought of as on the CPU."""
        if self._forecast is None:
            # Of a stream nothing is known beforehand.
            self._forecast = self.forecaster(self.steps) if self.forecaster else Forecast()
        return self._forecast

    @property
    def bytes_to_read(self) -> int:
        """Bytes that running the plan reads from its sources."""
        return self.forecast.bytes_to_read

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
            raise PlanError(
                "this plan has nothing that could run it",
                plan=self,
                hint="make it with `plan_load`; one that was read back: plan_load(model, weights, plan=plan)",
            )
        return self.runner(self, model)

    def explain(self, name: str) -> str:
        """How one parameter is filled, from which file and bytes, through which rules; or why it is not.

        Args:
            name: A parameter's name, or a source tensor's.

        Raises:
            UnknownTensorError: If the plan knows nothing of that name.
        """
        lines = self._fillings(name)
        lines += [finding.text for finding in self.findings if name in finding.tensors]
        if name in self.cast:
            stored, own = self.cast[name]
            lines.append(f"{name} is cast from {stored} to {own}")
        if name in self.tied:
            lines.append(f"{name} shares its memory or value with {self.tied[name]}")
            lines += self._fillings(self.tied[name])
        lines += [
            f"{name} is {what}"
            for names, what in (
                (self.dropped, "dropped by a rule"),
                (self.ignored, "ignored: computed, equal to another, or left out by the model's own word"),
                (self.unfilled, _UNFILLED if self.ok else "not filled from the source"),
            )
            if name in names
        ]
        if lines:
            return "\n".join(dict.fromkeys(lines))
        names = [*self.loaded, *self.tied, *self.missing, *self.unexpected]
        near = [other for other in names if f".{name}." in f".{other}."] or difflib.get_close_matches(name, names, n=1)
        more = f" It is in {len(near) - 1} more names." if len(near) > 1 else ""
        raise UnknownTensorError(
            f"the plan has nothing named {name!r}",
            tensor=name,
            hint=f"did you mean {near[0]!r}?{more}" if near else None,
        )

    def _fillings(self, name: str) -> list[str]:
        return [
            explain_step(step, target)
            for step in self.steps
            for target in step_targets(step)
            if target.name == name or any(info.name == name for info in step_infos(step))
        ]

    def to_json(self, *, runnable: bool = True) -> str:
        """The plan as a JSON document (see :doc:`plan-json`).

        Args:
            runnable: Refuse a plan that could not be run again because a function of it has no name (a lambda, for
                one). With False it is written all the same, for reading only, and marked as not runnable.

        Raises:
            RuleError: If there is such a function.
        """
        # Here, because few plans are written down, and pydantic takes its time to import.
        from weightloaders.plan.document import text_of
        from weightloaders.plan.writing import as_document

        return text_of(as_document(self, runnable=runnable))

    @classmethod
    def from_json(cls, text: str | bytes) -> LoadPlan:
        """A plan from its document: to be looked at, and with ``plan_load(model, weights, plan=plan)`` to be run.

        Nothing is opened, imported or run on the document's word.

        Args:
            text: What `to_json` wrote.

        Raises:
            PlanError: If it is no such document, of another version, or damaged.
        """
        from weightloaders.plan.document import parsed
        from weightloaders.plan.reading import as_plan

        return as_plan(parsed(text))

    def __str__(self) -> str:
        lines = [
            f"{len(self.loaded)} parameter{'' if len(self.loaded) == 1 else 's'} from {self.bytes_to_read:,} bytes"
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
