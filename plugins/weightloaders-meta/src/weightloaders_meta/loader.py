"""`MetaLoader`: a folder as Meta publishes it: ``consolidated.*.pth`` beside ``params.json``."""

from __future__ import annotations

import fnmatch
import threading
from typing import TYPE_CHECKING, Any, ClassVar

# Its names are resolved on first use.
import weightloaders as wl
from weightloaders.errors import OptionsError, SourceError, SourceNotFoundError
from weightloaders.weights.file_names import PARAMS_FILE

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from pathlib import Path

    from weightloaders import Listing

# In the order of preference: the loader that reads it, and which files.
_A_FOLDER = "name the folder with params.json and the weights"
_KINDS = {"local": "consolidated*.safetensors", "torch": "consolidated*.pth"}


class MetaLoader(wl.BaseWeightLoader):
    """A folder as Meta publishes it, with ``params.json``: one ``consolidated.00.pth``, or the parts of several ranks.

    Names stay Meta's own; the rules that this package has for Llamas make them transformers'. How the parts are put
    together is proved from the sizes in ``params.json``. ``LLM(model=folder, weight_loader="meta")`` builds the model's
    config from it, too.

    Args:
        file_pattern: A glob for the names of the files to read. Default: ``consolidated*.safetensors``, else
            ``consolidated*.pth``.
        axes: How parts are put together that aren't Llama's; as for the loader ``torch``.
        max_position_embeddings: How many positions the model has, for the config. Default: what its version has, going
            by ``params.json``.

    Raises:
        OptionsError: If the number is not positive.
    """

    description: ClassVar[str] = "Meta's consolidated.*.pth with params.json"

    def __init__(
        self,
        file_pattern: str | None = None,
        axes: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
    ) -> None:
        if max_position_embeddings is not None and not 0 < max_position_embeddings < 1 << 31:
            raise OptionsError(f"max_position_embeddings is a positive number, not {max_position_embeddings}")
        self.file_pattern = file_pattern
        self.axes = axes
        self.max_position_embeddings = max_position_embeddings
        self._folders: dict[Hashable, Path] = {}
        self._lock = threading.Lock()

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Catalogue the files of a folder; no tensor is read.

        Raises:
            SourceNotFoundError: If there is no such folder, no ``params.json`` in it, or no weights.
            IncompleteCheckpointError: If a part is missing.
            SourceError: If a file is not what it should be.
        """
        return self.get_listed_weights(_folder(model_name_or_path))

    def get_listed_weights(self, listing: Listing, name: str = "") -> wl.Weights:
        """The same of a folder wherever it lies."""
        loader, pattern = _kind_of(listing, name, self.file_pattern)
        options = {"axes": self.axes} if loader == "torch" else {}
        reader = wl.WeightLoaderRegistry.create(loader, file_pattern=pattern, **options)
        weights: wl.Weights = reader.get_listed_weights(listing)
        params = listing.open(PARAMS_FILE)
        if params.name not in {source.name for source in weights.described_by}:
            weights.described_by += (params,)
        return weights

    def get_model_files(self, model_name_or_path: str, needed: str = "") -> Path:
        """A folder with a config made of ``params.json``, and the tokenizer, if it is one that transformers reads.

        Raises:
            SourceError: See `get_weights`.
            ModelError: If ``params.json`` is not that of a Llama, or does not go with the weights.
        """
        folder = _folder(model_name_or_path)
        return self.get_listed_model_files(folder, needed=needed) or folder.folder

    def get_listed_model_files(self, listing: Listing, name: str = "", needed: str = "") -> Path | None:  # noqa: ARG002 -- both are there
        """The same of a folder wherever it lies; None if it has a config of its own."""
        from weightloaders.weights.folder import temporary_folder
        from weightloaders_meta.model_files import write_model_files

        if not listing.problems(["config.json"]):
            return None
        _check_params(listing, name)
        params = listing.open(PARAMS_FILE)
        place = params.name, params.identity
        with self._lock:
            made = self._folders.get(place)
            if made is None:
                with (
                    self.get_listed_weights(listing, name) as weights,
                    temporary_folder(f"the config that is made of {PARAMS_FILE}", params.name) as made,
                ):
                    write_model_files(listing, weights, made, self.max_position_embeddings)
                self._folders[place] = made
        return made

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is a folder with ``params.json`` and consolidated weights."""
        try:
            return cls.probe_listing(_folder(path))
        except (SourceError, ValueError) as error:  # a ValueError: a name that no folder can have
            return wl.Probe.no(str(error).partition("\n")[0])

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> wl.Probe:
        """The same of a folder wherever it lies."""
        try:
            _, pattern = _kind_of(listing, name, None)
        except SourceError as error:
            return wl.Probe.no(error.message)
        return wl.Probe.yes(f"a folder with {PARAMS_FILE} and {pattern}")


def _folder(name: str) -> wl.FolderListing:
    from weightloaders.weights.files import listed
    from weightloaders.weights.folder import path_of

    listing, file = listed(path_of(name))
    if file:
        where = f"{listing.where}/{file}"
        raise SourceNotFoundError(f"{where} is no folder", file=where, hint=_A_FOLDER)
    return listing


def _check_params(listing: Listing, name: str) -> None:
    if name:
        raise SourceNotFoundError(
            f"{listing.where}/{name} is no folder", file=f"{listing.where}/{name}", hint=_A_FOLDER
        )
    if listing.problems([PARAMS_FILE]):
        raise SourceNotFoundError(
            f"there is no {PARAMS_FILE} in {listing.where}",
            file=listing.where,
            hint="without it, the loaders 'torch' and 'local' read the files; axes say how parts are put together",
        )


def _kind_of(listing: Listing, name: str, pattern: str | None) -> tuple[str, str]:
    """The loader that reads the weights of a folder, and which files."""
    _check_params(listing, name)
    if pattern is not None:
        return ("local" if pattern.endswith(".safetensors") else "torch"), pattern
    for loader, usual in _KINDS.items():
        if fnmatch.filter(listing.names, usual):
            return loader, usual
    raise SourceNotFoundError(
        f"there is no {' and no '.join(_KINDS.values())} in {listing.where}",
        file=listing.where,
        hint="give file_pattern, if they are called otherwise",
    )
