"""`Finding`: what a plan found; `Policies`: how grave it is."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from weightloaders.errors import RuleError
from weightloaders.mapping.patterns import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
