"""`TensorizerLoader`: files of tensorizer (https://github.com/coreweave/tensorizer), read by tensorizer or by us."""

from __future__ import annotations

import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

# Its names are resolved on first use.
import weightloaders as wl
from weightloaders.errors import AmbiguousSourceError, OptionsError, SourceError, SourceNotFoundError
from weightloaders_engines.packages import needed, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from weightloaders_engines.tensorizer_header import Entry, Index

    Pairs = Iterator[tuple[str, torch.Tensor]]

# tensorizer keeps every tensor that it has read until it is closed, so it is closed after so many bytes.
_AT_ONCE = 256 << 20


class TensorizerLoader(wl.BaseWeightLoader):
    """A ``.tensors`` file that tensorizer wrote: one file, or the one in a folder.

    What it holds is read, and checked, from its index. Encrypted files are refused; tensors that were saved without
    values (from the meta device) are left out, with a note.

    Args:
        file_pattern: Which file of a folder is meant.
        engine: Who reads the values: ``"tensorizer"``, or ``"weightloaders"`` itself, which then needs no other
            package.
        num_readers: With how many threads tensorizer reads. Default: its own choice.
        verify_hash: Let tensorizer compare each tensor with the hashes that the file has of it.

    Raises:
        OptionsError: If the number is not positive, or an option of tensorizer's is given without it.
    """

    description: ClassVar[str] = "tensorizer's .tensors files"
    requires: ClassVar[Mapping[str, str]] = {"tensorizer": "weightloaders-engines[tensorizer]"}

    def __init__(
        self,
        file_pattern: str = "*.tensors",
        engine: Literal["tensorizer", "weightloaders"] = "tensorizer",
        num_readers: int | None = None,
        verify_hash: bool = False,
    ) -> None:
        if num_readers is not None and num_readers <= 0:
            raise OptionsError(f"num_readers is a positive number, not {num_readers}")
        if engine == "weightloaders" and (verify_hash or num_readers is not None):
            raise OptionsError("num_readers and verify_hash are options of tensorizer's, which engine says not to use")
        self.file_pattern = file_pattern
        self.engine = engine
        self.num_readers = num_readers
        self.verify_hash = verify_hash

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Describe the tensors of a file; nothing but its index is read.

        Raises:
            MissingDependencyError: If tensorizer is to read, and is not installed.
            SourceNotFoundError: If there is no such file, or none in the folder.
            AmbiguousSourceError: If the folder holds several.
            CheckpointFormatError: If it is no sound file of tensorizer's, or encrypted.
        """
        from weightloaders_engines.tensorizer_header import check_headers, read_index

        source = _find(*_listed(model_name_or_path), self.file_pattern)
        if self.engine == "weightloaders":
            return _described(read_index(source))
        needed("tensorizer", "tensorizer")
        index = read_index(source)
        check_headers(source, index.entries)
        entries = {entry.info.name: entry for entry in index.entries}
        return _described(index, partial(self._read, source.name, entries))

    def get_listed_weights(self, listing: wl.Listing, name: str = "") -> wl.Weights:
        """The same of a file wherever it lies; weightloaders reads it, for tensorizer knows nothing of a `Listing`."""
        from weightloaders_engines.tensorizer_header import read_index

        if self.verify_hash:
            raise OptionsError(f"verify_hash is tensorizer's, which can't read from {listing.where}")

        return _described(read_index(_find(listing, name, self.file_pattern)))

    def _read(self, path: str, entries: Mapping[str, Entry], names: Sequence[str]) -> Pairs:
        library = needed("tensorizer", "tensorizer")
        wanted = sorted((entries[name] for name in names), key=lambda entry: entry.place)
        for batch in _batches(wanted):
            ours = {entry.path: entry.info.name for entry in batch}
            with reading("tensorizer", path), self._opened(library, path, ours) as deserializer:
                for *_, name, parameter in deserializer.read_tensors():
                    yield ours[name], parameter.detach()

    def _opened(self, library: Any, path: str, ours: Mapping[Any, str]) -> Any:
        return library.TensorDeserializer(
            path,
            device="cpu",
            filter_func=ours.__contains__,
            lazy_load=True,
            num_readers=self.num_readers,
            verify_hash=self.verify_hash,
        )

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is a ``.tensors`` file, or a folder with just one."""
        try:
            return cls.probe_listing(*_listed(path))
        except SourceError as error:
            return wl.Probe.no(error.message)

    @classmethod
    def probe_listing(cls, listing: wl.Listing, name: str = "") -> wl.Probe:
        """The same of a file wherever it lies."""
        from weightloaders_engines.tensorizer_header import MAGIC

        try:
            source = _find(listing, name, "*.tensors")
            begin = source.read(0, min(len(MAGIC), source.size))
        except SourceError as error:
            return wl.Probe.no(error.message)
        return wl.Probe.yes("a file of tensorizer's") if begin == MAGIC else wl.Probe.no("no file of tensorizer's")


def _listed(name: str) -> tuple[wl.Listing, str]:
    """The folder that is meant, and the file in it if that was named."""
    from weightloaders.weights.files import listed
    from weightloaders.weights.folder import path_of

    return listed(path_of(name))


def _find(listing: wl.Listing, name: str, pattern: str) -> wl.ByteSource:
    if name:
        return listing.open(name)
    found = sorted(file for file in listing.names if fnmatch.fnmatch(file, pattern))
    if not found:
        raise SourceNotFoundError(f"{listing.where} holds no {pattern}", file=listing.where)
    if len(found) > 1:
        raise AmbiguousSourceError(
            f"{listing.where} holds several files of tensorizer's: {', '.join(found)}",
            file=listing.where,
            hint="name the file, or give file_pattern; each rank of a sharded model has a file of its own",
        )
    return listing.open(found[0])


def _described(index: Index, stream: Callable[[Sequence[str]], Pairs] | None = None) -> wl.Weights:
    return wl.Weights.describe((entry.info for entry in index.entries), notes=index.notes, stream=stream)


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    for entry in entries:
        if batch and sum(other.info.nbytes for other in batch) + entry.info.nbytes > _AT_ONCE:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch
