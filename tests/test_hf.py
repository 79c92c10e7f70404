"""The loader `hf`: folders, the hub's cache, and the hub itself, played by a server on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.hub_server import COMMIT as OLD
from tests.hub_server import NEWER as NEW
from tests.hub_server import Hub, servers
from weightloaders import LLM, from_pretrained, load_into, open_weights
from weightloaders.errors import (
    AmbiguousSourceError,
    IncompleteCheckpointError,
    ModelError,
    OptionsError,
    SourceError,
    SourceNotFoundError,
    SourceReadError,
    UnsafeCheckpointError,
)
from weightloaders.loaders.headers_only import headers_only
from weightloaders.loaders.hf import HuggingFaceLoader
from weightloaders.loaders.hub import HubAccess
from weightloaders.loaders.place import locate, looks_like_repository
from weightloaders.loaders.resolve import resolve_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightloaders.weights.weights import Weights

INDEX = "model.safetensors.index.json"
TOKEN = "hf_thisIsSecret"


def shard(**values: int) -> bytes:
    return save({name: torch.tensor([value]) for name, value in values.items()})


def index(**weight_map: str) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


SHARDED = {
    "config.json": b"{}",
    INDEX: index(a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"),
    "model-00001-of-00002.safetensors": shard(a=1),
    "model-00002-of-00002.safetensors": shard(b=2),
}


def values(weights: Weights) -> dict[str, int | float]:
    with weights:
        return {name: tensor.item() for name, tensor in weights.items()}


# ------------------------------------------------------------------ a hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with servers() as start:
        hub = Hub(start(), commits={OLD: dict(SHARDED)})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        pytest.fail("the network was used")

    for method in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, method, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fill(
    cache: Path, files: dict[str, bytes], commit: str = OLD, *, branch: str | None = "main", links: bool = True
) -> Path:
    """Write a snapshot as huggingface_hub does; returns its folder."""
    repository = cache / "models--org--name"
    for number, (name, content) in enumerate(files.items()):
        path = repository / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if links:
            blob = repository / "blobs" / f"{commit[:4]}{number}"
            blob.parent.mkdir(exist_ok=True)
            blob.write_bytes(content)
            path.symlink_to(os.path.relpath(blob, path.parent))
        else:
            path.write_bytes(content)
    if branch:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return repository / "snapshots" / commit


# ------------------------------------------------------------------ folders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `org/name` in the current directory, without weights."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "org" / "name"
    path.mkdir(parents=True)
    return path


def test_safetensors_are_taken_before_bin(folder: Path) -> None:
    torch.save({"a": torch.tensor([2.0])}, folder / "pytorch_model.bin")
    assert values(HuggingFaceLoader().get_weights("./org/name")) == {"a": 2}
    (folder / "model.safetensors").write_bytes(shard(a=1))
    weights = HuggingFaceLoader().get_weights("./org/name")
    assert values(weights) == {"a": 1}
    assert "pytorch_model.bin" in weights.skipped_files


def test_a_bin_with_several_state_dicts_is_read_by_key(folder: Path) -> None:
    torch.save({"a": {"x": torch.ones(2)}, "b": {"x": torch.zeros(2)}}, folder / "pytorch_model.bin")
    with pytest.raises(AmbiguousSourceError, match="key"):
        HuggingFaceLoader().get_weights("./org/name")
    with HuggingFaceLoader(key="b").get_weights("./org/name") as weights:
        assert weights["x"].sum() == 0


def test_the_folder_of_a_bare_name_is_used_if_it_has_weights_and_that_is_said(
    folder: Path, hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (folder / "model.safetensors").write_bytes(shard(here=1))
    weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert values(weights) == {"here": 1}
    assert "hf://org/name" in weights.notes[0]
    assert "org/name is a folder here" in caplog.text
    assert values(HuggingFaceLoader(cache_dir=cache).get_weights("hf://org/name")) == {"a": 1, "b": 2}


def test_how_a_name_was_read_is_a_note_of_the_report_and_no_warning(folder: Path, hub: Hub) -> None:
    (folder / "model.safetensors").write_bytes(save({"weight": torch.ones(2, 2)}))
    report = load_into(torch.nn.Linear(2, 2, bias=False), "org/name", loader="hf", progress=False)
    assert report.warnings == []
    assert report.notes == ["org/name is a folder here, and was used; hf://org/name means the repository on the hub"]
    assert any(line.split(maxsplit=1) == ["note", report.notes[0]] for line in str(report).splitlines())
    assert json.loads(report.to_json())["notes"] == report.notes


def test_a_folder_without_weights_does_not_hide_the_repository_of_that_name(
    folder: Path, hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert values(weights) == {"a": 1, "b": 2}
    assert "./org/name means the folder" in weights.notes[0]
    assert "org/name is a folder here" in caplog.text
    with pytest.raises(SourceNotFoundError, match="no weights in"):
        HuggingFaceLoader(cache_dir=cache).get_weights("./org/name")


def other_things(folder: Path) -> dict[str, str]:
    """Folders that hold no weights: name -> what is to be said of it."""
    (folder.parent / "pipe").mkdir()
    os.mkfifo(folder.parent / "pipe" / "model.safetensors")
    (folder.parent / "nested" / "model.safetensors").mkdir(parents=True)
    return {
        "org/name": "org/name is a folder here; no weights in org/name: .*the folder is empty",
        "org/pipe": "org/pipe is a folder here; .*model.safetensors: is not a regular file",
        "org/nested": "org/nested is a folder here; .*model.safetensors: is a folder, not a file",
    }


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("refusal", [(404, "RepoNotFound"), (500, ""), None])
def test_a_folder_without_weights_is_spoken_of_before_the_hub_that_has_none_either(
    folder: Path, hub: Hub, cache: Path, refusal: tuple[int, str] | None
) -> None:
    hub.refuses = refusal
    for name, said in other_things(folder).items():
        for open_it in (
            lambda name: HuggingFaceLoader(cache_dir=cache, local_files_only=refusal is None).get_weights(name),
            lambda name: open_weights(name, "auto", cache_dir=cache, local_files_only=refusal is None),
        ):
            with pytest.raises(SourceNotFoundError, match=f"{said}; as a repository on the hub: ") as caught:
                open_it(name)
            assert "there is no file or folder" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_neither_file_nor_folder_is_spoken_of_before_the_hub(folder: Path, hub: Hub, cache: Path) -> None:
    hub.refuses = (404, "RepoNotFound")
    os.mkfifo("pipe")
    Path("link").symlink_to("nowhere")
    for name, said in {"pipe": "is not a regular file", "link": "is a link that leads nowhere"}.items():
        with pytest.raises(SourceNotFoundError, match=f"^{name} {said}; as a repository on the hub: there is no"):
            HuggingFaceLoader(cache_dir=cache).get_weights(name)


def test_a_path_object_is_a_place_on_disk_for_everybody(folder: Path, hub: Hub) -> None:
    with pytest.raises(SourceNotFoundError, match="no loader recognises what is in it"):
        open_weights(Path("org/name"))
    for make in (
        lambda: from_pretrained(Path("org/name"), loader="hf"),
        lambda: LLM(Path("org/name"), weight_loader="hf"),
    ):
        with pytest.raises(ModelError, match=r"there is no config\.json in org/name\n"):
            make()
    assert not hub.asked


def test_a_path_object_is_never_a_repository(folder: Path, hub: Hub) -> None:
    with pytest.raises(SourceNotFoundError, match="no weights in"):
        HuggingFaceLoader().get_weights(Path("org/name"))  # type: ignore[arg-type]
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["", "./absent", "/absent", "~/absent", "a/b/c", "model.safetensors", "a\0b", "hf://", "hf://a/b/c"]
)
def test_what_can_be_no_repository_is_not_asked_for_on_the_hub(folder: Path, hub: Hub, name: str) -> None:
    with pytest.raises(SourceNotFoundError):
        HuggingFaceLoader().get_weights(name)
    assert not hub.asked


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("gpt2", True), ("org/name", True), ("Org-1/na.me_2", True), ("hf://org/name", True)]
    + [
        (name, False)
        for name in ("a/b/c", "a--b", "a..b", "x.git", "-a", "./a", "/a", "ü", "org/", "a b", "x.safetensors", "")
    ],
)
def test_the_form_of_a_repositorys_id_is_the_hubs(name: str, is_one: bool) -> None:
    assert looks_like_repository(name) == is_one


def test_a_subfolder_of_a_folder(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "model.safetensors").write_bytes(shard(a=1))
    assert values(HuggingFaceLoader(subfolder="sub").get_weights("org/name")) == {"a": 1}


@pytest.mark.parametrize("subfolder", ["../x", "/x", "a/../../b", "..\\x"])
def test_a_subfolder_must_lie_inside(subfolder: str) -> None:
    with pytest.raises(OptionsError, match="leads out"):
        HuggingFaceLoader(subfolder=subfolder)


def test_a_revision_asked_of_a_folder_is_said_to_be_ignored(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(shard(a=1))
    assert "revision 'v1' was ignored" in "".join(HuggingFaceLoader(revision="v1").get_weights("./org/name").notes)


# ------------------------------------------------------------------ the cache


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.usefixtures("no_network")
def test_a_cached_snapshot_loads_offline_without_a_socket(cache: Path, links: bool) -> None:
    fill(cache, SHARDED, links=links)
    weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")  # tests run with HF_HUB_OFFLINE=1
    assert values(weights) == {"a": 1, "b": 2}
    assert f"{OLD} from the cache" in weights.notes[0]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", None])
def test_the_offline_switches_work_when_set_after_the_import(
    hub: Hub, cache: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, SHARDED)
    if variable:
        monkeypatch.setenv(variable, "true")
    loader = HuggingFaceLoader(cache_dir=cache, local_files_only=variable is None)
    assert values(loader.get_weights("org/name")) == {"a": 1, "b": 2}


@pytest.mark.usefixtures("no_network")
def test_the_needed_files_suffice(cache: Path) -> None:
    fill(cache, {"model.safetensors": shard(a=1)})
    assert values(HuggingFaceLoader(cache_dir=cache).get_weights("org/name")) == {"a": 1}


def test_a_shard_missing_from_the_snapshot_is_named(cache: Path) -> None:
    snapshot = fill(cache, SHARDED)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        IncompleteCheckpointError, match=r"snapshot of org/name is incomplete.*00002-of-00002"
    ) as raised:
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert "load it once without HF_HUB_OFFLINE=1" in str(raised.value)


def test_a_blob_missing_from_the_snapshot_is_named(cache: Path) -> None:
    snapshot = fill(cache, SHARDED)
    (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"00002-of-00002\.safetensors is a link that leads nowhere"):
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")


def test_a_snapshot_without_weights_is_incomplete_and_one_that_is_not_there_is_absent(cache: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="has no snapshot of org/name at 'main'"):
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    fill(cache, {"config.json": b"{}"})
    with pytest.raises(SourceNotFoundError, match="snapshot of org/name is incomplete: no weights"):
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    with pytest.raises(SourceNotFoundError, match=f"at 'v2' .there are {OLD}"):
        HuggingFaceLoader(cache_dir=cache, revision="v2").get_weights("org/name")


@pytest.mark.parametrize("revision", ["v1", NEW, "refs/pr/1"])
def test_a_revision_is_looked_up_in_the_cache(cache: Path, revision: str) -> None:
    fill(cache, {"model.safetensors": shard(a=1)})
    fill(cache, {"model.safetensors": shard(a=2)}, NEW, branch=None)
    refs = cache / "models--org--name" / "refs"
    (refs / "v1").write_text(f"{NEW}\n")
    (refs / "refs" / "pr").mkdir(parents=True)
    (refs / "refs" / "pr" / "1").write_text(NEW)
    assert values(HuggingFaceLoader(cache_dir=cache, revision=revision).get_weights("org/name")) == {"a": 2}
    assert values(HuggingFaceLoader(cache_dir=cache).get_weights(f"hf://org/name@{revision}")) == {"a": 2}


def test_two_revisions_at_once_are_refused(cache: Path) -> None:
    with pytest.raises(OptionsError, match="two revisions"):
        HuggingFaceLoader(cache_dir=cache, revision="v1").get_weights("hf://org/name@v2")


@pytest.mark.parametrize("revision", ["../../secret", "/etc/hostname", "..", "a/../../../../secret"])
def test_a_revision_does_not_lead_out_of_the_cache(cache: Path, revision: str) -> None:
    fill(cache, SHARDED)
    (cache / "secret").write_text(OLD)
    with pytest.raises(SourceNotFoundError, match="no snapshot"):
        HuggingFaceLoader(cache_dir=cache, revision=revision).get_weights("org/name")


def test_a_reference_does_not_lead_out_of_the_cache(cache: Path, tmp_path: Path) -> None:
    fill(cache, SHARDED)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(shard(a=1))
    for text in ("../../../elsewhere", str(tmp_path / "elsewhere")):
        (cache / "models--org--name" / "refs" / "main").write_text(text)
        with pytest.raises(SourceNotFoundError, match="no snapshot"):
            HuggingFaceLoader(cache_dir=cache).get_weights("org/name")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", INDEX])
def test_in_the_cache_a_link_to_elsewhere_is_refused_even_if_the_content_is_good(
    cache: Path, tmp_path: Path, name: str, hub: Hub
) -> None:
    snapshot = fill(cache, SHARDED)
    (tmp_path / "elsewhere").write_bytes(SHARDED[name])
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(tmp_path / "elsewhere")
    for offline in (True, False):
        with pytest.raises(UnsafeCheckpointError, match="outside the blobs"):
            HuggingFaceLoader(cache_dir=cache, local_files_only=offline).get_weights("org/name")


READ_ONLY = """
import os, sys
from weightloaders.loaders.hf import HuggingFaceLoader

def load(cache, offline):
    with HuggingFaceLoader(cache_dir=cache, local_files_only=offline).get_weights("org/name") as weights:
        return {name: tensor.item() for name, tensor in weights.items()}

load(sys.argv[1], False)  # imports everything, which the other user may not be allowed to
if os.geteuid() == 0:  # root may write anywhere
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(os.access(sys.argv[2], os.W_OK), load(sys.argv[2], False), load(sys.argv[2], True))
"""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_read_only_cache_of_somebody_else_loads_without_a_lock(hub: Hub, tmp_path: Path) -> None:
    fill(tmp_path / "writable", SHARDED)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own can be entered by nobody else
        cache = Path(folder) / "cache"
        fill(cache, SHARDED)
        (cache / ".locks").mkdir(mode=0o700)
        before = sorted(cache.rglob("*"))
        for path in (cache.parent, cache, *before):
            if path.name != ".locks" and not path.is_symlink():
                path.chmod(0o555 if path.is_dir() else 0o444)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, tmp_path / "writable", cache],
            env={**os.environ, "HF_HOME": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "False {'a': 1, 'b': 2} {'a': 1, 'b': 2}\n", done.stderr
        assert not done.stderr
        assert sorted(cache.rglob("*")) == before
        for path in (cache.parent, cache, *before):
            if path.is_dir():
                path.chmod(0o755)
    assert len(hub.asked) == 2
    assert not hub.downloaded


# ------------------------------------------------------------------ the hub


def test_only_the_files_of_the_checkpoint_are_downloaded(hub: Hub, cache: Path) -> None:
    hub.commits[OLD] |= {
        "consolidated.safetensors": b"never",
        "pytorch_model.bin": b"never",
        "optimizer.pt": b"never",
        "original/model.safetensors": b"never",
        "model.fp16.safetensors": b"never",
        "README.md": b"never",
    }
    weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert values(weights) == {"a": 1, "b": 2}
    assert hub.downloaded == {INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    # Named all the same, though they never came here.
    assert {"consolidated.safetensors", "pytorch_model.bin", "optimizer.pt"} <= set(weights.skipped_files)
    assert OLD in weights.notes[0]


def test_every_request_goes_to_the_mirror(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect
    reached = set()

    def watched(self: socket.socket, address: Any) -> None:
        reached.add(address[:2])
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: pytest.fail("another way out"))
    HuggingFaceLoader(cache_dir=cache).get_weights("org/name").close()
    host, port = hub.url.removeprefix("http://").split(":")
    assert reached <= {(host, int(port))}
    # The listing; a HEAD and a GET for each of three files; and a HEAD before the index, and one before the shards.
    assert len(hub.asked) == 1 + 2 * 3 + 2


def test_what_was_downloaded_loads_offline_afterwards(hub: Hub, cache: Path) -> None:
    loader = HuggingFaceLoader(cache_dir=cache)
    loader.get_weights("org/name").close()
    hub.clear()
    assert values(loader.get_weights("org/name")) == {"a": 1, "b": 2}
    assert hub.asked == ["GET /api/models/org/name/revision/main"]
    hub.clear()
    assert values(HuggingFaceLoader(cache_dir=cache, local_files_only=True).get_weights("org/name")) == {"a": 1, "b": 2}
    assert not hub.asked


def test_a_fixed_commit_that_is_cached_is_not_asked_for(hub: Hub, cache: Path) -> None:
    fill(cache, SHARDED, branch=None)
    assert values(HuggingFaceLoader(cache_dir=cache, revision=OLD).get_weights("org/name")) == {"a": 1, "b": 2}
    assert not hub.asked


def test_a_fixed_commit_of_which_a_part_is_cached_is_completed(hub: Hub, cache: Path) -> None:
    snapshot = fill(cache, SHARDED, branch=None)
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    assert values(HuggingFaceLoader(cache_dir=cache, revision=OLD).get_weights("org/name")) == {"a": 1, "b": 2}
    assert hub.downloaded == {"model-00001-of-00002.safetensors"}


def test_a_new_commit_is_fetched_and_the_old_one_is_still_there(hub: Hub, cache: Path) -> None:
    loader = HuggingFaceLoader(cache_dir=cache)
    loader.get_weights("org/name").close()
    hub.commits[NEW], hub.branches["main"] = {"model.safetensors": shard(a=3)}, NEW
    assert values(loader.get_weights("org/name")) == {"a": 3}
    assert values(HuggingFaceLoader(cache_dir=cache, revision=OLD).get_weights("org/name")) == {"a": 1, "b": 2}


def test_the_branch_still_means_the_whole_old_commit_when_fetching_the_new_one_fails(
    hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cache, SHARDED)
    hub.commits[NEW], hub.branches["main"] = {**SHARDED, "model-00001-of-00002.safetensors": shard(a=3)}, NEW
    hub.withholds, hub.withheld = (403, ""), "model-00002-of-00002.safetensors"
    loader = HuggingFaceLoader(cache_dir=cache)
    assert values(loader.get_weights("org/name")) == {"a": 1, "b": 2}
    assert "maybe out of date" in caplog.text
    assert (cache / "models--org--name" / "refs" / "main").read_text() == OLD


def test_a_cache_that_cannot_take_the_new_commit_serves_the_old_one_and_says_so(
    hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cache, SHARDED, links=False)
    (cache / "models--org--name" / "blobs").write_text("a file where a folder should be")
    hub.commits[NEW], hub.branches["main"] = {"model.safetensors": shard(a=3)}, NEW
    weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert values(weights) == {"a": 1, "b": 2}
    assert "can't get org/name, because of a file on this machine" in caplog.text
    assert "maybe out of date" in "".join(weights.notes)


def test_a_subfolder_and_a_variant_of_a_repository(hub: Hub, cache: Path) -> None:
    hub.commits[OLD] |= {
        "unet/model.safetensors": shard(u=1),
        "unet/model.fp16.safetensors": shard(u=2),
        f"vae/{INDEX}": index(v="deep/part.safetensors"),
        "vae/deep/part.safetensors": shard(v=3),
    }
    assert values(HuggingFaceLoader(cache_dir=cache, subfolder="unet").get_weights("org/name")) == {"u": 1}
    assert values(HuggingFaceLoader(cache_dir=cache, subfolder="unet", variant="fp16").get_weights("org/name")) == {
        "u": 2
    }
    assert values(HuggingFaceLoader(cache_dir=cache, subfolder="vae").get_weights("org/name")) == {"v": 3}


@pytest.mark.parametrize("only_headers", [False, True])
def test_tensor_parallel_parts_of_a_repository_are_put_together(hub: Hub, cache: Path, only_headers: bool) -> None:
    def part(number: int) -> bytes:
        buffer = io.BytesIO()
        torch.save({"norm.weight": torch.ones(4), "output.weight": torch.full((3, 4), float(number))}, buffer)
        return buffer.getvalue()

    hub.commits[OLD] = {f"consolidated.{number:02}.pth": part(number) for number in range(2)}
    hub.commits[OLD] |= {"params.json": b'{"dim": 4, "n_heads": 2, "vocab_size": 6}', "tokenizer.model": b""}
    with headers_only() if only_headers else contextlib.nullcontext():
        weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert weights["output.weight"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert weights["norm.weight"].tolist() == [1, 1, 1, 1]
    assert not any("tokenizer" in asked for asked in hub.asked)


def test_a_repository_without_weights_is_told_what_it_has(hub: Hub, cache: Path) -> None:
    hub.commits[OLD] = {"config.json": b"{}", "model.gguf": b"", "original/x.safetensors": b""}
    with pytest.raises(SourceNotFoundError, match="loader 'gguf'") as raised:
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert "sub-folder original" in str(raised.value)
    assert not hub.downloaded


def test_an_index_on_the_hub_that_lies_is_found_out_before_a_shard_is_downloaded(hub: Hub, cache: Path) -> None:
    del hub.commits[OLD]["model-00002-of-00002.safetensors"]
    with pytest.raises(
        IncompleteCheckpointError, match=r"00002-of-00002\.safetensors is not in the repository: 1 of its 2"
    ):
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert hub.downloaded == {INDEX}


@pytest.mark.parametrize("path", ["../../../../secret", "/etc/hostname"])
def test_an_index_on_the_hub_that_leads_out_is_refused(hub: Hub, cache: Path, path: str) -> None:
    hub.commits[OLD][INDEX] = index(a=path)
    with pytest.raises(UnsafeCheckpointError):
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert hub.downloaded == {INDEX}


def test_what_is_ambiguous_on_the_hub_is_not_guessed_from_the_cache(hub: Hub, cache: Path) -> None:
    fill(cache, SHARDED)
    hub.commits[OLD] = {"model.fp16.safetensors": b"", "model.bf16.safetensors": b""}
    with pytest.raises(AmbiguousSourceError):
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")


# ------------------------------------------------------------------ a hub that refuses


@pytest.mark.parametrize(
    "refusal", [(401, "GatedRepo"), (403, "GatedRepo"), (401, ""), (403, ""), (404, "RepoNotFound"), (500, "")]
)
def test_a_hub_that_refuses_leaves_the_cache_with_a_warning(
    hub: Hub, cache: Path, refusal: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    fill(cache, SHARDED)
    hub.refuses = refusal
    weights = HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert values(weights) == {"a": 1, "b": 2}
    assert [record.levelname for record in caplog.records if record.name.startswith("weightloaders")] == ["WARNING"]
    assert "maybe out of date" in "".join(weights.notes)


@pytest.mark.parametrize(
    ("refusal", "kind", "says"),
    [
        ((401, "GatedRepo"), SourceReadError, "org/name is gated, and needs a token"),
        ((403, "GatedRepo"), SourceReadError, "org/name is gated, and needs a token"),
        ((401, ""), SourceNotFoundError, "gated and needs a token"),
        ((401, "RepoNotFound"), SourceNotFoundError, "gated and needs a token"),
        ((403, ""), SourceNotFoundError, "gated and needs a token"),
        ((404, "RepoNotFound"), SourceNotFoundError, "there is no repository org/name"),
        ((500, ""), SourceReadError, "can't get org/name"),
        ((200, ""), SourceReadError, "can't get org/name"),
    ],
)
def test_a_hub_that_refuses_without_a_cache_is_explained(
    hub: Hub, cache: Path, refusal: tuple[int, str], kind: type[SourceError], says: str
) -> None:
    hub.refuses = refusal
    with pytest.raises(kind, match=says) as raised:
        HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
    assert "the cache stand in: the cache" in str(raised.value)


def test_a_revision_that_is_not_on_the_hub_is_not_replaced_by_another(hub: Hub, cache: Path) -> None:
    fill(cache, SHARDED, branch="v9")
    with pytest.raises(SourceNotFoundError, match="no revision 'v9'"):
        HuggingFaceLoader(cache_dir=cache, revision="v9").get_weights("org/name")


def test_no_hub_at_all(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(SourceReadError, match=r"can't get org/name from http://127\.0\.0\.1"):
            HuggingFaceLoader(cache_dir=cache).get_weights("org/name")
        fill(cache, SHARDED)
        assert values(HuggingFaceLoader(cache_dir=cache).get_weights("org/name")) == {"a": 1, "b": 2}
    assert "maybe out of date" in caplog.text


def test_a_name_that_is_nowhere_is_told_not_to_be_here_before_what_is_wrong_with_the_hub(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.refuses = (401, "")
    with pytest.raises(
        SourceError, match=r"^there is no file or folder my/file\.house here; as a repository on the hub: "
    ):
        HuggingFaceLoader(cache_dir=cache).get_weights("my/file.house")
    # Who says that it is a repository is not told of files.
    with pytest.raises(SourceError) as refused:
        HuggingFaceLoader(cache_dir=cache).get_weights("hf://my/file.house")
    assert "no file or folder" not in refused.value.message


@pytest.mark.parametrize("refusal", [None, (401, "GatedRepo"), (401, ""), (500, "")])
def test_the_token_is_sent_but_never_told(
    hub: Hub, cache: Path, refusal: tuple[int, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    loader = HuggingFaceLoader(cache_dir=cache, token=f" {TOKEN}\n")
    told = repr(loader) + repr(loader.access)
    hub.refuses = refusal
    if refusal is None:
        told += "".join(loader.get_weights("org/name").notes)
    else:
        with pytest.raises(SourceError) as raised:
            loader.get_weights("org/name")
        told += "".join(traceback.format_exception(raised.value))
    assert TOKEN not in told + caplog.text
    assert hub.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("token", [f"{TOKEN}\nx", f"{TOKEN}\u200b", f"{TOKEN} x", ""])
def test_a_token_that_cannot_be_one_is_refused_without_telling_it(token: str) -> None:
    with pytest.raises(OptionsError, match="can't be a token") as raised:
        HuggingFaceLoader(token=token)
    assert TOKEN not in "".join(traceback.format_exception(raised.value))


# ------------------------------------------------------------------ probing, and folders for others


def test_the_probe_goes_by_names_and_never_asks_the_hub(folder: Path, hub: Hub, no_network: None) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    (folder.parent / "empty").mkdir()
    answers = {
        name: HuggingFaceLoader.probe(name).answer
        for name in ("org/name", "./org/name", "org/empty", "./org/empty", "hf://org/name", "gpt2", "s3://x/y", "a/b/c")
    }
    assert answers == {
        "org/name": "yes",
        "./org/name": "yes",
        "org/empty": "maybe",
        "./org/empty": "no",
        "hf://org/name": "yes",
        "gpt2": "maybe",
        "s3://x/y": "no",
        "a/b/c": "no",
    }
    assert HuggingFaceLoader.probe("org/name/model.safetensors").answer == "no"


def test_small_files_are_found_on_disk_on_the_hub_and_in_the_cache(folder: Path, hub: Hub, cache: Path) -> None:
    wanted = ("config.json", "tokenizer*")
    access = HubAccess(cache_dir=cache)
    hub.commits[OLD] |= {"tokenizer.json": b"{}", "sub/config.json": b"{}"}
    fetched = resolve_folder("org/name", wanted, access)
    assert sorted(path.name for path in fetched.iterdir()) == ["config.json", "tokenizer.json"]
    hub.refuses = (500, "")
    assert resolve_folder("org/name", wanted, HubAccess(cache_dir=cache, local_files_only=True)) == fetched
    (folder / "config.json").write_text("{}")
    assert resolve_folder("org/name", wanted, access) == Path("org/name")
    with pytest.raises(SourceNotFoundError, match=r"there is no config\.json or tokenizer\* in"):
        resolve_folder(folder.parent, wanted, access)


def test_a_needed_file_decides_whether_a_folder_will_do(folder: Path, hub: Hub, cache: Path) -> None:
    access = HubAccess(cache_dir=cache)
    (folder / "notes.txt").touch()
    assert resolve_folder("org/name", access=access) == Path("org/name")
    fetched = resolve_folder("org/name", access=access, needed="config.json")
    assert (fetched / "config.json").is_file()
    assert fetched.is_relative_to(cache)
    with pytest.raises(SourceNotFoundError, match=r"a folder here; there is no x\.json in org/name; as a repository"):
        resolve_folder("org/name", access=access, needed="x.json")
    with pytest.raises(SourceNotFoundError, match=r"notes\.txt is a file, where a folder is wanted"):
        resolve_folder("./org/name/notes.txt", access=access)


def test_what_is_wanted_decides_between_a_folder_and_a_repository(folder: Path) -> None:
    assert locate("org/name", lambda _: True).path == Path("org/name")
    assert locate("org/name", lambda _: False).repository == "org/name"
