"""The directory of a zip file: where each record's bytes lie, every claim checked.

Python's zipfile reads the central directory; the local headers, which say where the data begins, are read here, because
zipfile keeps that to itself. See APPNOTE.TXT of PKWARE for the format.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightloaders.errors import CheckpointFormatError, UnsafeCheckpointError, WeightLoadersError
from weightloaders.weights.source import ByteSource
from weightloaders.weights.source_file import MAX_READ, SourceFile

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED, _UTF8 = 0x1, 0x800
# What is read, or unpacked, at a time.
_PIECE = 16 << 20
# No deflated stream unpacks to more than 1,032 times its size.
_MOST_INFLATION, _SLACK = 1032, 1024
#: The directory is at the end. Of all but huge files this holds the whole of it.
END_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of one record of a file.

    Args:
        source: The file.
        name: Its name within the file.
        offset: First byte of its data.
        size: Bytes it holds.
        packed_size: Bytes it takes in the file; other than ``size`` where it is deflated.
        deflated: Whether it is compressed, so that its bytes don't lie raw.
        checksum: The CRC-32 of what a deflated one unpacks to.
    """

    source: ByteSource
    name: str
    offset: int
    size: int
    packed_size: int
    deflated: bool = False
    checksum: int = 0

    def read(self, limit: int = MAX_READ) -> bytes | bytearray:
        """All its bytes, unpacked; of what is packed only a part is in memory at a time.

        Raises:
            CheckpointFormatError: If it is larger than ``limit``, or does not unpack to what it claims.
            SourceReadError: If reading fails.
        """
        if self.size > limit:
            raise CheckpointFormatError(
                f"{self.name!r} in {self.source.name} claims {self.size} bytes where at most {limit} make sense",
                file=self.source.name,
            )
        if not self.deflated:
            return self.source.read(self.offset, self.packed_size)
        data, end = bytearray(self.size), 0
        try:
            for piece in self._unpacked():
                data[end : end + len(piece)] = piece
                end += len(piece)
                if end > self.size:
                    break
        except zlib.error as error:
            raise CheckpointFormatError(
                f"{self.name!r} in {self.source.name} can't be unpacked: {error}", file=self.source.name
            ) from error
        if end != self.size or zlib.crc32(data) != self.checksum:
            raise CheckpointFormatError(
                f"{self.name!r} in {self.source.name} does not unpack to the {self.size} bytes it claims",
                file=self.source.name,
                hint="the file is damaged; fetch it again",
            )
        return data

    def _unpacked(self) -> Iterator[bytes]:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        for at in range(0, self.packed_size, _PIECE):
            packed = self.source.read(self.offset + at, min(_PIECE, self.packed_size - at))
            while packed and not inflater.eof:
                yield inflater.decompress(packed, _PIECE)
                packed = inflater.unconsumed_tail
        yield inflater.flush()


def read_directory(source: ByteSource, end_bytes: int = END_BYTES) -> dict[str, Record]:
    """The records of a zip file by name; no data is read.

    Args:
        source: The file.
        end_bytes: So much of its end is read at once, to have the directory in it.

    Raises:
        CheckpointFormatError: If the file is truncated or damaged, has two records of one name or overlapping ones, or
            uses encryption or a compression other than deflate.
        SourceReadError: If reading fails.
    """
    try:
        entries = zipfile.ZipFile(SourceFile(_EndInMemory(source, end_bytes))).infolist()
    except WeightLoadersError:
        raise
    # A damaged directory surfaces as any of these.
    except (
        zipfile.BadZipFile,
        struct.error,
        ValueError,
        OSError,
        EOFError,
        NotImplementedError,
        UnicodeError,
    ) as error:
        if isinstance(error.__context__, WeightLoadersError):
            # Of what can't be read zipfile says that it is no zip file.
            raise error.__context__ from None
        raise CheckpointFormatError(
            f"{source.name} is a zip file without a readable directory ({error})",
            file=source.name,
            hint="the directory is at the end, so the file is probably truncated; fetch it again",
        ) from error
    entries.sort(key=lambda entry: entry.header_offset)
    headers = source.read_many([_local_header(source, entry) for entry in entries])
    records: dict[str, Record] = {}
    end, before = 0, ""
    for entry, header in zip(entries, headers, strict=True):
        record = _record(source, entry, header)
        if record.name in records:
            raise CheckpointFormatError(f"{source.name} has two records named {record.name!r}", file=source.name)
        if entry.header_offset < end:
            raise UnsafeCheckpointError(
                f"the records {before!r} and {record.name!r} of {source.name} overlap", file=source.name
            )
        end, before = record.offset + record.packed_size, record.name
        records[record.name] = record
    return records


class _EndInMemory(ByteSource):
    """A source whose last bytes were read at once: looking for a directory takes many small reads there."""

    def __init__(self, source: ByteSource, end_bytes: int) -> None:
        self._source = source
        self._start = max(0, source.size - end_bytes)
        self._end = source.read(self._start, source.size - self._start)
        self.name = source.name

    @property
    def size(self) -> int:
        return self._source.size

    @property
    def identity(self) -> Hashable:
        return self._source.identity

    def read_into(self, view: memoryview, offset: int) -> None:
        if offset >= self._start:
            view[:] = self._end[offset - self._start : offset - self._start + len(view)]
        else:
            self._source.read_into(view, offset)


def _damaged(source: ByteSource, entry: zipfile.ZipInfo, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"the record {entry.filename!r} of {source.name} {what}", file=source.name)


def _raw_name(entry: zipfile.ZipInfo) -> bytes:
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")


def _local_header(source: ByteSource, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Offset and length of the header that stands before a record's data, up to the end of the name in it."""
    length = _LOCAL_HEADER.size + len(_raw_name(entry))
    if entry.header_offset < 0 or entry.header_offset + length > source.size:
        raise _damaged(source, entry, "lies outside the file, which is truncated")
    return entry.header_offset, length


def _record(source: ByteSource, entry: zipfile.ZipInfo, header: bytes) -> Record:
    name = entry.filename
    if entry.flag_bits & _ENCRYPTED:
        raise _damaged(source, entry, "is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _damaged(source, entry, f"is compressed by method {entry.compress_type}, not by deflate")
    magic, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    raw_name = _raw_name(entry)
    if magic != ZIP_MAGIC or name_length != len(raw_name) or header[_LOCAL_HEADER.size :] != raw_name:
        raise _damaged(source, entry, "does not lie where the directory says")
    offset = entry.header_offset + len(header) + extra_length
    if offset + entry.compress_size > source.size:
        raise _damaged(source, entry, "ends outside the file, which is truncated")
    deflated = entry.compress_type == zipfile.ZIP_DEFLATED
    if not deflated and entry.compress_size != entry.file_size:
        raise _damaged(source, entry, f"claims {entry.file_size} bytes, but {entry.compress_size} are stored")
    if deflated and entry.file_size > entry.compress_size * _MOST_INFLATION + _SLACK:
        raise _damaged(
            source, entry, f"claims to unpack {entry.compress_size} bytes to the impossible {entry.file_size}"
        )
    return Record(source, name, offset, entry.file_size, entry.compress_size, deflated, entry.CRC)
