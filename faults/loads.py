"""Loads while something fails."""

from __future__ import annotations

import errno
import functools
import gc
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from faults.checkpoints import FORMATS, Own, Plain, values
from faults.shim import Action, Call, Fault
from faults.verdict import Lost, Verdict
from weightloaders import load_into, load_status
from weightloaders.errors import HalfLoadedModelError, LoadError, WeightLoadersError
from weightloaders.loading.status import check_usable
from weightloaders.transfer import jobs

if TYPE_CHECKING:
    import random

    from torch import nn

    from faults.shim import Shim

Mode = Literal["direct", "mmap", "o_direct", "stream"]
_MODES: tuple[Mode, ...] = ("direct", "mmap", "o_direct", "stream")
_CHUNK = 64 << 10
_LONG_AGO = 1_600_000_000
_ATOMIC = 0.3
# How it is said that a file isn't there.
_ABSENT = ("is not there", "there is no", "holds no")

_ANY = Call.OPEN | Call.READ | Call.MAP | Call.STAT
_REFUSALS = (
    *(
        Fault(f"{what}: {errno.errorcode[why]}", calls, Action.FAIL, why, lasts)
        for what, calls, reasons in (
            ("read", Call.READ, (errno.EIO, errno.ENOMEM, errno.ESTALE)),
            ("open", Call.OPEN, (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOENT, errno.EIO, errno.ENOMEM)),
            ("stat", Call.STAT, (errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES)),
            ("mmap", Call.MAP, (errno.ENOMEM, errno.ENODEV, errno.EAGAIN)),
        )
        for why in reasons
        for lasts in (True, False)
    ),
    Fault("read: interrupted by a signal", Call.READ, Action.FAIL, errno.EINTR, lasts=False),
    Fault("read: ends early", Call.READ, Action.SHORTEN),
    Fault("slow disk", Call.READ, Action.SLOW, 5, lasts=False),
)
_STOPS = (Fault("Ctrl-C", _ANY, Action.INTERRUPT, lasts=False),)
_DAMAGES = (
    Fault("cut", _ANY, Action.TRUNCATE, lasts=False),
    Fault("replaced", _ANY, Action.REPLACE, lasts=False),
    Fault("overwritten", _ANY, Action.OVERWRITE, lasts=False),
)

_DAMAGING = frozenset(fault.action for fault in _DAMAGES)


@dataclass(frozen=True)
class _Case:
    """A load, before anything is wrong."""

    form: str
    mode: Mode
    kind: type[Plain]
    dtype: torch.dtype
    device: str
    atomic: bool

    def model(self) -> Plain:
        return self.kind(self.device, self.dtype)

    def load(self, root: Path, model: nn.Module) -> None:
        loader, _ = FORMATS[self.form]
        load_into(model, root / self.form, loader=loader, transfer=self.mode, progress=False, atomic=self.atomic)


class Loads:
    """Executions of loads.

    Args:
        shim: What makes calls fail, below ``root``.
        root: Where the files are that are loaded.
        store: Where those are kept that they are copied from, out of its reach.
    """

    def __init__(self, shim: Shim, root: Path, store: Path) -> None:
        self._shim, self._root, self._store = shim, root, store
        self._kept_descriptors: set[tuple[str, str]] = set()
        self._kept_mappings: set[str] = set()
        self._old, new = values(1), values(2)
        self._calls = functools.cache(self._count)
        jobs.STRAIGHT_CHUNK = _CHUNK
        for name, (_, write) in FORMATS.items():
            for version, tensors in (("old", self._old), ("new", new)):
                folder = store / name / version
                folder.mkdir(parents=True, exist_ok=True)
                write(folder, tensors)

    def execute(self, chance: random.Random) -> Verdict:
        """One load.

        Raises:
            Lost: If what came of it is neither right nor an error of ours.
        """
        mode = chance.choice(_MODES)
        kind, dtype = chance.choice(((Plain, torch.float32), (Plain, torch.float16), (Own, torch.float32)))
        device = chance.choice(("cpu", "meta"))
        atomic = device == "cpu" and mode != "mmap" and chance.random() < _ATOMIC
        case = _Case(chance.choice(list(FORMATS)), mode, kind, dtype, device, atomic)
        refusals = [f for f in _REFUSALS if mode == "mmap" or f.calls is not Call.MAP]
        fault = chance.choice((refusals, refusals, _DAMAGES, _STOPS)[chance.randrange(4)])
        if fault in _DAMAGES:
            fault = fault._replace(argument=chance.randrange(1000))
        calls = self._calls(case, fault.calls)
        at = chance.randrange(max(1, calls))
        folder = self._fresh(case)
        other = self._root.parent / "other"
        shutil.copyfile(
            self._store / case.form / "new" / chance.choice(sorted(p.name for p in folder.iterdir())), other
        )
        try:
            return self._execute(case, fault, at, other)
        except Lost as lost:
            raise Lost(f"{case}: {fault.name} at call {at} of {calls}: {lost}") from lost.__cause__

    def _count(self, case: _Case, calls: Call) -> int:
        """How many such calls the load makes when nothing is wrong."""
        self._fresh(case)
        self._shim.arm(Fault("", calls, Action.COUNT))
        case.load(self._root, case.model())
        return self._shim.disarm().calls

    def _fresh(self, case: _Case) -> Path:
        folder = self._root / case.form
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._store / case.form / "old", folder)
        for file in folder.iterdir():
            # Long before any damage, whatever the file system's clock.
            os.utime(file, (_LONG_AGO, _LONG_AGO))
        return folder

    def _execute(self, case: _Case, fault: Fault, at: int, other: Path) -> Verdict:
        model = case.model()
        error: BaseException | None = None
        self._shim.arm(fault, at, other)
        try:
            case.load(self._root, model)
        except BaseException as raised:
            error = raised
        injected = self._shim.disarm().injected
        outcome = self._judge(case, fault, model, error)
        error = None
        # Whatever happened, nothing is in the way of the next load.
        self._fresh(case)
        case.load(self._root, model)
        self._check_values(model, [self._old])
        del model
        self._check_left(fault)
        return Verdict(fault.name, outcome, injected)

    def _judge(self, case: _Case, fault: Fault, model: Plain, error: BaseException | None) -> str:
        if error is None:
            # What was damaged before it was looked at is simply another file.
            self._check_values(model, [self._old, *(self._on_disk(case) if fault.action in _DAMAGING else [])])
            if load_status(model) != "loaded":
                raise Lost(f"loaded, and the status is {load_status(model)}")
            return "right"
        if isinstance(error, KeyboardInterrupt) and fault.action is Action.INTERRUPT:
            self._check_state(case, model, _written(model))
            return "interrupted"
        if not isinstance(error, WeightLoadersError):
            raise Lost(f"{type(error).__name__}: {error}") from error
        self._check_told(error, fault)
        self._check_state(case, model, set(error.written) if isinstance(error, LoadError) else set())
        return "refused"

    def _check_told(self, error: WeightLoadersError, fault: Fault) -> None:
        if not error.file or str(self._root) not in error.file:
            raise Lost(f"the error names no file: {error}") from error
        told = str(error).lower()
        is_absent = fault.argument == errno.ENOENT and any(said in told for said in _ABSENT)
        if fault.action is Action.FAIL and not is_absent:
            if os.strerror(fault.argument).lower() not in told:
                raise Lost(f"the error does not name the cause: {error}") from error
            if not error.hint:
                raise Lost(f"the error does not say what to do: {error}") from error

    def _check_values(self, model: Plain, allowed: list[dict[str, torch.Tensor]]) -> None:
        for tensors in allowed:
            if all(torch.equal(p, tensors[name].to(p.dtype)) for name, p in model.named_parameters()):
                return
        raise Lost("wrong values, and no error")

    def _on_disk(self, case: _Case) -> list[dict[str, torch.Tensor]]:
        """What the files hold now, if anything."""
        model = Plain("cpu", torch.float32)
        try:
            load_into(model, self._root / case.form, loader=FORMATS[case.form][0], progress=False)
        except WeightLoadersError:
            return []
        return [{name: parameter.detach() for name, parameter in model.named_parameters()}]

    def _check_state(self, case: _Case, model: Plain, written: set[str]) -> None:
        if case.device == "meta":
            # It has memory of its own by now, and nobody said what is in it.
            return
        status = load_status(model)
        changed = {name for name, p in model.named_parameters() if bool(p.detach().any())}
        if not changed <= written:
            raise Lost(f"{sorted(changed - written)} changed, and are not said to")
        if changed and status != "failed":
            raise Lost(f"half-loaded, and the status is {status}")
        if case.atomic and (changed or status is not None):
            raise Lost(f"atomic, and {sorted(changed)} changed; the status is {status}")

    def _check_left(self, fault: Fault) -> None:
        gc.collect()
        threads = [t.name for t in threading.enumerate() if t.name.startswith("weightloaders")]
        links = {(file.name, _link(file)) for file in Path("/proc/self/fd").iterdir()}
        descriptors = {(number, to) for number, to in links if to.startswith(str(self._root))}
        mappings = {line for line in Path("/proc/self/maps").read_text().splitlines() if str(self._root) in line}
        # What one left is not held against the next. It stays as it is: it may still be known, and used again.
        descriptors, mappings = descriptors - self._kept_descriptors, mappings - self._kept_mappings
        self._kept_descriptors |= descriptors
        self._kept_mappings |= mappings
        # Python may raise KeyboardInterrupt between the call that opens a file and the name that it is to get.
        most = 1 if fault.action is Action.INTERRUPT else 0
        if threads or len(descriptors) + len(mappings) > most:
            raise Lost(f"left are threads {threads}, descriptors {descriptors}, mappings {mappings}")


def _written(model: Plain) -> set[str]:
    """What a load that was interrupted says that it wrote."""
    try:
        check_usable(model)
    except HalfLoadedModelError as error:
        return set(error.written)
    return set()


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
