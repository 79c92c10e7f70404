"""Where the bytes of chunks lie within ``.distcp`` files.

Such a file is one item after another, and an item is what `torch.save` makes of one tensor: a small zip file, with the
tensor's bytes raw in it. Its directory is at its end and its pickle at its beginning, which makes many reads of each
item. But what lies before the bytes, the pickle first, is the same in all items of one shape and dtype, down to a
checksum; so only the first of these is taken apart, and of the others no more than that beginning is read. All
beginnings, and the ends of those that are taken apart, are read together: an end lies before the next beginning.

Where the format of the file is safetensors (``SerializationFormat.SAFETENSORS``), its header says it all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from weightloaders import ByteSource, TensorInfo
from weightloaders.errors import CheckpointFormatError
from weightloaders.weights.safetensors import read_safetensors
from weightloaders.weights.sniff import is_safetensors
from weightloaders.weights.threads import in_parallel
from weightloaders.weights.torch_zip import END_BYTES_OF_TENSOR, read_torch_tensor

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterator, Mapping, Sequence

    import torch

    from weightloaders_dcp.metadata import Chunk

# Bytes of an item before those of its tensor: some 700 for one of few dimensions.
_HEAD = 1280
_LOCAL_HEADER, _CHECKSUM, _NAME_LENGTH, _NAME = b"PK\x03\x04", slice(14, 18), slice(26, 28), 30


class _Item(NamedTuple):
    """What was read of an item: its first bytes, and its last ones if it is to be taken apart."""

    head: bytes
    end: bytes = b""


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
        # Of those that are likely to begin alike, one.
        firsts = {(chunk.length, chunk.shape): chunk for _, chunk in reversed(chunks)}
        ends = {*firsts.values()}
        read = dict(
            zip(by_file, in_parallel(lambda file: self._read(file, by_file[file], ends), [*by_file]), strict=True)
        )
        return [self._one(name, chunk, next(read[chunk.file])) for name, chunk in chunks]

    def _read(self, file: str, items: Sequence[tuple[str, Chunk]], ends: Container[Chunk]) -> Iterator[_Item]:
        """The beginnings of some items of a file, and these ends; nothing where a header says what they are."""
        source = self._sources[file]
        self._headers[file] = _header_of(source)
        if self._headers[file] is not None:
            return iter([_Item(b"")] * len(items))
        for name, chunk in items:
            end = chunk.offset + chunk.length
            if end > source.size:
                raise CheckpointFormatError(
                    f"tensor {name!r} lies at bytes {chunk.offset} to {end} of {source.name}, which has {source.size}",
                    file=source.name,
                    tensor=name,
                    hint="the file is truncated, or belongs to another checkpoint; fetch it again",
                )
        ending = [chunk for _, chunk in items if chunk in ends]
        lengths = [min(END_BYTES_OF_TENSOR, chunk.length) for chunk in ending]
        read = source.read_many(
            [(chunk.offset, min(_HEAD, chunk.length)) for _, chunk in items]
            + [(chunk.offset + chunk.length - length, length) for chunk, length in zip(ending, lengths, strict=True)]
        )
        end_of = dict(zip(ending, read[len(items) :], strict=True))
        return iter([_Item(head, end_of.get(chunk, b"")) for head, (_, chunk) in zip(read, items, strict=False)])

    def _one(self, name: str, chunk: Chunk, item: _Item) -> TensorInfo:
        header, source, head = self._headers[chunk.file], self._sources[chunk.file], item.head
        if header is not None:
            if name not in header:
                raise CheckpointFormatError(f"{source.name} holds no tensor {name!r}", file=source.name, tensor=name)
            return header[name]
        for length, at in self._forms:
            known = self._known.get((chunk.length, _masked(head, length, at)))
            if known is not None:
                return _placed(known, name, source, chunk.offset)
        info = read_torch_tensor(_Window(source, chunk, item), name)
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
    """An item as a source of its own, whose first and last bytes are here already."""

    def __init__(self, source: ByteSource, chunk: Chunk, item: _Item) -> None:
        self._source, self._offset, self._length = source, chunk.offset, chunk.length
        self._known = ((0, item.head), (chunk.length - len(item.end), item.end))
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
        for start, content in self._known:
            if start <= offset and offset + len(view) <= start + len(content):
                view[:] = content[offset - start : offset - start + len(view)]
                return
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
