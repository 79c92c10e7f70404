"""`DeviceMap`: which parameter goes to which device, as transformers' ``device_map`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.discovery import did_you_mean
from weightloaders.errors import ConfigError
from weightloaders.targets import held_by
from weightloaders.transfer.devices import usable_device
from weightloaders.weights.texts import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import nn

# A device for all, or devices by the names of modules.
DeviceOption = torch.device | str | int | Mapping[str, torch.device | str | int] | None
# What transformers calls the ways to find a map by itself.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_FORM = "a device, or a dict of module names, '' for all the rest, to devices: {'model.embed_tokens': 0, '': 'cpu'}"


class DeviceMap:
    """Where parameters go: by the name of a module, or their own. Of several that fit, the longest counts.

    Args:
        entries: Name -> device; the empty name fits all.
        said: How errors call it.
        strategy: How the entries are to be found once the model is known, where there are none yet.

    Attributes:
        entries: See above.
        strategy: See above.
        devices: The devices, each once.
    """

    def __init__(self, entries: Mapping[str, torch.device], said: str = "device_map", strategy: str = "") -> None:
        self.entries = dict(entries)
        self.strategy = strategy
        self.devices = tuple(dict.fromkeys(self.entries.values()))
        self._said = said

    @classmethod
    def of(cls, value: Any, said: str = "device_map") -> DeviceMap:
        """The map that a user means.

        Args:
            value: A device, as torch takes it; a mapping of names to devices; or, where a ``device_map`` is asked for,
                one of `STRATEGIES`.
            said: What the argument is called.

        Raises:
            ConfigError: If it is neither, or there is no such device here.
        """
        if said == "device_map" and isinstance(value, str) and value in STRATEGIES:
            return cls({}, said, value)
        if not isinstance(value, Mapping):
            return cls({"": _device(value, said)}, said)
        odd = [name for name in value if not isinstance(name, str)]
        if odd or not value:
            raise ConfigError(f"{said}={brief(value)}: a dict of module names is expected", hint=f"{said} is {_FORM}")
        return cls({name: _device_of_entry(name, device, said) for name, device in value.items()}, said)

    def device_of(self, name: str) -> torch.device:
        """The device of a parameter or buffer.

        Raises:
            ConfigError: If no entry fits.
        """
        prefix = name
        while True:
            if prefix in self.entries:
                return self.entries[prefix]
            if not prefix:
                raise ConfigError(
                    f"{self._said} says nothing of {name!r}",
                    tensor=name,
                    hint="add it, or a module that it is in, or '' for all that is not named",
                )
            prefix = prefix.rpartition(".")[0]

    def by_device(self, names: Iterable[str]) -> dict[torch.device, list[str]]:
        """The names that go to each device.

        Raises:
            ConfigError: If no entry fits one of them.
        """
        if len(self.devices) == 1 and "" in self.entries:
            return {self.devices[0]: list(names)}
        found: dict[torch.device, list[str]] = {}
        for name in names:
            found.setdefault(self.device_of(name), []).append(name)
        return found

    def move(self, model: nn.Module) -> None:
        """Move a model that has values already."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(self.device_of(name))

    def check(self, model: nn.Module, names: Collection[str], ties: Callable[[], Mapping[str, str]]) -> None:
        """Refuse a map that can't be followed.

        Args:
            model: The model.
            names: Those of its parameters and buffers that need a device.
            ties: Those that are one with another, to the name of the other.

        Raises:
            ConfigError: If no entry fits one of them, an entry is of nothing that the model has, or what is tied would
                be on two devices.
        """
        if self.entries.keys() == {""}:
            return
        known = {name for name, _ in model.named_modules(remove_duplicate=False)}
        known.update(held_by(model).everything)
        for name in self.entries:
            if name not in known:
                raise ConfigError(
                    f"{self._said}: the model has no module or parameter {name!r}{did_you_mean(name, known)}",
                    tensor=name,
                )
        tied = ties() if len(self.by_device(names)) > 1 else {}
        for name in names:
            where = self.device_of(name)
            other = tied.get(name, name)
            if other != name and self.device_of(other) != where:
                raise ConfigError(
                    f"{self._said} puts {name!r} on {where} and {other!r} on {self.device_of(other)}, but they are "
                    "tied, and one parameter can't be on two devices",
                    tensor=name,
                    hint="put both on one device",
                )


CPU = DeviceMap({"": torch.device("cpu")})


def _device(value: Any, said: str) -> torch.device:
    try:
        return usable_device(value, said)
    except ConfigError as error:
        strategy = did_you_mean(str(value), STRATEGIES) if said == "device_map" else ""
        raise ConfigError(f"{error.message}{strategy}", hint=error.hint) from error


def _device_of_entry(name: str, device: Any, said: str) -> torch.device:
    if device == "disk":
        raise ConfigError(
            f"{said}: {name!r} is to stay on disk, and weights are not loaded to be left there",
            hint="name 'cpu' instead, or load with transformers' own from_pretrained(offload_folder=...)",
        )
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise ConfigError(
            f"{said}: {name!r} can't go to {brief(device)}, which is no device", hint=f"{said} is {_FORM}"
        )
    try:
        return usable_device(device)
    except ConfigError as error:
        raise ConfigError(f"{said}: {name!r} can't go there: {error.message}", hint=error.hint) from error
