"""`HttpSource`: a file at an http or https address, read by ranged requests.

What is asked for is what comes over the wire: a server that ignores ranges (RFC 9110, section 14.2) is hung up on. The
requests go through huggingface_hub's own client (https://huggingface.co/docs/huggingface_hub/package_reference/utilities,
"Configure HTTP backend"), so proxies, certificates and a client factory that were set up for the hub hold here too.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

from weightloaders.errors import (
    RemoteReadError,
    SourceNotFoundError,
    SourceReadError,
    WeightLoadersError,
)
from weightloaders.weights.source import ByteSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
R = TypeVar("R")

#: What the first request asks for: a file's size comes with it, and most headers fit into it.
HEAD_BYTES = 64 << 10
# Small parts that are no further apart are asked for together.
_GAP = 16 << 10
#: Requests in flight at once, for headers.
IN_FLIGHT = 16

# Attempts in a row that bring nothing, the pause after the first of them (doubled after each), and how long it may all
# take, in seconds.
_ATTEMPTS = 5
_PAUSE = 0.25
_PATIENCE = 15.0
# Slower than this over so long (bytes a second, seconds), a transfer will not end in a life time.
_SLOWEST, _SLOW_AFTER = 1024, 30.0

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 8
# On the hub what precedes an @ is no password, but a repository.
_ADDRESS = re.compile(r"(?!hf:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def is_web_address(name: str) -> bool:
    """Whether it is an http or https address."""
    return re.match(r"https?://", name, re.IGNORECASE) is not None


def shown(name: str) -> str:
    """A name as it may be shown: of an address no password, and no query, which may hold a signature."""
    if not _ADDRESS.match(name):
        return name
    # By hand, for it may be no address after all.
    scheme, _, rest = re.split(r"[?#]", name, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def checked(url: str) -> str:
    """The address, if it is one.

    Raises:
        SourceNotFoundError: If it has no host, an impossible port, or characters that no address has.
    """
    try:
        parts = urlsplit(url)
        whole = bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        whole = False
    if not whole or not is_web_address(url):
        raise SourceNotFoundError(
            f"{shown(url)!r} is no address", file=shown(url), hint="write https://host/path/model.safetensors"
        )
    return url


class _Facts(NamedTuple):
    """What the server says of the file; anything else is another file."""

    size: int
    tag: str


_UNKNOWN = _Facts(-1, "")


class _TransientError(Exception):
    """Something that may go better the next time."""

    def __init__(self, problem: str, *, status: int | None = None, code: str = "", wait: float = 0.0) -> None:
        super().__init__(problem)
        self.status, self.code, self.wait = status, code, wait


@dataclass(slots=True)
class _Progress:
    """How far one read has come.

    Attributes:
        started: When it began.
        done: Bytes that are there.
    """

    started: float
    done: int = 0


class HttpSource(ByteSource):
    """A file at an address. Nothing is asked for until its size or its bytes are.

    Its first 64 KiB come with the first request and are kept: that is where headers are. Trouble that may pass (a lost
    connection, status 429 or 5xx) is met by trying again, for some seconds.

    Args:
        url: An http or https address.
        headers: Sent with each request, but to no other host, should the server lead to one.

    Raises:
        SourceNotFoundError: If it is no address.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = checked(url)
        self._headers = dict(headers or {})
        self.name = shown(url)
        self._lock = threading.Lock()
        self._facts = _UNKNOWN
        self._head = b""

    def __repr__(self) -> str:
        return f"HttpSource({self.name!r})"

    @property
    def size(self) -> int:
        """Length in bytes, as the first answer says.

        Raises:
            SourceNotFoundError: If there is no such file.
            RemoteReadError: If the server can't be reached, refuses, or does not serve ranges.
        """
        return self._known().size

    @property
    def identity(self) -> tuple[str, int, str]:
        """The address without its query, the size, and the ``ETag`` or else the date of the last change."""
        return (self.name, *self._known())

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill the view from ``offset`` on. See `ByteSource.read_into`."""
        size = self.size
        if offset < 0 or offset + len(view) > size:
            raise SourceReadError(f"{self.name} has only {size} bytes, not {offset + len(view)}", file=self.name)
        head = self._head[offset : offset + len(view)]
        view[: len(head)] = head
        if len(head) < len(view):
            self._fetch(view[len(head) :], offset + len(head))

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several small parts, those that lie close together in one request; see `ByteSource.read_many`."""
        spans: list[tuple[int, int]] = []
        for start, end in sorted((offset, offset + length) for offset, length in places):
            if spans and start <= spans[-1][1] + _GAP:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        contents = in_parallel(lambda span: self.read(span[0], span[1] - span[0]), spans)
        starts = [start for start, _ in spans]
        found = []
        for offset, length in places:
            span = bisect.bisect_right(starts, offset) - 1
            at = offset - starts[span]
            found.append(contents[span][at : at + length])
        return found

    def _known(self) -> _Facts:
        with self._lock:
            if self._facts is _UNKNOWN:
                head = bytearray(HEAD_BYTES)
                self._head = bytes(head[: self._fetch(memoryview(head), 0)])
            return self._facts

    # -- requests

    def _fetch(self, view: memoryview, offset: int) -> int:
        """Fill a view, going on where a connection broke off; returns the bytes there were."""
        progress = _Progress(time.monotonic())
        attempts, began = 0, progress.started
        while True:
            before = progress.done
            try:
                self._attempt(view, offset, progress)
                return progress.done
            except _TransientError as error:
                if progress.done > before:
                    attempts, began = 0, time.monotonic()
                attempts += 1
                pause = max(_PAUSE * 2 ** (attempts - 1), error.wait)
                if attempts >= _ATTEMPTS or time.monotonic() + pause > began + _PATIENCE:
                    raise self._failed(error) from error.__cause__
            time.sleep(pause)

    def _attempt(self, view: memoryview, offset: int, progress: _Progress) -> None:
        """One request for what is still to come."""
        start = offset + progress.done
        with self._answer(start, offset + len(view) - 1) as response:
            end = self._promised(response, start, offset + len(view))
            for chunk in response.iter_raw() if end > start else ():
                if offset + progress.done + len(chunk) > end:
                    raise self._error(f"sends more than the {end - start} bytes that it announces")
                view[progress.done : progress.done + len(chunk)] = chunk
                progress.done += len(chunk)
                self._check_pace(progress)
        if offset + progress.done < end:
            raise _TransientError(f"breaks off {end - offset - progress.done} bytes too early")
        if end < min(offset + len(view), self._facts.size):
            # A server may send less than was asked for, as long as it says so.
            raise _TransientError(f"sends only the bytes up to {end}")

    def _check_pace(self, progress: _Progress) -> None:
        elapsed = time.monotonic() - progress.started
        if elapsed > _SLOW_AFTER and progress.done < _SLOWEST * elapsed:
            raise self._error(f"sends too slowly: {progress.done} bytes in {elapsed:.0f} seconds")

    @contextlib.contextmanager
    def _answer(self, first: int, last: int) -> Iterator[Any]:
        """The answer to a request for a range, behind all redirects; what may be tried again as `_TransientError`."""
        from huggingface_hub import constants, errors, get_session

        url, headers = self._url, self._headers
        try:
            for _ in range(_MOST_REDIRECTS):
                client = get_session()
                request = self._request(
                    client,
                    url,
                    {**headers, "Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"},
                    constants.HF_HUB_DOWNLOAD_TIMEOUT,
                )
                response = client.send(request, stream=True, follow_redirects=False)
                try:
                    if response.status_code not in _REDIRECTS or "location" not in response.headers:
                        yield response
                        return
                    target = self._target(url, response.headers["location"])
                    _finish(response)
                finally:
                    response.close()
                if _origin(target) != _origin(url):
                    # What lets us in here is nobody else's business.
                    headers = {}
                url = target
        except WeightLoadersError:
            raise
        except errors.OfflineModeIsEnabled as error:
            raise self._error("is not asked for: huggingface_hub is in offline mode", hint=OFFLINE_HINT) from error
        # A client that another thread closes meanwhile, as huggingface_hub does after a failed connection, says so by a
        # RuntimeError.
        except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
            detail = " ".join(str(error).split())
            raise _TransientError(f"can't be read ({type(error).__name__}{': ' if detail else ''}{detail})") from error
        raise self._error("leads from one address to another without end")

    def _request(self, client: Any, url: str, headers: Mapping[str, str], timeout: float) -> Any:
        try:
            return client.build_request("GET", url, headers=headers, timeout=timeout)
        except Exception as error:  # noqa: BLE001 -- no base of ours has the InvalidURL of whichever library it is
            raise SourceNotFoundError(
                f"{shown(url)} is no address: {type(error).__name__}: {error}", file=self.name
            ) from None

    def _target(self, url: str, location: str) -> str:
        try:
            target = checked(urljoin(url, location))
        except (SourceNotFoundError, ValueError):
            raise self._error("leads to what is no address") from None
        if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
            raise self._error(f"leads from https to {shown(target)}, which anybody on the way could change")
        return target

    # -- answers

    def _promised(self, response: Any, start: int, wanted: int) -> int:
        """Where the bytes end that an answer brings. Refuses all answers but those to what was asked."""
        status, headers = response.status_code, response.headers
        content_range = headers.get("content-range", "").strip()
        length = _whole_number(headers.get("content-length", ""))
        if status == 206:
            match = _CONTENT_RANGE.fullmatch(content_range)
            first, last, size = map(int, match.groups()) if match else (-1, -1, 0)
            if first != start or not start <= last < min(wanted, size):
                raise self._error(
                    f"was asked for bytes {start} to {wanted}, and sends {content_range or 'no range'!r}", status
                )
            end = last + 1
        elif status == 416 and start == 0 and content_range == "bytes */0":
            size = end = 0
        elif status == 200 and start == 0 and length is not None and length <= wanted:
            # The whole file is not more than was asked for.
            size = end = length
        else:
            raise self._refused(response)
        encoding = headers.get("content-encoding", "").strip()
        if encoding.lower() not in ("identity", ""):
            raise self._error(
                f"comes compressed ({encoding}), though it was asked for as it is",
                hint="turn compression off for it on the server",
            )
        facts = _Facts(size, _tag(headers))
        if self._facts is _UNKNOWN:
            self._facts = facts
        elif size != self._facts.size or (facts.tag and self._facts.tag and facts.tag != self._facts.tag):
            raise self._changed()
        return end

    def _refused(self, response: Any) -> Exception:
        status, headers = response.status_code, response.headers
        code = headers.get("x-error-code", "")
        if status in _TRANSIENT:
            wait = float(_whole_number(headers.get("retry-after", "")) or 0)
            asks = f" and asks to wait {wait:.0f} seconds" if wait else ""
            return _TransientError(f"answers with status {status}{asks}", status=status, code=code, wait=wait)
        if status in (404, 410):
            return SourceNotFoundError(f"there is nothing at {self.name} (status {status})", file=self.name)
        if status == 416 and self._facts is not _UNKNOWN:
            return self._changed()
        if status in (200, 416):
            return self._error(
                "can't be read in parts: the server ignores ranges, and would send all of it"
                if status == 200
                else "is said to lack its first bytes",
                status,
                hint="download it, and name the file on disk",
            )
        if status in (401, 403, 407):
            hint = "check the address, and what lets you in: a token, or headers"
            return self._error(f"does not let us in (status {status})", status, code, hint)
        return self._error(f"answers with status {status}", status, code)

    # -- errors

    def _error(self, what: str, status: int | None = None, code: str = "", hint: str | None = None) -> RemoteReadError:
        return RemoteReadError(f"{self.name} {what}", file=self.name, status=status, code=code, hint=hint)

    def _failed(self, error: _TransientError) -> RemoteReadError:
        hint = "wait before you try again" if error.status == 429 else "check the network, or try again later"
        return self._error(str(error), error.status, error.code, hint)

    def _changed(self) -> SourceReadError:
        return SourceReadError(
            f"{self.name} was changed after it was catalogued",
            file=self.name,
            hint="wait until whoever writes it is done, then load again",
        )


#: What to do where an offline switch keeps from asking.
OFFLINE_HINT = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to have it asked for"


def _finish(response: Any) -> None:
    """Read an answer that is of no interest, if it is short: then its connection serves again."""
    length = _whole_number(response.headers.get("content-length", ""))
    if length is not None and length <= HEAD_BYTES:
        response.read()


def _whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text.strip()) else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _tag(headers: Any) -> str:
    # A cache on the way may make a strong tag weak.
    tag: str = headers.get("etag") or headers.get("last-modified") or ""
    return tag.strip().removeprefix("W/")


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of a function for each item, several of them waited for at once."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(IN_FLIGHT, len(items)), thread_name_prefix="weightloaders-http") as pool:
        tasks = [pool.submit(work, item) for item in items]
        try:
            return [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
