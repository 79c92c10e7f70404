"""A model's config from Meta's ``params.json``, written as the file that transformers reads, with the tokenizer.

``params.json`` leaves out what Meta's code has as constants, or takes from the tokenizer. Sizes are taken from the
weights; the rest as transformers' ``convert_llama_weights_to_hf.py`` has it for the version that the file speaks of.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

from weightloaders.errors import ModelError, WeightLoadersError
from weightloaders_meta.loader import PARAMS_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import weightloaders as wl

_MAX_BYTES = 1 << 20
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


def write_model_files(folder: Path, weights: wl.Weights, target: Path, positions: int | None) -> None:
    """Write ``config.json``, and the tokenizer's files where transformers can read them.

    Args:
        folder: Meta's.
        weights: What lies in it.
        target: Where to.
        positions: How many positions the model has, if not what its version has.

    Raises:
        ModelError: If ``params.json`` is not that of a Llama, or does not go with the weights.
    """
    path = folder / PARAMS_FILE
    params = _read(path)
    try:
        config = _config(params, weights, positions)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, WeightLoadersError):
            raise
        raise ModelError(
            f"{path} does not say what a Llama's config needs: {type(error).__name__}: {error}", file=path, hint=_HINT
        ) from error
    config.save_pretrained(target)
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    _write_sentencepiece(folder, target)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            params = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {error}", file=path, hint=_HINT) from error
    if not isinstance(params, dict):
        raise ModelError(f"{path} holds no sizes of a model", file=path, hint=_HINT)
    foreign = [key for key in _FOREIGN if params.get(key)]
    if foreign:
        raise ModelError(f"{path} is not that of a dense Llama: it has {', '.join(foreign)}", file=path, hint=_HINT)
    return params


def _config(params: Mapping[str, Any], weights: wl.Weights, positions: int | None) -> Any:
    from transformers import LlamaConfig, MistralConfig

    strange = next((name for name in weights if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise ModelError(f"there is {strange!r} among the weights, which a Llama does not have", hint=_HINT)
    vocabulary, width = weights.info("tok_embeddings.weight").shape
    heads = _size(params, "n_heads")
    head_dim = _size(params, "head_dim") if params.get("head_dim") else width // heads
    kv_heads = _size(params, "n_kv_heads") if params.get("n_kv_heads") else heads
    if width != _size(params, "dim") or weights.info("layers.0.attention.wq.weight").shape[0] != heads * head_dim:
        raise ModelError(
            f"{PARAMS_FILE} says {params['dim']} wide with {heads} heads, which the weights are not: they are "
            f"{width} wide", hint="it belongs to another model",
        )  # fmt: skip
    layers = 1 + max(int(match["layer"]) for match in map(_NAME.fullmatch, weights) if match and match["layer"])
    scaled = bool(params.get("use_scaled_rope"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(params.get("rope_theta", 10000.0))}
    if scaled:
        factor = params.get("rope_scaling_factor") or (32.0 if width in _SMALL else 8.0)
        rope |= {"rope_type": "llama3", "factor": float(factor), **_SCALING}
    eps = float(params["norm_eps"])
    is_llama_3 = vocabulary >= _LLAMA_3_VOCABULARY
    usual = 131072 if scaled else 8192 if is_llama_3 else 2048 if eps <= _LLAMA_1_EPS else 4096
    window = params.get("sliding_window")
    kind, name = (MistralConfig, "MistralForCausalLM") if window else (LlamaConfig, "LlamaForCausalLM")
    return kind(
        architectures=[name],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=weights.info("layers.0.feed_forward.w1.weight").shape[0],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions or params.get("max_seq_len") or usual,
        rms_norm_eps=eps,
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in weights,
        bos_token_id=128000 if is_llama_3 else 1,
        # The end of a text, of a message to a tool, and of a turn.
        eos_token_id=[128001, 128008, 128009] if is_llama_3 else 2,
        dtype=str(weights.info("tok_embeddings.weight").dtype).removeprefix("torch."),
        **({"sliding_window": window} if window else {}),
    )


def _size(params: Mapping[str, Any], name: str) -> int:
    value = params[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ValueError(f"{name} is {value!r}, not a size")
    return value


def _write_sentencepiece(folder: Path, target: Path) -> None:
    """The tokenizer of Llama 1 and 2, which in Meta's downloads lies beside the folders of all sizes.

    That of Llama 3 has the same name, but is text of another kind, and Meta's code has its special tokens. It is left,
    so that a tokenizer is asked for.
    """
    if (target / "tokenizer.json").exists():
        return
    for place in (folder, folder.parent):
        model = place / "tokenizer.model"
        if not model.is_file():
            continue
        with model.open("rb") as file:
            # A protocol buffer begins with the tag of its first field; Llama 3's with letters.
            is_sentencepiece = file.read(1) == b"\n"
        if is_sentencepiece:
            shutil.copyfile(model, target / model.name)
            if not (target / "tokenizer_config.json").exists():
                (target / "tokenizer_config.json").write_text(json.dumps(_SENTENCEPIECE_CONFIG))
        return
