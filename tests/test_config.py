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


# ------------------------------------------------------------------ what is said twice, or is not what it seems


@pytest.mark.parametrize("key", ["model", "dtype", "weight_loader", "device_map"])
def test_what_has_a_key_of_its_own_is_not_said_once_more_among_the_models_arguments(write, key):
    with pytest.raises(ConfigError, match=rf"model_kwargs: .*{key!r} is a key of the file itself"):
        LLMConfig.from_file(write(f"model: m\nmodel_kwargs: {{{key}: x}}\n"))


@pytest.mark.parametrize("key", ["self", "hidden size", "1"])
def test_an_argument_of_the_model_has_a_name_that_can_be_one(write, key):
    with pytest.raises(ConfigError, match="is no name of an argument"):
        LLMConfig.from_file(write(f"model: m\nmodel_kwargs: {{'{key}': 2}}\n"))


@pytest.mark.parametrize("key", ["model", "weights", "tokenizer", "rules", "revision"])
def test_an_empty_name_is_refused_rather_than_taken_for_the_folder_of_the_file(write, key):
    text = "model: ''\n" if key == "model" else f"model: m\n{key}: ''\n"
    with pytest.raises(ConfigError, match=rf"{key}: ''"):
        LLMConfig.from_file(write(text))


def test_a_path_beside_a_config_in_the_working_directory_stays_a_path(write, tmp_path, monkeypatch):
    write("model: ./smollm2\ntokenizer: there\n")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    config = LLMConfig.from_file("llm.yaml")
    assert (config.model, config.tokenizer) == (f".{os.sep}smollm2", f".{os.sep}there")


@pytest.mark.parametrize("name", ["llm.yaml", "llm.toml", "llm.json"])
@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file_is_called_empty_whatever_its_format(write, name, text):
    with pytest.raises(ConfigError, match="is empty"):
        LLMConfig.from_file(write(text, name))


def test_a_name_without_an_ending_is_told_so(write):
    with pytest.raises(ConfigError, match="its name has no ending that tells the format"):
        LLMConfig.from_file(write("model: m\n", "config"))


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 400_000 + " = 1", "[a" + ".a" * 400_000 + "]", ("a" + ".a" * 150 + "=1\n") * 3000]
)
def test_a_key_of_many_parts_is_refused_before_hours_are_spent_on_it(write, text):
    with pytest.raises(ConfigError, match=r"line 1 has more than 100 dots"):
        LLMConfig.from_file(write(text, "llm.toml"))


def test_the_home_folder_may_be_written_as_in_a_shell(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("model: m\n")
    assert LLMConfig.from_file("~/llm.yaml").model == "m"


def test_a_number_that_yaml_takes_for_text_is_told_how_it_is_written(write):
    from weightloaders import LLM

    with pytest.raises(ConfigError, match=r"'1e-1': should be a valid number \(in YAML .* 1\.0e-1\)"):
        LLM.from_config(write("model: m\nsampling_params: {temperature: 1e-1}\n"))


def test_a_loader_that_a_config_names_and_nobody_has_is_told_with_the_file(write, tmp_path):
    from weightloaders import LLM
    from weightloaders.errors import OptionsError, UnknownLoaderError
    from weightloaders.testing import tiny_checkpoint

    tiny_checkpoint(tmp_path / "llama")
    path = write("model: ./llama\nweight_loader: nobodys\n")
    with pytest.raises(UnknownLoaderError, match="nobodys") as caught:
        LLM.from_config(path)
    assert caught.value.file == str(path)
    with pytest.raises(UnknownLoaderError) as caught:
        LLM.from_config(path, weight_loader="nobodys-either")
    assert caught.value.file is None
    path = write("model: ./llama\nweight_loader: local\nweight_loader_kwargs: {size: 3}\n")
    with pytest.raises(OptionsError, match="size") as refused:
        LLM.from_config(path)
    assert str(path) in str(refused.value)


def test_a_value_that_does_not_suit_the_models_config_is_refused_by_name(write, tmp_path):
    from weightloaders import LLM
    from weightloaders.errors import ModelError
    from weightloaders.testing import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "llama")
    with pytest.raises(ModelError, match=r"hidden_size='16' does not suit the config: .*expected int, got str"):
        LLM.from_config(write("model: ./llama\nmodel_kwargs: {hidden_size: '16'}\n"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "16"}))
    with pytest.raises(ModelError, match=r"there is no usable config in .*hidden_size"):
        LLM(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sampling_params": {"temperature": 0}}, "sampling_params is a SamplingParams"),
        ({"trust_remote_code": "no"}, "trust_remote_code is True or False, not 'no'"),
        ({"max_num_seqs": "3"}, "max_num_seqs is a number from 1 on, not '3'"),
        ({"max_num_seqs": 0}, "max_num_seqs is a number from 1 on, not 0"),
        ({"max_model_len": True}, "max_model_len is a number from 1 on, not True"),
        ({"model_kwargs": {"a": 1}}, "model_kwargs is a key of config files"),
    ],
)
def test_arguments_in_python_are_checked_as_those_of_a_file_before_anything_is_opened(arguments, said):
    from weightloaders import LLM

    with pytest.raises(ConfigError, match=said):
        LLM("./nowhere", **arguments)


def test_code_is_trusted_by_true_and_not_by_any_word(tmp_path):
    from weightloaders import from_pretrained
    from weightloaders.testing import tiny_checkpoint

    with pytest.raises(ConfigError, match="trust_remote_code is True or False, not 'no'"):
        from_pretrained(tiny_checkpoint(tmp_path / "llama"), trust_remote_code="no")


def test_what_is_no_path_is_no_config():
    from weightloaders import LLM

    for wrong in (3, None):
        with pytest.raises(ConfigError, match="path is the path of a config file"):
            LLM.from_config(wrong)
