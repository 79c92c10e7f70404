"""The model classes of transformers that write text, and the smallest config of each that has all of its parts."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# ------------------------------------------------------------------ the classes


@functools.cache
def classes() -> dict[str, tuple[str, str]]:
    """Name -> the names of model class and model type; a class that serves several types is there once for each.

    Nothing is imported for it but the lists of names: importing every model takes ten seconds.
    """
    from transformers.models.auto import modeling_auto

    types: dict[str, dict[str, None]] = {}
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        for model_type, models in names.items():
            for model in models if isinstance(models, tuple) else (models,):
                types.setdefault(model, {})[model_type] = None
    return {
        model if len(found) == 1 else f"{model}[{model_type}]": (model, model_type)
        for model, found in sorted(types.items())
        for model_type in found
    }


def class_named(name: str) -> Any:
    """The model class."""
    import transformers

    return getattr(transformers, classes()[name][0])


_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
_SPARSE = {
    "indexer_budget": 2048, "indexer_compress_ratio": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
}  # fmt: skip
# What some default configs lack: the classes can't be built from them as they are.
COMPLETED: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {"vision_config": {"model_type": "siglip_vision_model"}},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 4}},
    "CohereCompassForCausalLM": {"rope_parameters": _ROPES},
    "CohereCompassForConditionalGeneration": {
        "text_config": {"model_type": "cohere_compass_text", "rope_parameters": _ROPES}
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0}},
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {
            "model_type": "deepseek_ocr2_text", "mlp_layer_types": ["dense"] + 31 * ["sparse"], "num_experts_per_tok": 6
        }
    },
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"model_type": "diffusion_gemma_text", "num_experts": 8, "top_k_experts": 2,
                        "moe_intermediate_size": 512}
    },
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5}},
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False, "num_kv_shared_layers": 30
        }
    },
    "Granite4VisionForConditionalGeneration": {"deepstack_layer_map": [[-2, 0], [-1, 1]], "downsample_rate": "1/2"},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "HunYuanVLForConditionalGeneration": {"text_config": {"model_type": "hunyuan_vl_text", "head_dim": 128}},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Qwen4ExpForCausalLM[qwen4_exp_text]": _SPARSE,
    "Qwen4ExpForCausalLM[qwen4_exp]": {"text_config": {"model_type": "qwen4_exp_text", **_SPARSE}},
    "Qwen4ExpForConditionalGeneration": {"text_config": {"model_type": "qwen4_exp_text", **_SPARSE}},
    "ReformerModelWithLMHead": {"is_decoder": True},
}  # fmt: skip
# What has to be said for some classes beyond the general way of shrinking.
SMALL: dict[str, dict[str, Any]] = {
    "Apertus1p5ForConditionalGeneration": {
        "image_token_offset": 8, "audio_token_offset": 264, "text_config": {"vocab_size": 528}
    },
    "ChameleonForConditionalGeneration": {"vq_config": {"base_channels": 32}},
    "Cosmos3EdgeForConditionalGeneration": {"text_config": {"head_dim": 128}},
    "DoryForCausalLM": {
        "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "sliding_attention", "mlp", "full_attention", "mlp"]
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    },
    "HYV4VLForConditionalGeneration": {
        "text_config": {"head_dim": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "qk_head_dim": 128}
    },
    "InklingForConditionalGeneration": {"vision_config": {"patch_size": 10}},
    "JanusForConditionalGeneration": {"vq_config": {"base_channels": 32}},
    "Kimi_K25ForConditionalGeneration": {"vision_config": {"num_attention_heads": 2}},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "Step3p7ForConditionalGeneration": {"vision_config": {"num_attention_heads": 2}},
    "VibeVoiceAsrForConditionalGeneration": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 2},
        "semantic_tokenizer_encoder_config": {"num_filters": 2},
    },
}  # fmt: skip


class NotBuiltError(Exception):
    """A class that can't be built from its default config, or not small; the message says why."""


def default_config(name: str) -> Any:
    """The default config of a class."""
    from transformers import CONFIG_MAPPING

    model_class, config_class = class_named(name), CONFIG_MAPPING[classes()[name][1]]
    try:
        config = config_class(**COMPLETED.get(name, {}))
    except Exception as error:
        raise NotBuiltError(f"no default config: {summary(error)}") from error
    # A text model takes its own part of a config for text and images.
    parts = [part for key in config.sub_configs if isinstance(part := getattr(config, key), model_class.config_class)]
    return config if isinstance(config, model_class.config_class) or len(parts) != 1 else parts[0]


def on_meta(model_class: Any, config: Any) -> nn.Module:
    import torch

    try:
        with torch.device("meta"):
            model: nn.Module = model_class(config)
    except Exception as error:
        raise NotBuiltError(summary(error)) from error
    return model


def summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


# ------------------------------------------------------------------ small configs

# Sizes that may be divided by one number without falling out with each other.
_WIDTHS = re.compile(
    r"hidden_sizes?$|hidden_size_|intermediate|ffn_size|embedding_size|attention_head_size|head_?dim|lru_width|_dims?$|^dim$"
    r"|dim_head$|^d_(model|ff|kv|inner|head|embed|rel)$|d_head$|^n_embd$|_rank$|^(dff|dim_ff|d_ff)$|embed_dims?$"
    r"|(base|latent|output|in|out|mid|nemo_conv)_channels$|_out_channel$|_embed_size$|_conv_channel|^adapter_input_size$"
)
_NO_WIDTHS = re.compile(r"patch_dim|conv_dim|^(in|out|num|audio)_channels|num_\w*dim|state_dim|action_dim")
# These stand alone, so they may be rounded.
_FREE_WIDTHS = re.compile(r"intermediate|ffn|^dff$|^dim_ff$|^d_ff$|mlp_dim$")
_LAYERS = re.compile(r"(?<!_per)(?<!dense)_layers?$|^(n_layers?|depth|depths|num_res_blocks|num_blocks|layers)$")
_WORDS = re.compile(r"vocab_size|vocab$|_size_base$|^codebook_size$|^num_embeddings$")
_WORD = re.compile(r"token_id$|token_index$|^(pad|bos|eos|unk|mask)_index$")
_PLACES = re.compile(r"position_embeddings$|_positions$|^n_(ctx|positions)$|^max_seq_len$|^context_length$")
_COUNTS = {
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
}
MAX_WORDS, MAX_PLACES, MAX_PARAMETERS = 256, 64, 18_000_000


def shrunk(config: Mapping[str, Any], layers: int, divisor: int) -> dict[str, Any]:
    """A config with few layers, experts, words and places, and its widths divided."""
    depths = {value for key, value in config.items() if type(value) is int and _LAYERS.search(key)}

    def smaller(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            if all(type(k) is str and k.isdecimal() for k in value):  # a dict of layers
                value = {k: v for k, v in value.items() if int(k) < layers}
            is_config = not key.startswith(("id2label", "label2id", "rope_")) and all(type(k) is str for k in value)
            return shrunk(value, layers, divisor) if is_config else value
        if isinstance(value, list | tuple):
            if len(value) in depths and len(value) > layers:
                value = value[:layers]
            return type(value)(smaller(key, v) if type(v) is int else v for v in value)
        if type(value) is not int:
            return value
        if key in _COUNTS:
            return min(value, _COUNTS[key])
        if _LAYERS.search(key):
            return min(value, layers)
        if _WORDS.search(key) or _WORD.search(key):
            return min(value, MAX_WORDS - bool(_WORD.search(key)))
        if _PLACES.search(key):
            return min(value, MAX_PLACES)
        return _divided(key, value, divisor) if _WIDTHS.search(key) and not _NO_WIDTHS.search(key) else value

    return {key: smaller(key, value) for key, value in config.items()}


def _divided(key: str, value: int, divisor: int) -> int:
    if value > 0 and value % divisor == 0:
        return value // divisor
    return max(8, value // divisor // 8 * 8) if _FREE_WIDTHS.search(key) and value > 8 else value


def _with(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some fields changed, those of nested configs too."""
    changed = {k: _with(config.get(k) or {}, v) if isinstance(v, dict) else v for k, v in fields.items()}
    return {**config, **changed}


def small_config(name: str) -> Any:
    """The smallest config found whose model has parameters of every kind that the default one has.

    Raises:
        NotBuiltError: If the default one can't be built, or there is no small one.
    """
    model_class = class_named(name)
    default = default_config(name)
    wanted = _kinds(on_meta(model_class, default))
    whole, problem = default.to_dict(), ""
    for layers in (2, 3, 4, 6, 8, 12, 24, 48):
        for divisor in (32, 16, 8, 4, 2, 1):
            try:
                config = type(default).from_dict(_with(shrunk(whole, layers, divisor), SMALL.get(name, {})))
                model = on_meta(model_class, config)
            except Exception as error:  # noqa: BLE001 -- whatever a config objects to
                problem = str(error) if isinstance(error, NotBuiltError) else summary(error)
                continue
            kinds, size = _kinds(model), sum(parameter.numel() for parameter in model.parameters())
            if kinds != wanted:
                problem = (
                    f"with {layers} layers it lacks {sorted(wanted - kinds)[:2]}, and has {sorted(kinds - wanted)[:2]}"
                )
                break
            if size > MAX_PARAMETERS:
                big, tensor = max(model.named_parameters(), key=lambda item: item[1].numel())
                raise NotBuiltError(
                    f"not small: {size} parameters at {layers}/{divisor}, {big} has {list(tensor.shape)}; {problem}"
                )
            return config
    raise NotBuiltError(f"not small: {problem}")


def _kinds(model: nn.Module) -> set[str]:
    return {re.sub(r"\d+", "*", name) for name in model.state_dict()}
