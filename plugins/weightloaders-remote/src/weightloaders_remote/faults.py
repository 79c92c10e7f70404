"""What obstore's exceptions mean, in our own errors.

Their texts hold addresses with signatures, answers with key ids, and headers; so a few known words are taken out of
them and nothing else, and they are neither chained nor logged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from weightloaders.weights.remote import TransientError

# What may go better the next time.
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_STATUS = re.compile(r"status code: ([1-5]\d\d)\b")
# The services' own codes: <Code>NoSuchBucket</Code>.
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_REGION = re.compile(r"expecting '([a-z0-9-]{1,40})'|<Region>([a-z0-9-]{1,40})</Region>")
# How the system says why there is no connection.
_REASON = re.compile(r'message: "([A-Za-z0-9 ,.\'-]{1,80})"')
# A key with a part that is empty, "..", or has control characters in it.
_BAD_KEY = re.compile(r'[Pp]ath "([^"]{0,200})"')
# Where machines in a cloud ask for credentials.
_METADATA = re.compile(
    r"169\.254\.\d+\.\d+|metadata\.google|fd00:ec2::|/latest/api/token|/computeMetadata/|/metadata/identity"
)


class Fault(NamedTuple):
    """What went wrong.

    Attributes:
        kind: ``"absent"`` (no such object), ``"changed"``, ``"no ranges"``, ``"behind the end"``, ``"no credentials"``,
            ``"elsewhere"`` (another place, perhaps another region), ``"bad key"``, ``"bad settings"``, ``"refused"``
            (whatever else is no use to try again) or ``"transient"``.
        what: As a predicate of what was asked for.
        status: The status that was answered with, if any.
        code: The service's own code, if any.
        region: The region that the service says should have been asked.
    """

    kind: str
    what: str
    status: int | None = None
    code: str = ""
    region: str = ""

    def transient(self) -> TransientError:
        """The error that has it tried again."""
        from weightloaders.weights.remote import TransientError

        return TransientError(self.what, status=self.status, code=self.code)


def is_obstores(error: BaseException) -> bool:
    """Whether it is one that obstore raises for what was asked, panics of its Rust code included."""
    from obstore.exceptions import BaseError

    return isinstance(error, (BaseError, OSError, ValueError)) or _is_panic(error)


def _is_panic(error: BaseException) -> bool:
    # Its class can't be imported, and is no Exception.
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


def fault_of(error: BaseException) -> Fault:
    """What an exception of obstore's says."""
    from obstore import exceptions

    if isinstance(error, TimeoutError):
        return Fault("transient", "does not answer in time")
    if _is_panic(error):
        return Fault("bad settings", "can't be asked for with these settings")
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    named = _CODE.search(text)
    code = named[1] if named else ""
    said = f"status {status}, {code}" if status and code else f"status {status}" if status else code
    if _METADATA.search(text):
        return Fault("no credentials", "needs credentials, and none were found", status, code)
    if isinstance(error, FileNotFoundError) or status == 410:
        return Fault("absent", f"is not there ({said})" if said else "is not there", status or 404, code)
    if isinstance(error, exceptions.InvalidPathError):
        key = _BAD_KEY.search(text)
        return Fault("bad key", f"leads to a key that can't be read{f', {key[1]!r}' if key else ''}")
    if isinstance(error, exceptions.PreconditionError):
        return Fault("changed", "was changed", status, code)
    if isinstance(error, exceptions.NotSupportedError) or "non-partial response" in text:
        return Fault("no ranges", "can't be read in parts: the server ignores ranges, and would send all of it", status)
    if status == 416:
        return Fault("behind the end", "ends before that", status, code)
    if status in _TRANSIENT:
        return Fault("transient", f"answers with {said}", status, code)
    if status is not None:
        region = _REGION.search(text)
        what = f"does not let us in ({said})" if status in (401, 403, 407) else f"answers with {said}"
        return Fault("refused", what, status, code, (region[1] or region[2]) if region else "")
    return _without_status(text)


def _without_status(text: str) -> Fault:
    if "without LOCATION" in text:
        return Fault("elsewhere", "is somewhere else, and the answer does not say where")
    if "kind: Redirect" in text:
        return Fault("refused", "leads from one place to another without end")
    if re.search(r"Requested \d+\.\.\d+, got \d+\.\.\d+", text):
        return Fault("refused", "sends other bytes than were asked for")
    if "Content-Range" in text or "content range" in text.lower():
        return Fault("refused", "sends a part without saying which")
    if "ParseContentRange" in text:
        return Fault("refused", "sends a part, and says nothing sensible about which of how many bytes")
    if "InvalidLastModified" in text:
        return Fault("refused", "sends a date that is none")
    if "BadHeader" in text:
        return Fault("refused", "sends headers that are no text")
    lacking = re.search(r"(ETag|Last-Modified|Content-Length) Header missing", text, re.IGNORECASE)
    if lacking:
        return Fault("refused", f"sends an answer without {lacking[1]}")
    if re.search(r"TimedOut|timed out", text):
        return Fault("transient", "does not answer in time")
    if re.search(r"kind: Connect|ConnectError|dns error", text):
        reason = _REASON.search(text)
        return Fault("transient", f"can't be reached{f' ({reason[1]})' if reason else ''}")
    if re.search(r"HTTP error|body error|request or response|connection", text):
        return Fault("transient", "breaks off")
    if re.search(r"credential|token|private key|sign", text, re.IGNORECASE):
        return Fault("no credentials", "needs credentials, and those that were found can't be used")
    return Fault("refused", "can't be read")
