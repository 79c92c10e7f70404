"""A picture of the tables: how many times as long as weightloaders each way takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.tables import title
from benchmarks.peers.ways import OURS, OURS_RAW, WAYS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.groups import Group
    from benchmarks.peers.results import Results

_OURS, _OTHERS_OF_OURS, _PEER, _LIMIT = "#1a7f64", "#8cc5b3", "#9aa5b1", "#d9c27a"


def draw(groups: Sequence[Group], results: Results, folder: Path) -> list[Path]:
    """Draw a panel for each group, as ``speed.svg`` and ``speed.png``."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "weightloaders", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    panels = []
    for group in groups:
        rows = [row for row in results.rows(group) if not row.failed]
        ours = next((row for row in rows if row.way in (OURS, OURS_RAW)), None)
        if ours is not None:
            panels.append((group, rows, ours))
    if not panels:
        return []
    columns = 2
    lines = -(-len(panels) // columns)
    heights = [max(len(p[1]) for p in panels[i * columns : (i + 1) * columns]) + 2 for i in range(lines)]
    figure, axes = plt.subplots(
        lines, columns, figsize=(15, 0.27 * sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (group, rows, ours) in zip(axes.flat, panels, strict=False):
        labels = [row.way + (" (lazy)" if WAYS[row.way].lazy else "") for row in rows]
        times = [row.seconds / ours.seconds for row in rows]
        errors = [
            [(row.seconds - row.least) / ours.seconds for row in rows],
            [(row.most - row.seconds) / ours.seconds for row in rows],
        ]
        axis.barh(
            labels,
            times,
            color=[_colour(row.way, ours.way) for row in rows],
            xerr=errors,
            error_kw={"elinewidth": 0.8, "ecolor": "#555"},
        )
        axis.invert_yaxis()
        axis.axvline(1, color=_OURS, linewidth=0.8)
        if max(times) > 20:  # beyond that the small ones can't be seen
            axis.set_xscale("log")
        for number, (time, most) in enumerate(zip(times, errors[1], strict=True)):
            axis.annotate(f" {time:.1f}", (time + most, number), va="center", fontsize=8)
        axis.set_title(title(group), loc="left", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.suptitle("Time to load, weightloaders = 1 (median; the thin lines are shortest and longest)", fontsize=12)
    written = []
    for suffix in ("svg", "png"):
        written.append(folder / f"speed.{suffix}")
        metadata = {"Date": None} if suffix == "svg" else {}
        figure.savefig(written[-1], dpi=110, metadata=metadata)
    plt.close(figure)
    return written


def _colour(way: str, ours: str) -> str:
    if way == ours:
        return _OURS
    if way.startswith("limit"):
        return _LIMIT
    return _OTHERS_OF_OURS if way.startswith(OURS) else _PEER
