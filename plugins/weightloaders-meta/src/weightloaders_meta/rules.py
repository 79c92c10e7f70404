"""From Meta's names and rotary layout to transformers', as rules.

Meta's code turns neighbours (even and odd rows of a head) against each other, transformers' the first half of a head
against the second; so the rows of q and k change places. The names are those of
https://github.com/meta-llama/llama/blob/main/llama/model.py, the layout that of transformers' own
``convert_llama_weights_to_hf.py``. Mistral publishes its dense models in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Its names are resolved on first use.
import weightloaders as wl

if TYPE_CHECKING:
    import torch

_MODEL_TYPES = ("llama", "mistral")
_FIRST = "layers.0.self_attn.q_proj.weight"
# Inside of a layer.
_NAMES = {
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def rules_of(model: torch.nn.Module) -> list[wl.Rename | wl.Convert | wl.Drop] | None:
    """The rules for a model; None if it is no Llama of transformers'.

    Args:
        model: The model, with a ``config`` that says its ``model_type`` and sizes.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in _MODEL_TYPES:
        return None
    # `model.` in one that has a head, nothing in the bare one.
    prefix = next((name.removesuffix(_FIRST) for name, _ in model.named_parameters() if name.endswith(_FIRST)), None)
    if prefix is None:
        return None
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = f"{prefix}layers.{{i}}"
    rotary = (("wq", "q_proj", heads), ("wk", "k_proj", config.num_key_value_heads))
    return [
        *(
            wl.Convert(
                f"layers.{{i}}.attention.{theirs}.{{leaf}}",
                f"{layer}.self_attn.{ours}.{{leaf}}",
                "rotary_meta_to_hf",
                heads=count,
                head_dim=head_dim,
            )
            for theirs, ours, count in rotary
        ),
        *(wl.Rename(f"layers.{{i}}.{theirs}", f"{layer}.{ours}") for theirs, ours in _NAMES.items()),
        wl.Rename("tok_embeddings.weight", f"{prefix}embed_tokens.weight"),
        wl.Rename("norm.weight", f"{prefix}norm.weight"),
        wl.Rename("output.weight", "lm_head.weight"),
        # Computed, not learnt.
        wl.Drop("rope.freqs"),
    ]
