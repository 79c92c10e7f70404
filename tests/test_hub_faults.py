"""A hub in trouble, a mirror, and a cache that is no good: the real client, against a server on this machine."""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save

from tests.hub_server import COMMIT, NEWER, XET_TOKEN, Handler, Hub, Web, servers, wait_for_threads
from weightloaders import from_pretrained, load_into, open_weights, plan_load
from weightloaders.errors import RemoteReadError, SourceError, SourceNotFoundError, SourceReadError
from weightloaders.loaders.headers_only import headers_only
from weightloaders.loaders.hf import HuggingFaceLoader
from weightloaders.weights.discretion import without_secrets
from weightloaders.weights.http import HttpSource
from weightloaders.weights.remote import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN, SIGNATURE, PASSWORD = "hf_thisIsSecret", "sIgNaTuRe", "pAsSwOrD"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FILES = {
    "config.json": b"{}",
    INDEX: json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}).encode(),
    FIRST: save({"a": torch.arange(20_000.0)}),
    SECOND: save({"b": torch.arange(20_000.0) + 1}),
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Web]]:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(RemoteSource, "pause", 0.001)
    with servers() as start:
        yield start


@pytest.fixture
def hub(serve: Callable[[], Web], monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub that sends to another server for its files, by addresses that are signed."""
    hub = Hub(serve(), serve(), {COMMIT: dict(FILES)}, query=f"?X-Amz-Signature={SIGNATURE}&X-Amz-Expires=60")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    return hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def loaded(cache: Path, **options: Any) -> dict[str, torch.Tensor]:
    with HuggingFaceLoader(cache_dir=cache, **options).get_weights("org/name") as weights:
        return dict(weights)


def is_right(found: dict[str, torch.Tensor]) -> bool:
    return torch.equal(found["a"], torch.arange(20_000.0)) and torch.equal(found["b"], torch.arange(20_000.0) + 1)


def answering(*answers: Any) -> Callable[[Handler], Any]:
    """Answers in turn, to whatever is asked but by HEAD; then as ever."""
    left = list(answers)
    return lambda handler: left.pop(0) if left and handler.command == "GET" else None


# ------------------------------------------------------------------ errors


REFUSALS = {
    "gated, no token": ((401, "GatedRepo"), "token=..."),
    "gated, token without access": ((403, "GatedRepo"), "ask for access at"),
    "private": ((401, "RepoNotFound"), "token=..."),
    "forbidden": ((403, ""), "token=..."),
    "absent": ((404, "RepoNotFound"), "check the name"),
    "too many requests": ((429, ""), "wait before you try again"),
    "broken": ((500, ""), "try again later"),
    "overloaded": ((503, ""), "try again later"),
}


@pytest.mark.parametrize("files_only", [False, True], ids=["the listing too", "files alone"])
@pytest.mark.parametrize("what", REFUSALS)
def test_each_refusal_names_repository_revision_status_and_the_way_out(
    hub: Hub, cache: Path, what: str, files_only: bool
) -> None:
    refusal, way_out = REFUSALS[what]
    hub.branches["v1"] = COMMIT
    if files_only:
        hub.withholds = refusal
    else:
        hub.refuses = refusal
    with pytest.raises(SourceError) as caught:
        loaded(cache, revision="v1")
    message = str(caught.value)
    assert "org/name" in message
    assert "revision 'v1'" in message
    assert f"status {refusal[0]}" in message
    assert way_out in message
    assert isinstance(caught.value, SourceNotFoundError) or caught.value.status == refusal[0]


@pytest.mark.parametrize("status", [403, 503])
def test_a_storage_that_refuses_is_told_from_a_hub_that_does(hub: Hub, cache: Path, status: int) -> None:
    assert hub.storage is not None
    hub.storage.odd[f"/{COMMIT}/{FIRST}"] = lambda _: (status, {}, b"no")
    with pytest.raises(RemoteReadError, match=rf"can't get org/name from .*revision 'main', status {status}") as caught:
        loaded(cache)
    assert caught.value.status == status
    assert status != 403 or hub.storage.url in str(caught.value)


def test_a_hub_that_fails_for_a_moment_is_asked_again(hub: Hub, cache: Path) -> None:
    busy = (429, {"Retry-After": "0"}, b"{}")
    hub.api.odd["/api/models/org/name/revision/main"] = answering((503, {}, b"{}"), busy)
    failures = [(503, {}, b""), (429, {}, b"")]
    hub.api.odd[f"/org/name/resolve/{COMMIT}/{INDEX}"] = lambda _: failures.pop() if failures else None
    assert is_right(loaded(cache))
    assert not failures


@pytest.mark.parametrize("asks", [{"Retry-After": "3600"}, {"RateLimit": '"resolvers";r=0;t=3600'}])
@pytest.mark.parametrize("files_only", [False, True])
def test_nobody_waits_an_hour_because_a_hub_asks_for_it(
    hub: Hub, cache: Path, asks: dict[str, str], files_only: bool
) -> None:
    hub.refusal_headers = asks
    if files_only:
        hub.withholds = (429, "")
    else:
        hub.refuses = (429, "")
    with pytest.raises(RemoteReadError, match=r"status 429.*which asks to wait 3600 seconds"):
        loaded(cache)
    assert len(hub.asked) == 1 + files_only


def test_of_a_hub_that_never_recovers_the_cache_serves_after_a_few_attempts(
    hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(cache)
    hub.clear()
    hub.refuses = (503, "")
    assert is_right(loaded(cache))
    assert len(hub.asked) == 5
    assert "status 503" in caplog.text
    assert "maybe out of date" in caplog.text


def test_a_gated_repository_loads_from_a_whole_cache_and_not_from_half_of_one(
    hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(cache)
    hub.refuses = (401, "GatedRepo")
    assert is_right(loaded(cache, token=False))
    assert "org/name is gated" in caplog.text
    (cache / "models--org--name" / "snapshots" / COMMIT / SECOND).unlink()
    with pytest.raises(SourceReadError, match=f"is gated, and needs a token.*nor can the cache stand in.*{SECOND}"):
        loaded(cache, token=False)


# ------------------------------------------------------------------ transfers


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that huggingface_hub makes before it takes a transfer up again."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.mark.usefixtures("no_pauses")
def test_a_transfer_that_breaks_off_is_taken_up_where_it_broke(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.storage is not None
    content, cuts = FILES[FIRST], [1000, 50_000]
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)

    def broken(handler: Handler) -> Any:
        status, headers, body = handler.part(content)
        return (status, {**headers, "Content-Length": str(len(body))}, body[: cuts.pop()]) if cuts else None

    hub.storage.odd[f"/{COMMIT}/{FIRST}"] = broken
    assert is_right(loaded(cache))
    ranges = [
        headers.get("range") for headers, path in zip(hub.storage.headers, hub.storage.asked, strict=True)
        if FIRST in path
    ]  # fmt: skip
    assert ranges == [None, "bytes=50000-", "bytes=51000-"]


@pytest.mark.usefixtures("no_pauses")
def test_a_transfer_that_always_breaks_off_ends_in_an_error_and_leaves_nothing_that_looks_whole(
    hub: Hub, cache: Path
) -> None:
    assert hub.storage is not None
    hub.storage.odd[f"/{COMMIT}/{FIRST}"] = lambda _: (200, {"Content-Length": str(len(FILES[FIRST]))}, b"")
    with pytest.raises(RemoteReadError, match=r"can't get org/name.*revision 'main'"):
        loaded(cache)
    wait_for_threads()
    assert not (cache / "models--org--name" / "snapshots" / COMMIT / FIRST).exists()
    assert not list(cache.rglob("*.incomplete"))
    hub.storage.odd.clear()
    assert is_right(loaded(cache))


@pytest.mark.usefixtures("no_pauses")
def test_what_was_whole_before_a_transfer_broke_off_is_not_fetched_again(hub: Hub, cache: Path) -> None:
    assert hub.storage is not None
    hub.storage.odd[f"/{COMMIT}/{SECOND}"] = lambda _: (500, {}, b"")
    with pytest.raises(RemoteReadError):
        loaded(cache)
    hub.storage.odd.clear()
    hub.clear()
    assert is_right(loaded(cache))
    assert hub.downloaded == {SECOND}


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_stops_sending_is_given_up(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    assert hub.storage is not None
    go_on = threading.Event()

    def stuck(_: Handler) -> None:
        go_on.wait(20)

    hub.storage.odd[f"/{COMMIT}/{FIRST}"] = stuck
    try:
        with pytest.raises(RemoteReadError, match=r"can't get org/name.*Timeout"):
            loaded(cache)
    finally:
        go_on.set()


def test_a_file_that_is_not_as_long_as_the_hub_says_is_refused(hub: Hub, cache: Path) -> None:
    assert hub.storage is not None
    hub.storage.odd[f"/{COMMIT}/{FIRST}"] = lambda _: (200, {}, FILES[FIRST][:-8])
    with pytest.raises(SourceReadError, match="org/name"):
        loaded(cache)
    assert not (cache / "models--org--name" / "snapshots" / COMMIT / FIRST).exists()


# ------------------------------------------------------------------ mirrors, offline


def test_a_mirror_is_asked_for_everything_wherever_its_replies_point(
    serve: Callable[[], Web], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(serve(), commits={COMMIT: dict(FILES)})
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    # A page that follows, at the hub's own address; and files that lie elsewhere on the mirror.
    listing = hub.api.route("/api/models/org/name/revision/main")  # type: ignore[misc]
    assert isinstance(listing, tuple)
    link = {"Link": '<https://huggingface.co/api/models/org/name?cursor=x>; rel="next"'}
    hub.api.odd["/api/models/org/name/revision/main"] = lambda _: (200, link, listing[2])
    for name, content in FILES.items():
        hub.api.files[f"/elsewhere/{name}"] = content
        facts = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{hash(content):x}"', "X-Linked-Size": str(len(content))}
        hub.api.odd[f"/org/name/resolve/{COMMIT}/{name}"] = lambda _, name=name, facts=facts: (
            307,
            {"Location": f"/elsewhere/{name}", **facts},
            b"",
        )
        hub.api.odd[f"/elsewhere/{name}"] = lambda handler, content=content, facts=facts: (
            (200, facts, content) if "Range" not in handler.headers else None
        )
    own = {("127.0.0.1", int(hub.url.rpartition(":")[2]))}

    def allowed(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and watching:
            reached.add(arguments[1][:2])
        if event == "socket.getaddrinfo" and watching:
            reached.add((arguments[0], arguments[1]))

    watching, reached = [True], set[Any]()
    sys.addaudithook(allowed)
    try:
        assert is_right(loaded(cache))
        with headers_only():
            HuggingFaceLoader(cache_dir=cache.with_name("other")).get_weights("org/name").close()
    finally:
        watching.clear()
    assert reached
    assert reached <= own


_OFFLINE = """
import sys
reached = []
sys.addaudithook(lambda event, arguments: reached.append(arguments) if event.startswith("socket.") else None)
from weightloaders import open_weights
with open_weights("org/name", cache_dir=sys.argv[1]) as weights:
    print(sorted(weights), weights["a"].sum().item())
print([arguments for arguments in reached if "socket.gethostname" not in str(arguments)])
"""


def test_a_process_that_starts_offline_opens_no_socket(hub: Hub, cache: Path) -> None:
    loaded(cache)
    hub.clear()
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE, cache],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['a', 'b'] 199990000.0\n[]\n", done.stderr
    assert not hub.asked


# ------------------------------------------------------------------ caches


_LOAD = """
import sys
from weightloaders.loaders.hf import HuggingFaceLoader
sys.stdin.readline()
with HuggingFaceLoader(cache_dir=sys.argv[1]).get_weights("org/name") as weights:
    print(weights["a"].double().sum().item() + weights["b"].double().sum().item())
"""


def test_two_processes_at_once_download_once(hub: Hub, cache: Path) -> None:
    assert hub.storage is not None

    def slowly(_: Handler) -> None:
        time.sleep(0.3)

    for name in FILES:
        hub.storage.odd[f"/{COMMIT}/{name}"] = slowly
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, cache],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert float(out) == 2 * 199990000.0 + 20_000, err
    fetched = [path.partition("?")[0] for path in hub.storage.asked]
    assert sorted(fetched) == sorted(f"/{COMMIT}/{name}" for name in FILES if name != "config.json")


def test_without_links_files_are_copied_by_however_many_threads(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no privilege to make links")

    monkeypatch.setattr(os, "symlink", refused)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(is_right(loaded(cache)))
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 8
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    assert not any(path.is_symlink() for path in snapshot.iterdir())
    assert is_right(loaded(cache, local_files_only=True))


def test_links_can_be_done_without_by_a_switch(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS", True)
    assert is_right(loaded(cache))
    assert not any(path.is_symlink() for path in cache.rglob("*"))


def test_locks_that_can_not_be_made_hinder_downloads_with_a_word_and_reading_not_at_all(hub: Hub, cache: Path) -> None:
    loaded(cache)
    locks = cache / ".locks"
    for path in sorted(locks.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    locks.rmdir()
    locks.write_text("in the way")
    assert is_right(loaded(cache))
    hub.commits[NEWER] = {**FILES, FIRST: save({"a": torch.zeros(2)})}
    with pytest.raises(SourceReadError, match="because of a file on this machine") as caught:
        loaded(cache, revision=NEWER)
    assert str(cache) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "../escaped.safetensors",
        "/escaped.safetensors",
        "..\\escaped.safetensors",
        "C:\\escaped.safetensors",
        "a\0b.bin",
    ],
)
def test_a_hub_that_lists_odd_names_has_nothing_written_outside_the_cache(
    hub: Hub, cache: Path, tmp_path: Path, name: str
) -> None:
    hub.commits[COMMIT] = {name: FILES[FIRST], "config.json": b"{}"}
    before = sorted(path for path in Path.home().iterdir() if path.name.startswith("escaped"))
    with contextlib.suppress(SourceError):
        loaded(cache)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []
    assert sorted(path for path in Path.home().iterdir() if path.name.startswith("escaped")) == before
    for path in cache.rglob("*") if cache.exists() else ():
        assert path.resolve().is_relative_to(cache.resolve())


def test_ctrl_c_ends_downloads_that_run(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose threads would else keep the process from ending for as long as they take."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 10)
    assert hub.storage is not None
    interrupted, whole = threading.Event(), []

    def slowly(handler: Handler) -> Any:
        if handler.command == "GET":
            content = hub.commits[COMMIT][FIRST]
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content[:5000])
            if not interrupted.is_set():
                interrupted.set()
                _thread.interrupt_main()
            interrupted.wait(20)
            for at in range(5000, len(content), 1000):
                time.sleep(0.1)
                handler.wfile.write(content[at : at + 1000])
            whole.append(handler.path)
        return None

    for name in (FIRST, SECOND):
        hub.storage.odd[f"/{COMMIT}/{name}"] = slowly
    with pytest.raises(KeyboardInterrupt):
        loaded(cache)
    wait_for_threads()
    assert whole == []
    assert not list(cache.rglob("*.incomplete"))


# ------------------------------------------------------------------ by hf_xet

# In a process of its own: hf_xet has threads that stay.
_BY_XET = """
import logging, sys, traceback
from weightloaders.errors import SourceError
from weightloaders.loaders.hf import HuggingFaceLoader
logging.basicConfig(level=logging.DEBUG)
try:
    with HuggingFaceLoader(cache_dir=sys.argv[1], token=sys.argv[2]).get_weights("org/name") as weights:
        print(weights["a"].double().sum().item() + weights["b"].double().sum().item())
except SourceError as error:
    traceback.print_exc()
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(importlib.util.find_spec("hf_xet") is None, reason="hf_xet is not installed")
@pytest.mark.parametrize("refused", [False, True], ids=["served", "refused"])
def test_what_hf_xet_fetches_is_right_or_explained_and_no_secret_is_told(
    hub: Hub, cache: Path, serve: Callable[[], Web], refused: bool, tmp_path: Path
) -> None:
    hub.xet = web = serve()
    if refused:
        for content in (FILES[FIRST], FILES[SECOND]):
            web.odd[f"/v1/reconstructions/{hashlib.sha256(content).hexdigest()}"] = lambda _: (403, {}, b"")
    done = subprocess.run(
        [sys.executable, "-c", _BY_XET, cache, TOKEN],
        capture_output=True, text=True, timeout=180, check=True, env={**os.environ, "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert hub.storage is not None
    if not refused:
        assert float(done.stdout) == 2 * 199990000.0 + 20_000, done.stderr
        assert not [path for path in hub.storage.asked if ".safetensors?" in path]
    else:
        assert done.stdout.startswith("RemoteReadError can't get org/name"), done.stdout + done.stderr
        assert "403" in done.stdout
        assert "HF_HUB_DISABLE_XET=1" in done.stdout
        assert not list(cache.glob("**/*.safetensors"))
    told = done.stdout + done.stderr
    told += "".join(path.read_bytes().decode("latin1") for path in tmp_path.rglob("*") if path.is_file())
    for secret in (TOKEN, SIGNATURE, XET_TOKEN):
        assert secret not in told
    # The token is for the hub alone.
    assert not any(TOKEN in str(headers) for headers in (*web.headers, *hub.storage.headers))


def test_headers_are_read_without_hf_xet(hub: Hub, cache: Path, serve: Callable[[], Web]) -> None:
    hub.xet = serve()
    with open_weights("org/name", "hf", cache_dir=cache) as weights:
        assert set(weights) == {"a", "b"}
    assert not hub.xet.asked


# ------------------------------------------------------------------ secrets


def _all_ways_to_fail(hub: Hub) -> dict[str, Callable[[], None]]:
    storage, file = hub.storage, f"/{COMMIT}/{FIRST}"
    assert storage is not None

    def withhold(status: int, code: str = "") -> Callable[[], None]:
        return lambda: setattr(hub, "withholds", (status, code))

    def refuse(status: int, code: str = "") -> Callable[[], None]:
        return lambda: setattr(hub, "refuses", (status, code))

    def store(answer: Any) -> Callable[[], None]:
        return lambda: storage.odd.__setitem__(file, lambda _: answer)

    return {
        "none": lambda: None,
        **{
            f"refuses {s} {c}": refuse(s, c)
            for s, c in [(401, "GatedRepo"), (403, ""), (404, "RepoNotFound"), (503, "")]
        },
        **{f"withholds {s}": withhold(s) for s in (401, 403, 404, 429, 500)},
        **{f"storage {s}": store((s, {}, b"")) for s in (401, 403, 404, 500)},
        "storage breaks off": store((200, {"Content-Length": "999"}, b"")),
        "storage sends something else": store((200, {}, b"<html>" * 20_000)),
    }


WAYS = (
    "none", "refuses 401 GatedRepo", "refuses 403 ", "refuses 404 RepoNotFound", "refuses 503 ", "withholds 401",
    "withholds 403", "withholds 404", "withholds 429", "withholds 500", "storage 401", "storage 403", "storage 404",
    "storage 500", "storage breaks off", "storage sends something else",
)  # fmt: skip


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("only_headers", [False, True], ids=["downloaded", "looked at"])
@pytest.mark.parametrize("way", WAYS)
def test_no_token_password_or_signature_is_ever_told(
    hub: Hub, cache: Path, way: str, only_headers: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ways = _all_ways_to_fail(hub)
    assert tuple(ways) == WAYS
    ways[way]()
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", f"//user:{PASSWORD}@"))
    caplog.set_level(logging.DEBUG)
    model = torch.nn.Module()
    model.a, model.b = (torch.nn.Parameter(torch.zeros(20_000)) for _ in range(2))
    options = {"cache_dir": cache, "token": TOKEN}
    loader = HuggingFaceLoader(**options)  # type: ignore[arg-type]
    events: list[Any] = []
    told = [repr(loader), repr(loader.access), repr(vars(loader))]
    try:
        if only_headers:
            with open_weights("org/name", "hf", **options) as weights:
                plan = plan_load(model, weights)
                told += [str(plan), plan.to_json(), repr(weights), repr(list(weights.infos()))]
        else:
            report = load_into(model, "org/name", loader="hf", loader_kwargs=options, progress=events.append)
            told += [str(report), report.to_json(), repr(report)]
    except SourceError as error:
        told += ["".join(traceback.format_exception(error)), repr(error), str(vars(error))]
        assert way != "none"
    told += [caplog.text, *map(repr, events), *capfd.readouterr()]
    told += [path.read_bytes().decode("latin1") for path in cache.rglob("*") if path.is_file()]
    told += [str(path) for path in cache.rglob("*")]
    for secret in (TOKEN, PASSWORD, SIGNATURE):
        assert not [text for text in told if secret in text]
    assert any("authorization" in headers for headers in hub.api.headers)
    assert hub.storage is not None
    assert not any(TOKEN in str(headers) for headers in hub.storage.headers)


def test_the_bar_of_a_download_names_the_file_and_no_address(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(importlib.import_module("huggingface_hub.utils.tqdm"), "HF_HUB_DISABLE_PROGRESS_BARS", False)
    hub.query = f"?{SIGNATURE * 10}"
    loaded(cache)
    assert FIRST in terminal.getvalue()
    assert SIGNATURE not in terminal.getvalue()


def test_a_signed_address_is_told_without_its_signature_in_anybodys_log(
    serve: Callable[[], Web], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    web = serve()
    web.files["/model.safetensors"] = FILES[FIRST]
    url = web.url.replace("//", f"//user:{PASSWORD}@") + f"/model.safetensors?X-Amz-Signature={SIGNATURE}"
    source = HttpSource(url)
    assert source.size == len(FILES[FIRST])
    assert "model.safetensors" in caplog.text
    assert SIGNATURE not in caplog.text + repr(source)
    assert PASSWORD not in caplog.text + repr(source)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("see https://u:p@h/x?sig=1, then", "see https://h/x then"),
        ("'http://h/a?b' and \"https://h/c#d\"", "'http://h/a' and \"https://h/c\""),
        ("(b'Location', b'https://h/x?sig=1')", "(b'Location', b'https://h/x')"),
        ("is of size 3 ((…)ature=abc&x=1).", "is of size 3 ((…))."),
        ("model.safetensors?sig=1 breaks off", "model.safetensors breaks off"),
        ("nothing of the kind: a?b, u@h", "nothing of the kind: a?b, u@h"),
        ("[(b'X-Xet-Access-Token', b'xyz'), (b'Date', b'1')]", "[(b'X-Xet-Access-Token', b'…'), (b'Date', b'1')]"),
        ("(b'set-cookie', b\"a='b'; c\")", "(b'set-cookie', b'…')"),
    ],
)
def test_addresses_in_a_text_lose_what_may_be_secret(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_code_of_a_repository_is_not_run_unless_it_is_asked_for(hub: Hub, cache: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    config = {
        "model_type": "theirs",
        "architectures": ["TheirsForCausalLM"],
        "auto_map": {"AutoConfig": "theirs.TheirsConfig", "AutoModelForCausalLM": "theirs.TheirsForCausalLM"},
    }
    hub.commits[COMMIT] |= {
        "config.json": json.dumps(config).encode(),
        "theirs.py": f"open({str(marker)!r}, 'w').close()\n".encode(),
    }
    for arguments in ({}, {"trust_remote_code": False}):
        with pytest.raises(Exception, match="trust_remote_code"):
            from_pretrained("org/name", loader="hf", loader_kwargs={"cache_dir": cache}, **arguments)
    assert not marker.exists()
