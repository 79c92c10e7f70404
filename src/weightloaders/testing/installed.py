"""`only_plugins`: of all that is installed, the plugins that a test is about."""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

from weightloaders.discovery import canonical
from weightloaders.testing.isolation import isolated_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightloaders.registry import WeightLoaderRegistry


@contextlib.contextmanager
def only_plugins(*distributions: str) -> Iterator[type[WeightLoaderRegistry]]:
    """Hide the installed plugins of other distributions for the length of a block, in this process.

    A test is then the same whatever else is installed: no other plugin's hook takes part in its loads. What the block
    itself installs (`fake_distribution`) is seen. Includes `isolated_registry`.

    Args:
        distributions: Names of those whose plugins are seen, e.g. ``"weightloaders-npz"``.

    Yields:
        `WeightLoaderRegistry`.
    """
    seen = {"weightloaders", *map(canonical, distributions)}
    hidden = {_identity(d) for d in metadata.Distribution.discover() if _is_plugin(d) and canonical(d.name) not in seen}

    def visible(**where: Any) -> Iterator[metadata.Distribution]:
        return (d for d in metadata.Distribution.discover(**where) if _identity(d) not in hidden)

    with mock.patch.object(metadata, "distributions", visible), isolated_registry() as registry:
        yield registry


def _is_plugin(distribution: metadata.Distribution) -> bool:
    return "weightloaders." in (distribution.read_text("entry_points.txt") or "")


def _identity(distribution: metadata.Distribution) -> tuple[str | None, str]:
    # Of a damaged distribution nobody knows the name, but it lies somewhere.
    return getattr(distribution, "name", None), str(distribution.locate_file(""))
