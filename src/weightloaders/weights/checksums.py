"""`Checksum`: what a file must come to, who says so, and what it really comes to.

Known are lists (`ChecksumList`), and the names of blobs in the hub's cache: those of large files are their sha256, all
others git's own checksum, a sha1 over a short header and the content
(https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from weightloaders.errors import SourceReadError
from weightloaders.weights.checksum_lists import SHA256, ChecksumList, own_digest
from weightloaders.weights.folder import real_path
from weightloaders.weights.threads import Crew, threads_that_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from weightloaders.weights.source import ByteSource

_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK = 1 << 22
# More readers only get in each other's way.
_MOST_THREADS = 8


class Mismatch(NamedTuple):
    """A file that does not come to what it must.

    Attributes:
        source: The file.
        expected: What it must come to.
        found: What it comes to.
    """

    source: ByteSource
    expected: Checksum
    found: str


@dataclass(frozen=True, slots=True)
class Checksum:
    """What a file must come to.

    Attributes:
        algorithm: ``"sha256"``, or ``"git"`` for git's checksum of a blob.
        digest: The checksum, as lower-case hexadecimal digits.
        said_by: Who says so, for messages.
    """

    algorithm: Literal["sha256", "git"]
    digest: str
    said_by: str

    @classmethod
    def known(cls, path: str | Path, lists: Sequence[ChecksumList] = ()) -> Checksum | None:
        """The checksum that is known for a file: from the lists, the hub's cache, or a list that lies beside it.

        Beside it lie ``<file>.sha256``, ``SHA256SUMS`` or ``SHA256SUMS.json``.

        Args:
            path: The file.
            lists: Asked first, in this order.

        Returns:
            The first that is found; None if none is.

        Raises:
            SourceError: If a list that lies beside it can't be read.
        """
        path = Path(path)
        listed = cls.listed(path, lists)
        if listed is not None:
            return listed
        blob = real_path(path)
        if SHA256.fullmatch(blob.name):
            return cls("sha256", blob.name.lower(), "the name of its blob")
        if blob.parent.name == "blobs" and _SHA1.fullmatch(blob.name):
            return cls("git", blob.name, "the name of its blob")
        return cls._beside(path)

    @classmethod
    def listed(cls, path: str | Path, lists: Sequence[ChecksumList]) -> Checksum | None:
        """The checksum that the first of these lists has of a file; None if none has one.

        Raises:
            CheckpointFormatError: If a list ends in the middle of its name.
        """
        for listed in lists:
            digest = listed.of(path)
            if digest is not None:
                return cls("sha256", digest, str(listed.path))
        return None

    @classmethod
    def _beside(cls, path: Path) -> Checksum | None:
        own = path.parent / f"{path.name}.sha256"
        digest = own_digest(own, path) if os.path.lexists(own) else None
        if digest is not None:
            return cls("sha256", digest, str(own))
        for name in ("SHA256SUMS", "SHA256SUMS.json"):
            place = path.parent / name
            digest = ChecksumList(place).of(path) if os.path.lexists(place) else None
            if digest is not None:
                return cls("sha256", digest, str(place))
        return None

    @property
    def called(self) -> str:
        """Whose it is, for messages."""
        return "checksum (sha256)" if self.algorithm == "sha256" else "checksum (git's)"

    @staticmethod
    def mismatches(
        expected: Mapping[ByteSource, Checksum], read: Callable[[ByteSource, int], object] | None = None
    ) -> list[Mismatch]:
        """Which files don't come to what they must. All of them are read, a thread a file, some at a time.

        Args:
            expected: What each is to come to.
            read: Told of bytes that were read, of which file and how many; from several threads.

        Raises:
            SourceReadError: If one can't be read.
            KeyboardInterrupt: After the threads have stopped.
        """
        stop = threading.Event()

        def goes_on(source: ByteSource, nbytes: int) -> bool:
            if read is not None:
                read(source, nbytes)
            return not stop.is_set()

        waiting = deque(expected.items())
        found: dict[ByteSource, str] = {}

        def work_off() -> None:
            while waiting and not stop.is_set():
                # Another thread may have taken the last one.
                with contextlib.suppress(IndexError):
                    source, due = waiting.popleft()
                    found[source] = due.of(source, goes_on)

        crew = Crew("weightloaders-checksums")
        try:
            if not crew.start(work_off, threads_that_fit(min(len(expected), os.cpu_count() or 1, _MOST_THREADS))):
                work_off()
            crew.wait()
        except BaseException:
            stop.set()
            crew.join()
            raise
        return _differing(expected, found)

    def of(self, source: ByteSource, goes_on: Callable[[ByteSource, int], bool] | None = None) -> str:
        """What the bytes of a source come to, by the same algorithm.

        Args:
            source: A file.
            goes_on: Told of bytes that were read; says whether to go on. What is returned after a no is of no use.

        Raises:
            SourceReadError: If they can't be read, or the file is no longer what it was when it was catalogued.
        """
        if self.algorithm == "sha256":
            sum_ = hashlib.sha256()
        else:
            sum_ = hashlib.sha1(b"blob %d\0" % source.size, usedforsecurity=False)
        buffer = memoryview(bytearray(min(_CHUNK, source.size)))
        for at in range(0, source.size, _CHUNK):
            part = buffer[: min(_CHUNK, source.size - at)]
            source.read_into(part, at)
            sum_.update(part)
            if goes_on is not None and not goes_on(source, len(part)):
                break
        return sum_.hexdigest()


def _differing(expected: Mapping[ByteSource, Checksum], found: Mapping[ByteSource, str]) -> list[Mismatch]:
    return [Mismatch(source, due, found[source]) for source, due in expected.items() if found[source] != due.digest]


class FileCheck:
    """Files, and what they must come to; then what holding them against it came to.

    Args:
        sources: The files; each counts once. None of them is read yet.
        lists: Asked first; see `Checksum.known`.
        alone: Whether nobody but these is asked.

    Attributes:
        due: What files must come to.
        unknown: Those of which nobody here has a checksum. What lies elsewhere is among them: it would have to be
            fetched twice to know.
        wrong: Those that don't come to what they must, once they were compared.

    Raises:
        SourceError: If a list that lies beside a file is none, or was cut off.
    """

    def __init__(
        self, sources: Iterable[ByteSource], lists: Sequence[ChecksumList] = (), *, alone: bool = False
    ) -> None:
        self.due: dict[ByteSource, Checksum] = {}
        self.unknown: list[ByteSource] = []
        self.wrong: list[Mismatch] = []
        for source in {source.name: source for source in sources}.values():
            known = None
            if os.path.lexists(source.name):
                known = Checksum.listed(source.name, lists) if alone else Checksum.known(source.name, lists)
            if known is None:
                self.unknown.append(source)
            else:
                self.due[source] = known

    def compare(self, read: Callable[[ByteSource, int], object] | None = None) -> None:
        """Read the files, a thread a file, some at a time.

        Args:
            read: Told of bytes that were read, of which file and how many; from several threads.

        Raises:
            SourceReadError: If one can't be read.
        """
        self.wrong = Checksum.mismatches(self.due, read)

    def raise_if_wrong(self, who: str = "") -> None:
        """Refuse what differs, by name.

        Args:
            who: Who asked, for the message.

        Raises:
            SourceReadError: If a file has another checksum. Nothing was touched.
        """
        if not self.wrong:
            return
        lines = [
            f"{who}{source.name} has the {due.called} {found}, not {due.digest}, which {due.said_by} says"
            for source, due, found in self.wrong
        ]
        raise SourceReadError(
            "\n".join(lines),
            file=self.wrong[0].source.name,
            hint="it is damaged or was exchanged: fetch it again; nothing was loaded from it",
        )

    def __str__(self) -> str:
        """What was compared; of files that are all right."""
        by = ", ".join(dict.fromkeys(known.said_by for known in self.due.values()))
        files = "1 file" if len(self.due) == 1 else f"{len(self.due)} files"
        return f"checksums compared and right: {files}, by {by}"
