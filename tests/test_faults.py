"""What a load leaves behind when the disk, the system or somebody else fails: the cause, and a model told truly."""

from __future__ import annotations

import _thread
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from faults.shim import VARIABLE, build
from weightloaders import load_into, load_status, open_weights, plan_load, save_weights
from weightloaders.errors import (
    ConfigError,
    HalfLoadedModelError,
    LoadError,
    ModelError,
    PlanError,
    SaveError,
    SourceError,
)
from weightloaders.loading.status import check_usable
from weightloaders.transfer import jobs
from weightloaders.weights.locks import locked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
MODES = ("direct", "mmap", "o_direct", "stream")
SHAPES = ((40, 30), (7,), (64, 64), (5, 3))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(shape)))


class Own(Plain):
    """A model that loads itself."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(SHAPES)}


def write(folder: Path, seed: int = 0) -> list[Path]:
    """A shard for each tensor, written long ago."""
    files = []
    for number, (name, tensor) in enumerate(values(seed).items(), 1):
        files.append(folder / f"model-{number:05}-of-{len(SHAPES):05}.safetensors")
        save_file({name: tensor}, files[-1])
        os.utime(files[-1], (1e9, 1e9))
    return files


def is_filled(model: nn.Module, seed: int = 0) -> bool:
    return all(torch.equal(p, values(seed)[name]) for name, p in model.named_parameters())


def is_empty(model: nn.Module) -> bool:
    return not any(bool(p.any()) for p in model.parameters())


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("weightloaders-headers"):
            # Nobody waits for what reads a last header when another could not be read.
            thread.join(10)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weightloaders")]
    if sys.platform == "linux":
        files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        assert not [file for file in files if file.startswith(str(tmp_path))]


# ------------------------------------------------------------------ before anything is written


@pytest.mark.parametrize("mode", MODES)
def test_a_last_shard_that_was_exchanged_is_found_before_the_first_is_read(shards: list[Path], mode: Any) -> None:
    model = Plain()
    with open_weights(shards[0].parent) as weights:
        plan = plan_load(model, weights, transfer=mode)
        shutil.copyfile(shards[-1], shards[-1].with_suffix(".new"))
        shards[-1].with_suffix(".new").replace(shards[-1])
        with pytest.raises(LoadError, match=r"model-00004-of-00004\.safetensors was changed") as caught:
            plan.run(model)
    assert caught.value.written == ()
    assert caught.value.hint
    assert is_empty(model)
    assert load_status(model) is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")
def test_a_file_that_this_user_may_not_read_is_named_with_what_to_do(shards: list[Path]) -> None:
    load_into(Plain(), shards[0].parent, progress=False)
    with tempfile.TemporaryDirectory() as place:
        # Pytest's own folders are closed to others.
        folder = Path(place)
        folder.chmod(0o755)
        files = write(folder)
        for file in files:
            file.chmod(0o644)
        closed = files[2]
        closed.chmod(0)
        try:
            os.seteuid(65534)
            with pytest.raises(SourceError, match="Permission denied") as caught:
                load_into(Plain(), folder, progress=False)
        finally:
            os.seteuid(0)
    assert caught.value.file == str(closed)
    assert caught.value.hint == "let this user read it"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")
def test_a_lock_that_somebody_else_left_is_no_obstacle_and_one_that_is_held_is(shards: list[Path]) -> None:
    model = Plain()
    load_into(model, shards[0].parent, progress=False)
    save_weights(model, shards[0].parent / "before.safetensors")  # imports what others may not
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o777)
        for name in (".saving.lock", ".one.safetensors.saving.lock"):
            (folder / name).touch(0o644)
        try:
            os.seteuid(65534)
            save_weights(model, folder / "one.safetensors")
            save_weights(model, folder)
            os.seteuid(0)
            (folder / ".saving.lock").touch(0o644)
            with locked(folder / ".saving.lock"):
                os.seteuid(65534)
                with pytest.raises(SaveError, match="somebody else is saving there"):
                    save_weights(model, folder)
        finally:
            os.seteuid(0)
        assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "one.safetensors"]


# ------------------------------------------------------------------ on the way


@pytest.mark.parametrize("kind", [Plain, Own])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "mmap"])
def test_ctrl_c_marks_the_model_and_what_was_written_is_listed(
    shards: list[Path], mode: Any, kind: type[Plain]
) -> None:
    model = kind()

    def interrupt(event: Any) -> None:
        # A model that loads itself is told before it gets a tensor.
        if event.done_bytes > event.total_bytes * 2 // 3:
            _thread.interrupt_main()

    options = {"threads": 1, "mode": mode}
    with pytest.raises(KeyboardInterrupt) as caught:
        load_into(model, shards[0].parent, progress=interrupt, transfer=options)
    assert load_status(model) == "failed"
    with pytest.raises(HalfLoadedModelError) as refused:
        check_usable(model)
    changed = {name for name, p in model.named_parameters() if bool(p.any())}
    assert changed
    assert changed <= set(refused.value.written)
    assert any("half-loaded" in note for note in caught.value.__notes__)
    load_into(model, shards[0].parent, progress=False)
    assert is_filled(model)


def test_a_mapped_file_that_is_cut_on_the_way_does_not_end_the_process(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching what was behind the new end of a mapped file would."""
    monkeypatch.setattr(jobs, "STRAIGHT_CHUNK", 64)
    # One that is read rather than mapped, so that there is something on the way.
    model = Plain()
    model.w0.data = torch.zeros(SHAPES[0], dtype=torch.float64)

    def cut(event: Any) -> None:
        if event.done_bytes:
            os.truncate(shards[2], 0)

    with pytest.raises(LoadError, match="changed") as caught:
        load_into(model, shards[0].parent, transfer="mmap", progress=cut)
    assert caught.value.file == str(shards[2])
    assert "w2" in caught.value.written
    assert load_status(model) == "failed"
    assert not model.w2.any()


# ------------------------------------------------------------------ atomic


@pytest.mark.parametrize("kind", [Plain, Own])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "mmap"])
def test_an_atomic_load_that_fails_on_the_way_leaves_every_value(
    shards: list[Path], tmp_path: Path, mode: Any, kind: type[Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    load_into(model, shards[0].parent, progress=False)
    held = dict(model.named_parameters())
    (tmp_path / "new").mkdir()
    new = write(tmp_path / "new", seed=1)

    def cut(event: Any) -> None:
        if event.done_bytes:
            os.truncate(new[-1], 100)

    options = {"threads": 1, "mode": mode}
    with pytest.raises(LoadError):
        load_into(model, new[0].parent, progress=cut, transfer=options, atomic=True)
    assert is_filled(model)
    assert load_status(model) == "loaded"

    write(tmp_path / "new", seed=1)
    seen = []
    report = load_into(
        model, new[0].parent, progress=lambda event: seen.append(is_filled(model)), transfer=options, atomic=True
    )
    # Until all of it was there, the model had its old values.
    assert seen
    assert all(seen)
    assert is_filled(model, seed=1)
    assert all(parameter is held[name] for name, parameter in model.named_parameters())
    assert load_status(model) == "loaded"
    assert report.extra_memory >= sum(p.nbytes for p in model.parameters())


def test_an_atomic_load_takes_what_is_shared_and_what_was_put_on_parameters_along(tmp_path: Path) -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4, 3))
            self.b = self.a
            self.part = nn.Parameter(torch.zeros(6))
            self.part.weight_loader = self.take  # type: ignore[attr-defined]
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

        def take(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
            parameter.data.copy_(tensor.flip(0))

    save_file({"a": torch.ones(4, 3), "part": torch.arange(6.0)}, tmp_path / "model.safetensors")
    model = Sharing()
    load_into(model, tmp_path, progress=False, atomic=True)
    assert model.a is model.b
    assert model.a.eq(1).all()
    assert model.part.tolist() == [5, 4, 3, 2, 1, 0]
    # It is known what it was loaded from.
    save_weights(model, tmp_path / "again", layout="model")
    assert load_file(tmp_path / "again" / "model.safetensors")["a"].eq(1).all()


def test_a_half_loaded_model_is_healed_by_an_atomic_load_and_not_by_one_that_fails(shards: list[Path]) -> None:
    model = Plain()
    with pytest.raises(LoadError):
        load_into(model, iter([("w0", torch.ones(SHAPES[0]))]), progress=False)
    assert load_status(model) == "failed"
    with pytest.raises(PlanError):
        load_into(model, {"w0": torch.ones(SHAPES[0])}, progress=False, atomic=True)
    assert load_status(model) == "failed"
    load_into(model, shards[0].parent, progress=False, atomic=True)
    assert load_status(model) == "loaded"
    check_usable(model)


def test_an_atomic_load_is_refused_where_there_is_nothing_to_keep_or_nothing_is_copied(shards: list[Path]) -> None:
    with pytest.raises(ModelError, match="w0 is on the meta device") as caught:
        load_into(Plain().to("meta"), shards[0].parent, progress=False, atomic=True)
    assert caught.value.hint
    with pytest.raises(ConfigError, match="mmap"):
        load_into(Plain(), shards[0].parent, progress=False, transfer="mmap", atomic=True)


def test_a_model_that_can_not_be_copied_is_refused_before_anything_changes(shards: list[Path]) -> None:
    model = Plain()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ModelError, match="can't be copied") as caught:
        load_into(model, shards[0].parent, progress=False, atomic=True)
    assert "leave out atomic" in str(caught.value)
    assert is_empty(model)


# ------------------------------------------------------------------ several processes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which memory is shared")
def test_eight_forked_processes_that_map_one_file_have_it_in_memory_once(tmp_path: Path) -> None:
    file, nbytes, count = tmp_path / "model.safetensors", 16 << 20, 8
    save_file({"weight": torch.ones(nbytes // 4 // 1024, 1024)}, file)
    # A load in the parent first: its locks, threads and descriptors must be no trouble to its children.
    load_into(nn.Linear(1024, nbytes // 4 // 1024, bias=False), file, progress=False)
    ready, stop = os.pipe(), os.pipe()
    children = []
    for _ in range(count):
        child = os.fork()
        if not child:
            try:
                os.close(stop[1])
                model = nn.Linear(1024, nbytes // 4 // 1024, bias=False, device="meta")
                load_into(model, file, transfer="mmap", progress=False)
                os.write(ready[1], b"1" if model.weight.eq(1).all() else b"0")
                # Until all have looked.
                os.read(stop[0], 1)
            finally:
                os._exit(0)
        children.append(child)
    os.close(ready[1])
    os.close(stop[0])
    try:
        answers = b"".join(os.read(ready[0], 1) for _ in children)
        shares = [_memory_of(child, file) for child in children]
    finally:
        os.close(stop[1])
        for child in children:
            os.waitpid(child, 0)
        os.close(ready[0])
    assert answers == b"1" * count
    # Each sees all of it, and together they have it once.
    assert all(resident >= nbytes for resident, _ in shares)
    assert sum(share for _, share in shares) < 1.5 * nbytes


def _memory_of(process: int, file: Path) -> tuple[int, int]:
    """Bytes of a file that a process has in memory, and its share of them (RSS and PSS)."""
    resident = share = 0
    mapped = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line.endswith(str(file))
        elif mapped and line.startswith(("Rss:", "Pss:")):
            value = int(line.split()[1]) << 10
            resident, share = (resident + value, share) if line.startswith("Rss:") else (resident, share + value)
    return resident, share


# ------------------------------------------------------------------ many of them, by chance

_PLANTED = {
    "loads": """
from weightloaders.weights.source import FileSource
FileSource.check_same = FileSource.check_unchanged = lambda *_: None
""",
    "saves": """
from weightloaders.weights import atomic
def exchange(stage, folder, *_):
    for file in stage.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
atomic.exchange = exchange
""",
}

needs_a_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="system calls are made to fail on Linux, with a compiler",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    library = str(build(tmp_path_factory.mktemp("shim")))
    return {**os.environ, VARIABLE: library, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}


def run_faults(environment: dict[str, str], executions: int, kind: str | None, planted: str = "") -> tuple[int, str]:
    code = f"{planted}\nimport sys\nfrom faults.running import run\nsys.exit(run({executions}, 0, {kind!r}, 120))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


@needs_a_compiler
def test_nothing_is_lost_while_system_calls_fail(environment: dict[str, str]) -> None:
    # As a shell leaves it to what it starts in the background.
    status, said = run_faults(environment, 60, None, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert status == 0, said
    assert said.count("survived 60, lost 0") == 2, said
    stopped = [int(number) for number in re.findall(r"Ctrl-C(?: +\d+){2} +(\d+)", said)]
    assert len(stopped) == 2, said
    assert all(stopped), said


@needs_a_compiler
@pytest.mark.parametrize("kind", _PLANTED)
def test_what_would_be_lost_is_noticed_and_its_seed_is_told(environment: dict[str, str], kind: str) -> None:
    """Files are no longer held against what they were; or are written where they belong."""
    status, said = run_faults(environment, 60, kind, _PLANTED[kind])
    assert status == 1, said
    lost = re.search(r"LOST --seed \d+: .*(wrong values, and no error|on disk is|changed)", said)
    assert lost is not None, said
