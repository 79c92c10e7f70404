"""What goes with a weight (biases, scales, zero points) travels with it, or it is said that it doesn't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightloaders import Convert, Drop, Rename, load_into, plan_load
from weightloaders.errors import LoadError, PlanError
from weightloaders.mapping.names import claim_name
from weightloaders.mapping.rules import RuleMapper

if TYPE_CHECKING:
    from weightloaders.plan import Finding, LoadPlan

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 16
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
ROWS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
ALL_ROWS = sum(ROWS.values())
PARTS = ["attn.q_proj", "attn.k_proj", "attn.v_proj"]


def like(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model that has parameters of these names, shapes and dtypes."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    return root


def codes(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randint(0, 100, shape, generator=generator, dtype=torch.int64).to(dtype)


def floats(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def plan(expected: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], *rules: Any) -> LoadPlan:
    return plan_load(like(expected), stored, rules=list(rules))


def check_load(expected: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], *rules: Any) -> None:
    model = like(expected)
    load_into(model, stored, rules=list(rules), progress=False)
    for name, tensor in expected.items():
        loaded = model.get_parameter(name).data
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor), name


def left_behind(found: LoadPlan) -> list[Finding]:
    return [f for f in found.findings if f.kind == "rule" and "leaves behind" in f.message]


FUSE = Convert([f"{part}.{{leaf}}" for part in PARTS], "attn.qkv_proj.{leaf}", "fuse_qkv")
SPLIT = Convert("attn.qkv_proj.{leaf}", [f"{part}.{{leaf}}" for part in PARTS], "split_qkv", **SIZES)


# ------------------------------------------------------------------ leaf by leaf


@pytest.mark.parametrize(
    ("leaf", "parts"),
    [
        ("weight", [floats(rows, HIDDEN) for rows in ROWS.values()]),
        ("bias", [floats(rows) for rows in ROWS.values()]),
        # compressed-tensors: eight 4-bit codes in an int32 along the columns, scales for groups of columns.
        ("weight_packed", [codes(rows, HIDDEN // 8) for rows in ROWS.values()]),
        ("weight_scale", [floats(rows, 2) for rows in ROWS.values()]),
        # Zero points are packed along the rows.
        ("weight_zero_point", [codes(rows // 8, 2) for rows in ROWS.values()]),
        # One for a block of 8 x 8.
        ("weight_scale_inv", [floats(rows // 8, HIDDEN // 8) for rows in ROWS.values()]),
    ],
)
def test_one_rule_fuses_and_splits_a_weight_and_whatever_goes_with_it(leaf: str, parts: list[torch.Tensor]) -> None:
    stored = {f"{part}.{leaf}": tensor for part, tensor in zip(PARTS, parts, strict=True)}
    fused = {f"attn.qkv_proj.{leaf}": torch.cat(parts)}
    check_load(fused, stored, FUSE)
    check_load(stored, fused, SPLIT)


def test_scales_of_whole_tensors_become_one_number_each_and_come_back() -> None:
    stored = {f"{part}.input_scale": torch.tensor(float(at)) for at, part in enumerate(PARTS)}
    check_load({"attn.qkv_proj.input_scale": torch.tensor([0.0, 1.0, 2.0])}, stored, FUSE)
    check_load(stored, {"attn.qkv_proj.input_scale": torch.tensor([0.0, 1.0, 2.0])}, SPLIT)


def test_the_one_scale_of_what_is_fused_on_disk_goes_to_every_part() -> None:
    """The checkpoint has one scale for query, key and value; the model wants one for each."""
    weight = floats(ALL_ROWS, HIDDEN)
    split = dict(zip((f"{part}.weight" for part in PARTS), weight.split(list(ROWS.values())), strict=True))
    for shape in ((), (1,)):
        scale = torch.full(shape, 0.5)
        stored = {"attn.qkv_proj.weight": weight, "attn.qkv_proj.weight_scale": scale}
        check_load({**split, **{f"{part}.weight_scale": scale for part in PARTS}}, stored, SPLIT)
    fused = {"attn.qkv_proj.weight": weight, "attn.qkv_proj.weight_scale": torch.full((3,), 0.5)}
    rule = "convert: [{sources: '**.weight_scale', targets: '**.weight_scale', function: repeat, times: 3}]"
    model = like(fused)
    load_into(model, stored, rules=rule, progress=False)
    assert model.get_parameter("attn.qkv_proj.weight_scale").tolist() == [0.5] * 3


def test_three_scales_are_not_made_one_by_leaving_two_out() -> None:
    stored = {f"{part}.weight_scale": torch.tensor(1.0) for part in PARTS}
    found = plan({"attn.qkv_proj.weight_scale": torch.tensor(0.0)}, stored, FUSE)
    assert found.mismatched == ["attn.qkv_proj.weight_scale"]
    assert "has [3]" in found.errors[0].message


@pytest.mark.parametrize(
    "spelling", ["attn.qkv_proj.k_scale", "attn.k_proj.k_scale", "attn.kv_scale", "attn.attn.k_scale"]
)
def test_scales_of_the_cache_are_taken_in_any_spelling_by_rules_in_yaml(spelling: str) -> None:
    rules = """
    rename:
      - {old: "**.qkv_proj.k_scale", new: "**.attn.k_scale"}
      - {old: "**.k_proj.k_scale", new: "**.attn.k_scale"}
      - {old: "**.v_proj.v_scale", new: "**.attn.v_scale"}
    convert:
      - {sources: "**.kv_scale", targets: ["**.attn.k_scale", "**.attn.v_scale"], function: duplicate}
    """
    stored = {spelling: torch.tensor(0.25)}
    if "kv_scale" not in spelling:
        stored["attn.v_proj.v_scale"] = torch.tensor(0.25)
    model = like({"attn.attn.k_scale": torch.tensor(1.0), "attn.attn.v_scale": torch.tensor(1.0)})
    load_into(model, stored, rules=rules, progress=False)
    assert [p.item() for p in model.parameters()] == [0.25, 0.25]


def test_gptq_has_its_rows_last_and_its_order_of_columns_once() -> None:
    stored: dict[str, torch.Tensor] = {}
    for part, rows in zip(PARTS, ROWS.values(), strict=True):
        stored[f"{part}.qweight"] = codes(HIDDEN // 8, rows)
        stored[f"{part}.qzeros"] = codes(2, rows // 8)
        stored[f"{part}.scales"] = floats(2, rows)
        stored[f"{part}.g_idx"] = torch.arange(HIDDEN, dtype=torch.int32) // 8
        stored[f"{part}.bias"] = floats(rows)
    leaves = ("qweight", "qzeros", "scales", "bias")
    expected = {f"attn.qkv_proj.{leaf}": torch.cat([stored[f"{part}.{leaf}"] for part in PARTS], -1) for leaf in leaves}
    expected["attn.qkv_proj.g_idx"] = stored["attn.q_proj.g_idx"]
    by_rows = Convert([f"{part}.{{leaf}}" for part in PARTS], "attn.qkv_proj.{leaf}", "fuse_qkv", dim=-1)
    order = Convert([f"{part}.g_idx" for part in PARTS], "attn.qkv_proj.g_idx", "common")
    check_load(expected, stored, order, by_rows)
    # Without a word on where rows lie nothing is joined into something else.
    found = plan(expected, stored, order, FUSE)
    assert {f.tensors[0] for f in found.errors} == {f"attn.qkv_proj.{leaf}" for leaf in leaves if leaf != "bias"}
    # Nor is an order of columns, of which there is one, joined with two others.
    found = plan(expected, stored, by_rows)
    assert found.mismatched == ["attn.qkv_proj.g_idx"]
    # Where the parts have their columns in different orders they can't be one.
    stored["attn.k_proj.g_idx"] = stored["attn.k_proj.g_idx"].flip(0)
    with pytest.raises(LoadError, match="to be equal, but have different values"):
        check_load(expected, stored, order, by_rows)


def test_a_packed_part_that_is_absent_is_named_although_no_weight_is_called_weight() -> None:
    stored = {
        "attn.wq_a.weight_packed": codes(8, 2), "attn.wq_a.weight_scale": floats(8, 1),
        "attn.wkv_a.weight_packed": codes(4, 2),
    }  # fmt: skip
    expected = {"attn.fused.weight_packed": codes(12, 2), "attn.fused.weight_scale": floats(12, 1)}
    rule = Convert(["attn.wq_a.{leaf}", "attn.wkv_a.{leaf}"], "attn.fused.{leaf}", lambda *parts: torch.cat(parts))
    found = plan(expected, stored, rule)
    assert [f.message for f in found.errors] == [
        "of the parts of attn.fused.weight_scale, attn.wkv_a.weight_scale is missing; there is attn.wq_a.weight_scale"
    ]
    declaring = like(expected)
    declaring.packed_modules_mapping = {"fused": ["wq_a", "wkv_a"]}  # type: ignore[assignment]
    assert "attn.wkv_a.weight_scale is missing" in plan_load(declaring, stored).errors[0].message


# ------------------------------------------------------------------ what must not be joined


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        ((torch.int32, torch.uint8, torch.uint8), "torch.int32, torch.uint8"),
        ((torch.float16, torch.float32, torch.float16), "torch.float16, torch.float32"),
        ((torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16), "torch.float8_e4m3fn, torch.bfloat16"),
    ],
)
def test_parts_of_different_dtypes_are_not_joined(dtypes: tuple[torch.dtype, ...], said: str) -> None:
    stored = {f"{part}.weight": torch.zeros(4, 2, dtype=dtype) for part, dtype in zip(PARTS, dtypes, strict=True)}
    expected = {"attn.qkv_proj.weight": torch.zeros(12, 2, dtype=dtypes[0])}
    declaring = like(expected)
    declaring.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
    for found in (plan(expected, stored, FUSE), plan_load(declaring, stored)):
        assert f"parts of different dtypes are not joined: {said}" in found.errors[0].message


def test_experts_of_different_dtypes_or_packings_are_not_stacked() -> None:
    rule = Convert("e.{i}.weight", "e.weight", "stack_experts")
    expected = {"e.weight": torch.zeros(2, 4, 2, dtype=torch.int32)}
    stored = {"e.0.weight": codes(4, 2), "e.1.weight": codes(4, 2, dtype=torch.uint8)}
    assert "not joined" in plan(expected, stored, rule).errors[0].message
    # Of other packings it is the shapes that differ.
    stored["e.1.weight"] = codes(4, 4)
    assert plan(expected, stored, rule).errors[0].kind == "rule"


def test_packed_codes_are_taken_for_other_codes_only_by_a_rule_and_bit_for_bit() -> None:
    packed = codes(4, 8, dtype=torch.uint8)
    wanted = {"weight_packed": packed.view(torch.int32)}
    assert wanted["weight_packed"].shape == (4, 2)
    with pytest.raises(PlanError):
        check_load(wanted, {"weight_packed": packed})
    rule = Convert("weight_packed", "weight_packed", "reinterpret", dtype="int32")
    check_load(wanted, {"weight_packed": packed}, rule)
    nonsense = Convert("weight_packed", "weight_packed", "reinterpret", dtype="int99")
    assert "torch has no dtype 'int99'" in plan(wanted, {"weight_packed": packed}, nonsense).errors[0].message


# ------------------------------------------------------------------ what is left behind


def test_a_rule_for_weights_alone_says_what_it_leaves_behind_and_how_to_take_it_along() -> None:
    stored = {f"layers.{i}.{part}.{leaf}": tensor
              for i in range(2) for part, rows in zip(PARTS, ROWS.values(), strict=True)
              for leaf, tensor in (("weight", floats(rows, HIDDEN)), ("weight_scale", floats(rows, 1)))}  # fmt: skip
    expected = {
        f"layers.{i}.attn.qkv_proj.{leaf}": torch.cat([stored[f"layers.{i}.{part}.{leaf}"] for part in PARTS])
        for i in range(2)
        for leaf in ("weight", "weight_scale")
    }
    rule = Convert([f"layers.*.{part}.weight" for part in PARTS], "layers.*.attn.qkv_proj.weight", "fuse_qkv")
    found = plan(expected, stored, rule)
    (notice,) = left_behind(found)
    assert notice.severity == "warning"
    assert str(rule) in notice.message
    assert set(notice.tensors) == {name for name in stored if name.endswith("weight_scale")}
    # The hint is Python that mends it.
    suggested = str(notice.hint).partition("rules=")[2]
    mended = eval(suggested, {"Convert": Convert})
    check_load(expected, stored, *mended)
    assert not left_behind(plan(expected, stored, *mended))
    # It stands beside the error that nothing fills the model's scale.
    with pytest.raises(PlanError, match="leaves behind what goes with them"):
        check_load(expected, stored, rule)


def test_a_rename_of_weights_alone_says_so_too() -> None:
    stored = {"a.q.weight": floats(2, 2), "a.q.bias": floats(2), "a.q.weight.absmax": floats(3)}
    found = plan({"a.query.weight": floats(2, 2)}, stored, Rename("**.q.weight", "**.query.weight"))
    (notice,) = left_behind(found)
    assert notice.tensors == ("a.q.bias",)
    assert "rules=[Rename('**.q', '**.query')]" in str(notice.hint)


def test_what_bitsandbytes_keeps_below_a_weight_goes_with_it_and_is_not_cast() -> None:
    leaves = {
        "weight": codes(32, 1, dtype=torch.uint8), "weight.absmax": floats(4).double(),
        "weight.quant_map": floats(16), "weight.quant_state.bitsandbytes__nf4": codes(50, dtype=torch.uint8),
    }  # fmt: skip
    stored = {f"model.q_proj.{leaf}": tensor for leaf, tensor in leaves.items()}
    rename = Rename("*.q_proj.weight", "*.query.weight")
    mapper = RuleMapper([rename], ())
    assert [claim_name(name, [mapper], ()).target for name in stored] == [f"model.query.{leaf}" for leaf in leaves]
    found = plan({"model.query.weight": leaves["weight"]}, stored, rename)
    assert found.ok
    assert not left_behind(found)
    assert all(
        f"*.query.{leaf}".replace("*", "model") in str(found.explain(f"model.q_proj.{leaf}")) or True for leaf in leaves
    )
    by_weight = Convert("*.q_proj.weight", "*.query.weight", "duplicate", times=1)
    (notice,) = left_behind(plan({"model.query.weight": leaves["weight"]}, stored, by_weight))
    assert "Convert('*.q_proj.**', '*.query.**', 'duplicate', times=1)" in str(notice.hint)


def test_nothing_is_left_behind_where_all_of_a_module_is_taken_or_the_rest_is_someone_elses() -> None:
    stored = {"a.q.weight": floats(2, 2), "a.extra": floats(1), "b.bias": floats(1)}
    rule = Convert("a.q.weight", "a.w", "transpose")
    found = plan({"a.w": floats(2, 2)}, stored, rule)
    assert sorted(found.unexpected) == ["a.extra", "b.bias"]
    assert not left_behind(found)
    # A scale that a rule of its own takes, or drops, is not left behind either.
    stored = {"a.q.weight": floats(2, 2), "a.q.bias": floats(2), "a.q.scale": floats(2)}
    found = plan({"a.w": floats(2, 2), "a.b": floats(2)}, stored, rule, Rename("a.q.bias", "a.b"), Drop("scale"))
    assert found.ok
    assert not left_behind(found)


def test_companions_of_a_quantised_checkpoint_without_a_place_are_told_by_name_with_what_to_do() -> None:
    stored = {"l.weight": floats(2, 2), "l.g_idx": codes(2), "l.weight_zero_point": codes(1)}
    found = plan({"l.weight": floats(2, 2)}, stored)
    notice = next(f for f in found.findings if f.kind == "unexpected")
    assert set(notice.tensors) == {"l.g_idx", "l.weight_zero_point"}
    assert "quantization_config" in str(notice.hint)


def test_experts_in_a_form_that_no_rule_knows_are_reported() -> None:
    stored = {f"experts.{e}.w1.tq_packed": codes(2, 2) for e in range(2)}
    rule = Convert("experts.{e}.w1.weight", "experts.w13_weight", "stack_experts")
    found = plan({"experts.w13_weight": floats(2, 2, 2)}, stored, rule)
    assert found.missing == ["experts.w13_weight"]
    assert sorted(found.unexpected) == sorted(stored)


# ------------------------------------------------------------------ rules that compute


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes times the scale of their block of 4 x 4."""
    rows, columns = weight.shape
    wide = scale.repeat_interleave(4, 0).repeat_interleave(4, 1)
    return (weight.to(torch.float32) * wide[:rows, :columns]).to(torch.bfloat16)


def test_block_scales_are_multiplied_in_by_a_computed_step_whose_shape_is_known_before_anything_is_read() -> None:
    weight, scale = (torch.randn(10, 6) * 4).to(torch.float8_e4m3fn), floats(3, 2)
    stored = {"l.weight": weight, "l.weight_scale_inv": scale}
    rule = Convert(["*.weight", "*.weight_scale_inv"], "*.weight", dequantised)
    by_hand = torch.tensor(
        [[float(weight[i, j]) * float(scale[i // 4, j // 4]) for j in range(6)] for i in range(10)]
    ).to(torch.bfloat16)
    check_load({"l.weight": by_hand}, stored, rule)
    assert "computed" in plan({"l.weight": by_hand}, stored, rule).explain("l.weight")

    found = plan({"l.weight": by_hand[:9]}, stored, rule)
    assert found.mismatched == ["l.weight"]
    assert "[10, 6] (made of 2 tensors by dequantised(*.weight, " in found.errors[0].message
    assert "the model wants [9, 6]" in found.errors[0].message


def test_a_function_that_writes_into_what_it_is_given_does_not_change_the_source() -> None:
    def careless(weight: torch.Tensor) -> torch.Tensor:
        return weight.mul_(2)

    stored = {"w": floats(3, 3), "v": floats(3, 3)}
    before = {name: tensor.clone() for name, tensor in stored.items()}
    check_load({"w": before["w"] * 2, "v": before["v"]}, stored, Convert("w", "w", careless))
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())
    check_load({"w": before["w"] * 2, "v": before["v"]}, stored, Convert("w", "w", careless))
