"""Small checkpoints that vLLM loads, and ways to damage them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from demo.prepare import SMOLLM2, write_once, write_smollm2
from weightloaders import BaseWeightLoader

if TYPE_CHECKING:
    from pathlib import Path

LAYER = "model.layers.1"
PROMPTS = ["The capital of France is", "Water boils at"]


def engine(folder, **options):
    """vLLM's engine, made small."""
    import vllm

    options = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "max_num_seqs": 4, **options}
    return vllm.LLM(model=str(folder), **options)


def tiny_checkpoint(folder: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """A random Llama with SmolLM2's tokenizer, in one file."""
    if folder.is_dir():
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM

    write_once(SMOLLM2, write_smollm2)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied, torch_dtype="bfloat16",
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMOLLM2 / name, folder)
    return folder


def change(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(*names):
    def change(tensors):
        for name in names:
            del tensors[f"model.{name}"]

    return change


class OneByOne(BaseWeightLoader):
    """Yields the tensors of one file; and only of the file that is there now does anybody know what is in it."""

    def get_weights(self, model_name_or_path):
        with safe_open(f"{model_name_or_path}/model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                yield name, file.get_tensor(name)


# ------------------------------------------------------------------ quantised


def _int8(name, weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def _float8(name, weight):
    scale = weight.float().abs().max() / 448
    return {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


_GROUP = 32


def _packed(values, dim):
    """Eight numbers of four bits in each int32."""
    size = values.shape[dim] // 8
    groups = values.unflatten(dim, (size, 8)).movedim(dim + 1, -1).long()
    return (groups << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def _four_bits(weight):
    out, into = weight.shape
    scales = weight.float().reshape(out, -1, _GROUP).abs().amax(-1).t().contiguous() / 7
    values = (weight.t() / scales.repeat_interleave(_GROUP, 0)).round().clamp(-8, 7) + 8
    return values, scales.to(torch.bfloat16), torch.full((into // _GROUP, out), 8)


def _gptq(name, weight):
    values, scales, zeros = _four_bits(weight)
    return {
        f"{name}.qweight": _packed(values, 0), f"{name}.scales": scales, f"{name}.qzeros": _packed(zeros - 1, 1),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // _GROUP).to(torch.int32),
    }  # fmt: skip


def _awq(name, weight):
    values, scales, zeros = _four_bits(weight)
    return {f"{name}.qweight": _packed(values, 1), f"{name}.scales": scales, f"{name}.qzeros": _packed(zeros, 1)}


QUANTISED = {
    "int8": (_int8, {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }},
    }),
    "float8": (_float8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True}),
}  # fmt: skip


def quantised_checkpoint(folder: Path, kind: str, without: str | None = None) -> Path:
    """The tiny checkpoint with its linear layers quantised, and perhaps without one of its tensors."""
    quantise, config = QUANTISED[kind]
    tiny_checkpoint(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors.update(quantise(name.removesuffix(".weight"), tensor) if "_proj" in name else {name: tensor})
    if without is not None:
        del tensors[without]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_config, "quantization_config": config}))
    return folder
