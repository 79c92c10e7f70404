"""The ways to fill a model: ours and the peers'.

Each is used as its documentation says, or as vLLM and nano-vllm use it. Where a checkpoint's names are not the model's,
peers copy each tensor into the part of the parameter where it belongs, as vLLM's weight loaders do.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.peers import limits

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.peers.workloads import Layout, Workload

Pairs = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Case:
    """What a way is given.

    Attributes:
        workload: What is loaded.
        layout: Its layout.
        folder: The checkpoint, in the format that the way reads.
        model: The model, on meta or with memory that was touched.
        buffer: For the limits: memory for the bytes of all files, untouched or touched as the model's is.
    """

    workload: Workload
    layout: Layout
    folder: Path
    model: nn.Module
    buffer: limits.Buffer | None = None

    @property
    def files(self) -> list[Path]:
        """The files with values."""
        return data_files(self.folder)

    def with_memory(self) -> nn.Module:
        """The model with memory that nothing has touched, if it had none."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            self.model.to_empty(device="cpu")
        return self.model


@dataclass(frozen=True)
class Way:
    """A way to fill a model.

    Attributes:
        name: For tables.
        load: Does it. Returns the model; limits return None.
        format: What it reads.
        needs: Modules that it imports, of which the first is the package that is asked for its version.
        lazy: Whether parameters may be mapped from the file, and are read in the timed section after the load.
        environment: Set in its process.
        builds: Whether it builds the model itself, so that it can't be given one.
    """

    name: str
    load: Callable[[Case], nn.Module | None]
    format: str = "safetensors"
    needs: tuple[str, ...] = ("safetensors",)
    lazy: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    builds: bool = False

    @property
    def missing(self) -> str | None:
        """The package that is not installed, if one isn't."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)


def data_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that have values."""
    return sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".tensors"))


# ------------------------------------------------------------------ ours


def _ours(**options: Any) -> Callable[[Case], nn.Module]:
    def load(case: Case) -> nn.Module:
        from weightloaders import load_into

        load_into(case.model, case.folder, rules=case.layout.rules, progress=False, **options)
        return case.model

    return load


def _our_from_pretrained(case: Case) -> nn.Module:
    from weightloaders import from_pretrained

    return from_pretrained(case.folder, dtype=case.workload.wanted, progress=False)[0]


# ------------------------------------------------------------------ peers that hand out tensors, which are copied


def _copied(pairs: Callable[[Case], Pairs]) -> Callable[[Case], nn.Module]:
    def load(case: Case) -> nn.Module:
        model = case.with_memory()
        parameters = dict(model.named_parameters())
        parts = case.layout.parts
        with torch.no_grad():
            for name, tensor in pairs(case):
                part = parts[name]
                part.view(parameters[part.parameter]).copy_(tensor)
        return model

    return load


def _safe_open(case: Case) -> Pairs:
    from safetensors import safe_open

    for file in case.files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- not a mapping
                yield name, opened.get_tensor(name)


def _load_file(case: Case) -> Pairs:
    from safetensors.torch import load_file

    for file in case.files:
        yield from load_file(file).items()


def _run_ai(case: Case) -> Pairs:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        # Each tensor is copied before the next is asked for, so the streamer need not copy it too.
        streamer.stream_files([str(file) for file in case.files], owned=False)
        yield from streamer.get_tensors()


def _fastsafetensors(case: Case) -> Pairs:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    for file in case.files:
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [str(file)]})
        try:
            buffers = loader.copy_files_to_device()
            try:
                for name in loader.get_keys():
                    yield name, buffers.get_tensor(name)
            finally:
                buffers.close()
        finally:
            loader.close()


def _torch_load(*, mmap: bool) -> Callable[[Case], Pairs]:
    def pairs(case: Case) -> Pairs:
        for file in case.files:
            yield from torch.load(file, mmap=mmap, weights_only=True).items()

    return pairs


# ------------------------------------------------------------------ peers that fill the model themselves


def _load_state_dict(pairs: Callable[[Case], Pairs]) -> Callable[[Case], nn.Module]:
    """Into a module whose names are the file's; elsewhere tensor for tensor."""
    copied = _copied(pairs)

    def load(case: Case) -> nn.Module:
        if not case.layout.same_names:
            return copied(case)
        model = case.with_memory()
        model.load_state_dict(dict(pairs(case)))
        return model

    return load


def _accelerate(case: Case) -> nn.Module:
    from accelerate import load_checkpoint_in_model

    model = case.with_memory()
    load_checkpoint_in_model(model, str(case.folder))
    return model


def _transformers(case: Case) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.workload.wanted)


def _tensorizer(case: Case) -> nn.Module:
    from tensorizer import TensorDeserializer

    [file] = case.files
    with TensorDeserializer(str(file), device="cpu") as deserializer:
        deserializer.load_into_module(case.model)
    return case.model


# ------------------------------------------------------------------ raw values


def _raw_entries(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    for line in (case.folder / "meta.txt").read_text().splitlines():
        name, sizes = line.split(":")
        yield name, tuple(map(int, sizes.split(",")))


def _struct_unpack(case: Case) -> Pairs:
    with (case.folder / "model.bin").open("rb") as file:
        for name, shape in _raw_entries(case):
            count = torch.Size(shape).numel()
            values = struct.unpack(f"<{count}f", file.read(4 * count))
            yield name, torch.tensor(values, dtype=torch.float32).view(shape)


def _fromfile(case: Case) -> Pairs:
    import numpy as np

    with (case.folder / "model.bin").open("rb") as file:
        for name, shape in _raw_entries(case):
            values = np.fromfile(file, np.float32, torch.Size(shape).numel())
            yield name, torch.from_numpy(values).view(shape)


def _memmap(case: Case) -> Pairs:
    import numpy as np

    values = torch.from_numpy(np.memmap(case.folder / "model.bin", np.float32, "c"))
    start = 0
    for name, shape in _raw_entries(case):
        count = torch.Size(shape).numel()
        yield name, values[start : start + count].view(shape)
        start += count


# ------------------------------------------------------------------ all of them

OURS = "weightloaders"
OURS_RAW = "weightloaders, raw"
SAFE_OPEN = "safe_open + copy_"
FROM_PRETRAINED = "transformers from_pretrained"
OUR_FROM_PRETRAINED = "weightloaders.from_pretrained"
STRUCT = "struct.unpack"
LIMIT_TOUCHED = "limit: read into touched memory"
LIMIT_FRESH = "limit: read into fresh memory"
LIMIT_DIRECT = "limit: O_DIRECT"

# glibc takes memory for large tensors from the system page by page; by this torch asks for huge pages. Few know it.
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}

WAYS = {
    way.name: way
    for way in (
        Way(LIMIT_TOUCHED, limits.buffered, needs=()),
        Way(LIMIT_FRESH, limits.buffered, needs=()),
        Way(LIMIT_DIRECT, limits.direct, needs=()),
        Way(OURS, _ours(), needs=("weightloaders",)),
        Way("weightloaders, o_direct", _ours(transfer="o_direct"), needs=("weightloaders",)),
        Way("weightloaders, mmap", _ours(transfer="mmap"), needs=("weightloaders",), lazy=True),
        Way("weightloaders, from .bin", _ours(), "torch", ("weightloaders",)),
        Way(OURS_RAW, _ours(), "raw", ("weightloaders",)),
        Way(OUR_FROM_PRETRAINED, _our_from_pretrained, needs=("weightloaders", "transformers"), builds=True),
        Way(SAFE_OPEN, _copied(_safe_open)),
        Way("safe_open + copy_, huge pages", _copied(_safe_open), environment=_HUGE_PAGES),
        Way("load_file + load_state_dict", _load_state_dict(_load_file)),
        Way(FROM_PRETRAINED, _transformers, needs=("transformers",), lazy=True, builds=True),
        Way("accelerate load_checkpoint_in_model", _accelerate, needs=("accelerate",)),
        Way("Run:ai streamer + copy_", _copied(_run_ai), needs=("runai_model_streamer",)),
        Way("fastsafetensors + copy_", _copied(_fastsafetensors), needs=("fastsafetensors",)),
        Way("tensorizer", _tensorizer, "tensorizer", ("tensorizer",), builds=True),
        Way("torch.load + load_state_dict", _load_state_dict(_torch_load(mmap=False)), "torch", ("torch",)),
        Way("torch.load(mmap=True) + load_state_dict", _load_state_dict(_torch_load(mmap=True)), "torch", ("torch",)),
        Way(STRUCT, _copied(_struct_unpack), "raw", ("torch",)),
        Way("numpy.fromfile + copy_", _copied(_fromfile), "raw", ("numpy",)),
        Way("numpy.memmap + copy_", _copied(_memmap), "raw", ("numpy",)),
    )
}
