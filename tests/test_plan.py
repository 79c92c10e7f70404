"""Planning without reading: what fits, what doesn't and why, what is tied, cast or fused, and how the plan says it."""

from __future__ import annotations

import json
import re
import struct
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from weightloaders import Convert, Drop, Extent, Rename, TensorInfo, Weights, load_into, open_weights, plan_load
from weightloaders.errors import ModelError, PlanError, RuleError, UnknownTensorError
from weightloaders.plan import ComputeStep, CopyStep, LoadPlan, Policies, step_infos

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


def counted(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape).to(dtype)


class Layer(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.norm = nn.LayerNorm(size)


class Body(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(4, 8, bias=False)


def state(model: nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def save(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name)
    return folder


def finding(plan: LoadPlan, kind: str) -> Any:
    found = [f for f in plan.findings if f.kind == kind]
    assert len(found) == 1, str(plan)
    return found[0]


def no_reading(tensors: Tensors) -> Weights:
    """A catalogue that fails as soon as anything is read."""

    def fail() -> torch.Tensor:
        pytest.fail("a tensor was read while planning")

    return Weights.describe([TensorInfo(n, t.dtype, tuple(t.shape), read=fail) for n, t in tensors.items()])


# ------------------------------------------------------------------ a plan that fits


def test_a_plan_reads_nothing_and_changes_nothing() -> None:
    model = Headed()
    before = state(model)
    plan = plan_load(model, no_reading(state(Headed())))
    assert plan.ok
    assert plan.loaded == list(dict.fromkeys(plan.loaded))
    assert set(plan.loaded) == set(before)
    assert (plan.missing, plan.unexpected, plan.mismatched, plan.findings) == ([], [], [], [])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_plan_carried_out_fills_the_model(tmp_path: Path) -> None:
    source, model = Headed(), Headed()
    save(tmp_path / "m", state(source))
    plan = plan_load(model, tmp_path / "m")
    assert plan.bytes_to_read == sum(t.nbytes for t in source.state_dict().values())
    report = plan.run(model)
    assert report.bytes_read == plan.bytes_to_read
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_a_header_of_many_gigabytes_plans_like_a_small_one(tmp_path: Path) -> None:
    layers, size = 40, 8192
    names = [f"layers.{i}.weight" for i in range(layers)]
    header, at = {}, 0
    for name in names:
        header[name] = {"dtype": "F32", "shape": [size, size], "data_offsets": [at, at + 4 * size * size]}
        at += 4 * size * size
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
    plan = plan_load(model, file)
    assert plan.ok
    assert plan.bytes_to_read == at == 40 * 4 * 8192 * 8192
    fused = nn.Module()
    with torch.device("meta"):
        fused.weight = nn.Parameter(torch.empty(layers, size, size))
    plan = plan_load(fused, file, rules=[Convert("layers.{i}.weight", "weight", "stack_experts")])
    assert plan.ok
    assert plan.bytes_to_read == at


def test_fewer_bytes_are_read_where_only_a_part_is_wanted(tmp_path: Path) -> None:
    save(tmp_path / "m", {"w": counted(10, 4)})
    model = nn.Linear(4, 3, bias=False)
    plan = plan_load(model, tmp_path / "m", rules=[Convert("w", "weight", lambda w: w[2:5])])
    assert plan.bytes_to_read == 3 * 4 * 4
    assert plan.run(model).bytes_read == plan.bytes_to_read
    assert torch.equal(model.weight.data, counted(10, 4)[2:5])


def test_a_plan_is_for_one_model_only(tmp_path: Path) -> None:
    save(tmp_path / "m", state(Headed()))
    plan = plan_load(Headed(), tmp_path / "m")
    with pytest.raises(PlanError, match="made for another model"):
        plan.run(Headed())


def test_a_lazy_module_is_asked_for_its_shapes_first() -> None:
    with pytest.raises(ModelError, match="'weight' has no shape yet"):
        plan_load(nn.LazyLinear(4), {"weight": counted(4, 4)})


def test_dimensions_of_zero_are_fine(tmp_path: Path) -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 4))
    model.none = nn.Parameter(torch.empty(0))
    model.w = nn.Parameter(torch.zeros(2))
    save(
        tmp_path / "m", {"empty": torch.empty(0, 4), "none": torch.empty(0), "w": counted(2), "more": torch.empty(3, 0)}
    )
    plan = plan_load(model, tmp_path / "m")
    assert plan.ok
    assert plan.unexpected == ["more"]
    assert set(plan.run(model).loaded) == {"empty", "none", "w"}


def test_a_scalar_and_a_vector_of_one_are_the_same_thing(tmp_path: Path) -> None:
    for stored, wanted in (((), (1,)), ((1,), ())):
        model = nn.Module()
        model.scale = nn.Parameter(torch.zeros(wanted))
        save(tmp_path / "m", {"scale": torch.full(stored, 3.0)})
        plan = plan_load(model, tmp_path / "m")
        assert plan.ok
        plan.run(model)
        assert model.scale.item() == 3.0


# ------------------------------------------------------------------ missing


def test_a_missing_parameter_is_named_with_its_file_the_cause_and_what_to_do(tmp_path: Path) -> None:
    tensors = state(Headed())
    del tensors["model.layers.1.o_proj.weight"]
    model = Headed()
    before = state(model)
    plan = plan_load(model, save(tmp_path / "m", tensors))
    assert plan.missing == ["model.layers.1.o_proj.weight"]
    with pytest.raises(PlanError) as caught:
        plan.run(model)
    message = str(caught.value)
    assert "1 of 14 parameters is not in the source: model.layers.1.o_proj.weight" in message
    assert str(tmp_path / "m" / "model.safetensors") in message
    assert "the checkpoint is incomplete: fetch or export it again" in message
    assert "on_missing={'model.layers.1.o_proj.weight': 'warn'}" in message
    assert caught.value.tensor == "model.layers.1.o_proj.weight"
    assert caught.value.plan is plan
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_file_named_is_the_one_its_neighbours_lie_in(tmp_path: Path) -> None:
    tensors = state(Headed())
    del tensors["model.layers.2.o_proj.weight"]
    last = {name: t for name, t in tensors.items() if ".2." in name}
    save(tmp_path / "m", {n: t for n, t in tensors.items() if n not in last}, "model-00001-of-00002.safetensors")
    save(tmp_path / "m", last, "model-00002-of-00002.safetensors")
    plan = plan_load(Headed(), tmp_path / "m")
    assert str(plan.errors[0].file).endswith("model-00002-of-00002.safetensors")


def test_whole_modules_that_are_missing_are_named_as_such() -> None:
    tensors = {n: t for n, t in state(Headed()).items() if "layers.1." not in n and "layers.2.norm" not in n}
    message = plan_load(Headed(), tensors).errors[0].message
    assert message == "6 of 14 parameters are not in the source: model.layers.1.* (4), model.layers.2.norm.* (2)"


def test_the_nearest_name_is_offered() -> None:
    tensors = state(Headed())
    tensors["model.layers.0.out_proj.weight"] = tensors.pop("model.layers.0.o_proj.weight")
    plan = plan_load(Headed(), tensors)
    assert "if 'model.layers.0.out_proj.weight' is what the model calls 'model.layers.0.o_proj.weight'" in str(
        plan.errors[0].hint
    )


def test_a_persistent_buffer_is_wanted_like_a_parameter() -> None:
    tensors = state(nn.BatchNorm1d(4))
    del tensors["running_mean"]
    assert plan_load(nn.BatchNorm1d(4), tensors).missing == ["running_mean"]


def test_an_empty_source_is_an_error_whatever_the_policy() -> None:
    for policy in ("error", "warn", "ignore"):
        plan = plan_load(Headed(), {}, on_missing=policy)  # type: ignore[arg-type]
        assert not plan.ok
    assert "holds no tensors" in plan.errors[0].message


def test_nothing_covered_is_an_error_whatever_the_policy() -> None:
    plan = plan_load(Headed(), {"a": counted(2), "b": counted(3)}, on_missing="ignore", on_unexpected="ignore")
    assert finding(plan, "nothing").severity == "error"
    assert "none of 2 tensors was matched" in plan.errors[0].message
    assert "begin like 'a', the model's like 'model.embed.weight'" in str(plan.errors[0].hint)


def test_nothing_covered_by_one_wrong_prefix_says_which() -> None:
    tensors = {f"rt_detr.{n.removeprefix('model.')}": t for n, t in state(Headed()).items()}
    plan = plan_load(Headed(), tensors, on_missing="warn")
    assert finding(plan, "nothing").severity == "error"
    assert "rules=[Rename('rt_detr', 'model')]" in str(finding(plan, "nothing").hint)


def test_a_model_without_parameters_needs_nothing() -> None:
    assert plan_load(nn.ReLU(), {}).ok


# ------------------------------------------------------------------ unexpected


def test_unexpected_tensors_are_listed_once_with_their_file(tmp_path: Path) -> None:
    tensors = {**state(Headed()), "extra.a": counted(2), "extra.b": counted(3)}
    plan = plan_load(Headed(), save(tmp_path / "m", tensors))
    assert plan.ok
    assert plan.unexpected == ["extra.a", "extra.b"]
    found = finding(plan, "unexpected")
    assert found.severity == "warning"
    assert found.message == "2 tensors of the source are not wanted by the model: extra.* (2)"
    assert found.file == str(tmp_path / "m" / "model.safetensors")
    assert found.tensors == ("extra.a", "extra.b")


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (
            [
                "base_model.model.model.layers.0.q_proj.lora_A.weight",
                "base_model.model.model.layers.0.q_proj.lora_B.weight",
            ],
            "LoRA adapter",
        ),
        (["model.layers.0.q_proj.base_layer.weight"], "LoRA adapter"),
        (["model.layers.0.q_proj.qweight", "model.layers.0.q_proj.qzeros"], "quantization_config"),
        (["model.layers.0.q_proj.g_idx"], "quantization_config"),
        (["model.layers.0.q_proj.weight.absmax"], "quantization_config"),
        (["model.layers.0.q_proj.weight.quant_state.bitsandbytes__nf4"], "quantization_config"),
        (["model.layers.0.q_proj.weight_scale_inv"], "quantization_config"),
        (["model.layers.0.self_attn.k_scale"], "quantization_config"),
        (["model.layers.0.q_proj.weight_packed"], "quantization_config"),
        (["blk.0.attn_q.weight"], "GGUF"),
        (["layers.0.attention.wq.weight"], "original release"),
        (["_fsdp_wrapped_module._flat_param"], "full state dict"),
    ],
)
def test_names_that_give_themselves_away_are_explained(names: list[str], cause: str) -> None:
    strangers = {name: counted(2) for name in names}
    # Alone they are why everything is missing; beside a whole checkpoint they are merely too much.
    assert cause in str(plan_load(Headed(), strangers).errors[0].hint)
    beside = plan_load(Headed(), {**state(Headed()), **strangers})
    assert beside.ok
    assert cause in str(finding(beside, "unexpected").hint)


def test_packed_weights_in_the_place_of_plain_ones_are_an_error() -> None:
    tensors = {n.replace("o_proj.weight", "o_proj.weight_packed"): t for n, t in state(Headed()).items()}
    plan = plan_load(Headed(), tensors)
    assert len(plan.missing) == len(plan.unexpected) == 3
    assert "quantization_config" in str(plan.errors[0].hint)


# ------------------------------------------------------------------ mismatched


def test_a_wrong_shape_is_named_with_both_shapes_and_the_file(tmp_path: Path) -> None:
    tensors = {**state(Headed()), "model.layers.1.o_proj.weight": counted(4, 5)}
    plan = plan_load(Headed(), save(tmp_path / "m", tensors))
    assert plan.mismatched == ["model.layers.1.o_proj.weight"]
    assert plan.missing == []
    with pytest.raises(PlanError) as caught:
        plan.raise_if_errors()
    assert "model.layers.1.o_proj.weight: the source has [4, 5], the model wants [4, 4]" in str(caught.value)
    assert str(tmp_path / "m" / "model.safetensors") in str(caught.value)
    assert "compare its config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "wanted", "hint"),
    [
        ((4, 6), (6, 4), "Convert('weight', 'weight', 'transpose')"),
        ((6, 4, 1), (6, 4), "Convert('weight', 'weight', 'reshape', shape=[6, 4])"),
        ((24,), (6, 4), "Convert('weight', 'weight', 'reshape', shape=[6, 4])"),
        ((3, 4), (6, 4), "one rank's part of a tensor-parallel checkpoint"),
        ((6, 2), (6, 8), "one rank's part of a tensor-parallel checkpoint"),
        ((5, 4), (6, 4), "a model of another size"),
        ((5, 3), (6, 4), "different architectures or sizes"),
        ((5,), (6, 4), "different architectures or sizes"),
        ((0,), (6, 4), "partitioned (ZeRO-3)"),
        ((1,), (6, 4), "partitioned (ZeRO-3)"),
        ((0, 4), (6, 4), "partitioned (ZeRO-3)"),
    ],
)
def test_the_likely_cause_of_a_wrong_shape_is_named(
    stored: tuple[int, ...], wanted: tuple[int, ...], hint: str
) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(wanted))
    plan = plan_load(model, {"weight": torch.zeros(stored)})
    assert plan.errors[0].kind == "shape"
    assert hint in str(plan.errors[0].hint)


@pytest.mark.parametrize(("stored", "wanted"), [((4, 6), (6, 4)), ((6, 4, 1), (6, 4)), ((24,), (6, 4))])
def test_a_rule_that_is_offered_for_a_shape_works(stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(wanted))
    hint = str(plan_load(model, {"weight": counted(*stored)}).errors[0].hint)
    rules = eval(hint[hint.index("rules=") + len("rules=") :], {"Convert": Convert})
    assert plan_load(model, {"weight": counted(*stored)}, rules=rules).ok


def test_placeholders_are_an_error_whatever_the_policy() -> None:
    tensors = {n: t if "norm" in n else torch.empty(0) for n, t in state(Headed()).items()}
    plan = plan_load(Headed(), tensors, on_mismatch="ignore")
    assert len(plan.mismatched) == 8
    assert plan.errors
    assert all("ZeRO-3" in str(f.hint) and "ignore" not in str(f.hint) for f in plan.errors)


@pytest.mark.parametrize(("have", "want"), [(10, 16), (10, 8)])
def test_vocabularies_of_other_sizes_are_told_with_the_option_and_never_cut(have: int, want: int) -> None:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(want, 4)
    plan = plan_load(model, {"embed_tokens.weight": counted(have, 4)})
    assert f"vocabularies of {have} and {want}" in plan.errors[0].message
    hint = str(plan.errors[0].hint)
    assert f"vocab_size={have}" in hint
    assert f"resize_token_embeddings({have})" in hint
    assert ("pad_rows" in hint) == (want > have)
    if want > have:
        rules = eval(hint[hint.index("rules=") + len("rules=") :], {"Convert": Convert})
        load_into(model, {"embed_tokens.weight": counted(have, 4)}, rules=rules, progress=False)
        assert torch.equal(model.embed_tokens.weight.data, torch.cat([counted(have, 4), torch.zeros(want - have, 4)]))


def test_a_mismatch_that_is_allowed_leaves_the_parameter_unfilled() -> None:
    tensors = {**state(Headed()), "lm_head.weight": counted(9, 4)}
    plan = plan_load(Headed(), tensors, on_mismatch={"lm_head": "warn"})
    assert plan.ok
    assert plan.mismatched == plan.unfilled == ["lm_head.weight"]
    assert plan.missing == []
    assert "lm_head.weight" not in plan.loaded


# ------------------------------------------------------------------ policies


def test_policies_by_pattern_decide_name_by_name() -> None:
    tensors = state(Headed())
    for name in ("lm_head.weight", "model.layers.0.norm.bias", "model.layers.1.norm.bias"):
        del tensors[name]
    plan = plan_load(Headed(), tensors, on_missing={"lm_head": "ignore", "layers.*.norm": "warn"})
    assert plan.ok
    assert {f.severity: f.tensors for f in plan.findings} == {
        "info": ("lm_head.weight",),
        "warning": ("model.layers.0.norm.bias", "model.layers.1.norm.bias"),
    }
    assert sorted(plan.unfilled) == sorted(plan.missing)
    plan = plan_load(Headed(), tensors, on_missing={"layers.0": "warn", re.compile("head"): "ignore"})
    assert [f.tensors for f in plan.errors] == [("model.layers.1.norm.bias",)]


def test_the_first_pattern_that_matches_counts() -> None:
    policies = Policies(missing={"a.b": "ignore", "a": "warn", "**": "error"}, unexpected={"a": "error"})
    assert [policies.missing(name) for name in ("a.b.c", "a.c", "x.a.b", "c")] == ["info", "warning", "info", "error"]
    assert [policies.unexpected(name) for name in ("a", "b")] == ["error", "warning"]
    assert policies.mismatched("a") == "error"


def test_each_policy_has_its_severity() -> None:
    for policy, severity in (("error", "error"), ("warn", "warning"), ("ignore", "info")):
        policies = Policies(policy, policy, policy)  # type: ignore[arg-type]
        assert {policies.missing("a"), policies.unexpected("a"), policies.mismatched("a")} == {severity}


def test_an_unexpected_tensor_may_be_an_error() -> None:
    plan = plan_load(Headed(), {**state(Headed()), "extra": counted(2)}, on_unexpected="error")
    assert [f.kind for f in plan.errors] == ["unexpected"]


@pytest.mark.parametrize(
    "value", ["Error", "", None, 3, ["error"], {"a": "never"}, {"a": ["warn"]}, {3: "warn"}, {"a*": "warn"}]
)
def test_a_policy_that_is_none_is_refused(value: Any) -> None:
    for option in ("on_missing", "on_unexpected", "on_mismatch"):
        with pytest.raises(RuleError):
            plan_load(Headed(), {}, **{option: value})


# ------------------------------------------------------------------ prefixes and wrappers


def test_a_known_prefix_is_stripped_or_added_where_that_makes_the_plan_whole() -> None:
    stripped = {f"transformer.{n}": t for n, t in state(Headed()).items()}
    plan = plan_load(Headed(), stripped)
    assert plan.ok
    assert plan.decided_by[-1] == "automatic rename 'transformer' -> ''"
    assert "all 14 names of the source begin with 'transformer.', which was left out" in finding(plan, "rename").message
    assert plan.renamed["transformer.lm_head.weight"] == "lm_head.weight"

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Body()

    plan = plan_load(Outer(), state(Body()))
    assert plan.ok
    assert plan.decided_by[-1] == "automatic rename '' -> 'model'"


def test_a_known_prefix_is_not_applied_where_something_would_still_be_missing() -> None:
    body_only = {n: t for n, t in state(Body()).items() if n != "embed.weight"}
    assert plan_load(Headed(), body_only, on_missing="warn").renamed == {}
    plan = plan_load(Headed(), body_only)
    assert not plan.ok
    assert set(plan.missing) == set(state(Headed()))
    hint = str(plan.errors[0].hint)
    assert "rules=[Rename('', 'model')]" in hint
    assert "still missing would be model.embed.weight, lm_head.weight" in hint


def test_a_base_only_checkpoint_in_a_headed_model_misses_just_the_head() -> None:
    plan = plan_load(Headed(), state(Body()), rules=[Rename("", "model")])
    assert plan.missing == ["lm_head.weight"]
    assert plan.unexpected == []
    plan = plan_load(Body(), state(Headed()), rules=[Rename("model", "")])
    assert plan.ok
    assert plan.unexpected == ["lm_head.weight"]


def test_body_names_without_prefix_beside_a_head_are_told_exactly() -> None:
    mixed = {**state(Body()), "lm_head.weight": counted(8, 4)}
    plan = plan_load(Headed(), mixed)
    # Adding the prefix to the head as well would lose it; automatic steps leave the model's own names alone.
    assert plan.ok
    assert "lm_head.weight" not in plan.renamed


def test_an_unknown_prefix_is_refused_with_the_rule_that_mends_it() -> None:
    for old, new in (("backbone", "model"), ("backbone.core", "model"), ("encoder.backbone", "model")):
        tensors = {f"{old}.{n.removeprefix('model.')}": t for n, t in state(Headed()).items()}
        plan = plan_load(Headed(), tensors)
        hint = str(plan.errors[0].hint)
        assert f"rules=[Rename({old!r}, {new!r})]" in hint
        rules = eval(re.search(r"rules=(\[.*?\])", hint)[1], {"Rename": Rename})  # type: ignore[index]
        assert plan_load(Headed(), tensors, rules=rules).ok


def test_a_stripped_unknown_prefix_is_offered_too() -> None:
    tensors = {f"my.backbone.{n}": t for n, t in state(Headed()).items()}
    plan = plan_load(Headed(), tensors)
    assert not plan.ok
    assert "rules=[Rename('my.backbone', '')]" in str(plan.errors[0].hint)
    assert plan_load(Headed(), tensors, rules=[Rename("my.backbone", "")]).ok


def test_several_prefixes_that_would_do_are_offered_not_chosen() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

    tensors = {"model.w": counted(2), "net.w": counted(2, start=5)}
    plan = plan_load(Twice(), tensors)
    assert not plan.ok
    assert finding(plan, "rename").message == (
        "several prefixes would make the source fit: rename 'model' -> '', rename 'net' -> ''"
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: f"module.{n}",
        lambda n: f"_orig_mod.{n}",
        lambda n: f"module._orig_mod.{n}",
        lambda n: re.sub(r"layers\.(\d+)\.", r"layers.\1._checkpoint_wrapped_module.", n),
        lambda n: "_fsdp_wrapped_module." + re.sub(r"layers\.(\d+)\.", r"layers.\1._fsdp_wrapped_module._orig_mod.", n),
    ],
)
def test_wrappers_are_removed_or_put_in_at_any_depth(wrap: Any) -> None:
    plain, wrapped = state(Headed()), {wrap(n): t for n, t in state(Headed()).items()}
    plan = plan_load(Headed(), wrapped)
    assert plan.ok
    assert plan.renamed == {wrap(n): n for n in plain if wrap(n) != n}

    model = nn.Module()
    for name, tensor in wrapped.items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, nn.Parameter(tensor))
    assert plan_load(model, plain).ok
    assert plan_load(model, wrapped).ok
    assert plan_load(model, {f"_orig_mod.{n}": t for n, t in wrapped.items()}).ok


def test_a_wrapped_model_with_fused_parts_takes_plain_parts() -> None:
    inner = Fused()
    outer = nn.Module()
    outer._orig_mod = inner
    plan = plan_load(outer, parts_of_fused())
    assert plan.ok, str(plan)
    plan.run(outer)
    assert torch.equal(inner.attn.qkv_proj.weight.data, counted(12, 4))


def test_a_module_that_is_called_like_a_wrapper_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    model.other = nn.Linear(2, 2)
    plan = plan_load(model, state(model))
    assert plan.ok
    assert plan.renamed == {}


def test_weight_norms_two_spellings_are_one() -> None:
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    old_names = {
        "bias": new.bias.data,
        "weight_g": new.parametrizations.weight.original0.data,  # type: ignore[union-attr, index]
        "weight_v": new.parametrizations.weight.original1.data,  # type: ignore[union-attr, index]
    }
    plan = plan_load(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), old_names)
    assert plan.ok
    assert plan.unexpected == []

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Module()
            for name, tensor in old_names.items():
                self.conv.register_parameter(name, nn.Parameter(tensor))

    plan = plan_load(Old(), {f"conv.{n}": t for n, t in new.state_dict().items()})
    assert plan.ok
    assert plan.unexpected == []


# ------------------------------------------------------------------ derived


class Rotary(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("position_ids", torch.arange(4), persistent=persistent)
        self.register_buffer("mask", torch.zeros(3), persistent=False)


def test_what_is_computed_is_ignored_quietly_where_it_is_too_much() -> None:
    tensors = {
        "w": counted(2),
        "position_ids": torch.arange(4),
        "mask": counted(3),
        "layers.3.rotary_emb.inv_freq": counted(2),
    }
    plan = plan_load(Rotary(persistent=False), tensors)
    assert plan.ok
    assert plan.findings == []
    assert sorted(plan.ignored) == ["layers.3.rotary_emb.inv_freq", "mask", "position_ids"]
    assert "ignored" in plan.explain("mask")


def test_what_is_computed_is_ignored_under_a_wrapper_or_prefix_too() -> None:
    for prefix in ("module", "model"):
        plan = plan_load(Rotary(persistent=False), {f"{prefix}.w": counted(2), f"{prefix}.mask": counted(3)})
        assert plan.ok
        assert plan.unexpected == []


def test_what_is_computed_is_listed_where_it_is_absent_though_persistent() -> None:
    plan = plan_load(Rotary(persistent=True), {"w": counted(2)})
    assert plan.ok
    assert plan.missing == []
    found = finding(plan, "derived")
    assert (found.severity, found.tensors) == ("info", ("position_ids",))


def test_it_is_loaded_where_both_have_it() -> None:
    model = Rotary(persistent=True)
    plan = plan_load(model, {"w": counted(2), "position_ids": torch.arange(4) + 7})
    plan.run(model)
    assert model.position_ids.tolist() == [7, 8, 9, 10]


def test_a_parameter_is_learnt_whatever_it_is_called() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    model.inv_freq = nn.Parameter(torch.zeros(2))
    plan = plan_load(model, {"w": counted(2)})
    assert plan.missing == ["inv_freq"]
    assert not plan.ok


# ------------------------------------------------------------------ dtypes

CODES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float64, torch.float32, True),
        (torch.float16, torch.float64, True),
        (torch.int64, torch.int64, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
        (torch.int64, torch.int32, False),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.bool, torch.float32, False),
        (torch.uint8, torch.bfloat16, False),
        (torch.int8, torch.bfloat16, False),
        (torch.int32, torch.uint8, False),
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.complex64, False),
        (torch.float8_e4m3fn, torch.float32, False),
        (torch.float8_e4m3fn, torch.float8_e5m2, False),
        (torch.bfloat16, torch.float8_e4m3fn, False),
    ],
)
def test_only_real_floating_point_is_cast_to_real_floating_point(
    stored: torch.dtype, wanted: torch.dtype, fits: bool
) -> None:
    model = nn.Module()
    model.register_buffer("w", torch.zeros(2, 2).to(wanted))
    plan = plan_load(model, no_reading({"w": torch.zeros(2, 2).to(stored)}))
    assert plan.ok == fits
    if not fits:
        found = finding(plan, "dtype")
        assert str(stored) in found.message
        assert str(wanted) in found.message
        assert plan.mismatched == ["w"]
        assert "quantization_config" in str(found.hint)


def test_casts_that_lose_something_are_reported_and_others_only_listed() -> None:
    model = nn.Module()
    for name, dtype in (
        ("up", torch.float32),
        ("down", torch.bfloat16),
        ("aside", torch.float16),
        ("same", torch.float32),
    ):
        model.register_parameter(name, nn.Parameter(torch.zeros(2, dtype=dtype)))
    stored = {"up": torch.bfloat16, "down": torch.float32, "aside": torch.bfloat16, "same": torch.float32}
    plan = plan_load(model, {name: torch.zeros(2, dtype=dtype) for name, dtype in stored.items()})
    assert plan.cast == {
        "up": (torch.bfloat16, torch.float32),
        "down": (torch.float32, torch.bfloat16),
        "aside": (torch.bfloat16, torch.float16),
    }
    lossy = {f.tensors for f in plan.findings if f.kind == "cast"}
    assert lossy == {("down",), ("aside",)}


def test_a_mixed_file_keeps_each_parameters_own_dtype(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    model.b = nn.Parameter(torch.zeros(2, dtype=torch.float32))
    save(tmp_path / "m", {"a": counted(2, dtype=torch.bfloat16), "b": counted(2)})
    plan = plan_load(model, tmp_path / "m")
    assert plan.cast == {}
    plan.run(model)
    assert (model.a.dtype, model.b.dtype) == (torch.bfloat16, torch.float32)


def test_codes_of_eight_bits_are_not_cast_within_a_fusion_either() -> None:
    model = nn.Linear(4, 8, bias=False)
    tensors = {name: torch.zeros(4, 4).to(torch.float8_e4m3fn) for name in ("a", "b")}
    plan = plan_load(model, no_reading(tensors), rules=[Convert(["a", "b"], "weight", lambda a, b: torch.cat([a, b]))])
    assert finding(plan, "dtype").tensors == ("weight", "a", "b")


# ------------------------------------------------------------------ ties


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.other = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.other.weight = self.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "other.weight"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_parameter_may_come_under_any_of_its_names(name: str, device: str) -> None:
    with torch.device(device):
        model = Tied()
    plan = plan_load(model, {name: counted(8, 4)})
    assert plan.ok
    assert plan.missing == []
    assert {*plan.tied, *plan.loaded} == {"embed.weight", "head.weight", "other.weight"}
    plan.run(model)
    assert model.embed.weight is model.head.weight is model.other.weight
    assert torch.equal(model.head.weight.data, counted(8, 4))


def test_a_tied_parameter_may_come_under_several_names_with_equal_values(tmp_path: Path) -> None:
    for source in ({"embed.weight": counted(8, 4), "head.weight": counted(8, 4)},):
        for weights in (source, save(tmp_path / "m", source)):
            plan = plan_load(Tied(), weights)
            assert plan.ok
            assert plan.tied["head.weight"] == "embed.weight"
            assert plan.ignored == ["head.weight"]
            assert len(plan.steps) == 1


def test_equal_up_to_the_cast_is_equal() -> None:
    plan = plan_load(Tied(), {"embed.weight": counted(8, 4), "head.weight": counted(8, 4, dtype=torch.bfloat16)})
    assert plan.ok


def test_a_tied_parameter_with_two_values_is_an_error_that_names_both(tmp_path: Path) -> None:
    plan = plan_load(
        Tied(), save(tmp_path / "m", {"embed.weight": counted(8, 4), "head.weight": counted(8, 4, start=1)})
    )
    found = finding(plan, "conflict")
    assert found.severity == "error"
    assert "both 'embed.weight' and 'head.weight' would fill 'head.weight', with different values" in found.message
    assert "the model ties it to embed.weight, other.weight" in found.message
    assert "untie" in str(found.hint)
    assert found.file == str(tmp_path / "m" / "model.safetensors")


def test_two_source_names_for_one_parameter_must_be_equal() -> None:
    model = nn.Linear(2, 2, bias=False)
    plan = plan_load(model, {"weight": counted(2, 2), "module.weight": counted(2, 2)})
    assert plan.ok
    assert plan.tied == {}
    plan = plan_load(model, {"weight": counted(2, 2), "module.weight": counted(2, 2, start=1)})
    assert "Drop(" in str(finding(plan, "conflict").hint)


def test_sources_that_can_not_be_compared_are_an_error_by_name() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("the tape broke")

    infos = [TensorInfo(name, torch.float32, (8, 4), read=fail) for name in ("embed.weight", "head.weight")]
    plan = plan_load(Tied(), Weights.describe(infos))
    assert finding(plan, "conflict").message.endswith("can't be read: RuntimeError: the tape broke")


def test_an_untied_head_that_is_absent_is_an_error() -> None:
    tensors = state(Headed())
    del tensors["lm_head.weight"]
    assert plan_load(Headed(), tensors).missing == ["lm_head.weight"]


def test_a_missing_tied_group_is_counted_once() -> None:
    model = Tied()
    model.w = nn.Parameter(torch.zeros(2))
    assert plan_load(model, {"w": counted(2)}).missing == ["embed.weight"]


class Views(nn.Module):
    """Parameters that are views of a flat one, and a transposed tie."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(12))
        self.first = nn.Parameter(self.flat.data[:4].view(2, 2))
        self.rest = nn.Parameter(self.flat.data[4:])
        self.turned = nn.Parameter(self.flat.data[:4].view(2, 2).t())


def test_views_are_filled_with_the_memory_they_lie_in() -> None:
    model = Views()
    plan = plan_load(model, {"flat": counted(12)})
    assert plan.ok
    assert plan.tied == {"first": "flat", "rest": "flat", "turned": "flat"}
    plan.run(model)
    assert torch.equal(model.turned.data, counted(2, 2).t())


def test_memory_is_filled_by_all_the_views_of_it_together() -> None:
    model = Views()
    plan = plan_load(model, {"turned": counted(2, 2).t(), "rest": counted(8, start=4)})
    assert plan.ok
    assert set(plan.tied) == {"flat", "first"}
    plan.run(model)
    assert torch.equal(model.flat.data, counted(12))
    assert plan_load(Views(), {"rest": counted(8, start=4)}).missing == ["flat", "first", "turned"]


def test_views_and_what_they_are_views_of_must_agree_where_both_are_given() -> None:
    agreeing = {"flat": counted(12), "first": counted(2, 2), "turned": counted(2, 2).t(), "rest": counted(8, start=4)}
    plan = plan_load(Views(), agreeing)
    assert plan.ok, str(plan)
    for name in ("first", "turned", "rest"):
        plan = plan_load(Views(), {**agreeing, name: agreeing[name] + 1})
        found = finding(plan, "conflict")
        assert found.severity == "error"
        assert "share memory" in found.message


def test_neighbours_in_memory_are_not_tied() -> None:
    memory = torch.zeros(8)
    model = nn.Module()
    model.a = nn.Parameter(memory[:4])
    model.b = nn.Parameter(memory[4:])
    assert plan_load(model, {"a": counted(4)}).missing == ["b"]
    plan = plan_load(model, no_reading({"a": counted(4), "b": counted(4, start=3)}))
    assert plan.ok
    assert plan.tied == {}


def test_a_view_with_gaps_does_not_fill_what_lies_between() -> None:
    memory = torch.zeros(8)
    model = nn.Module()
    model.even = nn.Parameter(memory[::2])
    model.odd = nn.Parameter(memory[1:7:2])
    assert plan_load(model, {"even": counted(4)}).missing == ["odd"]
    plan = plan_load(model, {"even": counted(4), "odd": counted(3)})
    assert plan.ok, str(plan)
    plan.run(model)
    assert memory.tolist() == [0, 0, 1, 1, 2, 2, 3, 0]


def test_hundreds_of_doubly_named_tensors_are_compared_without_reading_more_than_twice(tmp_path: Path) -> None:
    tensors = {f"{prefix}w{i}": counted(2, start=i) for i in range(300) for prefix in ("", "module.")}
    model = nn.Module()
    for i in range(300):
        model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(2)))
    plan = plan_load(model, save(tmp_path / "m", tensors))
    assert plan.ok
    assert len(plan.steps) == 300


# ------------------------------------------------------------------ what a model declares


class Fused(nn.Module):
    packed_modules_mapping: ClassVar[Any] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv_proj = nn.Linear(4, 12)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = nn.Linear(4, 6, bias=False)
        self.mlp.gate_up_proj.register_buffer("weight_scale", torch.zeros(2))


def parts_of_fused() -> Tensors:
    tensors = {}
    for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
        tensors[f"attn.{part}.weight"] = counted(4, 4, start=16 * i)
        tensors[f"attn.{part}.bias"] = counted(4, start=4 * i)
    for i, part in enumerate(("gate_proj", "up_proj")):
        tensors[f"mlp.{part}.weight"] = counted(3, 4, start=12 * i)
        tensors[f"mlp.{part}.weight_scale"] = torch.tensor(float(i))
    return tensors


SPELLINGS = {
    "fused name with its parts": Fused.packed_modules_mapping,
    "tuples of parts": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "part with fused name and shard id": {
        "q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    },
    "parts in any order": {
        "v_proj": ("qkv_proj", "v"), "q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"),
        "up_proj": ("gate_up_proj", 1), "gate_proj": ("gate_up_proj", 0),
    },
    "part with fused name": {
        "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
        "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    },
}  # fmt: skip


@pytest.mark.parametrize("declared", SPELLINGS.values(), ids=SPELLINGS)
def test_declared_parts_are_fused_leaf_by_leaf_in_either_spelling(declared: Any, tmp_path: Path) -> None:
    class Model(Fused):
        packed_modules_mapping = declared

    model = Model()
    plan = plan_load(model, save(tmp_path / "m", parts_of_fused()))
    assert plan.ok, str(plan)
    assert "the model's own declarations" in plan.decided_by
    assert all(isinstance(step, CopyStep) for step in plan.steps)
    plan.run(model)
    assert torch.equal(model.attn.qkv_proj.weight.data, counted(12, 4))
    assert torch.equal(model.attn.qkv_proj.bias.data, counted(12))
    assert torch.equal(model.mlp.gate_up_proj.weight.data, counted(6, 4))
    assert model.mlp.gate_up_proj.weight_scale.tolist() == [0, 1]


def test_a_fused_parameter_without_one_part_names_the_part() -> None:
    tensors = parts_of_fused()
    del tensors["attn.k_proj.weight"], tensors["mlp.up_proj.weight_scale"]
    plan = plan_load(Fused(), tensors)
    assert sorted(plan.missing) == ["attn.qkv_proj.weight", "mlp.gate_up_proj.weight_scale"]
    assert plan.unexpected == []
    assert [f.message for f in plan.errors] == [
        (
            "of the parts of attn.qkv_proj.weight, attn.k_proj.weight is missing; "
            "there is attn.q_proj.weight, attn.v_proj.weight"
        ),
        (
            "of the parts of mlp.gate_up_proj.weight_scale, mlp.up_proj.weight_scale is missing; "
            "there is mlp.gate_proj.weight_scale"
        ),
    ]


def test_an_incomplete_fusion_may_be_allowed() -> None:
    tensors = parts_of_fused()
    del tensors["attn.k_proj.bias"]
    plan = plan_load(Fused(), tensors, on_missing={"attn.qkv_proj.bias": "warn"})
    assert plan.ok
    assert plan.missing == plan.unfilled == ["attn.qkv_proj.bias"]


def test_a_checkpoint_that_is_fused_already_is_taken_as_it_is() -> None:
    assert plan_load(Fused(), state(Fused())).ok


def test_fused_and_parts_together_are_an_error() -> None:
    plan = plan_load(Fused(), {**state(Fused()), **parts_of_fused()})
    assert len([f for f in plan.errors if f.kind == "conflict"]) == 4


def test_stray_parts_of_what_is_there_as_a_whole_are_unexpected() -> None:
    plan = plan_load(Fused(), {**state(Fused()), "attn.q_proj.weight": counted(4, 4)})
    assert plan.ok
    assert plan.unexpected == ["attn.q_proj.weight"]
    assert "attn.k_proj.weight, attn.v_proj.weight is missing" in str(finding(plan, "unexpected").hint)


def test_parts_are_matched_by_whole_segments_and_only_where_there_is_such_a_module() -> None:
    tensors = {**parts_of_fused(), "attn.my_q_proj.weight": counted(4, 4), "vision.q_proj.weight": counted(4, 4)}
    plan = plan_load(Fused(), tensors)
    assert plan.ok
    assert sorted(plan.unexpected) == ["attn.my_q_proj.weight", "vision.q_proj.weight"]


def test_one_part_may_belong_to_fused_modules_of_different_names() -> None:
    class Two(nn.Module):
        packed_modules_mapping: ClassVar[Any] = {"qkv": ["q_proj", "k_proj"], "qk": ["q_proj", "k_proj"]}

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Module()
            self.a.qkv = nn.Linear(2, 4, bias=False)
            self.b = nn.Module()
            self.b.qk = nn.Linear(2, 4, bias=False)

    tensors = {f"{m}.{p}.weight": counted(2, 2) for m in "ab" for p in ("q_proj", "k_proj")}
    assert plan_load(Two(), tensors).ok


@pytest.mark.parametrize(
    "declared", [3, "qkv", {"qkv": 3}, {"qkv": [1, 2]}, {"q": ("qkv", 1.5)}, {"qkv": []}, {"q": ("qkv", ["q"])}]
)
def test_a_declaration_that_can_not_be_understood_is_an_error_of_the_model(declared: Any) -> None:
    class Model(Fused):
        packed_modules_mapping = declared

    with pytest.raises(ModelError, match="packed_modules_mapping of Model"):
        plan_load(Model(), parts_of_fused())


class WithLoader(Fused):
    def __init__(self) -> None:
        super().__init__()
        weight = self.attn.qkv_proj.weight

        def weight_loader(param: nn.Parameter, loaded: torch.Tensor, shard_id: str | None = None) -> None:
            at = None if shard_id is None else "qkv".index(shard_id)
            part = param.data if at is None else param.data[4 * at : 4 * at + 4]
            part.copy_(loaded)

        weight.weight_loader = weight_loader


def test_a_parameters_own_loader_gets_its_parts_with_their_shard_ids() -> None:
    model = WithLoader()
    plan = plan_load(model, parts_of_fused())
    assert plan.ok
    calls = json.loads(plan.to_json())["steps"]
    assert [c["shard_id"] for c in calls if c.get("target") == "attn.qkv_proj.weight"] == ["k", "q", "v"]
    assert "handed to the parameter's own weight_loader" in plan.explain("attn.qkv_proj.weight")
    plan.run(model)
    assert torch.equal(model.attn.qkv_proj.weight.data, counted(12, 4))


def test_a_parameters_own_loader_gets_a_whole_tensor_too() -> None:
    model = WithLoader()
    plan = plan_load(model, {**state(Fused()), "attn.qkv_proj.weight": counted(12, 4)})
    plan.run(model)
    assert torch.equal(model.attn.qkv_proj.weight.data, counted(12, 4))


def test_a_parameters_own_loader_without_one_part_names_the_part() -> None:
    tensors = parts_of_fused()
    del tensors["attn.v_proj.weight"]
    plan = plan_load(WithLoader(), tensors)
    assert plan.missing == ["attn.qkv_proj.weight"]
    assert plan.errors[0].message.startswith("of the parts of attn.qkv_proj.weight, attn.v_proj.weight is missing")


def test_a_part_that_comes_twice_for_a_parameters_own_loader_is_an_error() -> None:
    for extra in ({"module.attn.q_proj.weight": counted(4, 4)}, {"attn.qkv_proj.weight": counted(12, 4)}):
        plan = plan_load(WithLoader(), {**parts_of_fused(), **extra})
        assert [f.kind for f in plan.errors] in (["conflict"], ["conflict"] * 3)


def test_rules_of_the_caller_come_before_what_a_model_declares() -> None:
    tensors = {n.replace("q_proj", "wq"): t for n, t in parts_of_fused().items()}
    plan = plan_load(Fused(), tensors, rules=[Rename("attn.wq", "attn.q_proj")])
    assert plan.ok
    assert plan.decided_by[:2] == ["the caller's rules", "the model's own declarations"]


def test_scales_in_another_spelling_are_reported_or_mapped_by_rules() -> None:
    model = nn.Module()
    model.attn = nn.Module()
    for name in ("k_scale", "v_scale"):
        model.attn.register_buffer(name, torch.ones(()))
    model.w = nn.Parameter(torch.zeros(2))
    tensors = {"w": counted(2), "attn.kv_scale": torch.tensor(2.0)}
    plan = plan_load(model, tensors)
    assert plan.missing == ["attn.k_scale", "attn.v_scale"]
    assert plan.unexpected == ["attn.kv_scale"]
    both = Convert("**.kv_scale", ["**.k_scale", "**.v_scale"], lambda scale: (scale, scale))
    assert plan_load(model, tensors, rules=[both]).ok


# ------------------------------------------------------------------ every tensor is accounted for

_NAMES = ["a.w", "a.b", "b.w", "model.a.w", "q.w", "k.w", "qk.w", "x.0.w", "x.1.w", "x.2.w", "xs.w", "inv_freq"]
_some_tensors = st.dictionaries(
    st.builds(
        lambda prefix, name: prefix + name,
        st.sampled_from(["", "", "module.", "foo.", "model."]),
        st.sampled_from(_NAMES),
    ),
    st.tuples(
        st.sampled_from([(2, 2), (4, 2), (3, 2, 2), (), (1,), (0,), (2, 4)]),
        st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.int64]),
    ),
    max_size=8,
)
_some_rules = st.lists(
    st.sampled_from(
        [
            Rename("foo", ""), Rename("a", "b"), Rename("", "model"), Drop("b"), Drop("x.*"),
            Convert(["q.w", "k.w"], "qk.w", lambda q, k: torch.cat([q, k])),
            Convert("x.{i}.w", "xs.w", "stack_experts"), Convert("xs.w", "x.{i}.w", "unstack_experts"),
            Convert("a.w", "a.w", lambda w: w * 2), Convert("b.w", "b.w", "transpose"),
        ]
    ),
    unique_by=id, max_size=3,
)  # fmt: skip
_policies = st.sampled_from(["error", "warn", "ignore"])


def test_what_a_rule_made_too_many_of_is_no_name_that_a_missing_one_may_be_called() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(2, 2))
    model.x = nn.Module()
    model.x.register_buffer("0", torch.zeros(2))
    plan = plan_load(model, {"xs": counted(2, 2)}, rules=[Convert("xs", "x.{i}", "unstack_experts")])
    assert plan.unexpected == ["x.1"]
    assert plan.missing == ["a"]


@settings(max_examples=300, deadline=None)
@given(_some_tensors, _some_tensors, _some_rules, _policies, _policies)
def test_every_parameter_and_every_tensor_is_accounted_for(
    wanted: Any, given_: Any, rules: list[Any], missing: Any, mismatch: Any
) -> None:
    model = nn.Module()
    for name, (shape, dtype) in wanted.items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        if leaf not in module._modules:
            module.register_buffer(leaf, torch.zeros(shape, dtype=dtype))
    parameters = dict(model.named_buffers())
    tensors = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in given_.items()}
    plan = plan_load(model, tensors, rules=rules, on_missing=missing, on_mismatch=mismatch)

    loaded, tied = set(plan.loaded), set(plan.tied)
    left_out = {*plan.missing, *plan.mismatched, *plan.unfilled}
    spoken_of = {name for finding in plan.findings for name in finding.tensors}
    assert set(parameters) == loaded | tied | left_out | (spoken_of & set(parameters))
    assert not loaded & set(plan.missing)
    assert not loaded & set(plan.unfilled)
    used = {info.name for step in plan.steps for info in step_infos(step)}
    left = {*plan.unexpected, *plan.ignored, *plan.dropped, *spoken_of}
    assert set(tensors) == used | (left & set(tensors))
    for name in (*parameters, *tensors):
        assert plan.explain(name)
    text = plan.to_json(runnable=False)
    assert LoadPlan.from_json(text).to_json(runnable=False) == text
    assert str(plan)
    if plan.ok:
        before = {name: tensor.clone() for name, tensor in parameters.items()}
        assert set(plan.run(model).loaded) == loaded
        for name in plan.unfilled:
            assert torch.equal(model.get_buffer(name), before[name])
    else:
        with pytest.raises(PlanError):
            plan.run(model)
        assert all(not tensor.any() for tensor in parameters.values())


# ------------------------------------------------------------------ what a plan says


def test_explain_tells_file_bytes_and_rules(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "m",
        {"x.q": counted(2, 2), "x.k": counted(2, 2), "w": counted(3), "junk": counted(1), "extra": counted(1)},
    )
    model = nn.Module()
    model.qk = nn.Parameter(torch.zeros(4, 2))
    model.w = nn.Parameter(torch.zeros(3))
    model.gone = nn.Parameter(torch.zeros(1))
    rules = [Rename("x", ""), Convert(["q", "k"], "qk", lambda q, k: torch.cat([q, k])), Drop("junk")]
    plan = plan_load(model, folder, rules=rules, on_missing="warn")
    whole = plan.explain("qk")
    assert "qk  [4, 2] torch.float32" in whole
    assert re.search(r"qk\[2:4, :\] from x\.k in .*model\.safetensors, bytes \d+ to \d+", whole)
    assert "by rename 'x' -> ''" in whole
    # A source's name leads to where it goes.
    assert plan.explain("x.q") == whole
    assert "dropped by a rule" in plan.explain("junk")
    assert "not wanted by the model" in plan.explain("extra")
    assert "not in the source" in plan.explain("gone")
    with pytest.raises(UnknownTensorError, match="did you mean 'gone'"):
        plan.explain("gonne")


@pytest.mark.parametrize(
    ("stored", "wanted", "function", "said"),
    [
        ((4, 3), (4, 3), lambda w: w.clone(), "all of it from w (made by its loader)"),
        ((4, 3), (3, 4), lambda w: w.t(), "all of it from w (made by its loader), transposed"),
        ((4, 3, 2), (2, 4, 3), lambda w: w.permute(2, 0, 1), "all of it from w (made by its loader), transposed"),
        ((2, 3, 4), (3, 2, 4), lambda w: w.transpose(0, 1), "all of it from w (made by its loader), in another order"),
        ((8, 6), (6, 4), lambda w: w[1:7, 2:6], "all of it from w[1:7, 2:6] (made by its loader)"),
        ((8, 6), (4, 6), lambda w: w[::2], "all of it from w[0:7:2, :] (made by its loader)"),
        ((8, 6), (8, 3), lambda w: w[:, 1::2], "all of it from w[:, 1:6:2] (made by its loader)"),
        ((8, 6), (6,), lambda w: w[3], "all of it from w[3, :] (made by its loader)"),
        ((8, 6), (), lambda w: w[3, 2], "all of it from w[3, 2] (made by its loader)"),
        ((4,), (4,), lambda w: w.flip(0), "all of it from w (made by its loader), backwards"),
        ((1, 3), (4, 3), lambda w: w.expand(4, 3).clone(), "all of it from w (made by its loader), repeated"),
        (
            (6, 2), (6, 2), lambda w: w.view(3, 2, 2).transpose(0, 1).reshape(6, 2),
            "all of it from w (made by its loader), in another order",
        ),
        (
            (4, 3), (4, 3), lambda w: torch.cat([w[1:], w[:1]]),
            "w[0:3, :] from w[1:4, :] (made by its loader)\n  w[3, :] from w[0, :] (made by its loader)",
        ),
        (
            (3, 4), (3, 6), lambda w: torch.nn.functional.pad(w, (1, 1), value=2.5),
            "w[:, 1:5] from w (made by its loader)",
        ),
    ],
)  # fmt: skip
def test_explain_says_slices_as_they_are_written(
    stored: tuple[int, ...], wanted: tuple[int, ...], function: Any, said: str
) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(wanted))
    plan = plan_load(model, {"w": counted(*stored)}, rules=[Convert("w", "w", function)])
    assert isinstance(plan.steps[0], CopyStep)
    assert f"  {said}\n" in plan.explain("w")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_explain_says_where_a_tensor_without_elements_comes_from(shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.register_buffer("empty", torch.zeros(shape))
    model.register_buffer("full", torch.zeros(2))
    plan = plan_load(model, {"empty": torch.zeros(shape), "full": torch.zeros(2)})
    assert "all of it from empty" in plan.explain("empty")


def test_explain_says_what_is_a_constant_and_what_takes_turns() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(12, 2))
    rule = Convert("w", "w", lambda w: torch.nn.functional.pad(w.view(3, 2, 2), (0, 0, 1, 1), value=2.5).flatten(0, 1))
    explained = plan_load(model, {"w": counted(6, 2)}, rules=[rule]).explain("w")
    assert "w[1:3, :] (3 times, each 4 further in dimension 0) from w (made by its loader)" in explained
    assert "is 2.5 everywhere" in explained


def test_explain_tells_which_bytes_a_slice_is(tmp_path: Path) -> None:
    save(tmp_path / "m", {"w": counted(10, 4)})
    plan = plan_load(nn.Linear(4, 3, bias=False), tmp_path / "m", rules=[Convert("w", "weight", lambda w: w[2:5])])
    start = (tmp_path / "m" / "model.safetensors").stat().st_size - 10 * 4 * 4
    assert (
        f"all of it from w[2:5, :] in {tmp_path / 'm' / 'model.safetensors'}, bytes {start + 32} to {start + 80}"
        in (plan.explain("weight"))
    )


def test_explain_tells_of_ties_and_mismatches() -> None:
    assert "shares its memory or value with embed.weight" in plan_load(Tied(), {"embed.weight": counted(8, 4)}).explain(
        "head.weight"
    )
    assert "the model wants [8, 4]" in plan_load(Tied(), {"embed.weight": counted(9, 4)}).explain("embed.weight")


def test_to_json_has_it_all(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"module.a": counted(2, dtype=torch.float64), "b": counted(2, 2), "c": counted(1)})
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2))
    model.b = nn.Parameter(torch.zeros(2, 2))
    plan = plan_load(model, folder, rules=[Convert("b", "b", lambda b: b * 2)])
    with pytest.raises(RuleError, match=r"lambda.* has no name .*\n.*to_json\(runnable=False\)") as caught:
        plan.to_json()
    assert caught.value.tensor == "b"
    data = json.loads(plan.to_json(runnable=False))
    assert (data["ok"], data["runnable"]) == (True, False)
    assert data["forecast"]["bytes_to_read"] == 16 + 16
    assert data["renamed"] == {"module.a": "a"}
    assert data["cast"] == {"a": ["float64", "float32"]}
    assert data["unexpected"] == ["c"]
    copy, compute = sorted(data["steps"], key=lambda step: step["kind"], reverse=True)
    assert (copy["target"], copy["sources"]) == ("a", ["module.a"])
    assert copy["placements"] == [{"source": 0, "from": 0, "to": 0, "loops": [[2, 1, 1]]}]
    assert (compute["kind"], compute["sources"]) == ("compute", ["b"])
    assert {f["kind"] for f in data["findings"]} == {"unexpected", "cast", "rename"}
    assert [tensor["name"] for tensor in data["source"]["tensors"]] == ["b", "c", "module.a"]
    assert data["source"]["files"] == [
        {"name": "model.safetensors", "size": (folder / "model.safetensors").stat().st_size}
    ]
    assert [target["name"] for target in data["model"]["targets"]] == ["a", "b"]


def test_a_plan_as_text_says_what_matters() -> None:
    text = str(plan_load(Headed(), {**state(Body()), "extra": counted(1)}))
    assert text.startswith("0 parameters from 0 bytes")
    assert "missing: 14" in text
    assert "error: 14 of 14 parameters are not in the source: model.* (13), lm_head.weight" in text
    assert "what to do:" in text


def test_errors_come_first_and_all_of_them_are_in_the_message() -> None:
    tensors = {**state(Headed()), "lm_head.weight": counted(9, 4), "extra": counted(1)}
    del tensors["model.embed.weight"]
    plan = plan_load(Headed(), tensors)
    assert [f.severity for f in plan.findings] == ["error", "error", "warning"]
    with pytest.raises(PlanError) as caught:
        plan.raise_if_errors()
    assert "lm_head.weight: the source has [9, 4]" in str(caught.value)
    assert "model.embed.weight" in str(caught.value)
    assert "extra" not in str(caught.value)


def test_a_plan_error_crosses_processes_without_its_plan() -> None:
    import pickle

    with pytest.raises(PlanError) as caught:
        plan_load(Headed(), {"a": counted(1)}).raise_if_errors()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.plan is None


def test_files_left_out_and_notes_of_the_source_are_in_the_plan(tmp_path: Path) -> None:
    weights = Weights.describe(
        [TensorInfo("weight", torch.float32, (2, 2), read=lambda: counted(2, 2))],
        skipped_files={"optimizer.pt": "no weights"},
        notes=["read the slow way"],
    )
    plan = plan_load(nn.Linear(2, 2, bias=False), weights)
    assert plan.skipped_files == {"optimizer.pt": "no weights"}
    assert finding(plan, "note").message == "read the slow way"


def test_a_tensor_of_several_extents_is_counted_as_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(counted(6, 4).numpy().tobytes())
    info = TensorInfo(
        "weight", torch.float32, (4, 4),
        [Extent(file, 0, shape=(2, 4), at=(0, 0)), Extent(file, 64, shape=(2, 4), at=(2, 0))],
    )  # fmt: skip
    model = nn.Linear(4, 4, bias=False)
    plan = plan_load(model, Weights.describe([info]))
    assert plan.bytes_to_read == 64
    assert "and 1 more extents" in plan.explain("weight")
    assert plan.run(model).bytes_read == 64
    assert torch.equal(model.weight.data, counted(6, 4)[[0, 1, 4, 5]])


def test_tens_of_thousands_of_tensors_plan_in_linear_time() -> None:
    """Nothing here is timed; but were it quadratic, the test would take minutes."""
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5_000))
    tensors = dict(model.named_parameters())
    assert plan_load(model, no_reading(tensors)).ok
    assert plan_load(model, no_reading({f"module.model.{n}": t for n, t in tensors.items()})).ok
    half = plan_load(model, no_reading({f"foo.{n}": t for n, t in list(tensors.items())[::2]}))
    assert len(half.missing) == 10_000
    assert "Rename('foo', '')" in str(half.errors[0].hint)
    bias = plan_load(model, no_reading({n: t for n, t in tensors.items() if "weight" in n}))
    assert len(bias.missing) == 5_000


def test_the_real_thing_plans_from_its_headers(smollm2_folder: Path) -> None:
    from weightloaders.skeleton import build_skeleton

    model = build_skeleton(str(smollm2_folder)).model
    with open_weights(smollm2_folder) as weights:
        plan = plan_load(model, weights)
        assert plan.ok
        assert plan.missing == plan.unexpected == plan.mismatched == []
        assert plan.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        assert plan.bytes_to_read == weights.nbytes
        assert not any(isinstance(step, ComputeStep) for step in plan.steps)
