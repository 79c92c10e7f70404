"""The list of faults that were met elsewhere, held against the tests it names; and cases that lie across all parts."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hub_server import servers
from weightloaders import LLM, from_pretrained, load_into, open_weights, plan_load
from weightloaders.cli.main import app
from weightloaders.errors import CheckpointFormatError, WeightLoadersError
from weightloaders.weights.remote import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs/explanation/faults-met-elsewhere.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^- \*\*([A-Z]\d+)\*\* (.*?)(?=^- \*\*|^#|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE))
PAIRS = [line for line in DOCUMENT.splitlines() if line.startswith("| **")]
TESTS = sorted(set(re.findall(r"`((?:tests|plugins)/[\w./-]+\.py)::(test_\w+)`", DOCUMENT)))
REPORTED = {
    "A": (1, 3, 5, 7, 9, 10, 11, 12, 13, 14, 15, 17),
    "B": (1, 2, 4, 6, 8, 9, 11, 13, 15, 16),
    "C": (3, 4, 5, 7, 9, 10),
    "D": (1, 3, 4, 6, 8),
    "E": (3, *range(5, 17)),
    "F": (3, 4, 7, 10, 11, 12, 14, 15),
    "G": (5, 6, 7, 8, 9, 11, 13, 14, 15),
    "H": (1, *range(6, 15)),
    "I": (2, 4, 5, 6, 7),
    "J": (1, 2, 4, 5, 7, 9),
    "K": (3, 5, 7),
    "L": (1, 3, 5, 6, 7, 8, 9, 10),
    "M": (1, 4, 6, 7, 9, 10, 12, 13),
    "N": tuple(range(1, 17)),
}


def test_every_report_has_its_entry_with_a_test() -> None:
    assert list(ENTRIES) == [f"{letter}{number}" for letter, numbers in REPORTED.items() for number in numbers]
    assert [name for name, text in ENTRIES.items() if "::test_" not in text] == []
    assert DOCUMENT.count("::test_") == len(re.findall(r"`(?:tests|plugins)/[\w./-]+\.py::test_\w+`", DOCUMENT))


@pytest.mark.parametrize("file", sorted({file for file, _ in TESTS}))
def test_each_test_that_is_named_exists(file: str) -> None:
    defined = set(re.findall(r"^ *def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for where, name in TESTS if where == file} <= defined


def test_what_pulls_two_ways_is_tested_from_both_sides() -> None:
    assert len(PAIRS) == 7
    for line in PAIRS:
        sides = line.strip("|").split("|")
        assert [side for side in sides if "::test_" not in side] == []
        tests = re.findall(r"::(test_\w+)", line)
        assert len(set(tests)) == len(tests)


def test_trailing_bytes_get_one_verdict_whatever_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = save({"weight": torch.ones(2, 2)}) + b"\0" * 16
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    monkeypatch.setattr(RemoteSource, "pause", 0.001)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    model = torch.nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    with servers() as start:
        web = start()
        web.files["/model.safetensors"] = content
        url = f"{web.url}/model.safetensors"
        ways: list[Callable[[], Any]] = [
            lambda: open_weights(path),
            lambda: open_weights(tmp_path, "hf"),
            lambda: open_weights(url),
            lambda: plan_load(model, path),
            lambda: load_into(model, url, progress=False),
            *(
                functools.partial(load_into, model, path, transfer=mode, progress=False)
                for mode in ("direct", "mmap", "o_direct", "stream")
            ),
        ]
        verdicts = set()
        for way in ways:
            with pytest.raises(CheckpointFormatError, match="16") as caught:
                way()
            verdicts.add(caught.value.message.replace(url, "x").replace(str(path), "x"))
    assert len(verdicts) == 1
    assert torch.equal(model.weight, before)


_FORK = """
import os, sys
import torch
import weightloaders
from weightloaders import WeightLoaderRegistry, load_into, open_weights, plan_load
WeightLoaderRegistry.list_available(hooks=True), WeightLoaderRegistry.describe()
model = torch.nn.Linear(2, 2, bias=False)
with open_weights(sys.argv[1]) as weights:
    plan_load(model, weights)
child = os.fork()
if child == 0:
    load_into(model, sys.argv[1], progress=False)
    os._exit(0 if model.weight.sum() == 4 and not torch.cuda.is_initialized() else 1)
print(os.waitpid(child, 0)[1], torch.cuda.is_initialized())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_looking_around_loads_and_no_accelerator_was_touched(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(save({"weight": torch.ones(2, 2)}))
    done = subprocess.run([sys.executable, "-c", _FORK, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "0 False\n", done.stderr


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A small Llama with code for its tokenizer, its generation and itself, which leaves a mark where it runs."""
    folder = tmp_path / "folder"
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    ).save_pretrained(folder)  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model", "AutoModel": "theirs.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "theirs", "auto_map": classes}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}, "tokenizer_class": "TheirTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("theirs.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    return folder


@pytest.mark.parametrize("plain", [False, True], ids=["all", "only the tokenizer's"])
def test_code_of_a_tokenizer_or_model_runs_on_no_path_without_trust(
    with_code: Path, plain: bool, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    if plain:
        config = json.loads((with_code / "config.json").read_text())
        config.pop("auto_map", None)
        (with_code / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    text = str(with_code)
    ways: list[Callable[[], Any]] = [
        lambda: from_pretrained(text, progress=False),
        lambda: LLM(text, progress=False),
        lambda: LLM(text, progress=False, tokenizer=text),
        lambda: open_weights(text, "dummy").close(),
        lambda: open_weights(text).close(),
        *(
            functools.partial(CliRunner().invoke, app, arguments)
            for arguments in (["inspect", text], ["plan", text], ["generate", text, "x"], ["doctor"])
        ),
    ]
    errors = []
    for way in ways:
        try:
            way()
        except WeightLoadersError as error:
            errors.append(str(error))
    assert plain or (errors and all("trust_remote_code" in error for error in errors))
    assert not (with_code / "ran").exists()
