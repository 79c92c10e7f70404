"""The mapping that comes with transformers: tiny models of many families plan from what they save themselves."""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.families import check, different, sweep
from benchmarks.small_models import classes
from weightloaders import load_into, plan_load
from weightloaders.plan import ComputeStep, CopyStep
from weightloaders.skeleton import build_skeleton

if TYPE_CHECKING:
    from pathlib import Path

    from weightloaders.plan import LoadPlan

Tensors = dict[str, torch.Tensor]

_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 1, "head_dim": 8}
_EXPERTS = {**_GROUPED, "moe_intermediate_size": 8, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "llama tied": ("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 40, "n_positions": 32}),
    "bert": ("BertForMaskedLM", _SIZES),
    "bert body": ("BertModel", _SIZES),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "gemma3": ("Gemma3ForCausalLM", _GROUPED),
    "gpt-neox": ("GPTNeoXForCausalLM", _SIZES),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 40,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **_EXPERTS, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4, "v_head_dim": 8,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8, "vocab_size": 40,
            "n_groups": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_GROUPED},
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
            },
        },
    ),
}  # fmt: skip


def build(family: str) -> Any:
    """A tiny model of a family, with values of its own."""
    name, sizes = FAMILIES[family]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    model.tie_weights()
    return model


_saved: dict[str, Path] = {}


@pytest.fixture
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> a folder as the model itself saves it, made once."""

    def folder(family: str) -> Path:
        if family not in _saved:
            _saved[family] = tmp_path_factory.mktemp("family")
            build(family).save_pretrained(_saved[family])
        return _saved[family]

    return folder


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def plan_of(folder: Path, tensors: Tensors | None = None, **options: Any) -> LoadPlan:
    return plan_load(build_skeleton(str(folder)).model, folder if tensors is None else tensors, **options)


def experts(folder: Path) -> tuple[Tensors, str]:
    """A mixture of experts as tensors, and the pattern of one layer's experts' names."""
    tensors = tensors_of(folder)
    first = next(name for name in tensors if re.search(r"experts\.0\.", name))
    return tensors, first.partition("experts.0.")[0] + "experts."


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_own_checkpoint_fits_it_and_comes_back_to_the_bit(family: str, saved: Any) -> None:
    folder = saved(family)
    plan = plan_of(folder)
    assert plan.ok, str(plan)
    assert plan.missing == plan.unexpected == plan.mismatched == []
    assert not any(isinstance(step, ComputeStep) for step in plan.steps)
    assert "transformers' conversions" in plan.decided_by
    reference = build(family)
    model = type(reference)(copy.deepcopy(reference.config))
    load_into(model, folder, progress=False)
    expected, found = reference.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "mixtral"])
def test_one_missing_tensor_is_missing_in_every_family(family: str, saved: Any) -> None:
    tensors = tensors_of(saved(family))
    for name in list(tensors)[:: max(1, len(tensors) // 5)]:
        plan = plan_of(saved(family), {n: t for n, t in tensors.items() if n != name})
        assert not plan.ok, name
        assert len(plan.missing) == 1


# ------------------------------------------------------------------ every class

# Of each kind of conversion, and of each oddity of models, one; all are in the sweep below.
REPRESENTATIVE = (
    "BigBirdPegasusForCausalLM",  # sparse attention, a text model of a sequence-to-sequence config
    "BloomForCausalLM",  # the base model's prefix
    "DoryForCausalLM",  # two layers of the file are one of the model
    "FSMTForConditionalGeneration",  # ties of three
    "Gemma4ForCausalLM",  # buffers that are stored
    "GptOssForCausalLM",  # experts that are stored stacked
    "Inkling2LoopForCausalLM",  # queries of layers put together
    "MarianMTModel",  # parameters that are computed and not trained
    "MllamaForConditionalGeneration",  # gates and cross attention
    "PhimoeForCausalLM",  # experts one by one
    "Qwen3NextForCausalLM",  # projections that are joined anew
    "XLNetLMHeadModel",  # parameters that are no module's weight
)
# They came with later versions of transformers than the oldest that is supported.
NEWER = {"DoryForCausalLM", "Inkling2LoopForCausalLM"}
# transformers does not load the values that it saved itself, and weightloaders does.
FAULTS_OF_TRANSFORMERS = {
    "Gemma3ForConditionalGeneration[shieldgemma2]",  # it loads by the names of another class: all is missing
    "ZayaForCausalLM",  # a buffer is initialised over what was loaded
}
# Their vision towers come from other packages, which are not here.
NEED_MORE_PACKAGES = {
    "FastVlmForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
}


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_class_of_transformers_loads_to_the_bit(name: str) -> None:
    if name in NEWER and name not in classes():
        pytest.skip(f"transformers {transformers.__version__} does not have it yet")
    result = check(name)
    assert (result.status, result.reason) == ("equal", "")
    assert result.computed == {}


def test_the_comparison_sees_a_bit_a_buffer_a_tie_and_a_config() -> None:
    expected = build("llama tied")
    assert list(different(build("llama tied"), expected)) == []
    other = build("llama tied")
    norm = other.model.norm.weight.data
    norm[3] = torch.nextafter(norm[3], torch.tensor(torch.inf))
    assert list(different(other, expected)) == ["model.norm.weight has other values"]
    other = build("llama tied")
    other.model.rotary_emb.inv_freq[0] += 1
    assert list(different(other, expected)) == ["model.rotary_emb.inv_freq has other values"]
    other = build("llama tied")
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    assert list(different(other, expected)) == ["other ties: [['lm_head.weight', 'model.embed_tokens.weight']]"]
    other = build("llama tied")
    other.config.rms_norm_eps = 0.5
    assert list(different(other, expected)) == ["config: ['rms_norm_eps']"]
    assert list(different(build("llama tied").to(torch.bfloat16), expected)) != []


# In parts, which can run side by side.
PARTS = 54


def test_nearly_all_classes_of_transformers_are_looked_at() -> None:
    # 293 with transformers 5.19, and more with each version.
    assert len(classes()) > 290


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_of_transformers_that_can_be_built_loads_to_the_bit(part: int) -> None:
    results = {result.name: result for result in sweep(list(classes())[part::PARTS], workers=1)}
    assert list(results) == list(classes())[part::PARTS]
    not_built = {name: result.reason for name, result in results.items() if result.status == "not built"}
    assert not_built.keys() <= NEED_MORE_PACKAGES, not_built
    assert all(reason.startswith("ImportError") for reason in not_built.values()), not_built
    theirs = {name for name, result in results.items() if result.status == "theirs"}
    assert theirs <= FAULTS_OF_TRANSFORMERS
    others = {name: result for name, result in results.items() if name not in {*not_built, *theirs}}
    assert {name: result.reason for name, result in others.items() if result.status != "equal"} == {}
    assert {name: result.computed for name, result in others.items() if result.computed} == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_default_model_of_transformers_plans_from_headers_alone(part: int) -> None:
    results = list(sweep(list(classes())[part::PARTS], workers=1, whole=True))
    assert {r.name: r.reason for r in results if r.status not in ("equal", "not built")} == {}
    assert {r.name for r in results if r.status == "not built"} <= NEED_MORE_PACKAGES
    assert sum(r.tensors for r in results) > 2_000


# ------------------------------------------------------------------ experts


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_are_copied_each_to_its_place(family: str, saved: Any) -> None:
    plan = plan_of(saved(family))
    fused = [step for step in plan.steps if step.rules and "MergeModulelist" in step.rules[-1]]
    assert fused
    assert all(isinstance(step, CopyStep) for step in fused)
    assert {len(step.placements) for step in fused if isinstance(step, CopyStep)} == {4, 8}


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_an_experts_index_that_leaves_a_gap_is_refused(family: str, saved: Any) -> None:
    # transformers itself stacks what it finds and never looks at the number.
    tensors, prefix = experts(saved(family))
    renumbered = {n.replace(f"{prefix}3.", f"{prefix}7."): t for n, t in tensors.items()}
    plan = plan_of(saved(family), renumbered)
    assert {f.kind for f in plan.errors} == {"incomplete"}
    assert "the index 3 is missing: next is" in plan.errors[0].message
    assert "experts.7." in plan.errors[0].message


def test_an_expert_that_is_absent_or_of_another_shape_is_named(saved: Any) -> None:
    tensors, prefix = experts(saved("mixtral"))
    without = {n: t for n, t in tensors.items() if not n.startswith(f"{prefix}1.")}
    assert "the index 1 is missing" in plan_of(saved("mixtral"), without).errors[0].message
    one_part = {n: t for n, t in tensors.items() if n != f"{prefix}3.w1.weight"}
    assert "don't pair" in plan_of(saved("mixtral"), one_part).errors[0].message
    last = {n: t for n, t in tensors.items() if not n.startswith(f"{prefix}3.")}
    plan = plan_of(saved("mixtral"), last)
    assert {f.kind for f in plan.errors} == {"shape"}
    assert "of 4 experts the source has 3, and number 3 is missing" in plan.errors[0].message
    odd = {**tensors, f"{prefix}2.w1.weight": torch.zeros(24, 17)}
    plan = plan_of(saved("mixtral"), odd)
    assert f"'{prefix}2.w1.weight' has [24, 17], where others of" in plan.errors[0].message
    all_odd = {n: torch.zeros(t.shape[0], 17) if ".w1." in n or ".w3." in n else t for n, t in tensors.items()}
    plan = plan_of(saved("mixtral"), all_odd)
    assert "the model wants [4, 48, 16]" in plan.errors[0].message


def test_experts_stored_as_one_tensor_make_the_same_model(saved: Any) -> None:
    fused = {n: t.clone() for n, t in build("mixtral").state_dict().items()}
    plan = plan_of(saved("mixtral"), fused)
    assert plan.ok
    assert plan.unexpected == []
    one, other = (build("mixtral") for _ in range(2))
    load_into(one, fused, progress=False)
    load_into(other, saved("mixtral"), progress=False)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_experts_beyond_the_models_layers_are_unexpected_not_missing(saved: Any) -> None:
    tensors, prefix = experts(saved("mixtral"))
    more = {n.replace(".0.", ".9.", 1): t for n, t in tensors.items() if n.startswith(prefix)}
    plan = plan_of(saved("mixtral"), {**tensors, **more})
    assert plan.ok
    assert sorted(plan.unexpected) == sorted(more)


def test_experts_in_a_packing_that_no_conversion_knows_are_unexpected_and_the_plain_ones_missing(saved: Any) -> None:
    tensors, _ = experts(saved("mixtral"))
    packed = {re.sub(r"(experts\.\d+\.w\d)\.weight", r"\1.tq_packed", n): t for n, t in tensors.items()}
    plan = plan_of(saved("mixtral"), packed)
    assert not plan.ok
    assert len(plan.missing) == 4
    assert len(plan.unexpected) == 24


def test_a_mixture_under_an_unknown_prefix_is_told_its_rename(saved: Any) -> None:
    tensors = {f"backbone.{n}": t for n, t in tensors_of(saved("mixtral")).items()}
    assert "Rename('backbone', '')" in str(plan_of(saved("mixtral"), tensors).errors[0].hint)


# ------------------------------------------------------------------ names


def test_renames_that_wait_for_a_name_before_them_do_not_depend_on_the_order_of_storage(saved: Any) -> None:
    tensors = tensors_of(saved("mixtral"))
    backwards = dict(reversed(tensors.items()))
    assert plan_of(saved("mixtral"), backwards).ok


def test_a_bodys_checkpoint_fills_a_headed_model_up_to_the_head_and_the_other_way_round(saved: Any) -> None:
    body = tensors_of(saved("bert body"))
    plan = plan_of(saved("bert"), body)
    assert sorted(plan.missing) == [
        "cls.predictions.bias",
        "cls.predictions.decoder.bias",
        "cls.predictions.transform.LayerNorm.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.dense.weight",
    ]
    assert sorted(plan.unexpected) == ["pooler.dense.bias", "pooler.dense.weight"]
    plan = plan_of(saved("bert body"), tensors_of(saved("bert")))
    assert sorted(plan.missing) == ["pooler.dense.bias", "pooler.dense.weight"]
    assert all(name.startswith("cls.") for name in plan.unexpected)


def test_old_spellings_and_computed_buffers_of_old_checkpoints_are_understood(saved: Any) -> None:
    tensors = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors_of(saved("bert")).items()
    }
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    plan = plan_of(saved("bert"), tensors)
    assert plan.ok
    assert plan.unexpected == []
    assert plan.ignored == ["bert.embeddings.position_ids"]


def test_a_models_own_word_on_what_may_be_missing_or_unexpected_counts(saved: Any) -> None:
    tensors = tensors_of(saved("llama"))
    del tensors["model.norm.weight"]
    tensors["extra.weight"] = torch.zeros(1)
    model = build_skeleton(str(saved("llama"))).model
    model._keys_to_ignore_on_load_missing = [r"model\.norm"]  # type: ignore[assignment]
    model._keys_to_ignore_on_load_unexpected = {r"^extra"}  # type: ignore[assignment]
    plan = plan_load(model, tensors)
    assert plan.ok
    assert (plan.missing, plan.unexpected) == ([], [])
    assert plan.ignored == ["extra.weight"]
    assert plan.unfilled == ["model.norm.weight"]
    assert "the model says that this may be" in plan.findings[0].message


def test_a_mapping_that_somebody_registers_is_part_of_the_plan(saved: Any) -> None:
    from transformers.conversion_mapping import WeightRenaming, register_checkpoint_conversion_mapping

    class MyLlama(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    register_checkpoint_conversion_mapping("MyLlama", [WeightRenaming("my_attn", "self_attn")], overwrite=True)
    model = MyLlama(transformers.LlamaConfig(**FAMILIES["llama"][1]))
    tensors = {n.replace("self_attn", "my_attn"): t for n, t in tensors_of(saved("llama")).items()}
    plan = plan_load(model, tensors)
    assert plan.ok, str(plan)


def test_a_conversion_that_computes_is_a_computed_step(saved: Any) -> None:
    from transformers.conversion_mapping import WeightConverter, register_checkpoint_conversion_mapping
    from transformers.core_model_loading import ConversionOps

    class Doubled(ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> Any:
            return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}

    class DoubledLlama(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    converter = WeightConverter("norm.half_weight", "norm.weight", [Doubled()])
    register_checkpoint_conversion_mapping("DoubledLlama", [converter], overwrite=True)
    config = transformers.LlamaConfig(**FAMILIES["llama"][1])
    model = DoubledLlama(config).to(torch.bfloat16)
    tensors = tensors_of(saved("llama"))
    tensors["model.norm.half_weight"] = tensors.pop("model.norm.weight")
    plan = plan_load(model, tensors)
    assert plan.ok, str(plan)
    assert "computed (aten.mul.Tensor)" in plan.explain("model.norm.weight")
    plan.run(model)
    assert torch.equal(model.model.norm.weight.data, tensors["model.norm.half_weight"].to(torch.bfloat16) * 2)
    # Codes are not numbers, wherever they pass through.
    tensors["model.norm.half_weight"] = torch.zeros(16).to(torch.float8_e4m3fn)
    assert not plan_load(model, tensors).ok


def test_a_conversion_may_do_without_parts_that_only_some_checkpoints_have(saved: Any) -> None:
    from transformers.conversion_mapping import WeightConverter, register_checkpoint_conversion_mapping
    from transformers.core_model_loading import ConversionOps

    class Scaled(ConversionOps):  # type: ignore[misc]
        supports_many_to_many = True

        def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> Any:
            values = [parts[0] for parts in input_dict.values()]
            return {target_patterns[0]: values[0] if len(values) == 1 else values[0] * values[1]}

    class ScaledLlama(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    converter = WeightConverter(["norm.plain", "norm.factor"], "norm.weight", [Scaled()])
    register_checkpoint_conversion_mapping("ScaledLlama", [converter], overwrite=True)
    model = ScaledLlama(transformers.LlamaConfig(**FAMILIES["llama"][1]))
    tensors = tensors_of(saved("llama"))
    plain = tensors.pop("model.norm.weight")
    found = plan_load(model, {**tensors, "model.norm.plain": plain})
    assert found.ok, str(found)
    assert "computed" not in found.explain("model.norm.weight")
    found = plan_load(model, {**tensors, "model.norm.plain": plain, "model.norm.factor": torch.tensor(2.0)})
    assert "computed" in found.explain("model.norm.weight")
    # What is left does not do.
    found = plan_load(model, {**tensors, "model.norm.factor": torch.tensor(2.0)})
    assert "norm.plain is missing" in found.errors[0].message


# ------------------------------------------------------------------ ties


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_declared_tie_may_come_under_either_name(name: str, saved: Any) -> None:
    tensors = tensors_of(saved("llama tied"))
    tensors[name] = tensors.pop("model.embed_tokens.weight")
    plan = plan_of(saved("llama tied"), tensors)
    assert plan.ok
    assert {name, *plan.tied} == {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_declared_tie_that_comes_twice_is_kept_twice_and_told(saved: Any) -> None:
    tensors = tensors_of(saved("llama tied"))
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    plan = plan_of(saved("llama tied"), tensors)
    assert plan.ok
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(plan.loaded)
    assert [f.kind for f in plan.findings] == ["tied"]
    assert set(plan.findings[0].tensors) == {"lm_head.weight", "model.embed_tokens.weight"}


def test_a_declared_tie_that_comes_twice_from_the_same_bytes_is_read_once(saved: Any, tmp_path: Path) -> None:
    tensors = tensors_of(saved("llama tied"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    plan = plan_load(build_skeleton(str(saved("llama tied"))).model, tmp_path / "pytorch_model.bin")
    assert plan.ok
    assert "lm_head.weight" in {*plan.tied} ^ {*plan.loaded}
    assert plan.bytes_to_read == sum(t.nbytes for n, t in tensors.items() if n != "lm_head.weight")


def test_an_untied_head_that_is_absent_is_missing(saved: Any) -> None:
    tensors = tensors_of(saved("llama"))
    del tensors["lm_head.weight"]
    assert plan_of(saved("llama"), tensors).missing == ["lm_head.weight"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", ["llama tied", "t5"])
def test_declared_ties_are_made_once_the_weights_are_in(family: str, streamed: bool, saved: Any) -> None:
    model: Any = build_skeleton(str(saved(family))).model
    source: Any = iter(tensors_of(saved(family)).items()) if streamed else saved(family)
    load_into(model, source, progress=False)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected = build(family).state_dict()
    assert all(torch.equal(expected[name], parameter) for name, parameter in model.named_parameters())


def test_a_tie_that_the_config_declares_and_the_model_has_not_does_not_count(saved: Any) -> None:
    model = build("llama tied")
    model.lm_head = torch.nn.Linear(16, 40, bias=False)
    assert plan_load(model, saved("llama tied")).missing == ["lm_head.weight"]
    with_head = {**tensors_of(saved("llama tied")), "lm_head.weight": torch.ones(40, 16)}
    load_into(model, with_head, progress=False)
    assert torch.equal(model.lm_head.weight.data, torch.ones(40, 16))
    assert torch.equal(model.model.embed_tokens.weight.data, with_head["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_any_one_name_of_a_tie_of_several_will_do(family: str, saved: Any) -> None:
    tensors = tensors_of(saved(family))
    model = build_skeleton(str(saved(family))).model
    names = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}  # type: ignore[union-attr, operator]
    assert len(names) > 2
    (stored,) = names & set(tensors)
    for name in names:
        plan = plan_of(saved(family), {(name if n == stored else n): t for n, t in tensors.items()})
        assert plan.ok, str(plan)
        assert {name, *plan.tied} == names
    none = plan_of(saved(family), {n: t for n, t in tensors.items() if n != stored})
    assert set(none.missing) == names


def test_a_tie_that_a_nested_config_declares_counts(saved: Any, tmp_path: Path) -> None:
    for tied in (True, False):
        sizes = copy.deepcopy(FAMILIES["llava"][1])
        sizes["text_config"]["tie_word_embeddings"] = tied
        config = transformers.LlavaConfig(**sizes, tie_word_embeddings=tied)
        model = transformers.LlavaForConditionalGeneration(config)
        model.save_pretrained(tmp_path / str(tied))
        tensors = {n: t for n, t in tensors_of(tmp_path / str(tied)).items() if "lm_head" not in n}
        plan = plan_of(tmp_path / str(tied), tensors)
        assert plan.ok == tied
        assert ("lm_head.weight" in plan.tied) == tied


# ------------------------------------------------------------------ dtypes and cost


def test_the_models_dtype_is_the_targets_whatever_is_stored(saved: Any) -> None:
    model = build_skeleton(str(saved("mixtral")), dtype=torch.bfloat16).model
    plan = plan_load(model, saved("mixtral"))
    assert plan.ok
    assert set(plan.cast.values()) == {(torch.float32, torch.bfloat16)}
    assert set(plan.cast) == set(plan.loaded)


def test_a_quantised_checkpoint_in_a_plain_model_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    tensors = tensors_of(saved("mixtral"))
    codes = {n: t.to(torch.float8_e4m3fn) if t.dim() == 2 and ".experts." in n else t for n, t in tensors.items()}
    scales = {n.replace(".weight", ".weight_scale_inv"): torch.ones(1) for n in codes if ".experts." in n}
    plan = plan_of(saved("mixtral"), {**codes, **scales})
    assert {f.kind for f in plan.errors} == {"dtype"}
    assert "torch.float8_e4m3fn" in plan.errors[0].message
    assert "quantization_config" in str(plan.errors[0].hint)


def test_a_large_mixture_plans_from_headers_alone(tmp_path: Path) -> None:
    sizes = {**_EXPERTS, "num_experts": 32, "num_hidden_layers": 8, "hidden_size": 2048, "moe_intermediate_size": 768}
    config = transformers.Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False)
    model = build_skeleton(None, config=config, dtype=torch.bfloat16).model
    header: dict[str, Any] = {}
    at = 0
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        split = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(name.rpartition(".")[2])
        names = [name]
        if split is not None:
            names = [f"{name.rpartition('.')[0]}.{e}.{part}.weight" for e in range(shape[0]) for part in split]
            shape = [shape[1] // len(split), shape[2]]
        for stored in names:
            size = 2 * torch.Size(shape).numel()
            header[stored] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)
    plan = plan_load(model, file)
    assert plan.ok, str(plan)
    assert plan.bytes_to_read == at > 2**31
    assert len(plan.loaded) == len(list(model.parameters()))


def test_a_shard_that_an_index_leaves_out_is_told_as_whole_layers(saved: Any, tmp_path: Path) -> None:
    tensors = {n: t for n, t in tensors_of(saved("llama")).items() if "layers.1." not in n}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_load(build_skeleton(str(saved("llama"))).model, tmp_path / "model.safetensors")
    assert plan.errors[0].message.endswith("parameters are not in the source: model.layers.1.* (9)")
