"""The modes of a load: however the bytes are moved, the model is the same; and what each mode promises beside that."""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from weightloaders import (
    LLM,
    BaseWeightLoader,
    Convert,
    Extent,
    TensorInfo,
    TransferOptions,
    Weights,
    from_pretrained,
    load_into,
    save_weights,
)
from weightloaders.errors import LoadError, SourceReadError
from weightloaders.loaders.local import LocalLoader
from weightloaders.loading import load_status
from weightloaders.transfer import file_views

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ["direct", "mmap", "o_direct", "stream"]
OTHERS = MODES[1:]
LINUX = sys.platform == "linux"
on_linux = pytest.mark.skipif(not LINUX, reason="looks into /proc")


def llama(**changes: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    )


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bfloat16": (lambda: llama().to(torch.bfloat16), {}),
    "tied": (lambda: llama(tie_word_embeddings=True), {}),
    "in shards": (llama, {"max_shard_size": "20KB"}),
    "experts": (mixtral, {}),
    "tied, with buffers": (gpt2, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    make, options = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    make().save_pretrained(folder, **options)
    return folder


@pytest.fixture
def llama_folder(tmp_path) -> Path:
    llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def loaded(folder: Path, mode: Any, **options: Any) -> tuple[Any, Any]:
    return from_pretrained(folder, transfer=mode, progress=False, **options)


def same(a: nn.Module, b: nn.Module) -> None:
    """The same names, values, dtypes, gradients, and the same ties."""
    one, other = dict(a.named_parameters(remove_duplicate=False)), dict(b.named_parameters(remove_duplicate=False))
    one |= dict(a.named_buffers(remove_duplicate=False))
    other |= dict(b.named_buffers(remove_duplicate=False))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.requires_grad == other[name].requires_grad, name
        assert type(tensor) is type(other[name]), name
        assert torch.equal(tensor, other[name]), name
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(tensor), name) for name, tensor in one.items()}
    first.clear()
    assert ties == {name: first.setdefault(id(tensor), name) for name, tensor in other.items()}


# ------------------------------------------------------------------ the same model in every mode


@pytest.mark.parametrize("mode", OTHERS)
def test_a_model_is_the_same_in_every_mode_and_writes_the_same(folder, mode):
    direct, expected = loaded(folder, "direct")
    model, report = loaded(folder, mode)
    same(model, direct)
    prompt = torch.tensor([[3, 5, 7]])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), direct.generate(prompt, **options))
    assert sorted(report.loaded) == sorted(expected.loaded)
    assert (report.tied, report.missing, report.renamed) == (expected.tied, expected.missing, expected.renamed)
    assert sum(report.bytes_by_path.values()) >= sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("mode", OTHERS)
def test_a_cast_is_the_same_in_every_mode(folder, mode):
    direct, _ = loaded(folder, "direct", dtype=torch.float16)
    model, report = loaded(folder, mode, dtype=torch.float16)
    same(model, direct)
    assert "mapped" not in report.bytes_by_path


@pytest.mark.parametrize("mode", OTHERS)
def test_a_model_that_has_values_is_filled_in_every_mode(llama_folder, mode):
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    objects = dict(model.named_parameters())
    versions = {name: parameter._version for name, parameter in objects.items()}
    load_into(model, llama_folder, transfer=mode, progress=False)
    same(model, loaded(llama_folder, "direct")[0].train())
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    # Whoever saved a parameter for backward is told that it changed.
    assert all(parameter._version > versions[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_trained_in_every_mode(llama_folder, mode):
    model, _ = loaded(llama_folder, mode)
    reference = LlamaForCausalLM.from_pretrained(llama_folder)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(torch.arange(10)[None], labels=torch.arange(10)[None]).loss.backward()
        optimizer.step()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)


@pytest.mark.parametrize("mode", MODES)
def test_reloading_shows_the_new_values_to_whoever_holds_a_parameter(llama_folder, tmp_path, mode):
    llm = LLM(llama_folder, progress=False, transfer=mode)
    weight = llm.model.model.norm.weight
    trained = llama()
    with torch.no_grad():
        trained.model.norm.weight.fill_(3)
    save_weights(trained, tmp_path / "step")
    llm.reload_weights(tmp_path / "step")
    assert llm.model.model.norm.weight is weight
    assert bool((weight == 3).all())
    same(llm.model, trained.eval())


@pytest.mark.parametrize("mode", MODES)
def test_each_parameter_has_a_storage_of_its_own(llama_folder, tmp_path, mode):
    model, _ = loaded(llama_folder, mode)
    for name, parameter in model.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
        assert parameter.is_leaf
        assert not parameter._is_view()
    save_model(model, tmp_path / "whole.safetensors")
    assert load_file(tmp_path / "whole.safetensors").keys() == dict(model.named_parameters()).keys()
    torch.save(model.model.norm.weight, tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 4096


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_parameter_belongs_to_autograd_whoever_loads(llama_folder, mode, inference):
    with torch.inference_mode(inference):
        model = nn.Linear(32, 64, bias=False, device="meta") if not inference else None
    model = model or nn.Linear(32, 64, bias=False)
    source = {"weight": load_file(llama_folder / "model.safetensors")["lm_head.weight"]}
    save_file(source, llama_folder / "head.safetensors")
    with torch.inference_mode(inference):
        load_into(model, llama_folder / "head.safetensors", transfer=mode, progress=False)
    assert not model.weight.is_inference()
    model(torch.ones(1, 32)).sum().backward()
    assert torch.equal(model.weight, source["weight"])


@pytest.mark.parametrize("mode", MODES)
def test_attributes_of_a_parameter_stay(llama_folder, mode):
    with torch.device("meta"):
        model = llama()
    model.lm_head.weight.tag = "mine"
    model.lm_head.weight.requires_grad_(False)
    head = model.lm_head.weight
    model.model.rotary_emb = llama().model.rotary_emb
    load_into(model, llama_folder, transfer=mode, progress=False)
    assert model.lm_head.weight is head
    assert model.lm_head.weight.tag == "mine"
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize("mode", OTHERS)
def test_what_does_not_fit_is_an_error_before_anything_is_touched(llama_folder, mode):
    model = llama(attention_bias=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    storages = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        load_into(model, llama_folder, transfer=mode, progress=False)
    assert load_status(model) is None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() == storages[name]


@pytest.mark.parametrize("mode", OTHERS)
def test_what_the_source_leaves_out_is_initialised_or_kept(llama_folder, mode):
    tensors = load_file(llama_folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, llama_folder / "model.safetensors", {"format": "pt"})
    model, report = loaded(llama_folder, mode, on_missing="ignore")
    assert report.initialised == ["model.norm.weight"]
    assert bool((model.model.norm.weight == 1).all())


@pytest.mark.parametrize("mode", OTHERS)
def test_rules_that_fuse_compute_and_transpose_hold_in_every_mode(tmp_path, mode):
    torch.manual_seed(0)
    parts = {name: torch.randn(8, 8) for name in ("q", "k", "v", "out", "scaled", "two")}
    save_file(parts, tmp_path / "model.safetensors")

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.zeros(24, 8))
            self.out = nn.Parameter(torch.zeros(8, 8))
            self.scaled = nn.Parameter(torch.zeros(8, 8))
            self.upper = nn.Parameter(torch.zeros(4, 8))
            self.lower = nn.Parameter(torch.zeros(4, 8))

    rules = [
        Convert(["q", "k", "v"], ["qkv"], lambda q, k, v: torch.cat([q, k, v])),
        Convert(["out"], ["out"], lambda out: out.t()),
        Convert(["scaled"], ["scaled"], lambda scaled: scaled * 2),
        Convert(["two"], ["upper", "lower"], lambda two: (two[:4], two[4:])),
    ]
    model = Attention()
    report = load_into(model, tmp_path, rules=rules, transfer=mode, progress=False)
    assert torch.equal(model.qkv, torch.cat([parts["q"], parts["k"], parts["v"]]))
    assert torch.equal(model.out, parts["out"].t())
    assert torch.equal(model.scaled, parts["scaled"] * 2)
    assert torch.equal(torch.cat([model.upper, model.lower]), parts["two"])
    if mode == "mmap":
        # What is split lies in the file as it is to be; the rest is read.
        assert report.bytes_by_path["mapped"] == 8 * 8 * 4
        assert sorted(set(report.loaded) - {"upper", "lower"}) == ["out", "qkv", "scaled"]


class Halves(nn.Module):
    """A parameter with a loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.weight.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)
        self.plain = nn.Parameter(torch.zeros(4, 8))


@pytest.mark.parametrize("mode", MODES)
def test_a_parameters_own_loader_is_called_in_every_mode(tmp_path, mode):
    tensors = {"weight": torch.randn(4, 8), "plain": torch.randn(4, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Halves()
    report = load_into(model, tmp_path, transfer=mode, progress=False)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in tensors.items())
    assert sorted(report.loaded) == ["plain", "weight"]


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_on_the_way_names_what_was_written_and_marks_the_model(tmp_path, mode):
    save_file({"weight": torch.randn(4, 8), "plain": torch.randn(4, 8)}, tmp_path / "model.safetensors")
    model = Halves()

    def fail(parameter, tensor):
        raise RuntimeError("no")

    model.weight.weight_loader = fail
    with pytest.raises(LoadError) as error:
        load_into(model, tmp_path, transfer=mode, progress=False)
    assert "plain" in error.value.written
    assert load_status(model) == "failed"


def test_progress_of_a_stream_of_tensors_ends_with_all_bytes(llama_folder):
    events: list[Any] = []
    _, report = loaded(llama_folder, "stream")
    from_pretrained(llama_folder, transfer="stream", progress=events.append)
    assert [event.done_bytes for event in events] == sorted(event.done_bytes for event in events)
    assert events[-1].done_bytes == events[-1].total_bytes == report.bytes_read
    assert events[-1].file.endswith("model.safetensors")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_called_from_an_override_obeys_the_mode(tmp_path, mode, device):
    tensors = {"weight": torch.randn(4, 8), "bias": torch.randn(4)}
    save_file(tensors, tmp_path / "model.safetensors")

    class Override(LocalLoader):
        def load_weights(self, model, weights):
            return super().load_weights(model, weights)

    model = nn.Linear(8, 4, device=device)
    report = load_into(model, tmp_path, loader=Override, transfer=mode, progress=False)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in tensors.items())
    assert sorted(report.loaded) == ["bias", "weight"]
    assert ("mapped" in report.bytes_by_path) == (mode == "mmap")


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_an_optimizer_holds_weakly_is_filled(tmp_path, mode):
    """Its object can't be exchanged then, and the report says so."""
    save_file({"weight": torch.ones(4, 8)}, tmp_path / "model.safetensors")
    model = nn.Linear(8, 4, bias=False, device="meta")
    held = weakref.ref(model.weight)
    report = load_into(model, tmp_path, transfer=mode, progress=False)
    assert bool((model.weight == 1).all())
    assert (report.replaced == ["weight"]) == (held() is not model.weight)


# ------------------------------------------------------------------ mmap


def maps_of(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def copied_pages(name: str) -> int:
    """kB of a file's pages that this process has copies of its own of."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = name in line
        elif found and line.startswith("Anonymous:"):
            total += int(line.split()[1])
    return total


def open_files() -> set[str]:
    return {os.path.realpath(descriptor) for descriptor in Path("/proc/self/fd").iterdir()}


@on_linux
def test_parameters_are_views_of_the_file_and_read_nothing(llama_folder):
    model, report = loaded(llama_folder, "mmap")
    (mapping,) = maps_of(str(llama_folder))
    start, end = (int(part, 16) for part in mapping.split()[0].split("-"))
    assert " rw-p " in mapping
    for name, parameter in model.named_parameters():
        assert start <= parameter.data_ptr() < end, name
    assert report.bytes_read == 0
    assert report.bytes_by_path == {"mapped": sum(p.nbytes for p in model.parameters())}
    assert report.extra_memory == 0
    assert any("mapped" in note for note in report.notes)


@on_linux
def test_writing_to_a_parameter_copies_its_pages_and_never_reaches_the_file(llama_folder):
    file = llama_folder / "model.safetensors"
    before = file.read_bytes()
    model, _ = loaded(llama_folder, "mmap")
    for parameter in model.parameters():
        parameter.sum()
    # What is only read is shared with all others who do.
    assert copied_pages(str(file)) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert copied_pages(str(file)) > 0
    assert file.read_bytes() == before
    again, _ = loaded(llama_folder, "mmap")
    assert torch.equal(again.lm_head.weight + 1, model.lm_head.weight)


@on_linux
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_no_descriptor_stays_open_and_the_mapping_goes_with_the_model(llama_folder, device):
    model, _ = loaded(llama_folder, "mmap")
    if device == "cpu":
        load_into(model, llama_folder, transfer="mmap", progress=False)
    assert maps_of(str(llama_folder))
    assert str(llama_folder / "model.safetensors") not in open_files()
    kept = model.model.norm.weight
    del model
    gc.collect()
    # As long as one parameter lives, its file is mapped.
    assert maps_of(str(llama_folder))
    assert bool((kept == 1).all())
    del kept
    gc.collect()
    assert not maps_of(str(llama_folder))


@on_linux
@pytest.mark.parametrize("mode", ["direct", "o_direct", "stream"])
def test_in_every_other_mode_nothing_stays_mapped_or_open(llama_folder, mode):
    model, _ = loaded(llama_folder, mode)
    assert not maps_of(str(llama_folder))
    assert not any(name.startswith(str(llama_folder)) for name in open_files())
    assert model is not None


@on_linux
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_gigabyte_is_there_at_once_and_takes_no_memory(tmp_path, device):
    file = tmp_path / "model.safetensors"
    side = 16384
    save_file({"weight": torch.ones(1, 1)}, file)
    header = f'{{"weight":{{"dtype":"F32","shape":[{side},{side}],"data_offsets":[0,{4 * side * side}]}}}}'
    header += " " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header.encode())
        stream.truncate(8 + len(header) + 4 * side * side)
    model = nn.Linear(side, side, bias=False, device="meta")
    if device == "cpu":
        model.weight = nn.Parameter(torch.empty(side, side))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = load_into(model, file, transfer="mmap", progress=False)
    assert report.bytes_by_path == {"mapped": 4 * side * side}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert float(model.weight.detach()[-1, -1]) == 0


UNDER_A_LIMIT = """
    import logging, resource, sys, warnings
    import torch
    from torch import nn
    from weightloaders import load_into
    logging.basicConfig(format="%(message)s")
    model = nn.Linear({side}, {side}, bias=False, device="meta")
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + {room}, used + {room}))
    report = load_into(model, {file!r}, transfer="mmap", progress=False)
    print(report.bytes_by_path, len(report.warnings), bool((model.weight == 1).all()))
"""


@on_linux
def test_a_file_that_has_no_room_in_the_address_space_is_read(tmp_path):
    """Much of the file is not of this model, so there is room for the parameter."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(300 << 17, dtype=torch.float64), "weight": torch.ones(1024, 1024)}, file)
    code = UNDER_A_LIMIT.format(side=1024, room=200 << 20, file=str(file))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "{'straight': 4194304} 2 True"
    assert done.stderr.count("can't be mapped and is read") == 1
    assert "Cannot allocate memory" in done.stderr


def test_a_file_system_that_can_not_map_is_read_from_with_one_warning(llama_folder, monkeypatch, caplog):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("unable to mmap 100 bytes from file: No such device (19)\nmore")

    monkeypatch.setattr(file_views, "_mapped", fail)
    model, report = loaded(llama_folder, "mmap")
    same(model, loaded(llama_folder, "direct")[0])
    assert report.warnings == [w for w in report.warnings if "can't be mapped" in w]
    assert len(report.warnings) == 1
    assert "No such device" in report.warnings[0]
    assert "\n" not in report.warnings[0]
    assert report.bytes_read > 0
    assert "mapped" not in report.bytes_by_path
    assert sum("can't be mapped" in record.message for record in caplog.records) == 1


def test_saving_over_the_mapped_file_keeps_the_model_and_writes_it_whole(llama_folder):
    model, _ = loaded(llama_folder, "mmap")
    with torch.no_grad():
        model.model.norm.weight.fill_(5)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_weights(model, llama_folder)
    save_weights(model, llama_folder / "model.safetensors")
    # The model still has its values, of the file that was there before.
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    same(loaded(llama_folder, "direct")[0], model)
    save_weights(model, llama_folder, layout="checkpoint")
    same(loaded(llama_folder, "mmap")[0], model)


def test_a_file_that_is_exchanged_while_it_is_mapped_is_refused(llama_folder, monkeypatch):
    file = llama_folder / "model.safetensors"
    mapped = file_views._mapped

    def exchange(*args: Any, **kwargs: Any) -> Any:
        other = file.with_suffix(".new")
        other.write_bytes(file.read_bytes())
        other.replace(file)
        return mapped(*args, **kwargs)

    monkeypatch.setattr(file_views, "_mapped", exchange)
    model = llama()
    with pytest.raises(SourceReadError, match="changed"):
        load_into(model, llama_folder, transfer="mmap", progress=False)
    assert load_status(model) is None


def test_what_others_hold_a_view_of_is_filled_where_it_is(llama_folder):
    """They would go on seeing the old values otherwise."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    row = model.lm_head.weight.data[3]
    state = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
    report = load_into(model, llama_folder, transfer="mmap", progress=False)
    reference = load_file(llama_folder / "model.safetensors")
    assert torch.equal(row, reference["lm_head.weight"][3])
    assert all(torch.equal(tensor, reference[name]) for name, tensor in state.items())
    assert "6 (sharing memory with others)" in report.notes[-1]


class Fused(nn.Module):
    """Two parameters that are parts of one memory."""

    def __init__(self, device: str) -> None:
        super().__init__()
        memory = torch.zeros(8, 4, device=device)
        self.a, self.b = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
        self.c = nn.Parameter(torch.zeros(2, 4, device=device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_of_one_memory_stay_that(tmp_path, device):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5, 4), "c": torch.randn(2, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Fused(device)
    report = load_into(model, tmp_path, transfer="mmap", progress=False)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in tensors.items())
    assert model.a.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr()
    assert report.bytes_by_path == {"mapped": 32, "straight": 128}


def test_models_that_were_mapped_and_have_gone_leave_nothing_behind(tmp_path):
    save_file({f"w{i}": torch.zeros(2) for i in range(200)}, tmp_path / "model.safetensors")
    for _ in range(12):
        model = nn.Module()
        for i in range(200):
            model.register_parameter(f"w{i}", nn.Parameter(torch.empty(2, device="meta")))
        load_into(model, tmp_path, transfer="mmap", progress=False)
        # A mapped parameter is exchanged for the next one, as any other that nobody else holds.
        assert load_into(model, tmp_path, transfer="mmap", progress=False).bytes_by_path == {"mapped": 1600}
    assert len(file_views._views) <= 1400


ODD: dict[str, Callable[[Path], tuple[TensorInfo, str]]] = {
    "another byte order": lambda file: (
        TensorInfo("w", torch.float32, (4,), Extent(file, 0, byteorder="big")), "of another dtype or byte order",
    ),
    "another dtype": lambda file: (
        TensorInfo("w", torch.float32, (4,), Extent(file, 0, dtype=torch.float16)), "of another dtype or byte order",
    ),
    "not aligned": lambda file: (TensorInfo("w", torch.float32, (4,), Extent(file, 2)), "not aligned"),
    "strided": lambda file: (
        TensorInfo("w", torch.float32, (4,), Extent(file, 0, strides=(2,))), "not one run of bytes in a file",
    ),
    "in two pieces": lambda file: (
        TensorInfo(
            "w", torch.float32, (4,), [Extent(file, 0, shape=(2,), at=(0,)), Extent(file, 16, shape=(2,), at=(2,))]
        ),
        "not one run of bytes in a file",
    ),
    "no raw bytes": lambda file: (
        TensorInfo("w", torch.float32, (4,), read=lambda: torch.ones(4)), "not one run of bytes in a file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_what_can_not_be_mapped_is_read_and_the_report_says_why(tmp_path, case):
    (tmp_path / "raw").write_bytes(torch.arange(1, 17, dtype=torch.float32).numpy().tobytes())
    info, why = ODD[case](tmp_path / "raw")
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4))
    report = load_into(model, Weights.describe([info]), transfer="mmap", progress=False)
    assert torch.equal(model.w, Weights.describe([info])["w"])
    assert "mapped" not in report.bytes_by_path
    assert why in report.notes[-1]


def test_a_slice_of_a_fused_tensor_is_mapped_where_it_lies(tmp_path):
    fused = torch.randn(12, 4)
    save_file({"qkv": fused}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.q, model.k, model.v = (nn.Parameter(torch.zeros(4, 4)) for _ in range(3))
    rule = Convert(["qkv"], ["q", "k", "v"], lambda qkv: qkv.split(4))
    report = load_into(model, tmp_path, rules=[rule], transfer="mmap", progress=False)
    assert report.bytes_by_path == {"mapped": fused.nbytes}
    assert torch.equal(torch.cat([model.q, model.k, model.v]), fused)
    with torch.no_grad():
        model.q.zero_()
    assert torch.equal(torch.cat([model.k, model.v]), fused[4:])


def test_torch_files_are_mapped_as_well(tmp_path):
    tensors = {"weight": torch.randn(40, 30), "bias": torch.randn(40)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    model = nn.Linear(30, 40, device="meta")
    report = load_into(model, tmp_path, transfer="mmap", progress=False)
    assert report.bytes_by_path == {"mapped": sum(tensor.nbytes for tensor in tensors.values())}
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in tensors.items())


def test_empty_tensors_and_scalars_load_too(tmp_path):
    tensors = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Module()
    model.empty, model.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(()))
    load_into(model, tmp_path, transfer="mmap", progress=False)
    assert float(model.scalar.detach()) == 2.5


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_and_a_pickle_of_a_model_stand_alone(llama_folder, tmp_path, mode):
    import copy
    import pickle

    model, _ = loaded(llama_folder, mode)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(other, model)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert not torch.equal(other.lm_head.weight, model.lm_head.weight)
    moved = model.to(torch.float64)
    assert moved.lm_head.weight.dtype is torch.float64


# ------------------------------------------------------------------ stream


def test_a_loader_that_reuses_its_buffer_fills_a_model_in_order(tmp_path):
    buffer = torch.zeros(4)

    class Reusing(BaseWeightLoader):
        borrowed = True

        def get_weights(self, model_name_or_path):
            infos = [TensorInfo(str(i), torch.float32, (4,), read=lambda i=i: buffer.fill_(i)) for i in range(6)]
            return Weights.describe(infos, borrowed=True)

    model = nn.Module()
    for i in range(4):
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros(4)))
    model.pair = nn.Parameter(torch.zeros(8))
    rules = [Convert([str(i)], [f"p{i}"], lambda t: t) for i in range(4)]
    rules.append(Convert(["4", "5"], ["pair"], lambda a, b: torch.cat([a, b])))
    load_into(model, tmp_path, loader=Reusing(), rules=rules, transfer="stream", progress=False)
    assert [model.get_parameter(f"p{i}")[0].item() for i in range(4)] == [0, 1, 2, 3]
    assert model.pair.tolist() == [4.0] * 4 + [5.0] * 4


def test_tensors_that_no_parameter_wants_are_not_read(tmp_path):
    save_file({"weight": torch.randn(4, 4), "unwanted": torch.randn(1000, 1000)}, tmp_path / "model.safetensors")
    report = load_into(nn.Linear(4, 4, bias=False), tmp_path, transfer="stream", progress=False)
    assert report.bytes_read == 64


def test_what_waits_for_its_group_is_counted(tmp_path):
    parts = {f"part{i:02}": torch.randn(256, 256) for i in range(16)}
    save_file(parts, tmp_path / "model.safetensors")
    model = nn.Module()
    model.whole = nn.Parameter(torch.zeros(16, 256, 256))
    rule = Convert(["part{i}"], ["whole"], lambda parts: torch.stack(parts))
    options = TransferOptions(mode="stream", extra_memory="4 MiB")
    report = load_into(model, tmp_path, rules=[rule], transfer=options, progress=False)
    assert torch.equal(model.whole, torch.stack(list(parts.values())))
    assert 16 * 256 * 256 * 4 <= report.extra_memory <= 16 * 256 * 256 * 4 + (4 << 20)


def test_after_a_failure_no_thread_is_left(tmp_path):
    save_file({f"w{i}": torch.randn(1 << 20) for i in range(12)}, tmp_path / "model.safetensors")
    model = nn.Module()
    for i in range(12):
        model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(1 << 20)))

    def fail(parameter, tensor):
        raise RuntimeError("no")

    model.w0.weight_loader = fail
    with pytest.raises(LoadError, match="no") as error:
        load_into(model, tmp_path, transfer="stream", progress=False)
    assert not [t for t in threading.enumerate() if t.name.startswith("weightloaders-read-ahead")]
    assert error.value.tensor == "w0"


def test_what_was_streamed_is_let_go_of(tmp_path):
    save_file({"weight": torch.randn(8, 8)}, tmp_path / "model.safetensors")
    handed: list[Any] = []
    model = nn.Linear(8, 8, bias=False)
    model.weight.weight_loader = lambda parameter, tensor: (
        handed.append(weakref.ref(tensor.untyped_storage())), parameter.data.copy_(tensor),
    )  # fmt: skip
    load_into(model, tmp_path, transfer="stream", progress=False)
    gc.collect()
    assert handed[0]() is None
