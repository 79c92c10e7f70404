"""`HttpSource`: a file at an http or https address, read by ranged requests.

What is asked for is what comes over the wire: a server that ignores ranges (RFC 9110, section 14.2) is hung up on. The
requests go through huggingface_hub's own client (https://huggingface.co/docs/huggingface_hub/package_reference/utilities,
"Configure HTTP backend"), so proxies, certificates and a client factory that were set up for the hub hold here too.
"""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from weightloaders.errors import SourceNotFoundError, WeightLoadersError
from weightloaders.weights.discretion import keep_secrets_out_of_logs, shown
from weightloaders.weights.remote import HEAD_BYTES, Answer, RemoteSource, TransientError
from weightloaders.weights.threads import interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Status codes of what may go better the next time.
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 8
# Seconds that the headers of an answer may take.
_HEADERS_WITHIN = 30.0
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def is_web_address(name: str) -> bool:
    """Whether it is an http or https address."""
    return re.match(r"https?://", name, re.IGNORECASE) is not None


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


class HttpSource(RemoteSource):
    """A file at an address. Trouble that may pass is a lost connection, or status 429 or 5xx.

    Args:
        url: An http or https address.
        headers: Sent with each request, but to no other host, should the server lead to one.

    Raises:
        SourceNotFoundError: If it is no address.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = checked(url)
        self._headers = dict(headers or {})
        keep_secrets_out_of_logs()
        super().__init__(shown(url))

    @contextlib.contextmanager
    def ask(self, start: int, end: int) -> Iterator[Answer]:
        """Ask for a range, behind all redirects. See `RemoteSource.ask`."""
        with self._answer(start, end - 1) as response:
            yield self._promised(response, start, end)

    @contextlib.contextmanager
    def _answer(self, first: int, last: int) -> Iterator[Any]:
        """The answer to a request for a range, behind all redirects; what may be tried again as `TransientError`."""
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
                response = _sent(client, request)
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
            raise self.error("is not asked for: huggingface_hub is in offline mode", hint=OFFLINE_HINT) from error
        except TimeoutError as error:
            raise TransientError("does not answer in time") from error
        # A client that another thread closes meanwhile, as huggingface_hub does after a failed connection, says so by a
        # RuntimeError.
        except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
            detail = " ".join(str(error).split())
            raise TransientError(f"can't be read ({type(error).__name__}{': ' if detail else ''}{detail})") from error
        raise self.error("leads from one address to another without end")

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
            raise self.error("leads to what is no address") from None
        if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
            raise self.error(f"leads from https to {shown(target)}, which anybody on the way could change")
        return target

    # -- answers

    def _promised(self, response: Any, start: int, wanted: int) -> Answer:
        """What an answer brings. Refuses all answers but those to what was asked."""
        status, headers = response.status_code, response.headers
        content_range = headers.get("content-range", "").strip()
        length = _whole_number(headers.get("content-length", ""))
        if status == 206:
            match = _CONTENT_RANGE.fullmatch(content_range)
            first, last, size = map(int, match.groups()) if match else (-1, -1, 0)
            if first != start or not start <= last < min(wanted, size):
                raise self.error(
                    f"was asked for bytes {start} to {wanted}, and sends {content_range or 'no range'!r}", status
                )
            end = last + 1
        elif status == 416 and start == 0 and content_range == "bytes */0":
            size = end = 0
        elif status == 200 and start == 0 and length is not None and length <= wanted:
            # The whole file is not more than was asked for.
            size = end = length
        else:
            raise self._refused(response, start)
        encoding = headers.get("content-encoding", "").strip()
        if encoding.lower() not in ("identity", ""):
            raise self.error(
                f"comes compressed ({encoding}), though it was asked for as it is",
                hint="turn compression off for it on the server",
            )
        return Answer(size, _tag(headers), end, response.iter_raw())

    def _refused(self, response: Any, start: int) -> Exception:
        status, headers = response.status_code, response.headers
        code = headers.get("x-error-code", "")
        if status in TRANSIENT:
            wait = float(_whole_number(headers.get("retry-after", "")) or 0)
            asks = f" and asks to wait {wait:.0f} seconds" if wait else ""
            return TransientError(f"answers with status {status}{asks}", status=status, code=code, wait=wait)
        if status in (404, 410):
            return SourceNotFoundError(
                f"there is nothing at {self.name} (status {status})", file=self.name, hint="check the address"
            )
        if status == 416 and start > 0:
            # What was asked for was there.
            return self.changed()
        if status in (200, 416):
            return self.error(
                "can't be read in parts: the server ignores ranges, and would send all of it"
                if status == 200
                else "is said to lack its first bytes",
                status,
                hint="download it, and name the file on disk",
            )
        if status in (401, 403, 407):
            hint = "check the address, and what lets you in: a token, or headers"
            return self.error(f"does not let us in (status {status})", status, code, hint)
        return self.error(f"answers with status {status}", status, code)


#: What to do where an offline switch keeps from asking.
OFFLINE_HINT = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to have it asked for"


def _sent(client: Any, request: Any) -> Any:
    """The answer, once its headers are there: its time-outs are for each byte, and headers may trickle for ever."""
    send = partial(client.send, request, stream=True, follow_redirects=False)
    return interruptible(send, _HEADERS_WITHIN, lambda response: response.close())


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
