"""Memory for tensors that is used again as soon as nobody holds the tensor any more.

Touching new memory costs more than reading into it. Most tensors that are handed out one after the other have one of a
few sizes, and most consumers copy what they get and let go of it. Those who keep it get memory as torch gives it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef

# Of a consumer that keeps what it gets, no more than this many tensors are watched.
_WATCHED = 16


class _Lent(NamedTuple):
    """A tensor that somebody has: the memory below it, where that can be used again, and whether it still lives."""

    memory: torch.Tensor | None
    tensor: StorageWeakRef


class ReusedMemory:
    """Gives tensors memory, each its own. Not to be used by two threads at once.

    Attributes:
        nbytes: Size of the memory that is kept for the next tensors.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._spare: deque[torch.Tensor] = deque()
        self._lent: deque[_Lent] = deque()
        # How many tensors were let go of soon, and how many were not.
        self._returned = self._kept = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, room: int) -> torch.Tensor:
        """An uninitialised tensor, the only one in its storage.

        Args:
            shape: Its shape; not of no elements.
            dtype: Its dtype.
            room: Bytes that it may take together with what is kept then.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._collect()
        memory = self._taken(nbytes)
        while self._spare and nbytes + self.nbytes > room:
            self.nbytes -= self._spare.popleft().nbytes
        if memory is None and self._returned > self._kept:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if memory is None:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            # A storage of its own over the same memory, which it keeps alive. It can't be resized.
            tensor = torch.utils.dlpack.from_dlpack(memory).view(dtype).view(shape)
        self._lent.append(_Lent(memory, StorageWeakRef(tensor.untyped_storage())))  # type: ignore[no-untyped-call]
        if len(self._lent) > _WATCHED:
            self._lent.popleft()
            self._kept += 1
        return tensor

    def _collect(self) -> None:
        for _ in range(len(self._lent)):
            lent = self._lent.popleft()
            if not lent.tensor.expired():  # type: ignore[no-untyped-call]
                self._lent.append(lent)
                continue
            self._returned += 1
            if lent.memory is not None:
                self._spare.append(lent.memory)
                self.nbytes += lent.memory.nbytes

    def _taken(self, nbytes: int) -> torch.Tensor | None:
        for at, memory in enumerate(self._spare):
            if memory.nbytes == nbytes:
                del self._spare[at]
                self.nbytes -= nbytes
                return memory
        return None
