"""In what sizes a checkpoint's model and this one differ, by the shapes of tensors whose names are well known."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# What the dimensions of a weight are, by the module's name: a quantity, and how many of it. `q` and `kv` are the heads'
# widths together.
_DIMENSIONS: dict[str, tuple[tuple[str, int], ...]] = {
    **dict.fromkeys(("q_proj", "query", "q_lin", "wq"), (("q", 1), ("hidden_size", 1))),
    **dict.fromkeys(
        ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "wk", "wv"), (("kv", 1), ("hidden_size", 1))
    ),
    **dict.fromkeys(("o_proj", "out_lin", "wo"), (("hidden_size", 1), ("q", 1))),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "lin1"), (("intermediate_size", 1), ("hidden_size", 1))),
    **dict.fromkeys(("down_proj", "fc2", "lin2"), (("hidden_size", 1), ("intermediate_size", 1))),
    "gate_up_proj": (("intermediate_size", 2), ("hidden_size", 1)),
    **dict.fromkeys(
        ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared", "lm_head", "embed_out"),
        (("vocab_size", 1), ("hidden_size", 1)),
    ),
    **dict.fromkeys(("gate", "router"), (("num_experts", 1), ("hidden_size", 1))),
    **dict.fromkeys(("wpe", "position_embeddings"), (("max_position_embeddings", 1), ("hidden_size", 1))),
    **dict.fromkeys(("q_norm", "k_norm"), (("head_dim", 1),)),
    # Conv1D of GPT-2: the other way around.
    "c_attn": (("hidden_size", 1), ("hidden_size", 3)),
}  # fmt: skip
_NORM = re.compile(r"(norm|^ln_\w+|LayerNorm)\d*$")
# What configs call a quantity.
_FIELDS = {
    "intermediate_size": ("intermediate_size", "moe_intermediate_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}
_LAYER = re.compile(r"^((?:[^.\d]+\.)*?)(\d+)\.")


@dataclass(frozen=True, slots=True)
class Difference:
    """One size that is not the same.

    Attributes:
        field: What the model's config calls it.
        have: The checkpoint's.
        want: The model's.
    """

    field: str
    have: int
    want: int

    def __str__(self) -> str:
        return f"{self.field} is {self.have} in the checkpoint and {self.want} in the model"


class Sizes:
    """What shapes say about sizes: each pair of shapes, the checkpoint's and the model's, is a vote."""

    def __init__(self) -> None:
        self._votes: dict[str, set[tuple[int, int]]] = defaultdict(set)

    def vote(self, name: str, have: Sequence[int], want: Sequence[int]) -> None:
        """Take a tensor into account."""
        for (quantity, times), a, b in zip(_dimensions(name, len(want)), have, want, strict=False):
            if a % times == b % times == 0:
                self._votes[quantity].add((a // times, b // times))

    def differing(self) -> dict[str, tuple[int, int]]:
        """Quantity -> checkpoint's and model's, of those that are not the same; without what is contradictory."""
        agreed = {quantity: next(iter(votes)) for quantity, votes in self._votes.items() if len(votes) == 1}
        return {quantity: pair for quantity, pair in agreed.items() if pair[0] != pair[1]}

    def explains(self, name: str, have: Sequence[int], want: Sequence[int]) -> bool:
        """Whether all that is different in a tensor is one of the sizes that differ."""
        known, dimensions = self.differing(), list(_dimensions(name, len(want)))
        return len(have) == len(want) == len(dimensions) and all(
            a == b or known.get(quantity) == (a // times, b // times)
            for (quantity, times), a, b in zip(dimensions, have, want, strict=True)
        )


def _dimensions(name: str, count: int) -> Iterator[tuple[str, int]]:
    *path, leaf = name.split(".")
    if count == 3 and "experts" in name:
        # All experts in one: which way around the rest lies differs.
        yield ("num_experts", 1)
        return
    # A bare parameter is called like the module that it stands for elsewhere.
    module = path[-1] if path and leaf in ("weight", "bias") else leaf
    if _NORM.search(module) and module not in _DIMENSIONS:
        yield from (("hidden_size", 1),)[:count]
        return
    dimensions = _DIMENSIONS.get(module, ())
    yield from dimensions[: 1 if leaf == "bias" else count]


def differences(differing: dict[str, tuple[int, int]], config: Any) -> list[Difference]:
    """Quantities by the names that the model's config has for them.

    Args:
        differing: See `Sizes.differing`.
        config: The model's config.
    """
    rest = dict(differing)
    heads = {name: pair for name in ("q", "kv") if (pair := rest.pop(name, None))}
    if "hidden_size" in rest:
        # Heads that are wider as the model is follow from that.
        have, want = rest["hidden_size"]
        heads = {name: (a, b) for name, (a, b) in heads.items() if a * want != b * have}
    found = []
    for quantity, (have, want) in rest.items():
        names = [name for name in _FIELDS.get(quantity, ()) if getattr(config, name, None) == want]
        field = names[0] if names else quantity
        found.append(Difference(getattr(config, "attribute_map", {}).get(field, field), have, want))
    if heads and "head_dim" not in rest:
        found += _heads(heads.get("q"), heads.get("kv"), config)
    return found


def _heads(q: tuple[int, int] | None, kv: tuple[int, int] | None, config: Any) -> Iterator[Difference]:
    """What the widths of all heads together say of their number, or of the width of each."""
    heads = getattr(config, "num_attention_heads", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = q[1] // heads if q and heads else kv[1] // kv_heads if kv and kv_heads else 0
    same_ratio = q is not None and kv is not None and q[0] * kv[1] == q[1] * kv[0]
    if head_dim and not same_ratio and all(pair[0] % head_dim == 0 for pair in (q, kv) if pair):
        for field, pair in (("num_attention_heads", q), ("num_key_value_heads", kv)):
            if pair:
                yield Difference(field, pair[0] // head_dim, pair[1] // head_dim)
    elif head_dim and same_ratio and q and q[0] % heads == 0:
        yield Difference("head_dim", q[0] // heads, head_dim)
    else:
        for field, pair in (("num_attention_heads * head_dim", q), ("num_key_value_heads * head_dim", kv)):
            if pair:
                yield Difference(field, *pair)


def layers_short(absent: Iterable[str], present: Iterable[str]) -> tuple[int, int] | None:
    """How many layers one side has and the other, if all that is absent are the last layers, each as a whole.

    Args:
        absent: Names that one side lacks.
        present: Names that both have.

    Returns:
        The number of layers that are present, and of those and the absent ones together.
    """
    lacking, having = _layers(absent), _layers(present)
    if len(lacking) != 1 or None in lacking:
        return None
    front, numbers = next(iter(lacking.items()))
    there = having.get(front, set())
    if not there or there != set(range(len(there))):
        return None
    everything = len(there) + len(numbers)
    return (len(there), everything) if numbers == set(range(len(there), everything)) else None


def _layers(names: Iterable[str]) -> dict[str | None, set[int]]:
    """The numbers of layers in names, by what stands before them; None for names without."""
    found: dict[str | None, set[int]] = defaultdict(set)
    for name in names:
        match = _LAYER.match(name)
        if match and len(match[2]) < 6:
            found[match[1]].add(int(match[2]))
        else:
            found[None].add(0)
    return found
