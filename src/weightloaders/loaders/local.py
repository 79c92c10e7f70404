"""The loader ``local``: safetensors from a folder or a file on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.weights.candidates import Wanted
from weightloaders.weights.file_names import indexed_name, suffix_of
from weightloaders.weights.files import head_of, holds_weights, listed, select_listed
from weightloaders.weights.folder import A_FOLDER, kind_of, path_of
from weightloaders.weights.sniff import is_safetensors

if TYPE_CHECKING:
    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.weights import Weights


class LocalLoader(BaseWeightLoader):
    """Safetensors from a folder (one file, or shards with or without an index) or from one file.

    Args:
        file_pattern: A glob for the names of the files to read, e.g. ``"consolidated*"``. Default: ``*.safetensors``.
        ignore_index: Read all files that match, whatever an index says.
        include_unindexed: Read also the files and tensors that the index omits.
        max_header_bytes: A longer header is refused. Default: the limit of the safetensors package, 100 MB.
    """

    description: ClassVar[str] = "safetensors from a folder or file"

    def __init__(
        self,
        file_pattern: str | None = None,
        ignore_index: bool = False,
        include_unindexed: bool = False,
        max_header_bytes: int | None = None,
    ) -> None:
        self.file_pattern = file_pattern
        self.ignore_index = ignore_index
        self.include_unindexed = include_unindexed
        self.max_header_bytes = max_header_bytes

    def get_weights(self, model_name_or_path: str) -> Weights:
        """Catalogue the safetensors files of a folder.

        Args:
            model_name_or_path: A folder, a file, or an index.

        Raises:
            SourceNotFoundError: If there is no such path, or no weights in it.
            IncompleteCheckpointError: If a file or tensor that the index names is absent.
            SourceError: If a file is not what it should be; see `weightloaders.errors`.
        """
        return self.get_listed_weights(*listed(path_of(model_name_or_path)))

    def get_listed_weights(self, listing: Listing, name: str = "") -> Weights:
        """The same of files wherever they lie."""
        from weightloaders.weights.catalogue import catalogue

        wanted = Wanted(
            families=("safetensors",),
            file_pattern=self.file_pattern,
            ignore_index=self.ignore_index,
            include_unindexed=self.include_unindexed,
        )
        return catalogue(select_listed(listing, name, wanted), max_header_bytes=self.max_header_bytes)

    @classmethod
    def probe(cls, path: str) -> Probe:
        """Whether it is a folder with safetensors files, or such a file."""
        place = path_of(path)
        kind = kind_of(place)
        return cls.probe_listing(*listed(place)) if kind in (None, A_FOLDER) else Probe.no(f"it {kind}")

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> Probe:
        """The same of files wherever they lie."""
        if not name:
            if holds_weights(listing, Wanted(families=("safetensors",))):
                return Probe.yes("a folder with safetensors files")
            return Probe.no("a folder without safetensors files")
        if suffix_of(indexed_name(name) or name) == ".safetensors":
            return Probe.yes("a safetensors file by its name")
        if is_safetensors(head_of(listing, name, 64)):
            return Probe.yes("a safetensors file by its first bytes")
        return Probe.no("not a safetensors file")
