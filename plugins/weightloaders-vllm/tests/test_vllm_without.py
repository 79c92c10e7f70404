"""Without vLLM: the plugin is installed, and in nobody's way."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import vllm_standin
import weightloaders_vllm
from safetensors.torch import save_file
from vllm_loaders import WHOLE, Halfway, Misbehaving
from weightloaders_vllm.behind import absent_behind, named
from weightloaders_vllm.engine import VllmEngine, _extra
from weightloaders_vllm.options import LoadOptions, check

from weightloaders import LLM, WeightLoaderRegistry
from weightloaders.errors import (
    ConfigError,
    CoverageError,
    LoaderContractError,
    LoadError,
    MissingDependencyError,
    PlanError,
)

without = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")


@without
def test_the_facade_says_what_to_install(tmp_path):
    with pytest.raises(MissingDependencyError, match="pip install vllm"):
        LLM(model=str(tmp_path), engine="vllm")


@without
def test_registering_raises_nothing_and_is_told_in_the_log(caplog):
    with caplog.at_level(logging.ERROR):
        weightloaders_vllm.register()
    assert "can't be offered" in caplog.text


def test_the_short_form_names_the_loader():
    assert LoadOptions.of("weightloaders:binary", {"kwargs": {}}).loader == "binary"
    assert LoadOptions.of("weightloaders", {}).loader == "auto"


@pytest.mark.parametrize(
    ("load_format", "extra", "said"),
    [
        ("weightloaders", {"loder": "local"}, "'loder' is unknown; did you mean 'loader'"),
        ("weightloaders", ["local"], "is a dict"),
        ("weightloaders:hf", {"loader": "local"}, "two loaders"),
        ("weightloaders:locl", {}, "did you mean 'local'"),
        ("weightloaders:local", {"kwargs": {"patern": "*"}}, "patern"),
        ("weightloaders:local", {"on_missing": "never"}, "never"),
        ("weightloaders:local", {"verify": "crc"}, "verify"),
        ("weightloaders:local", {"watch": "no"}, "watch"),
    ],
)
def test_what_is_asked_for_is_checked_from_the_words_alone(load_format, extra, said):
    with pytest.raises(ConfigError, match=said):
        check(load_format, extra)


def test_the_facades_arguments_become_a_loaders_config():
    class Own:
        pass

    options = {"rules": None, "on_missing": "warn", "device": "cpu", "device_map": None, "progress": None}
    assert _extra("local", {"a": 1}, options) == {"loader": "local", "kwargs": {"a": 1}, "on_missing": "warn"}
    assert _extra(Own, None, {})["loader"].startswith(f"{__name__}:")
    for wrong in ({"device": "cuda"}, {"device_map": "auto"}, {"progress": print}):
        with pytest.raises(ConfigError):
            _extra("local", None, wrong)
    with pytest.raises(ConfigError, match="its name"):
        _extra(Own(), None, {})


def test_the_facade_can_not_keep_the_old_weights_until_all_new_ones_are_there(tmp_path):
    engine = VllmEngine.__new__(VllmEngine)
    with pytest.raises(ConfigError, match="atomic=True can't be had"):
        engine.reload_weights(tmp_path, loader="local", atomic=True)


# ------------------------------------------------------------------ what is behind a parameter


class Mapper:
    """As much of vLLM's WeightsMapper as is asked."""

    orig_to_new_substr: ClassVar = {".self_attn.": ".attn."}
    orig_to_new_prefix: ClassVar = {"model.language_model.": "model."}
    orig_to_new_suffix: ClassVar = {".embed_tokens.weight": ".embedding.weight"}

    def apply_list(self, names):
        for old, new in (*self.orig_to_new_substr.items(), *self.orig_to_new_prefix.items()):
            names = [name.replace(old, new) for name in names]
        for old, new in self.orig_to_new_suffix.items():
            names = [name.removesuffix(old) + new if name.endswith(old) else name for name in names]
        return names


class Experts(torch.nn.Module):
    def get_expert_mapping(self):
        parts = {"gate_proj": "w13_", "up_proj": "w13_", "down_proj": "w2_"}
        return [(f"experts.{param}", f"experts.{e}.{part}.", e, "") for e in range(3) for part, param in parts.items()]


class Moe(torch.nn.Module):
    """Two layers of experts, under vLLM's names."""

    def __init__(self, mapper=None):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            layer = torch.nn.Module()
            layer.mlp = torch.nn.Module()
            layer.mlp.experts = torch.nn.Module()
            layer.mlp.experts.routed_experts = Experts()
            layer.mlp.experts.routed_experts.w13_weight = torch.nn.Parameter(torch.zeros(3, 4, 4))
            self.layers.append(layer)
        if mapper is not None:
            self.hf_to_vllm_mapper = mapper


EXPERTS = {f"layers.{i}.mlp.experts.{e}.{p}_proj.weight" for i in (0, 1) for e in range(3) for p in ("gate", "up")}
W13 = "layers.1.mlp.experts.routed_experts.w13_weight"


def test_a_missing_expert_is_named_as_the_checkpoint_would_call_it():
    gone = {f"layers.1.mlp.experts.2.{p}_proj.weight" for p in ("gate", "up")}
    assert set(absent_behind(Moe(), W13, EXPERTS - gone)) == gone
    one = {"layers.1.mlp.experts.0.up_proj.weight"}
    assert set(absent_behind(Moe(), W13, EXPERTS - one)) == one


def test_what_other_layers_have_and_this_one_has_not_is_named():
    there = {f"layers.{i}.mlp.{part}" for i in (0, 1) for part in ("router.weight", "experts.gate_up", "norm.weight")}
    assert absent_behind(Moe(), W13, there - {"layers.1.mlp.experts.gate_up"}) == ["layers.1.mlp.experts.gate_up"]


@pytest.mark.parametrize(
    ("parameter", "tensor"),
    [
        ("model.layers.1.attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("model.layers.1.attn.qkv_proj.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("model.embedding.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_that_the_model_calls_otherwise_has_the_checkpoints_name(parameter, tensor):
    there = {
        f"model.layers.{i}.self_attn.{part}_proj.{leaf}"
        for i in (0, 1)
        for part in "qkvo"
        for leaf in ("weight", "bias")
    }
    there |= {"model.embed_tokens.weight", "lm_head.weight"}
    assert absent_behind(Moe(Mapper()), parameter, there - {tensor}) == [tensor]


def test_an_error_at_a_tensor_says_where_it_was_to_go_or_how_to_leave_it_out():
    tensor = "layers.1.mlp.experts.0.up_proj.weight"
    error = named(LoadError("failed", tensor=tensor), Moe(), set())
    assert f"{tensor}: it belongs into '{W13}' of shape [3, 4, 4]" in str(error)
    error = named(LoadError("failed", tensor="extra"), Moe(), set())
    assert "rules: {'drop': ['extra']}" in str(error)


# ------------------------------------------------------------------ with a stand-in for vLLM


class Stacked(torch.nn.Module):
    """Fills itself as vLLM's models do: two tensors in one parameter, and no word about what is missing."""

    packed_modules_mapping: ClassVar = {"qk": ["q", "k"]}

    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Linear(4, 8, bias=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            start = {"q.weight": 0, "k.weight": 4}.get(name)
            if start is not None:
                self.qk.weight.data[start : start + 4].copy_(tensor[:4])
        return {"qk.weight"}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Register the formats, and fill a model as vLLM does."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    formats = vllm_standin.install(monkeypatch)
    weightloaders_vllm.register()
    config = SimpleNamespace(
        model=str(tmp_path),
        model_weights="",
        revision=None,
        hf_text_config=SimpleNamespace(to_dict=dict),
        hf_config=SimpleNamespace(tie_word_embeddings=False),
    )

    def load(tensors, load_format="weightloaders:local", model_config=(), **extra):
        save_file(tensors, tmp_path / "model.safetensors")
        model = Stacked()
        load_config = vllm_standin.EngineArgs(load_format, extra).create_load_config()
        loader = formats[load_config.load_format](load_config)
        loader.load_weights(model, SimpleNamespace(**{**vars(config), **dict(model_config)}))
        load.reload = lambda: list(loader.get_all_weights(config, model))
        return model

    yield load
    # What knows the stand-in is not for other tests.
    for name in [name for name in sys.modules if name.startswith("weightloaders_vllm.")]:
        del sys.modules[name]


def test_the_formats_are_registered_and_fill_a_model(load):
    q, k = torch.ones(4, 4), torch.full((4, 4), 2.0)
    for load_format in ("weightloaders", "weightloaders:local"):
        model = load({"q.weight": q, "k.weight": k}, load_format)
        assert torch.equal(model.qk.weight, torch.cat([q, k]))


@pytest.mark.parametrize(
    ("tensors", "extra", "error", "said"),
    [
        ({"q.weight": torch.ones(4, 4)}, {}, CoverageError, "no 'k.weight'"),
        ({"q.weight": torch.ones(6, 4), "k.weight": torch.ones(4, 4)}, {}, CoverageError, r"'q.weight' .*\[6, 4\]"),
        (
            {name: torch.ones(4, 4) for name in ("q.weight", "k.weight", "bias")},
            {"on_unexpected": "error"}, CoverageError, "bias",
        ),
        (
            {"q.weight": torch.full((4, 4), float("nan")), "k.weight": torch.ones(4, 4)},
            {"verify": "finite"}, LoadError, "qk.weight",
        ),
        ({}, {"loder": "local"}, ConfigError, "did you mean 'loader'"),
    ],
)  # fmt: skip
def test_what_is_incomplete_or_misspelt_is_refused(load, tensors, extra, error, said):
    with pytest.raises(error, match=said):
        load(tensors, **extra)


@pytest.mark.parametrize(
    ("pairs", "error", "said"),
    [
        ([*WHOLE.items(), ("q.weight", torch.zeros(4, 4))], LoaderContractError, "two tensors named 'q.weight'"),
        ([("q.weight", WHOLE["q.weight"]), OSError("gone")], LoadError, "the stream of weights failed after 1 tensors"),
        ([("q.weight", WHOLE["q.weight"])], CoverageError, "qk.weight: the checkpoint has no 'k.weight'"),
        ([*WHOLE.items(), ("k.weight_scale", 1.0)], LoaderContractError, r"not \(str, float\)"),
        (
            [("q.weight", WHOLE["q.weight"]), ("k.weight", torch.ones(4, 4, dtype=torch.int8))],
            CoverageError, "copied 'k.weight', whose dtype is torch.int8",
        ),
    ],
)  # fmt: skip
def test_a_loader_that_misbehaves_is_refused_by_name(load, monkeypatch, pairs, error, said):
    monkeypatch.setattr(Misbehaving, "pairs", pairs)
    with pytest.raises(error, match=said):
        load({}, "weightloaders:vllm_loaders:Misbehaving")


def test_a_loader_that_fills_models_its_own_way_is_told_what_a_parameter_is_made_of(load):
    with pytest.raises(CoverageError, match=r"qk.weight: it is made of 'q.weight', 'k.weight'"):
        load(WHOLE, "weightloaders:vllm_loaders:Halfway")


def test_a_loader_that_is_registered_at_run_time_has_a_load_format(load):
    with WeightLoaderRegistry.isolated():
        WeightLoaderRegistry.register("of_today", Halfway)
        with pytest.raises(CoverageError):
            load(WHOLE, "weightloaders:of_today")


@pytest.mark.parametrize("load_format", ["weightloader", "weight-loaders:local", "Weightloders"])
def test_a_load_format_that_is_nearly_ours_is_asked_back_for(load, load_format):
    with pytest.raises(ConfigError, match="did you mean 'weightloaders'"):
        load(WHOLE, load_format)


def test_load_formats_of_others_pass(load):
    assert vllm_standin.EngineArgs("safetensors").create_load_config().load_format == "safetensors"
    assert vllm_standin.EngineArgs("tensorizer").create_load_config().load_format == "tensorizer"


def test_the_report_lists_nothing_that_checkpoints_need_not_have(load):
    from weightloaders_vllm.loader import report_of

    model = load(WHOLE)
    assert report_of(model).missing == []


HEAD = {"embed_tokens.weight": torch.zeros(3, 4)}
TIED = {"hf_config": SimpleNamespace(tie_word_embeddings=True)}


def test_an_output_layer_that_would_be_tied_to_other_values_is_refused(load):
    other = WHOLE | HEAD | {"lm_head.weight": torch.ones(3, 4)}
    with pytest.raises(CoverageError, match=r"'lm_head.weight' is not 'embed_tokens.weight'.*\n.*hf_overrides"):
        load(other, model_config=TIED)
    load(other, model_config=TIED, on_mismatch="ignore")
    load(other)
    load(WHOLE | HEAD | {"lm_head.weight": torch.zeros(3, 4)}, model_config=TIED)


def test_an_output_layer_that_is_not_in_the_source_is_tied(load, monkeypatch):
    tied = []
    untied = SimpleNamespace(tie=tied.append)
    weight_tying = sys.modules["vllm.model_executor.model_loader.weight_tying"]
    monkeypatch.setattr(weight_tying, "_get_untied_lm_head", lambda model: untied)
    model = load(WHOLE | HEAD, model_config={"word_embeddings_untied_by_checkpoint": True})
    assert tied == [model]
    load(
        WHOLE | HEAD | {"lm_head.weight": torch.ones(3, 4)}, model_config={"word_embeddings_untied_by_checkpoint": True}
    )
    assert tied == [model]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k.weight": torch.ones(4, 4, dtype=torch.int8)}, "'k.weight' is of torch.int8, not torch.float32"),
        ({"k.weight": torch.ones(2, 4)}, r"'k.weight' has shape \[2, 4\], not \[4, 4\]"),
    ],
)
def test_a_reload_of_another_kind_is_refused_before_anything_changes(load, tmp_path, changed, said):
    load(WHOLE)
    save_file(WHOLE | changed, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=said):
        load.reload()


def test_a_reload_leaves_out_what_the_model_has_no_place_for_or_refuses_it(load, tmp_path):
    for extra in ({}, {"on_unexpected": "error"}):
        load(WHOLE, **extra)
        save_file(WHOLE | {"v.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
        if extra:
            with pytest.raises(PlanError, match=r"'v.weight' was not there"):
                load.reload()
        else:
            assert [name for name, _ in load.reload()] == ["k.weight", "q.weight"]


def test_a_reload_may_do_without_what_the_model_did_not_use(load, tmp_path):
    load(WHOLE | {"v.weight": torch.ones(4, 4)})
    save_file(WHOLE, tmp_path / "model.safetensors")
    assert [name for name, _ in load.reload()] == ["k.weight", "q.weight"]


def test_a_reload_that_fails_on_the_way_is_an_error_of_a_load(load, monkeypatch):
    monkeypatch.setattr(Misbehaving, "pairs", list(WHOLE.items()))
    load({}, "weightloaders:vllm_loaders:Misbehaving")
    for pair in (OSError("gone"), ("k.weight", 1.0), ("k.weight", torch.ones(2, 4))):
        monkeypatch.setattr(Misbehaving, "pairs", [("q.weight", WHOLE["q.weight"]), pair])
        with pytest.raises(LoadError):
            load.reload()
