"""The tensors of a source as pairs, one after the other, while threads read the next ones ahead.

For code that wants an iterable: a model's own ``load_weights(weights)``, for one. Each tensor has memory of its own, so
whoever gets it may keep it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError, WeightLoadersError
from weightloaders.plan import single_run
from weightloaders.transfer.reuse import ReusedMemory
from weightloaders.transfer.sources import MAX_GAP, habits_for, read_runs, reads_of, sources_in
from weightloaders.weights.reading import enough_memory, memory_of, read_tensor
from weightloaders.weights.system_errors import advice
from weightloaders.weights.threads import Crew, next_of, threads_that_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from weightloaders.transfer.options import TransferOptions
    from weightloaders.weights.info import Extent, TensorInfo

# Several threads share the reading of a large tensor, in pieces of this size. Between two of them they can be stopped.
_CHUNK = 4 << 20
# Enough to keep every thread busy. What lies longer has left the processor's cache when it is wanted.
_CHUNKS_A_THREAD = 2
# Small neighbours are read at one go, up to this many bytes.
_BATCH = 1 << 20
# For a thread that waits for room, and missed that there is some.
_PATIENCE = 0.2


@dataclass(slots=True, eq=False)
class _Portion:
    """What is read together: one tensor, or several small neighbours.

    Attributes:
        infos: The tensors, in the order of the source.
        nbytes: Memory that they take.
        tensors: Their memory, the first one last; none before it was begun, and none when it was handed out.
        left: Reads that are not done yet; None before it was begun.
        error: Why it can't be read.
    """

    infos: list[TensorInfo]
    nbytes: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    left: int | None = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.left == 0 or self.error is not None


class ReadAhead:
    """Tensors with what is known of them, in the order given, read ahead by a few threads. To be iterated over once.

    Nothing is read before the first is asked for. Closing the iterator, or an error in the loop over it (with
    ``contextlib.closing``), stops the threads. An error while reading is raised where the tensor that it concerns would
    come.

    Args:
        infos: The tensors, best in the order in which they lie in their files.
        read: Reads one that has no raw bytes: on the caller's thread, when it is its turn.
        options: How many threads read, and how much they may hold: ``extra_memory``, with what was handed out last. One
            tensor is read ahead in any case, whatever its size.

    Attributes:
        most_held: Most bytes held at one time: those read ahead, and those handed out last.
        reads: How many positioned reads were begun.
    """

    def __init__(
        self, infos: Sequence[TensorInfo], read: Callable[[TensorInfo], torch.Tensor], options: TransferOptions
    ) -> None:
        self.most_held = self.reads = 0
        self._portions = list(_portions(infos))
        # Those that threads read, in order: not begun yet, and begun with reads that nobody has taken yet.
        self._coming = deque(portion for portion in self._portions if portion.infos[0].is_raw)
        self._open: deque[tuple[_Portion, Callable[[], object]]] = deque()
        threads = habits_for(sources_in(infos), options).threads
        self._threads = min(threads, len(self._coming))
        self._read, self._window = read, min(options.extra_memory, threads * _CHUNKS_A_THREAD * _CHUNK)
        self._ahead = self._handed = 0
        self._memory = ReusedMemory()
        self._stopped = False
        # Daemons: an iterator that nobody closes must not keep the process from ending.
        self._crew = Crew("weightloaders-read-ahead", daemon=True)
        # Of what its caller waits for: see `Crew`. Reentrant, because the garbage collector may close the iterator on
        # any thread, in the middle of anything.
        self._news: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def most_to_hold(self) -> int:
        """Most bytes that it will hold at one time."""
        sizes = [portion.nbytes for portion in self._portions]
        return min(sum(sizes), max(self._window, 2 * max(sizes, default=0)))

    @property
    def reads_in_all(self) -> int:
        """In how many positioned reads it will have read all."""
        return sum(map(_reads_of, self._portions))

    def __iter__(self) -> Generator[tuple[TensorInfo, torch.Tensor]]:
        _running.add(self)
        try:
            if self._threads and not self._crew.start(self._work, threads_that_fit(self._threads)):
                raise LoadError(
                    "no thread can be started to read ahead", hint="let the process have more threads, or more memory"
                )
            for portion in self._portions:
                yield from self._pairs_of(portion)
        finally:
            self._stop()
            _running.discard(self)

    def _stop(self, patience: float | None = None) -> None:
        """Let the threads end with what they read just now, and wait for them."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        self._crew.join(patience)

    def _pairs_of(self, portion: _Portion) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        is_raw = portion.infos[0].is_raw
        with self._lock:
            # What was handed out last is the consumer's alone.
            self._handed = 0
            self._changed.notify_all()
        while is_raw and not portion.is_done:
            next_of(self._news)
        if portion.error is not None:
            with naming(portion.infos[0]):
                raise portion.error
        with self._lock:
            self._ahead -= portion.nbytes if is_raw else 0
            self._handed = portion.nbytes
            self._account()
            tensors, portion.tensors = portion.tensors, []
        for info in portion.infos:
            # No name for it here, which would keep alive what the consumer lets go of.
            yield info, tensors.pop() if is_raw else self._read_here(info)

    def _read_here(self, info: TensorInfo) -> torch.Tensor:
        with naming(info):
            return self._read(info)

    def _account(self) -> None:
        self.most_held = max(self.most_held, self._ahead + self._handed + self._memory.nbytes)

    # -- on the threads

    def _work(self) -> None:
        while (read := self._next_read()) is not None:
            portion, fill = read
            error: BaseException | None = None
            try:
                fill()
            except BaseException as failure:  # noqa: BLE001 -- raised where its pair would come
                error = failure
            # A thread that waits keeps no tensor alive.
            del read, fill
            self._did(portion, error)
            del portion, error

    def _did(self, portion: _Portion, error: BaseException | None) -> None:
        with self._lock:
            portion.error = portion.error or error
            portion.left = (portion.left or 0) - 1
        self._news.put(None)

    def _next_read(self) -> tuple[_Portion, Callable[[], object]] | None:
        with self._lock:
            while not self._stopped:
                if self._open:
                    return self._open.popleft()
                if not self._coming:
                    return None
                held = self._ahead + self._handed
                if not self._ahead or held + self._coming[0].nbytes <= self._window:
                    self._begin(self._coming.popleft())
                else:
                    self._changed.wait(_PATIENCE)
            return None

    def _begin(self, portion: _Portion) -> None:
        """Make memory for a portion, and say what is to be read into it."""
        try:
            with enough_memory(portion.infos[0].name, portion.nbytes):
                reads = self._reads(portion)
        except BaseException as error:  # noqa: BLE001 -- as above
            portion.error = error
            self._news.put(None)
            return
        portion.left = len(reads)
        self.reads += _reads_of(portion)
        self._open.extend((portion, read) for read in reads)
        self._ahead += portion.nbytes
        self._account()

    def _reads(self, portion: _Portion) -> list[Callable[[], object]]:
        """Give each tensor memory of its own, and say what is to be read into it."""
        first = portion.infos[0]
        extent = _run(first)
        if extent is None:
            return [functools.partial(_read_whole, portion)]
        if extent.length <= _BATCH:
            portion.tensors = [torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in portion.infos[::-1]]
            return [functools.partial(_read_batch, portion.infos, portion.tensors[::-1])]
        room = self._window - self._ahead - self._handed
        portion.tensors = [self._memory.tensor(first.shape, first.dtype, room)]
        view = memory_of(portion.tensors[0])
        return [
            functools.partial(extent.source.read_into, view[at : at + _CHUNK], extent.offset + at)
            for at in range(0, len(view), _CHUNK)
        ]


# ------------------------------------------------------------------ what is read at one go


def _portions(infos: Sequence[TensorInfo]) -> Iterator[_Portion]:
    batch: list[TensorInfo] = []
    start = end = 0
    for info in infos:
        run = _run(info)
        if batch and not (
            run is not None
            and run.source is batch[0].extents[0].source
            and 0 <= run.offset - end <= MAX_GAP
            and run.offset + run.length - start <= _BATCH
            and 2 * len(batch) + 2 <= run.source.most_views
        ):
            yield _Portion(batch, end - start)
            batch = []
        if run is None or run.length > _BATCH:
            yield _Portion([info], info.nbytes)
            continue
        if not batch:
            start = run.offset
        batch.append(info)
        end = run.offset + run.length
    if batch:
        yield _Portion(batch, end - start)


# ------------------------------------------------------------------ when the process ends

_running: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
# For a source that does not answer; its thread is then left to the system.
_LAST_PATIENCE = 2.0


@atexit.register
def _stop_all() -> None:
    # Python ends a daemon wherever it is: within torch that aborts the process, and with a lock in its hands it may
    # keep the others waiting for ever.
    for ahead in list(_running):
        ahead._stop(_LAST_PATIENCE)  # noqa: SLF001 -- one module


@contextlib.contextmanager
def naming(info: TensorInfo) -> Iterator[None]:
    """Turn what a source's or loader's code raises into an error of ours that names the tensor."""
    try:
        yield
    except WeightLoadersError as error:
        error.tensor = error.tensor or info.name
        raise
    except Exception as error:
        file = info.extents[0].source.name if info.extents else None
        raise LoadError(
            f"reading {info.name} failed: {type(error).__name__}: {error}",
            tensor=info.name,
            file=file,
            hint=advice(error) if isinstance(error, OSError) else None,
        ) from error


def _reads_of(portion: _Portion) -> int:
    first = portion.infos[0]
    run = _run(first)
    if run is None:
        return reads_of(first)
    return -(-run.length // _CHUNK) if run.length > _BATCH else 1


def _run(info: TensorInfo) -> Extent | None:
    """Where a tensor lies, if its bytes are its values as they are."""
    extent = single_run(info)
    plain = extent is not None and extent.is_native and extent.stored_dtype == info.dtype and info.numel
    return extent if plain else None


def _read_whole(portion: _Portion) -> None:
    portion.tensors = [read_tensor(info) for info in portion.infos]


def _read_batch(infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
    extents = [info.extents[0] for info in infos]
    runs = [(extent.offset, memory_of(tensor)) for extent, tensor in zip(extents, tensors, strict=True)]
    read_runs(extents[0].source, runs)
