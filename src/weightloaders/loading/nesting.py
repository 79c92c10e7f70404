"""Which loads run: one at a time into a model, and what code that fills a model asks for belongs to its own load."""

from __future__ import annotations

import contextlib
import os
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from weightloaders.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from weightloaders.transfer.coverage import Coverage

_watches: ContextVar[tuple[tuple[nn.Module, Coverage], ...]] = ContextVar("weightloaders_watches", default=())
# A load -> the model that it is of.
_loading: dict[object, nn.Module] = {}
_lock = threading.RLock()


def _forget_loads() -> None:
    # In a forked child: the threads that were loading are not there, and the lock may be held by one of them.
    global _lock
    _lock = threading.RLock()
    _loading.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loads)


def active_watches() -> list[Coverage]:
    """The watches that this code runs under."""
    return [watch for _, watch in _watches.get()]


def is_nested(model: nn.Module) -> bool:
    """Whether this load is part of another one of the same model."""
    return any(watched is model for watched, _ in _watches.get())


@contextlib.contextmanager
def watching(model: nn.Module, watch: Coverage) -> Iterator[None]:
    """Watch a model be filled."""
    token = _watches.set((*_watches.get(), (model, watch)))
    try:
        with watch:
            yield
    finally:
        _watches.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Code that is told of a load, and is no part of it."""
    token = _watches.set(())
    try:
        yield
    finally:
        _watches.reset(token)


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Keep other loads out of a model meanwhile; two at once would mix their values.

    Raises:
        LoadError: If another load of this model is running.
    """
    if is_nested(model):
        yield
        return
    own = object()
    try:
        # Within the block, and taken away in one step, as Ctrl-C may come behind any.
        with _lock:
            if any(other is model for other in list(_loading.values())):
                raise LoadError(
                    "a load of this model is running, and a second one at the same time would mix their values",
                    hint="wait until the first one has ended, or load into another copy of the model",
                )
            _loading[own] = model
        yield
    finally:
        _loading.pop(own, None)
