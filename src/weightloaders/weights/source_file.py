"""`SourceFile`: a `ByteSource` as a read-only, seekable binary file, for libraries that want one (zipfile, pickle)."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from weightloaders.errors import CheckpointFormatError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from weightloaders.weights.source import ByteSource

# Directories and pickles of checkpoints are far smaller; a length that a damaged file claims may be anything.
MAX_READ = 1 << 28
_BUFFER = 1 << 16


class _RawSource(io.RawIOBase):
    def __init__(self, source: ByteSource) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        if start + offset < 0:
            raise OSError(f"seek to byte {start + offset} of {self._source.name}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.size - self._position))
        self._source.read_into(view[:count], self._position)
        self._position += count
        return count


class SourceFile(io.BufferedReader):
    """A buffered file over a source. It holds nothing open, so it need not be closed.

    Raises:
        CheckpointFormatError: From `read`, where more than `MAX_READ` bytes are asked for at once.
    """

    def __init__(self, source: ByteSource) -> None:
        super().__init__(_RawSource(source), _BUFFER)
        self._source = source

    def read(self, size: int | None = -1, /) -> bytes:
        """At most ``size`` bytes; all that is left where it is negative or None."""
        # The pickle of a legacy file is read byte by byte, so short reads must be cheap.
        if size is not None and 0 <= size <= _BUFFER:
            return super().read(size)
        left = self._source.size - self.tell()
        wanted = left if size is None or size < 0 else size
        if wanted > MAX_READ:
            raise CheckpointFormatError(
                f"{self._source.name} claims a part of {wanted} bytes where at most {MAX_READ} make sense",
                file=self._source.name,
                hint="the file is damaged, or not a checkpoint; fetch it again",
            )
        return super().read(min(wanted, max(left, 0)))

    def readline(self, size: int | None = -1, /) -> bytes:
        """A line; of one without an end only a part, so that a file of zeros is not read whole."""
        return super().readline(_BUFFER if size is None or size < 0 else size)
