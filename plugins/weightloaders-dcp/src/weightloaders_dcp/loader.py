"""`DcpLoader`: what `torch.distributed.checkpoint` saved, each rank its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import weightloaders as wl
from weightloaders.errors import OptionsError, SourceError
from weightloaders_dcp.names import METADATA, SUFFIX, is_of_dcp, is_shard

if TYPE_CHECKING:
    from weightloaders import Listing

_PICKLE_HEAD = 256


class DcpLoader(wl.BaseWeightLoader):
    """Reads a folder of `torch.distributed.checkpoint`: ``.metadata`` and ``.distcp`` files, one or more a rank.

    Each rank's slices are read from their place in its file, whatever number of ranks there was. Nothing in the
    checkpoint is run: its metadata is read as data, and its tensors are read weights-only. Folders that
    `HuggingFaceStorageWriter` wrote with ``save_distributed=True`` are read, too.

    Args:
        key: The keys that lead to the model's state dict, joined with dots, such as ``"model"``, where several could be
            meant; ``""`` for all tensors, an optimizer's included.
    """

    description: ClassVar[str] = "torch.distributed.checkpoint's folders"

    def __init__(self, key: str | None = None) -> None:
        self.key = key

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Describe the model's tensors; nothing but metadata and the beginnings of items is read.

        Args:
            model_name_or_path: The folder, or a file in it.

        Raises:
            SourceNotFoundError: If there is no such folder, or no metadata in it.
            IncompleteCheckpointError: If a file that the metadata names is missing.
            AmbiguousSourceError: If several sets of weights are in it, and `key` does not say which is meant.
            UnsafeCheckpointError: If a pickle needs more than DCP's own classes or tensors.
            CheckpointFormatError: If chunks are missing or overlap, or a file is damaged.
        """
        return self.get_listed_weights(_listing(model_name_or_path))

    def get_listed_weights(self, listing: Listing, name: str = "") -> wl.Weights:  # noqa: ARG002 -- any file means its folder
        """The same of files wherever they lie."""
        from weightloaders_dcp.huggingface import read_shards
        from weightloaders_dcp.reading import read_checkpoint

        if not any(map(is_of_dcp, listing.names)) and any(map(is_shard, listing.names)):
            if self.key:
                raise OptionsError(
                    f"key={self.key!r} is for .distcp files: parts in safetensors' format have no keys, only names",
                    file=listing.where,
                    hint="leave it out",
                )
            return read_shards(listing)
        return read_checkpoint(listing, self.key)

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is such a folder, or a file of one."""
        from weightloaders.weights.files import listed
        from weightloaders.weights.folder import path_of

        try:
            return cls.probe_listing(*listed(path_of(path)))
        except SourceError as error:
            return wl.Probe.no(error.message)

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> wl.Probe:
        """The same of files wherever they lie."""
        if name:
            return wl.Probe.yes("a file of DCP's") if is_of_dcp(name) else wl.Probe.no("no file of DCP's")
        names = listing.names
        if any(other.endswith(SUFFIX) for other in names):
            return wl.Probe.yes("a folder with .distcp files")
        if METADATA in names:
            source = listing.open(METADATA)
            if b"torch.distributed" in source.read(0, min(_PICKLE_HEAD, source.size)):
                return wl.Probe.yes("a folder with DCP's metadata")
        if any(map(is_shard, names)) and "model.safetensors.index.json" not in names:
            return wl.Probe.yes("a folder with ranks' parts in safetensors' format")
        return wl.Probe.no("a folder without .metadata and .distcp files")


def _listing(place: str) -> wl.FolderListing:
    from weightloaders.weights.files import listed
    from weightloaders.weights.folder import path_of

    # Any file means its folder.
    return listed(path_of(place))[0]
