"""One measurement. As a program: in a process of its own, which talks to `benchmarks.peers.running` line by line."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import resource
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.peers.ways import Case, Way

# What a load may need, for each byte of the model or of its files: when cold the page cache too.
_TOUCHED = {"warm": 1.1, "cold": 2.1}
_COLD_AT_MOST, _WARM_AT_LEAST = 0.01, 0.999


@dataclass(frozen=True)
class Task:
    """What is to be measured.

    Attributes:
        way: Name of the way.
        workload: Name of the workload.
        scale: Its size, as a part of the default.
        root: Where the checkpoints lie.
        memory: ``"fresh"``: the model is on meta, and the time has in it what giving it memory costs; ``"touched"``:
            it has memory already.
        cache: ``"warm"`` or ``"cold"``.
        address_space: Limit of the address space, in bytes beyond what the process has before the load and the model
            needs. None: none.
        descriptors: Limit of open files. None: as it is.
    """

    way: str
    workload: str
    scale: float
    root: str
    memory: str = "fresh"
    cache: str = "warm"
    address_space: int | None = None
    descriptors: int | None = None


class Measurement:
    """A task's three parts: what is prepared, what is timed, what is checked."""

    def __init__(self, task: Task) -> None:
        from benchmarks.peers.ways import WAYS

        self._task = task
        self._way: Way = WAYS[task.way]
        self._loaded: nn.Module | None = None
        self.model_bytes = 0

    def warm_up(self) -> None:
        """Load a tiny checkpoint of the same kind by the same way: imports and first calls are not what is timed."""
        for name in self._way.needs:
            importlib.import_module(name)
        self._way.load(self._case(tiny=True))

    def prepare(self) -> None:
        """Have the model, the memory and the page cache as they are wanted."""
        import torch

        from benchmarks.peers import memory

        case = self._case()
        self._case_at_hand = case
        self.model_bytes = sum(p.numel() * p.element_size() for p in case.model.parameters())
        if self._task.memory == "touched":
            case.model.to_empty(device="cpu")
            for parameter in case.model.parameters():
                torch.nn.init.zeros_(parameter)
        most = max(self.model_bytes, sum(file.stat().st_size for file in case.files))
        memory.touch(int(most * _TOUCHED[self._task.cache]))
        if self._task.cache == "cold":
            share = memory.make_cold(case.files)
            if share > _COLD_AT_MOST:
                raise RuntimeError(f"{share:.0%} of the files stayed in the page cache")
        elif (share := memory.make_warm(case.files)) < _WARM_AT_LEAST:
            raise RuntimeError(f"only {share:.1%} of the files are in the page cache")
        if self._task.address_space is not None:
            wanted = memory.status()["VmSize"] + self.model_bytes + self._task.address_space
            resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))

    def run(self) -> dict[str, float]:
        """The timed part."""
        from benchmarks.peers import memory

        memory.forget_peak()
        resident = memory.status()["VmRSS"]
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        self._loaded = self._way.load(self._case_at_hand)
        if self._way.lazy and self._loaded is not None:
            _read_what_is_mapped(self._loaded)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "user": after.ru_utime - before.ru_utime,
            "system": after.ru_stime - before.ru_stime,
            "minor_faults": after.ru_minflt - before.ru_minflt,
            "major_faults": after.ru_majflt - before.ru_majflt,
            "peak_growth": memory.status()["VmHWM"] - resident,
            "model_bytes": self.model_bytes if self._task.memory == "fresh" else 0,
        }

    def wrong(self) -> list[str]:
        """Names of parameters whose values are not the reference's."""
        from benchmarks.peers.checkpoints import differing, digests

        if self._loaded is None:
            return []
        found = digests(self._loaded.named_parameters())
        return differing(found, Path(self._task.root) / self._task.workload)

    def _case(self, *, tiny: bool = False) -> Case:
        from benchmarks.peers import limits
        from benchmarks.peers.ways import Case
        from benchmarks.peers.workloads import WORKLOADS, build

        workload = WORKLOADS[self._task.workload]
        layout = workload.sized(TINY if tiny else self._task.scale)
        folder = Path(self._task.root) / (f"tiny-{workload.name}" if tiny else workload.name) / self._way.format
        case = Case(workload, layout, folder, build(layout, workload.wanted))
        if self._way.name.startswith("limit"):
            case.buffer = limits.buffer_for(case.files)
            if "touched" in self._way.name or "O_DIRECT" in self._way.name:
                for offset in range(0, len(case.buffer), 4096):
                    case.buffer[offset] = 1
        return case


# The scale of the checkpoints that are loaded to warm up, and of those of `--small`.
TINY = 0.002


def _read_what_is_mapped(model: nn.Module) -> None:
    """Bring each page of the parameters into memory: a byte of each, which is the least that a user would pay."""
    import torch

    for parameter in model.parameters():
        parameter.detach().view(-1).view(torch.uint8)[::4096].sum()


def main() -> None:
    """Read a task, and do its parts when told."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a peer prints is no answer
    task = Task(**json.loads(sys.stdin.readline()))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if task.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (task.descriptors, task.descriptors))
    measurement = Measurement(task)
    parts: dict[str, Any] = {
        "warm_up": measurement.warm_up, "prepare": measurement.prepare, "tidy": gc.collect, "run": measurement.run,
        "wrong": measurement.wrong,
    }  # fmt: skip
    for line in sys.stdin:
        try:
            _say(output, {"answer": parts[line.strip()]()})
        except BaseException as error:  # noqa: BLE001 -- it goes into the table
            _say(output, {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
            os._exit(1)
    # Some peers' threads don't end.
    os._exit(0)


def _say(output: TextIO, what: dict[str, Any]) -> None:
    output.write(json.dumps(what) + "\n")


def as_line(task: Task) -> str:
    """A task as the first line that the process reads."""
    return json.dumps(asdict(task)) + "\n"


if __name__ == "__main__":
    main()
