"""What a thread does at one go, and the pieces that go into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource

# How bytes get where they belong.
Path = Literal["straight", "buffered", "assembled", "computed", "handed over"]


class Piece(NamedTuple):
    """A run of a source's bytes that may be read together with its neighbours.

    Attributes:
        source: What is read.
        offset: The first byte.
        nbytes: How many.
        target: What is filled with them.
        start: The byte of the target's memory that the first one goes to, where they go there as they are. Where they
            are cast on the way, that which it would be in a target of their own dtype.
        stored: Their dtype, where they are cast on the way and nothing else: one element after the other.
        place: Else what is done with them, given as they lie in a buffer that is reused.
        itemsize: Bytes an element.
        held: Memory that placing them takes, in bytes; beside the buffer.
        where: The accelerator that they are copied to as they are, and placed on; None for the host.
    """

    source: ByteSource
    offset: int
    nbytes: int
    target: Target
    start: int = 0
    stored: torch.dtype | None = None
    place: Callable[[torch.Tensor], object] | None = None
    itemsize: int = 1
    held: int = 0
    where: torch.device | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for a thread to do.

    Attributes:
        file: What it reads.
        offset: Where it starts to read; jobs are done in the order of file and offset.
        nbytes: How much it reads.
        targets: What it writes, in the order of ``starts``.
        work: Does it.
        path: How its bytes get where they belong.
        reads: In how many positioned reads, beside those for what it has asked for ahead.
        held: Memory that it holds meanwhile, in bytes; beside the thread's own buffer.
        pooled: Whether any thread may do it; else it runs code of others, and is done on the caller's thread.
        buffer: How much of the thread's own buffer it takes, in bytes.
        staged: How much of a slot on the way to an accelerator.
        ahead: What it asks for whole, in this order, so that it can be read before.
        starts: Where in the file the bytes of each target begin, if it reads those of several, one after the other.
    """

    file: str
    offset: int
    nbytes: int
    targets: tuple[Target, ...]
    work: Callable[[], object]
    path: Path
    reads: int = 1
    held: int = 0
    pooled: bool = True
    buffer: int = 0
    staged: int = 0
    ahead: tuple[TensorInfo, ...] = ()
    starts: tuple[int, ...] = ()
