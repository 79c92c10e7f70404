"""Who uses a model, and who writes its weights: each waits for the other. `alone` keeps two loads apart."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from weightloaders.errors import ModelError
from weightloaders.targets import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_PAUSE = 0.02

# Held for a few steps, to take a turn. It is not waited with, as Ctrl-C would leave a `threading.Condition` locked;
# and a turn is given back without it, as Ctrl-C may come while it is waited for.
_lock = threading.Lock()
# A turn -> its model.
_using: dict[object, nn.Module] = {}
_writing: dict[object, nn.Module] = {}
# The turns that this code runs within, in whichever of a load's threads it does.
_own: ContextVar[frozenset[object]] = ContextVar("weightloaders_turns", default=frozenset())


def _forget_turns() -> None:
    # In a forked child: the threads that have these turns are not there, and the lock may be held by one of them.
    global _lock
    _lock = threading.Lock()
    _using.clear()
    _writing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turns)


@contextlib.contextmanager
def using(model: nn.Module) -> Iterator[None]:
    """Use a model whose weights nobody writes meanwhile.

    Raises:
        ModelError: If this is called from within a load that is writing them.
    """
    turn, own = object(), _own.get()
    try:
        while True:
            with _lock:
                others = _turns(_writing, model)
                if others & own:
                    raise ModelError(
                        "this model is used from within a load into it: some of its weights are old and some new",
                        hint="use it when the load has returned, or in the hook after_load",
                    )
                # Who uses it already must not wait for who waits for that to end.
                if not others or _turns(_using, model) & own:
                    _using[turn] = model
                    break
            time.sleep(_PAUSE)
        _own.set(own | {turn})
        yield
    finally:
        _using.pop(turn, None)
        _own.set(_own.get() - {turn})


@contextlib.contextmanager
def writing(model: nn.Module) -> Iterator[None]:
    """Write a model's weights, when those that use it have ended; who comes later waits.

    Raises:
        ModelError: If this is called from within what uses the model.
    """
    turn, own = object(), _own.get()
    try:
        with _lock:
            if _turns(_using, model) & own:
                raise ModelError(
                    "weights are loaded from within what uses the model, which would go on with others",
                    hint="load them when generate, or save_weights, has returned",
                )
            _writing[turn] = model
        # Not for others that write: a load may have its parts written by threads of its own.
        while _turns(_using, model):
            time.sleep(_PAUSE)
        _own.set(own | {turn})
        yield
    finally:
        _writing.pop(turn, None)
        _own.set(_own.get() - {turn})


def _turns(turns: Mapping[object, nn.Module], model: nn.Module) -> set[object]:
    """Those of a model, of a part of it, or of what it is a part of."""
    if not turns:
        return set()
    parts = {id(module) for _, module in modules_of(model)}
    return {
        turn
        for turn, other in list(turns.items())
        if other is model or any(id(module) in parts for _, module in modules_of(other))
    }
