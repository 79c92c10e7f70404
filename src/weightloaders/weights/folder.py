"""A folder on disk as a listing, and where links in it may lead."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import stat
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weightloaders.errors import (
    ModelError,
    SourceNotFoundError,
    SourceReadError,
    UnsafeCheckpointError,
    WeightLoadersError,
)
from weightloaders.weights.file_names import family_of
from weightloaders.weights.index import MAX_INDEX_BYTES
from weightloaders.weights.source import FileSource
from weightloaders.weights.system_errors import unreadable
from weightloaders.weights.texts import read_small_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_REPOSITORY_FOLDER = re.compile(r"(models|datasets|spaces)--.+")
# huggingface_hub may keep one copy for all repositories; this file marks the folder as its own.
_SHARED_STORE_MARK = ".huggingface-shared-blobs"


def path_of(text: str | Path) -> Path:
    """A path on this machine, a home folder (``~``) spelt out; as it is where there is no such user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 -- `Path.expanduser` fails where there is no such user


@contextlib.contextmanager
def temporary_folder(what: str, file: str | Path) -> Iterator[Path]:
    """A new folder outside of all caches, to be written within the block.

    It is gone when the process ends, and no sooner: whoever is told of it may outlive whoever made it.

    Args:
        what: What is written there, for messages.
        file: Where that comes from.

    Raises:
        ModelError: If it can't be made or written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="weightloaders-"))
        _temporary.add(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        yield folder
    except WeightLoadersError:
        raise
    except OSError as error:
        raise ModelError(
            f"{what} can't be written to a temporary folder: {error.strerror or error}",
            file=file,
            hint="set TMPDIR to a folder that has room, or give config=... and tokenizer=... of the model",
        ) from error


_temporary: set[Path] = set()


def is_temporary(folder: Path) -> bool:
    """Whether it was written by this process: what lies there was made of other files, or fetched from elsewhere."""
    return folder in _temporary


class FolderListing:
    """What lies in a folder on disk: a `weightloaders.weights.candidates.Listing`.

    Args:
        folder: The folder. It is listed when its names are first asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    @property
    def names(self) -> frozenset[str]:
        """The files that lie in it directly.

        Raises:
            SourceNotFoundError: If there is no such folder.
            SourceReadError: If it can't be listed.
        """
        return self._entries[0]

    @property
    def odd(self) -> dict[str, str]:
        """Names of things in it that are no regular files, with what they are. Raises as `names` does."""
        return self._entries[1]

    @cached_property
    def _entries(self) -> tuple[frozenset[str], dict[str, str]]:
        names: set[str] = set()
        odd: dict[str, str] = {}
        try:
            for path in self.folder.iterdir():
                kind = kind_of(path)
                if kind in (A_FOLDER, _IRREGULAR):
                    odd[path.name] = kind
                else:
                    # What can't be looked at, or leads nowhere, counts as the file it should be: whoever wants it is
                    # told why it can't be read, and not that there is none.
                    names.add(path.name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SourceNotFoundError(f"there is no folder {self.folder}", file=self.folder) from error
        except OSError as error:
            raise unreadable(f"can't list the folder {self.folder}", error, self.folder) from error
        except ValueError as error:
            raise SourceReadError(f"can't list the folder {self.folder}: {error}", file=self.folder) from error
        return frozenset(names), odd

    def problems(self, names: Iterable[str]) -> dict[str, str]:
        """What is wrong with files of these relative paths; regular files are left out."""
        return {name: kind for name in names if (kind := kind_of(self.folder / name)) is not None}

    def read(self, name: str) -> bytes:
        """The content of an index."""
        self.check_links([name])
        return read_small_file(self.folder / name, MAX_INDEX_BYTES)

    def open(self, name: str) -> FileSource:
        """A file of that relative path."""
        return FileSource(self.folder / name)

    def subfolders_with_weights(self) -> list[str]:
        """Sub-folders in which files look like weights."""
        found = []
        for name, kind in self.odd.items():
            if kind == A_FOLDER:
                try:
                    inside = os.listdir(self.folder / name)  # noqa: PTH208 -- names are all that is needed
                except OSError:
                    continue
                if any(family_of(file) for file in inside):
                    found.append(name)
        return sorted(found)

    def check_links(self, files: Iterable[str]) -> None:
        """Refuse, in a snapshot of the hub's cache, files that are links to elsewhere than the repository's own blobs.

        Elsewhere links are the user's own business, and are followed.

        Raises:
            UnsafeCheckpointError: If a link leads out.
        """
        repository = _repository_of(self.folder)
        if repository is None:
            return
        for file in files:
            path = self.folder / file
            if not _stays_within(path, repository):
                raise UnsafeCheckpointError(
                    f"{path} is a link to {real_path(path)}, outside the blobs of its own repository",
                    file=path,
                    hint="the cache was tampered with: delete this snapshot and download it again",
                )


_DEAD_LINK = "is a link that leads nowhere"
NOT_THERE = "is not there"
A_FOLDER = "is a folder, not a file"
_IRREGULAR = "is not a regular file"


def kind_of(path: Path) -> str | None:
    """What keeps a path from being a regular file, or a link to one; None if it is one."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if os.path.islink(path):  # noqa: PTH114 -- unlike the other, it bears names that no file can have
            return _DEAD_LINK
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return NOT_THERE
        return f"can't be looked at ({getattr(error, 'strerror', None) or error})"
    if stat.S_ISDIR(mode):
        return A_FOLDER
    return None if stat.S_ISREG(mode) else _IRREGULAR


def real_path(path: Path) -> Path:
    """Where a path leads, all links followed; unlike `Path.resolve`, of links that lead in a circle, too."""
    return Path(os.path.realpath(path))


def _repository_of(folder: Path) -> Path | None:
    """The repository's folder in the hub's cache, if this is (within) one of its snapshots."""
    # As written as well as resolved: either alone could be talked out of it by a link on the way.
    for path in (Path(os.path.abspath(folder)), real_path(folder)):  # noqa: PTH100 -- links must stay unresolved here
        for parent in (path, *path.parents):
            if parent.parent.name == "snapshots" and _REPOSITORY_FOLDER.fullmatch(parent.parent.parent.name):
                return parent.parent.parent
    return None


def _stays_within(path: Path, repository: Path) -> bool:
    target = real_path(path)
    blobs = real_path(repository / "blobs")
    if target.is_relative_to(blobs) or target.is_relative_to(real_path(repository) / "snapshots"):
        return True
    store = real_path(repository).parent / "blobs"
    # The shared store is reached through the repository's own blob, which is then a link itself.
    if not (store / _SHARED_STORE_MARK).is_file() or not path.is_symlink():
        return False
    own_blob = Path(os.path.normpath(real_path(path.parent) / os.readlink(path)))  # noqa: PTH115 -- the first step only
    return own_blob.is_relative_to(blobs) and target.is_relative_to(real_path(store))
