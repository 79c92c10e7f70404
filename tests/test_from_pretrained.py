"""Models of transformers through any loader: equal, to the bit, to what transformers' own `from_pretrained` builds."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from weightloaders import LLM, BaseWeightLoader, from_pretrained, load_into, load_status, open_weights, save_weights
from weightloaders.errors import ConfigError, LoadError, ModelError, PlanError, SaveError
from weightloaders.skeleton import ARGUMENTS, HUB_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **options}))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=64, bos_token_id=0, eos_token_id=1)
    )


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8, vocab_size=40, decoder_start_token_id=0)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(tie_word_embeddings=False),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, long": lambda: llama(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }
    ),
    "qwen3": qwen3,
    "gpt2": gpt2,
    "mixtral": mixtral,
}  # fmt: skip


def ties(model: nn.Module) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter.data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def described(tensors: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (t.dtype, tuple(t.shape), t.stride(), t.requires_grad, type(t), t.device, t.is_contiguous())
        for name, t in tensors
    }


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    assert {name for name in theirs if not torch.equal(ours[name], theirs[name])} == set()


def assert_equal(model: Any, expected: Any) -> None:
    assert type(model) is type(expected)
    assert described(model.named_parameters(remove_duplicate=False)) == described(
        expected.named_parameters(remove_duplicate=False)
    )
    assert described(model.named_buffers(remove_duplicate=False)) == described(
        expected.named_buffers(remove_duplicate=False)
    )
    assert_same_values(model, expected)
    buffers = dict(expected.named_buffers())
    assert {name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])} == set()
    assert ties(model) == ties(expected)
    assert model.training == expected.training
    ours, theirs = (m.config.to_dict() | {"_name_or_path": ""} for m in (model, expected))
    assert ours == theirs
    assert model.dtype == expected.dtype
    if model.can_generate():
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens)[0], expected(tokens)[0])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            torch.manual_seed(len(made))
            model = {**MODELS, "t5": t5}[name]()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.3)
            model.generation_config.temperature = 0.75
            model.generation_config.do_sample = True
            model.to(torch.bfloat16).save_pretrained(made[name], max_shard_size="8kB")
        return made[name]

    return folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32", "float16"])
def test_a_model_equals_what_transformers_builds(folders: Callable[[str], Path], name: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders(name)
    model, report = from_pretrained(folder, dtype=dtype, progress=False)
    assert_equal(model, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    assert load_status(model) == "loaded"


@pytest.mark.parametrize("name", ["llama, tied", "mixtral", "gpt2"])
def test_the_same_comes_of_a_stream_and_of_a_classic_loader(folders: Callable[[str], Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders(name)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    tensors = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}

    class Streaming(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            yield from tensors.items()

    class ByName(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            return expected.state_dict()

        def load_weights(self, model: nn.Module, weights: Any) -> None:
            model.load_state_dict(weights, strict=False)

    for options in (
        {"loader": Streaming},
        {"loader": ByName},
        {"weights": tensors},
        {"weights": iter(tensors.items())},
    ):
        model, report = from_pretrained(folder, progress=False, **options)
        assert_equal(model, expected)
        assert report.missing == []


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_real_encoder_equals_what_transformers_builds(minilm_folder: Path, dtype: str) -> None:
    from transformers import AutoModel

    model, report = from_pretrained(minilm_folder, dtype=dtype, progress=False)
    expected = AutoModel.from_pretrained(minilm_folder, dtype="auto" if dtype == "auto" else torch.float16)
    assert type(model).__name__ == "BertModel"
    assert_equal(model, expected)
    # It carries position numbers, which are computed.
    assert report.unexpected == []


def test_a_real_chat_model_equals_what_transformers_builds(smollm2_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, report = from_pretrained(smollm2_folder, progress=False)
    assert_equal(model, AutoModelForCausalLM.from_pretrained(smollm2_folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report.bytes_read == 269030016


def test_a_model_in_evaluation_can_still_be_trained(folders: Callable[[str], Path]) -> None:
    model, _ = from_pretrained(folders("llama, tied"), dtype="float32", progress=False)
    model(torch.arange(3, 12)[None], labels=torch.arange(3, 12)[None]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ------------------------------------------------------------------ policies


def test_a_parameter_left_out_on_purpose_starts_as_transformers_starts_it(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("llama")
    tensors = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}
    lost = "model.layers.1.self_attn.o_proj.weight"
    del tensors[lost]
    with pytest.raises(PlanError, match="o_proj"):
        from_pretrained(folder, weights=tensors, progress=False)
    model, report = from_pretrained(folder, weights=tensors, on_missing={lost: "warn"}, progress=False)
    assert report.missing == report.initialised == [lost]
    # Standard deviation 0.02, by the config.
    assert 0.01 < float(model.get_parameter(lost).detach().float().std()) < 0.03
    state = model.state_dict()
    assert all(torch.equal(state[name], t) for name, t in tensors.items())


@pytest.mark.parametrize("form", ["catalogue", "stream"])
def test_an_untied_head_that_is_absent_is_an_error_and_a_tied_one_is_not(
    folders: Callable[[str], Path], form: str
) -> None:
    for name, is_tied in (("llama", False), ("llama, tied", True)):
        folder = folders(name)
        tensors = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}
        tensors.pop("lm_head.weight", None)
        weights: Any = tensors if form == "catalogue" else iter(tensors.items())
        if is_tied:
            model, _ = from_pretrained(folder, weights=weights, progress=False)
            assert model.lm_head.weight is model.model.embed_tokens.weight
        else:
            with pytest.raises((PlanError, LoadError), match=r"lm_head\.weight"):
                from_pretrained(folder, weights=weights, progress=False)


@pytest.mark.parametrize("form", ["catalogue", "stream"])
@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both, equal", "both, different"])
def test_ties_by_config_follow_what_the_file_holds(
    folders: Callable[[str], Path], tmp_path: Path, form: str, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    folder = folders("llama, tied")
    tensors = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}
    embed = tensors.pop("model.embed_tokens.weight")
    tensors.pop("lm_head.weight", None)
    if kept.startswith("both"):
        head = embed.clone() if "equal" in kept else embed + 1
        tensors |= {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    else:
        tensors[kept] = embed
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    model, report = from_pretrained(
        tmp_path, weights=iter(tensors.items()) if form == "stream" else None, progress=False
    )
    assert_equal(model, expected)
    assert report.missing == []
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == ("different" not in kept)
    # Both are kept, and that is said.
    said = [warning for warning in report.warnings if "the config ties lm_head.weight" in warning]
    assert len(said) == ("different" in kept)
    assert all(warning in caplog.text for warning in said)


def test_modules_that_must_stay_float32_stay_so(tmp_path: Path) -> None:
    from transformers import T5ForConditionalGeneration

    t5().save_pretrained(tmp_path)
    model, report = from_pretrained(tmp_path, dtype="float16", progress=False)
    expected = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    assert {parameter.dtype for parameter in expected.parameters()} == {torch.float16, torch.float32}
    assert described(model.named_parameters()) == described(expected.named_parameters())
    assert_same_values(model, expected)
    assert ties(model) == ties(expected)
    assert "encoder.block.0.layer.1.DenseReluDense.wo.weight" not in report.cast


@pytest.mark.parametrize("name", [*MODELS, "t5"])
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_transformers_that_builds_in_another_way_is_warned_of_and_the_model_still_equals(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, dtype: str,
) -> None:  # fmt: skip
    import transformers

    folder = folders(name)
    auto_class = transformers.T5ForConditionalGeneration if name == "t5" else transformers.AutoModelForCausalLM
    expected = auto_class.from_pretrained(folder, dtype=dtype)
    monkeypatch.delattr(transformers.PreTrainedModel, "get_init_context")
    model, report = from_pretrained(folder, dtype=dtype, progress=False)
    if name == "t5":
        assert described(model.named_parameters()) == described(expected.named_parameters())
        assert_same_values(model, expected)
    else:
        assert_equal(model, expected)
    assert report.missing == []
    (warning,) = [r for r in caplog.records if r.name == "weightloaders.skeleton"]
    assert warning.levelname == "WARNING"
    assert f"transformers {transformers.__version__} builds models in another way" in warning.getMessage()


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize("device", ["mps", "xpu", "cuda:4096", 4096, "cudda", "cuda:-1"])
def test_a_device_that_is_not_here_is_refused_before_anything_is_touched(
    folders: Callable[[str], Path], device: Any
) -> None:
    if not isinstance(device, int) and device == getattr(torch.accelerator.current_accelerator(), "type", None):
        pytest.skip("it is here")
    said = f"device='{device}' can't be used"
    model = nn.Linear(1, 1, bias=False)
    for load in (
        lambda: from_pretrained(folders("llama"), device=device),
        lambda: load_into(model, {"weight": torch.ones(1, 1)}, device=device),
        lambda: LLM(folders("llama"), device=device),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            load()
        assert "this machine has cpu" in str(caught.value.hint)
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 300
    assert load_status(model) is None


def test_where_no_accelerator_is_asked_for_none_is_initialised() -> None:
    load_into(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}, device="cpu", progress=False)
    assert not torch.cuda.is_initialized()


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_loads_again_and_equals(folders: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    model, _ = from_pretrained(folders(name), progress=False)
    files = save_weights(model, tmp_path / "whole")
    assert [file.name for file in files] == ["model.safetensors"]
    shards = save_weights(model, tmp_path / "shards", max_shard_size="6kB")
    assert len(shards) > 2
    save_weights(model, tmp_path / "one.safetensors")
    for place in (tmp_path / "whole", tmp_path / "shards", tmp_path / "one.safetensors"):
        again, report = from_pretrained(folders(name), weights=place, progress=False)
        assert_equal(again, model)
        assert report.missing == []


def test_tied_parameters_are_saved_once(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model, _ = from_pretrained(folders("llama, tied"), progress=False)
    (file,) = save_weights(model, tmp_path)
    with safe_open(file, "pt") as opened:
        names = set(opened.keys())
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & names) == 1
    # transformers reads it as well.
    from transformers import AutoModelForCausalLM

    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_a_model_is_saved_over_what_it_was_loaded_from(tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(300, 200), "bias": torch.randn(300)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Linear(200, 300)
    with open_weights(tmp_path) as weights:
        load_into(model, weights, progress=False)
        with torch.no_grad():
            model.bias.add_(1)
        save_weights(model, tmp_path)
    again = nn.Linear(200, 300)
    load_into(again, tmp_path, progress=False)
    assert torch.equal(again.weight, tensors["weight"])
    assert torch.equal(again.bias, tensors["bias"] + 1)


@pytest.mark.parametrize("model", [nn.Linear, None, "model", {}], ids=repr)
def test_only_a_model_can_be_saved(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ModelError, match=r"an nn\.Module"):
        save_weights(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 5, b"out", "", "a\0", "x" * 300, "x" * 300 + ".safetensors"], ids=repr)
def test_a_place_that_can_not_be_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SaveError, match="sav"):
        save_weights(nn.Linear(2, 2), path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "size", ["9" * 400 + "GB", "0GB", "0.1B", 0, -1, True, None, float("nan"), "5XB", "five"], ids=repr
)
def test_what_is_no_size_is_refused_before_anything_is_written(tmp_path: Path, size: Any) -> None:
    for place in ("out", "out.safetensors"):
        with pytest.raises(ConfigError, match="is no size"):
            save_weights(nn.Linear(2, 2), tmp_path / place, max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", [None, 5, b"model", {"w": torch.ones(1)}, nn.Linear], ids=repr)
def test_only_a_path_or_a_name_can_be_opened(source: Any) -> None:
    with pytest.raises(ConfigError, match="a source is a str or a Path"):
        open_weights(source)


def test_a_misspelt_argument_is_named_with_what_was_meant(folders: Callable[[str], Path]) -> None:
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM takes no argument 'on_mising'; did you mean 'on_missing'"
    ) as e:
        from_pretrained(folders("llama"), on_mising="warn")
    assert "correct its name" in str(e.value)
    with pytest.raises(ConfigError, match=r"device_map='atuo' can't be used: .*; did you mean 'auto'\?"):
        from_pretrained(folders("llama"), device_map="atuo")


def test_all_arguments_are_known_that_may_be_misspelt() -> None:
    given = {*inspect.signature(from_pretrained).parameters, *inspect.signature(LLM).parameters}
    own = given - {"source", "model", "model_kwargs"}
    assert own <= set(ARGUMENTS)
    assert set(ARGUMENTS) - own == {*HUB_OPTIONS, "quantization_config"} - own


def test_the_loader_by_the_name_that_it_has_elsewhere_is_told(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"from_pretrained has no argument 'weight_loader', .* here it is 'loader'"):
        from_pretrained(folders("llama"), weight_loader="local")
    with pytest.raises(ConfigError, match=r"LLM has no argument 'loader'; did you mean 'weight_loader'\?"):
        LLM(folders("llama"), loader="local")
