"""``weightloaders generate MODEL PROMPT``: load a model and have it write text."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from weightloaders.cli.common import (
    LOADER,
    NoAutomatic,
    OnMismatch,
    OnMissing,
    OnUnexpected,
    Option,
    Rules,
    Transfer,
    Verify,
    checks,
    loader_options,
    policies,
    remark,
    rules_file,
    say,
    settings,
    transfer_option,
)

# Where there is no config: an answer of some length, the same each time.
_PARAMS: dict[str, Any] = {"max_tokens": 128, "temperature": 0.0}


def generate_text(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL PROMPT",
            help="The model (left out with --config) and what to go on from (- reads standard input).",
            show_default=False,
        ),
    ],
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="FILE", help="A config file: YAML, TOML or JSON."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="SRC", help="Where the weights lie, if not with the model's config.")
    ] = None,
    loader: Annotated[str | None, LOADER] = None,
    option: Option = None,
    rules: Rules = None,
    on_missing: OnMissing = None,
    on_unexpected: OnUnexpected = None,
    on_mismatch: OnMismatch = None,
    no_automatic: NoAutomatic = False,
    transfer: Transfer = None,
    verify: Verify = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="'auto' (the config's, the default) or a dtype.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Where the model goes. Default: cpu.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to write. Default: 128.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 (the default) takes the likeliest token always.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For the same draws each time.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template aside.")] = False,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Let code that lies with the model run.")
    ] = None,
) -> None:
    """Load a model and let it answer a prompt (or go on from it, where there is no chat template).

    The text goes to standard output, the load report to standard error. What is given here counts rather than --config.
    """
    given: dict[str, Any] = {
        "weights": weights,
        "weight_loader": loader,
        "weight_loader_kwargs": loader_options(option) or None,
        "rules": rules_file(rules),
        **policies(on_missing=on_missing, on_unexpected=on_unexpected, on_mismatch=on_mismatch),
        "automatic": False if no_automatic else None,
        "transfer": transfer_option(transfer),
        "verify": checks(verify),
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "progress": settings.progress,
    }
    given = {name: value for name, value in given.items() if value is not None}
    *model, prompt = words
    if len(model) != (config is None):
        raise typer.BadParameter("a model and a prompt are needed; with --config, only a prompt")
    if prompt == "-":
        prompt = sys.stdin.read()

    from weightloaders.llm.llm import LLM
    from weightloaders.llm.outputs import SamplingParams

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    llm = LLM(model[0], **given) if config is None else LLM.from_config(config, **given)
    start = _PARAMS if config is None else llm.get_default_sampling_params().model_dump()
    params = SamplingParams(**{**start, **{name: value for name, value in sampling.items() if value is not None}})
    if not settings.quiet:
        remark(str(llm.load_report))
    chat = not raw and llm.tokenizer is not None and llm.tokenizer.chat_template
    outputs = llm.chat([{"role": "user", "content": prompt}], params) if chat else llm.generate(prompt, params)
    for output in outputs[0].outputs:
        say(output.text)
