"""``weightloaders inspect SRC``: what a source holds, from its headers alone."""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightloaders.cli.common import (
    Json,
    Loader,
    Option,
    Source,
    counted,
    loader_options,
    remark,
    say,
    say_json,
    say_table,
    settings,
)
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import natural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.weights import Weights


def inspect_source(
    source: Source,
    loader: Loader = "auto",
    option: Option = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help="Only tensors of these names.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Segments of a name that make a module in the totals.")] = 2,
    summary: Annotated[bool, typer.Option("--summary", help="Leave out the list of tensors.")] = False,
    json: Json = False,
) -> None:
    """Show what a source holds: tensors, dtypes, shapes, files, and totals by module. No data is read."""
    from weightloaders.api import open_weights

    with open_weights(source, loader, **loader_options(option)) as weights:
        infos = [info for info in weights.infos() if pattern is None or fnmatch.fnmatchcase(info.name, pattern)]
        if json:
            say_json(_as_data(source, weights, infos, depth))
            return
        if not summary:
            _say_tensors(infos)
        _say_totals("module", _by_module(infos, depth))
        _say_totals("file", _by_file(infos))
        dtypes = Counter(_dtype(info) for info in infos)
        said = [counted(number, what.removesuffix("s")) for what, number in _totals(infos).items()]
        say(", ".join(said) + ": " + ", ".join(f"{count:,} {dtype}" for dtype, count in dtypes.most_common()))
        if not settings.quiet:
            for file, reason in weights.skipped_files.items():
                remark(f"left out: {file} ({reason})")
            for note in weights.notes:
                remark(f"note: {note}")


def _say_tensors(infos: list[TensorInfo]) -> None:
    say_table(
        ["tensor", "dtype", "shape", "bytes", "file"],
        [(i.name, _dtype(i), list(i.shape), f"{i.nbytes:,}", ", ".join(_files(i))) for i in infos],
        numbers=["bytes"],
    )
    say("")


def _say_totals(what: str, groups: dict[str, list[TensorInfo]]) -> None:
    say_table(
        [what, "tensors", "elements", "bytes"],
        [(name, *(f"{number:,}" for number in _totals(group).values())) for name, group in groups.items()],
        numbers=["tensors", "elements", "bytes"],
    )
    say("")


def _totals(infos: list[TensorInfo]) -> dict[str, int]:
    return {
        "tensors": len(infos),
        "elements": sum(info.numel for info in infos),
        "bytes": sum(info.nbytes for info in infos),
    }


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _files(info: TensorInfo) -> list[str]:
    """Names of the files that its bytes lie in."""
    return list(
        dict.fromkeys(extent.source.origin.name.replace("\\", "/").rsplit("/", 1)[-1] for extent in info.extents)
    )


def _by_module(infos: Iterable[TensorInfo], depth: int) -> dict[str, list[TensorInfo]]:
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in infos:
        # The last segment is the tensor itself, in no module of that name.
        modules = info.name.split(".")[:-1][:depth]
        groups[".".join(modules) or info.name].append(info)
    return dict(sorted(groups.items(), key=lambda item: natural(item[0])))


def _by_file(infos: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in infos:
        for file in _files(info) or ["(made by the loader)"]:
            groups[file].append(info)
    return groups


def _as_data(source: str, weights: Weights, infos: list[TensorInfo], depth: int) -> dict[str, Any]:
    return {
        "source": shown(source),
        "totals": _totals(infos),
        "tensors": [
            {
                "name": i.name,
                "dtype": _dtype(i),
                "shape": list(i.shape),
                "bytes": i.nbytes,
                "files": list(dict.fromkeys(e.source.origin.name for e in i.extents)),
            }
            for i in infos
        ],
        "modules": {name: _totals(group) for name, group in _by_module(infos, depth).items()},
        "files": {name: _totals(group) for name, group in _by_file(infos).items()},
        "metadata": weights.metadata,
        "skipped_files": weights.skipped_files,
        "notes": list(weights.notes),
    }
