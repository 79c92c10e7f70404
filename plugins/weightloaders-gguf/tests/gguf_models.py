"""Tiny models of each architecture, and GGUF files of them as llama.cpp's converter writes them.

What the converter does to names and layouts (``convert_hf_to_gguf.py``) is written down here once more and the other
way round than in the package; names come from the ``gguf`` package's own table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Widths of experts are transformers' defaults: it reads them from no GGUF file.
_MOE = {"num_experts": 2, "num_experts_per_tok": 1}
_T5 = {
    "vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "is_gated_act": True, "tie_word_embeddings": False, "n_positions": 128,
    "decoder_start_token_id": 0,
}  # fmt: skip
_QWEN35 = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}  # fmt: skip

#: By llama.cpp's name: transformers' kind of config, and what a tiny one has.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", _MOE),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3moe": ("qwen3_moe", {**_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen35": ("qwen3_5_text", _QWEN35),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {**_QWEN35, **_MOE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8, "use_routing_bias": True},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "phi3": ("phi3", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "nemotron": ("nemotron", {}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16}),
    "falcon": (
        "falcon",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": False},
    ),
    "bloom": ("bloom", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "mamba": (
        "mamba",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "intermediate_size": 128},
    ),
    "t5": ("t5", _T5),
    "umt5": ("umt5", _T5),
    "t5encoder": ("t5", _T5),
    "gemma4": ("gemma4_text", {"head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 0}),
}
#: What the file says where that is not the key above.
SAID = {"umt5": "t5"}


def tiny(architecture: str, seed: int = 0) -> Any:
    """A model of random values; norms, biases and whatever else begins as zeros or ones included."""
    kind, sizes = MODELS[architecture]
    common = {} if kind in ("t5", "umt5", "gpt2", "bloom", "mamba", "falcon") else _SIZES
    config = transformers.CONFIG_MAPPING[kind](**{**common, **sizes})
    if architecture == "t5encoder":
        model = transformers.T5EncoderModel._from_config(config, dtype=torch.float32)
    else:
        family = transformers.AutoModelForSeq2SeqLM if "t5" in kind else transformers.AutoModelForCausalLM
        model = family.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.25)
        for name, tensor in model.state_dict().items():
            if name.endswith("A_log"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 2)
    return model.eval()


# ------------------------------------------------------------------ what the converter does


def _rotated(weights: torch.Tensor, heads: int) -> torch.Tensor:
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def _tiled(weights: torch.Tensor, keys: int, per_key: int, width: int) -> torch.Tensor:
    return weights.reshape(keys, per_key, width, *weights.shape[1:]).transpose(0, 1).reshape(weights.shape)


def converted(architecture: str, name: str, value: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """What a tensor of transformers' becomes, under the ``gguf`` package's names."""
    gguf_name = _names(architecture, config)(name)
    if gguf_name is None:
        raise KeyError(f"{architecture} has no name for {name}")
    leaf = gguf_name.split(".", 2)[2] if gguf_name.startswith("blk.") else gguf_name
    layer = gguf_name[: -len(leaf)]
    if architecture == "llama" and leaf.startswith(("attn_q.", "attn_k.")):
        value = _rotated(value, config.num_attention_heads if "q" in leaf else config.num_key_value_heads)
    if architecture in ("gemma2", "gemma3", "nemotron") and gguf_name.endswith("norm.weight"):
        value = value + 1
    if architecture == "gpt2" and leaf.startswith(("attn_qkv.w", "attn_output.w", "ffn_up.w", "ffn_down.w")):
        value = value.T
    if architecture == "bloom" and leaf.startswith("attn_qkv"):
        heads = config.n_head
        value = value.reshape(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
    if leaf in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        value = value.squeeze(1)
    if architecture == "mamba" and leaf == "ssm_a":
        value = -torch.exp(value)
    if leaf.startswith("ffn_gate_inp_shexp"):
        value = value.squeeze(0)
    if leaf in ("ffn_gate_up_exps.weight", "ffn_gate_up_exps"):
        gate, up = value.chunk(2, dim=1)
        return {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
    if architecture.startswith("qwen35"):
        value = _qwen35(leaf, value, config)
    if architecture == "gpt-oss":
        return _gpt_oss(layer, leaf, value)
    return {gguf_name: value}


def _gpt_oss(layer: str, leaf: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    if leaf == "gate_up_proj_bias":
        return {f"{layer}ffn_gate_exps.bias": value[:, ::2], f"{layer}ffn_up_exps.bias": value[:, 1::2]}
    if leaf == "gate_up_proj":
        turned = value.transpose(-1, -2)
        return {f"{layer}ffn_gate_exps.weight": turned[:, ::2], f"{layer}ffn_up_exps.weight": turned[:, 1::2]}
    if leaf == "ffn_down_exps.weight":
        value = value.transpose(-1, -2)
    return {layer + leaf: value}


def _qwen35(leaf: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    keys, values, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    per_key, before = values // keys, 2 * keys * config.linear_key_head_dim
    if leaf.endswith("norm.weight") and leaf != "ssm_norm.weight":
        return value + 1
    if leaf in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return torch.cat([value[:before], _tiled(value[before:], keys, per_key, width)])
    if leaf == "attn_gate.weight":
        return _tiled(value, keys, per_key, width)
    if leaf in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
        return _tiled(value, keys, per_key, 1)
    if leaf == "ssm_a":
        return _tiled(-torch.exp(value), keys, per_key, 1)
    if leaf == "ssm_out.weight":
        return _tiled(value.T, keys, per_key, width).T
    return value


_EXTRA = {
    "qwen35": {
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "post_attention_layernorm": "post_attention_norm",
    },
    "gpt-oss": {
        "mlp.experts.gate_up_proj": "gate_up_proj",
        "mlp.experts.gate_up_proj_bias": "gate_up_proj_bias",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        "self_attn.sinks": "attn_sinks.weight",
    },
    "minimax-m2": {"mlp.e_score_correction_bias": "exp_probs_b.bias"},
}  # fmt: skip
_EXTRA["qwen35moe"] = _EXTRA["qwen35"]
_EXPERTS = {"mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight"}


def _names(architecture: str, config: Any) -> Callable[[str], str | None]:
    said = SAID.get(architecture, architecture)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == said)
    table = gguf.get_tensor_name_map(number, getattr(config, "num_hidden_layers", None) or config.num_layers)

    def of(name: str) -> str | None:
        base, _, suffix = name.rpartition(".")
        suffixed = suffix in ("weight", "bias")
        stem = base if suffixed else name
        if name.startswith("model.layers."):
            _, _, layer, within = stem.split(".", 3)
            found = {**_EXPERTS, **_EXTRA.get(architecture, {})}.get(within)
            if found is not None:
                return f"blk.{layer}.{found}" + (f".{suffix}" if suffixed and "." not in found else "")
        found = table.get_name(stem) or table.get_name(stem.removeprefix("transformer."))
        return None if found is None else found + (f".{suffix}" if suffixed else "")

    return of


# ------------------------------------------------------------------ writing


def properties_of(architecture: str, config: Any) -> dict[str, Any]:
    """What the converter says of a model, as far as transformers asks for it."""

    def get(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)

    heads = get("num_attention_heads", "n_head", "num_heads")
    said = {
        "context_length": get("max_position_embeddings", "n_positions", "n_ctx"),
        "embedding_length": get("hidden_size", "d_model"),
        "block_count": get("num_hidden_layers", "num_layers"),
        "feed_forward_length": get("intermediate_size", "d_ff", "ffn_hidden_size", "n_inner"),
        "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
        "attention.layer_norm_epsilon": get("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
        "vocab_size": get("vocab_size"),
        "expert_count": get("num_experts", "num_local_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        "rope.freq_base": (get("rope_parameters") or {}).get("rope_theta"),
    }
    head_dim = get("head_dim", "d_kv")
    if architecture in ("qwen3moe", "gemma2", "umt5", "t5encoder", "gemma3", "minimax-m2", "t5", "qwen35", "qwen35moe"):
        said["attention.key_length"] = head_dim
    if architecture in ("llama", "mistral"):
        said["rope.dimension_count"] = head_dim
    if architecture == "minimax-m2":
        said |= {"rope.dimension_count": 8, "expert_gating_func": 2}
    if architecture == "mamba":
        said |= {
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": config.time_step_rank,
            "ssm.inner_size": config.intermediate_size,
        }
    if "t5" in architecture:
        said |= {"attention.relative_buckets_count": 32, "decoder_start_token_id": 0}
    if architecture == "lfm2":
        said |= {"shortconv.l_cache": config.conv_L_cache, "attention.head_count_kv": [0, config.num_key_value_heads]}
    if architecture.startswith("qwen35"):
        said |= {
            "full_attention_interval": 2,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "rope.dimension_sections": [1, 1, 0, 0],
            "rope.dimension_count": 4,
        }
    if architecture == "gemma4":
        said |= {"attention.key_length": config.global_head_dim}
    prefix = SAID.get(architecture, architecture)
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    general = {"general.name": architecture, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.padding_token_id": 0}
    return {**general, **{f"{prefix}.{key}": value for key, value in said.items() if value is not None}}


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    architecture: str = "nothing",
    properties: Mapping[str, Any] | None = None,
    kinds: Callable[[str, torch.Tensor], str | None] | None = None,
    *,
    big_endian: bool = False,
) -> Path:
    """Write a GGUF file with the ``gguf`` package's own writer.

    Args:
        path: Where to.
        tensors: The tensors, by the names that they get.
        architecture: What the file says that it is.
        properties: Its other metadata.
        kinds: The type that a tensor is stored as; None for its own.
        big_endian: Whether numbers have their first byte first.
    """
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    for key, value in (properties or {}).items():
        _say(writer, key, value)
    for name, tensor in tensors.items():
        kind = kinds(name, tensor) if kinds is not None else None
        _add(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _say(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str | None) -> None:
    dense = tensor.detach().contiguous()
    if kind is None and dense.dtype is torch.bfloat16:
        kind, dense = "BF16", dense
        raw = dense.view(torch.int16).numpy().view(np.uint16)
        order = ">" if writer.endianess is gguf.GGUFEndian.BIG else "<"
        writer.add_tensor(
            name, _as_bytes(raw.astype(f"{order}u2"), dense.shape), raw_dtype=gguf.GGMLQuantizationType.BF16
        )
        return
    if kind is None:
        writer.add_tensor(name, dense.numpy())
        return
    quantised = coded(dense.float(), kind)
    writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])


def _as_bytes(array: np.ndarray, shape: torch.Size) -> np.ndarray:
    return array.view(np.uint8).reshape(*shape[:-1], -1) if len(shape) else array.view(np.uint8)


def coded(values: torch.Tensor, kind: str) -> np.ndarray:
    """Values in a type of blocks; where the package has no coder for it, random codes with scales of modest size."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values.numpy(), number)
    except NotImplementedError:
        elements, nbytes = gguf.GGML_QUANT_SIZES[number]
        blocks = values.numel() // elements
        seed = int(values.flatten()[:4].abs().sum().item() * 1000)
        codes = np.random.default_rng(seed).integers(0, 256, (blocks, nbytes), dtype=np.uint8)
        # Halves whose exponent is small, wherever the type has its scales.
        codes = np.where(codes >= 0x40, codes & 0xBF, codes)
        return codes.astype(np.uint8).reshape(*values.shape[:-1], math.prod(values.shape[-1:]) // elements * nbytes)


def as_gguf(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """A model's tensors as llama.cpp's converter would name and arrange them."""
    tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name in tied or ("t5" in architecture and name.endswith("embed_tokens.weight")):
            continue
        found |= converted(architecture, name, value, model.config)
    return found
