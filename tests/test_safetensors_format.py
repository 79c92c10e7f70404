"""safetensors: the header's parser against the package as the reference, and the streaming writer."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import re
import stat
import struct
import subprocess
import sys
import time
import weakref
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders.errors import CheckpointFormatError, SaveError, UnsupportedDtypeError
from weightloaders.weights import info, locks, safetensors_header
from weightloaders.weights.safetensors import (
    MAX_HEADER_BYTES,
    read_safetensors,
    write_safetensors,
    write_sharded,
)
from weightloaders.weights.safetensors_header import DTYPES
from weightloaders.weights.sniff import describe_content
from weightloaders.weights.source import ByteSource, FileSource
from weightloaders.weights.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Memory(ByteSource):
    """Bytes in memory, which notes how much is asked of it."""

    def __init__(self, content: bytes, size: int | None = None) -> None:
        self.name = "memory.safetensors"
        self.content = content
        self._size = len(content) if size is None else size
        self.largest_read = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def identity(self) -> int:
        return id(self)

    def read_into(self, view: memoryview, offset: int) -> None:
        self.largest_read = max(self.largest_read, len(view))
        piece = self.content[offset : offset + len(view)]
        view[: len(piece)] = piece


def blob(header: str | bytes | dict[str, Any], data: int | bytes = b"") -> bytes:
    """A file of this header and so many bytes of data."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    data = bytes(i % 251 for i in range(data)) if isinstance(data, int) else data
    return struct.pack("<Q", len(header)) + header + data


def entry(
    dtype: str = "U8", shape: tuple[int, ...] | list[int] = (1,), offsets: tuple[int, int] = (0, 1)
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def catalogue(content: bytes) -> Weights:
    return Weights.describe(read_safetensors(Memory(content)).infos)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


# ------------------------------------------------------------------ the verdict is the package's


def reference(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """What the safetensors package makes of these bytes; None where it refuses them."""
    try:
        return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


def reason_to_be_stricter(content: bytes, accepted: dict[str, tuple[str, list[int], bytes]]) -> str | None:
    """Why we refuse a file that the package accepts. These are all the reasons there are."""
    for dtype, shape, _ in accepted.values():
        if dtype not in DTYPES:
            return "torch has no such dtype"  # F6_E2M3, F6_E3M2: its own torch functions refuse them, too
        if dtype == "F4" and (not shape or shape[-1] % 2):
            return "torch holds F4 in pairs"  # safe_open refuses it as well, once the tensor is asked for
        if math.prod(n or 1 for n in shape) * DTYPES[dtype].itemsize > info.MAX_TENSOR_BYTES:
            return "torch's strides would overflow"  # an empty tensor with gigantic other sizes

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise LookupError
        return dict(pairs)

    length = struct.unpack("<Q", content[:8])[0]
    try:
        header = json.loads(content[8 : 8 + length], object_pairs_hook=no_duplicates)
    except LookupError:
        return "a name twice"  # the package takes the last; a name that means two things is a damaged file
    for name, value in header.items():
        if name != "__metadata__" and (isinstance(value, list) or isinstance(value["dtype"], dict)):
            return "not as the format says"  # accidents of its parser: a struct as an array, an enum as an object
    return None


def check_same_verdict(content: bytes) -> None:
    expected = reference(content)
    if expected is None or reason_to_be_stricter(content, expected) is not None:
        with pytest.raises(CheckpointFormatError, match=r"memory\.safetensors") as refused:
            read_safetensors(Memory(content))
        assert refused.value.file == "memory.safetensors"
        return
    weights = catalogue(content)
    assert set(weights) == set(expected)
    for name, (dtype, shape, data) in expected.items():
        tensor = weights[name]
        assert tensor.dtype == DTYPES[dtype]
        assert list(tensor.shape) == ([*shape[:-1], shape[-1] // 2] if dtype == "F4" else shape)
        assert raw_bytes(tensor) == data


BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {
    code: dtype.itemsize * 8 for code, dtype in DTYPES.items() if code != "F4"
}

# Values where the format's or JSON's rules are easily got wrong, as JSON text.
TOKENS = (
    *("0", "1", "2", "-0", "-1", "1.0", "0.0", "1e0", "01", "+1", "1e999", "1e-999", "9" * 20, "9" * 25, "9" * 400),
    *("18446744073709551615", "18446744073709551616", "9223372036854775808", "4611686018427387904"),
    *("true", "false", "null", "NaN", "Infinity", "-Infinity", '"1"', '""', '"F32"', '"f32"', '"F128"', "{}", "[]"),
    *("[0]", "[1]", "[0,0]", "[0,1]", "[1,0]", "[0,1,2]", "[1.0]", "[true]", "[[1]]", '["1"]', "[-0]", "[null]"),
    *("[0,18446744073709551615]", "[18446744073709551615,0]", "[4294967296,4294967296,0]", "[0,4294967296,4294967296]"),
    *('{"U8":null}', '{"a":"b"}', '{"a":1}', '{"a":"b","a":"c"}', '{"x":[{"y":{}}]}', '["U8",[1],[0,1]]', "[null, {}]"),
    *(r'"\ud800"', r'"\ud83d\ude00"', r'"\\ud800"', r'"\u0041"', r'"\x41"', '"\t"', '"\u00e9\u6a21"', '"\x7f"', "'a'"),
    *("[" * 125 + "]" * 125, "[" * 126 + "]" * 126, '{"a":' * 125 + "1" + "}" * 125, '{"a":' * 126 + "1" + "}" * 126),
)
NAMES = ("a", "b", "c", "d.weight", "", "模型", r"\u0041", r"\ud83d\ude00", r"\n", "__metadata__", "dtype")


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A valid file, with some of what it says replaced, left out, doubled or moved."""
    mutate = draw(st.sampled_from([0.0, 0.05, 0.15]))

    def now() -> bool:
        return mutate > 0 and draw(st.floats(0, 1, exclude_max=True)) < mutate

    def token() -> str:
        return draw(st.sampled_from(TOKENS))

    entries: list[tuple[str, str]] = []
    position = 0
    names = NAMES[: 4 if mutate else 3]
    for i in range(draw(st.integers(0, 3))):
        code = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        length = math.prod(shape) * BITS[code] // 8
        begin = position + (draw(st.integers(-2, 2)) if now() else 0)
        end = begin + length + (draw(st.integers(-2, 2)) if now() else 0)
        fields = [
            ("dtype", token() if now() else f'"{code}"'),
            ("shape", token() if now() else json.dumps(shape)),
            ("data_offsets", token() if now() else json.dumps([begin, end])),
        ]
        if now():
            fields.pop(draw(st.integers(0, 2)))
        if now():
            fields.append((draw(st.sampled_from(["extra", "dtype", "shape"])), token()))
        fields = draw(st.permutations(fields))
        text = token() if now() else "{" + ",".join(f'"{key}": {value}' for key, value in fields) + "}"
        entries.append((draw(st.sampled_from(NAMES)) if now() else names[i], text))
        position = max(position, end)
    if draw(st.booleans()):
        entries.append(
            ("__metadata__", token() if now() else draw(st.sampled_from(["null", "{}", '{"format": "pt"}'])))
        )
    entries = draw(st.permutations(entries))
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in entries) + "}"
    text = draw(st.sampled_from(["", " ", "\n"])) + text + draw(st.sampled_from(["", "  ", "\n\t\r "]))
    if now():
        text += draw(st.sampled_from(["\0", "x", "{}", "\x0b", "\u00a0", ","]))
    return blob(text, max(0, position + (draw(st.integers(-2, 2)) if now() else 0)))


@settings(max_examples=1000, deadline=None)
@given(files())
def test_every_file_gets_the_verdict_and_the_values_that_the_package_gives(content: bytes) -> None:
    check_same_verdict(content)


@settings(max_examples=300, deadline=None)
@given(files(), st.data())
def test_a_file_damaged_in_its_bytes_gets_the_verdict_that_the_package_gives(
    content: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        match data.draw(st.sampled_from(["change", "delete", "insert", "cut"])):
            case "change":
                damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "delete":
                del damaged[at : at + data.draw(st.integers(1, 4))]
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del damaged[at:]
    check_same_verdict(bytes(damaged))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(blob), st.text(max_size=64).map(blob)))
def test_arbitrary_bytes_get_the_verdict_that_the_package_gives(content: bytes) -> None:
    check_same_verdict(content)


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize(
    "place", ["dtype", "shape", "data_offsets", "extra", "entry", "metadata", "metadata value", "header"]
)
def test_each_odd_value_in_each_place_gets_the_verdict_that_the_package_gives(token: str, place: str) -> None:
    fields = {"dtype": '"U8"', "shape": "[1]", "data_offsets": "[0,1]"}
    if place in (*fields, "extra"):
        fields[place] = token
    tensor = token if place == "entry" else "{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}"
    metadata = {"metadata": token, "metadata value": f'{{"k":{token}}}'}.get(place, "null")
    header = token if place == "header" else f'{{"__metadata__":{metadata},"a":{tensor}}}'
    for length in (0, 1):
        check_same_verdict(blob(header, length))


def test_every_prefix_and_every_extension_of_a_good_file_is_refused_by_name(tmp_path: Path) -> None:
    good = safetensors.torch.save({"a": torch.arange(3), "b": torch.ones(2, 2)}, {"format": "pt"})
    assert len(catalogue(good)) == 2
    path = tmp_path / "model.safetensors"
    for content in [*(good[:n] for n in range(len(good))), good + b"\0", good + bytes(16)]:
        path.write_bytes(content)
        with pytest.raises(CheckpointFormatError, match=r"model\.safetensors"):
            read_safetensors(FileSource(path))
        check_same_verdict(content)


# ------------------------------------------------------------------ what is read


ALL_DTYPES = sorted(DTYPES)


@pytest.mark.parametrize("code", ALL_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2,), (5, 4)], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_every_shared_dtype_reads_as_the_package_reads_it(
    tmp_path: Path, code: str, shape: tuple[int, ...], padding: int
) -> None:
    if code == "F4" and not shape:
        pytest.skip("half a byte is no tensor")
    length = math.prod(shape) * BITS[code] // 8
    pattern = b"\0\1" if code == "BOOL" else bytes(range(1, 200))
    data = (pattern * (length // len(pattern) + 1))[:length]
    path = tmp_path / "x.safetensors"
    # Padding shifts the data to addresses that are no multiple of the element's size.
    path.write_bytes(blob(json.dumps({"t": entry(code, shape, (0, length))}) + " " * padding, data))
    with safetensors.safe_open(path, "pt") as f:
        expected = f.get_tensor("t")
    tensor = Weights.describe(read_safetensors(FileSource(path)).infos)["t"]
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert raw_bytes(tensor) == raw_bytes(expected) == data


def test_all_dtypes_that_torch_and_the_package_share_are_known() -> None:
    with pytest.raises(safetensors.SafetensorError) as refused:
        safetensors.deserialize(blob({"a": entry("?")}, 1))
    known = [word for word in str(refused.value).split("`") if word[:1].isupper() and word.isupper()]
    assert [code for code in known if not code.startswith("F6_")] == list(DTYPES), "names, and their order by alignment"


def test_four_bit_tensors_count_pairs() -> None:
    weights = catalogue(blob({"t": entry("F4", (3, 4), (0, 6))}, 6))
    assert weights.info("t").shape == (3, 2)
    assert weights.info("t").dtype == torch.float4_e2m1fn_x2


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)], ids=str)
def test_four_bit_rows_that_end_within_a_byte_are_refused_as_the_package_does(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    length = math.prod(shape) // 2
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob({"t": entry("F4", shape, (0, length))}, length))
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "pt") as f:
        f.get_tensor("t")
    with pytest.raises(CheckpointFormatError, match="even") as refused:
        read_safetensors(FileSource(path))
    assert refused.value.tensor == "t"


@pytest.mark.parametrize("code", ["F6_E2M3", "F128", "f32", "", "I4"])
def test_an_unsupported_dtype_is_named_with_its_tensor(code: str) -> None:
    with pytest.raises(UnsupportedDtypeError) as refused:
        read_safetensors(Memory(blob({"layer.0.w": entry(code, (4,), (0, 3))}, 3)))
    assert refused.value.tensor == "layer.0.w"
    assert repr(code) in str(refused.value)
    assert "BF16" in refused.value.hint


def test_an_older_torch_refuses_only_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(safetensors_header.DTYPES, "F4")
    assert len(read_safetensors(Memory(blob({"t": entry()}, 1))).infos) == 1
    with pytest.raises(UnsupportedDtypeError, match="F4"):
        read_safetensors(Memory(blob({"t": entry("F4", (2,), (0, 1))}, 1)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (',"__metadata__":null', {}),
        (',"__metadata__":{}', {}),
        (',"__metadata__":{"format":"pt"}', {"format": "pt"}),
    ],
)
def test_metadata_may_be_absent_null_or_empty(text: str, expected: dict[str, str]) -> None:
    file = read_safetensors(Memory(blob('{"a":' + json.dumps(entry()) + text + "}", 1)))
    assert file.metadata == expected
    assert [info.name for info in file.infos] == ["a"]


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {"z": entry("U8", (2,), (3, 5)), "empty": entry("F32", (0, 7), (3, 3)), "m": entry("U8", (3,), (0, 3))}
    assert [info.name for info in read_safetensors(Memory(blob(header, 5))).infos] == ["m", "empty", "z"]


def test_a_header_alone_is_read_and_no_data() -> None:
    header = json.dumps({"w": entry("F32", (1 << 20, 1 << 18), (0, 1 << 40))}).encode()
    source = Memory(struct.pack("<Q", len(header)) + header, size=8 + len(header) + (1 << 40))
    assert read_safetensors(source).infos[0].nbytes == 1 << 40
    assert source.largest_read == len(header)


def test_values_are_little_endian_whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    content = safetensors.torch.save({"b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "i": torch.tensor([1, 2])})
    monkeypatch.setattr(sys, "byteorder", "big")
    weights = catalogue(content)
    assert weights["b"].tolist() == [1.5, -2.0]
    assert weights["i"].tolist() == [1, 2]


def test_a_big_endian_machine_swaps_what_it_reads_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Where the numbers in memory are big-endian, reading must turn the bytes round: seen from here, they end swapped.
    content = safetensors.torch.save({"b": torch.tensor([1.5], dtype=torch.bfloat16), "c": torch.tensor([1 + 2j])})
    monkeypatch.setattr(info, "HOST_BYTEORDER", "big")
    monkeypatch.setattr("weightloaders.weights.safetensors.HOST_BYTEORDER", "big")
    weights = catalogue(content)
    assert raw_bytes(weights["b"]) == struct.pack(">e", 0)[:0] + b"\x3f\xc0"
    assert raw_bytes(weights["c"]) == struct.pack(">ff", 1, 2)
    kept = weights["b"].clone()
    write_safetensors(tmp_path / "x.safetensors", weights.infos(), {"b": kept, "c": weights["c"]}.__getitem__)
    assert (tmp_path / "x.safetensors").read_bytes() == content
    assert raw_bytes(kept) == b"\x3f\xc0", "the caller's tensor is left as it was"


# ------------------------------------------------------------------ what is refused, and how it is said


def refusal(content: bytes, **options: int) -> CheckpointFormatError:
    with pytest.raises(CheckpointFormatError) as refused:
        read_safetensors(Memory(content), **options)
    return refused.value


def test_two_names_for_one_range_are_refused_with_both_named() -> None:
    error = refusal(blob({"a": entry(), "b": entry()}, 1))
    assert error.tensor == "b"
    assert "'a'" in str(error)
    assert "overlap" in str(error)
    assert "saved once" in error.hint


def test_a_gap_is_refused_with_its_size() -> None:
    error = refusal(blob({"a": entry(), "b": entry("U8", (1,), (5, 6))}, 6))
    assert error.tensor == "b"
    assert "4 bytes" in str(error)


def test_trailing_bytes_are_refused_with_their_number() -> None:
    assert "16 bytes behind" in str(refusal(blob({"a": entry()}, 17)))


def test_a_truncated_file_says_what_is_there_what_is_missing_and_from_which_tensor_on() -> None:
    error = refusal(blob({"a": entry("U8", (10,), (0, 10)), "b": entry("U8", (90,), (10, 100))}, 40))
    assert error.tensor == "b"
    assert "truncated" in str(error)
    for number in ("100 bytes", "only 40", "60 are missing"):
        assert number in str(error)


def test_a_file_cut_within_its_header_says_so() -> None:
    error = refusal(blob({"a": entry()}, 1)[:30])
    assert "truncated" in str(error)
    assert "22" in str(error)


def test_a_shape_that_does_not_fit_its_bytes_is_refused_with_both_sizes() -> None:
    error = refusal(blob({"w": entry("F32", (2, 3), (0, 20))}, 20))
    assert error.tensor == "w"
    for part in ("[2, 3]", "F32", "20 bytes", "needs 24"):
        assert part in str(error)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":%(e)s,"a":%(e)s}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"U8"}}',
        '{"__metadata__":{"a":"1","a":"2"},"a":%(e)s}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":1,"y":1}}}',
    ],
)
def test_a_name_twice_in_one_object_is_refused(text: str) -> None:
    assert "twice" in str(refusal(blob(text % {"e": json.dumps(entry())}, 1)))


def test_a_tensor_named_twice_is_the_tensor_at_fault() -> None:
    assert refusal(blob('{"a":%s,"a":%s}' % ((json.dumps(entry()),) * 2), 1)).tensor == "a"
    assert refusal(blob('{"__metadata__":{"a":"1","a":"2"}}')).tensor is None


@pytest.mark.parametrize("depth", [126, 2_000, 1_000_000])
def test_deep_nesting_is_our_own_error(depth: int) -> None:
    refusal(blob("[" * depth + "]" * depth))
    refusal(blob('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":' + "[" * depth + "]" * depth + "}}", 1))


@pytest.mark.parametrize("text", ["9" * 5_000, "-" + "9" * 5_000, "9" * 400_000, "NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_our_own_error(text: str) -> None:
    for place in (
        '"shape":[%s],"data_offsets":[0,1]',
        '"shape":[1],"data_offsets":[0,%s]',
        '"shape":[1],"data_offsets":[0,1],"x":%s',
    ):
        refusal(blob('{"a":{"dtype":"U8",' + place % text + "}}", 1))


def test_hostile_headers_take_no_time() -> None:
    start = time.perf_counter()
    refusal(blob('{"a":{"dtype":"U8","shape":[' + ",".join(["9"] * 500_000) + '],"data_offsets":[0,0]}}'))
    refusal(blob('{"a":{"dtype":"U8","shape":[0,' + ",".join(["9"] * 500_000) + '],"data_offsets":[0,0]}}'))
    refusal(blob("{" + ",".join(f'"{i}":0' for i in range(200_000)) + ',"199999":0}'))
    message = str(
        refusal(blob('{"a":{"dtype":"U8","shape":' + json.dumps(["x"] * 200_000) + ',"data_offsets":[0,0]}}'))
    )
    assert len(message) < 1_000
    assert time.perf_counter() - start < 10


def test_a_lying_length_is_refused_without_reading_it() -> None:
    for length in (10**7, 132_095_296, 1 << 40, (1 << 64) - 1):
        source = Memory(struct.pack("<Q", length) + b'{"a":')
        with pytest.raises(CheckpointFormatError, match=str(length)):
            read_safetensors(source)
        assert source.largest_read <= 13


def test_a_header_over_the_limit_is_refused_with_both_numbers_and_the_limit_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 132_095_296) + b'{"a":')
        file.truncate(1 << 30)
    with pytest.raises(CheckpointFormatError) as refused:
        read_safetensors(FileSource(path))
    assert str(MAX_HEADER_BYTES) in str(refused.value)
    assert "132095296" in str(refused.value)
    assert "max_header_bytes" in refused.value.hint

    small = blob({"a": entry()}, 1)
    assert "limit of 20" in str(refusal(small, max_header_bytes=20))
    assert len(read_safetensors(Memory(small), max_header_bytes=1_000).infos) == 1


@pytest.mark.parametrize("text", ["null", "1", '"x"', "[]", '[{"a":1}]', "true"])
def test_a_header_that_is_no_object_is_refused(text: str) -> None:
    assert "header" in str(refusal(blob(text)))


# ------------------------------------------------------------------ what a file really is


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"x")
    return buffer.getvalue()


def saved_by_torch(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer, **options)
    return buffer.getvalue()


def saved_by_numpy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


def savez_by_numpy() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, w=np.ones(3))
    return buffer.getvalue()


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4976698672\n"
)

OTHER_FILES: dict[str, tuple[bytes, str, str]] = {
    "lfs pointer": (LFS_POINTER, "Git LFS pointer to a file of 4976698672 bytes", "git lfs pull"),
    "html page": (
        b"\n<!DOCTYPE html><html><head><title>Sign in\n</title></head></html>",
        "HTML page ('Sign in')",
        "token",
    ),
    "html in capitals": (b"<HTML><BODY>404</BODY></HTML>", "HTML page", "address"),
    "xml error": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "AccessDenied", "token"),
    "json error": (b'{"error": "Invalid username or password."}', "Invalid username", "token"),
    "plain text": (b"Entry not found", "plain text ('Entry not found')", "address"),
    "text with accents": ("Accès refusé".encode(), "plain text ('Accès refusé')", "address"),
    "torch zip": (saved_by_torch(), "PyTorch checkpoint (zip)", "'torch' loader"),
    "torch legacy": (saved_by_torch(_use_new_zipfile_serialization=False), "before version 1.6", "'torch' loader"),
    "other zip": (zipped("readme.txt"), "zip archive", ".bin"),
    "pickle 2": (pickle.dumps({"a": 1}, protocol=2), "Python pickle", "right name"),
    "pickle 5": (pickle.dumps({"a": 1}, protocol=5), "Python pickle", "right name"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(40), "GGUF", "right name"),
    "npy": (saved_by_numpy(), "NumPy array", "right name"),
    "npz": (savez_by_numpy(), "NumPy archive", "right name"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5", "right name"),
    "gzip": (gzip.compress(b"weights" * 10), "gzip", "unpack"),
    "tar": (b"model.safetensors".ljust(257, b"\0") + b"ustar\0" + bytes(300), "tar archive", "unpack"),
    "empty": (b"", "an empty file", "fetch it again"),
    "zeros": (bytes(100_000), "nothing but zeros", "fetch it again"),
}


@pytest.mark.parametrize("case", OTHER_FILES)
def test_another_kind_of_file_is_recognised_for_what_it_is(case: str) -> None:
    content, words, hint = OTHER_FILES[case]
    assert words in describe_content(Memory(content))
    error = refusal(content)
    assert f"not a safetensors file: it is {describe_content(Memory(content))}" in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    "content", [os.urandom(3) + b"\xff\xfe" * 50, bytes(5000) + b"\1" + bytes(5000) + b"\1", b"a\0b" * 20, b"\x07bell"]
)
def test_what_is_not_recognised_is_not_guessed_at(content: bytes) -> None:
    assert describe_content(Memory(content)) is None
    assert "memory.safetensors" in str(refusal(content))


def test_a_safetensors_file_is_recognised_as_one_even_if_its_header_starts_like_a_pickle() -> None:
    # 640 is 80 02 in little-endian bytes, which is how a pickle of protocol 2 begins.
    content = blob(json.dumps({"a": entry()}).ljust(640), 1)
    assert content[:2] == b"\x80\x02"
    assert describe_content(Memory(content)) == "a safetensors file"


def test_a_page_cut_within_a_character_is_still_text() -> None:
    assert "plain text" in describe_content(Memory(("é" * 4000).encode()[1:].replace(b"\xa9", b"e", 1)[1:]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_describing_never_fails(content: bytes) -> None:
    assert describe_content(Memory(content)) is None or content == b"" or describe_content(Memory(content))


# ------------------------------------------------------------------ speed


def test_twenty_thousand_tensors_are_catalogued_at_once() -> None:
    header = {f"layers.{i}.experts.weight": entry("BF16", (64, 8), (i * 1024, (i + 1) * 1024)) for i in range(20_000)}
    content = blob(header)
    source = Memory(content, size=len(content) + 20_000 * 1024)
    start = time.process_time()
    assert len(Weights.describe(read_safetensors(source).infos)) == 20_000
    # A sixth of a second on a quiet machine.
    assert time.process_time() - start < 3


# ------------------------------------------------------------------ writing one file


class Row(NamedTuple):
    """The least that the writer wants to know."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def rows(tensors: dict[str, torch.Tensor]) -> list[Row]:
    return [Row(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    write_safetensors(path, rows(tensors), tensors.__getitem__, metadata)


def sample(code: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    dtype = DTYPES[code]
    generator = torch.Generator().manual_seed(seed)
    if code == "BOOL":
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_ino, p.read_bytes()) for p in folder.iterdir()}


def zoo() -> dict[str, torch.Tensor]:
    """A tensor of every dtype, and empty ones, in no order."""
    tensors = {f"{code.lower()}.weight": sample(code, (3, 4), i) for i, code in enumerate(reversed(ALL_DTYPES))}
    tensors |= {
        "z.scalar": torch.tensor(2.5),
        "a.empty": torch.empty(0, 7),
        "模型.w": torch.ones(2),
        'quote"\n': torch.ones(1),
    }
    return tensors


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"ключ\t": "значение\x01"}])
def test_a_written_file_is_the_packages_own_to_the_byte(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = zoo()
    path = tmp_path / "x.safetensors"
    write(path, tensors, metadata)
    assert path.read_bytes() == safetensors.torch.save(tensors, metadata)


def test_a_written_file_reads_back_bit_for_bit_by_the_package_and_by_us(tmp_path: Path) -> None:
    tensors = zoo()
    path = tmp_path / "x.safetensors"
    write(path, tensors, {"format": "pt"})
    ours = read_safetensors(FileSource(path))
    weights = Weights.describe(ours.infos)
    assert ours.metadata == {"format": "pt"}
    with safetensors.safe_open(path, "pt") as f:
        assert set(f.keys()) == set(weights) == set(tensors)
        for name, tensor in tensors.items():
            for again in (f.get_tensor(name), weights[name]):
                assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
                assert raw_bytes(again) == raw_bytes(tensor)


def test_no_tensors_at_all_make_a_valid_file(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {})
    assert safetensors.torch.load_file(tmp_path / "x.safetensors") == {}


class Wrapped(torch.Tensor):
    """A subclass without memory of its own, as quantised and distributed tensors are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


UNUSUAL = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "channels last": lambda: torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "a slice": lambda: torch.arange(20.0)[3:15:2],
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "a graph's result": lambda: torch.nn.Parameter(torch.arange(3.0)) * 2,
    "strided pairs": lambda: sample("F4", (4, 6)).t(),
    "strided 8 bit": lambda: sample("F8_E4M3", (4, 6))[:, ::2],
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_not_dense_and_plain_are_written_by_value(tmp_path: Path, kind: str) -> None:
    tensor = UNUSUAL[kind]()
    write(tmp_path / "x.safetensors", {"t": tensor})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as f:
        again = f.get_tensor("t")
    assert again.shape == tensor.shape
    assert raw_bytes(again) == raw_bytes(tensor.detach().resolve_conj().resolve_neg())


def test_a_tensor_subclass_is_written_by_its_values(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"t": Wrapped(torch.arange(3.0))})
    assert safetensors.torch.load_file(tmp_path / "x.safetensors")["t"].tolist() == [0, 1, 2]


def test_tensors_are_asked_for_one_at_a_time_and_let_go(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def fresh(name: str) -> torch.Tensor:
        assert not any(ref() is not None for ref in alive), "the tensor before is still held"
        tensor = torch.full((1000,), float(name))
        alive.append(weakref.ref(tensor))
        return tensor

    write_safetensors(tmp_path / "x.safetensors", [Row(str(i), torch.float32, (1000,)) for i in range(5)], fresh)
    assert len(alive) == 5


def test_a_file_can_be_saved_over_while_it_is_read_from(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"w{i}": torch.rand(100) for i in range(10)}
    safetensors.torch.save_file(tensors, path)
    with Weights.describe(read_safetensors(FileSource(path)).infos) as weights:
        write_safetensors(path, weights.infos(), lambda name: weights[name] + 1)
    for name, tensor in safetensors.torch.load_file(path).items():
        assert torch.equal(tensor, tensors[name] + 1)


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_replaced_files_permissions_stay_and_a_new_file_has_the_usual_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"t": torch.ones(1)})
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    path.chmod(0o600)
    write(path, {"t": torch.zeros(1)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path) -> None:
    # The hub's cache: a snapshot's files are links to blobs that other revisions share.
    (tmp_path / "blob").write_bytes(b"shared")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    write(tmp_path / "model.safetensors", {"t": torch.ones(1)})
    assert (tmp_path / "blob").read_bytes() == b"shared"
    assert safetensors.torch.load_file(tmp_path / "model.safetensors")["t"].item() == 1


def raises(error: BaseException) -> Callable[[str], torch.Tensor]:
    def tensors(name: str) -> torch.Tensor:
        if name == "b":
            raise error
        return torch.ones(2)

    return tensors


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), OSError("gone"), SystemExit(3)], ids=repr)
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the old file")
    before = snapshot(tmp_path)
    announced = [Row(name, torch.float32, (2,)) for name in "abc"]
    with pytest.raises(type(error)) as raised:
        write_safetensors(path, announced, raises(error))
    assert raised.value is error, "what the source raises is handed on as it is"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "given_tensor",
    [
        torch.ones(3),
        torch.ones(2, 1),
        torch.ones(2).half(),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        "text",
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tensor_that_is_not_as_announced_is_refused_by_name(tmp_path: Path, given_tensor: Any) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the old file")
    with pytest.raises(SaveError) as refused:
        write_safetensors(path, [Row("layer.w", torch.float32, (2,))], lambda _: given_tensor)
    assert refused.value.tensor == "layer.w"
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert path.read_bytes() == b"the old file"


@pytest.mark.parametrize(
    ("announced", "metadata", "words"),
    [
        ([Row("a", torch.complex128, (2,))], None, "complex128"),
        ([Row("a", torch.qint8, (2,))], None, "qint8"),
        ([Row("a", torch.float32, (2,)), Row("a", torch.float32, (2,))], None, "two tensors"),
        ([Row("__metadata__", torch.float32, (2,))], None, "__metadata__"),
        ([Row("a", torch.float32, (2,)), Row("\ud800", torch.float32, (2,))], None, re.escape(r"'\ud800'")),
        ([Row("a", torch.float32, (2,))], {"note": "\ud800"}, "note"),
        ([Row("a", torch.float4_e2m1fn_x2, ())], None, "scalar"),
        ([Row("a", torch.float32, (2,))], {"epoch": 3}, "epoch"),
        ([Row("a" * MAX_HEADER_BYTES, torch.float32, (2,))], None, "header"),
    ],
    ids=[
        "complex128",
        "quantised",
        "twice",
        "reserved",
        "surrogate",
        "surrogate in metadata",
        "half a byte",
        "metadata",
        "header too long",
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, announced: list[Row], metadata: Any, words: str
) -> None:
    def never(name: str) -> torch.Tensor:
        raise AssertionError("nothing may be read")

    for save in (
        lambda: write_safetensors(tmp_path / "x.safetensors", announced, never, metadata),
        lambda: write_sharded(tmp_path / "new", announced, never, metadata=metadata),
    ):
        with pytest.raises(SaveError, match=words):
            save()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["absent/x.safetensors", "folder", "file/x.safetensors", "nul\0.safetensors"])
def test_a_place_that_cannot_be_written_to_is_refused_by_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SaveError) as refused:
        write(tmp_path / place, {"t": torch.ones(1)})
    assert refused.value.file == str(tmp_path / place)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from weightloaders.errors import SaveError
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.raw import write_raw
from weightloaders.weights.safetensors import write_safetensors, write_sharded

folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
# Small ones are kept back by Python's own buffer, and meet the limit later than large ones.
count, size = map(int, sys.argv[2:])
tensors = {f"t{number}": torch.ones(size) for number in range(count)}
infos = [TensorInfo(name, t.dtype, t.shape, read=lambda: t) for name, t in tensors.items()]
for save in (
    lambda: write_safetensors(folder / "model.safetensors", infos, tensors.__getitem__),
    lambda: write_sharded(folder, infos, tensors.__getitem__, max_shard_size=200_000),
    lambda: write_sharded(folder / "new" / "deep", infos, tensors.__getitem__),
    lambda: write_raw(folder / "raw", infos, tensors.__getitem__),
):
    try:
        save()
    except SaveError as error:
        print(error.message)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize(("count", "size"), [(3, 20_000), (300, 100)])
def test_a_full_disk_is_our_own_error_and_leaves_no_trace(tmp_path: Path, count: int, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"the old file")
    before = snapshot(tmp_path)
    command = [sys.executable, "-c", LIMITED, tmp_path, str(count), str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.count("untouched") == 4, done.stdout + done.stderr
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------ writing a folder


def save_folder(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> list[str]:
    return [path.name for path in write_sharded(folder, rows(tensors), tensors.__getitem__, **options)]


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """As the hub's own loaders do: the index decides."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return {name: safetensors.torch.load_file(folder / file)[name] for name, file in weight_map.items()}


def ten(offset: int = 0) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(100) + 1000 * i + offset for i in range(10)}


def assert_holds(folder: Path, tensors: dict[str, torch.Tensor], *others: str) -> None:
    loaded = load_folder(folder)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    named = {"model.safetensors"}
    if (folder / "model.safetensors.index.json").exists():
        named = {*json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()}
        named.add("model.safetensors.index.json")
    assert {p.name for p in folder.iterdir()} == named | set(others), "nothing stale, nothing temporary"


def test_what_fits_in_one_file_is_one_file_without_an_index(tmp_path: Path) -> None:
    assert save_folder(tmp_path / "new" / "folder", ten()) == ["model.safetensors"]
    assert_holds(tmp_path / "new" / "folder", ten())
    assert read_safetensors(FileSource(tmp_path / "new" / "folder" / "model.safetensors")).metadata == {"format": "pt"}


def test_what_does_not_fit_is_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    names = save_folder(tmp_path, ten(), max_shard_size=2_400, metadata={"format": "pt", "by": "us"})
    assert names == [*(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)), "model.safetensors.index.json"]
    assert_holds(tmp_path, ten())
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 8_000
    assert index["weight_map"]["w0"] == names[0]
    for name in names[:-1]:
        file = read_safetensors(FileSource(tmp_path / name))
        assert sum(info.nbytes for info in file.infos) <= 2_400
        assert file.metadata == {"format": "pt", "by": "us"}


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1), "huge": torch.ones(1000), "b": torch.ones(1)}
    assert len(save_folder(tmp_path, tensors, max_shard_size=100)) == 4
    assert_holds(tmp_path, tensors)


@pytest.mark.parametrize(
    ("first", "second"), [(900, 10**6), (10**6, 900), (900, 2_400), (2_400, 2_400), (10**6, 10**6)]
)
def test_a_second_save_removes_what_the_first_left_and_nothing_else(tmp_path: Path, first: int, second: int) -> None:
    others = ("config.json", "other.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "notes")
    for name in others[:-1]:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "notes").mkdir()
    save_folder(tmp_path, ten(), max_shard_size=first)
    save_folder(tmp_path, ten(7), max_shard_size=second)
    assert_holds(tmp_path, ten(7), *others)


@pytest.mark.parametrize("shard", [10**6, 2_400])
def test_a_folder_can_be_saved_over_while_it_is_read_from(tmp_path: Path, shard: int) -> None:
    save_folder(tmp_path, ten(), max_shard_size=900)
    infos = [i for p in sorted(tmp_path.glob("*.safetensors")) for i in read_safetensors(FileSource(p)).infos]
    with Weights.describe(infos) as weights:
        write_sharded(tmp_path, weights.infos(), lambda name: weights[name] + 7, max_shard_size=shard)
    assert_holds(tmp_path, ten(7))


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", [0, 4, 9])
@pytest.mark.parametrize("earlier", [10**6, 900])
def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path: Path, error: BaseException, at: int, earlier: int) -> None:
    save_folder(tmp_path, ten(), max_shard_size=earlier)
    before = snapshot(tmp_path)
    new = ten(7)

    def tensors(name: str) -> torch.Tensor:
        if name == f"w{at}":
            raise error
        return new[name]

    with pytest.raises(type(error)):
        write_sharded(tmp_path, rows(new), tensors, max_shard_size=2_400)
    assert snapshot(tmp_path) == before
    with pytest.raises(type(error)):
        write_sharded(tmp_path / "a" / "b", rows(new), tensors, max_shard_size=2_400)
    assert snapshot(tmp_path) == before, "a folder made for the save goes with it"


@pytest.mark.parametrize("earlier", [10**6, 900])
def test_a_save_that_fails_at_the_last_step_leaves_the_folder_as_it_was(tmp_path: Path, earlier: int) -> None:
    save_folder(tmp_path, ten(), max_shard_size=earlier)
    # The index's place is taken by a folder, which is found only when all the shards are in theirs.
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    before = snapshot(tmp_path)
    (tmp_path / "model.safetensors.index.json").mkdir()
    (tmp_path / "model.safetensors.index.json" / "file").touch()
    with pytest.raises(SaveError, match="untouched"):
        save_folder(tmp_path, ten(7), max_shard_size=2_400)
    assert (tmp_path / "model.safetensors.index.json" / "file").exists()
    (tmp_path / "model.safetensors.index.json" / "file").unlink()
    (tmp_path / "model.safetensors.index.json").rmdir()
    assert snapshot(tmp_path) == before


def test_links_of_an_earlier_save_are_replaced_and_what_they_led_to_stays(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    for name in (
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ):
        (blobs / name).write_bytes(b"shared")
        (folder / name).symlink_to(blobs / name)
    (blobs / "model-00002-of-00002.safetensors").unlink()
    save_folder(folder, ten())
    assert_holds(folder, ten())
    assert (blobs / "model-00001-of-00002.safetensors").read_bytes() == b"shared"


# ------------------------------------------------------------------ two saves in one place, and saves that are killed


def save_to(place: Path, tensors: dict[str, torch.Tensor], read: Callable[[str], torch.Tensor] | None = None) -> None:
    if place.suffix:
        write_safetensors(place, rows(tensors), read or tensors.__getitem__)
    else:
        write_sharded(place, rows(tensors), read or tensors.__getitem__, max_shard_size=900)


def held(place: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(place) if place.suffix else load_folder(place)


@pytest.mark.parametrize("place", ["folder", "file.safetensors"])
@pytest.mark.parametrize("earlier", [False, True])
def test_of_two_saves_to_one_place_at_once_one_is_refused_and_the_other_is_whole(
    tmp_path: Path, place: str, earlier: bool
) -> None:
    if earlier:
        save_to(tmp_path / place, ten(3))

    def while_another_begins(name: str) -> torch.Tensor:
        with pytest.raises(SaveError, match="somebody else is saving there") as refused:
            save_to(tmp_path / place, ten(7))
        assert refused.value.file == str(tmp_path / place)
        save_to(tmp_path / f"other {place}", ten(7))
        return ten()[name]

    save_to(tmp_path / place, ten(), while_another_begins)
    assert held(tmp_path / place).keys() == ten().keys()
    assert all(torch.equal(tensor, ten()[name]) for name, tensor in held(tmp_path / place).items())
    assert {p.name for p in tmp_path.rglob(".*")} == set()


AT_ONCE = """
import sys, torch
from pathlib import Path
from weightloaders.errors import SaveError
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.safetensors import write_sharded

folder, value = Path(sys.argv[1]), float(sys.argv[2])
infos = [TensorInfo(f"w{i}", torch.float32, (1,), read=lambda: None) for i in range(20)]
for run in range(6):
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        write_sharded(folder / str(run), infos, lambda name: torch.tensor([value]), max_shard_size=1)
    except SaveError as error:
        print(error.message.replace(chr(10), " "), flush=True)
    else:
        print("saved", flush=True)
"""


def test_processes_that_save_to_one_new_folder_never_mix_their_weights(tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, tmp_path, str(value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in (1, 2)
    ]
    try:
        for run in range(6):
            assert [process.stdout.readline() for process in both if process.stdout] == ["ready\n"] * 2
            for process in both:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
            said = [process.stdout.readline().strip() for process in both if process.stdout]
            assert "saved" in said
            assert all(line == "saved" or "somebody else" in line for line in said)
            assert len({tensor.item() for tensor in load_folder(tmp_path / str(run)).values()}) == 1
            assert not list((tmp_path / str(run)).glob(".*"))
    finally:
        for process in both:
            process.communicate(timeout=60)


KILLED = """
import sys, time, torch
from pathlib import Path
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.safetensors import write_safetensors, write_sharded

def tensors(name):
    if name == "b":
        print("in the middle", flush=True)
        time.sleep(60)
    return torch.ones(1)

infos = [TensorInfo(name, torch.float32, (1,), read=lambda: None) for name in "abc"]
place = Path(sys.argv[1])
if place.suffix:
    write_safetensors(place, infos, tensors)
else:
    write_sharded(place, infos, tensors, max_shard_size=1)
"""


@pytest.mark.parametrize("place", ["folder", "x" * 240 + ".safetensors"], ids=["folder", "file"])
def test_what_a_killed_save_left_is_removed_by_the_next_and_what_a_running_one_needs_is_not(
    tmp_path: Path, place: str
) -> None:
    target = tmp_path / place
    with subprocess.Popen([sys.executable, "-c", KILLED, target], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "in the middle\n"
        with pytest.raises(SaveError, match="somebody else is saving there"):
            save_to(target, ten())
        assert process.poll() is None
        process.kill()
    assert len(list(tmp_path.rglob("*.saving*"))) == 2
    save_to(target, ten())
    assert held(target).keys() == ten().keys()
    assert not list(tmp_path.rglob("*.saving*"))


def test_old_files_that_a_killed_save_had_taken_away_stay_until_there_are_new_ones(tmp_path: Path) -> None:
    taken = tmp_path / f".saving-{'0' * 16}" / "replaced" / "model.safetensors"
    taken.parent.mkdir(parents=True)
    write(taken, {"old": torch.ones(1)})
    with pytest.raises(OSError, match="gone"):
        write_sharded(tmp_path, rows(dict.fromkeys("ab", torch.ones(2))), raises(OSError("gone")))
    assert taken.exists()
    save_to(tmp_path, ten())
    assert_holds(tmp_path, ten())


def test_what_only_looks_like_the_leftovers_of_a_save_stays(tmp_path: Path) -> None:
    others = (".saving-mine", f".other.safetensors.saving-{'0' * 16}", "x.saving-0000000000000000", ".x.saving-00")
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    save_to(tmp_path / "x.safetensors", ten())
    save_to(tmp_path, ten())
    assert {p.name for p in tmp_path.iterdir()} > set(others)


def test_where_the_file_system_knows_no_locks_saving_works_and_nothing_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_lock", lambda descriptor: False)
    alive = tmp_path / f".saving-{'0' * 16}"
    alive.mkdir()
    save_to(tmp_path, ten())
    assert_holds(tmp_path, ten(), alive.name)


@pytest.mark.skipif(sys.platform == "win32", reason="lengths of names differ")
def test_a_file_may_have_the_longest_name_there_can_be(tmp_path: Path) -> None:
    name = "x" * (255 - len(".safetensors")) + ".safetensors"
    write(tmp_path / name, {"t": torch.ones(1)})
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("place", ["nul\0", "x" * 300, "a/" + "x" * 300, "file", "file/inside", "\ud800"])
def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="can't save") as refused:
        save_folder(tmp_path / place, ten())
    assert refused.value.file == str(tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_tensor_for_whose_values_there_is_no_memory_is_named(tmp_path: Path) -> None:
    # More than any machine can address: a single number, expanded.
    huge = torch.ones(1).expand(1 << 57)
    with pytest.raises(SaveError, match="not enough memory for tensor 'huge'") as refused:
        write(tmp_path / "x.safetensors", {"huge": huge})
    assert refused.value.tensor == "huge"
    assert list(tmp_path.iterdir()) == []


def test_a_default_device_has_no_say_in_what_is_written(tmp_path: Path) -> None:
    class Tagged(torch.Tensor):
        pass

    tensors = {"plain": torch.ones(2), "of a subclass": torch.ones(2).as_subclass(Tagged)}
    with torch.device("meta"):
        write(tmp_path / "x.safetensors", tensors)
    assert safetensors.torch.load_file(tmp_path / "x.safetensors")["of a subclass"].tolist() == [1, 1]
