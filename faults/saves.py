"""Saves while something fails, or the process is killed."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
import signal
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from faults.checkpoints import FORMATS, SHARD_BYTES, Plain, values
from faults.shim import Action, Call, Fault
from faults.verdict import Lost, Verdict
from weightloaders import load_into, save_weights
from weightloaders.cli.main import app
from weightloaders.errors import SaveError, WeightLoadersError
from weightloaders.weights.exchanging import REPLACED

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from faults.shim import Shim

_STOPPED = 128 + signal.SIGINT
_ANY = Call.OPEN | Call.MAKE | Call.WRITE | Call.SYNC | Call.CLOSE | Call.MOVE | Call.REMOVE
_REFUSALS = (
    *(
        Fault(f"{what}: {errno.errorcode[why]}", calls, Action.FAIL, why, lasts)
        for what, calls, reasons in (
            ("write", Call.WRITE, (errno.ENOSPC, errno.EIO, errno.EDQUOT)),
            ("make", Call.MAKE, (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE)),
            ("sync", Call.SYNC, (errno.EIO, errno.ENOSPC)),
            ("close", Call.CLOSE, (errno.EIO, errno.ENOSPC)),
            ("move", Call.MOVE, (errno.EIO, errno.ENOSPC, errno.EACCES)),
            ("remove", Call.REMOVE, (errno.EIO, errno.EACCES)),
        )
        for why in reasons
        for lasts in (True, False)
    ),
    Fault("write: ends early", Call.WRITE, Action.SHORTEN),
    Fault("write: interrupted by a signal", Call.WRITE, Action.FAIL, errno.EINTR, lasts=False),
)
_STOP = Fault("Ctrl-C", _ANY, Action.INTERRUPT, lasts=False)
_KILL = Fault("killed", _ANY, Action.KILL, lasts=False)


def _model(seed: int) -> Plain:
    model = Plain("cpu", torch.float32)
    load_into(model, values(seed), progress=False)
    return model


def _save(size: int, name: str, folder: Path, seed: int) -> None:
    save_weights(_model(seed), folder / name if name else folder, max_shard_size=size)


def _raw(folder: Path, seed: int) -> None:
    FORMATS["raw"][1](folder, values(seed))


def _convert(store: Path, folder: Path, seed: int) -> None:
    source = store / f"source-{seed}"
    # Nothing that exists is replaced, so it goes where nothing is.
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = app(
                ["convert", str(source), str(folder), "--to", "safetensors", "--max-shard-size", str(SHARD_BYTES)],
                standalone_mode=False,
            )
        except SystemExit as stop:
            code = stop.code
    if code == _STOPPED:
        raise KeyboardInterrupt
    if code:
        raise SaveError(told.getvalue(), file=folder)


class Saves:
    """Executions of saves.

    Args:
        shim: What makes calls fail, below ``root``.
        root: Where is saved.
        store: Where what is converted lies, out of its reach.
    """

    def __init__(self, shim: Shim, root: Path, store: Path) -> None:
        self._shim, self._folder = shim, root / "saved"
        single, sharded = functools.partial(_save, 1 << 40, ""), functools.partial(_save, SHARD_BYTES, "")
        file = functools.partial(_save, 1 << 40, "model.safetensors")
        for seed in (1, 2):
            (store / f"source-{seed}").mkdir(parents=True, exist_ok=True)
            single(store / f"source-{seed}", seed)
            (store / f"source-{seed}" / "config.json").write_text("{}")
        convert = functools.partial(_convert, store)
        # What is saved, over what.
        self._ways: tuple[tuple[str, Callable[[Path, int], None], Callable[[Path, int], None] | None], ...] = (
            ("file over nothing", file, None),
            ("file over file", file, file),
            ("folder over nothing", single, None),
            ("folder over folder", single, single),
            ("shards over nothing", sharded, None),
            ("shards over shards", sharded, sharded),
            ("shards over folder", sharded, single),
            ("folder over shards", single, sharded),
            ("raw over nothing", _raw, None),
            ("raw over raw", _raw, _raw),
            ("converted", convert, None),
        )
        self._calls = functools.cache(self._count)

    def execute(self, chance: random.Random) -> Verdict:
        """One save.

        Raises:
            Lost: If what is on disk is neither old nor new, or an error is not ours.
        """
        way = chance.randrange(len(self._ways))
        fault = chance.choice((chance.choice(_REFUSALS), chance.choice(_REFUSALS), _STOP, _KILL, _KILL))
        calls = self._calls(way, fault.calls)
        at = chance.randrange(max(1, calls))
        try:
            return self._execute(way, fault, at)
        except Lost as lost:
            raise Lost(f"{self._ways[way][0]}: {fault.name} at call {at} of {calls}: {lost}") from lost.__cause__

    def _count(self, way: int, calls: Call) -> int:
        self._prepare(way)
        self._shim.arm(Fault("", calls, Action.COUNT))
        self._ways[way][1](self._folder, 2)
        return self._shim.disarm().calls

    def _prepare(self, way: int) -> None:
        _, _, before = self._ways[way]
        shutil.rmtree(self._folder, ignore_errors=True)
        if before is not None:
            self._folder.mkdir()
            before(self._folder, 1)
        elif self._ways[way][0].startswith("file"):
            self._folder.mkdir()

    def _execute(self, way: int, fault: Fault, at: int) -> Verdict:
        name, save, before = self._ways[way]
        self._prepare(way)
        old = "old" if before is not None else "nothing"
        files = self._files()
        outcome = "right"
        if fault.action is Action.KILL:
            injected, outcome = self._killed(save, fault, at)
        else:
            self._shim.arm(fault, at)
            try:
                save(self._folder, 2)
            except KeyboardInterrupt:
                outcome = "interrupted"
            except SaveError as error:
                outcome = "refused"
                _check_told(error, fault)
            except BaseException as error:
                raise Lost(f"{type(error).__name__}: {error}") from error
            finally:
                injected = self._shim.disarm().injected
        allowed = {"right": {"new"}, "refused": {old}, "interrupted": {old, "new"}, "killed": {old, "new"}}[outcome]
        found = self._found(name)
        is_stuck = outcome == "refused" and fault.calls is Call.MOVE and fault.lasts
        if is_stuck:
            # It can't be undone, either.
            allowed = {old, "new", "nothing"}
        if outcome == "killed" and name == "shards over folder" and "old" in found:
            # Beside shards without an index, ours takes no file for the whole.
            allowed = {*allowed, "nothing"}
        if found == {"nothing"} and outcome == "killed" and name == "raw over raw" and self._aside():
            # Two files without an index can't be exchanged at one moment: it is noticed, and the old ones are aside.
            found = {"old"}
        if not found <= allowed:
            raise Lost(f"{outcome}, and on disk is {found}")
        if is_stuck and found == {"nothing"} and before is not None and not self._aside():
            raise Lost("refused, and the old files are gone")
        if outcome == "refused" and fault.calls is not Call.REMOVE and not is_stuck and self._files() != files:
            raise Lost(f"refused, and {sorted(self._files().keys() ^ files.keys())} changed")
        self._again(name, save)
        return Verdict(fault.name, outcome, injected)

    def _killed(self, save: Callable[[Path, int], None], fault: Fault, at: int) -> tuple[int, str]:
        child = os.fork()
        if not child:
            status = 1
            try:
                self._shim.arm(fault, at)
                save(self._folder, 2)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, -signal.SIGKILL):
            raise Lost(f"it ended with {code}")
        return (1, "killed") if code else (0, "right")

    def _aside(self) -> bool:
        return any(self._folder.glob(f".saving-*/{REPLACED}/*"))

    def _files(self) -> dict[str, bytes]:
        if not self._folder.exists():
            return {}
        return {str(p.relative_to(self._folder)): p.read_bytes() for p in self._folder.rglob("*") if p.is_file()}

    def _found(self, name: str) -> set[str]:
        """What loaders find: ours, and one that goes by the hub's rules. Of two whole sets, each may take another."""
        reads = [_read_raw] if name.startswith("raw") else [_read_ours, _read_as_the_hub]
        return {_which(read, self._folder) for read in reads}

    def _again(self, name: str, save: Callable[[Path, int], None]) -> None:
        """Whatever happened, nothing is in the way of the next save, and of the last nothing is left."""
        if name == "converted":
            shutil.rmtree(self._folder, ignore_errors=True)
        try:
            save(self._folder, 2)
        except SaveError as error:
            raise Lost(f"saving again is refused: {error}") from error
        left = [path.name for path in self._folder.parent.rglob(".*saving*")]
        if self._found(name) != {"new"} or left:
            raise Lost(f"saved again, and there is {self._found(name)}; left is {left}")


def _check_told(error: WeightLoadersError, fault: Fault) -> None:
    told = " ".join(str(error).lower().split())
    if fault.action is not Action.FAIL or os.strerror(fault.argument).lower() not in told:
        raise Lost(f"the error does not name the cause: {error}") from error
    if not error.file:
        raise Lost(f"the error names no file: {error}") from error


def _which(read: Callable[[Path], dict[str, torch.Tensor] | None], folder: Path) -> str:
    tensors = read(folder)
    if tensors is None:
        return "nothing"
    for seed, name in ((1, "old"), (2, "new")):
        expected = values(seed)
        if tensors.keys() == expected.keys() and all(torch.equal(tensors[key], expected[key]) for key in expected):
            return name
    return "a mixture"


def _read_with(loader: str, folder: Path) -> dict[str, torch.Tensor] | None:
    model = Plain("cpu", torch.float32)
    try:
        load_into(model, folder, loader=loader, progress=False)
    except WeightLoadersError:
        return None
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _read_ours(folder: Path) -> dict[str, torch.Tensor] | None:
    return _read_with("local", folder)


def _read_raw(folder: Path) -> dict[str, torch.Tensor] | None:
    return _read_with("binary", folder)


def _read_as_the_hub(folder: Path) -> dict[str, torch.Tensor] | None:
    """As transformers does: the one file, if there is one; else what the index names."""
    import json

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return load_file(single)
    if not index.exists():
        return None
    names = set(json.loads(index.read_text())["weight_map"].values())
    return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
