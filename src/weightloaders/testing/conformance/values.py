"""Checks of what is read: every bit, every dtype, every kind of shape and name."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

import weightloaders as wl
from weightloaders.testing.conformance.author import (
    Author,
    bits,
    expect,
    expect_all,
    expect_names,
    expect_same,
    refusal,
    skip,
)
from weightloaders.testing.tiny import sample

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SHAPES: Mapping[str, tuple[int, ...]] = {
    "scalar": (),
    "one element": (1,),
    "ones": (1, 1, 1),
    "empty": (0,),
    "empty rows": (3, 0, 2),
    "vector": (7,),
    "matrix": (5, 3),
    "odd": (3, 1, 5, 1),
    "many dimensions": (2, 1, 3, 1, 2, 1, 1, 2),
    # Beyond what loaders usually read at once.
    "large": (2049, 2049),
}  # fmt: skip


class Values(Author):
    """What was written is what is read."""

    def test_values_are_exact(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """A declared dtype is read as it was written, to the last bit."""
        shapes = [shape for shape in ((300,), (7, 5), (2, 3, 4), (1,)) if self.holds(shape)]
        tensors = {f"t{i}": sample(dtype, shape, i) for i, shape in enumerate(shapes)}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            expect_all(weights, tensors)

    def test_a_nan_keeps_its_sign_and_payload(self, tmp_path: Path) -> None:
        """What is not a number has many patterns of bits, which some programs give a meaning."""
        tensors = {}
        for dtype in self.declared_dtypes:
            if dtype.is_floating_point and dtype.itemsize > 1:
                whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
                nan = torch.full(self.fitted((2, 3)), math.nan, dtype=dtype).view(whole)
                tensors[f"{dtype}.payload"] = (nan | 42).view(dtype)
                tensors[f"{dtype}.sign"] = (nan | torch.iinfo(whole).min).view(dtype)
        if not tensors:
            skip("the format does not hold floating-point values")
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            for name, tensor in tensors.items():
                expect(bits(weights[name]) == bits(tensor), f"{name!r} was written as NaN of other bits than were read")

    def test_a_dtype_that_is_not_declared_is_refused(self, tmp_path: Path, undeclared_dtype: torch.dtype) -> None:
        """A dtype that is not declared can't be written, or is refused by the loader."""
        shape = next(shape for shape in ((6,), (2, 3), (1, 2, 3)) if self.holds(shape))
        self._refused_or_fail({"t": sample(undeclared_dtype, shape)}, f"{undeclared_dtype}", "`dtypes`", tmp_path)

    def test_every_kind_of_shape_is_exact(self, tmp_path: Path) -> None:
        """Scalars, empty tensors, many dimensions: all that are declared are read, all in one checkpoint."""
        tensors = {kind: sample(self.usual_dtype, shape) for kind, shape in SHAPES.items() if self.holds(shape)}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            expect_all(weights, tensors)

    def test_a_shape_that_is_not_declared_is_refused(self, tmp_path: Path) -> None:
        """A shape that is not declared can't be written, or is refused by the loader."""
        for kind, shape in SHAPES.items():
            if not self.holds(shape):
                folder = tmp_path / kind
                folder.mkdir()
                tensors = {"t": sample(self.usual_dtype, shape)}
                said = "`min_dims`, `max_dims` or `holds_empty`"
                self._refused_or_fail(tensors, f"the shape {list(shape)}", said, folder)

    def _refused_or_fail(self, tensors: Mapping[str, torch.Tensor], what: str, attribute: str, folder: Path) -> None:
        try:
            source = self.write_checkpoint(folder, tensors)
        except Exception:  # noqa: BLE001 -- whatever the writer says, it does not write it
            return

        found: dict[str, torch.Tensor] = {}

        def read() -> None:
            with self.open(source) as weights:
                found.update(weights.items())

        if refusal(read) is None:
            expect_all(found, tensors)
            raise AssertionError(f"{what} is read as it was written, but not declared: add it to {attribute}")

    def test_names_are_kept(self, tmp_path: Path) -> None:
        """Names come back as they were written, be they long, dotted, of several alphabets, or different in case."""
        shape = (3,) if self.holds((3,)) else (3, 1)
        tensors = {name: sample(self.usual_dtype, shape, i) for i, name in enumerate(self.names)}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            expect_all(weights, tensors)

    def test_many_tensors_of_all_dtypes_lie_side_by_side(self, tmp_path: Path) -> None:
        """Sizes that are no multiple of anything put the tensors at all kinds of offsets."""
        dtypes = self.declared_dtypes
        shapes = [shape for shape in ((1,), (3,), (5, 1), (1, 7)) if self.holds(shape)]
        tensors = {f"layer.{i}.weight": sample(dtypes[i % len(dtypes)], shapes[i % len(shapes)], i) for i in range(100)}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            expect_names(weights, tensors)
            for name, tensor in weights.items():
                expect_same(name, tensor, tensors[name], tensors)

    def test_tied_tensors_have_both_names_and_memory_of_their_own(self, tmp_path: Path) -> None:
        """Two names for one tensor, and a view of a part of it: each is read, and none is another's memory."""
        whole = sample(self.usual_dtype, (6, 4))
        tensors = {"embed": whole, "head": whole, "rows": whole[2:4]}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            read = {name: weights[name] for name in tensors}
            expect_all(read, tensors)
            spans = {name: (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for name, tensor in read.items()}
            for name, other in itertools.combinations(spans, 2):
                (a, end_of_a), (b, end_of_b) = spans[name], spans[other]
                expect(end_of_a <= b or end_of_b <= a, f"{name!r} and {other!r} were handed out in the same memory")

    def test_strided_tensors_are_exact(self, tmp_path: Path) -> None:
        """A transposed tensor and one with gaps are values like any other."""
        base = sample(self.usual_dtype, (6, 8))
        tensors = {"transposed": base.t(), "with gaps": base[::2, ::3]}
        with self.open(self.write_checkpoint(tmp_path, tensors)) as weights:
            expect_all(weights, tensors)

    def test_defaults_of_torch_do_not_matter(self, tmp_path: Path) -> None:
        """Whoever has set another default dtype or device reads the same."""
        tensors = self.some_tensors()
        source = self.write_checkpoint(tmp_path, tensors)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                weights = self.open(source)
                read = {name: weights[name] for name in weights}
        finally:
            torch.set_default_dtype(before)
        with weights:
            astray = [name for name, tensor in read.items() if tensor.is_meta]
            expect(not astray, f"these are on the meta device, which was the default: {astray}")
            expect_all(read, tensors)

    def test_tensors_are_plain_and_the_callers_own(self, tmp_path: Path) -> None:
        """What is handed out is a `torch.Tensor` on the CPU, without gradient, as the catalogue says."""
        with self.open(self.write_checkpoint(tmp_path, self.some_tensors())) as weights:
            for name, tensor in weights.items():
                info = weights.info(name)
                expect(type(tensor) is torch.Tensor, f"{name!r} is a {type(tensor).__name__}, not a torch.Tensor")
                expect(tensor.device.type == "cpu", f"{name!r} is on {tensor.device}, not on the CPU")
                expect(not tensor.requires_grad, f"{name!r} requires a gradient")
                expect(
                    (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape)),
                    f"{name!r} is another tensor than the catalogue says",
                )

    def test_a_model_is_filled(self, tmp_path: Path) -> None:
        """`load_into` makes a model equal to the one that was saved, and reports every parameter."""
        if not (self.usual_dtype.is_floating_point and self.usual_dtype.itemsize > 1 and self.holds((8,))):
            skip("the format does not hold what a model is made of")
        saved, model = _model(self.usual_dtype, 1), _model(self.usual_dtype, 2)
        source = self.write_checkpoint(tmp_path, saved.state_dict())
        report = wl.load_into(model, source, loader=self.given_loader, loader_kwargs=dict(self.options))
        state = model.state_dict()
        expect_names(state, saved.state_dict())
        for name, expected in saved.state_dict().items():
            expect_same(name, state[name], expected)
        expect(set(report.loaded) >= set(dict(model.named_parameters())), f"the report omits parameters: {report}")


def _model(dtype: torch.dtype, seed: int) -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16), torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 8, bias=False)
    ).to(dtype)
    for i, parameter in enumerate(model.parameters()):
        parameter.data.copy_(sample(dtype, parameter.shape, 10 * seed + i).nan_to_num(0.5, 1.0, -1.0).clamp(-4, 4))
    return model
