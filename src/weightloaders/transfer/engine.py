"""The engine: carries the steps of a plan out, in bounded memory, on a few threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError, SourceReadError, WeightLoadersError
from weightloaders.plan import CallStep, Step, step_targets
from weightloaders.transfer.devices import device_for
from weightloaders.transfer.faults import faults
from weightloaders.transfer.jobs import jobs_of
from weightloaders.transfer.memory import bump_versions, is_plain
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.read_ahead import ReadAhead
from weightloaders.transfer.schedule import Schedule
from weightloaders.transfer.sources import check_unchanged, direct_reads, habits_for, sources_of
from weightloaders.transfer.workspace import Stopped, Workspace
from weightloaders.weights.reading import read_tensor
from weightloaders.weights.system_errors import advice
from weightloaders.weights.threads import Crew, threads_that_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightloaders.targets import Target
    from weightloaders.transfer.devices import Device
    from weightloaders.transfer.job import Job
    from weightloaders.weights.habits import Habits


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a load has come.

    Attributes:
        done_bytes: Bytes read so far.
        total_bytes: Bytes to read in all; 0 where that is not known beforehand (a stream).
        file: The file that was read last.
        seconds: Since the first byte was asked for.
    """

    done_bytes: int
    total_bytes: int
    file: str | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def bytes_per_second(self) -> float:
        """Bytes read in a second so far; 0 where no time has passed."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0


def tell(progress: Callable[[ProgressEvent], object], event: ProgressEvent) -> None:
    """Tell whoever wants to know.

    Raises:
        LoadError: If that fails.
    """
    try:
        progress(event)
    except WeightLoadersError:
        raise
    except Exception as error:
        raise LoadError(
            f"the progress function failed: {type(error).__name__}: {error}",
            hint="the load was stopped by it; progress=False loads without",
        ) from error


@dataclass(slots=True)
class Transferred:
    """What a transfer did.

    Attributes:
        bytes_read: Bytes read.
        bytes_by_path: The same by how they got where they belong: ``straight`` into the parameters' memory,
            ``buffered``, ``assembled`` beside the parameter, ``computed``, ``handed over``.
        reads: In how many positioned reads.
        extra_memory: Most bytes held at one time beside the model.
        page_faults: Of the process meanwhile: those met in memory, and those that read from a disk.
        infinities: Parameters in which a cast made new infinities.
        written: Names of the parameters that were written to.
        warnings: Sentences for the report: what is probably not as it should be.
        notes: And how it was done, where it could have been done otherwise.
        how: In which mode, by how many threads (``threads``), from which kind of ``storage``, and how that is known
            (``why``).
    """

    bytes_read: int = 0
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    extra_memory: int = 0
    page_faults: tuple[int, int] = (0, 0)
    infinities: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    how: dict[str, str | int] = field(default_factory=dict)


def how(options: TransferOptions, habits: Habits) -> dict[str, str | int]:
    """See `Transferred.how`."""
    return {"mode": options.mode, "threads": habits.threads, "storage": habits.kind, "why": habits.why}


_DEFAULT = TransferOptions()


class Transfer:
    """Carries out steps.

    Args:
        steps: What to do.
        options: How.
        progress: Called after each chunk, from any thread but never from two at once.
        handed: Told of each tensor that goes to foreign code.
        open_device: The accelerator of a name; None for the host.
        filled: Told of each target in the host's memory as soon as all of it is written, from any thread.

    Attributes:
        written: Names of the parameters that were written to, however it ended.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        options: TransferOptions | None = None,
        progress: Callable[[ProgressEvent], object] | None = None,
        handed: Callable[[str, torch.Tensor], object] | None = None,
        open_device: Callable[[torch.device], Device | None] = device_for,
        filled: Callable[[Target], object] | None = None,
    ) -> None:
        self._steps = steps
        self._progress = progress
        self._options = options or _DEFAULT
        self._sources = sources_of(steps)
        habits = habits_for(self._sources, self._options)
        self._threads = habits.threads
        direct, room = direct_reads(self._options, self._threads)
        tensors = [target.tensor for step in steps for target in step_targets(step)]
        host = torch.device("cpu")
        opened = {host: open_device(host)}
        # Asking each of many tensors for its device takes long, and nearly all are the host's.
        where = {id(tensor): tensor.device for tensor in tensors if not tensor.is_cpu or opened[host] is not None}
        opened |= {device: open_device(device) for device in {*where.values()} - {host}}
        devices = {device: accelerator for device, accelerator in opened.items() if accelerator is not None}
        accelerators = {tensor: device for tensor, device in where.items() if device in devices}
        self._space = Workspace(handed, room, self._threads, direct, accelerators, devices)
        self._total = 0
        self._start = 0.0
        self._lock = threading.Lock()
        # In how many jobs a target was begun.
        self._begun: Counter[str] = Counter()
        # And how many are still to be done, where somebody wants to know. What was filled may be written to once more
        # by code of others.
        self._filled = None if filled is None or any(isinstance(step, CallStep) for step in steps) else filled
        self._left: Counter[str] = Counter()
        self._result = Transferred(how=how(self._options, habits))
        self.written: set[str] = set()

    def run(self) -> Transferred:
        """Do all of it.

        Raises:
            LoadError: If anything fails; ``written`` names the parameters that were touched.
            KeyboardInterrupt: After the threads have stopped.
        """
        self._start = time.perf_counter()
        before = faults()
        try:
            self._check_memory()
            jobs = jobs_of(self._steps, self._space)
            if self._filled is not None:
                self._left.update(target.name for job in jobs for target in job.targets)
            self._space.buffer_needed = max((job.buffer for job in jobs), default=0)
            self._total = sum(job.nbytes for job in jobs)
            self._advance(None)
            self._space.staging.slot_bytes = max((job.staged for job in jobs), default=0)
            with self._space.staging:
                self._run_pooled([job for job in jobs if job.pooled])
            self._run_here([job for job in jobs if not job.pooled])
            self._space.settle()
            check_unchanged(self._sources)
        except WeightLoadersError as error:
            raise LoadError.of(error, self._written()) from error
        finally:
            self._space.forget()
            minor, major = faults()
            self._result.page_faults = minor - before[0], major - before[1]
            self._result.infinities = self._space.infinities
            self._result.extra_memory = self._space.most_held
            self._result.notes += self._space.staging.notes
            if self._space.direct is not None:
                self._result.extra_memory += self._space.direct.most_held
                self._result.notes += self._space.direct.notes
            self.written = self._result.written = self._written()
            touched = [t.tensor for step in self._steps for t in step_targets(step) if t.name in self._result.written]
            bump_versions(tensor for tensor in touched if is_plain(tensor) and not tensor.is_meta)
        return self._result

    def _written(self) -> set[str]:
        return {name for name, jobs in self._begun.items() if jobs}

    def _check_memory(self) -> None:
        for target in (target for step in self._steps for target in step_targets(step)):
            if target.tensor.is_meta:
                raise LoadError(
                    f"{target.name} is on the meta device and has no memory to be filled", tensor=target.name
                )

    def _run_pooled(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        schedule = Schedule(jobs)
        crew = Crew("weightloaders")
        try:
            if not crew.start(lambda: self._work_off(schedule), threads_that_fit(min(self._threads, len(jobs)))):
                self._work_off(schedule)
            crew.wait()
        except BaseException:
            # They stop at their next job.
            self._space.stop()
            crew.join()
            raise
        self._space.forget_buffers()

    def _run_here(self, jobs: Sequence[Job]) -> None:
        """Code of others (a loader's `read`, a rule's function) runs one at a time, on the caller's thread.

        What it will ask for next is read meanwhile.
        """
        wanted = [self._space.read_by(info) for job in jobs for info in job.ahead]
        if not wanted:
            for job in jobs:
                self._do(job)
            return
        ahead = ReadAhead(wanted, read_tensor, self._options)
        with self._space.reading_ahead(ahead):
            for job in jobs:
                self._do(job)
        self._result.reads += ahead.reads

    def _work_off(self, schedule: Schedule) -> None:
        with _single_threaded_torch:
            for job in schedule.jobs():
                if self._space.stopped:
                    return
                try:
                    self._do(job)
                except Stopped:
                    return
                except BaseException:
                    self._space.stop()
                    raise

    def _do(self, job: Job) -> None:
        with self._lock:
            self._begun.update(target.name for target in job.targets)
        try:
            with self._space.holding(job.held):
                job.work()
            self._tell_filled(job)
        except Stopped:
            raise
        except SourceReadError as error:
            name = self._stopped_at(job, error.at)
            error.tensor = error.tensor or name
            raise
        except WeightLoadersError as error:
            error.tensor = error.tensor or job.targets[0].name
            raise
        except MemoryError as error:
            name = job.targets[0].name
            raise LoadError(f"there is not enough memory to read {name}", tensor=name, file=job.file or None) from error
        except Exception as error:
            name = job.targets[0].name
            raise LoadError(
                f"filling {name} failed: {type(error).__name__}: {error}",
                tensor=name,
                file=job.file or None,
                hint=advice(error) if isinstance(error, OSError) else None,
            ) from error
        self._advance(job)

    def _tell_filled(self, job: Job) -> None:
        if self._filled is None:
            return
        with self._lock:
            self._left.subtract(target.name for target in job.targets)
            done = {target.name: target for target in job.targets if not self._left[target.name]}
        for target in done.values():
            # What is on the way to an accelerator may not have arrived.
            if target.tensor.is_cpu:
                self._filled(target)

    def _stopped_at(self, job: Job, at: int | None) -> str:
        """The target that a job was reading when it failed; those behind it were not touched."""
        if at is None or not job.starts:
            return job.targets[0].name
        reached = [target for target, start in zip(job.targets, job.starts, strict=True) if start <= at]
        names = {target.name for target in reached}
        with self._lock:
            # Another job may have begun with another part of them.
            self._begun.subtract(target.name for target in job.targets if target.name not in names)
        return (reached or job.targets)[-1].name

    def _advance(self, job: Job | None) -> None:
        with self._lock:
            if job is not None:
                self._result.bytes_read += job.nbytes
                self._result.reads += job.reads
                if job.nbytes:
                    by_path = self._result.bytes_by_path
                    by_path[job.path] = by_path.get(job.path, 0) + job.nbytes
            if self._progress is None:
                return
            seconds = time.perf_counter() - self._start
            file = job.file or None if job is not None else None
            tell(self._progress, ProgressEvent(self._result.bytes_read, self._total, file, seconds))


class _SingleThreadedTorch:
    """In these threads torch runs on one processor: in parallel it would meet at a barrier on every small copy.

    torch hands the last number that was set to all threads that start later, so the last thread to leave sets it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 1

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.get_num_threads()
            self._inside += 1
            torch.set_num_threads(1)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.set_num_threads(self._before)


_single_threaded_torch = _SingleThreadedTorch()
