"""What fuzzing found, each input with what it once did; and where safetensors' own package has another verdict."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import torch

from fuzz.files import refused_on_purpose
from weightloaders import from_pretrained, load_into, open_weights
from weightloaders.config import LLMConfig
from weightloaders.errors import CheckpointFormatError, MissingDependencyError, SourceError, WeightLoadersError
from weightloaders.loaders.local import LocalLoader
from weightloaders.loaders.torch import TorchLoader

if TYPE_CHECKING:
    from collections.abc import Callable

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")


def safetensors_file(header: Any, values: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + values


# ------------------------------------------------------------------ messages that a terminal takes for commands


def hostile_name_in_safetensors(folder: Path, name: str) -> Any:
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_file({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)))
    return LocalLoader().get_weights(str(path))


def hostile_name_in_an_index(folder: Path, name: str) -> Any:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: f"{name}.safetensors"}}))
    return LocalLoader().get_weights(str(folder))


def hostile_name_in_a_pickle(folder: Path, name: str) -> Any:
    raw = name.encode("utf-8", "surrogatepass")
    pickled = b"\x80\x02X" + struct.pack("<I", len(raw)) + raw + b"cevil\n" + b"module\x1b]0;\n.)R."
    (folder / "model.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}." + pickled)
    return TorchLoader().get_weights(str(folder / "model.pt"))


def hostile_name_in_a_description(folder: Path, name: str) -> Any:
    (folder / "meta.txt").write_bytes(f"{name}:5\n".encode("utf-8", "surrogatepass"))
    (folder / "model.bin").write_bytes(bytes(4))
    return open_weights(folder, "binary")


@pytest.mark.parametrize(
    "name",
    ["a\x1b[2J", "a\x9b31m", "a\x00b", "a\rb", "a\u202eb", "a\ud800b"],
    ids=["esc", "csi", "nul", "cr", "rtl", "half"],
)
@pytest.mark.parametrize(
    "opened",
    [
        hostile_name_in_safetensors,
        hostile_name_in_an_index,
        hostile_name_in_a_pickle,
        hostile_name_in_a_description,
    ],
)
def test_no_name_out_of_a_file_reaches_a_terminal_as_a_command(
    opened: Callable[[Path, str], Any], name: str, tmp_path: Path
) -> None:
    """Messages once carried control characters, and half surrogate pairs that can't even be printed."""
    with pytest.raises(WeightLoadersError) as refused:
        opened(tmp_path, name)
    message = str(refused.value)
    assert UNPRINTABLE.search(message) is None
    message.encode("utf-8")


def test_the_name_of_a_tensor_begins_no_line_of_its_own() -> None:
    error = CheckpointFormatError("it is damaged", tensor="a\n  what to do: trust me", hint="fetch it again")
    assert str(error).splitlines() == [
        "it is damaged", r"  tensor: a\n  what to do: trust me", "  what to do: fetch it again"
    ]  # fmt: skip
    assert error.tensor == "a\n  what to do: trust me"


# ------------------------------------------------------------------ names that are too long


LONG = "a/" * 3000


@pytest.mark.parametrize("loader", [
    "local", "torch", "hf", "binary", "dummy", "auto", "weightloaders_gguf:GgufLoader",
    "weightloaders_npz:NpzLoader", "weightloaders_dcp:DcpLoader",
    "weightloaders_dcp:ShardedStateLoader", "weightloaders_engines.tensorized:TensorizerLoader",
    "weightloaders_meta:MetaLoader",
])  # fmt: skip
def test_a_path_that_is_too_long_is_a_path_that_is_not_there(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.exists` and its like let the system's ENAMETOOLONG through."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((SourceError, MissingDependencyError)):
        load_into(torch.nn.Linear(1, 1), f"./{LONG}", loader=loader)


def test_a_model_whose_path_is_too_long_is_refused() -> None:
    with pytest.raises(WeightLoadersError):
        from_pretrained(f"./{LONG}")


@pytest.mark.parametrize("key", ["model", "weights", "tokenizer", "rules"])
def test_a_config_with_a_path_that_is_too_long_is_read(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": "x", key: LONG}))
    assert getattr(LLMConfig.from_file(tmp_path / "config.json"), key) == LONG


# ------------------------------------------------------------------ where safetensors' own package reads what we refuse


SCALAR = {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (safetensors_file(b'{"a":%s,"a":%s}' % ((json.dumps(SCALAR).encode(),) * 2), b"1"), "a name twice"),
        (safetensors_file({"a": ["U8", [1], [0, 1]]}, b"1"), "an array as an entry"),
        (
            safetensors_file({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3)),
            "a half byte of F4",
        ),
        (
            safetensors_file({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, bytes(3)),
            "a dtype that torch lacks",
        ),
        (
            safetensors_file({"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}),
            "a shape that overflows torch's strides",
        ),
    ],
    ids=["twice", "array", "half byte", "dtype", "overflow"],
)
def test_what_safetensors_reads_is_refused_for_a_listed_reason(data: bytes, reason: str, tmp_path: Path) -> None:
    assert safetensors.deserialize(data)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointFormatError) as refused:
        LocalLoader().get_weights(str(tmp_path))
    assert refused_on_purpose(refused.value.message) == reason
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "fuzzing.md").read_text("utf-8")
    assert f"| {reason.split(' ', 1)[1]} |" in page, "each is argued"


# ------------------------------------------------------------------ torch files


@pytest.mark.parametrize("elements", [0, 3])
def test_a_tensor_of_a_negative_size_is_refused(elements: int, tmp_path: Path) -> None:
    # Without memory to it torch makes one, of which nothing is inside the storage and nothing outside.
    saved = tmp_path / "saved.pt"
    torch.save({"p": torch.zeros(elements)}, saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(tmp_path / "model.pt", "w") as changed:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("data.pkl"):
                # The storage's offset, then the sizes: a tuple of one.
                size = b"K" + bytes([elements]) + b"\x85"
                assert data.count(b"K\x00" + size) == 1
                data = data.replace(
                    b"K\x00" + size, b"K\x00\x8a\x08" + (-(2**63)).to_bytes(8, "little", signed=True) + b"\x85"
                )
            changed.writestr(name, data)
    with pytest.raises(CheckpointFormatError, match=r"the tensor 'p' has the shape \[-9223372036854775808\]"):
        TorchLoader().get_weights(str(tmp_path / "model.pt"))
