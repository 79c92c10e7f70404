"""Configs that nobody would write: a model is made of them, or they are refused in our own words; no code runs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from weightloaders import from_pretrained
from weightloaders.errors import ModelError, WeightLoadersError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


VALUES: list[dict[str, Any]] = [
    {"dtype": 5},
    {"dtype": ["float32"]},
    {"dtype": "load"},
    {"dtype": "os.system"},
    {"dtype": {"": "float32"}},
    {"auto_map": 5},
    {"auto_map": {"AutoConfig": "../../x.y"}},
    {"architectures": 5},
    {"architectures": [5]},
    {"architectures": "LlamaForCausalLM"},
    {"architectures": ["os.system"]},
    {"architectures": ["__name__"]},
    {"architectures": ["logging"]},
    {"model_type": 5},
    {"model_type": "../x"},
    {"hidden_size": -1},
    {"hidden_size": None},
    {"vocab_size": "x"},
    {"num_attention_heads": 0},
    {"num_hidden_layers": -1},
    {"hidden_act": "os.system"},
    {"tie_word_embeddings": "x"},
    {"rope_parameters": 5},
    {"rope_scaling": {"rope_type": "evil"}},
    {"quantization_config": 5},
    {"quantization_config": {"quant_method": 5}},
    {"quantization_config": []},
    {"text_config": 5},
    {"attn_implementation": "org/kernel"},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("values", VALUES, ids=json.dumps)
def test_a_config_with_odd_values_makes_a_model_or_is_refused_in_our_own_words(
    folder: Path, values: dict[str, Any]
) -> None:
    change(folder / "config.json", **values)
    try:
        model, _ = from_pretrained(folder, progress=False)
    except WeightLoadersError:
        return
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize(
    "content", ["", "5", "null", "[]", "{", "[" * 100_000, '{"eos_token_id": "x"}', '{"dtype": 5}']
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_file_with_anything_in_it_is_used_or_refused_in_our_own_words(
    folder: Path, name: str, content: str
) -> None:
    (folder / name).write_text(content)
    try:
        from_pretrained(folder, progress=False)
    except WeightLoadersError:
        return
    assert name == "generation_config.json"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_of_absurd_size_is_refused_unread(folder: Path, name: str) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="bytes, which no config has") as caught:
        from_pretrained(folder, progress=False)
    assert caught.value.file == str(folder / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_named_pipe_in_the_place_of_a_config_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name == "generation_config.json":
        from_pretrained(folder, progress=False)
    else:
        with pytest.raises(ModelError, match="there is no config"):
            from_pretrained(folder, progress=False)


def test_code_that_a_config_names_is_run_only_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    references = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    change(folder / "config.json", auto_map=references, architectures=["M"])
    with pytest.raises(WeightLoadersError):
        from_pretrained(folder, progress=False)
    change(folder / "config.json", model_type="evil")
    with pytest.raises(WeightLoadersError, match="trust_remote_code=True"):
        from_pretrained(folder, progress=False)
    assert not marker.exists()
