"""What is done to names without being asked: never wrongly, always told, and only if it may be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from weightloaders import Convert, Rename, load_into, plan_load
from weightloaders.cli.main import app
from weightloaders.config import LLMConfig
from weightloaders.errors import ConfigError, WeightLoadersError
from weightloaders.plan import step_infos, step_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from weightloaders.plan import LoadPlan

Tensors = dict[str, torch.Tensor]


def model_of(names: Iterable[str]) -> nn.Module:
    """A model with parameters of these names, all of one shape, so that no shape tells one from another."""
    model = nn.Module()
    for name in names:
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, nn.Parameter(torch.zeros(2)))
    return model


def tensors_of(names: Iterable[str], start: int = 1) -> Tensors:
    """Tensors of these names, no two alike."""
    return {name: torch.full((2,), float(at)) for at, name in enumerate(names, start)}


def remarks(plan: LoadPlan) -> list[str]:
    return [f.message for f in plan.findings if f.kind == "rename"]


# ------------------------------------------------------------------ never wrongly

SEGMENTS = ("a", "b", "module", "_orig_mod", "model", "net", "encoder", "0")
LEAVES = ("w", "bias", "weight_g", "weight_v", "parametrizations.weight.original0", "parametrizations.weight.original1")
PREFIXES = (
    "model",
    "net",
    "transformer",
    "module",
    "_orig_mod",
    "encoder",
    "student",
    "model.module",
    "module.model",
    "a",
)


@st.composite
def models(draw: st.DrawFn) -> list[str]:
    """Names that a model can have: none of them is another one's module."""
    name = st.builds(
        lambda path, leaf: ".".join((*path, leaf)),
        st.lists(st.sampled_from(SEGMENTS), max_size=3),
        st.sampled_from(LEAVES),
    )
    names = draw(st.lists(name, min_size=1, max_size=6, unique=True))
    assume(not any(other.startswith(name + ".") for name in names for other in names))
    # Nor is a module weight-normalised in both ways.
    assume(not any(respelt(name) != name and respelt(name) in names for name in names))
    return names


def stripped(name: str, prefix: str) -> str:
    return name.removeprefix(prefix + ".")


def wrapped(name: str, at: int, wrapper: str) -> str:
    segments = name.split(".")
    # Within a module: a wrapper stands for a module, not for a parameter.
    segments.insert(min(at, len(segments) - 1), wrapper)
    return ".".join(segments)


def respelt(name: str) -> str:
    for old, new in (("weight_g", LEAVES[4]), ("weight_v", LEAVES[5])):
        if name.endswith(new):
            return name.removesuffix(new) + old
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


PREFIXED = st.sampled_from(PREFIXES).map(lambda p: lambda name: f"{p}.{name}")
STRIPPED = st.sampled_from(PREFIXES).map(lambda p: lambda name: stripped(name, p))
WRAPPED = st.tuples(st.integers(0, 3), st.sampled_from(SEGMENTS[2:4])).map(lambda w: lambda name: wrapped(name, *w))
RENAMED = st.sampled_from(SEGMENTS).map(lambda s: lambda name: re.sub(rf"(^|\.){s}(?=\.)", r"\1renamed", name))
CHANGES: dict[str, st.SearchStrategy[Callable[[str], str]]] = {
    "whole": st.one_of(PREFIXED, STRIPPED, WRAPPED, RENAMED, st.just(respelt)),
    "partial": st.one_of(PREFIXED, STRIPPED, WRAPPED, RENAMED, st.just(respelt)),
    # A copy that is called otherwise within can't be known to be one.
    "twice": st.one_of(PREFIXED, WRAPPED, st.just(respelt)),
}


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """A model's names, and a checkpoint's: what each of them is in truth ("" for what is none of them)."""
    own = draw(models())
    truth = {name: name for name in own}
    kind = draw(st.sampled_from(sorted(CHANGES)))
    for change in draw(st.lists(CHANGES[kind], max_size=3)):
        changed = {change(name): true for name, true in truth.items()}
        assume(len(changed) == len(truth))
        truth = changed
    if kind == "partial":
        kept = draw(st.sets(st.sampled_from(sorted(truth)), max_size=len(truth)))
        truth = {name: true for name, true in truth.items() if name in kept}
    if kind == "twice":
        front = draw(st.sampled_from(("student", "ema", "net", "model", "module.ema")))
        truth = {**{f"{front}.{name}": "" for name in own}, **truth}
    assume(truth)
    # A name that the model has stands for that parameter: nothing automatic makes it so.
    assume(not any(true != name for name, true in truth.items() if name in own))
    return own, truth


@settings(max_examples=600, deadline=None)
@given(checkpoints())
def test_a_plan_that_is_ok_never_has_a_tensor_in_the_wrong_place(case: tuple[list[str], dict[str, str]]) -> None:
    own, truth = case
    plan = plan_load(model_of(own), tensors_of(truth))
    if plan.ok:
        for step in plan.steps:
            for target in step_targets(step):
                for info in step_infos(step):
                    assert truth[info.name] == target.name, str(plan)


@settings(max_examples=400, deadline=None)
@given(checkpoints(), st.randoms(use_true_random=False))
def test_a_stream_that_loads_never_has_a_tensor_in_the_wrong_place(
    case: tuple[list[str], dict[str, str]], random: Any
) -> None:
    own, truth = case
    pairs = list(tensors_of(truth).items())
    random.shuffle(pairs)
    model = model_of(own)
    try:
        load_into(model, iter(pairs), progress=False)
    except WeightLoadersError:
        return
    right = {true: tensor for name, tensor in pairs if (true := truth[name])}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, right[name]), name


def test_a_name_that_two_of_the_models_could_be_is_left_alone() -> None:
    own = ["a.w", "a.module.w"]
    for policy in ("error", "ignore"):
        plan = plan_load(model_of(own), tensors_of(["module.a.w"]), on_missing=policy)
        assert plan.loaded == []
        assert not plan.ok
    # All of it together can be told: then the wrapper is a prefix like another.
    truth = {f"module.{name}": name for name in own}
    assert plan_load(model_of(own), tensors_of(truth)).renamed == truth


def test_a_name_that_the_model_has_in_torchs_other_spelling_keeps_its_wrappers() -> None:
    own = ["weight_g", "module.net.weight_g", "net.w"]
    other = "parametrizations.weight.original0"
    truth = {other: "weight_g", f"module.net.{other}": "module.net.weight_g"}
    assert plan_load(model_of(own), tensors_of([*truth, "net.w"])).renamed == truth
    # A stranger that a wrapper would make the same does not take its place.
    plan = plan_load(model_of(own), tensors_of([*truth, "net.w", "net.weight_g"]))
    assert not plan.ok
    assert "module.net.weight_g" in str(plan)


def test_a_prefix_is_taken_off_in_front_of_wrappers_too() -> None:
    own = ["model.module.w", "w"]
    plan = plan_load(model_of(own), tensors_of(["net.model.w", "net.w"]))
    assert plan.renamed == {"net.model.w": "model.module.w", "net.w": "w"}
    # So a stranger that seems to be one of the model's doesn't take its place.
    assert not plan_load(model_of(own), tensors_of(["model.w", "net.model.module.w", "net.w"])).ok


def test_names_with_and_without_the_base_models_prefix_are_not_exchanged() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Normed(LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.norm = nn.LayerNorm(config.hidden_size, bias=False)

    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Normed(LlamaConfig(**sizes))
    assert {"norm.weight", "model.norm.weight"} <= model.state_dict().keys()
    plan = plan_load(model, {name: torch.full_like(t, at) for at, (name, t) in enumerate(model.state_dict().items())})
    assert plan.ok
    assert plan.renamed == {}


def test_a_second_copy_of_the_model_makes_a_prefix_a_question() -> None:
    own = [f"layers.{i}.w" for i in range(9)]
    one, other = ([f"{front}.{name}" for name in own] for front in ("model", "ema_model"))
    assert plan_load(model_of(own), tensors_of(one)).ok
    both = tensors_of([*one, *other])
    plan = plan_load(model_of(own), both)
    assert not plan.ok
    hint = str(plan.errors[0].hint)
    assert "choose one: rules=[Rename('model', '')] or rules=[Rename('ema_model', '')]" in hint
    for front, start in (("model", 1), ("ema_model", 10)):
        model = model_of(own)
        load_into(model, both, rules=[Rename(front, "")], progress=False)
        assert [int(p[0]) for p in model.parameters()] == list(range(start, start + 9))
    # Half a copy is none.
    assert plan_load(model_of(own), tensors_of([*one, *other[1:]])).ok


def test_of_a_stream_it_is_told_at_its_end_whether_a_prefix_was_the_one() -> None:
    names = ["model.a.w", "model.b.w"]
    report = load_into(model_of(["a.w", "b.w"]), iter(tensors_of(names).items()), progress=False)
    assert report.automatic == [
        "all 2 names of the source begin with 'model.', which was left out: model.a.w -> a.w, model.b.w -> b.w"
    ]
    for pairs, message in (
        (tensors_of([*names, "net.a.w", "net.b.w"]), "net"),
        (tensors_of([*names, "student.a.w", "student.b.w"]), r"Rename\('student', ''\)"),
        (tensors_of(["model.a.w", "net.b.w"]), "several prefixes"),
    ):
        with pytest.raises(WeightLoadersError, match=message):
            load_into(model_of(["a.w", "b.w"]), iter(pairs.items()), progress=False)
    with pytest.raises(WeightLoadersError, match=r"not all of it"):
        load_into(model_of(["a.w", "b.w"]), iter(tensors_of(names[:1]).items()), on_missing="warn", progress=False)


# ------------------------------------------------------------------ always told

NORM = ("parametrizations.weight.original0", "parametrizations.weight.original1")
UNWRAPPED = "module._orig_mod.a.w -> a.w"
SPELT = f"a.weight_g -> a.{NORM[0]}, a.weight_v -> a.{NORM[1]}"


@pytest.mark.parametrize(
    ("own", "source", "sentence"),
    [
        (
            [f"{c}.w" for c in "abc"], [f"net.{c}.w" for c in "abc"],
            "all 3 names of the source begin with 'net.', which was left out: net.a.w -> a.w, net.b.w -> b.w, ...",
        ),
        (
            ["model.a.w", "model.b.w", "head.w"], ["a.w", "b.w", "head.w"],
            "2 of 3 names of the source lack the prefix 'model.', which was added: a.w -> model.a.w, b.w -> model.b.w",
        ),
        (
            ["a.w", "b.w"], ["module._orig_mod.a.w", "b.w"],
            f"1 of 2 names of the source carry a wrapper (module, _orig_mod), which was left out: {UNWRAPPED}",
        ),
        (
            ["_orig_mod.a.w"], ["a.w"],
            "1 of 1 names of the source lack a wrapper of the model's, which was put in: a.w -> _orig_mod.a.w",
        ),
        (
            [f"a.{leaf}" for leaf in NORM], ["a.weight_g", "a.weight_v"],
            f"all 2 names of the source have weight_norm's other spelling, which was exchanged: {SPELT}",
        ),
    ],
)  # fmt: skip
def test_each_automatic_step_is_told_and_may_be_switched_off(own: list[str], source: list[str], sentence: str) -> None:
    tensors = tensors_of(source)
    plan = plan_load(model_of(own), tensors)
    assert remarks(plan) == [sentence]
    model = model_of(own)
    report = load_into(model, tensors, progress=False)
    assert report.automatic == [sentence]
    assert sentence in str(report)
    for given_weights in (tensors, iter(tensors.items())):
        untouched = model_of(own)
        with pytest.raises(WeightLoadersError):
            load_into(untouched, given_weights, automatic=False, progress=False)
    plan = plan_load(model_of(own), tensors, automatic=False)
    assert remarks(plan) == []
    assert plan.renamed == {}


def test_steps_that_come_together_are_each_told() -> None:
    plan = plan_load(model_of(["a.w", f"a.{NORM[0]}"]), tensors_of(["model.module.a.w", "model.module.a.weight_g"]))
    assert plan.ok
    assert [message.partition(":")[0] for message in remarks(plan)] == [
        "all 2 names of the source carry a wrapper (module), which was left out",
        "all 2 names of the source begin with 'model.', which was left out",
        "1 of 2 names of the source have weight_norm's other spelling, which was exchanged",
    ]


def test_what_is_done_to_some_names_is_a_warning_where_others_may_be_missing() -> None:
    own = ["a.w", "b.w", "head.w"]
    for source, severity in (
        (["module.a.w", "module.b.w", "module.other.w"], "info"),
        (["module.a.w", "b.w"], "warning"),
    ):
        plan = plan_load(model_of(own), tensors_of(source), on_missing={re.compile("head"): "ignore"})
        assert plan.ok
        (found,) = [f for f in plan.findings if f.kind == "rename"]
        assert found.severity == severity
    assert "automatic=False" in str(found.hint)


def test_the_callers_rules_and_the_models_own_word_count_all_the_same() -> None:
    own = ["a.w", "b.qk.w"]
    model = model_of(own)
    model.packed_modules_mapping = {"qk": ["q", "k"]}  # type: ignore[assignment]
    model.b.qk.w = nn.Parameter(torch.zeros(4))  # type: ignore[union-attr]
    tensors = tensors_of(["module.a.w", "b.q.w", "b.k.w"])
    assert plan_load(model, tensors, automatic=False, rules=[Rename("module", "")]).ok
    twice = Convert("module.a.w", "a.w", lambda w: w + w)
    assert plan_load(model, tensors, automatic=False, rules=[twice]).ok
    assert plan_load(model, tensors, automatic=False).missing == ["a.w"]


@pytest.mark.parametrize("value", ["no", 0, None])
def test_automatic_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match="True or False"):
        load_into(model_of(["a.w"]), tensors_of(["a.w"]), automatic=value)


def test_it_can_be_switched_off_in_a_config_file_and_on_the_command_line(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    folder = tmp_path / "wrapped"
    model.save_pretrained(folder, state_dict={f"module.{name}": t for name, t in model.state_dict().items()})
    arguments = ["plan", str(folder)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    refused = CliRunner().invoke(app, [*arguments, "--no-automatic"])
    assert refused.exit_code == 1
    assert "Rename" not in refused.output
    assert "module" in refused.output
    refused = CliRunner().invoke(app, ["generate", str(folder), "hello", "--no-automatic"])
    assert refused.exit_code == 1
    assert "the checkpoint does not fit the model" in refused.output
    (tmp_path / "llm.yaml").write_text("model: ./wrapped\nautomatic: false\n")
    assert LLMConfig.from_file(tmp_path / "llm.yaml").arguments()["automatic"] is False
    with pytest.raises(ConfigError, match="automatic"):
        LLMConfig(model="m", automatic="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("twin", ["model.parametrizations.weight.original0", "model.module.weight_g"])
def test_a_stream_with_a_parameter_in_two_spellings_below_a_prefix_is_refused_as_a_catalogue_is(twin: str) -> None:
    stored = tensors_of(["model.w", "model.weight_g", twin])
    for source in (stored, iter(stored.items()), reversed(stored.items())):
        with pytest.raises(WeightLoadersError):
            load_into(model_of(["w", "weight_g"]), source, progress=False)


# ------------------------------------------------------------------ and the caller's rules

HUB = ("model.embed.w", "model.layers.0.a.w", "model.layers.0.b.w", "model.layers.1.a.w", "model.layers.1.b.w")
TO_MINE = (
    Rename("model.embed", "table"),
    Rename("model", ""),
    Convert(["layers.*.a.w", "layers.*.b.w"], "layers.*.ab", lambda a, b: torch.cat([a[:1], b[:1]])),
)
MINE = ("layers.0.ab", "layers.1.ab", "table.w")


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "module._orig_mod"])
def test_rules_hold_for_names_that_carry_a_wrapper(wrapper: str) -> None:
    stored = tensors_of(f"{wrapper}.{name}" for name in HUB)
    plan = plan_load(model_of(MINE), stored, rules=TO_MINE)
    assert plan.ok
    assert sorted(plan.loaded) == [*MINE]
    assert [f.kind for f in plan.findings] == ["rename"]
    assert "carry a wrapper" in remarks(plan)[0]
    assert "wrapper removed" in plan.explain("layers.1.ab")


def test_a_rule_that_names_the_wrapper_itself_is_heeded() -> None:
    stored = tensors_of(f"module.{name}" for name in HUB)
    plan = plan_load(model_of(MINE), stored, rules=[Rename("module", ""), *TO_MINE])
    assert plan.ok
    assert not plan.findings


@pytest.mark.parametrize(
    ("stored", "first"),
    [
        ([f"module.{name}" for name in HUB], Rename("module", "")),
        ([f"generator.{name}" for name in HUB], Rename("generator", "")),
        ([f"a.b.{name}" for name in HUB], Rename("a.b", "")),
    ],
)
def test_rules_for_names_with_another_prefix_are_told_what_to_begin_with(stored: list[str], first: Rename) -> None:
    plan = plan_load(model_of(MINE), tensors_of(stored), rules=TO_MINE, automatic=False)
    (said,) = [f for f in plan.findings if f.kind == "rule"]
    assert "rules match no tensor of the source" in said.message
    assert f"begin with a rename of {str(first.old)!r} to {first.new!r}" in str(said.hint)
    assert plan_load(model_of(MINE), tensors_of(stored), rules=[first, *TO_MINE], automatic=False).ok


def test_rules_for_names_that_lack_a_prefix_are_told_to_leave_it_out() -> None:
    plan = plan_load(model_of(MINE), tensors_of(name.removeprefix("model.") for name in HUB), rules=TO_MINE)
    (said,) = [f for f in plan.findings if f.kind == "rule"]
    assert str(said.hint).endswith("leave 'model.' out at the front of the rules' patterns")


def test_many_rules_for_another_model_are_one_finding() -> None:
    rules = [Rename(f"other.{i}", f"w{i}") for i in range(20)]
    (said,) = plan_load(model_of(["a", "b"]), tensors_of(["a", "b"]), rules=rules).findings
    assert said.message.startswith("20 rules match no tensor")


def test_a_misspelt_pattern_is_shown_the_name_that_is_most_like_it() -> None:
    stored = tensors_of(["layers.0.input_layernorm.w", "head.w", "attn.w"])
    plan = plan_load(model_of(["n.w", "head.w", "attn.w"]), stored, rules=[Rename("layers.*.input_layer_norm", "n")])
    (said,) = [f for f in plan.findings if f.kind == "rule"]
    assert "'layers.0.input_layernorm.w'" in str(said.hint)
