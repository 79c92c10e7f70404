"""``python -m benchmarks.peers``: make the checkpoints, measure, print the tables, write them down and draw them."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.peers.checkpoints import write
from benchmarks.peers.groups import GROUPS, ROBUST
from benchmarks.peers.measure import TINY
from benchmarks.peers.results import Results, judge
from benchmarks.peers.running import Record, left_out, run_group, run_group_here
from benchmarks.peers.tables import as_markdown, show
from benchmarks.peers.ways import WAYS
from benchmarks.peers.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.groups import Group

RESULTS = Path(__file__).parent.parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if values differ, or a way of ours fails."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 170)
    groups = _chosen(options)
    for way, package in left_out(groups).items():
        console.print(f"left out: {way} ({package} is not installed; see benchmarks/requirements.txt)")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        records = _run(groups, Path(place), options, console)
    groups = tuple(group for group in (*GROUPS, *ROBUST) if any(r["group"] == group.key for r in records))
    results = Results(records)
    if options.small:
        for group in groups:
            ways = [row.way for row in results.rows(group) if not row.failed]
            console.print(f"{group.key}: {len(ways)} ways ran", highlight=False)
    else:
        show(groups, results, judge(results, groups), console)
    for line in (*results.failures, *results.wrong):
        console.print(line, markup=False, highlight=False)
    if not results.wrong:
        console.print("The values are the reference's, in every way, each time.")
    if options.output is not None:
        _write_down(options.output, groups, records, results, console)
    return int(bool(results.wrong) or any("weightloaders" in line.split(": ")[1] for line in results.failures))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the checkpoints; 1: mostly 1 to 1.5 GB")
    parser.add_argument("--runs", type=int, default=5, help="rounds that are timed, after one that watches memory")
    parser.add_argument("--only", action="append", metavar="WORD", help="groups with that word, e.g. 'f32, warm'")
    parser.add_argument("--ways", action="append", metavar="PATTERN", help="these ways, e.g. 'limit*'")
    parser.add_argument("--robust", action="store_true", help="also with little memory, few open files, busy processes")
    parser.add_argument("--small", action="store_true", help="everything tiny, once, in this process: compares values")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: the system's for such)")
    parser.add_argument("--output", type=Path, nargs="?", const=RESULTS, help="where to write figures, tables, chart")
    parser.add_argument("--keep", action="store_true", help="keep what the output has of groups that are not measured")
    options = parser.parse_args(arguments)
    if options.keep and options.output is None:
        parser.error("--keep needs --output")
    if options.small:
        options.scale = TINY
    return options


def _chosen(options: argparse.Namespace) -> tuple[Group, ...]:
    groups = (*GROUPS, *(ROBUST if options.robust else ()))
    if options.only:
        groups = tuple(group for group in groups if any(word in group.key for word in options.only))
    if options.ways:
        groups = tuple(
            replace(group, ways=tuple(w for w in group.ways if any(map(partial(fnmatchcase, w), options.ways))))
            for group in groups
        )
    return groups


def _run(groups: Sequence[Group], place: Path, options: argparse.Namespace, console: Console) -> list[Record]:
    records: list[Record] = []
    if options.keep:
        measured = {group.key for group in groups}
        before = json.loads((options.output / "results.json").read_text())["records"]
        records = [record for record in before if record["group"] not in measured]
    start = time.monotonic()
    # Groups of one workload follow each other, so that only one checkpoint at a time takes room.
    for name in dict.fromkeys(group.workload for group in groups):
        own = [group for group in groups if group.workload == name]
        scales = {name: options.scale} if options.small else {name: options.scale, f"tiny-{name}": TINY}
        for folder, scale in scales.items():
            with console.status(f"writing {folder}"):
                _write_checkpoints(name, own, place / folder, scale)
        for group in own:
            with console.status(group.key) as status:
                if options.small:
                    records += run_group_here(group, place, options.scale)
                else:
                    records += run_group(group, place, options.scale, options.runs, status.update)
            console.print(f"{time.monotonic() - start:6.0f} s  {group.key}", highlight=False)
            if options.output is not None:
                _write_figures(options.output, records)
        for folder in scales:
            shutil.rmtree(place / folder)
    return records


def _write_checkpoints(name: str, groups: Sequence[Group], folder: Path, scale: float) -> None:
    workload = WORKLOADS[name]
    formats = dict.fromkeys(WAYS[way].format for g in groups for way in g.ways if not WAYS[way].missing)
    write(workload, workload.sized(scale), folder, formats)


def _write_down(
    folder: Path, groups: Sequence[Group], records: Sequence[Record], results: Results, console: Console
) -> None:
    _write_figures(folder, records)
    about = "\n".join(f"- {key}: {value}" for key, value in _machine().items())
    tables = as_markdown(groups, results, judge(results, groups))
    (folder / "results.md").write_text(f"# Measured\n\nBy `python -m benchmarks.peers`.\n\n{about}\n\n{tables}")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no chart: matplotlib is not installed; see benchmarks/requirements.txt")
        return
    from benchmarks.peers.chart import draw

    draw([group for group in groups if group.drawn], results, folder)


def _write_figures(folder: Path, records: Sequence[Record]) -> None:
    """All raw figures, a record a line. After each group, so that a run that is ended early leaves something."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(record) for record in records)
    text = f'{{"machine": {json.dumps(_machine())},\n "records": [\n  {lines}\n]}}\n'
    (folder / "results.json").write_text(text)


def _machine() -> dict[str, Any]:
    packages = ("torch", "safetensors", "transformers", "accelerate", "runai-model-streamer", "fastsafetensors",
                "tensorizer", "numpy")  # fmt: skip
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "processors": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB",
        "transparent huge pages": huge.read_text().split("[")[1].split("]")[0] if huge.exists() else "unknown",
        "versions": ", ".join(versions),
    }


if __name__ == "__main__":
    sys.exit(main())
