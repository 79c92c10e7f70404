"""What the engines for safetensors share: the catalogue is weightloaders' own, the reading is theirs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

# Its names are resolved on first use.
import weightloaders as wl
from weightloaders_engines.packages import needed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


class SafetensorsEngine(wl.BaseWeightLoader):
    """A loader of safetensors that a library of somebody else's reads.

    Which files there are, and what is in them, is found out and checked as the loader ``local`` does it, before the
    library is asked for anything.
    """

    #: The module to import, which is also the name of the library for messages.
    module: ClassVar[str]
    #: The extra that brings it, which is also the loader's name.
    extra: ClassVar[str]

    def __init__(
        self, file_pattern: str | None = None, ignore_index: bool = False, include_unindexed: bool = False
    ) -> None:
        self.file_pattern = file_pattern
        self.ignore_index = ignore_index
        self.include_unindexed = include_unindexed

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Catalogue the safetensors files of a folder; no tensor is read.

        Args:
            model_name_or_path: A folder, a file, or an index.

        Raises:
            MissingDependencyError: If the library is not installed.
            SourceError: If a file is absent, or not what it should be.
        """
        needed(self.module, self.extra)
        found = wl.open_weights(
            model_name_or_path,
            "local",
            file_pattern=self.file_pattern,
            ignore_index=self.ignore_index,
            include_unindexed=self.include_unindexed,
        )

        def stream(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            import torch

            by_file: dict[str, list[wl.TensorInfo]] = {}
            for info in map(found.info, names):
                if info.nbytes:
                    by_file.setdefault(info.extents[0].source.name, []).append(info)
                else:
                    # There is nothing to read, and libraries differ in what they make of that.
                    yield info.name, torch.empty(info.shape, dtype=info.dtype)
            for infos in by_file.values():
                infos.sort(key=lambda info: info.extents[0].offset)
            yield from self.read(by_file)

        return wl.Weights.describe(
            found.infos(),
            found.close,
            borrowed=self.borrowed,
            metadata=found.metadata,
            skipped_files=found.skipped_files,
            notes=found.notes,
            stream=stream,
            described_by=found.described_by,
        )

    @abstractmethod
    def read(self, by_file: dict[str, list[wl.TensorInfo]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors, in whatever order is the library's.

        Args:
            by_file: File -> what is wanted of it, in the order in which it lies there; none without elements.

        Raises:
            SourceReadError: If the library fails.
        """

    @classmethod
    def probe(cls, path: str) -> wl.Probe:  # noqa: ARG003 -- the answer is the same for all
        """No: what it reads, weightloaders reads itself."""
        return wl.Probe.no("safetensors are read without a library; name this loader to have them read by it")
