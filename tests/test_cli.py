"""The command line: what each command prints, and its exit status: 0 done, 1 an error or a difference, 2 misuse."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from weightloaders import __version__
from weightloaders.cli.main import app
from weightloaders.errors import SourceNotFoundError
from weightloaders.testing import fake_distribution
from weightloaders.weights.weights import Weights


def run(*arguments: object, status: int = 0, env: dict[str, str] | None = None, stdin: str | None = None):
    """Run the program; the result has `.stdout` and `.stderr`."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=env, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def program(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run the program as users do, in a process of its own."""
    command = [sys.executable, "-m", "weightloaders", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


@pytest.fixture(scope="module")
def environment(third_parties: str) -> dict[str, str]:
    """What processes are started with: the plugins that happen to be installed take no part."""
    return {**os.environ, "WEIGHTLOADERS_DISABLE": third_parties}


def importing_from(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """An environment in which modules, and metadata, are found in a folder, too."""
    paths = [str(folder), environment.get("PYTHONPATH")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama in three shards with an index."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"state")
    return folder


@pytest.fixture(scope="module")
def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def changed(tensors: dict[str, torch.Tensor], path: Path, **changes: torch.Tensor | None) -> Path:
    """A file with some tensors changed (or left out, where None), `__` for dots."""
    new = {**tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in new.items() if tensor is not None}, path)
    return path


# ------------------------------------------------------------------ the program


def test_the_program_and_the_module_are_one():
    by_module = program("--version")
    script = Path(sys.executable).with_name("weightloaders")
    assert (by_module.returncode, by_module.stdout) == (0, f"weightloaders {__version__}\n")
    if script.exists():
        by_script = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
        assert by_script.stdout == by_module.stdout


def test_an_error_is_a_message_and_no_traceback(tmp_path):
    result = program("inspect", tmp_path / "absent")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "error: " in result.stderr
    assert str(tmp_path / "absent") in result.stderr
    assert "Traceback" not in result.stderr


def test_what_a_plugin_prints_is_not_among_the_results(tmp_path):
    module = """
print("hello from a plugin")
from weightloaders import BaseWeightLoader
class Loader(BaseWeightLoader):
    def get_weights(self, path):
        print("reading")
        return {}
"""
    points = {"weightloaders.loaders": {"chatty": "chatty_module:Loader"}}
    with fake_distribution(tmp_path, "chatty", entry_points=points, modules={"chatty_module": module}):
        listed = run("list", "--json")
        assert "chatty" in {loader["name"] for loader in json.loads(listed.stdout)}
        assert "hello from a plugin" in listed.stderr
        inspected = run("inspect", "anything", "--loader", "chatty", "--json")
        assert json.loads(inspected.stdout)["tensors"] == []
        assert "reading" in inspected.stderr


@pytest.mark.parametrize("policies", [["lm_head=warn", "lm_head=error"], ["warn", "error"]])
def test_a_policy_that_is_given_twice_is_refused(folder, policies):
    said = run("plan", folder, *(part for policy in policies for part in ("--on-missing", policy)), status=1).stderr
    assert "is given twice" in said


def test_with_debug_an_error_is_raised_as_it_is(tmp_path):
    with pytest.raises(SourceNotFoundError):
        run("inspect", tmp_path / "absent", "--debug", status=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspct"],
        ["inspect"],
        ["inspect", "x", "--nope"],
        ["inspect", "x", "--depth", "0"],
        ["convert", "a", "b"],
        ["convert", "a", "b", "--to", "gguf"],
        ["generate", "model-without-prompt"],
        ["generate", "--config", "c.yaml", "model", "prompt"],
    ],
)
def test_misuse_has_exit_status_2(arguments):
    assert run(*arguments, status=2).stderr


def test_help_is_short_and_tells_switches_from_options():
    for command in ([], ["inspect"], ["plan"]):
        text = run(*command, "-h").stdout
        assert text == run(*command, "--help").stdout
        assert "bool" not in text.lower()


def test_a_mistyped_choice_brings_the_nearest():
    assert "did you mean 'binary'" in run("convert", "a", "b", "--to", "bianry", status=2).stderr.replace("\n", " ")


MINE = """
import torch
from weightloaders import BaseWeightLoader

class Loader(BaseWeightLoader):
    def get_weights(self, model_name_or_path):
        return {"w": torch.ones(2)}
"""


def test_a_loader_in_the_working_directory_can_be_named(tmp_path):
    """The program as it is installed, whose `sys.path` does not begin with the working directory, as `-m`'s does."""
    (tmp_path / "my_loader_here.py").write_text(MINE)
    code = "import sys; sys.path = [p for p in sys.path if p]; from weightloaders.cli.main import main; main()"
    command = [sys.executable, "-c", code, "inspect", "anything", "--loader"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    found = subprocess.run([*command, "my_loader_here:Loader"], check=True, **options)
    assert "1 tensor, 2 elements, 8 bytes: 1 float32" in found.stdout


def test_modules_of_the_working_directory_pass_for_nobody_elses(tmp_path, folder):
    """It may be a checkpoint's folder from anywhere."""
    for name in ("torch", "safetensors", "yaml", "accelerate", "my_loader_here"):
        (tmp_path / f"{name}.py").write_text(MINE + "open('it_ran', 'w').close()\n")
    code = "import sys; sys.path = [p for p in sys.path if p]; from weightloaders.cli.main import main; main()"
    command = [sys.executable, "-c", code]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120, "check": False}
    assert subprocess.run([*command, "inspect", folder], **options).returncode == 0
    assert subprocess.run([*command, "plan", folder, "-l", "hf"], **options).returncode == 0
    assert not (tmp_path / "it_ran").exists()


def test_listing_imports_neither_torch_nor_transformers(environment):
    code = (
        "import sys; from weightloaders.cli.main import app\n"
        "try: app(['list'])\nexcept SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "safetensors" in result.stdout


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "weightloaders", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


# ------------------------------------------------------------------ list


def test_list_shows_each_loader_with_where_it_is_from():
    output = run("list").stdout
    rows = {line.split()[0]: line.split() for line in output.splitlines()[1:]}
    assert {"auto", "binary", "dummy", "hf", "local", "torch"} <= rows.keys()
    assert rows["hf"][1:5] == ["built-in", "weightloaders", __version__, "ok"]
    as_json = json.loads(run("list", "--json").stdout)
    assert {entry["name"] for entry in as_json} == rows.keys()
    assert as_json[0].keys() >= {"name", "origin", "distribution", "version", "target", "status", "error"}


def test_a_disabled_loader_is_listed_as_such():
    as_json = json.loads(run("list", "--json", env={"WEIGHTLOADERS_DISABLE": "torch"}).stdout)
    assert {entry["name"]: entry["status"] for entry in as_json}["torch"] == "disabled"


# ------------------------------------------------------------------ inspect


def test_inspect_shows_tensors_files_and_totals(folder, tensors):
    result = run("inspect", folder, "--no-progress")
    lines = result.stdout.splitlines()
    row = next(line for line in lines if line.startswith("model.layers.1.mlp.up_proj.weight"))
    assert "float32" in row
    assert "[32, 16]" in row
    assert "2,048" in row
    assert ".safetensors" in row
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert lines[-1] == f"{len(tensors)} tensors, {elements:,} elements, {4 * elements:,} bytes: {len(tensors)} float32"
    assert any(line.split()[:2] == ["model.layers", "18"] for line in lines)


def test_inspect_for_programs_says_the_same_as_the_files(folder, tensors):
    data = json.loads(run("inspect", folder, "--json", "--depth", 3).stdout)
    assert {t["name"]: (t["dtype"], t["shape"]) for t in data["tensors"]} == {
        name: ("float32", list(tensor.shape)) for name, tensor in tensors.items()
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {t["name"]: [Path(f).name for f in t["files"]] for t in data["tensors"]} == {
        name: [file] for name, file in index.items()
    }
    assert data["modules"]["model.layers.0"]["tensors"] == 9
    assert data["totals"]["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert sum(file["tensors"] for file in data["files"].values()) == len(tensors)


def test_inspect_picks_tensors_by_a_pattern(folder):
    data = json.loads(run("inspect", folder, "--json", "--filter", "*.q_proj.weight").stdout)
    assert [t["name"] for t in data["tensors"]] == [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]
    assert "q_proj" not in run("inspect", folder, "--summary").stdout


def test_inspect_reads_no_data(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 40))
    assert "1,099,511,627,776" in run("inspect", tmp_path).stdout


def test_options_are_yaml_and_checked_by_the_loader(folder, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    one = run("inspect", tmp_path, "--loader", "local", "--option", "file_pattern=one*", "--json")
    assert [t["name"] for t in json.loads(one.stdout)["tensors"]] == ["a"]
    flag = run("inspect", folder, "-l", "local", "-o", "ignore_index=true", "--json")
    assert json.loads(flag.stdout)["tensors"]
    for bad, said in (
        ("ignore_index='true'", "ignore_index"),
        ("file_patern=x", "did you mean 'file_pattern'"),
        ("nothing", "NAME=VALUE"),
        ("a=[", "YAML"),
    ):
        assert said in run("inspect", folder, "-l", "local", "-o", bad, status=1).stderr
    twice = run("inspect", folder, "-l", "local", "-o", "ignore_index=true", "-o", "ignore_index=false", status=1)
    assert "twice" in twice.stderr


def test_names_from_a_file_can_not_steer_the_terminal(tmp_path):
    save_file({"\x1b[2Jevil\x07": torch.ones(2), "[red]plain[/red]": torch.ones(2)}, tmp_path / "model.safetensors")
    output = run("inspect", tmp_path / "model.safetensors").stdout
    assert "\x1b" not in output
    assert "\x07" not in output
    assert "\\x1b[2Jevil\\x07" in output
    assert "[red]plain[/red]" in output


# ------------------------------------------------------------------ plan


def test_plan_says_first_whether_it_fits_and_then_what_each_module_gets(folder, tensors):
    lines = run("plan", folder).stdout.splitlines()
    assert lines[0] == "it fits"
    assert f"{len(tensors)} parameters" in lines[1]
    modules = {line.split()[0]: line.split() for line in lines[lines.index("") + 2 :]}
    assert list(modules) == ["lm_head", "model.embed_tokens", "model.layers", "model.norm"]
    nbytes = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("model.layers."))
    assert modules["model.layers"][1:4] == ["18", f"{nbytes:,}", "read"]
    assert "and 2 more" in " ".join(modules["model.layers"])
    deeper = run("plan", folder, "--depth", 3).stdout
    assert "model.layers.1 " in deeper


def test_plan_shows_each_parameter_when_asked_in_natural_order(folder, tensors):
    rows = run("plan", folder, "--full").stdout.partition("\n\n")[2].splitlines()[1:]
    assert {row.split()[0] for row in rows} == tensors.keys()
    assert all(".safetensors, bytes" in row for row in rows)
    data = json.loads(run("plan", folder, "--json").stdout)
    assert data["ok"]
    assert data["forecast"]["bytes_to_read"] == sum(tensor.nbytes for tensor in tensors.values())


def test_plan_counts_layers_as_people_do(tmp_path):
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=11, num_attention_heads=1, dtype="float32"
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    lines = run("plan", tmp_path, "--depth", 3, "--quiet").stdout.splitlines()
    modules = [line.split()[0] for line in lines if line.startswith("model.layers.")]
    assert modules == [f"model.layers.{i}" for i in range(11)]


def test_plan_explains_one_parameter(folder):
    explained = run("plan", folder, "--explain", "model.norm.weight").stdout
    assert "model.norm.weight" in explained
    assert ".safetensors, bytes" in explained
    assert "nothing named 'nope'" in run("plan", folder, "--explain", "nope", status=1).stderr
    assert "did you mean 'model.norm.weight'" in run("plan", folder, "--explain", "model.nrom.weight", status=1).stderr
    hint = run("plan", folder, "--explain", "q_proj", status=1).stderr
    assert "did you mean 'model.layers.0.self_attn.q_proj.weight'? It is in 1 more names." in hint


def test_an_adapters_folder_is_called_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in run("plan", tmp_path, status=1).stderr


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_plan_fails_where_the_weights_do_not_fit(folder, tensors, tmp_path, quiet):
    name = "model.layers.1.self_attn.o_proj.weight"
    gap = changed(tensors, tmp_path / "gap.safetensors", model__layers__1__self_attn__o_proj__weight=None)
    result = run("plan", gap, "--model", folder, *quiet, status=1)
    assert result.stdout.startswith("it does not fit: 1 error\n")
    assert f"error: 1 of {len(tensors)} parameters" in result.stderr
    assert f"--on-missing {name}=warn" in result.stderr
    data = json.loads(run("plan", gap, "--model", folder, "--json", status=1).stdout)
    assert data["missing"] == [name]
    shape = changed(tensors, tmp_path / "shape.safetensors", model__norm__weight=torch.ones(3))
    assert "model.norm.weight" in run("plan", shape, "--model", folder, *quiet, status=1).stderr


def test_plan_shows_wrappers_that_are_removed_and_prefixes_that_are_added(folder, tensors, tmp_path):
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "wrapped.safetensors")
    wrapped = run("plan", tmp_path / "wrapped.safetensors", "-m", folder).stdout
    assert f"renamed: {len(tensors)}: 'module' -> '' ({len(tensors)})" in wrapped
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "bare.safetensors")
    number = len(tensors) - 1
    assert (
        f"renamed: {number}: '' -> 'model' ({number})"
        in run("plan", tmp_path / "bare.safetensors", "-m", folder).stdout
    )


@pytest.mark.parametrize(
    ("source", "file"),
    [
        (lambda name, tensor: (f"body.{name}", tensor), 'rename: {"body": ""}'),
        (
            lambda name, tensor: (
                name,
                tensor.T.contiguous() if name.endswith("0.mlp.up_proj.weight") else tensor,
            ),
            (
                'convert: [{sources: "model.layers.0.mlp.up_proj.weight", '
                'targets: "model.layers.0.mlp.up_proj.weight", function: transpose}]'
            ),
        ),
    ],
)
def test_advice_about_rules_is_a_file_that_can_be_written_as_it_stands(folder, tensors, tmp_path, source, file):
    save_file(dict(source(*item) for item in tensors.items()), tmp_path / "w.safetensors")
    plan = ["plan", tmp_path / "w.safetensors", "--model", folder]
    assert f"--rules FILE, with this in the file: {file}" in run(*plan, status=1).stderr
    (tmp_path / "rules.yaml").write_text(file)
    run(*plan, "--rules", tmp_path / "rules.yaml")


def test_plan_takes_policies_for_all_names_or_for_some(folder, tensors, tmp_path):
    gap = changed(tensors, tmp_path / "gap.safetensors", model__norm__weight=None, extra=torch.ones(1))
    plan = ["plan", gap, "--model", folder]
    assert "it fits" in run(*plan, "--on-missing", "warn").stdout
    assert "it fits" in run(*plan, "--on-missing", "model.norm=ignore").stdout
    run(*plan, "--on-missing", "lm_head=ignore", status=1)
    run(*plan, "--on-missing", "lm_head=error", "--on-missing", "ignore")
    run(*plan, "--on-missing", "model.norm=error", "--on-missing", "ignore", status=1)
    assert "extra" in run(*plan, "--on-missing", "warn", "--on-unexpected", "error", status=1).stderr
    shape = changed(tensors, tmp_path / "shape.safetensors", model__norm__weight=torch.ones(3))
    run("plan", shape, "--model", folder, "--on-mismatch", "norm=warn")
    assert "did you mean 'warn'" in run(*plan, "--on-missing", "norm=wran", status=1).stderr


def test_plan_obeys_a_file_of_rules(folder, tensors, tmp_path):
    save_file({f"backbone.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "b.safetensors")
    (tmp_path / "rules.yaml").write_text('rename:\n  - {old: backbone, new: ""}\n')
    run("plan", tmp_path / "b.safetensors", "--model", folder, "--rules", tmp_path / "rules.yaml")
    (tmp_path / "rules.yaml").write_text("renam: []\n")
    bad = run("plan", tmp_path / "b.safetensors", "--model", folder, "--rules", tmp_path / "rules.yaml", status=1)
    assert "renam" in bad.stderr


def test_plan_needs_a_config_and_says_how_to_name_one(tensors, tmp_path):
    file = changed(tensors, tmp_path / "model.safetensors")
    assert "--model DIR" in run("plan", file, status=1).stderr
    assert "--model DIR" in run("plan", tmp_path, status=1).stderr


# ------------------------------------------------------------------ convert


def converted(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_there_and_back_again_is_the_same(folder, tensors, tmp_path):
    run("convert", folder, tmp_path / "binary", "--to", "binary")
    assert sum(tensor.nbytes for tensor in tensors.values()) == (tmp_path / "binary" / "model.bin").stat().st_size
    run("convert", tmp_path / "binary", tmp_path / "back", "--to", "safetensors")
    assert same(converted(tmp_path / "back"), tensors)
    run("compare", folder, tmp_path / "back")
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(reference.state_dict()["lm_head.weight"], tensors["lm_head.weight"])


def test_what_belongs_to_the_model_comes_along_and_what_belongs_to_the_weights_does_not(folder, tmp_path):
    run("convert", folder, tmp_path / "out", "--to", "binary")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.bin",
        "meta.txt",
    }
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_shards_are_no_larger_than_asked_and_indexed(folder, tensors, tmp_path):
    run("convert", folder, tmp_path / "out", "--to", "safetensors", "--max-shard-size", "10KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    files = set(index["weight_map"].values())
    assert len(files) > 1
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert sum(opened.get_tensor(name).nbytes for name in opened.keys()) <= 10_000  # noqa: SIM118 -- no dict
    assert (
        "size"
        in run("convert", folder, tmp_path / "x", "--to", "safetensors", "--max-shard-size", "big", status=1).stderr
    )


def test_a_single_file_is_written_where_one_is_named(folder, tensors, tmp_path):
    run("convert", folder, tmp_path / "new" / "all.safetensors", "--to", "safetensors")
    assert same(load_file(tmp_path / "new" / "all.safetensors"), tensors)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["all.safetensors"]


def test_a_dtype_changes_floating_point_tensors_and_the_config(folder, tensors, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file({**tensors, "ids": torch.arange(3)}, source / "model.safetensors")
    (source / "config.json").write_text(
        json.dumps({"dtype": "float32", "text_config": {"torch_dtype": "float32"}, "x": 1})
    )
    run("convert", source, tmp_path / "out", "--to", "safetensors", "--dtype", "bfloat16")
    result = converted(tmp_path / "out")
    assert result.pop("ids").dtype is torch.int64
    assert same(result, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}, "x": 1}
    for dtype in ("int8", "bfloat61"):
        assert dtype in run("convert", source, tmp_path / "no", "--to", "binary", "--dtype", dtype, status=1).stderr


def test_a_cast_that_makes_infinities_is_refused_by_name_and_leaves_nothing(tmp_path):
    save_file({"a": torch.ones(2), "big.weight": torch.tensor([1e6])}, tmp_path / "a.safetensors")
    result = run(
        "convert", tmp_path / "a.safetensors", tmp_path / "out", "--to", "binary", "--dtype", "float16", status=1
    )
    assert "big.weight" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_nothing_that_exists_is_replaced(folder, tensors, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "file.safetensors").write_text("mine")
    for target in (tmp_path / "full", tmp_path / "file.safetensors", folder, folder.parent):
        result = run("convert", folder, target, "--to", "safetensors", status=1)
        assert str(target) in result.stderr
    assert (tmp_path / "file.safetensors").read_text() == "mine"
    assert same(converted(folder), tensors)


def test_into_an_empty_folder_or_one_inside_the_source(tensors, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    changed(tensors, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    (source / "empty").mkdir()
    run("convert", source, source / "empty", "--to", "safetensors")
    run("convert", source, source / "deep" / "new", "--to", "binary")
    assert same(converted(source / "empty"), tensors)
    assert {path.name for path in source.iterdir()} == {"model.safetensors", "config.json", "empty", "deep"}
    assert {path.name for path in (source / "deep" / "new").iterdir()} == {"config.json", "model.bin", "meta.txt"}


STUCK = """
import time
from pathlib import Path
import torch
from weightloaders import BaseWeightLoader, TensorInfo, Weights

class Loader(BaseWeightLoader):
    def __init__(self, then: str):
        self.then = then

    def get_weights(self, model_name_or_path):
        return Weights.describe(
            TensorInfo(name, torch.float32, (1000,), read=lambda name=name: self.read(name)) for name in "abc"
        )

    def read(self, name):
        if name == "b" and self.then == "fail":
            raise OSError("the disk went away")
        if name == "b":
            Path(self.then).touch()
            time.sleep(60)
        return torch.ones(1000)
"""


@pytest.fixture
def stuck(tmp_path) -> Path:
    """A folder to import from, with a loader whose second tensor can't be read, or takes for ever."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "stuck_in_the_middle.py").write_text(STUCK)
    return folder


@pytest.mark.parametrize("to", ["safetensors", "binary"])
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_a_conversion_that_fails_leaves_nothing(stuck, monkeypatch, tmp_path, to, target):
    monkeypatch.syspath_prepend(stuck)
    options = ["--loader", "stuck_in_the_middle:Loader", "--option", "then=fail"]
    result = run("convert", "anything", tmp_path / target, "--to", to, *options, status=1)
    assert "the disk went away" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["modules"]


@contextlib.contextmanager
def converting(stuck: Path, environment: dict[str, str], target: Path, to: str, *wrapper: str):
    """A conversion in a process of its own that is in the middle of its work."""
    waiting = stuck / "waiting"
    command = [*wrapper, sys.executable, "-m", "weightloaders", "convert", "anything", str(target), "--to", to]
    command += ["--loader", "stuck_in_the_middle:Loader", "--option", f"then={waiting}"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=importing_from(stuck, environment), **silent) as process:
        deadline = time.monotonic() + 60
        while not waiting.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
@pytest.mark.parametrize(
    ("to", "target"), [("safetensors", "out"), ("safetensors", "x.safetensors"), ("binary", "out")]
)
def test_what_a_killed_conversion_leaves_does_not_look_complete_and_the_next_removes_it(
    folder, stuck, environment, tmp_path, to, target
):
    with converting(stuck, environment, tmp_path / target, to) as process:
        result = run("convert", folder, tmp_path / target, "--to", to, status=1)
        assert "somebody else is saving there" in result.stderr
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / target).exists()
    assert len(list(tmp_path.iterdir())) == 3
    run("convert", folder, tmp_path / target, "--to", to)
    assert {path.name for path in tmp_path.iterdir()} == {target, "modules"}


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_conversion_that_is_told_to_end_leaves_nothing(stuck, environment, tmp_path, name):
    number = signal.Signals[name]
    with converting(stuck, environment, tmp_path / "deep" / "out", "safetensors") as process:
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["modules"]


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_what_shall_outlive_its_terminal_does(stuck, environment, tmp_path):
    with converting(stuck, environment, tmp_path / "out", "binary", "nohup") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


@pytest.mark.parametrize("name", ["\ud800", "two\nlines"])
def test_a_name_that_the_format_can_not_hold_is_told_before_anything_is_read(tmp_path, monkeypatch, name):
    torch.save({"first": torch.ones(2), name: torch.ones(2)}, tmp_path / "source.pt")
    monkeypatch.setattr(Weights, "__getitem__", lambda self, name: pytest.fail("it was read"))
    result = run("convert", tmp_path / "source.pt", tmp_path / "out", "--to", "binary", status=1)
    assert repr(name) in result.stderr
    if name == "\ud800":
        for target in ("out", "out.safetensors"):
            result = run("convert", tmp_path / "source.pt", tmp_path / "new" / target, "--to", "safetensors", status=1)
            assert repr(name) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


@pytest.mark.parametrize("target", ["x" * 300, "x" * 300 + ".safetensors", "~nobody_of_that_name/" + "x" * 300])
def test_a_destination_that_can_not_be_is_named(folder, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    result = run("convert", folder, target, "--to", "safetensors", status=1)
    assert f"can't save {target}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_errors_name_the_destination_and_not_what_is_written_aside(tmp_path):
    resource = pytest.importorskip("resource", reason="no limits for processes here")
    torch.save({"w": torch.ones(1 << 16)}, tmp_path / "source.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for to in ("safetensors", "binary"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            result = run("convert", tmp_path / "source.pt", tmp_path / "out", "--to", to, status=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(tmp_path / "out") in result.stderr
        assert ".saving" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_a_config_whose_dtype_can_not_be_changed_is_told_before_anything_is_read(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    monkeypatch.setattr(Weights, "__getitem__", lambda self, name: pytest.fail("it was read"))
    for text in ("{", "[" * 100_000):
        (source / "config.json").write_text(text)
        arguments = ("--to", "safetensors", "--dtype", "bfloat16")
        assert "config.json" in run("convert", source, tmp_path / "out", *arguments, status=1).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_empty_folder_is_filled_and_not_exchanged_for_it_may_be_a_volume(folder, tmp_path):
    target = tmp_path / "volume"
    target.mkdir()
    before = target.stat().st_ino
    run("convert", folder, target, "--to", "binary")
    assert target.stat().st_ino == before
    assert not list(target.glob(".*"))
    (tmp_path / "link").symlink_to("nowhere")
    assert "exists already" in run("convert", folder, tmp_path / "link", "--to", "binary", status=1).stderr


def test_progress_is_a_few_lines_or_none(folder, tmp_path):
    lines = run("convert", folder, tmp_path / "a", "--to", "binary").stderr.splitlines()
    assert 1 <= sum("loaded" in line for line in lines) <= 5
    assert "loaded" not in run("convert", folder, tmp_path / "b", "--to", "binary", "--no-progress").stderr
    assert run("convert", folder, tmp_path / "c", "--to", "binary", "--quiet").stderr == ""
    silent = run("convert", folder, tmp_path / "d", "--to", "binary", env={"WEIGHTLOADERS_PROGRESS": "0"})
    assert "loaded" not in silent.stderr


FUSING = """
rename: {model.layers: layers}
convert:
  - sources: ["layers.*.self_attn.q_proj.weight", "layers.*.self_attn.k_proj.weight", "layers.*.self_attn.v_proj.weight"]
    targets: "layers.*.qkv.weight"
    function: fuse_qkv_interleaved
  - {sources: ["layers.*.mlp.gate_proj.weight", "layers.*.mlp.up_proj.weight"], targets: "layers.*.gate_up.weight", function: fuse_gate_up}
"""  # noqa: E501 -- one rule a line


@pytest.fixture
def fused(folder, tmp_path) -> tuple[Path, Path]:
    """The tiny Llama in fused layers, and the rules that made it so."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(FUSING)
    run("convert", folder, tmp_path / "fused", "--to", "safetensors", "--rules", rules, "--max-shard-size", "8KB")
    return tmp_path / "fused", rules


def test_rules_change_names_and_layouts_on_the_way(folder, tensors, fused):
    result = converted(fused[0])
    assert "layers.1.qkv.weight" in result
    assert not any("proj" in name for name in result if "o_proj" not in name and "down_proj" not in name)
    q, k, v = (tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    # As the config says: two heads of eight rows, each with its own key and value.
    rows = [part[at : at + 8] for at in (0, 8) for part in (q, k, v)]
    assert torch.equal(result["layers.1.qkv.weight"], torch.cat(rows))
    assert torch.equal(
        result["layers.0.gate_up.weight"],
        torch.cat([tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]),
    )
    assert (fused[0] / "config.json").exists()


@pytest.mark.parametrize("to", ["safetensors", "binary"])
def test_the_same_rules_lead_back_into_the_layout_of_another_checkpoint(folder, tensors, fused, tmp_path, to):
    run("convert", fused[0], tmp_path / "back", "--to", to, "--rules", fused[1], "--like", folder)
    run("compare", tmp_path / "back", folder)
    if to == "safetensors":
        assert same(converted(tmp_path / "back"), tensors)


def test_a_dtype_may_change_on_the_way(folder, tensors, fused, tmp_path):
    back = ("--rules", fused[1], "--like", folder, "--dtype", "bfloat16")
    run("convert", fused[0], tmp_path / "back", "--to", "safetensors", *back)
    assert same(converted(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_the_way_back_reads_only_the_headers_of_the_other_checkpoint(folder, fused, tmp_path):
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for file in folder.glob("model*"):
        (hollow / file.name).write_bytes(file.read_bytes())
        if file.suffix == ".safetensors":
            with (hollow / file.name).open("r+b") as opened:
                opened.truncate(8 + int.from_bytes(opened.read(8), "little"))
                opened.truncate(file.stat().st_size)
    back = ("--rules", fused[1], "--like", hollow, "--model", folder)
    run("convert", fused[0], tmp_path / "back", "--to", "safetensors", *back)
    run("compare", tmp_path / "back", folder)


def test_what_there_is_no_value_for_is_named_and_can_be_left_out(folder, tensors, fused, tmp_path):
    more = tmp_path / "more"
    more.mkdir()
    changed(tensors, more / "model.safetensors", extra=torch.ones(3))
    back = ("--to", "safetensors", "--rules", fused[1], "--like", more)
    message = run("convert", fused[0], tmp_path / "back", *back, status=1).stderr
    assert "extra: it belongs into extra, which is not there" in message
    assert "--on-missing extra=warn" in message
    assert not (tmp_path / "back").exists()
    assert "extra" in run("convert", fused[0], tmp_path / "back", *back, "--on-missing", "extra=warn").stderr
    assert same(converted(tmp_path / "back"), tensors)


def test_what_is_missing_of_nothing_is_refused(folder, tmp_path):
    arguments = ("--to", "safetensors", "--on-missing", "warn")
    assert "--like goes with it" in run("convert", folder, tmp_path / "out", *arguments, status=1).stderr


def test_what_has_no_place_in_the_other_layout_is_named(tensors, fused, folder, tmp_path):
    less = tmp_path / "less"
    less.mkdir()
    changed(tensors, less / "model.safetensors", model__norm__weight=None)
    back = ("--to", "safetensors", "--rules", fused[1], "--like", less)
    assert "has no place for model.norm.weight" in run("convert", fused[0], tmp_path / "back", *back, status=1).stderr
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("rename: {model.norm.weight: lm_head.weight}", "two tensors come out as 'lm_head.weight'"),
        ("convert: [{sources: [model.norm.weight, absent], targets: x, function: fuse_gate_up}]", "absent is missing"),
        ("convert: [{sources: lm_head.weight, targets: x, function: reshape, shape: [3, 3]}]", "can't be applied"),
        ("rename: {modle: model}", "none of the rules matches a tensor: rename 'modle' -> 'model'"),
    ],
)
def test_rules_that_can_not_be_applied_are_told_before_anything_is_written(folder, tmp_path, rules, said):
    (tmp_path / "rules.yaml").write_text(rules)
    arguments = ("convert", folder, tmp_path / "out", "--to", "safetensors", "--rules", tmp_path / "rules.yaml")
    assert said in run(*arguments, status=1).stderr
    assert not (tmp_path / "out").exists()


def test_what_rules_compute_is_computed_and_what_they_drop_is_left_out(tmp_path):
    v, g = torch.randn(4, 3), torch.rand(4, 1)
    save_file({"v": v, "g": g, "rest": torch.ones(2), "gone": torch.ones(2)}, tmp_path / "in.safetensors")
    (tmp_path / "rules.yaml").write_text(
        "drop: [gone, nothing]\nconvert: [{sources: [g, v], targets: w, function: weight_norm}]"
    )
    arguments = ("--to", "safetensors", "--rules", tmp_path / "rules.yaml")
    said = run("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *arguments).stderr
    assert "drop 'nothing' matches no tensor" in said
    result = load_file(tmp_path / "out.safetensors")
    assert result.keys() == {"w", "rest"}
    assert torch.equal(result["w"], torch._weight_norm(v, g, 0))


# ------------------------------------------------------------------ compare


def test_compare_finds_equal_sources_equal(folder, tensors, tmp_path):
    torch.save(tensors, tmp_path / "model.pt")
    result = run("compare", folder, tmp_path / "model.pt")
    assert result.stdout == f"{len(tensors)} of {len(tensors)} tensors have the same names, shapes, dtypes and values\n"


def test_compare_names_each_difference(tmp_path):
    base = {
        "same": torch.ones(4),
        "shape": torch.ones(4),
        "dtype": torch.tensor([1.0, 2.5]),
        "values": torch.tensor([1.0, 2.0, 3.0]),
        "nan": torch.tensor([float("nan"), 1.0]),
        "one_nan": torch.tensor([float("nan"), 1.0]),
        "inf": torch.tensor([float("inf"), 1.0]),
        "count": torch.tensor([2**60, 1]),
        "flag": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "code": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "zero": torch.zeros(0),
        "minus": torch.tensor([0.0]),
        "only_a": torch.ones(1),
    }
    other = {
        **base,
        "shape": torch.ones(2, 2),
        "dtype": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "values": torch.tensor([1.0, 2.5, 2.75]),
        "one_nan": torch.tensor([0.0, 1.0]),
        "inf": torch.tensor([float("inf"), 2.0]),
        "count": torch.tensor([2**60 + 1, 1]),
        "flag": torch.tensor([True, True]),
        "complex": torch.tensor([1 + 5j]),
        "code": torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn),
        "minus": torch.tensor([-0.0]),
        "only_b": torch.ones(1),
    }
    del other["only_a"]
    save_file(base, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    data = json.loads(run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json", status=1).stdout)
    found = {d["name"]: (d["kind"], d["max_abs_diff"]) for d in data["differences"]}
    assert str(found.pop("one_nan")) == "('values', nan)"
    assert found == {
        "only_a": ("only in A", None),
        "only_b": ("only in B", None),
        "shape": ("shape", None),
        "dtype": ("dtype", 0.5),
        "values": ("values", 0.5),
        "inf": ("values", 1.0),
        "count": ("values", 1.0),
        "flag": ("values", 1.0),
        "complex": ("values", 3.0),
        "code": ("values", 2.0),
    }
    assert (data["tensors"], data["same"]) == (15, 4)
    table = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=1).stdout
    for name in found:
        assert name in table
    first, second, empty, *_ = table.splitlines()
    assert first == "4 of 15 tensors have the same names, shapes, dtypes and values"
    assert second == (
        "1 differ in shape; 1 differ in dtype; 7 differ in values; 1 only in A; 1 only in B; "
        "largest difference nan in one_nan"
    )
    assert empty == ""
    sides = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert run("compare", *sides, "--summary", status=1).stdout.splitlines() == [first, second]


def test_compare_ends_with_the_exit_status_of_diff(folder, tmp_path):
    run("compare", folder, folder)
    assert "nowhere" in run("compare", folder, tmp_path / "nowhere", status=2).stderr
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    run("compare", tmp_path / "broken.safetensors", folder, status=2)
    run("compare", folder, folder, "--loader-a", "nobody", status=2)


def test_compare_allows_what_it_is_told_to(tensors, tmp_path):
    nudged = {name: tensor + 1e-4 for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(nudged, tmp_path / "b.safetensors")
    run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=1)
    run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--atol", "1e-3")
    run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--headers-only")


def test_compare_asks_a_loader_for_each_side(folder, tmp_path):
    run("convert", folder, tmp_path / "bf16", "--to", "binary", "--dtype", "bfloat16")
    run("convert", folder, tmp_path / "ref", "--to", "safetensors", "--dtype", "bfloat16")
    options = ["--loader-a", "binary", "--option-a", "dtype=float32", "--loader-b", "local"]
    result = run("compare", tmp_path / "bf16", tmp_path / "ref", *options, "--json", status=1)
    assert {d["kind"] for d in json.loads(result.stdout)["differences"]} == {"dtype"}
    assert {d["max_abs_diff"] for d in json.loads(result.stdout)["differences"]} == {0.0}


# ------------------------------------------------------------------ doctor


def test_doctor_shows_versions_loaders_and_machine():
    output = run("doctor").stdout
    for words in (__version__, torch.__version__, "hf", "ok (weightloaders", "cores", "hub cache", "no problems"):
        assert words in output
    if sys.platform == "linux":
        assert re.search(r"^  memory +[\d.]+ [MGT]B available of [\d.]+ [MGT]B$", output, re.MULTILINE)


def test_doctor_shows_no_heading_with_nothing_below_it():
    nothing = dict.fromkeys(["HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "WEIGHTLOADERS_DISABLE"])
    assert "environment\n" not in run("doctor", env=nothing).stdout
    assert "environment\n  HF_HUB_OFFLINE" in run("doctor", env={**nothing, "HF_HUB_OFFLINE": "1"}).stdout


def test_doctor_tells_that_a_kind_of_storage_is_none():
    result = run("doctor", env={"WEIGHTLOADERS_STORAGE": "netwrok"}, status=1)
    assert re.search(
        r"WEIGHTLOADERS_STORAGE +netwrok \(which is no kind of storage; set it to .*network.*PROBLEM", result.stdout
    )


def test_doctor_never_shows_a_token():
    output = run("doctor", env={"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1"}).stdout
    assert "hf_secret" not in output
    assert "HF_TOKEN" in output
    assert "HF_HUB_OFFLINE" in output


def test_doctor_names_a_broken_plugin_and_goes_on(environment, tmp_path):
    info = tmp_path / "broken_plugin-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[weightloaders.loaders]\nshaky = broken_plugin:Loader\n")
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no luck')\n")
    result = program("doctor", env=importing_from(tmp_path, environment))
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if "shaky" in line)
    for words in ("broken", "broken-plugin 3.1", "no luck", "PROBLEM"):
        assert words in line
    assert "1 problem" in result.stdout
    assert "huge pages" in result.stdout or sys.platform != "linux"
    listed = program("list", env=importing_from(tmp_path, environment))
    assert listed.returncode == 0
    assert "no luck" in listed.stdout


# ------------------------------------------------------------------ generate


@pytest.fixture
def bare(folder, tmp_path) -> Path:
    """The model with a tokenizer whose tokens are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    target = tmp_path / "bare"
    run("convert", folder, target, "--to", "safetensors", "-q")
    (target / "chat_template.jinja").unlink()
    backend = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 64)}}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(target)
    return target


def test_generate_prints_the_text_and_reports_beside_it(bare):
    result = run("generate", bare, "w5 w6", "--max-tokens", 4)
    assert len(result.stdout.split()) == 4
    assert "loaded by hf" in result.stderr
    quiet = run("generate", bare, "-", "--max-tokens", 4, "--quiet", stdin="w5 w6")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_generate_takes_a_config_and_what_is_given_counts_rather(bare, tmp_path):
    (tmp_path / "llm.yaml").write_text(
        "model: bare\nweight_loader: hf\nsampling_params: {temperature: 0, max_tokens: 3}\n", encoding="utf-8"
    )
    three = run("generate", "--config", tmp_path / "llm.yaml", "w5 w6", "-q").stdout
    assert len(three.split()) == 3
    two = run("generate", "--config", tmp_path / "llm.yaml", "w5 w6", "--max-tokens", 2, "--loader", "local")
    assert two.stdout.split() == three.split()[:2]
    assert "loaded by local" in two.stderr


def test_generate_chats_where_there_is_a_template(bare):
    plain = run("generate", bare, "w5", "-q", "--max-tokens", 4).stdout
    (bare / "chat_template.jinja").write_text("{{ messages[0]['content'] }} w7 w8 w9")
    chat = run("generate", bare, "w5", "-q", "--max-tokens", 4).stdout
    assert chat == run("generate", bare, "w5 w7 w8 w9", "-q", "--raw", "--max-tokens", 4).stdout
    assert plain == run("generate", bare, "w5", "-q", "--raw", "--max-tokens", 4).stdout
    assert chat != plain


def test_generate_draws_by_a_seed(bare):
    def drawn(seed: int) -> str:
        options = ["--temperature", 3, "--seed", seed, "--max-tokens", 8, "-q"]
        return run("generate", bare, "w5", *options).stdout

    assert drawn(1) == drawn(1) != drawn(2)


def test_generate_takes_weights_from_elsewhere(bare, tensors, tmp_path):
    elsewhere = changed(tensors, tmp_path / "other.safetensors", lm_head__weight=-tensors["lm_head.weight"])
    other = run("generate", bare, "w5", "--weights", elsewhere, "-q", "--max-tokens", 4).stdout
    assert other != run("generate", bare, "w5", "-q", "--max-tokens", 4).stdout
    gap = changed(tensors, tmp_path / "gap.safetensors", model__norm__weight=None)
    failed = run("generate", bare, "w5", "--weights", gap, status=1)
    assert "--on-missing model.norm.weight=warn" in failed.stderr
    assert failed.stdout == ""
    run("generate", bare, "w5", "--weights", gap, "--on-missing", "model.norm.weight=warn", "-q")


def test_a_glob_is_an_option_as_it_is(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"v": torch.ones(2)}, tmp_path / "two.safetensors")
    output = run("inspect", tmp_path, "--loader", "local", "--option", "file_pattern=*two*").stdout
    assert re.search(r"^v ", output, re.MULTILINE)
    assert not re.search(r"^w ", output, re.MULTILINE)
