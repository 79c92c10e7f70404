"""What a transfer will take, told by the jobs that the engine itself would do."""

from __future__ import annotations

import contextlib
import heapq
from collections import defaultdict
from typing import TYPE_CHECKING

from weightloaders.errors import LoadError
from weightloaders.mapping.placement import is_empty
from weightloaders.plan import CopyStep, Forecast
from weightloaders.transfer.engine import threads_for
from weightloaders.transfer.jobs import jobs_of
from weightloaders.transfer.workspace import BUFFER_BYTES, Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.plan import Step
    from weightloaders.transfer.jobs import Job


def forecast(steps: Sequence[Step]) -> Forecast:
    """What carrying out these steps will take. Nothing is read, and nothing is allocated.

    Args:
        steps: The steps. Targets on meta are thought of as on the CPU. One that does not make up its target is never
            carried out, and takes nothing.
    """
    space = Workspace()
    jobs: list[Job] = []
    for step in steps:
        with contextlib.suppress(LoadError):
            jobs.extend(jobs_of(step, space))
    by_path: dict[str, int] = defaultdict(int)
    for job in jobs:
        by_path[job.path] += job.nbytes
    pieces = [placed for step in steps if isinstance(step, CopyStep) for placed in step.placements]
    pieces = [placed for placed in pieces if not is_empty(placed)]
    contiguous = sum(placed.is_contiguous for placed in pieces)
    return Forecast(
        bytes_to_read=sum(job.nbytes for job in jobs),
        reads=sum(job.reads for job in jobs),
        straight=by_path["straight"],
        buffered=by_path["buffered"],
        assembled=by_path["assembled"],
        computed=by_path["computed"],
        handed_over=by_path["handed over"],
        contiguous=contiguous,
        strided=len(pieces) - contiguous,
        extra_memory=_extra_memory(jobs),
    )


def _extra_memory(jobs: Sequence[Job]) -> int:
    """The most that is held at one time: as if the jobs that hold most met on all threads."""
    pooled = [job for job in jobs if job.pooled]
    alone = [job for job in jobs if not job.pooled]
    threads = threads_for(pooled)
    at_once = sum(heapq.nlargest(threads, (job.held for job in pooled)))
    # A thread keeps its buffer until all is done; the caller's own thread may have one, too.
    buffers = min(threads, sum(job.buffers for job in pooled)) + any(job.buffers for job in alone)
    return buffers * BUFFER_BYTES + max([at_once, *(job.held for job in alone)])
