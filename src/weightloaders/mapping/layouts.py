"""Ready-made layouts: functions of plain torch code that rules name, from Python or from YAML.

Each gets the source tensors and its sizes as keyword arguments. Sizes without a default that a rule doesn't give are
taken from the model's config (`sizes_from_config`).

What goes for a weight goes for its companions, so that one rule can take them along: a bias has no columns, a scale of
blocks has a row for so many of the weight's, packed integers likewise, and a scale of the whole tensor is a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# ------------------------------------------------------------------ query, key, value


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, *, dim: int = 0, transposed: bool = False) -> Tensor:
    """``[q; k; v]`` one below the other: (heads + 2 kv_heads) x head_dim rows. Three scalars become three numbers.

    ``dim`` is where the rows lie (GPTQ and AWQ have them last), ``transposed`` says that what is fused has its rows and
    columns swapped (Conv1D).
    """
    return _turned(joined([q, k, v], dim), transposed)


def split_qkv(
    qkv: Tensor, *, heads: int, kv_heads: int, head_dim: int, dim: int = 0, transposed: bool = False
) -> tuple[Tensor, ...]:
    """The inverse of `fuse_qkv`. A single number, which is the scale of all three, goes to each."""
    if (scales := _scales_of_three(qkv)) is not None:
        return scales
    qkv = _turned(qkv, transposed)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    return torch.split(qkv, _scaled(sizes, qkv.shape[dim]), dim)


def fuse_qkv_interleaved(q: Tensor, k: Tensor, v: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """For each key-value group its query heads, then its key, then its value head (Falcon, InternLM2).

    With as many key-value heads as heads it is head by head (GPT-NeoX, BLOOM).
    """
    if q.numel() == 1:
        return joined([q, k, v])
    groups = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in (q, k, v)]
    rows = [group.shape[1] for group in groups]
    if _scaled(_group_sizes(heads, kv_heads, head_dim), sum(rows)) != rows:
        raise ValueError(f"these are not {heads} query and {kv_heads} key-value heads of {head_dim} rows")
    return joined(groups, 1).reshape(-1, *q.shape[1:])


def split_qkv_interleaved(qkv: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """The inverse of `fuse_qkv_interleaved`."""
    if (scales := _scales_of_three(qkv)) is not None:
        return scales
    grouped = qkv.reshape(kv_heads, -1, *qkv.shape[1:])
    parts = torch.split(grouped, _scaled(_group_sizes(heads, kv_heads, head_dim), grouped.shape[1]), dim=1)
    return tuple(part.reshape(-1, *qkv.shape[1:]) for part in parts)


def _scales_of_three(qkv: Tensor) -> tuple[Tensor, ...] | None:
    """Scales of whole tensors: one that all share, or one for each."""
    if qkv.numel() == 1:
        return qkv, qkv, qkv
    return qkv.unbind(0) if qkv.shape == (3,) else None


def _group_sizes(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    if heads % kv_heads:
        raise ValueError(f"{heads} heads can't be shared out to {kv_heads} key-value heads")
    return [heads // kv_heads * head_dim, head_dim, head_dim]


# ------------------------------------------------------------------ gate and up


def fuse_gate_up(gate: Tensor, up: Tensor, *, dim: int = 0, transposed: bool = False) -> Tensor:
    """``[gate; up]`` one below the other; see `fuse_qkv` for what there is to say.

    Of stacked experts the rows are ``dim=1``, or ``dim=-1`` where they lie transposed.
    """
    return _turned(joined([gate, up], dim), transposed)


def split_gate_up(gate_up: Tensor, *, dim: int = 0, transposed: bool = False) -> tuple[Tensor, ...]:
    """The inverse of `fuse_gate_up`. A single number, which is the scale of both, goes to each."""
    if gate_up.numel() == 1:
        return gate_up, gate_up
    gate_up = _turned(gate_up, transposed)
    return torch.split(gate_up, [_half(gate_up, dim)] * 2, dim)


def fuse_gate_up_interleaved(gate: Tensor, up: Tensor, *, dim: int = 0) -> Tensor:
    """Rows in turn: gate 0, up 0, gate 1, up 1, and so on (GPT-OSS: ``dim=-1``)."""
    _check_alike([gate, up])
    dim %= gate.dim()
    return torch.stack([gate, up], dim + 1).flatten(dim, dim + 1)


def split_gate_up_interleaved(gate_up: Tensor, *, dim: int = 0) -> tuple[Tensor, ...]:
    """The inverse of `fuse_gate_up_interleaved`."""
    if gate_up.numel() == 1:
        return gate_up, gate_up
    dim %= gate_up.dim()
    pairs = gate_up.reshape(*gate_up.shape[:dim], _half(gate_up, dim), 2, *gate_up.shape[dim + 1 :])
    return pairs.unbind(dim + 1)


def _half(gate_up: Tensor, dim: int) -> int:
    half, rest = divmod(gate_up.shape[dim], 2)
    if rest:
        raise ValueError(f"{gate_up.shape[dim]} rows are not gate and up: the number is odd")
    return half


# ------------------------------------------------------------------ experts


def stack_experts(*parts: Sequence[Tensor], transposed: bool = False, interleaved: bool = False) -> Tensor:
    """One tensor an expert -> one tensor of (experts, rows, columns); gate and up of each are joined along the rows.

    ``transposed`` makes it (experts, columns, rows), as Llama 4, GPT-OSS and Qwen3-VL have it. ``interleaved`` takes
    the rows of gate and up in turn (GPT-OSS).
    """
    if interleaved and len(parts) != 2:
        raise ValueError(f"only gate and up can be interleaved, not {len(parts)} kinds of tensors")
    for part in parts:
        _check_alike(part)
    stacked = [torch.stack(list(part)) for part in parts]
    if len(stacked) == 1:
        whole = stacked[0]
    elif stacked[0].dim() == 1:
        # A scale of the whole tensor: (experts, parts).
        whole = torch.stack(stacked, 1)
    elif interleaved:
        whole = fuse_gate_up_interleaved(*stacked, dim=1)
    else:
        whole = joined(stacked, 1)
    return whole.transpose(1, 2) if transposed and whole.dim() > 2 else whole


def unstack_experts(
    stacked: Tensor, *, parts: int = 1, transposed: bool = False, interleaved: bool = False
) -> tuple[Any, ...]:
    """The inverse of `stack_experts`: a tensor an expert. With ``parts=2`` it gives the gates, then the ups."""
    if parts not in (1, 2) or (interleaved and parts != 2):
        raise ValueError(f"experts are taken apart into one tensor each or into gate and up, not into parts={parts}")
    whole = stacked.transpose(1, 2) if transposed and stacked.dim() > 2 else stacked
    if parts == 1:
        return whole.unbind(0)
    halves: Sequence[Tensor]
    if whole.shape[1:] in ((), (1,)):
        # A scale that gate and up of an expert share, and below it one for each.
        halves = whole, whole
    elif whole.shape[1:] == (2,):
        halves = whole.unbind(1)
    else:
        halves = (split_gate_up_interleaved if interleaved else split_gate_up)(whole, dim=1)
    return tuple(half.unbind(0) for half in halves)


# ------------------------------------------------------------------ single tensors


def transpose(weight: Tensor) -> Tensor:
    """The last two dimensions swapped (Conv1D against Linear); a bias, which has just one, stays as it is."""
    return _turned(weight, True)


def reshape(weight: Tensor, *, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape."""
    return weight.reshape(tuple(shape))


def rotary_meta_to_hf(weight: Tensor, *, head_dim: int, heads: int | None = None) -> Tensor:
    """Rows of a q or k projection, or of its bias, from pairs (Meta) to halves (Hugging Face), head by head.

    There are as many heads as rows / head_dim, unless the rule says how many there must be.
    """
    rest = weight.shape[1:]
    pairs = weight.reshape(_heads(weight, head_dim, heads), head_dim // 2, 2, *rest)
    return pairs.transpose(1, 2).reshape(weight.shape)


def rotary_hf_to_meta(weight: Tensor, *, head_dim: int, heads: int | None = None) -> Tensor:
    """The inverse of `rotary_meta_to_hf`."""
    rest = weight.shape[1:]
    halves = weight.reshape(_heads(weight, head_dim, heads), 2, head_dim // 2, *rest)
    return halves.transpose(1, 2).reshape(weight.shape)


def _heads(weight: Tensor, head_dim: int, heads: int | None) -> int:
    there, rest = divmod(weight.shape[0], head_dim)
    if rest or head_dim % 2 or heads not in (None, there):
        asked = "heads" if heads is None else f"{heads} heads"
        raise ValueError(f"{weight.shape[0]} rows are not {asked} of {head_dim} rows in pairs")
    return there


def pad_rows(weight: Tensor, *, rows: int | None = None, multiple: int | None = None) -> Tensor:
    """Zero rows added below, up to ``rows`` or to a multiple of ``multiple`` (a vocabulary that was padded)."""
    have = weight.shape[0]
    if (rows is None) == (multiple is None):
        raise ValueError("either the number of rows or what it is to be a multiple of has to be given")
    wanted = -(-have // (multiple or 1)) * (multiple or 1) if rows is None else rows
    if wanted < have:
        raise ValueError(f"pad_rows can't shorten {have} rows to {wanted}")
    return torch.cat([weight, weight.new_zeros(wanted - have, *weight.shape[1:])])


def unpad_rows(weight: Tensor, *, rows: int, multiple: int) -> Tensor:
    """The inverse of `pad_rows`: the first ``rows``, by default the vocabulary's.

    Only padding is cut: there must be as many rows as ``rows`` padded to a multiple of ``multiple``.
    """
    padded = -(-rows // multiple) * multiple
    if weight.shape[0] != padded:
        raise ValueError(
            f"unpad_rows cuts nothing but padding: {rows} rows padded to a multiple of {multiple} are {padded}, but "
            f"there are {weight.shape[0]}"
        )
    return weight[:rows]


def repeat(scale: Tensor, *, times: int) -> Tensor:
    """One number several times: the scale of a fused tensor where each part is to have one."""
    if scale.numel() != 1:
        raise ValueError(f"only a single number can be repeated, not {list(scale.shape)}")
    return scale.reshape(1).expand(times)


def duplicate(tensor: Tensor, *, times: int = 2) -> tuple[Tensor, ...]:
    """The same tensor for each of several targets (a scale that keys and values share)."""
    return (tensor,) * times


def common(*parts: Tensor) -> Tensor:
    """What several parts have alike, once: GPTQ's order of columns, a scale. The inverse of `duplicate`.

    It is read, compared, and refused where the parts differ.
    """
    _check_alike(parts)
    if any(part.shape != parts[0].shape for part in parts):
        raise ValueError("the parts are to be equal, but have different shapes")
    # Without values it is the shape that is asked for.
    if not parts[0].is_meta and not all(torch.equal(parts[0], part) for part in parts[1:]):
        raise ValueError("the parts are to be equal, but have different values")
    return parts[0]


def reinterpret(weight: Tensor, *, dtype: str) -> Tensor:
    """The same bytes as another dtype, e.g. ``int32`` for codes packed in ``uint8``; along the last dimension."""
    wanted = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}")  # noqa: TRY004 -- it is a name that is wrong
    return weight.view(wanted)


def weight_norm(g: Tensor, v: Tensor) -> Tensor:
    """The plain weight of a weight-normalised layer: ``g * v / |v|``, the norm over the dimensions that g has not."""
    g = g.reshape(-1, *[1] * (v.dim() - 1)) if g.dim() == 1 else g
    # Narrow floats are computed with as torch does it: in float32.
    wide = torch.promote_types(v.dtype, torch.float32)
    return (v.to(wide) * (g.to(wide) / _norm(v.to(wide), g.shape))).to(v.dtype)


def split_weight_norm(weight: Tensor, *, dim: int = 0) -> tuple[Tensor, Tensor]:
    """The inverse of `weight_norm`: the norms over all dimensions but ``dim``, and the weight itself."""
    shape = [1] * weight.dim()
    shape[dim] = weight.shape[dim]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return _norm(weight.to(wide), shape).to(weight.dtype), weight


def _norm(v: Tensor, shape: Sequence[int]) -> Tensor:
    over = [dim for dim in range(v.dim()) if shape[dim] == 1]
    norm: Tensor = torch.linalg.vector_norm(v, dim=over, keepdim=True)
    return norm


LAYOUTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        fuse_qkv, split_qkv, fuse_qkv_interleaved, split_qkv_interleaved, fuse_gate_up, split_gate_up,
        fuse_gate_up_interleaved, split_gate_up_interleaved, stack_experts, unstack_experts, transpose, reshape,
        rotary_meta_to_hf, rotary_hf_to_meta, pad_rows, unpad_rows, repeat, duplicate, common, reinterpret,
        weight_norm, split_weight_norm,
    )
}  # fmt: skip


# ------------------------------------------------------------------ what they share


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Parts of one kind, one behind the other; scalars, which have no dimension to be joined along, become a vector.

    Raises:
        ValueError: If the parts are of different dtypes: torch would promote integers that are codes as if they were
            numbers.
    """
    _check_alike(parts)
    scalars = all(part.dim() == 0 for part in parts)
    return torch.stack(list(parts)) if scalars else torch.cat(list(parts), dim)


def _check_alike(parts: Sequence[Tensor]) -> None:
    kinds = list(dict.fromkeys(str(part.dtype) for part in parts))
    if len(kinds) > 1:
        raise ValueError(f"parts of different dtypes are not joined: {', '.join(kinds)}; make them one dtype first")


def _turned(weight: Tensor, transposed: bool) -> Tensor:
    return weight.transpose(-1, -2).contiguous() if transposed and weight.dim() > 1 else weight


def _scaled(sizes: Sequence[int], rows: int) -> list[int]:
    """Numbers of a weight's rows as numbers of rows of what there is, which may have one for several of the weight's.

    Raises:
        ValueError: If these rows can't be those sizes, or one of them would end within a row.
    """
    several, rest = divmod(sum(sizes), rows) if rows else (0, 1)
    if rest or any(size % several for size in sizes):
        raise ValueError(f"{rows} rows can't be shared out in the ratio of {' to '.join(map(str, sizes))}")
    return [size // several for size in sizes]


def sizes_from_config(config: Any, wanted: Sequence[str]) -> dict[str, int]:
    """Sizes that a model's config tells: ``heads``, ``kv_heads``, ``head_dim``, and as ``rows`` the vocabulary's.

    Those that it doesn't tell are left out.

    Args:
        config: A transformers config, any object with its attributes, a mapping, or None.
        wanted: Which sizes.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def told(*names: str) -> Any:
        values = (text.get(name) if isinstance(text, Mapping) else getattr(text, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    heads, hidden = told("num_attention_heads"), told("hidden_size")
    # Falcon's older kind and GPT-BigCode say it so, whatever else they say.
    single = told("multi_query") is True and told("new_decoder_architecture") is not True
    sizes = {
        "heads": heads,
        "kv_heads": 1 if single else told("num_key_value_heads", "num_kv_heads") or heads,
        "head_dim": told("head_dim") or (hidden // heads if hidden and heads else None),
        "rows": told("vocab_size"),
    }
    return {name: value for name, value in sizes.items() if name in wanted and isinstance(value, int)}
