"""`RemoteSource`: bytes far away, asked for range by range; what all such sources share.

A first request brings the size, what tells that the content has changed, and the beginning, which is where headers are.
What breaks off is gone on with, what may pass is tried again, and what has changed meanwhile is refused.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from weightloaders.errors import RemoteReadError, SourceReadError
from weightloaders.weights.source import ByteSource, behind
from weightloaders.weights.threads import IN_FLIGHT, in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

R = TypeVar("R")

#: What the first request asks for: a file's size comes with it, and most headers fit into it.
HEAD_BYTES = 64 << 10
#: What to do about an answer that nobody can do anything with.
OTHERS_FAULT = "check the address; if it is right, ask whoever runs the server, or download the file and name that"
_LATER = "check the network, or try again later"
# Small parts that are no further apart are asked for together. Where there are more than go at once, so are others, as
# long as what lies between them comes to no more than this in all: it takes less time than one more round of requests.
_GAP = 16 << 10
_BETWEEN = 4 << 20
# A longer read goes in parts of this size, several at once. A load's own reads are no longer: it has its own threads.
_PART = 16 << 20
# How many pieces of memory one answer may fill.
_MOST_VIEWS = 1000
# Attempts in a row that bring nothing.
_ATTEMPTS = 5
# Slower than this, in bytes a second, a transfer will not end in a life time.
_SLOWEST = 1024


class TransientError(Exception):
    """Something that may go better the next time.

    Args:
        problem: What went wrong, as a predicate of the source: "breaks off".
        status: The status that was answered with, if any.
        code: The server's own code for the reason.
        wait: How long the server asks to be left alone, in seconds.
    """

    def __init__(self, problem: str, *, status: int | None = None, code: str = "", wait: float = 0.0) -> None:
        super().__init__(problem)
        self.status, self.code, self.wait = status, code, wait


class Answer(NamedTuple):
    """What a request for a range brings.

    Attributes:
        size: Length of the whole, in bytes.
        tag: What is another one once the content has changed, such as an ``ETag``; empty where nothing of the kind is
            told.
        end: Where in the whole the bytes end that come. It may be less than was asked for.
        chunks: The bytes.
    """

    size: int
    tag: str
    end: int
    chunks: Iterable[bytes]


class _Facts(NamedTuple):
    size: int
    tag: str


_UNKNOWN = _Facts(-1, "")


@dataclass(slots=True)
class _Progress:
    """How far one read has come.

    Attributes:
        views: What is still to be filled.
        at: Where in the whole the next byte is.
        end: And where the last one ends.
        started: When it began.
        done: Bytes that are there.
    """

    views: list[memoryview]
    at: int
    end: int
    started: float
    done: int = 0

    def take(self, chunk: memoryview) -> None:
        """Put the next bytes into place."""
        self.at += len(chunk)
        self.done += len(chunk)
        while chunk:
            count = min(len(chunk), len(self.views[0]))
            self.views[0][:count] = chunk[:count]
            self.views = behind(self.views, count)
            chunk = chunk[count:]


class RemoteSource(ByteSource):
    """Bytes that are asked for range by range. Nothing is asked for until the size or the bytes are.

    A source of this kind says how one range is asked for (`ask`). Trouble that may pass, a lost connection for one, it
    tells by a `TransientError`: then the rest is asked for again after a pause that doubles each time, for
    some seconds. The first 64 KiB come with the first request and are kept: that is where headers are.

    Args:
        name: How messages call it. It must hold no secret.

    Attributes:
        pause: Seconds until the second attempt; the next pauses are twice as long each.
        patience: Seconds that attempts may go on without bringing anything.
        slow_after: Seconds after which a transfer is given up that has come to less than a kilobyte for each.
    """

    pause: ClassVar[float] = 0.25
    patience: ClassVar[float] = 15.0
    slow_after: ClassVar[float] = 30.0

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._facts = _UNKNOWN
        self._head = b""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def ask(self, start: int, end: int) -> AbstractContextManager[Answer]:
        """Ask for a range of bytes, once.

        Args:
            start: The first byte.
            end: Behind the last one; it may lie behind the end of the whole, if the first does not.

        Raises:
            SourceNotFoundError: If there is nothing of that name.
            RemoteReadError: If the server refuses, or does not serve ranges; see `error`.
            TransientError: If it may go better the next time.
        """

    @property
    def size(self) -> int:
        """Length in bytes, as the first answer says.

        Raises:
            SourceNotFoundError: If there is no such file.
            RemoteReadError: If the server can't be reached, refuses, or does not serve ranges.
        """
        return self._known().size

    @property
    def tag(self) -> str:
        """What the server says that changes with the content; empty if it says nothing. Raises as `size`."""
        return self._known().tag

    @property
    def known_tag(self) -> str:
        """The same, if it has been told already; nothing is asked for."""
        return self._facts.tag

    @property
    def identity(self) -> tuple[str, int, str]:
        """The name, the size, and what the server says that changes with the content. Raises as `size`."""
        return (self.name, *self._known())

    @property
    def most_views(self) -> int:
        """How many views `read_vectors` fills by one request."""
        return _MOST_VIEWS

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill the view from ``offset`` on. See `ByteSource.read_into`."""
        parts = range(0, len(view), _PART) if len(view) > _PART else ()
        if parts:
            in_parallel(lambda at: self.read_vectors([view[at : at + _PART]], offset + at), parts)
        else:
            self.read_vectors([view], offset)

    def read_vectors(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill several views from bytes that lie side by side, by one request. See `ByteSource.read_vectors`."""
        end = offset + sum(map(len, views))
        if offset < 0 or end > self.size:
            raise SourceReadError(f"{self.name} has only {self.size} bytes, not {end}", at=offset, file=self.name)
        progress = _Progress([view for view in views if len(view)], offset, end, time.monotonic())
        progress.take(memoryview(self._head)[offset:end])
        if progress.at < end:
            self._fetch(progress)

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several small parts, those that lie close together in one request; see `ByteSource.read_many`."""
        spans = _spans(places)
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
                progress = _Progress([memoryview(head)], 0, HEAD_BYTES, time.monotonic())
                self._fetch(progress)
                self._head = bytes(head[: progress.done])
            return self._facts

    # -- attempts

    def _fetch(self, progress: _Progress) -> None:
        """Fetch what is missing, going on where a connection broke off."""
        try:
            persistently(
                lambda: self._attempt(progress), lambda: progress.done, pause=self.pause, patience=self.patience
            )
        except TransientError as error:
            hint = "wait before you try again" if error.status == 429 else _LATER
            raise self.error(str(error), error.status, error.code, hint) from error.__cause__

    def _attempt(self, progress: _Progress) -> None:
        """One request for what is still to come."""
        start = progress.at
        with self.ask(start, progress.end) as answer:
            self._check(answer)
            for chunk in answer.chunks if answer.end > start else ():
                if progress.at + len(chunk) > answer.end:
                    raise self.error(f"sends more than the {answer.end - start} bytes that it announces")
                progress.take(memoryview(chunk))
                self._check_pace(progress)
        if progress.at < answer.end:
            raise TransientError(f"breaks off {answer.end - progress.at} bytes too early")
        if answer.end < min(progress.end, answer.size):
            # A server may send less than was asked for, as long as it says so.
            raise TransientError(f"sends only the bytes up to {answer.end}")

    def _check(self, answer: Answer) -> None:
        facts = _Facts(answer.size, answer.tag)
        if self._facts is _UNKNOWN:
            self._facts = facts
        elif facts.size != self._facts.size or (facts.tag and self._facts.tag and facts.tag != self._facts.tag):
            raise self.changed()

    def _check_pace(self, progress: _Progress) -> None:
        elapsed = time.monotonic() - progress.started
        if elapsed > self.slow_after and progress.done < _SLOWEST * elapsed:
            raise self.error(f"sends too slowly: {progress.done} bytes in {elapsed:.0f} seconds", hint=_LATER)

    # -- errors

    def error(self, what: str, status: int | None = None, code: str = "", hint: str | None = None) -> RemoteReadError:
        """The error for what is no use to try again.

        Args:
            what: What is wrong, as a predicate of the source.
            status: The status that was answered with.
            code: The server's own code for the reason.
            hint: What to do about it. Default: ask whoever runs the server.
        """
        return RemoteReadError(
            f"{self.name} {what}", file=self.name, status=status, code=code, hint=hint or OTHERS_FAULT
        )

    def changed(self) -> SourceReadError:
        """The error for what is not what it was."""
        return SourceReadError(
            f"{self.name} was changed after it was catalogued",
            file=self.name,
            hint="wait until whoever writes it is done, then load again",
        )


def _spans(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is asked for to have these parts, each given by offset and length: where each request begins and ends."""
    parts: list[tuple[int, int]] = []
    for start, end in sorted((offset, offset + length) for offset, length in places):
        if parts and start <= parts[-1][1] + _GAP:
            parts[-1] = (parts[-1][0], max(end, parts[-1][1]))
        else:
            parts.append((start, end))
    gaps = sorted((after[0] - before[1], after[0]) for before, after in itertools.pairwise(parts))
    in_all = itertools.accumulate(gap for gap, _ in gaps)
    short = itertools.islice(zip(gaps, in_all, strict=True), max(0, len(parts) - IN_FLIGHT))
    bridged = {start for (_, start), total in short if total <= _BETWEEN}
    spans: list[tuple[int, int]] = []
    for start, end in parts:
        if start in bridged:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def persistently(
    attempt: Callable[[], R],
    done: Callable[[], int] = lambda: 0,
    *,
    pause: float = RemoteSource.pause,
    patience: float = RemoteSource.patience,
) -> R:
    """The result of something that may fail for a while.

    Args:
        attempt: Does it. After a `TransientError` it is called again.
        done: Tells how far it has come: as long as that grows, attempts go on.
        pause: Seconds until the second attempt; the next pauses are twice as long each.
        patience: Seconds that attempts may go on without bringing anything.

    Raises:
        TransientError: That of the last attempt.
    """
    attempts, began = 0, time.monotonic()
    while True:
        before = done()
        try:
            return attempt()
        except TransientError as error:
            if done() > before:
                attempts, began = 0, time.monotonic()
            attempts += 1
            wait = max(pause * 2 ** (attempts - 1), error.wait)
            if attempts >= _ATTEMPTS or time.monotonic() + wait > began + patience:
                raise
        time.sleep(wait)
