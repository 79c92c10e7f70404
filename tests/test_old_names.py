"""Checkpoints under the names of other times: each loads as transformers' own `from_pretrained` does, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from benchmarks.families import different, randomise
from weightloaders import from_pretrained, load_into, plan_load
from weightloaders.errors import PlanError
from weightloaders.plan import ComputeStep
from weightloaders.skeleton import build_skeleton

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, torch.Tensor]
Spelling = Callable[[Tensors], Tensors]

_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 1}
_SPEECH = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40,
    "conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "do_stable_layer_norm": True,
}  # fmt: skip
_GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 40, "n_positions": 32}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
}
_CONFIGS: dict[str, Any] = {
    "gpt2": _GPT2,
    "bert": _SIZES,
    "wav2vec2": _SPEECH,
    "hubert": _SPEECH,
    "mixtral": {**_GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40},
    "qwen2_vl": {
        "text_config": {**_GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": {**_QWEN_VISION, "hidden_size": 16},
    },
    "qwen2_5_vl": {
        "text_config": {**_GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": {**_QWEN_VISION, "out_hidden_size": 16, "fullatt_block_indexes": [0]},
    },
    "llava": {
        "text_config": {"model_type": "llama", **_GROUPED},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
        },
    },
}  # fmt: skip


def renamed(*pairs: tuple[str, str], only: str = "") -> Spelling:
    """Names with the first pattern that matches replaced; those that don't match ``only`` are left out."""

    def spell(tensors: Tensors) -> Tensors:
        result = {}
        for name, tensor in tensors.items():
            pattern, new = next((pair for pair in pairs if re.search(pair[0], name)), ("$^", ""))
            if re.search(only, name):
                result[re.sub(pattern, new, name, count=1)] = tensor
        assert not pairs or result.keys() != tensors.keys()
        return result

    return spell


def without(*names: str) -> Spelling:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def unstacked(tensors: Tensors) -> Tensors:
    """Experts each by itself, as Mixtral's own files have them."""
    result = {}
    for name, tensor in tensors.items():
        front, found, leaf = name.partition("mlp.experts.")
        if not found:
            result[name.replace(".mlp.", ".block_sparse_moe.")] = tensor
            continue
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[leaf]
        for index, expert in enumerate(tensor):
            for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                result[f"{front}block_sparse_moe.experts.{index}.{part}.weight"] = piece.clone()
    return result


_GAMMA = (("LayerNorm.weight$", "LayerNorm.gamma"), ("LayerNorm.bias$", "LayerNorm.beta"))
_OLD_NORM = (
    (r"parametrizations\.weight\.original0$", "weight_g"),
    (r"parametrizations\.weight\.original1$", "weight_v"),
)
_OLD_LLAVA = (
    (r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head"), (r"^model\.", "")
)  # fmt: skip
_T5 = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")

_QWEN: dict[str, Spelling] = {
    "new names": without(),
    "old names": renamed((r"^model\.language_model\.", "model."), (r"^model\.visual", "visual")),
    "names of another time": renamed((r"^model\.language_model\.", "model.language_model.model.")),
}

# Config, class of the state dict that is spelled, class that is loaded, and the spelling.
CASES: dict[str, tuple[str, str, str, Spelling]] = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", "GPT2LMHeadModel", without("lm_head.weight")),
    "gpt2, without prefix": (
        "gpt2", "GPT2LMHeadModel", "GPT2LMHeadModel", renamed((r"^transformer\.", ""), only="^transformer")
    ),
    "gpt2, its body from a headed one": ("gpt2", "GPT2LMHeadModel", "GPT2Model", without("lm_head.weight")),
    "gpt2, its body without prefix": ("gpt2", "GPT2Model", "GPT2Model", without()),
    "bert, gamma and beta": ("bert", "BertForPreTraining", "BertForPreTraining", renamed(*_GAMMA)),
    "bert, gamma and beta, masked": (
        "bert", "BertForMaskedLM", "BertForMaskedLM", renamed(*_GAMMA)
    ),
    "bert, without prefix": ("bert", "BertForPreTraining", "BertForPreTraining", renamed((r"^bert\.", ""))),
    "bert, its body from a headed one": ("bert", "BertForPreTraining", "BertModel", without()),
    "bert, its body, gamma and beta": (
        "bert", "BertForPreTraining", "BertModel", renamed(*_GAMMA)
    ),
    "bert, its body without prefix": ("bert", "BertModel", "BertModel", renamed(*_GAMMA)),
    "bert, its body under the prefix": ("bert", "BertModel", "BertModel", renamed(("^", "bert."))),
    "wav2vec2": ("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2ForCTC", without()),
    "wav2vec2, old weight norm": ("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2ForCTC", renamed(*_OLD_NORM)),
    "wav2vec2, its body, old weight norm": ("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Model", renamed(*_OLD_NORM)),
    "hubert": ("hubert", "HubertModel", "HubertModel", without()),
    "hubert, old weight norm": ("hubert", "HubertModel", "HubertModel", renamed(*_OLD_NORM)),
    "mixtral, expert by expert": ("mixtral", "MixtralForCausalLM", "MixtralForCausalLM", unstacked),
    "mixtral, stacked": ("mixtral", "MixtralForCausalLM", "MixtralForCausalLM", without()),
    **{
        f"t5, only {kept}": (
            "t5", "T5ForConditionalGeneration", "T5ForConditionalGeneration", without(*{*_T5} - {kept})
        )
        for kept in _T5
    },
    "t5, all of a tie": ("t5", "T5ForConditionalGeneration", "T5ForConditionalGeneration", without()),
    **{
        f"{family}, {spelling}": (family, headed, headed, spell)
        for family, headed in (
            ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
            ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        )
        for spelling, spell in _QWEN.items()
    },
    "qwen2_vl, its body, old names": (
        "qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLModel", _QWEN["old names"]
    ),
    "qwen2_5_vl, its body, old names": (
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel", _QWEN["old names"]
    ),
    "llava, new names": ("llava", "LlavaForConditionalGeneration", "LlavaForConditionalGeneration", without()),
    "llava, old names": (
        "llava", "LlavaForConditionalGeneration", "LlavaForConditionalGeneration", renamed(*_OLD_LLAVA)
    ),
    "llava, its body": ("llava", "LlavaForConditionalGeneration", "LlavaModel", without()),
    "llava, its body, old names": ("llava", "LlavaForConditionalGeneration", "LlavaModel", renamed(*_OLD_LLAVA)),
}  # fmt: skip


def build(family: str, class_name: str) -> Any:
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_CONFIGS[family]))
    randomise(model)
    return model


def folder_of(case: str, folder: Path) -> tuple[Any, type[Any]]:
    """Write the checkpoint of a case, with a config; returns the model that is in it, and the class to be loaded."""
    family, source, target, spell = CASES[case]
    model = build(family, source)
    # A copy of each, so that what is tied is there as often as it has names.
    tensors = spell({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target_class = getattr(transformers, target)
    model.config.architectures = [target]
    model.config.save_pretrained(folder)
    return model, target_class


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_names_of_all_times_load_as_transformers_loads_them(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, target_class = folder_of(case, tmp_path)
    expected, said = target_class.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    if said["missing_keys"]:
        # This version of transformers does not know the names, and leaves the parameters random.
        with pytest.raises(PlanError, match=f"{len(said['missing_keys'])} of"):
            from_pretrained(tmp_path, dtype=dtype, progress=False)
        return
    model, report = from_pretrained(tmp_path, dtype=dtype, progress=False)
    assert list(different(model, expected)) == []
    assert report.missing == report.mismatched == sorted(said["missing_keys"]) == []
    # What a body's model leaves of a headed checkpoint is the head.
    assert {name.split(".")[0] for name in report.unexpected} <= {"cls", "lm_head", "language_model"}
    plan = plan_load(build_skeleton(str(tmp_path), dtype=dtype).model, tmp_path)
    assert [step.reason for step in plan.steps if isinstance(step, ComputeStep)] == []


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL"])
def test_a_vision_models_body_loads_from_the_names_of_its_own_state_dict(family: str, tmp_path: Path) -> None:
    # transformers itself takes the vision part for a part of the language model here, and leaves it random.
    case = family.removesuffix("VL").rstrip("_").lower() + "_vl"
    model = build(case, f"{family}ForConditionalGeneration")
    save_file(without("lm_head.weight")(dict(model.state_dict())), tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    body, report = from_pretrained(tmp_path, auto_class=f"{family}Model", progress=False)
    assert (report.missing, report.unexpected) == ([], [])
    assert all(torch.equal(tensor, model.state_dict()[f"model.{name}"]) for name, tensor in body.state_dict().items())


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_weight_norm_of_a_plain_module_loads_from_either_spelling(spelling: str) -> None:
    with pytest.warns(FutureWarning):
        old: nn.Module = nn.utils.weight_norm(nn.Linear(4, 3))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    source, target = (old, new) if spelling == "old" else (new, old)
    load_into(target, dict(source.state_dict()), progress=False)
    inputs = torch.randn(2, 4)
    assert torch.equal(target(inputs), source(inputs))
