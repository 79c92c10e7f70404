"""What is fuzzed: a reader, sound files to begin with, ways to change them, and what must hold of whatever it reads."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

import torch

from weightloaders import plan_load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fuzz.mutate import Mutator
    from weightloaders import Weights

#: The files of one input, by name.
Files = dict[str, bytes]

# Planning and loading take longer than reading, so they are done to one of so many that are read.
_PLANNED = 32


class FaultError(Exception):
    """Something that must hold did not: values are not the file's, or another reader has another verdict."""


class Target(ABC):
    """One reader.

    Attributes:
        name: What the target is called.
        fixed: Files that lie beside those of an input, and stay as they are.
        remarks: What was counted beside verdicts, for people.
    """

    name: str

    def __init__(self) -> None:
        self.fixed: Files = {}
        self.remarks: Counter[str] = Counter()
        self._loads = 0

    @abstractmethod
    def seeds(self) -> list[Files]:
        """Inputs that are sound, or interestingly unsound."""

    @abstractmethod
    def mutated(self, files: Files, mutator: Mutator, others: Sequence[Files]) -> Files:
        """A changed input; ``others`` are inputs that parts may be taken from."""

    @abstractmethod
    def read(self, folder: Path, files: Files) -> None:
        """Read an input that lies in a folder, by the public names, values and all.

        Raises:
            WeightLoadersError: If it is refused.
            FaultError: If it was read wrongly.
        """

    def take(self, weights: Weights, folder: Path, files: Files) -> None:
        """Read all values of a source, twice, and see that they are the files' own; now and then, plan and load.

        Raises:
            FaultError: If one is not.
        """
        with weights:
            for name in weights:
                self._take(weights, name, folder, files)
            if self._loads % _PLANNED == 0:
                load_into_fitting(weights)
            self._loads += 1

    def _take(self, weights: Weights, name: str, folder: Path, files: Files) -> None:
        info, tensor = weights.info(name), weights[name]
        if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            raise FaultError(f"{name!r} is {tensor.dtype} {list(tensor.shape)}, not as described: {info}")
        values = bytes_of(tensor)
        for origin in info.origins:
            if not origin.name.startswith(str(folder)):
                raise FaultError(f"{name!r} comes from {origin.name}, outside {folder}")
        for extent in info.extents:
            if extent.length and not 0 <= extent.offset <= extent.offset + extent.length <= extent.source.size:
                raise FaultError(f"{name!r} lies outside its file: {extent}")
        if len(info.extents) == 1 and info.extents[0].is_contiguous and info.extents[0].is_native:
            extent = info.extents[0]
            data = (files | self.fixed).get(extent.source.name.removeprefix(f"{folder}/"))
            if data is not None and extent.stored_dtype == info.dtype:
                if values != data[extent.offset : extent.offset + len(values)]:
                    raise FaultError(f"the values of {name!r} are not the file's")
                return
        # What is read from memory that nobody wrote is seldom the same twice.
        if values != bytes_of(weights[name]):
            raise FaultError(f"the values of {name!r} are others each time they are read")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's values as bytes, row-major."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.numel() else b""


class Model(torch.nn.Module):
    """A model of three tensors, whose names and shapes are those of the sound files."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 2, bias=False)
        self.register_buffer("b", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("c", torch.zeros(()))


def load_into_fitting(weights: Weights) -> None:
    """Plan the load of a source into the model; where the plan is whole, run it and compare.

    Raises:
        FaultError: If the model has other values afterwards than the source.
    """
    model = Model()
    plan = plan_load(model, weights)
    if not plan.ok or not set(model.state_dict()) <= set(weights):
        return
    plan.run(model)
    for name, parameter in model.state_dict().items():
        if bytes_of(parameter) != bytes_of(weights[name].to(parameter.dtype)):
            raise FaultError(f"{name!r} was loaded with other values than the source has")


def sound_tensors() -> dict[str, torch.Tensor]:
    """What sound files hold; the model's, and a few of other dtypes."""
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1, -2, 3], dtype=torch.int8),
        "c": torch.tensor(0.5),
    }
