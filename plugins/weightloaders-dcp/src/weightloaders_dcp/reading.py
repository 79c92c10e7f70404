"""From a folder of DCP's to the model's tensors, each made of its ranks' chunks."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from weightloaders import Extent, FolderListing, TensorInfo, Weights
from weightloaders.errors import CheckpointFormatError, IncompleteCheckpointError
from weightloaders.weights.boxes import Box, check_cover
from weightloaders.weights.collector import collector_paused
from weightloaders.weights.reading import read_tensor
from weightloaders_dcp.choosing import choose
from weightloaders_dcp.items import Items, check
from weightloaders_dcp.metadata import read_metadata
from weightloaders_dcp.names import METADATA

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from weightloaders import Listing
    from weightloaders_dcp.metadata import Chunk, StoredTensor

_SHOWN, _LONGEST = 6, 200


@collector_paused()
def read_checkpoint(listing: Listing, key: str | None) -> Weights:
    """Describe the model's tensors in a folder of DCP's.

    Args:
        listing: What lies in the folder.
        key: The keys that lead to the model's state dict; None to look for them.

    Raises:
        SourceError: As `weightloaders_dcp.DcpLoader.get_weights`.
        OptionsError: If ``key`` leads nowhere.
    """
    metadata = read_metadata(listing)
    chosen = choose(metadata.tensors, key, f"{listing.where}/{METADATA}")
    for name, tensor in chosen.tensors.items():
        _check_whole(name, tensor, listing.where)
    files = dict.fromkeys(chunk.file for tensor in chosen.tensors.values() for chunk in tensor.chunks)
    _check_files(listing, files)
    chunks = [(tensor.name, chunk) for tensor in chosen.tensors.values() for chunk in tensor.chunks]
    items = iter(Items({file: listing.open(file) for file in files}).find(chunks))
    infos = []
    for name, tensor in chosen.tensors.items():
        pieces = [(chunk, next(items)) for chunk in tensor.chunks]
        for chunk, info in pieces:
            check(info, chunk, tensor.dtype, f"{listing.where}/{chunk.file}")
        infos.append(whole(name, tensor.dtype, tensor.shape, pieces))
    notes = _notes(chosen.key, key, chosen.left_out, metadata.others)
    return Weights.describe(infos, notes=notes, described_by=metadata.said_by)


def whole(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[tuple[Chunk, TensorInfo]]
) -> TensorInfo:
    """A tensor of its chunks, each given with where it begins.

    Raises:
        CheckpointFormatError: If they overlap, or don't fill it.
    """
    if all(info.is_raw for _, info in pieces):
        extents = [
            Extent(e.source, e.offset, e.length, e.dtype, e.byteorder, e.shape, e.strides, at=chunk.at)
            for chunk, info in pieces
            for e in info.extents
        ]
        return TensorInfo(name, dtype, shape, extents)
    origins = {origin: None for _, info in pieces for origin in info.origins}
    check_cover(name, shape, [Box(chunk.at, chunk.shape, info.origins[0].name) for chunk, info in pieces])
    return TensorInfo(name, dtype, shape, read=partial(_read_whole, dtype, shape, pieces), sources=origins)


def _read_whole(dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[tuple[Chunk, TensorInfo]]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    for chunk, info in pieces:
        box = tensor
        for dim, (begin, size) in enumerate(zip(chunk.at, chunk.shape, strict=True)):
            box = box.narrow(dim, begin, size)
        box.copy_(read_tensor(info))
    return tensor


def _check_whole(name: str, tensor: StoredTensor, where: str) -> None:
    filled, needed = sum(math.prod(chunk.shape) for chunk in tensor.chunks), math.prod(tensor.shape)
    if filled < needed:
        raise CheckpointFormatError(
            f"the chunks of tensor {name!r} that {METADATA} names fill {filled:,} of its {needed:,} elements",
            file=f"{where}/{METADATA}",
            tensor=name,
            hint="not all ranks took part in the save; save again",
        )
    if tensor.transformed:
        raise CheckpointFormatError(
            f"tensor {name!r} was transformed when it was written ({_listed(tensor.transformed)})",
            file=f"{where}/{METADATA}",
            tensor=name,
            hint="load it with torch.distributed.checkpoint and the same extensions, and save it without them",
        )


def _check_files(listing: Listing, files: Collection[str]) -> None:
    if isinstance(listing, FolderListing):
        listing.check_links(files)
    problems = listing.problems(list(files))
    if not problems:
        return
    named = [f"{file} {problem}" for file, problem in list(problems.items())[:_SHOWN]]
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise IncompleteCheckpointError(
        f"not all files that {METADATA} in {listing.where} names can be read: {', '.join(named)}{more}",
        file=f"{listing.where}/{next(iter(problems))}",
        hint="each rank wrote its own files: fetch those of all ranks into one folder",
    )


def _notes(found: str, asked: str | None, left_out: Sequence[str], others: Sequence[str]) -> Iterable[str]:
    if found and asked is None:
        yield f"{METADATA}: the weights are its {found!r}"
    if left_out:
        yield f"{METADATA}: left out beside the weights: {_listed(left_out)}"
    if others:
        yield f"{METADATA}: no tensors, and so left out: {_listed(others)}"


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(item[:_LONGEST] for item in items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
