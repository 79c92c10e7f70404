"""Whole models of every architecture: names, layouts and configs, as transformers' own loading has them, to the bit."""

import signal
import struct
import warnings

import gguf_bytes as raw
import gguf_models
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from weightloaders_gguf import GgufLoader
from weightloaders_gguf.names import ARCHITECTURES

import weightloaders as wl
from weightloaders.errors import (
    CheckpointFormatError,
    DuplicateTensorError,
    ModelError,
    PlanError,
    UnsupportedDtypeError,
)

NEWER = ("qwen35", "qwen35moe", "lfm2")
# transformers looks for these under other names than the converter gives them.
NOT_BY_TRANSFORMERS = ("gpt-oss",)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        # transformers' numpy, of parameters that are random.
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
    transformers.utils.logging.set_verbosity_warning()


def written(folder, architecture, kinds=None):
    model = gguf_models.tiny(architecture)
    said = gguf_models.SAID.get(architecture, architecture)
    path = gguf_models.write(
        folder / "model.gguf",
        gguf_models.as_gguf(model, architecture),
        said,
        gguf_models.properties_of(architecture, model.config),
        kinds,
    )
    return model, path


def by_transformers(path, architecture, dtype):
    if architecture == "t5encoder":
        family = transformers.T5EncoderModel
    else:
        family = transformers.AutoModelForSeq2SeqLM if "t5" in architecture else transformers.AutoModelForCausalLM
    return family.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].nan_to_num(), tensor.nan_to_num()), name


@pytest.mark.parametrize("architecture", [a for a in gguf_models.MODELS if a != "gemma4"])
def test_a_model_comes_back_as_it_was_and_as_transformers_loads_it(tmp_path, architecture):
    model, path = written(tmp_path, architecture)
    ours, report = wl.from_pretrained(path, progress=False)
    assert (report.unexpected, report.missing) == ([], [])
    assert_same_config(architecture, path)
    if architecture not in NOT_BY_TRANSFORMERS:
        assert_same(ours, by_transformers(path, architecture, torch.float32))
    for name, tensor in model.state_dict().items():
        # What is one more, or an exponential, in the file is rounded there.
        close = torch.testing.assert_close if "norm" in name or "A_log" in name else torch.equal
        assert close(ours.state_dict()[name], tensor) in (None, True), name


def assert_same_config(architecture, path):
    if architecture in NOT_BY_TRANSFORMERS:
        return
    theirs = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    mine = transformers.AutoConfig.from_pretrained(GgufLoader().get_model_files(str(path), "config.json")).to_dict()
    for content in (mine, theirs):
        for key in ("architectures", "dtype", "_name_or_path", "_model_name_or_path", "transformers_version"):
            content.pop(key, None)
    assert mine == theirs


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.float32), ("llama", torch.float16), ("qwen2moe", torch.bfloat16), ("gemma2", torch.bfloat16),
        ("gpt2", torch.bfloat16), ("bloom", torch.float32), ("mamba", torch.bfloat16), ("falcon", torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_a_quantised_model_is_what_transformers_makes_of_it(tmp_path, architecture, dtype):
    def kinds(name, tensor):
        if tensor.dim() == 1 or tensor.shape[-1] % 32 or "ssm_" in name:
            return None
        return "Q4_0" if "attn" in name else "Q5_1" if "ffn_up" in name else "Q8_0"

    _, path = written(tmp_path, architecture, kinds)
    ours, _ = wl.from_pretrained(path, dtype=dtype, progress=False)
    assert_same(ours, by_transformers(path, architecture, dtype))


@pytest.mark.parametrize("architecture", NEWER)
def test_of_those_that_transformers_decodes_by_torch_float32_is_the_same(tmp_path, architecture):
    def kinds(name, tensor):
        fits = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 and "conv" not in name
        return "Q8_0" if fits else None

    _, path = written(tmp_path, architecture, kinds)
    ours, _ = wl.from_pretrained(path, dtype=torch.float32, progress=False)
    assert_same(ours, by_transformers(path, architecture, torch.float32))


@pytest.mark.parametrize(("architecture", "stored"), [("llama", "F16"), ("gemma3", "BF16"), ("bloom", "F16")])
def test_narrow_numbers_are_read_as_transformers_reads_them(tmp_path, architecture, stored):
    _, path = written(tmp_path, architecture, lambda name, tensor: stored if tensor.dim() > 1 else None)
    for dtype in (torch.float32, torch.bfloat16):
        ours, _ = wl.from_pretrained(path, dtype=dtype, progress=False)
        assert_same(ours, by_transformers(path, architecture, dtype))
    ours, _ = wl.from_pretrained(path, progress=False)
    assert ours.dtype is {"F16": torch.float16, "BF16": torch.bfloat16}[stored]


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss"])
def test_a_model_that_was_made_by_hand_is_filled_the_same(tmp_path, architecture):
    _, path = written(tmp_path, architecture)
    model = gguf_models.tiny(architecture, seed=1)
    wl.load_into(model, path, progress=False)
    expected, _ = wl.from_pretrained(path, progress=False)
    assert_same(model, expected)


# ------------------------------------------------------------------ names


def test_names_of_gemma4_are_those_that_transformers_has():
    # It is too large a model to be written: a GGUF file does not say how wide its embeddings of each layer are.
    kind, sizes = gguf_models.MODELS["gemma4"]
    sizes = {**gguf_models._SIZES, **sizes, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**sizes))
    found = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get("gemma4", TensorProcessor)(config={}))
    assert "blk.1.layer_output_scale" in found
    assert {name: ARCHITECTURES["gemma4"].of(name) for name in found} == found


def test_every_architecture_that_transformers_loads_has_names():
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    renamed = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}
    known = {renamed.get(name, name) for name in (*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS)}
    assert known - {"general", "tokenizer", "umt5"} <= ARCHITECTURES.keys()


def test_names_may_stay_the_files_own(tmp_path):
    model, path = written(tmp_path, "llama")
    with wl.open_weights(path, "gguf", names="gguf") as weights:
        assert set(weights) == set(gguf_models.as_gguf(model, "llama"))
        rotated = gguf_models.as_gguf(model, "llama")["blk.0.attn_q.weight"]
        assert torch.equal(weights["blk.0.attn_q.weight"], rotated)


def test_an_architecture_that_is_not_known_keeps_its_names_and_says_so(tmp_path):
    path = gguf_models.write(tmp_path / "a.gguf", {"blk.0.attn_q.weight": torch.ones(2, 2)}, "llama99")
    with wl.open_weights(path) as weights:
        assert list(weights) == ["blk.0.attn_q.weight"]
        assert "'llama99'" in weights.notes[0]
        assert "qwen2moe" in weights.notes[0]
    with pytest.raises(ModelError, match=r"llama99.*qwen2") as raised:
        wl.from_pretrained(path)
    assert "config=" in raised.value.hint


def test_tensors_that_only_llama_cpp_needs_are_left_out(tmp_path):
    model = gguf_models.tiny("llama")
    tensors = {**gguf_models.as_gguf(model, "llama"), "rope_freqs.weight": torch.ones(8)}
    path = gguf_models.write(tmp_path / "a.gguf", tensors, "llama", gguf_models.properties_of("llama", model.config))
    _, report = wl.from_pretrained(path, progress=False)
    assert not report.unexpected
    with wl.open_weights(path) as weights:
        assert "rope_freqs.weight" not in weights
        assert "rope_freqs.weight" in weights.notes[0]


def test_a_tensor_without_a_name_in_transformers_is_unexpected(tmp_path):
    model = gguf_models.tiny("llama")
    tensors = {**gguf_models.as_gguf(model, "llama"), "blk.0.attn_extra.weight": torch.ones(8)}
    path = gguf_models.write(tmp_path / "a.gguf", tensors, "llama", gguf_models.properties_of("llama", model.config))
    _, report = wl.from_pretrained(path, progress=False)
    assert report.unexpected == ["blk.0.attn_extra.weight"]


def test_a_head_that_is_the_embedding_again_is_tied(tmp_path):
    # Written without output.weight, as llama.cpp does for tied models.
    model = gguf_models.tiny("llama")
    tensors = gguf_models.as_gguf(model, "llama")
    del tensors["output.weight"]
    path = gguf_models.write(tmp_path / "a.gguf", tensors, "llama", gguf_models.properties_of("llama", model.config))
    loaded, report = wl.from_pretrained(path, progress=False)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not report.missing


def test_experts_that_lack_their_other_half_are_refused(tmp_path):
    model = gguf_models.tiny("qwen3moe")
    tensors = gguf_models.as_gguf(model, "qwen3moe")
    del tensors["blk.1.ffn_up_exps.weight"]
    path = gguf_models.write(
        tmp_path / "a.gguf", tensors, "qwen3moe", gguf_models.properties_of("qwen3moe", model.config)
    )
    with pytest.raises(CheckpointFormatError, match=r"ffn_gate_exps.weight is there, and ffn_up_exps.weight is not"):
        wl.from_pretrained(path, progress=False)


def test_halves_of_experts_may_be_stored_in_different_types(tmp_path):
    _, path = written(tmp_path, "qwen3moe", lambda name, _: {"up_exps": "F16", "gate_exps": "Q8_0"}.get(name[10:-7]))
    ours, _ = wl.from_pretrained(path, dtype=torch.float32, progress=False)
    assert_same(ours, by_transformers(path, "qwen3moe", torch.float32))


def test_widths_of_experts_are_taken_from_the_file(tmp_path):
    model = gguf_models.tiny("qwen3moe")
    said = gguf_models.properties_of("qwen3moe", model.config) | {"qwen3moe.expert_feed_forward_length": 32}
    tensors = {
        name: value[:, :32]
        if "gate_exps" in name or "up_exps" in name
        else value[..., :32]
        if "down_exps" in name
        else value
        for name, value in gguf_models.as_gguf(model, "qwen3moe").items()
    }
    path = gguf_models.write(tmp_path / "a.gguf", tensors, "qwen3moe", said)
    ours, _ = wl.from_pretrained(path, progress=False)
    assert ours.config.moe_intermediate_size == 32


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path):
    model = gguf_models.tiny("llama")
    said = gguf_models.properties_of("llama", model.config) | {"llama.attention.head_count": 5}
    path = gguf_models.write(tmp_path / "a.gguf", gguf_models.as_gguf(model, "llama"), "llama", said)
    with pytest.raises((PlanError, ValueError), match="5 heads"):
        wl.open_weights(path)


@pytest.mark.parametrize(
    ("architecture", "claim"),
    [
        ("bloom", {"bloom.attention.head_count": 1 << 31}),
        ("bloom", {"bloom.attention.head_count": 0}),
        ("llama", {"llama.attention.head_count": 0}),
        ("llama", {"llama.attention.head_count": "four"}),
        ("qwen35", {"qwen35.ssm.group_count": 1 << 30, "qwen35.ssm.time_step_rank": 1 << 31}),
        ("qwen35", {"qwen35.ssm.time_step_rank": 3}),
        ("qwen35", {"qwen35.ssm.inner_size": (1 << 32) - 4}),
        ("qwen35", {"qwen35.ssm.state_size": 1 << 31}),
    ],
    ids=str,
)
def test_absurd_numbers_of_heads_are_refused_at_once(tmp_path, architecture, claim):
    model = gguf_models.tiny(architecture)
    said = gguf_models.properties_of(architecture, model.config) | claim
    path = gguf_models.write(tmp_path / "a.gguf", gguf_models.as_gguf(model, architecture), architecture, said)
    with pytest.raises(CheckpointFormatError):
        wl.open_weights(path)


def test_a_config_that_the_file_lacks_is_asked_for(tmp_path):
    path = gguf_models.write(tmp_path / "a.gguf", {"token_embd.weight": torch.ones(2, 2)}, "qwen35")
    with pytest.raises(ModelError, match="does not say what transformers needs") as raised:
        wl.from_pretrained(path)
    assert "config=" in raised.value.hint


# ------------------------------------------------------------------ what does not fit its place


def opened(folder, architecture, tensors, kinds=None, **said):
    properties = {f"{architecture}.{key.replace('__', '.')}": value for key, value in said.items()}
    return wl.open_weights(gguf_models.write(folder / "a.gguf", tensors, architecture, properties, kinds))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("architecture", "name", "said"),
    [
        ("gemma2", "blk.0.attn_norm.weight", {}),
        ("nemotron", "output_norm.weight", {}),
        ("mamba", "blk.0.ssm_a", {}),
        (
            "qwen35",
            "blk.0.ssm_a",
            {
                "block_count": 1,
                "ssm__group_count": 2,
                "ssm__time_step_rank": 4,
                "ssm__inner_size": 4,
                "ssm__state_size": 1,
            },
        ),
    ],
)
def test_integers_are_refused_where_numbers_are_reckoned_from_them(tmp_path, architecture, name, said, dtype):
    with pytest.raises(UnsupportedDtypeError, match="floating point") as raised:
        opened(tmp_path, architecture, {name: torch.arange(1, 5).to(dtype)}, **said)
    assert (raised.value.tensor, raised.value.file) == (name, str(tmp_path / "a.gguf"))
    assert raised.value.hint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_norms_of_any_floating_point_are_reckoned_with(tmp_path, dtype):
    with opened(tmp_path, "gemma2", {"output_norm.weight": torch.arange(1, 5).to(dtype)}) as weights:
        assert weights["model.norm.weight"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("gate", "up", "fits"),
    [
        (torch.int8, torch.float32, False),
        (torch.float16, torch.int64, False),
        (torch.int8, torch.int16, False),
        (torch.int8, torch.int8, True),
        (torch.float16, torch.float32, True),
    ],
    ids=str,
)
def test_integers_are_never_stacked_with_others(tmp_path, gate, up, fits):
    names = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")
    tensors = {name: torch.ones(1, 2, 2).to(dtype) for name, dtype in zip(names, (gate, up), strict=True)}
    if fits:
        with opened(tmp_path, "qwen3moe", tensors) as weights:
            assert torch.equal(weights["model.layers.0.mlp.experts.gate_up_proj"], torch.ones(1, 4, 2))
        return
    with pytest.raises(CheckpointFormatError, match="don't fit together") as raised:
        opened(tmp_path, "qwen3moe", tensors)
    assert raised.value.tensor in names


def test_a_tensor_whose_blocks_reach_across_rows_is_refused_where_rows_move(tmp_path):
    with pytest.raises(UnsupportedDtypeError, match="reach across its rows") as raised:
        opened(tmp_path, "llama", {"blk.0.attn_q.bias": torch.ones(64)}, lambda *_: "Q8_0", attention__head_count=2)
    assert raised.value.tensor == "blk.0.attn_q.bias"


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("gpt-oss", ["blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight"]),
        ("gemma4", ["blk.0.layer_output_scale.weight", "blk.0.layer_output_scale"]),
        ("qwen2", ["output_norm.weight", "model.norm.weight"]),
        ("qwen3moe", ["blk.0.ffn_down_exps.weight", "model.layers.0.mlp.experts.down_proj"]),
    ],
)
def test_two_tensors_of_one_name_in_transformers_are_both_named(tmp_path, architecture, names):
    with pytest.raises(DuplicateTensorError, match=r"both model\.") as raised:
        opened(tmp_path, architecture, {name: torch.ones(2, 2, 2) for name in names})
    assert all(name in raised.value.message for name in names)
    assert raised.value.tensor == names[1]


@pytest.mark.parametrize("number", ["00", "01", "\u0660", "1234567890"])
def test_a_layer_is_only_what_llama_cpp_would_call_so(tmp_path, number):
    names = ["blk.0.attn_norm.weight", f"blk.{number}.attn_norm.weight"]
    with opened(tmp_path, "llama", {name: torch.ones(4) for name in names}) as weights:
        assert set(weights) == {"model.layers.0.input_layernorm.weight", names[1]}


@pytest.mark.parametrize(
    ("architecture", "name", "shape"),
    [
        *(("qwen35", f"blk.0.{leaf}", ()) for leaf in (
            "ssm_out.weight", "ssm_conv1d.weight", "attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight",
            "ssm_dt.bias", "ssm_a",
        )),
        ("mamba", "blk.0.ssm_conv1d.weight", ()),
        ("lfm2", "blk.0.shortconv.conv.weight", (4,)),
        ("bloom", "blk.0.attn_qkv.weight", ()),
        ("bloom", "blk.0.attn_qkv.bias", ()),
        ("llama", "blk.0.attn_q.weight", ()),
        ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight", ()),
        *(("gpt-oss", "blk.0.ffn_down_exps.weight", shape) for shape in ((), (4,), (0,), (2, 2), (1, 2, 2, 2))),
    ],
)  # fmt: skip
def test_tensors_of_other_dimensions_than_the_models_are_named(tmp_path, architecture, name, shape):
    said = {"block_count": 1, "attention__head_count": 1, "ssm__group_count": 1, "ssm__time_step_rank": 1}
    with pytest.raises(CheckpointFormatError, match="dimensions") as raised:
        opened(tmp_path, architecture, {name: torch.ones(shape)}, ssm__inner_size=1, ssm__state_size=0, **said)
    assert raised.value.tensor == name


@pytest.mark.parametrize(
    ("architecture", "leaf", "dims"),
    [("llama", "attn_q.weight", (0, 1 << 40)), ("qwen35", "ssm_out.weight", (1 << 40, 0))],
)
def test_an_empty_tensor_of_endless_rows_is_arranged_at_once(tmp_path, architecture, leaf, dims):
    said = {"block_count": 1, "attention.head_count": 1, "ssm.group_count": 1, "ssm.time_step_rank": 1}
    pairs = [raw.number(f"{architecture}.{key}", value) for key, value in {**said, "ssm.state_size": 1}.items()]
    size = raw.pair(f"{architecture}.ssm.inner_size", 10, struct.pack("<Q", 1 << 40))
    path = tmp_path / "a.gguf"
    path.write_bytes(
        raw.gguf_file(
            (raw.string("general.architecture", architecture), *pairs, size),
            (raw.tensor(f"blk.0.{leaf}", dims),),
            bytes(32),
        )
    )
    with wl.open_weights(path) as weights:
        (name,) = weights
        assert weights[name].shape == dims[::-1]


def cut_between(folder, architecture, **halves):
    """A split model of two files, the first of which ends between the two tensors of experts."""
    for number, (leaf, value) in enumerate(halves.items()):
        said = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        path = folder / f"m-{number + 1:05d}-of-00002.gguf"
        gguf_models.write(path, {f"blk.0.{leaf}": value}, architecture, said)
    return folder


def test_halves_of_experts_in_different_files_are_stacked(tmp_path):
    halves = {"ffn_gate_exps.weight": torch.zeros(1, 2, 2), "ffn_up_exps.weight": torch.ones(1, 2, 2)}
    with wl.open_weights(cut_between(tmp_path, "qwen3moe", **halves)) as weights:
        assert torch.equal(weights["model.layers.0.mlp.experts.gate_up_proj"], torch.cat([*halves.values()], dim=1))


@pytest.mark.parametrize(("kind", "shape"), [("weight", (3, 4, 32)), ("bias", (3, 4)), ("weight", (0, 4, 32))])
def test_halves_that_take_turns_are_so_from_different_files_too(tmp_path, kind, shape):
    gate, up = torch.rand(shape), torch.rand(shape)
    due = torch.stack([gate, up], dim=2).flatten(1, 2)
    with wl.open_weights(
        cut_between(tmp_path, "gpt-oss", **{f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up})
    ) as weights:
        (name,) = weights
        assert torch.equal(weights[name], due.mT if kind == "weight" else due)
        assert [file.name for file in weights.info(name).origins] == [str(p) for p in sorted(tmp_path.iterdir())]


# ------------------------------------------------------------------ what is said, but can't be


def claiming(
    folder, architecture="qwen3", said=(), names=("blk.0.attn_norm.weight", "token_embd.weight"), shape=(4, 8)
):
    """A file of few bytes that says what it likes."""
    sizes = {"block_count": 1, "embedding_length": 8, "attention.head_count": 1, "feed_forward_length": 8}
    stated = {"context_length": 16, "vocab_size": 4, "attention.head_count_kv": 1} | sizes | dict(said)
    pairs = [
        value if isinstance(value, bytes) else raw.pair(f"{architecture}.{key}", 10, struct.pack("<Q", value))
        for key, value in stated.items()
    ]
    tensors = [raw.tensor(name, shape[::-1], 0, at * 4 * 32) for at, name in enumerate(names)]
    path = folder / "a.gguf"
    path.write_bytes(
        raw.gguf_file(
            (raw.string("general.architecture", architecture), *pairs), tuple(tensors), bytes(len(names) * 128)
        )
    )
    return path


@pytest.mark.parametrize("number", [2, 1 << 31, 1 << 62])
@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        *(("qwen3", key) for key in ("block_count", "nextn_predict_layers")),
        *(("qwen35", key) for key in ("block_count", "nextn_predict_layers")),
        ("lfm2", "block_count"), ("t5", "block_count"), ("gpt2", "block_count"),
    ],
)  # fmt: skip
def test_more_layers_than_there_are_tensors_of_are_refused_before_a_config_is_made(tmp_path, architecture, key, number):
    path = claiming(tmp_path, architecture, {key: number})
    with pytest.raises(ModelError, match=rf"{architecture}\.{key}: {number:,}, but it has") as raised:
        GgufLoader().get_model_files(str(path), "config.json")
    assert raised.value.file == str(path)
    assert "config=" in raised.value.hint


@pytest.mark.parametrize("key", ["vocab_size", "attention.head_count", "attention.key_length", "expert_count"])
def test_sizes_that_no_tensor_has_are_refused_before_a_config_is_made(tmp_path, key):
    path = claiming(tmp_path, said={key: 1 << 40})
    with pytest.raises(ModelError, match="no tensor has a size above 8"):
        wl.from_pretrained(path)


def test_positions_are_held_against_their_table(tmp_path):
    path = claiming(tmp_path, "gpt2", {"context_length": 1 << 31}, ("blk.0.attn_norm.weight", "position_embd.weight"))
    with pytest.raises(ModelError, match="context_length"):
        wl.from_pretrained(path)


def test_a_layer_that_is_predicted_ahead_may_be_counted_and_left_out(tmp_path):
    path = claiming(tmp_path, said={"block_count": 2, "nextn_predict_layers": 1})
    assert GgufLoader().get_model_files(str(path), "config.json")


def test_tensors_outside_the_layers_are_told_from_those_that_are_left_out(tmp_path):
    path = claiming(tmp_path, "qwen35", {"block_count": 1 << 62, "nextn_predict_layers": 1 << 62})
    with wl.open_weights(path) as weights:
        assert list(weights) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "value",
    [
        raw.string("qwen3.vocab_size", "x"),
        raw.number("qwen3.attention.layer_norm_rms_epsilon", 1),
        raw.array("qwen3.attention.head_count_kv", raw.UINT32, 3, struct.pack("<3I", 1, 2, 3)),
        raw.pair("tokenizer.ggml.bos_token_id", 7, b"\1"),
    ],
    ids=["text", "whole number", "one of each layer", "truth"],
)
def test_what_a_config_can_not_say_is_an_error_of_our_own(tmp_path, value):
    path = claiming(tmp_path, said={value[8 + len("qwen3.") : 8 + value[0]].decode(): value})
    with pytest.raises(ModelError) as raised:
        wl.from_pretrained(path)
    assert raised.value.file == str(path)
    assert "config=" in raised.value.hint


def test_a_panic_of_the_tokenizers_library_is_an_error_of_our_own(tmp_path, capfd):
    texts = {"tokens": ["a", "a", "a", "a"], "merges": ["a a"]}
    said = {
        key: raw.array(f"tokenizer.ggml.{key}", raw.STRING, len(value), b"".join(raw.text(text) for text in value))
        for key, value in texts.items()
    }
    path = claiming(tmp_path, said={**said, "model": raw.string("tokenizer.ggml.model", "gpt2")})
    with pytest.raises(ModelError, match="can't build the tokenizer") as raised:
        GgufLoader().get_model_files(str(path))
    assert "tokenizer=" in raised.value.hint
    capfd.readouterr()


def test_an_interrupt_stays_one(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.integrations.gguf.convert_gguf_tokenizer", interrupted)
    tokens = raw.array("tokenizer.ggml.tokens", raw.STRING, 1, raw.text("a"))
    path = claiming(tmp_path, said={"tokens": tokens})
    with pytest.raises(KeyboardInterrupt):
        GgufLoader().get_model_files(str(path))


def test_a_temporary_folder_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="temporary folder") as raised:
        wl.from_pretrained(claiming(tmp_path))
    assert "TMPDIR" in raised.value.hint


def test_a_tokenizer_that_could_not_be_written_is_written_when_there_is_room(tmp_path):
    resource = pytest.importorskip("resource")
    said = gguf_models.properties_of("llama", gguf_models.tiny("llama").config)
    said |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 96}
    path = gguf_models.write(
        tmp_path / "a.gguf", {f"blk.{n}.attn_norm.weight": torch.ones(128) for n in range(2)}, "llama", said
    )
    loader = GgufLoader()
    folder = loader.get_model_files(str(path), "config.json")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ModelError, match="temporary folder") as raised:
            loader.get_model_files(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "TMPDIR" in raised.value.hint
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert loader.get_model_files(str(path)) == folder
    assert transformers.AutoTokenizer.from_pretrained(folder).vocab_size == 96
