"""``weightloaders compare A B``: whether two sources hold the same tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weightloaders.cli.common import Json, counted, loader_options, say, say_json, say_table

if TYPE_CHECKING:
    import torch

    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.weights import Weights

# Elements that are compared as 64-bit floats at one time.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Difference:
    """What one tensor differs in.

    Attributes:
        name: The tensor.
        kind: ``"only in A"``, ``"only in B"``, ``"shape"``, ``"dtype"`` or ``"values"``.
        a: What A has.
        b: What B has.
        max_abs_diff: Largest absolute difference of values, where they were compared; NaN where one is not a number.
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""
    max_abs_diff: float | None = None


def compare_sources(
    a: Annotated[str, typer.Argument(metavar="A", help="A source.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
    loader_a: Annotated[str, typer.Option(metavar="NAME", help="The loader for A.")] = "auto",
    loader_b: Annotated[str, typer.Option(metavar="NAME", help="The loader for B.")] = "auto",
    option_a: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of A's loader.", show_default=False)
    ] = None,
    option_b: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of B's loader.", show_default=False)
    ] = None,
    atol: Annotated[float, typer.Option(min=0, help="Values that differ by no more than this count as equal.")] = 0.0,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Leave out values; no data is read.")] = False,
    json: Json = False,
) -> None:
    """Compare names, shapes, dtypes and values. Exit status 1 if anything differs.

    Memory is bounded by the largest tensor. Not-a-number equals not-a-number.
    """
    from weightloaders.api import open_to_read, open_weights

    opened = open_weights if headers_only else open_to_read
    with (
        opened(a, loader_a, **loader_options(option_a)) as weights_a,
        opened(b, loader_b, **loader_options(option_b)) as weights_b,
    ):
        found = _differences(weights_a, weights_b, atol, values=not headers_only)
        tensors = len(weights_a.keys() | weights_b.keys())
    same = tensors - len({difference.name for difference in found})
    if json:
        say_json({"a": a, "b": b, "tensors": tensors, "same": same, "differences": [asdict(d) for d in found]})
    else:
        if found:
            say_table(
                ["tensor", "differs in", "A", "B", "max abs diff"],
                [(d.name, d.kind, d.a, d.b, "" if d.max_abs_diff is None else f"{d.max_abs_diff:g}") for d in found],
            )
        what = "names, shapes and dtypes" if headers_only else "names, shapes, dtypes and values"
        say(f"{same:,} of {counted(tensors, 'tensor')} {'has' if tensors == 1 else 'have'} the same {what}")
    if found:
        raise typer.Exit(1)


def _differences(a: Weights, b: Weights, atol: float, *, values: bool) -> list[Difference]:
    found = [Difference(i.name, "only in A", _described(i)) for i in a.infos() if i.name not in b]
    found += [Difference(i.name, "only in B", "", _described(i)) for i in b.infos() if i.name not in a]
    for info in a.infos():
        if info.name in b:
            found += _difference(a, b, info.name, atol, values=values)
    return found


def _difference(a: Weights, b: Weights, name: str, atol: float, *, values: bool) -> list[Difference]:
    from weightloaders.weights.reading import same_values

    one, other = a.info(name), b.info(name)
    described = (_described(one), _described(other))
    if one.shape != other.shape:
        return [Difference(name, "shape", *described)]
    differs_in_dtype = one.dtype != other.dtype
    if not values or (not differs_in_dtype and same_values(one, other)):
        return [Difference(name, "dtype", *described)] if differs_in_dtype else []
    distance = _distance(a[name], b[name])
    if differs_in_dtype:
        return [Difference(name, "dtype", *described, distance)]
    return [] if distance is not None and distance <= atol else [Difference(name, "values", *described, distance)]


def _described(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Largest absolute difference; NaN where only one is not a number, None where the dtype has no arithmetic."""
    import torch

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
