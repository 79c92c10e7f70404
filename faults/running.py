"""Many executions, each in a process that may be lost without loss to the others."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from faults.loads import Loads
from faults.saves import Saves
from faults.shim import Shim
from faults.verdict import Lost, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A process does so many one after the other; what one leaves behind is then met by the next.
_IN_ONE_PROCESS = 200


@dataclass
class Counts:
    """What came of all.

    Attributes:
        executions: How many there were.
        faults: How often something went wrong.
        outcomes: By what was to go wrong, what came of it.
        lost: What was lost, with the seed.
    """

    executions: int = 0
    faults: int = 0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Count one in."""
        self.executions += 1
        self.faults += verdict.injected
        self.outcomes.setdefault(verdict.fault, Counter())[verdict.outcome if verdict.injected else "not met"] += 1


def run(executions: int, seed: int, only: str | None, patience: float) -> int:
    """Execute, and print what came of it; returns the process's exit status."""
    status = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        root, store = Path(place).resolve() / "root", Path(place).resolve() / "store"
        root.mkdir()
        shim = Shim(root)
        logging.disable(logging.WARNING)
        # What a shell starts in the background ignores Ctrl-C, and so would all that is to be interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kinds = {"loads": Loads(shim, root, store), "saves": Saves(shim, root, store)}
        # Or each execution looks through all that the libraries have made.
        gc.collect()
        gc.freeze()
        for name, kind in kinds.items():
            if only in (None, name):
                counts = Counts()
                for done in _in_processes(kind.execute, range(seed, seed + executions), patience):
                    counts.lost.append(done) if isinstance(done, str) else counts.add(done)
                _print(name, counts)
                status |= bool(counts.lost)
    return status


def _print(name: str, counts: Counts) -> None:
    print(f"{name:36}{'refused':>9}{'right':>9}{'stopped':>9}{'not met':>9}")
    for fault, outcomes in sorted(counts.outcomes.items()):
        stopped = outcomes["interrupted"] + outcomes["killed"]
        print(f"  {fault:34}{outcomes['refused']:9,}{outcomes['right']:9,}{stopped:9,}{outcomes['not met']:9,}")
    for lost in counts.lost:
        print(f"  LOST {lost}")
    survived = counts.executions
    print(
        f"{name}: executions {survived + len(counts.lost):,}, faults injected {counts.faults:,}, "
        f"survived {survived:,}, lost {len(counts.lost):,}",
        flush=True,
    )


def _in_processes(
    execute: Callable[[random.Random], Verdict], seeds: range, patience: float
) -> Iterator[Verdict | str]:
    """Each seed's verdict, or what was lost with it."""
    while seeds:
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.close(reads)
            _work(execute, seeds[:_IN_ONE_PROCESS], patience, writes)
        os.close(writes)
        done = 0
        with os.fdopen(reads, encoding="utf-8") as lines:
            for line in lines:
                answer = json.loads(line)
                done += 1
                yield answer if isinstance(answer, str) else Verdict(*answer)
        _, status = os.waitpid(child, 0)
        if status and done < len(seeds):
            code = os.waitstatus_to_exitcode(status)
            why = signal.Signals(-code).name if code < 0 else f"exit status {code}: a hang, or a crash"
            yield f"--seed {seeds[done]}: the process ended: {why}"
            done += 1
        seeds = seeds[done:]


def _work(execute: Callable[[random.Random], Verdict], seeds: range, patience: float, to: int) -> None:
    """What a child does."""
    status = 0
    try:
        for seed in seeds:
            faulthandler.dump_traceback_later(patience, exit=True)
            try:
                answer: object = execute(random.Random(seed))
            except Lost as error:
                answer = f"--seed {seed}: {error}"
                traceback.print_exception(error.__cause__) if error.__cause__ and "-v" in sys.argv else None
            faulthandler.cancel_dump_traceback_later()
            os.write(to, json.dumps(answer).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)
