"""What a transfer will take, told by the jobs that the engine itself would do."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING

from weightloaders.mapping.placement import is_empty
from weightloaders.plan import CopyStep, Forecast, step_targets
from weightloaders.transfer.copying import SMALL_BYTES
from weightloaders.transfer.device_map import CPU, DeviceMap
from weightloaders.transfer.devices import device_for
from weightloaders.transfer.jobs import jobs_of
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.read_ahead import ReadAhead
from weightloaders.transfer.sources import direct_reads, habits_for, sources_of
from weightloaders.transfer.staging import SLOTS
from weightloaders.transfer.workspace import Workspace
from weightloaders.weights.reading import read_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.plan import Step
    from weightloaders.transfer.job import Job


def forecast(steps: Sequence[Step], options: TransferOptions | None = None, devices: DeviceMap = CPU) -> Forecast:
    """What carrying out these steps will take. Nothing is read, and nothing is allocated.

    Args:
        steps: The steps. One that does not make up its target is never carried out, and takes nothing.
        options: How they will be carried out. For the modes ``mmap`` and ``stream``, too, what is told is what reading
            straight takes.
        devices: Where targets on meta will be.
    """
    options = options or TransferOptions()
    targets = [target for step in steps for target in step_targets(step)]
    where = {id(t.tensor): devices.device_of(t.name) if t.tensor.is_meta else t.tensor.device for t in targets}
    accelerators = {tensor: device for tensor, device in where.items() if device_for(device) is not None}
    threads = habits_for(sources_of(steps), options).threads
    _, room = direct_reads(options, threads)
    space = Workspace(extra_memory=room, threads=threads, accelerators=accelerators)
    jobs = jobs_of(steps, space, unfit=lambda _: None)
    # As in `Transfer`: what code of others asks for, in the order of its jobs.
    ahead = ReadAhead([info for job in jobs for info in job.ahead], read_tensor, options)
    by_path: dict[str, int] = defaultdict(int)
    for job in jobs:
        by_path[job.path] += job.nbytes
    pieces = [placed for step in steps if isinstance(step, CopyStep) for placed in step.placements]
    pieces = [placed for placed in pieces if not is_empty(placed)]
    contiguous = sum(placed.is_contiguous for placed in pieces)
    return Forecast(
        bytes_to_read=sum(job.nbytes for job in jobs),
        reads=sum(job.reads for job in jobs) + ahead.reads_in_all,
        straight=by_path["straight"],
        buffered=by_path["buffered"],
        assembled=by_path["assembled"],
        computed=by_path["computed"],
        handed_over=by_path["handed over"],
        contiguous=contiguous,
        strided=len(pieces) - contiguous,
        # Reads past the page cache have buffers of their own.
        extra_memory=_extra_memory(jobs, threads, space, ahead.most_to_hold) + options.extra_memory - room,
    )


def _extra_memory(jobs: Sequence[Job], threads: int, space: Workspace, ahead: int) -> int:
    """The most that is held at one time: as if the jobs that hold most met on all threads, and there was room."""
    pooled = [job for job in jobs if job.pooled]
    alone = [job for job in jobs if not job.pooled]
    buffer = max((job.buffer for job in jobs), default=0)
    # What a copy needs on its way: as much as it writes, where that is little.
    copied = max((max(job.nbytes, job.held, _written_by(job)) for job in jobs if job.path != "straight"), default=0)
    scratch = min(space.scratch_bytes, -(-copied // 64) * 64) if copied > SMALL_BYTES else 0
    threads = min(threads, len(pooled))
    # A thread keeps its buffer until all are done.
    buffers = (buffer + scratch) * min(threads, sum(job.path != "straight" for job in pooled))
    slot = max((job.staged for job in pooled), default=0)
    buffers += slot * (SLOTS + 1) * min(threads, sum(job.staged > 0 for job in pooled))
    most = heapq.nlargest(threads, (job.held for job in pooled))
    # One job alone may hold more than there is room for; others wait then.
    at_once = buffers + min(sum(most), max([space.room, *most[:1]]))
    own = (buffer if any(job.buffer for job in alone) else 0) + scratch if alone else 0
    return max(at_once, max((job.held for job in alone), default=0) + own + ahead)


def _written_by(job: Job) -> int:
    return max((target.tensor.numel() * target.tensor.element_size() for target in job.targets), default=0)
