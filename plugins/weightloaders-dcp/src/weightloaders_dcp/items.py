"""Where the bytes of chunks lie within ``.distcp`` files.

Such a file is one item after another, and an item is what `torch.save` makes of one tensor: a small zip file, with the
tensor's bytes raw in it. Its directory is at its end and its pickle at its beginning, which makes many reads of each
item. But what lies before the bytes, the pickle first, is the same in all items of one shape and dtype, down to a
checksum; so only the first of these is taken apart, and of the others no more than that beginning is read.

Where the format of the file is safetensors (``SerializationFormat.SAFETENSORS``), its header says it all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightloaders import ByteSource, TensorInfo
from weightloaders.errors import CheckpointFormatError
from weightloaders.weights.safetensors import read_safetensors
from weightloaders.weights.sniff import is_safetensors
from weightloaders.weights.threads import in_parallel
from weightloaders.weights.torch_zip import read_torch_tensor

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import torch

    from weightloaders_dcp.metadata import Chunk

# Bytes of an item before those of its tensor: some 700 for one of few dimensions.
_HEAD = 1280
_LOCAL_HEADER, _CHECKSUM, _NAME_LENGTH, _NAME = b"PK\x03\x04", slice(14, 18), slice(26, 28), 30


class Items:
    """The items of a checkpoint's files.

    Args:
        sources: The files, by their names in the metadata.
    """

    def __init__(self, sources: Mapping[str, ByteSource]) -> None:
        self._sources = sources
        self._headers: dict[str, dict[str, TensorInfo] | None] = {}
        # Beginnings that were seen before, with what is behind them; their lengths, and where their checksums are.
        self._known: dict[tuple[int, bytes], TensorInfo] = {}
        self._forms: dict[tuple[int, int], None] = {}

    def find(self, chunks: Sequence[tuple[str, Chunk]]) -> list[TensorInfo]:
        """Each chunk, given with its tensor's name, as a tensor of its own.

        Raises:
            CheckpointFormatError: If an item is not what it should be.
            UnsafeCheckpointError: If an item is a pickle that would run code.
        """
        by_file: dict[str, list[tuple[str, Chunk]]] = {}
        for item in chunks:
            by_file.setdefault(item[1].file, []).append(item)
        heads = dict(zip(by_file, in_parallel(lambda file: self._heads(file, by_file[file]), [*by_file]), strict=True))
        return [self._one(name, chunk, next(heads[chunk.file])) for name, chunk in chunks]

    def _heads(self, file: str, items: Sequence[tuple[str, Chunk]]) -> Iterator[bytes]:
        """The beginnings of some items of a file; nothing where a header says what they are."""
        source = self._sources[file]
        self._headers[file] = _header_of(source)
        if self._headers[file] is not None:
            return iter([b""] * len(items))
        for name, chunk in items:
            end = chunk.offset + chunk.length
            if end > source.size:
                raise CheckpointFormatError(
                    f"tensor {name!r} lies at bytes {chunk.offset} to {end} of {source.name}, which has {source.size}",
                    file=source.name,
                    tensor=name,
                    hint="the file is truncated, or belongs to another checkpoint; fetch it again",
                )
        return iter(source.read_many([(chunk.offset, min(_HEAD, chunk.length)) for _, chunk in items]))

    def _one(self, name: str, chunk: Chunk, head: bytes) -> TensorInfo:
        header, source = self._headers[chunk.file], self._sources[chunk.file]
        if header is not None:
            if name not in header:
                raise CheckpointFormatError(f"{source.name} holds no tensor {name!r}", file=source.name, tensor=name)
            return header[name]
        for length, at in self._forms:
            known = self._known.get((chunk.length, _masked(head, length, at)))
            if known is not None:
                return _placed(known, name, source, chunk.offset)
        info = read_torch_tensor(_Window(source, chunk.offset, chunk.length), name)
        if not info.is_raw or not info.extents:
            return info
        length = info.extents[0].offset
        at = head.rfind(_LOCAL_HEADER, 0, length)
        # Strides are in the pickle: only where that stands in front do equal beginnings mean equal items.
        if at > 0 and length <= len(head) and _begins_with_pickle(head):
            self._forms[length, at] = None
            self._known[chunk.length, _masked(head, length, at)] = info
        return _placed(info, name, source, chunk.offset)


def _begins_with_pickle(head: bytes) -> bool:
    """Whether the first file of an item, as torch writes it, is its pickle."""
    end = _NAME + int.from_bytes(head[_NAME_LENGTH], "little")
    return head.startswith(_LOCAL_HEADER) and head[_NAME:end].endswith(b"/data.pkl")


def _masked(head: bytes, length: int, at: int) -> bytes:
    """The beginning of an item without the checksum of its bytes, in the header that stands before them."""
    return head[: at + _CHECKSUM.start] + head[at + _CHECKSUM.stop : length]


def _placed(info: TensorInfo, name: str, source: ByteSource, offset: int) -> TensorInfo:
    """A tensor of an item, as one of the file that has such an item at this place."""
    extents = [replace(extent, source=source, offset=offset + extent.offset) for extent in info.extents]
    return TensorInfo(name, info.dtype, info.shape, extents)


def _header_of(source: ByteSource) -> dict[str, TensorInfo] | None:
    """The tensors of a file in safetensors' format by name; None for a file of items."""
    if not is_safetensors(source.read(0, min(64, source.size))):
        return None
    return {info.name: info for info in read_safetensors(source).infos}


class _Window(ByteSource):
    """A part of a source."""

    def __init__(self, source: ByteSource, offset: int, length: int) -> None:
        self._source, self._offset, self._length = source, offset, length
        self.name = source.name

    @property
    def origin(self) -> ByteSource:
        return self._source.origin

    @property
    def size(self) -> int:
        return self._length

    @property
    def identity(self) -> Hashable:
        return self._source.identity, self._offset, self._length

    def read_into(self, view: memoryview, offset: int) -> None:
        self._source.read_into(view, self._offset + offset)


def check(info: TensorInfo, chunk: Chunk, dtype: torch.dtype, file: str) -> None:
    """Raise `CheckpointFormatError` if a chunk is not what the metadata says."""
    if (info.dtype, info.shape) != (dtype, chunk.shape):
        raise CheckpointFormatError(
            f"{file} holds a chunk of tensor {info.name!r} that is {list(info.shape)} {info.dtype}, where the metadata "
            f"says {list(chunk.shape)} {dtype}",
            file=file,
            tensor=info.name,
            hint="the file belongs to another checkpoint than its .metadata; fetch both again",
        )
