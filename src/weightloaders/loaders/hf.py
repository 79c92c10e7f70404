"""The loader ``hf``: Hugging Face folders and repositories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from weightloaders.errors import OptionsError
from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.loaders.headers_only import only_headers_are_wanted
from weightloaders.loaders.hub import HubAccess, repository_at
from weightloaders.loaders.place import locate, looks_like_repository
from weightloaders.loaders.torch import not_of_torch
from weightloaders.weights.candidates import Wanted
from weightloaders.weights.file_names import part_number, reader_of, said_beside
from weightloaders.weights.files import Selection, choose_files, first_file, holds_weights, listed, select_listed
from weightloaders.weights.folder import A_FOLDER, FolderListing, kind_of, path_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.loaders.hub_files import HubFiles
    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.weights import Weights

_WITHOUT = "a folder without safetensors or .bin files"


class HuggingFaceLoader(BaseWeightLoader):
    """A folder in Hugging Face's layout, or a repository on the hub: safetensors, else PyTorch's ``.bin``.

    ``hf://org/name`` means the repository and ``./name`` the folder; a bare ``org/name`` that is also a folder with
    weights means the folder. Only the files that make up the checkpoint are downloaded.

    Args:
        revision: Branch, tag or commit of the repository. Default: ``main``.
        cache_dir: The cache for downloads. Default: huggingface_hub's own.
        token: A token for private and gated repositories; True for the saved one, False for none. Default: the saved
            one, if any.
        subfolder: A folder within the folder or repository.
        variant: A precision variant: ``"fp16"`` reads ``model.fp16.safetensors``.
        local_files_only: Look only into the cache. So do ``HF_HUB_OFFLINE`` and ``TRANSFORMERS_OFFLINE``.
        file_pattern: A glob for the names of the files to read.
        ignore_index: Read all files that match, whatever an index says.
        include_unindexed: Read also the files and tensors that the index omits.
        key: Dotted path to the state dict within each ``.bin``, where several could be meant.
        safe_globals: Classes and functions that a ``.bin`` may use because you trust them; also by name, as
            ``"package.module:name"``.
    """

    description: ClassVar[str] = "Hugging Face folders and repositories on the hub"

    def __init__(
        self,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        subfolder: str | None = None,
        variant: str | None = None,
        local_files_only: bool = False,
        file_pattern: str | None = None,
        ignore_index: bool = False,
        include_unindexed: bool = False,
        key: str | None = None,
        safe_globals: Sequence[Any] = (),
    ) -> None:
        self.access = HubAccess(revision, cache_dir, token, local_files_only)
        self.subfolder = _checked_subfolder(subfolder)
        self.wanted = Wanted(
            file_pattern=file_pattern,
            variant=variant,
            ignore_index=ignore_index,
            include_unindexed=include_unindexed,
        )
        self.key = key
        self.safe_globals = tuple(safe_globals)

    def get_weights(self, model_name_or_path: str) -> Weights:
        """Catalogue a folder's or repository's checkpoint; of one on the hub, download the files first.

        Where only headers are wanted (`weightloaders.open_weights`), they are read on the hub instead.

        Args:
            model_name_or_path: A folder, or the id of a repository.

        Raises:
            SourceNotFoundError: If there is no such folder or repository, or it holds no weights.
            IncompleteCheckpointError: If a file or tensor that the index names is absent.
            SourceReadError: If the hub can't be reached or does not let us in, and the cache can't stand in.
            SourceError: If a file is not what it should be; see `weightloaders.errors`.
        """
        from weightloaders.weights.catalogue import catalogue

        place = locate(model_name_or_path, self._is_there)
        notes = [place.note] if place.note else []
        if place.path is not None:
            selection = self._on_disk(place.path)
            if self.access.revision is not None:
                notes.append(f"revision {self.access.revision!r} was ignored: {place.path} is no repository on the hub")
        else:
            selection, note = repository_at(place, self.access).obtain(self._on_hub, self._on_disk, suffices=_is_whole)
            notes.append(note)
        selection = replace(selection, notes=(*notes, *selection.notes))
        return catalogue(selection, key=self.key, safe_globals=self.safe_globals)

    def get_listed_weights(self, listing: Listing, name: str = "") -> Weights:
        """The same of files wherever they lie. What leads to the hub, and `subfolder`, is of no account then."""
        from weightloaders.weights.catalogue import catalogue

        selection = select_listed(listing, name, self.wanted)
        return catalogue(selection, key=self.key, safe_globals=self.safe_globals)

    def _is_there(self, folder: Path) -> bool:
        return holds_weights(FolderListing(folder / self.subfolder), self.wanted)

    def _on_disk(self, path: Path) -> Selection:
        return select_listed(*listed(path / self.subfolder), self.wanted)

    def _on_hub(self, files: HubFiles) -> Selection:
        files = files.within(self.subfolder)
        # Chosen from the repository's listing, so that nothing else is downloaded.
        selection = choose_files(files, self.wanted)
        needed = [*selection.files, *said_beside(selection.files, files.names)]
        if only_headers_are_wanted():
            files.look_at(needed)
            return selection
        return replace(selection, listing=FolderListing(files.download(needed)))

    @classmethod
    def probe(cls, path: str) -> Probe:
        """Whether it is a folder with weights, or may be a repository; the hub is not asked."""
        if path.startswith("hf://"):
            return Probe.yes("an address on the hub")
        place = path_of(path)
        kind = kind_of(place)
        if kind is None:
            return Probe.no("a single file")
        if kind == A_FOLDER and holds_weights(FolderListing(place), Wanted()):
            return cls.probe_listing(FolderListing(place))
        if kind == A_FOLDER:
            foreign = next((name for name in sorted(FolderListing(place).names) if reader_of(name)), None)
            if foreign is not None:
                return Probe.no(f"a folder with {foreign}, which the loader {reader_of(foreign)!r} reads")
        if looks_like_repository(path):
            return Probe.maybe("it may be a repository on the hub")
        return Probe.no(_WITHOUT if kind == A_FOLDER else f"it {kind}")

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> Probe:
        """Whether it is a folder with weights, wherever it lies."""
        if name:
            return Probe.no("a single file")
        if not holds_weights(listing, Wanted()):
            return Probe.no(_WITHOUT)
        if len([other for other in listing.names if part_number(other) is not None]) > 1:
            first = first_file(listing, Wanted())
            if first is not None and part_number(first[0]) is not None:
                return Probe.maybe("tensor-parallel parts, which the loader 'torch' puts together")
        stranger = not_of_torch(listing, Wanted())
        return Probe.maybe(stranger) if stranger else Probe.yes("a folder with weights in Hugging Face's layout")


def _is_whole(selection: Selection) -> bool:
    """Whether the files say of themselves that they are all there are."""
    return selection.index is not None or len(selection.files) == 1


def _checked_subfolder(subfolder: str | None) -> str:
    path = PurePosixPath((subfolder or "").replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or Path(subfolder or "").is_absolute():
        raise OptionsError(f"subfolder={subfolder!r} leads out of the repository", hint="name a folder inside it")
    return "" if path == PurePosixPath() else str(path)
