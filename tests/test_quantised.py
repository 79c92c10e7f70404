"""Quantised checkpoints of transformers' models: equal, to the bit, to what its own `from_pretrained` makes of them."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from weightloaders import (
    LLM,
    SamplingParams,
    from_pretrained,
    load_into,
    load_status,
    open_weights,
    plan_load,
    save_weights,
)
from weightloaders.errors import ConfigError, LoadError, ModelError, PlanError
from weightloaders.mapping import quantised
from weightloaders.mapping.float8 import multiplied
from weightloaders.mapping.quantised import one_by_one
from weightloaders.plan import ComputeStep, CopyStep
from weightloaders.skeleton import build_skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

BLOCK = (16, 16)
pytestmark = pytest.mark.skipif(
    not hasattr(FineGrainedFP8HfQuantizer, "get_load_operations"),
    reason=f"refused with transformers {transformers.__version__}: see test_older_transformers.py",
)
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
BITNET = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}


# ------------------------------------------------------------------ small checkpoints of each kind


def deepseek() -> Any:
    sizes = {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SMALL, **sizes))


def gpt_oss() -> Any:
    sizes = {
        "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SMALL, **sizes}))


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **options}))


def fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes and scales of the linear layers; the last blocks may be smaller than the others."""
    if weight.dim() != 2 or ".layers." not in name or name.endswith("mlp.gate.weight"):
        return {name: weight}
    (rows, columns), grid = weight.shape, [-(-size // by) for size, by in zip(weight.shape, BLOCK, strict=True)]
    whole = torch.zeros(grid[0] * BLOCK[0], grid[1] * BLOCK[1])
    whole[:rows, :columns] = weight
    blocks = whole.view(grid[0], BLOCK[0], grid[1], BLOCK[1])
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(whole.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return {name: codes.contiguous(), f"{name}_scale_inv": scales}


def mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}
    experts, ins, outs = weight.shape
    return {
        f"{name}_blocks": torch.randint(0, 256, (experts, outs, ins // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(118, 124, (experts, outs, ins // 32), dtype=torch.uint8),
    }


def bitnet(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if weight.dim() != 2 or ".layers." not in name:
        return {name: weight}
    rows, columns = weight.shape
    codes = torch.randint(0, 171, (rows // 4, columns), dtype=torch.uint8)
    return {name: codes, f"{name}_scale": torch.rand(1).to(weight.dtype)}


KINDS: dict[str, tuple[Callable[[], Any], Callable[..., dict[str, torch.Tensor]], dict[str, Any]]] = {
    "fp8 deepseek": (deepseek, fp8, FP8),
    "mxfp4 gpt-oss": (gpt_oss, mxfp4, MXFP4),
    "bitnet llama": (llama, bitnet, BITNET),
    "fp8 llama, tied": (lambda: llama(tie_word_embeddings=True), fp8, FP8),
    "fp8 llama, smaller blocks at the end": (lambda: llama(intermediate_size=56), fp8, FP8),
    "plain deepseek": (deepseek, lambda name, weight: {name: weight}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = path = tmp_path_factory.mktemp("model")
            build, quantise, quantization = KINDS[kind]
            torch.manual_seed(len(made))
            model = build()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.3)
            model.to(torch.bfloat16).save_pretrained(path)
            plain = load_file(path / "model.safetensors")
            write(path, {name: tensor for n, weight in plain.items() for name, tensor in quantise(n, weight).items()})
            if quantization:
                describe(path, quantization)
        return made[kind]

    return make


@pytest.fixture
def changed(folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint in which something is amiss."""

    def change(kind: str, tensors: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: Any) -> Path:
        path = tmp_path / "changed"
        shutil.copytree(folder(kind), path)
        if tensors is not None:
            content = load_file(path / "model.safetensors")
            tensors(content)
            write(path, content)
        for key, value in config.items():
            describe(path, value, key)
        return path

    return change


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})


def describe(path: Path, value: Any, key: str = "quantization_config") -> None:
    config = json.loads((path / "config.json").read_text())
    config[key] = value
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def theirs(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does where it finds a GPU: fp8 stays fp8. Only to run such a model takes one."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def assert_same_tensors(model: Any, expected: Any) -> None:
    ours, others = model.state_dict(), expected.state_dict()
    assert list(ours) == list(others)
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in others.items()}
    assert {name for name in others if not torch.equal(raw(ours[name]), raw(others[name]))} == set()


def assert_same(model: Any, expected: Any, *, runs: bool = True) -> None:
    assert type(model) is type(expected)
    assert [type(module) for module in model.modules()] == [type(module) for module in expected.modules()]
    assert_same_tensors(model, expected)
    buffers = dict(expected.named_buffers())
    assert {name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])} == set()
    for attribute in ("is_quantized", "quantization_method", "_is_quantized", "training"):
        assert getattr(model, attribute, None) == getattr(expected, attribute, None)
    assert type(getattr(model, "hf_quantizer", None)) is type(getattr(expected, "hf_quantizer", None))
    conversions = [list(map(repr, getattr(m, "_weight_conversions", ()))) for m in (model, expected)]
    assert conversions[0] == conversions[1]
    configs = [m.config.to_dict() | {"_name_or_path": ""} for m in (model, expected)]
    assert configs[0] == configs[1]
    assert model.dtype == expected.dtype
    if runs:
        tokens = torch.arange(3, 12)[None]
        with torch.no_grad():
            assert torch.equal(model(tokens)[0], expected(tokens)[0])


# ------------------------------------------------------------------ equal to transformers


@pytest.mark.parametrize("kind", ["fp8 deepseek", "mxfp4 gpt-oss", "bitnet llama", "fp8 llama, tied"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_a_quantised_checkpoint_loads_as_transformers_loads_it(
    folder: Callable[[str], Path], kind: str, dtype: str
) -> None:
    model, report = from_pretrained(folder(kind), dtype=dtype, progress=False)
    # What runs bitnet's layers is compiled first, which takes a quarter of a minute.
    assert_same(model, theirs(folder(kind), dtype=dtype), runs=kind != "bitnet llama")
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    # Codes are not cast.
    assert {stored for stored, _ in report.cast.values()} <= {"torch.bfloat16", "torch.float32"}
    assert load_status(model) == "loaded"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.usefixtures("gpu")
def test_weights_stay_quantised_where_transformers_leaves_them_so(folder: Callable[[str], Path], dtype: str) -> None:
    model, report = from_pretrained(folder("fp8 deepseek"), dtype=dtype, progress=False)
    assert_same(model, theirs(folder("fp8 deepseek"), dtype=dtype), runs=False)
    assert Counter(tensor.dtype for tensor in model.state_dict().values())[torch.float8_e4m3fn] == 18
    assert report.warnings == []


@pytest.mark.usefixtures("gpu")
def test_what_stays_quantised_is_read_straight_from_the_file(folder: Callable[[str], Path]) -> None:
    model = build_skeleton(str(folder("fp8 deepseek"))).model
    plan = plan_load(model, folder("fp8 deepseek"))
    assert {type(step) for step in plan.steps} == {CopyStep}
    assert "up_proj.weight_scale_inv" in plan.explain("model.layers.1.mlp.experts.gate_up_proj_scale_inv")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("option", [{"dequantize": True}, transformers.FineGrainedFP8Config(dequantize=True)])
def test_the_option_that_dequantises_is_an_object_or_a_mapping(folder: Callable[[str], Path], option: Any) -> None:
    model, report = from_pretrained(folder("fp8 deepseek"), quantization_config=option, progress=False)
    expected = theirs(folder("fp8 deepseek"), quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    assert_same(model, expected)
    assert report.warnings == []


def test_every_option_of_a_mapping_counts(changed: Callable[..., Path]) -> None:
    path = changed("fp8 deepseek", quantization_config={**FP8, "weight_block_size": [32, 32]})
    with pytest.raises(PlanError, match="32 x 32"):
        from_pretrained(path, progress=False)
    model, _ = from_pretrained(path, quantization_config={"weight_block_size": [16, 16]}, progress=False)
    assert_same(model, theirs(path))


def test_a_config_without_a_dtype_takes_that_of_the_weights_that_are_plain(changed: Callable[..., Path]) -> None:
    path = changed("fp8 deepseek", lambda tensors: tensors.pop("lm_head.weight"), dtype=None)
    path = shutil.copytree(path, path.parent / "tied")
    describe(path, True, "tie_word_embeddings")
    model, _ = from_pretrained(path, progress=False)
    assert_same(model, theirs(path))
    assert model.dtype == torch.bfloat16


def test_that_transformers_had_to_dequantise_is_told(folder: Callable[[str], Path]) -> None:
    _, report = from_pretrained(folder("mxfp4 gpt-oss"), progress=False)
    assert ["mxfp4 were de-quantised to bfloat16" in warning for warning in report.warnings] == [True]
    _, report = from_pretrained(folder("mxfp4 gpt-oss"), quantization_config={"dequantize": True}, progress=False)
    assert report.warnings == []


def test_a_plan_computes_the_codes_group_by_group_and_says_why(folder: Callable[[str], Path]) -> None:
    path = folder("fp8 deepseek")
    plan = plan_load(build_skeleton(str(path)).model, path)
    computed = [step for step in plan.steps if isinstance(step, ComputeStep)]
    assert {step.reason for step in computed} == {"fp8 codes are multiplied by their scales"}
    experts = next(step for step in computed if "model.layers.1.mlp.experts.gate_up_proj" in step.targets)
    assert list(experts.targets) == ["model.layers.1.mlp.experts.gate_up_proj"]
    copied = {step.target.name for step in plan.steps if isinstance(step, CopyStep)}
    assert {"lm_head.weight", "model.norm.weight"} <= copied
    assert "fp8 codes are multiplied by their scales" in plan.explain("model.layers.0.mlp.up_proj.weight")
    assert "up_proj.weight_scale_inv" in plan.explain("model.layers.0.mlp.up_proj.weight")


def eighth(weight: torch.Tensor) -> torch.Tensor:
    return (weight.float() * 100).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        (
            {**FP8, "activation_scheme": "static", "weight_block_size": None},
            lambda w: {"weight": eighth(w), "weight_scale_inv": torch.rand(()), "activation_scale": torch.rand(())},
        ),
        (FP8, lambda w: {"weight": eighth(w), "scale": torch.rand(w.shape[0] // 16, w.shape[1] // 16)}),
        (
            {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
            lambda w: {
                "weight": eighth(w),
                "weight_scale_inv": torch.randint(118, 124, (w.shape[0], w.shape[1] // 32), dtype=torch.uint8),
            },
        ),
        (
            {**FP8, "scale_fmt": "ue8m0"},
            lambda w: {
                "weight": torch.randint(-128, 127, (w.shape[0], w.shape[1] // 2), dtype=torch.int8),
                "weight_scale_inv": torch.rand(w.shape[0], w.shape[1] // 32).to(torch.float8_e8m0fnu),
            },
        ),
    ],
    ids=["one scale, static", "named scale", "mxfp8", "packed fp4"],
)
def test_other_kinds_of_codes_and_scales_load_alike(changed: Callable[..., Path], method: Any, parts: Any) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name, weight in list(tensors.items()):
            if weight.dim() == 2 and "self_attn.o_proj" in name:
                del tensors[name]
                tensors.update({name.removesuffix("weight") + part: value for part, value in parts(weight).items()})

    path = changed("plain deepseek", quantise, quantization_config=method)
    expected, pairs = theirs(path), load_file(path / "model.safetensors")
    assert_same(from_pretrained(path, progress=False)[0], expected)
    for order in (sorted(pairs), sorted(pairs, reverse=True)):
        stream = ((name, pairs[name]) for name in order)
        model, report = from_pretrained(path, weights=stream, progress=False)
        assert_same(model, expected, runs=False)
        assert report.unexpected == []


@pytest.mark.usefixtures("gpu")
def test_what_is_to_stay_float32_does_not_make_numbers_of_codes(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", ["mlp.up_proj"])
    model, _ = from_pretrained(folder("fp8 deepseek"), progress=False)
    assert model.get_parameter(UP).dtype == torch.float8_e4m3fn


def test_a_quantizer_may_ask_for_another_dtype(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "update_dtype", lambda self, dtype: torch.float16)
    model, _ = from_pretrained(folder("fp8 deepseek"), progress=False)
    assert_same(model, theirs(folder("fp8 deepseek")))
    assert model.dtype == torch.float16


@pytest.mark.parametrize("joined", [0, 1, 2])
@pytest.mark.parametrize("stacked", [0, 1])
def test_experts_one_by_one_make_what_all_at_once_make(stacked: int, joined: int) -> None:
    patterns = ["experts.*.gate.weight", "experts.*.up.weight"]
    operations = [MergeModulelist(dim=stacked), Concatenate(dim=joined)]
    converter = WeightConverter(patterns, "experts.gate_up", [Passing(), *operations])

    def run(slots: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        for pattern, tensors in slots.items():
            for tensor in tensors:
                converter.add_tensor("experts.gate_up", "experts.gate_up", pattern, tensor)
        return converter.convert("experts.gate_up")

    slots = {pattern: [torch.rand(3, 4) for _ in range(5)] for pattern in patterns}
    made, expected = one_by_one(converter, slots, run), run(slots)
    assert made.keys() == expected.keys()
    assert torch.equal(made["experts.gate_up"], expected["experts.gate_up"])


class Passing(ConversionOps):
    """In the place of what de-quantises."""

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return input_dict


def test_smaller_blocks_at_the_end_are_blocks_of_their_own(folder: Callable[[str], Path]) -> None:
    # transformers makes as many blocks of equal size of them, 4 of 14 rows instead of 3 of 16 and one of 8, and so
    # multiplies codes by the scales of other blocks.
    path = folder("fp8 llama, smaller blocks at the end")
    model, _ = from_pretrained(path, dtype="float32", progress=False)
    stored = load_file(path / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        codes, scales = stored[name].float(), stored[f"{name}_scale_inv"]
        spread = scales.repeat_interleave(16, 0)[: codes.shape[0]].repeat_interleave(16, 1)[:, : codes.shape[1]]
        assert torch.equal(model.get_parameter(name), codes * spread)


def test_a_stream_in_any_order_loads_the_same_and_holds_a_group_at_a_time(folder: Callable[[str], Path]) -> None:
    for kind in ("fp8 deepseek", "mxfp4 gpt-oss"):
        pairs = load_file(folder(kind) / "model.safetensors")
        expected = theirs(folder(kind))
        total = sum(tensor.nbytes for tensor in pairs.values())
        for order in (sorted(pairs), sorted(pairs, reverse=True)):
            stream = ((name, pairs[name]) for name in order)
            model, report = from_pretrained(folder(kind), weights=stream, progress=False)
            assert_same(model, expected, runs=False)
            assert report.extra_memory < total / 3


def test_codes_are_multiplied_on_the_threads_that_read_them(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()

    def noted(*arguments: Any) -> torch.Tensor:
        threads.add(threading.current_thread())
        return multiplied(*arguments)

    monkeypatch.setattr(quantised, "multiplied", noted)
    from_pretrained(folder("fp8 llama, smaller blocks at the end"), progress=False)
    assert threads
    assert threading.main_thread() not in threads


def test_new_weights_can_be_loaded_into_a_model_that_was_dequantised(folder: Callable[[str], Path]) -> None:
    for kind in ("fp8 deepseek", "mxfp4 gpt-oss"):
        model, _ = from_pretrained(folder(kind), progress=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_into(model, folder(kind), progress=False)
        assert_same(model, theirs(folder(kind)))


@pytest.mark.usefixtures("gpu")
def test_a_model_that_transformers_loaded_takes_the_checkpoint_again(folder: Callable[[str], Path]) -> None:
    model, expected = theirs(folder("fp8 deepseek")), theirs(folder("fp8 deepseek"))
    for parameter in model.parameters():
        raw(parameter).zero_()
    load_into(model, folder("fp8 deepseek"), progress=False)
    assert_same(model, expected, runs=False)


# ------------------------------------------------------------------ what doesn't belong together


def without(*names: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def with_scales(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape).to(tensors[name].dtype)})


UP = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.experts"
PACKED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("fp8 deepseek", without(f"{UP}_scale_inv"), (UP, f"without its scales, '{UP}_scale_inv'")),
        ("fp8 deepseek", without(UP), (f"{UP}_scale_inv", f"without the weight that it belongs to, '{UP}'")),
        ("fp8 deepseek", with_scales(f"{UP}_scale_inv", 1, 1), (f"{UP}_scale_inv", "[1, 1]", "[4, 2] scales")),
        (
            "fp8 deepseek",
            without(f"{EXPERTS}.1.up_proj.weight_scale_inv"),
            ("experts.*.up_proj.weight_scale_inv", "the index 1 is missing"),
        ),
        (
            "fp8 deepseek",
            without(*(f"{EXPERTS}.{expert}.up_proj.weight_scale_inv" for expert in range(4))),
            (f"{EXPERTS}.3.up_proj.weight", "without its scales", f"{EXPERTS}.3.up_proj.weight_scale_inv"),
        ),
        ("fp8 deepseek", with_scales(f"{EXPERTS}.2.down_proj.weight_scale_inv", 2, 2), ("[2, 2]", "[2, 1] scales")),
        (
            "fp8 deepseek",
            lambda tensors: tensors.update(
                {
                    f"{EXPERTS}.2.down_proj.weight": torch.ones(16, 16).to(torch.float8_e4m3fn),
                    f"{EXPERTS}.2.down_proj.weight_scale_inv": torch.ones(1, 1),
                }
            ),
            ("down_proj.weight", "several shapes: [32, 16], [16, 16]"),
        ),
        ("mxfp4 gpt-oss", without(f"{PACKED}_scales"), (f"{PACKED}_blocks", f"its scales, '{PACKED}_scales'")),
        ("mxfp4 gpt-oss", without(f"{PACKED}_blocks"), (f"{PACKED}_scales", f"belongs to, '{PACKED}_blocks'")),
        ("mxfp4 gpt-oss", with_scales(f"{PACKED}_scales", 4, 64, 1), ("[4, 64, 1]", "[4, 64, 2] scales")),
    ],
)  # fmt: skip
def test_codes_and_scales_that_do_not_match_are_told_before_anything_is_touched(
    changed: Callable[..., Path], kind: str, change: Any, told: tuple[str, ...]
) -> None:
    path = changed(kind, change)
    model = build_skeleton(str(path)).model
    plan = plan_load(model, path, on_missing="warn", on_mismatch="warn")
    (error,) = plan.errors or plan_load(model, path).errors
    assert [part for part in told if part not in error.message] == []
    with pytest.raises(PlanError):
        from_pretrained(path, progress=False)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_scales_that_codes_cannot_be_multiplied_by_are_told_with_their_shapes(changed: Callable[..., Path]) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
        tensors[f"{UP}_scale_inv"] = torch.ones(7)

    path = changed("plain deepseek", quantise, quantization_config={**FP8, "weight_block_size": None})
    with pytest.raises(PlanError) as refused:
        from_pretrained(path, quantization_config={"dequantize": True}, progress=False)
    # What is absent besides, the scale of activations, is not why.
    assert "and without it" in str(refused.value)
    assert "[7] torch.float32" in str(refused.value)


def test_a_scale_of_activations_is_no_weight(changed: Callable[..., Path]) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.activation_scale"] = torch.ones(())
        del tensors[UP], tensors[f"{UP}_scale_inv"]

    with pytest.raises(PlanError, match=r"1 of 31 parameters (is|are) not in the source"):
        from_pretrained(changed("fp8 deepseek", lose), progress=False)


def test_a_stream_that_ends_without_some_scales_fails(folder: Callable[[str], Path]) -> None:
    pairs = load_file(folder("fp8 deepseek") / "model.safetensors")
    del pairs[f"{UP}_scale_inv"]
    with pytest.raises(LoadError, match=f"without its scales, '{UP}_scale_inv'"):
        from_pretrained(folder("fp8 deepseek"), weights=iter(pairs.items()), progress=False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(f"{UP}_scale_inv"), f"{UP}_scale_inv"),
        (with_scales(f"{UP}_scale_inv", 1, 1), "the model wants [4, 2]"),
        (without(f"{EXPERTS}.3.up_proj.weight_scale_inv"), "4 of mlp.experts.*.gate_proj.weight_scale_inv, 3 of"),
    ],
)
def test_scales_that_a_quantised_model_lacks_are_told(changed: Callable[..., Path], change: Any, told: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_pretrained(changed("fp8 deepseek", change), progress=False)
    assert told in str(caught.value)


# ------------------------------------------------------------------ configs and checkpoints that contradict each other


def test_plain_weights_with_a_quantised_config_are_taken_as_they_are_and_that_is_told(
    changed: Callable[..., Path], folder: Callable[[str], Path]
) -> None:
    path = changed("plain deepseek", quantization_config=FP8)
    for dtype in ("auto", "float32"):
        model, report = from_pretrained(path, dtype=dtype, progress=False)
        # With the config as it is, transformers leaves the experts in the dtype that they are stored in.
        assert_same_tensors(model, theirs(folder("plain deepseek"), dtype=dtype))
        assert ["remove quantization_config" in warning for warning in report.warnings] == [True]


@pytest.mark.usefixtures("gpu")
def test_plain_weights_do_not_become_codes(changed: Callable[..., Path]) -> None:
    with pytest.raises(PlanError) as caught:
        from_pretrained(changed("plain deepseek", quantization_config=FP8), progress=False)
    hints = {str(finding.hint) for finding in caught.value.plan.errors if finding.kind == "dtype"}
    assert ["these are plain: build it from a config without quantization_config" in hint for hint in hints] == [True]


@pytest.mark.parametrize("kind", ["fp8 deepseek", "mxfp4 gpt-oss", "bitnet llama"])
def test_codes_without_a_quantised_config_are_refused_with_the_cause(changed: Callable[..., Path], kind: str) -> None:
    with pytest.raises(PlanError, match="quantization_config"):
        from_pretrained(changed(kind, quantization_config=None), progress=False)


# ------------------------------------------------------------------ what transformers can't load here


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
        ({"quant_method": "spqr"}, "GPU is required"),
    ],
)
def test_a_method_that_transformers_cannot_load_here_is_refused_with_what_it_needs(
    changed: Callable[..., Path], method: dict[str, Any], told: str
) -> None:
    path = changed("fp8 deepseek", quantization_config=method)
    with pytest.raises(ModelError) as caught:
        from_pretrained(path, progress=False)
    assert f"is quantised with {method['quant_method']}" in caught.value.message
    assert told in caught.value.message
    with pytest.raises(Exception, match=told):
        theirs(path)


@pytest.mark.parametrize("method", [{"quant_method": "nosuch"}, {"bits": 4}, {}])
def test_a_method_that_nobody_knows_is_refused(changed: Callable[..., Path], method: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=method.get("quant_method", "does not name")) as caught:
        from_pretrained(changed("fp8 deepseek", quantization_config=method), progress=False)
    assert "remove quantization_config from the config" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "module", "hint"),
    [
        ("mxfp4 gpt-oss", "mxfp4", "quantization_config=Mxfp4Config(dequantize=True)"),
        # transformers asks for accelerate whatever is to become of fp8.
        ("fp8 deepseek", "finegrained_fp8", "install what it names"),
    ],
)
def test_without_accelerate_the_way_out_is_named_where_there_is_one(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kind: str, module: str, hint: str
) -> None:
    monkeypatch.setattr(f"transformers.quantizers.quantizer_{module}.is_accelerate_available", lambda: False)
    with pytest.raises(ModelError, match="pip install accelerate") as caught:
        from_pretrained(folder(kind), progress=False)
    assert hint in str(caught.value.hint)
    if "dequantize" in hint:
        model, _ = from_pretrained(folder(kind), quantization_config={"dequantize": True}, progress=False)
        assert load_status(model) == "loaded"


def test_weights_that_transformers_puts_together_itself_are_refused(changed: Callable[..., Path]) -> None:
    path = changed("bitnet llama", quantization_config={**BITNET, "linear_class": "autobitlinear"})
    with pytest.raises(ModelError, match="bitnet are put together by code of transformers") as caught:
        from_pretrained(path, progress=False)
    assert "transformers' own from_pretrained" in str(caught.value.hint)


def test_where_transformers_would_keep_mxfp4_the_way_out_is_named(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What it does where it finds a GPU and its kernels.
    quantizer = transformers.quantizers.quantizer_mxfp4.Mxfp4HfQuantizer
    for step in ("validate_environment", "_process_model_before_weight_loading"):
        monkeypatch.setattr(quantizer, step, lambda self, *args, **kwargs: None)
    with pytest.raises(ModelError, match="mxfp4 are put together by code of transformers") as caught:
        from_pretrained(folder("mxfp4 gpt-oss"), progress=False)
    assert "quantization_config=Mxfp4Config(dequantize=True)" in str(caught.value.hint)


def test_weights_are_not_quantised_while_they_are_loaded(folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="not quantised while they are loaded"):
        from_pretrained(
            folder("plain deepseek"), quantization_config=transformers.FineGrainedFP8Config(), progress=False
        )


@pytest.mark.parametrize(
    ("option", "error", "told"),
    [
        ({"dequantise": True}, ConfigError, "has no 'dequantise'; did you mean 'dequantize'"),
        ("fp8", ConfigError, "not 'fp8'"),
        (transformers.Mxfp4Config(dequantize=True), ModelError, "passing a Mxfp4Config"),
    ],
)
def test_options_of_another_method_are_refused(
    folder: Callable[[str], Path], option: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        from_pretrained(folder("fp8 deepseek"), quantization_config=option, progress=False)


@pytest.mark.parametrize(
    "piece", ["quantizers.auto.get_hf_quantizer", "modeling_utils.PreTrainedModel.get_init_context"]
)
def test_where_transformers_keeps_its_pieces_elsewhere_a_quantised_model_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    monkeypatch.delattr(f"transformers.{piece}")
    with pytest.raises(ModelError, match="quantised with fp8"):
        from_pretrained(folder("fp8 deepseek"), progress=False)


# ------------------------------------------------------------------ saving, writing text


@pytest.mark.usefixtures("gpu")
def test_what_stayed_quantised_is_saved_as_it_was(folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, _ = from_pretrained(folder("fp8 deepseek"), progress=False)
    model.save_pretrained(tmp_path / "saved")
    theirs(folder("fp8 deepseek")).save_pretrained(tmp_path / "expected")
    saved, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "expected"))
    assert saved.keys() == expected.keys() == load_file(folder("fp8 deepseek") / "model.safetensors").keys()
    assert {name for name in expected if not torch.equal(raw(saved[name]), raw(expected[name]))} == set()


@pytest.mark.usefixtures("gpu")
def test_what_save_weights_writes_of_a_quantised_model_loads_again(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, _ = from_pretrained(folder("fp8 deepseek"), progress=False)
    path = shutil.copytree(folder("fp8 deepseek"), tmp_path / "saved")
    save_weights(model, path)
    again, report = from_pretrained(path, progress=False)
    assert (report.missing, report.unexpected) == ([], [])
    assert_same_tensors(again, model)


def test_what_was_dequantised_is_saved_plain(folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, _ = from_pretrained(folder("fp8 deepseek"), progress=False)
    save_weights(model, tmp_path)
    model.config.save_pretrained(tmp_path)
    with open_weights(tmp_path) as weights:
        assert {info.dtype for info in weights.infos()} == {torch.bfloat16, torch.float32}
    again, report = from_pretrained(tmp_path, progress=False)
    assert report.warnings == []
    assert_same(again, theirs(tmp_path))
    assert_same_tensors(again, model)


def test_an_llm_writes_with_a_quantised_checkpoint(folder: Callable[[str], Path]) -> None:
    path = folder("mxfp4 gpt-oss")
    llm = LLM(path, quantization_config={"dequantize": True}, progress=False)
    completion = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    expected = theirs(path).generate(torch.tensor([[5, 6, 7]]), do_sample=False, min_new_tokens=8, max_new_tokens=8)
    assert list(completion.token_ids) == expected[0, 3:].tolist()
    llm.reload_weights(path)
    assert_same(llm.model, theirs(path))
