"""Reading files past the page cache: what is read once leaves no copy of itself behind, and pushes nothing out.

On Linux by ``O_DIRECT`` (open(2)): offsets, lengths and addresses have to be multiples of what the disk and the file
system ask for, which statx(2) tells since Linux 6.1 (``STATX_DIOALIGN``). Blocks that lie as they are to lie in memory
are read there; the others go through a buffer of the thread. On macOS by ``F_NOCACHE``, which asks for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from weightloaders.weights.source import FileSource
from weightloaders.weights.storage import storage_of

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.weights.source import ByteSource

BUFFER_BYTES = 4 << 20
# A multiple of what nearly every disk asks for, and what is asked for where that is not known.
_BLOCK = 4096
# Less is not worth a vector of its own.
_LEAST_STRAIGHT = 64 << 10
_MOST_VECTORS = 1000
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

# Linux has it, and some other systems with other rules.
_O_DIRECT: int = getattr(os, "O_DIRECT", 0) if sys.platform == "linux" else 0
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000


class Alignment(NamedTuple):
    """What direct reads have to be multiples of, in bytes: the address in memory, and offset and length in the file."""

    memory: int
    file: int


class DirectReads:
    """Reading past the page cache, for one load.

    Args:
        room: Most bytes that a thread's buffer may have.

    Attributes:
        buffer_bytes: How many it has: at most 4 MiB, at least 4096.
        most_held: Most bytes that the threads' buffers had at one time.
        notes: What could not be read so, a sentence for each file system.
    """

    def __init__(self, room: int = BUFFER_BYTES) -> None:
        self.buffer_bytes = max(_BLOCK, min(BUFFER_BYTES, room - room % _BLOCK))
        self.most_held = 0
        self.notes: list[str] = []
        self._held = 0
        self._own = threading.local()
        # A buffer may go, and be counted, in the middle of anything.
        self._lock = threading.RLock()
        self._sources: dict[tuple[str, tuple[int, int, int, int]], DirectSource] = {}
        self._refused: set[int] = set()

    def source(self, source: ByteSource) -> ByteSource:
        """The same bytes, read past the page cache; what is no file is left as it is."""
        if type(source) is not FileSource:
            return source
        with self._lock:
            key = source.name, source.identity
            if key not in self._sources:
                self._sources[key] = DirectSource(source, self)
            return self._sources[key]

    def buffer(self) -> memoryview:
        """This thread's buffer, at the beginning of a page. What was in it is gone.

        Raises:
            MemoryError: If there is no memory for it.
        """
        memory: memoryview | None = getattr(self._own, "memory", None)
        if memory is None:
            try:
                pages = _pages(self.buffer_bytes)
            except OSError as error:
                raise MemoryError(f"no {self.buffer_bytes} bytes for a buffer") from error
            # It goes with its thread.
            weakref.finalize(pages, self._count, -self.buffer_bytes).atexit = False
            self._count(self.buffer_bytes)
            memory = self._own.memory = memoryview(pages)
        return memory

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes
            self.most_held = max(self.most_held, self._held)

    def refused(self, source: FileSource) -> None:
        """A file system takes no direct reads."""
        with self._lock:
            if source.identity[0] in self._refused:
                return
            self._refused.add(source.identity[0])
        name = storage_of(source.path).filesystem or "the file system"
        self.notes.append(f"{name} takes no direct reads, so {source.name} was read through the page cache")


def _pages(nbytes: int) -> mmap.mmap:
    """Memory of its own; in huge pages, if there are any, it takes fewer and larger requests to the disk."""
    if sys.platform == "win32":
        pages = mmap.mmap(-1, nbytes)
    else:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class DirectSource(FileSource):
    """A regular file that is read past the page cache, as far as its file system does that.

    Args:
        source: The file.
        reads: Has the buffers, and is told where the file system refuses.
    """

    __slots__ = ("_alignment", "_reads")

    def __init__(self, source: FileSource, reads: DirectReads) -> None:
        self.path, self.name, self._stat = source.path, source.name, source.identity
        self._reads = reads
        self._alignment: Alignment | None = None

    def open(self, flags: int = 0) -> int:
        """A new descriptor. See `FileSource.open`."""
        if _O_DIRECT:
            try:
                return super().open(flags | _O_DIRECT)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
        descriptor = super().open(flags)
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor

    def _read_some(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        # Descriptors are shared with other sources of the file, so what they can do is asked of them.
        if is_direct(descriptor) and hasattr(os, "preadv"):
            self._alignment = self._alignment or alignment_of(descriptor)
            if self._alignment is not None and self._alignment.file <= self._reads.buffer_bytes:
                batch = arrange(views, offset, self._alignment, self._reads.buffer())
                try:
                    return batch.spread(os.preadv(descriptor, batch.vectors, batch.start))
                except OSError as error:
                    # Some refuse only when they are to read.
                    if error.errno not in _REFUSALS:
                        raise
            make_indirect(descriptor)
        if sys.platform != "darwin":
            self._reads.refused(self)
        return super()._read_some(descriptor, views, offset)


def is_direct(descriptor: int) -> bool:
    """Whether reads go past the page cache, and so have to be aligned."""
    return sys.platform != "win32" and bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _O_DIRECT)


def make_indirect(descriptor: int) -> None:
    """Let reads go through the page cache from now on."""
    if sys.platform != "win32":
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT)


def alignment_of(descriptor: int) -> Alignment | None:
    """What direct reads of an open file have to be multiples of; None if there can't be any."""
    status = (ctypes.c_uint32 * 64)()
    try:
        failed = ctypes.CDLL(None).statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status)
    except AttributeError:  # a C library older than statx
        failed = -1
    # struct statx: stx_mask is its first word, stx_dio_mem_align and stx_dio_offset_align are words 38 and 39.
    if failed or not status[0] & _STATX_DIOALIGN:
        return Alignment(_BLOCK, _BLOCK)
    memory, file = status[38], status[39]
    if not file or memory > mmap.PAGESIZE:
        return None
    return Alignment(memory, max(file, _BLOCK))


class Copy(NamedTuple):
    """Bytes that were read into the buffer and belong elsewhere: from which byte of the file on, and of the buffer."""

    view: memoryview
    offset: int
    start: int


class Batch(NamedTuple):
    """One direct read.

    Attributes:
        vectors: Where its bytes go.
        start: Where it begins in the file.
        wanted: The first byte that was asked for, and the one behind the last.
        copies: What is copied out of the buffer afterwards.
        buffer: The buffer.
    """

    vectors: list[memoryview]
    start: int
    wanted: tuple[int, int]
    copies: list[Copy]
    buffer: memoryview

    def spread(self, count: int) -> int:
        """Copy out of the buffer, after ``count`` bytes were read; returns how many that were asked for have come."""
        end = self.start + count
        first, last = self.wanted
        for view, offset, start in self.copies:
            if offset < end:
                count = min(len(view), end - offset)
                # Slices of views would be copied under the interpreter's lock.
                _memmove(_address(view), _address(self.buffer) + start, count)
        return max(0, min(last, end) - first)


def arrange(views: Sequence[memoryview], offset: int, alignment: Alignment, buffer: memoryview) -> Batch:
    """The direct read that fills these views, or the first of them, from bytes that lie side by side from an offset on.

    Blocks that lie whole in one view, and there at an address that will do, are read into it. The others, those with
    the end of one view and the beginning of the next among them, go through the buffer, as many as fit into it.
    """
    block = alignment.file
    first, start = offset, offset - offset % block
    vectors: list[memoryview] = []
    copies: list[Copy] = []
    # How far the file is arranged, how much of the buffer is, and where the last run in the buffer begins.
    at, used, run = start, 0, 0
    for view in filter(None, views):
        begin, offset = offset, offset + len(view)
        low, high = begin + -begin % block, offset - offset % block
        if high - low < _LEAST_STRAIGHT or (_address(view) + low - begin) % alignment.memory:
            low = high = begin
        # Head and tail, or all of it, through the buffer.
        for left, right in ((begin, low), (high, offset)):
            if left == high > low:
                vectors += [part for part in (buffer[run:used], view[low - begin : high - begin]) if part]
                at, run = high, used
            taken = min(max(0, right + -right % block - at), len(buffer) - used)
            at, used = at + taken, used + taken
            if left < min(right, at):
                copies.append(Copy(view[left - begin : min(right, at) - begin], left, used - (at - left)))
            if at < right:
                break
        if at < offset or len(vectors) > _MOST_VECTORS - 4:
            break
    if run < used:
        vectors.append(buffer[run:used])
    return Batch(vectors, start, (first, min(at, offset)), copies, buffer)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


_memmove = ctypes.CDLL(None).memmove if sys.platform != "win32" else ctypes.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
