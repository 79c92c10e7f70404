"""`compare`: whether two models, sources or records of loads hold the same tensors, and how far they are apart."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from weightloaders.api import open_to_read, open_weights
from weightloaders.errors import CheckpointFormatError
from weightloaders.provenance import MANIFEST_FORMAT, MANIFEST_VERSION
from weightloaders.report import LoadReport
from weightloaders.transfer.inspecting import values_of
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.reading import read_tensor, same_values
from weightloaders.weights.texts import read_text
from weightloaders.weights.weights import Weights, as_catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Elements that are compared as 64-bit floats at one time.
_CHUNK = 1 << 22
# A hundred thousand parameters take a few hundred bytes each.
_MAX_MANIFEST_BYTES = 1 << 28

Kind = Literal["only in A", "only in B", "shape", "dtype", "values"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What one tensor differs in.

    Attributes:
        name: The tensor.
        kind: ``"only in A"``, ``"only in B"``, ``"shape"``, ``"dtype"`` or ``"values"``.
        a: What A has.
        b: What B has.
        max_abs_diff: Largest absolute difference of values, where both sides have them; NaN where only one is not a
            number.
    """

    name: str
    kind: Kind
    a: str = ""
    b: str = ""
    max_abs_diff: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two sides differ in.

    Attributes:
        tensors: How many tensors there are, on one side or both.
        differences: One for each tensor that is not the same.
        with_values: Whether values were compared.
    """

    tensors: int
    differences: list[Difference] = field(default_factory=list)
    with_values: bool = True

    @property
    def same(self) -> int:
        """How many tensors are the same."""
        return self.tensors - len(self.differences)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        """In a line or two: how many are equal, how many differ in what, how many only one side has."""
        what = "names, shapes, dtypes and values" if self.with_values else "names, shapes and dtypes"
        noun = "tensor has" if self.tensors == 1 else "tensors have"
        text = f"{self.same:,} of {self.tensors:,} {noun} the same {what}"
        if self.equal:
            return text
        counts = Counter(difference.kind for difference in self.differences)
        said = [f"{counts[kind]:,} differ in {kind}" for kind in ("shape", "dtype", "values") if counts[kind]]
        said += [f"{counts[kind]:,} {kind}" for kind in ("only in A", "only in B") if counts[kind]]
        apart = [d for d in self.differences if d.max_abs_diff]
        if apart:
            # What is not a number is further away than any number.
            most = max(apart, key=lambda d: (d.max_abs_diff != d.max_abs_diff, d.max_abs_diff))
            said.append(f"largest difference {most.max_abs_diff:g} in {most.name}")
        return f"{text}\n{'; '.join(said)}"


class _Entry(NamedTuple):
    """A tensor of one side: its values, or at least what they came to."""

    dtype: str
    shape: tuple[int, ...]
    info: TensorInfo | None = None
    sha256: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def digest(self) -> str | None:
        return self.sha256 if self.info is None else values_of(read_tensor(self.info), finite=False).sha256


def compare(
    a: Any,
    b: Any,
    *,
    atol: float = 0.0,
    values: bool = True,
    loader_a: Any = "auto",
    loader_b: Any = "auto",
    options_a: Mapping[str, Any] | None = None,
    options_b: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare names, shapes, dtypes and values. Memory is bounded by the largest tensor.

    Not-a-number equals not-a-number. Of a record only checksums are known: it says what differs, not by how much.

    Args:
        a: A model; a source, as `open_weights` takes it; weights or a dict of tensors; or the record of a load: a
            `LoadReport` with ``verify="record"``, or the path of its `LoadReport.manifest`, which ends in ``.json``.
        b: Another.
        atol: Values that differ by no more than this count as equal.
        values: Whether to compare values. If not, only headers are read.
        loader_a: Who opens A, where it is a source.
        loader_b: Who opens B.
        options_a: Options for that.
        options_b: Options for that.

    Raises:
        SourceError: If a source can't be opened or read, or a manifest is none.
        ConfigError: If a load was not recorded.
    """
    with _opened(a, values, loader_a, options_a) as one, _opened(b, values, loader_b, options_b) as other:
        found = [Difference(name, "only in A", str(entry)) for name, entry in one.items() if name not in other]
        found += [Difference(name, "only in B", "", str(entry)) for name, entry in other.items() if name not in one]
        for name, entry in one.items():
            if name in other:
                found += _difference(name, entry, other[name], atol, values=values)
        return Comparison(len(one.keys() | other.keys()), found, values)


# ------------------------------------------------------------------ what is compared


@contextlib.contextmanager
def _opened(side: Any, values: bool, loader: Any, options: Mapping[str, Any] | None) -> Iterator[Mapping[str, _Entry]]:
    if isinstance(side, LoadReport):
        yield _recorded(side.manifest(), "the report")
    elif isinstance(side, nn.Module):
        yield {name: _of_tensor(name, tensor) for name, tensor in side.state_dict().items()}
    elif isinstance(side, Weights):
        yield _entries(side.infos())
    elif not isinstance(side, str | Path):
        yield _entries(as_catalogue(side).infos())
    elif str(side).endswith(".json") and loader == "auto" and Path(side).is_file():
        yield _recorded(read_text(Path(side), _MAX_MANIFEST_BYTES), str(side))
    else:
        opened = open_to_read if values else open_weights
        with opened(side, loader, **(options or {})) as weights:
            yield _entries(weights.infos())


def _entries(infos: Sequence[TensorInfo]) -> dict[str, _Entry]:
    return {info.name: _Entry(_dtype(info.dtype), info.shape, info) for info in infos}


def _of_tensor(name: str, tensor: torch.Tensor) -> _Entry:
    shape = tuple(tensor.shape)
    info = TensorInfo(name, tensor.dtype, shape, read=lambda: tensor.detach().cpu())
    return _Entry(_dtype(tensor.dtype), shape, info)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _recorded(text: str, name: str) -> dict[str, _Entry]:
    """The parameters of a manifest, and the names of those that are one with them."""
    try:
        document = json.loads(text)
        if (document["format"], document["version"]) != (MANIFEST_FORMAT, MANIFEST_VERSION):
            raise ValueError("another format, or another version of it")
        entries = {
            parameter: _Entry(str(found["dtype"]), tuple(map(int, found["shape"])), None, str(found["sha256"]))
            for parameter, found in document["parameters"].items()
        }
        return entries | {tied: entries[other] for tied, other in document["tied"].items() if other in entries}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointFormatError(
            f"{name} is no manifest of a load: {type(error).__name__}: {error}",
            file=name,
            hint="LoadReport.manifest() writes one, after a load with verify='record'",
        ) from error


# ------------------------------------------------------------------ how


def _difference(name: str, one: _Entry, other: _Entry, atol: float, *, values: bool) -> list[Difference]:
    described = (str(one), str(other))
    if one.shape != other.shape:
        return [Difference(name, "shape", *described)]
    differs_in_dtype = one.dtype != other.dtype
    if one.info is None or other.info is None:
        if differs_in_dtype:
            return [Difference(name, "dtype", *described)]
        return [Difference(name, "values", *described)] if values and one.digest() != other.digest() else []
    if not values or (not differs_in_dtype and same_values(one.info, other.info)):
        return [Difference(name, "dtype", *described)] if differs_in_dtype else []
    distance = _distance(read_tensor(one.info), read_tensor(other.info))
    if differs_in_dtype:
        return [Difference(name, "dtype", *described, distance)]
    return [] if distance is not None and distance <= atol else [Difference(name, "values", *described, distance)]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Largest absolute difference; NaN where only one is not a number, None where the dtype has no arithmetic."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    whole = a.dtype == b.dtype and not (a.is_floating_point() or a.is_complex())
    peaks = []
    for one, other in zip(torch.split(a.reshape(-1), _CHUNK), torch.split(b.reshape(-1), _CHUNK), strict=True):
        try:
            x, y = one.to(wide), other.to(wide)
        except (RuntimeError, NotImplementedError):
            return None
        # Large whole numbers may differ by less than a float can tell; and the difference of two infinities is NaN.
        unlike = (one != other) if whole else ~((x == y) | (x.isnan() & y.isnan()))
        gap = (x - y).abs()[unlike]
        if gap.numel():
            peaks.append(gap.max().clamp(min=1) if whole else gap.max())
    return float(torch.stack(peaks).max()) if peaks else 0.0
