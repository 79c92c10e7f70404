"""The safetensors format: reading the catalogue of a file, and a writer that streams.

A file is eight bytes (the header's length, little-endian), a header in JSON, and the tensors' bytes, one after the
other; see https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weightloaders.errors import CheckpointFormatError, SaveError
from weightloaders.weights.atomic import make_durable, new_file, replaced_file, replaced_files, saving
from weightloaders.weights.collector import collector_paused
from weightloaders.weights.info import HOST_BYTEORDER, TensorInfo
from weightloaders.weights.reading import enough_memory, memory_of, swap_bytes
from weightloaders.weights.safetensors_header import DTYPES, METADATA, NotAHeaderError, parse_header
from weightloaders.weights.sniff import SAFETENSORS, advice, describe_content
from weightloaders.weights.texts import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import BinaryIO

    from weightloaders.weights.source import ByteSource

# The package's own limit (MAX_HEADER_SIZE); a longer header is read by nobody else.
MAX_HEADER_BYTES = 100_000_000

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_RANKS = {code: rank for rank, code in enumerate(DTYPES)}

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYOUT = re.compile(r"model((-\d+)?-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


# ------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """What the header of a safetensors file says.

    Attributes:
        infos: The tensors, in storage order.
        metadata: The texts of ``__metadata__``; empty where there are none.
    """

    infos: tuple[TensorInfo, ...]
    metadata: dict[str, str]


def read_safetensors(source: ByteSource, *, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsFile:
    """Read the header of a safetensors file, and none of its data.

    Args:
        source: The file, or anything that can be read like one.
        max_header_bytes: A longer header is refused before it is read.

    Raises:
        CheckpointFormatError: If the file is truncated or another kind of file, or its header claims what can't be.
        UnsupportedDtypeError: If a tensor's dtype is one that this torch does not have.
        SourceReadError: If it can't be read.
    """
    return understand_header(source, read_header(source, max_header_bytes))


def read_header(source: ByteSource, max_header_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """The bytes of a header, not yet looked at. Raises as `read_safetensors`."""
    size = source.size
    if size < 8:
        raise _wrong_content(source, f"has only {size} bytes, fewer than any safetensors file")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > max_header_bytes:
        raise _wrong_content(
            source,
            f"claims a header of {length} bytes, more than the limit of {max_header_bytes} (the file has {size} bytes)",
            hint="raise the limit (max_header_bytes) if the file is to be trusted; else fetch it again",
        )
    if length > size - 8:
        raise _wrong_content(
            source, f"is truncated: its header has {length} bytes by its own word, but only {size - 8} are there"
        )
    return source.read(8, length)


def understand_header(source: ByteSource, raw: bytes) -> SafetensorsFile:
    """What the bytes of a header say. Raises as `read_safetensors`."""
    start = 8 + len(raw)
    try:
        with collector_paused():
            entries, metadata = parse_header(raw, source.size - start, source.name)
            infos = [
                TensorInfo.of_one_run(name, dtype, shape, source, start + begin, end - begin)
                for begin, end, name, dtype, shape in entries
            ]
    except NotAHeaderError as error:
        raise _wrong_content(source, str(error)) from error
    return SafetensorsFile(tuple(infos), metadata)


def _wrong_content(source: ByteSource, problem: str, *, hint: str | None = None) -> CheckpointFormatError:
    """The error for a whole file: what it is, where that can be told, else the problem that was met."""
    what = describe_content(source)
    if what is None or what == SAFETENSORS:
        message = f"{source.name} {problem}"
    else:
        message, hint = f"{source.name} is not a safetensors file: it is {what}", None
    return CheckpointFormatError(message, file=source.name, hint=hint or advice(what))


# ------------------------------------------------------------------ writing


class Described(Protocol):
    """What the writer needs to know of a tensor beforehand; a `TensorInfo` is one."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""


def write_safetensors(
    path: str | Path,
    infos: Iterable[Described],
    tensors: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file, one tensor at a time, atomically.

    The file appears under its name once it is complete; until then, and if anything fails, the old one stays. It may
    be a file that ``tensors`` reads from.

    Args:
        path: The file to make or replace; its folder must exist.
        infos: Name, dtype and shape of each tensor. They may come in any order; the file has the package's own order.
        tensors: Returns a tensor by its name: on any device, dense or not. Called once for each, in the file's order.
        metadata: Text for ``__metadata__``.

    Raises:
        SaveError: If something can't be stored in this format, a tensor is not what ``infos`` says, or writing fails.
    """
    path = Path(path)
    draft = _Draft(_rows(infos), metadata)
    with replaced_file(path) as file:
        draft.write(file, tensors, path)


def write_sharded(
    folder: str | Path,
    infos: Iterable[Described],
    tensors: Callable[[str], torch.Tensor],
    *,
    max_shard_size: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write a folder in the hub's layout, one tensor at a time.

    That is ``model.safetensors`` if everything fits in one file, else ``model-00001-of-0000N.safetensors`` and so on
    with ``model.safetensors.index.json`` (https://huggingface.co/docs/transformers/big_models). Where shards of those
    names are there already, the new ones are ``model-1-00001-of-0000N.safetensors`` and so on, so that at every moment
    the index names a whole set. Files of an earlier save in this layout are removed. If anything fails, the folder is
    as it was.

    Args:
        folder: Made where it does not exist. The files in it may be those that ``tensors`` reads from.
        infos: Name, dtype and shape of each tensor; shards are filled in this order.
        tensors: See `write_safetensors`.
        max_shard_size: Bytes of tensors in a file; a larger tensor gets a file of its own.
        metadata: Text for each file's ``__metadata__``. Default: ``{"format": "pt"}``, which transformers expects.

    Returns:
        The files, the index last.

    Raises:
        SaveError: As `write_safetensors`.
    """
    folder = Path(folder)
    draft = SafetensorsFolder(folder, infos, max_shard_size=max_shard_size, metadata=metadata)
    passing = None if _INDEX in draft.files else _INDEX
    with replaced_files(folder, lambda name: _LAYOUT.fullmatch(name) is not None, passing) as stage:
        draft.write(stage, tensors)
    return tuple(folder / name for name in draft.files)


class SafetensorsFolder:
    """The files of a folder in the hub's layout before they are written.

    Args:
        folder: Where they are to lie in the end, for messages.
        infos: As for `write_sharded`.
        max_shard_size: As for `write_sharded`.
        metadata: As for `write_sharded`.

    Attributes:
        files: Their names, the index last.

    Raises:
        SaveError: If something can't be stored in this format.
    """

    def __init__(
        self,
        folder: Path,
        infos: Iterable[Described],
        *,
        max_shard_size: int = 5 * 10**9,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        rows = _rows(infos)
        shards = _in_shards(rows, max_shard_size)
        count = len(shards)
        names = _free_names(folder, count) if count > 1 else [_SINGLE_FILE]
        self._folder = folder
        self._drafts = [_Draft(shard, {"format": "pt"} if metadata is None else metadata) for shard in shards]
        self._index: bytes | None = None
        self.files = names
        # Where there is an index, a single file needs one as well, until the other's shards are gone.
        if count > 1 or os.path.lexists(folder / _INDEX):
            weight_map = {row.name: name for name, shard in zip(names, shards, strict=True) for row in shard}
            index = {"metadata": {"total_size": sum(row.nbytes for row in rows)}, "weight_map": weight_map}
            self._index = json.dumps(index, ensure_ascii=False, indent=2, sort_keys=True).encode("utf-8") + b"\n"
        if count > 1:
            self.files = [*names, _INDEX]

    def write(self, stage: Path, tensors: Callable[[str], torch.Tensor]) -> None:
        """Write them into a folder, and have the disk hold them; raises as `write_sharded`."""
        for name, draft in zip(self.files, self._drafts, strict=False):
            with new_file(stage / name, self._folder / name) as file:
                draft.write(file, tensors, self._folder / name)
        if self._index is not None:
            with saving(self._folder / _INDEX), (stage / _INDEX).open("xb") as file:
                file.write(self._index)
                make_durable(file)


def _free_names(folder: Path, count: int) -> list[str]:
    """Names for shards, none of them that of another save's: these stay until the new index is there."""
    for number in itertools.count():
        stem = f"model-{number}" if number else "model"
        names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if not any(os.path.lexists(folder / name) for name in names):
            break
    return names


class _Row(NamedTuple):
    """A tensor to be written."""

    name: str
    code: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    @property
    def stored_shape(self) -> list[int]:
        """The shape that the header says: it counts each of the two numbers in a byte of F4."""
        return [*self.shape[:-1], self.shape[-1] * 2] if self.code == "F4" else list(self.shape)


def _row(info: Described) -> _Row:
    code = _CODES.get(info.dtype)
    shape = tuple(info.shape)
    if code is None:
        raise SaveError(
            f"tensor {info.name!r} is {info.dtype}, which safetensors has no name for",
            tensor=info.name,
            hint=f"convert it to one of {', '.join(map(str, _CODES))}",
        )
    if code == "F4" and not shape:
        raise SaveError(
            f"tensor {info.name!r} is a scalar of {info.dtype}, which safetensors can't say", tensor=info.name
        )
    return _Row(info.name, code, info.dtype, shape, math.prod(shape) * info.dtype.itemsize)


def _rows(infos: Iterable[Described]) -> list[_Row]:
    rows: dict[str, _Row] = {}
    for row in map(_row, infos):
        name = row.name
        if name in rows:
            raise SaveError(f"two tensors are named {name!r}", tensor=name)
        if name == METADATA:
            raise SaveError(f"no tensor can be named {METADATA}: the format keeps that name to itself", tensor=name)
        if not is_text(name):
            raise SaveError(f"the name {name!r} of a tensor can't be written as UTF-8", tensor=name)
        rows[name] = row
    return list(rows.values())


def _in_shards(rows: list[_Row], max_shard_size: int) -> list[list[_Row]]:
    shards: list[list[_Row]] = [[]]
    filled = 0
    for row in rows:
        if shards[-1] and filled + row.nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += row.nbytes
    return shards


class _Draft:
    """One file before it is written: its header, and the tensors in the order of their bytes."""

    def __init__(self, rows: Iterable[_Row], metadata: Mapping[str, str] | None) -> None:
        # The package's order: the widest dtypes first, so that every tensor is aligned; then by name.
        self._rows = sorted(rows, key=lambda row: (-_RANKS[row.code], row.name))
        header: dict[str, object] = {} if metadata is None else {METADATA: _checked_metadata(metadata)}
        position = 0
        for row in self._rows:
            offsets = [position, position + row.nbytes]
            header[row.name] = {"dtype": row.code, "shape": row.stored_shape, "data_offsets": offsets}
            position += row.nbytes
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        if len(text) > MAX_HEADER_BYTES:
            raise SaveError(
                f"the header would take {len(text)} bytes, more than the {MAX_HEADER_BYTES} that readers accept",
                hint="save in smaller shards",
            )
        self._header = text + b" " * (-len(text) % 8)

    def write(self, file: BinaryIO, tensors: Callable[[str], torch.Tensor], path: Path) -> None:
        """Write everything, and have the disk hold it."""
        with saving(path):
            file.write(len(self._header).to_bytes(8, "little") + self._header)
        for row in self._rows:
            _write_tensor(file, tensors(row.name), row, path)
        with saving(path):
            make_durable(file)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor, row: _Row, path: Path) -> None:
    # A function of its own: when it returns, the tensor is let go before the next one is asked for.
    with enough_memory(row.name, row.nbytes, SaveError, file=path):
        storable = _storable(tensor, row)
    with saving(path):
        file.write(memory_of(storable))


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    checked: dict[Any, Any] = dict(metadata)
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise SaveError(f"metadata is text by text; {key!r} has the value {value!r}")
        if not is_text(key) or not is_text(value):
            raise SaveError(f"the metadata {key!r} can't be written as UTF-8")
    return checked


def _storable(tensor: Any, row: _Row) -> torch.Tensor:
    """The tensor as it is stored: plain, dense, in memory, little-endian; copied only where it is not so already."""
    if not isinstance(tensor, torch.Tensor):
        raise SaveError(f"tensor {row.name!r} is a {type(tensor).__name__}, not a tensor", tensor=row.name)
    if tuple(tensor.shape) != row.shape or tensor.dtype != row.dtype:
        raise SaveError(
            f"tensor {row.name!r} is {list(tensor.shape)} {tensor.dtype}, "
            f"but was announced as {list(row.shape)} {row.dtype}",
            tensor=row.name,
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise SaveError(
            f"tensor {row.name!r} has no dense values to save ({tensor.layout} on {tensor.device})", tensor=row.name
        )
    plain: torch.Tensor = tensor.detach()
    if type(plain) is not torch.Tensor:
        # A subclass need not have its values in its own memory.
        plain = torch.empty(row.shape, dtype=row.dtype, device="cpu").copy_(plain)
    plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    if HOST_BYTEORDER == "big":
        plain = plain.clone()
        swap_bytes(plain)
    return plain
