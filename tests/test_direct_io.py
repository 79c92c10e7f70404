"""Reading past the page cache: the same bytes, and the cache stays as it was."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from weightloaders import load_into
from weightloaders.errors import LoadError, SourceReadError
from weightloaders.weights import direct_io
from weightloaders.weights.direct_io import Alignment, DirectReads, DirectSource, alignment_of, arrange
from weightloaders.weights.source import ByteSource, FileSource, close_files

linux = pytest.mark.skipif(sys.platform != "linux", reason="direct reads as Linux has them")

SIZE = (5 << 20) + 1234


@pytest.fixture(scope="module")
def content() -> bytes:
    return bytes(memoryview(os.urandom(SIZE)))


@pytest.fixture(scope="module")
def file(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "weights.bin"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def memory() -> memoryview:
    """Writable memory that begins with a page."""
    return memoryview(mmap.mmap(-1, 16 << 20))


def opened_directly(path: Path) -> bool:
    """Whether the file system takes direct reads of this file."""
    reads = DirectReads()
    reads.source(FileSource(path)).read(0, 1)
    return not reads.notes


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by mincore(2)."""
    size = path.stat().st_size
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapping:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        begin = ctypes.c_char.from_buffer(mapping)
        try:
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), ctypes.byref(pages)
            )
        finally:
            del begin
    assert not failed
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def forget_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# ------------------------------------------------------------------ the same bytes

_LENGTHS = st.one_of(
    st.integers(0, 9000), st.sampled_from([511, 512, 4096, 8192, 65536, 65537, 1 << 20, 1 << 22]), st.integers(0, SIZE)
)


@given(
    offset=st.one_of(st.integers(0, SIZE), st.integers(0, SIZE // 4096).map(lambda block: block * 4096)),
    parts=st.lists(st.tuples(_LENGTHS, st.sampled_from([0, 1, 3, 64]), st.booleans()), min_size=1, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_views_are_filled_with_the_bytes_of_the_file_wherever_both_lie(
    file: Path, content: bytes, memory: memoryview, offset: int, parts: list[tuple[int, int, bool]]
) -> None:
    source = DirectReads().source(FileSource(file))
    assert isinstance(source, DirectSource)
    views, expected, at, place = [], [], offset, 0
    for length, gap, congruent in parts:
        # As far from a block's beginning in memory as in the file: then it is read there straight.
        place += gap if not congruent else (at - place) % 4096
        length = min(length, SIZE - at, len(memory) - place)
        if length < 0:
            break
        views.append(memory[place : place + length])
        expected.append(content[at : at + length])
        at, place = at + length, place + length
    memory[:place] = bytes(place)
    source.read_vectors(views, offset)
    assert [bytes(view) for view in views] == expected


def test_nothing_beside_a_view_is_written(file: Path, content: bytes, memory: memoryview) -> None:
    memory[:] = b"\xee" * len(memory)
    DirectReads().source(FileSource(file)).read_into(memory[4096 + 100 : 4096 + 200_100], 100)
    assert bytes(memory[4196:204_196]) == content[100:200_100]
    assert set(memory[:4196]) == set(memory[204_196:1_000_000]) == {0xEE}


def test_the_end_of_the_file_is_read_though_it_ends_within_a_block(file: Path, content: bytes) -> None:
    assert DirectReads().source(FileSource(file)).read(SIZE - 1, 1) == content[-1:]


def test_several_threads_read_one_file(file: Path, content: bytes) -> None:
    source = DirectReads().source(FileSource(file))
    offsets = range(0, SIZE - 300_000, 123_457)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: source.read(at, 300_000), offsets))
    assert found == [content[at : at + 300_000] for at in offsets]


@linux
def test_what_lies_as_it_is_to_lie_is_read_straight_into_its_place(memory: memoryview) -> None:
    # A head, blocks, a tail that shares its block with the next view, and that one.
    views = [memory[100 : 100 + 300_000], memory[400_000 : 400_000 + 5000]]
    batch = arrange(views, 100, Alignment(512, 4096), memoryview(mmap.mmap(-1, 1 << 20)))
    inside = sum(len(vector) for vector in batch.vectors)
    copied = sum(len(copy.view) for copy in batch.copies)
    assert batch.start == 0
    assert inside % 4096 == 0
    assert inside < 305_100 + 2 * 4096
    assert copied == 4096 - 100 + (300_100 - 73 * 4096) + 5000


@linux
def test_memory_may_lie_less_evenly_than_the_file_where_the_disk_allows_it(memory: memoryview) -> None:
    views = [memory[4 : 4 + (1 << 20)]]
    buffer = memoryview(mmap.mmap(-1, 1 << 20))
    assert arrange(views, 8, Alignment(4, 4096), buffer).vectors[1].nbytes >= (1 << 20) - 8192
    assert len(arrange(views, 8, Alignment(512, 4096), buffer).vectors) == 1


# ------------------------------------------------------------------ the cache stays as it was


@linux
def test_the_page_cache_is_not_filled(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    forget_pages(path)
    if not opened_directly(path) or cached_bytes(path) > SIZE // 2:
        pytest.skip("this file system reads through the page cache only, or does not forget")
    close_files()
    forget_pages(path)
    assert DirectReads().source(FileSource(path)).read(0, SIZE) == content
    assert cached_bytes(path) == 0
    # And the counter-proof, that it would be seen.
    FileSource(path).read(0, SIZE)
    assert cached_bytes(path) >= SIZE


# ------------------------------------------------------------------ where it can't be done


@linux
@pytest.mark.parametrize("how", ["open", "statx", "read"])
def test_a_file_system_that_refuses_is_read_through_the_cache_and_noted_once(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    refused = OSError(errno.EINVAL, "Invalid argument")
    opened, preadv = os.open, os.preadv
    direct: set[int] = set()

    def open_(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if how == "open" and flags & os.O_DIRECT:
            raise refused
        descriptor = opened(path, flags, mode, **more)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def read(descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor in direct:
            direct.discard(descriptor)
            raise refused
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "open", open_)
    if how == "read":
        monkeypatch.setattr(os, "preadv", read)
    if how == "statx":
        monkeypatch.setattr(direct_io, "alignment_of", lambda descriptor: None)
    reads = DirectReads()
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(content)
        source = reads.source(FileSource(tmp_path / name))
        assert source.read(100, 1_000_000) == content[100:1_000_100]
        assert source.read(7, 9) == content[7:16]
    [note] = reads.notes
    assert "takes no direct reads" in note
    assert str(tmp_path / "one") in note


@linux
def test_an_error_of_the_disk_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    reads = DirectReads()
    source = reads.source(FileSource(file))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceReadError, match=r"at byte 100 failed: Input/output error"):
        source.read(100, 1000)
    assert not reads.notes


@linux
def test_reads_that_end_early_are_gone_on_with(
    file: Path, content: bytes, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    sizes: list[int] = []

    def little(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(preadv(descriptor, [views[0][: 32 << 10]], offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", little)
    views = [memory[100:500_100], memory[600_000:600_500]]
    DirectReads().source(FileSource(file)).read_vectors(views, 100)
    assert bytes(views[0]) + bytes(views[1]) == content[100:500_600]
    assert len(sizes) > 10


def test_a_file_that_was_shortened_meanwhile_is_named(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    source = FileSource(path)
    monkeypatch.setattr(FileSource, "check_same", lambda self, status: os.truncate(path, 10_000))
    with pytest.raises(SourceReadError, match=r"ends at byte 10000, .* too early"):
        DirectReads().source(source).read(5000, 100_000)


def test_a_file_that_was_exchanged_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    source = DirectReads().source(FileSource(path))
    path.write_bytes(content[::-1])
    with pytest.raises(SourceReadError, match="was changed"):
        source.read(0, 100)


def test_memory_that_can_not_be_written_is_an_error(file: Path, content: bytes) -> None:
    if sys.platform != "linux":
        pytest.skip("mapped as Linux does it")
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20), mmap.PROT_READ)
    with pytest.raises(SourceReadError, match="can't be written"):
        DirectReads().source(FileSource(file)).read_into(view[: 1 << 20], 0)


# ------------------------------------------------------------------ what it takes


@linux
def test_each_thread_has_one_buffer_that_is_counted_and_goes_with_it(file: Path) -> None:
    if not opened_directly(file):
        pytest.skip("nothing is read directly here")
    reads = DirectReads(1 << 20)
    source = reads.source(FileSource(file))
    barrier = threading.Barrier(3)

    def work() -> None:
        for at in (0, 100, SIZE // 2):
            barrier.wait()
            source.read(at, 2_000_000)

    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert reads.most_held == 3 << 20


@linux
def test_no_memory_for_a_buffer_is_said_as_that(file: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    if not opened_directly(file):
        pytest.skip("nothing is read directly here")
    monkeypatch.setattr(direct_io, "_pages", none)
    with pytest.raises(LoadError, match="not enough memory to read"):
        load_into(Model(), checkpoint, transfer="o_direct", progress=False)


@pytest.mark.parametrize(("room", "buffer"), [(0, 4096), (5000, 4096), (1 << 20, 1 << 20), (1 << 30, 4 << 20)])
def test_a_buffer_is_a_number_of_blocks_within_bounds(file: Path, content: bytes, room: int, buffer: int) -> None:
    reads = DirectReads(room)
    assert reads.buffer_bytes == buffer
    assert reads.source(FileSource(file)).read(5, 100_000) == content[5:100_005]


@linux
def test_descriptors_are_as_few_as_for_other_reads(tmp_path: Path) -> None:
    close_files()
    before = len(list(Path("/proc/self/fd").iterdir()))
    reads = DirectReads()
    for at in range(40):
        (tmp_path / f"{at}").write_bytes(b"x" * 5000)
        FileSource(tmp_path / f"{at}").read(0, 8)
        assert reads.source(FileSource(tmp_path / f"{at}")).read(8, 8) == b"x" * 8
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 16


def test_one_source_stands_for_a_file_and_what_is_no_file_is_left_alone(file: Path) -> None:
    class Watched(FileSource):
        def read_into(self, view: memoryview, offset: int) -> None:
            super().read_into(view, offset)

    reads = DirectReads()
    assert reads.source(FileSource(file)) is reads.source(FileSource(file))
    watched: ByteSource = Watched(file)
    assert reads.source(watched) is watched
    direct = reads.source(FileSource(file))
    assert reads.source(direct) is direct


@linux
def test_the_alignment_of_an_unknown_file_system_is_a_block(file: Path) -> None:
    found = alignment_of(-1)
    assert found == Alignment(4096, 4096)
    descriptor = os.open(file, os.O_RDONLY)
    known = alignment_of(descriptor)
    os.close(descriptor)
    assert known is None or known.file % 4096 == 0


# ------------------------------------------------------------------ a whole load


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.straight = nn.Parameter(torch.zeros(1000, 1500))
        self.cast = nn.Parameter(torch.zeros(1000, 700, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.zeros(3))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    stored = {"straight": torch.rand(1000, 1500), "cast": torch.rand(1000, 700), "small": torch.rand(3)}
    save_file(stored, folder / "model.safetensors")
    return folder


@linux
def test_a_load_past_the_page_cache_leaves_it_as_it_was(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    if not opened_directly(path):
        pytest.skip("this file system reads through the page cache only")
    close_files()
    forget_pages(path)
    model = Model()
    report = load_into(model, checkpoint, transfer="o_direct", progress=False)
    # The header is read as usual, with what the system reads ahead of it.
    assert cached_bytes(path) <= 1 << 20
    expected = load_file(path)
    assert torch.equal(model.straight, expected["straight"])
    assert torch.equal(model.cast, expected["cast"].to(torch.bfloat16))
    assert torch.equal(model.small, expected["small"])
    assert not report.notes


@linux
def test_a_report_says_that_a_file_system_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "alignment_of", lambda descriptor: None)
    model = Model()
    report = load_into(model, checkpoint, transfer="o_direct", progress=False)
    assert [note for note in report.notes if "takes no direct reads" in note]
    assert torch.equal(model.straight, load_file(checkpoint / "model.safetensors")["straight"])


@pytest.mark.parametrize("threads", [1, 4, 32])
def test_the_buffers_are_within_what_a_load_may_hold(checkpoint: Path, threads: int) -> None:
    options = {"mode": "o_direct", "threads": threads, "extra_memory": "4 MiB"}
    report = load_into(Model(), checkpoint, transfer=options, progress=False)
    assert 0 < report.extra_memory <= 4 << 20
