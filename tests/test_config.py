"""Config files: what they may say, and how each mistake is named before anything is opened."""

from __future__ import annotations

import inspect
import json
import os
import string
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightloaders.config import LLMConfig
from weightloaders.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def write(tmp_path):
    def written(text: str, name: str = "llm.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written


SAME = {
    "llm.yaml": "model: org/name\nweight_loader: binary\n"
    "weight_loader_kwargs: {dtype: bfloat16, file_pattern: '*.bin'}\n"
    "dtype: float16\non_missing: {'lm_head.*': warn}\nmax_num_seqs: 4\ntrust_remote_code: false\n",
    "llm.toml": 'model = "org/name"\nweight_loader = "binary"\ndtype = "float16"\nmax_num_seqs = 4\n'
    'trust_remote_code = false\n[weight_loader_kwargs]\ndtype = "bfloat16"\nfile_pattern = "*.bin"\n'
    '[on_missing]\n"lm_head.*" = "warn"\n',
    "llm.json": json.dumps(
        {
            "model": "org/name",
            "weight_loader": "binary",
            "weight_loader_kwargs": {"dtype": "bfloat16", "file_pattern": "*.bin"},
            "dtype": "float16",
            "on_missing": {"lm_head.*": "warn"},
            "max_num_seqs": 4,
            "trust_remote_code": False,
        }
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_yaml_toml_and_json_say_the_same(write, name):
    config = LLMConfig.from_file(write(SAME[name], name))
    assert config == LLMConfig(
        model="org/name",
        weight_loader="binary",
        weight_loader_kwargs={"dtype": "bfloat16", "file_pattern": "*.bin"},
        dtype="float16",
        on_missing={"lm_head.*": "warn"},
        max_num_seqs=4,
    )


def test_the_arguments_are_those_of_the_constructor(write):
    from weightloaders import LLM

    path = write("model: org/name\nmodel_kwargs: {attn_implementation: eager}\n")
    arguments = LLMConfig.from_file(path).arguments()
    assert arguments.pop("attn_implementation") == "eager"
    # Every parameter of LLM can be set in a file, under the same name, with the same default.
    parameters = {name: p for name, p in inspect.signature(LLM).parameters.items() if name != "model_kwargs"}
    assert arguments.keys() == parameters.keys()
    for name, parameter in parameters.items():
        if name not in ("model", "weight_loader_kwargs"):
            assert arguments[name] == parameter.default, name


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\nweight_loade: hf\n", ["weight_loade", "did you mean 'weight_loader'"]),
        ("model: m\nzzz: 1\n", ["zzz", "sampling_params", "weight_loader"]),
        ("weights: x\n", ["model: is required"]),
        ("model: 3\n", ["model", "string", "3"]),
        ("model: m\ntrust_remote_code: 'yes'\n", ["trust_remote_code", "boolean", "'yes'"]),
        ("model: m\nmax_num_seqs: '6'\n", ["max_num_seqs", "integer", "'6'"]),
        ("model: m\nmax_num_seqs: 0\n", ["max_num_seqs", "greater than or equal to 1"]),
        ("model: m\non_missing: eror\n", ["on_missing", "'error', 'warn' or 'ignore'", "eror"]),
        ("model: m\non_unexpected: {'a.*': nope}\n", ["on_unexpected.a.*", "'error', 'warn' or 'ignore'", "nope"]),
        ("model: m\nverify: md5\n", ["verify", "'finite', 'sha256' or 'record'", "md5"]),
        ("model: m\nmodel: n\n", ["'model' occurs twice", "line 2"]),
        ("model: m\nweight_loader_kwargs: {a: 1, a: 2}\n", ["'a' occurs twice"]),
        ("model: [m\n", ["line"]),
        ("- model\n", ["list"]),
        ("", ["empty"]),
        ("3: 4\nmodel: m\n", ["3"]),
        ("model: !!python/object/apply:os.system ['echo']\n", ["python/object"]),
        ("? [a, b]\n: c\nmodel: m\n", ["line 1", "no name"]),
    ],
)
def test_a_mistake_is_named_with_the_file_and_the_key(write, text, said):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        LLMConfig.from_file(path)
    for words in (str(path), *said):
        assert words in str(caught.value)


def test_all_mistakes_are_named_at_once(write):
    with pytest.raises(ConfigError) as caught:
        LLMConfig.from_file(write("modle: m\ndtype: 4\nverify: x\n"))
    for words in ("modle", "did you mean 'model'", "dtype", "verify"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("llm.json", '{"model": "a", "model": "b"}', "'model' occurs twice"),
        ("llm.json", '{"model": "a",}', "line 1"),
        ("llm.json", "[" * 100_000, "nested too deeply"),
        ("llm.yaml", "[" * 20_000, "nested too deeply"),
        ("llm.toml", 'model = "a"\nmodel = "b"\n', "overwrite"),
        ("llm.ini", "model = a", ".yaml"),
        ("llm", "model: a", ".yaml"),
    ],
)
def test_a_file_that_can_not_be_understood_is_named(write, name, text, said):
    path = write(text, name)
    with pytest.raises(ConfigError, match=r"(?s)llm.*" + said.replace(".", r"\.")):
        LLMConfig.from_file(path)


def test_a_file_that_is_absent_or_no_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        LLMConfig.from_file(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="UTF-8"):
        LLMConfig.from_file(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="too large"):
        LLMConfig.from_file(_sparse(tmp_path / "weights.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml"):
        LLMConfig.from_file(tmp_path / "folder.yaml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        LLMConfig.from_file(tmp_path / "pipe.yaml")


def _sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path


def test_aliases_that_explode_are_told_in_a_few_words(write):
    layers = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(30))
    with pytest.raises(ConfigError) as caught:
        LLMConfig.from_file(write(layers + "model: *a29\n"))
    assert len(str(caught.value)) < 50_000


def test_a_yaml_merge_is_no_duplicate(write):
    text = "weight_loader_kwargs: &k {a: 1}\nmodel_kwargs:\n  <<: *k\n  a: 2\nmodel: m\n"
    assert LLMConfig.from_file(write(text)).model_kwargs == {"a": 2}


@given(st.dictionaries(st.text(string.ascii_lowercase, min_size=1), st.none() | st.booleans() | st.integers()))
def test_any_keys_and_values_are_accepted_or_refused_by_our_own_error(values):
    unknown = values.keys() - LLMConfig.model_fields.keys()
    # Without a model none is complete, so each is refused, and with all its unknown keys.
    with pytest.raises(ConfigError) as caught:
        LLMConfig(**{name: value for name, value in values.items() if name != "model"})
    assert all(repr(name) in str(caught.value) for name in unknown)


# ------------------------------------------------------------------ paths


def test_a_path_that_exists_beside_the_config_is_meant(write, tmp_path):
    (tmp_path / "smollm2").mkdir()
    config = LLMConfig.from_file(write("model: smollm2\nweights: org/name\ntokenizer: ./absent\n"))
    assert config.model == str(tmp_path / "smollm2")
    assert config.weights == "org/name"
    assert config.tokenizer == str(tmp_path / "absent")


def test_absolute_and_home_paths_stay_what_they_are(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = LLMConfig.from_file(write("model: /abs/model\nweights: ~/weights\n"))
    assert (config.model, config.weights) == ("/abs/model", str(tmp_path / "weights"))


def test_rules_stand_in_the_config_or_in_a_file_beside_it(write, tmp_path):
    (tmp_path / "rules.yaml").write_text("drop: [x]\n")
    inline = LLMConfig.from_file(write("model: m\nrules: {drop: [x]}\n")).arguments()["rules"]
    beside = LLMConfig.from_file(write("model: m\nrules: rules.yaml\n")).arguments()["rules"]
    assert inline == {"drop": ["x"]}
    assert beside == tmp_path / "rules.yaml"


def test_mistakes_in_sampling_params_name_the_file_and_the_field(write):
    from weightloaders import LLM

    path = write("model: m\nsampling_params: {temprature: 0}\n")
    with pytest.raises(ConfigError) as caught:
        LLM.from_config(path)
    for words in (str(path), "sampling_params", "temprature", "did you mean 'temperature'"):
        assert words in str(caught.value)


def test_a_dtype_may_be_given_to_the_constructor_as_such():
    # Files say dtypes as strings; only Python can say them otherwise, and then LLM takes them without a config.
    with pytest.raises(ConfigError, match="dtype"):
        LLMConfig(model="m", dtype=torch.float16)
