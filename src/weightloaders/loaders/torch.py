"""The loader ``torch``: PyTorch's own files, .bin, .pt and .pth, read weights-only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from weightloaders.errors import AmbiguousSourceError, OptionsError
from weightloaders.loaders.axes import Axes
from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.weights.candidates import Wanted
from weightloaders.weights.file_names import OTHER_FORMATS, family_of, indexed_name, part_number, suffix_of
from weightloaders.weights.files import first_file, head_of, holds_weights, listed, select_listed
from weightloaders.weights.folder import A_FOLDER, kind_of, path_of

if TYPE_CHECKING:
    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.weights import Weights


class TorchLoader(BaseWeightLoader):
    """Files that `torch.save` wrote, from a folder (one file, or shards with or without an index) or one file.

    They are pickles, and are read weights-only: no code in them runs, and a file that needs to run some is refused.
    The state dict may be wrapped (``state_dict``, ``model``, ``module``, ...). Optimizer and trainer files are never
    opened.

    Args:
        file_pattern: A glob for the names of the files to read, e.g. ``"pytorch_model*.bin"``. Default: ``*.bin``, else
            ``*.pt``, else ``*.pth``.
        key: Dotted path to the state dict within each file, where several could be meant; ``""`` for the whole file.
        safe_globals: Classes and functions that a pickle may use because you trust them; also by name, as
            ``"package.module:name"``.
        ignore_index: Read all files that match, whatever an index says.
        include_unindexed: Read also the files and tensors that the index omits.
        axes: For tensor-parallel parts (``consolidated.00.pth``, ``consolidated.01.pth``, ...): name pattern -> the
            dimension that was split, ``{"axis": ..., "sections": [...]}`` for a fused tensor, ``"same"`` where every
            part holds the whole, or ``"first"`` to take that of the first part. Meta's Llamas need none where their
            ``params.json`` lies beside them. The files that ``file_pattern`` picks count as parts then, whatever they
            are called.

    Raises:
        OptionsError: If ``safe_globals`` is no list, or ``axes`` can't be understood.
    """

    description: ClassVar[str] = "PyTorch's .bin, .pt and .pth, weights-only"

    def __init__(
        self,
        file_pattern: str | None = None,
        key: str | None = None,
        safe_globals: Collection[Any] = (),
        ignore_index: bool = False,
        include_unindexed: bool = False,
        axes: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(safe_globals, str) or not isinstance(safe_globals, Collection):
            raise OptionsError(f"safe_globals is a list of classes and functions, not {safe_globals!r}")
        self.file_pattern = file_pattern
        self.key = key
        self.safe_globals = tuple(safe_globals)
        self.ignore_index = ignore_index
        self.include_unindexed = include_unindexed
        self.axes = axes
        Axes(axes)

    def get_weights(self, model_name_or_path: str) -> Weights:
        """Catalogue the PyTorch files of a folder.

        Args:
            model_name_or_path: A folder, a file, or an index.

        Raises:
            SourceNotFoundError: If there is no such path, or no weights in it.
            IncompleteCheckpointError: If a file or tensor that the index names is absent.
            UnsafeCheckpointError: If a pickle needs more than weights.
            AmbiguousSourceError: If a file holds several state dicts, and `key` does not say which; or if which files
                are tensor-parallel parts, or how these are put together, is not clear.
            SourceError: If a file is not what it should be; see `weightloaders.errors`.
        """
        return self.get_listed_weights(*listed(path_of(model_name_or_path)))

    def get_listed_weights(self, listing: Listing, name: str = "") -> Weights:
        """The same of files wherever they lie."""
        from weightloaders.weights.catalogue import catalogue

        wanted = Wanted(
            families=("torch",),
            file_pattern=self.file_pattern,
            ignore_index=self.ignore_index,
            include_unindexed=self.include_unindexed,
        )
        axes = Axes(self.axes)
        selection = select_listed(listing, name, wanted)
        if axes and selection.index is not None:
            raise OptionsError(
                f"axes is for tensor-parallel parts, but {selection.index.name} says which file each tensor is in",
                hint="leave it out, or pass ignore_index=True",
            )
        passed_over = [file for file in selection.skipped if part_number(file) is not None and wanted.may_be(file)]
        if axes and passed_over and part_number(selection.files[0]) is None:
            raise AmbiguousSourceError(
                f"axes is for tensor-parallel parts, but {selection.files[0]} would be read, not {passed_over[0]}",
                file=listing.where,
                hint="choose by file_pattern, e.g. file_pattern='consolidated.*'",
            )
        way_of = axes.way_of if axes else None
        weights = catalogue(selection, key=self.key, safe_globals=self.safe_globals, way_of=way_of)
        if len(selection.files) > 1:
            weights.notes += tuple(axes.notes())
        return weights

    @classmethod
    def probe(cls, path: str) -> Probe:
        """Whether it is a folder with PyTorch files, or such a file."""
        place = path_of(path)
        kind = kind_of(place)
        return cls.probe_listing(*listed(place)) if kind in (None, A_FOLDER) else Probe.no(f"it {kind}")

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> Probe:
        """The same of files wherever they lie."""
        if not name:
            wanted = Wanted(families=("torch",))
            if not holds_weights(listing, wanted):
                return Probe.no("a folder without PyTorch files")
            stranger = not_of_torch(listing, wanted)
            return Probe.maybe(stranger) if stranger else Probe.yes("a folder with PyTorch files")
        index_of = indexed_name(name)
        if index_of is not None:
            return (
                Probe.yes("an index of PyTorch files")
                if family_of(index_of) == "torch"
                else Probe.no("another's index")
            )
        if suffix_of(name) in OTHER_FORMATS:
            # Some of these are zip files, too.
            return Probe.no(f"its format is {OTHER_FORMATS[suffix_of(name)]}")
        named_so = family_of(name) == "torch"
        if _begins_as_torch_does(listing, name):
            return Probe.yes("a file of torch.save") if named_so else Probe.maybe("a zip file, as torch.save writes")
        # Its reader can say what it is instead, an LFS pointer for one.
        return Probe.maybe("a PyTorch file by its name alone") if named_so else Probe.no("not a file of torch.save")


def not_of_torch(listing: Listing, wanted: Wanted) -> str | None:
    """Why the files that a folder's names promise are none of `torch.save`'s; None if they are, or another format's.

    Formats of all kinds are called ``.bin``, so the beginning of the first of them is looked at.
    """
    first = first_file(listing, wanted)
    if first is None or first[1] != "torch" or _begins_as_torch_does(listing, first[0]):
        return None
    return f"{first[0]} is a PyTorch file by its name alone"


def _begins_as_torch_does(listing: Listing, name: str) -> bool:
    from weightloaders.weights.torch_zip import is_torch_file

    return is_torch_file(head_of(listing, name, 64))
