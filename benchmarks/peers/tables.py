"""Tables: on the terminal, and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.peers.results import MIB, Judged, Results, Row
from benchmarks.peers.ways import LIMIT_DIRECT, LIMIT_FRESH, OURS, OURS_RAW, WAYS
from benchmarks.peers.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from benchmarks.peers.groups import Group

_COLUMNS = ("way", "seconds", "spread", "/ ours", "/ limit", "cpu s", "extra MiB", "mapped MiB", "faults", "values")
_JUDGED = ("work", "bar", "measured", "reached")


def title(group: Group) -> str:
    """What a group is, for people."""
    memory = "" if group.memory == "fresh" else "into memory touched before"
    return ", ".join(filter(None, (WORKLOADS[group.workload].title, group.cache, memory, group.condition)))


def show(groups: Sequence[Group], results: Results, judged: Sequence[Judged], console: Console) -> None:
    """Print all tables."""
    for group in groups:
        table = Table(title=title(group), title_justify="left")
        for number, column in enumerate(_COLUMNS):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for cells in _rows(group, results):
            table.add_row(*cells, style="bold" if cells[0] in (OURS, OURS_RAW) else None)
        console.print(table)
    table = Table(*_JUDGED, title="What is demanded", title_justify="left")
    for one in judged:
        table.add_row(one.work, one.bar, one.measured, _reached(one), style=None if one.reached else "red")
    console.print(table)


def as_markdown(groups: Sequence[Group], results: Results, judged: Sequence[Judged]) -> str:
    """The same, in Markdown."""
    lines: list[str] = []
    for group in groups:
        lines += [f"## {title(group)}", "", *_markdown(_COLUMNS, _rows(group, results)), ""]
    rows = ((one.work, one.bar, one.measured, _reached(one)) for one in judged)
    lines += ["## What is demanded", "", *_markdown(_JUDGED, rows), ""]
    return "\n".join(lines)


def _rows(group: Group, results: Results) -> Iterator[tuple[str, ...]]:
    rows = results.rows(group)
    ours = next((row for row in rows if row.way in (OURS, OURS_RAW) and not row.failed), None)
    limit = next((row for row in rows if row.way in (LIMIT_FRESH, LIMIT_DIRECT)), None) or next(
        (row for row in rows if row.way.startswith("limit")), None
    )
    for row in rows:
        if row.failed:
            yield row.way, "fails", *[""] * 8
            continue
        yield (
            row.way + (" (lazy)" if WAYS[row.way].lazy else ""),
            f"{row.seconds:.3f}",
            f"{row.least:.3f} to {row.most:.3f}",
            _times(row, ours),
            _times(row, limit),
            f"{row.cpu:.2f}",
            _mib(row.extra),
            _mib(row.mapped),
            f"{row.faults:,.0f}",
            {True: "equal", False: "WRONG", None: ""}[row.equal],
        )


def _times(row: Row, other: Row | None) -> str:
    return f"{row.seconds / other.seconds:.2f}" if other is not None and other.seconds else ""


def _mib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:,.0f}"


def _reached(judged: Judged) -> str:
    return "yes" if judged.reached else "no"


def _markdown(columns: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
