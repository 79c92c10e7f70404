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
    r"(^|[._])(qweight|qzeros|scales|g_idx|absmax|nested_absmax|quant_map|quant_state|blocks|packed|tq_packed|SCB|weight_format|weight_packed"
    r"|weight_shape|zero_point|weight_zero_point|(weight|input|output|k|v|kv|q)_scale|weight_scale_inv|scale_inv)(\.|$)"
)
_IF_PLAIN = (
    "the model is built for quantised weights, and these are plain: build it from a config without quantization_config"
)
_IS_QUANTISED = re.compile(_QUANTISED)
_LORA = (
    "these are a LoRA adapter's, which is no model by itself: merge it into its base model (peft: "
    "PeftModel.from_pretrained(base, adapter).merge_and_unload()), save that and load it"
)
_ADAPTER = (
    "these are an adapter's of peft (IA3, LoHa, LoKr, OFT, VeRA, prompts, modules_to_save), which is no model by "
    "itself: merge it into its base model (peft: merge_and_unload()), or fetch the merged model"
)
_WITHIN_PEFT = (
    "these were saved from a model within peft: if no adapter is among them, load with "
    "rules=[Rename('base_model.model', '')]; else merge it first (peft: merge_and_unload())"
)
_OPTIMIZER = "these are an optimizer's states, not weights: name the file, or the part of it, that holds the model"
_IF_CODES = f"integers and 8-bit codes are usually quantised weights: {_IF_QUANTISED}"
_OTHER_SIZE = "the checkpoint is of a model of another size: compare its config.json with the model's"
_PART = (
    "either the file is one rank's part of a tensor-parallel checkpoint, or the checkpoint is of a model of another "
    "size: compare its config.json with the model's"
)
_OTHER_RULE = "look at the rule: its function, its sizes and its sources; or is it a model of another size?"
# What is advised of tensors with other sizes than the model's.
SIZES = frozenset({_OTHER_SIZE, _PART, _OTHER_RULE})
VOCABULARY = re.compile(r"embed|lm_head|wte|vocab|(^|\.)output\.weight$")
# More tokens than this are another vocabulary, not one that grew.
_ADDED = 1024
_GIVEN_AWAY = tuple(
    (re.compile(pattern), cause)
    for pattern, cause in (
        (
            r"(^|\.)lora_[AB]\b|lora_embedding_[AB]|lora_magnitude_vector|\.base_layer\.",
            _LORA,
        ),
        (
            r"(^|\.)(ia3_l|hada_w|lokr_w|oft_r|vera_lambda|modules_to_save|prompt_(embeddings|encoder))\w*(\.|$)",
            _ADAPTER,
        ),
        (r"^base_model\.model\.", _WITHIN_PEFT),
        (
            r"(^|\.)(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|optimizer(_states?)?|lr_schedulers?)(\.|$)",
            _OPTIMIZER,
        ),
        (
            _QUANTISED,
            f"these belong to a quantised checkpoint: {_IF_QUANTISED}",
        ),
        (r"(^|\.)_?flat_param", "these are FSDP's flattened parameters: save a full state dict instead"),
        (
            r"^blk\.\d+\.",
            "these are GGUF's names: the loader 'gguf' (weightloaders-gguf) turns those that it knows; or give rules",
        ),
        (
            r"^layers\.\d+\.(attention\.w[qkvo]|feed_forward\.w[123])\.",
            "these are the original release's names: fetch the Hugging Face one, or rename them with rules",
        ),
    )
)


def cause_of_shape(
    target: Target, shape: tuple[int, ...], dtype: torch.dtype, *, made: bool = False
) -> tuple[str, str]:
    """The likely cause of a mismatch of shapes, and what to do about it.

    Args:
        target: What the model wants.
        shape: The shape that there is.
        dtype: Its dtype.
        made: Whether a rule's function has made it. Then no rule can be advised that takes it by its name.
    """
    wanted, name = target.shape, target.name
    if is_placeholder(shape, wanted):
        return " (a placeholder)", (
            "the file was saved from a model whose parameters were partitioned (ZeRO-3) and not gathered; "
            "gather them and save again"
        )
    if not may_cast(dtype, target.dtype):
        return f" in {dtype}", _codes_hint(dtype, target)
    if is_transposed(shape, wanted):
        return " (it looks transposed)", (
            "let the rule's function transpose what it makes; of the ready-made ones some take transposed=True"
            if made
            else f"load with rules=[Convert({name!r}, {name!r}, 'transpose')]"
        )
    if made:
        return "", _OTHER_RULE
    if sorted(shape) == sorted(wanted):
        return " (the same sizes in another order)", (
            "if only its dimensions are in another order, load with a Convert whose function permutes them"
        )
    if math.prod(shape) == math.prod(wanted):
        return " (as many elements)", (
            f"if they only lie in another shape, load with rules=[Convert({name!r}, {name!r}, 'reshape', "
            f"shape={list(wanted)})]"
        )
    different = [at for at, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b]
    if len(shape) != len(wanted) or len(different) != 1:
        return "", "the checkpoint and the model are of different architectures or sizes: compare their configs"
    have, want = shape[different[0]], wanted[different[0]]
    if different == [0] and VOCABULARY.search(name):
        return f" (vocabularies of {have} and {want}{vocabulary_remark(have, want)})", vocabulary_hint(
            [name], have, want
        )
    if have and want % have == 0 and want // have in (2, 4, 8, 16, 32):
        return f" (1/{want // have} of it)", _PART
    return "", _OTHER_SIZE


def is_transposed(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two shapes differ in that the last two sizes are exchanged."""
    return len(wanted) > 1 and (*shape[:-2], *shape[:-3:-1]) == tuple(wanted) != tuple(shape)


def vocabulary_remark(have: int, want: int) -> str:
    """What is probably behind the difference of two vocabularies, as a half sentence."""
    small, large = sorted((have, want))
    multiple = next((n for n in (128, 64, 32, 16, 8) if large % n == 0 and small % n), 0)
    if multiple and large - small < multiple:
        return f"; the {'source' if have > want else 'model'}'s looks padded to a multiple of {multiple}"
    if 0 < have - want <= _ADDED:
        return f"; {have - want} tokens were probably added in training"
    return ""


def vocabulary_hint(names: Sequence[str], have: int, want: int) -> str:
    """What to do about two vocabularies of different sizes."""
    rules = ", ".join(f"Convert({name!r}, {name!r}, 'pad_rows', rows={want})" for name in names)
    pad = f", or pad it with rules=[{rules}]" if want > have else "; no rows are cut off unless a rule of yours does it"
    return (
        f"build the model with vocab_size={have} (transformers: from_pretrained(..., vocab_size={have}), or for a "
        f"model that is built model.resize_token_embeddings({have})){pad}"
    )


def is_placeholder(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor stands for one that was partitioned away rather than for one of another size."""
    return math.prod(wanted) > 1 and (math.prod(shape) == 0 or (tuple(shape) == (1,) and len(wanted) > 1))


def cause_of_dtype(source: torch.dtype, target: Target) -> tuple[str, str]:
    """Why values of one kind can't become another, and what to do about it."""
    return f"the source has {source} values, which can't become {target.dtype} by a cast", _codes_hint(source, target)


def _codes_hint(source: torch.dtype, target: Target) -> str:
    packed = is_codes(target.dtype) and target.dtype.itemsize == 1
    return _IF_PLAIN if packed and not is_codes(source) else _IF_CODES


def packed_remark(name: str, unexpected: Sequence[str]) -> str:
    """In what form the source has a parameter that it lacks by its name, as a sentence; empty where in none."""
    whole, module = name.removesuffix(".weight"), name.rpartition(".")[0]
    # Beside each other: `w.qweight` for `w.weight`, `experts_blocks` for `experts`; or in the same module.
    packed = [u for u in unexpected if u.startswith((f"{whole}.", f"{whole}_"))]
    packed = packed or [u for u in unexpected if module and u.startswith(f"{module}.") and _IS_QUANTISED.search(u)]
    if not packed:
        return ""
    more = f" and {len(packed) - 3} more" if len(packed) > 3 else ""
    return f"in the place of {name} the source has {', '.join(packed[:3])}{more}; "


def cause_of_unexpected(names: Sequence[str]) -> str | None:
    """Whose names these are, where they give it away."""
    return next((cause for pattern, cause in _GIVEN_AWAY if any(pattern.search(name) for name in names)), None)
