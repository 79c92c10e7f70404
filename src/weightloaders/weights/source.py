"""`ByteSource`: positioned, thread-safe reads from a file or from anything that can do the same.

Files are opened on their first read and at most `MAX_OPEN_FILES` stay open, so a checkpoint of a thousand shards
works under a low descriptor limit; none stays open longer than there are sources that read from it. Nothing is ever
mapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightloaders.errors import SourceNotFoundError, SourceReadError
from weightloaders.weights.system_errors import advice, unreadable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

MAX_OPEN_FILES = 16
# What the systems that have vectored reads allow is 1024.
_MOST_VIEWS = 1000
# More at once is an error on some systems, and would be cut on the others.
_MAX_READ = 1 << 30
# Where bytes come as an object of their own, and are copied.
_MAX_COPIED = 1 << 24
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
_SEQUENTIAL: int = getattr(os, "POSIX_FADV_SEQUENTIAL", 0)


class ByteSource(ABC):
    """Bytes that can be read from any position, by several threads at once.

    Attributes:
        name: How the source is called in messages: a path or an address.
    """

    name: str

    @property
    def origin(self) -> ByteSource:
        """What is really read, which is the source itself or the one that its bytes are made from meanwhile."""
        return self

    @property
    def most_views(self) -> int:
        """How many views `read_vectors` fills in one go; 1 where each is a read of its own."""
        return 1

    @property
    @abstractmethod
    def size(self) -> int:
        """Length in bytes."""

    @property
    @abstractmethod
    def identity(self) -> Hashable:
        """A value that differs once the content has changed, e.g. a file's inode, size and modification time."""

    @abstractmethod
    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill the whole of a writable byte view from ``offset`` on.

        Raises:
            SourceReadError: If fewer bytes are there, or reading fails.
        """

    def read_vectors(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill several views from bytes that lie side by side, the first from ``offset`` on.

        Raises:
            SourceReadError: As for `read_into`.
        """
        for view in views:
            self.read_into(view, offset)
            offset += len(view)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, for headers.

        Raises:
            SourceReadError: If fewer bytes are there, or reading fails.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise SourceReadError(
                f"bytes {offset} to {offset + length} were asked of a source of {self.size} bytes", file=self.name
            )
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several small parts, each given by offset and length. Overridden where every read is a trip to somewhere far.

        Raises:
            SourceReadError: As for `read`.
        """
        return [self.read(offset, length) for offset, length in places]


class FileSource(ByteSource):
    """A regular file.

    Args:
        path: The file. What it was at this moment (device, inode, size, modification time) is remembered, and a file
            that is another one when it is read is refused.

    Raises:
        SourceNotFoundError: If there is no such file, or it is not a regular file.
        SourceReadError: If the system does not let it be looked at.
    """

    __slots__ = ("_stat", "name", "path")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = str(path)
        try:
            status = self.path.stat()
        except ValueError as error:
            raise SourceNotFoundError(f"can't open {self.name}: {error}", file=self.name) from error
        except OSError as error:
            if error.errno not in _NO_SUCH_FILE:
                raise unreadable(f"can't open {self.name}", error, self.name) from error
            reason = error.strerror or error
            raise SourceNotFoundError(
                f"can't open {self.name}: {reason}", file=self.name, hint=advice(error)
            ) from error
        # Opening a named pipe would wait for ever, so the kind is asked for before anything is opened.
        if not stat.S_ISREG(status.st_mode):
            raise SourceNotFoundError(f"{self.name} is not a regular file", file=self.name)
        self._stat = _fingerprint(status)

    def __repr__(self) -> str:
        return f"FileSource({self.name!r})"

    @property
    def size(self) -> int:
        """Length in bytes when the source was made."""
        return self._stat[2]

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Device, inode, size and modification time (nanoseconds) when the source was made."""
        return self._stat

    @property
    def most_views(self) -> int:
        """How many views `read_vectors` fills in one go."""
        # Whoever overrides `read_into` wants to see every read.
        return _MOST_VIEWS if type(self).read_into is FileSource.read_into else 1

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill the view from ``offset`` on. See `ByteSource.read_into`."""
        with _open_files.use(self) as descriptor:
            self._fill([view], descriptor, offset)

    def read_vectors(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill several views from bytes that lie side by side. See `ByteSource.read_vectors`."""
        if self.most_views == 1:
            super().read_vectors(views, offset)
            return
        with _open_files.use(self) as descriptor:
            for at in range(0, len(views), _MOST_VIEWS):
                offset = self._fill(views[at : at + _MOST_VIEWS], descriptor, offset)

    def _fill(self, views: Sequence[memoryview], descriptor: int, offset: int) -> int:
        """Fill a few views; returns where they end in the file."""
        end = offset + sum(map(len, views))
        while offset < end:
            try:
                some = views if end - offset <= _MAX_READ else [views[0][:_MAX_READ]]
                count = self._read_some(descriptor, some, offset)
            except OSError as error:
                raise self._failed(error, offset) from error
            if count == 0:
                raise SourceReadError(
                    f"{self.name} ends at byte {offset}, {end - offset} bytes too early",
                    at=offset,
                    file=self.name,
                    hint="the file was shortened while it was being read; fetch it again",
                )
            offset += count
            if offset < end:
                views = behind(views, count)
        return end

    def _read_some(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """One positioned read straight into memory, or the nearest thing the system has. It may end early."""
        if hasattr(os, "preadv"):
            count: int = os.preadv(descriptor, views, offset)
            return count
        view = next(view for view in views if len(view))
        if hasattr(os, "pread"):
            data = os.pread(descriptor, min(len(view), _MAX_COPIED), offset)
        else:
            # Windows: a descriptor has one position, so seeking and reading must not be torn apart.
            with _seek_lock:
                os.lseek(descriptor, offset, os.SEEK_SET)
                data = os.read(descriptor, min(len(view), _MAX_COPIED))
        view[: len(data)] = data
        return len(data)

    def _failed(self, error: OSError, offset: int) -> SourceReadError:
        if error.errno == errno.EFAULT:
            return SourceReadError(
                f"the memory that byte {offset} of {self.name} was to be read into can't be written",
                at=offset,
                file=self.name,
                hint="it may be a read-only mapping; give the model memory of its own, e.g. by copying its parameters",
            )
        return unreadable(f"reading {self.name} at byte {offset} failed", error, self.name, at=offset)

    def open(self, flags: int = 0) -> int:
        """A new descriptor of the file, for whoever closes it.

        Args:
            flags: More than it takes to read.

        Raises:
            OSError: If it can't be opened.
        """
        # O_NONBLOCK: the file may have become a named pipe since, and opening one would wait for a writer.
        for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"):
            flags |= getattr(os, name, 0)
        descriptor = os.open(self.path, os.O_RDONLY | flags)
        if hasattr(os, "posix_fadvise"):
            # A load reads from front to back: the system may read twice as far ahead.
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, _SEQUENTIAL)
        return descriptor

    def check_unchanged(self) -> None:
        """Raise `SourceReadError` if the path now leads to other content than when the source was made."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise unreadable(f"{self.name} went away", error, self.name) from error
        self.check_same(status)

    def check_same(self, status: os.stat_result) -> None:
        """Raise `SourceReadError` if this is not the status of the file as it was when the source was made."""
        if _fingerprint(status) != self._stat:
            raise SourceReadError(
                f"{self.name} was changed after it was catalogued",
                file=self.name,
                hint="wait until whoever writes it is done, then load again",
            )


def _fingerprint(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_seek_lock = threading.Lock()


def behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of these views behind their first bytes."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []


def _status(source: FileSource, descriptor: int) -> os.stat_result:
    try:
        return os.fstat(descriptor)
    except OSError as error:
        raise unreadable(f"{source.name} can't be looked at", error, source.name) from error


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    users: int = 0
    # Closed by its owner while somebody was still reading: the last reader closes it.
    abandoned: bool = False
    # Every source that has read from it, as long as it lives.
    sources: set[weakref.ref[FileSource]] = field(default_factory=set)


# One file may be read in several ways, each with a descriptor of its own.
_Key = tuple[str, tuple[int, int, int, int], type[FileSource]]


class _OpenFiles:
    """Open descriptors by file, least recently used first; none is closed while somebody reads from it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, _OpenFile] = OrderedDict()
        self._gone: deque[tuple[_Key, weakref.ref[FileSource]]] = deque()

    @contextlib.contextmanager
    def use(self, source: FileSource) -> Iterator[int]:
        key = (source.name, source.identity, type(source))
        with self._lock:
            self._close_gone()
            entry = self._entries.get(key)
            if entry is None:
                self._close_idle(keep=self._limit - 1)
                entry = self._entries[key] = _OpenFile(self._open(source))
            self._entries.move_to_end(key)
            if weakref.ref(source) not in entry.sources:
                entry.sources.add(weakref.ref(source, partial(self._source_gone, key)))
            entry.users += 1
        try:
            # Also for a file that was open already: its content may have been changed in place since.
            source.check_same(_status(source, entry.descriptor))
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1
                if entry.abandoned and not entry.users:
                    os.close(entry.descriptor)

    def _open(self, source: FileSource) -> int:
        try:
            try:
                return source.open()
            except OSError as error:
                # Somebody else holds the descriptors: give back all that are idle, and try once more.
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._close_idle(keep=0)
                return source.open()
        except OSError as error:
            raise unreadable(f"can't open {source.name}", error, source.name) from error

    def _close_idle(self, keep: int) -> None:
        idle = [key for key, entry in self._entries.items() if not entry.users]
        for key in idle[: max(0, len(self._entries) - keep)]:
            os.close(self._entries.pop(key).descriptor)

    def _source_gone(self, key: _Key, source: weakref.ref[FileSource]) -> None:
        # The garbage collector calls this in the middle of anything, be it of what holds the lock: then the next who
        # takes it does the work.
        self._gone.append((key, source))
        if self._lock.acquire(blocking=False):
            try:
                self._close_gone()
            finally:
                self._lock.release()

    def _close_gone(self) -> None:
        while self._gone:
            key, source = self._gone.popleft()
            entry = self._entries.get(key)
            # The file may have been closed meanwhile, and opened by others.
            if entry is not None and source in entry.sources:
                entry.sources.discard(source)
                if not entry.sources:
                    os.close(self._entries.pop(key).descriptor)

    def close(self, names: frozenset[str] | None = None) -> None:
        with self._lock:
            self._close_gone()
            for key in [key for key in self._entries if names is None or key[0] in names]:
                entry = self._entries.pop(key)
                if entry.users:
                    entry.abandoned = True
                else:
                    os.close(entry.descriptor)

    def forget(self) -> None:
        # In a forked child: the descriptors are shared with the parent and are harmless, but the lock may be held.
        self._lock = threading.Lock()
        for entry in self._entries.values():
            entry.users = 0


_open_files = _OpenFiles(MAX_OPEN_FILES)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_files.forget)


def close_files(names: frozenset[str] | None = None) -> None:
    """Close the idle descriptors of these files (by `ByteSource.name`), or of all."""
    _open_files.close(names)
