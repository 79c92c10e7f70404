"""What the operating system refuses, told as an error of ours: with its reason, and what can be done about it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from weightloaders.errors import SourceReadError

if TYPE_CHECKING:
    from pathlib import Path

_FETCH = "fetch it again, or name another place"
_DISK = "the disk, or the way to it, fails: see the system's log, and read another copy"
_ADVICE = {
    "EACCES": "let this user read it",
    "EPERM": "let this user read it",
    "ENOENT": _FETCH,
    "ENOTDIR": _FETCH,
    "ELOOP": _FETCH,
    "ENAMETOOLONG": _FETCH,
    "EMFILE": "the process has too many files open: close some, or allow more (ulimit -n)",
    "ENFILE": "the system has too many files open: close some",
    "ENOMEM": "free memory, or let the process have more of it (ulimit -v, the container's limit)",
    "ESTALE": "the file was replaced on its server: load again",
    "EIO": _DISK,
    "ENXIO": _DISK,
    "ENODEV": _DISK,
    "ETIMEDOUT": _DISK,
}
_OTHERWISE = "see to what the system says, then load again"


def advice(error: OSError) -> str:
    """What can be done about it, as a phrase."""
    return _ADVICE.get(errno.errorcode.get(error.errno or 0, ""), _OTHERWISE)


def unreadable(what: str, error: OSError, file: str | Path, *, at: int | None = None) -> SourceReadError:
    """The error for a file or folder that can't be read.

    Args:
        what: What could not be done, e.g. ``"can't open model.safetensors"``.
        error: What the system said.
        file: Which it is.
        at: The byte at which reading failed.
    """
    return SourceReadError(f"{what}: {error.strerror or error}", at=at, file=file, hint=advice(error))
