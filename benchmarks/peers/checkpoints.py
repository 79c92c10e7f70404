"""Writing the checkpoints, and the reference: what the model's parameters must be, made by plain torch code."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from benchmarks.peers.workloads import Layout, Shape, Workload

# Primes: what is put a chunk or two beside its place must not find the same values there.
_POOL_VALUES, _SMALL_POOL_VALUES = 15_999_989, 99_991


class Values:
    """Random values, the same for a name each time: a stretch of a pool, which begins elsewhere for each name."""

    def __init__(self, dtype: torch.dtype, *, few: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randn(_SMALL_POOL_VALUES if few else _POOL_VALUES, generator=generator).to(dtype)

    def of(self, name: str, shape: Shape) -> torch.Tensor:
        """The stored tensor of a name."""
        count = math.prod(shape)
        start = zlib.crc32(name.encode()) % len(self._pool)
        pieces = []
        while count:
            piece = self._pool[start : start + count]
            pieces.append(piece)
            count, start = count - len(piece), 0
        return torch.cat(pieces).view(shape)


def write(workload: Workload, layout: Layout, folder: Path, formats: Iterable[str]) -> None:
    """Write a workload's checkpoint into a subfolder for each format, and the digests of what it makes.

    Args:
        workload: The workload.
        layout: Its layout at the size wanted.
        folder: Where.
        formats: Of ``"safetensors"``, ``"torch"``, ``"tensorizer"``, ``"raw"``.
    """
    values = Values(workload.stored, few=sum(map(math.prod, layout.stored.values())) < _POOL_VALUES)
    for name in formats:
        place = folder / name
        place.mkdir(parents=True)
        _WRITERS[name](workload, layout, values, place)
        if layout.config is not None:
            dtype = str(workload.stored).removeprefix("torch.")
            (place / "config.json").write_text(json.dumps(layout.config | {"dtype": dtype}))
        for file in place.iterdir():
            _make_durable(file)

    def made(name: str) -> tuple[str, torch.Tensor]:
        recipe = layout.parameters[name]
        parameter = recipe.function([values.of(source, layout.stored[source]) for source in recipe.sources])
        return name, parameter.to(workload.wanted)

    reference = digests(made(name) for name in layout.parameters)
    (folder / "reference.json").write_text(json.dumps(reference))


def _write_safetensors(workload: Workload, layout: Layout, values: Values, folder: Path) -> None:
    from safetensors.torch import save_file

    weight_map = {}
    for file, names in _shards(layout, workload.shards, "model", "safetensors"):
        save_file({name: values.of(name, layout.stored[name]) for name in names}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if workload.shards > 1:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


def _write_torch(workload: Workload, layout: Layout, values: Values, folder: Path) -> None:
    weight_map = {}
    for file, names in _shards(layout, workload.shards, "pytorch_model", "bin"):
        torch.save({name: values.of(name, layout.stored[name]) for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    if workload.shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_tensorizer(workload: Workload, layout: Layout, values: Values, folder: Path) -> None:
    from tensorizer import TensorSerializer

    from benchmarks.peers.workloads import build

    model = build(layout, workload.stored).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values.of(name, layout.stored[name]))
    serializer = TensorSerializer(str(folder / "model.tensors"))
    serializer.write_module(model)
    serializer.close()


def _write_raw(workload: Workload, layout: Layout, values: Values, folder: Path) -> None:
    del workload
    with (folder / "model.bin").open("wb") as data, (folder / "meta.txt").open("w") as meta:
        for name, shape in layout.stored.items():
            meta.write(f"{name}:{','.join(map(str, shape))}\n")
            data.write(memoryview(values.of(name, shape).numpy()).cast("B"))


_WRITERS = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "tensorizer": _write_tensorizer,
    "raw": _write_raw,
}


def _shards(layout: Layout, count: int, stem: str, suffix: str) -> Iterator[tuple[str, list[str]]]:
    """The files' names and the tensors in each: in their order, of about the same size, none of them empty."""
    if count == 1:
        yield f"{stem}.{suffix}", list(layout.stored)
        return
    left = list(layout.stored.items())
    for number in range(count):
        share = sum(math.prod(shape) for _, shape in left) / (count - number)
        taken: list[str] = []
        held = 0
        while len(left) > count - number - 1 and (not taken or held < share):
            name, shape = left.pop(0)
            taken.append(name)
            held += math.prod(shape)
        yield f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}", taken


def _make_durable(file: Path) -> None:
    """Write it out: what is dirty can't be dropped from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ------------------------------------------------------------------ the reference


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """SHA-256 of the bytes of each, by name."""

    def digest(item: tuple[str, torch.Tensor]) -> tuple[str, str]:
        name, tensor = item
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return name, hashlib.sha256(memoryview(data)).hexdigest()

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(digest, tensors))


def differing(found: Mapping[str, str], folder: Path) -> list[str]:
    """Names of parameters that are not what the reference says."""
    reference = json.loads((folder / "reference.json").read_text())
    return sorted(name for name in reference.keys() | found.keys() if reference.get(name) != found.get(name))
