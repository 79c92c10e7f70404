"""Files that appear whole or not at all: written aside, made durable, then moved to where they belong.

What is replaced stays readable for whoever has it open, so a checkpoint can be saved over the one it was loaded from.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from typing import TYPE_CHECKING

from weightloaders.errors import SaveError, WeightLoadersError
from weightloaders.weights.source import close_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO


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
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends well; otherwise nothing has happened.

    The block is to make it durable (`make_durable`), as the last thing that it does.

    Args:
        path: The file to make or replace; its folder must exist. A replaced file's permissions are kept.

    Yields:
        The file, open for writing, in the same folder under a name of its own.

    Raises:
        SaveError: If it can't be made, made durable or moved.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with saving(path):
        # Asked before hours of writing: a folder can't be replaced by a file.
        if path.is_dir():
            raise SaveError(f"can't save {path}: it is a folder", file=path)
        file = aside.open("xb")
    try:
        with file:
            yield file
        with saving(path):
            if path.exists():
                shutil.copymode(path, aside)
            _release_open_files()
            aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    _make_moves_durable(path.parent)


@contextlib.contextmanager
def replaced_files(folder: Path, is_outdated: Callable[[str], bool]) -> Iterator[Path]:
    """A set of new files that takes the place of an old one when the block ends well.

    Args:
        folder: Where they belong; made where it does not exist.
        is_outdated: Whether a file of this name belongs to the old set. Such files, and those of the same names as new
            ones, are removed as the new ones come.

    Yields:
        An empty folder to write the new files into, on the same file system.

    Raises:
        SaveError: If something can't be made or moved. The folder is then as it was.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    stage = folder / f".saving-{secrets.token_hex(8)}"
    try:
        with saving(folder):
            stage.mkdir(parents=True)
        yield stage
        with saving(folder):
            _exchange(stage, folder, is_outdated)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    shutil.rmtree(stage, ignore_errors=True)


def _exchange(stage: Path, folder: Path, is_outdated: Callable[[str], bool]) -> None:
    # An index comes last: it is what makes the others a checkpoint.
    new = sorted((path.name for path in stage.iterdir()), key=lambda name: (name.endswith(".json"), name))
    old = [
        p.name for p in folder.iterdir() if (p.name in new or is_outdated(p.name)) and (p.is_symlink() or p.is_file())
    ]
    _release_open_files()
    if len(new) == 1 and old in ([], new):
        # One file for another: at no moment is there neither.
        (stage / new[0]).replace(folder / new[0])
    else:
        # All of the old go before any of the new comes. Whoever looks (or a crash) in between finds too few tensors,
        # which every loader notices, and never a mixture of two checkpoints.
        aside = stage / "replaced"
        aside.mkdir()
        moves = [(folder / name, aside / name) for name in old] + [(stage / name, folder / name) for name in new]
        try:
            for origin, target in moves:
                origin.rename(target)
        except BaseException:
            for origin, target in reversed(moves):
                if os.path.lexists(target) and not os.path.lexists(origin):
                    target.rename(origin)
            raise
    _make_moves_durable(folder)


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
