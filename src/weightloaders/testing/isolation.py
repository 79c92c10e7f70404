"""`isolated_registry`: what a test registers is gone when it ends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from weightloaders import hooks
from weightloaders.registry import WeightLoaderRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def isolated_registry() -> Iterator[type[WeightLoaderRegistry]]:
    """The registry, for a block that may register what it likes and in which hook plugins are looked for anew.

    The registry belongs to the process: tests that use this must not run in several threads at once.

    Yields:
        `WeightLoaderRegistry`.
    """
    with WeightLoaderRegistry.isolated(), hooks.isolated():
        yield WeightLoaderRegistry
