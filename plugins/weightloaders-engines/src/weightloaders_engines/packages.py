"""The packages of the engines: imported when a loader needs one, and what they raise told in our errors."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from weightloaders.errors import MissingDependencyError, SourceReadError, WeightLoadersError, summary

if TYPE_CHECKING:
    from collections.abc import Iterator


def needed(module: str, extra: str) -> Any:
    """Import an engine's module.

    Args:
        module: Its name.
        extra: The extra of this distribution that brings it.

    Raises:
        MissingDependencyError: If it can't be imported; with the extra to install.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # an OSError: a library of the system's that it lacks
        raise MissingDependencyError(
            f"the loader {extra!r} needs the package {module!r}, which can't be imported: {summary(error)}",
            hint=f"pip install 'weightloaders-engines[{extra}]'",
        ) from error


@contextlib.contextmanager
def reading(engine: str, file: str) -> Iterator[None]:
    """Turn whatever an engine raises within the block into an error of ours that names the file."""
    try:
        yield
    except (WeightLoadersError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise SourceReadError(
            f"{engine} can't read {file}: {summary(error)}",
            file=file,
            hint="the loader 'auto' reads it without that library, and says more about what is wrong with a file",
        ) from error
