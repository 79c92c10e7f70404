"""How many more threads a process can have."""

from __future__ import annotations

import mmap
import sys

# What a thread takes of the address space while it starts: a stack, of 8 MiB on most systems; 64 MiB, and for a moment
# twice that, which glibc reserves for what the thread allocates; and some memory of Python's.
_TAKEN_BY_A_THREAD = 160 << 20


def threads_that_fit(wanted: int) -> int:
    """How many threads there is address space for (``ulimit -v``): as many as are wanted, or fewer, or none.

    A thread that finds no memory while it starts ends without a word, and whoever started it waits for ever: so it goes
    in CPython.
    """
    fitting = wanted
    if sys.platform == "linux":
        while fitting and not _has_room(fitting * _TAKEN_BY_A_THREAD):
            fitting -= 1
    return fitting


if sys.platform == "linux":

    def _has_room(nbytes: int) -> bool:
        try:
            # What can't be written is not counted as memory that would have to be there.
            mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
        except (OSError, MemoryError):
            return False
        return True
