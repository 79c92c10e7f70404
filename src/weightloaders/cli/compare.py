"""``weightloaders compare A B``: whether two sources, or records of loads, hold the same tensors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from weightloaders.cli.common import Json, loader_options, say, say_json, say_table
from weightloaders.weights.discretion import shown


def compare_sources(
    a: Annotated[str, typer.Argument(metavar="A", help="A source, or the manifest of a load.", show_default=False)],
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
    summary: Annotated[bool, typer.Option("--summary", help="Leave out the list of differences.")] = False,
    json: Json = False,
) -> None:
    """Compare names, shapes, dtypes and values. Exit status as diff's: 1 if anything differs, 2 after an error.

    Memory is bounded by the largest tensor. Not-a-number equals not-a-number.
    """
    from weightloaders.comparing import compare

    found = compare(
        a, b, atol=atol, values=not headers_only, loader_a=loader_a, loader_b=loader_b,
        options_a=loader_options(option_a), options_b=loader_options(option_b),
    )  # fmt: skip
    if json:
        differences = [asdict(difference) for difference in found.differences]
        sides = {"a": shown(a), "b": shown(b)}
        say_json({**sides, "tensors": found.tensors, "same": found.same, "differences": differences})
    else:
        say(str(found))
        if found.differences and not summary:
            say("")
            say_table(
                ["tensor", "differs in", "A", "B", "max abs diff"],
                [
                    (d.name, d.kind, d.a, d.b, "" if d.max_abs_diff is None else f"{d.max_abs_diff:g}")
                    for d in found.differences
                ],
            )
    if found.differences:
        raise typer.Exit(1)
