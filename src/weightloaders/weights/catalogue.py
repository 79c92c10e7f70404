"""From the files of a checkpoint to its `Weights`: headers opened, names held against the index and each other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weightloaders.errors import DuplicateTensorError, IncompleteCheckpointError
from weightloaders.weights.collector import collector_paused
from weightloaders.weights.file_names import PARAMS_FILE
from weightloaders.weights.folder import FolderListing
from weightloaders.weights.parts import is_set_of_parts, whole_tensors
from weightloaders.weights.reading import same_values
from weightloaders.weights.safetensors import MAX_HEADER_BYTES, read_header, understand_header
from weightloaders.weights.source import close_files
from weightloaders.weights.threads import IN_FLIGHT, in_turn
from weightloaders.weights.torch_zip import read_torch
from weightloaders.weights.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from weightloaders.weights.files import Selection
    from weightloaders.weights.index import Index
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource
    from weightloaders.weights.tensor_parallel import Way

_SHOWN = 6


@collector_paused()
def catalogue(
    selection: Selection,
    *,
    max_header_bytes: int | None = None,
    key: str | None = None,
    safe_globals: Sequence[Any] = (),
    way_of: Callable[[str], Way | None] | None = None,
) -> Weights:
    """Open the headers of the chosen files and say what they hold together. No tensor is read, save for two cases.

    Where there is no index and two files have a tensor of one name, the two are compared, in bounded memory; and so is
    what all tensor-parallel parts hold whole.

    Args:
        selection: The files.
        max_header_bytes: A longer safetensors header is refused; None for the safetensors package's own limit.
        key: For torch files: the path to the state dict within each.
        safe_globals: For torch files: what a pickle may use beyond torch's own list.
        way_of: How the parts of each tensor are put together, where the files are tensor-parallel parts; None takes
            only those for parts that are called so, and leaves the ways to their shapes.

    Raises:
        IncompleteCheckpointError: If a tensor is not in the file that the index names.
        DuplicateTensorError: If two files have different values under one name, and no index decides.
        SourceError: Whatever the format's reader finds wrong with a file.
    """
    if selection.family == "safetensors":
        contents = _read_headers(selection, MAX_HEADER_BYTES if max_header_bytes is None else max_header_bytes)
    else:
        contents = _read_pickles(selection, key, safe_globals)
    notes = [*selection.notes, *(note for content in contents.values() for note in content.notes)]
    if selection.index is None and (way_of or is_set_of_parts(selection.files)):
        held = {file: content.infos for file, content in contents.items()}
        infos = whole_tensors(selection, held, way_of or _undeclared, notes)
    elif selection.index is None:
        infos = _merged({file: content.infos for file, content in contents.items()}, notes)
    else:
        infos = _as_indexed(selection, selection.index, contents, notes)
    metadata: dict[str, str] = {}
    for content in contents.values():
        metadata = {**content.metadata, **metadata}
    # By name, for not every tensor says where it is read from: sparse and compressed ones have no extents.
    close = partial(close_files, frozenset(content.place for content in contents.values()))
    return Weights.describe(
        infos, close, metadata=metadata, skipped_files=selection.skipped, notes=notes,
        described_by=_described_by(selection),
    )  # fmt: skip


def _described_by(selection: Selection) -> list[ByteSource]:
    """The files that said where the tensors are, and how they are put together, where they lie on disk."""
    listing = selection.listing
    if not isinstance(listing, FolderListing):
        return []
    said = [selection.index.name] if selection.index else [PARAMS_FILE] if is_set_of_parts(selection.files) else []
    return [listing.open(name) for name in said if not listing.problems([name])]


def _undeclared(_: str) -> None:
    return None


@dataclass(frozen=True)
class _Contents:
    """What one file holds, whatever its format; ``place`` is its source's name."""

    place: str
    infos: Sequence[TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    non_tensors: frozenset[str] = frozenset()


def _read_headers(selection: Selection, max_header_bytes: int) -> dict[str, _Contents]:
    def read(file: str) -> tuple[ByteSource, bytes]:
        source = selection.listing.open(file)
        return source, read_header(source, max_header_bytes)

    def understood(source: ByteSource, raw: bytes) -> _Contents:
        header = understand_header(source, raw)
        return _Contents(source.name, header.infos, header.metadata)

    # Only one thread at a time can run Python, so what is read is understood here, while more is being read.
    headers = in_turn(read, selection.files, IN_FLIGHT, "weightloaders-headers")
    return {file: understood(*header) for file, header in zip(selection.files, headers, strict=True)}


def _read_pickles(selection: Selection, key: str | None, safe_globals: Sequence[Any]) -> dict[str, _Contents]:
    # One after the other: what a pickle may use is set for the whole process.
    contents = {}
    for file in selection.files:
        source = selection.listing.open(file)
        read = read_torch(source, key=key, safe_globals=safe_globals)
        contents[file] = _Contents(source.name, read.infos, notes=read.notes, non_tensors=read.non_tensors)
    return contents


def _as_indexed(
    selection: Selection, index: Index, contents: Mapping[str, _Contents], notes: list[str]
) -> list[TensorInfo]:
    """The tensors that the index names, each from the file it names; others only on request."""
    held = {file: {info.name: info for info in content.infos} for file, content in contents.items()}
    chosen, absent = [], []
    for tensor, file in index.weight_map.items():
        if tensor in held[file]:
            chosen.append(held[file][tensor])
        # An index may list what the file does hold, but not as a tensor; the file's own notes name that.
        elif tensor not in contents[file].non_tensors:
            absent.append((tensor, file))
    if absent:
        raise _not_where_indexed(index, absent, contents)
    rest: dict[str, list[TensorInfo]] = {}
    for file, infos in held.items():
        copies = [name for name in infos if index.weight_map.get(name, file) != file]
        if copies:
            notes.append(f"{file} also has {_named(copies)}, which {index.name} places elsewhere; that is what is used")
        unlisted = [info for name, info in infos.items() if name not in index.weight_map]
        if unlisted:
            rest[file] = unlisted
            verb = "included as asked" if selection.include_unindexed else "left out; include_unindexed=True takes them"
            notes.append(f"{file} has {_named([i.name for i in unlisted])}, absent from {index.name}: {verb}")
    return [*chosen, *_merged(rest, notes)] if selection.include_unindexed else chosen


def _not_where_indexed(
    index: Index, absent: list[tuple[str, str]], contents: Mapping[str, _Contents]
) -> IncompleteCheckpointError:
    tensor, file = absent[0]
    elsewhere = [other for other, content in contents.items() if any(tensor == info.name for info in content.infos)]
    message = f"{index.name} says that tensor {tensor!r} is in {file}, but that file does not hold it"
    message += f"; {elsewhere[0]} does" if elsewhere else "; nor does any other of the checkpoint's files"
    if len(absent) > 1:
        message += f". The same goes for {_named([name for name, _ in absent[1:]])}"
    return IncompleteCheckpointError(
        message,
        file=contents[file].place,
        tensor=tensor,
        hint="the index belongs to other files: fetch both again; or load what is there with ignore_index=True",
    )


def _merged(held: Mapping[str, Iterable[TensorInfo]], notes: list[str]) -> list[TensorInfo]:
    """The tensors of all files; a name that several have must stand for equal values."""
    first: dict[str, tuple[str, TensorInfo]] = {}
    twins: list[tuple[str, TensorInfo]] = []
    for file, infos in held.items():
        for info in infos:
            if info.name in first:
                twins.append((file, info))
            else:
                first[info.name] = (file, info)
    # What a header gives away is asked of all pairs before the values of any are read.
    for agree in (_same_kind, same_values):
        for file, info in twins:
            other_file, other = first[info.name]
            if not agree(other, info):
                raise _contradiction(other_file, other, file, info)
    by_pair: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, info in twins:
        by_pair[first[info.name][0], file].append(info.name)
    notes += [f"{a} and {b} both have {_named(names)}, with equal values" for (a, b), names in by_pair.items()]
    return [info for _, info in first.values()]


def _same_kind(a: TensorInfo, b: TensorInfo) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _contradiction(file: str, info: TensorInfo, other_file: str, other: TensorInfo) -> DuplicateTensorError:
    if _same_kind(info, other):
        how = "with different values"
    else:
        how = f"as {list(info.shape)} {info.dtype} and as {list(other.shape)} {other.dtype}"
    return DuplicateTensorError(
        f"tensor {info.name!r} is in {file} and in {other_file}, {how}",
        tensor=info.name,
        file=other_file,
        hint="the files belong to different checkpoints: choose some with file_pattern, or remove the others",
    )


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
