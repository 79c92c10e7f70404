"""``weightloaders plan SRC``: what would go where, before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightloaders.cli.common import (
    Json,
    Loader,
    Option,
    Rules,
    Source,
    TrustRemoteCode,
    loader_options,
    rules_file,
    say,
    say_table,
)

if TYPE_CHECKING:
    from weightloaders.plan import LoadPlan


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
    explain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show how one parameter is filled.", show_default=False)
    ] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what would go where if SRC were loaded into the model. Exit status 1 if it does not fit."""
    from weightloaders.api import open_weights, plan_load
    from weightloaders.skeleton import build_skeleton

    options = loader_options(option)
    skeleton = build_skeleton(
        model or source, hub_options=options if model is None else {}, trust_remote_code=trust_remote_code
    )
    with open_weights(source, loader, **options) as weights:
        plan = plan_load(skeleton.model, weights, rules=rules_file(rules))
        if json:
            say(plan.to_json())
        elif explain is not None:
            say(plan.explain(explain))
        else:
            _say_steps(plan)
            say(str(plan))
    if not plan.ok:
        raise typer.Exit(1)


def _say_steps(plan: LoadPlan) -> None:
    from weightloaders.plan import describe_source, step_infos, step_targets

    kinds = {"CopyStep": "read", "ComputeStep": "computed", "CallStep": "own weight_loader"}
    say_table(
        ["parameter", "dtype", "shape", "how", "from"],
        [
            (
                target.name,
                str(target.dtype).removeprefix("torch."),
                list(target.shape),
                kinds[type(step).__name__],
                "; ".join(describe_source(info) for info in step_infos(step)),
            )
            for step in plan.steps
            for target in step_targets(step)
        ],
    )
    say("")
