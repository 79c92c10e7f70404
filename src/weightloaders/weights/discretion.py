"""Addresses as they may be told: without passwords, and without queries, which may hold a signature."""

from __future__ import annotations

import functools
import logging
import re

# On the hub what precedes an @ is no password, but a repository.
_ADDRESS = re.compile(r"(?!hf:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# An address, or the end of one: a query, or what huggingface_hub shows of a long name.
_IN_TEXT = re.compile(r"(https?://[^\s'\"<>\\]+)|(?<=\(…\))[^\s'\")]+|\?[^\s'\"?=]+=[^\s'\")]*", re.IGNORECASE)
# Headers that let somebody in, as httpcore tells them: (b'Set-Cookie', b'...').
_IN_HEADER = re.compile(
    r"""(\(b'(?:[\w-]*token|set-cookie|cookie|(?:proxy-)?authorization)', b)(['"]).*?\2\)""", re.IGNORECASE
)
# Those that tell of each request, and where it led, among the libraries by which the web is asked.
_TALKATIVE = (
    "huggingface_hub.file_download",
    "huggingface_hub.utils._http",
    *(f"httpx{version}" for version in ("", "2")),
    *(f"httpcore{version}.{part}" for version in ("", "2") for part in ("http11", "http2")),
)


def shown(name: str) -> str:
    """A name as it may be shown: of an address no password, and no query, which may hold a signature."""
    if not _ADDRESS.match(name):
        return name
    # By hand, for it may be no address after all.
    scheme, _, rest = re.split(r"[?#]", name, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def without_secrets(text: str) -> str:
    """A text whose web addresses are as they may be shown, and whose headers let nobody in."""
    return _IN_HEADER.sub(r"\1'…')", _IN_TEXT.sub(lambda match: shown(match[1] or ""), text))


def tells_secrets(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, has the password or the query of an address in its message."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if without_secrets(str(error)) != str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@functools.cache
def keep_secrets_out_of_logs() -> None:
    """Have the libraries by which the web is asked tell addresses, in their own logs, as they may be shown."""
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_discreet)


def _discreet(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    told = without_secrets(text)
    if told != text:
        record.msg, record.args = told, ()
    return True
