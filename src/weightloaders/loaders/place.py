"""What a model's name stands for: a place on disk, or a repository on the hub."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from weightloaders.errors import SourceNotFoundError
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import names_weights
from weightloaders.weights.folder import A_FOLDER, kind_of, path_of
from weightloaders.weights.http import is_web_address

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)

_SCHEME = "hf://"
# As huggingface_hub's `validate_repo_id` has it.
_REPOSITORY = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)


class Place(NamedTuple):
    """What a name stands for.

    Attributes:
        path: A folder or file on disk; None for a repository.
        repository: The repository's id; empty for a place on disk.
        revision: The revision that the name itself gives.
        note: What was decided, where the name could have meant the other.
        passed_over: The place here of a repository's name, where what is wanted is not.
    """

    path: Path | None
    repository: str = ""
    revision: str | None = None
    note: str = ""
    passed_over: Path | None = None


def as_name(source: str | Path) -> str:
    """A source as text that means the same: a path stays a place on disk, where a bare name may be a repository.

    Raises:
        SourceNotFoundError: If it is empty.
    """
    text = os.fspath(source)
    if not text:
        raise SourceNotFoundError("the name of the source is empty", hint="the working directory is called '.'")
    if isinstance(source, str) or source.is_absolute() or text.startswith((".", "~")):
        return text
    return os.path.join(".", text)  # noqa: PTH118 -- a Path would drop the dot


def looks_like_repository(name: str) -> bool:
    """Whether a name has the form of a repository's id, or says with ``hf://`` that it is one."""
    # model.safetensors has that form too, but somebody who writes this means a file.
    return name.startswith(_SCHEME) or (_is_repository_id(name) and not names_weights(name))


def _is_repository_id(name: str) -> bool:
    return _REPOSITORY.fullmatch(name) is not None and not re.search(r"--|\.\.|\.git$", name)


def locate(name: str | Path, holds: Callable[[Path], bool]) -> Place:
    """Decide whether a name means a place on disk or a repository.

    ``hf://org/name`` (or ``hf://org/name@revision``) is a repository; ``./x``, ``../x``, ``~/x``, absolute paths and
    `Path` objects are places on disk. A bare ``org/name`` is a folder if there is one that holds what is wanted, else a
    repository.

    Args:
        name: What the user gave.
        holds: Whether a folder holds what is wanted.

    Raises:
        SourceNotFoundError: If it can be neither.
    """
    text = as_name(name)
    if text.startswith(_SCHEME):
        return _address(text)
    if is_web_address(text):
        raise SourceNotFoundError(
            f"{shown(text)} is neither a folder nor a repository on the hub, but a web address",
            file=shown(text),
            hint="web addresses are read by the loader 'http'",
        )
    path = path_of(text)
    kind = kind_of(path)
    if kind is None or path.is_absolute() or text.startswith((".", "~")):
        return Place(path)
    if not looks_like_repository(text):
        if kind == A_FOLDER:
            return Place(path)
        if _is_repository_id(text):
            raise SourceNotFoundError(
                f"{text} {kind}", file=text, hint=f"{_SCHEME}{text} means a repository on the hub"
            )
        raise SourceNotFoundError(
            f"{text} {kind}, and it has not the form of a repository on the hub (org/name) either", file=text
        )
    if kind == A_FOLDER and holds(path):
        note = f"{text} is a folder here, and was used; hf://{text} means the repository on the hub"
        logger.info("%s", note)
        return Place(path, note=note)
    if kind == A_FOLDER:
        note = f"{text} is a folder here, but without what is wanted, so the repository on the hub is meant"
        note += f"; ./{text} means the folder"
        logger.warning("%s", note)
        return Place(None, text, note=note, passed_over=path)
    return Place(None, text, passed_over=path)


def _address(text: str) -> Place:
    repository, _, revision = text.removeprefix(_SCHEME).removesuffix("/").partition("@")
    if not _is_repository_id(repository):
        raise SourceNotFoundError(
            f"{text} is no address of a repository",
            file=text,
            hint="write hf://org/name or hf://org/name@revision; a folder in it is an option: subfolder=...",
        )
    return Place(None, repository, revision or None)
