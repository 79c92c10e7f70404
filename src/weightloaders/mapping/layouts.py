"""Ready-made layouts: functions of plain torch code that rules name, from Python or from YAML.

Each gets the source tensors and its sizes as keyword arguments. Sizes that a rule doesn't give are taken from the
model's config (`sizes_from_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[q; k; v]`` one below the other: (heads + 2 kv_heads) x head_dim rows."""
    return torch.cat([q, k, v])


def split_qkv(qkv: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """The inverse of `fuse_qkv`."""
    return torch.split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])


def fuse_qkv_interleaved(q: Tensor, k: Tensor, v: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """For each key-value group its query heads, then its key, then its value head (GPT-NeoX, Falcon, InternLM2)."""
    rest = q.shape[1:]
    groups = [
        q.reshape(kv_heads, heads // kv_heads, head_dim, *rest),
        k.reshape(kv_heads, 1, head_dim, *rest),
        v.reshape(kv_heads, 1, head_dim, *rest),
    ]
    return torch.cat(groups, dim=1).reshape(-1, *rest)


def split_qkv_interleaved(qkv: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """The inverse of `fuse_qkv_interleaved`."""
    rest = qkv.shape[1:]
    grouped = qkv.reshape(kv_heads, heads // kv_heads + 2, head_dim, *rest)
    parts = torch.split(grouped, [heads // kv_heads, 1, 1], dim=1)
    return tuple(part.reshape(-1, *rest) for part in parts)


def fuse_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """``[gate; up]`` one below the other."""
    return torch.cat([gate, up])


def split_gate_up(gate_up: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `fuse_gate_up`."""
    rows = gate_up.shape[0] // 2
    return torch.split(gate_up, [rows, rows])


def fuse_gate_up_interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows in turn: gate 0, up 0, gate 1, up 1, ..."""
    return torch.stack([gate, up], dim=1).reshape(-1, *gate.shape[1:])


def split_gate_up_interleaved(gate_up: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `fuse_gate_up_interleaved`."""
    pairs = gate_up.reshape(-1, 2, *gate_up.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def stack_experts(*parts: Sequence[Tensor]) -> Tensor:
    """One tensor an expert -> one tensor of (experts, rows, columns); several lists are joined along the rows."""
    stacked = [torch.stack(list(part)) for part in parts]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=1)


def unstack_experts(stacked: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `stack_experts` for one list."""
    return tuple(stacked.unbind(0))


def transpose(weight: Tensor) -> Tensor:
    """The last two dimensions swapped (Conv1D against Linear)."""
    return weight.transpose(-1, -2).contiguous()


def reshape(weight: Tensor, *, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape."""
    return weight.reshape(tuple(shape))


def rotary_meta_to_hf(weight: Tensor, *, heads: int, head_dim: int) -> Tensor:
    """Rows of a q or k projection from pairs (Meta) to halves (Hugging Face), head by head."""
    rest = weight.shape[1:]
    return weight.reshape(heads, head_dim // 2, 2, *rest).transpose(1, 2).reshape(heads * head_dim, *rest)


def rotary_hf_to_meta(weight: Tensor, *, heads: int, head_dim: int) -> Tensor:
    """The inverse of `rotary_meta_to_hf`."""
    rest = weight.shape[1:]
    return weight.reshape(heads, 2, head_dim // 2, *rest).transpose(1, 2).reshape(heads * head_dim, *rest)


def pad_rows(weight: Tensor, *, rows: int) -> Tensor:
    """Zero rows added below, up to ``rows`` (a vocabulary padded to a multiple)."""
    if rows < weight.shape[0]:
        raise ValueError(f"pad_rows can't shorten {weight.shape[0]} rows to {rows}")
    return torch.cat([weight, weight.new_zeros(rows - weight.shape[0], *weight.shape[1:])])


def weight_norm(g: Tensor, v: Tensor) -> Tensor:
    """The plain weight of a weight-normalised layer: ``g * v / |v|``, the norm over all dimensions but the first."""
    norm: Tensor = torch.linalg.vector_norm(v.flatten(1), dim=1)
    return v * (g / norm.reshape(-1, *[1] * (v.dim() - 1)))


LAYOUTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        fuse_qkv, split_qkv, fuse_qkv_interleaved, split_qkv_interleaved, fuse_gate_up, split_gate_up,
        fuse_gate_up_interleaved, split_gate_up_interleaved, stack_experts, unstack_experts, transpose, reshape,
        rotary_meta_to_hf, rotary_hf_to_meta, pad_rows, weight_norm,
    )
}  # fmt: skip


def sizes_from_config(config: Any, wanted: Sequence[str]) -> dict[str, int]:
    """Sizes that a model's config tells: ``heads``, ``kv_heads``, ``head_dim``; those it doesn't are left out.

    Args:
        config: A transformers config, any object with its attributes, a mapping, or None.
        wanted: Which sizes.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def told(name: str) -> Any:
        return text.get(name) if isinstance(text, Mapping) else getattr(text, name, None)

    heads, hidden = told("num_attention_heads"), told("hidden_size")
    sizes = {
        "heads": heads,
        "kv_heads": told("num_key_value_heads") or heads,
        "head_dim": told("head_dim") or (hidden // heads if hidden and heads else None),
    }
    return {name: value for name, value in sizes.items() if name in wanted and isinstance(value, int)}
