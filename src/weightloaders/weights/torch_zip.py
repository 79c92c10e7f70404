"""The catalogue of a file that `torch.save` wrote (.bin, .pt, .pth), without reading a tensor.

The format is a zip whose record ``NAME/data.pkl`` is a pickle of tensors over storages, and whose records
``NAME/data/KEY`` are the storages' bytes, raw; see ``torch/serialization.py``. Files of torch before 1.6 are a pickle
with the storages behind it. A tensor is a strided view of a storage, so its extent is a strided span of the record.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightloaders.errors import CheckpointFormatError, UnsafeCheckpointError, WeightLoadersError
from weightloaders.weights.info import Extent, TensorInfo
from weightloaders.weights.reading import enough_memory, read_tensor
from weightloaders.weights.sniff import LEGACY_TORCH, TAR, describe_content
from weightloaders.weights.source import ByteSource, FileSource
from weightloaders.weights.source_file import MAX_READ, SourceFile
from weightloaders.weights.state_dict import find_state_dict
from weightloaders.weights.torch_pickle import (
    MetaStorages,
    SlowPathNeededError,
    admitted,
    undisturbed,
    unpickle,
)
from weightloaders.weights.zip_directory import END_BYTES, ZIP_MAGIC, Record, read_directory

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

#: The directory of a file with one tensor, and all else behind that tensor's bytes, is within so many bytes of its end.
END_BYTES_OF_TENSOR = 2 << 10
_LEGACY_PROTOCOL = 1001
_HEAD = 32
_LONGEST_ORDER = 16
# A deflated pickle unpacks to at most so many times its size; one of a large model, to some fifteen.
_MOST_DEFLATION, _SMALL_PICKLE = 32, 1 << 20
# A few numbers in a file can claim any shape. Expanded and sparse tensors, taken together, become at most so many times
# the file when they are made dense, or so many bytes.
_MOST_GROWTH, _SMALL_GROWTH = 1 << 10, 1 << 24
# Of what is unpacked, so much stays in memory for the next tensor.
_MOST_KEPT = 1 << 27
_REFETCH = "the file is truncated or damaged; fetch it again"

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What a torch file holds.

    Args:
        infos: The tensors of its state dict, in the order of the file.
        notes: Remarks: what was unwrapped, left out, made dense.
        key: Dotted path to the state dict within the file; ``""`` for the whole file.
        non_tensors: Names in the state dict that stand for something other than a tensor.
    """

    infos: tuple[TensorInfo, ...]
    notes: tuple[str, ...]
    key: str
    non_tensors: frozenset[str] = frozenset()


def is_torch_file(head: bytes) -> bool:
    """Whether a file that begins with these bytes (32 or more) may be one that `torch.save` wrote."""
    return head.startswith(ZIP_MAGIC) or LEGACY_TORCH.match(head) is not None


def read_torch(source: ByteSource, *, key: str | None = None, safe_globals: Sequence[Any] = ()) -> TorchFile:
    """Catalogue a torch file. Nothing of it runs, and only its pickle and its directory are read.

    Args:
        source: The file.
        key: Dotted path to the state dict within the file; None to look for it.
        safe_globals: Classes and functions beyond torch's own list that the pickle may use, because you trust them.

    Raises:
        UnsafeCheckpointError: If the pickle needs other globals, or records overlap.
        AmbiguousSourceError: If several state dicts could be meant.
        CheckpointFormatError: If it is no torch file, is damaged, or holds a tensor without raw values (a quantized or
            nested one).
        OptionsError: If ``key`` leads nowhere, or ``safe_globals`` holds something else.
    """
    content = _opened(source, safe_globals)
    found = find_state_dict(content.root, key=key, file=source.name)
    with undisturbed():
        infos = tuple(content.info(name, tensor) for name, tensor in found.tensors.items())
    file = PurePath(source.name).name
    notes = [f"{file}: {note}" for note in content.notes]
    if found.key and key is None:
        notes.append(f"{file}: the weights are its {found.key!r}")
    if found.left_out:
        notes.append(f"{file}: left out beside the weights: {_listed(found.left_out)}")
    if content.densified:
        notes.append(f"{file}: sparse tensors, made dense when read: {_listed(content.densified)}")
    if content.unpacked:
        notes.append(f"{file}: compressed, so read slowly: {_listed(content.unpacked)}")
    return TorchFile(infos, tuple(notes), found.key, found.non_tensors)


def read_torch_tensor(source: ByteSource, name: str, *, safe_globals: Sequence[Any] = ()) -> TensorInfo:
    """Catalogue a file of `torch.save` that holds one tensor rather than a state dict.

    For formats that keep each tensor as such a file within their own.

    Args:
        source: The file.
        name: What the tensor is to be called.
        safe_globals: As for `read_torch`.

    Raises:
        UnsafeCheckpointError: As from `read_torch`.
        CheckpointFormatError: As from `read_torch`, and if it holds something else.
    """
    content = _opened(source, safe_globals, END_BYTES_OF_TENSOR)
    if not isinstance(content.root, torch.Tensor):
        raise CheckpointFormatError(
            f"{source.name} holds {type(content.root).__name__!r} where tensor {name!r} should be",
            file=source.name,
            tensor=name,
        )
    with undisturbed():
        return content.info(name, content.root)


def _opened(source: ByteSource, safe_globals: Sequence[Any], end_bytes: int = END_BYTES) -> _Content:
    head = source.read(0, min(_HEAD, source.size))
    try:
        if head.startswith(ZIP_MAGIC):
            return _open_zip(source, safe_globals, end_bytes)
        if LEGACY_TORCH.match(head):
            return _open_legacy(source, safe_globals)
        raise _no_torch_file(source, head)
    except SlowPathNeededError:
        return _load_whole(source, safe_globals)


class _LastUnpacked:
    """The last deflated record that was unpacked: tensors that view one storage are mostly read one after the other."""

    def __init__(self) -> None:
        self._last: tuple[Record, bytes | bytearray] | None = None

    def bytes_of(self, record: Record) -> bytes | bytearray:
        """The unpacked bytes of a record."""
        last = self._last
        if last is not None and last[0] is record:
            return last[1]
        self._last = last = None  # so that no two are in memory
        data = record.read(record.size)
        if len(data) <= _MOST_KEPT:
            self._last = record, data
        return data


@dataclass(slots=True)
class _Content:
    """What was unpickled, and where the storages of its tensors lie: in the file, or ``loaded`` with it."""

    source: ByteSource
    root: Any
    storages: MetaStorages
    records: Mapping[str, Record] = field(default_factory=dict)
    byteorder: Literal["little", "big"] = "little"
    loaded: bool = False
    notes: list[str] = field(default_factory=list)
    densified: list[str] = field(default_factory=list)
    unpacked: list[str] = field(default_factory=list)
    growth: int = 0
    last_unpacked: _LastUnpacked = field(default_factory=_LastUnpacked)

    def check_claims(self) -> None:
        """Each storage that the pickle names must have a record of just its size."""
        for key, (numel, itemsize) in self.storages.claims.items():
            record, nbytes = self.records.get(key), numel * itemsize
            if record is None and nbytes:
                raise self._error(f"lacks the record of its storage {key!r}", hint=_REFETCH)
            if record is not None and record.size != nbytes:
                raise self._error(
                    f"has {record.size} bytes for its storage {key!r}, but its pickle says {nbytes}", hint=_REFETCH
                )

    def info(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        """The catalogue entry of a tensor of the state dict."""
        kind = _unreadable(tensor)
        if kind is not None:
            raise self._error(
                f"holds the tensor {name!r}, which is {kind}", tensor=name, hint="save it as a plain, dense tensor"
            )
        # A file may give a tensor attributes that are called like its methods; the alias has none.
        tensor = torch.Tensor.detach(tensor)
        if any(size < 0 for size in tensor.shape):
            # torch makes such a tensor where there is no memory to it.
            raise self._error(f"says that the tensor {name!r} has the shape {list(tensor.shape)}", tensor=name)
        if tensor.layout is torch.strided:
            return self._strided(name, tensor)
        parts = [self._strided(name, getattr(tensor, part)()) for part in _SPARSE_PARTS[tensor.layout]]
        self.densified.append(name)
        shape = tuple(tensor.shape)
        self._check_growth(name, tensor, sum(part.nbytes for part in parts))
        dense = partial(_dense, parts, tensor.layout, shape, name, self.source.name)
        return TensorInfo(name, tensor.dtype, shape, read=dense, sources=[self.source])

    def _strided(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        dtype, shape, strides = tensor.dtype, tuple(tensor.shape), tensor.stride()
        part = self.storages.part_of(tensor)
        if part is None and self.loaded:
            return TensorInfo(name, dtype, shape, read=partial(_own_copy, tensor), sources=[self.source])
        if part is None and tensor.device.type == "meta":
            raise self._error(f"holds no data for the tensor {name!r}: it was saved from the meta device", tensor=name)
        if 0 in shape:
            return TensorInfo(name, dtype, shape)
        if part is None:
            # It was made while unpickling, by a size alone: what it holds is whatever was in memory there.
            raise self._error(
                f"holds no data for the tensor {name!r}: its pickle makes it, of no storage of the file",
                tensor=name,
                hint="save it as a plain tensor, by torch.save(model.state_dict(), path)",
            )
        start = int(tensor.storage_offset()) * dtype.itemsize
        length = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * dtype.itemsize
        if start + length > part.nbytes:
            raise self._error(
                f"says that the tensor {name!r} ends at byte {start + length} of a storage of {part.nbytes}",
                tensor=name,
                hint=_REFETCH,
            )
        self._check_growth(name, tensor, length)
        record = self.records[part.record]
        where = _Unpacked(record, self.last_unpacked) if record.deflated else self.source
        offset = part.offset + start + (0 if record.deflated else record.offset)
        raw = TensorInfo(name, dtype, shape, (Extent(where, offset, length, dtype, self.byteorder, shape, strides),))
        if record.deflated:
            self.unpacked.append(name)
        elif not (tensor.is_conj() or tensor.is_neg()):
            return raw
        resolved = partial(_resolved, raw, tensor.is_conj(), tensor.is_neg())
        return TensorInfo(name, dtype, shape, read=resolved, sources=[self.source])

    def _check_growth(self, name: str, tensor: torch.Tensor, stored: int) -> None:
        """A tensor of few stored numbers may be far larger than they are, but not without bounds."""
        nbytes = tensor.numel() * tensor.dtype.itemsize
        self.growth += max(0, nbytes - stored)
        if self.growth > max(_SMALL_GROWTH, _MOST_GROWTH * self.source.size):
            raise self._error(
                f"makes the {nbytes:,} bytes of the tensor {name!r} of {stored:,}, "
                f"too many for a file of {self.source.size:,} bytes",
                tensor=name,
                hint="if it is meant, save it as what it stands for: tensor.to_dense().contiguous()",
            )

    def _error(self, what: str, **where: str | None) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self.source.name} {what}", file=self.source.name, **where)


class _Unpacked(ByteSource):
    """A deflated record as a source of its unpacked bytes."""

    def __init__(self, record: Record, last: _LastUnpacked) -> None:
        self._record, self._last = record, last
        self.name = record.source.name

    @property
    def size(self) -> int:
        return self._record.size

    @property
    def identity(self) -> Hashable:
        return self._record.source.identity, self._record.offset

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = memoryview(self._last.bytes_of(self._record))[offset : offset + len(view)]


# ------------------------------------------------------------------ the three ways in


def _open_zip(source: ByteSource, safe_globals: Sequence[Any], end_bytes: int) -> _Content:
    records = read_directory(source, end_bytes)
    roots = [name.removesuffix("/data.pkl") for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        what = describe_content(source)
        raise CheckpointFormatError(
            f"{source.name} is no file of torch.save: {what}, with {len(roots)} records NAME/data.pkl",
            file=source.name,
        )
    root = roots[0]
    if f"{root}/constants.pkl" in records:
        raise CheckpointFormatError(
            f"{source.name} is a TorchScript program, not a state dict",
            file=source.name,
            hint="torch.save(torch.jit.load(path).state_dict(), new_path)",
        )
    written = records.get(f"{root}/byteorder")
    order = "little" if written is None else written.read(_LONGEST_ORDER).decode("latin-1")
    if order not in ("little", "big"):
        raise CheckpointFormatError(f"{source.name} has the unknown byte order {order!r}", file=source.name)
    record = records[f"{root}/data.pkl"]
    pickled = record.read(max(_SMALL_PICKLE, min(MAX_READ, _MOST_DEFLATION * record.packed_size)))
    storages = MetaStorages(source.name)
    unpickled = unpickle(io.BytesIO(pickled), storages, limit=source.size, safe_globals=safe_globals)
    prefix = f"{root}/data/"
    by_key = {name.removeprefix(prefix): record for name, record in records.items() if name.startswith(prefix)}
    content = _Content(source, unpickled, storages, by_key, "big" if order == "big" else "little")
    content.check_claims()
    return content


def _open_legacy(source: ByteSource, safe_globals: Sequence[Any]) -> _Content:
    file = SourceFile(source)
    storages = MetaStorages(source.name)
    # The magic number, the protocol's version, facts about the system, the object, the storages' keys in their order.
    _, version, _, root, keys = (
        unpickle(file, storages, safe_globals=safe_globals, limit=source.size) for _ in range(5)
    )
    # Only what is plain is made text of: nested lists that share their parts may have more of it than fits in memory.
    plain = isinstance(keys, list) and all(type(key) in (str, int) for key in keys)
    if type(version) is not int or version != _LEGACY_PROTOCOL or not plain or len(set(map(str, keys))) != len(keys):
        raise CheckpointFormatError(f"{source.name} is no valid file of an old torch", file=source.name, hint=_REFETCH)
    records: dict[str, Record] = {}
    position = file.tell()
    for key in map(str, keys):
        numel, itemsize = storages.claims.get(key, (-1, 1))
        nbytes = numel * itemsize
        # Eight bytes before the data count it.
        if numel >= 0 and position + 8 + nbytes <= source.size:
            records[key] = Record(source, key, position + 8, nbytes, nbytes)
        position += 8 + max(0, nbytes)
    counts = source.read_many([(record.offset - 8, 8) for record in records.values()])
    # Both the count and the data are little-endian, whatever machine wrote them.
    counted = {key: int.from_bytes(c, "little", signed=True) for key, c in zip(records, counts, strict=True)}
    for key in map(str, keys):
        if key not in counted or counted[key] != storages.claims[key][0]:
            raise CheckpointFormatError(
                f"the storage {key!r} of {source.name} is cut off, or its size is not what the pickle says",
                file=source.name,
                hint=_REFETCH,
            )
    content = _Content(source, root, storages, records)
    content.check_claims()
    return content


def _load_whole(source: ByteSource, safe_globals: Sequence[Any]) -> _Content:
    """By `torch.load` itself, weights-only: for a torch whose unpickler can't be had alone."""
    path = source.path if isinstance(source, FileSource) else None
    mapped = path is not None and source.read(0, 4) == ZIP_MAGIC
    with admitted(safe_globals), undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            root = torch.load(
                str(path) if mapped else SourceFile(source), map_location="cpu", weights_only=True, mmap=mapped
            )
        except WeightLoadersError:
            raise
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{source.name} is refused by torch's weights-only unpickler: {error}", file=source.name
            ) from error
        except Exception as error:
            raise CheckpointFormatError(
                f"torch can't load {source.name}: {type(error).__name__}: {error}", file=source.name, hint=_REFETCH
            ) from error
    note = "loaded whole by torch.load, because this torch does not let it be catalogued"
    return _Content(source, root, MetaStorages(source.name), loaded=True, notes=[note])


def _no_torch_file(source: ByteSource, head: bytes) -> CheckpointFormatError:
    content, hint = describe_content(source), None
    if content is None and head[:1] != b"\x80":
        content = "its first bytes are those of no known format"
        hint = (
            "files of all kinds are named so: if it is of a format of your own, name the loader that reads it, as "
            "loader='name' or 'package.module:Class'; else fetch it again"
        )
    elif content is None:
        content = "a pickle, but none that torch.save wrote; it is not opened, because unpickling can run code"
    elif content == TAR:
        # What `torch.load` reads as its "legacy .tar format", and refuses weights-only, too.
        content += ", as the first releases of torch wrote; reading its pickles can run code"
        hint = "if you trust it: torch.save(torch.load(path, weights_only=False), new_path), and load that"
    return CheckpointFormatError(
        f"{source.name} is no file of torch.save: {content}",
        file=source.name,
        hint=hint,
    )


# ------------------------------------------------------------------ tensors


def _unreadable(tensor: torch.Tensor) -> str | None:
    """What makes it more than raw values, if it is; None for what can be read."""
    if tensor.is_quantized or str(tensor.dtype).startswith("torch.q"):
        return "quantized"
    if tensor.is_nested:
        return "a nested tensor"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, whose values only its own class knows"
    if tensor.layout is not torch.strided and tensor.layout not in _SPARSE_PARTS:
        return f"of the layout {tensor.layout}"
    return None


def _resolved(raw: TensorInfo, conjugate: bool, negative: bool) -> torch.Tensor:
    """The values behind a lazily conjugated or negated view."""
    tensor = read_tensor(raw)
    if conjugate:
        tensor = torch.conj_physical(tensor)
    return torch.neg(tensor) if negative else tensor


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _dense(parts: list[TensorInfo], layout: torch.layout, shape: tuple[int, ...], name: str, file: str) -> torch.Tensor:
    *indices, values = [read_tensor(part) for part in parts]
    try:
        with enough_memory(name, math.prod(shape) * values.dtype.itemsize, file=file):
            if layout is torch.sparse_coo:
                sparse = torch.sparse_coo_tensor(indices[0], values, shape, device="cpu", check_invariants=True)
            else:
                compressed, plain = indices
                sparse = torch.sparse_compressed_tensor(
                    compressed, plain, values, shape, layout=layout, device="cpu", check_invariants=True
                )
            return sparse.to_dense()
    except RuntimeError as error:
        raise CheckpointFormatError(
            f"the sparse tensor {name!r} of {file} can't be made dense: {error}", file=file, tensor=name
        ) from error


def _listed(items: Sequence[str]) -> str:
    more = len(items) - 8
    return ", ".join(items[:8]) + (f" and {more} more" if more > 0 else "")
