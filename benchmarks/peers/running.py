"""Order and processes: each measurement in a process of its own, ways in turn, in shuffled order."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from benchmarks.peers import memory
from benchmarks.peers.groups import ADDRESS_SPACE, BUSY, CORE, DESCRIPTORS, Group
from benchmarks.peers.measure import Measurement, Task, as_line
from benchmarks.peers.ways import WAYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Record = dict[str, Any]

_LIMIT_S = 300.0
_SAMPLE_S = 0.001
_SLACK = 512 << 20
_DESCRIPTORS = 40


class MeasurementError(Exception):
    """What became of a way that could not be measured."""


class Child:
    """A measurement in a process of its own."""

    def __init__(self, task: Task) -> None:
        # By default waiting threads of OpenMP spin, beside the threads that work.
        variables = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", **WAYS[task.way].environment}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.measure"], text=True, bufsize=1, env={**os.environ, **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._tell(as_line(task))
        self._tell("warm_up\n")

    def measure(self, *, sample: bool) -> Record:
        """Prepare, and run.

        Args:
            sample: Whether memory is watched meanwhile, which takes processor time away.
        """
        with self._watched():
            self._answer()
            for part in ("prepare", "tidy"):
                self._tell(f"{part}\n")
                self._answer()
            before = memory.status(self._process.pid)
            self._tell("run\n")
            peaks: dict[str, int] = {}
            with sampling(self._process.pid, peaks) if sample else contextlib.nullcontext():
                record: Record = self._answer()
            self._tell("wrong\n")
            return record | {f"{key}_growth": most - before[key] for key, most in peaks.items()}

    def wrong(self) -> list[str]:
        """Wait for the comparison with the reference: names of parameters that differ."""
        with self._watched():
            names: list[str] = self._answer()
            return names

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        watchdog = threading.Timer(_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def _tell(self, text: str) -> None:
        # If the process has ended, the next answer says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(text)  # type: ignore[union-attr]

    def _answer(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise MeasurementError(f"its process ended with {self._process.wait()}")
        answer = json.loads(line)
        if "failed" in answer:
            raise MeasurementError(answer["failed"])
        return answer["answer"]


@contextlib.contextmanager
def sampling(process: int, peaks: dict[str, int]) -> Iterator[None]:
    """Note the most of each kind of memory that a process has meanwhile."""
    stop = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while True:
                now = memory.status(process)
                for key in ("RssAnon", "RssFile", "RssShmem"):
                    peaks[key] = max(peaks.get(key, 0), now.get(key, 0))
                if stop.wait(_SAMPLE_S):
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def task_for(group: Group, way: str, root: Path, scale: float) -> Task:
    """What one measurement of a group is."""
    return Task(
        way, group.workload, scale, str(root), group.memory, group.cache,
        address_space=_SLACK if group.condition == ADDRESS_SPACE else None,
        descriptors=_DESCRIPTORS if group.condition == DESCRIPTORS else None,
    )  # fmt: skip


def run_group(group: Group, root: Path, scale: float, runs: int, told: Callable[[str], object]) -> Iterator[Record]:
    """Measure a group: first a round in which memory is watched and time does not count, then the others.

    Args:
        group: What.
        root: Where the checkpoints lie.
        scale: Their size.
        runs: Rounds whose time counts.
        told: Hears what is being measured.
    """
    with _busy_processes() if group.condition == BUSY else contextlib.nullcontext():
        failed: set[str] = set()
        waiting = [*_order(group, runs)]
        following: Child | None = None
        for place, (number, way) in enumerate(waiting):
            if way in failed:
                continue
            child = following or Child(task_for(group, way, root, scale))
            following = None
            told(f"{group.key}: {way}, {number} of {runs}")
            record: Record = {"group": group.key, "way": way, "round": number, "sampled": not number}
            try:
                record |= child.measure(sample=not number)
                # The next one's imports go on while this one compares its values.
                upcoming = next((w for _, w in waiting[place + 1 :] if w not in failed), None)
                following = Child(task_for(group, upcoming, root, scale)) if upcoming else None
                record["wrong"] = child.wrong()
            except MeasurementError as error:
                record["failed"] = str(error).replace(f"{root}/", "")
                failed.add(way)
                if following is not None and upcoming == way:
                    following.close()
                    following = None
            finally:
                child.close()
            yield record


def run_group_here(group: Group, root: Path, scale: float) -> Iterator[Record]:
    """The same once, in this process: values are right, figures mean nothing."""
    for way in group.ways:
        if WAYS[way].missing:
            continue
        record: Record = {"group": group.key, "way": way, "round": 1, "sampled": False}
        measurement = Measurement(task_for(group, way, root, scale))
        try:
            measurement.prepare()
            record |= measurement.run()
            record["wrong"] = measurement.wrong()
        except Exception as error:  # noqa: BLE001 -- it goes into the table
            record["failed"] = f"{type(error).__name__}: {error}"
        yield record


def _order(group: Group, runs: int) -> Iterator[tuple[int, str]]:
    for number in range(runs + 1):
        ways = [way for way in group.ways if not WAYS[way].missing]
        for way in random.sample(ways, len(ways)):
            # Of three rounds two, of five three; and the slowest, with which nothing comes close, once.
            if way in CORE or number <= -(-runs // 2):
                yield number, way


@contextlib.contextmanager
def _busy_processes() -> Iterator[None]:
    """As many processes that do nothing but work as there are processors."""
    count = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def left_out(groups: tuple[Group, ...]) -> Mapping[str, str]:
    """Ways whose package is not installed -> that package."""
    return {way: missing for group in groups for way in group.ways if (missing := WAYS[way].missing)}
