"""The folder that a model's small files lie in: its config, its tokenizer."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from weightloaders.errors import SourceError, SourceNotFoundError
from weightloaders.loaders.headers_only import only_headers_are_wanted
from weightloaders.loaders.hub import HubAccess, repository_at
from weightloaders.loaders.place import locate
from weightloaders.loaders.web import UnlistedFolder, WebFolder, split_address
from weightloaders.weights.discretion import shown
from weightloaders.weights.folder import FolderListing, kind_of, temporary_folder
from weightloaders.weights.http import is_web_address
from weightloaders.weights.texts import read_small
from weightloaders.weights.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from weightloaders.loaders.hub_files import HubFiles
    from weightloaders.weights.candidates import Listing

# Everything of a model but its weights: config, tokenizer, chat template, and code for who trusts it.
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
# What a model without weights is built from.
_FOR_BUILDING = ("config.json", "generation_config.json", "*.py")
# The names that transformers writes; the web has no listings to match patterns with.
_USUAL_NAMES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "chat_template.jinja", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_MAX_BYTES = 1 << 28


def resolve_folder(
    name: str | Path,
    patterns: Iterable[str] = MODEL_FILES,
    access: HubAccess | None = None,
    subfolder: str = "",
    needed: str = "",
    headers: Mapping[str, str] | None = None,
) -> Path:
    """The folder with a model's files of these names; downloaded, if they are on the hub.

    Args:
        name: A folder or a repository, told apart as by `locate`; or a web address.
        patterns: Globs of file names, e.g. ``["config.json", "tokenizer*"]``. One that matches nothing is no error.
        access: How to reach the hub.
        subfolder: Where the files lie within the folder or repository.
        needed: The file without which the others are of no use. Default: any of them will do.
        headers: What is sent with each request to a web address.

    Raises:
        SourceNotFoundError: If there is no such folder or repository, or no file in it matches, or none of that name.
        SourceReadError: If the hub can't be reached, and the cache can't stand in.
    """
    patterns = tuple(patterns)

    def matching(listing: FolderListing | HubFiles) -> list[str]:
        found = sorted(name for name in listing.names if any(fnmatch.fnmatchcase(name, p) for p in patterns))
        if not found or (needed and needed not in found):
            lacking = needed or " or ".join(patterns)
            raise SourceNotFoundError(f"there is no {lacking} in {listing.where}", file=listing.where)
        return found

    def on_disk(folder: Path) -> Path:
        folder = folder / subfolder
        if kind_of(folder) is None:
            raise SourceNotFoundError(f"{folder} is a file, where a folder is wanted", file=folder)
        matching(FolderListing(folder))
        return folder

    def on_hub(files: HubFiles) -> Path:
        files = files.within(subfolder)
        if only_headers_are_wanted():
            return _fetched(files, [name for name in matching(files) if _is_for_building(name)])
        return files.download(matching(files))

    def holds(folder: Path) -> bool:
        try:
            return bool(on_disk(folder))
        except SourceError:
            return False

    if is_web_address(str(name)):
        return _from_the_web(str(name), subfolder, patterns, needed, headers)
    place = locate(name, holds)
    if place.path is not None:
        return on_disk(place.path)
    return repository_at(place, access or HubAccess()).obtain(on_hub, on_disk)[0]


def _is_for_building(name: str) -> bool:
    # A backslash in a name separates on some systems.
    return "\\" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in _FOR_BUILDING)


def fetch_model_files(listing: Listing, patterns: Iterable[str] = MODEL_FILES, needed: str = "") -> Path:
    """The folder with a model's files of these names, fetched from wherever they lie.

    Args:
        listing: What lies there.
        patterns: Globs of file names.
        needed: The file without which the others are of no use. Default: any of them will do.

    Raises:
        SourceNotFoundError: If no file matches, or there is none of that name.
        SourceReadError: If they can't be read.
    """
    patterns = tuple(patterns)
    told = _USUAL_NAMES if isinstance(listing, UnlistedFolder) else listing.names
    wanted = {name for name in told if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    if only_headers_are_wanted():
        wanted = set(filter(_is_for_building, wanted))
    names = sorted(name for name in (wanted | {needed} if needed else wanted) if "\\" not in name)
    problems = listing.problems(names)
    there = [name for name in names if name not in problems]
    if not there or needed in problems:
        lacking = (
            f"{needed} at {listing.where}: it {problems[needed]}" if needed else f"file of a model at {listing.where}"
        )
        raise SourceNotFoundError(f"there is no {lacking}", file=listing.where)
    return _fetched(listing, there)


def _from_the_web(
    url: str, subfolder: str, patterns: Sequence[str], needed: str, headers: Mapping[str, str] | None
) -> Path:
    parent, file = split_address(url)
    if file:
        raise SourceNotFoundError(f"{file} at {shown(parent)} is a file, where a folder is wanted", file=shown(url))
    return fetch_model_files(WebFolder(url, headers, subfolder), patterns, needed)


def _fetched(files: Listing, names: Sequence[str]) -> Path:
    """Files in a folder of their own; see `temporary_folder`."""
    contents = in_parallel(lambda name: read_small(files.open(name), _MAX_BYTES), names)
    with temporary_folder(f"what describes the model at {files.where}", files.where) as folder:
        for name, content in zip(names, contents, strict=True):
            (folder / name).write_bytes(content)
    return folder
