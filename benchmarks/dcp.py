"""Checkpoints of several ranks, ours beside `torch.distributed.checkpoint.load`: time to fill a model in one process.

See README.md for the method.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# SmolLM2-135M's matrices: a few large tensors, each cut by rows among ranks.
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
WAYS = ("weightloaders", "torch.distributed.checkpoint")


def shapes_of_smollm2() -> dict[str, tuple[int, int]]:
    """Name -> shape."""
    found = {"embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("q_proj", HIDDEN, HIDDEN), ("k_proj", 192, HIDDEN), ("v_proj", 192, HIDDEN), ("o_proj", HIDDEN, HIDDEN),
            ("gate_proj", INTERMEDIATE, HIDDEN), ("up_proj", INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE),
        ):  # fmt: skip
            found[f"layers.{layer}.{name}.weight"] = rows, columns
    return found


def write(folder: Path, shapes: dict[str, tuple[int, int]], ranks: int) -> None:
    """What that many ranks would have saved, each its rows of every tensor; file by file as DCP lays them out."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    folder.mkdir()
    tensors, stored = {}, {}
    for name, shape in shapes.items():
        rows = shape[0] // ranks
        chunks = [
            metadata.ChunkStorageMetadata(torch.Size((rank * rows, 0)), torch.Size((rows, shape[1])))
            for rank in range(ranks)
        ]
        tensors[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.bfloat16), torch.Size(shape), chunks
        )
    generator = torch.Generator().manual_seed(0)
    for rank in range(ranks):
        file = f"__{rank}_0.distcp"
        with (folder / file).open("wb") as out:
            for name, entry in tensors.items():
                chunk, item = entry.chunks[rank], io.BytesIO()
                torch.save(torch.randn(chunk.sizes, generator=generator).to(torch.bfloat16), item)
                index = metadata.MetadataIndex(name, chunk.offsets, rank)
                stored[index] = filesystem._StorageInfo(file, out.tell(), len(item.getvalue()))  # noqa: SLF001
                out.write(item.getvalue())
    paths = {name: (name,) for name in tensors}
    whole = metadata.Metadata(tensors, paths, stored, metadata.StorageMeta(), "1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(whole))


def model_of(shapes: dict[str, tuple[int, int]]) -> torch.nn.Module:
    """A module with these parameters."""
    import torch

    root = torch.nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, leaf = name.split(".")
        for step in path:
            if step not in module._modules:  # noqa: SLF001
                module.add_module(step, torch.nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    return root


def ways(folder: Path, model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """Name -> what fills the model."""
    import torch.distributed.checkpoint as dcp

    from weightloaders import load_into

    return {
        WAYS[0]: lambda: load_into(model, folder, loader="weightloaders_dcp:DcpLoader", progress=False),
        WAYS[1]: lambda: dcp.load(model.state_dict(), checkpoint_id=folder, no_dist=True),
    }


def compare(what: str, shapes: dict[str, tuple[int, int]], ranks: int, rounds: int, folder: Path) -> bool:
    """Time both ways in turn, and print the medians; whether they gave the same values."""
    import torch

    write(folder, shapes, ranks)
    model = model_of(shapes)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sums: dict[str, list[torch.Tensor]] = {}
    for turn in range(rounds + 1):
        for way, fill in ways(folder, model).items():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            start = time.perf_counter()
            fill()
            taken = time.perf_counter() - start
            # The first of each warms up what is imported and cached.
            if turn:
                seconds[way].append(taken)
            else:
                sums[way] = [parameter.detach().clone() for parameter in model.parameters()]
    same = all(map(torch.equal, *sums.values()))
    nbytes = sum(2 * rows * columns for rows, columns in shapes.values())
    print(f"{what}: {len(shapes)} tensors, {nbytes / 1e6:.0f} MB, {ranks} ranks; equal values: {same}")
    for way, taken in seconds.items():
        print(f"  {way:<30} {statistics.median(taken):7.3f} s  ({min(taken):.3f} to {max(taken):.3f})")
    return same


def main() -> None:
    """Compare both ways for a model of a few ranks, and for one in very many slices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    # Hooks of what else is installed have no part in this.
    os.environ.update(OMP_NUM_THREADS="1", WEIGHTLOADERS_DISABLE="weightloaders-checksum,weightloaders-meta")
    warnings.filterwarnings("ignore", message=".*assuming the intent is to")
    with tempfile.TemporaryDirectory() as place:
        few = compare("SmolLM2-135M", shapes_of_smollm2(), 4, rounds, Path(place) / "few")
        slices = {f"layers.{i}.weight": (256, 64) for i in range(500)}
        many = compare("32,000 slices", slices, 64, max(1, rounds // 2), Path(place) / "many")
    sys.exit(not (few and many))


if __name__ == "__main__":
    main()
