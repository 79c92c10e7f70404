"""Random weights in the shapes that a config implies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from weightloaders.errors import ModelError, OptionsError, SourceNotFoundError
from weightloaders.loaders.dummy import DummyLoader

if TYPE_CHECKING:
    from pathlib import Path

    from weightloaders.weights.weights import Weights

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    configs: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM": {"model_type": "llama", **SMALL, "num_key_value_heads": 2},
        "MixtralForCausalLM": {"model_type": "mixtral", **SMALL, "num_key_value_heads": 2, "num_local_experts": 2},
        "BertModel": {"model_type": "bert", **SMALL},
        "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    }
    return {"architectures": [architecture], **SPECIAL, **configs[architecture], **changes}


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def read(path: Path, **options: Any) -> Weights:
    return DummyLoader(**options).get_weights(str(path))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM", "BertModel", "GPT2LMHeadModel"])
def test_every_parameter_of_the_model_is_there_in_its_shape(tmp_path: Path, architecture: str) -> None:
    folder = folder_with(tmp_path, config_of(architecture))
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class.from_pretrained(folder))
    with read(folder) as weights:
        result = model.load_state_dict(dict(weights.items()), strict=False)
    assert result.unexpected_keys == []
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    assert set(result.missing_keys) <= tied


def test_the_model_runs_on_them(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config_of("LlamaForCausalLM"))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    with read(folder) as weights:
        model.load_state_dict(dict(weights.items()), strict=False)
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_tied_parameters_are_given_once(tmp_path: Path) -> None:
    with read(folder_with(tmp_path, config_of("LlamaForCausalLM", tie_word_embeddings=True))) as weights:
        assert "model.embed_tokens.weight" in weights
        assert "lm_head.weight" not in weights
    with read(folder_with(tmp_path, config_of("LlamaForCausalLM", tie_word_embeddings=False))) as weights:
        assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_the_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config_of("LlamaForCausalLM"))
    name = "model.layers.1.self_attn.q_proj.weight"
    with read(folder) as first, read(folder) as second, read(folder, seed=1) as other:
        everything = dict(first.items())
        assert torch.equal(second[name], everything[name])
        assert not torch.equal(other[name], everything[name])
        assert not torch.equal(everything[name], everything[name.replace("layers.1", "layers.0")])


def test_the_values_have_the_spread_asked_for(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config_of("LlamaForCausalLM"))
    for std in (0.02, 0.5):
        with read(folder, std=std) as weights:
            tensor = weights["model.embed_tokens.weight"]
        assert tensor.std().item() == pytest.approx(std, rel=0.1)
        assert abs(tensor.mean().item()) < std / 5


def test_the_dtype_is_the_configs_unless_another_is_asked_for(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config_of("LlamaForCausalLM", dtype="bfloat16"))
    with read(folder) as weights:
        assert {info.dtype for info in weights.infos()} == {torch.bfloat16}
        halves = weights["model.embed_tokens.weight"]
    with read(folder, dtype="float32") as weights:
        assert {info.dtype for info in weights.infos()} == {torch.float32}
        assert torch.equal(weights["model.embed_tokens.weight"].bfloat16(), halves)


def test_buffers_get_values_that_they_can_bear(tmp_path: Path) -> None:
    config = {
        "model_type": "resnet",
        "architectures": ["ResNetModel"],
        "hidden_sizes": [4, 8],
        "depths": [1, 1],
        "embedding_size": 4,
    }
    with read(folder_with(tmp_path, config)) as weights:
        variances = [weights[name] for name in weights if name.endswith("running_var")]
        counters = [weights[name] for name in weights if name.endswith("num_batches_tracked")]
    assert variances
    assert all((variance >= 0).all() for variance in variances)
    assert all(counter.dtype == torch.int64 and counter == 0 for counter in counters)


def test_the_report_will_say_that_these_are_no_weights(tmp_path: Path) -> None:
    with read(folder_with(tmp_path, config_of("BertModel")), seed=7) as weights:
        assert "random values (seed 7)" in weights.notes[0]


def test_a_config_without_architectures_is_taken_for_a_causal_model_where_there_is_one(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    del config["architectures"]
    with read(folder_with(tmp_path, config)) as weights:
        assert "model.embed_tokens.weight" in weights
    config = {"model_type": "resnet", "hidden_sizes": [4], "depths": [1], "embedding_size": 4}
    with read(folder_with(tmp_path, config)) as weights:
        assert len(weights) > 0


def test_a_file_stands_for_its_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config_of("BertModel"))
    (folder / "model.safetensors").touch()
    with read(folder / "model.safetensors") as weights:
        assert "embeddings.word_embeddings.weight" in weights


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"no config\.json in") as caught:
        read(tmp_path)
    assert caught.value.file == str(tmp_path)


def test_a_repository_that_is_not_there_is_refused_offline() -> None:
    with pytest.raises(SourceNotFoundError, match="no-such-org/no-such-model"):
        DummyLoader().get_weights("no-such-org/no-such-model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"model_type": "llama", "architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({}, "config"),
        (config_of("LlamaForCausalLM", num_attention_heads="many"), "config"),
        (config_of("LlamaForCausalLM", vocab_size=-4), "config"),
    ],
    ids=["type", "architecture", "empty", "ill-typed", "negative"],
)
def test_a_config_that_no_model_can_be_built_from_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(folder_with(tmp_path, config))


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises((SourceNotFoundError, ModelError), match="config"):
        read(tmp_path)


def test_code_that_a_repository_brings_along_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": {"AutoConfig": "own.OwnConfig"}}
    folder = folder_with(tmp_path, config)
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ModelError):
        read(folder)
    assert not marker.exists()


@pytest.mark.parametrize("options", [{"std": -1.0}, {"std": float("nan")}, {"dtype": "int8"}, {"dtype": "flot"}])
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        DummyLoader(**options)


def test_it_never_offers_itself(tmp_path: Path) -> None:
    assert DummyLoader.probe(str(folder_with(tmp_path, config_of("BertModel")))).answer == "no"
