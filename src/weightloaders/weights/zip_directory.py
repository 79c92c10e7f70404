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
from weightloaders.weights.source_file import MAX_READ, SourceFile

if TYPE_CHECKING:
    from weightloaders.weights.source import ByteSource

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED, _UTF8 = 0x1, 0x800
# No deflated stream unpacks to more than 1,032 times its size.
_MOST_INFLATION, _SLACK = 1032, 1024


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
    """

    source: ByteSource
    name: str
    offset: int
    size: int
    packed_size: int
    deflated: bool = False

    def read(self, limit: int = MAX_READ) -> bytes:
        """All its bytes, unpacked.

        Raises:
            CheckpointFormatError: If it is larger than ``limit``, or does not unpack to what it claims.
            SourceReadError: If reading fails.
        """
        if self.size > limit:
            raise CheckpointFormatError(
                f"{self.name!r} in {self.source.name} claims {self.size} bytes where at most {limit} make sense",
                file=self.source.name,
            )
        packed = self.source.read(self.offset, self.packed_size)
        if not self.deflated:
            return packed
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflater.decompress(packed, self.size + 1)
        except zlib.error as error:
            raise CheckpointFormatError(
                f"{self.name!r} in {self.source.name} can't be unpacked: {error}", file=self.source.name
            ) from error
        if len(data) != self.size:
            raise CheckpointFormatError(
                f"{self.name!r} in {self.source.name} does not unpack to the {self.size} bytes it claims",
                file=self.source.name,
            )
        return data


def read_directory(source: ByteSource) -> dict[str, Record]:
    """The records of a zip file by name; no data is read.

    Raises:
        CheckpointFormatError: If the file is truncated or damaged, has two records of one name or overlapping ones, or
            uses encryption or a compression other than deflate.
        SourceReadError: If reading fails.
    """
    try:
        entries = zipfile.ZipFile(SourceFile(source)).infolist()
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
        raise CheckpointFormatError(
            f"{source.name} is a zip file without a readable directory ({error})",
            file=source.name,
            hint="the directory is at the end, so the file is probably truncated; fetch it again",
        ) from error
    records: dict[str, Record] = {}
    end, before = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        record = _record(source, entry)
        if record.name in records:
            raise CheckpointFormatError(f"{source.name} has two records named {record.name!r}", file=source.name)
        if entry.header_offset < end:
            raise UnsafeCheckpointError(
                f"the records {before!r} and {record.name!r} of {source.name} overlap", file=source.name
            )
        end, before = record.offset + record.packed_size, record.name
        records[record.name] = record
    return records


def _record(source: ByteSource, entry: zipfile.ZipInfo) -> Record:
    name = entry.filename

    def damaged(what: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"the record {name!r} of {source.name} {what}", file=source.name)

    if entry.flag_bits & _ENCRYPTED:
        raise damaged("is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise damaged(f"is compressed by method {entry.compress_type}, not by deflate")
    raw_name = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")
    name_end = entry.header_offset + _LOCAL_HEADER.size + len(raw_name)
    if entry.header_offset < 0 or name_end > source.size:
        raise damaged("lies outside the file, which is truncated")
    header = source.read(entry.header_offset, _LOCAL_HEADER.size + len(raw_name))
    magic, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
    if magic != ZIP_MAGIC or name_length != len(raw_name) or header[_LOCAL_HEADER.size :] != raw_name:
        raise damaged("does not lie where the directory says")
    offset = name_end + extra_length
    if offset + entry.compress_size > source.size:
        raise damaged("ends outside the file, which is truncated")
    deflated = entry.compress_type == zipfile.ZIP_DEFLATED
    if not deflated and entry.compress_size != entry.file_size:
        raise damaged(f"claims {entry.file_size} bytes, but {entry.compress_size} are stored")
    if deflated and entry.file_size > entry.compress_size * _MOST_INFLATION + _SLACK:
        raise damaged(f"claims to unpack {entry.compress_size} bytes to the impossible {entry.file_size}")
    return Record(source, name, offset, entry.file_size, entry.compress_size, deflated)
