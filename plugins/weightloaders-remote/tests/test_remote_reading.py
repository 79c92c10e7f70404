"""How bytes are read from servers that behave, and from those that don't: in one way from buckets and from the web."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from weightloaders_remote import RemoteLoader, stores

from weightloaders import load_into, open_weights, plan_load
from weightloaders.errors import (
    CheckpointFormatError,
    IncompleteCheckpointError,
    LoadError,
    OptionsError,
    RemoteReadError,
    SourceError,
    SourceNotFoundError,
    SourceReadError,
)
from weightloaders.weights.remote import HEAD_BYTES, RemoteSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Handler, Web


def opened(address: str, **options: Any) -> Any:
    """Opened by the loader itself: finding it among all that are installed takes long."""
    return open_weights(address, RemoteLoader, **options)


BIG = torch.arange(300_000, dtype=torch.float32)
CONTENT = save({"big": BIG})


@dataclass
class Place:
    """Files on a server, and how they are asked for.

    Attributes:
        address: Of the folder.
        options: What leads there.
        path: Of the folder, on the server.
    """

    web: Web
    address: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, content: bytes) -> str:
        self.web.files[f"{self.path}/{name}"] = content
        return f"{self.address}/{name}"

    def answers(self, name: str, answer: Callable[[Handler], Any]) -> str:
        self.web.odd[f"{self.path}/{name}"] = answer
        return f"{self.address}/{name}"

    def open(self, name: str = "", **options: Any) -> Any:
        return opened(f"{self.address}/{name}" if name else self.address, **self.options, **options)


@pytest.fixture(params=["http", "s3", "gs", "az"])
def place(web: Web, request: pytest.FixtureRequest) -> Place:
    return place_on(web, request.param)


def place_on(web: Web, scheme: str) -> Place:
    if scheme == "http":
        return Place(web, f"{web.url}/bucket/folder", "/bucket/folder")
    # Nothing is listed there, so the usual names are tried.
    for path in ("/bucket", "/account/bucket"):
        web.odd[path] = lambda _: (403, {}, b"<Error><Code>AccessDenied</Code></Error>")
    options: dict[str, Any] = {"endpoint": web.url, "anonymous": True}
    if scheme == "az":
        return Place(
            web, "az://bucket/folder", "/bucket/folder", {**options, "account": "account", "endpoint": f"{web.url}"}
        )
    return Place(web, f"{scheme}://bucket/folder", "/bucket/folder", options)


@pytest.fixture
def some(web: Web) -> Place:
    """One of the ways, where all would take long."""
    return place_on(web, "s3")


def refused(say: str, error: type[Exception] = RemoteReadError) -> Any:
    return pytest.raises(error, match=say)


# ------------------------------------------------------------------ servers that behave


def test_a_file_is_read_equal_from_everywhere_and_only_what_is_needed(place: Place) -> None:
    small = torch.ones(4)
    content = save({"big": BIG, "small": small})
    place.put("model.safetensors", content)
    with place.open("model.safetensors") as weights:
        assert place.web.total == HEAD_BYTES
        assert torch.equal(weights["small"], small)
        assert place.web.total < HEAD_BYTES + 1024
        assert torch.equal(weights["big"], BIG)
        # Nothing twice.
        assert place.web.total <= len(content) + 16


def test_a_folder_that_is_not_listed_is_read_by_the_usual_names(place: Place) -> None:
    shards = {"model-1.safetensors": save({"a": torch.ones(1)}), "deep/2.safetensors": save({"b": torch.zeros(1)})}
    for name, content in shards.items():
        place.put(name, content)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "deep/2.safetensors"}}
    place.put("model.safetensors.index.json", json.dumps(index).encode())
    assert set(place.open()) == {"a", "b"}
    del place.web.files[f"{place.path}/deep/2.safetensors"]
    with refused("deep/2.safetensors is not there", IncompleteCheckpointError):
        place.open()


def test_what_is_not_there_is_not_found(place: Place) -> None:
    with refused("there is nothing at .*none.safetensors .status 404", SourceNotFoundError):
        place.open("none.safetensors")
    place.answers("gone.safetensors", lambda _: (410, {}, b""))
    with refused("there is nothing at .*gone.safetensors .status 410", SourceNotFoundError) as caught:
        place.open("gone.safetensors")
    assert caught.value.hint == "check the address"
    with refused("there is none of model.safetensors.index.json, model.safetensors", SourceNotFoundError):
        place.open()


def test_parts_that_lie_apart_are_asked_for_together_and_several_at_once(some: Place) -> None:
    tensors = {f"{i}.{j}": torch.full((300_000 if j == 1 else 3,), float(i)) for i in range(12) for j in range(40)}
    for i in range(12):
        some.put(f"model-{i}.safetensors", save({name: t for name, t in tensors.items() if name.startswith(f"{i}.")}))
    index = {"weight_map": {name: f"model-{name.split('.')[0]}.safetensors" for name in tensors}}
    some.put("model.safetensors.index.json", json.dumps(index).encode())
    model = torch.nn.ParameterDict({name.replace(".", "_"): torch.zeros_like(t) for name, t in tensors.items()})
    some.web.before = lambda _: time.sleep(0.05)
    rules = {"rename": {"{i}.{j}": "{i}_{j}"}}
    report = load_into(
        model, some.address, loader=RemoteLoader, loader_kwargs=some.options, rules=rules, progress=False
    )
    assert all(torch.equal(model[name.replace(".", "_")], t) for name, t in tensors.items())
    # The beginnings of twelve files, and what is behind them; not one request a tensor.
    ranges = [asked for asked in some.web.asked if asked[1]]
    assert report.reads <= 12
    assert len(ranges) < 12 * 3 + 4
    assert 6 < some.web.most_busy <= 20


def test_a_large_tensor_by_itself_is_read_in_several_parts_at_once(some: Place) -> None:
    big = torch.arange(12 << 20, dtype=torch.int32)
    some.put("model.safetensors", save({"big": big}))
    with some.open("model.safetensors") as weights:
        some.web.before = lambda _: time.sleep(0.1)
        some.web.forget()
        some.web.most_busy = 0
        assert torch.equal(weights["big"], big)
    assert some.web.most_busy == 3


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 3 * HEAD_BYTES)), min_size=1, max_size=5))
def test_any_parts_are_those_of_the_content(some: Place, parts: list[tuple[int, int]]) -> None:
    places = [(start, min(length, len(CONTENT) - start)) for start, length in parts]
    source = source_of(some)
    assert source.read_many(places) == [CONTENT[start : start + length] for start, length in places]
    start = places[0][0]
    views = [bytearray(min(length, len(CONTENT) - start) // len(places)) for _, length in places]
    source.read_vectors([memoryview(view) for view in views], start)
    assert b"".join(views) == CONTENT[start : start + sum(map(len, views))]
    with refused("has only", SourceReadError):
        source.read_into(memoryview(bytearray(2)), len(CONTENT) - 1)


def source_of(place: Place) -> RemoteSource:
    place.put("x.safetensors", CONTENT)
    with place.open("x.safetensors") as weights:
        source = weights.info("big").extents[0].source
    assert isinstance(source, RemoteSource)
    return source


# ------------------------------------------------------------------ servers that don't


def test_a_connection_that_breaks_off_is_gone_on_with(place: Place) -> None:
    def breaking(handler: Handler) -> Any:
        status, headers, body = handler.part(CONTENT)
        if len(body) <= 100_000:
            return status, headers, body
        return status, {**headers, "Content-Length": str(len(body))}, body[:100_000]

    with opened(place.answers("x.safetensors", breaking), **place.options) as weights:
        assert torch.equal(weights["big"], BIG)
    # Nothing that had come was asked for again: a little is lost with the connection.
    assert place.web.total < len(CONTENT) * 1.5


def test_a_connection_that_never_brings_anything_is_given_up(some: Place) -> None:
    source = source_of(some)
    some.answers("x.safetensors", lambda h: (*h.part(CONTENT)[:2], b"") if shut(h) else None)
    some.web.forget()
    with refused("breaks off|can't be reached|does not answer") as caught:
        source.read(500_000, 100_000)
    assert caught.value.hint == "check the network, or try again later"
    assert len(some.web.asked) == 5


def shut(handler: Handler) -> bool:
    handler.connection.shutdown(socket.SHUT_RDWR)
    return True


@pytest.mark.parametrize("status", [429, 500, 503])
def test_trouble_that_passes_is_waited_for(place: Place, status: int) -> None:
    left = [3]

    def busy(_: Handler) -> Any:
        left[0] -= 1
        return (status, {}, b"<Error><Code>SlowDown</Code></Error>") if left[0] >= 0 else None

    place.put("x.safetensors", CONTENT)
    with opened(place.answers("x.safetensors", busy), **place.options) as weights:
        assert torch.equal(weights["big"], BIG)


def test_trouble_that_does_not_pass_is_named(place: Place) -> None:
    address = place.answers("x.safetensors", lambda _: (503, {}, b"<Error><Code>SlowDown</Code></Error>"))
    with refused("answers with status 503") as caught:
        opened(address, **place.options)
    assert caught.value.status == 503
    assert len([path for path, _ in place.web.asked if unquote(path).endswith("/x.safetensors")]) == 5


def test_a_server_that_does_not_answer_is_given_up(some: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stores._CLIENT, "read_timeout", "0.1s")
    some.web.before = lambda _: time.sleep(0.4)
    with refused("does not answer in time"):
        some.open("x.safetensors")


def test_a_server_that_trickles_is_given_up(some: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteSource, "slow_after", 0.2)

    def trickling(handler: Handler) -> None:
        _, headers, body = handler.part(CONTENT)
        handler.send_response(206)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        for byte in body[:100]:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.05)

    with refused("sends too slowly|breaks off"):
        opened(some.answers("x.safetensors", trickling), **some.options)


def endless(begin: bytes, more: bytes) -> Callable[[Handler], None]:
    """Sends this, and then that again and again."""

    def send(handler: Handler) -> None:
        handler.wfile.write(begin)
        while True:
            handler.wfile.write(more)
            time.sleep(0.02)

    return send


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\n" + CHUNKED, b"HTTP/1.1 403 Forbidden\r\n" + CHUNKED, b"HTTP/1.1 200 OK\r\n"]
)
@pytest.mark.parametrize("name", ["", "x.safetensors"])
def test_an_answer_that_has_no_end_is_given_up(
    some: Place, monkeypatch: pytest.MonkeyPatch, begin: bytes, name: str
) -> None:
    monkeypatch.setitem(stores._CLIENT, "timeout", "0.5s")
    monkeypatch.setattr(RemoteSource, "patience", 0.0)
    some.web.before = endless(begin, b"10\r\n<0123456789012>\r\n" if begin.endswith(CHUNKED) else b"X-More: y\r\n")
    with refused("does not answer in time|breaks off|without Content-Length"):
        some.open(name)


def test_headers_that_have_no_end_are_given_up(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightloaders.weights.http._HEADERS_WITHIN", 0.5)
    monkeypatch.setattr(RemoteSource, "patience", 0.0)
    web.before = endless(b"HTTP/1.1 206 Partial Content\r\n", b"X-More: y\r\n")
    with refused("does not answer in time"):
        opened(f"{web.url}/x.safetensors", headers={"X-Token": "x"})


def test_a_bucket_that_always_has_more_to_list_is_given_up(some: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_LISTED_WITHIN", 0.5)
    monkeypatch.setattr(RemoteSource, "patience", 0.0)
    page = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken><Contents>"
        b"<Key>folder/x.safetensors</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>5</Size></Contents>"
        b"</ListBucketResult>"
    )
    enough = threading.Event()
    some.web.odd["/bucket"] = lambda _: (200, {}, b"<ListBucketResult/>" if enough.is_set() else page)
    some.web.before = lambda _: time.sleep(0.01)
    try:
        with refused("does not answer in time"):
            some.open()
    finally:
        enough.set()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system sends no signals to a thread")
@pytest.mark.parametrize("name", ["", "x.safetensors"])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_ctrl_c_does_not_wait_for_a_server(web: Web, scheme: str, name: str) -> None:
    place = place_on(web, scheme)
    asked, enough, answered = threading.Event(), threading.Event(), threading.Event()

    def late(_: Handler) -> None:
        asked.set()
        enough.wait(15)
        answered.set()

    def interrupt() -> None:
        asked.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    web.before = late
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            place.open(name)
        assert not answered.is_set()
    finally:
        enough.set()
        thread.join()


def test_a_server_that_fails_is_not_asked_again_for_each_loader_that_might_read(some: Place) -> None:
    address = some.answers("x.bin", lambda _: (503, {}, b""))
    with refused("answers with status 503"):
        opened(address, **some.options)
    assert len(some.web.asked) == 5


def test_a_server_that_is_not_there_is_named(place: Place) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    address = place.address.replace(place.web.url, url)
    options = {**place.options, "endpoint": url} if place.options else {}
    with refused("can't be reached .Connection refused"):
        opened(f"{address}/x.safetensors", **options)


def test_a_server_that_ignores_ranges_is_refused_before_it_sends_everything(place: Place) -> None:
    place.web.ranges = False
    with refused("ignores ranges") as caught:
        opened(place.put("x.safetensors", CONTENT), **place.options)
    assert caught.value.hint == "download it, and name the file on disk"


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Content-Range": f"bytes 500001-600000/{len(CONTENT)}"}, "other bytes than were asked for"),
        ({"Content-Range": f"bytes 500000-599999/{len(CONTENT) + 7}"}, "was changed after it was catalogued"),
        ({"Content-Range": f"bytes 500000-599999/{len(CONTENT) - 7}"}, "was changed after it was catalogued"),
        ({"Content-Range": "bytes 500000-599999/*"}, "can't be read|sends"),
        ({"Content-Range": "nonsense"}, "can't be read|sends"),
        ({"Content-Range": ""}, "sends a part without saying which"),
        ({"ETag": '"another"'}, "was changed after it was catalogued"),
        ({"Content-Encoding": "gzip"}, "comes compressed"),
    ],
)
def test_a_server_that_lies_about_what_it_sends_is_refused(some: Place, headers: dict[str, str], says: str) -> None:
    source = source_of(some)
    some.answers("x.safetensors", lambda h: (206, {**h.part(CONTENT)[1], **headers}, h.part(CONTENT)[2]))
    with refused(says, SourceReadError):
        source.read(500_000, 100_000)


def test_more_bytes_than_were_announced_are_not_written_anywhere(some: Place) -> None:
    source = source_of(some)
    some.answers("x.safetensors", lambda h: (*h.part(CONTENT)[:2], h.part(CONTENT)[2] + b"more"))
    buffer = bytearray(b"-" * 100_010)
    with refused("sends more than the 100000 bytes that it announces", SourceReadError):
        source.read_into(memoryview(buffer)[:100_000], 500_000)
    assert buffer.endswith(b"-" * 10)


@pytest.mark.parametrize("tags", [True, False])
def test_an_object_that_is_exchanged_in_between_is_refused(place: Place, tags: bool) -> None:
    if not tags and place.address.startswith(("gs", "az")):
        pytest.skip("these services always tell an ETag, and obstore insists on it")
    place.web.tags = tags
    place.put("x.safetensors", CONTENT)
    model = torch.nn.ParameterDict({"big": torch.zeros_like(BIG)})
    plan = plan_load(model, f"{place.address}/x.safetensors", loader=RemoteLoader, loader_kwargs=place.options)
    # Without a tag only the size tells.
    place.put("x.safetensors", save({"big": BIG + 1}) if tags else save({"big": BIG[1:]}))
    with refused("was changed after it was catalogued", LoadError):
        plan.run(model)


def test_a_header_that_is_cut_off_or_none_is_refused_as_on_disk(place: Place) -> None:
    with refused("is truncated", CheckpointFormatError):
        opened(place.put("x.safetensors", CONTENT[: len(CONTENT) // 2]), **place.options)
    with refused("is an HTML page", CheckpointFormatError):
        opened(place.put("y.safetensors", b"<!doctype html><title>Sign in</title>" * 9), **place.options)
    with refused("it is an empty file", CheckpointFormatError):
        opened(place.put("z.safetensors", b""), **place.options)


# ------------------------------------------------------------------ secrets

SECRETS = ("AKIASECRETKEYID", "s3cr3tT0ken", "SIGNATURE0123", "StringToSign")
CONFESSION = (
    b"<Error><Code>SignatureDoesNotMatch</Code><Message>The request</Message><AWSAccessKeyId>AKIASECRETKEYID"
    b"</AWSAccessKeyId><StringToSign>AWS4 s3cr3tT0ken</StringToSign><SignatureProvided>SIGNATURE0123"
    b"</SignatureProvided></Error>"
)


@pytest.mark.parametrize("status", [400, 403, 404, 412, 500, 503])
def test_no_error_or_log_holds_what_a_server_says_of_credentials(
    place: Place, status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    if place.address.startswith("s3"):
        place.options["anonymous"] = False
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETKEYID")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3tT0ken")
    with pytest.raises(SourceError) as caught:
        opened(place.answers("x.safetensors", lambda _: (status, {}, CONFESSION)), **place.options)
    error: BaseException | None = caught.value
    said = caplog.text + "".join(traceback.format_exception(caught.value))
    while error is not None:
        said += repr(error) + str(vars(error))
        error = error.__cause__ or error.__context__
    assert not [secret for secret in SECRETS if secret in said]


def test_no_repr_report_or_plan_holds_a_secret(some: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    some.options["anonymous"] = False
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETKEYID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3tT0ken")
    source = source_of(some)
    model = torch.nn.ParameterDict({"big": torch.zeros_like(BIG)})
    plan = plan_load(model, f"{some.address}/x.safetensors", loader=RemoteLoader, loader_kwargs=some.options)
    report = plan.run(model)
    assert any("AKIASECRETKEYID" in headers.get("authorization", "") for headers in some.web.headers)
    said = "".join([repr(source), repr(source.identity), plan.to_json(), str(plan), str(report), report.to_json()])
    assert not [secret for secret in SECRETS if secret in said]


def test_what_lets_us_in_goes_to_no_other_host(serve: Callable[[], Web]) -> None:
    web, elsewhere = serve(), serve()
    elsewhere.files["/x.safetensors"] = CONTENT
    target = elsewhere.url.replace("127.0.0.1", "localhost")
    web.odd["/x.safetensors"] = lambda _: (302, {"Location": f"{target}/x.safetensors"}, b"")
    with opened(f"{web.url}/x.safetensors?sig=SIGNATURE0123", headers={"X-Token": "s3cr3tT0ken"}) as weights:
        assert torch.equal(weights["big"], BIG)
        assert "SIGNATURE0123" not in weights.info("big").extents[0].source.name
    assert all(headers["x-token"] == "s3cr3tT0ken" for headers in web.headers)
    assert elsewhere.headers
    assert not any("x-token" in headers for headers in elsewhere.headers)
    assert all("sig=SIGNATURE0123" in path for path, _ in web.asked)


@pytest.mark.parametrize("name", ["secret_access_key", "account_key", "sas_token", "bearer_token"])
def test_a_secret_is_no_option(some: Place, name: str) -> None:
    with pytest.raises(OptionsError, match=f"'{name}' is a secret") as caught:
        some.open("x.safetensors", config={name: "s3cr3tT0ken"})
    assert "s3cr3tT0ken" not in str(caught.value)


# ------------------------------------------------------------------ options and processes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoint": "127.0.0.1:9000"}, "endpoint: it is an address"),
        ({"endpoint": "http://user:password@host"}, "without a password"),
        ({"anonymous": True, "profile": "x"}, "anonymous and profile"),
        ({"reader": "remote"}, "reader: it is the loader of the files"),
        ({"region": 5}, "region"),
        ({"headers": {"X-Token": "user:password\n"}}, "headers: 'X-Token' can't be sent"),
        ({"cache_size": "lots"}, "'lots' is no size"),
        ({"config": {"nonsense": "x"}}, "can't be reached with these settings"),
        ({"subfolder": "../other"}, "subfolder: '../other' is no folder within"),
        ({"subfolder": "a//b"}, "subfolder: 'a//b' is no folder within"),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        open_weights("s3://bucket/x.safetensors", "remote", **{"cache": True, **options})
    assert "user:password" not in str(caught.value)


def test_a_container_needs_an_account() -> None:
    with pytest.raises(OptionsError, match="in which storage account") as caught:
        opened("az://container/x.safetensors")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in str(caught.value.hint)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_says_that_it_can_not_read_rather_than_wait_for_ever(some: Place) -> None:
    some.put("x.safetensors", CONTENT)
    script = f"""
import os, sys
from weightloaders import open_weights
from weightloaders.errors import RemoteReadError
open_weights({some.address!r} + "/x.safetensors", "weightloaders_remote:RemoteLoader", **{some.options!r})
child = os.fork()
if not child:
    try:
        open_weights({some.address!r} + "/x.safetensors", "weightloaders_remote:RemoteLoader", **{some.options!r})
    except RemoteReadError as error:
        os._exit(7 if "was forked" in str(error) and "spawn" in error.hint else 8)
    os._exit(9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=False, capture_output=True)
    assert done.returncode == 7, done.stderr


def test_listing_loaders_imports_neither_obstore_nor_torch() -> None:
    script = "import sys, weightloaders_remote; sys.exit(str({'obstore', 'boto3', 'torch'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((302, {"Location": "/m/model.safetensors"}, b""), "leads from one place to another without end"),
        ((302, {}, b""), "is somewhere else"),
        ((206, {"Content-Range": "bytes 0-9/*"}, bytes(10)), "says nothing sensible"),
        ((206, {"Content-Range": f"bytes 0-9/{1 << 70}"}, bytes(10)), "says nothing sensible"),
        ((206, {"Content-Range": "bytes 0-9/-5"}, bytes(10)), "says nothing sensible"),
        ((206, {"Content-Range": "bytes 0-9/10", "Last-Modified": "yesterday"}, bytes(10)), "a date that is none"),
        ((206, {"Content-Range": "bytes 0-9/10", "ETag": '"\xff"'}, bytes(10)), "headers that are no text"),
    ],
)
def test_what_a_server_says_wrongly_is_said_and_not_asked_for_again(web: Web, answer: Any, said: str) -> None:
    web.odd["/m/model.safetensors"] = lambda _: answer
    with pytest.raises(RemoteReadError, match=said) as caught:
        open_weights(f"{web.url}/m/model.safetensors", RemoteLoader)
    assert "region" not in str(caught.value)
    assert caught.value.hint
    # A client follows so many redirects.
    assert len(web.asked) == (11 if "Location" in answer[1] else 1)
