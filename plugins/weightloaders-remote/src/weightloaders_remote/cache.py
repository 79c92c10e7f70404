"""A local cache of whole files, each under what tells its content: address, ``ETag`` and size.

A file is downloaded beside its place and moved there when it is whole, so what is there is whole, and processes that
want the same one at the same time don't disturb each other: one downloads, the others wait for it. What was not used
for longest goes first once there is more than fits, but nothing that was used within the last hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from weightloaders.errors import SourceReadError
from weightloaders.loaders.headers_only import only_headers_are_wanted
from weightloaders.weights.locks import locked
from weightloaders.weights.remote import RemoteSource
from weightloaders.weights.source import FileSource
from weightloaders.weights.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders import ByteSource, Listing

logger = logging.getLogger(__name__)

#: Where files are kept unless something else is said.
VARIABLE = "WEIGHTLOADERS_REMOTE_CACHE"

_PART = 16 << 20
# Seconds within which what was used is not removed, and between two looks whether another process has done its work.
_IN_USE = 3600.0
_BETWEEN_LOOKS = 0.1
_UNFINISHED = ".unfinished-"


def usual_folder() -> Path:
    """The folder that the environment names, else one among the user's caches."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weightloaders" / "remote"


class Cache:
    """Files that were downloaded.

    Args:
        folder: Where they are kept; made if it is not there.
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
        if place.is_file() and place.stat().st_size == source.size:
            with contextlib.suppress(OSError):
                os.utime(place)
            return FileSource(place)
        if only_headers_are_wanted():
            return source
        try:
            with self._turn:
                self._fetch(source, place)
            self._make_room(place)
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
        return self.folder / key / Path(source.name).name

    def _fetch(self, source: RemoteSource, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        while not place.is_file():
            try:
                with locked(place.parent / ".lock"):
                    # The other may have been done just before.
                    if not place.is_file():
                        self._download(source, place)
            except BlockingIOError:
                time.sleep(_BETWEEN_LOOKS)
                # Whoever made room may have taken the folder for an old one.
                place.parent.mkdir(parents=True, exist_ok=True)

    def _download(self, source: RemoteSource, place: Path) -> None:
        logger.info("downloading %s (%s bytes) into %s", source.name, f"{source.size:,}", self.folder)
        draft = place.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
        try:
            with draft.open("xb") as file:
                file.truncate(source.size)
                writing = threading.Lock()

                def fetch(start: int) -> None:
                    content = source.read(start, min(_PART, source.size - start))
                    with writing:
                        file.seek(start)
                        file.write(content)

                in_parallel(fetch, range(0, source.size, _PART))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(place)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _make_room(self, newest: Path) -> None:
        entries = []
        for place in self.folder.glob("*/*"):
            # Others may be removing the same.
            with contextlib.suppress(OSError):
                status = place.stat()
                entries.append((status.st_mtime, status.st_size, place))
        total = sum(size for _, size, _ in entries)
        for used, size, place in sorted(entries):
            if total <= self._most_bytes:
                break
            if place != newest and used < time.time() - _IN_USE:
                shutil.rmtree(place.parent, ignore_errors=True)
                total -= size


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
