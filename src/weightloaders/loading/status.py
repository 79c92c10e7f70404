"""What is remembered of a model's last load: what it was loaded from, or that it failed on the way.

A model that a failed load left half-loaded is not used or saved.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch.utils.weak import WeakIdKeyDictionary

from weightloaders.errors import HalfLoadedModelError, LoadError, WeightLoadersError
from weightloaders.loading.turns import forget_turns, using, writing
from weightloaders.plan import listed
from weightloaders.targets import modules_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, MutableMapping

    from torch import nn

    from weightloaders.loading.origin import Origin

# Where a module keeps why it is half-loaded, and what was written: a copy of such a model, pickled or not, is one too.
_FAILED = "_weightloaders_failed"
# By identity, and held weakly: it must neither keep a model alive nor depend on how it compares.
_loaded: MutableMapping[nn.Module, Origin | None] = WeakIdKeyDictionary()


def _after_fork() -> None:
    for model in forget_turns():
        for _, module in modules_of(model):
            vars(module)[_FAILED] = "another thread was loading it when this process was forked", ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class Mark:
    """What a load says of itself.

    Attributes:
        touched: Whether it has touched its model yet.
        origin: What it loaded the model from, where that can be told.
        written: The parameters that it has written, in whole or in part, as far as its error doesn't say so.
    """

    touched: bool = False
    origin: Origin | None = None
    written: Collection[str] = ()


@contextlib.contextmanager
def marking(model: nn.Module) -> Iterator[Mark]:
    """A failure after the model was touched leaves a mark on it and its parts; success takes it away.

    Whoever loads says so when the model is touched. Those that use the model end before that, or begin after it.

    Raises:
        ModelError: If this thread itself is using the model.
    """
    with writing(model):
        yield from _marked(model)


def _marked(model: nn.Module) -> Iterator[Mark]:
    mark = Mark()
    try:
        yield mark
    except BaseException as error:
        if mark.touched:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            written = tuple(sorted(error.written if isinstance(error, LoadError) else mark.written))
            for _, module in modules_of(model):
                vars(module)[_FAILED] = why, written
            if not isinstance(error, WeightLoadersError):
                # Ctrl-C, which has no place for it.
                error.add_note(f"the model is half-loaded: {listed(written) if written else 'none'} written so far")
            _loaded.pop(model, None)
        raise
    for _, module in modules_of(model):
        vars(module).pop(_FAILED, None)
    _loaded[model] = mark.origin


def _reason(model: nn.Module) -> tuple[str, tuple[str, ...]] | None:
    # A wrapper is as usable as what it wraps.
    return next((vars(module)[_FAILED] for _, module in modules_of(model) if _FAILED in vars(module)), None)


def load_status(model: nn.Module) -> Literal["loaded", "failed"] | None:
    """How the last load into a model went: ``"loaded"``, ``"failed"`` (it is half-loaded), or None (there was none)."""
    if _reason(model) is not None:
        return "failed"
    return "loaded" if model in _loaded else None


def load_origin(model: nn.Module) -> Origin | None:
    """What a model was last loaded from; None where that can't be told, or there was no load."""
    return _loaded.get(model)


@contextlib.contextmanager
def usable(model: nn.Module) -> Iterator[None]:
    """Use a model; a load into it that is running is waited for, and one that comes waits.

    Raises:
        HalfLoadedModelError: If the last load into the model, or into a part of it, failed on the way.
        ModelError: If this is called from within a load into it.
    """
    with using(model):
        check_usable(model)
        yield


def check_usable(model: nn.Module) -> None:
    """Raise `HalfLoadedModelError` if the last load into a model, or into a part of it, failed on the way."""
    reason = _reason(model)
    if reason is not None:
        why, written = reason
        raise HalfLoadedModelError(
            f"this model is half-loaded: {why}",
            written=written,
            hint="load it again, completely, before it is used or saved",
        )
