"""The folder that a model's small files lie in: its config, its tokenizer."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from weightloaders.errors import SourceError, SourceNotFoundError
from weightloaders.loaders.hub import HubAccess, HubFiles, repository_at
from weightloaders.loaders.place import locate
from weightloaders.weights.folder import FolderListing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


# Everything of a model but its weights: config, tokenizer, chat template, and code for who trusts it.
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


def resolve_folder(
    name: str | Path, patterns: Iterable[str] = MODEL_FILES, access: HubAccess | None = None, subfolder: str = ""
) -> Path:
    """The folder with a model's files of these names; downloaded, if they are on the hub.

    Args:
        name: A folder or a repository, told apart as by `locate`.
        patterns: Globs of file names, e.g. ``["config.json", "tokenizer*"]``. One that matches nothing is no error.
        access: How to reach the hub.
        subfolder: Where the files lie within the folder or repository.

    Raises:
        SourceNotFoundError: If there is no such folder or repository, or no file in it matches.
        SourceReadError: If the hub can't be reached, and the cache can't stand in.
    """
    patterns = tuple(patterns)

    def matching(listing: FolderListing | HubFiles) -> list[str]:
        found = sorted(name for name in listing.names if any(fnmatch.fnmatchcase(name, p) for p in patterns))
        if not found:
            raise SourceNotFoundError(f"there is no {' or '.join(patterns)} in {listing.where}", file=listing.where)
        return found

    def on_disk(folder: Path) -> Path:
        matching(FolderListing(folder / subfolder))
        return folder / subfolder

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
