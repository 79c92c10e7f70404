"""What the jobs of a transfer share: buffers that are reused, an account of the memory held, and what they noticed."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError
from weightloaders.transfer.copying import SCRATCH_BYTES, SMALL_BYTES, copy_values, made_infinities, may_overflow
from weightloaders.transfer.options import EXTRA_MEMORY
from weightloaders.transfer.staging import SLOTS, Staging
from weightloaders.weights.reading import read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from weightloaders.targets import Target
    from weightloaders.transfer.devices import Device
    from weightloaders.transfer.read_ahead import ReadAhead
    from weightloaders.weights.direct_io import DirectReads
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource

# Small enough for the processor's cache, large enough that reading it is not all overhead.
BUFFER_BYTES = 4 << 20


class Workspace:
    """Shared by all jobs of one transfer, on all threads.

    Args:
        handed: Told of each tensor that goes to foreign code.
        extra_memory: Most bytes to hold at one time beside the model. One job alone may hold more.
        threads: How many threads have a buffer.
        direct: The way past the page cache, where reads are to take it.
        accelerators: By the identity of a target's tensor, the accelerator that it lies on, or will lie on.
        devices: The accelerators themselves. Without them, what is to be done can be told, but not be done.

    Attributes:
        direct: See above.
        staging: The way to the accelerators.
        buffer_bytes: Most bytes that a thread's buffer has.
        buffer_needed: How many of them the largest job takes.
        room: Most bytes that jobs may hold together, beside these.
        scratch_bytes: Most bytes that a thread's scratch memory for copies has.
        most_held: Most bytes held at one time.
        infinities: Parameters in which a cast made new infinities.
    """

    def __init__(
        self,
        handed: Callable[[str, torch.Tensor], object] | None = None,
        extra_memory: int = EXTRA_MEMORY,
        threads: int = 1,
        direct: DirectReads | None = None,
        accelerators: Mapping[int, torch.device] | None = None,
        devices: Mapping[torch.device, Device] | None = None,
    ) -> None:
        self.handed, self.direct = handed, direct
        self._accelerators = accelerators or {}
        # On the way to accelerators a thread has slots, too, and there as much memory as one of them.
        slots = SLOTS + 1 if accelerators else 0
        # What is left, a quarter or more, is for what single jobs hold.
        share = extra_memory // ((2 + 4 * slots // 3) * threads)
        self.buffer_bytes = max(64, min(BUFFER_BYTES, share - share % 64))
        self.buffer_needed = self.buffer_bytes
        self.scratch_bytes = min(SCRATCH_BYTES, self.buffer_bytes // 128 * 64)
        self.room = extra_memory - threads * ((1 + slots) * self.buffer_bytes + self.scratch_bytes)
        self.most_held = 0
        self.infinities: list[str] = []
        self._held = 0
        self._buffers = 0
        self._holders = self._held_by_jobs = 0
        # Taken by itself: Ctrl-C may leave a condition's lock taken, see `Crew`.
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._stopped = False
        self._ahead: Generator[tuple[TensorInfo, torch.Tensor]] | None = None
        self._own = threading.local()
        self._last: tuple[TensorInfo, torch.Tensor] | None = None
        self._asked: dict[tuple[str, torch.device, int], torch.Tensor] = {}
        self.staging = Staging(devices or {}, self.keep)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory for at most `buffer_needed`: this thread's own, and overwritten by the next call."""
        memory: torch.Tensor | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = torch.empty(self.buffer_needed, dtype=torch.uint8, device="cpu")
            self._take(self.buffer_needed)
        return memory[:nbytes]

    def _take(self, nbytes: int) -> None:
        """Account for memory that a thread keeps until it ends."""
        with self._lock:
            self._buffers += nbytes
            self._account(nbytes)

    def keep(self, nbytes: int) -> None:
        """Account for memory that is taken, or (a negative number) given back."""
        with self._lock:
            self._account(nbytes)

    def forget_buffers(self) -> None:
        """The threads that had buffers have ended."""
        self._own = threading.local()
        self._account(-self._buffers)
        self._buffers = 0

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Hold memory meanwhile. Waits until there is room for it, or nobody else holds any."""
        if not nbytes:
            yield
            return
        with self._lock:
            self._change.wait_for(
                lambda: self._stopped or not self._holders or self._held_by_jobs + nbytes <= self.room
            )
            self.check_stop()
            self._holders += 1
            self._held_by_jobs += nbytes
            self._account(nbytes)
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                self._held_by_jobs -= nbytes
                self._account(-nbytes)
                self._change.notify_all()

    def _account(self, nbytes: int) -> None:
        self._held += nbytes
        self.most_held = max(self.most_held, self._held)

    @property
    def stopped(self) -> bool:
        """Whether everybody is to stop."""
        return self._stopped

    def stop(self) -> None:
        """Let every thread stop as soon as it looks up."""
        with self._lock:
            self._stopped = True
            self._change.notify_all()

    def check_stop(self) -> None:
        """Raise `Stopped` if everybody is to stop."""
        if self._stopped:
            raise Stopped("the transfer was stopped")

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A tensor without raw bytes, from its loader's own `read`; on the caller's thread only.

        The last one is kept, because parts of it often go to several parameters, one after the other.
        """
        if self._last is None or self._last[0] is not info:
            # Let go of the last one first: two at a time would be one too many.
            self._last = None
            self._last = (info, read_tensor(info))
        return self._last[1]

    @contextlib.contextmanager
    def reading_ahead(self, ahead: ReadAhead) -> Iterator[None]:
        """Within this, `own` has what is read ahead."""
        before, self.most_held = self.most_held, self._held
        try:
            with contextlib.closing(iter(ahead)) as self._ahead:
                yield
        finally:
            self._ahead = None
            self.most_held = max(before, self.most_held + ahead.most_held)

    def own(self, info: TensorInfo) -> torch.Tensor:
        """A tensor that code of others may write to, and keep."""
        if info.read is not None:
            # It may still be somebody else's.
            return read_tensor(info).detach().clone()
        return read_tensor(self.read_by(info)) if self._ahead is None else next(self._ahead)[1]

    def reader(self, source: ByteSource) -> ByteSource:
        """What a source is read by: itself, or a way past the page cache."""
        return source if self.direct is None else self.direct.source(source)

    def read_by(self, info: TensorInfo) -> TensorInfo:
        """The same tensor, read by `reader`."""
        if self.direct is None:
            return info
        return replace(info, extents=tuple(replace(e, source=self.reader(e.source)) for e in info.extents))

    def forget(self) -> None:
        """Let go of what `read` kept."""
        self._last = None

    def store(self, values: torch.Tensor, destination: torch.Tensor, name: str) -> None:
        """Copy values into (a part of) a parameter, and notice infinities that a cast has made."""
        if destination.device.type == "cpu":
            made = copy_values(destination, values, self._scratch(values.nbytes))
        elif values.device.type == "cpu":
            cast = values.to(destination.dtype)
            made = made_infinities(cast, values)
            destination.copy_(cast)
        else:
            destination.copy_(values)
            made = False
            if may_overflow(values.dtype, destination.dtype):
                # An answer from a device is waited for; so it is asked for when all is done.
                there = (destination.isinf() & values.isfinite()).any()
                key = name, destination.device, threading.get_ident()
                self._asked[key] = self._asked[key] | there if key in self._asked else there
        if made:
            self._note_infinities(name)

    def settle(self) -> None:
        """Ask accelerators what casts there have made, once all is done."""
        for (name, *_), made in self._asked.items():
            if bool(made):
                self._note_infinities(name)

    def _note_infinities(self, name: str) -> None:
        with self._lock:
            if name not in self.infinities:
                self.infinities.append(name)

    def accelerator_of(self, target: Target) -> torch.device | None:
        """The accelerator that a target lies on, or will lie on; None for the host."""
        # Not by its name: what is put together beside a parameter, on the host, has the same.
        return self._accelerators.get(id(target.tensor))

    def write(self, target: Target, work: Callable[[], object]) -> None:
        """Write to a target by torch, from the host."""

        def write() -> None:
            with writing(target.tensor):
                work()

        where = self.accelerator_of(target)
        if where is None:
            write()
        else:
            self.staging.run(where, write)

    def _scratch(self, nbytes: int) -> torch.Tensor:
        """This thread's own memory for what a copy needs on its way; no more than what is copied."""
        memory: torch.Tensor | None = getattr(self._own, "scratch", None)
        wanted = min(self.scratch_bytes, -(-nbytes // 64) * 64) if nbytes > SMALL_BYTES else 0
        if memory is None or memory.numel() < wanted:
            self._take(wanted - (0 if memory is None else memory.numel()))
            memory = self._own.scratch = torch.empty(wanted, dtype=torch.uint8, device="cpu")
        return memory


class Stopped(LoadError):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """A thread has stopped because another one failed; the other one's error is what is told."""


@contextlib.contextmanager
def writing(tensor: torch.Tensor) -> Iterator[None]:
    """Write a parameter by torch. One that was made in inference mode can be written only in it."""
    # Both are a thread's own.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        yield
