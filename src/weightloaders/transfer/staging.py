"""The way to an accelerator: bytes are read into page-locked slots, and copied from there while the next are read.

Each thread has slots of its own, which it fills in turn, and a stream of its own for each device. A slot is filled
again only when the event that was recorded behind its last copy has come. What is stored in another dtype, byte order
or layout than the parameter wants is copied as it is, into scratch memory on the device, and put into its place there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError
from weightloaders.transfer.devices import Device, Event, Stream, enough_memory_on
from weightloaders.weights.reading import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

# Large enough that a copy of it takes longer than starting one, and small enough that some of them for each thread stay
# within the memory that a load may take.
SLOT_BYTES = 4 << 20
# One is copied from while the other is read into.
SLOTS = 2


class Staging:
    """Shared by all threads of one transfer. A context manager: when it is left, everything has arrived.

    Args:
        devices: The devices that are filled, by what torch calls them. What this thread has put into their current
            streams so far is done before anything that comes from here.
        account: Told of memory that is taken, and (as a negative number) given back, in bytes.
        slot_bytes: Size of a slot.
        slots: How many slots a thread has.

    Attributes:
        slot_bytes: See above.
        slots: See above.
        notes: What is worth telling, as sentences.
    """

    def __init__(
        self,
        devices: Mapping[torch.device, Device],
        account: Callable[[int], object],
        *,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.notes: list[str] = []
        self._devices, self._account = devices, account
        # The memory of a parameter may still be in use as what it was before, or still be initialised.
        self._begin = {where: device.current_stream().record() for where, device in devices.items()}
        self._own = threading.local()
        self._caller = threading.get_ident()
        self._lanes: list[_Lane] = []
        self._held = 0
        self._lock = threading.Lock()

    def can_cast(self, where: torch.device, *dtypes: torch.dtype) -> bool:
        """Whether a device, one after the other, makes each of these dtypes of the one before."""
        device = self._devices.get(where)
        return device is None or all(itertools.starmap(device.can_cast, itertools.pairwise(dtypes)))

    @contextlib.contextmanager
    def slot(self) -> Iterator[Slot]:
        """This thread's next slot, once it is free: to be read into, and to be copied from."""
        slot = self._lane().next_slot()
        try:
            yield slot
        finally:
            slot.leave()

    def run(self, where: torch.device, work: Callable[[], object]) -> None:
        """Do what puts operations on tensors of a device into its current stream, and wait until they are done."""
        # Code of others runs on the thread that asked for the transfer, and what it has put into its own stream counts.
        own = threading.get_ident() == self._caller
        stream = self._devices[where].current_stream() if own else self._lane().stream(where)
        stream.run(work)
        stream.record().synchronize()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whatever anybody lets the device do from then on comes after what the host has waited for, in any stream.
        try:
            for lane in self._lanes:
                lane.synchronize()
        except RuntimeError as failure:
            # A device that failed says so at each call; the first is the one to be heard of.
            if error is None:
                raise LoadError(f"an accelerator failed: {failure}") from failure
        finally:
            for lane in self._lanes:
                lane.release()
            self._lanes.clear()
            self._own = threading.local()
            if self._held:
                for device in self._devices.values():
                    device.release_unused()
                self.hold(-self._held)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane(self)
            with self._lock:
                self._lanes.append(lane)
        return lane

    def new_stream(self, where: torch.device) -> Stream:
        """A stream for a thread, which begins after what the caller of the transfer has put into its own."""
        stream = self._devices[where].stream()
        stream.wait(self._begin[where])
        return stream

    def new_memory(self) -> torch.Tensor:
        """Memory for a slot: page-locked if that can be had."""
        self.hold(self.slot_bytes)
        # Any of the devices will do: page-locked memory is so for all of one kind.
        device = next(iter(self._devices.values()))
        try:
            return device.page_locked(self.slot_bytes)
        except RuntimeError as error:
            with self._lock:
                if not self.notes:
                    reason = str(error).partition("\n")[0].partition(". ")[0]
                    self.notes.append(
                        f"there is no page-locked memory to be had ({reason}), so reading and copying to the device "
                        "take turns"
                    )
            return torch.empty(self.slot_bytes, dtype=torch.uint8, device="cpu")

    def hold(self, nbytes: int) -> None:
        """Account for memory that is held until all is done."""
        with self._lock:
            self._held += nbytes
        self._account(nbytes)


class _Lane:
    """What a thread has: its slots, and for each device a stream and scratch memory."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._slots: list[Slot] = []
        self._taken = 0
        self._streams: dict[torch.device, Stream] = {}
        self._scratch: dict[torch.device, torch.Tensor] = {}

    def stream(self, where: torch.device) -> Stream:
        if where not in self._streams:
            self._streams[where] = self._staging.new_stream(where)
        return self._streams[where]

    def scratch(self, where: torch.device) -> torch.Tensor:
        # One is enough: the stream is done with what it has of one slot before it comes to the next.
        if where not in self._scratch:
            nbytes = self._staging.slot_bytes
            with enough_memory_on(where, f"{nbytes:,} bytes that loading needs beside the model"):
                self._scratch[where] = self.stream(where).allocate(nbytes)
            self._staging.hold(nbytes)
        return self._scratch[where]

    def next_slot(self) -> Slot:
        at = self._taken % self._staging.slots
        self._taken += 1
        if at == len(self._slots):
            self._slots.append(Slot(self._staging.new_memory(), self))
        slot = self._slots[at]
        slot.wait_until_free()
        return slot

    def release(self) -> None:
        # Slots know their lane: what is in a circle would not be free yet when the allocators are asked for it back.
        self._slots.clear()
        self._scratch.clear()

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.record().synchronize()


class Slot:
    """Host memory that is read into, and what is on its way out of it."""

    def __init__(self, memory: torch.Tensor, lane: _Lane) -> None:
        self._memory, self._lane = memory, lane
        self._used: set[torch.device] = set()
        self._events: list[Event] = []

    def view(self, nbytes: int) -> memoryview:
        """The first bytes, to be read into."""
        return memory_of(self._memory)[:nbytes]

    def upload(self, start: int, destination: torch.Tensor) -> None:
        """Copy bytes from here on to where they belong.

        Args:
            start: Where they begin in the slot.
            destination: Bytes in the memory of a tensor on the device, one behind the other; as many as are copied.
        """
        where = destination.device
        self._used.add(where)
        self._lane.stream(where).upload(destination, self._memory[start : start + destination.numel()])

    def place(self, where: torch.device, start: int, nbytes: int, place: Callable[[torch.Tensor], object]) -> None:
        """Copy bytes as they are into scratch memory on a device, and let them be put into their places there.

        Args:
            where: The device.
            start: Where they begin in the slot.
            nbytes: How many.
            place: Puts operations on the bytes it is given into the device's current stream.
        """
        there = self._lane.scratch(where)[start : start + nbytes]
        self.upload(start, there)
        self._lane.stream(where).run(lambda: place(there))

    def leave(self) -> None:
        """Remember behind what the slot is free."""
        self._events = [self._lane.stream(where).record() for where in self._used]
        self._used.clear()

    def wait_until_free(self) -> None:
        """Wait until all copies of what it held are done."""
        for event in self._events:
            event.synchronize()
