"""``weightloaders verify``: every file is told, whatever is wrong with the others."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weightloaders import load_into, save_weights
from weightloaders.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
NAMES = (*SHARDS, INDEX, "config.json", "tokenizer.json")


def verify(*arguments: object, status: int = 0) -> dict[str, Any]:
    """What it says, by the names of the files."""
    result = CliRunner().invoke(app, ["verify", "--json", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    if status == 2:
        return {"error": result.stderr}
    said = json.loads(result.stdout)
    assert said["ok"] == (status == 0)
    return {
        "headers": said["headers"]["status"],
        "tensors": said["tensors"],
        **{PurePath(file["name"]).name: file["status"] for file in said["files"]},
    }


def listed(folder: Path, path: Path, names: tuple[str, ...] = NAMES) -> Path:
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    path.write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    save_weights(model, folder, max_shard_size=1200)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "README.md").write_text("It is not read.")
    listed(folder, folder / "SHA256SUMS")
    return folder


ALL_OK = {"headers": "ok", "tensors": [], **dict.fromkeys(NAMES, "ok")}


def test_a_folder_that_is_what_it_must_be_is_ok(folder: Path) -> None:
    assert verify(folder) == ALL_OK
    assert verify(folder, "--finite") == ALL_OK
    text = CliRunner().invoke(app, ["verify", str(folder)]).stdout
    assert text.splitlines()[0] == "5 files: 5 ok"


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_told_whichever_is_wrong(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b" " if name.endswith("json") else content[:-1] + bytes([content[-1] ^ 1]))
    assert verify(folder, status=1) == {**ALL_OK, name: "wrong"}


def test_a_damaged_header_keeps_no_file_from_being_compared(folder: Path) -> None:
    content = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(content[:-100])
    (folder / "config.json").write_text("{} ")
    assert verify(folder, status=1) == {**ALL_OK, "headers": "wrong", SHARDS[0]: "wrong", "config.json": "wrong"}
    (folder / SHARDS[0]).write_bytes(content)
    # What no checksum tells, as a list may have been made of it.
    (folder / INDEX).write_text("{")
    listed(folder, folder / "SHA256SUMS")
    assert verify(folder, status=1) == {**ALL_OK, "headers": "wrong", "config.json": "ok"}


def test_what_nobody_knows_is_no_success_unless_that_is_allowed(folder: Path) -> None:
    listed(folder, folder / "SHA256SUMS", SHARDS)
    unknown = {INDEX: "unknown", "config.json": "unknown", "tokenizer.json": "unknown"}
    assert verify(folder, status=1) == {**ALL_OK, **unknown}
    assert verify(folder, "--allow-unknown") == {**ALL_OK, **unknown}
    (folder / SHARDS[1]).unlink()
    assert verify(folder, "--allow-unknown", status=1)["headers"] == "wrong"


def test_a_list_that_is_named_is_asked_alone_and_must_be_there_as_a_whole(folder: Path, tmp_path: Path) -> None:
    trusted = listed(folder, tmp_path / "trusted", (*NAMES, "README.md"))
    (folder / "SHA256SUMS").write_text("garbage")
    assert verify(folder, "--list", trusted) == ALL_OK
    (folder / "README.md").unlink()
    assert verify(folder, "--list", trusted, status=1) == {**ALL_OK, "README.md": "missing"}
    listed(folder, tmp_path / "trusted", SHARDS)
    assert verify(folder, "--list", trusted, status=1)["config.json"] == "unknown"
    # One that can't be read, or was cut off, says nothing at all.
    assert "line 1 is no entry" in verify(folder, status=2)["error"]
    assert "nowhere" in verify(folder, "--list", tmp_path / "nowhere", status=2)["error"]


def test_the_manifest_of_a_load_will_do_as_a_list(folder: Path, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    report = load_into(model, folder, verify=["sha256", "record"], progress=False)
    (tmp_path / "manifest.json").write_text(report.manifest())
    (folder / "SHA256SUMS").unlink()
    said = verify(folder, "--list", tmp_path / "manifest.json", "--allow-unknown")
    assert {name for name, status in said.items() if status == "ok"} == {"headers", *SHARDS, INDEX}


def test_blobs_of_the_hubs_cache_are_held_against_their_names(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in NAMES:
        content = (folder / name).read_bytes()
        is_large = name in SHARDS
        digest = hashlib.sha256(content) if is_large else hashlib.sha1(b"blob %d\0" % len(content) + content)
        (repository / "blobs" / digest.hexdigest()).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest.hexdigest()}")
    assert verify(snapshot) == ALL_OK
    (snapshot / "config.json").resolve().write_text("[]")
    assert verify(snapshot, status=1) == {**ALL_OK, "config.json": "wrong"}


def test_values_that_are_not_finite_are_told_where_they_are_asked_for(folder: Path) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = float("nan")
    values[2, 0] = float("inf")
    save_file({"odd": values, "fine": torch.ones(2)}, folder.parent / "m.safetensors")
    file = folder.parent / "m.safetensors"
    assert verify(file, "--allow-unknown")["tensors"] == []
    said = verify(file, "--allow-unknown", "--finite", status=1)
    assert said["tensors"] == [{"name": "odd", "status": "wrong", "why": "1 NaN and 1 infinite, the first at [1, 2]"}]
    assert said["m.safetensors"] == "unknown"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_told_as_such(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("nowhere")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert verify(folder, status=1) == {**ALL_OK, "tokenizer.json": "wrong", "config.json": "wrong"}


def test_what_can_not_be_asked_at_all_is_an_error(folder: Path) -> None:
    assert "nowhere" in verify(folder.parent / "nowhere", status=2)["error"]
    assert "nobody" in verify(folder, "--loader", "nobody", status=2)["error"]


def test_what_lets_one_in_at_an_address_is_not_told() -> None:
    told = verify("https://user:pAsSwOrD@127.0.0.1:1/model.safetensors?signature=pAsSwOrD", status=2)
    assert "pAsSwOrD" not in str(told)
