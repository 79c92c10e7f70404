"""Tensors that are read ahead: in order, each its own, in a bounded window, and with nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from weightloaders import (
    ByteSource,
    Extent,
    TensorInfo,
    TransferOptions,
    Weights,
    load_into,
    open_weights,
    safetensors_weights_iterator,
)
from weightloaders.errors import LoadError, SourceReadError
from weightloaders.transfer import file_views
from weightloaders.transfer.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
OPTIONS = TransferOptions(threads=2, extra_memory="8 MiB")


class Memory(ByteSource):
    """Bytes in memory, that count what is read of them, and can be slow or fail."""

    def __init__(self, data: bytes, before: Callable[[int], object] = lambda offset: None) -> None:
        self.name, self.data, self.before = "memory", data, before
        self.reads = 0
        self.bytes_read = 0

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def identity(self) -> int:
        return id(self.data)

    def read_into(self, view: memoryview, offset: int) -> None:
        self.before(offset)
        self.reads += 1
        self.bytes_read += len(view)
        view[:] = self.data[offset : offset + len(view)]


def numbered(count: int, elements: int, before: Callable[[int], object] = lambda offset: None) -> Weights:
    """Tensors ``0``, ``1``, ... that hold their own numbers."""
    data = b"".join(torch.full((elements,), i, dtype=torch.int32).numpy().tobytes() for i in range(count))
    source = Memory(data, before)
    return Weights.describe(
        TensorInfo(str(i), torch.int32, (elements,), Extent(source, 4 * elements * i)) for i in range(count)
    )


def source_of(weights: Weights) -> Memory:
    source = weights.infos()[0].extents[0].source
    assert isinstance(source, Memory)
    return source


def ahead(weights: Weights, options: TransferOptions = OPTIONS) -> ReadAhead:
    return ReadAhead(weights.infos(), lambda info: weights[info.name], options)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weightloaders-read-ahead")]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert readers() == []


SIZES = {"many small": (500, 300), "medium": (40, 300_000), "large": (5, 3 * MIB), "one element": (50, 1)}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_tensors_come_whole_and_in_the_order_of_the_file(size, threads):
    count, elements = SIZES[size]
    weights = numbered(count, elements)
    names = []
    for info, tensor in ahead(weights, TransferOptions(threads=threads, extra_memory="8 MiB")):
        names.append(info.name)
        assert tensor.shape == (elements,)
        assert bool((tensor == int(info.name)).all())
    assert names == [str(i) for i in range(count)]


def test_every_kind_of_tensor_comes_as_reading_it_alone_gives_it(tmp_path):
    torch.manual_seed(0)
    plain = {
        "a": torch.randn(7, 5),
        "b": torch.randn(1000, 1000).to(torch.bfloat16),
        "c": torch.zeros(0, 4),
        "d": torch.tensor(3.0),
        "e": torch.randint(0, 2, (33,)).bool(),
        "f": torch.randn(64, 64).to(torch.float8_e4m3fn),
    }
    save_file(plain, tmp_path / "model.safetensors")
    big = torch.randn(5, 6)
    (tmp_path / "raw").write_bytes(big.numpy().byteswap().tobytes() + torch.arange(12.0).numpy().tobytes())
    with open_weights(tmp_path / "model.safetensors") as stored:
        odd = [
            TensorInfo("big endian", torch.float32, (5, 6), Extent(tmp_path / "raw", 0, byteorder="big")),
            TensorInfo(
                "cast", torch.float16, (5, 6), Extent(tmp_path / "raw", 0, dtype=torch.float32, byteorder="big")
            ),
            TensorInfo("strided", torch.float32, (3, 4), Extent(tmp_path / "raw", 120, strides=(1, 3))),
            TensorInfo("made", torch.float32, (2,), read=lambda: torch.ones(2)),
        ]
        weights = Weights.describe([*stored.infos(), *odd])
        found = dict(weights.items())
        streamed = {info.name: tensor for info, tensor in ahead(weights)}
    assert list(found) == list(streamed)
    for name, tensor in found.items():
        assert streamed[name].dtype == tensor.dtype
        assert streamed[name].shape == tensor.shape
        assert (
            streamed[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        )


# ------------------------------------------------------------------ whose memory it is


@pytest.mark.parametrize("size", SIZES)
def test_whoever_keeps_what_comes_keeps_its_values(size):
    count, elements = SIZES[size]
    kept = {info.name: tensor for info, tensor in ahead(numbered(count, elements))}
    assert all(bool((tensor == int(name)).all()) for name, tensor in kept.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept.values()}) == count
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept.values())


def test_what_is_kept_is_memory_as_torch_gives_it():
    """It can be resized, as wrappers for distributed training do."""
    kept = [tensor for _, tensor in ahead(numbered(60, MIB // 2))]
    assert all(tensor.untyped_storage().resizable() for tensor in kept)


def test_a_view_or_an_array_of_what_came_keeps_it_as_well():
    kept = {}
    for info, tensor in ahead(numbered(30, MIB)):
        kept[info.name] = tensor[5:7] if int(info.name) % 2 else tensor.numpy()[5:7]
        del tensor
    assert {name: value.tolist() for name, value in kept.items()} == {str(i): [i, i] for i in range(30)}


def test_what_is_let_go_of_gives_its_memory_to_the_next():
    addresses = set()
    for _, tensor in ahead(numbered(40, MIB)):
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) <= 12


def test_a_copy_that_is_still_running_when_the_stream_goes_on_is_exact():
    """Tensors are handed to a pool of threads, whose copies are late."""
    copies = {str(i): torch.empty(MIB, dtype=torch.int32) for i in range(12)}

    def copy(name: str, tensor: torch.Tensor) -> None:
        time.sleep(0.02)
        copies[name].copy_(tensor)

    with ThreadPoolExecutor(3) as pool:
        for info, tensor in ahead(numbered(12, MIB)):
            pool.submit(copy, info.name, tensor)
    assert all(bool((tensor == int(name)).all()) for name, tensor in copies.items())


def test_tensors_are_usable_outside_of_the_inference_mode_they_were_asked_for_in():
    with torch.inference_mode():
        tensors = [tensor for _, tensor in ahead(numbered(3, 10))]
    assert not any(tensor.is_inference() for tensor in tensors)


def test_a_loader_that_reuses_its_buffer_is_copied_from_when_it_is_its_turn():
    buffer = torch.zeros(4)

    def read(i: int) -> torch.Tensor:
        return buffer.fill_(i)

    weights = Weights.describe(
        [TensorInfo(str(i), torch.float32, (4,), read=lambda i=i: read(i)) for i in range(5)], borrowed=True
    )
    kept = {info.name: tensor for info, tensor in ahead(weights)}
    assert {name: tensor[0].item() for name, tensor in kept.items()} == {str(i): i for i in range(5)}


def test_code_of_others_runs_on_the_callers_thread():
    threads = []

    def read() -> torch.Tensor:
        threads.append(threading.current_thread())
        return torch.ones(2)

    source = numbered(3, MIB).infos()
    infos = [*source, *(TensorInfo(f"made {i}", torch.float32, (2,), read=read) for i in range(3))]
    weights = Weights.describe(infos)
    assert len(list(ahead(weights))) == 6
    assert threads == [threading.current_thread()] * 3


# ------------------------------------------------------------------ how far it goes ahead


def test_nothing_is_read_before_the_first_is_asked_for():
    weights = numbered(3, 10)
    pairs = iter(ahead(weights))
    time.sleep(0.05)
    assert source_of(weights).reads == 0
    pairs.close()


def test_looking_at_a_few_does_not_eat_the_stream():
    weights = numbered(100, MIB // 4)
    pairs = iter(ahead(weights))
    assert [next(pairs)[0].name for _ in range(3)] == ["0", "1", "2"]
    time.sleep(0.2)
    # Three were taken, and no more than the window was read ahead of them.
    assert source_of(weights).bytes_read <= 3 * MIB + OPTIONS.extra_memory
    assert [info.name for info, _ in pairs] == [str(i) for i in range(3, 100)]


@pytest.mark.parametrize("size", ["many small", "medium"])
def test_what_is_held_stays_within_extra_memory(size):
    count, elements = SIZES[size]
    reading = ahead(numbered(count, elements))
    for _, tensor in reading:
        time.sleep(0.0005)
        del tensor
    assert 0 < reading.most_held <= OPTIONS.extra_memory


def test_a_tensor_larger_than_the_window_is_read_ahead_alone():
    """As few as there can be: the one in use, and the next."""
    reading = ahead(numbered(4, 4 * MIB))
    storages: list[StorageWeakRef] = []
    for _, tensor in reading:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        assert sum(not storage.expired() for storage in storages) == 1
        del tensor
    assert reading.most_held <= 3 * 16 * MIB


def test_the_process_grows_by_the_window_alone(tmp_path):
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(256 * MIB)
    code = f"""
        import resource, sys
        from weightloaders import Extent, TensorInfo, TransferOptions
        from weightloaders.transfer.read_ahead import ReadAhead
        import torch
        infos = [TensorInfo(str(i), torch.uint8, (8 << 20,), Extent({str(file)!r}, i << 23)) for i in range(32)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for info, tensor in ReadAhead(infos, None, TransferOptions(extra_memory="32 MiB", threads=2)):
            del tensor
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 64 << 10


# ------------------------------------------------------------------ how it ends


def test_closing_early_stops_the_threads():
    weights = numbered(40, MIB)
    pairs = iter(ahead(weights))
    next(pairs)
    assert readers()
    pairs.close()
    assert readers() == []
    assert source_of(weights).bytes_read < weights.nbytes / 2


def test_an_iterator_that_is_dropped_stops_its_threads():
    weights = numbered(40, MIB)
    next(iter(ahead(weights)))
    gc.collect()
    assert readers() == []


def test_an_error_in_the_loop_stops_the_threads_though_its_traceback_is_kept():
    def consume() -> None:
        with contextlib.closing(iter(ahead(numbered(20, MIB)))) as pairs:
            for _ in pairs:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        consume()
    assert readers() == []
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("bad", [0, 3, 9])
@pytest.mark.parametrize("elements", [300, MIB])
def test_an_error_while_reading_comes_where_its_tensor_would(bad, elements):
    def fail(offset: int) -> None:
        if offset // (4 * elements) == bad:
            raise SourceReadError("the disk is broken")

    # One view at a time, so that each small tensor is a read of its own.
    weights = numbered(10, elements, fail)
    names = []

    def consume() -> None:
        for info, tensor in ahead(weights):
            assert bool((tensor == int(info.name)).all())
            names.append(info.name)

    with pytest.raises(SourceReadError, match="the disk is broken"):
        consume()
    assert names == [str(i) for i in range(bad)]
    assert readers() == []


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path):
    save_file({f"w{i}": torch.randn(MIB) for i in range(8)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as weights:
        pairs = iter(ahead(weights))
        next(pairs)
        os.truncate(tmp_path / "model.safetensors", 20 * MIB)
        with pytest.raises(SourceReadError, match=r"model\.safetensors"):
            list(pairs)


def test_too_little_memory_is_our_own_error():
    weights = Weights.describe([TensorInfo("huge", torch.uint8, (1 << 45,), Extent(Sparse(), 0))])
    with pytest.raises(SourceReadError, match=r"not enough memory for tensor 'huge'"):
        list(ahead(weights))


class Sparse(Memory):
    def __init__(self) -> None:
        super().__init__(b"")

    @property
    def size(self) -> int:
        return 1 << 46


def test_ctrl_c_while_waiting_for_a_slow_source_ends_it_and_its_threads(tmp_path):
    code = """
        import signal, threading, time
        import torch
        from weightloaders import ByteSource, Extent, TensorInfo, TransferOptions
        from weightloaders.transfer.read_ahead import ReadAhead

        class Slow(ByteSource):
            name, size, identity = "slow", 1 << 30, 1
            def read_into(self, view, offset):
                print("reading", flush=True)
                time.sleep(0.5 if offset else 0)

        infos = [TensorInfo(str(i), torch.uint8, (1 << 22,), Extent(Slow(), i << 22)) for i in range(100)]
        try:
            for info, tensor in ReadAhead(infos, None, TransferOptions(threads=2)):
                pass
        except KeyboardInterrupt:
            left = [t for t in threading.enumerate() if t is not threading.main_thread()]
            print("stopped", len(left), flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output.splitlines()[-1] == "stopped 0"
    assert time.monotonic() - start < 10


def test_a_process_ends_though_an_iterator_was_left_open(tmp_path):
    save_file({f"w{i}": torch.zeros(MIB) for i in range(40)}, tmp_path / "model.safetensors")
    code = f"""
        from weightloaders import safetensors_weights_iterator
        pairs = safetensors_weights_iterator({str(tmp_path)!r}, progress=False)
        next(pairs)
        print("end", flush=True)
        import sys
        sys.keep = pairs
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


# ------------------------------------------------------------------ who uses it


class OwnWay(nn.Module):
    """A model that fills itself from pairs."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        for i in range(count):
            self.register_parameter(f"w{i}", nn.Parameter(torch.zeros(elements)))

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class Keeping(OwnWay):
    """And keeps what it is given."""

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data = tensor


class Peeking(OwnWay):
    """And looks at three names first, then takes all."""

    def load_weights(self, weights):
        first = [next(weights) for _ in range(3)]
        assert len(readers()) == 2
        super().load_weights(iter([*first, *weights]))


class Late(OwnWay):
    """And copies on threads of its own."""

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())

        def copy(name, tensor):
            time.sleep(0.01)
            parameters[name].data.copy_(tensor)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pair: copy(*pair), weights))


class Stopping(OwnWay):
    """And has enough after two."""

    def load_weights(self, weights):
        for _, (name, tensor) in zip(range(2), weights, strict=False):
            self.get_parameter(name).data.copy_(tensor)


class Failing(OwnWay):
    def load_weights(self, weights):
        for _ in weights:
            raise RuntimeError("no")


@pytest.fixture
def stored(tmp_path) -> Path:
    torch.manual_seed(0)
    save_file({f"w{i}": torch.randn(MIB // 2) for i in range(12)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("kind", [OwnWay, Keeping, Peeking, Late])
def test_a_model_with_a_way_of_its_own_is_read_to_ahead(kind, stored):
    model = kind(12, MIB // 2)
    report = load_into(model, stored, transfer=OPTIONS, progress=False)
    reference = load_file(stored / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in reference.items())
    assert set(report.loaded) == set(reference)
    assert 0 < report.extra_memory <= OPTIONS.extra_memory
    assert report.bytes_read == 12 * 2 * MIB


@pytest.mark.parametrize("kind", [OwnWay, Keeping, Peeking, Late])
def test_in_mode_mmap_a_model_with_a_way_of_its_own_is_handed_views_of_the_file(kind, stored, monkeypatch):
    monkeypatch.setattr(Peeking, "load_weights", OwnWay.load_weights)
    file = stored / "model.safetensors"
    before = file.read_bytes()
    model = kind(12, MIB // 2)
    report = load_into(model, stored, transfer="mmap", progress=False)
    reference = load_file(file)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in reference.items())
    assert set(report.loaded) == set(reference)
    assert (report.bytes_read, report.bytes_by_path) == (0, {"mapped": 12 * 2 * MIB})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert file.read_bytes() == before


def test_in_mode_mmap_what_can_not_be_mapped_is_read(stored, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(file_views, "_mapped", fail)
    report = load_into(OwnWay(12, MIB // 2), stored, transfer="mmap", progress=False)
    assert report.bytes_read == 12 * 2 * MIB
    assert [note for note in report.notes if "can't be mapped" in note]
    monkeypatch.undo()
    big = torch.randn(4)
    (stored / "raw").write_bytes(big.numpy().byteswap().tobytes())
    infos = [
        TensorInfo("w0", torch.float32, (4,), Extent(stored / "raw", 0, byteorder="big")),
        TensorInfo("w1", torch.float32, (4,), read=lambda: torch.ones(4)),
    ]
    model = OwnWay(2, 4)
    load_into(model, Weights.describe(infos), transfer="mmap", progress=False)
    assert torch.equal(model.w0, big)
    assert bool((model.w1 == 1).all())


@pytest.mark.parametrize("mode", ["o_direct", "stream"])
def test_the_other_modes_fill_a_model_with_a_way_of_its_own_too(mode, stored):
    model = OwnWay(12, MIB // 2)
    report = load_into(model, stored, transfer=mode, progress=False)
    reference = load_file(stored / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in reference.items())
    assert report.bytes_read == 12 * 2 * MIB


@pytest.mark.parametrize("kind", [Stopping, Failing])
def test_a_model_that_stops_or_fails_leaves_no_thread_behind(kind, stored):
    with pytest.raises(LoadError) as error:
        load_into(kind(12, MIB // 2), stored, transfer=OPTIONS, progress=False)
    assert readers() == []
    del error


def test_what_a_model_that_keeps_its_tensors_has_is_freed_with_it(stored):
    model = Keeping(12, MIB // 2)
    load_into(model, stored, progress=False)
    gone = weakref.ref(model)
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    del model
    gc.collect()
    assert gone() is None
    assert all(storage.expired() for storage in storages)


def test_the_iterator_over_a_folder_reads_ahead_and_yields_what_the_reference_reads(stored):
    reference = load_file(stored / "model.safetensors")
    pairs = safetensors_weights_iterator(stored, progress=False)
    found = dict(pairs)
    assert found.keys() == reference.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.items())
    pairs = safetensors_weights_iterator(stored, progress=False)
    next(pairs)
    pairs.close()
    assert readers() == []
