"""A real S3 server on this machine (moto's, in a process of its own), and web servers that behave in all ways."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from weightloaders_remote import RemoteLoader

from weightloaders.testing import isolated_registry
from weightloaders.weights.remote import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


# ------------------------------------------------------------------ S3


class S3:
    """A server of S3, and what is put there."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()

    @cached_property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
        )  # fmt: skip

    def put(self, key: str, content: bytes, **options: str) -> None:
        """Put an object; the key begins with the bucket."""
        bucket, _, key = key.partition("/")
        self.client.put_object(Bucket=bucket, Key=key, Body=content, **options)

    def upload(self, folder: Path, key: str) -> str:
        """Put the files of a folder below a key, and return the address."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{key}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return f"s3://{key}"

    def remove_one(self, key: str) -> None:
        """Remove an object; the key begins with the bucket."""
        bucket, _, key = key.partition("/")
        self.client.delete_object(Bucket=bucket, Key=key)

    def remove(self, key: str) -> None:
        """Remove what lies below a key."""
        bucket, _, prefix = key.partition("/")
        for entry in self.client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("Contents", ()):
            self.client.delete_object(Bucket=bucket, Key=entry["Key"])


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
    ) as process:
        try:
            said = []
            for line in process.stdout or ():
                said.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    server = S3(found[0])
                    break
            else:
                pytest.fail("moto's server did not start: " + "".join(said))
            # What it says further would fill the pipe.
            threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
            server.bucket("bucket")
            yield server
        finally:
            process.terminate()


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, with its endpoint and credentials in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return s3_server


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No credentials, caches or settings of whoever runs the tests; short pauses; the loader is registered."""
    for name in list(os.environ):
        if name.upper().startswith(("AWS_", "GOOGLE_", "AZURE_", "WEIGHTLOADERS_REMOTE")) or name.lower().endswith(
            "_proxy"
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none" / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none" / "credentials"))
    # Nobody answers there, and at once, where a machine in a cloud would.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    monkeypatch.setattr(RemoteSource, "pause", 0.001)
    with isolated_registry() as registry:
        # Where all tests run together, what is installed is hidden from them.
        registry.register("remote", RemoteLoader, replace=True)
        yield


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as a Hugging Face folder (BERT, float32, one file); read it only."""
    prepare = pytest.importorskip("demo.prepare", reason="the model is prepared by the repository's own code")
    folder: Path = prepare.minilm_folder()
    return folder


# ------------------------------------------------------------------ web servers

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Web:
    """A server of files by path, with ranges, that remembers what it was asked for and counts what it sent.

    Attributes:
        odd: Paths that are answered in another way: by a status, headers and a body; None for the usual one. What is
            announced as longer than it is, is cut off.
        before: Called before each answer.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    odd: dict[str, Callable[[Handler], Answer | None]] = field(default_factory=dict)
    before: Callable[[Handler], object] = lambda _: None
    ranges: bool = True
    tags: bool = True
    sent: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    busy: int = 0
    most_busy: int = 0
    lock: Any = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def forget(self) -> None:
        self.asked.clear(), self.headers.clear(), self.sent.clear()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_GET(self) -> None:
        web, path = self.web, unquote(urlsplit(self.path).path)
        with web.lock:
            web.asked.append((self.path, self.headers.get("Range", "")))
            web.headers.append({name.lower(): value for name, value in self.headers.items()})
            web.busy += 1
            web.most_busy = max(web.most_busy, web.busy)
        try:
            web.before(self)
            answer = web.odd[path](self) if path in web.odd else None
            if answer is None:
                answer = self.part(web.files[path]) if path in web.files else (404, {}, b"not here")
            self.send(path, *answer)
        finally:
            with web.lock:
                web.busy -= 1

    do_HEAD = do_PUT = do_GET  # noqa: N815 -- as the base class has it

    def send(self, path: str, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        # Before it is sent, for who gets it may look at once.
        with self.web.lock:
            self.web.sent[path] += len(body)
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True
            return
        if int(headers.get("Content-Length", len(body))) > len(body):
            self.close_connection = True

    def part(self, content: bytes) -> Answer:
        # The date says nothing here: it is the same for everything.
        headers = {"Last-Modified": "Mon, 30 Nov 2026 01:58:30 GMT"}
        if self.web.tags:
            headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
        if "Range" not in self.headers or not self.web.ranges:
            return 200, headers, content
        if self.headers.get("If-Match", headers.get("ETag")) != headers.get("ETag"):
            return 412, {}, b""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if first >= len(content):
            return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
        part = content[first : last + 1]
        return 206, {**headers, "Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}, part

    def log_message(self, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # Many connections are made at once.
    request_queue_size = 64

    def handle_error(self, *args: Any) -> None:
        """Connections that break are what some tests are about."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Web]]:
    """Starts web servers; the process may use the network."""
    import huggingface_hub
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    running = []

    def start() -> Web:
        web = Web()
        server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"web": web}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        running.append((server, thread))
        web.url = f"http://127.0.0.1:{server.server_port}"
        return web

    yield start
    # An error is told while other files are still on their way.
    for fetching in [thread for thread in threading.enumerate() if thread.name.startswith("weightloaders")]:
        fetching.join(timeout=20)
    huggingface_hub.close_session()
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web(serve: Callable[[], Web]) -> Web:
    return serve()
