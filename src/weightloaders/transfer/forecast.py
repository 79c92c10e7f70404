"""What a transfer will take, told by the jobs that the engine itself would do."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING

from weightloaders.mapping.placement import is_empty
from weightloaders.plan import CopyStep, Forecast
from weightloaders.transfer.engine import habits_for, sources_of
from weightloaders.transfer.jobs import jobs_of
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.plan import Step
    from weightloaders.transfer.job import Job


def forecast(steps: Sequence[Step]) -> Forecast:
    """What carrying out these steps will take. Nothing is read, and nothing is allocated.

    Args:
        steps: The steps. Targets on meta are thought of as on the CPU. One that does not make up its target is never
            carried out, and takes nothing.
    """
    options = TransferOptions()
    threads = habits_for(sources_of(steps), options).threads
    space = Workspace(extra_memory=options.extra_memory, threads=threads)
    jobs = jobs_of(steps, space, unfit=lambda _: None)
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
        extra_memory=_extra_memory(jobs, threads, options.extra_memory),
    )


def _extra_memory(jobs: Sequence[Job], threads: int, limit: int) -> int:
    """The most that is held at one time: as if the jobs that hold most met on all threads, and there was room."""
    pooled = [job for job in jobs if job.pooled]
    alone = [job for job in jobs if not job.pooled]
    threads = min(threads, len(pooled))
    # A thread keeps its buffer until all is done; the caller's own thread may have one, too.
    buffer = max((job.buffer for job in jobs), default=0)
    users = min(threads, sum(job.buffer > 0 for job in pooled)) + any(job.buffer for job in alone)
    buffers = buffer * users
    most = heapq.nlargest(threads, (job.held for job in pooled))
    # One job alone may hold more than there is room for; others wait then.
    at_once = min(sum(most), max([limit - buffers, *most[:1]]))
    return buffers + max([at_once, *(job.held for job in alone)])
