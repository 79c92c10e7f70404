"""The engine: carries the steps of a plan out, in bounded memory, on a few threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError, WeightLoadersError
from weightloaders.plan import Step, step_infos, step_targets
from weightloaders.transfer.jobs import Job, jobs_of
from weightloaders.transfer.memory import bump_versions, is_dense
from weightloaders.transfer.workspace import Workspace
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# More threads than this defeat the read-ahead of a cold disk, and gain nothing on a warm one.
MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a load has come.

    Attributes:
        done_bytes: Bytes read so far.
        total_bytes: Bytes to read in all; 0 where that is not known beforehand (a stream).
        file: The file that was read last.
    """

    done_bytes: int
    total_bytes: int
    file: str | None = None


@dataclass(slots=True)
class Transferred:
    """What a transfer did.

    Attributes:
        bytes_read: Bytes read.
        bytes_by_path: The same by how they got where they belong: ``straight`` into the parameters' memory,
            ``buffered``, ``assembled`` beside the parameter, ``computed``, ``handed over``.
        extra_memory: Most bytes held at one time beside the model.
        infinities: Parameters in which a cast made new infinities.
        written: Names of the parameters that were written to.
        warnings: Sentences for the report.
    """

    bytes_read: int = 0
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    extra_memory: int = 0
    infinities: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)


class Transfer:
    """Carries out steps.

    Args:
        steps: What to do.
        progress: Called after each chunk, from any thread but never from two at once.
        handed: Told of each tensor that goes to foreign code.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        progress: Callable[[ProgressEvent], object] | None = None,
        handed: Callable[[str, torch.Tensor], object] | None = None,
    ) -> None:
        self._steps = steps
        self._progress = progress
        self._space = Workspace(handed)
        self._total = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._result = Transferred()

    def run(self) -> Transferred:
        """Do all of it.

        Raises:
            LoadError: If anything fails; ``written`` names the parameters that were touched.
            KeyboardInterrupt: After the threads have stopped.
        """
        try:
            self._check_memory()
            jobs = [job for step in self._steps for job in jobs_of(step, self._space)]
            jobs.sort(key=lambda job: (job.file, job.offset))
            self._total = sum(job.nbytes for job in jobs)
            self._advance(0)
            self._run_pooled([job for job in jobs if job.pooled])
            # Code of others (a loader's `read`, a rule's function) runs here, one at a time, on the caller's thread.
            for job in jobs:
                if not job.pooled:
                    self._do(job)
            self._check_sources()
        except WeightLoadersError as error:
            raise LoadError(
                error.message, written=tuple(sorted(self._result.written)), file=error.file, tensor=error.tensor,
                plugin=error.plugin, hint=error.hint,
            ) from error  # fmt: skip
        finally:
            self._space.forget()
            self._result.infinities = self._space.infinities
            self._result.extra_memory = self._space.most_held
            touched = [t.tensor for step in self._steps for t in step_targets(step) if t.name in self._result.written]
            bump_versions(tensor for tensor in touched if is_dense(tensor))
        return self._result

    def _check_memory(self) -> None:
        for target in (target for step in self._steps for target in step_targets(step)):
            if target.tensor.is_meta:
                raise LoadError(
                    f"{target.name} is on the meta device and has no memory to be filled", tensor=target.name
                )

    def _run_pooled(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        threads = threads_for(jobs)
        left = iter(jobs)
        with ThreadPoolExecutor(threads, "weightloaders") as pool:
            pending = {pool.submit(self._work_off, left) for _ in range(threads)}
            try:
                while pending:
                    # A wait with a limit lets Ctrl-C through.
                    done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
            finally:
                # After an error or Ctrl-C the threads stop at their next job; done, there is none left.
                self._stop.set()
        self._stop.clear()

    def _work_off(self, jobs: Iterator[Job]) -> None:
        with _single_threaded_torch:
            while not self._stop.is_set():
                with self._lock:
                    job = next(jobs, None)
                if job is None:
                    return
                try:
                    self._do(job)
                except BaseException:
                    self._stop.set()
                    raise

    def _do(self, job: Job) -> None:
        name = job.targets[0].name
        with self._lock:
            self._result.written.update(target.name for target in job.targets)
        try:
            # Both are a thread's own. A parameter made in inference mode can be written only in it.
            inference = torch.inference_mode(job.targets[0].tensor.is_inference())
            with self._space.holding(job.held), inference, torch.no_grad():
                job.work()
        except WeightLoadersError as error:
            error.tensor = error.tensor or name
            raise
        except MemoryError as error:
            raise LoadError(f"there is not enough memory to read {name}", tensor=name, file=job.file or None) from error
        except Exception as error:
            raise LoadError(
                f"filling {name} failed: {type(error).__name__}: {error}", tensor=name, file=job.file or None
            ) from error
        self._advance(job.nbytes, job.path, job.file or None)

    def _advance(self, nbytes: int, path: str = "", file: str | None = None) -> None:
        with self._lock:
            self._result.bytes_read += nbytes
            if nbytes:
                by_path = self._result.bytes_by_path
                by_path[path] = by_path.get(path, 0) + nbytes
            if self._progress is None:
                return
            try:
                self._progress(ProgressEvent(self._result.bytes_read, self._total, file))
            except WeightLoadersError:
                raise
            except Exception as error:
                raise LoadError(
                    f"the progress function failed: {type(error).__name__}: {error}",
                    hint="the load was stopped by it; progress=False loads without",
                ) from error

    def _check_sources(self) -> None:
        sources = {e.source.name: e.source for step in self._steps for info in step_infos(step) for e in info.extents}
        for source in sources.values():
            if isinstance(source, FileSource):
                source.check_unchanged()


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


def threads_for(jobs: Sequence[Job]) -> int:
    """On how many threads jobs are done that any thread may do."""
    return min(_usable_processors(), MAX_THREADS, len(jobs))


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
