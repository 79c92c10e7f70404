"""A server on this machine that stands in for the hub, its mirrors and the web, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

COMMIT, NEWER = "0" * 40, "1" * 40
XET_TOKEN = "xEtToKeN"

Answer = tuple[int, "Mapping[str, str]", bytes]


@dataclass
class Web:
    """A server of files by path, with ranges, that remembers what it was asked for and counts what it sent."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    # Paths that are answered in another way: with a status, headers and a body; None for the file itself.
    odd: dict[str, Callable[[Handler], Answer | None]] = field(default_factory=dict)
    # Whatever is asked for, when nothing else answers.
    route: Callable[[str], Answer | bytes | None] | None = None
    ranges: bool = True
    sent: Counter[str] = field(default_factory=Counter)
    asked: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    @property
    def requests(self) -> list[str]:
        return [f"{method} {path}" for method, path in zip(self.methods, self.asked, strict=True)]

    def clear(self) -> None:
        for record in (self.asked, self.methods, self.headers, self.sent):
            record.clear()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_GET(self) -> None:
        web, path = self.web, unquote(urlsplit(self.path).path)
        web.asked.append(self.path)
        web.methods.append(self.command)
        web.headers.append({name.lower(): value for name, value in self.headers.items()})
        answer: Any = web.odd[path](self) if path in web.odd else None
        if answer is None:
            answer = web.files.get(path)
        if answer is None and web.route is not None:
            answer = web.route(path)
        if answer is None:
            answer = (404, {}, b"not here")
        status, headers, body = self.part(answer) if isinstance(answer, bytes) else answer
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), **headers}
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        # In pieces, so that what is counted is not much more than what the other side took.
        for at in range(0, len(body), 1 << 14):
            try:
                self.wfile.write(body[at : at + (1 << 14)])
            except OSError:
                self.close_connection = True
                return
            web.sent[path] += len(body[at : at + (1 << 14)])
        if headers["Content-Length"] not in ("", str(len(body))):
            self.close_connection = True

    do_HEAD = do_GET

    def part(self, content: bytes) -> Answer:
        """The range of a content that was asked for; all of it, where none was."""
        headers = {"ETag": f'"{hash(content):x}"'}
        if "Range" not in self.headers or not self.web.ranges:
            return 200, headers, content
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        if int(first) >= len(content):
            return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
        part = content[int(first) : int(last) + 1 if last else None]
        return (
            206,
            {**headers, "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"},
            part,
        )

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Connections that the other side gave up are what some tests are about."""


def wait_for_threads() -> None:
    """An error is told while other files are still on their way; this waits for the threads that fetch them."""
    for thread in threading.enumerate():
        if thread.name.startswith("weightloaders"):
            thread.join(timeout=20)


@contextlib.contextmanager
def servers() -> Iterator[Callable[[], Web]]:
    """Starts servers, which end with the block."""
    import huggingface_hub

    running = []

    def start() -> Web:
        web = Web()
        server = _Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"web": web}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        running.append((server, thread))
        web.url = f"http://127.0.0.1:{server.server_port}"
        return web

    try:
        yield start
    finally:
        # Connections that are kept for the next request would keep their threads.
        wait_for_threads()
        huggingface_hub.close_session()
        for server, thread in running:
            server.shutdown()
            server.server_close()
            thread.join()


@dataclass
class Hub:
    """A hub with the routes that loading needs; it answers for the repository ``org/name`` alone.

    Args:
        api: The server that is the hub.
        storage: The one to which it sends for files, as the real hub does; None where it serves them itself.
        commits: For each commit, its files.
        query: What is put behind the addresses of files on the other server, as signatures are.
    """

    api: Web
    storage: Web | None = None
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    query: str = ""
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    repository: str = "org/name"
    # The server from which hf_xet gets large files, as the real hub has it.
    xet: Web | None = None
    # What every request is answered with instead: a status and the hub's error code.
    refuses: tuple[int, str] | None = None
    # What files are refused with, though they are listed; and which one, if not all.
    withholds: tuple[int, str] | None = None
    withheld: str = ""
    # What is sent beside the refusals above.
    refusal_headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api.route = self._answer
        if self.storage is not None:
            self.storage.route = lambda path: self.commits[path.split("/")[1]].get(path.split("/", 2)[2])

    @property
    def url(self) -> str:
        return self.api.url

    @property
    def asked(self) -> list[str]:
        """The requests to the hub itself: method and path."""
        return [request.partition("?")[0] for request in self.api.requests]

    @property
    def listings(self) -> int:
        return sum("/api/" in path for path in self.api.asked)

    @property
    def tokens(self) -> set[str | None]:
        """What came as authorisation."""
        return {headers.get("authorization") for headers in self.api.headers}

    @property
    def downloaded(self) -> set[str]:
        """The files of which the hub, or where it leads to, was asked for the content."""
        files = f"/{self.repository}/resolve/"
        found = {
            path.partition("?")[0].removeprefix("GET " + files).partition("/")[2]
            for path in self.api.requests
            if path.startswith("GET " + files)
        }
        stored = self.storage.requests if self.storage else ()
        return found | {r.partition("?")[0].split("/", 2)[2] for r in stored if r.startswith("GET ")}

    def clear(self) -> None:
        for web in (self.api, self.storage):
            if web is not None:
                web.clear()

    def _answer(self, path: str) -> Answer | bytes | None:
        if self.refuses is not None:
            return self.refuses[0], {"X-Error-Code": self.refuses[1], **self.refusal_headers}, b"{}"
        if self.xet is not None and path.startswith(f"/api/models/{self.repository}/xet-read-token/"):
            in_an_hour = str(int(time.time()) + 3600)
            admits = {"X-Xet-Access-Token": XET_TOKEN, "X-Xet-Token-Expiration": in_an_hour}
            return 200, {"X-Xet-Cas-Url": self.xet.url, **admits}, b"{}"
        listing, files = f"/api/models/{self.repository}/revision/", f"/{self.repository}/resolve/"
        if path.startswith(listing):
            revision = path.removeprefix(listing)
            commit = self.branches.get(revision, revision)
            if commit not in self.commits:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            siblings = [{"rfilename": name} for name in self.commits[commit]]
            return 200, {}, json.dumps({"id": self.repository, "sha": commit, "siblings": siblings}).encode()
        if not path.startswith(files):
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit, _, name = path.removeprefix(files).partition("/")
        if self.withholds is not None and self.withheld in ("", name):
            return self.withholds[0], {"X-Error-Code": self.withholds[1], **self.refusal_headers}, b"{}"
        content = self.commits[commit].get(name)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if self.storage is None:
            return 200, {"ETag": f'"{hash(content):x}"', "X-Repo-Commit": commit}, content
        facts = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{hash(content):x}"',
            "X-Linked-Size": str(len(content)),
        }
        if self.xet is not None and name.endswith(".safetensors"):
            route = f"{self.url}/api/models/{self.repository}/xet-read-token/{commit}"
            facts |= {"X-Xet-Hash": _stored_by_xet(self.xet, content, self.query), "X-Xet-Refresh-Route": route}
        return 302, {"Location": f"{self.storage.url}/{commit}/{name}{self.query}", **facts}, b"moved"


def _stored_by_xet(web: Web, content: bytes, query: str) -> str:
    """Put a file on a server as hf_xet asks for it, and give its name there.

    A file is put together of chunks of "xorbs": https://huggingface.co/docs/xet/api and .../docs/xet/xorb. Each chunk
    has a header: version, length as it is stored, way of compression (none), length.
    """
    name = hashlib.sha256(content).hexdigest()
    chunks = [content[at : at + 60_000] for at in range(0, len(content), 60_000)]
    lengths = [len(chunk).to_bytes(3, "little") for chunk in chunks]
    xorb = b"".join(b"\0" + n + b"\0" + n + chunk for n, chunk in zip(lengths, chunks, strict=True))
    chunks_of = {"start": 0, "end": len(chunks)}
    place = {"range": chunks_of, "url": f"{web.url}/{name}{query}", "url_range": {"start": 0, "end": len(xorb) - 1}}
    term = {"hash": name, "unpacked_length": len(content), "range": chunks_of}
    parts = {"offset_into_first_range": 0, "terms": [term], "fetch_info": {name: [place]}}
    web.files[f"/v1/reconstructions/{name}"] = json.dumps(parts).encode()
    web.files[f"/{name}"] = xorb
    return name
