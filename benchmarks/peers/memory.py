"""Memory of this process, and of the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.limits import private_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

_PAGE = mmap.PAGESIZE


def status(process: int | str = "self") -> dict[str, int]:
    """What the kernel says of a process's memory, in bytes: ``VmHWM``, ``RssAnon``, ``RssFile``, ``VmSize``, ..."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)
            if value.endswith(" kB")}  # fmt: skip


def forget_peak() -> None:
    """Let ``VmHWM`` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def touch(nbytes: int) -> None:
    """Touch memory and give it back, so that what is timed finds it with the system rather than with its host."""
    with private_memory(nbytes) as memory:
        for offset in range(0, nbytes, _PAGE):
            memory[offset] = 1


def cached(files: Iterable[Path]) -> float:
    """The share of the files' pages that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    present = total = 0
    for file in files:
        size = file.stat().st_size
        descriptor = os.open(file, os.O_RDONLY)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        pages = (ctypes.c_ubyte * -(-size // _PAGE))()
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore failed")
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        os.close(descriptor)
        present += sum(page & 1 for page in pages)
        total += len(pages)
    return present / total


def make_cold(files: Iterable[Path]) -> float:
    """Drop the files from the page cache; returns the share that stayed."""
    files = list(files)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return cached(files)


def make_warm(files: Iterable[Path]) -> float:
    """Have the files in the page cache; returns the share that is."""
    files, scratch = list(files), bytearray(16 << 20)
    for _ in range(3):
        # A system that is short of memory may drop the first while the last are read.
        if (share := cached(files)) == 1:
            break
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(scratch):
                    pass
    return share
