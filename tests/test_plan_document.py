"""A plan as a document: written down, read back, proved, and run; and what becomes of documents that are not true."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from weightloaders import Convert, Extent, LoadPlan, Rename, TensorInfo, Weights, load_into, open_weights, plan_load
from weightloaders.errors import ConfigError, PlanError, RuleError, SourceReadError, WeightLoadersError
from weightloaders.plan import CallStep, ComputeStep, CopyStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


def halved(w: torch.Tensor) -> torch.Tensor:
    """A function of a rule that computes."""
    return w * 0.5


def scaled(w: torch.Tensor, *, by: float) -> torch.Tensor:
    return w * by


class Model(nn.Module):
    """Something of everything that a plan can say."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(16, 4))  # interleaved
        self.flipped = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))  # transposed and cast
        self.padded = nn.Parameter(torch.zeros(8, 4))  # filled up with a constant
        self.normed = nn.Parameter(torch.zeros(4, 4))  # computed, by a ready-made layout
        self.plain = nn.Linear(4, 3)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.plain.weight


RULES = [
    Convert(["q", "k", "v"], "qkv", "fuse_qkv_interleaved", heads=4, kv_heads=2, head_dim=2),
    Convert("f", "flipped", "transpose"),
    Convert("p", "padded", "pad_rows", rows=8),
    Convert(["n.g", "n.v"], "normed", "weight_norm"),
    Rename("linear", "plain"),
]


def tensors() -> Tensors:
    torch.manual_seed(0)
    shapes = {
        "q": (8, 4), "k": (4, 4), "v": (4, 4), "f": (4, 6), "p": (5, 4), "n.g": (4, 1), "n.v": (4, 4),
        "linear.weight": (3, 4), "linear.bias": (3,), "extra": (2,),
    }  # fmt: skip
    return {name: torch.rand(shape) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    split = list(tensors().items())
    save_file(dict(split[:5]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(split[5:]), folder / "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{1 + (at >= 5)}-of-00002.safetensors" for at, (name, _) in enumerate(split)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture
def text(folder: Path) -> str:
    return plan_load(Model(), folder, rules=RULES).to_json()


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def changed(text: str, change: Callable[[Any], object]) -> str:
    """The document with a change, and with the fingerprint that goes with it."""
    from weightloaders.plan import document as doc

    data = json.loads(text)
    change(data)
    model, source = doc.ModelData.model_validate(data["model"]), doc.SourceData.model_validate(data["source"])
    data["fingerprint"] = doc.fingerprint(model, source).model_dump()
    return json.dumps(data)


def steps(data: Any, target: str) -> Any:
    return next(s for s in data["steps"] if target in (s.get("target"), *s.get("targets", ())))


# ------------------------------------------------------------------ there and back


def test_a_plan_read_back_loads_the_same_bits_as_a_fresh_one(folder: Path, text: str) -> None:
    fresh, again = Model(), Model()
    report = load_into(fresh, folder, rules=RULES, progress=False)
    read = LoadPlan.from_json(text)
    assert read.ok
    proved = plan_load(again, folder, plan=read)
    told = proved.run(again)
    assert same(fresh, again)
    assert again.head.weight is again.plain.weight
    assert (told.loaded, told.cast, told.tied, told.unexpected) == (
        report.loaded, report.cast, report.tied, report.unexpected,
    )  # fmt: skip
    assert (told.bytes_read, told.sources) == (report.bytes_read, report.sources)


def test_what_is_written_again_is_the_same_text(folder: Path, text: str) -> None:
    read = LoadPlan.from_json(text)
    assert read.to_json() == text
    assert plan_load(Model(), folder, plan=read).to_json() == text
    assert LoadPlan.from_json(text.encode()).to_json() == text


def test_a_plan_read_back_can_be_looked_at_without_model_and_files(folder: Path, text: str) -> None:
    plan = plan_load(Model(), folder, rules=RULES)
    shutil.rmtree(folder)
    read = LoadPlan.from_json(text)
    assert str(read) == str(plan)
    assert read.forecast == plan.forecast
    for name in ("qkv", "flipped", "padded", "normed", "plain.weight", "head.weight", "q", "extra"):
        assert read.explain(name) == plan.explain(name)


def test_a_plan_read_back_does_not_run_before_it_is_proved(text: str) -> None:
    model = Model()
    with pytest.raises(PlanError, match=r"nothing that could run it\n.*plan_load\(model, weights, plan=plan\)"):
        LoadPlan.from_json(text).run(model)
    read = LoadPlan.from_json(text)
    computed = next(step for step in read.steps if isinstance(step, ComputeStep))
    with pytest.raises(PlanError, match="not proved"):
        computed.function([])
    with pytest.raises(PlanError, match="not proved"):
        computed.sources[0].extents[0].source.read(0, 1)  # type: ignore[union-attr]


def test_a_checkpoint_that_was_moved_is_still_the_same(folder: Path, text: str, tmp_path: Path) -> None:
    shutil.move(folder, tmp_path / "elsewhere")
    fresh, again = Model(), Model()
    load_into(fresh, tmp_path / "elsewhere", rules=RULES, progress=False)
    plan_load(again, tmp_path / "elsewhere", plan=LoadPlan.from_json(text)).run(again)
    assert same(fresh, again)


def test_a_plan_serves_the_next_checkpoint_of_the_same_layout(folder: Path, text: str) -> None:
    """It speaks of where bytes lie, not of what they are."""
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    fresh, again = Model(), Model()
    load_into(fresh, folder, rules=RULES, progress=False)
    plan_load(again, folder, plan=LoadPlan.from_json(text)).run(again)
    assert same(fresh, again)


def test_a_plan_made_on_meta_serves_a_model_with_memory_and_the_other_way_round(folder: Path, text: str) -> None:
    with torch.device("meta"):
        on_meta = Model()
    assert plan_load(on_meta, folder, rules=RULES).to_json() == text
    plan_load(on_meta, folder, plan=LoadPlan.from_json(text)).run(on_meta)
    fresh = Model()
    load_into(fresh, folder, rules=RULES, progress=False)
    assert same(fresh, on_meta)


def test_tensors_without_raw_bytes_are_read_by_their_loader(folder: Path) -> None:
    text = plan_load(Model(), tensors(), rules=RULES).to_json()
    fresh, again = Model(), Model()
    load_into(fresh, folder, rules=RULES, progress=False)
    plan_load(again, tensors(), plan=LoadPlan.from_json(text)).run(again)
    assert same(fresh, again)
    with pytest.raises(PlanError, match="the source has a new file"):
        plan_load(Model(), folder, plan=LoadPlan.from_json(text))


def test_extents_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    values = torch.rand(4, 6)
    (tmp_path / "data.bin").write_bytes(values.numpy().tobytes() + values.half().numpy().byteswap().tobytes())
    file = tmp_path / "data.bin"
    infos = [
        TensorInfo("boxes", torch.float32, (4, 6), [
            Extent(file, 0, shape=(4, 2), strides=(6, 1), at=(0, 0)),
            Extent(file, 8, shape=(4, 4), strides=(6, 1), at=(0, 2)),
        ]),
        TensorInfo("other", torch.float32, (4, 6), Extent(file, 96, dtype=torch.float16, byteorder="big")),
    ]  # fmt: skip
    model = nn.Module()
    model.boxes, model.other = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4, 6))
    text = plan_load(model, Weights.describe(infos)).to_json()
    assert LoadPlan.from_json(text).to_json() == text
    plan_load(model, Weights.describe(infos), plan=LoadPlan.from_json(text)).run(model)
    assert torch.equal(model.boxes.data, values)
    assert torch.equal(model.other.data, values.half().float())


def test_policies_are_in_what_they_led_to(folder: Path) -> None:
    model = Model()
    model.more = nn.Linear(2, 2)
    plan = plan_load(model, folder, rules=RULES, on_missing={"more": "warn"}, on_unexpected="ignore")
    read = LoadPlan.from_json(plan.to_json())
    assert [(f.severity, f.text) for f in read.findings] == [(f.severity, f.text) for f in plan.findings]
    before = model.more.weight.clone()
    report = plan_load(model, folder, plan=read).run(model)
    assert report.missing == ["more.weight", "more.bias"]
    assert torch.equal(before, model.more.weight)
    for option in ({"rules": RULES}, {"on_missing": "ignore"}, {"automatic": False}):
        with pytest.raises(ConfigError, match="rules and policies of its own"):
            plan_load(model, folder, plan=read, **option)  # type: ignore[arg-type]


def test_a_plan_with_errors_is_a_document_that_does_not_run(folder: Path) -> None:
    model = Model()
    model.more = nn.Linear(2, 2)
    plan = plan_load(model, folder, rules=RULES)
    read = LoadPlan.from_json(plan.to_json())
    assert not read.ok
    assert [str(finding) for finding in read.errors] == [str(finding) for finding in plan.errors]
    with pytest.raises(PlanError, match="does not fit the model"):
        plan_load(model, folder, plan=read).run(model)


class Own(nn.Module):
    """A parameter with its own loader, and one that is declared to be packed."""

    packed_modules_mapping: ClassVar[Any] = {"qkv": ["q", "k"], "gu": ["g", "u"]}

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(4, 2))
        self.qkv.weight_loader = self.load  # type: ignore[attr-defined]
        self.gu = nn.Parameter(torch.zeros(4, 2))

    def load(self, parameter: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
        parameter.data["qk".index(shard) * 2 :][:2].copy_(tensor)


def test_parameters_own_loaders_get_their_parts(tmp_path: Path) -> None:
    parts = {name: torch.rand(2, 2) for name in "qkgu"}
    save_file(parts, tmp_path / "model.safetensors")
    fresh, again = Own(), Own()
    load_into(fresh, tmp_path, progress=False)
    plan = plan_load(again, tmp_path)
    assert {type(step) for step in plan.steps} == {CallStep, CopyStep}
    plan_load(again, tmp_path, plan=LoadPlan.from_json(plan.to_json())).run(again)
    assert same(fresh, again)
    del again.qkv.weight_loader
    with pytest.raises(PlanError, match="'qkv' has no weight_loader of its own"):
        plan_load(again, tmp_path, plan=LoadPlan.from_json(plan.to_json()))


def test_a_transformers_model_is_loaded_by_a_plan_that_the_command_line_wrote(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from typer.testing import CliRunner

    from weightloaders.cli.main import app

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    text = CliRunner().invoke(app, ["plan", str(tmp_path), "--json", "--quiet"]).stdout
    model = LlamaForCausalLM(config)
    plan_load(model, tmp_path, plan=LoadPlan.from_json(text)).run(model)
    expected = LlamaForCausalLM.from_pretrained(tmp_path)
    assert same(model, expected)


def test_conversions_of_transformers_that_compute_are_found_again(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    from weightloaders.skeleton import build_skeleton

    if not hasattr(FineGrainedFP8HfQuantizer, "get_load_operations"):
        pytest.skip("refused with this version of transformers: see test_older_transformers.py")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    stored: Tensors = {}
    for name, weight in LlamaForCausalLM(config).to(torch.bfloat16).state_dict().items():
        is_linear = weight.dim() == 2 and ".layers." in name
        stored[name] = weight.to(torch.float8_e4m3fn) if is_linear else weight
        if is_linear:
            stored[f"{name}_scale_inv"] = torch.rand(2, 2)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16], "dequantize": True}
    config.quantization_config = method
    config.save_pretrained(tmp_path)

    fresh, again = build_skeleton(str(tmp_path)).model, build_skeleton(str(tmp_path)).model
    plan = plan_load(fresh, tmp_path)
    computed = [step for step in plan.steps if isinstance(step, ComputeStep)]
    assert len(computed) == 7
    text = plan.to_json()
    plan.run(fresh)
    plan_load(again, tmp_path, plan=LoadPlan.from_json(text)).run(again)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), again.parameters(), strict=True))

    target = next(iter(computed[0].targets))
    bad = changed(text, lambda data: steps(data, target)["function"].update(operations=["Elsewhere"]))
    with pytest.raises(RuleError, match=f"no conversion by Elsewhere for {target} any more"):
        plan_load(build_skeleton(str(tmp_path)).model, tmp_path, plan=LoadPlan.from_json(bad))


# ------------------------------------------------------------------ functions


def test_a_function_of_a_module_runs_if_it_is_trusted(folder: Path) -> None:
    name = f"{__name__}:scaled"
    model = nn.Linear(4, 3)
    rules = [Rename("linear", ""), Convert("linear.weight", "weight", scaled, by=3.0)]
    text = plan_load(model, folder, rules=rules).to_json()
    assert json.loads(text)["runnable"]
    with pytest.raises(RuleError, match=rf"scaled.* would run '{name}'") as caught:
        plan_load(model, folder, plan=LoadPlan.from_json(text))
    assert caught.value.tensor == "weight"
    assert f"trust=['{name}']" in str(caught.value)
    for trust in (scaled, name):
        again = nn.Linear(4, 3)
        plan_load(again, folder, plan=LoadPlan.from_json(text), trust=[trust]).run(again)
        assert torch.equal(again.weight.data, tensors()["linear.weight"] * 3.0)


@pytest.mark.parametrize("make", [lambda: lambda w: w * 2, lambda: functools.partial(scaled, by=2.0), lambda: local()])
def test_a_function_without_a_name_is_refused_unless_it_is_for_reading_only(folder: Path, make: Any) -> None:
    rules = [Rename("linear", ""), Convert("linear.weight", "weight", make())]
    plan = plan_load(nn.Linear(4, 3), folder, rules=rules)
    with pytest.raises(RuleError, match=r"\(linear.weight\) -> weight computes.*\n.*'package.module:function'"):
        plan.to_json()
    text = plan.to_json(runnable=False)
    assert json.loads(text)["runnable"] is False
    read = LoadPlan.from_json(text)
    assert read.explain("weight") == plan.explain("weight")
    with pytest.raises(RuleError, match="has no name by which it could be found again"):
        plan_load(nn.Linear(4, 3), folder, plan=read)
    with pytest.raises(RuleError, match="has no name"):
        read.to_json()


def local() -> Any:
    def inside(w: torch.Tensor) -> torch.Tensor:
        return w * 2

    return inside


def test_a_lambda_that_only_moves_needs_no_name(folder: Path) -> None:
    model = nn.Linear(4, 3)
    rules = [Rename("linear", ""), Convert("linear.weight", "weight", lambda w: w.flip(0))]
    text = plan_load(model, folder, rules=rules).to_json()
    plan_load(model, folder, plan=LoadPlan.from_json(text)).run(model)
    assert torch.equal(model.weight.data, tensors()["linear.weight"].flip(0))


def test_sizes_that_can_not_be_written_down_are_refused(folder: Path) -> None:
    rules = [Rename("linear", ""), Convert("linear.weight", "weight", scaled, by=torch.tensor(2.0))]
    plan = plan_load(nn.Linear(4, 3), folder, rules=rules)
    with pytest.raises(RuleError, match="sizes can't be written down"):
        plan.to_json()


def test_what_is_trusted_must_have_a_name(folder: Path, text: str) -> None:
    with pytest.raises(RuleError, match="trust takes functions that have a name"):
        plan_load(Model(), folder, plan=LoadPlan.from_json(text), trust=[lambda w: w])
    with pytest.raises(RuleError, match="trust takes functions that have a name"):
        plan_load(Model(), folder, plan=LoadPlan.from_json(text), trust=[3])  # type: ignore[list-item]


def test_nothing_is_imported_on_a_documents_word(
    folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil_module:run", "os:system", "builtins:exec", "halved", "", f"{__name__}:halved"):
        bad = changed(text, lambda data, name=name: steps(data, "normed")["function"].update(function=name))
        read = LoadPlan.from_json(bad)
        with pytest.raises(RuleError, match="is not one of the ready-made layouts"):
            plan_load(Model(), folder, plan=read, trust=["os:getcwd"])
    assert "evil_module" not in sys.modules


# ------------------------------------------------------------------ another model, another source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "qkv", nn.Parameter(torch.zeros(8, 8))), r"'qkv' .* the shape \[16, 4\], .* \[8, 8\]"),
        (lambda m: m.qkv.data.__class__ and setattr(m, "qkv", nn.Parameter(m.qkv.double())), "'qkv' .* the dtype"),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), "the model has a new 'more.weight'"),
        (lambda m: delattr(m, "qkv"), "the model has no 'qkv' any more"),
        (lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(3, 4))), "'head.weight' .* the tie"),
    ],
)
def test_another_model_is_named_with_what_differs(folder: Path, text: str, change: Any, message: str) -> None:
    model = Model()
    change(model)
    with pytest.raises(PlanError, match=message) as caught:
        plan_load(model, folder, plan=LoadPlan.from_json(text))
    assert "make the plan again" in str(caught.value)


def rewritten(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    stored = load_file(file)
    change(stored)
    save_file(stored, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(q=t["q"].half()), "had .* bytes, and now has"),
        (lambda t: t.update(q=t["q"].reshape(4, 8), k=t["k"]), "'q' of the source was|does not lie where it lay"),
        (lambda t: t.update(q=t["q"].view(torch.int32)), "'q' of the source was"),
        (lambda t: t.update(k=torch.zeros(8, 4), q=torch.zeros(4, 4)), "of the source was"),
    ],
)
def test_another_source_is_named_with_what_differs(folder: Path, text: str, change: Any, message: str) -> None:
    rewritten(folder, change)
    with pytest.raises(PlanError, match=message):
        plan_load(Model(), folder, plan=LoadPlan.from_json(text))


def test_files_and_tensors_that_come_or_go_are_named(folder: Path, text: str) -> None:
    with pytest.raises(PlanError, match=r"the source has no file 'model-00002-of-00002.safetensors' any more"):
        plan_load(Model(), folder / "model-00001-of-00002.safetensors", plan=LoadPlan.from_json(text))
    held = tensors()
    read = LoadPlan.from_json(plan_load(Model(), held, rules=RULES).to_json())
    with pytest.raises(PlanError, match="the source has a new tensor, 'new'"):
        plan_load(Model(), {**held, "new": torch.zeros(1)}, plan=read)
    del held["q"]
    with pytest.raises(PlanError, match="the source has no tensor 'q' any more"):
        plan_load(Model(), held, plan=read)


def test_a_file_that_changes_after_the_proof_is_refused(folder: Path, text: str) -> None:
    model = Model()
    plan = plan_load(model, folder, plan=LoadPlan.from_json(text))
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightLoadersError) as caught:
        plan.run(model)
    assert isinstance(caught.value.__cause__, SourceReadError)


# ------------------------------------------------------------------ documents that are not true


@pytest.mark.parametrize(
    "bad",
    [
        "", "{}", "null", "[]", "3", "{", '{"format": "something else"}', "\x00", "[" * 100_000, '"' + "x" * 100_000,
        b"\xff\xfe", None, 3,
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(bad: Any) -> None:
    with pytest.raises(PlanError, match=r"no plan|damaged"):
        LoadPlan.from_json(bad)


def test_a_plan_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="of another version than 1"):
        LoadPlan.from_json(text.replace('"version": 1', '"version": 2'))


def test_a_truncated_document_is_refused_wherever_it_ends(text: str) -> None:
    for end in range(0, len(text) - 1, 97):
        with pytest.raises(PlanError):
            LoadPlan.from_json(text[:end])


def test_a_document_whose_words_were_changed_does_not_have_its_fingerprint(text: str) -> None:
    data = json.loads(text)
    data["source"]["tensors"][0]["shape"] = [1, 2]
    with pytest.raises(PlanError, match="does not have the fingerprint"):
        LoadPlan.from_json(json.dumps(data))


_HUGE = 10**30


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["source"]["tensors"][0].update(shape=[2**59, 2**59]),
        lambda d: d["source"]["tensors"][0].update(shape=[2**40]),
        lambda d: d["source"]["tensors"][0].update(shape=[1] * 64 + [2]),
        lambda d: d["source"]["tensors"][0].update(dtype="float31"),
        lambda d: d["source"]["tensors"][0].update(dtype="nn"),
        lambda d: d["source"]["tensors"][0]["extents"][0].update(offset=2**50),
        lambda d: d["source"]["tensors"][0]["extents"][0].update(file=7),
        lambda d: d["source"]["tensors"].append(d["source"]["tensors"][0]),
        lambda d: d["model"]["targets"][0].update(shape=[2**59, 2**59]),
        lambda d: d["model"]["targets"].append(d["model"]["targets"][0]),
        lambda d: steps(d, "qkv").update(target="elsewhere"),
        lambda d: steps(d, "qkv").update(sources=["q", "k", "elsewhere"]),
        lambda d: steps(d, "qkv")["placements"][0].update(source=9),
        lambda d: steps(d, "qkv")["placements"][0].update({"from": -1}),
        lambda d: steps(d, "qkv")["placements"][0].update(to=_HUGE),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[_HUGE, 1, 1]]),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[4, 1, 0]]),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[4, 1, -1]]),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[-4, 1, 1]]),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[4, 1]]),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[2, 1, 1]] * 100),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[4.0, 1, 1]]),
        lambda d: steps(d, "qkv")["placements"][0].update(more=1),
        lambda d: steps(d, "qkv").update(kind="delete"),
        lambda d: steps(d, "normed").update(function={"kind": "pickle"}),
        lambda d: d.update(findings=3),
        lambda d: d.update(cast={"qkv": ["float32", "elsewhere"]}),
        lambda d: d.pop("steps"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused_when_it_is_read(text: str, change: Any) -> None:
    data = json.loads(text)
    change(data)
    try:
        bad = changed(json.dumps(data), lambda _: None)
    except ValueError:
        bad = json.dumps(data)
    with pytest.raises(PlanError):
        LoadPlan.from_json(bad)


def extents_of(data: Any, name: str) -> Any:
    return next(t for t in data["source"]["tensors"] if t["name"] == name)["extents"][0]


@pytest.mark.parametrize(
    "change",
    [
        # Outside of the source, and of the target.
        lambda d: steps(d, "qkv")["placements"][0].update({"from": 8}),
        lambda d: steps(d, "qkv")["placements"][0].update({"from": 2**59}),
        lambda d: steps(d, "qkv")["placements"][0].update(to=2**59),
        lambda d: steps(d, "qkv")["placements"][0].update(to=33),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[32, -1, 1]]),
        # Twice, or never.
        lambda d: steps(d, "qkv")["placements"][0].update(to=1),
        lambda d: steps(d, "qkv")["placements"].pop(),
        lambda d: steps(d, "qkv")["placements"].append(steps(d, "qkv")["placements"][0]),
        lambda d: steps(d, "qkv")["placements"][0].update(loops=[[2, 16, 16], [16, 1, 1]]),
        lambda d: steps(d, "qkv").update(placements=[]),
        lambda d: steps(d, "padded")["placements"][-1].pop("constant"),
        lambda d: d["steps"].append(steps(d, "qkv")),
        lambda d: d["steps"].append({**steps(d, "plain.weight"), "target": "head.weight"}),
        lambda d: d["steps"].remove(steps(d, "plain.bias")),
        lambda d: d.update(steps=[]),
        lambda d: d["tied"].update(qkv="padded") or d["steps"].remove(steps(d, "qkv")),
        # Of another kind.
        lambda d: steps(d, "normed").update(sources=["n.g"]),
        lambda d: steps(d, "normed").update(sources=[["n.g", "n.v"]]),
        lambda d: steps(d, "normed").update(targets=["padded"]),
        lambda d: steps(d, "normed")["function"].update(function="transpose"),
        lambda d: steps(d, "normed")["function"].update(function="pad_rows", sources=["n.v"], sizes={"rows": 2**58}),
        lambda d: steps(d, "normed")["function"].update(sizes={"sources": 1}),
        lambda d: steps(d, "normed")["function"].update(sizes={"self": 1}),
        lambda d: steps(d, "normed")["function"].update(sources=["**"], shared=["a", "b"]),
        lambda d: steps(d, "normed")["function"].update(sources=["{"]),
        lambda d: steps(d, "normed").update(
            function={"kind": "transformers", "target": "w", "patterns": ["w"], "operations": ["Cat"], "sources": {}}
        ),
        lambda d: d["steps"].append({"kind": "call", "target": "qkv", "source": "q"}),
    ],
)  # fmt: skip
def test_a_plan_that_is_not_true_is_refused_before_anything_is_read(folder: Path, text: str, change: Any) -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    read = LoadPlan.from_json(changed(text, change))
    with pytest.raises((PlanError, RuleError)):
        plan_load(model, folder, plan=read)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_thousands_of_pieces_that_leave_gaps_are_refused_soon(folder: Path) -> None:
    """Nothing here is timed; but were each gap looked at again for each piece, the test would take minutes."""
    count = 20_000
    held = {"w": torch.zeros(2 * count)}
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2 * count))
    pieces = [{"source": 0, "from": at, "to": 2 * (at % count), "loops": []} for at in range(2 * count)]
    text = plan_load(model, held).to_json()
    read = LoadPlan.from_json(changed(text, lambda data: steps(data, "w").update(placements=pieces)))
    with pytest.raises(PlanError, match="exactly once"):
        plan_load(model, held, plan=read)


_odd = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([-1, 0, 1, 2**31, 2**59, 2**62, 2**64, 10**40]),
    st.floats(), st.text(max_size=3), st.just([]), st.just({}), st.lists(st.integers(-2, 9), max_size=3),
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in _places(item, (*path, key)))]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_document_says_there_is_an_error_of_ours_or_a_plan_that_runs(
    folder: Path, text: str, data: st.DataObject
) -> None:
    document = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, key = data.draw(st.sampled_from([place for place in _places(document) if place]))
        holder = document
        for step in path:
            holder = holder[step]
        if data.draw(st.booleans()) and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = data.draw(_odd)
    try:
        bad = changed(json.dumps(document), lambda _: None)
    except (ValueError, TypeError, KeyError):
        bad = json.dumps(document)
    model = Model()
    with contextlib.suppress(WeightLoadersError):
        plan_load(model, folder, plan=LoadPlan.from_json(bad)).run(model)


# ------------------------------------------------------------------ the document itself


def test_a_document_holds_a_line_for_each_step_tensor_and_target(text: str) -> None:
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    data = json.loads(text)
    for part in (data["steps"], data["source"]["tensors"], data["source"]["files"], data["model"]["targets"]):
        assert part
        assert all(item in objects for item in part)


def test_the_catalogues_order_and_place_play_no_part_in_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    with open_weights(folder) as a, open_weights(tmp_path / "copy") as b:
        backwards = Weights.describe(reversed(b.infos()))
        one, other = (json.loads(plan_load(Model(), w, rules=RULES).to_json()) for w in (a, backwards))
    assert one["fingerprint"] == other["fingerprint"]
    assert one["source"]["root"] != other["source"]["root"]


def test_constants_that_are_no_numbers_come_back() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4))
    held = {"w": torch.ones(2)}
    for value in (float("inf"), float("-inf"), float("nan"), 2.5):
        rule = Convert("w", "w", lambda w, value=value: torch.nn.functional.pad(w, (0, 2), value=value))
        plan = plan_load(model, held, rules=[rule])
        assert isinstance(plan.steps[0], CopyStep)
        plan_load(model, held, plan=LoadPlan.from_json(plan.to_json())).run(model)
        assert torch.equal(model.w.data.nan_to_num(7), torch.tensor([1, 1, value, value]).nan_to_num(7))


def test_complex_constants_are_computed_for_a_document_has_no_word_for_them() -> None:
    model = nn.Module()
    model.register_buffer("w", torch.zeros(4, dtype=torch.complex64))
    held = {"w": torch.ones(2, dtype=torch.complex64)}
    plan = plan_load(model, held, rules=[Convert("w", "w", lambda w: torch.cat([w, w.new_full((2,), 1 - 2j)]))])
    with pytest.raises(RuleError, match="no name"):
        plan.to_json()
    assert LoadPlan.from_json(plan.to_json(runnable=False)).ok
    plan.run(model)
    assert model.w.tolist() == [1, 1, 1 - 2j, 1 - 2j]
