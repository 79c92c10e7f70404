"""What can't be beaten: the bytes of the files, read into one stretch of memory and nowhere else."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.ways import Case

Buffer = mmap.mmap

_CHUNK, _THREADS = 16 << 20, 2
_DIRECT_CHUNK, _DIRECT_THREADS = 4 << 20, 4


def private_memory(nbytes: int) -> Buffer:
    """Memory for huge pages, untouched. Python's own ``mmap(-1, n)`` is shared, and so never of huge pages."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def buffer_for(files: Sequence[Path]) -> Buffer:
    """Memory for all files, each from a boundary of chunks on."""
    return private_memory(sum(_rounded(file.stat().st_size) for file in files))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _CHUNK) * _CHUNK


def buffered(case: Case) -> None:
    """Positioned reads through the page cache."""
    _read(case, os.O_RDONLY, _CHUNK, _THREADS)


def direct(case: Case) -> None:
    """Positioned reads past the page cache."""
    _read(case, os.O_RDONLY | os.O_DIRECT, _DIRECT_CHUNK, _DIRECT_THREADS)


def _read(case: Case, flags: int, chunk: int, threads: int) -> None:
    assert case.buffer is not None
    view = memoryview(case.buffer)
    start, jobs, opened = 0, [], []
    for file in case.files:
        size = file.stat().st_size
        opened.append(os.open(file, flags))
        jobs += [(opened[-1], start + offset, offset, min(chunk, size - offset)) for offset in range(0, size, chunk)]
        start += _rounded(size)

    def read(job: tuple[int, int, int, int]) -> None:
        descriptor, at, offset, wanted = job
        got = 0
        while got < wanted:
            got += (count := os.preadv(descriptor, [view[at + got : at + chunk]], offset + got))
            if not count:
                raise EOFError(f"a file ended {wanted - got} bytes too early")

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, jobs))
    finally:
        view.release()
        for descriptor in opened:
            os.close(descriptor)
