"""The suite for loaders, of a bucket: safetensors, written by the package that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from weightloaders_remote import RemoteLoader

from weightloaders.testing import LoaderConformance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from conftest import S3


class TestRemote(LoaderConformance):
    loader = RemoteLoader
    name = "remote"
    dtypes: ClassVar = frozenset(LoaderConformance.dtypes) - {torch.complex128}

    @pytest.fixture(autouse=True)
    def _server(self, s3: S3) -> None:
        self.s3 = s3

    def write_checkpoint(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> str:
        # Each in memory of its own, which safetensors wants.
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        return f"{self.s3.upload(folder, self.key(folder))}/model.safetensors"

    def files_changed(self, folder: Path) -> None:
        self.s3.remove(self.key(folder))
        self.s3.upload(folder, self.key(folder))

    def key(self, folder: Path) -> str:
        return f"bucket{folder.as_posix()}"

    @pytest.mark.slow
    def test_changed_bytes_never_end_in_a_foreign_exception(self, tmp_path: Path) -> None:
        super().test_changed_bytes_never_end_in_a_foreign_exception(tmp_path)

    @pytest.mark.slow
    def test_a_spawned_process_reads_the_same_values(self, tmp_path: Path) -> None:
        super().test_a_spawned_process_reads_the_same_values(tmp_path)
