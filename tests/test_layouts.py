"""Ready-made layouts, each against a formula of its own, element by element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders import Convert, plan_load
from weightloaders.mapping import layouts
from weightloaders.mapping.layouts import LAYOUTS, sizes_from_config
from weightloaders.mapping.symbolic import SymbolicTensor, Untraceable

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 6, 2, 4, 3
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
REST = [(), (HIDDEN,), (HIDDEN, 2)]


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def projections(rest: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = counted(HEADS * HEAD_DIM, *rest)
    k = counted(KV_HEADS * HEAD_DIM, *rest, start=1000)
    v = counted(KV_HEADS * HEAD_DIM, *rest, start=2000)
    return q, k, v


@pytest.mark.parametrize("rest", REST)
def test_qkv_lie_one_below_the_other(rest: tuple[int, ...]) -> None:
    q, k, v = projections(rest)
    fused = layouts.fuse_qkv(q, k, v)
    rows = [*q, *k, *v]
    assert fused.shape[0] == len(rows)
    assert all(torch.equal(a, b) for a, b in zip(fused, rows, strict=True))
    assert all(map(torch.equal, layouts.split_qkv(fused, **SIZES), (q, k, v)))


@pytest.mark.parametrize("rest", REST)
def test_interleaved_qkv_has_for_each_group_its_queries_its_key_and_its_value(rest: tuple[int, ...]) -> None:
    q, k, v = projections(rest)
    fused = layouts.fuse_qkv_interleaved(q, k, v, **SIZES)
    per_group = HEADS // KV_HEADS
    rows = []
    for group in range(KV_HEADS):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * HEAD_DIM + at] for at in range(HEAD_DIM)]
        rows += [k[group * HEAD_DIM + at] for at in range(HEAD_DIM)]
        rows += [v[group * HEAD_DIM + at] for at in range(HEAD_DIM)]
    assert fused.shape[0] == len(rows)
    assert all(torch.equal(a, b) for a, b in zip(fused, rows, strict=True))
    assert all(map(torch.equal, layouts.split_qkv_interleaved(fused, **SIZES), (q, k, v)))


def test_interleaved_qkv_with_as_many_key_heads_is_gpt_neox_own() -> None:
    # transformers' GPTNeoXAttention views the fused projection as (heads, 3 * head_dim) and chunks that.
    q, k, v = (counted(HEADS * HEAD_DIM, HIDDEN, start=1000 * i) for i in range(3))
    fused = layouts.fuse_qkv_interleaved(q, k, v, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)
    parts = fused.view(HEADS, 3 * HEAD_DIM, HIDDEN).chunk(3, dim=1)
    assert all(torch.equal(part.reshape(-1, HIDDEN), whole) for part, whole in zip(parts, (q, k, v), strict=True))


@pytest.mark.parametrize("rest", REST)
def test_gate_and_up_lie_one_below_the_other_or_row_by_row(rest: tuple[int, ...]) -> None:
    gate, up = counted(5, *rest), counted(5, *rest, start=1000)
    fused = layouts.fuse_gate_up(gate, up)
    assert all(torch.equal(fused[i], gate[i]) and torch.equal(fused[5 + i], up[i]) for i in range(5))
    assert all(map(torch.equal, layouts.split_gate_up(fused), (gate, up)))
    interleaved = layouts.fuse_gate_up_interleaved(gate, up)
    assert all(
        torch.equal(interleaved[2 * i], gate[i]) and torch.equal(interleaved[2 * i + 1], up[i]) for i in range(5)
    )
    assert all(map(torch.equal, layouts.split_gate_up_interleaved(interleaved), (gate, up)))


def test_gate_and_up_of_an_odd_number_of_rows_are_not_cut_somewhere() -> None:
    for split in (layouts.split_gate_up, layouts.split_gate_up_interleaved):
        with pytest.raises(RuntimeError):
            split(counted(5, 2))


def test_experts_are_stacked_in_order_and_several_lists_joined_along_their_rows() -> None:
    gates = [counted(4, 3, start=100 * e) for e in range(5)]
    ups = [counted(4, 3, start=1000 + 100 * e) for e in range(5)]
    stacked = layouts.stack_experts(gates)
    assert stacked.shape == (5, 4, 3)
    assert all(map(torch.equal, stacked, gates))
    assert all(map(torch.equal, layouts.unstack_experts(stacked), gates))
    both = layouts.stack_experts(gates, ups)
    assert both.shape == (5, 8, 3)
    assert all(torch.equal(both[e, :4], gates[e]) and torch.equal(both[e, 4:], ups[e]) for e in range(5))


def test_transpose_swaps_the_last_two_dimensions() -> None:
    weight = counted(2, 3, 4)
    swapped = layouts.transpose(weight)
    assert swapped.shape == (2, 4, 3)
    assert all(swapped[i, j, k] == weight[i, k, j] for i in range(2) for j in range(4) for k in range(3))
    assert torch.equal(layouts.transpose(swapped), weight)


def test_reshape_keeps_the_order_of_elements() -> None:
    reshaped = layouts.reshape(counted(4, 6), shape=[2, 2, 6])
    assert reshaped.flatten().tolist() == list(range(24))
    assert reshaped.shape == (2, 2, 6)


@pytest.mark.parametrize("rest", REST)
def test_rotary_rows_go_from_pairs_to_halves(rest: tuple[int, ...]) -> None:
    weight = counted(HEADS * HEAD_DIM, *rest)
    halves = layouts.rotary_meta_to_hf(weight, heads=HEADS, head_dim=HEAD_DIM)
    for head in range(HEADS):
        for at in range(HEAD_DIM):
            half, pair = divmod(at, HEAD_DIM // 2)
            assert torch.equal(halves[head * HEAD_DIM + at], weight[head * HEAD_DIM + 2 * pair + half])
    assert torch.equal(layouts.rotary_hf_to_meta(halves, heads=HEADS, head_dim=HEAD_DIM), weight)


def test_rotary_rows_are_permuted_as_transformers_converts_llama() -> None:
    # The formula of transformers' convert_llama_weights_to_hf.py.
    def permute(w: torch.Tensor, n_heads: int, dim1: int, dim2: int) -> torch.Tensor:
        return w.view(n_heads, dim1 // n_heads // 2, 2, dim2).transpose(1, 2).reshape(dim1, dim2)

    weight = counted(HEADS * HEAD_DIM, HIDDEN)
    expected = permute(weight, HEADS, HEADS * HEAD_DIM, HIDDEN)
    assert torch.equal(layouts.rotary_meta_to_hf(weight, heads=HEADS, head_dim=HEAD_DIM), expected)


def test_rotary_halves_turn_as_pairs_did() -> None:
    """Rotating in either layout with its own rows gives the same scores."""
    weight = torch.randn(HEADS * HEAD_DIM, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    angles = torch.tensor([0.3, 1.1], dtype=torch.float64)
    pairs = (weight @ x).view(HEADS, HEAD_DIM // 2, 2)
    turned_pairs = torch.view_as_real(torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles))
    halves = (layouts.rotary_meta_to_hf(weight, heads=HEADS, head_dim=HEAD_DIM) @ x).view(HEADS, HEAD_DIM)
    cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
    first, second = halves.chunk(2, dim=-1)
    turned_halves = halves * cos + torch.cat([-second, first], dim=-1) * sin
    assert torch.allclose(turned_halves.view(HEADS, 2, -1).transpose(1, 2), turned_pairs)


def test_padding_adds_zero_rows_and_never_cuts() -> None:
    weight = counted(3, 2, start=1)
    padded = layouts.pad_rows(weight, rows=5)
    assert torch.equal(padded[:3], weight)
    assert torch.equal(padded[3:], torch.zeros(2, 2))
    assert padded.dtype == weight.dtype
    assert torch.equal(layouts.pad_rows(weight, rows=3), weight)
    with pytest.raises(ValueError, match="can't shorten 3 rows to 2"):
        layouts.pad_rows(weight, rows=2)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2)])
def test_weight_norm_gives_the_weight_that_torch_computes(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator)
    v = torch.randn(shape, generator=generator)
    expected = torch._weight_norm(v, g, 0)
    assert torch.allclose(layouts.weight_norm(g, v), expected, atol=1e-6)


# ------------------------------------------------------------------ all of them

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "fuse_qkv": lambda t: layouts.fuse_qkv(t(24, 3), t(8, 3), t(8, 3)),
    "split_qkv": lambda t: layouts.split_qkv(t(40, 3), **SIZES),
    "fuse_qkv_interleaved": lambda t: layouts.fuse_qkv_interleaved(t(24, 3), t(8, 3), t(8, 3), **SIZES),
    "split_qkv_interleaved": lambda t: layouts.split_qkv_interleaved(t(40, 3), **SIZES),
    "fuse_gate_up": lambda t: layouts.fuse_gate_up(t(5, 3), t(5, 3)),
    "split_gate_up": lambda t: layouts.split_gate_up(t(10, 3)),
    "fuse_gate_up_interleaved": lambda t: layouts.fuse_gate_up_interleaved(t(5, 3), t(5, 3)),
    "split_gate_up_interleaved": lambda t: layouts.split_gate_up_interleaved(t(10, 3)),
    "stack_experts": lambda t: layouts.stack_experts([t(4, 3) for _ in range(3)], [t(4, 3) for _ in range(3)]),
    "unstack_experts": lambda t: layouts.unstack_experts(t(3, 4, 3)),
    "transpose": lambda t: layouts.transpose(t(5, 3)),
    "reshape": lambda t: layouts.reshape(t(5, 4), shape=[2, 10]),
    "rotary_meta_to_hf": lambda t: layouts.rotary_meta_to_hf(t(24, 3), heads=HEADS, head_dim=HEAD_DIM),
    "rotary_hf_to_meta": lambda t: layouts.rotary_hf_to_meta(t(24, 3), heads=HEADS, head_dim=HEAD_DIM),
}


def test_every_layout_is_tried_here() -> None:
    assert {*_FUNCTIONS, "pad_rows", "weight_norm"} == set(LAYOUTS)


@pytest.mark.parametrize("function", _FUNCTIONS.values(), ids=_FUNCTIONS)
def test_what_only_moves_elements_is_traced_to_where_they_go(function: Callable[[Any], Any]) -> None:
    firsts: list[int] = [0]

    def number(*shape: int) -> torch.Tensor:
        firsts.append(firsts[-1] + torch.Size(shape).numel())
        return counted(*shape, start=firsts[-2])

    def symbol(*shape: int) -> SymbolicTensor:
        symbols.append(SymbolicTensor.of(len(symbols), shape, torch.float32))
        return symbols[-1]

    symbols: list[SymbolicTensor] = []
    expected, traced = function(number), function(symbol)
    for result, trace in zip(
        expected if isinstance(expected, tuple) else [expected],
        traced if isinstance(traced, tuple) else [traced],
        strict=True,
    ):
        assert torch.equal(_element_numbers(trace, firsts).float(), result)


def _element_numbers(trace: SymbolicTensor, firsts: list[int]) -> torch.Tensor:
    """The numbers of the elements that a symbol says it consists of; a constant is its own value."""
    numbers = torch.full((trace.numel(),), -99)
    for placed in trace.placements():
        sizes = [count for count, _, _ in placed.dims]
        target = numbers.as_strided(sizes, [step for _, _, step in placed.dims], placed.target_start)
        if isinstance(placed.source, int):
            elements = torch.arange(firsts[placed.source], firsts[placed.source + 1])
            target.copy_(elements.as_strided(sizes, [step for _, step, _ in placed.dims], placed.source_start))
        elif placed.source is not None:
            target.fill_(int(placed.source.value))
    return numbers.reshape(trace.shape)


def test_what_computes_is_not_traced() -> None:
    symbol = SymbolicTensor.of(0, (4, 3), torch.float32)
    with pytest.raises(Untraceable):
        layouts.weight_norm(symbol, symbol)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_splits_undo_fusions_for_any_numbers_of_heads(kv_heads: int, per_group: int, pairs: int) -> None:
    sizes = {"heads": kv_heads * per_group, "kv_heads": kv_heads, "head_dim": 2 * pairs}
    q = counted(sizes["heads"] * sizes["head_dim"], 2)
    k, v = (counted(kv_heads * sizes["head_dim"], 2, start=1000 * i) for i in (1, 2))
    assert all(map(torch.equal, layouts.split_qkv(layouts.fuse_qkv(q, k, v), **sizes), (q, k, v)))
    interleaved = layouts.fuse_qkv_interleaved(q, k, v, **sizes)
    assert all(map(torch.equal, layouts.split_qkv_interleaved(interleaved, **sizes), (q, k, v)))
    rotary = {key: sizes[key] for key in ("heads", "head_dim")}
    assert torch.equal(layouts.rotary_hf_to_meta(layouts.rotary_meta_to_hf(q, **rotary), **rotary), q)


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}, (8, 2, 16)),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}, (8, 2, 8)),
        ({"num_attention_heads": 8, "hidden_size": 64}, (8, 8, 8)),
        ({"num_attention_heads": 8, "num_key_value_heads": None, "head_dim": None, "hidden_size": 64}, (8, 8, 8)),
    ],
)
def test_sizes_are_taken_from_the_config(config: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = sizes_from_config(SimpleNamespace(**config), ["heads", "kv_heads", "head_dim"])
    assert tuple(found.values()) == expected
    assert sizes_from_config(SimpleNamespace(**config), ["head_dim"]) == {"head_dim": expected[2]}


def test_sizes_that_a_config_does_not_tell_are_left_out() -> None:
    assert sizes_from_config(None, ["heads"]) == {}
    assert sizes_from_config(SimpleNamespace(hidden_size=3), ["heads", "head_dim", "rows"]) == {}
    assert sizes_from_config({"num_attention_heads": 3}, ["heads"]) == {"heads": 3}


def test_sizes_are_those_of_the_text_part_and_under_transformers_own_names() -> None:
    from transformers import GPT2Config, LlamaConfig, Qwen2_5_VLConfig

    wanted = ["heads", "kv_heads", "head_dim"]
    llama = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    assert sizes_from_config(llama, wanted) == {"heads": 4, "kv_heads": 2, "head_dim": 8}
    assert sizes_from_config(GPT2Config(n_head=4, n_embd=32), wanted) == {"heads": 4, "kv_heads": 4, "head_dim": 8}
    nested = Qwen2_5_VLConfig(text_config={"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64})
    assert sizes_from_config(nested, wanted) == {"heads": 4, "kv_heads": 2, "head_dim": 16}


def test_a_padded_vocabulary_loads_by_a_rule_and_says_how_it_came_about() -> None:
    model = torch.nn.Embedding(16, 4)
    found = plan_load(model, {"weight": counted(10, 4)}, rules=[Convert("weight", "weight", "pad_rows", rows=16)])
    assert found.ok
    assert "pad_rows(weight) -> weight" in found.explain("weight")
    found.run(model)
    assert torch.equal(model.weight.data, torch.cat([counted(10, 4), torch.zeros(6, 4)]))
    too_few = plan_load(model, {"weight": counted(20, 4)}, rules=[Convert("weight", "weight", "pad_rows", rows=16)])
    assert "can't shorten 20 rows to 16" in too_few.errors[0].message
