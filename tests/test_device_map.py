"""Which part of a model goes to which device: a device map as transformers takes it."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.accelerate import expand_device_map

from weightloaders import LLM, SamplingParams, from_pretrained, load_into, load_status, plan_load
from weightloaders.dispatch import input_device
from weightloaders.errors import ConfigError, MissingDependencyError, ModelError
from weightloaders.transfer import device_map as device_maps
from weightloaders.transfer.device_map import DeviceMap

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=40,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            tie_word_embeddings=tied,
        )
    ).eval()


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    llama(tied=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    llama(tied=False).save_pretrained(folder)
    return folder


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that this machine has not: for what is found before anything is put there."""
    monkeypatch.setattr(
        device_maps,
        "usable_device",
        lambda device: torch.device("cuda", device) if isinstance(device, int) else torch.device(device),
    )


def tokens() -> torch.Tensor:
    return torch.arange(3, 12)[None]


# ------------------------------------------------------------------ what an entry fits


def test_the_longest_name_counts_as_in_transformers() -> None:
    names = [name for name, _ in llama(tied=False).named_parameters()]
    prefixes = sorted({".".join(name.split(".")[:n]) for name in names for n in range(9)} - {""})
    for seed in range(30):
        picked = random.Random(seed).sample(prefixes, 6)
        entries = {"": 0} | {name: at for at, name in enumerate(picked, 1)}
        ours = DeviceMap({name: torch.device("cuda", at) for name, at in entries.items()})
        assert {name: ours.device_of(name).index for name in names} == expand_device_map(entries, names)


def test_an_entry_fits_whole_parts_of_a_name() -> None:
    there = DeviceMap({"layers.1": torch.device("cuda", 1), "": CPU})
    assert there.device_of("layers.1.weight").index == 1
    assert there.device_of("layers.1").index == 1
    assert there.device_of("layers.11.weight") == CPU
    assert there.device_of("layers.1x") == CPU


def test_one_device_is_a_map_for_all() -> None:
    there = DeviceMap.of("cpu")
    assert there.entries == {"": CPU}
    assert there.by_device(["a", "b.c"]) == {CPU: ["a", "b.c"]}


# ------------------------------------------------------------------ what is refused, before anything is touched


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "a dict of module names is expected"),
        ({0: "cpu"}, "a dict of module names is expected"),
        ({"": "disk"}, "'' is to stay on disk"),
        ({"": True}, "'' can't go to True, which is no device"),
        ({"": None}, "'' can't go to None, which is no device"),
        ({"model": "cpu", "lm_head": "cuda:4096"}, "'lm_head' can't go there: device='cuda:4096' can't be used"),
        ({"": -1}, "'' can't go there: device='-1' can't be used"),
        ("cudda", "device_map='cudda' can't be used"),
        (4096, "device_map='4096' can't be used"),
        (["cpu"], "can't be used"),
    ],
)
def test_a_map_that_is_none_is_refused_at_once(given: Any, said: str) -> None:
    for load in (
        lambda: from_pretrained("no such folder", device_map=given),
        lambda: LLM("no such folder", device_map=given),
    ):
        with pytest.raises(ConfigError, match="device") as caught:
            load()
        assert said in str(caught.value)


def test_a_map_and_a_device_say_the_same_thing_twice(folder: Path) -> None:
    with pytest.raises(ConfigError, match="say the same thing twice"):
        from_pretrained(folder, device="meta", device_map={"": "cpu"})
    assert from_pretrained(folder, device="cpu", device_map={"": "cpu"}, progress=False)[0].device == CPU


def test_a_parameter_that_no_entry_covers_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    weights = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"device says nothing of 'b.weight'") as caught:
        load_into(model, weights, device={"a": "cpu"}, progress=False)
    assert caught.value.tensor == "b.weight"
    assert all(p.is_meta for p in model.parameters())
    assert load_status(model) is None
    load_into(model, weights, device={"a": "cpu", "b.weight": "cpu", "b.bias": CPU}, progress=False)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_buffer_that_no_entry_covers_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device_map says nothing of 'model.rotary_emb.inv_freq'"):
        from_pretrained(
            folder,
            device_map={"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"},
            progress=False,
        )


def test_an_entry_of_nothing_that_the_model_has_is_named_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no module or parameter 'model.layer.2'; did you mean 'model.layers.2'"):
        from_pretrained(folder, device_map={"model.layer.2": "cpu", "": "cpu"}, progress=False)


@pytest.mark.usefixtures("any_device")
def test_tied_parameters_are_on_one_device(tied_folder: Path) -> None:
    said = r"'lm_head.weight' on cpu and 'model.embed_tokens.weight' on cuda:1, but they are tied"
    with pytest.raises(ConfigError, match=said):
        from_pretrained(tied_folder, device_map={"model": 1, "lm_head": "cpu"}, progress=False)


@pytest.mark.usefixtures("any_device")
def test_several_devices_need_accelerate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "accelerate" else find_spec(name, *a)
    )
    for given in ({"model": 0, "lm_head": 1}, "auto"):
        with pytest.raises(MissingDependencyError, match="needs accelerate"):
            from_pretrained(folder, device_map=given, progress=False)
    # One device needs none.
    from_pretrained(folder, device_map={"": "cpu"}, progress=False)


# ------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize(
    "given",
    ["cpu", CPU, {"": "cpu"}, {"model": CPU, "lm_head": "cpu"}, "auto", "balanced", "balanced_low_0", "sequential"],
)
def test_a_map_of_one_device_loads_as_without(folder: Path, given: Any) -> None:
    if isinstance(given, str) and given != "cpu" and torch.accelerator.is_available():
        pytest.skip("it would be spread over the accelerators")
    model, report = from_pretrained(folder, device_map=given, progress=False)
    assert report.missing == report.unexpected == []
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, llama(tied=False)(tokens()).logits)


def test_an_llm_takes_a_map(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    written = [
        LLM(folder, progress=False, **options).generate([[5, 6, 7]], params)[0].outputs[0].token_ids
        for options in ({}, {"device_map": {"": "cpu"}})
    ]
    assert written[0] == written[1]


def test_a_config_file_takes_a_map(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "llm.yaml"
    config.write_text(f"model: {folder}\nprogress: false\ndevice_map: {{model: cpu, lm_head: cpu}}\n")
    assert LLM.from_config(config).model.device == CPU
    config.write_text(f"model: {folder}\ndevice_map: {{model: 1.5}}\n")
    with pytest.raises(ConfigError, match="device_map"):
        LLM.from_config(config)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import accelerate as integration

    monkeypatch.setattr(integration, "accelerate_max_memory", lambda given: {"cpu": 5_000})
    with pytest.raises(ModelError, match=r"does not fit into memory; .* would have to stay on disk"):
        from_pretrained(folder, device_map="auto", progress=False)


def test_a_model_whose_parts_accelerate_has_put_aside_is_not_filled(folder: Path, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    model = dispatch_model(llama(tied=False), {"model": "disk", "lm_head": "cpu"}, offload_dir=tmp_path / "offloaded")
    with pytest.raises(ModelError, match="put aside by accelerate"):
        load_into(model, folder, progress=False)


@pytest.mark.usefixtures("any_device")
def test_a_plan_forecasts_for_the_devices_that_are_named(folder: Path) -> None:
    with torch.device("meta"):
        model = llama(tied=False)
    for device, through_slots in ((None, 0), ({"": 0}, 1), ({"model": "cpu", "lm_head": 1}, 40 * 16 * 4)):
        told = plan_load(model, folder, device=device).forecast
        expected = told.bytes_to_read if through_slots == 1 else through_slots
        assert told.buffered == expected
        assert told.straight == told.bytes_to_read - expected
        assert (told.extra_memory > 0) is (through_slots > 0)


def test_a_plan_is_run_where_it_was_made_for(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    weights = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"device says nothing of 'b.weight'"):
        plan_load(model, weights, device={"a": "cpu"}).run(model)
    plan_load(model, weights, device="cpu").run(model)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


# ------------------------------------------------------------------ on accelerators


def accelerator() -> str:
    return str(torch.accelerator.current_accelerator())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        {"": 0},
        {"model": 0, "lm_head": "cpu"},
        {"model.embed_tokens": "cpu", "model.layers.1": "cpu", "": 0},
        "auto",
    ],
)
def test_a_model_over_several_devices_is_what_transformers_makes(folder: Path, given: Any) -> None:
    model, report = from_pretrained(folder, device_map=given, progress=False)
    expected = LlamaForCausalLM.from_pretrained(folder, device_map=given).eval()
    assert report.missing == report.unexpected == []
    ours, theirs = (getattr(m, "hf_device_map", {}) for m in (model, expected))
    assert set(ours.values()) == set(theirs.values())
    assert {n: p.device for n, p in model.named_parameters()} == {n: p.device for n, p in expected.named_parameters()}
    with torch.no_grad():
        logits = [m(tokens().to(input_device(m))).logits.cpu() for m in (model, expected)]
    assert torch.equal(*logits)


@pytest.mark.gpu
def test_an_llm_over_several_devices_writes_the_same_text(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    written = [
        LLM(folder, progress=False, **options).generate([[5, 6, 7]], params)[0].outputs[0].token_ids
        for options in ({}, {"device_map": {"model": 0, "lm_head": "cpu"}})
    ]
    assert written[0] == written[1]


@pytest.mark.gpu
def test_a_stream_and_a_plan_go_where_the_map_says(folder: Path) -> None:
    weights = {name: p.detach().clone() for name, p in llama(tied=False).named_parameters()}
    for source in (folder, weights, iter(weights.items())):
        with torch.device("meta"):
            model = llama(tied=False)
        load_into(model, source, device={"model.layers.0": 0, "": "cpu"}, progress=False)
        for name, parameter in model.named_parameters():
            assert parameter.device.type == (accelerator() if name.startswith("model.layers.0.") else "cpu")
            assert torch.equal(parameter.cpu(), weights[name])
