"""The facade: a model filled by any loader writes the text that transformers itself would write."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from weightloaders import LLM, BaseWeightLoader, SamplingParams
from weightloaders.errors import (
    ConfigError,
    HalfLoadedModelError,
    LoaderContractError,
    LoadError,
    ModelError,
    OptionsError,
    PlanError,
    RuleError,
    SourceNotFoundError,
    UnknownLoaderError,
    WeightLoadersError,
)
from weightloaders.llm.engines.sequences import Sequence
from weightloaders.llm.engines.transformers import TransformersEngine
from weightloaders.llm.outputs import Request, RequestOutput
from weightloaders.llm.prompts import requests_for

VOCABULARY = 96
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# Of very different lengths, so that a batch is mostly padding.
PROMPTS = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


def llama_config(**changes) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            # Large, so that logits are far apart and rounding never decides.
            "initializer_range": 0.5,
            "bos_token_id": None,
            "eos_token_id": 1,
            **changes,
        }
    )


def printable_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, and what a chat needs."""
    vocabulary = {"<unk>": 0, "<eos>": 1, "<user>": 2, **{chr(31 + i): i for i in range(3, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('odd role') }}{% endif %}"
        "<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(folder)
    printable_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(model=folder, progress=False)


def other_weights(folder: Path, target: Path, seed: int = 1) -> Path:
    """A copy of the folder with other weights."""
    shutil.copytree(folder, target)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config())
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, target / "model.safetensors")
    return target


def by_transformers(model, prompt: list[int], max_new_tokens: int = 10) -> list[int]:
    """The reference: transformers' own greedy generation of one prompt, as a user would call it."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=[],
    )
    return out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


def written(engine: TransformersEngine, prompts, params) -> list[RequestOutput]:
    requests = requests_for(prompts, params, tokenizer=engine.tokenizer, request_ids=map(str, itertools.count()))
    return engine.generate(requests)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ------------------------------------------------------------------ loading


def test_the_model_is_the_one_that_transformers_loads(folder, llm):
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert llm.model.state_dict().keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(llm.model.state_dict()[name], tensor), name
    assert llm.load_report is not None
    assert set(llm.load_report.loaded) >= set(dict(reference.named_parameters()))
    assert not llm.model.training
    assert llm.tokenizer.eos_token == "<eos>"


def test_a_loader_in_the_classic_style_is_chosen_with_its_options(folder, tmp_path):
    class Classic(BaseWeightLoader):
        def __init__(self, dtype=None, file_pattern="*.safetensors"):
            self.dtype = dtype
            self.file_pattern = file_pattern

        def get_weights(self, model_name_or_path):
            (file,) = Path(model_name_or_path).glob(self.file_pattern)
            return {name: tensor.to(self.dtype) for name, tensor in load_file(file).items()}

    shutil.copy(folder / "model.safetensors", tmp_path / "model.weights")
    llm = LLM(
        model=folder,
        weights=tmp_path,
        weight_loader=Classic,
        weight_loader_kwargs={"dtype": torch.bfloat16, "file_pattern": "*.weights"},
        dtype="bfloat16",
        progress=False,
    )
    assert llm.model.dtype is torch.bfloat16
    assert len(llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) == 10


@pytest.mark.parametrize("dtype", [torch.float16, "float16"])
def test_a_dtype_is_given_as_such_or_by_name(folder, dtype):
    assert LLM(model=folder, dtype=dtype, progress=False).model.dtype is torch.float16


def test_a_config_file_is_the_same_as_arguments(folder, llm, tmp_path):
    (tmp_path / "llm.yaml").write_text(
        f"model: {folder}\nweight_loader: local\nweight_loader_kwargs: {{file_pattern: '*.safetensors'}}\n"
        "progress: false\nsampling_params: {temperature: 0, max_tokens: 3, ignore_eos: true}\n"
    )
    configured = LLM.from_config(tmp_path / "llm.yaml")
    assert configured.load_report.loader == "local"
    assert tokens(configured.generate(PROMPTS)) == [t[:3] for t in tokens(llm.generate(PROMPTS, GREEDY))]
    overridden = LLM.from_config(tmp_path / "llm.yaml", sampling_params=SamplingParams(temperature=0, max_tokens=2))
    assert len(overridden.generate([[5]])[0].outputs[0].token_ids) <= 2


def test_a_mistyped_argument_is_named_before_anything_is_loaded(folder):
    with pytest.raises(ConfigError, match=r"'weight_loade'.*'weight_loader'"):
        LLM(model=folder, weight_loade="hf")
    with pytest.raises(ConfigError, match=r"'transformer'.*'transformers'"):
        LLM(model=folder, engine="transformer")
    with pytest.raises(WeightLoadersError, match="float31"):
        LLM(model=folder, dtype="float31")


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"weight_loader": "locl"}, UnknownLoaderError, "did you mean 'local'"),
        ({"weight_loader": "hf", "weight_loader_kwargs": {"revison": "x"}}, OptionsError, "did you mean 'revision'"),
        ({"weight_loader_kwargs": ["x"]}, ConfigError, "weight_loader_kwargs is a mapping"),
        ({"weights": 5}, LoaderContractError, "not int"),
        ({"dtype": "bfloat17"}, ConfigError, "not 'bfloat17'; did you mean 'bfloat16'"),
        ({"dtype": "int8"}, ConfigError, "a floating-point dtype"),
        ({"device": "cudda"}, ConfigError, "device='cudda' can't be used"),
        ({"engine": "vlm"}, ConfigError, "'vlm' is unknown"),
        ({"on_missing": "eror"}, RuleError, "on_missing can't be 'eror'"),
        ({"rules": {"renam": {}}}, RuleError, "'renam'"),
        ({"verify": "md5"}, ConfigError, "verify='md5'"),
        ({"auto_class": "AutoModelForCausalML"}, ConfigError, "did you mean 'AutoModelForCausalLM'"),
        ({"tokenizer": 5}, ConfigError, "tokenizer is a folder or hub id, not 5"),
        ({"model": None}, ConfigError, "model is a folder or hub id, not None"),
        ({"model": 5}, ConfigError, "model is a folder or hub id, not 5"),
    ],
    ids=str,
)
def test_what_can_be_told_without_looking_is_told_before_anything_is_looked_for(arguments, kind, said, tmp_path):
    with pytest.raises(kind, match=re.escape(said)):
        LLM(**{"model": "org/absent", **arguments})
    if arguments.keys() <= {"weight_loader", "dtype", "device", "engine"}:
        (tmp_path / "llm.json").write_text(json.dumps({"model": "org/absent", **arguments}))
        with pytest.raises(kind, match=re.escape(said)):
            LLM.from_config(tmp_path / "llm.json")


def test_a_model_without_config_is_told_before_its_tokenizer_is_looked_for(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bare").mkdir()
    shutil.copy(folder / "model.safetensors", "bare")
    with pytest.raises(ModelError, match=r"bare is a folder here; there is no config\.json in bare; as a repository"):
        LLM("bare")
    with pytest.raises(ModelError, match=r"model\.safetensors is a file, where a folder is wanted"):
        LLM(folder / "model.safetensors")
    shutil.copy(folder / "config.json", "bare")
    assert LLM("bare", progress=False).tokenizer is None


def test_too_long_a_max_model_len_is_told_before_the_weights_are_read(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    (broken / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="positions for 64 tokens"):
        LLM(model=broken, max_model_len=65, progress=False)


@pytest.fixture
def cache(folder, tmp_path, monkeypatch) -> dict[str, str]:
    """A cache with the model without its weights, and the weights in a repository of their own; their commits."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commits = {"model": "a" * 40, "weights": "b" * 40}
    for name, commit in commits.items():
        ignored = shutil.ignore_patterns("*.safetensors") if name == "model" else shutil.ignore_patterns("*.json")
        repository = tmp_path / f"models--org--{name}"
        shutil.copytree(folder, repository / "snapshots" / commit, ignore=ignored)
        (repository / "refs").mkdir()
        (repository / "refs" / f"of-{name}").write_text(commit)
    return commits


def test_each_repository_is_asked_for_its_own_revision_alone(cache, llm):
    arguments = {"weights": "org/weights", "weight_loader": "hf", "progress": False}
    for revision, of_weights in [("of-model", "of-weights"), (cache["model"], cache["weights"])]:
        elsewhere = LLM("org/model", revision=revision, weight_loader_kwargs={"revision": of_weights}, **arguments)
        assert tokens(elsewhere.generate(PROMPTS, GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))
        assert elsewhere.tokenizer.eos_token == "<eos>"
    # Neither of them has a `main` in this cache.
    with pytest.raises(ModelError, match="no snapshot of org/model at 'main'"):
        LLM("org/model", weight_loader_kwargs={"revision": "of-weights"}, **arguments)
    with pytest.raises(SourceNotFoundError, match="no snapshot of org/weights at 'main'"):
        LLM("org/model", revision="of-model", **arguments)


def test_a_checkpoint_with_a_gap_makes_no_llm(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(PlanError, match=r"layers\.1\.self_attn\.o_proj"):
        LLM(model=broken, progress=False)


def test_code_of_a_model_runs_only_if_trusted(folder, tmp_path):
    evil = shutil.copytree(folder, tmp_path / "evil")
    config = json.loads((evil / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}
    (evil / "config.json").write_text(json.dumps(config))
    (evil / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(WeightLoadersError):
        LLM(model=evil, progress=False)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------ generating: what is written


MODELS = {
    "llama": lambda: LlamaForCausalLM(llama_config()),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=1,
        )
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.5)
    ),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            initializer_factor=3.0,
        )
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_is_written_as_one_by_one_and_as_transformers_does(kind):
    torch.manual_seed(0)
    engine = TransformersEngine(MODELS[kind]().eval())
    batch = tokens(written(engine, PROMPTS, GREEDY))
    assert batch == [tokens(written(engine, [prompt], GREEDY))[0] for prompt in PROMPTS]
    assert batch == [by_transformers(engine.model, prompt) for prompt in PROMPTS]


def test_more_prompts_than_fit_in_a_batch_come_back_in_their_order(folder):
    llm = LLM(model=folder, max_num_seqs=2, progress=False)
    prompts = [[3 + i] * (1 + i % 5) for i in range(9)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert tokens(outputs) == [by_transformers(llm.model, prompt) for prompt in prompts]
    assert [output.request_id for output in outputs] == [str(i) for i in range(9)]


def test_the_models_own_generation_config_does_not_interfere(folder):
    llm = LLM(model=folder, progress=False)
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    llm.model.generation_config.update(
        num_beams=4, do_sample=True, temperature=3.0, repetition_penalty=9.0, no_repeat_ngram_size=1, min_length=5
    )
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_prompts_are_text_tokens_or_dicts(llm):
    text = llm.generate("abc", GREEDY)[0]
    ids = llm.tokenizer("abc")["input_ids"]
    assert text.prompt == "abc"
    assert text.prompt_token_ids == ids
    for prompts in (ids, [ids], {"prompt": "abc"}, [{"prompt_token_ids": ids}], ["abc"]):
        assert tokens(llm.generate(prompts, GREEDY)) == tokens([text])
    assert llm.generate([ids], GREEDY)[0].prompt is None
    assert llm.generate([], GREEDY) == []


def test_the_text_is_what_the_tokenizer_makes_of_the_tokens(llm):
    for output in llm.generate(["abc", "x"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)):
        completion = output.outputs[0]
        assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert len(completion.text) > 5


# ------------------------------------------------------------------ generating: the end


def test_max_tokens_ends_a_text_with_length(llm):
    completion = llm.generate([[5, 6]], GREEDY)[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("length", None, 10)
    assert completion.finished()


def test_each_prompt_of_a_batch_has_its_own_parameters(llm):
    params = [GREEDY.model_copy(update={"max_tokens": n}) for n in (1, 7, 3)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(ids) for ids in tokens(outputs)] == [1, 7, 3]
    assert tokens(outputs) == [by_transformers(llm.model, p, n) for p, n in zip(PROMPTS, (1, 7, 3), strict=True)]


def test_without_max_tokens_the_model_writes_until_it_is_full(llm):
    output = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 64 - 4
    assert output.outputs[0].finish_reason == "length"
    # Asking for more than there is room for ends at the same place.
    more = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))[0]
    assert more.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.fixture
def ended(folder, tmp_path):
    """An LLM for which the fourth token of a known text is an end-of-sequence token."""
    llm = LLM(model=folder, progress=False)
    ids = tokens(llm.generate([[5, 6]], GREEDY))[0]
    assert ids.index(ids[3]) == 3
    llm.model.generation_config.eos_token_id = [95, ids[3]]
    return llm, ids


def test_an_end_of_sequence_token_ends_a_text(ended):
    llm, ids = ended
    completion = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=10))[0].outputs[0]
    assert completion.token_ids == ids[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == llm.tokenizer.decode(ids[:3])


def test_ignore_eos_and_min_tokens_go_on_behind_it(ended):
    llm, ids = ended
    assert tokens(llm.generate([[5, 6]], GREEDY))[0] == ids
    longer = llm.generate([[5, 6]], SamplingParams(temperature=0, min_tokens=6, max_tokens=10))[0].outputs[0]
    assert len(longer.token_ids) >= 6
    assert longer.token_ids[:3] == ids[:3]
    assert ids[3] not in longer.token_ids[:6]


def test_a_row_that_has_ended_does_not_disturb_the_others(ended):
    llm, ids = ended
    params = SamplingParams(temperature=0, max_tokens=10)
    together = tokens(llm.generate([[5, 6], *PROMPTS], params))
    assert together == [tokens(llm.generate([p], params))[0] for p in ([5, 6], *PROMPTS)]
    assert together[0] == ids[:4]


def test_a_stop_token_ends_a_text_and_is_named(llm):
    ids = tokens(llm.generate([[5, 6]], GREEDY))[0]
    params = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "stop_token_ids": [ids[2], 10**9]}
    completion = llm.generate([[5, 6]], SamplingParams(**params))[0].outputs[0]
    end = ids.index(ids[2]) + 1
    assert completion.token_ids == ids[:end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[2])
    assert completion.text == llm.tokenizer.decode(ids[: end - 1])
    kept = llm.generate([[5, 6]], SamplingParams(**params, include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == llm.tokenizer.decode(ids[:end])
    # Before min_tokens it is not written at all.
    later = llm.generate([[5, 6]], SamplingParams(**params, min_tokens=5))[0].outputs[0]
    assert ids[2] not in later.token_ids[:5]


def test_a_stop_string_ends_a_text_before_it(llm):
    whole = llm.generate(["abc"], GREEDY)[0].outputs[0].text
    stop = whole[3:5]
    at = whole.index(stop)
    for given in (stop, ["never to be seen", stop]):
        completion = llm.generate(["abc"], GREEDY.model_copy(update={"stop": given}))[0].outputs[0]
        assert completion.text == whole[:at]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True) == whole[:at] + stop
    kept = llm.generate(["abc"], GREEDY.model_copy(update={"stop": stop, "include_stop_str_in_output": True}))
    assert kept[0].outputs[0].text == whole[:at] + stop


class ByteTokenizer:
    """One token a byte: a character may be spread over several tokens."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


def sequence(**params) -> Sequence:
    request = Request("0", None, [1], SamplingParams(**params))
    return Sequence(
        request,
        0,
        max_tokens=request.params.max_tokens,
        eos_ids=frozenset(),
        tokenizer=ByteTokenizer(),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("héllo wörld — ok", "ö", "héllo w"),
        ("héllo wörld — ok", "rld —", "héllo wö"),
        ("a日本語b", "本語", "a日"),
        ("aaab", "aab", "a"),
        ("abcabd", "abd", "abc"),
        ("xy", ["y", "xy"], ""),
    ],
)
def test_a_stop_string_is_found_wherever_token_and_character_borders_lie(text, stop, left):
    one = sequence(max_tokens=100, stop=stop)
    for byte in text.encode():
        if not one.done:
            one.accept(byte)
    assert one.output().text == left
    assert one.output().finish_reason == "stop"


def test_a_stop_string_among_the_first_min_tokens_does_not_count():
    one = sequence(max_tokens=100, stop="b", min_tokens=3)
    for byte in b"abcab":
        assert not one.done
        one.accept(byte)
    assert one.output().text == "abca"


def test_half_a_character_at_the_end_is_still_shown_as_the_tokenizer_does():
    one = sequence(max_tokens=2, stop="zzz")
    for byte in "é—".encode()[:3]:
        if not one.done:
            one.accept(byte)
    assert one.output().text == "é"
    assert one.output().finish_reason == "length"


# ------------------------------------------------------------------ generating: sampling

SAMPLED = {"max_tokens": 8, "temperature": 2.0, "ignore_eos": True}


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(llm):
    params = SamplingParams(seed=7, **SAMPLED)
    alone = tokens(llm.generate([[9]], params))[0]
    together = tokens(llm.generate(PROMPTS, params))
    assert together[1] == alone
    assert tokens(llm.generate([[9]], SamplingParams(seed=8, **SAMPLED)))[0] != alone


def test_a_seed_leaves_torchs_own_generator_alone(llm):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    llm.generate(PROMPTS, SamplingParams(seed=7, **SAMPLED))
    llm.generate(PROMPTS, GREEDY)
    assert torch.equal(torch.rand(4), expected)


def test_without_a_seed_torchs_own_decides(llm):
    def drawn(seed: int):
        torch.manual_seed(seed)
        return tokens(llm.generate(PROMPTS, SamplingParams(**SAMPLED)))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_n_outputs_differ_and_are_reproducible(llm):
    params = SamplingParams(n=4, seed=5, **SAMPLED)
    one, two = llm.generate([[5, 6], [7]], params)
    assert [c.index for c in one.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in one.outputs}) == 4
    assert [c.token_ids for c in llm.generate([[7]], params)[0].outputs] == [c.token_ids for c in two.outputs]


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def chosen(draws: int = 300, logits: torch.Tensor = LOGITS, prompt=(0,), already=(), **params) -> set[int]:
    """Every token that is drawn from these logits."""
    seen = set()
    for seed in range(draws):
        one = Sequence(
            Request("0", None, prompt, SamplingParams(**{"seed": seed, "temperature": 3.0, **params})),
            0,
            max_tokens=100,
            eos_ids=frozenset({1}),
            tokenizer=None,
            device=torch.device("cpu"),
        )
        one.token_ids.extend(already)
        seen.add(one.choose(logits.clone()))
    return seen


def test_top_k_top_p_and_min_p_draw_from_the_likeliest_tokens_only():
    assert chosen() == {0, 1, 2, 3, 4, 5}
    assert chosen(top_k=2) == {0, 1}
    assert chosen(top_k=100) == chosen(top_k=-1) == chosen()
    # At temperature 1 the probabilities are about .55 .20 .12 .07 .03 .00.
    assert chosen(temperature=1.0, top_p=0.5) == {0}
    assert chosen(temperature=1.0, top_p=0.6) == {0, 1}
    assert chosen(temperature=1.0, min_p=0.3) == {0, 1}
    assert chosen(temperature=1.0, min_p=1.0) == {0}
    assert chosen(draws=1, temperature=0) == {0}


def test_the_draws_follow_the_probabilities():
    counts = torch.zeros(6)
    for seed in range(4000):
        counts[next(iter(chosen_once(seed)))] += 1
    assert torch.allclose(counts / 4000, LOGITS.softmax(-1), atol=0.03)


def chosen_once(seed: int) -> set[int]:
    one = Sequence(
        Request("0", None, [0], SamplingParams(seed=seed)),
        0,
        max_tokens=9,
        eos_ids=frozenset(),
        tokenizer=None,
        device=torch.device("cpu"),
    )
    return {one.choose(LOGITS.clone())}


def test_penalties_make_what_was_seen_less_likely():
    greedy = {"draws": 1, "temperature": 0}
    assert chosen(**greedy) == {0}
    # Repetition counts the prompt (which is token 0) and the output, presence and frequency the output alone.
    assert chosen(**greedy, repetition_penalty=3.0) == {1}
    assert chosen(**greedy, presence_penalty=1.5) == {0}
    assert chosen(**greedy, presence_penalty=1.5, already=[0]) == {1}
    assert chosen(**greedy, frequency_penalty=0.6, already=[0]) == {0}
    assert chosen(**greedy, frequency_penalty=0.6, already=[0, 0]) == {1}
    # Below zero a repetition penalty multiplies, or it would make the token likelier.
    assert chosen(**greedy, logits=-LOGITS - 5, prompt=[5], repetition_penalty=2.0) == {4}


def test_greedy_text_with_a_repetition_penalty_is_that_of_transformers(llm):
    ids = torch.tensor([[5, 6, 7]])
    reference = llm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=10,
        repetition_penalty=1.7,
        pad_token_id=0,
        eos_token_id=[],
    )
    params = GREEDY.model_copy(update={"repetition_penalty": 1.7})
    assert tokens(llm.generate([[5, 6, 7]], params))[0] == reference[0, 3:].tolist()


def test_a_model_of_nonsense_weights_is_told(folder):
    llm = LLM(model=folder, progress=False)
    with torch.no_grad():
        llm.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        llm.generate([[5]], GREEDY)


def test_defaults_come_from_the_models_generation_config_as_in_vllm(folder, tmp_path, caplog):
    changed = shutil.copytree(folder, tmp_path / "changed")
    path = changed / "generation_config.json"
    path.write_text(
        json.dumps({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3, "eos_token_id": 1})
    )
    defaults = LLM(model=changed, progress=False).get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=3)
    path.write_text(json.dumps({"temperature": -1.0}))
    with caplog.at_level(logging.WARNING, "weightloaders"):
        assert LLM(model=changed, progress=False).get_default_sampling_params() == SamplingParams()
    assert "temperature" in caplog.text


# ------------------------------------------------------------------ generating: mistakes


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[]], "prompt 0 is empty"),
        (["abc", ""], "prompt 1 is empty"),
        ([3.5], "prompt 0 is no prompt"),
        ([{"promt": "abc"}], "promt"),
        ([{"prompt_token_ids": [1, "2"]}], "prompt 0"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_a_prompt_that_is_none_is_named(llm, prompts, said):
    with pytest.raises(ConfigError, match=said):
        llm.generate(prompts, GREEDY)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(llm):
    with pytest.raises(ModelError, match=r"64 tokens.*room for 64"):
        llm.generate([[5] * 64], GREEDY)
    assert len(tokens(llm.generate([[5] * 63], GREEDY))[0]) == 1
    for bad in (VOCABULARY, -1):
        with pytest.raises(ModelError, match="vocabulary"):
            llm.generate([[5], [bad]], GREEDY)


def test_max_model_len_can_be_less_but_not_more_than_the_model_has(folder):
    llm = LLM(model=folder, max_model_len=8, progress=False)
    assert len(tokens(llm.generate([[5] * 3], GREEDY))[0]) == 5
    with pytest.raises(ConfigError, match=r"max_model_len.*65.*64"):
        LLM(model=folder, max_model_len=65, progress=False)


def test_a_model_without_positions_needs_max_tokens():
    engine = TransformersEngine(MODELS["mamba"]().eval())
    with pytest.raises(ModelError, match="max_tokens"):
        written(engine, [[5]], SamplingParams(temperature=0, max_tokens=None))


def test_as_many_parameters_as_prompts_are_needed(llm):
    with pytest.raises(ConfigError, match="3 prompts, but 2"):
        llm.generate(PROMPTS, [GREEDY] * 2)
    with pytest.raises(ConfigError, match="SamplingParams"):
        llm.generate(PROMPTS, {"temperature": 0})


def test_an_encoder_is_not_asked_for_text(tmp_path):
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path)
    llm = LLM(model=tmp_path, progress=False)
    assert llm.model(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 16)
    with pytest.raises(ModelError, match="BertModel does not write text"):
        llm.generate([[1, 2]])


def test_without_a_tokenizer_tokens_work_and_text_is_refused(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(folder / name, bare)
    llm = LLM(model=bare, progress=False)
    assert llm.tokenizer is None
    output = llm.generate([[5, 6]], GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (10, "")
    for call in (lambda: llm.generate("abc"), lambda: llm.chat([{"role": "user", "content": "abc"}])):
        with pytest.raises(ConfigError, match="no tokenizer"):
            call()
    with pytest.raises(ConfigError, match="stop"):
        llm.generate([[5, 6]], SamplingParams(stop="x"))
    assert LLM(model=bare, tokenizer=folder, progress=False).generate("abc", GREEDY)[0].prompt == "abc"


def test_a_tokenizer_that_can_not_be_read_is_named(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer in .*broken"):
        LLM(model=broken, progress=False)
    with pytest.raises(ModelError, match="absent"):
        LLM(model=folder, tokenizer=tmp_path / "absent", progress=False)


# ------------------------------------------------------------------ chat


def test_chat_goes_through_the_tokenizers_template(llm):
    messages = [{"role": "user", "content": "ab"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "<user>ab!"
    assert output.prompt_token_ids == [2, *llm.tokenizer("ab!")["input_ids"]]
    assert output.outputs == llm.generate([output.prompt_token_ids], GREEDY)[0].outputs
    several = llm.chat([messages, [{"role": "user", "content": "x"}]], GREEDY)
    assert several[0].outputs == output.outputs
    assert several[1].prompt == "<user>x!"
    assert llm.chat(messages, GREEDY, add_generation_prompt=False)[0].prompt == "<user>ab"
    assert llm.chat(messages, GREEDY, chat_template="{{ messages[0]['content'] }}")[0].prompt == "ab"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "nobody", "content": "x"}], "odd role"),
        ([{"content": "x"}], "role"),
        ([], "conversation"),
        ("hello", "str"),
        ([["hello"]], "conversation"),
    ],
)
def test_messages_that_do_not_fit_are_named(llm, messages, said):
    with pytest.raises(ConfigError, match=said):
        llm.chat(messages)


def test_without_a_template_chat_says_what_to_do(folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare")
    tokenizer = printable_tokenizer()
    tokenizer.chat_template = None
    for old in (bare / "chat_template.jinja", bare / "tokenizer_config.json"):
        old.unlink(missing_ok=True)
    tokenizer.save_pretrained(bare)
    llm = LLM(model=bare, progress=False)
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat([{"role": "user", "content": "x"}])
    assert llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template="{{ messages[0]['content'] }}")


def test_a_real_model_answers_readably(smollm2_folder):
    llm = LLM(model=smollm2_folder, progress=False)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


# ------------------------------------------------------------------ reloading


def test_a_reload_changes_the_text_and_keeps_the_objects(folder, tmp_path):
    other = other_weights(folder, tmp_path / "other")
    llm = LLM(model=folder, progress=False)
    model, parameters = llm.model, dict(llm.model.named_parameters())
    first = tokens(llm.generate(PROMPTS, GREEDY))
    report = llm.reload_weights(other)
    assert llm.model is model
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert llm.load_report is report
    second = tokens(llm.generate(PROMPTS, GREEDY))
    assert second == [by_transformers(AutoModelForCausalLM.from_pretrained(other), p) for p in PROMPTS] != first
    # Without a source it is the last one again; with the first one it is as it was.
    llm.reload_weights()
    assert tokens(llm.generate(PROMPTS, GREEDY)) == second
    llm.reload_weights(folder)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == first


def test_weights_may_be_given_as_such(folder, tmp_path):
    other = other_weights(folder, tmp_path / "other")
    expected = [by_transformers(AutoModelForCausalLM.from_pretrained(other), prompt) for prompt in PROMPTS]
    llm = LLM(model=folder, weights=load_file(other / "model.safetensors"), progress=False)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    with pytest.raises(ConfigError, match="no place"):
        llm.reload_weights()
    # As a trainer does: again and again, a loader or none, from memory.
    llm = LLM(model=folder, weight_loader="local", progress=False)
    llm.reload_weights(load_file(other / "model.safetensors"))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    llm.reload_weights()
    llm.reload_weights(iter(load_file(other / "model.safetensors").items()))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_reload_that_is_refused_leaves_the_model_as_it_was(folder, tmp_path):
    llm = LLM(model=folder, progress=False)
    before = {name: tensor.clone() for name, tensor in llm.model.state_dict().items()}
    with pytest.raises(SourceNotFoundError):
        llm.reload_weights(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"on_missin.*on_missing"):
        llm.reload_weights(folder, on_missin="ignore")
    assert all(torch.equal(tensor, before[name]) for name, tensor in llm.model.state_dict().items())
    assert llm.generate([[5]], GREEDY)
    assert llm.reload_weights().loaded  # the source is still the one that worked


class FailsLate(BaseWeightLoader):
    """A stream that breaks off in the middle."""

    def get_weights(self, model_name_or_path):
        tensors = load_file(Path(model_name_or_path) / "model.safetensors")
        yield from itertools.islice(tensors.items(), 5)
        raise OSError("the network went away")


def test_a_reload_that_fails_on_the_way_blocks_generation_until_one_succeeds(folder):
    llm = LLM(model=folder, progress=False)
    first = tokens(llm.generate(PROMPTS, GREEDY))
    with pytest.raises((LoadError, OSError)):
        llm.reload_weights(folder, weight_loader=FailsLate)
    with pytest.raises(HalfLoadedModelError):
        llm.generate(PROMPTS, GREEDY)
    llm.reload_weights(folder)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == first


# ------------------------------------------------------------------ SamplingParams


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.seed) == (16, 0, None, None)
    assert params.skip_special_tokens
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"n": 0}, "n: 0: should be greater than or equal to 1"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) is more than max_tokens \(4\)"),
        ({"stop": ["a", ""]}, "empty"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"seed": -1}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 2, "temperature": 0}, "n is 2"),
        ({"logprobs": 5}, "'logprobs' is one of vLLM's, but is not supported"),
        ({"logit_bias": {3: 1.0}}, "'logit_bias' is one of vLLM's"),
    ],
)
def test_a_parameter_that_is_not_allowed_is_named(values, said):
    with pytest.raises(ConfigError, match=said):
        SamplingParams(**values)


def test_what_is_not_asked_for_need_not_be_supported():
    assert SamplingParams(logprobs=None, stop=None) == SamplingParams()
    assert SamplingParams(stop="a").stops == SamplingParams(stop=["a"]).stops == ("a",)
