"""The header: what a sound one says, and what is refused."""

import contextlib
import os
import struct
import subprocess
import sys
import time

import gguf
import gguf_models
import numpy as np
import pytest
import torch
from gguf_bytes import ARRAY, FLOAT32, STRING, UINT32, array, gguf_file, number, pair, string, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weightloaders_gguf.ggml_types import TYPES, WITHOUT_DECODER
from weightloaders_gguf.header import read_header

from weightloaders import ByteSource
from weightloaders.errors import (
    CheckpointFormatError,
    DuplicateTensorError,
    SourceReadError,
    UnsupportedDtypeError,
    WeightLoadersError,
)


class Bytes(ByteSource):
    """Bytes in memory, which remember how many of them were read."""

    name = "model.gguf"

    def __init__(self, content, size=None):
        self.content, self._size, self.read_bytes = content, size or len(content), 0

    @property
    def size(self):
        return self._size

    @property
    def identity(self):
        return id(self.content)

    def read_into(self, view, offset):
        if offset + len(view) > self._size:
            raise SourceReadError("too far")
        self.read_bytes += len(view)
        part = self.content[offset : offset + len(view)]
        view[: len(part)] = part
        view[len(part) :] = bytes(len(view) - len(part))


def header_of(content, **options):
    return read_header(Bytes(content), **options)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_a_header_says_what_was_written(version, order):
    content = gguf_file(
        (
            string("general.architecture", "llama", order),
            number("llama.block_count", 7, order),
            array("tokens", STRING, 2, b"".join(struct.pack(f"{order}Q", 2) + t for t in (b"ab", "ü".encode())), order),
            array("scores", FLOAT32, 2, struct.pack(f"{order}2f", 0.5, -1), order),
        ),
        (tensor("a", (4, 3), 0, 0, order), tensor("b", (), 0, 64, order), tensor("c", (0, 5), 1, 96, order)),
        bytes(100),
        version=version,
        order=order,
    )
    if (version, order) == (2, ">"):
        with pytest.raises(CheckpointFormatError, match="big-endian GGUF version 2"):
            header_of(content)
        return
    header = header_of(content)
    assert (header.version, header.byteorder, header.architecture) == (
        version,
        "little" if order == "<" else "big",
        "llama",
    )
    assert header.metadata["llama.block_count"] == 7
    assert list(header.metadata["tokens"]) == ["ab", "ü"]
    assert list(header.metadata["scores"]) == [0.5, -1.0]
    begin = len(content) - 100
    assert [(t.name, t.shape, t.type.name, t.offset - begin, t.nbytes) for t in header.tensors] == [
        ("a", (3, 4), "F32", 0, 48),
        ("b", (), "F32", 64, 4),
        ("c", (5, 0), "F16", 96, 0),
    ]


@pytest.mark.parametrize("big_endian", [False, True])
def test_a_file_is_understood_as_the_gguf_package_understands_it(tmp_path, big_endian):
    tensors = {"one": torch.arange(12.0).reshape(3, 4), "two": torch.ones(2, 2, 2, dtype=torch.float16)}
    said = {"nothing.list": ["x", "yz"], "nothing.numbers": [1, 2, 3], "nothing.yes": True, "nothing.half": 0.5}
    path = gguf_models.write(tmp_path / "a.gguf", tensors, "nothing", said, big_endian=big_endian)
    content = path.read_bytes()
    header = header_of(content)
    theirs = gguf.GGUFReader(path)
    assert [(t.name, t.offset) for t in header.tensors] == [(t.name, t.data_offset) for t in theirs.tensors]
    for key, value in said.items():
        ours = header.metadata[key]
        assert (list(ours) if isinstance(value, list) else ours) == value


def test_types_are_those_of_the_gguf_package():
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: kind[:3] for number, kind in TYPES.items()} == theirs
    for kind in TYPES.values():
        if not kind.torch_name:
            decodes = gguf.GGMLQuantizationType[kind.name] in gguf.quants._type_traits
            assert decodes == (kind.name not in WITHOUT_DECODER)


def test_only_the_header_is_read_of_a_file_of_terabytes():
    content = gguf_file((string("general.architecture", "x"),), (tensor("t", (1 << 40,)),))
    source = Bytes(content, size=1 << 43)
    assert read_header(source).tensors[0].nbytes == 1 << 42
    assert source.read_bytes <= 1 << 19


# ------------------------------------------------------------------ what is refused

X = string("general.architecture", "x")
REFUSED = {
    "tensors beyond the file": (gguf_file(counts=(1 << 60, 0)), "tensors"),
    "properties beyond the file": (gguf_file(counts=(0, 1 << 63)), "properties"),
    "sizes whose product wraps": (gguf_file((X,), (tensor("t", (1 << 32, 1 << 32)),), bytes(64)), "absurd shape"),
    "sizes of nothing that wrap": (gguf_file((X,), (tensor("t", (0, 1 << 63, 2)),), bytes(64)), "absurd shape"),
    "bytes beyond the file": (gguf_file((X,), (tensor("t", (1 << 30,)),), bytes(64)), "ends at byte"),
    "an offset beyond the file": (gguf_file((X,), (tensor("t", (4,), 0, 1 << 40),), bytes(64)), "ends at byte"),
    "an offset that wraps": (gguf_file((X,), (tensor("t", (4,), 0, (1 << 64) - 32),), bytes(64)), "ends at byte"),
    "an offset of nothing beyond the file": (gguf_file((X,), (tensor("t", (4, 0), 0, 1 << 62),)), "ends at byte"),
    "a crooked offset": (gguf_file((X,), (tensor("t", (4,), 0, 4),), bytes(64)), "no multiple of 32"),
    "an overlap": (gguf_file((X,), (tensor("s", (16,), 0, 0), tensor("t", (4,), 0, 32)), bytes(64)), "overlap"),
    "five dimensions": (gguf_file((X,), (tensor("t", (1,) * 5),), bytes(64)), "5 dimensions"),
    "a row of half a block": (gguf_file((X,), (tensor("t", (48,), 2),), bytes(64)), "blocks of 32"),
    "an unknown type": (gguf_file((X,), (tensor("t", (4,), 77),), bytes(64)), "type 77"),
    "a type that is gone": (gguf_file((X,), (tensor("t", (32,), 4),), bytes(64)), "type 4"),
    "one name twice": (gguf_file((X,), (tensor("t", (4,)), tensor("t", (4,), 0, 32)), bytes(64)), "two tensors"),
    "a property twice": (gguf_file((X, X)), "twice"),
    "a name that is no UTF-8": (gguf_file((X,), (tensor(b"\xff\xfe", (4,)),), bytes(64)), "not UTF-8"),
    "a property's name that is no UTF-8": (gguf_file((pair(b"\xc3", UINT32, bytes(4)),)), "not UTF-8"),
    "a text that is no UTF-8": (gguf_file((string("a", b"\xed\xa0\x80"),)), "not UTF-8"),
    "an array of arrays": (gguf_file((array("a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 1000),)), "array of arrays"),
    "an unknown kind of value": (gguf_file((pair("a", 99, bytes(8)),)), "unknown type 99"),
    "an array of an unknown kind": (gguf_file((array("a", 99, 1, bytes(8)),)), "unknown type 99"),
    "an array beyond the file": (gguf_file((array("a", FLOAT32, 1 << 61, b""),)), "within its header"),
    "texts beyond the file": (gguf_file((array("a", STRING, 1 << 61, b""),)), "texts"),
    "a long text in a list": (gguf_file((array("a", STRING, 1, struct.pack("<Q", 1 << 63)),)), "within its header"),
    "a text beyond the file": (gguf_file((pair("a", STRING, struct.pack("<Q", 1 << 50)),)), "bytes"),
    "an alignment of zero": (gguf_file((number("general.alignment", 0),)), "power of two"),
    "an alignment of seven": (gguf_file((number("general.alignment", 7),)), "power of two"),
    "an alignment in words": (gguf_file((string("general.alignment", "32"),)), "power of two"),
    "version 1": (gguf_file(version=1), "version 1"),
    "version 4": (gguf_file(version=4), "version 4"),
    "version 0": (gguf_file(version=0), "version 0"),
    "another magic": (b"GGML" + bytes(60), "no GGUF file"),
    "an empty file": (b"", "no GGUF file"),
    "a pointer to a file": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "LFS"),
    "a page": (b"<!doctype html><title>404</title>", "error message"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what):
    content, said = REFUSED[what]
    with pytest.raises((CheckpointFormatError, DuplicateTensorError), match=said) as raised:
        header_of(content)
    assert raised.value.file == "model.gguf"
    assert (raised.value.tensor == "t") == ("tensor(" in what or "'t'" in raised.value.message)


def test_a_type_that_nobody_can_decode_is_named(tmp_path):
    content = gguf_file((X,), (tensor("t", (256,), 15),), bytes(320))
    (tmp_path / "a.gguf").write_bytes(content)
    import weightloaders as wl

    with pytest.raises(UnsupportedDtypeError, match="Q8_K"):
        wl.open_weights(tmp_path / "a.gguf")


def test_a_header_longer_than_any_is_refused_unread():
    content = gguf_file((array("a", 0, 1 << 30, b""),))
    source = Bytes(content, size=1 << 40)
    with pytest.raises(CheckpointFormatError, match="header of more than"):
        read_header(source)
    assert source.read_bytes < 1 << 20


def test_texts_of_a_vocabulary_are_checked_when_they_are_asked_for():
    header = header_of(gguf_file((array("tokens", STRING, 1, struct.pack("<Q", 1) + b"\xff"),)))
    assert len(header.metadata["tokens"]) == 1
    with pytest.raises(CheckpointFormatError, match="not UTF-8"):
        list(header.metadata["tokens"])


def _sound():
    return gguf_file(
        (X, number("general.alignment", 64), array("tokens", STRING, 3, (struct.pack("<Q", 1) + b"a") * 3)),
        (tensor("t", (32, 2), 2), tensor("u", (4,), 0, 64), tensor("v", (0,), 1, 128)),
        bytes(128),
        alignment=64,
    )


def test_a_header_that_ends_early_is_refused_wherever_it_ends():
    content = _sound()
    end = content.index(b"v") + 40
    assert header_of(content).tensors[1].nbytes == 16
    for length in range(end - 16):
        with pytest.raises(CheckpointFormatError):
            header_of(content[:length])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_bytes_are_changed_only_errors_of_ours_come_out(data):
    content = bytearray(_sound())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(content) - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, (1 << 31) - 1, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]))
        raw = (value % (1 << 8 * width)).to_bytes(width, "little")
        content[at : at + width] = raw[: len(content) - at]
    start = time.monotonic()
    try:
        header = header_of(bytes(content))
        for value in header.metadata.values():
            if hasattr(value, "values"):
                list(value)
        assert all(t.offset + t.nbytes <= len(content) for t in header.tensors if t.nbytes)
    except WeightLoadersError:
        pass
    assert time.monotonic() - start < 5


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_noise_behind_the_magic_is_refused_or_understood(noise):
    with contextlib.suppress(WeightLoadersError):
        header_of(b"GGUF\x03\0\0\0" + noise)


def test_listing_the_loaders_imports_no_torch_and_no_gguf():
    code = (
        "import sys; from weightloaders import WeightLoaderRegistry as R; R.list_available(); "
        "import weightloaders_gguf; "
        "assert R.describe('gguf').status == 'ok'; print(sorted({'torch', 'gguf', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == "[]"


def test_numbers_of_a_header_are_numpys(tmp_path):
    # The other direction: what numpy packs is what is read, of every kind of number.
    kinds = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 10: "u8", 11: "i8", 12: "f8"}
    for code, kind in kinds.items():
        for order in "<>":
            values = np.array([1, 2, 100], dtype=f"{order}{kind}")
            header = header_of(gguf_file((array("a", code, 3, values.tobytes(), order),), order=order))
            assert list(header.metadata["a"]) == [1, 2, 100]
