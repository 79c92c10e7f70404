"""What was measured, summed up, and held against what the project demands of itself."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.peers.groups import GROUPS, ROBUST, Group
from benchmarks.peers.ways import (
    FROM_PRETRAINED,
    LIMIT_DIRECT,
    LIMIT_FRESH,
    OUR_FROM_PRETRAINED,
    OURS,
    OURS_RAW,
    SAFE_OPEN,
    STRUCT,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.running import Record

MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A way's figures in a group: medians.

    Attributes:
        way: Its name.
        seconds: Time.
        least: The shortest.
        most: The longest.
        cpu: Processor time, of user and system.
        extra: Most anonymous and shared memory at a time beyond what the process had and the model is, in bytes.
        mapped: Most memory at a time that was files mapped, beyond what was mapped before, in bytes.
        faults: Page faults.
        runs: How often it was timed.
        equal: Whether the values were the reference's each time; None for a limit.
        failed: Why there are no figures, if so.
    """

    way: str
    seconds: float = 0.0
    least: float = 0.0
    most: float = 0.0
    cpu: float = 0.0
    extra: float | None = None
    mapped: float | None = None
    faults: float = 0.0
    runs: int = 0
    equal: bool | None = True
    failed: str = ""


class Results:
    """Records of measurements, by group and way."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def rows(self, group: Group) -> list[Row]:
        """A row for each way that was tried, limits first, then from the quickest to the slowest."""
        rows = [row for way in group.ways if (row := self.row(group, way)) is not None]
        return sorted(rows, key=lambda row: (not row.way.startswith("limit"), bool(row.failed), row.seconds))

    def row(self, group: Group, way: str) -> Row | None:
        """The figures of one way; None if it was not tried."""
        records = [r for r in self._records if r["group"] == group.key and r["way"] == way]
        if not records:
            return None
        failed = next((r["failed"] for r in records if "failed" in r), "")
        timed = [r for r in records if "seconds" in r and not r["sampled"]]
        if failed or not timed:
            return Row(way, failed=failed or "it was not timed", equal=False)
        seconds = [r["seconds"] for r in timed]
        sampled = [r for r in records if "RssAnon_growth" in r]
        return Row(
            way,
            statistics.median(seconds),
            min(seconds),
            max(seconds),
            statistics.median(r["user"] + r["system"] for r in timed),
            max((self._extra(r) for r in sampled), default=None),
            max((max(0, r["RssFile_growth"]) for r in sampled), default=None),
            statistics.median(r["minor_faults"] + r["major_faults"] for r in timed),
            len(timed),
            None if way.startswith("limit") else not any(r["wrong"] for r in records),
        )

    def ratio(self, group: Group, slower: str, faster: str) -> float | None:
        """How many times as long one way takes as another; None where either has no figures."""
        one, other = self.row(group, slower), self.row(group, faster)
        if one is None or other is None or one.failed or other.failed:
            return None
        return one.seconds / other.seconds

    @property
    def wrong(self) -> list[str]:
        """Ways whose values were not the reference's, and in what."""
        return [
            f"{r['group']}: {r['way']}: {', '.join(r['wrong'][:3])} ({len(r['wrong'])} differ)"
            for r in self._records
            if r.get("wrong")
        ]

    @property
    def failures(self) -> list[str]:
        """Ways that could not be measured, and why."""
        return [f"{r['group']}: {r['way']}: {r['failed']}" for r in self._records if "failed" in r]

    @staticmethod
    def _extra(record: Record) -> float:
        return max(0, record["RssAnon_growth"] + record["RssShmem_growth"] - record["model_bytes"])


# ------------------------------------------------------------------ the bars


@dataclass(frozen=True)
class Judged:
    """A demand and what was measured.

    Attributes:
        work: What was done.
        bar: What is demanded.
        measured: What was measured; empty if it was not.
        reached: Whether that is enough.
    """

    work: str
    bar: str
    measured: str
    reached: bool


@dataclass(frozen=True)
class _Bar:
    workload: str
    way: str
    against: str
    factor: float
    ours: str = OURS
    cache: str = "warm"

    def judge(self, results: Results) -> Judged:
        group = _group(self.workload, self.cache)
        work = f"{self.workload}, {self.cache}"
        if self.way == "limit":
            found = results.ratio(group, self.ours, self.against)
            bar = f"at most {self.factor:g} times the time of {self.against}"
            return Judged(work, bar, _times(found), found is not None and found <= self.factor)
        found = results.ratio(group, self.against, self.ours)
        bar = f"{self.factor:g} times as fast as {self.against}" if self.factor > 1 else f"faster than {self.against}"
        enough = found is not None and (found >= self.factor if self.factor > 1 else found > 1)
        return Judged(work, bar, _times(found), enough)


_BARS = (
    _Bar("dense", "peer", SAFE_OPEN, 2),
    _Bar("dense", "limit", LIMIT_FRESH, 1.6),
    _Bar("fused", "peer", SAFE_OPEN, 2),
    _Bar("fused", "limit", LIMIT_FRESH, 1.6),
    _Bar("dense", "limit", LIMIT_DIRECT, 1.25, cache="cold"),
    _Bar("experts", "peer", SAFE_OPEN, 3),
    _Bar("experts", "peer", FROM_PRETRAINED, 5),
    _Bar("experts", "peer", FROM_PRETRAINED, 5, OUR_FROM_PRETRAINED),
    _Bar("f32", "peer", SAFE_OPEN, 2),
    _Bar("f16", "peer", SAFE_OPEN, 2),
    _Bar("raw", "peer", STRUCT, 100, OURS_RAW),
    _Bar("transposed", "peer", SAFE_OPEN, 1.5),
    _Bar("small", "peer", SAFE_OPEN, 1),
)
_MOST_EXTRA = 64 * MIB


def _group(workload: str, cache: str = "warm", memory: str = "fresh", condition: str = "") -> Group:
    wanted = (workload, cache, memory, condition)
    return next(g for g in (*GROUPS, *ROBUST) if (g.workload, g.cache, g.memory, g.condition) == wanted)


def judge(results: Results, groups: Sequence[Group]) -> list[Judged]:
    """Hold what was measured against the bars."""
    measured = {group.key for group in groups}
    judged = [bar.judge(results) for bar in _BARS if _group(bar.workload, bar.cache).key in measured]
    judged += [_under(group, results) for group in groups if group.condition]
    judged.append(_extra_memory(results, groups))
    compared = "all ways, each time" if not results.wrong else f"{len(results.wrong)} differ"
    judged.append(Judged("values", "equal to the reference", compared, not results.wrong))
    return judged


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _under(group: Group, results: Results) -> Judged:
    ours = results.row(group, OURS)
    ratios = {way: results.ratio(group, way, OURS) for way in group.ways if way != OURS}
    found = {way: ratio for way, ratio in ratios.items() if ratio is not None}
    failed = [way for way in ratios if (row := results.row(group, way)) is not None and row.failed]
    measured = "; ".join(
        [
            *(f"{_times(ratio)} times as fast as {way}" for way, ratio in found.items()),
            *(f"{way} fails" for way in failed),
        ]
    )
    right = ours is not None and not ours.failed and bool(ours.equal)
    reached = right and all(ratio > 1 for ratio in found.values())
    return Judged(f"{group.workload} {group.condition}", "right, and ahead", measured if right else "fails", reached)


def _extra_memory(results: Results, groups: Sequence[Group]) -> Judged:
    most = [
        (row.extra, group.key)
        for group in groups
        for way in (OURS, OURS_RAW)
        if not group.condition and (row := results.row(group, way)) is not None and row.extra is not None
    ]
    extra, where = max(most, default=(None, ""))
    text = f"{extra / MIB:.0f} MiB ({where})" if extra is not None else ""
    return Judged("each of these, extra memory", "at most 64 MiB", text, extra is not None and extra <= _MOST_EXTRA)
