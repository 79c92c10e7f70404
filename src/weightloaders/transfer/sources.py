"""What a transfer reads from, and how that is read best."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightloaders.plan import Step, step_infos
from weightloaders.weights.direct_io import DirectReads
from weightloaders.weights.habits import habits_of
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightloaders.transfer.options import TransferOptions
    from weightloaders.weights.habits import Habits
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource


# Reading this much that nobody wants costs less than a read of its own.
MAX_GAP = 64 << 10
# Bytes that nobody wants go here, from all threads at once.
_nowhere = memoryview(bytearray(MAX_GAP))


def sources_of(steps: Iterable[Step]) -> list[ByteSource]:
    """What these steps read from, each once."""
    return sources_in(info for step in steps for info in step_infos(step))


def sources_in(infos: Iterable[TensorInfo]) -> list[ByteSource]:
    """What these tensors lie in, each once."""
    return list({extent.source.name: extent.source for info in infos for extent in info.extents}.values())


def check_unchanged(sources: Iterable[ByteSource]) -> None:
    """Raise `SourceReadError` if a file is not what it was when it was catalogued."""
    for source in (source.origin for source in sources):
        if isinstance(source, FileSource):
            source.check_unchanged()


def reads_of(info: TensorInfo) -> int:
    """In how many positioned reads a tensor is read whole."""
    return sum(0 not in (extent.shape or ()) for extent in info.extents)


def read_runs(source: ByteSource, runs: Sequence[tuple[int, memoryview]]) -> None:
    """Fill views from runs of a source's bytes, at one go.

    Args:
        source: What is read.
        runs: Where each begins, in order, and what it fills. What lies between two, at most `MAX_GAP`, is read along
            and thrown away.
    """
    start = end = runs[0][0]
    views = []
    for offset, view in runs:
        if offset > end:
            views.append(_nowhere[: offset - end])
        views.append(view)
        end = offset + len(view)
    if len(views) == 1:
        source.read_into(views[0], start)
    else:
        source.read_vectors(views, start)


def habits_for(sources: Iterable[ByteSource], options: TransferOptions) -> Habits:
    """How these are read with these options."""
    habits = habits_of(sources, options.storage, past_page_cache=options.mode == "o_direct")
    return habits if options.threads is None else replace(habits, threads=options.threads)


def direct_reads(options: TransferOptions, threads: int) -> tuple[DirectReads | None, int]:
    """The way past the page cache, where it is asked for; and the extra memory that is left beside its buffers."""
    room = options.extra_memory
    if options.mode != "o_direct":
        return None, room
    direct = DirectReads(room // (8 * threads))
    # The caller's own thread reads, too.
    return direct, room - direct.buffer_bytes * (threads + 1)
