"""Weights in Meta's layout, made by the inverse of transformers' own formula, against the model that they come from."""

from __future__ import annotations

import json
import logging
import tempfile

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel, MistralConfig
from typer.testing import CliRunner
from weightloaders_meta import MetaLoader

from weightloaders import LLM, SamplingParams, WeightLoaderRegistry, from_pretrained, load_into, open_weights, plan_load
from weightloaders.cli.main import app
from weightloaders.errors import (
    IncompleteCheckpointError,
    ModelError,
    OptionsError,
    PlanError,
    SourceNotFoundError,
    WeightLoadersError,
)

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PARAMS = {
    "dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 128, "multiple_of": 32, "norm_eps": 1e-5,
    "ffn_dim_multiplier": 0.5, "rope_theta": 10000.0,
}  # fmt: skip
IDS = torch.tensor([[1, 5, 9, 2, 100, 17, 33, 64]])


def llama(kind=LlamaConfig, seed=0, **changes):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    # Norms of ones would hide it if two were taken for each other.
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, "rms_norm_eps": 1e-5, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def unpermuted(weight, heads):
    # convert_llama_weights_to_hf.py: w.view(n_heads, dim1 // n_heads // 2, 2, dim2).transpose(1, 2).reshape(dim1, dim2)
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def as_meta(model):
    """The weights of a transformers Llama under Meta's names, in Meta's layout."""
    config, held = model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = {
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {"tok_embeddings.weight": held["model.embed_tokens.weight"], "norm.weight": held["model.norm.weight"]}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"layers.{i}"
        q, k = held[f"{ours}.self_attn.q_proj.weight"], held[f"{ours}.self_attn.k_proj.weight"]
        found[f"{theirs}.attention.wq.weight"] = unpermuted(q, config.num_attention_heads)
        found[f"{theirs}.attention.wk.weight"] = unpermuted(k, config.num_key_value_heads)
        found |= {f"{theirs}.{new}.weight": held[f"{ours}.{old}.weight"] for old, new in names.items()}
    if not config.tie_word_embeddings:
        found["output.weight"] = held["lm_head.weight"]
    found["rope.freqs"] = torch.zeros(4)
    return found


AXES = {
    "wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0,
}  # fmt: skip


def split(found, parts, embedding_axis):
    ranks = [{} for _ in range(parts)]
    for name, tensor in found.items():
        leaf = name.split(".")[-2] if name != "rope.freqs" else name
        axis = embedding_axis if leaf == "tok_embeddings" else AXES.get(leaf)
        pieces = [tensor] * parts if axis is None else tensor.chunk(parts, axis)
        for rank, piece in zip(ranks, pieces, strict=True):
            rank[name] = piece.clone()
    return ranks


def folder_of(path, model, parts=1, embedding_axis=0, params=PARAMS):
    path.mkdir()
    for rank, tensors in enumerate(split(as_meta(model), parts, embedding_axis)):
        torch.save(tensors, path / f"consolidated.{rank:02}.pth")
    (path / "params.json").write_text(json.dumps(params))
    return path


def assert_same(model, reference):
    expected = reference.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        assert torch.equal(model(IDS)[0], reference(IDS)[0])


@pytest.fixture(scope="module")
def reference():
    return llama()


def written(kind, path, found):
    if kind == "a dict":
        return found
    if kind == "a stream":
        return iter(found.items())
    if kind == ".pth":
        torch.save(found, path / "consolidated.00.pth")
        return path / "consolidated.00.pth"
    save_file(found, path / "consolidated.safetensors")
    return path


@pytest.mark.parametrize("kind", [".pth", "safetensors", "a dict", "a stream"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_filled_from_metas_names_in_any_format(tmp_path, kind, tied):
    source, model = llama(tie_word_embeddings=tied), llama(seed=1, tie_word_embeddings=tied)
    report = load_into(model, written(kind, tmp_path, as_meta(source)), progress=False)
    assert_same(model, source)
    assert (report.warnings, report.dropped) == ([], ["rope.freqs"])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    ],
)
def test_heads_and_their_sizes_are_those_of_the_models_config(changes):
    source, model = llama(**changes), llama(seed=1, **changes)
    load_into(model, as_meta(source), progress=False)
    assert_same(model, source)


def test_nothing_is_computed_on_the_way(tmp_path, reference):
    report = load_into(llama(seed=1), written(".pth", tmp_path, as_meta(reference)), progress=False)
    assert not {"computed", "assembled"} & set(report.bytes_by_path)


def test_a_mistral_and_a_model_without_head_are_filled_too(reference):
    source, model = llama(MistralConfig), llama(MistralConfig, seed=1)
    load_into(model, as_meta(source), progress=False)
    assert_same(model, source)
    bare = LlamaModel(reference.config)
    report = load_into(bare, as_meta(reference), progress=False, on_unexpected="ignore")
    assert report.unexpected == ["output.weight"]
    assert all(torch.equal(t, bare.state_dict()[name]) for name, t in reference.model.state_dict().items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_with_a_wrapper_in_front_are_known_too(reference, prefix):
    model = llama(seed=1)
    load_into(model, {prefix + name: tensor for name, tensor in as_meta(reference).items()}, progress=False)
    assert_same(model, reference)


def test_a_tensor_that_is_missing_is_an_error_with_its_own_name(reference):
    found, model = as_meta(reference), llama(seed=1)
    del found["layers.1.attention.wk.weight"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PlanError, match=r"layers\.1\.self_attn\.k_proj"):
        load_into(model, found, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ------------------------------------------------------------------ no harm


@pytest.mark.parametrize("strip", ["", "model."])
def test_checkpoints_with_transformers_names_are_left_alone(reference, strip, caplog):
    model = llama(seed=1)
    held = {name.removeprefix(strip): tensor for name, tensor in reference.state_dict().items()}
    with caplog.at_level(logging.INFO, "weightloaders"):
        report = load_into(model, held, progress=False)
    assert_same(model, reference)
    assert not report.warnings
    assert not any("rotary" in source or "rename" in source for source in report.sources.values() if not strip)
    assert not any("attention.w" in record.message for record in caplog.records)


def test_a_plan_for_transformers_names_says_nothing_of_rules_that_are_not_for_it(reference):
    plan = plan_load(llama(seed=1), dict(reference.state_dict()))
    assert "attention.wq" not in str(plan)
    assert "wq" not in " ".join(finding.message for finding in plan.findings)


def test_rules_that_were_not_for_a_checkpoint_decided_nothing(reference):
    assert plan_load(llama(), reference.state_dict()).decided_by == ["transformers' conversions", "names"]
    assert "rules of weightloaders-meta" in str(plan_load(llama(), as_meta(reference)).decided_by)


def test_a_conversion_leaves_a_config_out_that_is_not_that_of_these_names(tmp_path, reference):
    source = folder_of(tmp_path / "meta", reference)
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--loader", "meta"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "the config is left out" in result.stderr
    assert not (tmp_path / "out" / "config.json").exists()
    with open_weights(tmp_path / "out") as weights:
        assert "tok_embeddings.weight" in weights


def test_other_models_are_left_alone():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    source, model = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    report = load_into(model, source.state_dict(), progress=False)
    assert not any("weightloaders-meta" in who for who in report.decided_by)
    own = torch.nn.Module()
    own.layers = torch.nn.ModuleList([torch.nn.Module()])
    own.layers[0].attention = torch.nn.Module()
    own.layers[0].attention.wq = torch.nn.Linear(8, 8, bias=False)
    weight = torch.randn(8, 8)
    load_into(own, {"layers.0.attention.wq.weight": weight}, progress=False)
    assert torch.equal(own.layers[0].attention.wq.weight, weight)


# ------------------------------------------------------------------ the loader


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("embedding_axis", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_as_meta_publishes_it_needs_nothing_else(tmp_path, parts, embedding_axis, tied):
    source = llama(tie_word_embeddings=tied)
    folder = folder_of(tmp_path / "llama", source, parts, embedding_axis)
    model, report = from_pretrained(folder, loader="meta", progress=False)
    assert_same(model, source)
    assert report.loader == "meta"
    expected = source.config.to_dict()
    got = model.config.to_dict()
    same = [*SIZES.keys() - {"max_position_embeddings"}, "head_dim", "rms_norm_eps", "rope_parameters", "bos_token_id"]
    same.append("tie_word_embeddings")
    assert {key: got[key] for key in same} == {key: expected[key] for key in same}


def test_an_llm_writes_what_the_model_it_was_made_from_writes(tmp_path, reference):
    llm = LLM(folder_of(tmp_path / "llama", reference), weight_loader="meta", progress=False)
    [output] = llm.generate([IDS[0].tolist()], SamplingParams(max_tokens=8, temperature=0))
    expected = reference.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, IDS.shape[1] :]
    assert list(output.outputs[0].token_ids) == expected.tolist()
    with pytest.raises(Exception, match="no tokenizer"):
        llm.generate("text")


@pytest.mark.parametrize("place", ["llama", "."])
def test_the_sentencepiece_tokenizer_of_llama_2_is_taken_along(tmp_path, reference, place):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = folder_of(tmp_path / "llama", reference)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / place / "tokenizer"), vocab_size=128,
        model_type="bpe", byte_fallback=False, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    llm = LLM(folder, weight_loader="meta", progress=False)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / place / "tokenizer.model"))
    for text in ("the quick  fox", "lazy", "dog jumps"):
        assert llm.tokenizer(text)["input_ids"] == [1, *processor.encode(text)]
    assert llm.generate("the fox", SamplingParams(max_tokens=2))[0].prompt_token_ids[0] == 1


def test_the_tokenizer_of_llama_3_is_not_taken_for_one_that_transformers_reads(tmp_path, reference):
    folder = folder_of(tmp_path / "llama", reference)
    (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert LLM(folder, weight_loader="meta", progress=False).tokenizer is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"norm_eps": 1e-6}, {"max_position_embeddings": 2048}),
        ({}, {"max_position_embeddings": 4096}),
        ({"max_seq_len": 512}, {"max_position_embeddings": 512}),
        ({"use_scaled_rope": True, "rope_theta": 500000.0}, {"max_position_embeddings": 131072}),
    ],
)
def test_what_params_do_not_say_is_what_the_version_has(tmp_path, reference, params, expected):
    folder = folder_of(tmp_path / "llama", reference, params={**PARAMS, **params})
    config = from_pretrained(folder, loader="meta", progress=False)[0].config
    assert {key: getattr(config, key) for key in expected} == expected
    if params.get("use_scaled_rope"):
        assert config.rope_parameters == {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
    chosen = {"max_position_embeddings": 99}
    config = from_pretrained(folder, loader="meta", loader_kwargs=chosen, progress=False)[0].config
    assert config.max_position_embeddings == 99


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ("[1]", "holds no sizes"),
        ('{"dim": 64}', "n_heads"),
        ('{"dim": 64, "n_heads": "8", "norm_eps": 1e-5}', "n_heads is '8'"),
        ('{"dim": 32, "n_heads": 8, "norm_eps": 1e-5}', "says 32 wide with 8 heads"),
        ('{"dim": 64, "n_heads": 16, "head_dim": 8, "norm_eps": 1e-5}', "says 64 wide with 16 heads"),
        ('{"dim": 64, "n_heads": 8, "moe": {"num_experts": 8}}', "has moe"),
    ],
)
def test_params_that_are_not_those_of_the_weights_are_refused(tmp_path, reference, content, message):
    folder = folder_of(tmp_path / "llama", reference)
    (folder / "params.json").write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        from_pretrained(folder, loader="meta", progress=False)
    assert "params.json" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("norm_eps", value) for value in (-1, 0, float("nan"), float("inf"), 10**400, "1e-5", None)),
        *(("rope_theta", value) for value in (-1, float("inf"), 10**400, [1])),
        *(("max_seq_len", value) for value in (-5, 10**30, "abc", [5], 1.5)),
        *(("sliding_window", value) for value in (-1, "x", True)),
        *(("n_kv_heads", value) for value in ("2", -2, 3, 4)),
        *(("n_heads", value) for value in (3, 0, 1 << 40)),
        *(("n_layers", value) for value in (1, 4, 1 << 30, "3")),
    ],
)
def test_absurd_values_in_params_are_refused_by_the_file(tmp_path, reference, field, value):
    folder = folder_of(tmp_path / "llama", reference)
    (folder / "params.json").write_text(json.dumps({**PARAMS, field: value}))
    with pytest.raises(ModelError) as caught:
        MetaLoader().get_model_files(str(folder))
    assert caught.value.file == str(folder / "params.json")


def test_a_scaling_that_is_no_number_is_refused(tmp_path, reference):
    folder = folder_of(tmp_path / "llama", reference)
    for value in ([1], 10**400, -1):
        params = {**PARAMS, "use_scaled_rope": True, "rope_scaling_factor": value}
        (folder / "params.json").write_text(json.dumps(params))
        with pytest.raises(ModelError, match="rope_scaling_factor"):
            MetaLoader().get_model_files(str(folder))


def test_only_layers_that_are_all_there_make_a_model(tmp_path, reference):
    folder = folder_of(tmp_path / "llama", reference)
    state = as_meta(reference)
    params = {name: value for name, value in PARAMS.items() if name != "n_layers"}
    (folder / "params.json").write_text(json.dumps(params))
    torch.save({**state, "layers.99999.attention.wq.weight": torch.ones(64, 64)}, folder / "consolidated.00.pth")
    with pytest.raises(ModelError, match="no layer 3 among the weights, but layer 99999"):
        MetaLoader().get_model_files(str(folder))
    torch.save({n: t for n, t in state.items() if not n.startswith("layers.")}, folder / "consolidated.00.pth")
    with pytest.raises(ModelError, match="no layer 0 among the weights"):
        MetaLoader().get_model_files(str(folder))


@pytest.mark.parametrize("name", ["tok_embeddings.weight", "layers.0.attention.wq.weight"])
@pytest.mark.parametrize(
    "changed", [lambda t: torch.tensor(1.0), lambda t: t[:0], lambda t: t.to(torch.float8_e4m3fn), torch.Tensor.char]
)
def test_weights_that_a_model_can_not_compute_with_are_refused_by_name(tmp_path, reference, name, changed):
    folder = folder_of(tmp_path / "llama", reference)
    state = as_meta(reference)
    torch.save({**state, name: changed(state[name])}, folder / "consolidated.00.pth")
    with pytest.raises(WeightLoadersError) as caught:
        MetaLoader().get_model_files(str(folder))
    assert caught.value.tensor == name


def test_where_no_file_can_be_written_that_is_what_is_said(tmp_path, reference, monkeypatch):
    folder = folder_of(tmp_path / "llama", reference)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="can't be written"):
        MetaLoader().get_model_files(str(folder))


def test_weights_of_another_model_are_refused_by_a_name_that_they_have(tmp_path, reference):
    folder = folder_of(tmp_path / "llama", reference)
    torch.save({**as_meta(reference), "vision.conv.weight": torch.zeros(2)}, folder / "consolidated.00.pth")
    with pytest.raises(ModelError, match=r"vision\.conv\.weight"):
        from_pretrained(folder, loader="meta", progress=False)


def test_a_folder_that_is_none_of_metas_is_refused_and_a_missing_part_named(tmp_path, reference):
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(SourceNotFoundError, match=name):
            open_weights(tmp_path / name, "meta")
    (tmp_path / "empty" / "params.json").write_text("{}")
    with pytest.raises(SourceNotFoundError, match="consolidated"):
        open_weights(tmp_path / "empty", "meta")
    folder = folder_of(tmp_path / "llama", reference, parts=2)
    (folder / "consolidated.01.pth").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.0"):
        open_weights(folder, "meta")


def test_whoever_does_not_name_the_loader_is_told_of_it(tmp_path, reference):
    with pytest.raises(ModelError) as caught:
        from_pretrained(folder_of(tmp_path / "llama", reference), progress=False)
    assert "loader 'meta'" in caught.value.hint


def test_safetensors_are_taken_before_pth_and_a_pattern_before_both(tmp_path, reference):
    folder = folder_of(tmp_path / "llama", reference)
    save_file(as_meta(llama(seed=7)), folder / "consolidated.safetensors")
    torch.save(as_meta(llama(seed=8)), folder / "other.pth")
    for pattern, seed in ((None, 7), ("consolidated*.pth", 0), ("other.pth", 8)):
        with open_weights(folder, "meta", file_pattern=pattern) as weights:
            assert torch.equal(weights["norm.weight"], llama(seed=seed).model.norm.weight)


def test_a_config_that_lies_there_counts(tmp_path, reference):
    folder = folder_of(tmp_path / "llama", reference, params={"dim": 1})
    reference.config.save_pretrained(folder)
    model, _ = from_pretrained(folder, loader="meta", auto_class="LlamaForCausalLM", progress=False)
    assert_same(model, reference)


def test_it_is_offered_by_a_hook_and_says_what_it_reads(tmp_path, reference):
    found = WeightLoaderRegistry.describe("meta")
    assert (found.origin, found.distribution, found.status) == ("hook", "weightloaders-meta", "ok")
    probe = WeightLoaderRegistry.get("meta").probe
    assert probe(str(folder_of(tmp_path / "llama", reference))).answer == "yes"
    assert probe(str(tmp_path)).answer == probe("a\0b").answer == "no"
    with pytest.raises(OptionsError, match="max_position_embeddings"):
        WeightLoaderRegistry.create("meta", max_position_embeddings=0)
