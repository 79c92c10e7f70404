"""Before any byte moves: memory for what is on meta, and first values for what the source leaves out.

The values are those that the model itself would start with: transformers' ``initialize_weights``, or a module's
``reset_parameters``. Nothing is ever left as raw memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import ModelError
from weightloaders.mapping import transformers as hf
from weightloaders.targets import held_by
from weightloaders.transfer.coverage import Coverage
from weightloaders.transfer.materialising import allocate, materialise
from weightloaders.transfer.memory import advise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from weightloaders.loading.status import Mark
    from weightloaders.targets import Targets
    from weightloaders.transfer.device_map import DeviceMap


@dataclass(slots=True)
class Prepared:
    """What was done to the model before the first byte moved.

    Attributes:
        initialised: Parameters that were given their first values.
        replaced: Parameters that are new objects.
    """

    initialised: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


def can_initialise(model: nn.Module, name: str) -> bool:
    """Whether the model itself can give a parameter or buffer its first value."""
    return _is_transformers(model) or callable(getattr(_owner(model, name), "reset_parameters", None))


class Groundwork:
    """What has to be done to a model before the first byte moves. Making one touches nothing; `lay` does it.

    Args:
        model: The model.
        targets: What it wants filled.
        devices: Where what is on meta goes.
        dtypes: The dtype of parameters where it differs from the meta parameter's.
        gaps: Parameters that the source leaves out.
        tied: Parameters whose value comes with another's.
        certain: Whether the gaps are known. Else they are what may turn out to be left out.

    Attributes:
        raw: Possible gaps that nobody can initialise: whoever loads has to see to it that they are filled.

    Raises:
        ModelError: If something on meta would be left without a value.
        ConfigError: If something on meta is to go to no device, or what is tied to two.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        devices: DeviceMap,
        dtypes: Mapping[str, torch.dtype],
        gaps: Iterable[str],
        tied: Iterable[str] = (),
        *,
        certain: bool = True,
    ) -> None:
        if any(where.type == "meta" for where in devices.devices):
            raise ModelError(
                "weights can't be loaded onto the meta device", hint="name a real device, e.g. device='cpu'"
            )
        self._model, self._targets, self._devices, self._dtypes = model, targets, devices, dtypes
        # A declared tie is made when the model is finalised; until then its meta parameter stays.
        later = set(tied) & targets.declared_partners().keys()
        self._on_meta = {
            name: target.tensor
            for name, target in targets.by_name.items()
            if target.tensor.is_meta and name not in later
        }
        gaps = [name for name in gaps if name in self._on_meta]
        self._computed = {
            name: buffer for name, buffer in targets.derived.items() if name not in self._on_meta and buffer.is_meta
        }
        self._check_devices(devices)
        self.raw = {name for name in gaps if not can_initialise(model, name)}
        helpless = [*(self.raw if certain else ()), *(n for n in self._computed if not can_initialise(model, n))]
        if helpless:
            raise _without_value(model, helpless[0])
        self._gaps = [name for name in gaps if name not in self.raw]

    def _check_devices(self, devices: DeviceMap) -> None:
        if self._on_meta and hasattr(self._model, "hf_device_map"):
            raise ModelError(
                "parts of this model were put aside by accelerate, and are not where they would be filled",
                hint="build and load the model anew, e.g. by from_pretrained(..., device_map=...)",
            )
        # The value of one that is tied later comes with the other's, and so does its device.
        on_meta = {name: None for name, target in self._targets.by_name.items() if target.tensor.is_meta}
        devices.check(self._model, (*on_meta, *self._computed), self._targets.ties)

    @property
    def needed(self) -> bool:
        """Whether anything has to be done."""
        return bool(self._on_meta or self._computed)

    def lay(self, mark: Mark, made: Mapping[int, torch.Tensor] | None = None) -> Prepared:
        """Do it.

        Args:
            mark: Told when the model is touched.
            made: By the identity of what is on meta, what comes into its place and is made already.

        Raises:
            ModelError: If there is not enough memory, or a module does not initialise what only it could.
        """
        advise(target.tensor for target in self._targets.by_name.values())
        if not self.needed:
            return Prepared()
        raw = {**self._on_meta, **self._computed}
        twins = dict(made or {})
        lacking_memory = {name: tensor for name, tensor in raw.items() if id(tensor) not in twins}
        for where, names in self._devices.by_device(lacking_memory).items():
            twins |= allocate({name: raw[name] for name in names}, where, self._dtypes)
        # The values that a module starts with touch it, too.
        advise(twins.values())
        mark.touched = True
        lacking = {**{name: self._on_meta[name] for name in self._gaps}, **self._computed}
        with _kept(self._model, {id(tensor) for tensor in raw.values()}, lacking):
            replaced = materialise(self._model, raw, twins)
            if lacking:
                self._initialise(lacking)
        return Prepared(list(self._gaps), replaced)

    def _initialise(self, names: Mapping[str, Any]) -> None:
        now = held_by(self._model).everything
        with Coverage({name: now[name] for name in names}, any_values=True) as watch:
            if _is_transformers(self._model):
                _initialise_transformers(self._model, set(names))
            else:
                for prefix in dict.fromkeys(name.rpartition(".")[0] for name in names):
                    _reset(self._model.get_submodule(prefix), prefix)
        left = watch.finish(self._model).missing
        if left:
            raise _without_value(self._model, left[0])


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _without_value(model: nn.Module, name: str) -> ModelError:
    owner = type(_owner(model, name)).__name__
    how = "has no reset_parameters() that could" if not can_initialise(model, name) else "does not initialise it"
    return ModelError(
        f"{name} is on the meta device, the source does not fill it, and {owner} {how}",
        tensor=name,
        hint="build the model on a real device, or give the module a reset_parameters() that fills it",
    )


def _reset(module: nn.Module, name: str) -> None:
    try:
        module.reset_parameters()  # type: ignore[operator]
    except Exception as error:
        who = f"{type(module).__name__}.reset_parameters()" + (f" of {name}" if name else "")
        raise ModelError(f"{who} failed: {type(error).__name__}: {error}") from error


def _is_transformers(model: Any) -> bool:
    return hf.is_transformers_model(model) and callable(getattr(model, "initialize_weights", None))


def _initialise_transformers(model: Any, names: set[str]) -> None:
    """Give these their first values as transformers does: it leaves alone what carries its mark."""
    for module in model.modules():
        module._is_hf_initialized = False  # noqa: SLF001 -- transformers' own mark; a model built on meta carries it
    for name, tensor in held_by(model).everything.items():
        tensor._is_hf_initialized = name not in names  # type: ignore[attr-defined]  # noqa: SLF001 -- as above
    try:
        model.initialize_weights()
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__}.initialize_weights() failed: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _kept(model: nn.Module, on_meta: set[int], lacking: Iterable[str]) -> Iterator[None]:
    """``reset_parameters`` initialises all that a module has; what has a value already keeps it."""
    owners = {} if _is_transformers(model) else {id(m): m for m in (_owner(model, name) for name in lacking)}
    real = {
        id(tensor): tensor
        for owner in owners.values()
        for tensor in (*owner.parameters(), *owner.buffers())
        if id(tensor) not in on_meta
    }
    values = {key: tensor.detach().clone() for key, tensor in real.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for key, tensor in real.items():
                tensor.copy_(values[key])
