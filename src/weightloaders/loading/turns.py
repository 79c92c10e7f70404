"""Who uses a model, and who writes its weights: each waits for the other. `nesting.alone` keeps loads apart."""

from __future__ import annotations

import contextlib
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from weightloaders.errors import ModelError
from weightloaders.hooks import is_before_or_after_load
from weightloaders.targets import modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_PAUSE = 0.02

# Held for a few steps, to take a turn. It is not waited with, as Ctrl-C would leave a `threading.Condition` locked; a
# turn is given back without it, as Ctrl-C may come while it is waited for; and a signal's handler may take turns, too.
_lock = threading.RLock()
# A turn -> its model.
_using: dict[object, nn.Module] = {}
_writing: dict[object, nn.Module] = {}
# The turns that this code runs within, in whichever of a load's threads it does.
_own: ContextVar[frozenset[object]] = ContextVar("weightloaders_turns", default=frozenset())


def forget_turns() -> list[nn.Module]:
    """In a forked child: the threads that have these turns are not there, and the lock may be held by one of them.

    Returns:
        The models that they were writing.
    """
    global _lock
    _lock = threading.RLock()
    cut_off = [*_writing.values()]
    _using.clear()
    _writing.clear()
    return cut_off


@contextlib.contextmanager
def using(model: nn.Module) -> Iterator[None]:
    """Use a model whose weights nobody writes meanwhile.

    Raises:
        ModelError: If this is called from within a load that is writing them, unless by a hook of the load.
    """
    turn, own = object(), _own.get()
    try:
        # Its own from the beginning: what a signal's handler asks for meanwhile must not wait for it.
        _own.set(own | {turn})
        while True:
            with _lock:
                others = _turns(_writing, model)
                if others & own and not is_before_or_after_load():
                    raise ModelError(
                        "this model is used from within a load into it: some of its weights are old and some new",
                        hint="use it when the load has returned, or in the hook after_load",
                    )
                # Who uses it already, or is asked by who writes it, must not wait for who waits for that to end.
                if not others or (others | _turns(_using, model)) & own:
                    _using[turn] = model
                    break
            time.sleep(_PAUSE)
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
        _own.set(own | {turn})
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
        yield
    finally:
        _writing.pop(turn, None)
        _own.set(_own.get() - {turn})


def _turns(turns: Mapping[object, nn.Module], model: nn.Module) -> set[object]:
    """Those of a model, of a part of it, of what it is a part of, or of what has tensors of it as well."""
    if not turns:
        return set()
    parts = _parts(model)
    return {turn for turn, other in list(turns.items()) if other is model or not parts.isdisjoint(_parts(other))}


def _parts(model: nn.Module) -> set[int]:
    """The identities of its modules, and of what they hold."""
    found = set()
    for _, module in modules_of(model):
        found |= {id(module), *map(id, module._parameters.values()), *map(id, module._buffers.values())}  # noqa: SLF001 -- as torch's own named_parameters() does
    return found - {id(None)}
