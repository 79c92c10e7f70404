"""However bytes are moved, what fails on the way is an error of ours, and says what and where."""

from __future__ import annotations

import gc
import hashlib
import logging
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weightloaders import ByteSource, Extent, TensorInfo, Weights, load_into, load_status
from weightloaders.errors import ConfigError, LoadError, SourceReadError
from weightloaders.loading import loading
from weightloaders.mapping.placement import placement
from weightloaders.plan import CopyStep
from weightloaders.targets import Target
from weightloaders.transfer import jobs
from weightloaders.transfer.engine import Transfer
from weightloaders.transfer.options import TransferOptions
from weightloaders.weights.source import FileSource
from weightloaders.weights.threads import in_parallel, in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MODES = ("direct", "mmap", "o_direct", "stream")
NAMES = tuple(f"{i}.weight" for i in range(4))


class Own(nn.Sequential):
    """A model that loads itself."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def model(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(*(nn.Linear(30, 20, bias=False) for _ in NAMES))


def remember(filled: nn.Sequential) -> None:
    for parameter in filled.parameters():
        parameter.before = parameter.detach().clone()  # type: ignore[attr-defined]


def is_untouched(filled: nn.Sequential, error: LoadError) -> None:
    """Or else it is marked, and what was changed is named."""
    changed = {n for n, p in filled.named_parameters() if not torch.equal(p, p.before)}  # type: ignore[attr-defined]
    assert changed <= set(error.written)
    assert load_status(filled) == ("failed" if error.written else None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({name: torch.randn(20, 30) for name in NAMES}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weightloaders")]


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
def test_a_progress_function_that_fails_is_named(file: Path, mode: Any, kind: type[nn.Sequential]) -> None:
    def progress(event: object) -> None:
        raise ValueError("no more")

    filled = model(kind)
    remember(filled)
    with pytest.raises(LoadError, match="no more") as caught:
        load_into(filled, file, transfer=mode, progress=progress)
    assert "progress function failed" in str(caught.value)
    is_untouched(filled, caught.value)


def test_a_progress_function_that_fails_on_a_stream_of_pairs_is_named() -> None:
    filled = model()
    pairs = ((name, torch.randn(20, 30)) for name in NAMES)
    with pytest.raises(LoadError, match="progress function failed: ValueError: no more"):
        load_into(filled, pairs, progress=lambda event: (_ for _ in ()).throw(ValueError("no more")))
    assert load_status(filled) == "failed"


class Failing(ByteSource):
    name = "a source of somebody else's"
    size = 1 << 20  # type: ignore[assignment]
    identity = 1  # type: ignore[assignment]

    def read_into(self, view: memoryview, offset: int) -> None:
        raise RuntimeError("the cable is loose")


def failing_read() -> torch.Tensor:
    raise RuntimeError("the cable is loose")


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["source", "read"])
def test_code_of_others_that_fails_while_reading_is_named_with_the_tensor(
    mode: Any, how: str, kind: type[nn.Sequential]
) -> None:
    source = Failing()
    infos = [
        TensorInfo(name, torch.float32, (20, 30), read=failing_read)
        if how == "read"
        else TensorInfo(name, torch.float32, (20, 30), Extent(source, 2400 * i))
        for i, name in enumerate(NAMES)
    ]
    filled = model(kind)
    remember(filled)
    with pytest.raises(LoadError, match="the cable is loose") as caught:
        load_into(filled, Weights.describe(infos), transfer=mode)
    assert caught.value.tensor in NAMES
    is_untouched(filled, caught.value)


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
def test_a_storage_that_there_is_none_of_is_refused_before_anything_changes(
    file: Path, mode: Any, kind: type[nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = model(kind)
    before = [parameter.detach().clone() for parameter in filled.parameters()]
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "floppy")
    with pytest.raises(ConfigError, match="floppy"):
        load_into(filled, file, transfer=mode)
    assert load_status(filled) is None
    assert all(torch.equal(a, b) for a, b in zip(before, filled.parameters(), strict=True))


# ------------------------------------------------------------------ memory that is not what it seems


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped read-only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as it is", "cast"])
@pytest.mark.parametrize("mode", MODES)
def test_read_only_memory_is_refused_in_every_mode_before_anything_is_written(
    file: Path, tmp_path: Path, mode: Any, dtype: torch.dtype
) -> None:
    filled = model()
    (tmp_path / "memory").write_bytes(bytes(1 << 16))
    with (tmp_path / "memory").open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 1 << 16, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is read-only memory, which is what it is here for
        memory = torch.frombuffer(mapping, dtype=dtype, count=600).view(20, 30)
    filled[2].weight = nn.Parameter(memory, requires_grad=False)
    remember(filled)
    with pytest.raises(LoadError, match="can't be written") as caught:
        load_into(filled, file, transfer=mode)
    assert caught.value.tensor == "2.weight"
    assert not caught.value.written
    is_untouched(filled, caught.value)


@pytest.mark.parametrize("mode", ["direct", "o_direct", "stream"])
def test_a_parameter_that_is_given_less_memory_while_loading_is_an_error_and_nothing_else_is_written(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "STRAIGHT_CHUNK", 1 << 16)
    count = 40
    tensors = {f"{i}.weight": torch.randn(300, 400) for i in range(count)}
    save_file(tensors, tmp_path / "model.safetensors")
    filled = nn.Sequential(*(nn.Linear(400, 300, bias=False) for _ in range(count)))

    def shrink(event: Any) -> None:
        if event.done_bytes:
            for layer in filled:
                layer.weight.data = torch.zeros(3)

    with pytest.raises(LoadError):
        load_into(filled, tmp_path / "model.safetensors", transfer=mode, progress=shrink)
    assert load_status(filled) == "failed"


def test_a_storage_that_was_cut_is_an_error(file: Path) -> None:
    filled = model()
    filled[1].weight.untyped_storage().resize_(100)
    with pytest.raises(LoadError, match=r"1\.weight"):
        load_into(filled, file)


def test_memory_that_others_see_is_filled_and_not_exchanged(file: Path) -> None:
    stored = load_file(file)
    filled = model()
    filled[0].weight.data.share_memory_()
    array = np.zeros((20, 30), dtype=np.float32)
    filled[1].weight = nn.Parameter(torch.from_numpy(array))
    report = load_into(filled, file, transfer="mmap")
    assert filled[0].weight.is_shared()
    assert np.array_equal(array, stored["1.weight"].numpy())
    assert all(torch.equal(parameter, stored[name]) for name, parameter in filled.named_parameters())
    assert report.bytes_by_path == {"mapped": 2 * 2400, "straight": 2 * 2400}
    assert "2 (sharing memory with others)" in report.notes[-1]


def test_what_is_mapped_already_is_mapped_again(file: Path, tmp_path: Path) -> None:
    filled = model()
    load_into(filled, file, transfer="mmap")
    save_file({name: torch.ones(20, 30) for name in NAMES}, tmp_path / "other.safetensors")
    assert set(load_into(filled, tmp_path / "other.safetensors", transfer="mmap").bytes_by_path) == {"mapped"}
    assert all(bool((parameter == 1).all()) for parameter in filled.parameters())


# ------------------------------------------------------------------ files


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("mode", MODES)
def test_a_folder_whose_name_is_no_text_is_read_in_every_mode(
    file: Path, tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # What is logged has the name in it, which the workers of a parallel run can't tell each other.
    caplog.set_level(logging.CRITICAL, "weightloaders")
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    shutil.copy(file, folder)
    filled = model()
    load_into(filled, folder, transfer=mode)
    assert all(torch.equal(p, load_file(file)[name]) for name, p in filled.named_parameters())


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_is_written_to_while_it_is_loaded_is_an_error_in_every_mode(
    file: Path, mode: Any, kind: type[nn.Sequential]
) -> None:
    def rewrite(event: Any) -> None:
        if event.done_bytes:
            with file.open("r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(b"\0\0\0\0")
            os.utime(file, (1, 1))

    filled = model(kind)
    if (mode, kind) == ("mmap", nn.Sequential):
        pytest.skip("nothing is read there, and so nobody is told of progress")
    with pytest.raises(LoadError, match="changed"):
        load_into(filled, file, transfer=mode, progress=rewrite)
    assert load_status(filled) == "failed"


def test_a_parameter_that_one_thread_has_begun_counts_as_written_when_another_one_fails_before_it(
    tmp_path: Path,
) -> None:
    """One read covers all of the first and the head of the second, and fails when the rest of the second is there."""
    rest_is_there = threading.Event()

    class Torn(FileSource):
        def read_into(self, view: memoryview, offset: int) -> None:
            raise AssertionError("not used")

        most_views = 1000  # type: ignore[assignment]

        def read_vectors(self, views: Any, offset: int) -> None:
            rest_is_there.wait(20)
            raise SourceReadError("gone", at=offset, file=self.name)

    class Rest(Torn):
        def read_into(self, view: memoryview, offset: int) -> None:
            view[:] = bytes(len(view))

    (tmp_path / "f").write_bytes(bytes(1 << 12))
    torn = Torn(tmp_path / "f")
    first, second = torch.ones(10), torch.ones(20)
    names = {"a": first, "b": second}
    targets = {name: Target(name, tensor, "parameter", True, tensor.dtype) for name, tensor in names.items()}
    head = TensorInfo("head", torch.float32, (10,), Extent(torn, 40))
    tail = TensorInfo("tail", torch.float32, (10,), Extent(Rest(tmp_path / "f"), 2000))
    runs = (placement(0, 0, 0, [(10, 1, 1)]), placement(1, 0, 10, [(10, 1, 1)]))
    steps = [
        CopyStep.whole(targets["a"], TensorInfo("a", torch.float32, (10,), Extent(torn, 0))),
        CopyStep(targets["b"], (head, tail), runs),
    ]
    version = second._version

    def progress(event: Any) -> None:
        if event.done_bytes:
            rest_is_there.set()

    with pytest.raises(LoadError, match="gone") as caught:
        Transfer(steps, options=TransferOptions(threads=2), progress=progress).run()
    assert not second[10:].any()
    assert caught.value.written == ("a", "b")
    assert second._version > version


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_a_child_that_is_started_while_a_model_is_loaded_can_load_it(file: Path, tmp_path: Path, start: str) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has none")
    program = """
        import multiprocessing, os, sys, torch, warnings
        from torch import nn
        from weightloaders import load_into

        warnings.simplefilter("ignore")

        class Own(nn.Sequential):
            def load_weights(self, weights):
                parameters = dict(self.named_parameters())
                for name, tensor in weights:
                    parameters[name].data.copy_(tensor)

        def model(kind):
            return kind(*(nn.Linear(30, 20, bias=False) for _ in range(4)))

        def load(half_loaded):
            for kind in (nn.Sequential, Own):
                for filled in (model(kind), half_loaded):
                    report = load_into(filled, sys.argv[1], progress=False)
                    assert len(report.loaded) == 4

        if __name__ == "__main__":
            codes = []

            # A model that loads itself is told of progress while it has a part of its tensors.
            def start_child(event):
                if event.done_bytes and not codes:
                    child = multiprocessing.get_context(sys.argv[2]).Process(target=load, args=(filled,))
                    child.start()
                    child.join(100)
                    codes.append(child.exitcode)

            filled = model(Own)
            load_into(filled, sys.argv[1], progress=start_child)
            print(codes)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, script, file, start],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.strip() == "[0]", done.stderr


# ------------------------------------------------------------------ Ctrl-C


def test_the_callers_thread_takes_no_lock_that_ctrl_c_could_leave_taken(file: Path) -> None:
    """Within Python code it is taken before its taker knows: interrupted there, others wait for it for ever."""
    taken = []

    def watch(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_qualname in ("Condition.__enter__", "_AcquireFutures.__enter__"):
            callers = [frame.f_back, frame.f_back.f_back]
            # What Python itself does to start a thread can't be helped.
            if [caller.f_code.co_qualname for caller in callers] != ["Event.wait", "Thread.start"]:
                taken.append([caller.f_code.co_qualname for caller in callers])

    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (file.parent / "SHA256SUMS").write_text(f"{digest}  {file.name}\n")
    for kind in (nn.Sequential, Own):
        filled = model(kind)
        sys.setprofile(watch)
        try:
            load_into(filled, file.parent, transfer={"threads": 3}, verify=["sha256", "record"], progress=False)
        finally:
            sys.setprofile(None)
        assert load_status(filled) == "loaded"
    sys.setprofile(watch)
    try:
        assert in_parallel(lambda item: item + 1, range(20), 4) == list(range(1, 21))
    finally:
        sys.setprofile(None)
    assert taken == []


def test_what_fails_in_a_thread_is_raised_in_its_turn_and_ends_the_rest() -> None:
    done = []

    def work(item: int) -> int:
        if item == 5:
            raise SystemExit("a thread's own end")
        time.sleep(0.002)
        done.append(item)
        return item

    results = in_turn(work, range(500), 4)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(SystemExit, match="a thread's own end"):
        next(results)
    wait_for = time.monotonic() + 20
    while any(t.name.startswith("weightloaders") for t in threading.enumerate()) and time.monotonic() < wait_for:
        time.sleep(0.001)
    assert len(done) < 20


def test_ctrl_c_before_code_of_a_loader_is_called_leaves_no_other_complaint(file: Path) -> None:
    """What names the code at fault is given up with it, and says nothing of its own: pytest fails where it does."""
    naming = loading._naming(object(), "get_weights", str(file))
    naming.__enter__()
    del naming
    gc.collect()
