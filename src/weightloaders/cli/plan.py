"""``weightloaders plan SRC``: what would go where, before anything is read."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightloaders.cli.common import (
    Json,
    Loader,
    NoAutomatic,
    OnMismatch,
    OnMissing,
    OnUnexpected,
    Option,
    Rules,
    Source,
    TrustRemoteCode,
    counted,
    loader_options,
    names_a_file,
    policies,
    remark,
    rules_file,
    say,
    say_table,
)
from weightloaders.cli.hints import for_command_line
from weightloaders.cli.plan_diff import say_difference
from weightloaders.cli.plan_tree import say_tree
from weightloaders.cli.plan_ways import forecast_text, ways_of
from weightloaders.errors import ModelError
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import natural

if TYPE_CHECKING:
    from weightloaders.cli.plan_ways import Way
    from weightloaders.plan import LoadPlan
    from weightloaders.weights.weights import Weights

# Files and kinds of renames that are listed; `--json` has them all.
_SHOWN = 2


def plan_source(
    source: Source,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR",
            help="Folder or hub id with the model's config. Default: SRC.",
            show_default=False,
        ),
    ] = None,
    loader: Loader = "auto",
    option: Option = None,
    rules: Rules = None,
    on_missing: OnMissing = None,
    on_unexpected: OnUnexpected = None,
    on_mismatch: OnMismatch = None,
    no_automatic: NoAutomatic = False,
    explain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show how one parameter is filled.", show_default=False)
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Segments of a name that make a module in the table.")] = 2,
    full: Annotated[
        bool, typer.Option("--full", help="A line for each parameter, with its place in the file.")
    ] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="The modules as a tree; layers that are alike in one line.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Show what is read differently where the model is filled from OTHER. Exit status 1 if anything is.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what would go where if SRC were loaded into the model. Exit status 1 if it does not fit."""
    from weightloaders.api import open_weights, plan_load
    from weightloaders.loaders.headers_only import headers_only
    from weightloaders.loaders.place import as_name
    from weightloaders.registry import WeightLoaderRegistry
    from weightloaders.skeleton import build_skeleton

    options = loader_options(option)
    decided = policies(on_missing=on_missing, on_unexpected=on_unexpected, on_mismatch=on_mismatch)
    with headers_only():
        reader = WeightLoaderRegistry.resolve(loader, options, source=as_name(source))
        # Some files say what they are for, and their loader can tell.
        if model is None and names_a_file(source) and reader.get_model_files(as_name(source), "config.json") is None:
            raise ModelError(
                f"{shown(source)} is a file, which says nothing of the model that it is for",
                file=shown(source),
                hint="name the folder or hub id with the model's config: --model DIR",
            )
        skeleton = build_skeleton(
            model or source,
            hub_options=options if model is None else {},
            trust_remote_code=trust_remote_code,
            loader=reader if model is None else None,
        )
        # Within it, too: a branch on the hub is asked for once, and stands for one commit.
        opened = open_weights(source, reader)

    def planned(weights: Weights) -> LoadPlan:
        return plan_load(skeleton.model, weights, rules=rules_file(rules), automatic=not no_automatic, **decided)

    with opened as weights:
        plan = planned(weights)
        if diff is not None:
            with open_weights(diff, loader, **options) as others:
                differs = say_difference(plan, planned(others), (source, diff), json=json)
            raise typer.Exit(differs)
        if json:
            say(plan.to_json(runnable=False))
        elif explain is not None:
            say(for_command_line(plan.explain(explain)))
        else:
            _say_verdict(plan)
            say("")
            if tree:
                say_tree(ways_of(plan), skeleton.model.__class__.__name__)
            elif full:
                _say_steps(plan)
            else:
                _say_modules(plan, depth)
    if not plan.ok:
        raise typer.Exit(1)


def _say_verdict(plan: LoadPlan) -> None:
    say("it fits" if plan.ok else f"it does not fit: {counted(len(plan.errors), 'error')}")
    for finding in plan.errors:
        remark(for_command_line(str(finding)))
    rest = [finding for finding in plan.findings if finding.severity != "error"]
    say(for_command_line(str(dataclasses.replace(plan, findings=rest))))
    if plan.renamed:
        kinds = Counter(_change(old, new) for old, new in plan.renamed.items())
        said = [f"{old!r} -> {new!r} ({count:,})" for (old, new), count in kinds.most_common()]
        say(f"renamed: {len(plan.renamed):,}: {_listed(said, _SHOWN)}")
    say(f"it takes {forecast_text(plan)}")


def _listed(items: list[str], most: int) -> str:
    """Some items as text, the rest as a number."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")


def _change(old: str, new: str) -> tuple[str, str]:
    """What differs between two names, without the numbers, so that one rename is one kind in all layers."""
    a, b = old.split("."), new.split(".")
    while a and b and a[-1] == b[-1]:
        a.pop(), b.pop()
    while a and b and a[0] == b[0]:
        del a[0], b[0]
    return re.sub(r"\d+", "*", ".".join(a)), re.sub(r"\d+", "*", ".".join(b))


def _filled(plan: LoadPlan) -> list[Way]:
    return [way for way in ways_of(plan).values() if way.steps]


def _say_modules(plan: LoadPlan, depth: int) -> None:
    modules: dict[str, list[Way]] = defaultdict(list)
    for way in _filled(plan):
        name = way.target.name
        modules[".".join(name.split(".")[:-1][:depth]) or name].append(way)
    rows = []
    for module, ways in modules.items():
        infos = [info for way in ways for info in way.sources]
        files = sorted({Path(extent.source.name).name for info in infos for extent in info.extents}, key=natural)
        how = dict.fromkeys(way.how for way in ways)
        nbytes = sum(way.nbytes for way in ways)
        where = _listed(files, _SHOWN) or "(made by the loader)"
        rows.append((module, f"{len(ways):,}", f"{nbytes:,}", ", ".join(how), where))
    say_table(["module", "parameters", "bytes", "how", "from"], rows, numbers=["parameters", "bytes"])


def _say_steps(plan: LoadPlan) -> None:
    from weightloaders.plan import describe_source

    say_table(
        ["parameter", "dtype", "shape", "how", "from"],
        [
            (
                way.target.name,
                str(way.target.dtype).removeprefix("torch."),
                list(way.target.shape),
                way.how,
                "; ".join(map(describe_source, way.sources)),
            )
            for way in _filled(plan)
        ],
    )
