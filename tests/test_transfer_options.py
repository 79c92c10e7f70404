"""How bytes are to be moved: what may be said, wherever a load is asked for, and how mistakes are named."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from weightloaders import (
    LLM,
    LoadPlan,
    TransferOptions,
    from_pretrained,
    load_into,
    load_model,
    open_weights,
    plan_load,
)
from weightloaders.cli.main import app
from weightloaders.config import LLMConfig
from weightloaders.errors import ConfigError
from weightloaders.prepare import load_context

WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no mode": ("mmapp", ("transfer: mode: 'mmapp'", "'direct', 'mmap', 'o_direct' or 'stream'")),
    "no field": ({"thread": 2}, ("transfer: 'thread' is unknown; did you mean 'threads'?", "extra_memory")),
    "a field that Python has": ({"self": 2}, ("transfer: 'self' is unknown",)),
    "no thread": ({"threads": 0}, ("transfer: threads: 0", "greater than or equal to 1")),
    "too many threads": ({"threads": 100_000}, ("transfer: threads: 100000", "256")),
    "threads as text": ({"threads": "2"}, ("transfer: threads: '2'", "valid integer")),
    "too little memory": ({"extra_memory": "1 MiB"}, ("transfer: extra_memory: '1 MiB'", "at least 4 MiB")),
    "no size": ({"extra_memory": "much"}, ("transfer: extra_memory: 'much'", "at least 4 MiB", "'64 MiB'")),
    "a size that is no number": ({"extra_memory": True}, ("transfer: extra_memory: True", "at least 4 MiB")),
    "no storage": ({"storage": "tape"}, ("transfer: storage: 'tape'", "'local', 'rotational', 'network' or 'memory'")),
    "a number": (2, ("transfer=2", "a mode, TransferOptions or a mapping")),
    "None": (None, ("transfer=None", "a mode, TransferOptions or a mapping")),
    "a list": (["mmap"], ("transfer=['mmap']", "a mode, TransferOptions or a mapping")),
    "a field that is no name": ({1: 2}, ("transfer={1: 2}", "a mode, TransferOptions or a mapping")),
}


def test_a_mode_options_and_a_mapping_say_the_same():
    options = TransferOptions(mode="mmap")
    assert TransferOptions.of("mmap") == TransferOptions.of({"mode": "mmap"}) == options
    assert TransferOptions.of(options) is options
    assert TransferOptions() == TransferOptions.of("direct") == TransferOptions.of({})


def test_extra_memory_is_bytes_or_a_text():
    sizes = ["64 MiB", "64MiB", 64 << 20, "67108864"]
    assert {TransferOptions(extra_memory=size).extra_memory for size in sizes} == {64 << 20}
    assert TransferOptions().extra_memory == 64 << 20
    assert TransferOptions(extra_memory="64MB").extra_memory == 64_000_000


def test_options_can_be_shared_and_carried_to_other_processes():
    options = TransferOptions(mode="stream", threads=3, storage="network")
    assert pickle.loads(pickle.dumps(options)) == options
    assert len({options, TransferOptions(mode="stream", threads=3, storage="network")}) == 1
    with pytest.raises(Exception, match="frozen"):
        options.threads = 4


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_with_what_is_allowed(case):
    value, parts = WRONG[case]
    with pytest.raises(ConfigError) as error:
        TransferOptions.of(value)
    for part in parts:
        assert part in str(error.value)


class Never(nn.Module):
    """Asked for nothing."""

    def named_parameters(self, *args, **kwargs):
        raise AssertionError("it was looked at")


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_found_before_anything_is_opened(case, tmp_path):
    value, parts = WRONG[case]
    calls = [
        lambda: load_into(Never(), tmp_path / "nowhere", transfer=value),
        lambda: load_model(Never(), tmp_path / "nowhere", transfer=value),
        lambda: from_pretrained(tmp_path / "nowhere", transfer=value),
        lambda: plan_load(Never(), tmp_path / "nowhere", transfer=value),
    ]
    if value is not None:
        # None leaves it to the engine.
        calls.append(lambda: LLM(tmp_path / "nowhere", transfer=value))
    for call in calls:
        with pytest.raises(ConfigError) as error:
            call()
        assert parts[0] in str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_config_file_names_a_mode_or_its_fields(folder, tmp_path):
    file = tmp_path / "llm.yaml"
    for text, expected in (
        ("mmap", "mmap"),
        ("{mode: stream, extra_memory: 8 MiB}", {"mode": "stream", "extra_memory": "8 MiB"}),
    ):
        file.write_text(f"model: {folder}\ntransfer: {text}\nprogress: false\n")
        assert LLMConfig.from_file(file).transfer == expected
        assert len(LLM.from_config(file).load_report.loaded) == 12


@pytest.mark.parametrize("case", ["no mode", "no field", "too little memory", "a number"])
def test_a_mistake_in_a_config_file_is_named(case, tmp_path):
    value, (part, *_) = WRONG[case]
    file = tmp_path / "llm.json"
    file.write_text(json.dumps({"model": "x", "transfer": value}))
    with pytest.raises(ConfigError) as error:
        LLMConfig.from_file(file)
    assert "llm.json" in str(error.value)
    assert "transfer: " in str(error.value)
    assert part.removeprefix("transfer: ").removeprefix("transfer=") in str(error.value)


def test_what_was_said_holds_for_reloads_unless_something_else_is_said(folder):
    llm = LLM(folder, transfer={"threads": 1}, progress=False)
    asked = []
    reload = llm._engine.reload_weights
    llm._engine.reload_weights = lambda source, **options: (
        asked.append(options["transfer"]) or reload(source, **options)
    )
    llm.reload_weights()
    llm.reload_weights(transfer="stream")
    assert asked == [{"threads": 1}, "stream"]
    with pytest.raises(ConfigError, match="mmapp"):
        llm.reload_weights(transfer="mmapp")


def test_the_command_line_takes_a_mode_or_its_fields(folder):
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["generate", str(folder), "x", "--quiet", *words])

    wrong = run("--transfer", "mmapp")
    assert wrong.exit_code == 1
    assert "transfer: mode: 'mmapp'" in wrong.stderr
    wrong = run("--transfer", "{threads: 0}")
    assert "transfer: threads: 0" in wrong.stderr
    wrong = run("--transfer", "{threads")
    assert "--transfer is no valid YAML" in wrong.stderr


def test_the_context_of_a_load_carries_the_options():
    assert load_context().transfer == TransferOptions()
    assert load_context(transfer={"threads": 2}).transfer == TransferOptions(threads=2)


@pytest.mark.parametrize("mode", ["direct", "mmap", "o_direct", "stream"])
def test_every_mode_fills_a_model(mode, tmp_path):
    tensors = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Linear(4, 3)
    load_into(model, tmp_path, transfer=mode, progress=False)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_a_plan_is_run_as_was_said_when_it_was_made(tmp_path):
    save_file({"weight": torch.randn(3, 4)}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 3, bias=False)
    with open_weights(tmp_path) as weights:
        plan = plan_load(model, weights, transfer="mmap")
        again = plan_load(model, weights, plan=LoadPlan.from_json(plan.to_json()), transfer="stream")
        assert plan.run(model).bytes_by_path == {"mapped": 48}
        assert again.run(model).bytes_by_path == {"streamed": 48}
        assert plan_load(model, weights).run(model).bytes_by_path == {"straight": 48}


def test_the_command_line_maps_a_real_model_and_lets_it_write(smollm2_folder):
    command = ["generate", str(smollm2_folder), "What is gravity?", "--max-tokens", "4", "--no-progress"]
    direct, mapped = (CliRunner().invoke(app, [*command, "--transfer", mode]) for mode in ("direct", "mmap"))
    assert mapped.exit_code == 0, mapped.output
    assert " mapped" in mapped.stderr
    assert " mapped" not in direct.stderr
    assert mapped.stdout == direct.stdout


@pytest.mark.parametrize("mode", ["direct", "o_direct", "stream"])
def test_the_report_says_how_it_was_done(tmp_path, mode):
    save_file({"weight": torch.randn(3, 4)}, tmp_path / "model.safetensors")
    options = {"mode": mode, "threads": 3, "storage": "network"}
    report = load_into(nn.Linear(4, 3, bias=False), tmp_path, transfer=options)
    assert report.transfer == {**options, "why": "as asked for"}
    assert f"transfer      {mode}, 3 threads, network storage (as asked for)\n" in str(report)


def test_a_misspelt_mode_is_told_with_what_was_meant():
    with pytest.raises(ConfigError, match=r"'mmpa': should be .*; did you mean 'mmap'\?"):
        load_into(nn.Linear(1, 1), {}, transfer="mmpa")
