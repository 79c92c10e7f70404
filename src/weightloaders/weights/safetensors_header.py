"""The header of a safetensors file: JSON that says where each tensor lies, with every claim checked.

What the ``safetensors`` package refuses is refused here (``Metadata::validate`` in its ``tensor.rs``; JSON as its
parser understands it). Refused beyond that: names that occur twice in an object (it takes the last), entries that are
arrays instead of objects, and what torch can't hold: dtypes that it lacks, sizes that overflow its strides, an odd
number of half bytes in a row.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from weightloaders.errors import CheckpointFormatError, UnsupportedDtypeError
from weightloaders.weights.info import MAX_TENSOR_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

METADATA = "__metadata__"

# In the package's order (enum Dtype), which is by alignment: files are written from the last to the first.
_TORCH_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

#: The format's name of every dtype that this torch has. ``F4`` is torch's pair of two numbers in a byte.
DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _TORCH_NAMES.items() if hasattr(torch, name)
}

_FIELDS = len(("dtype", "shape", "data_offsets"))
# The name of a tensor, those of the fields, and its dtype.
_STRINGS = 1 + _FIELDS + 1
_MAX_U64 = (1 << 64) - 1
# serde_json's recursion limit, less the header's own object.
_MAX_NESTING = 127 - 1
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


# One tensor: the first byte of the data that it takes and the one behind the last, its name, dtype and shape. In this
# order, so that sorting entries sorts them by where they lie.
Entry = tuple[int, int, str, torch.dtype, tuple[int, ...]]


class NotAHeaderError(ValueError):
    """The bytes are no JSON object, so the file is probably no safetensors file at all."""


def parse_header(raw: bytes, available: int, file: str) -> tuple[list[Entry], dict[str, str]]:
    """Understand a header.

    Args:
        raw: Its bytes.
        available: How many bytes follow it in the file.
        file: The file's name, for messages.

    Returns:
        The tensors in the order of their bytes, and the texts of ``__metadata__``.

    Raises:
        NotAHeaderError: If it is not a JSON object.
        CheckpointFormatError: If it claims what can't be.
        UnsupportedDtypeError: If a tensor's dtype is one that this torch does not have.
    """
    return _Parser(file).parse(raw, available)


class _Parser:
    """Understands one header. A class so that every error knows the file."""

    def __init__(self, file: str) -> None:
        self._file = file

    def parse(self, raw: bytes, available: int) -> tuple[list[Entry], dict[str, str]]:
        header = self._json_object(raw)
        metadata = self._metadata(header.pop(METADATA, None))
        entries = sorted([self._entry(name, fields) for name, fields in header.items()])
        self._check_layout(entries, available)
        return entries, metadata

    def _refuse(self, problem: str, *, tensor: str | None = None, hint: str | None = None) -> NoReturn:
        raise CheckpointFormatError(f"{self._file} {problem}", file=self._file, tensor=tensor, hint=hint)

    def _json_object(self, raw: bytes) -> dict[str, Any]:
        try:
            header = _parse_json(raw)
        except (ValueError, RecursionError) as error:
            raise NotAHeaderError(f"has a header that is not valid JSON: {error}") from error
        except _DuplicateKeyError as error:
            self._refuse(f"has the name {error.key!r} twice in one object of its header", tensor=error.tensor)
        if type(header) is not dict:
            raise NotAHeaderError(f"has a header that is not a JSON object but a {type(header).__name__}")
        return header

    def _metadata(self, value: Any) -> dict[str, str]:
        if value is None:
            return {}
        if type(value) is not dict:
            self._refuse(f"has a {METADATA} that is not an object but {_short(value)}")
        for key, text in value.items():
            if type(text) is not str:
                self._refuse(f"has a {METADATA} whose {key!r} is not text but {_short(text)}")
        return value

    # -- one tensor

    def _entry(self, name: str, fields: Any) -> Entry:
        try:
            code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        except (KeyError, TypeError):
            self._refuse(
                f"describes tensor {name!r} by {_short(fields)}, not by dtype, shape and data_offsets", tensor=name
            )
        if len(fields) > _FIELDS:
            self._check_unknown(name, fields)
        dtype = DTYPES.get(code) if type(code) is str else None
        if dtype is None:
            self._refuse_dtype(name, code)
        if type(offsets) is not list or len(offsets) != 2 or not _are_sizes(offsets):
            self._refuse(f"has data_offsets {_short(offsets)} for tensor {name!r}, not two positions", tensor=name)
        if type(shape) is not list or not _are_sizes(shape):
            self._refuse(f"has the shape {_short(shape)} for tensor {name!r}, not a list of sizes", tensor=name)
        if code == "F4":
            if not shape or shape[-1] % 2:
                self._refuse(
                    f"has tensor {name!r} of shape {_short(shape)} in F4; torch holds pairs of these, so the last size "
                    "must be even",
                    tensor=name,
                )
            shape = [*shape[:-1], shape[-1] // 2]
        begin, end = offsets
        needed = self._nbytes(name, dtype, shape)
        if end - begin != needed:
            self._refuse(
                f"says that tensor {name!r} of shape {_short(fields['shape'])} in {code} lies at {offsets}, which are "
                f"{end - begin} bytes; it needs {needed}",
                tensor=name,
                hint="the header was damaged or made by a faulty writer; fetch the file again",
            )
        return begin, end, name, dtype, tuple(shape)

    def _check_unknown(self, name: str, fields: dict[str, Any]) -> None:
        """Fields that the format does not know are nobody's business, as long as the package's parser takes them."""
        if _nests_deeper(fields, _MAX_NESTING):
            self._refuse(f"has objects nested too deep in its header, at tensor {name!r}", tensor=name)
        if _has_huge_number(fields):
            self._refuse(f"has a number that is out of range in its header, at tensor {name!r}", tensor=name)

    def _refuse_dtype(self, name: str, code: Any) -> NoReturn:
        raise UnsupportedDtypeError(
            f"{self._file} has tensor {name!r} in the unsupported dtype {_short(code)}",
            file=self._file,
            tensor=name,
            hint=f"torch {torch.__version__} and safetensors share {', '.join(DTYPES)}",
        )

    def _nbytes(self, name: str, dtype: torch.dtype, shape: list[int]) -> int:
        # Multiplied step by step, because a hostile shape of a million sizes makes a number of a million digits. Zeros
        # count as one: an empty tensor has strides, too.
        product = dtype.itemsize
        for size in shape:
            product *= size or 1
            if product > MAX_TENSOR_BYTES:
                self._refuse(f"claims the absurd shape {_short(shape)} for tensor {name!r}", tensor=name)
        return 0 if 0 in shape else product

    # -- all tensors together

    def _check_layout(self, entries: Sequence[Entry], available: int) -> None:
        """Tensors lie one behind the other, from the first byte after the header to the last of the file."""
        position, before = 0, None
        for begin, end, name, _, _ in entries:
            if begin != position:
                gap = begin - position
                what = f"tensor {before!r} before it" if before is not None else "the header"
                self._refuse(
                    f"has tensor {name!r} at bytes {begin} to {end} of its data, but {what} ends "
                    f"at {position}: " + (f"the {gap} bytes between belong to nothing" if gap > 0 else "they overlap"),
                    tensor=name,
                    hint="the header is damaged; fetch the file again"
                    if gap > 0
                    else "tensors that share values are to be saved once, under one name",
                )
            position, before = end, name
        if position > available:
            first = next(name for _, end, name, _, _ in entries if end > available)
            self._refuse(
                f"is truncated: its tensors take {position} bytes, but only {available} follow the header; "
                f"{position - available} are missing, from tensor {first!r} on",
                tensor=first,
                hint="the download or copy was interrupted; fetch the file again",
            )
        if position < available:
            self._refuse(
                f"has {available - position} bytes behind its last tensor that belong to nothing",
                hint="the file was appended to, or its header belongs to another file; fetch it again",
            )


class _DuplicateKeyError(Exception):
    """A JSON object has a name twice."""

    def __init__(self, key: str, tensor: str | None) -> None:
        super().__init__(key)
        self.key = key
        self.tensor = tensor


def _parse_json(raw: bytes) -> Any:
    """Parse as the package's parser does, which is stricter than Python's about numbers and text."""
    parse = functools.partial(
        json.loads,
        raw.decode("utf-8"),
        # Python calls it for each number, where it is not its own; without a sign there is nothing that it would change
        # of numbers that can be sizes.
        parse_int=_whole_number if b"-" in raw else None,
        parse_float=_finite_number,
        parse_constant=_refuse_constant,
    )
    value = parse()
    if b"\\" in raw or not _has_all_names(value, raw.count(b'"')):
        # By a call for each object, which takes as long as all the rest.
        value = parse(object_pairs_hook=_object)
    if _SURROGATE.search(raw):
        # Half a surrogate pair is no text; encoding finds those that are really halves.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _has_all_names(header: Any, quotes: int) -> bool:
    """Whether no name can have come twice, of which Python keeps the last: by the number of quotes in the text.

    Without escapes there are two around each string, and what was lost would have had some. An entry of fewer strings
    than this counts is refused whatever else there is.
    """
    if type(header) is not dict:
        return False
    metadata = header.get(METADATA)
    strings = _STRINGS * len(header)
    if type(metadata) is dict:
        strings += 1 + 2 * len(metadata) - _STRINGS
    return quotes == 2 * strings


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, count in counts.items() if count > 1)
        raise _DuplicateKeyError(key, tensor=key if type(result[key]) is dict and key != METADATA else None)
    return result


def _whole_number(digits: str) -> int | float:
    # Numbers that no 64-bit integer holds, and minus zero, are floating point to that parser. (20 digits may still be
    # too many, but not by enough to be slow.)
    return int(digits) if len(digits) <= 20 and digits != "-0" else _finite_number(digits)


def _finite_number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


def _are_sizes(values: list[Any]) -> bool:
    for value in values:  # noqa: SIM110 -- twice as fast as all(), and called twice for each tensor
        # `type`, because a bool is an int to `isinstance`.
        if type(value) is not int or not 0 <= value <= _MAX_U64:
            return False
    return True


def _has_huge_number(value: Any) -> bool:
    """Whether there is a whole number that no floating-point number comes near."""
    if isinstance(value, dict | list):
        return any(map(_has_huge_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value > sys.float_info.max


def _nests_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _nests_deeper(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value)
    )


_repr = reprlib.Repr()
_repr.maxlist, _repr.maxstring = 8, 80
_short = _repr.repr
