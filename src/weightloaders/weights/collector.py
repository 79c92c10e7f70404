"""`collector_paused`: Python's garbage collector kept out of the way while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector for the length of a block; of several on one or more threads, until the last of them ends.

    A catalogue or a plan of a hundred thousand tensors is a million new objects, none of them garbage; looking through
    them again and again takes as long as making them. Code of others, which may leave garbage that only the collector
    takes away, runs in a block of `collector_resumed` within it.
    """
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()


@contextlib.contextmanager
def collector_resumed() -> Iterator[None]:
    """Undo a pause for the length of a block."""
    with _lock:
        if _inside and _was_enabled:
            gc.enable()
    try:
        yield
    finally:
        with _lock:
            if _inside:
                gc.disable()
