"""The loader ``binary``: ``meta.txt`` and ``model.bin``, the raw binary format."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from weightloaders.errors import AmbiguousSourceError, OptionsError, SourceError, SourceNotFoundError
from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.weights.file_names import OTHER_FORMATS, family_of, is_training_state, natural, suffix_of
from weightloaders.weights.files import head_of, listed
from weightloaders.weights.folder import path_of
from weightloaders.weights.zip_directory import ZIP_MAGIC

if TYPE_CHECKING:
    import torch

    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.weights import Weights

_META_FILE, _PATTERN = "meta.txt", "*.bin"
_SHOWN = 6


class BinaryLoader(BaseWeightLoader):
    """Packed values in ``model.bin``, described line by line in ``meta.txt``; see `weightloaders.weights.raw`.

    A data file ``x.bin`` may have a description of its own, ``x.meta.txt``, which is used before ``meta.txt``. Several
    data files in a folder make up one checkpoint only where each has its own.

    Args:
        dtype: What floating-point tensors are handed out in, e.g. ``torch.bfloat16``. None: as stored. Integers, bool,
            complex and 8-bit floats are always as stored.
        stored_dtype: What lies in the data file where the description does not say.
        byteorder: ``"little"`` or ``"big"``: that of the values.
        meta_file: Name of the description.
        file_pattern: A glob for the names of the data files.

    Raises:
        OptionsError: If a dtype or the byte order is none.
    """

    description: ClassVar[str] = "meta.txt and model.bin: packed values with a list of names and shapes"

    def __init__(
        self,
        dtype: torch.dtype | str | None = None,
        stored_dtype: torch.dtype | str = "float32",
        byteorder: Literal["little", "big"] = "little",
        meta_file: str = _META_FILE,
        file_pattern: str = _PATTERN,
    ) -> None:
        from weightloaders.weights.raw import dtype_option

        if byteorder not in ("little", "big"):
            raise OptionsError(f"byteorder must be 'little' or 'big', not {byteorder!r}")
        self.dtype = None if dtype is None else dtype_option(dtype, "dtype", real=True)
        self.stored_dtype = dtype_option(stored_dtype, "stored_dtype")
        self.byteorder: Literal["little", "big"] = byteorder
        self.meta_file = meta_file
        self.file_pattern = file_pattern

    def get_weights(self, model_name_or_path: str) -> Weights:
        """Catalogue a folder or a data file.

        Args:
            model_name_or_path: The folder, or the data file, whose description lies beside it.

        Raises:
            SourceNotFoundError: If there is no such path, no data file, or no description.
            AmbiguousSourceError: If there are several data files, and not each has its own description.
            CheckpointFormatError: If a description can't be understood, or does not fit the size of its data file.
            DuplicateTensorError: If a name is described twice.
        """
        return self.get_listed_weights(*listed(path_of(model_name_or_path)))

    def get_listed_weights(self, listing: Listing, name: str = "") -> Weights:
        """The same of files wherever they lie."""
        from weightloaders.weights.raw import read_raw
        from weightloaders.weights.weights import Weights

        infos = [
            info
            for data, meta in self._files(listing, name)
            for info in read_raw(
                listing.open(data),
                listing.open(meta),
                dtype=self.dtype,
                stored_dtype=self.stored_dtype,
                byteorder=self.byteorder,
            )
        ]
        return Weights.describe(infos)

    def _files(self, listing: Listing, name: str) -> list[tuple[str, str]]:
        """Data files, each with its description."""
        if name:
            return [(name, self._meta_for(name, listing))]
        place = listing.where
        found = _data_files(listing, self.file_pattern)
        if not found:
            raise SourceNotFoundError(f"no data file ({self.file_pattern}) in {place}", file=place)
        if len(found) > 1:
            bare = [name for name in found if _own_meta(name) not in listing.names]
            if bare:
                raise AmbiguousSourceError(
                    f"{place} holds {len(found)} files {self.file_pattern}; without a description of their own: "
                    f"{', '.join(bare[:_SHOWN])}",
                    file=place,
                    hint=f"name one with file_pattern={found[0]!r}, or describe each: {_own_meta(bare[0])}",
                )
        return [(data, self._meta_for(data, listing)) for data in found]

    def _meta_for(self, data: str, listing: Listing) -> str:
        own = _own_meta(data)
        meta = self.meta_file if listing.problems([own]) else own
        if problems := listing.problems([meta]):
            # Where there is one that can't be looked at, that is what is wrong.
            raise SourceNotFoundError(
                f"no description for {data} in {listing.where}: neither {own} nor {meta}, which {problems[meta]}",
                file=f"{listing.where}/{data}",
                hint="name it with meta_file=..., or use another loader if this is no raw binary file",
            )
        return meta

    @classmethod
    def probe(cls, path: str) -> Probe:
        """Whether a description of this format lies beside a data file."""
        try:
            return cls.probe_listing(*listed(path_of(path)))
        except SourceError as error:
            return Probe.no(error.message)

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> Probe:
        """The same of files wherever they lie."""
        if family_of(name) == "safetensors" or suffix_of(name) in OTHER_FORMATS:
            # Looking for a description may be a trip to somewhere far.
            return Probe.no("a file of another format by its name")
        try:
            files = cls()._files(listing, name)  # noqa: SLF001 -- its own class
        except SourceError as error:
            return Probe.no(error.message)
        if not all(_starts_like_meta(listing, meta) for _, meta in files):
            return Probe.no(f"{files[0][1]} is no description of raw values")
        if any(head_of(listing, data, len(ZIP_MAGIC)) == ZIP_MAGIC for data, _ in files):
            return Probe.no(f"{files[0][0]} is a zip file, as torch.save writes")
        if not name and any(family_of(other) == "safetensors" for other in listing.names):
            return Probe.maybe("raw values, but the folder holds safetensors files too")
        return Probe.yes(f"{files[0][1]} describes raw values")


def _data_files(listing: Listing, pattern: str) -> list[str]:
    matching = (n for n in listing.names if fnmatch.fnmatchcase(n, pattern) and not is_training_state(n))
    return sorted(matching, key=natural)


def _own_meta(data: str) -> str:
    return f"{Path(data).stem}.meta.txt"


def _starts_like_meta(listing: Listing, name: str) -> bool:
    from weightloaders.weights.raw import is_meta

    return is_meta(head_of(listing, name, 4096))
