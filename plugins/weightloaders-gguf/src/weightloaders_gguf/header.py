"""The header of a GGUF file: what the model is, and where each tensor lies, with every claim checked.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp's own reader (``gguf.cpp``)
refuses is refused here, but for gaps between tensors, which do no harm. Refused beyond that: text that is not UTF-8,
and tensors that overlap.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from weightloaders.errors import CheckpointFormatError, DuplicateTensorError, UnsupportedDtypeError
from weightloaders_gguf.ggml_types import TYPES, GgmlType

if TYPE_CHECKING:
    from weightloaders import ByteSource

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Vocabularies take a few million bytes; a header beyond this is a damaged one.
MAX_HEADER_BYTES = 1 << 28

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NAME_BYTES = 1 << 16
_MAX_ELEMENTS = 1 << 60
_FIRST_READ, _LARGEST_READ = 1 << 18, 1 << 24
# A key of no characters, its type and a value of one byte; a tensor of no name and no dimensions.
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8

# `enum gguf_type`: what struct calls numbers of that type.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class StoredTensor(NamedTuple):
    """A tensor as the file has it.

    Attributes:
        name: Its name.
        shape: Its sizes as torch counts them, the outermost first.
        type: How its numbers are stored.
        offset: Its first byte, from the start of the file.
        nbytes: Its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


class Array(Sequence[Any]):
    """An array of the metadata. A vocabulary is long and rarely asked for, so it is decoded when it is."""

    def __init__(self, file: str, raw: bytearray, start: int, code: int, count: int, order: str) -> None:
        self._file, self._raw, self._start, self._code = file, raw, start, code
        self._count, self._order = count, order
        self._values: list[Any] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is an array of texts."""
        return self._code == _STRING

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        return f"<{self._count} values>"

    @property
    def values(self) -> list[Any]:
        """All of them.

        Raises:
            CheckpointFormatError: If one is no UTF-8 text.
        """
        if self._values is None:
            self._values = list(self._strings() if self._code == _STRING else self._numbers())
        return self._values

    def _numbers(self) -> Sequence[Any]:
        return struct.unpack_from(f"{self._order}{self._count}{_NUMBERS[self._code]}", self._raw, self._start)

    def _strings(self) -> Iterator[str]:
        length_at = struct.Struct(self._order + "Q").unpack_from
        at, raw = self._start, self._raw
        try:
            for _ in range(self._count):
                end = at + 8 + length_at(raw, at)[0]
                yield raw[at + 8 : end].decode("utf-8")
                at = end
        except UnicodeDecodeError as error:
            raise CheckpointFormatError(
                f"{self._file} has a text at byte {at + 8} that is not UTF-8: {error}", file=self._file
            ) from error


class Header(NamedTuple):
    """What a GGUF file says before its data.

    Attributes:
        file: The file's name, for messages.
        version: 2 or 3.
        byteorder: Of all numbers in it, those of its tensors included.
        metadata: Its key-value pairs; arrays as `Array`.
        tensors: In the order of the header.
    """

    file: str
    version: int
    byteorder: Literal["little", "big"]
    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model; empty where the file does not say."""
        found = self.metadata.get("general.architecture", "")
        return found if isinstance(found, str) else ""


def read_header(source: ByteSource, max_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read and understand a header; of the tensors nothing is read.

    Args:
        source: The file, or whatever has its bytes.
        max_bytes: A longer header is refused.

    Raises:
        CheckpointFormatError: If it is no GGUF file, or its header claims what can't be.
        DuplicateTensorError: If two tensors have one name.
        UnsupportedDtypeError: If a tensor is of a type that is not known.
        SourceReadError: If it can't be read.
    """
    return _Parser(source, max_bytes).parse()


class _Parser:
    """Understands one header, of which it reads no more than it needs."""

    def __init__(self, source: ByteSource, max_bytes: int) -> None:
        self._source, self._file, self._size = source, source.name, source.size
        self._limit = min(max_bytes, self._size)
        self._raw = bytearray()
        self._at = 0
        self._order = "<"

    def parse(self) -> Header:
        version = self._version()
        tensor_count, pair_count = self._number("Q"), self._number("Q")
        if tensor_count * _LEAST_TENSOR + pair_count * _LEAST_PAIR > self._size - self._at:
            self._refuse(f"claims {tensor_count:,} tensors and {pair_count:,} properties in {self._size:,} bytes")
        metadata = self._metadata(pair_count)
        alignment = self._alignment(metadata)
        claims = [self._tensor() for _ in range(tensor_count)]
        begin = -(-self._at // alignment) * alignment
        tensors = tuple(self._placed(claim, begin, alignment) for claim in claims)
        self._check_names_and_places(tensors)
        return Header(self._file, version, "big" if self._order == ">" else "little", metadata, tensors)

    # -- bytes

    def _refuse(self, problem: str, *, tensor: str | None = None, hint: str | None = None) -> NoReturn:
        raise CheckpointFormatError(f"{self._file} {problem}", file=self._file, tensor=tensor, hint=hint)

    def _need(self, end: int) -> None:
        """See to it that all bytes before this one are there."""
        if end > self._limit:
            if end <= self._size:
                self._refuse(f"has a header of more than {self._limit:,} bytes, which no sound file has")
            self._refuse(
                f"ends at byte {self._size:,}, within its header",
                hint="the download was interrupted, or the header is damaged: fetch it again",
            )
        while len(self._raw) < end:
            have = len(self._raw)
            step = max(end - have, min(max(have, _FIRST_READ), _LARGEST_READ))
            self._raw += self._source.read(have, min(step, self._limit - have))

    def _number(self, code: str) -> Any:
        packed = self._order + code
        end = self._at + struct.calcsize(packed)
        self._need(end)
        (value,) = struct.unpack_from(packed, self._raw, self._at)
        self._at = end
        return value

    def _text(self, what: str, longest: int) -> str:
        length = self._number("Q")
        if length > longest:
            self._refuse(f"has {what} of {length:,} bytes at byte {self._at - 8}")
        end = self._at + length
        self._need(end)
        raw = self._raw[self._at : end]
        self._at = end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointFormatError(
                f"{self._file} has {what} that is not UTF-8: {bytes(raw[:80])!r}", file=self._file
            ) from error

    # -- the parts of a header

    def _version(self) -> int:
        head = self._source.read(0, min(self._size, 8))
        if head[:4] != MAGIC or len(head) < len(MAGIC) + 4:
            self._refuse(f"is no GGUF file: it begins with {head[:4]!r}, not {MAGIC!r}", hint=_what_else(head))
        self._at = len(MAGIC)
        # A small number whose lower half is zero is one of the other byte order.
        self._order = ">" if not int.from_bytes(head[4:8], "little") & 0xFFFF else "<"
        version: int = self._number("I")
        if version not in VERSIONS or (self._order == ">" and version != VERSIONS[-1]):
            order = "big-endian " if self._order == ">" else ""
            self._refuse(
                f"is of {order}GGUF version {version}; 2 and 3 are read, big-endian ones from 3 on",
                hint="convert the model again with a llama.cpp of today",
            )
        return version

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._text("a property's name", _MAX_NAME_BYTES)
            if key in metadata:
                self._refuse(f"has the property {key!r} twice")
            code = self._number("I")
            metadata[key] = self._array(key) if code == _ARRAY else self._value(key, code)
        return metadata

    def _value(self, key: str, code: int) -> Any:
        if code == _STRING:
            return self._text(f"a text as {key!r}", self._limit)
        if code not in _NUMBERS:
            self._refuse(f"has a value of the unknown type {code} as {key!r}")
        return self._number(_NUMBERS[code])

    def _array(self, key: str) -> Array:
        code, count = self._number("I"), self._number("Q")
        begin = self._at
        if code == _ARRAY:
            self._refuse(f"has an array of arrays as {key!r}, which nobody reads")
        if code == _STRING:
            self._skip_texts(key, count)
        elif code in _NUMBERS:
            self._at += count * struct.calcsize(self._order + _NUMBERS[code])
            self._need(self._at)
        else:
            self._refuse(f"has an array of the unknown type {code} as {key!r}")
        return Array(self._file, self._raw, begin, code, count, self._order)

    def _skip_texts(self, key: str, count: int) -> None:
        if count * 8 > self._limit - self._at:
            self._refuse(f"claims {count:,} texts as {key!r} in {self._size:,} bytes")
        # A vocabulary has a hundred thousand of them, so there is no call for each but this one.
        length_at = struct.Struct(self._order + "Q").unpack_from
        raw, at, left = self._raw, self._at, count
        while left:
            try:
                for left in range(left, 0, -1):  # noqa: B007, B020 -- where it stopped is where it goes on
                    at += 8 + length_at(raw, at)[0]
                left = 0
            except (struct.error, OverflowError):
                self._need(at + 8)
        self._need(at)
        self._at = at

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment < 1 << 32 or alignment & (alignment - 1):
            self._refuse(f"has the alignment {alignment!r}, which is no power of two")
        return alignment

    def _tensor(self) -> StoredTensor:
        name = self._text("a tensor's name", _MAX_NAME_BYTES)
        dims = self._number("I")
        if dims > _MAX_DIMS:
            self._refuse(f"says that tensor {name!r} has {dims} dimensions; there are at most {_MAX_DIMS}", tensor=name)
        # The innermost comes first in the file.
        shape = tuple(reversed([self._number("Q") for _ in range(dims)]))
        code, offset = self._number("I"), self._number("Q")
        if code not in TYPES:
            raise UnsupportedDtypeError(
                f"tensor {name!r} of {self._file} is stored as type {code}, which is not known",
                file=self._file,
                tensor=name,
                hint="a newer weightloaders-gguf may know it; llama.cpp's llama-quantize turns it into another",
            )
        kind = TYPES[code]
        # What is empty has strides too, which must not overflow.
        if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
            self._refuse(f"says that tensor {name!r} has the absurd shape {list(shape)}", tensor=name)
        row = shape[-1] if shape else 1
        if row % kind.elements:
            self._refuse(
                f"says that tensor {name!r} has rows of {row} numbers, stored as {kind.name} in blocks of "
                f"{kind.elements}",
                tensor=name,
            )
        return StoredTensor(name, shape, kind, offset, math.prod(shape) // kind.elements * kind.nbytes)

    def _placed(self, claim: StoredTensor, begin: int, alignment: int) -> StoredTensor:
        if claim.offset % alignment:
            self._refuse(
                f"says that tensor {claim.name!r} lies at {claim.offset}, which is no multiple of {alignment}",
                tensor=claim.name,
            )
        offset = begin + claim.offset
        # One without numbers may lie where padding would have been.
        end = self._size if claim.nbytes else max(begin, -(-self._size // alignment) * alignment)
        if offset + claim.nbytes > end:
            self._refuse(
                f"says that tensor {claim.name!r} ends at byte {offset + claim.nbytes:,}, but the file has "
                f"{self._size:,}",
                tensor=claim.name,
                hint="the download was interrupted: fetch the file again",
            )
        return claim._replace(offset=offset)

    def _check_names_and_places(self, tensors: Sequence[StoredTensor]) -> None:
        names = set()
        for tensor in tensors:
            if tensor.name in names:
                raise DuplicateTensorError(
                    f"{self._file} has two tensors named {tensor.name!r}", file=self._file, tensor=tensor.name
                )
            names.add(tensor.name)
        end, before = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if not tensor.nbytes:
                continue
            if tensor.offset < end:
                self._refuse(f"says that the tensors {before!r} and {tensor.name!r} overlap", tensor=tensor.name)
            end, before = tensor.offset + tensor.nbytes, tensor.name


def _what_else(head: bytes) -> str | None:
    if head.startswith(b"version "):
        return "it is a Git LFS pointer: run `git lfs pull` in the repository, or download the file itself"
    if head.lstrip()[:1] in (b"<", b"{"):
        return "it is a text, perhaps an error message that was saved in its place: fetch it again"
    return "fetch it again" if not head.strip(b"\0") else None
