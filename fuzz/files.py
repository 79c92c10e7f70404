"""The formats that weights come in."""

from __future__ import annotations

import functools
import io
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from weightloaders_gguf import GgufLoader
from weightloaders_npz import NpzLoader

from fuzz.archives import Member, members_of, mutated_archive, put_together
from fuzz.mutate import NUMBERS, Mutator, dumped, packed
from fuzz.target import FaultError, Files, Target, bytes_of, sound_tensors
from weightloaders.errors import WeightLoadersError
from weightloaders.loaders.binary import BinaryLoader
from weightloaders.loaders.local import LocalLoader
from weightloaders.weights.raw import named_dtype
from weightloaders.weights.safetensors_header import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightloaders import Weights

_TO_HEADER = struct.Struct("<Q")


class Safetensors(Target):
    """Files of safetensors, held against what its own package makes of them."""

    name = "safetensors"

    _WORDS = (
        *DTYPES, "F6_E2M3", "F6_E3M2", "F4", "f32", "__metadata__", "dtype", "shape", "data_offsets", "a.weight",
        [0, 0], [0, 4],
        [0, 24], [24, 27], [2, 3], [6], [], [0], [1, 0], [3, 2, 1], [1 << 32, 1 << 32], [0, 1 << 62], {"format": "pt"},
        {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, ["F32", [2, 3], [0, 24]],
    )  # fmt: skip

    def seeds(self) -> list[Files]:
        """Sound files."""
        tensors = sound_tensors()
        odd = {
            str(dtype): torch.zeros(4).to(dtype) for dtype in DTYPES.values() if "float4" not in str(dtype)
        }  # fmt: skip
        made = [
            safetensors.torch.save(tensors),
            safetensors.torch.save(tensors, {"format": "pt", "é\n": "☃"}),
            safetensors.torch.save(odd),
            safetensors.torch.save({"a.weight": torch.zeros(2, 0, 3), "b": torch.zeros(0)}),
            safetensors.torch.save({}),
            _with_header({"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}, b"\x12\x34"),
        ]
        return [{"model.safetensors": data} for data in made]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """The header as JSON, or the file as bytes."""
        rng, data = mutator.rng, files["model.safetensors"]
        length = int.from_bytes(data[:8], "little")
        if rng.random() < 0.75 and length <= len(data) - 8:
            header, values = mutator.json(data[8 : 8 + length], self._WORDS), data[8 + length :]
            choice = rng.random()
            if choice < 0.1:
                values = mutator.data(values)
            elif choice < 0.6:
                header, values = _laid_out(header, values)
            told = len(header) if rng.random() < 0.95 else mutator.number() % (1 << 64)
            data = _TO_HEADER.pack(told) + header + values
        else:
            data = mutator.data(
                data, (b'"F16"', b"__metadata__", b'{"', b"[0,0]"), [o["model.safetensors"] for o in others]
            )
        return {"model.safetensors": data}

    def read(self, folder: Path, files: Files) -> None:
        """By the loader for a folder of them, and by the package."""
        data = files["model.safetensors"]
        try:
            theirs: Any = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            theirs = error
        try:
            weights = LocalLoader().get_weights(str(folder / "model.safetensors"))
        except WeightLoadersError as error:
            if isinstance(theirs, dict):
                reason = refused_on_purpose(error.message)
                if reason is None:
                    raise FaultError(f"safetensors reads what is refused here: {error.message:.200}") from error
                self.remarks[f"refused here alone: {reason}"] += 1
            raise
        if not isinstance(theirs, dict):
            raise FaultError(f"safetensors refuses what is read here: {theirs}")
        self._compare(weights, theirs)
        self.take(weights, folder, files)

    def _compare(self, weights: Weights, theirs: dict[str, Any]) -> None:
        if set(weights) != set(theirs):
            raise FaultError(f"safetensors has {sorted(theirs)}, here are {sorted(weights)}")
        for name, other in theirs.items():
            tensor = weights[name]
            shape = list(tensor.shape)
            if other["dtype"] == "F4":
                shape[-1] *= 2
            same = shape == list(other["shape"]) and DTYPES[other["dtype"]] == tensor.dtype
            if not same or bytes_of(tensor) != bytes(other["data"]):
                raise FaultError(f"safetensors has another {name!r}: {other['dtype']} {other['shape']}")
        self.remarks["the same values as safetensors"] += 1


def refused_on_purpose(message: str) -> str | None:
    """Why a file that the package reads is refused here, if that is meant; docs/explanation/fuzzing.md argues each."""
    for words, reason in (
        ("twice in one object", "a name twice"),
        ("not by dtype, shape and data_offsets", "an array as an entry"),
        ("in the unsupported dtype", "a dtype that torch lacks"),
        ("in F4; torch holds pairs", "a half byte of F4"),
        ("claims the absurd shape", "a shape that overflows torch's strides"),
    ):
        if words in message:
            return reason
    return None


def _with_header(header: Any, values: bytes) -> bytes:
    raw = dumped(header)
    return _TO_HEADER.pack(len(raw)) + raw + values


def _laid_out(header: bytes, values: bytes) -> tuple[bytes, bytes]:
    """A header whose tensors lie side by side, and as many values as it speaks of, as far as sizes can be told."""
    try:
        tree, at = json.loads(header), 0
        for name, entry in tree.items():
            if name == "__metadata__":
                continue
            if not all(type(size) is int and 0 <= size < 1 << 20 for size in entry["shape"]):
                return header, values
            bits = 4 if entry["dtype"] == "F4" else DTYPES[entry["dtype"]].itemsize * 8
            nbytes = math.prod(entry["shape"]) * bits // 8
            if nbytes > len(values) + 256:
                return header, values
            entry["data_offsets"] = [at, at + nbytes]
            at += nbytes
        return dumped(tree), (values + bytes(range(256)) * 2)[:at]
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return header, values


# ------------------------------------------------------------------ GGUF


def _text(value: str) -> bytes:
    raw = value.encode()
    return packed("Q", len(raw)) + raw


def _string(key: str, value: str) -> bytes:
    return _text(key) + packed("I", 8) + _text(value)


def _number(key: str, value: int) -> bytes:
    return _text(key) + packed("II", 4, value)


class Gguf(Target):
    """llama.cpp's files."""

    name = "gguf"

    _TOKENS = (
        b"GGUF", b"FUGG", packed("I", 9), packed("I", 8), packed("IQ", 8, 1 << 60), packed("IQ", 4, 1 << 60),
        _text("general.alignment"),
        _number("general.alignment", 64), _number("general.alignment", 0), _string("general.architecture", "mamba"),
        _number("split.count", 2), _number("llama.attention.head_count", 0), packed("Q", (1 << 64) - 1),
        packed("Q", 1 << 63),
        *(packed("I", code) for code in (0, 1, 2, 8, 12, 14, 24, 30, 36, 39, 40, 41)),
    )  # fmt: skip

    @functools.cache  # noqa: B019 -- a target lives as long as its process
    def seeds(self) -> list[Files]:
        """Sound files: plain, quantised, and of a Llama whose layouts are changed on the way."""
        llama = [
            _string("general.architecture", "llama"), _number("llama.attention.head_count", 2),
            _number("llama.block_count", 1),
            _number("llama.attention.head_count_kv", 1), _number("llama.embedding_length", 32),
        ]  # fmt: skip
        words = _text("tokenizer.ggml.tokens") + packed("IIQ", 9, 8, 3) + b"".join(map(_text, ("a", "b", "c")))
        scores = _text("tokenizer.ggml.scores") + packed("IIQ", 9, 6, 3) + bytes(12)
        plain = [("a.weight", (3, 2), 0, 24), ("b", (3,), 24, 3), ("c", (), 0, 4)]
        mixed = [
            (f"blk.0.attn_{x}.weight", (32, 32 if x != "k" else 16), 8, 34 * (32 if x != "k" else 16)) for x in "qk"
        ]
        kinds = [("t2", (32, 1), 2, 18), ("t14", (256,), 14, 210), ("t39", (32,), 39, 17), ("t12", (256, 1), 12, 144)]
        halves = [("output_norm.weight", (32,), 1, 64), ("token_embd.weight", (32, 2), 30, 128)]
        made = [
            _gguf([_string("general.architecture", "none"), words, scores], plain),
            _gguf(llama, mixed + halves),
            _gguf([*llama, _number("general.alignment", 64)], kinds),
            _gguf([], plain, version=2),
            _gguf([], []),
        ]
        return [{"model.gguf": data} for data in made]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """Bytes of the header above all."""
        data, rng = files["model.gguf"], mutator.rng
        at = rng.choice((4, 8, 24, 24, len(data))) if len(data) > 24 else 0
        head = min(len(data), 700)
        if rng.random() < 0.3 and head > 40:
            # Lengths and counts are numbers of eight bytes, and of four.
            at = rng.randrange(4, head - 8)
            width = rng.choice((4, 8))
            data = data[:at] + (mutator.number() % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]
            if rng.random() < 0.7:
                return {"model.gguf": data}
        pieces = [o["model.gguf"][:700] for o in others[:20]]
        changed = mutator.data(data[at if at < head else 4 : head], self._TOKENS, pieces)
        return {"model.gguf": data[: at if at < head else 4] + changed + data[head:]}

    def read(self, folder: Path, files: Files) -> None:
        """By the loader, with names as the file has them and as transformers has them, by turns."""
        path, named = str(folder / "model.gguf"), len(files["model.gguf"]) % 3 == 0
        self.take(GgufLoader(names="gguf" if named else "transformers").get_weights(path), folder, files)


def _gguf(pairs: Sequence[bytes], tensors: Sequence[tuple[str, tuple[int, ...], int, int]], version: int = 3) -> bytes:
    header, data = b"", b""
    for name, dims, code, nbytes in tensors:
        header += _text(name) + packed("I", len(dims)) + packed("Q" * len(dims), *dims) + packed("IQ", code, len(data))
        data += bytes(i * 7 % 64 for i in range(nbytes))
        data += bytes(-len(data) % 64)
    begin = b"GGUF" + packed("IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + header
    return begin + bytes(-len(begin) % 64) + data


# ------------------------------------------------------------------ raw


class Raw(Target):
    """The binary format."""

    name = "raw"

    _WORDS = (
        "a.weight:2,3\n", "b:3:int8\n", "c:\n", ":", ",", "#", "float16", "bfloat16", "complex64", "int8",
        "qint8", "bits8", "uint4", "bool",
        "float8_e4m3fn", "float4_e2m1fn_x2", "0", "99999999999999999999", "1" * 5000, "torch.", "\ufeff", "\r\n",
        "-1", "\uff11", "0,",
        *map(str, NUMBERS),
    )  # fmt: skip

    def seeds(self) -> list[Files]:
        """Sound pairs of files."""
        metas = (
            "a.weight:2,3\nb:3:int8\nc:\n", "# x\nn:ame:4:bfloat16\n\nz:0,5\n",
            "e:2,2:complex64\nf:3:f16\ng:1:float64\n",
            "a:4:uint8\n\ufeffb:2:bool\n",
        )  # fmt: skip
        return [{"meta.txt": meta.encode(), "model.bin": _values(meta)} for meta in metas]

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """The description above all, with values that fit as often as not."""
        rng = mutator.rng
        meta, data = files["meta.txt"].decode("utf-8", "surrogateescape"), files["model.bin"]
        meta = mutator.text(meta, self._WORDS)
        raw = meta.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")
        if rng.random() < 0.1:
            raw = mutator.data(raw)
        data = _values(meta) if rng.random() < 0.7 else mutator.data(data)
        return {"meta.txt": raw, "model.bin": data}

    def read(self, folder: Path, files: Files) -> None:
        """By the loader."""
        self.take(BinaryLoader().get_weights(str(folder)), folder, files)


def _values(meta: str) -> bytes:
    """As many values as a description speaks of, as far as it can be understood."""
    needed = 0
    for line in filter(None, map(str.strip, meta.split("\n"))):
        name, _, last = line.rpartition(":")
        dtype = torch.float32
        if found := named_dtype(last.strip()):
            dtype, (_, _, last) = found, name.rpartition(":")
        try:
            needed += math.prod(int(size) for size in last.split(",") if size.strip()) * dtype.itemsize
        except ValueError:
            continue
    return bytes(i % 251 % 2 for i in range(min(needed, 2000)))


# ------------------------------------------------------------------ npz


class Npz(Target):
    """NumPy's archives."""

    name = "npz"

    _WORDS = (
        "'<f4'", "'>f4'", "'|b1'", "'<c8'", "'|O'", "'<U3'", "[('a','<f4')]", "'<f2'", "'<u8'", "'<M8[s]'",
        "'|V4'", "True", "False", "(2, 3)",
        "(0,)", "(-1,)", "()", "(1 << 40,)", "(9223372036854775807,)", "(4611686018427387904, 4)",
        "fortran_order", "(2L,)", "2", "None",
        "'f'*99", "{", "}", "(" * 100, "'<f16'", "'<i3'", "'<V0'", "\\x00",
    )  # fmt: skip

    @functools.cache  # noqa: B019 -- a target lives as long as its process
    def seeds(self) -> list[Files]:
        """Sound archives, stored and deflated."""
        arrays = {
            "a.weight": np.arange(6, dtype="<f4").reshape(2, 3),
            "b": np.array([1, 2, 3], "i1"),
            "c": np.array(0.5, "<f4"),
        }
        odd = {
            "big": np.arange(3, dtype=">f8"), "for": np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)),
            "flag": np.array([True]),
            "half": np.zeros(2, "<f2"), "none": np.zeros((0, 2), "<f4"), "complex": np.zeros(2, "<c8"),
        }  # fmt: skip
        made = []
        for write in (np.savez, np.savez_compressed):
            for value in (arrays, odd, {"o": np.array([1, "x"], dtype=object)}):
                file = io.BytesIO()
                write(file, **value)  # type: ignore[arg-type]
                with_sizes = put_together(members_of(file.getvalue()))
                made.append({"model.npz": with_sizes})
        return made

    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """The headers of arrays, the archive, or bytes."""
        data = files["model.npz"]
        if mutator.rng.random() < 0.2:
            return {"model.npz": mutator.data(data, (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"\x93NUMPY"))}
        names = (b"x.npy", b"", b".npy", b"../x.npy", b"/etc/passwd", b"a\x00b.npy", b"d/", b"x.txt", b"\xff.npy")
        return {"model.npz": mutated_archive(data, mutator, functools.partial(self._array, mutator), names)}

    def _array(self, mutator: Mutator, member: Member) -> bytes:
        data, rng = member.data, mutator.rng
        if rng.random() < 0.3 or data[:6] != b"\x93NUMPY":
            return mutator.data(data, (b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00"))
        length = int.from_bytes(data[8:10], "little")
        header = data[10 : 10 + length].decode("latin-1").rstrip()
        raw = mutator.text(header, self._WORDS).encode("latin-1", "replace")
        raw += b" " * (-(len(raw) + 11) % 64) + b"\n"
        told = len(raw) if rng.random() < 0.95 else mutator.number()
        return data[:8] + packed("H", told) + raw + data[10 + length :]

    def read(self, folder: Path, files: Files) -> None:
        """By the loader."""
        self.take(NpzLoader().get_weights(str(folder / "model.npz")), folder, files)
