"""The process that reads inputs, one after the other, and judges how each was received."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import re
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.mutate import Mutator
from fuzz.target import FaultError
from weightloaders.errors import WeightLoadersError
from weightloaders.weights.reading import lacks_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from fuzz.target import Files, Target

#: Bytes that an input may take beyond what there was before; inputs have some thousand bytes.
MOST_MEMORY = 32 << 20
#: Seconds of the processor's time that an input may take.
MOST_SECONDS = 2.0
# Address space beyond that of the process as it is: an allocation of an absurd size fails, and is seen.
_ADDRESS_SPACE = 1 << 30
# Inputs between two looks at the memory's high-water mark.
_BATCH = 256
_LARGEST_CORPUS = 4000
_LONGEST_MESSAGE = 20_000
_KEPT_FAULTS = 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Where Python and its packages lie, which import parts of themselves late; and what the system says of this process.
_READABLE = tuple(
    {str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix, Path(__file__).parents[1])} | {"/proc/", "/sys/"}
)
_ESCAPES = frozenset((
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen",
    "pty.spawn", "socket.connect", "socket.bind", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir",
    "os.link",
    "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.putenv", "shutil.rmtree", "shutil.copyfile",
    "shutil.move",
    "urllib.Request", "code.__new__", "function.__new__", "webbrowser.open",
))  # fmt: skip


class Counts(ctypes.Structure):
    """What the watching process sees of this one.

    Attributes:
        executions: Inputs that were read to the end.
        refused: Those refused by an error of ours.
        loaded: Those whose values were read.
        slowest: Nanoseconds of the processor's time that the slowest took.
        peak: Bytes of memory that the greediest took.
        faults: Those with a fault.
    """

    executions: int
    refused: int
    loaded: int
    slowest: int
    peak: int
    faults: int

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("executions", "refused", "loaded", "slowest", "peak", "faults")
    )


class _EscapeError(BaseException):
    """Reading did what no reader may do. No `Exception`, so that nobody takes it for a damaged file."""


class Child:
    """Reads inputs.

    Args:
        target: The reader.
        place: An empty folder of this process's own, in memory if may be.
        counts: What the watching process sees.
        faults: Where inputs with faults are kept.
    """

    def __init__(self, target: Target, place: Path, counts: Counts, faults: Path) -> None:
        self.target, self.counts, self.faults = target, counts, faults
        self.folder = place / "input"
        self.folder.mkdir(exist_ok=True)
        self._present: set[str] = set()
        self._watching = False
        self._escape = ""
        self._known: set[Any] = set()
        self._kept: set[Any] = set()
        for name, data in target.fixed.items():
            (self.folder / name).write_bytes(data)

    def run(self, executions: int, seed: int) -> None:
        """Read so many inputs, drawn from a seed, with those that were read or refused in a new way to go on from."""
        rng = random.Random(f"{self.target.name}:{seed}:{self.counts.executions}")  # noqa: S311 -- to be repeated
        mutator = Mutator(rng)
        seeds = self.target.seeds()
        self.prepare(seeds)
        found: list[Files] = []
        batch: list[Files] = []
        level = _reset_peak()
        while self.counts.executions < executions:
            pool = found if found and rng.random() < 0.6 else seeds
            # The latest found are those that led furthest.
            base = pool[int(len(pool) * rng.random() ** 0.5)] if pool is found else rng.choice(pool)
            files = self.target.mutated(base, mutator, pool)
            batch.append(files)
            key = self.judge(files)
            if key not in self._known:
                self._known.add(key)
                if len(found) < _LARGEST_CORPUS:
                    found.append(files)
            self.counts.executions += 1
            if len(batch) == _BATCH:
                level = self._check_memory(batch, level)
                batch = []
        self._check_memory(batch, level)

    def prepare(self, seeds: Sequence[Files]) -> None:
        """Get everything imported, and bounds in place."""
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        for files in seeds:
            self._write(files)
            with contextlib.suppress(WeightLoadersError):
                self.target.read(self.folder, files)
        self.target.remarks.clear()
        sys.addaudithook(self._audit)
        gc.collect()
        gc.freeze()
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken + _ADDRESS_SPACE, hard))

    def judge(self, files: Files) -> object:
        """Read one input; returns what kind of reception it had, and counts it."""
        self._write(files)
        self._escape = ""
        before = time.process_time_ns()
        self._watching = True
        key: object
        problem = None
        trace = ""
        try:
            self.target.read(self.folder, files)
            key = "loaded"
            self.counts.loaded += 1
        except WeightLoadersError as error:
            self._watching = False
            key = type(error), _site(error)
            self.counts.refused += 1
            problem = _fault_of(error)
        except FaultError as error:
            key, problem = _site(error), str(error)
        except BaseException as error:  # noqa: BLE001 -- whatever else there is, is a fault
            self._watching = False
            key = type(error), _site(error)
            problem = f"a foreign exception: {type(error).__name__}: {error!s:.300}"
            trace = traceback.format_exc()
        self._watching = False
        taken = time.process_time_ns() - before
        self.counts.slowest = max(self.counts.slowest, taken)
        if self._escape:
            problem = f"an escape: {self._escape}"
        elif problem is None and taken > MOST_SECONDS * 1e9 and (again := self._time_again(files)) > MOST_SECONDS * 1e9:
            problem = f"it took {taken / 1e9:.1f} seconds, and {again / 1e9:.1f} when it was read again"
        if problem is not None:
            self._keep(files, problem, key, trace)
        return key

    def _time_again(self, files: Files) -> int:
        """Nanoseconds that an input takes when it is read once more: it may have been the machine that was slow."""
        before = time.process_time_ns()
        with contextlib.suppress(WeightLoadersError, FaultError):
            self.target.read(self.folder, files)
        return time.process_time_ns() - before

    def _keep(self, files: Files, problem: str, key: object, trace: str = "") -> None:
        self.counts.faults += 1
        if key in self._kept or len(self._kept) >= _KEPT_FAULTS:
            return
        self._kept.add(key)
        keep(self.faults, self.target.name, files, f"{problem}\n{trace}")

    def _check_memory(self, batch: Sequence[Files], level: int) -> int:
        """See how much the last inputs took; if too much, which of them did."""
        taken = max(0, _peak() - level)
        if taken > MOST_MEMORY:
            # They were counted when they were read first.
            before, greedy = bytes(self.counts), 0
            for files in batch:
                gc.collect()
                level = _reset_peak()
                self.judge(files)
                alone = max(0, _peak() - level)
                self.counts.peak = max(self.counts.peak, alone)
                greedy += alone > MOST_MEMORY
                if alone > MOST_MEMORY:
                    self._keep(files, f"it took {alone >> 20} MiB", "memory")
            peak = self.counts.peak
            ctypes.memmove(ctypes.byref(self.counts), before, len(before))
            self.counts.peak, self.counts.faults = max(peak, self.counts.peak), self.counts.faults + greedy
        else:
            self.counts.peak = max(self.counts.peak, taken)
        return _reset_peak()

    def _write(self, files: Files) -> None:
        for name in self._present - files.keys():
            os.unlink(f"{self.folder}/{name}")  # noqa: PTH108 -- a path object takes as long as reading the file
        for name, data in files.items():
            descriptor = os.open(f"{self.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(descriptor, data)
            os.close(descriptor)
        self._present = set(files)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int):
                return
            name = os.fspath(path)
            name = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes and name.startswith((f"{self.folder}/", *_READABLE)) and "/../" not in name:
                return
        elif event == "exec":
            # Code of a file is a module that is imported late, which may make up more while it is.
            if not arguments[0].co_filename.startswith("<") or _is_importing():
                return
        elif event not in _ESCAPES:
            return
        self._watching = False
        self._escape = f"{event} {arguments!r:.300}"
        raise _EscapeError(self._escape)

    def save_remarks(self, place: Path) -> None:
        """Leave what the target counted to the watching process."""
        (place / "remarks.json").write_text(json.dumps(self.target.remarks))


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith(
        ("importlib._bootstrap>", "dataclasses.py", "typing.py")
    ):
        frame = frame.f_back
    return frame is not None


def keep(faults: Path, target: str, files: Files, problem: str) -> Path:
    """Keep an input, and what was wrong with how it was received."""
    number = 1
    while (folder := faults / f"{target}-{number:03}").exists():
        number += 1
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (faults / f"{folder.name}.txt").write_text(problem, "utf-8", "backslashreplace")
    return folder


def _fault_of(error: WeightLoadersError) -> str | None:
    """What is wrong with an error of ours, if anything."""
    message = str(error)
    if len(message) > _LONGEST_MESSAGE:
        return f"a message of {len(message)} characters"
    if found := _CONTROL.search(message):
        return f"a message with the character {found[0]!r}: {message!r:.300}"
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, WeightLoadersError) and lacks_memory(cause):
            return f"memory was asked for that is not there: {message:.300}"
        cause = cause.__cause__ or cause.__context__
    return None


def _site(error: BaseException) -> tuple[str, int] | None:
    """Where an exception was raised."""
    trace = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def _reset_peak() -> int:
    """Forget the memory's high-water mark; returns what is taken now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status[status.index("VmHWM:") + 6 :].split(None, 1)[0]) << 10
