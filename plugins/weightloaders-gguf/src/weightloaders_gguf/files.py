"""Which files are meant: one, the parts of a split one, or one of several that a folder holds."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from weightloaders import FolderListing
from weightloaders.errors import AmbiguousSourceError, IncompleteCheckpointError, SourceNotFoundError
from weightloaders.weights.files import listed
from weightloaders.weights.folder import path_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightloaders import Listing

_SUFFIX = ".gguf"
# llama.cpp's own form, `llama_split_path`.
_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_QUANTISATION = re.compile(
    r"(?<![a-z0-9])(I?Q[1-8]_\w+|TQ[12]_0|MXFP4\w*|NVFP4|BF16|F16|F32)(?![a-z0-9])", re.IGNORECASE
)
_NO_MODELS = {
    "mmproj": "the part of a model that sees or hears, not the language model",
    "imatrix": "what guides quantisation, not a model",
}
_SHOWN = 6


class Place(NamedTuple):
    """What a user named.

    Attributes:
        listing: The folder.
        name: The file in it; empty for the folder.
        tag: Which of several is meant, such as ``Q4_K_M``; empty where nothing was said.
    """

    listing: FolderListing
    name: str = ""
    tag: str = ""


@dataclass(frozen=True)
class Files:
    """The files of one model.

    Attributes:
        listing: The folder that they lie in.
        names: One, or all parts in their order, as paths within the folder.
        skipped: Files that were left out, each with the reason.
    """

    listing: Listing
    names: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def place_of(text: str) -> Place:
    """What a name stands for: a file, a folder, or ``folder:Q4_K_M``.

    Raises:
        SourceNotFoundError: If there is no such file or folder.
    """
    try:
        return Place(*listed(path_of(text)))
    except SourceNotFoundError as error:
        head, colon, tag = text.rpartition(":")
        if colon and tag:
            with contextlib.suppress(SourceNotFoundError):
                return Place(*listed(path_of(head or ".")), tag)
        error.hint = (
            "give a .gguf file, the folder of one, or folder:Q4_K_M; files on the hub have to be downloaded first"
        )
        raise


def choose(listing: Listing, name: str = "", tag: str = "", file_pattern: str | None = None) -> Files:
    """The files of the model that is meant.

    Args:
        listing: What lies in the folder.
        name: The file that was named, any part of a split one; empty for the folder.
        tag: Which of several is meant: a part of its name that is a word, such as ``Q4_K_M``, or the whole name.
        file_pattern: A glob that the name has to match.

    Raises:
        SourceNotFoundError: If there is none.
        AmbiguousSourceError: If there are several.
        IncompleteCheckpointError: If a part is missing.
    """
    if name and tag:
        raise SourceNotFoundError(
            f"{name} is a file, of which {tag!r} can't pick one", file=f"{listing.where}/{name}", hint="name it alone"
        )
    if name:
        return Files(listing, _whole(listing, name))
    # Where each quantisation has a folder of its own, it is called like it.
    names = names_in(listing, within=bool(tag))
    skipped = {other: reason for other in names if (reason := _no_model(other))}
    # Links that lead nowhere are listed, so that a missing part is noticed; but what isn't there at all is no model.
    skipped |= {other: reason for other, reason in listing.problems(names).items() if not _PART.fullmatch(other)}
    wanted = [other for other in names if other not in skipped]
    if file_pattern is not None:
        wanted = [other for other in wanted if fnmatch.fnmatchcase(other, file_pattern)]
    if tag:
        wanted = [other for other in wanted if _is_tagged(other, tag)]
    sets: dict[str, list[str]] = defaultdict(list)
    for other in wanted:
        match = _PART.fullmatch(other)
        sets[f"{match['prefix']}-*-of-{match['count']}{match['suffix']}" if match else other].append(other)
    if len(sets) != 1:
        raise _none_or_many(listing, sets, names, skipped, tag, file_pattern)
    (found,) = sets.values()
    return Files(listing, _whole(listing, found[0]), skipped)


def names_in(listing: Listing, *, within: bool = False) -> list[str]:
    """The GGUF files of a folder, by name.

    Args:
        listing: What lies in the folder.
        within: Also those in its sub-folders, on disk.
    """
    names = sorted(name for name in listing.names if name.lower().endswith(_SUFFIX))
    return names + _in_subfolders(listing) if within and isinstance(listing, FolderListing) else names


def names_quantisation(tag: str) -> bool:
    """Whether a word is what llama.cpp calls a quantisation, such as ``Q4_K_M``."""
    return _QUANTISATION.fullmatch(tag) is not None


def _no_model(name: str) -> str | None:
    file = name.rpartition("/")[2].lower()
    return next((reason for word, reason in _NO_MODELS.items() if re.search(rf"(^|[-_.]){word}([-_.]|$)", file)), None)


def _is_tagged(name: str, tag: str) -> bool:
    # Q4_K is not Q4_K_M, nor is Q4_XS IQ4_XS.
    return name == tag or re.search(rf"(?<![a-z0-9]){re.escape(tag)}(?![a-z0-9_])", name, re.IGNORECASE) is not None


def _in_subfolders(listing: FolderListing) -> list[str]:
    found = []
    for folder in listing.odd:
        if (listing.folder / folder).is_dir():
            inside = FolderListing(listing.folder / folder)
            found += [f"{folder}/{name}" for name in inside.names if name.lower().endswith(_SUFFIX)]
    return sorted(found)


def _none_or_many(
    listing: Listing, sets: Iterable[str], names: list[str], skipped: Mapping[str, str], tag: str, pattern: str | None
) -> SourceNotFoundError | AmbiguousSourceError:
    what = tag or pattern or f"*{_SUFFIX}"
    sets = sorted(sets)
    if sets:
        # Both as the file has it, for the pattern goes by case.
        found = _QUANTISATION.search(sets[0])
        said = found[0] if found else "Q4_K_M"
        tagged = f"{listing.where}:{said}, or " if isinstance(listing, FolderListing) else ""
        return AmbiguousSourceError(
            f"{listing.where} holds several models{f' that {what!r} may mean' if tag or pattern else ''}: "
            f"{_listed(sets)}",
            file=listing.where,
            hint=f"name the file itself, or say which: {tagged}file_pattern='*{said}*'",
        )
    shown = [f"{name} ({skipped[name]})" if name in skipped else name for name in names]
    there = f"; there is {_listed(shown)}" if shown else ""
    return SourceNotFoundError(
        f"{listing.where} holds no model {what!r}{there}", file=listing.where, hint="name the file, or another folder"
    )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _whole(listing: Listing, name: str) -> tuple[str, ...]:
    """A file, or all parts of the set that it belongs to."""
    folder, slash, file = name.rpartition("/")
    match = _PART.fullmatch(file)
    if match is None:
        return (name,)
    count = int(match["count"])
    parts = [
        f"{folder}{slash}{match['prefix']}-{i:05d}-of-{match['count']}{match['suffix']}" for i in range(1, count + 1)
    ]
    if name not in parts:
        # A number that its own set does not have: so it is no part, whatever it is called.
        return (name,)
    problems = listing.problems(parts)
    if problems:
        missing = [part for part in parts if part in problems]
        raise IncompleteCheckpointError(
            f"{name} is one of {count} parts, but {missing[0]} {problems[missing[0]]}"
            + (f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""),
            file=f"{listing.where}/{missing[0]}",
            hint="fetch all parts into one folder",
        )
    return tuple(parts)
