"""Checkpoints with something wrong: each way to spoil a folder that transformers has written, by name.

`refusals.py` measures how they are refused, and the tests hold what is said of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
EMBED = "model.embed_tokens.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"


def write_model(folder: Path, kind: str, *, scale: int = 1, layers: int = 2, vocab_size: int = 64) -> None:
    """A ``llama`` or a ``mixtral`` with random weights in bfloat16, in shards with an index, as transformers writes it.

    Args:
        folder: Where.
        kind: Which.
        scale: What its width is multiplied by.
        layers: How many.
        vocab_size: Of how many tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 16 * scale, "intermediate_size": 32 * scale,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    model = model.to(torch.bfloat16)
    nbytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=nbytes // 2)


def shards(folder: Path) -> list[Path]:
    """The files of tensors."""
    return sorted(folder.glob("*.safetensors"))


def file_of(folder: Path, name: str) -> Path:
    """The file that the index names for a tensor."""
    return folder / str(read_index(folder)[name])


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file."""
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def change_index(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Write the index anew."""
    data = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**data, "weight_map": change(data["weight_map"])}))


def change_tensors(folder: Path, file: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Write a file of tensors anew, and the index with it."""
    tensors = change(load_file(file))
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, {"format": "pt"})
    others = {name: where for name, where in read_index(folder).items() if where != file.name}
    change_index(folder, lambda _: {**others, **dict.fromkeys(tensors, file.name)})


def change_header(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the header of a file of tensors anew, and leave its data as it is."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def _without(*names: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for name in names:
            change_tensors(
                folder, file_of(folder, name), lambda t, name=name: {k: v for k, v in t.items() if k != name}
            )  # type: ignore[misc]

    return spoil


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        change_tensors(folder, file_of(folder, name), lambda t: {**t, name: change(t[name])})

    return spoil


def _renamed(old: str, new: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        change_tensors(folder, file_of(folder, old), lambda t: {new if k == old else k: v for k, v in t.items()})

    return spoil


def _layer_without_linears(folder: Path) -> None:
    names = [name for name in read_index(folder) if name.startswith("model.layers.1.") and "_proj" in name]
    _without(*names)(folder)


def _layer_without_experts(folder: Path) -> None:
    _without(*(name for name in read_index(folder) if "layers.1.block_sparse_moe.experts" in name))(folder)


def _all_renamed(folder: Path) -> None:
    for file in shards(folder):
        change_tensors(folder, file, lambda t: {f"backbone.{k.removeprefix('model.')}": v for k, v in t.items()})


def _index_without_a_shard(folder: Path) -> None:
    last = shards(folder)[-1].name
    change_index(folder, lambda names: {name: file for name, file in names.items() if file != last})


def _index_names_the_wrong_files(folder: Path) -> None:
    first, *_, last = (file.name for file in shards(folder))
    change_index(folder, lambda names: {name: first if file == last else file for name, file in names.items()})


def _shard_absent(folder: Path) -> None:
    shards(folder)[-1].unlink()


def _truncated(folder: Path) -> None:
    file = shards(folder)[-1]
    file.write_bytes(file.read_bytes()[:-100])


def _header_damaged(folder: Path) -> None:
    with shards(folder)[0].open("r+b") as file:
        file.seek(40)
        file.write(b"\x00\xff\x00\xff")


def _header_length_wrong(folder: Path) -> None:
    with shards(folder)[0].open("r+b") as file:
        file.write((1 << 40).to_bytes(8, "little"))


def _offsets_overlap(folder: Path) -> None:
    file = file_of(folder, Q_PROJ)
    change_header(file, lambda h: {**h, O_PROJ: {**h[O_PROJ], "data_offsets": h[Q_PROJ]["data_offsets"]}})


def _pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    shards(folder)[0].write_text(text)


def _two_versions(folder: Path) -> None:
    """The same tensor in two files, with other values, and no index."""
    first, *_, last = shards(folder)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: tensor + 1}, last, {"format": "pt"})
    (folder / INDEX).unlink()


LLAMA: dict[str, Callable[[Path], None]] = {
    "an o_proj is missing": _without(O_PROJ),
    "a k_proj is missing": _without(K_PROJ),
    "all linear layers of a layer are missing": _layer_without_linears,
    "embed_tokens is missing": _without(EMBED),
    "all names have another prefix": _all_renamed,
    "a q_proj is twice as large": _with(Q_PROJ, lambda t: torch.cat([t, t])),
    "a k_proj is of another shape": _with(K_PROJ, lambda t: t[:-1]),
    "the vocabulary is smaller": _with(EMBED, lambda t: t[:-4]),
    "an o_proj holds integers": _with(O_PROJ, lambda t: t.to(torch.int8)),
    "the index omits a shard": _index_without_a_shard,
    "the index names the wrong files": _index_names_the_wrong_files,
    "a shard is absent": _shard_absent,
    "a shard is truncated": _truncated,
    "a header is damaged": _header_damaged,
    "a header claims to be a terabyte long": _header_length_wrong,
    "two tensors have one place": _offsets_overlap,
    "a shard is a Git LFS pointer": _pointer,
    "two files differ in one tensor": _two_versions,
}
MIXTRAL: dict[str, Callable[[Path], None]] = {
    "an expert's w1 is missing": _without(EXPERT),
    "expert 3 is called 7": _renamed(EXPERT, EXPERT.replace("experts.3", "experts.7")),
    "an expert's w1 is of another shape": _with(EXPERT, lambda t: t[:-1]),
    "an expert's w1 holds integers": _with(EXPERT, lambda t: t.to(torch.int8)),
    "a layer's experts are missing": _layer_without_experts,
    "a router is missing": _without(ROUTER),
}
