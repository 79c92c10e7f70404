"""What a transfer reads from, and how that is read best."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightloaders.plan import Step, step_infos
from weightloaders.weights.direct_io import DirectReads
from weightloaders.weights.habits import habits_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.transfer.options import TransferOptions
    from weightloaders.weights.habits import Habits
    from weightloaders.weights.source import ByteSource


def sources_of(steps: Iterable[Step]) -> list[ByteSource]:
    """What these steps read from, each once."""
    sources = {e.source.name: e.source for step in steps for info in step_infos(step) for e in info.extents}
    return list(sources.values())


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
