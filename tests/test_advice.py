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
from transformers import LlamaConfig, LlamaForCausalLM

from weightloaders import Convert, Rename, from_pretrained, load_into, plan_load
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
    assert [re.sub(r".*\.(\w+)\.weight:.*", r"\1", f.message) for f in other.errors] == sorted(QKV)
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
