"""`FastSafetensorsLoader`: safetensors by fastsafetensors (https://github.com/foundation-model-stack/fastsafetensors)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from weightloaders.errors import OptionsError
from weightloaders_engines.packages import needed, reading
from weightloaders_engines.safetensors_files import SafetensorsEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    import weightloaders as wl


class FastSafetensorsLoader(SafetensorsEngine):
    """Safetensors read by fastsafetensors: a file at a time, whole, of which the tensors are views.

    Args:
        file_pattern: A glob for the names of the files to read. Default: ``*.safetensors``.
        ignore_index: Read all files that match, whatever an index says.
        include_unindexed: Read also the files and tensors that the index omits.
        max_threads: How many threads it reads with.
        bounce_buffer_kb: The size of the buffers that it reads through, in KiB.

    Raises:
        OptionsError: If a number is not positive.
    """

    description: ClassVar[str] = "safetensors, read by fastsafetensors"
    module: ClassVar[str] = "fastsafetensors"
    extra: ClassVar[str] = "fastsafetensors"
    requires: ClassVar[Mapping[str, str]] = {"fastsafetensors": "weightloaders-engines[fastsafetensors]"}

    def __init__(
        self,
        file_pattern: str | None = None,
        ignore_index: bool = False,
        include_unindexed: bool = False,
        max_threads: int = 16,
        bounce_buffer_kb: int = 16 * 1024,
    ) -> None:
        super().__init__(file_pattern, ignore_index, include_unindexed)
        for name, value in (("max_threads", max_threads), ("bounce_buffer_kb", bounce_buffer_kb)):
            if value <= 0:
                raise OptionsError(f"{name} is a positive number, not {value}")
        self.max_threads = max_threads
        self.bounce_buffer_kb = bounce_buffer_kb

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Catalogue the safetensors files of a folder; see `SafetensorsEngine.get_weights`.

        Raises:
            SourceReadError: If fastsafetensors does not know a dtype in one of them, be it wanted or not.
        """
        weights = super().get_weights(model_name_or_path)
        library = needed(self.module, self.extra)
        try:
            for file in dict.fromkeys(extent.source.name for info in weights.infos() for extent in info.extents):
                with reading("fastsafetensors", file), contextlib.closing(self._loader(library)) as loader:
                    loader.add_filenames({0: [file]})
        except BaseException:
            weights.close()
            raise
        return weights

    def _loader(self, library: Any) -> Any:
        return library.SafeTensorsFileLoader(
            library.SingleGroup(),
            device="cpu",
            nogds=True,
            max_threads=self.max_threads,
            bbuf_size_kb=self.bounce_buffer_kb,
        )

    def read(self, by_file: dict[str, list[wl.TensorInfo]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors. They share the memory of their file, which lives as long as one of them does."""
        library = needed(self.module, self.extra)
        for file, infos in by_file.items():
            wanted = {info.name for info in infos}
            with reading("fastsafetensors", file), contextlib.ExitStack() as stack:
                loader = stack.enter_context(contextlib.closing(self._loader(library)))
                loader.add_filenames({0: [file]})
                loader.set_tensor_filter(wanted.__contains__)
                buffers = stack.enter_context(contextlib.closing(loader.copy_files_to_device()))
                for info in infos:
                    yield info.name, buffers.get_tensor(info.name)
