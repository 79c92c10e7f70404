"""What the jobs of a transfer share: buffers that are reused, an account of the memory held, and what they noticed."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from weightloaders.weights.reading import read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightloaders.weights.info import TensorInfo

# Small enough for the processor's cache, large enough that reading it is not all overhead.
BUFFER_BYTES = 4 << 20


class Workspace:
    """Shared by all jobs of one transfer, on all threads.

    Args:
        handed: Told of each tensor that goes to foreign code.

    Attributes:
        most_held: Most bytes held at one time.
        infinities: Parameters in which a cast made new infinities.
    """

    def __init__(self, handed: Callable[[str, torch.Tensor], object] | None = None) -> None:
        self.handed = handed
        self.most_held = 0
        self.infinities: list[str] = []
        self._held = 0
        self._lock = threading.Lock()
        self._own = threading.local()
        self._last: tuple[TensorInfo, torch.Tensor] | None = None

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for some elements, at most `BUFFER_BYTES`: this thread's own, and overwritten by the next call."""
        memory: torch.Tensor | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
            # Held until the transfer is done.
            self._account(BUFFER_BYTES)
        return memory[: count * dtype.itemsize].view(dtype)

    @contextlib.contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Account for memory that is held meanwhile."""
        self._account(nbytes)
        try:
            yield
        finally:
            self._account(-nbytes)

    def _account(self, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes
            self.most_held = max(self.most_held, self._held)

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A tensor without raw bytes, from its loader's own `read`; on the caller's thread only.

        The last one is kept, because parts of it often go to several parameters, one after the other.
        """
        if self._last is None or self._last[0] is not info:
            # Let go of the last one first: two at a time would be one too many.
            self._last = None
            self._last = (info, read_tensor(info))
        return self._last[1]

    def forget(self) -> None:
        """Let go of what `read` kept."""
        self._last = None

    def check_cast(self, values: torch.Tensor, cast: torch.Tensor, name: str) -> None:
        """Notice infinities that a cast has made."""
        if not _may_overflow(values.dtype, cast.dtype):
            return
        found = torch.isinf(cast)
        if bool(found.any()) and int(found.sum()) > int(torch.isinf(values).sum()):
            with self._lock:
                if name not in self.infinities:
                    self.infinities.append(name)


def _may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target or not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(target).max < torch.finfo(source).max
