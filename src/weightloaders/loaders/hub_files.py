"""The files of a repository on the hub."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from weightloaders.loaders.headers_only import only_headers_are_wanted
from weightloaders.loaders.hub_trouble import abort_hf_xet
from weightloaders.weights.file_names import family_of
from weightloaders.weights.folder import FolderListing
from weightloaders.weights.index import MAX_INDEX_BYTES
from weightloaders.weights.texts import read_small
from weightloaders.weights.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightloaders.loaders.hub import Repository
    from weightloaders.weights.source import ByteSource

_DOWNLOADS = 4


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository, or of a sub-folder, at one commit: a `weightloaders.weights.candidates.Listing`."""

    repository: Repository
    commit: str
    all_files: frozenset[str]
    subfolder: str = ""
    odd: dict[str, str] = field(default_factory=dict)
    _opened: dict[str, ByteSource] = field(default_factory=dict, repr=False)

    @property
    def where(self) -> str:
        """The address, for messages."""
        return f"hf://{self.repository.name}@{self.commit}" + (f"/{self.subfolder}" if self.subfolder else "")

    @property
    def names(self) -> frozenset[str]:
        """The files that lie directly in the folder."""
        return frozenset(name for name in self._inside() if "/" not in name)

    def within(self, subfolder: str) -> HubFiles:
        """The files of a sub-folder."""
        return replace(self, subfolder=subfolder)

    def problems(self, names: Iterable[str]) -> dict[str, str]:
        """What is wrong with files of these relative paths; those in the repository are left out."""
        return {name: "is not in the repository" for name in names if self._full(name) not in self.all_files}

    def subfolders_with_weights(self) -> list[str]:
        """Sub-folders in which files look like weights."""
        return sorted({name.split("/")[0] for name in self._inside() if "/" in name and family_of(name)})

    def read(self, name: str) -> bytes:
        """The content of an index, which is downloaded unless only headers are wanted."""
        if only_headers_are_wanted():
            return read_small(self.open(name), MAX_INDEX_BYTES)
        return FolderListing(self.download([name])).read(name)

    def open(self, name: str) -> ByteSource:
        """A file, to be read in parts."""
        path = self._full(name)
        if path not in self._opened:
            self._opened[path] = self.repository.source(path, self.commit)
        return self._opened[path]

    def look_at(self, names: Sequence[str]) -> None:
        """Open files and ask for their beginnings, several at once, to see whether they can be read.

        Raises:
            SourceError: If one can't.
        """
        in_parallel(lambda name: self.open(name).size, names)

    def download(self, names: Sequence[str]) -> Path:
        """Download what is not in the cache yet.

        Args:
            names: Relative paths.

        Returns:
            The folder in the cache that they are in now.
        """
        self.repository.check_served([self._full(name) for name in names], self.commit)
        stop = threading.Event()
        try:
            paths = in_parallel(
                lambda name: self.repository.download(self._full(name), self.commit, stop.is_set),
                names,
                _DOWNLOADS,
                "weightloaders-download",
            )
        except BaseException:
            # Those that run would go on to their end, and the process could not end before.
            stop.set()
            abort_hf_xet()
            raise
        folder = paths[0].parents[len(PurePosixPath(names[0]).parts) - 1]
        FolderListing(folder).check_links(names)
        return folder

    def _inside(self) -> list[str]:
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        return [name.removeprefix(prefix) for name in self.all_files if name.startswith(prefix)]

    def _full(self, name: str) -> str:
        return f"{self.subfolder}/{name}" if self.subfolder else name
