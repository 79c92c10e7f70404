"""A lock between processes, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error
        return True
else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return False
        return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock within the block.

    Args:
        path: A file for it, which is there as long as the lock is held.

    Yields:
        Whether it holds: some network file systems know no locks.

    Raises:
        BlockingIOError: If somebody else holds it, be it another thread.
        OSError: If the file can't be made.
    """
    while True:
        with _closing(_opened(path)) as file:
            holds = _lock(file.fileno())
            # Who held it before removes the file, and perhaps has just now.
            if holds and not _is_at(path, file.fileno()):
                continue
            try:
                yield holds
            finally:
                # Before the lock ends, or it would be that of a file which others have locked by now. (Windows removes
                # no file that is open, neither ours nor theirs.)
                if sys.platform == "win32":
                    file.close()
                with contextlib.suppress(OSError):
                    path.unlink()
            return


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except PermissionError as refused:
        # Somebody else's, as one leaves it who is killed: what can be read can be locked.
        try:
            return path.open("rb")
        except OSError:
            raise refused from None


@contextlib.contextmanager
def _closing(file: BinaryIO) -> Iterator[BinaryIO]:
    try:
        yield file
    finally:
        # Nothing was written, so nothing is lost where closing fails.
        with contextlib.suppress(OSError):
            file.close()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
