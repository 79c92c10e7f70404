"""`RunAiLoader`: safetensors by the Run:ai model streamer (https://github.com/run-ai/runai-model-streamer)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from weightloaders.errors import OptionsError
from weightloaders_engines.packages import needed, reading
from weightloaders_engines.safetensors_files import SafetensorsEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    import weightloaders as wl

_LIMIT_VARIABLE = "RUNAI_STREAMER_MEMORY_LIMIT"
# The streamer itself would take 40 GB, which is mostly the whole model once more, and no quicker.
_USUAL_LIMIT = 1 << 30


class RunAiLoader(SafetensorsEngine):
    """Safetensors read by the Run:ai model streamer, whose threads fill a ring of buffers that it reuses.

    How many threads there are is said in its environment variable ``RUNAI_STREAMER_CONCURRENCY``.

    Args:
        file_pattern: A glob for the names of the files to read. Default: ``*.safetensors``.
        ignore_index: Read all files that match, whatever an index says.
        include_unindexed: Read also the files and tensors that the index omits.
        memory_limit: Bytes that its buffers may take, or the largest tensor if that takes more. Default: what the
            streamer's own ``RUNAI_STREAMER_MEMORY_LIMIT`` says, else 1 GiB.

    Raises:
        OptionsError: If the limit is not a positive number.
    """

    description: ClassVar[str] = "safetensors, read by the Run:ai model streamer"
    borrowed: ClassVar[bool] = True
    module: ClassVar[str] = "runai_model_streamer"
    extra: ClassVar[str] = "runai"
    requires: ClassVar[Mapping[str, str]] = {"runai_model_streamer": "weightloaders-engines[runai]"}

    def __init__(
        self,
        file_pattern: str | None = None,
        ignore_index: bool = False,
        include_unindexed: bool = False,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(file_pattern, ignore_index, include_unindexed)
        if memory_limit is not None and memory_limit <= 0:
            raise OptionsError(f"memory_limit is a number of bytes, not {memory_limit}")
        self.memory_limit = memory_limit

    def read(self, by_file: dict[str, list[wl.TensorInfo]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors; each lies in a buffer that is filled again when the next is asked for."""
        if not by_file:
            return
        library = needed(self.module, self.extra)
        files = [*by_file]
        chunks = [
            library.FileChunks(number, file, [i.extents[0].offset for i in infos], [i.extents[0].length for i in infos])
            for number, (file, infos) in enumerate(by_file.items())
        ]
        limit = self.memory_limit
        if limit is None and _LIMIT_VARIABLE not in os.environ:
            limit = _USUAL_LIMIT
        if limit is not None:
            limit = max(limit, max(info.nbytes for infos in by_file.values() for info in infos))
        # It tells of an error without saying in which file it was.
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
        with reading("Run:ai's streamer", where), library.FileStreamer() as streamer:
            streamer.stream_files(chunks, memory_limit=limit, owned=False)
            for number, place, buffer in streamer.get_chunks():
                info = by_file[files[number]][place]
                buffer = buffer.view(-1)
                if buffer.data_ptr() % info.dtype.itemsize:
                    # Of what lies in a file at an odd place, no view in its own dtype can be made.
                    buffer = buffer.clone()
                yield info.name, buffer.view(info.dtype).view(info.shape)
