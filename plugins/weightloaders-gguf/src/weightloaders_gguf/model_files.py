"""A model's config and tokenizer, as a GGUF file describes them, written as the files that transformers reads.

transformers has the rules: which property is which field of a config, and how a vocabulary becomes a tokenizer. They
are taken from there, while the header is the one that was read here: transformers' own readers take seconds for it, and
read neither split nor big-endian files. The tests hold what comes out against transformers' own.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightloaders.errors import ModelError, WeightLoadersError
from weightloaders_gguf.header import Array
from weightloaders_gguf.names import split

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightloaders_gguf.header import Header, StoredTensor

#: The file of a tokenizer.
TOKENIZER = "tokenizer.json"

# Where transformers' name for an architecture is not llama.cpp's.
_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
# Each layer's text alone; the other parts of these models come in files of their own.
_TEXT_ALONE = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
_ALWAYS_TIED = ("falcon", "bloom")
# What transformers' table leaves at its default, though the file says it.
_EXPERT_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_LAYERS, _AHEAD = "block_count", "nextn_predict_layers"
# Each is a size of a tensor, or divides one; that of a feed-forward network is stated where all of it are experts, too.
_SIZES = (
    "vocab_size", "embedding_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.relative_buckets_count", "rope.dimension_count",
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "shortconv.l_cache",
)  # fmt: skip
_ROOM = "set TMPDIR to a folder that has room, or give config=... and tokenizer=... of the model"
_HINT = "give config=<folder or config object>, or tokenizer=..., of the model that the file was made from"


def write_config(headers: Sequence[Header], folder: Path) -> None:
    """Write ``config.json``.

    Args:
        headers: Those of all files of the model.
        folder: Where to.

    Raises:
        ModelError: If transformers knows no such architecture, or the file does not say what its config needs.
        OSError: If it can't be written.
    """
    header, tensors = headers[0], [tensor for header in headers for tensor in header.tensors]
    names = tuple(tensor.name for tensor in tensors)
    architecture = header.architecture
    if not architecture:
        raise ModelError(f"{header.file} does not say what kind of model it is", file=header.file, hint=_HINT)
    _check_counts(header, tensors)
    with _in_our_words(f"{header.file} does not say what transformers needs for its config", header):
        builder = _newer().get(architecture)
        config = _legacy(header, names) if builder is None else builder(_counted(header.metadata), names)
        made = _as_config(config, header)
        content = made.to_dict()
    content["architectures"] = config.get("architectures") or [_model_class(made.model_type, header)]
    content["dtype"] = _dtype({tensor.type.name for tensor in tensors})
    content.pop("_model_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")


@contextlib.contextmanager
def room_for_files_of(header: Header) -> Iterator[None]:
    """What can't be written while this holds is a `weightloaders.errors.ModelError`."""
    with _in_our_words(f"can't write the config and tokenizer of {header.file} to a temporary folder", header, _ROOM):
        yield


@contextlib.contextmanager
def _in_our_words(what: str, header: Header, hint: str = _HINT) -> Iterator[None]:
    """An error that says what it was about, whatever the many parts of transformers and tokenizers raise."""
    try:
        yield
    except WeightLoadersError:
        raise
    except BaseException as error:
        # A panic of tokenizers is none, though it is an error like others.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {type(error).__name__}: {error}", file=header.file, hint=hint) from error


def _check_counts(header: Header, tensors: Sequence[StoredTensor]) -> None:
    """Hold what is said of layers and sizes against the tensors, before anything is made as large as that."""
    layers = len({layer for tensor in tensors if (layer := split(tensor.name)[1]) is not None})
    largest = max((size for tensor in tensors for size in tensor.shape), default=0)
    # Some count the layers that predict several tokens at once, but leave them out.
    ahead = min(layers, _largest(header, _AHEAD))
    most = dict.fromkeys(_SIZES, (largest, f"no tensor has a size above {largest:,}"))
    most |= {_LAYERS: (layers + ahead, f"it has tensors of {layers:,}"), _AHEAD: (layers, f"it has {layers:,} layers")}
    if any(tensor.name == "position_embd.weight" for tensor in tensors):
        most["context_length"] = most["vocab_size"]
    for key, (limit, what) in most.items():
        found = _largest(header, key)
        if found > limit:
            raise ModelError(
                f"{header.file} says {header.architecture}.{key}: {found:,}, but {what}", file=header.file, hint=_HINT
            )


def _largest(header: Header, key: str) -> int:
    """A number, or the largest that a layer has; what is no number at all is left to transformers."""
    value = header.metadata.get(f"{header.architecture}.{key}")
    values = value if isinstance(value, Array) and not value.is_text else [value]
    return max((found for found in values if isinstance(found, int)), default=0)


def _newer() -> Mapping[str, Any]:
    """Builders of configs, from the versions of transformers that have them."""
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    except ImportError:
        return {}
    found: Mapping[str, Any] = GGUF_CONFIG_ARCHS
    return found


def _counted(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers' newer reader has them: of an array of texts only the length."""
    return {
        key: value if not isinstance(value, Array) else (len(value) if value.is_text else list(value))
        for key, value in metadata.items()
    }


def _legacy(header: Header, names: tuple[str, ...]) -> dict[str, Any]:
    """What ``load_gguf_checkpoint`` makes of a header (transformers, ``modeling_gguf_pytorch_utils``)."""
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    stated = header.architecture
    config: dict[str, Any] = {}
    title = header.metadata.get("general.name")
    called = _RENAMED.get(stated, stated)
    if stated in ("t5", "t5encoder"):
        called = "umt5" if isinstance(title, str) and "umt5" in title.lower() else "t5"
        config["is_gated_act"] = True
        if stated == "t5encoder":
            config["architectures"] = ["UMT5EncoderModel" if called == "umt5" else "T5EncoderModel"]
    elif stated == "llama" and title == "mistral":
        called = "mistral"
    elif stated == "stablelm":
        config["use_qkv_bias"] = any(f"attn_{x}.bias" in name for name in names for x in "qkv")
        config["use_parallel_residual"] = not any("ffn_norm" in name for name in names)
    if called not in GGUF_CONFIG_MAPPING:
        known = sorted({*GGUF_CONFIG_MAPPING, *_newer()} - {"general", "tokenizer"})
        raise ModelError(
            f"transformers can't build a config for the architecture {stated!r} of {header.file}; it can for "
            f"{', '.join(known)}",
            file=header.file,
            hint=_HINT,
        )
    config["tie_word_embeddings"] = "output.weight" not in names or stated in _ALWAYS_TIED
    config |= GGUF_CONFIG_DEFAULTS_MAPPING.get(called, {})
    for key, value in _single(header.metadata).items():
        prefix, _, rest = key.partition(".")
        field = GGUF_CONFIG_MAPPING.get(called if prefix == stated else prefix, {}).get(rest)
        if prefix == stated and rest in _EXPERT_WIDTHS and called in ("qwen2_moe", "qwen3_moe"):
            field = _EXPERT_WIDTHS[rest]
        if field is not None and field != -1:
            config[field] = value
    config["model_type"] = _TEXT_ALONE.get(called, called)
    if "vocab_size" not in config and "tokenizer.ggml.tokens" in header.metadata:
        config["vocab_size"] = len(header.metadata["tokenizer.ggml.tokens"])
    return _finished(config, called, header)


def _finished(config: dict[str, Any], called: str, header: Header) -> dict[str, Any]:
    if called == "gemma4":
        # The three tokens that end a turn, of which the file states one.
        config["eos_token_id"] = [1, 106, 50]
    elif called == "minimax_m2" and isinstance(config.get("scoring_func"), int):
        functions = {0: "none", 1: "softmax", 2: "sigmoid"}
        config["scoring_func"] = functions.get(config["scoring_func"], "softmax")
    elif called == "gpt_oss":
        key = f"{header.architecture}.rope.scaling."
        scaling = {name.removeprefix(key): value for name, value in header.metadata.items() if name.startswith(key)}
        renamed = {"type": "rope_type", "original_context_length": "original_max_position_embeddings"}
        if "type" in scaling:
            config["rope_scaling"] = {renamed.get(name, name): value for name, value in scaling.items()}
    return config


def _single(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The properties, an array of one as its value; vocabularies are left out, being no part of a config."""
    found = {}
    for key, value in metadata.items():
        if not isinstance(value, Array):
            found[key] = value
        elif not value.is_text:
            found[key] = value[0] if len(value) == 1 else list(value)
    return found


def _as_config(config: Mapping[str, Any], header: Header) -> Any:
    from transformers import CONFIG_MAPPING

    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers has no model of the kind {kind!r}, which {header.file} is", file=header.file, hint=_HINT
        )
    return CONFIG_MAPPING[kind].from_dict(dict(config))


def _model_class(kind: str, header: Header) -> str:
    from transformers.models.auto import modeling_auto

    for table in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
        found = getattr(modeling_auto, table).get(kind)
        if found is not None:
            return str(found if isinstance(found, str) else found[0])
    raise ModelError(f"transformers has no language model of the kind {kind!r}", file=header.file, hint=_HINT)


def _dtype(types: set[str]) -> str:
    """The dtype of a file of plain numbers; codes stand for float32."""
    # Norms are float32 in any file, so what is narrower is the model's.
    if types <= {"F32", "F16", "BF16"}:
        for name, dtype in (("BF16", "bfloat16"), ("F16", "float16")):
            if name in types:
                return dtype
    return "float32"


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write ``tokenizer.json`` and what belongs to it; nothing, if the file has no tokenizer.

    Args:
        header: That of the model's first file.
        folder: Where to.

    Raises:
        ModelError: If transformers can't build such a tokenizer.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Array) or not tokens.is_text:
        return
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    described = {
        group: {
            name: _plain(header.metadata[f"tokenizer.{key}"])
            for key, name in keys.items()
            if f"tokenizer.{key}" in header.metadata
        }
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    tokenizer, options = described["tokenizer"], described["tokenizer_config"]
    kind = tokenizer.get("tokenizer_type")
    if kind == "llama":
        # llama.cpp adds the token to a sentencepiece vocabulary that does not say otherwise.
        options.setdefault("add_bos_token", True)
    elif kind == "gemma4":
        # The chat template writes it itself.
        options["add_bos_token"] = False
    for name, key in _SPECIAL_TOKENS.items():
        index = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        options[f"{name}_token"] = _token(header, tokens, f"{key}_token_id", index)
    with _in_our_words(f"transformers can't build the tokenizer of {header.file}", header):
        backend, more = convert_gguf_tokenizer(header.architecture, tokenizer)
        made = PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
    with room_for_files_of(header), tempfile.TemporaryDirectory(dir=folder) as draft:
        made.save_pretrained(draft)
        # That one last: where it is, all of them are.
        for file in sorted(Path(draft).iterdir(), key=lambda file: file.name == TOKENIZER):
            file.replace(folder / file.name)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Array) else value


def _token(header: Header, tokens: Sequence[str], key: str, index: Any) -> str | None:
    if index is None:
        return None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelError(
            f"{header.file} says that {key} is {index!r}, of {len(tokens)} tokens", file=header.file, hint=_HINT
        )
    return tokens[index]
