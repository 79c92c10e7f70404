"""The process that watches: it starts those that read, and sees them crash, hang or finish."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.child import Child, Counts, keep

if TYPE_CHECKING:
    from fuzz.target import Target

#: Seconds, by the clock, that an input may take before its process is ended. A machine may be busy with other things.
MOST_SECONDS_BY_CLOCK = 60.0
# Seconds of the processor's time that do for the same.
_MOST_SECONDS = 10.0
# A reader that crashes at every turn shall not go on for ever.
_MOST_CRASHES = 20


@dataclass
class Result:
    """How the inputs of a target were received.

    Attributes:
        target: Its name.
        executions: Inputs.
        refused: Those refused by an error of ours.
        loaded: Those whose values were read.
        slowest: Seconds of the processor's time that the slowest took.
        peak: Bytes of memory that the greediest took.
        faults: Those with a fault.
        kept: Where some of them are.
        remarks: What the target counted beside that.
    """

    target: str
    executions: int = 0
    refused: int = 0
    loaded: int = 0
    slowest: float = 0.0
    peak: int = 0
    faults: int = 0
    kept: list[Path] = field(default_factory=list)
    remarks: dict[str, int] = field(default_factory=dict)


def fuzz(target: Target, executions: int, seed: int, faults: Path, limit: float = MOST_SECONDS_BY_CLOCK) -> Result:
    """Have a target read so many inputs.

    Args:
        target: The reader.
        executions: How many.
        seed: What they are drawn from.
        faults: Where inputs with faults are kept.
        limit: Seconds, by the clock, that one may take.
    """
    if not sys.platform.startswith("linux"):
        raise NotImplementedError("the readers are watched by what Linux says of processes")
    shared = mmap.mmap(-1, ctypes.sizeof(Counts))
    counts = Counts.from_buffer(shared)
    memory = Path("/dev/shm")  # noqa: S108 -- a folder of our own is made in it
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    before = set(faults.glob("*")) if faults.is_dir() else set()
    crashes = 0
    try:
        while counts.executions < executions and crashes < _MOST_CRASHES:
            problem = _watch(_start(target, executions, seed, place, counts, faults), counts, limit)
            if problem is not None:
                crashes += 1
                counts.faults += 1
                counts.executions += 1
                files = {p.name: p.read_bytes() for p in (place / "input").iterdir() if p.name not in target.fixed}
                keep(faults, target.name, files, problem)
        remarks = place / "remarks.json"
        return Result(
            target.name, counts.executions, counts.refused, counts.loaded, counts.slowest / 1e9, counts.peak,
            counts.faults,
            sorted(p for p in faults.glob("*") if p.is_dir() and p not in before) if faults.is_dir() else [],
            json.loads(remarks.read_text()) if remarks.exists() else {},
        )  # fmt: skip
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _start(target: Target, executions: int, seed: int, place: Path, counts: Counts, faults: Path) -> int:
    """Start a process that reads; returns its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        reader = Child(target, place, counts, faults)
        reader.run(executions, seed)
        reader.save_remarks(place)
        status = 0
    except BaseException:  # noqa: BLE001 -- nothing may return from here into the code of the watching process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _watch(child: int, counts: Counts, limit: float) -> str | None:
    """Wait until a process ends, or end it; returns what was wrong."""
    last, since, spent = -1, time.monotonic(), 0.0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == 0 else f"the process ended with {code} ({_named(code)})"
        now = time.monotonic()
        if counts.executions != last:
            last, since, spent = counts.executions, now, _seconds_of(child)
        elif now - since > limit or _seconds_of(child) - spent > _MOST_SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"it took more than {now - since:.0f} seconds"
        time.sleep(0.02)


def _seconds_of(process: int) -> float:
    """The processor's time that a process took."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else "an error of the harness"
