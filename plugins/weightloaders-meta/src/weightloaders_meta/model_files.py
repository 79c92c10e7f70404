"""A model's config from Meta's ``params.json``, written as the file that transformers reads, with the tokenizer.

``params.json`` leaves out what Meta's code has as constants, or takes from the tokenizer. Sizes are taken from the
weights; the rest as transformers' ``convert_llama_weights_to_hf.py`` has it for the version that the file speaks of.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightloaders import FolderListing
from weightloaders.errors import ModelError
from weightloaders.weights.file_names import PARAMS_FILE
from weightloaders.weights.meta_llama import MAX_PARAMS_BYTES
from weightloaders.weights.texts import read_small

if TYPE_CHECKING:
    from pathlib import Path

    import weightloaders as wl
    from weightloaders import ByteSource, Listing

_HINT = "give config=<folder or config object>"
_NAME = re.compile(
    r"(tok_embeddings|norm|output)\.weight|rope\.freqs|"
    r"layers\.(?P<layer>\d{1,5})\.(attention\.w[qkvo]|feed_forward\.w[123]|attention_norm|ffn_norm)\.weight"
)
# Parts of a model that a dense Llama does not have.
_FOREIGN = ("moe", "moe_args", "vision_encoder", "vision_chunk_size", "quantization", "quantization_args", "lora")
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The widths of the two small models of Llama 3.2, whose positions are stretched further.
_SMALL = (2048, 3072)
_LLAMA_3_VOCABULARY = 128256
# The fields of `params.json` that Llama 1 and 2 differ in.
_LLAMA_1_EPS = 1e-6
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
_SENTENCEPIECE = "tokenizer.model"
_MAX_TOKENIZER_BYTES = 1 << 28
# What Meta's code does around SentencePiece.
_SENTENCEPIECE_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
    "legacy": False,
}


_Size = Annotated[int, Field(gt=0, lt=1 << 31)]
# float32 goes up to some 3e38.
_Number = Annotated[float, Field(gt=0, le=1e38, allow_inf_nan=False)]


class _Params(BaseModel):
    """What a config needs of ``params.json``; whatever else is in there is Meta's own business."""

    model_config = ConfigDict(strict=True, frozen=True)

    dim: _Size
    n_heads: _Size
    norm_eps: Annotated[float, Field(gt=0, lt=1)]
    n_layers: _Size | None = None
    n_kv_heads: _Size | None = None
    head_dim: _Size | None = None
    rope_theta: _Number = 10000.0
    use_scaled_rope: bool = False
    rope_scaling_factor: _Number | None = None
    max_seq_len: _Size | None = None
    sliding_window: _Size | None = None


def write_model_files(listing: Listing, weights: wl.Weights, target: Path, positions: int | None) -> None:
    """Write ``config.json``, and the tokenizer's files where transformers can read them.

    Args:
        listing: What lies in Meta's folder.
        weights: What lies in it.
        target: Where to.
        positions: How many positions the model has, if not what its version has.

    Raises:
        ModelError: If ``params.json`` is not that of a Llama, or does not go with the weights.
        SourceReadError: If a file can't be read.
    """
    source = listing.open(PARAMS_FILE)
    config = _config(_read(source), source.name, weights, positions)
    config.save_pretrained(target)
    lacking = listing.problems(_TOKENIZER_FILES)
    for name in _TOKENIZER_FILES:
        if name not in lacking:
            (target / name).write_bytes(read_small(listing.open(name), _MAX_TOKENIZER_BYTES))
    _write_sentencepiece(listing, target)


def _read(source: ByteSource) -> _Params:
    path = source.name
    try:
        params = json.loads(read_small(source, MAX_PARAMS_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}", file=path, hint=_HINT) from error
    if not isinstance(params, dict):
        raise ModelError(f"{path} holds no sizes of a model", file=path, hint=_HINT)
    foreign = [key for key in _FOREIGN if params.get(key)]
    if foreign:
        raise ModelError(f"{path} is not that of a dense Llama: it has {', '.join(foreign)}", file=path, hint=_HINT)
    try:
        return _Params.model_validate(params)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = wrong["loc"][0]
        said = f"{name} is {params[name]!r:.80}" if name in params else f"there is no {name}"
        raise ModelError(
            f"{path} does not say what a Llama's config needs: {said}: {wrong['msg']}", file=path, hint=_HINT
        ) from error


def _config(params: _Params, path: str, weights: wl.Weights, positions: int | None) -> Any:
    from transformers import LlamaConfig, MistralConfig

    strange = next((name for name in weights if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise ModelError(f"there is {strange!r} among the weights, which a Llama does not have", hint=_HINT)
    layers = _layers(params, path, weights)
    vocabulary, width = _matrix(weights, "tok_embeddings.weight")
    heads = params.n_heads
    head_dim = params.head_dim or width // heads
    kv_heads = params.n_kv_heads or heads
    rows = [_matrix(weights, f"layers.0.attention.{name}.weight")[0] for name in ("wq", "wk")]
    if width != params.dim or rows != [heads * head_dim, kv_heads * head_dim] or heads % kv_heads:
        raise ModelError(
            f"{PARAMS_FILE} says {params.dim} wide with {heads} heads, {kv_heads} of them for keys, which the weights "
            f"are not: they are {width} wide, with {rows[0]} and {rows[1]} rows for queries and keys",
            file=path, hint="it belongs to another model",
        )  # fmt: skip
    scaled = params.use_scaled_rope
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.rope_theta}
    if scaled:
        factor = params.rope_scaling_factor or (32.0 if width in _SMALL else 8.0)
        rope |= {"rope_type": "llama3", "factor": factor, **_SCALING}
    is_llama_3 = vocabulary >= _LLAMA_3_VOCABULARY
    usual = 131072 if scaled else 8192 if is_llama_3 else 2048 if params.norm_eps <= _LLAMA_1_EPS else 4096
    window = params.sliding_window
    kind, name = (MistralConfig, "MistralForCausalLM") if window else (LlamaConfig, "LlamaForCausalLM")
    return kind(
        architectures=[name],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=_matrix(weights, "layers.0.feed_forward.w1.weight")[0],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions or params.max_seq_len or usual,
        rms_norm_eps=params.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in weights,
        bos_token_id=128000 if is_llama_3 else 1,
        # The end of a text, of a message to a tool, and of a turn.
        eos_token_id=[128001, 128008, 128009] if is_llama_3 else 2,
        dtype=str(weights.info("tok_embeddings.weight").dtype).removeprefix("torch."),
        **({"sliding_window": window} if window else {}),
    )


def _layers(params: _Params, path: str, weights: wl.Weights) -> int:
    """How many layers there are: each of them has weights, so a model is no larger than they are."""
    there = {int(match["layer"]) for match in map(_NAME.fullmatch, weights) if match and match["layer"]}
    lacking = next((layer for layer in range(params.n_layers or len(there)) if layer not in there), None)
    if lacking is not None or not there:
        raise ModelError(
            f"there is no layer {lacking or 0} among the weights"
            + (f", but layer {max(there)}" if there else "")
            + (f"; {PARAMS_FILE} says that there are {params.n_layers} layers" if params.n_layers else ""),
            file=path,
            hint="the weights are not complete, or belong to another model",
        )
    if len(there) != (params.n_layers or len(there)):
        raise ModelError(
            f"{PARAMS_FILE} says that there are {params.n_layers} layers, but the weights have layer {max(there)}",
            file=path,
            hint="it belongs to another model",
        )
    return len(there)


def _matrix(weights: wl.Weights, name: str) -> tuple[int, int]:
    """The sizes of a matrix of floating-point numbers that a model computes with."""
    info = weights.info(name)
    if len(info.shape) != 2 or not info.numel or not info.dtype.is_floating_point or info.dtype.itemsize < 2:
        raise ModelError(
            f"{name} of a Llama is a matrix of floating-point numbers, not {list(info.shape)} {info.dtype}",
            tensor=name,
            hint="the weights are quantised, or another model's",
        )
    return info.shape[0], info.shape[1]


def _write_sentencepiece(listing: Listing, target: Path) -> None:
    """The tokenizer of Llama 1 and 2, which in Meta's downloads lies beside the folders of all sizes.

    That of Llama 3 has the same name, but is text of another kind, and Meta's code has its special tokens. It is left,
    so that a tokenizer is asked for.
    """
    if (target / "tokenizer.json").exists():
        return
    # Of a bucket's folder, what lies above is not known.
    above = [FolderListing(listing.folder.parent)] if isinstance(listing, FolderListing) else []
    for place in (listing, *above):
        if place.problems([_SENTENCEPIECE]):
            continue
        content = read_small(place.open(_SENTENCEPIECE), _MAX_TOKENIZER_BYTES)
        # A protocol buffer begins with the tag of its first field; Llama 3's with letters.
        if content.startswith(b"\n"):
            (target / _SENTENCEPIECE).write_bytes(content)
            if not (target / "tokenizer_config.json").exists():
                (target / "tokenizer_config.json").write_text(json.dumps(_SENTENCEPIECE_CONFIG))
        return
