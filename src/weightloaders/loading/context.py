"""What one load was asked to do, and what is remembered of a model's last load.

What was asked travels in a context variable, so that a loader's two-argument ``load_weights`` override, and the
``super().load_weights(model, weights)`` in it, obey it.
"""

from __future__ import annotations

import contextlib
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from weightloaders.errors import HalfLoadedModelError
from weightloaders.plan import Policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn

    from weightloaders.mapping.rules import Rule
    from weightloaders.progress import ProgressOption
    from weightloaders.transfer.coverage import Coverage

Verify = Literal["finite", "sha256"]


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What one load was asked to do.

    Attributes:
        rules: The caller's rules.
        policies: What is done about what doesn't fit.
        device: Where meta parameters are materialised; default: the CPU.
        progress: See `Progress`.
        verify: ``"finite"`` or ``"sha256"``.
        dtypes: The dtype of parameters where it differs from what the model has now.
        initialise: Fills what the source leaves out, instead of the modules' own ``reset_parameters``.
        loader: The loader's name, for the report.
        coverage: The watch that this load runs under, if a loader's own code is being watched.
    """

    rules: tuple[Rule, ...] = ()
    policies: Policies = field(default_factory=Policies)
    device: torch.device | None = None
    progress: ProgressOption = None
    verify: Verify | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    initialise: Callable[[nn.Module, list[str]], None] | None = None
    loader: str | None = None
    coverage: Coverage | None = None

    def changed(self, **changes: Any) -> LoadContext:
        """The same with some fields changed."""
        return replace(self, **changes)


_current: ContextVar[LoadContext | None] = ContextVar("weightloaders_load", default=None)


def current_context() -> LoadContext:
    """What the load that this code runs in was asked to do; the defaults outside of one."""
    return _current.get() or LoadContext()


@contextlib.contextmanager
def within(context: LoadContext) -> Iterator[None]:
    """Make this the current load."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


# ------------------------------------------------------------------ the model's state

_status: weakref.WeakKeyDictionary[nn.Module, tuple[Literal["loaded", "failed"], str]] = weakref.WeakKeyDictionary()


def load_status(model: nn.Module) -> Literal["loaded", "failed"] | None:
    """Whether the last load into a model succeeded: ``"loaded"``, ``"failed"`` (it is half-loaded), or None."""
    state = _status.get(model)
    return None if state is None else state[0]


def check_usable(model: nn.Module) -> None:
    """Raise `HalfLoadedModelError` if the last load into a model failed on the way."""
    state = _status.get(model)
    if state is not None and state[0] == "failed":
        raise HalfLoadedModelError(
            f"this model is half-loaded: {state[1]}", hint="load it again, completely, before it is used or saved"
        )


@contextlib.contextmanager
def marking(model: nn.Module) -> Iterator[None]:
    """From the first write on a failure leaves a mark; success takes it away."""
    try:
        yield
    except BaseException as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        _status[model] = ("failed", text)
        raise
    _status[model] = ("loaded", "")
