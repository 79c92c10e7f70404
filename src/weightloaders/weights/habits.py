"""How sources are read best, by what they lie on: how many at once, in how large pieces, with which advice."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from weightloaders.errors import ConfigError
from weightloaders.weights.source import FileSource
from weightloaders.weights.storage import Kind, storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightloaders.weights.source import ByteSource

VARIABLE = "WEIGHTLOADERS_STORAGE"
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Habits:
    """How sources are read.

    Attributes:
        kind: What they lie on.
        threads: Threads in all, at most.
        per_file: Readers of one file at one time, at most.
        chunk: Bytes asked for at once.
        sequential: Whether the system is told that files are read from front to back.
        why: How it is known what they lie on.
    """

    kind: Kind
    threads: int
    per_file: int
    chunk: int
    sequential: bool
    why: str = ""


_HABITS: Mapping[Kind, Habits] = {
    # A disk reads ahead for one reader a file; more threads than four gain nothing there.
    "local": Habits("local", threads=4, per_file=1, chunk=16 << 20, sequential=True),
    # A head can be in one place at one time.
    "rotational": Habits("rotational", threads=1, per_file=1, chunk=16 << 20, sequential=True),
    # What takes long is the way there and back, so many are on the way at once.
    "network": Habits("network", threads=16, per_file=8, chunk=16 << 20, sequential=True),
    # Nothing is waited for, and there is nothing to read ahead.
    "memory": Habits("memory", threads=64, per_file=64, chunk=16 << 20, sequential=False),
}


def habits_of(sources: Iterable[ByteSource], storage: Kind | None = None) -> Habits:
    """How sources that are read in one load are read: as befits the kind that most of their bytes lie on.

    Args:
        sources: What is read.
        storage: What they are to be taken for; None: as the environment variable ``WEIGHTLOADERS_STORAGE`` says, else
            as the system says.

    Raises:
        ConfigError: If the environment variable names no kind.
    """
    asked = storage or asked_for()
    kind, why = (asked, "as asked for") if asked else _most_of(sources)
    habits = _HABITS[kind]
    threads = habits.threads if kind == "network" else min(habits.threads, usable_processors())
    return replace(habits, threads=threads, per_file=min(habits.per_file, threads), why=why)


def asked_for() -> Kind | None:
    """What ``WEIGHTLOADERS_STORAGE`` says, if it is set.

    Raises:
        ConfigError: If it names no kind.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return None
    for kind in KINDS:
        if text == kind:
            return kind
    raise ConfigError(f"{VARIABLE} is {text!r}, which is no kind of storage", hint=f"set it to {', '.join(KINDS)}")


def _most_of(sources: Iterable[ByteSource]) -> tuple[Kind, str]:
    nbytes: Counter[tuple[Kind, str]] = Counter()
    by_device: dict[int, tuple[Kind, str]] = {}
    for source in sources:
        if isinstance(source, FileSource):
            device = source.identity[0]
            if device not in by_device:
                storage = storage_of(source.path)
                by_device[device] = (storage.kind, storage.why)
            nbytes[by_device[device]] += source.size
        else:
            nbytes["network", "no files"] += source.size
    return max(nbytes, key=lambda known: nbytes[known], default=("local", "nothing is read"))


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
