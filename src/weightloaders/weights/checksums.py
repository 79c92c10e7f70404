"""`Checksum`: what a file must come to, who says so, and what it really comes to.

Known are lists in the format of ``sha256sum`` (also that of ``--tag``), lists in JSON, and the names of blobs in the
hub's cache: those of large files are their sha256, all others git's own checksum, a sha1 over a short header and the
content (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from weightloaders.errors import CheckpointFormatError
from weightloaders.weights.folder import real_path
from weightloaders.weights.texts import read_text
from weightloaders.weights.threads import threads_that_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightloaders.weights.source import ByteSource

_SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_SHA1 = re.compile(r"[0-9a-f]{40}")
# A leading backslash says that the name is escaped. Behind the digest is a space and one more, or a star for binary; a
# name may itself begin with a space. What is written by hand may have a tab, or one space.
_LINE = re.compile(r"(?P<escaped>\\)?(?P<digest>[0-9a-fA-F]{64})(?: [ *]|\s\*?)(?P<name>.+)")
_TAGGED = re.compile(r"(?P<escaped>\\)?SHA256 \((?P<name>.+)\) = (?P<digest>[0-9a-fA-F]{64})")
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}
_CHUNK = 1 << 22
# A line takes a hundred bytes, so this lists far more files than any checkpoint has.
_MAX_LIST_BYTES = 1 << 24
# More readers only get in each other's way.
_MOST_THREADS = 8
# A wait with a limit lets Ctrl-C through on every system.
_PATIENCE = 0.2


class ChecksumList:
    """The sha256 of files, from a list of them.

    Args:
        path: The list: lines as ``sha256sum`` writes them; or, where its name ends in ``.json``, an object of names to
            checksums, or to objects with a ``sha256``.
        root: What its names are relative to. Default: its own folder.

    Raises:
        SourceError: If it can't be read.
        CheckpointFormatError: If it is no such list, or says two things about one file.
    """

    def __init__(self, path: str | Path, root: str | Path | None = None) -> None:
        self.path = Path(path)
        self._root = real_path(self.path.parent if root is None else Path(root))
        text = read_text(self.path, _MAX_LIST_BYTES)
        self._digests: dict[str, str] = {}
        entries = _in_json(text, self.path) if self.path.suffix.lower() == ".json" else _in_lines(text)
        for name, digest in entries:
            said = self._digests.setdefault(os.path.normpath(name), digest)
            if said != digest:
                raise CheckpointFormatError(f"{self.path} has two checksums for {name}", file=self.path)

    def __len__(self) -> int:
        return len(self._digests)

    def of(self, path: str | Path) -> str | None:
        """The sha256 that it has for a file; None if it does not list it."""
        path = Path(path)
        # The file itself may be a link, as in the hub's cache; the list is about the name that leads to it.
        place = os.path.join(real_path(path.parent), path.name)  # noqa: PTH118 -- a Path would change nothing here
        try:
            name = os.path.relpath(place, self._root)
        except ValueError:  # another drive
            name = place
        return self._digests.get(name) or self._digests.get(place)


def _in_lines(text: str) -> list[tuple[str, str]]:
    found = []
    for line in _lines(text):
        match = _TAGGED.fullmatch(line) or _LINE.fullmatch(line)
        if match is not None:
            name = re.sub(r"\\[\\nr]", lambda e: _ESCAPES[e[0]], match["name"]) if match["escaped"] else match["name"]
            found.append((name, match["digest"].lower()))
    return found


def _lines(text: str) -> list[str]:
    # Names may have in them what Python else takes for the end of a line.
    return [line.removesuffix("\r").lstrip(" \t") for line in text.split("\n")]


def _in_json(text: str, path: Path) -> list[tuple[str, str]]:
    try:
        listed: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{path} is no JSON: {error}", file=path) from error
    if isinstance(listed, dict) and isinstance(listed.get("files"), dict):
        listed = listed["files"]
    if not isinstance(listed, dict):
        raise CheckpointFormatError(f"{path} is no object of file names to checksums", file=path)
    found = []
    for name, value in listed.items():
        digest = value.get("sha256") if isinstance(value, dict) else value
        digest = digest.removeprefix("sha256:") if isinstance(digest, str) else ""
        if not _SHA256.fullmatch(digest):
            raise CheckpointFormatError(f"{path} has no sha256 for {name}, but {value!r:.80}", file=path)
        found.append((name, digest.lower()))
    return found


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
        for listed in lists:
            digest = listed.of(path)
            if digest is not None:
                return cls("sha256", digest, str(listed.path))
        blob = real_path(path)
        if _SHA256.fullmatch(blob.name):
            return cls("sha256", blob.name.lower(), "the name of its blob")
        if blob.parent.name == "blobs" and _SHA1.fullmatch(blob.name):
            return cls("git", blob.name, "the name of its blob")
        return cls._beside(path)

    @classmethod
    def _beside(cls, path: Path) -> Checksum | None:
        own = path.parent / f"{path.name}.sha256"
        if os.path.lexists(own):
            # It may hold the checksum alone.
            lines = map(str.strip, _lines(read_text(own, _MAX_LIST_BYTES)))
            listed = ChecksumList(own)
            digest = listed.of(path) or next((line.lower() for line in lines if _SHA256.fullmatch(line)), None)
            if digest is not None:
                return cls("sha256", digest, str(own))
            if not listed:
                raise CheckpointFormatError(
                    f"{own} holds no sha256", file=own, hint="it was cut off or is empty: write it again, or remove it"
                )
        for name in ("SHA256SUMS", "SHA256SUMS.json"):
            place = path.parent / name
            digest = ChecksumList(place).of(path) if os.path.lexists(place) else None
            if digest is not None:
                return cls("sha256", digest, str(place))
        return None

    @staticmethod
    def mismatches(expected: Mapping[ByteSource, Checksum]) -> list[Mismatch]:
        """Which files don't come to what they must. All of them are read, a thread a file, some at a time.

        Raises:
            SourceReadError: If one can't be read.
            KeyboardInterrupt: After the threads have stopped.
        """
        stop = threading.Event()
        threads = threads_that_fit(min(len(expected), os.cpu_count() or 1, _MOST_THREADS))
        if not threads:
            return _differing(expected, {source: checksum.of(source) for source, checksum in expected.items()})
        with ThreadPoolExecutor(threads, "weightloaders-checksums") as pool:
            found = {source: pool.submit(checksum.of, source, stop.is_set) for source, checksum in expected.items()}
            pending = set(found.values())
            try:
                while pending:
                    done, pending = wait(pending, _PATIENCE, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return _differing(expected, {source: future.result() for source, future in found.items()})

    def of(self, source: ByteSource, stop: Callable[[], bool] | None = None) -> str:
        """What the bytes of a source come to, by the same algorithm.

        Args:
            source: A file.
            stop: Asked now and then whether to end early; what is returned then is of no use.

        Raises:
            SourceReadError: If they can't be read.
        """
        if self.algorithm == "sha256":
            sum_ = hashlib.sha256()
        else:
            sum_ = hashlib.sha1(b"blob %d\0" % source.size, usedforsecurity=False)
        buffer = memoryview(bytearray(min(_CHUNK, source.size)))
        for at in range(0, source.size, _CHUNK):
            if stop is not None and stop():
                break
            part = buffer[: min(_CHUNK, source.size - at)]
            source.read_into(part, at)
            sum_.update(part)
        return sum_.hexdigest()


def _differing(expected: Mapping[ByteSource, Checksum], found: Mapping[ByteSource, str]) -> list[Mismatch]:
    return [Mismatch(source, due, found[source]) for source, due in expected.items() if found[source] != due.digest]
