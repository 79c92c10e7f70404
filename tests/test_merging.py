"""What lies side by side in a file is read at one go, and what a load holds beside the model is bounded."""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightloaders.errors import LoadError
from weightloaders.mapping.placement import placement
from weightloaders.plan import CopyStep
from weightloaders.targets import Target
from weightloaders.transfer import jobs, merging
from weightloaders.transfer.engine import Transfer
from weightloaders.transfer.job import Job
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.schedule import Schedule
from weightloaders.transfer.workspace import Workspace
from weightloaders.weights.info import Extent, TensorInfo
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from pathlib import Path

F32, BF16 = torch.float32, torch.bfloat16
MIB = 1 << 20


def target(tensor: torch.Tensor, name: str = "w") -> Target:
    return Target(name, tensor, "parameter", True, tensor.dtype)


def written(path: Path, values: torch.Tensor) -> FileSource:
    path.write_bytes(values.contiguous().view(torch.uint8).numpy().tobytes())
    return FileSource(path)


def part(source: FileSource, name: str, start: int, count: int, dtype: torch.dtype = F32) -> TensorInfo:
    return TensorInfo(name, dtype, (count,), Extent(source, start * dtype.itemsize))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What is read: offset, bytes, views."""
    calls: list[tuple[int, int, int]] = []
    whole = os.preadv

    def watched(descriptor: int, views: list[memoryview], offset: int) -> int:
        calls.append((offset, sum(map(len, views)), len(views)))
        return whole(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", watched)
    return calls


# ------------------------------------------------------------------ what is read together


def test_neighbours_in_a_file_are_one_read_wherever_in_memory_they_go(
    tmp_path: Path, reads: list[tuple[int, int, int]]
) -> None:
    values = torch.randn(5000)
    source = written(tmp_path / "f", values)
    parameters = [torch.zeros(10) for _ in range(500)]
    steps = [CopyStep.whole(target(p, f"w{i}"), part(source, f"w{i}", 10 * i, 10)) for i, p in enumerate(parameters)]
    moved = Transfer(steps[::-1]).run()
    assert torch.equal(torch.cat(parameters), values)
    assert [(offset, nbytes) for offset, nbytes, _ in reads] == [(0, 20_000)]
    assert (moved.reads, moved.bytes_read, moved.bytes_by_path) == (1, 20_000, {"straight": 20_000})


def test_neighbours_in_memory_too_are_one_view(tmp_path: Path, reads: list[tuple[int, int, int]]) -> None:
    values = torch.randn(400)
    source, memory = written(tmp_path / "f", values), torch.zeros(400)
    Transfer(
        [CopyStep.whole(target(memory[100 * i :][:100], str(i)), part(source, str(i), 100 * i, 100)) for i in range(4)]
    ).run()
    assert torch.equal(memory, values)
    assert reads == [(0, 1600, 1)]


def test_what_nobody_wants_is_read_along_where_it_is_little_and_left_out_where_it_is_much(
    tmp_path: Path, reads: list[tuple[int, int, int]]
) -> None:
    gap = merging.MAX_GAP // 4
    values = torch.randn(100 + gap + 100 + gap + 1 + 100)
    source = written(tmp_path / "f", values)
    starts = [0, 100 + gap, 200 + 2 * gap + 1]
    parameters = [torch.zeros(100) for _ in starts]
    Transfer(
        [
            CopyStep.whole(target(p, str(at)), part(source, str(at), at, 100))
            for at, p in zip(starts, parameters, strict=True)
        ]
    ).run()
    assert all(torch.equal(p, values[at : at + 100]) for at, p in zip(starts, parameters, strict=True))
    assert sorted(reads) == [(0, 4 * (200 + gap), 3), (4 * starts[2], 400, 1)]


def test_casts_of_neighbours_share_a_read(tmp_path: Path, reads: list[tuple[int, int, int]]) -> None:
    values = torch.randn(1000)
    source = written(tmp_path / "f", values)
    parameters = [torch.zeros(10, dtype=BF16) for _ in range(100)]
    moved = Transfer(
        [CopyStep.whole(target(p, str(i)), part(source, str(i), 10 * i, 10)) for i, p in enumerate(parameters)]
    ).run()
    assert torch.equal(torch.cat(parameters), values.bfloat16())
    assert reads == [(0, 4000, 1)]
    assert moved.bytes_by_path == {"buffered": 4000}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_number_of_tensors_anywhere_in_files_arrives_as_it_is(
    tmp_path: Path, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight, cast, fused, repeated and overlapping pieces, under limits so small that all of them are met."""
    monkeypatch.setattr(merging, "MAX_GAP", data.draw(st.sampled_from([0, 8, 64])))
    monkeypatch.setattr(jobs, "STRAIGHT_CHUNK", data.draw(st.sampled_from([4, 40, 1000])))
    monkeypatch.setattr(jobs, "_SMALL", data.draw(st.sampled_from([4, 32])))
    monkeypatch.setattr("weightloaders.transfer.workspace.BUFFER_BYTES", data.draw(st.sampled_from([64, 256])))
    monkeypatch.setattr("weightloaders.weights.source._MOST_VIEWS", data.draw(st.sampled_from([1, 2, 3, 1000])))
    content = [torch.randn(200), torch.randn(200)]
    sources = [written(tmp_path / str(i), values) for i, values in enumerate(content)]
    steps, expected = [], []
    for number in range(data.draw(st.integers(1, 12))):
        infos, pieces, wanted, at = [], [], [], 0
        for index in range(data.draw(st.integers(1, 3))):
            file, count = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 40))
            start = data.draw(st.integers(0, 200 - count))
            infos.append(part(sources[file], f"{number}.{index}", start, count))
            pieces.append(placement(index, 0, at, [(count, 1, 1)]))
            wanted.append(content[file][start : start + count])
            at += count
        dtype = data.draw(st.sampled_from([F32, F32, BF16, torch.float64]))
        parameter = torch.zeros(at, dtype=dtype)
        steps.append(CopyStep(target(parameter, str(number)), tuple(infos), tuple(pieces)))
        expected.append((parameter, torch.cat(wanted).to(dtype)))
    moved = Transfer(steps).run()
    assert all(torch.equal(parameter, wanted) for parameter, wanted in expected)
    assert moved.bytes_read == sum(moved.bytes_by_path.values())


# ------------------------------------------------------------------ how reading fails


def test_of_neighbours_the_one_is_named_at_which_a_file_ends_and_those_behind_it_count_as_untouched(
    tmp_path: Path,
) -> None:
    source = written(tmp_path / "f", torch.randn(100))
    infos = [part(source, f"w{i}", 10 * i, 10) for i in range(10)]
    with (tmp_path / "f").open("r+b") as file:
        file.truncate(210)
        # Whatever tells that a file has changed must not be what notices it.
        source.check_same = lambda status: None  # type: ignore[method-assign]
    parameters = [torch.zeros(10) for _ in infos]
    with pytest.raises(LoadError, match="ends at byte 210") as caught:
        Transfer([CopyStep.whole(target(p, i.name), i) for p, i in zip(parameters, infos, strict=True)]).run()
    assert caught.value.tensor == "w5"
    assert caught.value.written == tuple(f"w{i}" for i in range(6))
    assert all(not parameter.any() for parameter in parameters[6:])


def test_a_parameter_in_memory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "f", torch.randn(2048))
    with (tmp_path / "f").open("rb") as file, mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_READ) as mapping:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this is read-only memory, which is what it is here for
            parameter = torch.frombuffer(mapping, dtype=F32)
        with pytest.raises(LoadError, match="can't be written") as caught:
            Transfer([CopyStep.whole(target(parameter, "layer.weight"), part(source, "w", 0, 2048))]).run()
        assert caught.value.tensor == "layer.weight"
        del parameter


# ------------------------------------------------------------------ tensors of several extents, and strided ones


def test_a_tensor_in_several_files_is_read_straight_into_its_place(tmp_path: Path) -> None:
    values = torch.randn(64, 256)
    halves = [written(tmp_path / str(i), values[32 * i : 32 * (i + 1)]) for i in range(2)]
    extents = [Extent(half, 0, shape=(32, 256), at=(32 * i, 0)) for i, half in enumerate(halves)]
    parameter = torch.zeros(64, 256)
    moved = Transfer([CopyStep.whole(target(parameter), TensorInfo("w", F32, (64, 256), extents))]).run()
    assert torch.equal(parameter, values)
    assert moved.bytes_by_path == {"straight": values.nbytes}
    assert moved.extra_memory == 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["as it is", "cast"])
def test_a_tensor_stored_by_columns_goes_through_the_buffer_whatever_its_size(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = torch.randn(3000, 2000)
    info = TensorInfo("w", F32, (2000, 3000), Extent(written(tmp_path / "f", values), 0, strides=(1, 2000)))
    parameter = torch.zeros(2000, 3000, dtype=dtype)
    moved = Transfer([CopyStep.whole(target(parameter), info)]).run()
    assert torch.equal(parameter, values.t().to(dtype))
    assert moved.bytes_by_path == {"buffered": values.nbytes}
    assert moved.extra_memory <= 16 * MIB


def test_rows_of_ranks_side_by_side_are_put_together(tmp_path: Path) -> None:
    values = torch.randn(40, 60)
    parts = values.chunk(3, dim=1)
    extents = [Extent(written(tmp_path / str(i), p), 0, shape=p.shape, at=(0, 20 * i)) for i, p in enumerate(parts)]
    info, parameter = TensorInfo("w", F32, (40, 60), extents), torch.zeros(40, 60)
    moved = Transfer([CopyStep.whole(target(parameter), info)]).run()
    assert torch.equal(parameter, values)
    assert moved.bytes_read == values.nbytes


# ------------------------------------------------------------------ bounded memory


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["as it is", "cast"])
@pytest.mark.parametrize("shape", [(3000, 2000), (7, 5, 300, 400), (1, 4_000_000)], ids=str)
def test_a_parameter_that_is_not_in_row_major_order_is_put_together_in_blocks(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.randn(shape)
    order = [*range(1, len(shape)), 0]
    parameter = torch.zeros([shape[i] for i in order], dtype=dtype).permute(
        *[order.index(i) for i in range(len(shape))]
    )
    assert parameter.shape == values.shape
    info = TensorInfo("w", F32, shape, Extent(written(tmp_path / "f", values), 0))
    moved = Transfer([CopyStep.whole(target(parameter), info)], options=TransferOptions(extra_memory=8 * MIB)).run()
    assert torch.equal(parameter, values.to(dtype))
    assert moved.bytes_by_path in (
        {"assembled": values.nbytes},
        {"straight": values.nbytes},
        {"buffered": values.nbytes},
    )
    assert moved.extra_memory <= 8 * MIB


def test_jobs_that_would_hold_more_together_than_is_allowed_wait_for_each_other() -> None:
    space, most, running, lock = Workspace(extra_memory=4 * MIB), 0, 0, threading.Lock()
    part = space.room // 2
    assert 0 < part < 2 * MIB

    def hold(nbytes: int) -> None:
        nonlocal most, running
        with space.holding(nbytes):
            with lock:
                running += nbytes
                most = max(most, running)
            time.sleep(0.01)
            with lock:
                running -= nbytes

    threads = [threading.Thread(target=hold, args=(part,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == space.most_held == 2 * part


def test_one_job_alone_may_hold_more_than_is_allowed() -> None:
    space = Workspace(extra_memory=4 * MIB)
    with space.holding(100 * MIB):
        assert space.most_held == 100 * MIB


def test_whoever_waits_for_room_stops_with_the_others() -> None:
    space, outcome = Workspace(extra_memory=4 * MIB), []

    def wait() -> None:
        try:
            with space.holding(space.room):
                outcome.append("held")
        except LoadError as error:
            outcome.append(type(error).__name__)

    with space.holding(space.room):
        thread = threading.Thread(target=wait)
        thread.start()
        space.stop()
        thread.join(10)
    assert outcome == ["Stopped"]


# ------------------------------------------------------------------ who reads what next


def job(file: str, offset: int) -> Job:
    return Job(file, offset, 1, (), lambda: None, "straight")


def test_a_reader_stays_with_its_file_and_takes_another_one_when_it_is_done() -> None:
    schedule = Schedule([job("a", 0), job("a", 1), job("b", 0), job("c", 0)])
    one, other = schedule.jobs(), schedule.jobs()
    taken = [next(one), next(other), next(one), next(other)]
    assert [(found.file, found.offset) for found in taken] == [("a", 0), ("b", 0), ("a", 1), ("c", 0)]
    assert list(one) == list(other) == []


def test_a_reader_that_has_nothing_left_takes_the_second_half_of_what_another_has() -> None:
    schedule = Schedule([job("a", at) for at in range(9)])
    one, other = schedule.jobs(), schedule.jobs()
    assert next(one).offset == 0
    # Of the eight that are left it takes four, and both go on from front to back.
    assert [next(other).offset for _ in range(3)] == [5, 6, 7]
    assert [found.offset for found in one] == [1, 2, 3, 4, 8]
    assert list(other) == []
