"""Checkpoints of tensor-parallel ranks as Meta writes them: ``consolidated.00.pth``, ``consolidated.01.pth``, ..."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from weightloaders.errors import AmbiguousSourceError, CheckpointFormatError, IncompleteCheckpointError, SourceError
from weightloaders.weights.file_names import PARAMS_FILE, part_number
from weightloaders.weights.meta_llama import MAX_PARAMS_BYTES, LlamaShapes
from weightloaders.weights.tensor_parallel import WAYS_HINT, put_together
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
        AmbiguousSourceError: If two files are the same part, or some are none.
        CheckpointFormatError: If the sizes beside the files are another model's.
        SourceError: As `put_together` does.
    """
    others = sorted(name for name in _all_names(selection.listing) if _is_part(name) and name not in held)
    if len(held) == 1 and others and is_set_of_parts(list(held)):
        (file,) = held
        notes.append(f"{file} is one of {len(others) + 1} tensor-parallel parts; it was loaded alone, as asked")
        return list(held[file])
    files = _in_order(selection, others)
    parts = {file: held[file] for file in files}
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

    if shapes is not None:
        _check_shapes(selection, shapes, [info for info in first.values() if way_of(info.name) is None], len(parts))
    places = {f"{selection.listing.where}/{file}": infos for file, infos in parts.items()}
    whole = put_together(places, declared_or_proved, hint=f"by the loader 'torch', {WAYS_HINT}")
    notes.append(f"{_listed(files)}: tensor-parallel parts, put together")
    return whole


def _names(listing: Listing) -> frozenset[str]:
    try:
        return listing.names
    except SourceError:  # a server that shows no folder
        return frozenset()


def _all_names(listing: Listing) -> set[str]:
    """Also those of what is there, but is no regular file."""
    names = _names(listing)
    return {*names, *listing.odd} if names else set()


def _is_part(name: str) -> bool:
    return part_number(name) is not None


def _shapes(listing: Listing) -> LlamaShapes | None:
    if PARAMS_FILE not in _names(listing):
        return None
    return LlamaShapes.read(read_small(listing.open(PARAMS_FILE), MAX_PARAMS_BYTES))


def _in_order(selection: Selection, others: Sequence[str]) -> list[str]:
    """The files in the order of their ranks, which are all there, each once, as far as their names tell."""
    files = list(selection.files)
    strangers = [file for file in files if not _is_part(file)]
    if strangers and len(strangers) < len(files):
        parts = [file for file in files if _is_part(file)]
        raise AmbiguousSourceError(
            f"{_listed(strangers)} {'are' if len(strangers) > 1 else 'is'} no tensor-parallel part, going by "
            f"the name, as {_listed(parts)} {'are' if len(parts) > 1 else 'is'}",
            file=selection.listing.where,
            hint="choose by file_pattern, e.g. file_pattern='consolidated.*'",
        )
    if not strangers and others:
        raise IncompleteCheckpointError(
            f"{_listed(others)} {'are parts' if len(others) > 1 else 'is a part'} of the same checkpoint as "
            f"{_listed(files)}, but left out",
            file=selection.listing.where,
            hint="take all parts, or name the one that is wanted by itself",
        )
    place = _place_of_number(files)
    if place is None:
        if len(files) > 1:
            raise AmbiguousSourceError(
                f"nothing in the names of {_listed(files)} says in which order these parts go together",
                file=selection.listing.where,
                hint="name them by one number that tells them apart, e.g. rank0.pt, rank1.pt; or name one file alone",
            )
        return files
    by_number: dict[int, str] = {}
    for file in files:
        twin = by_number.setdefault(int(_pieces(file)[place]), file)
        if twin != file:
            raise AmbiguousSourceError(
                f"{twin} and {file} are the same part, going by their numbers",
                file=selection.listing.where,
                hint="remove one of them, or choose by file_pattern",
            )
    ordered = [by_number[number] for number in sorted(by_number)]
    # Some count from one.
    expected = range(0 if _is_part(files[0]) else min(1, *by_number), max(by_number) + 1)
    lacking = islice((number for number in expected if number not in by_number), _SHOWN)
    names = [_numbered(ordered[0], place, number) for number in lacking]
    if names:
        raise _missing(selection, names, ordered)
    return ordered


def _pieces(file: str) -> list[str]:
    """A name as text, number, text, number, ..., text."""
    return re.split("([0-9]+)", file)


def _place_of_number(files: Sequence[str]) -> int | None:
    """Which of the `_pieces` of the names is the number of the part; None if that can't be told."""
    if is_set_of_parts(files):
        return 1
    names = [_pieces(file) for file in files]
    if len({len(name) for name in names}) > 1:
        return None
    differ = [place for place, pieces in enumerate(zip(*names, strict=True)) if len(set(pieces)) > 1]
    return differ[0] if len(differ) == 1 and differ[0] % 2 else None


def _numbered(file: str, place: int, number: int) -> str:
    """The name of a part of the same set with another number."""
    pieces = _pieces(file)
    return "".join([*pieces[:place], f"{number:0{len(pieces[place])}}", *pieces[place + 1 :]])


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
    place = _place_of_number(files)
    # A count by shapes alone may be absurd, so no more names are made than are shown.
    numbers = range(len(files), min(needed, len(files) + _SHOWN))
    lacking = ["another part"] if place is None else [_numbered(files[0], place, number) for number in numbers]
    raise _missing(selection, lacking, files, f"; by their shapes and {PARAMS_FILE} there are {needed} parts")


def _check_shapes(selection: Selection, shapes: LlamaShapes, infos: Sequence[TensorInfo], parts: int) -> None:
    """What is known of a Llama's tensors must be so, or the sizes are another model's."""
    for info in infos:
        whole = shapes.whole(info.name) or ()
        # Parts that each have the whole of a tensor don't contradict it.
        if whole and whole != info.shape and None not in whole and shapes.way_of(info, parts) is None:
            raise CheckpointFormatError(
                f"by {PARAMS_FILE}, tensor {info.name!r} is {list(whole)} as a whole, which {parts} tensor-parallel "
                f"parts of {list(info.shape)} don't make up",
                file=f"{selection.listing.where}/{PARAMS_FILE}",
                tensor=info.name,
                hint=f"{PARAMS_FILE} may be another model's: fetch its own; or, by the loader 'torch', {WAYS_HINT}",
            )


def _missing(
    selection: Selection, lacking: Sequence[str], files: Sequence[str], why: str = ""
) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{_listed(lacking)} {'are' if len(lacking) > 1 else 'is'} missing beside {_listed(files)}{why}",
        file=selection.listing.where,
        hint="each tensor is spread over all parts: fetch what is missing",
    )


def _listed(files: Sequence[str]) -> str:
    rest = len(files) - _SHOWN
    return ", ".join(files[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
