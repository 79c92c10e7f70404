"""`GgufLoader`: llama.cpp's GGUF files, with names and layouts as transformers has them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar, Literal

import weightloaders as wl
from weightloaders.errors import AmbiguousSourceError, IncompleteCheckpointError, SourceError
from weightloaders_gguf.files import Files, choose, names_in, names_quantisation, place_of

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path

    from weightloaders import Listing


class GgufLoader(wl.BaseWeightLoader):
    """Reads GGUF: a file, all parts of a split one from any of them, the one in a folder, or ``folder:Q4_K_M``.

    Numbers that are stored plainly are read from their place in the file. Quantised ones are decoded while they are
    read, piece by piece. Config and tokenizer come from the file, too.

    Args:
        file_pattern: Which file of a folder is meant.
        names: ``"transformers"``: tensors are named and arranged as transformers has them. ``"gguf"``: as the file has
            them.
    """

    description: ClassVar[str] = "llama.cpp's GGUF, quantised or not"

    def __init__(
        self, file_pattern: str | None = None, names: Literal["transformers", "gguf"] = "transformers"
    ) -> None:
        self.file_pattern = file_pattern
        self.names = names
        self._folders: dict[Hashable, Path] = {}
        self._lock = threading.Lock()

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Describe the tensors; nothing but headers is read.

        Raises:
            SourceNotFoundError: If there is no such file, or none in the folder.
            AmbiguousSourceError: If the folder holds several models.
            IncompleteCheckpointError: If a part of a split file is missing.
            CheckpointFormatError: If a file is not sound, or is none of this model's.
            UnsupportedDtypeError: If a tensor is of a type that can't be decoded.
        """
        from weightloaders_gguf.catalogue import catalogue

        return catalogue(self._files(model_name_or_path), self.names)

    def get_listed_weights(self, listing: Listing, name: str = "") -> wl.Weights:
        """The same of files wherever they lie."""
        from weightloaders_gguf.catalogue import catalogue

        return catalogue(choose(listing, name, file_pattern=self.file_pattern), self.names)

    def get_model_files(self, model_name_or_path: str, needed: str = "") -> Path | None:
        """A folder with the model's config, and its tokenizer if that is asked for, as the file describes them.

        Raises:
            SourceError: See `get_weights`.
            ModelError: If transformers can't build such a model, or such a tokenizer, from a GGUF file.
        """
        return self._model_files(self._files(model_name_or_path), needed)

    def get_listed_model_files(self, listing: Listing, name: str = "", needed: str = "") -> Path | None:
        """The same of files wherever they lie."""
        return self._model_files(choose(listing, name, file_pattern=self.file_pattern), needed)

    def _model_files(self, files: Files, needed: str) -> Path:
        from weightloaders.weights.folder import temporary_folder
        from weightloaders_gguf.catalogue import headers_of
        from weightloaders_gguf.model_files import TOKENIZER, write_config, write_tokenizer

        with self._lock:
            found = headers_of(files)
            headers = [header for _, header in found]
            key = tuple((source.name, source.identity) for source, _ in found)
            folder = self._folders.get(key)
            if folder is None:
                with temporary_folder(f"the config of {headers[0].file}", headers[0].file) as folder:
                    write_config(headers, folder)
                self._folders[key] = folder
            if needed != "config.json" and not (folder / TOKENIZER).exists():
                write_tokenizer(headers[0], folder)
        return folder

    def _files(self, model_name_or_path: str) -> Files:
        place = place_of(model_name_or_path)
        return choose(place.listing, place.name, place.tag, self.file_pattern)

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is a GGUF file, or a folder with one, or with several."""
        try:
            place = place_of(path)
        except SourceError as error:
            # llama.cpp's own way to name a repository's file: told here what to do with it.
            named = names_quantisation(path.rpartition(":")[2])
            return wl.Probe.maybe("a quantisation is named") if named else wl.Probe.no(error.message)
        return cls._probe(place.listing, place.name, place.tag)

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> wl.Probe:
        """The same of files wherever they lie."""
        return cls._probe(listing, name, "")

    @classmethod
    def _probe(cls, listing: Listing, name: str, tag: str) -> wl.Probe:
        from weightloaders_gguf.header import MAGIC

        if name:
            try:
                source = listing.open(name)
                if source.read(0, min(source.size, len(MAGIC))) == MAGIC:
                    return wl.Probe.yes("a GGUF file")
            except SourceError as error:
                return wl.Probe.no(error.message)
            # The reader can say what it is instead, an LFS pointer for one.
            return (
                wl.Probe.maybe("GGUF by its name alone") if name.lower().endswith(".gguf") else wl.Probe.no("no GGUF")
            )
        try:
            choose(listing, tag=tag)
        except IncompleteCheckpointError:
            return wl.Probe.yes("a folder with parts of a GGUF file")
        except AmbiguousSourceError:
            return wl.Probe.yes("a folder with several GGUF files")
        except SourceError as error:
            # Who names a quantisation means this format, and is told here which there are.
            if tag and names_in(listing, within=True):
                return wl.Probe.yes("a folder with GGUF files")
            return wl.Probe.no(error.message)
        return wl.Probe.yes("a folder with a GGUF file")
