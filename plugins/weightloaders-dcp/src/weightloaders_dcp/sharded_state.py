"""`ShardedStateLoader`: vLLM's sharded states, one set of safetensors files a tensor-parallel rank.

``model-rank-0-part-0.safetensors`` and so on; see ``vllm/model_executor/model_loader/sharded_state_loader.py``. The
tensors have the names and the layout of vLLM's own models, cut for a rank, and nothing says how they were cut.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import weightloaders as wl
from weightloaders.errors import (
    AmbiguousSourceError,
    IncompleteCheckpointError,
    OptionsError,
    SourceError,
    SourceNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightloaders import Listing, TensorInfo

_NAME = re.compile(r"model-rank-(\d{1,6})-part-(\d{1,6})\.safetensors")


class ShardedStateLoader(wl.BaseWeightLoader):
    """Reads what vLLM's ``save_sharded_state`` wrote: one rank's state, or all put together.

    Args:
        rank: Read this rank's tensors as they are.
        axes: Put all ranks' tensors together: name pattern -> the dimension that was split, ``{"axis": 0, "sections":
            [4, 1, 1]}`` for a fused tensor (a rank's rows of query, key and value, as proportions), ``"same"`` where
            every rank holds the whole, or ``"first"`` to take that of rank 0.
        world_size: How many ranks there were, to notice that the last are missing.

    Raises:
        OptionsError: If both ``rank`` and ``axes`` are given, or can't be understood.
    """

    description: ClassVar[str] = "vLLM's sharded states, one rank's or all put together"

    def __init__(
        self, rank: int | None = None, axes: Mapping[str, Any] | None = None, world_size: int | None = None
    ) -> None:
        from weightloaders.loaders.axes import Axes

        if rank is not None and axes is not None:
            raise OptionsError(
                "rank and axes exclude each other", hint="rank=... reads one rank's tensors, axes=... puts all together"
            )
        if world_size is not None and world_size < 1:
            raise OptionsError(f"world_size is 1 or more, not {world_size}")
        if rank is not None and not 0 <= rank < (world_size or rank + 1):
            raise OptionsError(f"there is no rank {rank}" + (f" among {world_size}" if world_size else ""))
        Axes(axes)
        self.rank, self.axes, self.world_size = rank, axes, world_size

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Describe the tensors; nothing but headers is read, and what is declared to be the same, to compare it.

        Args:
            model_name_or_path: The folder.

        Raises:
            SourceNotFoundError: If there is no such folder, or no sharded state in it.
            IncompleteCheckpointError: If a rank's or a part's file is missing.
            AmbiguousSourceError: If there are several ranks, and neither option says what is wanted; or ``axes`` says
                nothing of a tensor.
            DuplicateTensorError: If a tensor is in two parts, or differs between ranks where it should be the same.
            CheckpointFormatError: If slices don't fit each other, or a file is damaged.
        """
        from weightloaders.weights.files import listed
        from weightloaders.weights.folder import path_of

        path = path_of(model_name_or_path)
        listing, name = listed(path)
        if name:
            raise SourceNotFoundError(f"{path} is no folder", file=path, hint="give the folder that vLLM wrote")
        return self.get_listed_weights(listing)

    def get_listed_weights(self, listing: Listing, name: str = "") -> wl.Weights:  # noqa: ARG002 -- any file means its folder
        """The same of files wherever they lie."""
        from weightloaders.loaders.axes import Axes
        from weightloaders.weights.tensor_parallel import put_together

        ranks = _ranks(listing, self.world_size, self.rank)
        if self.rank is not None or len(ranks) == 1:
            rank = 0 if self.rank is None else self.rank
            if rank not in ranks:
                raise SourceNotFoundError(
                    f"{listing.where} has no file of rank {rank}",
                    file=listing.where,
                    hint="fetch it, or give the number of a rank that is there",
                )
            notes = [f"the state of rank {rank} alone"]
            if self.axes is not None:
                notes.append("axes: not used, for there is one rank, which has the whole of each tensor")
            return wl.Weights.describe(_tensors(listing, ranks[rank]), notes=notes)
        if self.axes is None:
            raise AmbiguousSourceError(
                f"{listing.where} holds the states of {len(ranks)} tensor-parallel ranks",
                file=listing.where,
                hint="rank=0 reads the state of one; axes={'**.o_proj.weight': 1, ...} puts all together",
            )
        axes = Axes(self.axes)
        parts = {files[0]: _tensors(listing, files) for files in ranks.values()}
        infos = put_together(parts, axes.way_of)
        return wl.Weights.describe(infos, notes=[f"the states of {len(ranks)} ranks, put together", *axes.notes()])

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is a folder with such files."""
        from weightloaders.weights.files import listed
        from weightloaders.weights.folder import path_of

        try:
            listing, name = listed(path_of(path))
        except SourceError as error:
            return wl.Probe.no(error.message)
        return wl.Probe.no("no folder") if name else cls.probe_listing(listing)

    @classmethod
    def probe_listing(cls, listing: Listing, name: str = "") -> wl.Probe:
        """The same of files wherever they lie."""
        if not name and any(map(_NAME.fullmatch, listing.names)):
            return wl.Probe.yes("a folder with ranks' states")
        return wl.Probe.no("no model-rank-*-part-*.safetensors")


def _ranks(listing: Listing, world_size: int | None, only: int | None) -> dict[int, list[str]]:
    """Each rank's files in their order, none of them missing as far as the numbers tell; or those of one rank."""
    found: dict[int, dict[int, str]] = {}
    for name in sorted({*listing.names, *listing.odd}):
        match = _NAME.fullmatch(name)
        if match is not None:
            twin = found.setdefault(int(match[1]), {}).setdefault(int(match[2]), name)
            if twin != name:
                raise AmbiguousSourceError(
                    f"{listing.where} has {twin} and {name}, which have the same numbers",
                    file=f"{listing.where}/{name}",
                    hint="remove what belongs to another checkpoint",
                )
    if not found:
        raise SourceNotFoundError(
            f"{listing.where} holds no model-rank-*-part-*.safetensors",
            file=listing.where,
            hint="give the folder that vLLM's save_sharded_state wrote",
        )
    count = max(found) + 1 if world_size is None else world_size
    if len(found) > count or max(found) >= count:
        raise OptionsError(f"world_size={count}, but {listing.where} has files of rank {max(found)}")
    wanted = range(count) if only is None else [only] if only in found else []
    for rank in wanted:
        parts = found.get(rank, {})
        lacking = next((part for part in range(max(parts, default=0) + 1) if part not in parts), None)
        if lacking is not None:
            raise IncompleteCheckpointError(
                f"model-rank-{rank}-part-{lacking}.safetensors is missing in {listing.where}, which has files of rank "
                f"{max(found)}",
                file=f"{listing.where}/model-rank-{rank}-part-{lacking}.safetensors",
                hint="fetch what is missing",
            )
    files = [name for rank in wanted for name in found[rank].values()]
    problems = listing.problems(files)
    if problems:
        name, problem = next(iter(problems.items()))
        raise IncompleteCheckpointError(
            f"{name} in {listing.where} {problem}", file=f"{listing.where}/{name}", hint="fetch what is missing"
        )
    return {rank: [found[rank][part] for part in sorted(found[rank])] for rank in wanted}


def _tensors(listing: Listing, files: list[str]) -> list[TensorInfo]:
    """The tensors of a rank's files."""
    from weightloaders.weights.safetensors import read_safetensors

    if isinstance(listing, wl.FolderListing):
        listing.check_links(files)
    infos = [info for file in files for info in read_safetensors(listing.open(file)).infos]
    # `Weights` refuses a name that occurs twice, and says where.
    wl.Weights.describe(infos)
    return infos
