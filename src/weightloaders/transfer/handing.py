"""Tensors one after the other for code of others, a model's own ``load_weights`` for one, as the mode says."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from weightloaders.plan import single_run
from weightloaders.transfer.file_views import map_file, view_of
from weightloaders.transfer.read_ahead import ReadAhead, naming
from weightloaders.transfer.sources import check_unchanged, direct_reads, habits_for, sources_in
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from weightloaders.transfer.options import TransferOptions
    from weightloaders.weights.info import TensorInfo


class HandedTensors:
    """All tensors of a source, each its owner's: read ahead, or in mode ``mmap`` views of their file.

    To be iterated over once, and closed where the loop ends early.

    Args:
        infos: The tensors, in the order in which they lie in their files.
        read: Reads one that has no raw bytes.
        options: How.

    Attributes:
        extra_memory: Most bytes held at one time, so far.
        bytes_read: Bytes that were read, so far.
        bytes_mapped: Bytes of views of files, so far.
        notes: What could not be done as asked, a sentence each.
    """

    def __init__(
        self, infos: Sequence[TensorInfo], read: Callable[[TensorInfo], torch.Tensor], options: TransferOptions
    ) -> None:
        self.extra_memory = self.bytes_read = self.bytes_mapped = 0
        self.notes: list[str] = []
        self._infos, self._read, self._options = infos, read, options

    def __iter__(self) -> Generator[tuple[TensorInfo, torch.Tensor]]:
        pairs = self._mapped() if self._options.mode == "mmap" else self._ahead(self._infos)
        with contextlib.closing(pairs):
            yield from pairs
        check_unchanged(sources_in(self._infos))

    def _ahead(self, infos: Sequence[TensorInfo]) -> Generator[tuple[TensorInfo, torch.Tensor]]:
        direct, room = direct_reads(self._options, habits_for(sources_in(infos), self._options).threads)
        if direct is not None:
            infos = [
                replace(info, extents=tuple(replace(e, source=direct.source(e.source)) for e in info.extents))
                for info in infos
            ]
            self.notes = direct.notes
        ahead = ReadAhead(infos, self._read, self._options.model_copy(update={"extra_memory": room}))
        with contextlib.closing(iter(ahead)) as tensors:
            for info, tensor in tensors:
                self.bytes_read += info.bytes_stored
                held = ahead.most_held + (0 if direct is None else direct.most_held)
                self.extra_memory = max(self.extra_memory, held)
                yield info, tensor
                # What is let go of gives its memory to the next.
                del tensor

    def _mapped(self) -> Generator[tuple[TensorInfo, torch.Tensor]]:
        for file, group in itertools.groupby(self._infos, _file_of):
            infos = list(group)
            memory: torch.Tensor | str = ""
            source = infos[0].extents[0].source if file else None
            if isinstance(source, FileSource):
                memory = map_file(source, max(info.extents[0].offset + info.nbytes for info in infos))
                self.notes.extend([memory] if isinstance(memory, str) else [])
            if isinstance(memory, str):
                yield from self._ahead(infos)
                continue
            for info in infos:
                with naming(info):
                    # Where it was cut, the system ends a process that touches what was behind.
                    check_unchanged([info.extents[0].source])
                self.bytes_mapped += info.nbytes
                yield info, view_of(memory, info.extents[0].offset, info.dtype, info.shape)


def _file_of(info: TensorInfo) -> object:
    """What tells the file that a tensor may be a view of from others; None where there is none."""
    extent = single_run(info)
    if extent is None or not isinstance(extent.source, FileSource) or not info.numel:
        return None
    is_plain = extent.is_native and extent.stored_dtype == info.dtype and extent.offset % info.dtype.itemsize == 0
    return (extent.source.name, extent.source.identity) if is_plain else None
