"""The index of a tensorizer file: what it holds and where, every claim checked.

tensorizer itself reads what a header says without holding it against the file, and a file that ends early as if memory
had the rest. So nothing is left to it that has not been looked at here.

The format is that of tensorizer 2.12, ``tensorizer/serialization.py``: the magic, the version (``<I``), feature flags
(32 bytes), sizes and the number of tensors; then the length of the index (``<Q``) and for each tensor its name (``H``
bytes), kind (one byte), dtype (``B`` bytes), shape (``B`` sizes of four bytes, or eight in entries of version 5), and
the offsets of its own header and of its values, and their length (``<QQQ``).
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import weightloaders as wl
from weightloaders.errors import CheckpointFormatError, DuplicateTensorError, UnsupportedDtypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MAGIC = b"|TZR|"
_VERSIONS = range(1, 6)
_VERSION_OF_LONG_SHAPES = 5
# The version that brought encryption had no flag for it.
_VERSION_OF_ENCRYPTION = 3
_ENCRYPTED, _VERSIONED_ENTRIES = 1, 2
# tensorizer reserves a quarter of a megabyte; a tensor takes a few dozen bytes.
_MAX_INDEX_BYTES = 1 << 28
_LEAST_ENTRY_BYTES = 29
_MAX_DIMENSIONS = 64
_STATE_DICT = 2
# Values are read by number of bytes; names of other kinds ("O", "U") are not of numbers at all.
_NUMPY = re.compile(r"(?P<order>[<>|=]?)(?P<kind>[biufcV])(?P<size>\d{1,2})")
_TORCH = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor.

    Attributes:
        info: What is known of it.
        path: What tensorizer calls it: a name, or the keys that lead to it in a nested state dict.
        place: Its place in the index.
        header: The byte at which its own header begins.
        said: What its own header has to say of it: kind, name, dtype and shape, byte for byte.
    """

    info: wl.TensorInfo
    path: str | tuple[str | int, ...]
    place: int
    header: int
    said: bytes


@dataclass
class Index:
    """What a file holds.

    Attributes:
        entries: Its tensors.
        notes: Remarks for the report.
    """

    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Reader:
    """Fields one after the other, each within what is there."""

    def __init__(self, data: bytes, path: str) -> None:
        self._data, self._at, self._path = data, 0, path

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise CheckpointFormatError(
                f"the index of {self._path} ends in the middle of an entry", file=self._path, hint="fetch it again"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, kind: str) -> int:
        return int(self.numbers(kind, 1)[0])

    def numbers(self, kind: str, count: int) -> tuple[int, ...]:
        form = struct.Struct(f"<{count}{kind}")
        return form.unpack(self.take(form.size))

    def text(self, kind: str) -> bytes:
        return self.take(self.number(kind))


def read_index(source: wl.ByteSource) -> Index:
    """Read and check what a file says that it holds.

    Raises:
        SourceReadError: If it can't be read.
        CheckpointFormatError: If it is another kind of file, encrypted, or its index does not fit it.
    """
    path = source.name
    begin = source.read(0, min(source.size, _HEAD.size))
    if begin[: len(MAGIC)] != MAGIC:
        raise CheckpointFormatError(
            f"{path} is no file of tensorizer's: it does not begin with {MAGIC.decode()}",
            file=path,
            hint="the loader 'auto' finds out what it is",
        )
    if len(begin) < _HEAD.size:
        raise CheckpointFormatError(f"{path} ends within its header", file=path, hint="fetch it again")
    _, version, raw_flags, _, count, length = _HEAD.unpack(begin)
    flags = int.from_bytes(raw_flags, "little")
    if version not in _VERSIONS or flags > (_ENCRYPTED | _VERSIONED_ENTRIES):
        raise CheckpointFormatError(
            f"{path} is of a version of tensorizer's format that is not known here: {version}, with flags {flags:#x}",
            file=path,
        )
    if version == _VERSION_OF_ENCRYPTION or flags & _ENCRYPTED:
        raise CheckpointFormatError(
            f"{path} is encrypted", file=path, hint="decrypt it with tensorizer, and save it without encryption"
        )
    if length > min(source.size - _HEAD.size, _MAX_INDEX_BYTES) or count * _LEAST_ENTRY_BYTES > length:
        raise CheckpointFormatError(
            f"{path} claims an index of {length} bytes for {count} tensors, in a file of {source.size} bytes",
            file=path,
            hint="the file is truncated or damaged; fetch it again",
        )
    reader = _Reader(source.read(_HEAD.size, length), path)
    index = Index()
    without_values = []
    for place in range(count):
        entry = _entry(reader, source, place, versioned=bool(flags & _VERSIONED_ENTRIES))
        if isinstance(entry, str):
            without_values.append(entry)
        else:
            index.entries.append(entry)
    if without_values:
        index.notes.append(f"saved without values, and so left out: {', '.join(without_values)}")
    _check_names(index.entries, path)
    return index


def check_headers(source: wl.ByteSource, entries: Sequence[Entry]) -> None:
    """Refuse a file whose tensors are not right behind headers of their own that say the same of them as the index.

    tensorizer goes by these headers: it reads as many bytes as one says, into a tensor of the shape that it says.

    Raises:
        CheckpointFormatError: If one says something else.
        SourceReadError: If the file can't be read.
    """
    lengths = [_OWN_HEAD.size + len(entry.said) + _HASHES.size for entry in entries]
    for entry, length in zip(entries, lengths, strict=True):
        room = entry.info.extents[0].offset - entry.header - length - _OWN_LENGTH.size
        if not 0 <= room < 1 << (8 * _HASHES.size):
            raise _other_header(source, entry, "it is not where the index says")
    begins = [(entry.header, length) for entry, length in zip(entries, lengths, strict=True)]
    ends = [(entry.info.extents[0].offset - _OWN_LENGTH.size, _OWN_LENGTH.size) for entry in entries]
    read = source.read_many(begins + ends)
    for entry, begin, end in zip(entries, read[: len(entries)], read[len(entries) :], strict=True):
        total, _ = _OWN_HEAD.unpack_from(begin)
        if total != entry.info.extents[0].offset - entry.header:
            raise _other_header(source, entry, "it is not where the index says")
        if begin[_OWN_HEAD.size : -_HASHES.size] != entry.said:
            raise _other_header(source, entry, "its name, dtype or shape is another")
        (hashes,) = _HASHES.unpack(begin[-_HASHES.size :])
        if len(begin) + hashes + _OWN_LENGTH.size != total:
            raise _other_header(source, entry, "its hashes don't fill the space that they have")
        (length,) = _OWN_LENGTH.unpack(end)
        if length != entry.info.nbytes:
            raise _other_header(source, entry, f"it says {length} bytes, not {entry.info.nbytes}")


def _other_header(source: wl.ByteSource, entry: Entry, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the header of tensor {entry.info.name!r} in {source.name} does not go with the file's index: {what}",
        file=source.name,
        tensor=entry.info.name,
        hint="the file is damaged; fetch it again",
    )


# A tensor's own header: its length and a module's number, then kind, name, dtype and shape, ...
_OWN_HEAD = struct.Struct("<QH")
# ... the length of the hashes, the hashes, and the length of its values.
_HASHES = struct.Struct("<H")
_OWN_LENGTH = struct.Struct("<q")
# Magic, version, feature flags, total size, unused, number of tensors, length of the index.
_HEAD = struct.Struct("<5sI32s16sQQ")


def _entry(reader: _Reader, source: wl.ByteSource, place: int, *, versioned: bool) -> Entry | str:
    """The next tensor; only its name where it was saved without values."""
    long = versioned and reader.number("I") >= _VERSION_OF_LONG_SHAPES
    raw_name = reader.text("H")
    path = _path(raw_name, source.name)
    name = path if isinstance(path, str) else ".".join(map(str, path))
    kind = reader.number("B")
    if kind != _STATE_DICT:
        # The parameters of a module are saved with the module's name in front, which the model itself has none of.
        name = name.removeprefix(".")
    where = {"file": source.name, "tensor": name}
    raw_dtype = reader.text("B")
    dtype, byteorder = _dtype(raw_dtype, where)
    shape = reader.numbers("Q" if long else "I", reader.number("B"))
    header, offset, length = reader.numbers("Q", 3)
    needed = math.prod(shape) * dtype.itemsize
    if len(shape) > _MAX_DIMENSIONS or length not in (0, needed):
        raise CheckpointFormatError(
            f"tensor {name!r} of shape {list(shape)} in {dtype} takes {needed} bytes, but the index says {length}",
            **where,
        )
    if length != needed:
        return name
    info = wl.TensorInfo(name, dtype, shape, wl.Extent(source, offset, length, byteorder=byteorder))
    form = f"<BH{len(raw_name)}sB{len(raw_dtype)}sB{len(shape)}{'Q' if long else 'I'}"
    said = struct.pack(form, kind, len(raw_name), raw_name, len(raw_dtype), raw_dtype, len(shape), *shape)
    return Entry(info, path, place, header, said)


def _path(raw: bytes, file: str) -> str | tuple[str | int, ...]:
    try:
        if raw[:1] != b"\x1e":
            return raw.decode()
        keys = json.loads(raw[1:])
        if isinstance(keys, list) and keys and all(type(key) in (str, int) for key in keys):
            return tuple(keys)
    except (ValueError, RecursionError):  # a ValueError: also what is no UTF-8, or no JSON
        pass
    raise CheckpointFormatError(f"the index of {file} has a name that is none: {raw[:80]!r}", file=file)


def _dtype(raw: bytes, where: dict[str, str]) -> tuple[torch.dtype, Literal["little", "big"]]:
    """The dtype, and the byte order, of names such as ``<f4`` and ``<V2`` with torch's own name behind a zero byte."""
    import torch

    text, _, own = raw.decode("ascii", "replace").partition("\0")
    match = _NUMPY.fullmatch(text)
    name = own.removeprefix("torch.") if own else _TORCH.get(f"{match['kind']}{match['size']}" if match else "")
    dtype = getattr(torch, name, None) if name else None
    if match is None or not isinstance(dtype, torch.dtype) or dtype.itemsize != int(match["size"]):
        raise UnsupportedDtypeError(
            f"tensor {where['tensor']!r} is stored as {own or text!r}, which torch has no dtype for", **where
        )
    return dtype, "big" if match["order"] == ">" else "little"


def _check_names(entries: list[Entry], path: str) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.info.name in seen:
            raise DuplicateTensorError(
                f"{path} has two tensors named {entry.info.name!r}", file=path, tensor=entry.info.name
            )
        seen.add(entry.info.name)
