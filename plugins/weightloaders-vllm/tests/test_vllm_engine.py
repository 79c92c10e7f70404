"""With vLLM's real engine; `make test-vllm` installs it."""

from __future__ import annotations

import importlib
import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment with it")

import psutil  # noqa: E402
import vllm_standin  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm_checkpoints import LAYER, PROMPTS, change, drop, engine, quantised_checkpoint, tiny_checkpoint  # noqa: E402

import weightloaders  # noqa: E402
from demo.prepare import PREPARED, SMOLLM2, smollm2_gguf, write_once, write_smollm2  # noqa: E402
from weightloaders import SamplingParams, open_weights  # noqa: E402
from weightloaders.errors import ConfigError, CoverageError, LoadError, ModelError, PlanError, SourceError  # noqa: E402
from weightloaders.weights.raw import write_raw  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

# vLLM's own warnings are none of ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def written(llm: vllm.LLM) -> list[tuple[list[int], list[float]]]:
    """Token ids and their log-probabilities."""
    answers = llm.generate(PROMPTS, vllm.SamplingParams(temperature=0, max_tokens=8, logprobs=1), use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (list(o.token_ids), [at[token].logprob for token, at in zip(o.token_ids, o.logprobs, strict=True)])
        for o in outputs
    ]


# ------------------------------------------------------------------ SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> Path:
    write_once(SMOLLM2, write_smollm2)
    return SMOLLM2


@pytest.fixture(scope="module")
def expected(smollm2):
    return written(engine(smollm2))


def binary_of(folder: Path) -> Path:
    def write(target: Path) -> None:
        with open_weights(str(folder), loader="local") as weights:
            write_raw(target, weights.infos(), weights.__getitem__)

    target = PREPARED / f"{folder.name}-binary"
    write_once(target, write)
    return target


@pytest.mark.parametrize("loader", ["hf", "local", "binary", "gguf"])
def test_every_loader_gives_the_tokens_and_log_probabilities_of_vllms_own(loader, smollm2, expected):
    places = {"binary": binary_of, "gguf": lambda _: smollm2_gguf()}
    if loader == "gguf":
        pytest.importorskip("weightloaders_gguf")
    elsewhere = {"model_weights": str(places[loader](smollm2))} if loader in places else {}
    llm = engine(smollm2, load_format="weightloaders", model_loader_extra_config={"loader": loader}, **elsewhere)
    assert written(llm) == expected


def test_the_facade_hands_over_to_vllm_and_reloads(smollm2, expected):
    llm = weightloaders.LLM(
        model=str(smollm2), engine="vllm", weight_loader="local", dtype="bfloat16", max_model_len=128, max_num_seqs=4,
        enforce_eager=True,
    )  # fmt: skip
    tokens = [ids for ids, _ in expected]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    answers = llm.generate(PROMPTS, greedy)
    assert [answer.outputs[0].token_ids for answer in answers] == tokens
    assert [type(answer) for answer in answers] == [weightloaders.RequestOutput] * 2
    assert llm.load_report.loader == "local"
    # Mapped, which is the plugin's default.
    assert llm.load_report.bytes_read == 0

    with pytest.raises(PlanError, match="nothing was changed"):
        llm.reload_weights(str(tiny_checkpoint(PREPARED / "vllm-tiny", seed=0)))
    report = llm.reload_weights(str(binary_of(smollm2)), weight_loader="binary")
    assert report.loader == "binary"
    assert [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, greedy)] == tokens


# ------------------------------------------------------------------ a tiny Llama


@pytest.fixture
def tiny(tmp_path, smollm2) -> Path:
    return tiny_checkpoint(tmp_path / "tiny")


LINEAR = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
CASES = {
    "o_proj missing": (drop("layers.1.self_attn.o_proj.weight"), [f"{LAYER}.self_attn.o_proj.weight"]),
    "k_proj missing": (
        drop("layers.1.self_attn.k_proj.weight"),
        [f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight"],
    ),
    "a layer's linear layers missing": (
        drop(*(f"layers.1.{name}.weight" for name in LINEAR)),
        [f"{LAYER}.mlp.gate_up_proj.weight", f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.self_attn.o_proj.weight"],
    ),
    "embed_tokens missing": (drop("embed_tokens.weight"), ["model.embed_tokens.weight"]),
    "q_proj too large": (
        lambda tensors: tensors.update(
            {f"{LAYER}.self_attn.q_proj.weight": torch.ones(192, 128, dtype=torch.bfloat16)}
        ),
        [f"{LAYER}.self_attn.q_proj.weight", "[192, 128]"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_vllm_lets_through_is_refused_by_name(case, tiny):
    damage, names = CASES[case]
    change(tiny, damage)
    with pytest.raises(CoverageError) as caught:
        engine(tiny, load_format="weightloaders:local")
    for name in names:
        assert name in str(caught.value)


def test_two_ranks_write_what_two_ranks_write_by_vllms_own_loader_and_leave_no_process_behind(tiny, monkeypatch):
    # Two workers on the same processors.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    results = []
    for options in ({}, {"load_format": "weightloaders:local"}):
        llm = engine(tiny, tensor_parallel_size=2, **options)
        results.append(written(llm))
        workers = [p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in str(p.cmdline())]
        assert len(workers) >= 2
        llm.llm_engine.engine_core.shutdown()
        assert psutil.wait_procs(workers, 60)[1] == []
        cleanup_dist_env_and_memory()
    assert results[0] == results[1]


def test_a_quantised_model_writes_what_it_writes_by_vllms_own_loader(tmp_path, smollm2):
    folder = quantised_checkpoint(tmp_path / "int8", "int8")
    tokens = written(engine(folder))
    cleanup_dist_env_and_memory()
    assert written(engine(folder, load_format="weightloaders:local")) == tokens


def test_two_files_with_different_values_for_one_name_are_refused(tiny):
    tensors = load_file(tiny / "model.safetensors")
    name = "model.norm.weight"
    save_file({name: tensors[name] + 1}, tiny / "other.safetensors")
    with pytest.raises(SourceError, match=name):
        engine(tiny, load_format="weightloaders:local", model_loader_extra_config={})


def test_a_tensor_that_the_model_does_not_use_is_refused_where_that_is_asked_for(tiny):
    name = f"{LAYER}.self_attn.q_proj.bias"
    change(tiny, lambda tensors: tensors.update({name: torch.ones(128)}))
    with pytest.raises(CoverageError, match=name):
        engine(tiny, load_format="weightloaders:local", model_loader_extra_config={"on_unexpected": "error"})


def test_nan_is_refused_where_finite_values_are_asked_for(tiny):
    change(tiny, lambda tensors: tensors[f"{LAYER}.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(LoadError, match="gate_up_proj"):
        engine(tiny, load_format="weightloaders:local", model_loader_extra_config={"verify": "finite"})


def test_unwatched_everything_passes_as_with_vllm(tiny):
    change(tiny, drop("layers.1.self_attn.o_proj.weight"))
    engine(tiny, load_format="weightloaders:local", model_loader_extra_config={"watch": False})


def test_rules_lead_from_other_names_to_those_of_the_model(tiny):
    tokens = written(engine(tiny))
    change(tiny, lambda tensors: [tensors.update({f"backbone.{n}": tensors.pop(n)}) for n in list(tensors)])
    rules = {"rename": {"backbone": ""}}
    cleanup_dist_env_and_memory()
    llm = engine(tiny, load_format="weightloaders", model_loader_extra_config={"loader": "local", "rules": rules})
    assert written(llm) == tokens


def test_a_reload_gives_the_new_weights_and_refuses_incomplete_ones_before_anything_changes(tiny, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    llm = engine(tiny, load_format="weightloaders:local", enable_prefix_caching=False)
    first = written(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    second = written(llm)
    assert second != first

    damaged = tiny_checkpoint(tmp_path / "damaged")
    change(damaged, drop("layers.1.self_attn.k_proj.weight"))
    with pytest.raises(PlanError, match=r"there is no 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(damaged)})
    assert written(llm) == second

    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny)})
    assert written(llm) == first
    llm.collective_rpc("reload_weights")
    assert written(llm) == first


def test_a_reload_that_fails_on_the_way_says_so_and_the_next_one_is_right(tiny, tmp_path):
    options = {"loader": "vllm_checkpoints:OneByOne", "verify": "finite"}
    llm = engine(tiny, load_format="weightloaders", model_loader_extra_config=options, enable_prefix_caching=False)
    first = written(llm)
    for name, damage, said in (
        ("nan", lambda tensors: tensors[f"{LAYER}.mlp.up_proj.weight"].fill_(float("nan")), "NaN"),
        ("k", drop("layers.1.self_attn.k_proj.weight"), "k_proj"),
        ("o", drop("layers.1.self_attn.o_proj.weight"), "wrote nothing to .*o_proj"),
    ):
        damaged = tiny_checkpoint(tmp_path / name, seed=1)
        change(damaged, damage)
        with pytest.raises(LoadError, match=said):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(damaged)})
        # What is left is of both, and whole.
        written(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny)})
        assert written(llm) == first


def test_what_is_tied_is_reloaded_through_one_of_its_names(tmp_path):
    first, second = (tiny_checkpoint(tmp_path / str(seed), seed=seed, tied=True) for seed in (0, 1))
    options = {"loader": "vllm_checkpoints:OneByOne"}
    llm = engine(first, load_format="weightloaders", model_loader_extra_config=options, enable_prefix_caching=False)
    before = written(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
    assert written(llm) != before
    change(second, drop("embed_tokens.weight"))
    with pytest.raises(LoadError, match=r"wrote nothing to 'model\.embed_tokens\.weight', 'lm_head\.weight'"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(first)})
    assert written(llm) == before


def test_a_model_that_takes_weights_from_further_sources_is_refused(tiny, monkeypatch):
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models.llama import LlamaForCausalLM

    further = [DefaultModelLoader.Source("other/model", None)]
    monkeypatch.setattr(LlamaForCausalLM, "secondary_weights", further, raising=False)
    with pytest.raises(ModelError, match="other/model"):
        engine(tiny, load_format="weightloaders:local")


def test_the_guides_loader_serves_an_in_house_format(tiny, tmp_path, monkeypatch):
    guide = (PREPARED.parent / "docs" / "how-to" / "vllm.md").read_text(encoding="utf-8")
    (tmp_path / "inhouse.py").write_text(re.search(r"file: inhouse.py -->\n```python\n(.*?)```", guide, re.DOTALL)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    entries, blob = {}, b""
    for name, tensor in load_file(tiny / "model.safetensors").items():
        data = tensor.view(torch.uint8).numpy().tobytes()
        entries[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(blob), len(data)]
        blob += data
    tokens = written(engine(tiny))
    cleanup_dist_env_and_memory()
    (tiny / "model.safetensors").unlink()
    (tiny / "weights.json").write_text(json.dumps(entries))
    (tiny / "weights.blob").write_bytes(blob)
    config = {"loader": "inhouse:InHouseLoader"}
    assert written(engine(tiny, load_format="weightloaders", model_loader_extra_config=config)) == tokens


# ------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_format": "weightloaders:locl"}, "did you mean 'local'"),
        ({"load_format": "weightloaders", "model_loader_extra_config": {"loder": "local"}}, "'loder' is unknown"),
        (
            {
                "load_format": "weightloaders",
                "model_loader_extra_config": {"loader": "local", "kwargs": {"patern": "*"}},
            },
            "patern",
        ),
        ({"load_format": "weightloaders:hf", "model_loader_extra_config": {"loader": "local"}}, "two loaders"),
        ({"load_format": "weightloaders", "model_loader_extra_config": {"on_missing": "never"}}, "never"),
    ],
)
def test_a_mistake_is_told_before_an_engine_starts(options, said, tiny):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ConfigError, match=said):
        EngineArgs(model=str(tiny), **options).create_load_config()


def test_registering_twice_changes_nothing(smollm2):
    import weightloaders_vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor import model_loader

    weightloaders_vllm.register()
    before = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER), EngineArgs.create_load_config
    weightloaders_vllm.register()
    assert (model_loader._LOAD_FORMAT_TO_MODEL_LOADER, EngineArgs.create_load_config) == before
    assert {"weightloaders", "weightloaders:local", "weightloaders:binary"} <= before[0].keys()


def test_the_stand_in_for_vllm_has_names_that_vllm_has():
    for module, name in vllm_standin.NAMES:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
