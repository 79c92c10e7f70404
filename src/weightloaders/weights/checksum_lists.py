"""`ChecksumList`: what files must come to, as somebody has listed it.

Known are lists in the format of ``sha256sum``, also that of ``--tag`` and signed in clear text, and lists in JSON. Each
line counts: one that is neither entry nor comment was cut off or damaged, and what it was to say must not pass for
never having been said.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weightloaders.errors import CheckpointFormatError
from weightloaders.weights.folder import real_path
from weightloaders.weights.texts import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
# A leading backslash says that the name is escaped. Behind the digest is a space and one more, or a star for binary; a
# name may itself begin with a space. What is written by hand may have a tab, or one space.
_LINE = re.compile(r"(?P<escaped>\\)?(?P<digest>[0-9a-fA-F]{64})(?: [ *]|\s\*?)(?P<name>.+)")
_TAGGED = re.compile(r"(?P<escaped>\\)?SHA256 \((?P<name>.+)\) = (?P<digest>[0-9a-fA-F]{64})")
# Entries that are whole, but by md5, sha1, sha224, sha384 or sha512.
_OTHERS = re.compile(
    r"\\?(?:(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{40}|[0-9a-fA-F]{56}|[0-9a-fA-F]{96}|[0-9a-fA-F]{128})\s[ *]?.+"
    r"|(?!SHA256 )[A-Z0-9-]+ \(.+\) = [0-9a-fA-F]+)"
)
# https://www.rfc-editor.org/rfc/rfc9580#section-7: headers up to an empty line, the text, the signature.
_SIGNED = re.compile(
    r"-----BEGIN PGP SIGNED MESSAGE-----\n(?:.+\n)*\n(?P<text>.*?)\n?-----BEGIN PGP SIGNATURE-----\n.*", re.DOTALL
)
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}
# A line takes a hundred bytes, so this lists far more files than any checkpoint has.
_MAX_LIST_BYTES = 1 << 24
_CUT = "the list was cut off or damaged: fetch it again, or write it again"


class _Entry(NamedTuple):
    name: str
    digest: str


class ChecksumList:
    """The sha256 of files, from a list of them.

    Args:
        path: The list: lines as ``sha256sum`` writes them; or, where its name ends in ``.json``, an object of names to
            checksums, or to objects with a ``sha256``.
        root: What its names are relative to. Default: its own folder.

    Raises:
        SourceError: If it can't be read.
        CheckpointFormatError: If it is no such list, a line of it is cut off, or it says two things about one file.
    """

    def __init__(self, path: str | Path, root: str | Path | None = None) -> None:
        self.path = Path(path)
        self._root = real_path(self.path.parent if root is None else Path(root))
        text = read_text(self.path, _MAX_LIST_BYTES)
        is_json = self.path.suffix.lower() == ".json"
        entries = _in_json(text, self.path) if is_json else _in_lines(text, self.path)
        # Whether the last name is whole can't be told where nothing follows it.
        is_open = entries and not is_json and not text.endswith("\n")
        last = entries[-1].name if is_open else None
        self._last = last if last is not None and not os.path.lexists(self._root / last) else None
        self._digests: dict[str, str] = {}
        for name, digest in entries:
            said = self._digests.setdefault(os.path.normpath(name), digest)
            if said != digest:
                raise CheckpointFormatError(f"{self.path} has two checksums for {name}", file=self.path)

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def paths(self) -> list[Path]:
        """The files that it lists."""
        return [self._root / name for name in self._digests]

    def of(self, path: str | Path) -> str | None:
        """The sha256 that it has for a file; None if it does not list it.

        Raises:
            CheckpointFormatError: If it ends in the middle of that file's name.
        """
        path = Path(path)
        # The file itself may be a link, as in the hub's cache; the list is about the name that leads to it.
        place = os.path.join(real_path(path.parent), path.name)  # noqa: PTH118 -- a Path would change nothing here
        try:
            name = os.path.relpath(place, self._root)
        except ValueError:  # another drive
            name = place
        found = self._digests.get(name) or self._digests.get(place)
        if found is None and self._last is not None and path.name.startswith(self._last.strip().rpartition("/")[2]):
            raise CheckpointFormatError(
                f"{self.path} ends in the middle of the name of {path.name}: {self._last}", file=self.path, hint=_CUT
            )
        return found


def list_about(path: str | Path, files: Sequence[str | Path]) -> ChecksumList:
    """The list of some files that lie anywhere: its names are relative to its own folder, or else to theirs.

    Raises:
        SourceError: As `ChecksumList` does.
    """
    listed = ChecksumList(path)
    if any(listed.of(file) is not None for file in files):
        return listed
    return ChecksumList(path, _common([real_path(Path(file).parent) for file in files]))


def _common(folders: Sequence[Path]) -> str | None:
    with contextlib.suppress(ValueError):  # several drives, or none of them
        return os.path.commonpath(folders)
    return None


def own_digest(own: Path, path: Path) -> str | None:
    """The sha256 that ``<file>.sha256`` has for its file; None if it is about others.

    Raises:
        SourceError: If it can't be read.
        CheckpointFormatError: If it holds none.
    """
    lines = [line.strip() for line in _lines(read_text(own, _MAX_LIST_BYTES))]
    # It may hold the checksum alone.
    alone = next((line.lower() for line in lines if SHA256.fullmatch(line)), None)
    if alone is not None:
        return alone
    try:
        listed = ChecksumList(own)
    except CheckpointFormatError as error:
        raise _empty(own) from error
    if not listed:
        raise _empty(own)
    return listed.of(path)


def _empty(own: Path) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{own} holds no sha256", file=own, hint="it was cut off or is empty: write it again, or remove it"
    )


def _in_lines(text: str, path: Path) -> list[_Entry]:
    signed = _SIGNED.fullmatch(text.replace("\r\n", "\n"))
    found = []
    for number, line in enumerate(_lines(signed["text"] if signed else text), 1):
        match = _TAGGED.fullmatch(line) or _LINE.fullmatch(line)
        if match is not None:
            name = re.sub(r"\\[\\nr]", lambda e: _ESCAPES[e[0]], match["name"]) if match["escaped"] else match["name"]
            found.append(_Entry(name, match["digest"].lower()))
        elif line.strip() and not line.startswith(("#", ";")) and _OTHERS.fullmatch(line) is None:
            raise CheckpointFormatError(
                f"{path}: line {number} is no entry of a list of checksums: {line!r:.100}", file=path, hint=_CUT
            )
    return found


def _lines(text: str) -> list[str]:
    # Names may have in them what Python else takes for the end of a line.
    return [line.removesuffix("\r").lstrip(" \t") for line in text.split("\n")]


def _in_json(text: str, path: Path) -> list[_Entry]:
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
        if not SHA256.fullmatch(digest):
            raise CheckpointFormatError(f"{path} has no sha256 for {name}, but {value!r:.80}", file=path)
        found.append(_Entry(name, digest.lower()))
    return found
