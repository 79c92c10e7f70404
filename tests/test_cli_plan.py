"""``weightloaders plan``: the tree, the comparison of two sources, and what is said of reads and memory."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from weightloaders import LoadPlan
from weightloaders.cli import plan_tree
from weightloaders.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments), "--quiet"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], object]], Path]:
    """The same checkpoint with a change."""

    def make(change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        shutil.copytree(folder, tmp_path / "other")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
        return tmp_path / "other"

    return make


def test_plan_says_how_many_bytes_are_read_in_which_way(folder: Path) -> None:
    nbytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert (
        f"it takes {nbytes:,} bytes in 1 read: {nbytes:,} straight into the parameters; "
        "at most 0 B of memory beside the model" in run(folder)
    )
    told = json.loads(run(folder, "--json"))["forecast"]
    assert (told["bytes_to_read"], told["reads"], told["straight"]) == (nbytes, 1, nbytes)


def test_the_tree_has_layers_that_are_alike_in_one_line(folder: Path) -> None:
    lines = run(folder, "--tree").partition("\n\n")[2].splitlines()
    assert lines[0].startswith("LlamaForCausalLM  111 parameters, 22,816 bytes")
    assert "├── lm_head.weight  float32 [16, 8], tied" in lines
    assert "    ├── layers.0 ... 11  12 times 9 parameters, 22,272 bytes, read" in lines
    assert "    │       ├── k_proj.weight  float32 [8, 8], read" in lines
    assert sum("k_proj" in line for line in lines) == 1
    assert all(line == line.rstrip() for line in lines)


def test_the_tree_shows_layers_that_are_not_like_the_others(folder: Path, other: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.5.mlp.up_proj.weight"]

    lines = run(other(change), "--tree", "--on-missing", "ignore").partition("\n\n")[2].splitlines()
    layers = [
        line.partition("layers.")[2].partition("  ")[0] for line in lines if "layers." in line and "param" in line
    ]
    assert layers == ["0 ... 4", "5", "6 ... 11"]
    assert sum("up_proj.weight  float32 [8, 8], not filled" in line for line in lines) == 1


def test_the_tree_is_folded_to_the_width_of_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(plan_tree, "_UNFOLDED", None)
    lines = run(folder, "--tree").partition("\n\n")[2].splitlines()
    assert max(map(len, lines)) <= 40
    # A line that goes on stays in its branch.
    at = next(number for number, line in enumerate(lines) if "layers.0 ... 11" in line)
    assert lines[at + 1].startswith("    │")


def test_the_same_source_differs_in_nothing(folder: Path) -> None:
    assert run(folder, "--diff", folder).endswith("111 of 111 parameters are filled in the same way\n")
    data = json.loads(run(folder, "--diff", folder, "--json"))
    assert (data["differences"], data["same"], data["parameters"]) == ([], 111, 111)


def test_what_is_read_differently_is_said_once_for_all_layers(folder: Path, other: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "up_proj" in name:
                tensors[name] = tensors[name].to(torch.bfloat16)
            if "norm" in name:
                tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["extra"] = torch.zeros(2)
        del tensors["model.layers.3.self_attn.q_proj.weight"]

    # What is not in its place any more makes names without prefix unclear, so a rule says it.
    place = other(change)
    (place / "rules.yaml").write_text("rename: {layers: model.layers, norm: model.norm}")
    text = run(folder, "--diff", place, "--rules", place / "rules.yaml", status=1)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "model.layers.*.mlp.up_proj.weight (12) dtype float32 bfloat16" in rows
    assert "model.layers.3.self_attn.q_proj.weight filled read not filled" in rows
    assert (
        "model.layers.*.input_layernorm.weight (12) names model.layers.*.input_layernorm.weight "
        "layers.*.input_layernorm.weight" in rows
    )
    assert "extra only in one float32 [2], not used" in rows
    assert any(row.startswith("SRC: fits, 22,816 bytes in 1 read") for row in rows)
    assert any(row.startswith("OTHER: does not fit, ") for row in rows)
    data = json.loads(run(folder, "--diff", place, "--rules", place / "rules.yaml", "--json", status=1))
    assert {d["kind"] for d in data["differences"]} == {"dtype", "filled", "names", "only in one"}
    assert data["same"] == 111 - 12 - 25 - 1
    assert data["forecast"]["b"]["buffered"] == 12 * 8 * 8 * 2


def test_other_shapes_and_layouts_are_told(folder: Path, other: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("down_proj.weight"):
                tensors[name] = tensors[name].t().contiguous()
            if name.endswith("norm.weight"):
                tensors[name] = tensors[name][None].clone()

    rules = "convert:\n- {sources: '**.down_proj.weight', targets: '**.down_proj.weight', function: transpose}\n"
    rules += "- {sources: model.norm.weight, targets: model.norm.weight, function: reshape, shape: [8]}\n"
    place = other(change)
    (place / "rules.yaml").write_text(rules)
    rows = run(folder, "--diff", place, "--rules", place / "rules.yaml", status=1).splitlines()
    assert any(" ".join(row.split()) == "model.norm.weight shape [8] [1, 8]" for row in rows)


def test_a_plan_that_is_piped_into_a_file_can_be_read_back(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(run(folder, "--json"))
    plan = LoadPlan.from_json((tmp_path / "plan.json").read_bytes())
    assert plan.ok
    assert "model.norm.weight" in plan.explain("model.norm.weight")
