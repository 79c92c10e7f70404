"""Putting a tensor together from pieces of others, in memory or in files; one tensor at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

from weightloaders.errors import SaveError
from weightloaders.mapping.composing import TooManyPlacements, compose
from weightloaders.mapping.placement import Placement, placement
from weightloaders.plan import CopyStep
from weightloaders.targets import Target
from weightloaders.transfer.engine import Transfer
from weightloaders.transfer.jobs import strided
from weightloaders.transfer.memory import is_plain
from weightloaders.weights.info import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.saving.inverting import Written
    from weightloaders.weights.info import TensorInfo


class Fetch(Protocol):
    """Copies pieces of tensors, by their names, into a flat tensor."""

    def __call__(self, pieces: Sequence[tuple[str, Placement]], size: int, dtype: torch.dtype) -> torch.Tensor:
        """The flat tensor, of ``size`` elements; the pieces fill it."""


def gathered(written: Written, fetch: Fetch) -> torch.Tensor:
    """A tensor, put together.

    Args:
        written: What it is made of.
        fetch: `in_memory` or `in_files`.

    Raises:
        SaveError: If its elements lie at several places, with different values; or its dtype has no room for them.
    """
    flat = fetch(written.pieces, written.numel, written.values)
    for name, way in written.doubles:
        _check_equal(written, name, way, flat, fetch)
    return cast(written.name, flat.reshape(written.shape), written.dtype)


def _check_equal(written: Written, name: str, way: Placement, flat: torch.Tensor, fetch: Fetch) -> None:
    counts = [count for count, _, _ in way.dims]
    rows = contiguous_strides(counts)
    # The places where this tensor's elements lie, one behind the other.
    places = placement(0, way.target_start, 0, [(n, at, row) for (n, _, at), row in zip(way.dims, rows, strict=True)])
    there = fetch([(name, places)], math.prod(counts), written.values)
    if not _same_bits(there, strided(flat.contiguous(), way, 1, 0).reshape(-1).to(there.device)):
        raise SaveError(
            f"{written.name!r} can't be written back: its elements lie at several places in {name!r} and elsewhere, "
            "and are not the same there any more",
            tensor=written.name,
            hint="layout='model' writes them as they are",
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype.

    Raises:
        SaveError: If that makes an infinity of a finite value.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if bool(result.isinf().any()) and not bool(tensor.isinf().any()):
        raise SaveError(
            f"tensor {name!r} has values that {dtype} has no room for: they would become infinite",
            tensor=name,
            hint="bfloat16 has the range of float32",
        )
    return result


# ------------------------------------------------------------------ where the pieces are


def in_memory(tensors: Mapping[str, torch.Tensor]) -> Fetch:
    """From tensors, wherever and however they lie in memory; what is put together is where its pieces are."""

    def fetch(pieces: Sequence[tuple[str, Placement]], size: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            if len(pieces) == 1:
                name, piece = pieces[0]
                tensor = tensors[name].detach()
                if piece.is_contiguous and piece.numel == size == tensor.numel():
                    return _plain(tensor).reshape(-1).to(dtype)
            devices = {tensors[name].device for name, _ in pieces}
            flat = torch.empty(size, dtype=dtype, device=devices.pop() if len(devices) == 1 else "cpu")
            for name, piece in pieces:
                tensor = _plain(tensors[name].detach())
                tensor, parts = _from_storage(tensor, piece)
                for part in parts:
                    strided(flat, part, 2, 0).copy_(strided(tensor, part, 1, 0))
            return flat

    return fetch


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is what it seems to be."""
    if not is_plain(tensor):
        # A class of its own need not have its values in its own memory.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor.resolve_conj().resolve_neg()


def _from_storage(tensor: torch.Tensor, piece: Placement) -> tuple[torch.Tensor, Sequence[Placement]]:
    """A copy out of a tensor as copies out of the flat memory that it is a view of: it need not be copied whole."""
    if tensor.is_contiguous():
        return tensor.view(-1), [piece]
    laid_out = placement(0, 0, 0, zip(tensor.shape, tensor.stride(), contiguous_strides(tensor.shape), strict=True))
    try:
        parts, _ = compose([laid_out], piece)
    except TooManyPlacements:
        return tensor.contiguous().view(-1), [piece]
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)), parts


def in_files(infos: Mapping[str, TensorInfo]) -> Fetch:
    """From tensors of a source; only what is needed of each is read."""

    def fetch(pieces: Sequence[tuple[str, Placement]], size: int, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.empty(size, dtype=dtype)
        names = list(dict.fromkeys(name for name, _ in pieces))
        placements = [piece._replace(source=names.index(name)) for name, piece in pieces]
        target = Target(", ".join(names), flat, "buffer", True, dtype)
        Transfer([CopyStep(target, tuple(infos[name] for name in names), tuple(placements))]).run()
        return flat

    return fetch
