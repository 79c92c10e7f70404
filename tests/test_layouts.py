"""Ready-made layouts, each against a formula of its own, element by element."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders import Convert, plan_load
from weightloaders.errors import RuleError
from weightloaders.mapping import layouts
from weightloaders.mapping.layouts import LAYOUTS, sizes_from_config
from weightloaders.plan import ComputeStep

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 6, 2, 4, 3
_PAIRS = (
    ("fuse_qkv", "split_qkv"),
    ("fuse_qkv_interleaved", "split_qkv_interleaved"),
    ("fuse_gate_up", "split_gate_up"),
    ("fuse_gate_up_interleaved", "split_gate_up_interleaved"),
    ("stack_experts", "unstack_experts"),
    ("transpose", "transpose"),
    ("rotary_meta_to_hf", "rotary_hf_to_meta"),
    ("pad_rows", "unpad_rows"),
    ("duplicate", "common"),
    ("weight_norm", "split_weight_norm"),
)
# What undoes a layout. The others can't be undone without knowing more: the shape or dtype before, say.
INVERSES = {**dict(_PAIRS), **{inverse: name for name, inverse in _PAIRS}}

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
        with pytest.raises(ValueError, match="5 rows are not gate and up"):
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


class Case(NamedTuple):
    """A layout with sources for it: tensors, or lists of tensors."""

    name: str
    sources: list[Any]
    sizes: dict[str, Any]
    undone: bool = True


def _id(case: Case) -> str:
    shapes = [list(source.shape) if isinstance(source, torch.Tensor) else len(source) for source in case.sources]
    return f"{case.name}-{shapes}-{case.sizes}"


def several(count: int, *shape: int) -> list[torch.Tensor]:
    size = torch.Size(shape).numel()
    return [counted(*shape, start=1 + i * size) for i in range(count)]


CASES = [
    Case("fuse_qkv", list(projections((3,))), {}),
    Case("fuse_qkv", list(projections(())), {}),
    Case("fuse_qkv", [t.t().contiguous() for t in projections((3,))], {"dim": -1}),
    Case("fuse_qkv", list(projections((3,))), {"transposed": True}),
    Case("fuse_qkv", several(3), {}),
    Case("split_qkv", several(1, 40, 3), SIZES),
    Case("split_qkv", several(1, 3, 40), {**SIZES, "dim": 1}),
    Case("split_qkv", several(1, 3, 40), {**SIZES, "transposed": True}),
    Case("split_qkv", several(1, 20, 3), SIZES),
    Case("split_qkv", several(1), SIZES, undone=False),
    Case("fuse_qkv_interleaved", list(projections((3,))), SIZES),
    Case("fuse_qkv_interleaved", several(3), SIZES),
    Case("split_qkv_interleaved", several(1, 40, 3), SIZES),
    Case("split_qkv_interleaved", several(1, 1), SIZES, undone=False),
    Case("fuse_gate_up", several(2, 5, 3), {}),
    Case("fuse_gate_up", several(2, 4, 5, 3), {"dim": 1}),
    Case("fuse_gate_up", several(2, 5, 3), {"transposed": True}),
    Case("split_gate_up", several(1, 10, 3), {}),
    Case("split_gate_up", several(1, 4, 3, 10), {"dim": -1}),
    Case("split_gate_up", several(1), {}, undone=False),
    Case("fuse_gate_up_interleaved", several(2, 5, 3), {}),
    Case("fuse_gate_up_interleaved", several(2, 4, 3, 5), {"dim": -1}),
    Case("split_gate_up_interleaved", several(1, 10, 3), {}),
    Case("split_gate_up_interleaved", several(1, 4, 3, 10), {"dim": 2}),
    Case("split_gate_up_interleaved", several(1), {}, undone=False),
    Case("stack_experts", [several(4, 5, 3)], {}),
    Case("stack_experts", [several(4, 5, 3), several(4, 5, 3)], {}),
    Case("stack_experts", [several(4, 5, 3), several(4, 5, 3)], {"transposed": True}),
    Case("stack_experts", [several(4, 5, 3), several(4, 5, 3)], {"transposed": True, "interleaved": True}),
    Case("stack_experts", [several(4), several(4)], {}),
    Case("unstack_experts", several(1, 4, 5, 3), {}),
    Case("unstack_experts", several(1, 4, 3, 5), {"transposed": True}),
    Case("unstack_experts", several(1, 4, 10, 3), {"parts": 2}),
    Case("unstack_experts", several(1, 4, 3, 10), {"parts": 2, "transposed": True, "interleaved": True}),
    Case("unstack_experts", several(1, 4, 2), {"parts": 2}),
    Case("unstack_experts", several(1, 4), {"parts": 2}, undone=False),
    Case("transpose", several(1, 5, 3), {}),
    Case("transpose", several(1, 5), {}),
    Case("reshape", several(1, 5, 4), {"shape": [2, 10]}, undone=False),
    Case("rotary_meta_to_hf", several(1, 24, 3), {"head_dim": HEAD_DIM}),
    Case("rotary_hf_to_meta", several(1, 24), {"head_dim": HEAD_DIM, "heads": HEADS}),
    Case("unpad_rows", several(1, 16, 3), {"rows": 10, "multiple": 8}, undone=False),
    Case("pad_rows", several(1, 3, 2), {"multiple": 8}, undone=False),
    Case("repeat", several(1), {"times": 3}, undone=False),
    Case("duplicate", several(1, 5, 3), {}),
    Case("duplicate", several(1), {"times": 3}),
]
COMPUTED = {"common", "reinterpret", "weight_norm", "split_weight_norm"}


def test_every_layout_is_tried_here() -> None:
    assert {case.name for case in CASES} | COMPUTED == set(LAYOUTS)


def flat(returned: Any) -> list[torch.Tensor]:
    return [returned] if isinstance(returned, torch.Tensor) else [t for part in returned for t in flat(part)]


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_what_only_moves_elements_is_read_to_where_they_go(case: Case) -> None:
    returned = LAYOUTS[case.name](*case.sources, **case.sizes)
    spreads = case.name == "unstack_experts"
    parts = returned if isinstance(returned, tuple) and not (spreads and case.sizes.get("parts") != 2) else [returned]
    targets = [f"t{at}.{{e}}" if spreads else f"t{at}" for at in range(len(parts))]
    expected = {
        target.replace("{e}", str(e)): tensor
        for target, part in zip(targets, parts, strict=True)
        for e, tensor in enumerate(flat(part))
    }
    stored: dict[str, torch.Tensor] = {}
    sources = []
    for at, source in enumerate(case.sources):
        sources.append(f"s{at}.{{x}}" if isinstance(source, list) else f"s{at}")
        stored |= {sources[-1].replace("{x}", str(e)): tensor for e, tensor in enumerate(flat(source))}
    model = torch.nn.Module()
    for name, tensor in expected.items():
        path, _, leaf = name.rpartition(".")
        module = model if not path else model._modules.setdefault(path, torch.nn.Module())
        assert module is not None
        module.register_parameter(leaf, torch.nn.Parameter(torch.full(tensor.shape, -1.0)))
    found = plan_load(model, stored, rules=[Convert(sources, targets, case.name, **case.sizes)])
    assert found.ok, str(found)
    assert not any(isinstance(step, ComputeStep) for step in found.steps)
    found.run(model)
    for name, tensor in expected.items():
        assert torch.equal(model.get_parameter(name).data, tensor), name


@pytest.mark.parametrize("case", [c for c in CASES if c.undone], ids=_id)
def test_the_inverse_of_a_layout_undoes_it(case: Case) -> None:
    inverse = LAYOUTS[INVERSES[case.name]]
    returned = LAYOUTS[case.name](*case.sources, **case.sizes)
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    if case.name == "unstack_experts" and case.sizes.get("parts") != 2:
        parts = [parts]
    known = {**SIZES, "parts": len(case.sources), **case.sizes}
    accepted = [p.name for p in inspect.signature(inverse).parameters.values() if p.kind is p.KEYWORD_ONLY]
    wanted = {key: known[key] for key in accepted if key in known and key != "multiple"}
    before, after = flat(case.sources), flat(inverse(*parts, **wanted))
    # One number may come back as a vector of one, which is the same to a plan.
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(after, before, strict=True))


def test_inverses_are_each_others_and_all_are_layouts() -> None:
    assert set(INVERSES) <= set(LAYOUTS)
    assert all(INVERSES[inverse] == name for name, inverse in INVERSES.items())
    assert set(LAYOUTS) - set(INVERSES) == {"reshape", "repeat", "reinterpret"}


def test_what_was_padded_is_cut_again() -> None:
    weight = counted(10, 3, start=1)
    padded = layouts.pad_rows(weight, multiple=8)
    assert padded.shape == (16, 3)
    assert torch.equal(layouts.unpad_rows(padded, rows=10, multiple=8), weight)


# ------------------------------------------------------------------ against transformers


def _as_activations(fused: torch.Tensor) -> torch.Tensor:
    """What a projection gives for the unit vectors: (batch, tokens, rows)."""
    return fused.t()[None]


@pytest.mark.parametrize(
    ("options", "kv_heads"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": False, "multi_query": True}, 1),
        ({"new_decoder_architecture": False, "multi_query": False}, 6),
    ],
)
def test_interleaved_qkv_is_what_transformers_falcon_takes_apart(options: dict[str, Any], kv_heads: int) -> None:
    from transformers import FalconConfig
    from transformers.models.falcon.modeling_falcon import FalconAttention

    config = FalconConfig(num_attention_heads=6, hidden_size=24, **options)
    sizes = sizes_from_config(config, ["heads", "kv_heads", "head_dim"])
    assert sizes == {"heads": 6, "kv_heads": kv_heads, "head_dim": 4}
    q = counted(24, HIDDEN)
    k, v = (counted(4 * kv_heads, HIDDEN, start=start) for start in (1000, 2000))
    fused = layouts.fuse_qkv_interleaved(q, k, v, **sizes)
    seen = FalconAttention(config, layer_idx=0)._split_heads(_as_activations(fused))
    for part, found in zip((q, k, v), seen, strict=True):
        # (batch, tokens, heads, head_dim); keys and values come once for each of their query heads.
        heads = found[0].permute(1, 2, 0)
        every = 6 // kv_heads if heads.shape[0] == 6 and part is not q else 1
        assert torch.equal(heads[::every].reshape(part.shape), part)


def test_interleaved_qkv_with_as_many_key_heads_is_what_transformers_bloom_takes_apart() -> None:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention

    config = BloomConfig(n_head=6, hidden_size=24)
    q, k, v = (counted(24, HIDDEN, start=1000 * i) for i in range(3))
    sizes = sizes_from_config(config, ["heads", "kv_heads", "head_dim"])
    fused = layouts.fuse_qkv_interleaved(q, k, v, **sizes)
    seen = BloomAttention(config, layer_idx=0)._reshape(_as_activations(fused))
    for part, found in zip((q, k, v), seen, strict=True):
        assert torch.equal(found[0].permute(0, 2, 1).reshape(24, HIDDEN), part)


def test_experts_are_stacked_as_transformers_stacks_those_of_mixtral() -> None:
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    gates, ups = several(4, 5, 3), [t + 1000 for t in several(4, 5, 3)]
    merged = MergeModulelist(dim=0).convert({"g": gates, "u": ups}, ["g", "u"], ["both"])
    (both,) = Concatenate(dim=1).convert(merged, ["g", "u"], ["both"]).values()
    assert torch.equal(layouts.stack_experts(gates, ups), both)
    (turned,) = Transpose(1, 2).convert({"both": both}, ["both"], ["both"]).values()
    assert torch.equal(layouts.stack_experts(gates, ups, transposed=True), turned)


def test_interleaved_experts_are_what_transformers_gpt_oss_computes_with() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gates, ups = several(2, 4, 3), [t + 1000 for t in several(2, 4, 3)]
    stacked = layouts.stack_experts(gates, ups, transposed=True, interleaved=True)
    experts = GptOssExperts(GptOssConfig(num_local_experts=2, hidden_size=3, intermediate_size=4))
    assert experts.gate_up_proj.shape == stacked.shape
    for e in range(2):
        assert torch.equal(stacked[e, :, ::2].t(), gates[e])
        assert torch.equal(stacked[e, :, 1::2].t(), ups[e])
    gate, up = torch.randn(1, 2, 4).unbind(1)
    mixed = layouts.fuse_gate_up_interleaved(gate, up, dim=-1)
    expected = (up.clamp(-7, 7) + 1) * (gate.clamp(max=7) * torch.sigmoid(gate.clamp(max=7) * experts.alpha))
    assert torch.allclose(experts._apply_gate(mixed), expected)


def test_rotary_heads_are_counted_so_that_keys_of_grouped_heads_need_no_other_rule() -> None:
    """One rule, with nothing but what the config says, for queries and keys, their weights and biases."""

    # The formula of transformers' convert_llama_weights_to_hf.py.
    def permute(w: torch.Tensor, n_heads: int) -> torch.Tensor:
        rows, columns = w.shape
        return w.view(n_heads, rows // n_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)

    heads = {"q": HEADS, "k": KV_HEADS}
    stored = {f"{p}.weight": counted(n * HEAD_DIM, HIDDEN, start=100 * n) for p, n in heads.items()}
    stored |= {f"{p}.bias": counted(n * HEAD_DIM, start=100 * n) for p, n in heads.items()}
    model = torch.nn.ModuleDict({p: torch.nn.Linear(HIDDEN, n * HEAD_DIM) for p, n in heads.items()})
    model.config = SimpleNamespace(  # type: ignore[assignment]
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    rules = "convert: [{sources: '{p}.{leaf}', targets: '{p}.{leaf}', function: rotary_meta_to_hf}]"
    plan_load(model, stored, rules=rules).run(model)
    for part, count in heads.items():
        assert torch.equal(model[part].weight.data, permute(stored[f"{part}.weight"], count))
        assert torch.equal(model[part].bias.data, permute(stored[f"{part}.bias"][:, None], count)[:, 0])
    for wrong in ({"head_dim": 5}, {"head_dim": HEAD_DIM, "heads": HEADS + 1}, {"head_dim": 3}):
        with pytest.raises(ValueError, match="24 rows are not"):
            layouts.rotary_meta_to_hf(stored["q.weight"], **wrong)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weight_norm_over_any_dimension_is_what_torch_makes_of_it(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(4, 6, 3, dtype=dtype), dim=dim)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(1.7)  # type: ignore[union-attr, operator]
    g, v = (p.detach() for p in layer.parametrizations.weight.parameters())  # type: ignore[union-attr]
    merged = layouts.weight_norm(g, v)
    assert merged.dtype == dtype
    # Of narrow floats torch rounds every step on the way where the dimension is neither the first nor the last.
    rtol = 1e-6 if dtype != torch.bfloat16 else 1e-2 if dim == 1 else 0
    assert torch.allclose(merged, layer.weight.detach(), rtol=rtol, atol=0)
    g, v = layouts.split_weight_norm(merged, dim=dim)
    assert g.shape == layer.parametrizations.weight.original0.shape  # type: ignore[union-attr]
    assert torch.allclose(layouts.weight_norm(g, v), merged, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


# ------------------------------------------------------------------ any sizes


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_experts_lie_where_index_arithmetic_says(
    experts: int, rows: int, columns: int, transposed: bool, interleaved: bool
) -> None:
    gates, ups = several(experts, rows, columns), [t + 1000 for t in several(experts, rows, columns)]
    stacked = layouts.stack_experts(gates, ups, transposed=transposed, interleaved=interleaved)
    assert stacked.shape == ((experts, columns, 2 * rows) if transposed else (experts, 2 * rows, columns))
    for e in range(experts):
        for row in range(rows):
            for at, part in ((0, gates), (1, ups)):
                fused = 2 * row + at if interleaved else at * rows + row
                found = stacked[e, :, fused] if transposed else stacked[e, fused]
                assert torch.equal(found, part[e][row])
    if (rows, columns) != (1, 1):
        back = layouts.unstack_experts(stacked, parts=2, transposed=transposed, interleaved=interleaved)
        assert all(torch.equal(a, b) for a, b in zip([*back[0], *back[1]], [*gates, *ups], strict=True))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_gate_and_up_lie_where_index_arithmetic_says_along_any_dimension(a: int, b: int, c: int, dim: int) -> None:
    gate, up = (t.movedim(0, dim) for t in several(2, c, a, b))
    contiguous, interleaved = (f(gate, up, dim=dim) for f in (layouts.fuse_gate_up, layouts.fuse_gate_up_interleaved))
    for at in range(c):
        assert torch.equal(contiguous.select(dim, at), gate.select(dim, at))
        assert torch.equal(contiguous.select(dim, c + at), up.select(dim, at))
        assert torch.equal(interleaved.select(dim, 2 * at), gate.select(dim, at))
        assert torch.equal(interleaved.select(dim, 2 * at + 1), up.select(dim, at))
    assert all(map(torch.equal, layouts.split_gate_up(contiguous, dim=dim), (gate, up)))
    assert all(map(torch.equal, layouts.split_gate_up_interleaved(interleaved, dim=dim), (gate, up)))


@given(st.integers(1, 40), st.integers(1, 16))
def test_padding_goes_to_the_next_multiple_and_only_that_is_cut_again(rows: int, multiple: int) -> None:
    weight = counted(rows, 2, start=1)
    padded = layouts.pad_rows(weight, multiple=multiple)
    assert rows <= padded.shape[0] < rows + multiple
    assert padded.shape[0] % multiple == 0
    assert not padded[rows:].any()
    assert torch.equal(layouts.unpad_rows(padded, rows=rows, multiple=multiple), weight)
    with pytest.raises(ValueError, match="cuts nothing but padding"):
        layouts.unpad_rows(layouts.pad_rows(padded, rows=padded.shape[0] + 1), rows=rows, multiple=multiple)


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


def test_a_vocabulary_of_another_size_is_an_error_until_a_rule_says_what_is_padding() -> None:
    small, large = counted(10, 4, start=1), torch.cat([counted(10, 4, start=1), torch.zeros(6, 4)])
    for stored, rows in ((small, 16), (small, 8), (large, 10)):
        assert plan_load(torch.nn.Embedding(rows, 4), {"weight": stored}).mismatched == ["weight"]
    model = torch.nn.Embedding(10, 4)
    model.config = SimpleNamespace(vocab_size=10)  # type: ignore[assignment]
    cut = "convert: [{sources: weight, targets: weight, function: unpad_rows, multiple: 8}]"
    plan_load(model, {"weight": large}, rules=cut).run(model)
    assert torch.equal(model.weight.data, small)
    # What is more than padding is never cut.
    for stored, multiple in ((large, 4), (counted(24, 4), 8), (small[:9], 8)):
        rule = Convert("weight", "weight", "unpad_rows", multiple=multiple)
        assert "cuts nothing but padding" in plan_load(model, {"weight": stored}, rules=[rule]).errors[0].message
    with pytest.raises(ValueError, match="either the number of rows or what it is to be a multiple of"):
        layouts.pad_rows(small)


def test_heads_that_can_not_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads can't be shared out to 4"):
        layouts.split_qkv_interleaved(counted(56, 2), heads=6, kv_heads=4, head_dim=4)
    with pytest.raises(ValueError, match="39 rows can't be shared out in the ratio of 24 to 8 to 8"):
        layouts.split_qkv(counted(39, 2), **SIZES)
    # Scales of blocks that lie across the border of query and key have no place.
    with pytest.raises(ValueError, match="can't be shared out"):
        layouts.split_qkv(counted(4, 2), **SIZES)
    q, k, v = projections((3,))
    with pytest.raises(ValueError, match="these are not 6 query and 2 key-value heads of 4 rows"):
        layouts.fuse_qkv_interleaved(k, q, v, **SIZES)


def test_flags_of_layouts_are_checked_when_a_rule_is_made() -> None:
    for wrong in ({"transposed": 1}, {"transposed": "yes"}, {"interleaved": None}):
        with pytest.raises(RuleError, match="is neither true nor false"):
            Convert("e.{i}", "e", "stack_experts", **wrong)
    with pytest.raises(RuleError, match="rows=True is no whole number"):
        Convert("w", "w", "pad_rows", rows=True)
    with pytest.raises(RuleError, match="dtype=32 is no text"):
        Convert("w", "w", "reinterpret", dtype=32)
    with pytest.raises(RuleError, match="shape='4, 4' is no whole number"):
        Convert("w", "w", "reshape", shape="4, 4")
