"""Help for the tests of loader authors: a suite to inherit, tiny checkpoints, an isolated registry, distributions.

The names are resolved on first use: importing this imports neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightloaders.testing.conformance import LoaderConformance as LoaderConformance
    from weightloaders.testing.distributions import fake_distribution as fake_distribution
    from weightloaders.testing.installed import only_plugins as only_plugins
    from weightloaders.testing.isolation import isolated_registry as isolated_registry
    from weightloaders.testing.tiny import tiny_checkpoint as tiny_checkpoint
    from weightloaders.testing.tiny import tiny_tensors as tiny_tensors

_HOMES = {
    "LoaderConformance": "weightloaders.testing.conformance",
    "fake_distribution": "weightloaders.testing.distributions",
    "isolated_registry": "weightloaders.testing.isolation",
    "only_plugins": "weightloaders.testing.installed",
    "tiny_checkpoint": "weightloaders.testing.tiny",
    "tiny_tensors": "weightloaders.testing.tiny",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'weightloaders.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
