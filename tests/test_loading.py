"""Loading into a module: nothing is touched when something is wrong, and what is right arrives."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import shutil
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders import (
    BaseWeightLoader,
    Convert,
    Extent,
    LoadReport,
    Rename,
    TensorInfo,
    Weights,
    default_weight_loader,
    load_into,
    load_model,
    load_status,
    open_weights,
    plan_load,
    save_weights,
)
from weightloaders.errors import (
    ConfigError,
    CoverageError,
    HalfLoadedModelError,
    LoaderContractError,
    LoadError,
    ModelError,
    PlanError,
    SourceClosedError,
    SourceError,
    SourceNotFoundError,
    SourceReadError,
    WeightLoadersError,
)
from weightloaders.testing.distributions import fake_distribution
from weightloaders.testing.isolation import isolated_registry
from weightloaders.transfer import jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Attention(nn.Module):
    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, rows) for rows in (size, size // 3, size // 3))
        self.o_proj = nn.Linear(size, size, bias=False)


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("steps", torch.tensor(3))


def reference(seed: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {name: torch.randn(t.shape) for name, t in Model(**options).named_parameters()}
    return {**tensors, "steps": torch.tensor(17)}


def digest(model: nn.Module) -> dict[str, int]:
    """A checksum of every byte of a model."""
    return {
        name: zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def assert_filled(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert {name for name in tensors if not torch.equal(state[name], tensors[name])} == set()


def open_files() -> set[str]:
    return {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


# ------------------------------------------------------------------ a real checkpoint with something wrong


def with_header(source: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A safetensors file with another header over the same data."""
    target.unlink(missing_ok=True)
    with source.open("rb") as old, target.open("wb") as new:
        header = json.dumps(change(json.loads(old.read(struct.unpack("<Q", old.read(8))[0])))).encode()
        header += b" " * (-len(header) % 8)
        new.write(struct.pack("<Q", len(header)) + header)
        shutil.copyfileobj(old, new, 1 << 24)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder)


@pytest.fixture
def broken(smollm2_folder: Path, tmp_path: Path) -> Path:
    """A folder of links to the real files, to be broken."""
    for file in smollm2_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


SHARD = "model-00002-of-00003.safetensors"
O_PROJ = "model.layers.7.self_attn.o_proj.weight"


def rewritten_index(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.unlink()
    index.write_text(json.dumps({**content, "weight_map": change(content["weight_map"])}))


def without_o_proj(folder: Path) -> None:
    original = (folder / SHARD).resolve()
    with_header(
        original,
        folder / SHARD,
        lambda h: {k.replace(O_PROJ, "model.layers.7.self_attn.rotary_emb.inv_freq"): v for k, v in h.items()},
    )
    rewritten_index(folder, lambda names: {name: file for name, file in names.items() if name != O_PROJ})


def wrong_shape(folder: Path) -> None:
    original = (folder / SHARD).resolve()
    with_header(original, folder / SHARD, lambda h: {**h, O_PROJ: {**h[O_PROJ], "shape": [288, 1152]}})


def truncated_shard(folder: Path) -> None:
    original = (folder / SHARD).resolve()
    (folder / SHARD).unlink()
    shutil.copyfile(original, folder / SHARD)
    os.truncate(folder / SHARD, original.stat().st_size - 1000)


def absent_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def wrong_prefix(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        with_header(
            file.resolve(),
            folder / file.name,
            lambda h: {k.replace("model.", "net.decoder.", 1): v for k, v in h.items()},
        )
    rewritten_index(folder, lambda names: {k.replace("model.", "net.decoder.", 1): file for k, file in names.items()})


def nan_in_config(folder: Path) -> None:
    original = (folder / SHARD).resolve()
    with_header(original, folder / SHARD, lambda h: {**h, O_PROJ: {**h[O_PROJ], "dtype": "I16"}})


@pytest.mark.parametrize(
    ("wrong", "file", "tensor", "words"),
    [
        (without_o_proj, SHARD, O_PROJ, ["not in the source", "incomplete", "on_missing"]),
        (wrong_shape, SHARD, O_PROJ, ["[288, 1152]", "[576, 576]"]),
        (truncated_shard, SHARD, None, ["truncated"]),
        (absent_shard, SHARD, None, [SHARD]),
        (wrong_prefix, None, "model.embed_tokens.weight", ["differ by a prefix", "Rename('net.decoder', 'model')"]),
        (nan_in_config, SHARD, O_PROJ, ["torch.int16", "torch.bfloat16", "cast"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_checkpoint_with_something_wrong_is_refused_at_once_and_no_parameter_changes(
    smollm2: nn.Module,
    broken: Path,
    wrong: Callable[[Path], None],
    file: str | None,
    tensor: str | None,
    words: list[str],
) -> None:
    wrong(broken)
    before = digest(smollm2)
    start = time.process_time()
    with pytest.raises((PlanError, SourceError)) as caught:
        load_into(smollm2, broken, progress=False)
    # Processor time: what the neighbours on this machine do is not ours.
    assert time.process_time() - start < 1
    message = str(caught.value)
    if file is not None:
        # What is at fault may be the shard or the index that names it.
        assert caught.value.file in (str(broken / file), str(broken / "model.safetensors.index.json"))
        assert file in message
    if tensor is not None:
        assert caught.value.tensor == tensor
        assert tensor in message
    assert all(word in message for word in words), message
    assert digest(smollm2) == before
    assert load_status(smollm2) is None


def test_the_rule_that_the_message_names_mends_the_prefix(
    smollm2_folder: Path, broken: Path, smollm2: nn.Module
) -> None:
    wrong_prefix(broken)
    plan = plan_load(smollm2, broken, rules=[Rename("net.decoder", "model")])
    assert plan.ok
    assert plan.missing == []


# ------------------------------------------------------------------ what is right


@pytest.mark.parametrize("form", ["folder", "file", "dict", "weights", "stream"])
def test_every_form_of_weights_fills_a_module_in_place(tmp_path: Path, form: str) -> None:
    tensors = reference()
    save_file(tensors, tmp_path / "model.safetensors")
    source: Any = {
        "folder": tmp_path, "file": tmp_path / "model.safetensors", "dict": tensors, "stream": iter(tensors.items()),
        "weights": open_weights(tmp_path),
    }[form]  # fmt: skip
    model = Model()
    before = dict(model.named_parameters())
    report = load_into(model, source, progress=False)
    assert_filled(model, tensors)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert sorted(report.loaded) == sorted(tensors)
    assert (report.missing, report.unexpected, report.mismatched, report.cast) == ([], [], [], {})
    assert report.bytes_read == sum(t.nbytes for t in tensors.values())
    assert report.seconds > 0
    assert load_status(model) == "loaded"
    assert model.training


def test_load_model_returns_the_model_itself_ready_for_use(tmp_path: Path) -> None:
    save_file(reference(), tmp_path / "model.safetensors")
    model = Model()
    assert load_model(model, tmp_path, progress=False) is model
    assert not model.training


def test_the_report_says_where_each_parameter_came_from_and_is_data(tmp_path: Path) -> None:
    save_file(reference(), tmp_path / "model.safetensors")
    report = load_into(Model(), tmp_path / "model.safetensors", progress=False)
    assert "model.safetensors, bytes" in report.sources["layers.0.o_proj.weight"]
    data = json.loads(report.to_json())
    assert data["loaded"] == report.loaded
    assert LoadReport(**data).sources == report.sources
    assert "tensors" in str(report)
    assert f"{report.bytes_read:,}" in str(report)


@pytest.mark.parametrize("form", ["catalogue", "stream"])
def test_casts_are_reported_and_new_infinities_warned_about(caplog: pytest.LogCaptureFixture, form: str) -> None:
    tensors = reference()
    tensors["norm.weight"] = torch.full((6,), 1e30)
    model = Model().to(torch.float16)
    report = load_into(model, tensors if form == "catalogue" else iter(tensors.items()), progress=False)
    assert report.cast["norm.weight"] == ("torch.float32", "torch.float16")
    assert "steps" not in report.cast
    assert any("norm.weight" in warning and "infinities" in warning for warning in report.warnings)
    assert "norm.weight: the cast from torch.float32 to torch.float16 made new infinities" in caplog.text
    assert torch.equal(model.layers[0].q_proj.weight, tensors["layers.0.q_proj.weight"].half())


def test_a_mapping_that_is_no_dict_is_read_name_by_name() -> None:
    from collections.abc import Mapping

    tensors = reference()

    class Reading(Mapping[str, torch.Tensor]):
        asked: list[str] = []  # noqa: RUF012 -- a test

        def __getitem__(self, name: str) -> torch.Tensor:
            self.asked.append(name)
            return tensors[name].clone()

        def __iter__(self) -> Iterator[str]:
            return iter(tensors)

        def __len__(self) -> int:
            return len(tensors)

    model = Model()
    load_into(model, Reading(), progress=False)
    assert_filled(model, tensors)
    assert Reading.asked == list(tensors)


def test_what_was_given_is_not_changed_and_stays_open(tmp_path: Path) -> None:
    # One mapping loaded into two models: the second must not find it emptied or closed.
    tensors = reference()
    save_file(tensors, tmp_path / "model.safetensors")
    given = {f"module.{name}": t for name, t in tensors.items()}
    with open_weights(tmp_path) as weights:
        for _ in range(2):
            model = Model()
            load_into(model, given, progress=False)
            assert_filled(model, tensors)
            model = Model()
            load_into(model, weights, progress=False)
            assert_filled(model, tensors)
        assert not weights.closed
    assert list(given) == [f"module.{name}" for name in tensors]


def test_a_model_can_be_filled_from_its_own_state_dict() -> None:
    model = Model()
    before = digest(model)
    load_into(model, model.state_dict(), progress=False)
    load_into(model, dict(model.named_parameters()) | dict(model.named_buffers()), progress=False)
    assert digest(model) == before


def test_a_device_is_for_what_is_on_meta(tmp_path: Path) -> None:
    save_file(reference(), tmp_path / "model.safetensors")
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        with torch.device("meta"):
            model = Model()
        load_into(model, tmp_path, device=device, progress=False)
        assert_filled(model, reference())
    with pytest.raises(ConfigError, match="device='abacus'"):
        load_into(Model(), tmp_path, device="abacus")


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.int8, torch.bfloat16), (torch.int64, torch.float32), (torch.float32, torch.int64),
        (torch.bool, torch.float32), (torch.float8_e4m3fn, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn),
        (torch.complex64, torch.float32), (torch.float32, torch.complex64), (torch.int32, torch.int64),
        (torch.uint8, torch.int8),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("form", ["catalogue", "stream", "file"])
def test_only_real_floating_point_is_cast(tmp_path: Path, form: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = nn.Module()
    model.other = nn.Parameter(torch.zeros(2))
    model.register_buffer("w", torch.zeros(4, dtype=wanted))
    tensors = {"other": torch.ones(2), "w": torch.ones(4, dtype=stored)}
    save_file(tensors, tmp_path / "m.safetensors")
    source: Any = {"catalogue": tensors, "stream": iter(tensors.items()), "file": tmp_path / "m.safetensors"}[form]
    with pytest.raises((PlanError, LoadError), match=r"w: the source has .* values, which can't become") as caught:
        load_into(model, source, progress=False)
    assert caught.value.tensor == "w"
    assert str(stored) in str(caught.value)
    assert not model.w.to(torch.float32 if not wanted.is_complex else wanted).any()


def test_paths_of_all_spellings_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "模型 ü #1 %41"
    folder.mkdir()
    names = list(reference())
    for number, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: reference()[name] for name in part}, folder / f"model part #{number} ü.safetensors")
    model = Model()
    load_into(model, folder, progress=False)
    assert_filled(model, reference())


def test_a_reload_leaves_alone_what_it_does_not_load_and_keeps_what_is_shared() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(3, 3)
            self.register_buffer("mask", torch.ones(3))
            self.register_buffer("same_mask", self.mask)
            self.register_buffer("cache", torch.arange(3.0), persistent=False)
            self.kept = nn.Parameter(torch.full((2,), 5.0))

    model = Shared()
    whole = {"proj.weight": torch.ones(3, 3), "proj.bias": torch.ones(3), "mask": torch.zeros(3), "kept": torch.ones(2)}
    for value in (1.0, 2.0):
        tensors = {name: t * value for name, t in whole.items() if name != "kept"}
        load_into(model, tensors, on_missing={"kept": "ignore"}, progress=False)
        assert model.kept.tolist() == [5, 5]
        assert model.cache.tolist() == [0, 1, 2]
        assert model.same_mask is model.mask
        assert bool((model.proj.weight == value).all())


def test_a_buffer_in_the_model_is_filled_by_what_was_a_parameter_elsewhere() -> None:
    model = nn.Linear(2, 2)
    del model.bias
    model.register_buffer("bias", torch.zeros(2))
    load_into(model, {"weight": torch.ones(2, 2), "bias": nn.Parameter(torch.ones(2))}, progress=False)
    assert model.bias.tolist() == [1, 1]
    assert not model.bias.requires_grad


# ------------------------------------------------------------------ policies


@pytest.mark.parametrize("form", ["catalogue", "stream"])
def test_policies_decide_about_missing_unexpected_and_mismatched(caplog: pytest.LogCaptureFixture, form: str) -> None:
    tensors = reference()
    del tensors["layers.1.o_proj.weight"]
    tensors["layers.0.k_proj.weight"] = torch.zeros(3, 6)
    tensors["lora_A"] = torch.zeros(3)

    def source() -> Any:
        return iter(tensors.items()) if form == "stream" else tensors

    with pytest.raises((PlanError, LoadError)):
        load_into(Model(), source(), progress=False)
    model = Model()
    before = model.layers[1].o_proj.weight.detach().clone(), model.layers[0].k_proj.weight.detach().clone()
    report = load_into(model, source(), on_missing="warn", on_mismatch={"**.k_proj.*": "warn"}, progress=False)
    assert (report.missing, report.unexpected) == (["layers.1.o_proj.weight"], ["lora_A"])
    assert report.mismatched == ["layers.0.k_proj.weight"]
    assert torch.equal(model.layers[1].o_proj.weight, before[0])
    assert torch.equal(model.layers[0].k_proj.weight, before[1])
    for name in ("layers.1.o_proj.weight", "layers.0.k_proj.weight", "lora_A"):
        assert sum(name in record.message for record in caplog.records) == 1
    with pytest.raises((PlanError, LoadError), match="lora_A"):
        load_into(Model(), source(), on_missing="ignore", on_mismatch="ignore", on_unexpected="error", progress=False)


@pytest.mark.parametrize("form", ["catalogue", "stream"])
def test_nothing_at_all_is_an_error_whatever_the_policy(form: str) -> None:
    for tensors in ({"other": torch.zeros(2)}, {}):
        for policy in ("warn", "ignore"):
            source: Any = iter(tensors.items()) if form == "stream" else tensors
            with pytest.raises((PlanError, CoverageError), match=r"nothing in the source|holds no tensors"):
                load_into(Model(), source, on_missing=policy, on_unexpected=policy, progress=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("on_missing", "never"), ("on_unexpected", None), ("on_mismatch", {"a": "b"}), ("progress", 3), ("verify", "md5")],
)
def test_an_option_that_means_nothing_is_refused_and_leaves_no_mark(option: str, value: Any) -> None:
    model = Model()
    before = digest(model)
    with pytest.raises(WeightLoadersError, match=option):
        load_into(model, reference(), **{option: value})
    assert digest(model) == before
    assert load_status(model) is None


# ------------------------------------------------------------------ fused parameters


class Fused(nn.Module):
    """Attention and MLP as inference engines have them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(6, 10)
        self.gate_up_proj = nn.Linear(6, 16, bias=False)
        self.down_proj = nn.Linear(8, 6, bias=False)


def parts() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint with separate projections, and what a fused model is to hold."""
    torch.manual_seed(4)
    rows = {"q_proj": 6, "k_proj": 2, "v_proj": 2, "gate_proj": 8, "up_proj": 8}
    tensors = {f"{name}.weight": torch.randn(n, 6) for name, n in rows.items()}
    tensors |= {f"{name}.bias": torch.randn(n) for name, n in rows.items() if name[0] in "qkv"}
    tensors["down_proj.weight"] = torch.randn(6, 8)
    fused = {
        "qkv_proj.weight": torch.cat([tensors[f"{n}_proj.weight"] for n in "qkv"]),
        "qkv_proj.bias": torch.cat([tensors[f"{n}_proj.bias"] for n in "qkv"]),
        "gate_up_proj.weight": torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]]),
        "down_proj.weight": tensors["down_proj.weight"],
    }
    return tensors, fused


YAML = """
convert:
  - {sources: [q_proj.*, k_proj.*, v_proj.*], targets: qkv_proj.*, function: fuse_qkv}
  - {sources: [gate_proj.weight, up_proj.weight], targets: gate_up_proj.weight, function: fuse_gate_up}
"""


def fused_by(way: str) -> tuple[Fused, Any]:
    model = Fused()
    if way == "python":
        return model, [
            Convert(["q_proj.*", "k_proj.*", "v_proj.*"], "qkv_proj.*", lambda q, k, v: torch.cat([q, k, v])),
            Convert(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", lambda *both: torch.cat(both)),
        ]
    if way == "yaml":
        return model, YAML
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return model, None


@pytest.mark.parametrize("way", ["python", "yaml", "packed_modules_mapping"])
@pytest.mark.parametrize("form", ["file", "stream", "borrowed stream"])
def test_fused_parameters_are_read_straight_from_their_parts(tmp_path: Path, way: str, form: str) -> None:
    tensors, fused = parts()
    save_file(tensors, tmp_path / "m.safetensors")
    model, rules = fused_by(way)
    if form == "file":
        plan = plan_load(model, tmp_path / "m.safetensors", rules=rules)
        assert {type(step).__name__ for step in plan.steps} == {"CopyStep"}
        report = load_into(model, tmp_path / "m.safetensors", rules=rules, progress=False)
        assert report.extra_memory == 0
    elif form == "stream":
        report = load_into(model, iter(tensors.items()), rules=rules, progress=False)
    else:
        report = load_into(model, "anywhere", loader=Reusing(tensors), rules=rules, progress=False)
    assert_filled(model, fused)
    assert sorted(report.loaded) == sorted(fused)
    assert report.bytes_read == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("form", ["file", "stream"])
def test_a_fused_parameter_without_one_part_is_an_error_with_its_parts(tmp_path: Path, form: str) -> None:
    tensors, _ = parts()
    del tensors["k_proj.bias"]
    save_file(tensors, tmp_path / "m.safetensors")
    model, rules = fused_by("yaml")
    before = digest(model)
    source: Any = iter(tensors.items()) if form == "stream" else tmp_path / "m.safetensors"
    with pytest.raises((PlanError, CoverageError), match=r"k_proj\.bias") as caught:
        load_into(model, source, rules=rules, progress=False)
    assert "q_proj.bias" in str(caught.value)
    if form == "file":
        assert digest(model) == before


def test_experts_that_come_one_by_one_are_stacked_as_soon_as_all_are_there() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ParameterDict({"up": torch.zeros(4, 3, 5)}) for _ in range(3))

    experts = {f"layers.{layer}.experts.{e}.up": torch.randn(3, 5) for layer in range(3) for e in (2, 0, 3, 1)}
    rules = [Convert("layers.*.experts.{e}.up", "layers.*.up", lambda ups: torch.stack(ups))]
    model = Experts()
    report = load_into(model, iter(experts.items()), rules=rules, progress=False)
    for layer in range(3):
        assert torch.equal(
            model.layers[layer]["up"], torch.stack([experts[f"layers.{layer}.experts.{e}.up"] for e in range(4)])
        )
    # A layer waits for its last expert, not for the last layer.
    assert report.extra_memory <= 5 * 3 * 5 * 4
    for lost in ("layers.1.experts.3.up", "layers.1.experts.1.up"):
        rest = {name: t for name, t in experts.items() if name != lost}
        with pytest.raises((CoverageError, LoadError), match=r"layers\.1"):
            load_into(Experts(), iter(rest.items()), rules=rules, progress=False)


# ------------------------------------------------------------------ streams


class Reusing(BaseWeightLoader):
    """Hands every tensor out in one buffer, and counts how far it was advanced."""

    borrowed = True

    def __init__(self, tensors: Any = None, fail_after: int | None = None) -> None:
        self.tensors, self.fail_after, self.given, self.closed = tensors, fail_after, 0, False

    def get_weights(self, model_name_or_path: str) -> Any:
        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(1000)
            try:
                for name, tensor in self.tensors.items():
                    if self.given == self.fail_after:
                        raise OSError(5, "the line went dead")
                    self.given += 1
                    if tensor.dtype != torch.float32:
                        yield name, tensor
                        continue
                    view = buffer[: tensor.numel()].view(tensor.shape)
                    view.copy_(tensor)
                    yield name, view
                    view.fill_(float("nan"))
            finally:
                self.closed = True

        return pairs()


def test_a_stream_that_reuses_its_buffer_fills_a_model_rightly() -> None:
    loader, model = Reusing(reference()), Model()
    events: list[Any] = []
    report = load_into(model, "anywhere", loader=loader, progress=events.append)
    assert_filled(model, reference())
    assert loader.closed
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == report.bytes_read
    assert {event.total_bytes for event in events} == {0}
    # One tensor at a time, not the sum of all.
    assert report.extra_memory < report.bytes_read / 2


def test_a_stream_that_fails_on_the_way_says_how_far_it_came_and_marks_the_model(tmp_path: Path) -> None:
    model, loader = Model(), Reusing(reference(), fail_after=4)
    with pytest.raises(LoadError, match="the line went dead") as caught:
        load_into(model, "anywhere", loader=loader, progress=False)
    assert list(caught.value.written) == sorted(list(reference())[:4])
    assert "after 4 tensors" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert loader.closed
    assert load_status(model) == "failed"
    for use in (
        lambda: save_weights(model, tmp_path / "saved"),
        lambda: save_weights(model.layers[0], tmp_path / "saved"),
    ):
        with pytest.raises(HalfLoadedModelError, match="half-loaded"):
            use()
    # A wrapper is no way round it.
    with pytest.raises(HalfLoadedModelError):
        save_weights(nn.Sequential(model), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    load_into(model, reference(), progress=False)
    assert load_status(model) == "loaded"
    save_weights(model, tmp_path / "saved")


@pytest.mark.parametrize("first", [3, ("a",), ("a", 3), (1, torch.zeros(1)), "ab", None], ids=repr)
def test_a_stream_of_something_else_is_refused_before_anything_is_touched(first: Any) -> None:
    model = Model()
    before = digest(model)
    with pytest.raises(LoaderContractError, match="pairs"):
        load_into(model, iter([first]), progress=False)
    assert digest(model) == before
    assert load_status(model) is None


def test_a_stream_that_turns_into_something_else_marks_the_model() -> None:
    model = Model()
    with pytest.raises(LoadError, match="pairs") as caught:
        load_into(model, iter([*list(reference().items())[:2], "nonsense"]), progress=False)
    assert len(caught.value.written) == 2
    assert load_status(model) == "failed"


def test_a_name_that_comes_twice_in_a_stream_must_bring_the_same_values() -> None:
    pairs = list(reference().items())
    nan = torch.full((6,), float("nan"))
    pairs = [(name, nan if name == "norm.bias" else tensor) for name, tensor in pairs]
    load_into(Model(), iter([*pairs, ("norm.bias", nan.clone()), pairs[0]]), progress=False)
    with pytest.raises(LoadError, match=r"norm\.weight"):
        load_into(Model(), iter([*pairs, ("norm.weight", torch.zeros(6))]), progress=False)


def test_a_wrong_tensor_in_a_stream_is_named_when_it_comes() -> None:
    tensors = reference()
    tensors["layers.0.o_proj.weight"] = torch.zeros(6, 7)
    loader = Reusing(tensors)
    with pytest.raises(LoadError, match=r"layers\.0\.o_proj\.weight") as caught:
        load_into(Model(), "anywhere", loader=loader, progress=False)
    assert caught.value.tensor == "layers.0.o_proj.weight"
    assert loader.given == list(tensors).index("layers.0.o_proj.weight") + 1


def test_names_in_a_stream_may_carry_a_known_prefix_or_wrapper() -> None:
    for prefix in ("module.", "model.", "module._orig_mod."):
        model = Model()
        load_into(model, ((prefix + name, tensor) for name, tensor in reference().items()), progress=False)
        assert_filled(model, reference())


def test_a_stream_on_meta_fills_and_ties() -> None:
    with torch.device("meta"):
        model = Model()
    load_into(model, iter(reference().items()), progress=False)
    assert_filled(model, reference())


# ------------------------------------------------------------------ failures on the way


def failing(tensors: dict[str, torch.Tensor], name: str, error: BaseException) -> Weights:
    def read(key: str) -> torch.Tensor:
        if key == name:
            raise error
        return tensors[key]

    return Weights.describe(
        TensorInfo(key, t.dtype, t.shape, read=lambda key=key: read(key))
        for key, t in tensors.items()  # type: ignore[misc]
    )


def test_a_reader_that_fails_is_named_what_was_written_listed_and_a_reload_heals() -> None:
    model = Model()
    with pytest.raises(LoadError, match=r"layers\.0\.v_proj\.bias.*KeyError") as caught:
        load_into(model, failing(reference(), "layers.0.v_proj.bias", KeyError("x")), progress=False)
    assert caught.value.tensor == "layers.0.v_proj.bias"
    assert "embed_tokens.weight" in caught.value.written
    assert "norm.weight" not in caught.value.written
    assert load_status(model) == "failed"
    # An error of the plan touches nothing, so it heals nothing either.
    with pytest.raises(PlanError):
        load_into(model, {"norm.weight": torch.zeros(6)}, progress=False)
    assert load_status(model) == "failed"
    load_into(model, reference(), progress=False)
    assert load_status(model) == "loaded"


def test_a_file_cut_short_while_it_is_read_is_named_and_marks_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than one read, so that there is something left to be read.
    monkeypatch.setattr(jobs, "STRAIGHT_CHUNK", 64)
    save_file(reference(), tmp_path / "m.safetensors")
    model = Model()

    def cut(event: Any) -> None:
        if event.done_bytes:
            os.truncate(tmp_path / "m.safetensors", 1500)

    with pytest.raises(LoadError) as caught:
        load_into(model, tmp_path / "m.safetensors", progress=cut)
    assert caught.value.file == str(tmp_path / "m.safetensors")
    assert caught.value.tensor in caught.value.written
    assert isinstance(caught.value.__cause__, SourceReadError)
    assert load_status(model) == "failed"


def test_a_file_that_changed_since_the_plan_is_refused_when_the_plan_is_run(tmp_path: Path) -> None:
    save_file(reference(), tmp_path / "m.safetensors")
    model = Model()
    plan = plan_load(model, tmp_path / "m.safetensors")
    save_file(reference(2), tmp_path / "m.safetensors")
    os.utime(tmp_path / "m.safetensors", ns=(5, 5))
    with pytest.raises(LoadError, match="changed after it was catalogued"):
        plan.run(model)


def test_a_plan_of_closed_weights_is_refused(tmp_path: Path) -> None:
    save_file(reference(), tmp_path / "m.safetensors")
    model = Model()
    with open_weights(tmp_path / "m.safetensors") as weights:
        plan = plan_load(model, weights)
    with pytest.raises(SourceClosedError):
        plan.run(model)
    assert load_status(model) is None


@pytest.mark.parametrize(
    "nothing", [None, 3, "a string", b"bytes", torch.zeros(3), object()], ids=lambda value: type(value).__name__
)
def test_a_loader_that_returns_no_weights_is_told_so(nothing: Any) -> None:
    class Odd(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            return nothing

    model = Model()
    before = digest(model)
    with pytest.raises(LoaderContractError, match="weights are"):
        load_into(model, "anywhere", loader=Odd, progress=False)
    assert digest(model) == before
    assert load_status(model) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyError("x"), SourceError), (FileNotFoundError(2, "no"), SourceNotFoundError), (RuntimeError(), SourceError)],
    ids=repr,
)
def test_a_loader_that_fails_to_open_is_named(error: Exception, kind: type[SourceError]) -> None:
    class Failing(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            raise error

    for call in (lambda: load_into(Model(), "the/source", loader=Failing), lambda: open_weights("the/source", Failing)):
        with pytest.raises(kind, match=r"Failing\.get_weights\('the/source'\) failed") as caught:
            call()
        assert caught.value.plugin == "Failing"
        assert caught.value.__cause__ is error


# ------------------------------------------------------------------ what is left behind


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells its open files otherwise")
def test_no_file_stays_open_and_none_is_mapped_on_any_path(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file(reference(), good)
    save_file({k: v for k, v in reference().items() if "o_proj" not in k}, bad)
    closed: list[str] = []

    class Opening(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            infos = open_weights(model_name_or_path).infos()
            return Weights.describe(infos, close=lambda: closed.append(model_name_or_path))

    class Own(Opening):
        def load_weights(self, model: nn.Module, weights: Any) -> None:
            for name, tensor in weights.items():
                model.state_dict()[name].copy_(tensor)

    before = open_files()
    for loader in ("auto", Opening, Own):
        load_into(Model(), good, loader=loader, progress=False)
        with pytest.raises(WeightLoadersError):
            load_into(Model(), bad, loader=loader, progress=False)
    with pytest.raises(LoadError):
        load_into(Model(), good, progress=lambda event: event.done_bytes // 0)
    model = Model()
    plan = plan_load(model, good)  # kept: what is dropped closes its files by itself
    plan.run(model)
    assert closed == [str(good), str(bad)] * 2
    assert open_files() == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_load_does_not_keep_its_model_alive() -> None:
    import gc
    import weakref

    model = Model()
    with pytest.raises(LoadError):
        load_into(model, failing(reference(), "norm.bias", OSError("x")), progress=False)
    load_into(model, reference(), progress=False)
    reference_to_it = weakref.ref(model)
    del model
    gc.collect()
    assert reference_to_it() is None


def test_a_mark_goes_with_its_model_and_does_not_fall_on_another() -> None:
    for _ in range(50):
        model = Model(layers=0)
        assert load_status(model) is None
        with pytest.raises(LoadError):
            load_into(model, failing(reference(layers=0), "norm.bias", OSError("x")), progress=False)
        assert load_status(model) == "failed"
        del model


# ------------------------------------------------------------------ loads at once, and inside each other


def test_loads_in_several_threads_at_once_each_get_their_own(tmp_path: Path) -> None:
    references = [reference(seed) for seed in range(4)]
    for seed in range(4):
        save_file(references[seed], tmp_path / f"{seed}.safetensors")
    models = [Model() for _ in range(4)]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for policy in ("error", "ignore"):
                extra = {} if policy == "error" else {"on_missing": "ignore", "rules": [Rename("nothing", "else")]}
                load_into(models[seed], tmp_path / f"{seed}.safetensors", progress=False, **extra)
                load_into(models[seed], iter(references[seed].items()), progress=False, **extra)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for model, tensors in zip(models, references, strict=True):
        assert_filled(model, tensors)


def test_a_load_inside_a_load_is_a_load_of_its_own(tmp_path: Path) -> None:
    save_file(reference(), tmp_path / "m.safetensors")
    inner = Model()

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        # The outer load's policies are not the inner one's.
        with pytest.raises(PlanError):
            load_into(inner, {"norm.weight": torch.ones(6)}, progress=False)
        load_into(inner, tmp_path / "m.safetensors", progress=False)
        for name, tensor in inner.state_dict().items():
            if name != "norm.bias":
                yield name, tensor

    outer = Model()
    report = load_into(outer, pairs(), on_missing="ignore", progress=False)
    assert report.missing == ["norm.bias"]
    assert_filled(inner, reference())
    assert_filled(outer, {k: v for k, v in reference().items() if k != "norm.bias"})


def test_a_second_load_of_a_model_is_refused_while_one_is_running(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in reference(1).items():
            yield name, tensor
            started.set()
            go_on.wait(30)

    model = Model()
    plan = plan_load(model, reference(2))
    first = threading.Thread(target=load_into, args=(model, pairs()), kwargs={"progress": False})
    first.start()
    started.wait(30)
    try:
        for second in (lambda: load_into(model, reference(2), progress=False), lambda: plan.run(model)):
            with pytest.raises(LoadError, match="a load of this model is running"):
                second()
    finally:
        go_on.set()
        first.join()
    assert_filled(model, reference(1))
    load_into(model, reference(2), progress=False)


@pytest.mark.parametrize("way", ["catalogue", "override"])
def test_a_progress_function_can_not_load_into_the_model_that_is_being_loaded(way: str) -> None:
    class Override(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            return iter(reference().items())

        def load_weights(self, model: nn.Module, weights: Any) -> None:
            model.load_state_dict(dict(weights))

    model = Model()
    options: dict[str, Any] = {} if way == "catalogue" else {"loader": Override}
    with pytest.raises(LoadError, match="a load of this model is running"):
        load_into(
            model,
            reference() if way == "catalogue" else "anywhere",
            progress=lambda event: load_into(model, reference(2), progress=False),
            **options,
        )


# ------------------------------------------------------------------ whose memory it is


@pytest.mark.parametrize("form", ["dict", "pairs"])
def test_a_function_of_a_rule_may_work_in_place_and_the_source_stays_as_it_was(form: str) -> None:
    tensors = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    for _ in range(2):
        model = nn.Linear(4, 4)
        source = tensors if form == "dict" else iter(tensors.items())
        load_into(model, source, rules=[Convert("weight", "weight", lambda w: w.mul_(2))], progress=False)
        assert torch.equal(model.weight, torch.full((4, 4), 2.0))
    assert torch.equal(tensors["weight"], torch.ones(4, 4))


def test_a_parameters_own_loader_may_work_in_place_and_the_source_stays_as_it_was() -> None:
    model = nn.Linear(4, 4)
    model.weight.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor.mul_(2))  # type: ignore[attr-defined]
    tensors = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    load_into(model, tensors, progress=False)
    assert torch.equal(tensors["weight"], torch.ones(4, 4))


def test_parameters_can_be_exchanged_with_each_other() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first, second = (layer.weight.detach().clone() for layer in model)
    load_into(model, {"0.weight": model[1].weight, "1.weight": model[0].weight}, progress=False)
    assert torch.equal(model[0].weight, second)
    assert torch.equal(model[1].weight, first)


def test_a_parameter_that_lies_over_itself_is_refused_before_anything_changes() -> None:
    for tensor in (torch.zeros(10).as_strided((3, 4), (2, 1)), torch.zeros(1, 4).expand(3, 4)):
        model = nn.Linear(4, 3)
        model.weight = nn.Parameter(tensor)
        before = model.bias.detach().clone()
        with pytest.raises(ModelError, match="several elements in one place") as caught:
            load_into(model, {"bias": torch.ones(3), "weight": torch.ones(3, 4)}, progress=False)
        assert caught.value.tensor == "weight"
        assert torch.equal(model.bias, before)
    # What only looks like it is fine.
    model.weight = nn.Parameter(torch.zeros(4, 3).t())
    load_into(model, {"bias": torch.ones(3), "weight": torch.ones(3, 4)}, progress=False)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_a_parameter_that_is_not_dense_is_refused_before_anything_changes(kind: str) -> None:
    model = nn.Linear(4, 4)
    tensor = torch.eye(4).to_sparse() if kind == "sparse" else torch.nested.nested_tensor([torch.ones(2)])
    model.weight = nn.Parameter(tensor)
    before = model.bias.detach().clone()
    with pytest.raises(ModelError, match=kind) as caught:
        load_into(model, {"bias": torch.ones(4), "weight": torch.ones(4, 4)}, progress=False)
    assert caught.value.tensor == "weight"
    assert torch.equal(model.bias, before)


@pytest.mark.parametrize("model", [nn.Linear, None, "x", {}], ids=repr)
def test_what_is_no_model_is_said_to_be_none(model: Any) -> None:
    for call in (load_into, plan_load):
        with pytest.raises(
            ModelError, match=r"an nn\.Module is expected, not (the class Linear|a (NoneType|str|dict))"
        ):
            call(model, reference())


def test_a_device_that_is_set_as_the_default_does_not_matter(tmp_path: Path) -> None:
    tensors = reference()
    save_file({k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}, tmp_path / "m.safetensors")
    model, odd = Model(), nn.Linear(4, 4)
    odd.weight = nn.Parameter(torch.zeros(4, 4).t())
    with torch.device("meta"):
        load_into(model, tmp_path / "m.safetensors", progress=False)
        load_into(odd, {"weight": torch.ones(4, 4, device="cpu"), "bias": torch.ones(4, device="cpu")}, progress=False)
    assert_filled(model, tensors)
    assert torch.equal(odd.weight, torch.ones(4, 4))


def test_a_copy_of_a_half_loaded_model_is_half_loaded_until_it_is_loaded() -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(4, 4)
        raise ValueError("gone")

    model = nn.Linear(4, 4)
    with pytest.raises(LoadError):
        load_into(model, pairs(), progress=False)
    copied = copy.deepcopy(model)
    assert load_status(copied) == load_status(pickle.loads(pickle.dumps(model))) == "failed"
    load_into(copied, {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, progress=False)
    assert load_status(copied) == "loaded"
    assert load_status(model) == "failed"


# ------------------------------------------------------------------ verification


def test_verify_finite_names_what_is_not(tmp_path: Path) -> None:
    tensors = reference()
    load_into(Model(), tensors, verify="finite", progress=False)
    for value in (float("nan"), float("inf"), float("-inf")):
        tensors["layers.1.k_proj.bias"] = torch.tensor([1.0, value])
        for source in (dict(tensors), iter(tensors.items())):
            model = Model()
            with pytest.raises(LoadError, match=r"NaN or infinity: layers\.1\.k_proj\.bias") as caught:
                load_into(model, source, verify="finite", progress=False)
            assert caught.value.tensor == "layers.1.k_proj.bias"
            assert set(caught.value.written) == set(tensors)
            assert load_status(model) == "failed"
        load_into(Model(), dict(tensors), progress=False)


def test_verify_sha256_holds_the_files_against_what_is_known(tmp_path: Path) -> None:
    import hashlib

    file = tmp_path / "m.safetensors"
    save_file(reference(), file)
    model = Model()
    before = digest(model)
    digits = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(SourceReadError, match="no checksum is known"):
        load_into(model, file, verify="sha256", progress=False)
    manifests = {
        "m.safetensors.sha256": f"{digits}  m.safetensors\n",
        "SHA256SUMS": f"{'0' * 64} *other\n{digits} *m.safetensors\n",
    }
    for name, text in manifests.items():
        (tmp_path / name).write_text(text)
        load_into(Model(), file, verify="sha256", progress=False)
        (tmp_path / name).write_text(text.replace(digits, "1" + digits[1:] if digits[0] != "1" else "2" + digits[1:]))
        with pytest.raises(SourceReadError, match="has the checksum") as caught:
            load_into(model, file, verify="sha256", progress=False)
        assert caught.value.file == str(file)
        (tmp_path / name).unlink()
    # As in the hub's cache: the file's name is a link to a blob that is named after its checksum.
    (tmp_path / digits).write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(digits)
    load_into(Model(), file, verify="sha256", progress=False)
    assert digest(model) == before


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["m.safetensors.sha256", "SHA256SUMS"])
def test_verify_sha256_reads_checksums_only_from_a_file_of_a_sensible_size(tmp_path: Path, name: str) -> None:
    file = tmp_path / "m.safetensors"
    save_file(reference(), file)
    model = Model()
    before = digest(model)
    for make, said in (
        (os.mkfifo, "not a regular file"),
        (sparse_file, "too large"),
        (lambda path: path.write_bytes(b"\xff\xfe0\0"), "UTF-8"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
    ):
        make(tmp_path / name)
        with pytest.raises(SourceError, match=f"(?s){name}.*{said}"):
            load_into(model, file, verify="sha256", progress=False)
        (tmp_path / name).unlink()
    assert digest(model) == before


def test_verify_sha256_is_refused_where_there_is_no_file_to_check() -> None:
    class Override(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            return reference()

        def load_weights(self, model: nn.Module, weights: Any) -> None:
            model.load_state_dict(weights)

    model = Model()
    before = digest(model)
    for source, options in ((reference(), {}), (iter(reference().items()), {}), ("anywhere", {"loader": Override})):
        with pytest.raises(ConfigError, match="sha256"):
            load_into(model, source, verify="sha256", progress=False, **options)
    assert digest(model) == before


# ------------------------------------------------------------------ hooks


HOOKS = """
from weightloaders import hookimpl
from weightloaders.errors import PlanError

calls, veto, shorten, rules = [], False, False, None

@hookimpl
def rules_for(model):
    calls.append("rules_for")
    return rules

@hookimpl
def before_load(plan):
    calls.append("before_load")
    if veto:
        raise PlanError("not on a Friday")
    if shorten:
        plan.steps.pop()

@hookimpl
def on_progress(event):
    calls.append("on_progress")

@hookimpl
def after_load(report):
    calls.append(("after_load", len(report.loaded)))
"""


@pytest.fixture
def hook_calls(tmp_path: Path) -> Iterator[Any]:
    """A hook plugin that notes what it is called for."""
    entry_points = {"weightloaders.hooks": {"observer": "observing_hooks"}}
    with (
        fake_distribution(tmp_path, "observer", entry_points=entry_points, modules={"observing_hooks": HOOKS}),
        isolated_registry(),
    ):
        yield importlib.import_module("observing_hooks")


class ByHand(BaseWeightLoader):
    """Overrides `load_weights` in the classic way."""

    def get_weights(self, model_name_or_path: str) -> Any:
        return reference()

    def load_weights(self, model: nn.Module, weights: Any) -> None:
        model.load_state_dict(weights, strict=False)


class Calling(ByHand):
    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        return super(ByHand, self).load_weights(model, weights)


WAYS: dict[str, Callable[[nn.Module], LoadReport]] = {
    "catalogue": lambda model: load_into(model, reference(), progress=False),
    "stream": lambda model: load_into(model, iter(reference().items()), progress=False),
    "loader": lambda model: load_into(model, "x", loader=ByHand, progress=False),
    "loader calling the default": lambda model: load_into(model, "x", loader=Calling, progress=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_see_every_load_once(hook_calls: Any, way: str) -> None:
    WAYS[way](Model())
    kinds = [call if isinstance(call, str) else call[0] for call in hook_calls.calls]
    assert kinds.count("after_load") == 1
    assert kinds[-1] == "after_load"
    assert "before_load" in kinds
    assert ("after_load", len(reference())) in hook_calls.calls
    if way in ("catalogue", "stream"):
        assert "on_progress" in kinds


@pytest.mark.parametrize("way", WAYS)
def test_a_veto_leaves_the_model_as_it_was(hook_calls: Any, way: str) -> None:
    hook_calls.veto = True
    model = Model()
    before = digest(model)
    with pytest.raises(PlanError, match="not on a Friday") as caught:
        WAYS[way](model)
    assert "observer" in str(caught.value.plugin)
    assert digest(model) == before
    assert load_status(model) is None
    assert not any(call[0] == "after_load" for call in hook_calls.calls)


def test_a_hook_that_takes_steps_out_of_a_plan_is_refused_by_name(hook_calls: Any) -> None:
    hook_calls.shorten = True
    model = Model()
    before = digest(model)
    with pytest.raises(PlanError, match=r"observer.* changed the steps"):
        load_into(model, reference(), progress=False)
    assert digest(model) == before


def test_rules_of_a_hook_are_used_and_named(hook_calls: Any) -> None:
    hook_calls.rules = [Rename("backbone", "")]
    model = Model()
    report = load_into(model, {f"backbone.{k}": v for k, v in reference().items()}, progress=False)
    assert_filled(model, reference())
    assert any("observer" in who for who in report.decided_by)


# ------------------------------------------------------------------ default_weight_loader


def test_the_default_weight_loader_copies_and_casts_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    value = torch.randn(2, 3)
    default_weight_loader(parameter, value)
    assert torch.equal(parameter, value.bfloat16())
    scalar = nn.Parameter(torch.zeros(()))
    default_weight_loader(scalar, torch.ones(1))
    assert scalar.shape == ()
    assert float(scalar.detach()) == 1
    with torch.inference_mode():
        made = torch.zeros(2)
    default_weight_loader(made, torch.ones(2))
    assert made.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("parameter", "value", "kind"),
    [
        (torch.zeros(2, 3), torch.ones(3), PlanError), (torch.zeros(2, 3), torch.ones(3, 2), PlanError),
        (torch.zeros(2), torch.ones(2, dtype=torch.int8), PlanError),
        (torch.zeros(2), torch.ones(2, dtype=torch.float8_e4m3fn), PlanError),
        (torch.zeros(2, device="meta"), torch.ones(2), PlanError), (torch.zeros(2), [1, 1], LoaderContractError),
        ("w", torch.ones(2), LoaderContractError),
    ],
    ids=str,
)  # fmt: skip
def test_the_default_weight_loader_refuses_what_does_not_fit(parameter: Any, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        default_weight_loader(parameter, value)
    if isinstance(parameter, torch.Tensor) and parameter.device.type == "cpu":
        assert not parameter.any()


def test_extents_of_ones_own_format_are_loaded_like_any(tmp_path: Path) -> None:
    (tmp_path / "weights.raw").write_bytes(b"HEAD" + torch.arange(6.0).numpy().tobytes())

    class Raw(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Weights:
            return Weights.describe([TensorInfo("weight", torch.float32, (2, 3), Extent(model_name_or_path, 4))])

    model = nn.Linear(3, 2, bias=False)
    report = load_into(model, tmp_path / "weights.raw", loader=Raw, progress=False)
    assert torch.equal(model.weight, torch.arange(6.0).view(2, 3))
    assert report.loader == "Raw"


def test_a_stream_that_gives_one_name_twice_is_told_so_and_not_to_drop_it():
    class Twice(BaseWeightLoader):
        def get_weights(self, model_name_or_path):
            yield "weight", torch.ones(2, 2)
            yield "bias", torch.ones(2)
            yield "weight", torch.zeros(2, 2)

    with pytest.raises(LoadError, match=r"the source gives 'weight' twice") as caught:
        load_into(torch.nn.Linear(2, 2), "x", loader=Twice)
    assert "Drop" not in str(caught.value)


def test_a_tensor_that_waits_for_its_shape_is_no_weight():
    waiting = {"weight": torch.nn.parameter.UninitializedParameter(), "bias": torch.ones(2)}
    with pytest.raises(LoaderContractError, match="'weight' waits for its shape"):
        load_into(torch.nn.Linear(2, 2), waiting)
