"""Accelerators: which ones this machine has, and how work is put in order on one, by streams and events."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weightloaders.errors import ConfigError, LoadError, WeightLoadersError, summary
from weightloaders.weights.reading import lacks_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come here."""


class Stream(Protocol):
    """Work for a device, done in the order in which it was put in, while the host goes on."""

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the host. The source must stay as it is until an event that is recorded later was waited for."""

    def run(self, work: Callable[[], object]) -> None:
        """Do what puts operations on tensors of the device into its current stream: that is this one meanwhile."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory on the device, for work of this stream."""

    def record(self) -> Event:
        """Mark the end of what was put in so far."""

    def wait(self, event: Event) -> None:
        """Let what is put in from now on begin after an event of another stream. The host does not wait."""


class Device(Protocol):
    """A device that tensors lie on, seen from the host."""

    def stream(self) -> Stream:
        """A stream of its own."""

    def current_stream(self) -> Stream:
        """The stream that this thread's own work on the device goes to."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device copies from by itself.

        Raises:
            RuntimeError: If there is none to be had.
        """

    def can_cast(self, source: torch.dtype, target: torch.dtype) -> bool:
        """Whether the device knows both dtypes, and turns one into the other."""

    def release_unused(self) -> None:
        """Give back what the allocators keep of memory that is no longer used."""


def device_for(where: torch.device) -> Device | None:
    """The device that is filled by way of staging; None where memory is the host's own."""
    if where.type in ("cpu", "meta"):
        return None
    return Accelerator(where)


class Accelerator:
    """A device that torch knows, through what torch offers for all kinds: CUDA, ROCm, XPU, and others.

    Args:
        where: Its kind and index.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._casts: dict[tuple[torch.dtype, torch.dtype], bool] = {}

    @functools.cached_property
    def _has_streams(self) -> bool:
        try:
            torch.Stream(self._where)
            torch.accelerator.current_stream(self._where)
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        # Older versions of torch can't make a generic stream the current one.
        return hasattr(torch.Stream, "__enter__")

    def stream(self) -> Stream:
        """A stream of its own; on a device without streams (mps) what is put in is done at once."""
        return _Queue(torch.Stream(self._where)) if self._has_streams else _Immediate(self._where)

    def current_stream(self) -> Stream:
        """The stream that this thread's own work on the device goes to."""
        if self._has_streams:
            return _Queue(torch.accelerator.current_stream(self._where))
        return _Immediate(self._where)

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device copies from by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def can_cast(self, source: torch.dtype, target: torch.dtype) -> bool:
        """Whether the device does it: each kind lacks other dtypes, so it is tried on an element."""
        pair = source, target
        if pair not in self._casts:
            try:
                # Side by side is not enough: what is scattered must be copied by the device, too.
                values, scattered = (torch.empty(2, dtype=dtype, device=self._where)[::2] for dtype in pair)
                scattered.copy_(values)
                self._casts[pair] = True
            except (RuntimeError, TypeError):
                self._casts[pair] = False
        return self._casts[pair]

    def release_unused(self) -> None:
        """Empty the caches of the device's allocator, and of the one of page-locked memory."""
        module = torch.get_device_module(self._where)
        if hasattr(module, "empty_cache"):
            module.empty_cache()
        # Before torch 2.10 page-locked memory, once used, stays with the process.
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()


class _Queue:
    """A stream of torch's."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._stream:
            destination.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        with self._stream:
            work()

    def allocate(self, nbytes: int) -> torch.Tensor:
        # What the allocator hands out belongs to the stream that is the current one.
        with self._stream:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)

    def record(self) -> Event:
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)


class _Immediate:
    """Instead of a stream, where a device has none: everything is done when it is put in."""

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def upload(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def run(self, work: Callable[[], object]) -> None:
        work()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._where)

    def record(self) -> Event:
        return self

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


# ------------------------------------------------------------------ what this machine has


def usable_device(device: torch.device | str | int, said: str = "device") -> torch.device:
    """A device by its name or number, if this machine has it.

    Args:
        device: As torch takes it. Without an index it is the process's current device, and is named by its index then:
            other threads may have another current device.
        said: What the argument is called.

    Raises:
        ConfigError: If there is no such device.
    """
    try:
        where = torch.device(device)
        if where.type == _accelerator() and (where.index or 0) >= torch.accelerator.device_count():
            raise ValueError("no device has this number")
        # It initialises no other device than this. Where torch or the machine lacks it, each kind fails in its own way.
        return torch.empty(0, device=where).device
    except Exception as error:
        # A torch that was built without a kind of device says so by an assertion.
        reason = summary(error).splitlines()[0].partition(". ")[0]
        raise ConfigError(
            f"{said}={str(device)!r} can't be used: {reason.removeprefix('AssertionError: ')}",
            hint=f"this machine has {', '.join(_devices_here())}",
        ) from error


def _accelerator() -> str | None:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if kind is None else kind.type


def _devices_here() -> list[str]:
    kind = _accelerator()
    return ["cpu"] + [f"{kind}:{index}" for index in range(torch.accelerator.device_count() if kind else 0)]


@contextlib.contextmanager
def enough_memory_on(
    where: torch.device, what: str, error: type[WeightLoadersError] = LoadError, tensor: str | None = None
) -> Iterator[None]:
    """Turn a lack of memory within the block into an error that says of which device, and how much it has.

    Args:
        where: The device.
        what: What memory is needed for, with its size.
        error: What is raised.
        tensor: The tensor that it is for.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as lack:
        if isinstance(lack, WeightLoadersError) or not lacks_memory(lack):
            raise
        if where.type == "cpu":
            raise error(f"there is not enough memory for {what}", tensor=tensor) from lack
        raise error(
            f"there is not enough memory on {where} for {what}{_room_on(where)}",
            tensor=tensor,
            hint="free memory there, or leave part of the model on other devices (device_map)",
        ) from lack


def _room_on(where: torch.device) -> str:
    """How much memory of a device is free; empty where that can't be said."""
    try:
        # Before torch 2.9 each kind of device is asked in its own way.
        ask = getattr(torch.accelerator, "get_memory_info", None) or torch.get_device_module(where).mem_get_info
        free, total = ask(where)
    except (RuntimeError, AttributeError, ValueError):
        return ""
    return f"; it has {free:,} bytes free of {total:,}"
