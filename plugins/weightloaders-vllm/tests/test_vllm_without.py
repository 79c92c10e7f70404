"""Without vLLM: the plugin is installed, and in nobody's way."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import weightloaders_vllm
from weightloaders_vllm.engine import _extra
from weightloaders_vllm.options import LoadOptions, check

from weightloaders import LLM
from weightloaders.errors import ConfigError, MissingDependencyError

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
