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
from weightloaders_vllm.engine import _extra
from weightloaders_vllm.options import LoadOptions, check

from weightloaders import LLM
from weightloaders.errors import ConfigError, CoverageError, LoadError, MissingDependencyError

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
        model=str(tmp_path), model_weights="", revision=None, hf_text_config=SimpleNamespace(to_dict=dict)
    )

    def load(tensors, load_format="weightloaders:local", **extra):
        save_file(tensors, tmp_path / "model.safetensors")
        model = Stacked()
        load_config = vllm_standin.EngineArgs(load_format, extra).create_load_config()
        formats[load_format](load_config).load_weights(model, config)
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
