"""Checkpoints on the hub and at web addresses, told from their headers alone: servers on this machine count bytes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.hub_server import COMMIT, NEWER, Handler, Hub, Web, servers
from weightloaders import from_pretrained, load_into, open_weights, plan_load
from weightloaders.cli.main import app
from weightloaders.errors import (
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
    ModelError,
    OptionsError,
    RemoteReadError,
    SourceError,
    SourceNotFoundError,
    SourceReadError,
    UnsafeCheckpointError,
)
from weightloaders.loaders.headers_only import headers_only
from weightloaders.loaders.hf import HuggingFaceLoader
from weightloaders.loaders.http import HttpLoader
from weightloaders.loaders.hub import HubAccess
from weightloaders.loaders.resolve import resolve_folder
from weightloaders.testing import isolated_registry
from weightloaders.weights.http import HttpSource
from weightloaders.weights.remote import HEAD_BYTES, RemoteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INDEX = "model.safetensors.index.json"
TOKEN = "hf_thisIsSecret"
SECRET = "s3cr3t"
SLACK = 300 << 10


# ------------------------------------------------------------------ servers


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Web]]:
    """Starts servers; the process may use the network."""
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with servers() as start:
        yield start


@pytest.fixture
def web(serve: Callable[[], Web]) -> Web:
    return serve()


@pytest.fixture
def hub(serve: Callable[[], Web], monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(serve(), serve(), {COMMIT: dict(SHARDED)})
    monkeypatch.setenv("HF_ENDPOINT", hub.api.url)
    return hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteSource, "pause", 0.001)


def shard(**values: int) -> bytes:
    return save({name: torch.tensor([value]) for name, value in values.items()})


def index(**weight_map: str) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


SHARDED = {
    INDEX: index(a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"),
    "model-00001-of-00002.safetensors": shard(a=1),
    "model-00002-of-00002.safetensors": shard(b=2),
}


def values(weights: Any) -> dict[str, Any]:
    with weights:
        return {name: tensor.item() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some 45 MB, in shards of more than 10 MB."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="13MB")
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) >= 3
    assert min(sorted(file.stat().st_size for file in shards)[-3:]) > 10 << 20
    return folder


@pytest.fixture(scope="module")
def llama_files(llama: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in llama.iterdir()}
    # What must never be asked for.
    return {**files, "tokenizer.json": b" " * (5 << 20), "optimizer.pt": b"never", "pytorch_model.bin": b"never"}


def headers_in(files: dict[str, bytes]) -> int:
    """What has to be known of a checkpoint: its index, its config, the headers of its shards."""
    headers = sum(8 + int.from_bytes(c[:8], "little") for name, c in files.items() if name.endswith(".safetensors"))
    return headers + len(files[INDEX]) + len(files["config.json"])


def run(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


# ------------------------------------------------------------------ the hub: inspect, plan, and what they take


def check_what_was_taken(hub: Hub, files: dict[str, bytes], home: Path) -> None:
    assert hub.api.total + hub.storage.total < headers_in(files) + SLACK
    assert not [path for path in hub.api.asked if "tokenizer" in path or "optimizer" in path or ".bin" in path]
    assert not [path for path in home.rglob("*") if path.is_file()]
    # The token goes to the hub and to nobody whom the hub leads to; a branch stands for one commit throughout.
    assert {h.get("authorization") for h in hub.api.headers} == {f"Bearer {TOKEN}"}
    assert hub.storage.headers
    assert not any("authorization" in h for h in hub.storage.headers)
    assert {h["accept-encoding"] for h in hub.storage.headers} == {"identity"}
    assert hub.listings == 1


def test_inspecting_a_repository_reads_headers_and_keeps_nothing(
    hub: Hub, llama_files: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    hub.commits[COMMIT] = llama_files
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    result = run("inspect", "org/name", "--json")
    assert json.loads(result.stdout)["totals"]["tensors"] == 30
    check_what_was_taken(hub, llama_files, cache)


def test_planning_a_repository_reads_headers_and_keeps_nothing(
    hub: Hub, llama_files: dict[str, bytes], tmp_path: Path, third_parties: str
) -> None:
    hub.commits[COMMIT] = llama_files
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-m", "weightloaders", "plan", "org/name"],
        env={
            **{name: value for name, value in os.environ.items() if name not in offline},
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "TMPDIR": str(temporary),
            "WEIGHTLOADERS_DISABLE": third_parties,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("it fits\n30 parameters from ")
    assert TOKEN not in done.stdout + done.stderr
    check_what_was_taken(hub, llama_files, home)
    # Where the config was for a while.
    assert not list(temporary.iterdir())


def test_a_plan_from_headers_equals_the_plan_from_the_files(
    hub: Hub, llama: Path, llama_files: dict[str, bytes], cache: Path
) -> None:
    hub.commits[COMMIT] = llama_files
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(llama))
    remote = plan_load(model, "org/name", loader_kwargs={"cache_dir": cache})
    local = plan_load(model, llama)
    assert remote.ok
    assert remote.bytes_to_read == local.bytes_to_read > 40 << 20
    assert hub.storage.total < SLACK
    assert not cache.exists()


def test_tensors_that_were_only_described_can_be_read_all_the_same(
    hub: Hub, llama: Path, llama_files: dict[str, bytes], cache: Path
) -> None:
    hub.commits[COMMIT] = llama_files
    expected = {name: t for file in llama.glob("*.safetensors") for name, t in load_file(file).items()}
    with open_weights("org/name", cache_dir=cache, token=TOKEN) as weights:
        assert weights.keys() == expected.keys()
        for name in list(weights)[::9]:
            assert torch.equal(weights[name], expected[name])
    assert not cache.exists()
    assert not any("authorization" in h for h in hub.storage.headers)


def test_loading_from_the_hub_downloads_into_the_cache_as_ever(hub: Hub, cache: Path) -> None:
    model = torch.nn.Module()
    model.a, model.b = (torch.nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False) for _ in "ab")
    load_into(model, "org/name", loader_kwargs={"cache_dir": cache}, progress=False)
    assert (model.a.item(), model.b.item()) == (1, 2)
    assert {path.name for path in cache.rglob("snapshots/*/*")} == set(SHARDED)


@pytest.mark.parametrize("command", ["convert", "compare", "compare --headers-only"])
def test_commands_that_read_everything_download_first(hub: Hub, cache: Path, tmp_path: Path, command: str) -> None:
    where = f"cache_dir={cache}"
    if command == "convert":
        run("convert", "org/name", tmp_path / "out", "--to", "safetensors", "--option", where, "--quiet")
    else:
        name, *switches = command.split()
        run(name, "org/name", "hf://org/name", "--option-a", where, "--option-b", where, "--quiet", *switches)
    assert cache.exists() == ("--headers-only" not in command)


def test_several_headers_are_asked_for_at_once(hub: Hub, cache: Path) -> None:
    shards = {f"model-{i:05}-of-00006.safetensors": shard(**{f"t{i}": i}) for i in range(1, 7)}
    hub.commits[COMMIT] = {**shards, INDEX: index(**{f"t{i}": name for i, name in enumerate(shards, 1)})}
    together = threading.Barrier(6, timeout=30)

    def wait(handler: Handler) -> None:
        together.wait()

    hub.storage.odd = {f"/{COMMIT}/{name}": wait for name in shards}
    with open_weights("org/name", cache_dir=cache) as weights:
        assert len(weights) == 6


def test_headers_longer_than_the_first_request_come_whole(hub: Hub, cache: Path) -> None:
    names = [f"model.layers.{i}.some.rather.long.name.of.a.tensor.weight" for i in range(4000)]
    content = save({name: torch.tensor([i]) for i, name in enumerate(names)})
    assert int.from_bytes(content[:8], "little") > 4 * HEAD_BYTES
    hub.commits[COMMIT] = {"model.safetensors": content}
    with open_weights("org/name", cache_dir=cache) as weights:
        assert len(weights) == 4000
        assert len(hub.storage.asked) == 2
        assert weights[names[77]].item() == 77


# ------------------------------------------------------------------ the hub: which files


def described(name: str = "org/name", **options: Any) -> Any:
    return open_weights(name, "hf", **options)


def test_the_rules_on_files_hold_on_the_hub_too(hub: Hub, cache: Path) -> None:
    hub.commits[COMMIT] |= {
        "consolidated.safetensors": b"never",
        "pytorch_model.bin": b"never",
        "optimizer.pt": b"never",
        "model.fp16.safetensors": b"never",
        "original/model.safetensors": b"never",
        "stray.safetensors": b"never",
    }
    weights = described(cache_dir=cache)
    assert {"consolidated.safetensors", "pytorch_model.bin", "optimizer.pt", "stray.safetensors"} <= set(
        weights.skipped_files
    )
    assert values(weights) == {"a": 1, "b": 2}
    assert {path.rpartition("/")[2] for path in hub.api.asked if "resolve" in path} == set(SHARDED)


def test_without_an_index_all_that_match_are_taken_and_twins_compared(hub: Hub, cache: Path) -> None:
    hub.commits[COMMIT] = {"one.safetensors": shard(a=1, b=2), "two.safetensors": shard(b=2, c=3)}
    assert values(described(cache_dir=cache)) == {"a": 1, "b": 2, "c": 3}
    hub.commits[COMMIT]["two.safetensors"] = shard(b=9)
    with pytest.raises(DuplicateTensorError, match=r"'b' is in one\.safetensors and in two"):
        described(cache_dir=cache)


@pytest.mark.parametrize(
    ("weight_map", "error", "says"),
    [
        ({"a": "absent.safetensors"}, IncompleteCheckpointError, "absent.safetensors is not in the repository"),
        ({"a": "one.safetensors"}, IncompleteCheckpointError, "'a' is in one.safetensors, but that file"),
        ({"a": "../one.safetensors"}, UnsafeCheckpointError, "outside"),
    ],
)
def test_an_index_that_lies_is_found_out(
    hub: Hub, cache: Path, weight_map: dict[str, str], error: type[SourceError], says: str
) -> None:
    hub.commits[COMMIT] = {INDEX: index(**weight_map), "one.safetensors": shard(b=1)}
    with pytest.raises(error, match=says):
        described(cache_dir=cache)


def test_a_subfolder_and_a_revision_are_described(hub: Hub, cache: Path) -> None:
    hub.commits[NEWER] = {"unet/model.safetensors": shard(u=1), "model.safetensors": shard(a=1)}
    assert values(described(cache_dir=cache, revision=NEWER, subfolder="unet")) == {"u": 1}
    assert values(described(f"hf://org/name@{NEWER}", cache_dir=cache)) == {"a": 1}
    assert all(COMMIT not in path for path in hub.api.asked)
    with pytest.raises(SourceNotFoundError, match="no revision 'v9'"):
        described(cache_dir=cache, revision="v9")


# ------------------------------------------------------------------ the hub and its cache


@pytest.fixture
def snapshot(hub: Hub, cache: Path) -> Path:
    """The repository as loading it leaves it in the cache."""
    HuggingFaceLoader(cache_dir=cache).get_weights("org/name").close()
    hub.clear()
    return cache / "models--org--name" / "snapshots" / COMMIT


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*args: Any) -> None:
        pytest.fail("the network was used")

    def apply() -> None:
        for method in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, method, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    return apply


@pytest.mark.parametrize("how", ["switch", "option", "commit"])
def test_a_cached_snapshot_is_described_without_a_socket(
    snapshot: Path, cache: Path, how: str, no_network: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_network()
    if how == "switch":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    revision = COMMIT if how == "commit" else None
    weights = described(cache_dir=cache, local_files_only=how == "option", revision=revision)
    assert values(weights) == {"a": 1, "b": 2}


def test_of_a_commit_that_is_cached_the_hub_is_asked_only_whether_the_branch_is_still_there(
    hub: Hub, snapshot: Path, cache: Path
) -> None:
    weights = described(cache_dir=cache)
    assert {extent.source.name for info in weights.infos() for extent in info.extents} == {
        str(snapshot / name) for name in SHARDED if name != INDEX
    }
    assert values(weights) == {"a": 1, "b": 2}
    assert len(hub.api.asked) == 1
    assert not hub.storage.asked


def test_looking_at_a_newer_commit_leaves_the_cache_usable_offline(
    hub: Hub, snapshot: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commits[NEWER], hub.branches["main"] = {"model.safetensors": shard(a=3)}, NEWER
    assert values(described(cache_dir=cache)) == {"a": 3}
    assert values(described(cache_dir=cache, local_files_only=True)) == {"a": 1, "b": 2}


def test_a_link_in_the_cache_that_leads_out_is_refused(hub: Hub, snapshot: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(shard(a=1))
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    (snapshot / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeCheckpointError, match="outside the blobs"):
        described(cache_dir=cache)


@pytest.mark.parametrize("refusal", [(401, "GatedRepo"), (403, "GatedRepo"), (401, ""), (503, "")])
@pytest.mark.usefixtures("impatient")
def test_files_that_are_listed_but_refused_leave_the_cache_with_a_warning(
    hub: Hub, snapshot: Path, cache: Path, refusal: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    hub.commits[NEWER], hub.branches["main"] = {"model.safetensors": shard(a=3)}, NEWER
    hub.withholds = refusal
    assert values(described(cache_dir=cache)) == {"a": 1, "b": 2}
    assert "maybe out of date" in caplog.text


@pytest.mark.parametrize(
    ("refusal", "error", "says"),
    [
        ((401, "GatedRepo"), SourceReadError, "org/name is gated, and needs a token"),
        ((403, "GatedRepo"), SourceReadError, "org/name is gated, and needs a token"),
        ((401, ""), SourceNotFoundError, "does not show org/name .revision 'main', status 401"),
        ((429, ""), RemoteReadError, "answers with status 429"),
        ((500, ""), RemoteReadError, "answers with status 500"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_files_that_are_listed_but_refused_are_explained(
    hub: Hub, cache: Path, refusal: tuple[int, str], error: type[SourceError], says: str
) -> None:
    hub.withholds = refusal
    with pytest.raises(error, match=says) as raised:
        described(cache_dir=cache, token=TOKEN)
    assert TOKEN not in "".join(traceback.format_exception(raised.value))


def test_a_revision_is_the_weights_own_and_not_that_of_the_repository_with_the_config(
    hub: Hub, cache: Path, llama: Path, llama_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    hub.commits[NEWER] = llama_files
    listing = {"id": "org/config", "sha": "2" * 40, "siblings": [{"rfilename": "config.json"}]}
    hub.api.odd["/api/models/org/config/revision/main"] = lambda _: (200, {}, json.dumps(listing).encode())
    hub.api.files[f"/org/config/resolve/{'2' * 40}/config.json"] = llama_files["config.json"]
    run("plan", "hf://org/name", "--model", "hf://org/config", "--option", f"revision='{NEWER}'", "--quiet")
    asked = [path.partition("?")[0] for path in hub.api.asked if "/api/" in path]
    assert asked == ["/api/models/org/config/revision/main", f"/api/models/org/name/revision/{NEWER}"]
    assert not cache.exists()


def test_only_what_a_model_is_built_from_is_fetched_and_not_into_the_cache(hub: Hub, cache: Path) -> None:
    hub.commits[COMMIT] |= {"config.json": b"{}", "tokenizer.json": b"never", "merges.txt": b"never"}
    with headers_only():
        folder = resolve_folder("org/name", access=HubAccess(cache_dir=cache), needed="config.json")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not cache.exists()
    with headers_only(), pytest.raises(SourceNotFoundError, match=r"no x\.json in hf://org/name"):
        resolve_folder("org/name", access=HubAccess(cache_dir=cache), needed="x.json")


# ------------------------------------------------------------------ addresses


def test_an_address_of_a_file_is_described_and_read(web: Web) -> None:
    content = save({"w": torch.arange(3 << 20, dtype=torch.float32), "v": torch.ones(3)})
    web.files["/sub/model.safetensors"] = content
    with open_weights(f"{web.url}/sub/model.safetensors") as weights:
        assert set(weights) == {"w", "v"}
        assert web.total <= HEAD_BYTES
        assert weights.info("w").extents[0].source.name == f"{web.url}/sub/model.safetensors"
        assert torch.equal(weights["w"], torch.arange(3 << 20, dtype=torch.float32))
    assert web.total < len(content) + HEAD_BYTES


def at(web: Web, files: dict[str, bytes], folder: str = "/m") -> str:
    web.files = {f"{folder}/{name}": content for name, content in files.items()}
    return web.url + folder


def test_in_a_folder_the_index_comes_first_then_the_single_file(web: Web) -> None:
    everything = {
        **SHARDED,
        "model.safetensors": shard(single=1),
        "pytorch_model.bin": b"never",
        "consolidated.safetensors": shard(consolidated=1),
    }
    weights = open_weights(at(web, everything))
    assert "model.safetensors" in weights.skipped_files
    assert values(weights) == {"a": 1, "b": 2}
    assert not any("pytorch_model" in path for path in web.asked)
    del everything[INDEX]
    assert values(open_weights(at(web, everything) + "/")) == {"single": 1}
    del everything["model.safetensors"], everything["pytorch_model.bin"]
    assert values(open_weights(at(web, everything))) == {"consolidated": 1}
    assert values(open_weights(at(web, SHARDED) + f"/{INDEX}")) == {"a": 1, "b": 2}


def test_an_address_without_weights_says_what_was_looked_for(web: Web) -> None:
    with pytest.raises(SourceNotFoundError, match=r"none of model\.safetensors\.index\.json, model\.safetensors"):
        open_weights(web.url + "/nothing/here")
    with pytest.raises(SourceNotFoundError, match=r"nothing at http://127.*/x\.safetensors .status 404"):
        open_weights(web.url + "/x.safetensors")


def test_a_storage_service_that_refuses_what_is_not_there_is_understood(web: Web) -> None:
    web.route = lambda _: (403, {}, b"AccessDenied")
    assert values(open_weights(at(web, {"model.safetensors": shard(a=1)}))) == {"a": 1}
    with pytest.raises(RemoteReadError, match=r"no weights at .*does not let us in \(status 403\)") as raised:
        open_weights(web.url + "/elsewhere")
    assert raised.value.status == 403
    assert "headers" in str(raised.value.hint)


@pytest.mark.parametrize("status", [404, 403])
def test_files_that_an_index_names_and_that_are_not_there_are_all_named(web: Web, status: int) -> None:
    web.route = lambda _: (status, {}, b"")
    files = {
        INDEX: index(a="one.safetensors", b="two.safetensors", c="three.safetensors"),
        "one.safetensors": shard(a=1),
    }
    with pytest.raises(IncompleteCheckpointError, match=r"two\.safetensors is not .*, three\.safetensors is not") as e:
        open_weights(at(web, files))
    assert "2 of its 3 tensors" in str(e.value)


def test_names_with_spaces_and_signs_are_found(web: Web) -> None:
    files = {INDEX: index(a="ein # Stück 100%.safetensors"), "ein # Stück 100%.safetensors": shard(a=1)}
    assert values(open_weights(at(web, files, "/Modell ü"))) == {"a": 1}


def test_a_query_goes_with_every_request_and_is_never_told(web: Web) -> None:
    url = at(web, {**SHARDED, "x.safetensors": shard(a=1)})
    weights = open_weights(f"{url}?sig={SECRET}")
    assert all(path.endswith(f"?sig={SECRET}") for path in web.asked)
    assert values(open_weights(f"{url}/x.safetensors?sig={SECRET}")) == {"a": 1}
    told = repr(weights.infos()) + "".join(weights.notes)
    with pytest.raises(SourceNotFoundError) as raised:
        open_weights(f"{url.replace('//', f'//me:{SECRET}@')}/y.safetensors?sig={SECRET}")
    assert SECRET not in told + "".join(traceback.format_exception(raised.value))


def test_headers_are_sent_to_the_server_and_to_no_other(web: Web, serve: Callable[[], Web]) -> None:
    other = serve()
    other.files["/moved.safetensors"] = shard(a=1)
    headers = {"Authorization": f"Bearer {SECRET}", "X-Key": SECRET}
    for name, target in (("far", f"{other.url}/moved.safetensors"), ("near", "/here.safetensors")):
        web.odd[f"/{name}.safetensors"] = lambda _, target=target: (302, {"Location": target}, b"")
    web.files["/here.safetensors"] = shard(a=2)
    assert values(open_weights(f"{web.url}/far.safetensors", headers=headers)) == {"a": 1}
    assert values(open_weights(f"{web.url}/near.safetensors", headers=headers)) == {"a": 2}
    assert all(h["authorization"] == f"Bearer {SECRET}" and h["x-key"] == SECRET for h in web.headers)
    assert other.headers
    assert not any("authorization" in h or "x-key" in h for h in other.headers)


@pytest.mark.parametrize("headers", [{"X-Key": "a\nb"}, {"X Key": SECRET}, {"X-Key": ""}, {"X-Key": f" {SECRET}"}])
def test_headers_that_can_not_be_sent_are_refused_without_telling_them(headers: dict[str, str]) -> None:
    with pytest.raises(OptionsError, match="can't be sent") as raised:
        HttpLoader(headers=headers)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "address",
    ["http://", "https:///x", "http://host:99999/x", "http://[::1/x", "http://a\nb/x.bin", "http://☃.de/x.bin"],
)
def test_what_is_no_address_is_said_to_be_none(serve: Callable[[], Web], address: str) -> None:
    with pytest.raises(SourceNotFoundError, match="no address"):
        open_weights(address)


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_no_address_is_asked(web: Web, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "1")
    with pytest.raises(RemoteReadError, match=f"is not asked for: {switch}=1") as raised:
        open_weights(at(web, SHARDED))
    assert not web.asked
    assert "unset HF_HUB_OFFLINE" in str(raised.value)


def test_an_address_is_read_by_the_loader_http_and_by_no_other_built_in(web: Web) -> None:
    url = at(web, SHARDED)
    with isolated_registry() as registry:
        assert isinstance(registry.resolve("auto", source=url), HttpLoader)
        with pytest.raises(SourceNotFoundError, match=r"loader recognises") as raised:
            open_weights(f"{web.url}/model.gguf")
        assert raised.value.hint == "pip install weightloaders-gguf"
    with pytest.raises(SourceNotFoundError, match="loader 'http'"):
        open_weights(url, "hf")
    with pytest.raises(SourceNotFoundError, match="is no http or https address"):
        open_weights("model.safetensors", "http")
    assert HttpLoader.probe("HTTPS://host/x").answer == "maybe"
    assert HttpLoader.probe("org/name").answer == "no"


def test_a_page_of_the_hub_is_told_from_the_repository(hub: Hub) -> None:
    with pytest.raises(SourceNotFoundError, match="no weights at") as raised:
        open_weights(f"{hub.api.url}/org/name/tree/main")
    assert "hf://org/name" in str(raised.value.hint)


# ------------------------------------------------------------------ addresses: models


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_of_a_model_at_an_address_only_headers_are_read(
    web: Web, llama_files: dict[str, bytes], command: str, tmp_path: Path
) -> None:
    result = run(command, at(web, llama_files), "--json")
    assert json.loads(result.stdout)
    assert web.total < headers_in(llama_files) + SLACK
    assert not any("tokenizer" in path or ".bin" in path for path in web.asked)


def test_a_file_at_an_address_says_nothing_of_the_model_it_is_for(web: Web, llama: Path) -> None:
    url = at(web, {path.name: path.read_bytes() for path in llama.iterdir()})
    with pytest.raises(ModelError, match="is a file, which says nothing of the model"):
        CliRunner().invoke(app, ["plan", f"{url}/{INDEX}", "--debug"], catch_exceptions=False)
    run("plan", f"{url}/{INDEX}", "--model", llama, "--quiet")


def test_a_model_at_an_address_equals_what_transformers_loads_from_disk(
    web: Web, llama: Path, llama_files: dict[str, bytes]
) -> None:
    files = {name: content for name, content in llama_files.items() if name != "tokenizer.json"}
    model, report = from_pretrained(at(web, files), progress=False)
    expected = LlamaForCausalLM.from_pretrained(llama).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert report.loader == "http"
    assert report.extra_memory < 16 << 20
    # Read once: no more than the files, and the beginnings twice.
    assert web.total < sum(len(c) for name, c in files.items()) + len(llama_files) * 2 * HEAD_BYTES


def test_headers_let_in_the_config_too(web: Web, llama_files: dict[str, bytes]) -> None:
    content = llama_files

    def guard(path: str) -> Any:
        def answer(handler: Handler) -> Any:
            return None if handler.headers.get("X-Key") == "k" else (401, {}, b"")

        return answer

    url = at(web, content)
    web.odd = {path: guard(path) for path in web.files}
    run("plan", url, "--option", "headers={X-Key: k}", "--quiet")
    assert "does not let us in" in run("inspect", url, status=1).stderr
    assert "config.json" in run("plan", url, status=1).stderr


# ------------------------------------------------------------------ torch files


@pytest.mark.parametrize("legacy", [False, True])
def test_of_a_torch_file_the_directory_and_the_pickle_are_read_and_nothing_else(
    web: Web, tmp_path: Path, legacy: bool
) -> None:
    torch.manual_seed(0)
    tensors = {f"layer{i}.weight": torch.randn(700, 1000) for i in range(12)}
    torch.save(tensors, tmp_path / "model.bin", _use_new_zipfile_serialization=not legacy)
    content = (tmp_path / "model.bin").read_bytes()
    assert len(content) > 30 << 20
    with open_weights(at(web, {"pytorch_model.bin": content})) as weights:
        assert weights.keys() == tensors.keys()
        assert web.total < SLACK
        assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


def test_a_torch_file_on_the_hub_is_described_too(hub: Hub, cache: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1 << 20)}, tmp_path / "model.bin")
    hub.commits[COMMIT] = {"pytorch_model.bin": (tmp_path / "model.bin").read_bytes(), "training_args.bin": b"never"}
    with described(cache_dir=cache) as weights:
        assert hub.storage.total < SLACK
        assert torch.equal(weights["w"], torch.arange(1 << 20))


# ------------------------------------------------------------------ the source


BYTES = bytes(range(256)) * 1024


@pytest.fixture
def source(web: Web) -> HttpSource:
    web.files["/x.bin"] = BYTES
    return HttpSource(f"{web.url}/x.bin?sig={SECRET}", {"X-Key": SECRET})


def test_size_identity_and_name(web: Web, source: HttpSource) -> None:
    assert source.name == f"{web.url}/x.bin"
    assert source.size == len(BYTES)
    assert source.identity[:2] == (source.name, len(BYTES))
    assert HttpSource(f"{web.url}/x.bin").identity == source.identity
    assert SECRET not in repr(source)
    web.files["/x.bin"] = b"other" + BYTES[5:]
    assert HttpSource(f"{web.url}/x.bin").identity != source.identity


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(BYTES)), st.integers(0, 3 * HEAD_BYTES)), min_size=1, max_size=6))
def test_any_parts_are_what_the_file_has_there(source: HttpSource, places: list[tuple[int, int]]) -> None:
    places = [(offset, min(length, len(BYTES) - offset)) for offset, length in places]
    expected = [BYTES[offset : offset + length] for offset, length in places]
    assert source.read_many(places) == expected
    assert [source.read(*place) for place in places] == expected


def test_parts_that_lie_close_together_come_in_one_request(web: Web, source: HttpSource) -> None:
    assert source.size
    web.asked.clear()
    source.read_many([(100_000 + 500 * i, 30) for i in range(20)])
    assert len(web.asked) == 1
    source.read_many([(70_000, 10), (200_000, 10)])
    assert len(web.asked) == 3


def test_bytes_beyond_the_end_are_not_asked_for(web: Web, source: HttpSource) -> None:
    assert source.size
    web.asked.clear()
    with pytest.raises(SourceReadError):
        source.read(len(BYTES) - 1, 2)
    with pytest.raises(SourceReadError, match="has only"):
        source.read_into(memoryview(bytearray(2)), len(BYTES) - 1)
    assert not web.asked


@pytest.mark.parametrize("ranges", [True, False])
def test_an_empty_file_and_a_small_one(web: Web, ranges: bool) -> None:
    web.files |= {"/empty.bin": b"", "/small.bin": b"small"}
    web.ranges = ranges
    assert HttpSource(f"{web.url}/empty.bin").size == 0
    assert HttpSource(f"{web.url}/small.bin").read(1, 3) == b"mal"


def test_a_server_that_ignores_ranges_is_hung_up_on(web: Web) -> None:
    web.files["/x.safetensors"] = bytes(64 << 20)
    web.ranges = False
    with pytest.raises(RemoteReadError, match="ignores ranges") as raised:
        open_weights(f"{web.url}/x.safetensors")
    assert "download it" in str(raised.value)
    # What the two systems' buffers hold has left the server, though nobody reads it.
    assert web.total < 32 << 20


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (400, RemoteReadError, "answers with status 400"),
        (401, RemoteReadError, "does not let us in .status 401"),
        (403, RemoteReadError, "does not let us in .status 403"),
        (404, SourceNotFoundError, "there is nothing at .*status 404"),
        (410, SourceNotFoundError, "there is nothing at .*status 410"),
        (416, RemoteReadError, "first bytes"),
        (429, RemoteReadError, "answers with status 429"),
        (500, RemoteReadError, "answers with status 500"),
        (503, RemoteReadError, "answers with status 503"),
        (204, RemoteReadError, "answers with status 204"),
        (304, RemoteReadError, "answers with status 304"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_each_refusal_names_the_address_and_no_secret(
    web: Web, source: HttpSource, status: int, error: type[SourceError], says: str
) -> None:
    web.odd["/x.bin"] = lambda _: (status, {}, b"")
    with pytest.raises(error, match=says) as raised:
        _ = source.size
    told = "".join(traceback.format_exception(raised.value))
    assert source.name in str(raised.value)
    assert SECRET not in told
    assert getattr(raised.value, "status", status) == status
    assert len(web.asked) == (5 if status in (429, 500, 503) else 1)


@pytest.mark.usefixtures("impatient")
def test_trouble_that_passes_is_waited_out(web: Web, source: HttpSource) -> None:
    troubles = [(503, {}, b""), (429, {"Retry-After": "0"}, b""), (500, {}, b""), (502, {}, b"")]
    web.odd["/x.bin"] = lambda _: troubles.pop() if troubles else None
    assert source.read(0, len(BYTES)) == BYTES
    assert not troubles


def test_a_server_that_asks_to_wait_long_is_not_waited_for(web: Web, source: HttpSource) -> None:
    web.odd["/x.bin"] = lambda _: (429, {"Retry-After": "3600"}, b"")
    with pytest.raises(RemoteReadError, match="status 429 and asks to wait 3600 seconds") as raised:
        _ = source.size
    assert "wait before you try again" in str(raised.value.hint)
    assert len(web.asked) == 1


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(web: Web, source: HttpSource) -> None:
    def broken(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        handler.close_connection = True
        status, headers, body = handler.part(BYTES)
        return status, {**headers, "Content-Length": str(len(body))}, body[: max(1, len(body) // 2)]

    assert source.size
    web.asked.clear()
    web.headers.clear()
    web.odd["/x.bin"] = broken
    assert source.read(100_000, 100_000) == BYTES[100_000:200_000]
    firsts = [int(h["range"].removeprefix("bytes=").split("-")[0]) for h in web.headers]
    assert firsts == sorted(set(firsts))
    assert firsts[1] == 150_000


@pytest.mark.usefixtures("impatient")
def test_a_body_without_a_length_that_ends_early_is_no_success(web: Web, source: HttpSource) -> None:
    def short(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        handler.close_connection = True
        status, headers, _ = handler.part(BYTES)
        return status, {**headers, "Content-Length": "", "Connection": "close"}, b""

    assert source.size
    web.odd["/x.bin"] = short
    with pytest.raises(RemoteReadError, match="breaks off 10 bytes too early"):
        source.read(100_000, 10)


def answer_of(**changes: Any) -> Callable[[Handler], tuple[int, dict[str, str], bytes]]:
    def answer(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = handler.part(BYTES)
        headers = {**headers, **changes.get("headers", {})}
        return status, headers, changes.get("body", lambda body: body)(body)

    return answer


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"headers": {"ETag": '"another"'}}, "was changed after it was catalogued"),
        ({"headers": {"Content-Range": f"bytes 100000-100009/{len(BYTES) + 1}"}}, "was changed"),
        ({"headers": {"Content-Range": f"bytes 100001-100010/{len(BYTES)}"}}, "was asked for bytes 100000"),
        ({"headers": {"Content-Range": f"bytes 100000-199999/{len(BYTES)}"}}, "was asked for bytes 100000"),
        ({"headers": {"Content-Range": "bytes 100000-100009/*"}}, "was asked for bytes 100000"),
        ({"headers": {"Content-Range": "rows 1-2/3"}}, "was asked for bytes 100000"),
        ({"headers": {"Content-Range": ""}}, "no range"),
        ({"headers": {"Content-Encoding": "gzip"}}, "comes compressed .gzip"),
        ({"body": lambda body: body + b"x"}, "sends more than the 10 bytes"),
    ],
)
def test_an_answer_that_is_not_to_what_was_asked_is_refused(
    web: Web, source: HttpSource, changes: dict[str, Any], says: str
) -> None:
    assert source.size
    web.asked.clear()
    web.odd["/x.bin"] = answer_of(**changes)
    with pytest.raises(SourceReadError, match=says):
        source.read(100_000, 10)
    assert len(web.asked) == 1


def test_a_file_that_became_shorter_was_changed(web: Web, source: HttpSource) -> None:
    assert source.size
    web.files["/x.bin"] = BYTES[:1000]
    with pytest.raises(SourceReadError, match="was changed"):
        source.read(100_000, 10)


def test_a_tag_that_became_weak_on_the_way_is_the_same(web: Web, source: HttpSource) -> None:
    assert source.size
    web.odd["/x.bin"] = answer_of(headers={"ETag": f'W/"{hash(BYTES):x}"'})
    assert source.read(100_000, 10) == BYTES[100_000:100_010]


@pytest.mark.usefixtures("impatient")
def test_a_server_may_send_less_than_was_asked_for_if_it_says_so(web: Web, source: HttpSource) -> None:
    def half(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, first + 40_000 - 1)
        return 206, {"Content-Range": f"bytes {first}-{last}/{len(BYTES)}"}, BYTES[first : last + 1]

    web.odd["/x.bin"] = half
    assert source.read(0, 200_000) == BYTES[:200_000]


@pytest.mark.parametrize(
    ("location", "says"),
    [("/x.bin", "without end"), ("file:///etc/passwd", "no address"), ("http://[", "no address")],
)
def test_redirects_that_lead_nowhere(web: Web, source: HttpSource, location: str, says: str) -> None:
    web.odd["/x.bin"] = lambda _: (307, {"Location": location}, b"")
    with pytest.raises(RemoteReadError, match=says):
        _ = source.size


def test_a_redirect_from_https_to_http_is_not_followed() -> None:
    source = HttpSource("https://host/x")
    with pytest.raises(RemoteReadError, match="leads from https to http://host/y, which anybody"):
        source._target("https://host/x", f"http://host/y?sig={SECRET}")
    assert source._target("https://host/x", "https://other/y") == "https://other/y"


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_not_there_is_said_so(serve: Callable[[], Web]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(RemoteReadError, match=r"/x\.safetensors can't be read") as raised:
            open_weights(f"http://127.0.0.1:{unused.getsockname()[1]}/x.safetensors")
    assert "check the network" in str(raised.value)


def test_a_server_that_never_answers_is_given_up(web: Web, source: HttpSource, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(RemoteSource, "patience", 0.5)
    done = threading.Event()
    web.odd["/x.bin"] = lambda _: done.wait(60) and None
    try:
        with pytest.raises(RemoteReadError, match=r"can't be read \(ReadTimeout"):
            _ = source.size
    finally:
        done.set()


def test_a_server_that_trickles_is_given_up(web: Web, source: HttpSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteSource, "slow_after", 0.3)

    def trickle(handler: Handler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{HEAD_BYTES - 1}/{len(BYTES)}")
        handler.send_header("Content-Length", str(HEAD_BYTES))
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.05)

    web.odd["/x.bin"] = trickle
    with pytest.raises(RemoteReadError, match="sends too slowly"):
        _ = source.size


# ------------------------------------------------------------------ other content than it should be


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "Git LFS pointer"),
        (b"<html><title>Sign in</title></html>" + b" " * 100, "HTML page"),
        (b"", "empty file"),
        ((200 << 20).to_bytes(8, "little") + b"{" + b" " * 100_000, "claims a header of"),
        ((1 << 20).to_bytes(8, "little") + b"{" + b" " * 100_000, "truncated"),
    ],
)
def test_what_is_no_checkpoint_is_told_by_its_beginning(web: Web, content: bytes, says: str) -> None:
    web.files["/x.safetensors"] = content
    with pytest.raises(CheckpointFormatError, match=says):
        open_weights(f"{web.url}/x.safetensors")


def test_a_torch_file_that_is_cut_off_is_said_to_be(web: Web, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1 << 18)}, tmp_path / "model.bin")
    web.files["/x.bin"] = (tmp_path / "model.bin").read_bytes()[:-5000]
    with pytest.raises(CheckpointFormatError, match="without a readable directory"):
        open_weights(f"{web.url}/x.bin")


def test_a_package_that_is_made_for_addresses_goes_before_the_built_in(web: Web) -> None:
    from weightloaders import BaseWeightLoader, Probe

    class Tuned(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> dict[str, torch.Tensor]:
            return {"tuned": torch.ones(1)}

        @classmethod
        def probe(cls, path: str) -> Probe:
            return Probe.yes("mine") if path.startswith("http") else Probe.no()

    with isolated_registry() as registry:
        registry.register("tuned", Tuned)
        chosen = registry.resolve("auto", source=f"{web.url}/model.safetensors")
    assert isinstance(chosen, Tuned)
    assert not web.asked
