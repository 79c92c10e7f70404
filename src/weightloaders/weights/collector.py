"""`collector_paused`: Python's garbage collector kept out of the way while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector for the length of a block.

    A catalogue or a plan of a hundred thousand tensors is a million new objects, none of them garbage; looking through
    them again and again takes as long as making them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
