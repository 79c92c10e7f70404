"""What touching memory has cost the process so far, as the system counts it."""

from __future__ import annotations

import sys


def faults() -> tuple[int, int]:
    """Page faults of this process so far: those met in memory, and those for which the disk was read.

    Two calls, one before and one after, tell those between. Where the system does not count them (Windows), both are 0.
    """
    counted = 0, 0
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        counted = used.ru_minflt, used.ru_majflt
    return counted


def peak_resident() -> int | None:
    """The most memory this process ever had resident, in bytes; None where the system does not tell (Windows)."""
    peak = None
    if sys.platform != "win32":
        import resource

        # macOS counts bytes, others units of 1024.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak
