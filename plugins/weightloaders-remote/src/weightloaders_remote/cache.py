"""A local cache of whole files, each under what tells its content: address, ``ETag`` and size.

A file is downloaded beside its place and moved there when it is whole, so what is there is whole, and processes that
want the same one at the same time don't disturb each other: one downloads, the others wait for it. Beside it lies its
checksum, so that what others have changed since is noticed, and ``verify="sha256"`` has something to go by. What was
not used for longest goes first once there is more than fits, but nothing that was used within the last hour. All of it
lies in a sub-folder with a name of its own, in folders that are named by hashes, and nothing else is ever removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from weightloaders import Checksum
from weightloaders.errors import OptionsError, SourceReadError
from weightloaders.loaders.headers_only import only_headers_are_wanted
from weightloaders.weights.locks import locked
from weightloaders.weights.remote import RemoteSource
from weightloaders.weights.source import FileSource
from weightloaders.weights.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from weightloaders import ByteSource, Listing

logger = logging.getLogger(__name__)

#: Where files are kept unless something else is said.
VARIABLE = "WEIGHTLOADERS_REMOTE_CACHE"

_PART = 16 << 20
# Seconds within which what was used is not removed, and between two looks whether another process has done its work.
_IN_USE = 3600.0
_BETWEEN_LOOKS = 0.1
# Seconds after which who has written nothing is thought to have been stopped; the disk may take long at the end.
_STUCK = 600.0
_UNFINISHED = ".unfinished-"
# In the folder that the user names there may be anything.
_OWN = "weightloaders-remote-cache"
# Beside a file, so that whoever verifies it finds it there.
_SUMS = "SHA256SUMS.json"
_MAX_SUMS = 1 << 12
_ENTRY = re.compile(r"[0-9a-f]{32}")


def usual_folder() -> Path:
    """The folder that the environment names, else one among the user's caches.

    Raises:
        OptionsError: If what the environment names can't be a folder.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return as_folder(named, VARIABLE)
    return as_folder(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME") / "weightloaders" / "remote"


def as_folder(named: str | Path, said_by: str) -> Path:
    """A folder that somebody named, with ``~`` resolved.

    Raises:
        OptionsError: If it can't be one; ``said_by`` is where it was named.
    """
    text = str(named)
    with contextlib.suppress(RuntimeError):
        if text and "\0" not in text:
            return Path(named).expanduser()
    raise OptionsError(f"{said_by}: {text!r} can't be a folder", hint="name one by its path, such as /data/cache")


class Cache:
    """Files that were downloaded.

    Args:
        folder: Where they are kept, in a sub-folder; made if it is not there.
        most_bytes: How much is kept.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        # One file after the other: each has many requests in flight.
        self._turn = threading.Lock()

    def file(self, source: RemoteSource) -> ByteSource:
        """A file as it is now: from the cache, downloaded into it first if need be.

        Where only headers are wanted nothing is downloaded; nor is what bears no mark of its content, for nobody could
        tell when it changes. Then it is the source itself.

        Raises:
            SourceError: If the source can't be read.
            SourceReadError: If the cache can't be written.
        """
        if not source.tag:
            return source
        place = self._place_of(source)
        if _is_whole(place, source.size):
            with contextlib.suppress(OSError):
                os.utime(place.with_name(_SUMS))
            return FileSource(place)
        if only_headers_are_wanted():
            return source
        try:
            with self._turn:
                self._fetch(source, place)
            self._make_room(place.parent)
        except OSError as error:
            if isinstance(error, SourceReadError):
                raise
            raise SourceReadError(
                f"{source.name} can't be kept in the cache {self.folder}: {error.strerror or error}",
                file=source.name,
                hint="make room there, name another folder (cache=...), or load without a cache (cache=False)",
            ) from error
        return FileSource(place)

    def _place_of(self, source: RemoteSource) -> Path:
        key = hashlib.sha256("\0".join((source.name, source.tag, str(source.size))).encode()).hexdigest()[:32]
        return self.folder / _OWN / key / Path(source.name).name

    def _fetch(self, source: RemoteSource, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        while not _is_whole(place, source.size):
            try:
                with locked(place.parent / ".lock"):
                    # The other may have been done just before.
                    if not _is_whole(place, source.size):
                        self._download(source, place)
            except BlockingIOError:
                if _last_written(place.parent) < time.time() - _STUCK:
                    raise SourceReadError(
                        f"{source.name} is being downloaded by another process, which writes nothing",
                        file=source.name,
                        hint=f"end that process, which holds {place.parent / '.lock'}, or load without a cache "
                        "(cache=False)",
                    ) from None
                time.sleep(_BETWEEN_LOOKS)
                # Whoever made room may have taken the folder for an old one.
                place.parent.mkdir(parents=True, exist_ok=True)

    def _download(self, source: RemoteSource, place: Path) -> None:
        logger.info("downloading %s (%s bytes) into %s", source.name, f"{source.size:,}", self.folder)
        draft = place.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
        try:
            with draft.open("xb") as file, draft.open("rb") as written:
                file.truncate(source.size)
                writing, following = threading.Lock(), _Following(written)

                def fetch(start: int) -> None:
                    content = source.read(start, min(_PART, source.size - start))
                    with writing:
                        file.seek(start)
                        file.write(content)
                        file.flush()
                    following.add(start, len(content))

                in_parallel(fetch, range(0, source.size, _PART))
                os.fsync(file.fileno())
            # Without it the file does not count, so nothing is lost if this is as far as it comes.
            draft.replace(place)
            _write_sums(place, following.digest())
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _make_room(self, newest: Path) -> None:
        now = time.time()
        entries = []
        for folder in (self.folder / _OWN).iterdir():
            if not _ENTRY.fullmatch(folder.name) or folder.is_symlink():
                continue
            # Others may be removing the same.
            with contextlib.suppress(OSError):
                found = {file: file.stat() for file in folder.iterdir()}
                for file, status in list(found.items()):
                    # Whoever downloaded it is gone.
                    if file.name.startswith(_UNFINISHED) and status.st_mtime < now - _IN_USE:
                        file.unlink()
                        del found[file]
                used = max((status.st_mtime for status in found.values()), default=now)
                entries.append((used, sum(status.st_size for status in found.values()), folder))
        total = sum(size for _, size, _ in entries)
        for used, size, folder in sorted(entries):
            if total <= self._most_bytes:
                break
            if folder != newest and used < now - _IN_USE:
                with contextlib.suppress(OSError):
                    for file in folder.iterdir():
                        file.unlink()
                    folder.rmdir()
                total -= size


class _Following:
    """The sha256 of a file that is being written in parts, in any order: what is there from the start on is hashed.

    Whoever writes the part that was awaited does it, while the others go on.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum = file, hashlib.sha256()
        self._written: dict[int, int] = {}
        self._turn = threading.Lock()
        self._end = 0

    def add(self, start: int, length: int) -> None:
        """A part was written."""
        self._written[start] = length
        if self._turn.acquire(blocking=False):
            try:
                self._follow()
            finally:
                self._turn.release()

    def digest(self) -> str:
        """The checksum, once all of it is written."""
        # What came while somebody else had the turn.
        self._follow()
        return self._sum.hexdigest()

    def _follow(self) -> None:
        while self._written.get(self._end):
            length = self._written.pop(self._end)
            self._file.seek(self._end)
            self._sum.update(self._file.read(length))
            self._end += length


def _is_whole(place: Path, size: int) -> bool:
    """Whether the file lies there as it was written: others may have cut it off, replaced it, or written to it."""
    try:
        status = place.lstat()
        sums = json.loads(place.with_name(_SUMS).read_bytes()[:_MAX_SUMS])["files"][place.name]
        digest, time_ns = sums["sha256"], sums["mtime_ns"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        return False
    if status.st_mtime_ns == time_ns:
        return True
    if Checksum("sha256", digest, "the cache").of(FileSource(place)) != digest:
        logger.warning("%s was changed by others: it is fetched anew", place)
        return False
    # Copied, or touched.
    with contextlib.suppress(OSError):
        _write_sums(place, digest)
    return True


def _last_written(folder: Path) -> float:
    """When something in a folder was last written; now, if there is nothing."""
    times = []
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                times.append(file.stat().st_mtime)
    return max(times, default=time.time())


def _write_sums(place: Path, digest: str) -> None:
    """Write down what a file comes to, as `weightloaders.ChecksumList` reads it, and when it was written."""
    draft = place.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
    entry = {"sha256": digest, "mtime_ns": place.stat().st_mtime_ns}
    try:
        draft.write_text(json.dumps({"files": {place.name: entry}}) + "\n")
        draft.replace(place.with_name(_SUMS))
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


class CachedFolder:
    """A listing whose files are read from the cache: a `weightloaders.Listing`."""

    def __init__(self, listing: Listing, cache: Cache) -> None:
        self._listing = listing
        self._cache = cache
        self.where = listing.where

    @property
    def names(self) -> frozenset[str]:
        """The names in the folder."""
        return self._listing.names

    @property
    def odd(self) -> Mapping[str, str]:
        """What lies there and is no file."""
        return self._listing.odd

    def problems(self, names: Sequence[str]) -> dict[str, str]:
        """What is wrong with files of these relative paths."""
        return self._listing.problems(names)

    def read(self, name: str) -> bytes:
        """The content of an index."""
        return self._listing.read(name)

    def open(self, name: str) -> ByteSource:
        """A file of that relative path, whole and on this disk unless only its header is wanted."""
        source = self._listing.open(name)
        return self._cache.file(source) if isinstance(source, RemoteSource) else source

    def subfolders_with_weights(self) -> list[str]:
        """Sub-folders in which files look like weights."""
        return self._listing.subfolders_with_weights()
