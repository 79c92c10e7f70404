"""`Forecast`: what carrying a plan out will take, told before anything is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """What carrying a plan out will take, by reading straight (modes ``direct`` and ``o_direct``).

    In mode ``mmap`` most of it is not read at all; in mode ``stream`` whole tensors are held, those read ahead, too.

    Attributes:
        bytes_to_read: Bytes that are read from the sources: what is asked of them, gaps within a tensor included.
        reads: Positioned reads that this takes, one after the other or at once.
        straight: Of the bytes, those read straight into the parameters' own memory.
        buffered: Those that go through a small buffer, being cast or scattered.
        assembled: Those of tensors that are put together beside the parameter and copied.
        computed: Those that a function is run on.
        handed_over: Those of tensors that go to the parameters' own ``weight_loader``.
        contiguous: Pieces of parameters that are one run of bytes in the source, too.
        strided: Pieces that are not.
        extra_memory: Most bytes that are held at one time beside the model itself; not more than that.
    """

    bytes_to_read: int = 0
    reads: int = 0
    straight: int = 0
    buffered: int = 0
    assembled: int = 0
    computed: int = 0
    handed_over: int = 0
    contiguous: int = 0
    strided: int = 0
    extra_memory: int = 0
