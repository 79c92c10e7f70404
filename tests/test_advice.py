"""What a plan says where something does not fit: each cause once, with its place, and with advice that works."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from weightloaders import Convert, Drop, Rename, from_pretrained, load_into, plan_load
from weightloaders.cli.hints import for_command_line
from weightloaders.errors import LoaderContractError, PlanError, RuleError
from weightloaders.mapping.parsing import parse_rules
from weightloaders.report import LoadReport

if TYPE_CHECKING:
    from pathlib import Path

    from weightloaders.plan import LoadPlan

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def counted(shapes: Shapes) -> Tensors:
    """Tensors of these shapes, no two elements alike."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).reshape(shape)
        start += size
    return tensors


def model_of(shapes: Shapes, config: Any = None) -> nn.Module:
    """A model with parameters of these names."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
    if config is not None:
        model.config = config
    return model


def advised_rules(plan: LoadPlan) -> list[Any]:
    """The rules that the first error advises."""
    hint = str(plan.errors[0].hint)
    found = re.search(r"rules=(\[.*\])", hint)
    assert found is not None, hint
    return eval(found[1], {"Convert": Convert, "Rename": Rename})  # type: ignore[no-any-return]


def layers(parts: Shapes, count: int = 3) -> Shapes:
    return {f"layers.{i}.{name}": shape for i in range(count) for name, shape in parts.items()}


# ------------------------------------------------------------------ fused against separate

CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=8)
QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(
    ("fused", "parts", "rows"),
    [
        ("qkv_proj", QKV, (8, 4, 4)),
        ("qkv", ("q", "k", "v"), (8, 4, 4)),
        ("Wqkv", ("wq", "wk", "wv"), (8, 4, 4)),
        ("c_attn", ("to_q", "to_k", "to_v"), (8, 4, 4)),
        ("query_key_value", ("query", "key", "value"), (8, 4, 4)),
        ("gate_up_proj", ("gate_proj", "up_proj"), (12, 12)),
        ("w13", ("w1", "w3"), (12, 12)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_fused_on_one_side_only_is_told_with_one_rule_for_all_layers(
    fused: str, parts: tuple[str, ...], rows: tuple[int, ...], bias: bool
) -> None:
    separate: Shapes = {f"{part}.weight": (n, 8) for part, n in zip(parts, rows, strict=True)}
    whole: Shapes = {f"{fused}.weight": (sum(rows), 8)}
    if bias:
        separate |= {f"{part}.bias": (n,) for part, n in zip(parts, rows, strict=True)}
        whole |= {f"{fused}.bias": (sum(rows),)}
    rest: Shapes = {"o.weight": (8, 8)}
    for mine, theirs in ((whole, separate), (separate, whole)):
        source = counted(layers({**theirs, **rest}))
        plan = plan_load(model_of(layers({**mine, **rest}), CONFIG), source)
        rules = advised_rules(plan)
        assert len(rules) == 1
        mended = model_of(layers({**mine, **rest}), CONFIG)
        load_into(mended, source, rules=rules, progress=False)
        if "query" not in fused:
            joined = [source if theirs is separate else dict(mended.named_parameters())][0]
            other = dict(mended.named_parameters()) if theirs is separate else source
            pieces = [joined[f"layers.2.{part}.weight"] for part in parts]
            assert torch.equal(torch.cat(pieces), other[f"layers.2.{fused}.weight"])


def test_attention_and_mlp_are_told_together_and_what_would_still_be_missing() -> None:
    mine = layers({"a.qkv_proj.weight": (16, 8), "m.gate_up_proj.weight": (24, 8), "norm.weight": (8,)})
    theirs = layers({
        **{f"a.{p}.weight": (n, 8) for p, n in zip(QKV, (8, 4, 4), strict=True)},
        "m.gate_proj.weight": (12, 8), "m.up_proj.weight": (12, 8),
    })  # fmt: skip
    plan = plan_load(model_of(mine), counted(theirs))
    assert "still missing would be layers.0.norm.weight and 2 more" in str(plan.errors[0].hint)
    assert plan_load(model_of(mine), counted(theirs), rules=advised_rules(plan)).missing == [
        f"layers.{i}.norm.weight" for i in range(3)
    ]


def test_the_command_line_gives_the_same_rules_in_yaml() -> None:
    mine = layers({"a.qkv_proj.weight": (16, 8), "m.gate_proj.weight": (12, 8), "m.up_proj.weight": (12, 8)})
    theirs = layers({
        **{f"a.{p}.weight": (n, 8) for p, n in zip(QKV, (8, 4, 4), strict=True)}, "m.gate_up_proj.weight": (24, 8),
    })  # fmt: skip
    hint = for_command_line(str(plan_load(model_of(mine), counted(theirs)).errors[0].hint))
    rules = parse_rules(re.sub(r".*with this in the file: ", "", hint))
    assert "--rules FILE" in hint
    assert len(rules) == 2
    assert plan_load(model_of(mine), counted(theirs), rules=rules).ok


def test_numbers_of_heads_that_no_config_tells_are_left_to_be_put_in() -> None:
    plan = plan_load(
        model_of({f"{p}.weight": (4, 4) for p in QKV}), counted({"qkv_proj.weight": (12, 4)})
    )  # fmt: skip
    hint = str(plan.errors[0].hint)
    assert "'split_qkv', heads=..., kv_heads=..., head_dim=...)]" in hint
    assert "the model's numbers" in hint


def test_rows_that_may_take_turns_are_said_to() -> None:
    plan = plan_load(
        model_of({"query_key_value.weight": (12, 4)}, CONFIG), counted({f"{p}.weight": (4, 4) for p in QKV})
    )
    assert "'fuse_qkv_interleaved', heads=4, kv_heads=2, head_dim=2" in str(plan.errors[0].hint)
    assert "leave out _interleaved if" in str(plan.errors[0].hint)


def test_parts_that_lie_side_by_side_need_a_function_of_ones_own() -> None:
    theirs = counted({f"{p}.weight": (4, 4) for p in QKV})
    hint = str(plan_load(model_of({"c_attn.weight": (4, 12)}), theirs).errors[0].hint)
    assert "'**.c_attn.*', function)]" in hint
    assert "side by side" in hint


def test_names_without_counterpart_get_no_such_advice() -> None:
    plan = plan_load(model_of(layers({"qkv_proj.weight": (12, 4)})), counted(layers({"q_proj.weight": (4, 4)})))
    assert "Convert" not in str(plan)


# ------------------------------------------------------------------ each cause once, with its place


class Tied(nn.Module):
    """A head that is declared tied to the embedding, as in a skeleton of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(12, 2)
        self.lm_head = nn.Linear(2, 12, bias=False)
        self.all_tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}


def test_a_partner_of_what_does_not_fit_is_not_missing_besides() -> None:
    with torch.device("meta"):
        model = Tied()
    source = counted({"embed_tokens.weight": (10, 2), "norm": (2,)})
    model.register_parameter("norm", nn.Parameter(torch.zeros(2)))
    for policy in ("error", "warn"):
        plan = plan_load(model, source, on_mismatch=policy)  # type: ignore[arg-type]
        assert plan.ok is (policy == "warn")
        assert [f.kind for f in plan.findings] == ["shape"]
        assert plan.missing == []
        assert sorted(plan.unfilled) == ["embed_tokens.weight", "lm_head.weight"]


def test_a_view_of_what_does_not_fit_is_not_missing_besides() -> None:
    model = model_of({"whole": (4, 2)})
    model.register_parameter("part", nn.Parameter(model.whole.data[:2]))  # type: ignore[union-attr, operator, index]
    plan = plan_load(model, counted({"whole": (5, 2)}))
    assert [f.kind for f in plan.errors] == ["shape"]


@pytest.mark.parametrize("names", [["backbone.a", "backbone.b"], ["x", "y"]])
def test_where_everything_is_missing_the_file_is_named(names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(counted(dict.fromkeys(names, (2,))), file)
    for policy in ("error", "warn"):
        plan = plan_load(model_of({"a": (2,), "b": (2,)}), file, on_missing=policy)  # type: ignore[arg-type]
        assert plan.errors[0].file == str(file)


def test_an_empty_source_is_said_to_be_empty_first() -> None:
    with pytest.raises(PlanError, match=r"nothing was changed\n- the source holds no tensors\n"):
        plan_load(model_of({"a": (2,)}), {}).raise_if_errors()
    with pytest.raises(PlanError, match="the source holds no tensors"):
        load_into(model_of({"a": (2,)}), iter(()), progress=False)


def test_what_goes_wrong_in_every_layer_is_said_once() -> None:
    shapes = layers({f"{p}.weight": (4, 4) for p in QKV}, 30)
    source = counted(layers({"qkv.weight": (12, 4)}, 30))
    rule = ("**.qkv.*", [f"**.{p}.*" for p in QKV], "split_qkv")
    plan = plan_load(model_of(shapes), source, rules=[Convert(*rule, heads=3, kv_heads=4, head_dim=1)])
    assert len(plan.errors) == 1
    assert plan.errors[0].message.startswith("layers.0.q_proj.weight: split_qkv(")
    assert plan.errors[0].message.endswith("(and 29 more like it)")
    assert set(plan.errors[0].tensors) == {*shapes, *source}
    assert "(and 29 more like it)" in plan.explain("layers.17.k_proj.weight")
    other = plan_load(model_of(shapes), counted(layers({f"{p}.weight": (5, 4) for p in QKV}, 30)))
    kinds = ", ".join(f"layers.*.{part}.weight ([5, 4] for [4, 4])" for part in sorted(QKV))
    assert [f.message for f in other.errors] == [f"90 parameters want 4 where the source has 5: {kinds}"]
    assert len(other.mismatched) == 90


def test_what_differs_in_more_than_the_layer_is_said_each_time() -> None:
    shapes = layers({"a.weight": (4, 4)})
    source = counted({"layers.0.a.weight": (5, 4), "layers.1.a.weight": (6, 4), "layers.2.a.weight": (5, 4)})
    messages = [f.message for f in plan_load(model_of(shapes), source).errors]
    assert len(messages) == 2
    assert "[5, 4]" in messages[0]
    assert messages[0].endswith("(and 1 more like it)")
    assert "[6, 4]" in messages[1]


def test_all_the_sizes_that_a_layout_lacks_are_named_for_python_and_yaml() -> None:
    model, source = model_of({f"{p}.weight": (4, 4) for p in QKV}), counted({"qkv.weight": (12, 4)})
    plan = plan_load(model, source, rules=[Convert("qkv.*", [f"{p}.*" for p in QKV], "split_qkv", heads=4)])
    hint = str(plan.errors[0].hint)
    assert "Convert(..., 'split_qkv', kv_heads=..., head_dim=...)" in hint
    assert "{..., function: split_qkv, kv_heads: ..., head_dim: ...}" in hint


def test_a_callers_rule_that_matched_nothing_is_named_where_something_is_missing() -> None:
    with pytest.raises(PlanError) as caught:
        plan_load(model_of({"a.w": (2,)}), counted({"b.w": (2,)}), rules=[Rename("bb", "a")]).raise_if_errors()
    assert "- warning: rename 'bb' -> 'a' matches no tensor of the source" in str(caught.value)
    assert "the source's names look like 'b.w'" in str(caught.value)


def test_one_tensor_is_one_and_not_one_tensors() -> None:
    plan = plan_load(model_of({"a": (2,)}), counted({"a": (2,), "b": (2,)}))
    assert plan.findings[0].message == "1 tensor of the source is not wanted by the model: b"


def test_a_vocabulary_is_changed_as_the_advice_says(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    config.vocab_size = 12
    config.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"from_pretrained\(\.\.\., vocab_size=10\)") as caught:
        from_pretrained(tmp_path, progress=False)
    assert [f.kind for f in caught.value.plan.errors] == ["shape"]
    model, _ = from_pretrained(tmp_path, vocab_size=10, progress=False)
    assert tuple(model.get_input_embeddings().weight.shape) == (10, 8)


def test_an_array_among_tensors_is_told_how_to_become_one() -> None:
    with pytest.raises(LoaderContractError) as caught:
        plan_load(model_of({"a": (2,)}), {"a": np.zeros(2)})
    assert "torch.from_numpy" in str(caught.value.hint)
    with pytest.raises(LoaderContractError) as caught:
        plan_load(model_of({"a": (2,)}), {"state_dict": {"a": torch.zeros(2)}})
    assert "checkpoint['state_dict']" in str(caught.value.hint)


# ------------------------------------------------------------------ rules in YAML


@pytest.mark.parametrize(
    "text", ["drop: [*.bias]", "drop:\n- **.bias", "rename:\n  {a}.b: c", "drop: [{x}.b]", "rename: {{a}: b}"]
)
def test_a_pattern_that_yaml_takes_for_something_else_needs_quotes(text: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rules(text)
    assert "needs quotes" in str(caught.value.hint)


def test_a_key_that_is_nearly_right_is_guessed() -> None:
    with pytest.raises(RuleError, match="did you mean 'sources'"):
        parse_rules({"convert": [{"source": "a", "targets": "b", "function": "transpose"}]})
    with pytest.raises(RuleError, match="did you mean 'rename'"):
        parse_rules({"renames": {"a": "b"}})


def test_a_file_of_rules_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    for given in (tmp_path / "rules.yaml", str(tmp_path / "rules.yaml")):
        with pytest.raises(RuleError, match="there is no file") as caught:
            parse_rules(given)
        assert caught.value.hint is None
        assert caught.value.file == str(tmp_path / "rules.yaml")
    with pytest.raises(RuleError) as caught:
        parse_rules("backbone -> model")
    assert "`rename:`" in str(caught.value.hint)


# ------------------------------------------------------------------ reports


def test_a_report_tells_from_which_dtype_to_which_was_cast() -> None:
    model = model_of({f"layers.{i}.w": (2,) for i in range(9)}).to(torch.bfloat16)
    model.register_parameter("b", nn.Parameter(torch.zeros(2, dtype=torch.float16)))
    source = counted({f"layers.{i}.w": (2,) for i in range(9)} | {"b": (2,)})
    text = str(load_into(model, source, progress=False))
    shown = ", ".join(f"layers.{i}.w" for i in range(8))
    assert f"9 from torch.float32 to torch.bfloat16: {shown}, ..." in text
    assert "1 from torch.float32 to torch.float16: b" in text


def test_the_speed_of_a_tiny_load_is_not_told() -> None:
    assert "GB/s" not in str(LoadReport(bytes_read=999_999, seconds=0.1))
    assert "0.01 GB/s" in str(LoadReport(bytes_read=1_000_000, seconds=0.1))


def test_values_that_a_cast_makes_infinite_are_a_warning_with_both_dtypes() -> None:
    model = model_of({"w": (2,)}).half()
    source = {"w": torch.tensor([1.0, 1e6], dtype=torch.bfloat16)}
    for given in (source, iter(source.items())):
        report = load_into(model, given, progress=False)
        assert len(report.warnings) == 1
        assert "torch.bfloat16" in report.warnings[0]
        assert "torch.float16" in report.warnings[0]


# ------------------------------------------------------------------ shapes that have one cause

LLAMA = {
    "vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def built(kind: str = "llama", **sizes: int) -> nn.Module:
    config, model = MODELS[kind]
    return model(config(**{**LLAMA, **sizes}))  # type: ignore[no-any-return]


def plan_of(model: nn.Module, source: nn.Module | Tensors, **options: Any) -> LoadPlan:
    tensors = dict(source.state_dict()) if isinstance(source, nn.Module) else source
    return plan_load(model, tensors, **options)


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("llama", {"hidden_size": 32}, ["hidden_size is 32 in the checkpoint and 16 in the model"]),
        ("llama", {"intermediate_size": 64}, ["intermediate_size is 64 in the checkpoint and 32 in the model"]),
        # Half of it looks like a slice, but the heads are whole.
        ("llama", {"intermediate_size": 16}, ["intermediate_size is 16 in the checkpoint and 32 in the model"]),
        (
            "llama", {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 100},
            ["hidden_size is 32 in", "intermediate_size is 48 in", "vocab_size is 100 in"],
        ),
        ("llama", {"num_key_value_heads": 4}, ["num_key_value_heads is 4 in the checkpoint and 2 in the model"]),
        ("llama", {"num_attention_heads": 8, "head_dim": 4}, ["num_attention_heads is 8 in the checkpoint and 4 in"]),
        ("llama", {"head_dim": 8}, ["head_dim is 8 in the checkpoint and 4 in the model"]),
        ("qwen3", {"head_dim": 8}, ["head_dim is 8 in the checkpoint and 128 in the model"]),
        ("mixtral", {"num_local_experts": 4}, ["num_local_experts is 4 in the checkpoint and 8 in the model"]),
        ("mixtral", {"hidden_size": 32}, ["hidden_size is 32 in the checkpoint and 16 in the model"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_of_another_size_is_said_once_with_the_configs_fields_and_both_values(
    kind: str, sizes: dict[str, int], said: list[str]
) -> None:
    plan = plan_of(built(kind), built(kind, **sizes))
    assert [f.kind for f in plan.errors] == ["shape"]
    message = plan.errors[0].message
    assert message.startswith("the checkpoint is of a model of another size: ")
    for part in said:
        assert part in message
    assert message.count(" in the checkpoint and ") == len(said)
    assert f"{len(plan.mismatched)} parameters do not fit: " in message
    assert set(plan.mismatched) <= set(plan.errors[0].tensors)
    assert "the checkpoint's own config.json" in str(plan.errors[0].hint)


def test_one_tensor_of_another_shape_is_no_model_of_another_size() -> None:
    state = dict(built().state_dict())
    state["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(32, 16)
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 16)
    messages = [f.message for f in plan_of(built(), state).errors]
    assert len(messages) == 2
    assert not any("another size" in message for message in messages)


def test_what_no_size_explains_is_said_besides() -> None:
    state = dict(built(hidden_size=32).state_dict())
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 32)
    messages = [f.message for f in plan_of(built(), state).errors]
    assert len(messages) == 2
    assert "hidden_size is 32" in messages[0]
    assert messages[1].startswith("model.layers.0.mlp.up_proj.weight: the source has [5, 32]")


def sliced(model: nn.Module, world: int) -> Tensors:
    """One rank's part, as tensor parallelism cuts it."""
    part = {}
    for name, tensor in model.state_dict().items():
        rows = any(word in name for word in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head"))
        columns = "o_proj" in name or "down_proj" in name
        part[name] = tensor.chunk(world, 0 if rows else 1)[0].clone() if rows or columns else tensor
    return part


@pytest.mark.parametrize("world", [2, 4])
def test_a_ranks_part_is_recognised_with_its_dimensions_and_the_size_of_the_world(world: int) -> None:
    whole = built(num_key_value_heads=4)
    (found,) = plan_of(whole, sliced(whole, world)).errors
    assert f"one rank's part of a tensor-parallel checkpoint of world size {world}" in found.message
    assert f"dim 0 of lm_head.weight ([{96 // world}, 16] for [96, 16])" in found.message
    assert f"dim 1 of model.layers.0.mlp.down_proj.weight ([16, {32 // world}] for [16, 32])" in found.message
    assert f"join the files of the {world} ranks" in str(found.hint)
    # And the other way around.
    part = model_of({name: tuple(tensor.shape) for name, tensor in sliced(whole, world).items()})
    (found,) = plan_of(part, whole).errors
    assert f"one rank's part of a tensor-parallel model of world size {world}" in found.message


def test_a_ranks_part_of_a_model_with_names_of_its_own_is_recognised_too() -> None:
    model = model_of({"b0.first": (8, 6), "b0.second": (6, 8), "b0.scale": (6,)})
    (found,) = plan_of(model, counted({"b0.first": (4, 6), "b0.second": (6, 4), "b0.scale": (6,)})).errors
    assert "tensor-parallel checkpoint of world size 2" in found.message


def test_placeholders_are_said_once_and_are_no_size() -> None:
    model = built()
    state = {n: t if "norm" in n else torch.empty(0) for n, t in model.state_dict().items()}
    (found,) = plan_of(model, state).errors
    assert found.message.startswith("23 parameters have placeholders (of shape [0]) in the source, not their values: ")
    assert "gather them and save again" in str(found.hint)
    # A tensor that is to be empty is none, and one that lacks a dimension of zero is no placeholder of it.
    assert plan_of(model_of({"a": (0, 4), "b": (2,)}), counted({"a": (0, 4), "b": (2,)})).ok


def test_tensors_that_lie_the_other_way_around_are_mended_by_the_rules_that_are_told() -> None:
    shapes = layers({"up.weight": (6, 4), "down.weight": (4, 6)}, 12)
    source = {name: tensor.t() for name, tensor in counted(shapes).items()}
    plan = plan_of(model_of(shapes), source)
    (found,) = plan.errors
    assert "24 tensors look transposed: layers.*.down.weight ([6, 4] for [4, 6])" in found.message
    assert "square matrices" in str(found.hint)
    model = model_of(shapes)
    load_into(model, source, rules=advised_rules(plan), progress=False)
    for name, tensor in counted(shapes).items():
        assert torch.equal(model.get_parameter(name).data, tensor)


def test_stacked_experts_that_lie_the_other_way_around_are_not_taken_for_a_reshape() -> None:
    shapes = {"a.experts": (3, 4, 6), "b.experts": (3, 6, 4)}
    source = {name: tensor.mT for name, tensor in counted(shapes).items()}
    plan = plan_of(model_of(shapes), source)
    model = model_of(shapes)
    load_into(model, source, rules=advised_rules(plan), progress=False)
    for name, tensor in counted(shapes).items():
        assert torch.equal(model.get_parameter(name).data, tensor)


def test_sizes_in_another_order_are_not_taken_for_a_reshape() -> None:
    (found,) = plan_of(model_of({"w": (2, 3, 4)}), counted({"w": (3, 4, 2)})).errors
    assert "the same sizes in another order" in found.message
    assert "reshape" not in found.text


def test_what_a_rule_made_in_a_wrong_shape_is_the_rules_matter() -> None:
    experts = counted({f"experts.{e}.{part}": (4, 6) for e in range(3) for part in ("up", "gate")})
    one = Convert("experts.{e}.up", "w", "stack_experts")
    for wanted, says in (
        ((3, 6, 4), "transposed=True"),
        ((3, 8, 6), "look at the rule"),
        ((3, 24), "look at the rule"),
    ):
        plan = plan_load(model_of({"w": wanted}), experts, rules=[one])
        assert says in str(plan.errors[0].hint)
        # No rule can take what another has made, and what a wrong rule leaves over is no part of a larger model.
        assert not any("rules=[" in str(f.hint) or "build that model" in str(f.hint) for f in plan.findings)


def test_one_size_that_differs_everywhere_is_said_once_for_a_model_without_a_config() -> None:
    shapes: dict[int, Shapes] = {n: {"up.weight": (12, n), "down.weight": (n, 12), "n.weight": (n,)} for n in (6, 8)}
    (found,) = plan_of(model_of(shapes[8]), counted(shapes[6])).errors
    assert found.message.startswith("3 parameters want 8 where the source has 6: ")
    assert set(found.tensors) == set(shapes[8])


def test_a_head_by_another_name_differs_with_the_vocabulary_of_its_embedding() -> None:
    shapes: dict[int, Shapes] = {n: {"embed.weight": (n, 4), "head.weight": (n, 4)} for n in (60, 64)}
    plan = plan_of(model_of(shapes[64]), counted(shapes[60]))
    assert "the vocabularies of 60 tokens in the source and 64 in the model differ" in plan.errors[0].message
    assert plan_of(model_of(shapes[64]), counted(shapes[60]), rules=advised_rules(plan)).ok


def test_codes_in_the_place_of_numbers_are_said_once() -> None:
    shapes: Shapes = {"q.weight": (4, 4), "k.weight": (2, 4), "norm.weight": (4,)}
    source = {n: t.to(torch.int8) if "norm" not in n else t for n, t in counted(shapes).items()}
    (found,) = plan_of(model_of(shapes), source).errors
    assert found.message == (
        "2 parameters: the source has torch.int8 values, which can't become torch.float32 by a cast: k.weight, q.weight"
    )
    assert found.tensors == ("k.weight", "q.weight")


def test_a_misspelt_target_of_a_rule_is_said_where_the_parameter_is_missing() -> None:
    source = counted({"q": (2, 2), "k": (2, 2), "v": (2, 2), "norm": (2,)})
    rule = Convert(["q", "k", "v"], "qkv.weight", "fuse_qkv")
    plan = plan_load(model_of({"qkv_proj.weight": (6, 2), "norm": (2,)}), source, rules=[rule])
    assert "(did you mean 'qkv_proj.weight'?)" in str(plan.errors[0].hint)


def test_no_tensor_of_another_shape_is_offered_for_one_that_is_missing() -> None:
    plan = plan_of(model_of({"a.qkv_proj": (6, 2), "n": (2,)}), counted({"a.v_proj": (2, 2), "n": (2,)}))
    assert "v_proj' is what" not in str(plan.errors[0].hint)
    plan = plan_of(model_of({"a.v_projs": (2, 2), "n": (2,)}), counted({"a.v_proj": (2, 2), "n": (2,)}))
    assert "if 'a.v_proj' is what the model calls 'a.v_projs'" in str(plan.errors[0].hint)


def test_the_policy_that_is_advised_covers_all_of_a_module_that_is_missing() -> None:
    shapes: Shapes = {"layers.0.mlp.a": (2,), "layers.0.mlp.b": (2,), "layers.0.n": (2,)}
    plan = plan_of(model_of(shapes), counted({"layers.0.n": (2,)}))
    policy = re.search(r"on_missing=(\{.*?\})", str(plan.errors[0].hint))
    assert policy is not None
    assert plan_load(model_of(shapes), counted({"layers.0.n": (2,)}), on_missing=eval(policy[1])).ok


def test_a_part_that_is_there_twice_is_not_looked_for_elsewhere() -> None:
    experts = {name: torch.ones(2) for name in ("e.0", "e.1", "e.01")}
    (found,) = plan_load(model_of({"w": (2, 2)}), experts, rules=[Convert("e.{i}", "w", "stack_experts")]).errors
    assert "comes twice" in found.message
    assert "drop rule" in str(found.hint)


@pytest.mark.parametrize(
    ("have", "want", "remark"),
    [
        (128, 100, "the source's looks padded to a multiple of 128"),
        (100, 128, "the model's looks padded to a multiple of 128"),
        (99, 96, "3 tokens were probably added in training"),
        (4000, 96, ""),
    ],
)
def test_vocabularies_that_differ_are_told_once_with_both_sizes_and_what_it_looks_like(
    have: int, want: int, remark: str
) -> None:
    plan = plan_of(built(vocab_size=want), built(vocab_size=have))
    (found,) = plan.errors
    assert f"the vocabularies of {have} tokens in the source and {want} in the model differ" in found.message
    assert found.message.endswith(f"; {remark}" if remark else ")")
    assert f"vocab_size={have}" in str(found.hint)
    assert ("pad_rows" in str(found.hint)) is (want > have)
    if want > have:
        model = built(vocab_size=want)
        rules = eval(re.search(r"rules=(\[.*\])", str(found.hint))[1], {"Convert": Convert})  # type: ignore[index]
        load_into(model, dict(built(vocab_size=have).state_dict()), rules=rules, progress=False)
        assert not model.get_parameter("lm_head.weight")[have:].any()


# ------------------------------------------------------------------ a part of a model that is, or is not, there


def test_fewer_layers_and_more_are_told_with_the_configs_field() -> None:
    plan = plan_of(built(), built(num_hidden_layers=2))
    assert "the source has 2 layers, the model 3" in str(plan.errors[0].hint)
    assert "num_hidden_layers=2" in str(plan.errors[0].hint)
    plan = plan_of(built(), built(num_hidden_layers=5))
    assert plan.ok
    (found,) = [f for f in plan.findings if f.kind == "unexpected"]
    assert found.message.startswith("18 tensors of the source are not wanted by the model: model.layers.3.* (9)")
    assert "the source has 5 layers, the model 3" in str(found.hint)
    assert "num_hidden_layers=5" in str(found.hint)
    # One from the middle is no model with fewer.
    state = {name: t for name, t in built().state_dict().items() if ".layers.1." not in name}
    assert "incomplete" in str(plan_of(built(), state).errors[0].hint)


def test_a_head_is_told_from_a_hole_in_both_directions() -> None:
    body, head = {"encoder.w": (2, 2), "encoder.b": (2,)}, {"classifier.w": (2, 2)}
    plan = plan_of(model_of({**body, **head}), counted(body))
    assert plan.missing == ["classifier.w"]
    hint = str(plan.errors[0].hint)
    assert "the source has all of encoder and nothing of classifier" in hint
    assert "on_missing={'classifier': 'warn'}" in hint
    assert plan_of(model_of({**body, **head}), counted(body), on_missing={"classifier": "warn"}).ok
    plan = plan_of(model_of(body), counted({**body, **head}))
    assert plan.ok
    assert plan.unexpected == ["classifier.w"]
    (found,) = plan.findings
    assert "the source is of a model that has classifier besides" in str(found.hint)
    assert plan_of(model_of(body), counted({**body, **head}), on_unexpected={"classifier": "ignore"}).ok
    hole = plan_of(model_of({**body, **head}), counted({"encoder.w": (2, 2), **head}))
    assert "the checkpoint is incomplete" in str(hole.errors[0].hint)
    assert "classifier" not in str(hole.errors[0].hint)


def test_a_head_that_may_be_the_embedding_once_more_is_told_so() -> None:
    state = {name: t for name, t in built().state_dict().items() if "lm_head" not in name}
    assert "tie_word_embeddings=True" in str(plan_of(built(), state).errors[0].hint)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["base_model.model.a.lora_A.default.weight", "base_model.model.a.lora_B.default.weight"], "merge_and_unload"),
        (["a.lora_magnitude_vector.weight"], "LoRA adapter"),
        (["base_model.model.a.ia3_l.weight"], "an adapter's of peft (IA3"),
        (["base_model.model.score.modules_to_save.weight"], "modules_to_save"),
        (["prompt_encoder.default.embedding.weight"], "an adapter's of peft"),
        (["base_model.model.a.w", "base_model.model.b.w"], "rules=[Rename('base_model.model', '')]"),
        (["state.0.exp_avg", "state.0.exp_avg_sq"], "an optimizer's states"),
        (["experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"], "quantised checkpoint"),
        (["layers.0.mlp.experts.3.w1.tq_packed"], "quantised checkpoint"),
    ],
)
def test_what_is_no_model_by_itself_is_called_by_its_name_with_what_to_do(names: list[str], said: str) -> None:
    strangers = counted(dict.fromkeys(names, (2,)))
    own: Shapes = {"a.w": (2,), "b.w": (2,)}
    assert said in str(plan_of(model_of(own), strangers).errors[0].hint)
    beside = plan_of(model_of(own), {**counted(own), **strangers})
    assert beside.ok
    assert sorted(beside.unexpected) == sorted(names)
    assert said in str(next(f.hint for f in beside.findings if f.kind == "unexpected"))


@pytest.mark.parametrize(
    ("missing", "packed"),
    [
        ("mlp.experts.gate_up_proj", ["mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"]),
        ("mlp.w1.weight", ["mlp.w1.qweight", "mlp.w1.qzeros", "mlp.w1.g_idx"]),
        ("mlp.experts.gate_up_proj", ["mlp.experts.0.w1.tq_packed", "mlp.experts.0.w3.tq_packed"]),
    ],
)
def test_packed_weights_are_paired_with_what_is_missing(missing: str, packed: list[str]) -> None:
    rest: Shapes = {"norm.weight": (2,)}
    plan = plan_of(model_of({missing: (2, 2), **rest}), counted({**dict.fromkeys(packed, (2,)), **rest}))
    assert (plan.missing, sorted(plan.unexpected)) == ([missing], sorted(packed))
    hint = str(plan.errors[0].hint)
    assert f"in the place of {missing} the source has {', '.join(sorted(packed))}" in hint
    assert "quantization_config" in hint


def test_companions_of_quantised_weights_are_spoken_of_only_where_they_are_not_loaded() -> None:
    shapes: Shapes = {"a.qweight": (2,), "a.weight_scale": (1,)}
    plan = plan_of(model_of(shapes), counted({**shapes, "b.other": (2,)}))
    assert plan.ok
    assert "quant" not in str(plan)
    plan = plan_of(model_of(shapes), counted({**shapes, "a.g_idx": (2,)}))
    assert plan.ok
    assert "a.g_idx" in str(plan)
    assert "quantization_config" in str(plan)


# ------------------------------------------------------------------ names, together


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rt_detr", "model", "begin with 'rt_detr.' where the model's begin with 'model.'"),
        ("", "backbone", "lack the prefix 'backbone.' of the model's"),
        ("backbone", "", "begin with 'backbone.', the model's don't"),
    ],
)
def test_hundreds_of_names_with_one_fault_are_one_finding_with_the_rule_that_mends_it(
    old: str, new: str, said: str
) -> None:
    def named(prefix: str) -> Shapes:
        return {f"{prefix}.{name}".removeprefix("."): s for name, s in layers({"w": (2,), "b": (2,)}, 250).items()}

    plan = plan_of(model_of(named(new)), counted(named(old)))
    assert (len(plan.missing), len(plan.unexpected), len(plan.errors)) == (500, 500, 1)
    assert len(str(plan)) < 1500
    assert f"(the source's {said})" in str(plan.errors[0].hint)
    assert plan_of(model_of(named(new)), counted(named(old)), rules=advised_rules(plan)).ok


def test_a_rule_for_names_as_they_are_further_in_is_said_to_match_nothing() -> None:
    names: Shapes = {"model.layers.61.w": (2,), "model.layers.0.w": (2,)}
    plan = plan_of(model_of(names), counted(names), rules=[Rename("layers.61", "mtp"), Drop("layers.62")])
    assert plan.ok
    said = [f.message for f in plan.findings]
    assert "rename 'layers.61' -> 'mtp' matches no tensor of the source" in said
    assert any("layers.62" in message and "matches no tensor" in message for message in said)


# ------------------------------------------------------------------ weight_norm


def old_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), torch.nn.utils.weight_norm(nn.Conv1d(3, 4, 2)))


def new_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("prefix", ["", "model."])
def test_weight_norm_loads_from_either_of_torchs_spellings_into_either(prefix: str) -> None:
    values = torch.randn(1, 2, 9)
    for source in (old_norm(), new_norm()):
        for target in (old_norm(), new_norm()):
            state = {f"{prefix}{name}": tensor.clone() for name, tensor in source.state_dict().items()}
            plan = plan_load(target, state)
            assert plan.ok
            assert not plan.unexpected
            assert not any(f.severity == "warning" for f in plan.findings)
            plan.run(target)
            assert torch.equal(source(values), target(values))


@pytest.mark.parametrize("prefix", ["module", "model", "net"])
def test_a_prefix_that_all_names_carry_is_advised_and_not_the_one_of_those_that_are_left(prefix: str) -> None:
    model = nn.Module()
    model.register_buffer("w", torch.zeros(2))
    model.add_module(prefix, nn.Module())
    model.get_submodule(prefix).register_buffer("w", torch.zeros(2))
    held = {f"{prefix}.w": torch.ones(2), f"{prefix}.{prefix}.w": torch.full((2,), 2.0)}
    plan = plan_load(model, held, automatic=False)
    assert f"rules=[Rename({prefix!r}, '')]" in str(plan.errors[0])
    load_into(model, held, rules=Rename(prefix, ""), progress=False)
    assert (model.w[0], model.get_submodule(prefix).w[0]) == (1, 2)


def test_a_rename_that_another_one_leaves_nothing_to_is_told_what_became_of_its_names():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2)])
    stored = {"enc.0.w": torch.ones(2, 2), "enc.0.bias": torch.ones(2)}
    rules = [Rename("enc", "blocks"), Rename("enc.*.w", "blocks.*.weight")]
    plan = plan_load(model, stored, rules=rules)
    said = next(finding for finding in plan.findings if finding.kind == "rule")
    assert "comes too late: by the rules before it, 'enc.0.w' is 'blocks.0.w' already" in said.message
    assert said.hint == "put it before these"
    assert "if 'enc.0.w' is what the model calls 'blocks.0.weight'" in str(plan.errors[0].hint)
    assert plan_load(model, stored, rules=rules[::-1]).ok


def test_where_nothing_fits_the_hint_names_what_the_source_holds():
    model = nn.Linear(2, 2)
    plan = plan_load(model, {"encoder.a": torch.ones(3), "encoder.b": torch.ones(3)})
    assert "the source holds encoder.* (2)" in str(plan.errors[0].hint)
    assert "rules=[Rename(old, new)]" in str(plan.errors[0].hint)
