"""`tiny_tensors` and `tiny_checkpoint`: weights of a few kilobytes, the same in every run."""

from __future__ import annotations

import json
import math
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from weightloaders.weights.info import TensorInfo
from weightloaders.weights.raw import write_raw

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What a checkpoint may hold. (complex32 is experimental, and warns.)
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

_SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (5,), "matrix": (3, 4), "empty": (0, 3)}
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def sample(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Values that tell a wrong reading: for floats zeros of both signs, infinities, nan, the least and the greatest."""
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    real = _REAL_OF.get(dtype, dtype)
    numbers = count * (dtype.itemsize // real.itemsize)
    bits = torch.randint(0, 256, (numbers * real.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return (bits % 2).to(torch.bool).reshape(tuple(shape))
    values = bits.view(real)
    if real.is_floating_point and real.itemsize > 1:
        limits = torch.finfo(real)
        special = [0.0, -0.0, math.inf, -math.inf, math.nan, limits.tiny, limits.smallest_normal / 2, limits.max]
        values = torch.where(values.isfinite(), values, torch.ones((), dtype=real))
        values[: len(special)] = torch.tensor(special, dtype=real)[:numbers]
    return values.view(dtype).reshape(tuple(shape))


def tiny_tensors(dtypes: Iterable[torch.dtype] = (torch.float32,), *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A scalar, a vector, a matrix and an empty tensor of each dtype, by names such as ``"float32.matrix"``.

    Floating-point values are of all kinds: zeros of both signs, infinities, nan, the least and the greatest.

    Args:
        dtypes: Which dtypes.
        seed: Another seed gives other values.
    """
    names = {
        f"{str(dtype).removeprefix('torch.')}.{kind}": (dtype, shape)
        for dtype in dtypes
        for kind, shape in _SHAPES.items()
    }
    return {name: sample(*what, seed + zlib.crc32(name.encode())) for name, what in names.items()}


_VOCABULARY, _HIDDEN, _INNER, _HEADS, _LAYERS = 64, 16, 32, 2, 2
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}  # fmt: skip


def _llama(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)

    tensors = {"model.embed_tokens.weight": values(_VOCABULARY, _HIDDEN)}
    for i in range(_LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.self_attn.{p}_proj.weight": values(_HIDDEN, _HIDDEN) for p in "qkvo"}
        tensors |= {f"{layer}.mlp.{p}_proj.weight": values(_INNER, _HIDDEN) for p in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = values(_HIDDEN, _INNER)
        tensors |= {f"{layer}.{p}_layernorm.weight": 1 + values(_HIDDEN) for p in ("input", "post_attention")}
    tensors["model.norm.weight"] = 1 + values(_HIDDEN)
    tensors["lm_head.weight"] = values(_VOCABULARY, _HIDDEN)
    return tensors


def tiny_checkpoint(
    folder: str | Path,
    format: Literal["safetensors", "sharded", "torch", "binary"] = "safetensors",  # noqa: A002 -- the field's word
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint that a built-in loader reads: a Llama of 13,000 parameters, with its ``config.json``.

    Args:
        folder: Where to; made if absent.
        format: ``"safetensors"`` (one file), ``"sharded"`` (two safetensors files and an index), ``"torch"``
            (``pytorch_model.bin``) or ``"binary"`` (``model.bin`` and ``meta.txt``).
        tensors: Other tensors than the Llama's; then there is no ``config.json``.
        seed: Another seed gives another Llama.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        _write_json(folder / "config.json", _CONFIG)
        tensors = _llama(seed)
    # Memory of its own for each, which safetensors wants.
    held = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if format == "safetensors":
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    elif format == "sharded":
        names = list(held)
        half = (len(names) + 1) // 2
        shards = {f"model-0000{i}-of-00002.safetensors": part for i, part in ((1, names[:half]), (2, names[half:]))}
        for file, part in shards.items():
            save_file({name: held[name] for name in part}, folder / file, {"format": "pt"})
        places = {name: file for file, part in shards.items() for name in part}
        total = sum(tensor.nbytes for tensor in held.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    elif format == "torch":
        torch.save(held, folder / "pytorch_model.bin")
    elif format == "binary":
        infos = [
            TensorInfo(name, t.dtype, tuple(t.shape), read=partial(held.__getitem__, name)) for name, t in held.items()
        ]
        write_raw(folder, infos, held.__getitem__)
    else:
        raise ValueError(f"format is 'safetensors', 'sharded', 'torch' or 'binary', not {format!r}")
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
