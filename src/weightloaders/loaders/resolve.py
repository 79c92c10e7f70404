"""The folder that a model's small files lie in: its config, its tokenizer."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from weightloaders.errors import SourceError, SourceNotFoundError
from weightloaders.loaders.hub import HubAccess, HubFiles, repository_at
from weightloaders.loaders.place import locate
from weightloaders.weights.folder import FolderListing, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


# Everything of a model but its weights: config, tokenizer, chat template, and code for who trusts it.
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


def resolve_folder(
    name: str | Path,
    patterns: Iterable[str] = MODEL_FILES,
    access: HubAccess | None = None,
    subfolder: str = "",
    needed: str = "",
) -> Path:
    """The folder with a model's files of these names; downloaded, if they are on the hub.

    Args:
        name: A folder or a repository, told apart as by `locate`.
        patterns: Globs of file names, e.g. ``["config.json", "tokenizer*"]``. One that matches nothing is no error.
        access: How to reach the hub.
        subfolder: Where the files lie within the folder or repository.
        needed: The file without which the others are of no use. Default: any of them will do.

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
        return files.download(matching(files))

    def holds(folder: Path) -> bool:
        try:
            return bool(on_disk(folder))
        except SourceError:
            return False

    place = locate(name, holds)
    if place.path is not None:
        return on_disk(place.path)
    return repository_at(place, access or HubAccess()).obtain(on_hub, on_disk)[0]
