"""How many threads a process can have more of."""

from __future__ import annotations

import mmap

# What a thread takes of the address space while it starts: a stack of 8 MiB, as most systems have it, and some memory
# of Python's own.
_TAKEN_BY_A_THREAD = 16 << 20


def threads_that_fit(wanted: int) -> int:
    """How many threads there is memory for: as many as are wanted, or fewer, or none.

    A thread that finds no memory while it starts ends without a word, and whoever started it waits for ever: so it goes
    in CPython. Where memory is short, this is asked first.
    """
    while wanted:
        try:
            mmap.mmap(-1, wanted * _TAKEN_BY_A_THREAD).close()
        except (OSError, MemoryError):
            wanted -= 1
        else:
            break
    return wanted
