"""What is loaded: the shapes of models, what lies in their checkpoints, and where each stored tensor belongs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Shape = tuple[int, ...]

# Below this many bytes, a model has narrow widths rather than one layer.
_TINY = 16 << 20


@dataclass(frozen=True)
class Made:
    """A parameter, and how plain torch code makes it of what is stored: the reference that every way is held against.

    Attributes:
        shape: The parameter's.
        sources: Names of stored tensors.
        function: Takes these, in that order.
    """

    shape: Shape
    sources: tuple[str, ...]
    function: Callable[[list[torch.Tensor]], torch.Tensor] = lambda tensors: tensors[0]


@dataclass(frozen=True)
class Part:
    """Where a stored tensor belongs: what the peers, which have no rules, copy it into.

    Attributes:
        parameter: The parameter.
        view: The part of it that the tensor fills, of the tensor's shape.
    """

    parameter: str
    view: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter


@dataclass
class Layout:
    """A checkpoint and the model that it goes into.

    Attributes:
        stored: Stored tensors, in the order in which they lie in the files.
        parameters: The model's.
        parts: Stored tensor -> where it belongs.
        rules: The same as rules of weightloaders; None where the names are the model's own.
        config: A config of transformers with which its own ``from_pretrained`` loads this checkpoint, if there is one.
    """

    stored: dict[str, Shape] = field(default_factory=dict)
    parameters: dict[str, Made] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    rules: Any = None
    config: dict[str, Any] | None = None

    @property
    def same_names(self) -> bool:
        """Whether each stored tensor is a parameter."""
        return self.rules is None

    def keep(self, name: str, *shape: int) -> None:
        """A parameter that is stored as it is."""
        self.stored[name] = shape
        self.parameters[name] = Made(shape, (name,))
        self.parts[name] = Part(name)

    def turn(self, name: str, rows: int, columns: int) -> None:
        """A parameter that is stored transposed."""
        self.stored[name] = (rows, columns)
        self.parameters[name] = Made((columns, rows), (name,), lambda tensors: tensors[0].t().contiguous())
        self.parts[name] = Part(name, lambda parameter: parameter.t())

    def fuse(self, target: str, sources: Sequence[str], rows: Sequence[int], columns: int) -> None:
        """A parameter that is stored in several tensors, one below the other."""
        self.parameters[target] = Made((sum(rows), columns), tuple(sources), torch.cat)
        start = 0
        for name, count in zip(sources, rows, strict=True):
            self.stored[name] = (count, columns)
            self.parts[name] = Part(target, _rows(start, count))
            start += count

    def stack_experts(self, prefix: str, experts: int, inner: int, hidden: int) -> None:
        """Gate, up and down of each expert, which the model has stacked, gate and up fused."""
        names = {part: [f"{prefix}.{e}.{part}_proj.weight" for e in range(experts)] for part in ("gate", "up", "down")}
        for expert in range(experts):
            for part in ("gate", "up", "down"):
                self.stored[names[part][expert]] = (hidden, inner) if part == "down" else (inner, hidden)
            for part, start in (("gate", 0), ("up", inner)):
                self.parts[names[part][expert]] = Part(f"{prefix}.gate_up_proj", _rows_of(expert, start, inner))
            self.parts[names["down"][expert]] = Part(f"{prefix}.down_proj", _rows_of(expert, 0, hidden))
        self.parameters[f"{prefix}.gate_up_proj"] = Made(
            (experts, 2 * inner, hidden),
            (*names["gate"], *names["up"]),
            lambda t: torch.cat([torch.stack(t[:experts]), torch.stack(t[experts:])], dim=1),
        )
        self.parameters[f"{prefix}.down_proj"] = Made((experts, hidden, inner), tuple(names["down"]), torch.stack)

    def fitting(self, nbytes: int, dtype: torch.dtype, add: Callable[[int], None]) -> int:
        """Add layers, at least one, as long as there is room; returns how many."""
        rest = _elements(self.stored.values())
        add(0)
        layer = _elements(self.stored.values()) - rest  # all are of one size
        count = max(1, int((nbytes / dtype.itemsize - rest) / layer))
        for number in range(1, count):
            add(number)
        return count


def _elements(shapes: Iterable[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _rows(start: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: parameter.narrow(0, start, count)


def _rows_of(expert: int, start: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: parameter[expert].narrow(0, start, count)


# ------------------------------------------------------------------ models


def llama(nbytes: int, dtype: torch.dtype, *, fused: bool = False, whole: bool = True) -> Layout:
    """Llama's names and the widths of a model of a billion parameters, of as many layers as fit.

    Args:
        nbytes: Size of the checkpoint.
        dtype: What it is stored in.
        fused: Whether the model has q, k and v in one parameter, and gate and up.
        whole: Whether it has the embedding and the head, which are large.
    """
    from weightloaders import Convert

    small = nbytes < _TINY
    hidden, inner, kv, vocab = (64, 160, 16, 256) if small else (2048, 8192, 512, 32768)
    layout = Layout()

    def layer(number: int) -> None:
        start = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            layout.keep(f"{start}{name}.weight", hidden)
        attention = [f"{start}self_attn.{part}_proj.weight" for part in "qkv"]
        mlp = [f"{start}mlp.{part}_proj.weight" for part in ("gate", "up")]
        if fused:
            layout.fuse(f"{start}self_attn.qkv_proj.weight", attention, [hidden, kv, kv], hidden)
            layout.fuse(f"{start}mlp.gate_up_proj.weight", mlp, [inner, inner], hidden)
        else:
            for name, rows in zip((*attention, *mlp), (hidden, kv, kv, inner, inner), strict=True):
                layout.keep(name, rows, hidden)
        layout.keep(f"{start}self_attn.o_proj.weight", hidden, hidden)
        layout.keep(f"{start}mlp.down_proj.weight", hidden, inner)

    if whole:
        layout.keep("model.embed_tokens.weight", vocab, hidden)
        layout.keep("lm_head.weight", vocab, hidden)
        layout.keep("model.norm.weight", hidden)
    layers = layout.fitting(nbytes, dtype, layer)
    if fused:
        part = "model.layers.*.{block}.{name}_proj.weight"
        layout.rules = [
            Convert([part.format(block="self_attn", name=name) for name in "qkv"],
                    part.format(block="self_attn", name="qkv"), "fuse_qkv"),
            Convert([part.format(block="mlp", name=name) for name in ("gate", "up")],
                    part.format(block="mlp", name="gate_up"), "fuse_gate_up"),
        ]  # fmt: skip
    elif whole:
        head = 16 if small else 64
        layout.config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // head,
            "num_key_value_heads": kv // head, "head_dim": head, "vocab_size": vocab, "tie_word_embeddings": False,
        }  # fmt: skip
    return layout


def experts(nbytes: int, dtype: torch.dtype) -> Layout:
    """Qwen3-MoE: 128 experts a layer, stored one by one, which the model has stacked in three dimensions."""
    from weightloaders import Convert

    small = nbytes < _TINY
    hidden, inner, count, kv, vocab = (64, 32, 8, 32, 256) if small else (1024, 384, 128, 256, 8192)
    head = 16 if small else 128
    layout = Layout()

    def layer(number: int) -> None:
        start = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            layout.keep(f"{start}{name}.weight", hidden)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            layout.keep(f"{start}self_attn.{name}_proj.weight", rows, hidden)
        for name in "qk":
            layout.keep(f"{start}self_attn.{name}_norm.weight", head)
        layout.keep(f"{start}mlp.gate.weight", count, hidden)
        layout.stack_experts(f"{start}mlp.experts", count, inner, hidden)

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        layout.keep(name, vocab, hidden)
    layout.keep("model.norm.weight", hidden)
    layers = layout.fitting(nbytes, dtype, layer)
    prefix = "model.layers.{l}.mlp.experts"
    one = prefix + ".{e}.%s_proj.weight"
    layout.rules = [
        Convert([one % "gate", one % "up"], f"{prefix}.gate_up_proj", "stack_experts"),
        Convert(one % "down", f"{prefix}.down_proj", "stack_experts"),
    ]
    layout.config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "moe_intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": hidden // head, "num_key_value_heads": kv // head, "head_dim": head,
        "num_experts": count, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": vocab, "tie_word_embeddings": False,
    }  # fmt: skip
    return layout


def gpt2(nbytes: int, dtype: torch.dtype) -> Layout:
    """GPT-2's layers, of the widths of XL, stored as its Conv1D has them, into ordinary linear layers."""
    from weightloaders import Convert

    hidden = 64 if nbytes < _TINY else 1600
    layout = Layout()
    linears = {
        "attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1),
    }  # fmt: skip

    def layer(number: int) -> None:
        start = f"transformer.h.{number}."
        for name in ("ln_1", "ln_2"):
            layout.keep(f"{start}{name}.weight", hidden)
            layout.keep(f"{start}{name}.bias", hidden)
        for name, (rows, columns) in linears.items():
            layout.turn(f"{start}{name}.weight", rows * hidden, columns * hidden)
            layout.keep(f"{start}{name}.bias", columns * hidden)

    layout.fitting(nbytes, dtype, layer)
    names = [f"transformer.h.*.{name}.weight" for name in linears]
    layout.rules = [Convert(name, name, "transpose") for name in names]
    return layout


def many_small(nbytes: int, dtype: torch.dtype) -> Layout:
    """Tensors of 4 KiB."""
    layout = Layout()
    values = 4096 // dtype.itemsize
    layout.fitting(nbytes, dtype, lambda i: layout.keep(f"blocks.{i // 100}.parts.{i % 100}.weight", values))
    return layout


def few_huge(nbytes: int, dtype: torch.dtype) -> Layout:
    """Three tensors that have all the bytes."""
    layout = Layout()
    for name in ("tables.0.weight", "tables.1.weight", "tables.2.weight"):
        layout.keep(name, nbytes // 3 // dtype.itemsize // 1024, 1024)
    return layout


# ------------------------------------------------------------------ workloads


@dataclass(frozen=True)
class Workload:
    """A model, what it is stored in, and how large.

    Attributes:
        name: For options and files.
        title: For tables.
        layout: Makes the layout, given a size in bytes and the stored dtype.
        stored: The checkpoint's dtype.
        wanted: The parameters' dtype.
        gigabytes: Size of the checkpoint, times the option ``--scale``.
        shards: Number of files.
    """

    name: str
    title: str
    layout: Callable[[int, torch.dtype], Layout]
    stored: torch.dtype = torch.bfloat16
    wanted: torch.dtype = torch.bfloat16
    gigabytes: float = 1.5
    shards: int = 4

    def sized(self, scale: float) -> Layout:
        """The layout at a size."""
        return self.layout(int(self.gigabytes * scale * 1e9), self.stored)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("dense", "dense, bf16", llama),
        Workload("fused", "dense, bf16, into fused parameters", lambda n, d: llama(n, d, fused=True)),
        Workload("experts", "128 experts a layer, bf16, stacked", experts),
        Workload("f32", "float32 into bf16", llama, torch.float32),
        Workload("f16", "float16 into bf16", llama, torch.float16, gigabytes=1.0),
        Workload("transposed", "GPT-2, transposed, float32", gpt2, torch.float32, torch.float32, 1.0),
        Workload("raw", "raw float32 binary", lambda n, d: llama(n, d, whole=False),
                 torch.float32, torch.float32, 0.25, 1),
        Workload("small", "20,000 tensors of 4 KiB", many_small, gigabytes=0.08192, shards=1),
        Workload("huge", "three huge tensors, bf16", few_huge, shards=3),
        Workload("shards", "dense, bf16, in 64 files", llama, shards=64),
    )
}  # fmt: skip


def build(layout: Layout, dtype: torch.dtype) -> nn.Module:
    """The model, on meta."""
    root = nn.Module()
    for name, made in layout.parameters.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:  # noqa: SLF001 -- quicker than hasattr for 20,000
                module.add_module(part, nn.Module())
            module = module._modules[part]  # noqa: SLF001 -- as above
        module.register_parameter(leaf, nn.Parameter(torch.empty(made.shape, dtype=dtype, device="meta")))
    return root
