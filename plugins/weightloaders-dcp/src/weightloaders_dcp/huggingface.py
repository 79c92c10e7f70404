"""Ranks' parts in safetensors' format: what `HuggingFaceStorageWriter` writes with ``save_distributed=True``.

The files are called ``shard-00001-model-00001-of-00002.safetensors``, by rank and by file, and each says in its
metadata where its slices begin; see ``torch/distributed/checkpoint/_hf_utils.py``. There is no list of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from weightloaders import FolderListing, Weights
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
)
from weightloaders.weights.reading import same_values
from weightloaders.weights.safetensors import read_safetensors
from weightloaders.weights.threads import in_parallel
from weightloaders_dcp.metadata import Chunk
from weightloaders_dcp.names import SHARD
from weightloaders_dcp.reading import whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightloaders import Listing, TensorInfo

_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def read_shards(listing: Listing) -> Weights:
    """Describe the tensors of a folder of such files.

    Raises:
        IncompleteCheckpointError: If a rank's file is missing, as far as the numbers tell.
        AmbiguousSourceError: If two files are called by the same numbers.
        DuplicateTensorError: If a slice that several ranks stored is not the same in all of them.
        CheckpointFormatError: If slices are missing or overlap, or a file is damaged.
    """
    _check_names(listing)
    numbers = {name: int(match[1]) for name in sorted(listing.names) if (match := SHARD.fullmatch(name))}
    lacking = next((rank for rank in range(1, max(numbers.values())) if rank not in numbers.values()), None)
    if lacking is not None:
        raise IncompleteCheckpointError(
            f"{listing.where} has ranks' files up to shard-{max(numbers.values()):05}, but none of shard-{lacking:05}",
            file=listing.where,
            hint="fetch what is missing",
        )
    if isinstance(listing, FolderListing):
        listing.check_links(numbers)
    files = in_parallel(lambda name: read_safetensors(listing.open(name)), [*numbers])
    pieces: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Chunk, TensorInfo]]] = {}
    for name, file in zip(numbers, files, strict=True):
        begins = _begins(file.metadata.get(_INFO), f"{listing.where}/{name}")
        for info in file.infos:
            at = begins.get(info.name) or (0,) * len(info.shape)
            if len(at) != len(info.shape):
                raise _malformed(f"{listing.where}/{name}", info.name)
            # Of slices that several ranks hold the same, one.
            if 0 not in info.shape or not info.shape:
                piece = (Chunk(at, info.shape, name, 0, 0), info)
                _, first = pieces.setdefault(info.name, {}).setdefault((at, info.shape), piece)
                if not same_values(first, info):
                    raise DuplicateTensorError(
                        f"the slice of tensor {info.name!r} from {list(at)} on is not the same in "
                        f"{first.extents[0].source.name} and {name}",
                        file=f"{listing.where}/{name}",
                        tensor=info.name,
                        hint=f"the files belong to different checkpoints, or lack {_INFO}: save again",
                    )
            else:
                pieces.setdefault(info.name, {})
    empty = {info.name: info for file in files for info in file.infos}
    infos = [_tensor(name, list(boxes.values()), empty[name]) for name, boxes in pieces.items()]
    return Weights.describe(infos, notes=[f"{len(numbers)} files of {len(set(numbers.values()))} ranks, put together"])


def _check_names(listing: Listing) -> None:
    """Each file must be there once. A rank that has no part of a file's tensors does not write it, another does."""
    matches = [match for name in sorted(listing.names) if (match := SHARD.fullmatch(name))]
    by_numbers: dict[tuple[int, int], str] = {}
    for match in matches:
        twin = by_numbers.setdefault((int(match[1]), int(match[2])), match[0])
        if twin != match[0]:
            raise AmbiguousSourceError(
                f"{listing.where} has {twin} and {match[0]}, which have the same numbers",
                file=f"{listing.where}/{match[0]}",
                hint="remove what belongs to another checkpoint",
            )
    count, there = max(int(match[3]) for match in matches), {number for _, number in by_numbers}
    lacking = next((number for number in range(1, count + 1) if number not in there), None)
    if lacking is not None:
        raise IncompleteCheckpointError(
            f"{listing.where} has no rank's model-{lacking:05}-of-{count:05}",
            file=listing.where,
            hint="fetch what is missing",
        )


def _tensor(name: str, pieces: list[tuple[Chunk, TensorInfo]], empty: TensorInfo) -> TensorInfo:
    if not pieces:
        return empty
    dims = len(pieces[0][0].shape)
    for chunk, info in pieces:
        if len(chunk.shape) != dims or info.dtype != pieces[0][1].dtype:
            raise CheckpointFormatError(
                f"the slices of tensor {name!r} don't fit each other: {list(chunk.shape)} {info.dtype} in {chunk.file}",
                file=info.extents[0].source.name,
                tensor=name,
            )
    # Nothing says how large the whole is, but where the last slice ends.
    shape = tuple(max(chunk.at[dim] + chunk.shape[dim] for chunk, _ in pieces) for dim in range(dims))
    return whole(name, pieces[0][1].dtype, shape, pieces)


def _begins(text: str | None, file: str) -> Mapping[str, tuple[int, ...]]:
    """Where each slice of a file begins within its tensor."""
    if text is None:
        return {}
    try:
        value: Any = json.loads(text)
        begins = {name: tuple(entry[_OFFSETS]) for name, entry in value.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _malformed(file) from error
    for name, at in begins.items():
        if not all(type(begin) is int and 0 <= begin < 1 << 62 for begin in at):
            raise _malformed(file, name)
    return begins


def _malformed(file: str, tensor: str | None = None) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{file} does not say in a way that is known where its slices begin ({_INFO})", file=file, tensor=tensor
    )
