"""What a DCP checkpoint's ``.metadata`` says: its tensors, their chunks, and where each chunk lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch

from weightloaders import FolderListing
from weightloaders.errors import (
    CheckpointFormatError,
    IncompleteCheckpointError,
    SourceNotFoundError,
    UnsafeCheckpointError,
)
from weightloaders_dcp.names import METADATA, METADATA_OF_RANK
from weightloaders_dcp.pickled import Record, read_pickle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightloaders import ByteSource, Listing

# Some hundred bytes a chunk: ten million of them.
_MAX_BYTES = 1 << 30
# What no size or place comes near.
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it was stored.

    Args:
        at: Where the box begins within the tensor.
        shape: Its sizes.
        file: The file that it is in, within the folder.
        offset: Its item's first byte there.
        length: Bytes of its item.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        name: Its name, with all keys that lead to it.
        path: These keys, as they were before DCP joined them with dots.
        dtype: Its dtype.
        shape: The whole shape.
        chunks: Its boxes; each box once.
        transformed: How its bytes were transformed when they were written; empty if they were not.
    """

    name: str
    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    transformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """What there is in a checkpoint.

    Args:
        tensors: All tensors, be they weights or an optimizer's.
        others: Names of what else was saved.
        said_by: The files that say so.
    """

    tensors: tuple[StoredTensor, ...]
    others: tuple[str, ...]
    said_by: tuple[ByteSource, ...]


def read_metadata(listing: Listing) -> Metadata:
    """Read what is said about a checkpoint; no tensor is looked at.

    Raises:
        SourceNotFoundError: If there is no metadata.
        IncompleteCheckpointError: If there is only that of some ranks.
        UnsafeCheckpointError: If its pickle needs what is not DCP's own, or it names a file outside the folder.
        CheckpointFormatError: If it is damaged.
    """
    if METADATA in listing.names:
        return _read(listing, METADATA)
    by_rank = {int(match[1]): name for name in listing.names if (match := METADATA_OF_RANK.fullmatch(name))}
    if not by_rank:
        raise SourceNotFoundError(
            f"{listing.where} lacks {METADATA}, without which nobody knows what its .distcp files hold",
            file=listing.where,
            hint="it is written last: the save was interrupted, or the copy is not complete",
        )
    for rank in range(max(by_rank)):
        if rank not in by_rank:
            raise IncompleteCheckpointError(
                f"__{rank}{METADATA} is missing: each rank wrote its own, and there is that of rank {max(by_rank)}",
                file=listing.where,
                hint="fetch what is missing",
            )
    return _merged([_read(listing, name) for _, name in sorted(by_rank.items())], listing.where)


def _read(listing: Listing, name: str) -> Metadata:
    if isinstance(listing, FolderListing):
        listing.check_links([name])
    source = listing.open(name)
    if source.size > _MAX_BYTES:
        raise CheckpointFormatError(
            f"{source.name} is too large: {source.size:,} bytes, where at most {_MAX_BYTES:,} make sense",
            file=source.name,
        )
    root = read_pickle(source.read(0, source.size), source.name)
    try:
        return _understood(root, source)
    except _Malformed as error:
        raise CheckpointFormatError(
            f"{source.name} is no metadata of DCP's: {error}", file=source.name, tensor=error.tensor
        ) from error
    except _Outside as error:
        raise UnsafeCheckpointError(
            f"{source.name} names {error.args[0]!r}, a file outside its folder", file=source.name
        ) from error


def _merged(parts: Sequence[Metadata], where: str) -> Metadata:
    """What all ranks say together; of a box that several of them stored, what the first did."""
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for tensor in part.tensors:
            known = tensors.setdefault(tensor.name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointFormatError(
                    f"the ranks of {where} say of tensor {tensor.name!r} that it is {list(known.shape)} {known.dtype} "
                    f"and {list(tensor.shape)} {tensor.dtype}",
                    file=where,
                    tensor=tensor.name,
                )
            tensors[tensor.name] = StoredTensor(
                known.name, known.path, known.dtype, known.shape,
                _each_box_once((*known.chunks, *tensor.chunks)),
                known.transformed or tensor.transformed,
            )  # fmt: skip
    others = dict.fromkeys(name for part in parts for name in part.others)
    return Metadata(tuple(tensors.values()), tuple(others), tuple(source for part in parts for source in part.said_by))


def _each_box_once(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    return tuple({(chunk.at, chunk.shape): chunk for chunk in reversed(list(chunks))}.values())[::-1]


# ------------------------------------------------------------------ from records


class _Malformed(Exception):  # noqa: N818 -- never leaves this module
    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class _Outside(Exception):  # noqa: N818 -- never leaves this module
    """A file outside the folder."""


def _understood(root: Any, source: ByteSource) -> Metadata:
    fields = _fields(root, "Metadata")
    stored = {_index(key): value for key, value in _dict(fields.get("storage_data"), "storage_data").items()}
    paths = fields.get("planner_data")
    tensors, others = [], []
    for name, entry in _dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
        if not isinstance(name, str):
            raise _Malformed("a name is no string")
        if isinstance(entry, Record) and entry.kind == "BytesStorageMetadata":
            others.append(name)
        else:
            tensors.append(_tensor(name, entry, stored, _path(name, paths)))
    return Metadata(tuple(tensors), tuple(others), (source,))


def _tensor(
    name: str, entry: Any, stored: Mapping[tuple[str, tuple[int, ...] | None], Any], path: tuple[str, ...]
) -> StoredTensor:
    fields = _fields(entry, "TensorStorageMetadata", name)
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Record) and properties.kind == "TensorProperties" else None
    dtype = state[0] if type(state) is tuple and state else None
    if not isinstance(dtype, torch.dtype):
        raise _Malformed(f"tensor {name!r} has no dtype", name)
    shape = _shape(fields.get("size"), name)
    chunks: list[Chunk] = []
    transformed: tuple[str, ...] = ()
    if type(fields.get("chunks")) is not list:
        raise _Malformed(f"tensor {name!r} has no chunks", name)
    for value in fields["chunks"]:
        box = _fields(value, "ChunkStorageMetadata", name)
        at, sizes = _shape(box.get("offsets"), name), _shape(box.get("sizes"), name)
        if len(at) != len(shape) or len(sizes) != len(shape):
            raise _Malformed(f"a chunk of tensor {name!r} has another number of dimensions than its shape", name)
        if any(begin + size > whole for begin, size, whole in zip(at, sizes, shape, strict=True)) and 0 not in sizes:
            raise _Malformed(
                f"a chunk of tensor {name!r} is {list(sizes)} from {list(at)}, outside its shape {list(shape)}", name
            )
        info = stored.get((name, at))
        if info is None and not shape:
            info = stored.get((name, None))
        if info is None and 0 not in sizes:
            raise _Malformed(f"it does not say where the chunk of tensor {name!r} from {list(at)} is stored", name)
        if info is not None and 0 not in sizes:
            chunk, how = _chunk(info, at, sizes, name)
            chunks.append(chunk)
            transformed = transformed or how
    return StoredTensor(name, path, dtype, shape, _each_box_once(chunks), transformed)


def _chunk(info: Any, at: tuple[int, ...], shape: tuple[int, ...], name: str) -> tuple[Chunk, tuple[str, ...]]:
    fields = _fields(info, "_StorageInfo", name)
    file, offset, length = (fields.get(field) for field in ("relative_path", "offset", "length"))
    how = fields.get("transform_descriptors") or ()
    if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
        raise _Malformed(f"it does not say where tensor {name!r} is stored", name)
    if not (0 <= offset < _MOST and 0 <= length < _MOST):
        raise _Malformed(f"tensor {name!r} is said to be stored where nothing can be", name)
    if not isinstance(how, list | tuple) or not all(isinstance(word, str) for word in how):
        raise _Malformed(f"it does not say how tensor {name!r} is stored", name)
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    if posix.is_absolute() or windows.anchor or ".." in posix.parts or ".." in windows.parts or not posix.name:
        raise _Outside(file)
    return Chunk(at, shape, file, offset, length), tuple(how)


def _fields(value: Any, kind: str, tensor: str | None = None) -> dict[Any, Any]:
    if not isinstance(value, Record) or value.kind != kind or type(value.state) is not dict:
        raise _Malformed(f"it has no {kind} where one should be", tensor)
    return value.state


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _Malformed(f"its {what} is no dict")
    return value


def _index(key: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(key, "MetadataIndex")
    name, at = fields.get("fqn"), fields.get("offset")
    if not isinstance(name, str):
        raise _Malformed("a name is no string")
    return name, None if at is None else _shape(at, name)


def _shape(value: Any, name: str) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(size) is int and 0 <= size < _MOST for size in value):
        raise _Malformed(f"tensor {name!r} has a shape that is none", name)
    return value


def _path(name: str, paths: Any) -> tuple[str, ...]:
    """The keys that led to a tensor before DCP joined them; the name itself where that isn't known."""
    keys = paths.get(name) if type(paths) is dict else None
    if type(keys) is tuple and all(type(key) is str or (type(key) is int and 0 <= key < _MOST) for key in keys):
        path = tuple(map(str, keys))
        # Long strings that share their memory would have none to be joined in.
        if sum(map(len, path)) + len(path) - 1 == len(name) and ".".join(path) == name:
            return path
    return (name,)
