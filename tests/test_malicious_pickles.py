"""Pickles that would run code, in every form that a pickle has for it: nothing of them ever runs."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightloaders import open_weights
from weightloaders.errors import SourceError, WeightLoadersError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MARKER = "weightloaders-evil-marker"
COMMAND = f"touch {MARKER}"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (COMMAND,))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def stack_global(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


_NESTED = io.BytesIO()
torch.save(Evil(), _NESTED)
_INNER = b"B" + struct.pack("<I", len(_NESTED.getvalue())) + _NESTED.getvalue()
_OS = call("builtins", "__import__", text("os"))

# What comes before the final full stop of a pickle.
PAYLOADS: dict[str, bytes] = {
    **{f"reduce, protocol {p}": pickle.dumps({"w": Evil()}, protocol=p)[:-1] for p in range(6)},
    "global": call("os", "system", text(COMMAND)),
    "global by its real module": call(os.system.__module__, "system", text(COMMAND)),
    "stack global": b"\x80\x04" + stack_global("os", "system") + b"(" + text(COMMAND) + b"tR",
    "dotted stack global": (
        b"\x80\x04" + stack_global("torch", "serialization.os.system") + b"(" + text(COMMAND) + b"tR"
    ),
    "dotted global": call("torch", "serialization.os.system", text(COMMAND)),
    "inst": b"(" + text(COMMAND) + b"ios\nsystem\n",
    "obj": b"(cos\nsystem\n" + text(COMMAND) + b"o",
    "newobj": b"csubprocess\nPopen\n(](" + text("touch") + text(MARKER) + b"et\x81",
    "newobj_ex": (
        b"\x80\x04" + stack_global("subprocess", "Popen") + b"(" + text(COMMAND) + b"t}" + text("shell") + b"\x88s\x92"
    ),
    "build": b"ctypes\nSimpleNamespace\n)R}" + text("x") + call("os", "system", text(COMMAND)) + b"sb",
    "setstate of a partial": (
        b"cfunctools\npartial\n(cos\nsystem\n" + text(COMMAND) + b"tR(cos\nsystem\n(" + text(COMMAND) + b"t}NtbR"
    ),
    "getattr of an import": (
        b"cbuiltins\ngetattr\n(" + _OS + text("system") + b"tR(" + text(COMMAND) + b"tR"
    ),
    "getattr of torch's own": (
        b"cbuiltins\ngetattr\n(" + b"ctorch\nserialization\n" + text("os") + b"tR"
    ),
    "attrgetter": call("operator", "attrgetter", text("system")) + b"(" + _OS + b"tR(" + text(COMMAND) + b"tR",
    "methodcaller": call("operator", "methodcaller", text("system"), text(COMMAND)) + b"(" + _OS + b"tR",
    "eval": call("builtins", "eval", text(f"__import__('os').system({COMMAND!r})")),
    "exec of Python 2": call("__builtin__", "exec", text(f"import os; os.system({COMMAND!r})")),
    "runpy": call("runpy", "_run_code", text(f"import os; os.system({COMMAND!r})"), b"}"),
    "timeit": call("timeit", "timeit", text(f"__import__('os').system({COMMAND!r})")),
    "a file that is opened for writing": call("builtins", "open", text(MARKER), text("w")),
    "a path that is touched": call("pathlib", "Path.touch", call("pathlib", "PosixPath", text(MARKER))),
    "ctypes": call("ctypes", "CDLL", text("libc.so.6")),
    "a code object": call("types", "CodeType"),
    "torch.load": call("torch", "load", text(MARKER)),
    "torch's own pickle within": call("torch.storage", "_load_from_bytes", _INNER),
    "torch.hub": call("torch.hub", "load", text("evil/evil"), text("evil")),
    "torch's own shell": call("torch.utils.collect_env", "run", text(COMMAND)),
    "torch.jit": call("torch.jit", "load", text(MARKER)),
    "a package's importer": call("torch.package", "PackageImporter", text(MARKER)),
    "what torch admits, given what it does not": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\n" + b"cos\nsystem\n(" + text(COMMAND) + b"t}tR"
    ),
    "what torch admits, given text for a function": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + text("os.system") + b"ctorch\nTensor\n(" + text(COMMAND) + b"t}tR"
    ),
    "what torch admits, given a state that sets its class": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nTensor\nctorch\nTensor\n)}"
        + text("__class__") + call("os", "system", text(COMMAND)) + b"stR"
    ),
    "a default dict that makes what it lacks": call("collections", "defaultdict", b"cos\nsystem\n"),
    "an ordered dict of pairs that run": (
        call("collections", "OrderedDict", b"(" + call("os", "system", text(COMMAND)) + b"l")
    ),
    "a counter": call("collections", "Counter", call("os", "popen", text(COMMAND))),
    "a codec": call("_codecs", "encode", text(COMMAND), text("os.system")),
    "an extension": b"\x82\x01",
    "a persistent id as text": b"Pos.system\n",
    "a persistent id that calls": b"(" + text("storage") + call("os", "system", text(COMMAND)) + b"tQ",
    "a persistent id with a type as text": (
        b"(" + text("storage") + text("os.system") + text("0") + text("cpu") + b"K\x01tQ"
    ),
    "a persistent id of a module and its source": (
        b"(" + text("module") + b"cos\nsystem\n" + text(MARKER) + text(COMMAND) + b"tQ"
    ),
    "numpy's own pickle within": call("numpy", "load", text(MARKER), b"N\x88"),
    "numpy's testing shell": call("numpy.testing._private.utils", "runstring", text(COMMAND), b"}"),
    "pip": call("pip", "main", b"](" + text("install") + text("evil") + b"e"),
    "webbrowser": call("webbrowser", "open", text("http://127.0.0.1:9/")),
    "a module that would be imported": call("antigravity", "fly_sanic_fly"),
    "a memo that doubles": b"".join([b"(K\x01t", *(b"q\x00h\x00h\x00\x86" for _ in range(200))]),
    "a memo that doubles, as a key": b"}" + b"(K\x01t" + b"q\x00h\x00h\x00\x86" * 200 + b"K\x01s",
}  # fmt: skip


def zipped(payload: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def legacy(payload: bytes) -> bytes:
    before = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "protocol_version": 1001, "type_sizes": {}})
    return b"".join(pickle.dumps(part, protocol=2) for part in before) + payload + pickle.dumps([], protocol=2)


CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "zip": zipped,
    "legacy": legacy,
    "plain": lambda payload: payload,
    "a zip in a zip": lambda payload: zipped(zipped(payload)),
}


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test reads: no file appears, no process is started and no module imported that runs at once."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    started: list[str] = []
    watching = [True]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "ctypes.dlopen"):
            started.append(event)

    sys.addaudithook(watch)
    yield
    watching.clear()
    assert started == []
    assert list(place.iterdir()) == []
    assert "antigravity" not in sys.modules


def refused_or_harmless(source: Path, **options: Any) -> WeightLoadersError | None:
    try:
        with open_weights(source, **options) as weights:
            for name in weights:
                weights[name]
    except WeightLoadersError as error:
        return error
    return None


def test_a_file_that_torch_would_run_does_run_there(tmp_path: Path) -> None:
    """What is refused here is no straw man."""
    path = tmp_path / "x.bin"
    path.write_bytes(zipped(b"\x80\x02" + PAYLOADS["global"].replace(b"os\nsystem", b"builtins\nlen") + b"."))
    assert torch.load(path, weights_only=False) == len(COMMAND)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("what", PAYLOADS)
def test_no_pickle_runs_whatever_it_is_made_of(tmp_path: Path, what: str, container: str) -> None:
    payload = PAYLOADS[what]
    payload = payload if payload.startswith(b"\x80") else b"\x80\x02" + payload
    path = tmp_path / "pytorch_model.bin"
    # As the whole, and as what lies beside a weight.
    for pickled in (payload + b".", payload[:2] + b"}" + text("x") + payload[2:] + b"s."):
        path.write_bytes(CONTAINERS[container](pickled))
        for options in (
            {},
            {"loader": "torch"},
            {"loader": "torch", "safe_globals": ["os:system", "subprocess:Popen"]},
        ):
            error = refused_or_harmless(path, **options)
            assert error is not None, options


@pytest.mark.parametrize(
    "name", ["model.pt", "model.pth", "consolidated.00.pth", "pytorch_model.bin", "model.safetensors"]
)
@pytest.mark.parametrize("loader", ["auto", "torch", "local", "hf", "binary"])
def test_no_loader_runs_what_a_folder_holds(tmp_path: Path, loader: str, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save({"w": torch.ones(2), "x": Evil()}, folder / name)
    (folder / "params.json").write_text('{"dim": 4, "n_heads": 2}')
    assert refused_or_harmless(folder, loader=loader) is not None
    for stray in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        shutil.copy(folder / name, folder / stray)
    (folder / name).unlink()
    assert refused_or_harmless(folder, loader=loader) is not None


def test_weights_beside_what_would_run_are_not_read_either(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Evil()}, tmp_path / "a.bin")
    with pytest.raises(SourceError, match=r"system") as caught, open_weights(tmp_path / "a.bin"):
        pass
    assert "safe_globals" in str(caught.value)


def test_a_pickle_that_was_refused_leaves_nothing_admitted(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    torch.save({"x": Evil()}, tmp_path / "a.bin")
    assert refused_or_harmless(tmp_path / "a.bin", loader="torch", safe_globals=["os:system"]) is not None
    assert set(torch.serialization.get_safe_globals()) == before
