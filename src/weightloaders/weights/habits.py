"""How sources are read best, by what they lie on."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from weightloaders.errors import ConfigError
from weightloaders.weights.source import FileSource
from weightloaders.weights.storage import Kind, storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.weights.source import ByteSource

VARIABLE = "WEIGHTLOADERS_STORAGE"
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Habits:
    """How sources are read.

    Attributes:
        kind: What they lie on.
        why: How that is known.
        threads: How many threads read, at most.
    """

    kind: Kind
    why: str
    threads: int


def habits_of(sources: Iterable[ByteSource], storage: Kind | None = None, *, past_page_cache: bool = False) -> Habits:
    """How sources that are read in one load are read: as befits the kind that most of their bytes lie on.

    Args:
        sources: What is read.
        storage: What they are to be taken for; None: as the environment variable ``WEIGHTLOADERS_STORAGE`` says, else
            as the system says.
        past_page_cache: Whether they are read past the page cache.

    Raises:
        ConfigError: If the environment variable names no kind.
    """
    asked = storage or asked_for()
    kind, why = (asked, "as asked for") if asked else _most_of(sources)
    return Habits(kind, why, _threads(kind, past_page_cache))


def _threads(kind: Kind, past_page_cache: bool) -> int:
    processors = usable_processors()
    return {
        # Copying keeps a processor busy, and a few readers keep a disk busy. More of them defeat its reading ahead.
        # Past the page cache nothing is read ahead and hardly anything copied: there they only wait.
        "local": 4 if past_page_cache else min(processors, 4),
        # The head can be in one place at one time.
        "rotational": 1,
        # What takes long is the way there and back. So many are on the way at once, and most of them only wait.
        "network": 16,
        # Nothing is waited for, so there is work for each processor; beyond this, memory itself is the limit.
        "memory": min(processors, 16),
    }[kind]


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
    for source in (source.origin for source in sources):
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
