"""Checkpoints of tensor-parallel ranks as Meta writes them: ``consolidated.00.pth``, ``consolidated.01.pth``, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightloaders.errors import IncompleteCheckpointError, SourceError
from weightloaders.weights.file_names import PARAMS_FILE, part_number
from weightloaders.weights.meta_llama import MAX_PARAMS_BYTES, LlamaShapes
from weightloaders.weights.tensor_parallel import put_together
from weightloaders.weights.texts import read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightloaders.weights.candidates import Listing
    from weightloaders.weights.files import Selection
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.tensor_parallel import Way

_SHOWN = 6


def is_set_of_parts(files: Sequence[str]) -> bool:
    """Whether all of these files, going by their names, are tensor-parallel parts of one checkpoint."""
    return bool(files) and all(part_number(file) is not None for file in files)


def whole_tensors(
    selection: Selection,
    held: Mapping[str, Sequence[TensorInfo]],
    way_of: Callable[[str], Way | None],
    notes: list[str],
) -> list[TensorInfo]:
    """The whole tensors of a set of parts; of a part that was asked for alone, what it holds.

    Args:
        selection: The files.
        held: What each of them holds.
        way_of: What the user declared about how the parts of a tensor are put together.
        notes: Gets remarks for the report.

    Raises:
        IncompleteCheckpointError: If a part is missing, going by the numbers or by the shapes.
        SourceError: As `put_together` does.
    """
    parts = dict(sorted(held.items(), key=lambda item: part_number(item[0]) or 0))
    files = list(parts)
    others = [name for name in _names(selection.listing) if part_number(name) is not None and name not in held]
    if len(files) == 1 and others:
        notes.append(f"{files[0]} is one of {len(others) + 1} tensor-parallel parts; it was loaded alone, as asked")
        return list(held[files[0]])
    if is_set_of_parts(files):
        _check_numbers(selection, files, others)
    first = {info.name: info for info in parts[files[0]]}
    shapes = _shapes(selection.listing)
    if shapes is not None:
        shapes = shapes.with_vocabulary_of(first, len(parts))
        _check_count(selection, shapes.parts_needed(first.values()), files)
    if len(files) == 1:
        return list(first.values())

    def declared_or_proved(name: str) -> Way | None:
        way = way_of(name)
        if way is None and shapes is not None and name in first:
            way = shapes.way_of(first[name], len(parts))
        return way

    whole = put_together(parts, declared_or_proved)
    notes.append(f"{_listed(files)}: tensor-parallel parts, put together")
    return whole


def _names(listing: Listing) -> frozenset[str]:
    try:
        return listing.names
    except SourceError:  # a server that shows no folder
        return frozenset()


def _shapes(listing: Listing) -> LlamaShapes | None:
    if PARAMS_FILE not in _names(listing):
        return None
    return LlamaShapes.read(read_small(listing.open(PARAMS_FILE), MAX_PARAMS_BYTES))


def _check_numbers(selection: Selection, files: Sequence[str], others: Sequence[str]) -> None:
    if others:
        raise IncompleteCheckpointError(
            f"{_listed(sorted(others))} {'are parts' if len(others) > 1 else 'is a part'} of the same checkpoint as "
            f"{_listed(files)}, but left out",
            file=selection.listing.where,
            hint="take all parts, or name the one that is wanted by itself",
        )
    numbers = [part_number(file) for file in files]
    lacking = [_numbered(files[0], number) for number in range(numbers[-1] or 0) if number not in numbers]
    if lacking:
        raise _missing(selection, lacking, files)


def _check_count(selection: Selection, needed: int | None, files: Sequence[str]) -> None:
    if needed is None or needed == len(files):
        return
    if needed < len(files):
        raise IncompleteCheckpointError(
            f"the shapes in {files[0]} are those of {needed} tensor-parallel parts, by {PARAMS_FILE}, but there are "
            f"{len(files)}: {_listed(files)}",
            file=selection.listing.where,
            hint="the files belong to different checkpoints: remove the others",
        )
    # A count by shapes alone may be absurd, so no more names are made than are shown.
    lacking = [_numbered(files[0], number) for number in range(len(files), min(needed, len(files) + _SHOWN))]
    raise _missing(selection, lacking, files, f"; by their shapes and {PARAMS_FILE} there are {needed} parts")


def _missing(
    selection: Selection, lacking: Sequence[str], files: Sequence[str], why: str = ""
) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{_listed(lacking)} {'are' if len(lacking) > 1 else 'is'} missing beside {_listed(files)}{why}",
        file=selection.listing.where,
        hint="each tensor is spread over all parts: fetch what is missing",
    )


def _numbered(file: str, number: int) -> str:
    """The name of a part of the same set with another number."""
    stem, digits, suffix = file.rsplit(".", 2)
    return f"{stem}.{number:0{len(digits)}}.{suffix}"


def _listed(files: Sequence[str]) -> str:
    rest = len(files) - _SHOWN
    return ", ".join(files[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
