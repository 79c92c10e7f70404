"""``weightloaders verify SRC``: whether files are what they must be, and hold what they say. Each is told."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weightloaders.cli.common import (
    Json,
    Loader,
    Option,
    Source,
    counted,
    loader_options,
    say,
    say_json,
    say_table,
    settings,
)
from weightloaders.errors import SourceError, WeightLoadersError
from weightloaders.weights.checksum_lists import list_about
from weightloaders.weights.checksums import FileCheck
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import names_weights
from weightloaders.weights.folder import FolderListing, kind_of, path_of
from weightloaders.weights.source import FileSource
from weightloaders.weights.threads import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightloaders.weights.checksums import Checksum
    from weightloaders.weights.source import ByteSource
    from weightloaders.weights.weights import Weights

Status = Literal["ok", "wrong", "missing", "unknown"]

_LISTS = ("SHA256SUMS", "SHA256SUMS.json", "*.sha256")


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What there is to say of one file, or one tensor."""

    name: str
    status: Status
    why: str = ""


@dataclass(slots=True)
class _Answer:
    """What there is to say of a source."""

    files: list[_Verdict] = field(default_factory=list)
    headers: _Verdict = field(default_factory=lambda: _Verdict("headers", "ok"))
    tensors: list[_Verdict] = field(default_factory=list)

    def count(self, *statuses: Status) -> int:
        return sum(file.status in statuses for file in self.files)

    def is_right(self, *, allow_unknown: bool) -> bool:
        bad: tuple[Status, ...] = ("wrong", "missing") if allow_unknown else ("wrong", "missing", "unknown")
        return not self.count(*bad) and self.headers.status == "ok" and not self.tensors


def verify_source(
    source: Source,
    checksums: Annotated[
        list[str] | None,
        typer.Option(
            "--list",
            metavar="FILE",
            help="A list of checksums that alone is asked. May be repeated.",
            show_default=False,
        ),
    ] = None,
    finite: Annotated[bool, typer.Option("--finite", help="Read all values, and tell NaN and infinity.")] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Files that nobody has a checksum of are no failure.")
    ] = False,
    loader: Loader = "auto",
    option: Option = None,
    json: Json = False,
) -> None:
    """Hold every file of a source against its checksum, and read its headers. Exit status 1 if anything is not right.

    What lies on the hub is downloaded first, unless it is in the cache.
    """  # fmt: skip
    from weightloaders.api import open_to_read

    answer = _Answer()
    read: Sequence[ByteSource] = ()
    try:
        with open_to_read(source, loader, **loader_options(option)) as weights:
            infos = weights.infos()
            read = [*(origin for info in infos for origin in info.origins), *weights.described_by]
            answer.headers = _Verdict("headers", "ok", counted(len(infos), "tensor"))
            if finite:
                answer.tensors = list(_not_finite(weights))
    except SourceError as error:
        # The other files are looked at all the same, as far as it can be told which they are.
        answer.headers = _Verdict("headers", "wrong", error.message)
    beside = list(_beside(source, read))
    files = {file.name: file for file in (*read, *(FileSource(path) for path in beside if kind_of(path) is None))}
    answer.files = list(_verdicts(files, checksums or ()))
    answer.files += [_Verdict(str(path), "wrong", f"it {odd}") for path in beside if (odd := kind_of(path)) is not None]
    if not (answer.files or answer.headers.status == "ok"):
        raise SourceError(answer.headers.why, file=shown(source))
    if json:
        say_json({"source": shown(source), "ok": answer.is_right(allow_unknown=allow_unknown), **asdict(answer)})
    else:
        _say(answer)
    if not answer.is_right(allow_unknown=allow_unknown):
        raise typer.Exit(1)


def _say(answer: _Answer) -> None:
    counts = [f"{answer.count(status):,} {status}" for status in ("ok", "wrong", "missing", "unknown")]
    said = [count for count in counts if not count.startswith("0 ")]
    if answer.headers.status != "ok":
        said.append("headers wrong")
    if answer.tensors:
        said.append(f"{counted(len(answer.tensors), 'tensor')} not finite")
    say(f"{counted(len(answer.files), 'file')}: {', '.join(said)}")
    say("")
    rows = [*answer.files, answer.headers, *answer.tensors]
    say_table(["", "", ""], [(verdict.status, verdict.name, verdict.why) for verdict in rows])


# ------------------------------------------------------------------ which files


def _beside(source: str, read: Sequence[ByteSource]) -> Iterator[Path]:
    """What lies where the weights lie, and belongs to the model: weights that could not be read, config, tokenizer."""
    from weightloaders.loaders.resolve import MODEL_FILES

    folders = {os.path.dirname(file.name) for file in read if os.path.lexists(file.name)}  # noqa: PTH120
    path = path_of(source)
    if os.path.isfile(path):  # noqa: PTH113 -- pathlib fails at some names
        if not folders:
            yield path
        return
    for folder in sorted(folders) or [str(path)]:
        if not Path(folder).is_dir():
            continue
        listing = FolderListing(Path(folder))
        for name in sorted({*listing.names, *listing.odd}):
            belongs = _is_one_of(name, MODEL_FILES) or (not folders and names_weights(name))
            if belongs and not _is_one_of(name, _LISTS):
                yield Path(folder) / name


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ------------------------------------------------------------------ what they come to


def _verdicts(files: dict[str, ByteSource], lists: Sequence[str]) -> Iterator[_Verdict]:
    named = [list_about(path, list(files)) for path in lists]
    check = FileCheck(files.values(), named, alone=bool(named))
    yield from _compared(check)
    yield from (_Verdict(file.name, "unknown", "nobody has a checksum of it") for file in check.unknown)
    yield from (
        _Verdict(str(path), "missing", f"listed by {listed.path}")
        for listed in named
        for path in listed.paths
        if not os.path.lexists(path)
    )


def _compared(check: FileCheck) -> Iterator[_Verdict]:
    from weightloaders.progress import Progress
    from weightloaders.transfer.engine import ProgressEvent

    total, done, lock = sum(file.size for file in check.due), 0, threading.Lock()
    stopped = threading.Event()

    with Progress(settings.progress) as shown_:

        def goes_on(file: ByteSource, nbytes: int) -> bool:
            nonlocal done
            with lock:
                done += nbytes
                shown_(ProgressEvent(done, total, file.name))
            return not stopped.is_set()

        def verdict(item: tuple[ByteSource, Checksum]) -> _Verdict:
            file, due = item
            try:
                found = due.of(file, goes_on)
            except SourceError as error:
                return _Verdict(file.name, "wrong", error.message)
            if found == due.digest:
                return _Verdict(file.name, "ok", f"by {due.said_by}")
            return _Verdict(file.name, "wrong", f"it has the {due.called} {found}, not {due.digest}, by {due.said_by}")

        try:
            yield from in_turn(verdict, list(check.due.items()), os.cpu_count() or 1)
        finally:
            stopped.set()


def _not_finite(weights: Weights) -> Iterator[_Verdict]:
    from weightloaders.api import streamed
    from weightloaders.transfer.inspecting import values_of

    try:
        for name, tensor in streamed(weights, settings.progress):
            odd = values_of(tensor, checksum=False).not_finite
            if odd is not None:
                yield _Verdict(name, "wrong", str(odd))
    except WeightLoadersError as error:
        yield _Verdict(error.tensor or "", "wrong", error.message)
