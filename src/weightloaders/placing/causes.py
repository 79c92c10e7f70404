"""What is probably behind a tensor that does not fit, and what to do about it, in words."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from weightloaders.mapping.dtypes import is_codes, may_cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightloaders.targets import Target

_IF_QUANTISED = (
    "build the model with the checkpoint's quantization_config, or convert the checkpoint to plain weights first"
)
_QUANTISED = (
    r"(^|[._])(qweight|qzeros|scales|g_idx|absmax|nested_absmax|quant_map|quant_state|SCB|weight_format|weight_packed"
    r"|weight_shape|zero_point|weight_zero_point|(weight|input|output|k|v|kv|q)_scale|weight_scale_inv|scale_inv)(\.|$)"
)
_IF_PLAIN = (
    "the model is built for quantised weights, and these are plain: build it from a config without quantization_config"
)
_IF_CODES = f"integers and 8-bit codes are usually quantised weights: {_IF_QUANTISED}"
_VOCABULARY = re.compile(r"embed|lm_head|wte|vocab|(^|\.)output\.weight$")
_GIVEN_AWAY = tuple(
    (re.compile(pattern), cause)
    for pattern, cause in (
        (
            r"(^|\.)lora_[AB]\b|lora_embedding_[AB]|\.base_layer\.",
            "these are a LoRA adapter's: merge it into its base model (peft: merge_and_unload) and load the result",
        ),
        (
            _QUANTISED,
            f"these belong to a quantised checkpoint: {_IF_QUANTISED}",
        ),
        (r"(^|\.)_?flat_param", "these are FSDP's flattened parameters: save a full state dict instead"),
        (r"^blk\.\d+\.", "these are GGUF's names: convert the file, or rename them with rules"),
        (
            r"^layers\.\d+\.(attention\.w[qkvo]|feed_forward\.w[123])\.",
            "these are the original release's names: fetch the Hugging Face one, or rename them with rules",
        ),
    )
)


def cause_of_shape(target: Target, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, str]:
    """The likely cause of a mismatch of shapes, and what to do about it."""
    wanted, name = target.shape, target.name
    if is_placeholder(shape, wanted):
        return " (a placeholder)", (
            "the file was saved from a model whose parameters were partitioned (ZeRO-3) and not gathered; "
            "gather them and save again"
        )
    if not may_cast(dtype, target.dtype):
        return f" in {dtype}", _codes_hint(dtype, target)
    if len(shape) == len(wanted) == 2 and shape == wanted[::-1]:
        return " (it looks transposed)", f"load with rules=[Convert({name!r}, {name!r}, 'transpose')]"
    if math.prod(shape) == math.prod(wanted):
        return " (as many elements)", (
            f"if they only lie in another shape, load with rules=[Convert({name!r}, {name!r}, 'reshape', "
            f"shape={list(wanted)})]"
        )
    different = [at for at, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b]
    if len(shape) != len(wanted) or len(different) != 1:
        return "", "the checkpoint and the model are of different architectures or sizes: compare their configs"
    have, want = shape[different[0]], wanted[different[0]]
    if different == [0] and _VOCABULARY.search(name):
        pad = f", or pad it with rules=[Convert({name!r}, {name!r}, 'pad_rows', rows={want})]" if want > have else ""
        return f" (vocabularies of {have} and {want})", (
            f"build the model with vocab_size={have} (transformers: from_pretrained(..., vocab_size={have}), or for a "
            f"model that is built model.resize_token_embeddings({have})){pad}"
        )
    if have and want % have == 0 and want // have in (2, 4, 8, 16, 32):
        return f" (1/{want // have} of it)", (
            "either the file is one rank's part of a tensor-parallel checkpoint, or the checkpoint is of a model of "
            "another size: compare its config.json with the model's"
        )
    return "", "the checkpoint is of a model of another size: compare its config.json with the model's"


def is_placeholder(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor stands for one that was partitioned away rather than for one of another size."""
    return math.prod(wanted) > 1 and (math.prod(shape) == 0 or (tuple(shape) == (1,) and len(wanted) > 1))


def cause_of_dtype(source: torch.dtype, target: Target) -> tuple[str, str]:
    """Why values of one kind can't become another, and what to do about it."""
    return f"the source has {source} values, which can't become {target.dtype} by a cast", _codes_hint(source, target)


def _codes_hint(source: torch.dtype, target: Target) -> str:
    packed = is_codes(target.dtype) and target.dtype.itemsize == 1
    return _IF_PLAIN if packed and not is_codes(source) else _IF_CODES


def cause_of_unexpected(names: Sequence[str]) -> str | None:
    """Whose names these are, where they give it away."""
    return next((cause for pattern, cause in _GIVEN_AWAY if any(pattern.search(name) for name in names)), None)
