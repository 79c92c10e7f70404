"""The hook: before a load, each file that it will read is held against the checksum that is known of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

# Its names are resolved on first use.
import weightloaders as wl
from weightloaders.errors import SourceReadError
from weightloaders_checksum.settings import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.plan import Severity

logger = logging.getLogger(__name__)

_SHOWN = 6
_FROM_NOWHERE = "nothing says which files these come from, so no checksum was compared"


@wl.hookimpl
def before_load(plan: wl.LoadPlan) -> None:
    """Refuse a load of files that are not what they must be.

    Raises:
        SourceReadError: If a file has another checksum; or none is known, and that is to be an error.
        SourceError: If a list of checksums can't be read.
        ConfigError: If the settings are not allowed.
    """
    # A plan that has errors is not carried out.
    if not plan.ok:
        return
    asked = settings()
    files = [*(origin for info in plan.tensors_read for origin in info.origins), *plan.described_by]
    check = wl.FileCheck(files, [wl.ChecksumList(path, asked.root) for path in asked.lists])
    unknown = [source.name for source in check.unknown]
    nowhere = [info.name for info in plan.tensors_read if info.numel and not info.origins]
    nowhere = nowhere or ([] if plan.tensors_read else ["a stream's tensors"])
    if asked.unknown == "error":
        _refuse_unknown(unknown, nowhere)
    check.compare()
    check.raise_if_wrong()
    if check.due:
        # The report is told by way of the plan's findings.
        _add(plan, "note", "info", str(check))
    if asked.unknown != "warn":
        return
    if check.due or asked.lists:
        _warn(plan, unknown, nowhere)
    elif unknown or nowhere:
        # Where nobody keeps checksums at all, that is no news.
        said = f"no checksum is known of {_listed(unknown)}, so none was compared" if unknown else _FROM_NOWHERE
        _add(plan, "note", "info", said)
        if unknown:
            _say_once(said)


def _refuse_unknown(files: Sequence[str], tensors: Sequence[str]) -> None:
    hint = "list it in SHA256SUMS beside it, or allow it with WEIGHTLOADERS_CHECKSUM_UNKNOWN=warn"
    if files:
        raise SourceReadError(f"no checksum is known of {_listed(files)}", file=files[0], hint=hint)
    if tensors:
        raise SourceReadError(f"{_FROM_NOWHERE}: {_listed(tensors)}", tensor=tensors[0], hint=hint)


_told = False


def _say_once(text: str) -> None:
    """For whoever reads no reports."""
    global _told
    if not _told:
        _told = True
        logger.warning("%s; this is said once, and not at all with WEIGHTLOADERS_CHECKSUM_UNKNOWN=ignore", text)


def _warn(plan: wl.LoadPlan, files: Sequence[str], tensors: Sequence[str]) -> None:
    silence = "WEIGHTLOADERS_CHECKSUM_UNKNOWN=ignore silences this"
    if files:
        hint = f"list it in SHA256SUMS beside it; {silence}"
        _add(plan, "checksum", "warning", f"no checksum is known of {_listed(files)}", hint, files[0])
    if tensors:
        _add(plan, "checksum", "warning", f"{_FROM_NOWHERE}: {_listed(tensors)}", silence)


def _add(
    plan: wl.LoadPlan, kind: str, severity: Severity, message: str, hint: str | None = None, file: str | None = None
) -> None:
    from weightloaders.plan import Finding

    finding = Finding(kind, severity, message, file=file, hint=hint)
    # A plan may be run several times.
    if finding not in plan.findings:
        plan.findings.append(finding)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
