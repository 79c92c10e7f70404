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
