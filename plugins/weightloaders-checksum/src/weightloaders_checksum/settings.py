"""What is asked for: by `configure` in this process, else by the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from weightloaders.errors import ConfigError

Unknown = Literal["warn", "error", "ignore"]

_LIST = "WEIGHTLOADERS_CHECKSUM_LIST"
_ROOT = "WEIGHTLOADERS_CHECKSUM_ROOT"
_UNKNOWN = "WEIGHTLOADERS_CHECKSUM_UNKNOWN"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for.

    Attributes:
        lists: Lists of checksums, asked before those that lie beside the files.
        root: What their names are relative to; None for each list's own folder.
        unknown: What is done about a file that nobody has a checksum of.
    """

    lists: tuple[Path, ...] = ()
    root: Path | None = None
    unknown: Unknown = "warn"


_configured: Settings | None = None


def configure(
    lists: str | Path | list[str | Path] | None = None, *, root: str | Path | None = None, unknown: Unknown = "warn"
) -> None:
    """Say for this process what the environment would say otherwise. Called without arguments: the defaults.

    Args:
        lists: One or several lists of checksums, as ``sha256sum`` writes them or in JSON (``.json``). They count before
            those that lie beside the files.
        root: What their names are relative to. Default: each list's own folder.
        unknown: What is done about a file that nobody has a checksum of: ``"warn"``, ``"error"`` (the load is refused)
            or ``"ignore"``.

    Raises:
        ConfigError: If ``unknown`` is none of these, or a path is none.
    """
    global _configured
    given = [] if lists is None else lists if isinstance(lists, list | tuple) else [lists]
    _configured = Settings(
        tuple(_path(path, "a list of checksums") for path in given),
        None if root is None else _path(root, "root"),
        _checked(unknown, "unknown"),
    )


def settings() -> Settings:
    """What is asked for now.

    Raises:
        ConfigError: If the environment asks for what there is not.
    """
    if _configured is not None:
        return _configured
    lists = [path for path in os.environ.get(_LIST, "").split(os.pathsep) if path]
    root = os.environ.get(_ROOT)
    return Settings(
        tuple(Path(path).expanduser() for path in lists),
        Path(root).expanduser() if root else None,
        _checked(os.environ.get(_UNKNOWN) or "warn", f"the environment variable {_UNKNOWN}"),
    )


def _path(value: object, what: str) -> Path:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{what} is given by its path, not as {value!r}")
    return Path(value).expanduser()


def _checked(value: object, what: str) -> Unknown:
    for allowed in get_args(Unknown):
        if value == allowed:
            found: Unknown = allowed
            return found
    raise ConfigError(f"{what} is {value!r}: 'warn', 'error' or 'ignore' is expected")
