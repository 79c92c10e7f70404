"""The engines against the suite that every loader has to pass."""

from __future__ import annotations

from typing import ClassVar

import torch
from safetensors.torch import save_file
from tensorizer import TensorSerializer
from weightloaders_engines import FastSafetensorsLoader, RunAiLoader, TensorizerLoader

from weightloaders.testing import LoaderConformance

# Both the format's writer and its reader have them.
SAFETENSORS = {
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip


class TestRunAi(LoaderConformance):
    loader = RunAiLoader
    recognised = False  # what is read without a library as well is left to that
    dtypes = SAFETENSORS

    def write_checkpoint(self, folder, tensors):
        own = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(own, folder / "model.safetensors")
        return folder


class TestFastSafetensors(TestRunAi):
    loader = FastSafetensorsLoader
    recognised = False  # what is read without a library as well is left to that
    dtypes = SAFETENSORS - {torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class TestTensorizer(LoaderConformance):
    loader = TensorizerLoader

    def write_checkpoint(self, folder, tensors):
        serializer = TensorSerializer(str(folder / "model.tensors"))
        serializer.write_state_dict(dict(tensors))
        serializer.close()
        return folder / "model.tensors"


class TestTensorizerFilesWithoutTensorizer(TestTensorizer):
    options: ClassVar = {"engine": "weightloaders"}
