"""A model with fused layers, as inference engines have them: in from the hub's names by rules alone, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from weightloaders import load_into, open_weights, plan_load, save_weights
from weightloaders.plan import CopyStep

RULES = """
convert:
  - sources: ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]
    targets: "**.qkv_proj.*"
    function: fuse_qkv
  - sources: ["**.mlp.gate_proj.*", "**.mlp.up_proj.*"]
    targets: "**.mlp.gate_up_proj.*"
    function: fuse_gate_up
  - sources: ["**.experts.{expert}.gate_proj.weight", "**.experts.{expert}.up_proj.weight"]
    targets: "**.experts.w13_weight"
    function: stack_experts
  - sources: "**.experts.{expert}.down_proj.weight"
    targets: "**.experts.w2_weight"
    function: stack_experts
"""
# Which rows of q, k and v are whose has to be known for this one, and the config tells it.
INTERLEAVED = RULES.replace("fuse_qkv", "fuse_qkv_interleaved").replace("fuse_gate_up", "fuse_gate_up_interleaved")


# ------------------------------------------------------------------ the model, with nothing of transformers in it


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.theta = config.rope_parameters["rope_theta"]
        rows = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=True)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=True)
        self.q_norm, self.k_norm = (Norm(self.size, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        counts = (self.heads, self.kv_heads, self.kv_heads)
        parts = self.qkv_proj(x).split([count * self.size for count in counts], -1)
        q, k, v = (
            part.unflatten(-1, (count, self.size)).transpose(1, 2) for part, count in zip(parts, counts, strict=True)
        )
        q, k = self._turned(self.q_norm(q)), self._turned(self.k_norm(k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2])[:, None] / self.theta ** (torch.arange(0, self.size, 2) / self.size)
        first, second = x.chunk(2, -1)
        return torch.cat([first * at.cos() - second * at.sin(), second * at.cos() + first * at.sin()], -1)


class Dense(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        count, rows, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.w13_weight = nn.Parameter(torch.empty(count, 2 * rows, hidden))
        self.w2_weight = nn.Parameter(torch.empty(count, hidden, rows))


class Sparse(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.chosen, self.normed = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x: Tensor) -> Tensor:
        weights, numbers = self.gate(x).softmax(-1).topk(self.chosen, -1)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up = torch.einsum("bth,erh->bter", x, self.experts.w13_weight).chunk(2, -1)
        out = torch.einsum("bter,ehr->bteh", F.silu(gate) * up, self.experts.w2_weight)
        return (weights[..., None] * out.gather(2, numbers[..., None].expand(*numbers.shape, x.shape[-1]))).sum(2)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = Attention(config)
        self.mlp = Dense(config) if number in config.mlp_only_layers else Sparse(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Fused(nn.Module):
    """Qwen3-MoE with a dense layer among the sparse ones, as an inference engine would have it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def config(**changes: Any) -> Qwen3MoeConfig:
    sizes = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 12,
        "num_experts_per_tok": 2, "mlp_only_layers": [1], "attention_bias": True, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3MoeConfig(**{**sizes, **changes})


@pytest.fixture
def reference(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Qwen3MoeForCausalLM, Path]:
    """A model of transformers, and the folder that it saved itself to in the hub's names."""
    changes, dtype = getattr(request, "param", ({}, torch.float32))
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config(**changes)).to(dtype).eval()
    with torch.no_grad():
        # Fresh biases and norms are all zeros and ones, so that nobody would see them mixed up.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "hub", max_shard_size="40kB")
    return model, tmp_path / "hub"


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names, shapes, dtypes and bytes."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


VARIANTS = pytest.mark.parametrize(
    "reference",
    [
        ({}, torch.float32),
        ({"tie_word_embeddings": True}, torch.float32),
        ({}, torch.bfloat16),
        ({"num_key_value_heads": 6}, torch.float32),
    ],
    ids=["grouped heads", "tied head", "bfloat16", "a key head for each query head"],
    indirect=True,
)


@VARIANTS
def test_a_fused_model_loads_by_rules_alone_and_is_written_back_as_it_was(
    reference: tuple[Qwen3MoeForCausalLM, Path], tmp_path: Path
) -> None:
    model, folder = reference
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    fused = Fused(model.config).to(model.dtype)
    plan = plan_load(fused, folder, rules=rules)
    assert all(isinstance(step, CopyStep) for step in plan.steps)
    report = load_into(fused, folder, rules=rules, progress=False)
    assert (report.missing, report.unexpected) == ([], [])

    hub, front = stored(folder), "model.layers.2."
    own = dict(fused.named_parameters(remove_duplicate=False))
    for leaf in ("weight", "bias"):
        parts = [hub[f"{front}self_attn.{part}_proj.{leaf}"] for part in "qkv"]
        assert torch.equal(own[f"{front}self_attn.qkv_proj.{leaf}"], torch.cat(parts))
    experts = range(model.config.num_experts)
    gates, ups, downs = (
        [hub[f"{front}mlp.experts.{expert}.{part}_proj.weight"] for expert in experts]
        for part in ("gate", "up", "down")
    )
    assert torch.equal(own[f"{front}mlp.experts.w13_weight"], torch.cat([torch.stack(gates), torch.stack(ups)], 1))
    assert torch.equal(own[f"{front}mlp.experts.w2_weight"], torch.stack(downs))
    assert torch.equal(
        own["model.layers.1.mlp.gate_up_proj.weight"],
        torch.cat([hub[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]),
    )
    if model.dtype == torch.float32:
        ids = torch.randint(0, 48, (2, 7))
        with torch.no_grad():
            torch.testing.assert_close(fused(ids), model(ids).logits)

    files = save_weights(fused, tmp_path / "back", layout="checkpoint", max_shard_size="40kB")
    assert len(files) > 2
    assert_same(stored(tmp_path / "back"), hub)
    # transformers reads it, too.
    model.config.save_pretrained(tmp_path / "back")
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "back", dtype=model.dtype)
    assert_same(again.state_dict(), model.state_dict())


def test_sizes_that_rules_leave_out_come_from_the_config(
    reference: tuple[Qwen3MoeForCausalLM, Path], tmp_path: Path
) -> None:
    model, folder = reference
    fused = Fused(model.config)
    load_into(fused, folder, rules=INTERLEAVED, progress=False)
    q = stored(folder)["model.layers.0.self_attn.q_proj.weight"]
    k = stored(folder)["model.layers.0.self_attn.k_proj.weight"]
    # Three query heads of eight rows, then the first key head.
    assert torch.equal(fused.model.layers[0].self_attn.qkv_proj.weight[:32], torch.cat([q[:24], k[:8]]))
    save_weights(fused, tmp_path / "back", layout="checkpoint")
    assert_same(stored(tmp_path / "back"), stored(folder))


def test_what_was_changed_in_the_model_is_what_is_written(
    reference: tuple[Qwen3MoeForCausalLM, Path], tmp_path: Path
) -> None:
    model, folder = reference
    fused = Fused(model.config)
    load_into(fused, folder, rules=RULES, progress=False)
    with torch.no_grad():
        fused.model.layers[0].mlp.experts.w13_weight[3, 24:] = 7
    # Over the very files that it was loaded from.
    save_weights(fused, folder, layout="checkpoint")
    hub = stored(folder)
    assert [name for name, tensor in hub.items() if (tensor == 7).all()] == [
        "model.layers.0.mlp.experts.3.up_proj.weight"
    ]
    load_into(model, folder, progress=False)
    assert (model.model.layers[0].mlp.experts.gate_up_proj[3, 24:] == 7).all()


def test_the_layout_of_another_checkpoint_can_be_named_and_only_its_headers_are_read(
    reference: tuple[Qwen3MoeForCausalLM, Path], tmp_path: Path
) -> None:
    model, folder = reference
    hub = {name: tensor.clone() for name, tensor in stored(folder).items()}
    fused = Fused(model.config)
    load_into(fused, folder, rules=RULES, progress=False)
    trained = Fused(model.config)
    trained.load_state_dict(fused.state_dict())
    with open_weights(folder) as weights:
        files = {extent.source.name for info in weights.infos() for extent in info.extents}
    for file in files:
        # Nothing but the header.
        with Path(file).open("r+b") as opened:
            size = int.from_bytes(opened.read(8), "little")
            whole = Path(file).stat().st_size
            opened.truncate(8 + size)
            opened.truncate(whole)
    save_weights(trained, tmp_path / "back", layout="checkpoint", like=folder, rules=RULES)
    assert_same(stored(tmp_path / "back"), hub)
