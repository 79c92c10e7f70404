"""Putting together what tensor-parallel ranks stored: each rank's slices, as extents of whole tensors.

Such a set has one file (or a few) a rank, all of them with the same names. Nothing in a file says along which dimension
a tensor was split, and slices that are put together the wrong way still have a shape that fits somewhere. So each
tensor's way is declared, or proved by who knows the format; what is neither is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch

from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
)
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.reading import read_tensor, same_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from weightloaders.weights.info import Extent

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor of which each rank has a slice; the slices follow each other in the order of the ranks.

    Args:
        axis: The dimension that is split.
        sections: What a rank's slice is made of, as proportions. A fused projection has several: with ``(1, 1)``, gate
            and up, the whole is the gates of all ranks and then the ups of all ranks.
    """

    axis: int
    sections: tuple[int, ...] = (1,)


Way = Split | Literal["same", "first"]
"""How the ranks' tensors of one name make up the whole: a `Split`; ``"same"``, where every rank has the whole, which is
compared; or ``"first"``, where the first rank's is taken unseen."""

WAYS_HINT = (
    "say how each is put together, e.g. axes={'layers.*.wq.weight': 0, 'norm.weight': 'same'}: the dimension that was "
    "split, 'same' where every part holds the whole, or 'first' to take that of the first part"
)


def put_together(
    parts: Mapping[str, Iterable[TensorInfo]], way_of: Callable[[str], Way | None], *, hint: str = WAYS_HINT
) -> list[TensorInfo]:
    """The whole tensors of a set of parts. Only what is declared to be the same everywhere is read, to compare it.

    Args:
        parts: What each rank holds, by a name for messages (its file), in the order of the ranks.
        way_of: How the tensors of a name are put together; None where that is not known.
        hint: What to do where it is not known.

    Raises:
        AmbiguousSourceError: If it is not known of some.
        IncompleteCheckpointError: If a rank lacks its slice of a tensor.
        CheckpointFormatError: If slices don't fit each other.
        DuplicateTensorError: If tensors differ that are declared to be the same.
    """
    held = {part: {info.name: info for info in infos} for part, infos in parts.items()}
    names = list(dict.fromkeys(name for infos in held.values() for name in infos))
    ways = {name: way_of(name) for name in names}
    unknown = [name for name, way in ways.items() if way is None]
    if unknown:
        first = next(iter(parts))
        raise AmbiguousSourceError(
            f"{len(parts)} tensor-parallel parts ({first}, ...) hold {_named(unknown)}, and nothing says how the "
            f"parts of {'these' if len(unknown) > 1 else 'it'} are put together",
            file=first,
            tensor=unknown[0],
            hint=hint,
        )
    return [_whole(name, way, held) for name, way in ways.items() if way is not None]


def _whole(name: str, way: Way, held: Mapping[str, Mapping[str, TensorInfo]]) -> TensorInfo:
    having = {part: infos[name] for part, infos in held.items() if name in infos}
    if way == "first":
        return next(iter(having.values()))
    if way == "same":
        return _common(name, having)
    lacking = [part for part in held if part not in having]
    if lacking:
        raise IncompleteCheckpointError(
            f"{lacking[0]} has no tensor {name!r}, of which {next(iter(having))} has a slice",
            file=lacking[0],
            tensor=name,
            hint="the parts belong to different checkpoints, or one is damaged: fetch them again",
        )
    return _joined(name, way, having)


def _common(name: str, having: Mapping[str, TensorInfo]) -> TensorInfo:
    (first, info), *others = having.items()
    for part, other in others:
        if not same_values(info, other):
            raise DuplicateTensorError(
                f"tensor {name!r} is not the same in {first} and {part}, where every part should hold the whole",
                file=part,
                tensor=name,
                hint="the parts belong to different checkpoints; or declare its axis, or 'first' to take that of the "
                "first part",
            )
    return info


def _joined(name: str, way: Split, having: Mapping[str, TensorInfo]) -> TensorInfo:
    infos = list(having.values())
    first, axis = infos[0], way.axis
    if not -len(first.shape) <= axis < len(first.shape):
        raise CheckpointFormatError(
            f"tensor {name!r} of shape {list(first.shape)} has no dimension {axis} that could be split",
            file=next(iter(having)),
            tensor=name,
            hint="declare the dimension that was split, or 'same'",
        )
    axis %= len(first.shape)
    for part, info in having.items():
        if info.dtype != first.dtype or _other_sizes(info, axis) != _other_sizes(first, axis):
            raise CheckpointFormatError(
                f"the slices of tensor {name!r} don't fit each other: {list(first.shape)} {first.dtype} in "
                f"{next(iter(having))}, {list(info.shape)} {info.dtype} in {part}, split along dimension {axis}",
                file=part,
                tensor=name,
                hint="it was split along another dimension, or the files belong to different checkpoints",
            )
        if info.shape[axis] % sum(way.sections):
            raise CheckpointFormatError(
                f"the slice of tensor {name!r} in {part} has the size {info.shape[axis]} along dimension {axis}, "
                f"which can't be divided as {':'.join(map(str, way.sections))}",
                file=part,
                tensor=name,
                hint="declare the sections of one part: those of a part's queries, keys and values",
            )
    size = sum(info.shape[axis] for info in infos)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    if all(info.is_raw for info in infos):
        extents = [e for info, begin, end, at in _pieces(infos, way, axis) for e in _moved(info, axis, begin, end, at)]
        return TensorInfo(name, first.dtype, shape, extents)
    origins = {origin: None for info in infos for origin in info.origins}
    return TensorInfo(name, first.dtype, shape, read=partial(_read_joined, infos, way, axis), sources=origins)


def _other_sizes(info: TensorInfo, axis: int) -> tuple[int, ...]:
    return (*info.shape[:axis], *info.shape[axis + 1 :])


def _pieces(infos: Sequence[TensorInfo], way: Split, axis: int) -> Iterator[tuple[TensorInfo, int, int, int]]:
    """Each section of each rank's slice, in the order of the whole: from where to where in the slice, and its place."""
    units = [info.shape[axis] // sum(way.sections) for info in infos]
    at = 0
    for end, size in zip(accumulate(way.sections), way.sections, strict=True):
        for info, unit in zip(infos, units, strict=True):
            yield info, (end - size) * unit, end * unit, at
            at += size * unit


def _moved(info: TensorInfo, axis: int, begin: int, end: int, to: int) -> Iterator[Extent]:
    """The extents of a tensor from ``begin`` to ``end`` along a dimension, where they begin at ``to`` instead."""
    for extent in info.extents:
        at, shape, strides = extent.at or (), extent.shape or (), extent.strides or ()
        low, high = max(begin, at[axis]), min(end, at[axis] + shape[axis])
        if low < high:
            yield replace(
                extent,
                offset=extent.offset + (low - at[axis]) * strides[axis] * extent.stored_dtype.itemsize,
                length=-1,
                shape=(*shape[:axis], high - low, *shape[axis + 1 :]),
                at=(*at[:axis], to + low - begin, *at[axis + 1 :]),
            )


def _read_joined(infos: Sequence[TensorInfo], way: Split, axis: int) -> torch.Tensor:
    tensors = {id(info): read_tensor(info) for info in infos}
    pieces = _pieces(infos, way, axis)
    return torch.cat([tensors[id(info)].narrow(axis, begin, end - begin) for info, begin, end, _ in pieces], axis)


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
