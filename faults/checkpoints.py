"""The models and the checkpoints in all formats that executions are about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders.weights.info import TensorInfo
from weightloaders.weights.raw import write_raw
from weightloaders.weights.safetensors import write_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

# Some take several reads, some are read together at one go.
_SHAPES = ((300, 300), (7,), (64, 64), (1,), (200, 500), (33, 3), (128, 256), (5,), (90, 400), (11,))
#: Bytes a shard, so that there are a few.
SHARD_BYTES = 200_000


class Plain(nn.Module):
    """Nothing but parameters."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        for number, shape in enumerate(_SHAPES):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)))


class Own(Plain):
    """A model that loads itself."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the parameters."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def values(seed: int) -> dict[str, torch.Tensor]:
    """Other values for another seed."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(_SHAPES)}


def _infos(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(name, t.dtype, tuple(t.shape), read=lambda t=t: t) for name, t in tensors.items()]  # type: ignore[misc]


def _write_safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_sharded(folder, _infos(tensors), tensors.__getitem__, max_shard_size=SHARD_BYTES)


def _write_torch(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def _write_raw(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_raw(folder, _infos(tensors), tensors.__getitem__)


def _write_npz(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    np.savez(folder / "model.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]


def _write_gguf(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


#: Format -> the loader that reads it, and what writes it.
FORMATS: dict[str, tuple[str, Callable[[Path, dict[str, torch.Tensor]], None]]] = {
    "safetensors": ("local", _write_safetensors),
    "shards": ("local", _write_shards),
    "torch": ("torch", _write_torch),
    "raw": ("binary", _write_raw),
    "npz": ("npz", _write_npz),
    "gguf": ("gguf", _write_gguf),
}
