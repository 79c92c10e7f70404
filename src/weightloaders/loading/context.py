"""What one load was asked to do.

It travels in a context variable, so that a loader's two-argument ``load_weights`` override, and the
``super().load_weights(model, weights)`` in it, obey it.
"""

from __future__ import annotations

import contextlib
import time
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from weightloaders.plan import Policies
from weightloaders.transfer.device_map import CPU, DeviceMap
from weightloaders.transfer.options import TransferOptions
from weightloaders.transfer.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    import torch
    from torch import nn

    from weightloaders.mapping.rules import Rule
    from weightloaders.progress import ProgressOption
    from weightloaders.transfer.coverage import Covered
    from weightloaders.weights.source import ByteSource


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What one load was asked to do.

    Attributes:
        rules: The caller's rules.
        policies: What is done about what doesn't fit.
        device: Where meta parameters are materialised.
        progress: See `Progress`.
        verify: What is checked beside what is checked anyway.
        dtypes: The dtype of meta parameters where it is to differ from what the model says.
        loader: The loader's name, for the report.
        automatic: Whether names may be matched without being asked (see `mappers_for`).
        ties: Ties that the model declares, and that are made once its weights are in. Default: those of what is on
            meta now.
        transfer: How bytes are moved.
        phases: What the load's time went into so far, in seconds; see `LoadReport.phases`.
        compared: Files that were held against their checksums so far, with these; see `LoadReport.files`.
        unite: Where several processes fill a model together, each its part: makes of what this one did what they did
            together. Without it, it is not told there whether a tensor was cut to fit.
        companions: Files beside the weights that the model was made of: its config, its tokenizer.
    """

    rules: tuple[Rule, ...] = ()
    policies: Policies = field(default_factory=Policies)
    device: DeviceMap = CPU
    progress: ProgressOption = None
    verify: Verification = field(default_factory=Verification)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    loader: str | None = None
    automatic: bool = True
    ties: Mapping[str, str] | None = None
    transfer: TransferOptions = field(default_factory=TransferOptions)
    phases: dict[str, float] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    unite: Callable[[Covered], Covered] | None = None
    companions: list[ByteSource] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of this block to a phase of the load."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start

    def changed(self, **changes: Any) -> LoadContext:
        """The same with some fields changed."""
        return replace(self, **changes)


_current: ContextVar[tuple[nn.Module, LoadContext] | None] = ContextVar("weightloaders_load", default=None)
# A thread that a loader starts has none of its starter's context variables, but it has the model.
_running: MutableMapping[nn.Module, LoadContext] = WeakIdKeyDictionary()


def current_context(model: nn.Module) -> LoadContext:
    """What the load that this code runs in was asked to do; the defaults outside of one."""
    current = _current.get()
    if current is None:
        return _running.get(model) or LoadContext()
    # Another model, or a part of the model: what was said of parameters by their names does not hold there.
    return current[1] if current[0] is model else current[1].changed(dtypes={}, ties=None)


@contextlib.contextmanager
def within(context: LoadContext, model: nn.Module) -> Iterator[None]:
    """Make this the current load."""
    token, outer = _current.set((model, context)), _running.get(model)
    _running[model] = context
    try:
        yield
    finally:
        _current.reset(token)
        if outer is None:
            _running.pop(model, None)
        else:
            _running[model] = outer
