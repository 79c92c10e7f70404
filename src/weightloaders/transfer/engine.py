"""The engine: carries the steps of a plan out, in bounded memory, on a few threads.

A piece whose bytes lie in the source as they are to lie in the parameter is read straight into the parameter's memory.
Everything else goes through a small buffer: read, swap, cast, copy. What has no raw bytes, or is a strided view, is
made whole and copied.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import LoaderContractError, LoadError, WeightLoadersError
from weightloaders.plan import CallStep, ComputeStep, CopyStep, Piece, Step, step_infos, step_targets
from weightloaders.transfer.memory import bump_versions, is_dense
from weightloaders.weights.reading import memory_of, native_order, read_tensor
from weightloaders.weights.source import ByteSource, FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightloaders.targets import Target
    from weightloaders.weights.info import Extent, TensorInfo

STRAIGHT_CHUNK = 16 << 20
BOUNCE_CHUNK = 4 << 20
MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a load has come.

    Attributes:
        done_bytes: Bytes read so far.
        total_bytes: Bytes to read in all.
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
        extra_memory: Most bytes held at one time beside the model.
        infinities: Parameters in which a cast made new infinities.
        written: Names of the parameters that were written to.
    """

    bytes_read: int = 0
    extra_memory: int = 0
    infinities: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Job:
    """One thing for a thread to do; jobs are done in the order of file and offset."""

    file: str
    offset: int
    nbytes: int
    target: str
    work: Callable[[], None]
    pooled: bool = True


class Transfer:
    """Carries out steps.

    Args:
        steps: What to do.
        progress: Called after each chunk, from any thread but never from two at once.
        threads: How many threads read; default: the processors, at most four.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        progress: Callable[[ProgressEvent], object] | None = None,
        threads: int | None = None,
    ) -> None:
        self._steps = steps
        self._progress = progress
        self._threads = threads or min(_usable_processors(), MAX_THREADS)
        self._total = sum(_bytes_of(step) for step in steps)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._held = 0
        self.result = Transferred()

    def run(self) -> Transferred:
        """Do all of it.

        Raises:
            LoadError: If anything fails; ``written`` names the parameters that were touched.
            KeyboardInterrupt: After the threads have stopped.
        """
        jobs = sorted((job for step in self._steps for job in self._jobs(step)), key=lambda job: (job.file, job.offset))
        try:
            if self._progress is not None:
                self._progress(ProgressEvent(0, self._total))
            self._run_pooled([job for job in jobs if job.pooled])
            # Foreign code (a loader's `read`, a rule's function) runs here, one at a time, on the caller's thread.
            for job in jobs:
                if not job.pooled:
                    self._do(job)
            self._check_sources()
        except WeightLoadersError as error:
            raise LoadError(
                error.message, written=tuple(sorted(self.result.written)), file=error.file, tensor=error.tensor,
                plugin=error.plugin, hint=error.hint,
            ) from error  # fmt: skip
        finally:
            written = [t.tensor for step in self._steps for t in step_targets(step) if t.name in self.result.written]
            bump_versions(t for t in written if is_dense(t))
        return self.result

    def _run_pooled(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        with ThreadPoolExecutor(self._threads, "weightloaders", initializer=_single_threaded_torch) as pool:
            futures = [pool.submit(self._do, job) for job in jobs]
            try:
                pending = set(futures)
                while pending:
                    # A wait with a limit lets Ctrl-C through.
                    done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _do(self, job: _Job) -> None:
        if self._stop.is_set():
            return
        try:
            with self._lock:
                self.result.written.add(job.target)
            # Gradient mode is a thread's own.
            with torch.no_grad():
                job.work()
        except WeightLoadersError as error:
            error.tensor = error.tensor or job.target
            raise
        except MemoryError as error:
            raise LoadError(
                f"there is not enough memory to read {job.target}", tensor=job.target, file=job.file
            ) from error
        except Exception as error:
            raise LoadError(
                f"filling {job.target} failed: {type(error).__name__}: {error}", tensor=job.target, file=job.file
            ) from error
        with self._lock:
            self.result.bytes_read += job.nbytes
            if self._progress is not None:
                self._progress(ProgressEvent(self.result.bytes_read, self._total, job.file or None))

    def _hold(self, nbytes: int) -> _Held:
        return _Held(self, nbytes)

    def _check_sources(self) -> None:
        seen: dict[str, ByteSource] = {
            e.source.name: e.source for step in self._steps for info in step_infos(step) for e in info.extents
        }
        for source in seen.values():
            if isinstance(source, FileSource):
                source.check_unchanged()

    # -- from steps to jobs

    def _jobs(self, step: Step) -> Iterable[_Job]:
        if isinstance(step, CopyStep):
            yield from self._copy_jobs(step)
        elif isinstance(step, ComputeStep):
            infos = step_infos(step)
            yield _Job(
                *_place(infos[0]), _bytes_of(step), next(iter(step.targets)), lambda: self._compute(step), pooled=False
            )
        else:
            yield _Job(*_place(step.info), _bytes_of(step), step.target.name, lambda: self._call(step), pooled=False)

    def _copy_jobs(self, step: CopyStep) -> Iterable[_Job]:
        whole: dict[int, list[Piece]] = defaultdict(list)
        flat = _flat_view(step.target.tensor)
        for piece in step.pieces:
            extent = _single_dense_extent(piece.info)
            if extent is None or flat is None:
                whole[id(piece.info)].append(piece)
            elif _is_straight(piece, extent, step.target):
                yield from self._straight_jobs(piece, extent, step.target)
            else:
                yield from self._bounce_jobs(piece, extent, step.target, flat)
        for pieces in whole.values():
            info = pieces[0].info
            yield _Job(
                *_place(info), sum(p.length for p in pieces) * info.dtype.itemsize, step.target.name,
                lambda info=info, pieces=pieces: self._whole(info, pieces, step.target),  # type: ignore[misc]
                pooled=info.is_raw,
            )  # fmt: skip

    def _straight_jobs(self, piece: Piece, extent: Extent, target: Target) -> Iterable[_Job]:
        size = target.dtype.itemsize
        memory = memory_of(target.tensor)
        for at in range(0, piece.length * size, STRAIGHT_CHUNK):
            count = min(STRAIGHT_CHUNK, piece.length * size - at)
            start = piece.target_start * size + at
            offset = extent.offset + piece.source_start * size + at
            view = memory[start : start + count]
            yield _Job(
                extent.source.name, offset, count, target.name,
                lambda view=view, offset=offset: extent.source.read_into(view, offset),  # type: ignore[misc]
            )  # fmt: skip

    def _bounce_jobs(self, piece: Piece, extent: Extent, target: Target, flat: torch.Tensor) -> Iterable[_Job]:
        size = extent.stored_dtype.itemsize
        step = max(1, BOUNCE_CHUNK // max(size, piece.info.dtype.itemsize))
        for at in range(0, piece.length, step):
            count = min(step, piece.length - at)
            offset = extent.offset + (piece.source_start + at) * size
            part = flat[piece.target_start + at : piece.target_start + at + count]
            yield _Job(
                extent.source.name, offset, count * size, target.name,
                lambda part=part, offset=offset: self._bounce(piece.info, extent, offset, part, target),  # type: ignore[misc]
            )  # fmt: skip

    # -- what jobs do

    def _bounce(self, info: TensorInfo, extent: Extent, offset: int, part: torch.Tensor, target: Target) -> None:
        buffer = torch.empty(part.numel(), dtype=extent.stored_dtype)
        with self._hold(buffer.numel() * (buffer.element_size() + info.dtype.itemsize)):
            extent.source.read_into(memory_of(buffer), offset)
            self._store(native_order(buffer, extent).to(info.dtype), part, target)

    def _whole(self, info: TensorInfo, pieces: Sequence[Piece], target: Target) -> None:
        with self._hold(info.nbytes if info.is_raw else 0):
            tensor = read_tensor(info)
            flat = _flat_view(target.tensor)
            if flat is None:
                self._scatter(tensor, pieces, target)
                return
            source = tensor.reshape(-1)
            for piece in pieces:
                part = flat[piece.target_start : piece.target_start + piece.length]
                self._store(source[piece.source_start : piece.source_start + piece.length], part, target)

    def _scatter(self, tensor: torch.Tensor, pieces: Sequence[Piece], target: Target) -> None:
        """Into a parameter whose own memory is strided, or that only `copy_` knows how to fill."""
        if len(pieces) == 1 and pieces[0].length == target.tensor.numel() and pieces[0].source_start == 0:
            self._store(tensor.reshape(-1)[: pieces[0].length].view(target.shape), target.tensor, target)
            return
        source, strides = tensor.reshape(-1), [math.prod(target.shape[d + 1 :]) for d in range(len(target.shape))]
        for piece in pieces:
            linear = torch.arange(piece.target_start, piece.target_start + piece.length)
            index = tuple((linear // s) % n for s, n in zip(strides, target.shape, strict=True))
            values = source[piece.source_start : piece.source_start + piece.length]
            target.tensor[index] = values.to(target.tensor.dtype)

    def _store(self, values: torch.Tensor, destination: torch.Tensor, target: Target) -> None:
        destination.copy_(values)
        if _may_overflow(values.dtype, destination.dtype) and bool(
            torch.isinf(destination).sum() > torch.isinf(values).sum()
        ):
            with self._lock:
                if target.name not in self.result.infinities:
                    self.result.infinities.append(target.name)

    def _compute(self, step: ComputeStep) -> None:
        with self._hold(
            sum(info.nbytes for info in step_infos(step)) + sum(t.tensor.nbytes for t in step.targets.values())
        ):
            arguments = [
                [read_tensor(i) for i in source] if isinstance(source, tuple) else read_tensor(source)
                for source in step.sources
            ]
            results = step.function(arguments)
            for name, target in step.targets.items():
                result = results.get(name)
                if result is None or tuple(result.shape) != target.shape:
                    found = "nothing" if result is None else f"a tensor of shape {list(result.shape)}"
                    raise LoaderContractError(
                        f"{'; '.join(step.rules)} returned {found} for {name}, not {list(target.shape)}", tensor=name
                    )
                with self._lock:
                    self.result.written.add(name)
                self._store(result, target.tensor, target)

    def _call(self, step: CallStep) -> None:
        with self._hold(step.info.nbytes if step.info.is_raw else 0):
            loader: Any = step.target.tensor.weight_loader  # type: ignore[attr-defined]
            arguments = () if step.shard_id is None else (step.shard_id,)
            loader(step.target.tensor, read_tensor(step.info), *arguments)


class _Held:
    """Counts memory that a job holds while it runs."""

    def __init__(self, transfer: Transfer, nbytes: int) -> None:
        self._transfer, self._nbytes = transfer, nbytes

    def __enter__(self) -> None:
        self._add(self._nbytes)

    def __exit__(self, *exc: object) -> None:
        self._add(-self._nbytes)

    def _add(self, nbytes: int) -> None:
        transfer = self._transfer
        with transfer._lock:  # noqa: SLF001 -- two halves of one thing
            transfer._held += nbytes  # noqa: SLF001 -- as above
            transfer.result.extra_memory = max(transfer.result.extra_memory, transfer._held)  # noqa: SLF001 -- as above


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _single_threaded_torch() -> None:
    # Parallelism inside torch would meet at a barrier on every small copy.
    torch.set_num_threads(1)


def _place(info: TensorInfo) -> tuple[str, int]:
    return (info.extents[0].source.name, info.extents[0].offset) if info.extents else ("", 0)


def _bytes_of(step: Step) -> int:
    if not isinstance(step, CopyStep):
        return sum(info.bytes_stored for info in step_infos(step))
    total = 0
    for piece in step.pieces:
        extent = _single_dense_extent(piece.info)
        total += piece.length * (extent.stored_dtype if extent is not None else piece.info.dtype).itemsize
    return total


def _single_dense_extent(info: TensorInfo) -> Extent | None:
    """The extent, where the whole tensor lies in one piece in row-major order."""
    if info.is_raw and len(info.extents) == 1 and info.extents[0].is_contiguous:
        return info.extents[0]
    return None


def _flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """A parameter's elements in row-major order as a view, where its memory is laid out so."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    return tensor.detach().view(-1) if tensor.is_contiguous() else None


def _is_straight(piece: Piece, extent: Extent, target: Target) -> bool:
    same = extent.stored_dtype == piece.info.dtype == target.tensor.dtype
    return same and extent.is_native and is_dense(target.tensor)


def _may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target or not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(target).max < torch.finfo(source).max
