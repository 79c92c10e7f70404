"""What Meta's Llama files are split along, proved from their shapes and ``params.json``.

A checkpoint of several tensor-parallel ranks is ``consolidated.00.pth``, ``consolidated.01.pth`` and so on, each with
all names. The names and the sizes are those of https://github.com/meta-llama/llama/blob/main/llama/model.py, and of
llama3's, which splits the embedding along its rows instead of its columns.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightloaders.weights.tensor_parallel import Split

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.tensor_parallel import Way

MAX_PARAMS_BYTES = 1 << 20

_LAYER = re.compile(r"layers\.\d+\.")
# Of each name its whole shape, in the words of `_sizes`.
_SHAPES: dict[str, tuple[str, ...]] = {
    "tok_embeddings.weight": ("vocab", "dim"),
    "output.weight": ("vocab", "dim"),
    "norm.weight": ("dim",),
    "rope.freqs": ("frequencies",),
    "layers.attention.wq.weight": ("heads", "dim"),
    "layers.attention.wk.weight": ("kv_heads", "dim"),
    "layers.attention.wv.weight": ("kv_heads", "dim"),
    "layers.attention.wo.weight": ("dim", "heads"),
    "layers.attention_norm.weight": ("dim",),
    "layers.ffn_norm.weight": ("dim",),
    "layers.feed_forward.w1.weight": ("hidden", "dim"),
    "layers.feed_forward.w2.weight": ("dim", "hidden"),
    "layers.feed_forward.w3.weight": ("hidden", "dim"),
}
# What Meta's code keeps whole on each rank; all else is split.
_WHOLE = frozenset(name for name, shape in _SHAPES.items() if len(shape) == 1)


@dataclass(frozen=True, slots=True)
class LlamaShapes:
    """The whole shapes of a Llama's tensors.

    Args:
        sizes: The sizes of the model, by the words of this module; what is not known is absent.
    """

    sizes: Mapping[str, int]

    @classmethod
    def read(cls, raw: bytes) -> LlamaShapes | None:
        """From the content of a ``params.json``; None if it is that of another model, or none at all."""
        try:
            return cls(_sizes(json.loads(raw)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return None

    def with_vocabulary_of(self, first: Mapping[str, TensorInfo], parts: int) -> LlamaShapes:
        """The same with the vocabulary's size, where the embedding was split by columns, so that its rows are whole."""
        embedding, dim = first.get("tok_embeddings.weight"), self.sizes["dim"]
        if "vocab" in self.sizes or embedding is None or embedding.shape[1:] != (dim // parts,):
            return self
        return LlamaShapes({**self.sizes, "vocab": embedding.shape[0]})

    def whole(self, name: str) -> tuple[int | None, ...] | None:
        """A tensor's whole shape, with None for a size that is not known; None for a name that is no Llama's."""
        words = _SHAPES.get(_LAYER.sub("layers.", name))
        return None if words is None else tuple(self.sizes.get(word) for word in words)

    def way_of(self, info: TensorInfo, parts: int) -> Way | None:
        """How the parts of a tensor are put together, where its shape proves it; ``parts`` is how many there are."""
        if _LAYER.sub("layers.", info.name) in _WHOLE:
            return "same" if self._fits(info, 1) else None
        axes = self._fits(info, parts)
        return Split(axes[0]) if len(axes) == 1 else None

    def parts_needed(self, infos: Iterable[TensorInfo]) -> int | None:
        """How many parts the shapes of one of them speak of; None where they don't tell."""
        counts = set()
        for info in infos:
            whole = self.whole(info.name)
            if whole is None or _LAYER.sub("layers.", info.name) in _WHOLE or None in whole:
                continue
            if len(whole) != len(info.shape) or 0 in info.shape:
                return None
            ratios = [size / part for size, part in zip(whole, info.shape, strict=True) if size and size != part]
            if len(ratios) > 1 or any(ratio != int(ratio) for ratio in ratios):
                return None
            counts.add(int(ratios[0]) if ratios else 1)
        return counts.pop() if len(counts) == 1 else None

    def _fits(self, info: TensorInfo, parts: int) -> list[int]:
        """The dimensions along which that many tensors of this shape make up the whole."""
        whole = self.whole(info.name)
        if whole is None or len(whole) != len(info.shape):
            return []
        return [
            axis
            for axis in range(len(whole))
            if all(
                size == part * (parts if dim == axis else 1)
                for dim, (size, part) in enumerate(zip(whole, info.shape, strict=True))
            )
        ]


def _sizes(params: Any) -> dict[str, int]:
    dim, heads = _positive(params["dim"]), _positive(params["n_heads"])
    kv_heads = _positive(params.get("n_kv_heads") or heads)
    head_dim = _positive(params.get("head_dim") or dim // heads)
    sizes = {"dim": dim, "heads": heads * head_dim, "kv_heads": kv_heads * head_dim, "frequencies": head_dim // 2}
    vocabulary = params.get("vocab_size", -1)
    # Llama 2's says -1: the tokenizer has it.
    if isinstance(vocabulary, int) and vocabulary > 0:
        sizes["vocab"] = vocabulary
    if params.get("hidden_dim"):
        sizes["hidden"] = _positive(params["hidden_dim"])
    elif params.get("multiple_of"):
        # As `FeedForward` there computes it.
        multiple, factor = _positive(params["multiple_of"]), params.get("ffn_dim_multiplier")
        hidden = int(2 * (4 * dim) / 3)
        hidden = hidden if factor is None else int(float(factor) * hidden)
        sizes["hidden"] = multiple * ((hidden + multiple - 1) // multiple)
    return sizes


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
        raise ValueError(f"{value!r} is no size")
    return value
