"""What transformers calls the tensors of each architecture.

GGUF has one vocabulary for all models (``gguf-py/gguf/constants.py`` in llama.cpp), transformers one for each. The
tables hold for the architectures that transformers itself loads from GGUF; the tests hold them against its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_DECODER_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _GATED
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    # Both become one; `arranging` puts them together.
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = (
    _ATTENTION
    | _GATED
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_FALCON = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_QWEN35 = (
    _ATTENTION
    | _GATED
    | _QK_NORM
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    }
)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one architecture, without ``.weight`` and ``.bias`` where both may occur.

    Attributes:
        top: Of tensors outside the layers.
        leaves: Of tensors of a layer, within the layer.
        layers: How a layer is called.
        stacks: The same two for stacks of layers that begin otherwise than with ``blk.``, by their beginning.
    """

    top: dict[str, str]
    leaves: dict[str, str]
    layers: str = "model.layers.{}"
    stacks: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    def of(self, name: str) -> str | None:
        """What transformers calls a tensor; None if it has no such tensor."""
        stack, layer, leaf = split(name)
        if layer is None:
            return _looked_up(name, self.top)
        beginning, leaves = self.stacks.get(stack, ("", {})) if stack else (self.layers, self.leaves)
        found = _looked_up(leaf, leaves)
        return None if found is None else f"{beginning.format(layer)}.{found}"


def split(name: str) -> tuple[str, int | None, str]:
    """``"enc.blk.3.attn_q.weight"`` → ``("enc", 3, "attn_q.weight")``; no number where it belongs to no layer."""
    match = re.fullmatch(r"(?:(\w+)\.)?blk\.(0|[1-9][0-9]{0,8})\.(.+)", name)
    return (match[1] or "", int(match[2]), match[3]) if match else ("", None, name)


def _looked_up(leaf: str, table: dict[str, str]) -> str | None:
    if leaf in table:
        return table[leaf]
    base, dot, suffix = leaf.rpartition(".")
    if suffix in ("weight", "bias") and base in table:
        return f"{table[base]}{dot}{suffix}"
    return None


def _t5_stack(attention: int, feed_forward: int) -> dict[str, str]:
    return {
        **{f"attn_{x}": f"layer.{attention}.SelfAttention.{x}" for x in "qkvo"},
        "attn_rel_b": f"layer.{attention}.SelfAttention.relative_attention_bias",
        "attn_norm": f"layer.{attention}.layer_norm",
        **{f"cross_attn_{x}": f"layer.1.EncDecAttention.{x}" for x in "qkvo"},
        "cross_attn_norm": "layer.1.layer_norm",
        "ffn_gate": f"layer.{feed_forward}.DenseReluDense.wi_0",
        "ffn_up": f"layer.{feed_forward}.DenseReluDense.wi_1",
        "ffn_down": f"layer.{feed_forward}.DenseReluDense.wo",
        "ffn_norm": f"layer.{feed_forward}.layer_norm",
    }


_T5 = Names(
    {
        "token_embd": "shared",
        "enc.output_norm": "encoder.final_layer_norm",
        "dec.output_norm": "decoder.final_layer_norm",
        "output": "lm_head",
    },
    {},
    stacks={"enc": ("encoder.block.{}", _t5_stack(0, 1)), "dec": ("decoder.block.{}", _t5_stack(0, 2))},
)

#: By ``general.architecture``.
ARCHITECTURES: dict[str, Names] = {
    "llama": Names(_DECODER_TOP, _LLAMA),
    "mistral": Names(_DECODER_TOP, _LLAMA),
    "deci": Names(_DECODER_TOP, _LLAMA),
    "qwen2": Names(_DECODER_TOP, _LLAMA),
    "qwen2moe": Names(_DECODER_TOP, _ATTENTION | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Names(_DECODER_TOP, _LLAMA | _QK_NORM),
    "qwen3moe": Names(_DECODER_TOP, _ATTENTION | _QK_NORM | _EXPERTS),
    "qwen35": Names(_DECODER_TOP, _QWEN35),
    "qwen35moe": Names(_DECODER_TOP, _QWEN35 | _EXPERTS | _SHARED_EXPERT),
    "gpt-oss": Names(
        _DECODER_TOP,
        _ATTENTION
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
    ),
    "minimax-m2": Names(
        _DECODER_TOP, _ATTENTION | _QK_NORM | _EXPERTS | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
    ),
    "lfm2": Names(
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        {
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "phi3": Names(
        _DECODER_TOP,
        _ATTENTION | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
    ),
    "stablelm": Names(_DECODER_TOP, _LLAMA),
    "starcoder2": Names(_DECODER_TOP, _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "nemotron": Names(_DECODER_TOP, _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}),
    "gemma2": Names(_DECODER_TOP, _GEMMA),
    "gemma3": Names(_DECODER_TOP, _GEMMA | _QK_NORM),
    "gemma4": Names(
        _DECODER_TOP
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        _GEMMA
        | _QK_NORM
        | {
            "layer_output_scale.weight": "layer_scalar",
            "layer_output_scale": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
    ),
    "falcon": Names(
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
        _FALCON,
        "transformer.h.{}",
    ),
    "bloom": Names(
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        _FALCON,
        "transformer.h.{}",
    ),
    "gpt2": Names(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        "transformer.h.{}",
    ),
    "mamba": Names(
        {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        {
            "attn_norm": "norm",
            "ssm_a": "mixer.A_log",
            "ssm_d": "mixer.D",
            "ssm_conv1d": "mixer.conv1d",
            "ssm_in": "mixer.in_proj",
            "ssm_x": "mixer.x_proj",
            "ssm_dt": "mixer.dt_proj",
            "ssm_out": "mixer.out_proj",
        },
        "backbone.layers.{}",
    ),
    "t5": _T5,
    "t5encoder": _T5,
}

#: What llama.cpp computes beforehand, and transformers from its config.
HELPERS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|(blk\.\d+\.)?attn_rot_embd(\.weight)?")
