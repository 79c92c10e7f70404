"""Files that appear whole or not at all: written aside, made durable, then moved to where they belong.

What is replaced stays readable for whoever has it open, so a checkpoint can be saved over the one it was loaded from.
One save at a time has a place to itself; what a killed one left there is removed by the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import sys
from typing import TYPE_CHECKING

from weightloaders.errors import SaveError, WeightLoadersError
from weightloaders.weights.exchanging import REPLACED, exchange, move
from weightloaders.weights.locks import locked
from weightloaders.weights.source import close_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

# What file systems allow, less what is added to it.
_MAX_NAME_BYTES = 200


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses within the block into `SaveError`.

    Args:
        path: What is being saved, for the message.
    """
    try:
        yield
    except WeightLoadersError:
        raise
    except (OSError, ValueError) as error:  # a ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"can't save {path}: {reason}; what was there before is untouched", file=path) from error


@contextlib.contextmanager
def new_file(file: Path, path: Path) -> Iterator[BinaryIO]:
    """A file that is written from its beginning, and closed after the block.

    Args:
        file: The file to make.
        path: What is being saved by it, for messages.

    Raises:
        SaveError: If it can't be made or closed.
    """
    with saving(path):
        opened = file.open("xb")
    try:
        yield opened
    except BaseException:
        # Closing tries once more to write what could not be written; what it says then is no news.
        with contextlib.suppress(OSError):
            opened.close()
        raise
    with saving(path):
        opened.close()


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends well; otherwise nothing has happened.

    The block is to make it durable (`make_durable`), as the last thing that it does.

    Args:
        path: The file to make or replace; its folder must exist. A replaced file's permissions are kept.

    Yields:
        The file, open for writing, in the same folder under a name of its own.

    Raises:
        SaveError: If it can't be made, made durable or moved, or somebody else is saving there.
    """
    with saving(path):
        # Asked before hours of writing: a folder can't be replaced by a file.
        if path.is_dir():
            raise SaveError(f"can't save {path}: it is a folder", file=path)
        place = _beside(path)
    with _place_aside(path.parent, place, path) as aside:
        with new_file(aside, path) as file:
            yield file
        with saving(path):
            if path.exists():
                shutil.copymode(path, aside)
            _release_open_files()
            aside.replace(path)
    _make_moves_durable(path.parent)


@contextlib.contextmanager
def replaced_files(folder: Path, is_outdated: Callable[[str], bool], passing: str | None = None) -> Iterator[Path]:
    """A set of new files that takes the place of an old one when the block ends well.

    Args:
        folder: Where they belong; made where it does not exist.
        is_outdated: Whether a file of this name belongs to the old set. Such files, and those of the same names as new
            ones, are removed as the new ones come.
        passing: See `exchange`.

    Yields:
        An empty folder to write the new files into, on the same file system.

    Raises:
        SaveError: If something can't be made or moved, or somebody else is saving there. The folder is then as it was.
    """
    with made_folder(folder), _place_aside(folder, "", folder) as stage:
        with saving(folder):
            stage.mkdir()
        yield stage
        with saving(folder):
            _release_open_files()
            exchange(stage, folder, is_outdated, passing)
            _make_moves_durable(folder)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name, with all that is in it, when the block ends well; otherwise it is gone.

    Args:
        path: The folder to make; nothing may be there. The folder that it lies in is made where it does not exist.

    Yields:
        The folder, beside its place under a name of its own.

    Raises:
        SaveError: If it can't be made or moved, or somebody else is saving there.
    """
    with saving(path):
        place = _beside(path)
    with made_folder(path.parent), _place_aside(path.parent, place, path) as stage:
        with saving(path):
            stage.mkdir()
        yield stage
        with saving(path):
            move(stage, path)
    _make_moves_durable(path.parent)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and those it lies in, where they do not exist; if the block fails, they go again.

    Raises:
        SaveError: If it can't be made.
    """
    with saving(folder):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()
        raise


def make_durable(file: BinaryIO) -> None:
    """Have the disk hold what was written, so that a crash after the move can't leave an empty file."""
    file.flush()
    os.fsync(file.fileno())


def _make_moves_durable(folder: Path) -> None:
    # A move is an entry in its folder. Windows opens no folders, and some network file systems refuse to sync them.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _release_open_files() -> None:
    # Windows moves nothing onto a file that is open; elsewhere an open file outlives its name, and stays readable.
    if sys.platform == "win32":
        close_files()


# ------------------------------------------------------------------ one at a time


@contextlib.contextmanager
def _place_aside(folder: Path, place: str, shown: Path) -> Iterator[Path]:
    """A path to make something at, while nobody else saves to the same place; what is there at the end is removed.

    Args:
        folder: Where the path is to lie.
        place: Names the place in its name: the same for all who save there, and for nobody else.
        shown: What is being saved, for messages.
    """
    with contextlib.ExitStack() as held:
        with saving(shown):
            try:
                alone = held.enter_context(locked(folder / f"{place}.saving.lock"))
            except BlockingIOError as error:
                raise SaveError(
                    f"can't save {shown}: somebody else is saving there at this moment",
                    file=shown,
                    hint="wait until that is done; of several processes with the same weights, let one save them",
                ) from error
        # Nobody else is at work, so whatever looks so was left by one who was killed.
        dead = _made_for(folder, place) if alone else []
        for path in dead:
            # The old files that it had taken away stay until there are new ones.
            if not (path / REPLACED).exists():
                _remove(path)
        aside = folder / f"{place}.saving-{secrets.token_hex(8)}"
        succeeded = False
        try:
            yield aside
            succeeded = True
            for path in dead:
                _remove(path)
        finally:
            if not _holds_the_old(aside, succeeded=succeeded):
                _remove(aside)


def _holds_the_old(aside: Path, *, succeeded: bool) -> bool:
    """Whether the old files are still here, and nowhere else: they could not be moved back."""
    replaced = aside / REPLACED
    try:
        return not succeeded and replaced.is_dir() and any(replaced.iterdir())
    except OSError:
        return True


def _made_for(folder: Path, place: str) -> list[Path]:
    name = re.compile(re.escape(place) + r"\.saving-[0-9a-f]{16}")
    # A folder may be closed to being listed, and open to being written to.
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if name.fullmatch(path.name)]
    return []


def _remove(path: Path) -> None:
    if path.is_dir():
        try:
            shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            # It closes twice what Ctrl-C came upon while it was being closed, and the second time hides Ctrl-C.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _beside(path: Path) -> str:
    """How the names begin of what is put beside a path for its sake."""
    name = os.fsencode(path.name)
    return f".{path.name if len(name) <= _MAX_NAME_BYTES else hashlib.sha256(name).hexdigest()}"
