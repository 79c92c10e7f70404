"""Rules of names and layouts: patterns, what each kind of rule does, their YAML form, and what is refused."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightloaders import Convert, Drop, Rename, load_into, plan_load
from weightloaders.errors import RuleError
from weightloaders.mapping import layouts
from weightloaders.mapping.names import claim_name, natural_order
from weightloaders.mapping.parsing import parse_rules
from weightloaders.mapping.patterns import Pattern, PatternIndex
from weightloaders.mapping.rules import RuleMapper
from weightloaders.plan import Policies
from weightloaders.planner import Planner
from weightloaders.targets import Targets
from weightloaders.testing import fake_distribution, isolated_registry
from weightloaders.weights.weights import as_catalogue

if TYPE_CHECKING:
    from pathlib import Path

    from weightloaders.plan import LoadPlan


def renamed(name: str, *rules: Any, own: tuple[str, ...] = ()) -> str:
    """What rules make of a name, for a model that has some names."""
    return claim_name(name, [RuleMapper(rules, own)], own).target


class Model(torch.nn.Module):
    """A module with parameters of any dotted names."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split("__")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))


def plan(model: torch.nn.Module, tensors: dict[str, torch.Tensor], *rules: Any, **options: Any) -> LoadPlan:
    return plan_load(model, tensors, rules=list(rules), **options)


def load(model: torch.nn.Module, tensors: dict[str, torch.Tensor], *rules: Any, **options: Any) -> Any:
    return load_into(model, tensors, rules=list(rules), progress=False, **options)


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    tensor = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32)
    return tensor.reshape(shape)


# ------------------------------------------------------------------ patterns


@pytest.mark.parametrize(
    ("pattern", "name", "values"),
    [
        ("a.b", "a.b", {}),
        ("a.*", "a.b", {"1": "b"}),
        ("*.*", "a.b", {"1": "a", "2": "b"}),
        ("**", "a.b.c", {"1": "a.b.c"}),
        ("**.c", "a.b.c", {"1": "a.b"}),
        ("**.c", "c", {"1": ""}),
        ("a.**.c", "a.c", {"1": ""}),
        ("a.**.c.*", "a.x.c.y.c.z", {"1": "x.c.y", "2": "z"}),
        ("**.b.**.d", "a.b.c.b.d.d", {"1": "a", "2": "c.b.d"}),
        ("layers.{i}.w", "layers.12.w", {"i": "12"}),
        ("block{i}.w", "block7.w", {"i": "7"}),
        ("h{a}x{b}.w", "h1x2x3.w", {"a": "1", "b": "2x3"}),
        ("{name}.w", "a_b.w", {"name": "a_b"}),
        ("a(b.c+", "a(b.c+", {}),
    ],
)
def test_a_pattern_matches_whole_names_segment_by_segment(pattern: str, name: str, values: dict[str, str]) -> None:
    compiled = Pattern(pattern)
    match = compiled.whole.match(name + ".")
    assert match is not None
    assert compiled.values(match) == values
    assert compiled.filled(values) == name


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("a", "ab"),
        ("a", "a.b"),
        ("a.*", "a"),
        ("a.*", "a.b.c"),
        ("a.b", "aXb"),
        ("layers.{i}", "layers.1.2"),
        ("block{i}", "block"),
        ("**.c", "a.bc"),
        ("a.**.c", "ac"),
    ],
)
def test_a_pattern_never_matches_part_of_a_segment(pattern: str, name: str) -> None:
    assert Pattern(pattern).whole.match(name + ".") is None


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=7),
    st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=5),
)
def test_a_pattern_matches_what_its_definition_says(name: list[str], pattern: list[str]) -> None:
    def matches(pattern: list[str], name: list[str]) -> bool:
        if not pattern:
            return not name
        if pattern[0] == "**":
            return any(matches(pattern[1:], name[taken:]) for taken in range(len(name) + 1))
        return bool(name) and pattern[0] in ("*", name[0]) and matches(pattern[1:], name[1:])

    compiled, text = Pattern(".".join(pattern)), ".".join(name)
    match = compiled.whole.match(text + ".")
    assert (match is not None) == matches(pattern, name)
    if match is not None:
        assert compiled.filled(compiled.values(match)) == text
    fronts = [matches(pattern, name[:end]) for end in range(len(name) + 1)]
    assert (compiled.front.match(text + ".") is not None) == any(fronts)
    inside = [matches(pattern, name[start:end]) for start in range(len(name)) for end in range(start, len(name) + 1)]
    assert (compiled.anywhere.search(text + ".") is not None) == any(inside)


@given(
    st.text("ab", min_size=1, max_size=8),
    st.lists(st.sampled_from(["a", "b", "{}"]), min_size=2, max_size=6),
    st.sampled_from(["", ".{last}", ".**"]),
)
def test_captures_in_a_segment_match_what_backtracking_finds(name: str, parts: list[str], rest: str) -> None:
    pattern = "".join(part if part != "{}" else f"{{x{at}}}" for at, part in enumerate(parts))
    regex = "".join("([^.]+?)" if part == "{}" else part for part in parts)
    match = Pattern(pattern + rest).whole.match(f"{name}.end." if rest else f"{name}.")
    wanted = re.fullmatch(regex, name)
    assert (match and match.groups()[: regex.count("(")]) == (wanted and wanted.groups())


def test_many_wildcards_on_a_long_name_take_no_time() -> None:
    # Backtracking over five `**` would try some 10**14 ways.
    long = ".".join(["a"] * 2000)
    start = time.process_time()
    assert Pattern("**.a.**.a.**.a.**.a.**.b").whole.match(long + ".") is None
    assert not Drop("a.**.a.**.a.**.c").matches(long)
    assert not Drop("a.**.a.**.a.**.c").matches(".".join(["a"] * 50_000))
    assert not Drop("**.a.{x}a{y}a{z}b").matches("a." * 50_000 + "a" * 50_000)
    assert Pattern("{v}a{w}a{x}a{y}a{z}b").whole.match("a" * 100_000 + ".") is None
    assert renamed(long, Rename("**.b.**.c.**.d", "x")) == long
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a.b*", "whole segment"),
        ("a.{i.w", "hold no name"),
        ("a.{}", "hold no name"),
        ("a.{1}", "hold no name"),
        ("{i}.{i}", "captures {i} twice"),
        ("a..b", "empty segment"),
        (".a", "empty segment"),
        ("a.", "empty segment"),
    ],
)
def test_a_malformed_pattern_is_refused_when_the_rule_is_made(pattern: Any, message: str) -> None:
    for make in (lambda: Rename(pattern, ""), lambda: Drop(pattern), lambda: Convert(pattern, "x", "transpose")):
        with pytest.raises(RuleError, match=re.escape(message)):
            make()


@pytest.mark.parametrize("pattern", [None, 3, b"a"])
def test_a_pattern_that_is_no_text_is_refused(pattern: Any) -> None:
    for make in (lambda: Rename(pattern, ""), lambda: Drop(pattern), lambda: Convert([pattern], "x", "transpose")):
        with pytest.raises(RuleError, match="a pattern is a string"):
            make()


# ------------------------------------------------------------------ Rename


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        (Rename("backbone", ""), "backbone.a.w", "a.w"),
        (Rename("", "model"), "a.w", "model.a.w"),
        (Rename("a", "b"), "a.w", "b.w"),
        (Rename("a", "b"), "a", "b"),
        (Rename("a", "b"), "ab.w", "ab.w"),
        (Rename("a", "b"), "x.a.w", "x.a.w"),
        (Rename("a.b", "c"), "a.b.w", "c.w"),
        (Rename("a", "b.c"), "a.w", "b.c.w"),
        (Rename("block{i}", "layers.{i}"), "block3.w", "layers.3.w"),
        (Rename("layers.{i}.attn", "h.{i}.mixer"), "layers.3.attn.q.w", "h.3.mixer.q.w"),
        (Rename("layers.*.attn", "h.*.mixer"), "layers.3.attn.q.w", "h.3.mixer.q.w"),
        (Rename("**.gamma", "**.weight"), "a.b.gamma", "a.b.weight"),
        (Rename("**.gamma", "**.weight"), "gamma", "weight"),
        (Rename("*.*.w", "*.x.*.w"), "a.b.w", "a.x.b.w"),
        (Rename("{a}.{b}", "{b}.{a}"), "one.two.w", "two.one.w"),
        (Rename("{a}_{b}.w", "{b}.{a}.w"), "one_two.w", "two.one.w"),
        (Rename("**.qkv.**", "**.c_attn.**"), "h.0.qkv.weight", "h.0.c_attn.weight"),
        (Rename(re.compile(r"^h\.(\d+)\."), r"layers.\1."), "h.3.w", "layers.3.w"),
        (Rename(re.compile("gamma$"), "weight"), "ln.gamma", "ln.weight"),
        (Rename(re.compile(r"(?i)LN_(\d)"), r"norm\1"), "a.ln_2.w", "a.norm2.w"),
    ],
)
def test_a_rename(rule: Rename, name: str, expected: str) -> None:
    assert renamed(name, rule) == expected


def test_stripping_never_leaves_a_name_empty() -> None:
    assert renamed("backbone", Rename("backbone", "")) == "backbone"


def test_two_renames_swap_two_names() -> None:
    rules = (Rename("**.gate", "**.up"), Rename("**.up", "**.gate"))
    assert renamed("mlp.gate.w", *rules) == "mlp.up.w"
    assert renamed("mlp.up.w", *rules) == "mlp.gate.w"


def test_two_regular_expressions_swap_two_names() -> None:
    rules = (Rename(re.compile(r"\bgate\b"), "up"), Rename(re.compile(r"\bup\b"), "gate"))
    assert renamed("mlp.gate.w", *rules) == "mlp.up.w"
    assert renamed("mlp.up.w", *rules) == "mlp.gate.w"


def test_what_a_rule_wrote_is_not_matched_by_a_later_one_but_what_it_carried_over_is() -> None:
    assert renamed("a.w", Rename("a", "b"), Rename("b", "c")) == "b.w"
    assert renamed("a.w", Rename("", "a"), Rename("a", "x")) == "a.a.w"
    # A regular expression sees no more of it.
    assert renamed("a.w", Rename(re.compile("^a"), "b"), Rename(re.compile("b"), "c"), Rename("b", "d")) == "b.w"
    assert renamed("a.w", Rename("a", "b"), Rename(re.compile("b|^.{1}"), "c")) == "c.w"
    # The segment `x` came with the source, although the rule writes one of the same name.
    assert renamed("a.x.w", Rename("a.*", "x.*"), Rename("x", "y")) == "x.x.w"
    assert renamed("old.gate.w", Rename("old", "new"), Rename("**.gate", "**.up")) == "new.up.w"
    assert renamed("old.block3.w", Rename("old.*", "new.*"), Rename("*.block{i}", "*.h.{i}")) == "new.h.3.w"


def test_later_renames_match_across_what_earlier_ones_left_alone() -> None:
    assert renamed("model.h.3.gamma", Rename("model", ""), Rename("h", "layers"), Rename("**.gamma", "**.weight")) == (
        "layers.3.weight"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a", "b.*", "wildcard number 1"),
        ("a.*", "b.*.*", "wildcard number 2"),
        ("a", "b.{i}", "{i}"),
        ("a", None, "is a string"),
        (re.compile("a"), r"\1", "can't replace"),
        (re.compile(b"a"), "b", "for bytes"),
    ],
)
def test_a_new_name_that_nothing_fills_is_refused_when_the_rule_is_made(old: Any, new: Any, message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(message)):
        Rename(old, new)


@given(st.text(st.sampled_from("ab.01"), min_size=1, max_size=12))
def test_a_rename_and_its_inverse_give_the_name_back(name: str) -> None:
    added = renamed(name, Rename("", "pre.fix"))
    assert added == f"pre.fix.{name}".removesuffix(".") or name.endswith(".")
    if not name.startswith(".") and not name.endswith("."):
        assert renamed(added, Rename("pre.fix", "")) == name


# ------------------------------------------------------------------ Drop


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (Drop("inv_freq"), {"a.inv_freq", "inv_freq", "a.inv_freq.b"}),
        (Drop("a.b"), {"a.b", "x.a.b.y"}),
        (Drop("h.*.bias"), {"h.0.bias", "x.h.0.bias"}),
        (Drop("a.**.z"), {"a.z", "x.a.b.c.z.y"}),
        (Drop(re.compile("^a")), {"a.b", "ab"}),
    ],
)
def test_drop_matches_segments_side_by_side_anywhere(rule: Drop, names: set[str]) -> None:
    everything = {
        "a.inv_freq", "inv_freq", "a.inv_freq.b", "a.inv_freqs", "a.b", "x.a.b.y", "ab", "a.x.b", "h.0.bias",
        "x.h.0.bias", "h.0.x.bias", "a.z", "x.a.b.c.z.y", "xa.z", "q.w",
    }  # fmt: skip
    found = {name for name in everything if rule.matches(name)}
    assert names <= found
    if isinstance(rule.pattern, str):
        segments = rule.pattern.split(".")
        assert found == {
            name for name in everything
            if re.search(
                r"(^|\.)" + "".join(
                    r"([^.]+\.)*" if s == "**" else r"[^.]+\." if s == "*" else re.escape(s) + r"\." for s in segments
                ),
                name + ".",
            )
        }  # fmt: skip


def test_an_empty_drop_is_refused() -> None:
    with pytest.raises(RuleError, match="would drop everything"):
        Drop("")


def test_dropped_tensors_are_listed_and_neither_loaded_nor_unexpected() -> None:
    found = plan(Model(w=(2,)), {"w": counted(2), "x.junk": counted(3), "junk.y": counted(3)}, Drop("junk"))
    assert found.ok
    assert sorted(found.dropped) == ["junk.y", "x.junk"]
    assert found.unexpected == []


# ------------------------------------------------------------------ Convert


def test_a_conversion_takes_sources_in_the_order_of_its_patterns() -> None:
    model = Model(qkv=(6, 2))
    load(
        model,
        {"v": counted(2, 2, start=8), "q": counted(2, 2), "k": counted(2, 2, start=4)},
        Convert(["q", "k", "v"], "qkv", "fuse_qkv"),
    )
    assert torch.equal(model.qkv.data, counted(6, 2))


def test_a_conversion_goes_for_every_layer_by_captures_or_wildcards() -> None:
    for layer in ("{i}", "*"):
        model = Model(**{f"h__{i}__gu": (4, 2) for i in range(3)})
        tensors = {f"h.{i}.{p}": counted(2, 2, start=10 * i + 4 * (p == "u")) for i in range(3) for p in "gu"}
        load(model, tensors, Convert([f"h.{layer}.g", f"h.{layer}.u"], f"h.{layer}.gu", lambda g, u: torch.cat([g, u])))
        for i in range(3):
            assert torch.equal(model.get_parameter(f"h.{i}.gu").data, counted(4, 2, start=10 * i))


def test_a_source_with_a_capture_of_its_own_gives_a_list_in_index_order() -> None:
    model = Model(experts=(11, 2, 2))
    tensors = {f"experts.{i}.w": counted(2, 2, start=4 * i) for i in (10, 2, 0, 1, 9, 8, 7, 6, 5, 4, 3)}
    found = plan(model, tensors, Convert("experts.{e}.w", "experts", "stack_experts"))
    assert found.ok
    load(model, tensors, Convert("experts.{e}.w", "experts", "stack_experts"))
    assert torch.equal(model.experts.data, counted(11, 2, 2))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 1, 3], "the index 2 is missing: next is 'experts.3.w'"),
        ([1, 2, 3], "the index 0 is missing: next is 'experts.1.w'"),
        ([0, 1, "01"], "the index 1 comes twice"),
    ],
)
def test_indices_that_are_not_0_to_e_minus_1_are_an_error(indices: list[Any], message: str) -> None:
    tensors = {f"experts.{i}.w": counted(2, 2) for i in indices}
    found = plan(Model(experts=(3, 2, 2)), tensors, Convert("experts.{e}.w", "experts", "stack_experts"))
    assert not found.ok
    assert message in found.errors[0].message
    assert found.missing == ["experts"]


def test_what_is_no_index_is_no_member() -> None:
    tensors = {f"experts.{i}.w": counted(2, 2) for i in (0, 1, "shared", "²", "٣", "9" * 5000)}
    found = plan(Model(experts=(2, 2, 2)), tensors, Convert("experts.{e}.w", "experts", "stack_experts"))
    assert found.ok
    assert len(found.unexpected) == 4


def test_lists_of_different_lengths_are_an_error() -> None:
    tensors = {**{f"e.{i}.g": counted(2, 2) for i in range(3)}, **{f"e.{i}.u": counted(2, 2) for i in range(2)}}
    found = plan(Model(w=(3, 4, 2)), tensors, Convert(["e.{e}.g", "e.{e}.u"], "w", "stack_experts"))
    assert "there are 3 of e.{e}.g, 2 of e.{e}.u" in found.errors[0].message


EXPERTS = Convert(
    ["layers.{l}.experts.{e}.gate.{leaf}", "layers.{l}.experts.{e}.up.{leaf}"],
    "layers.{l}.experts.gate_up.{leaf}",
    "stack_experts",
)


def _layers_of_experts(layers: int, experts: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.experts.{e}.{part}.{leaf}": counted(*shape, start=1000 * layer + 100 * e + 10 * (part == "up"))
        for layer in range(layers)
        for e in range(experts)
        for part in ("gate", "up")
        for leaf, shape in (("weight", (2, 3)), ("scale", ()))
    }


def test_experts_are_stacked_layer_by_layer_gate_and_up_of_each_and_whatever_they_have() -> None:
    tensors = _layers_of_experts(3, 12)
    model = Model(**{f"layers__{i}__experts__gate_up__weight": (12, 4, 3) for i in range(3)},
                  **{f"layers__{i}__experts__gate_up__scale": (12, 2) for i in range(3)})  # fmt: skip
    load(model, tensors, EXPERTS)
    for layer in range(3):
        weight = model.get_parameter(f"layers.{layer}.experts.gate_up.weight").data
        scale = model.get_parameter(f"layers.{layer}.experts.gate_up.scale").data
        for e in range(12):
            for at, part in enumerate(("gate", "up")):
                front = f"layers.{layer}.experts.{e}.{part}"
                assert torch.equal(weight[e, 2 * at : 2 * at + 2], tensors[f"{front}.weight"])
                assert scale[e, at] == tensors[f"{front}.scale"]


@pytest.mark.parametrize(
    ("lost", "added", "message"),
    [
        (["layers.1.experts.2.up.weight"], {}, "of the 3 tensors layers.1.experts.{e}.up.weight for layers.1.experts"),
        (["layers.1.experts.3.up.weight"], {}, "there are 4 of layers.1.experts.{e}.gate.weight, 3 of layers.1."),
        ([f"layers.1.experts.{e}.up.weight" for e in range(4)], {}, "layers.1.experts.{e}.up.weight is missing"),
        ([], {"layers.1.experts.01.up.weight": counted(2, 3)}, "the index 1 comes twice"),
        ([], {"layers.1.experts.7.up.weight": counted(2, 3)}, "the index 4 is missing: next is 'layers.1.experts.7.up"),
        (["layers.1.experts.0.up.weight"], {"layers.1.experts.4.up.weight": counted(2, 3)}, "the index 0 is missing"),
    ],
)
def test_indices_are_proved_for_every_layer_and_every_list(
    lost: list[str], added: dict[str, torch.Tensor], message: str
) -> None:
    tensors = {**_layers_of_experts(2, 4), **added}
    for name in lost:
        del tensors[name]
    model = Model(**{f"layers__{i}__experts__gate_up__weight": (4, 4, 3) for i in range(2)},
                  **{f"layers__{i}__experts__gate_up__scale": (4, 2) for i in range(2)})  # fmt: skip
    found = plan(model, tensors, EXPERTS)
    assert message in found.errors[0].message
    # The other layer, and the scales, are as they should be.
    assert found.missing == ["layers.1.experts.gate_up.weight"]


def test_stacked_experts_are_taken_apart_into_gate_and_up_of_each() -> None:
    apart = _layers_of_experts(2, 4)
    model = Model(**{name.replace(".", "__"): tuple(tensor.shape) for name, tensor in apart.items()})
    stacked = {
        f"layers.{layer}.experts.gate_up.{leaf}": layouts.stack_experts(
            *([apart[f"layers.{layer}.experts.{e}.{part}.{leaf}"] for e in range(4)] for part in ("gate", "up"))
        )
        for layer in range(2)
        for leaf in ("weight", "scale")
    }
    rule = Convert(
        "layers.{l}.experts.gate_up.{leaf}",
        ["layers.{l}.experts.{e}.gate.{leaf}", "layers.{l}.experts.{e}.up.{leaf}"],
        "unstack_experts",
        parts=2,
    )
    load(model, stacked, rule)
    assert all(torch.equal(model.get_parameter(name).data, tensor) for name, tensor in apart.items())
    one_list = Convert("layers.{l}.experts.gate_up.{leaf}", ["a.{l}.{leaf}.{e}", "b.{l}.{leaf}.{e}"], lambda w: (w,))
    found = plan(Model(a__0__weight__0=(2, 3)), {"layers.0.experts.gate_up.weight": counted(4, 3)}, one_list)
    assert "did not return 2 lists, one for each target" in found.errors[0].message


def test_a_missing_part_is_named_with_those_that_are_there() -> None:
    found = plan(
        Model(qkv=(6, 2)),
        {"a.q": counted(2, 2), "a.v": counted(2, 2)},
        Convert(["a.q", "a.k", "a.v"], "qkv", "fuse_qkv"),
    )
    assert found.errors[0].kind == "incomplete"
    assert found.errors[0].message == "of the parts of qkv, a.k is missing; there is a.q, a.v"
    assert found.missing == ["qkv"]
    assert found.unexpected == []


def test_two_tensors_for_one_part_are_an_error() -> None:
    found = plan(
        Model(qkv=(4, 2)),
        {"q": counted(2, 2), "x.q": counted(2, 2), "k": counted(2, 2)},
        Rename("x", ""),
        Convert(["q", "k"], "qkv", lambda *t: torch.cat(t)),
    )
    assert "all take the place of q" in found.errors[0].message


def test_one_source_becomes_several_targets() -> None:
    model = Model(a__q=(4, 3), a__k=(2, 3), a__v=(2, 3))
    load(
        model,
        {"a.qkv": counted(8, 3)},
        Convert("a.qkv", ["a.q", "a.k", "a.v"], "split_qkv", heads=2, kv_heads=1, head_dim=2),
    )
    assert torch.equal(torch.cat([p.data for p in model.parameters()]), counted(8, 3))


def test_a_target_with_a_capture_of_its_own_is_spread_over_the_results() -> None:
    for index in ("{e}", "*"):
        model = Model(**{f"h__{i}__experts__{e}__w": (2, 2) for i in range(2) for e in range(3)})
        tensors = {f"h.{i}.experts": counted(3, 2, 2, start=100 * i) for i in range(2)}
        rule = Convert("h.{i}.experts", f"h.{{i}}.experts.{index}.w", "unstack_experts")
        found = plan(model, tensors, rule)
        assert found.ok, str(found)
        load(model, tensors, rule)
        for i in range(2):
            for e in range(3):
                assert torch.equal(
                    model.get_parameter(f"h.{i}.experts.{e}.w").data, counted(2, 2, start=100 * i + 4 * e)
                )


def test_a_conversion_that_makes_nothing_says_so() -> None:
    found = plan(Model(e__0__w=(2, 2)), {"es": torch.zeros(0, 2, 2)}, Convert("es", "e.{i}.w", "unstack_experts"))
    assert found.missing == ["e.0.w"]
    assert found.unexpected == ["es"]
    assert any("makes nothing of it" in str(f.hint) for f in found.findings)


def test_one_tensor_may_fill_two_parameters() -> None:
    model = Model(k_scale=(), v_scale=())
    load(
        model,
        {"kv_scale": torch.tensor(3.0)},
        Convert("kv_scale", ["k_scale", "v_scale"], lambda scale: (scale, scale)),
    )
    assert model.k_scale.item() == model.v_scale.item() == 3.0


def test_one_rule_covers_a_modules_weight_and_its_companions() -> None:
    """Keys and values are one projection in the file: whatever it has, scales included, goes to both."""
    model = Model(**{f"attn__{p}__{leaf}": s for p in "kv" for leaf, s in (("weight", (2, 2)), ("weight_scale", ()))})
    tensors = {"attn.kv.weight": counted(2, 2), "attn.kv.weight_scale": torch.tensor(3.0)}
    load(model, tensors, Convert("attn.kv.{leaf}", ["attn.k.{leaf}", "attn.v.{leaf}"], lambda t: (t, t)))
    for part in "kv":
        assert torch.equal(model.get_parameter(f"attn.{part}.weight").data, counted(2, 2))
        assert model.get_parameter(f"attn.{part}.weight_scale").item() == 3.0


def test_a_fused_tensor_and_its_block_scales_are_taken_apart_each_by_itself() -> None:
    model = Model(**{f"w{n}__{leaf}": (2, s) for n in (1, 3) for leaf, s in (("weight", 6), ("scale", 3))})
    tensors = {"gate_up.weight": counted(4, 6), "gate_up.scale": counted(4, 3)}
    rule = Convert("gate_up.{leaf}", ["w1.{leaf}", "w3.{leaf}"], "split_gate_up")
    for _ in range(2):
        load(model, tensors, rule)
        for leaf, columns in (("weight", 6), ("scale", 3)):
            joined = torch.cat([model.get_parameter(f"w{n}.{leaf}").data for n in (1, 3)])
            assert torch.equal(joined, counted(4, columns))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", [["up", "gate"], ["gate", "up"]])
def test_experts_gate_and_up_are_taken_apart_in_the_order_that_is_declared(interleaved: bool, order: list[str]) -> None:
    def apart(both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)  # type: ignore[return-value]

    model = Model(gate=(3, 2, 4), up=(3, 2, 4))
    rows = counted(3, 4, 4)
    found = plan(model, {"gate_up": rows}, Convert("gate_up", order, apart))
    assert found.ok
    assert "computed" not in found.explain("gate")
    found.run(model)
    first, second = (getattr(model, name).data for name in order)
    for expert in range(3):
        for row in range(2):
            at = (2 * row, 2 * row + 1) if interleaved else (row, 2 + row)
            assert torch.equal(first[expert, row], rows[expert, at[0]])
            assert torch.equal(second[expert, row], rows[expert, at[1]])


def test_the_same_mapping_converted_twice_gives_the_same_twice() -> None:
    tensors = {"q": counted(2, 2), "k": counted(2, 2, start=4)}
    rule = Convert(["q", "k"], "qk", lambda q, k: torch.cat([q, k]))
    for _ in range(2):
        model = Model(qk=(4, 2))
        load(model, tensors, rule)
        assert torch.equal(model.qk.data, counted(4, 2))
    assert sorted(tensors) == ["k", "q"]


def test_a_function_that_computes_is_run_on_real_tensors() -> None:
    model = Model(w=(2, 2))
    found = plan(model, {"w": counted(2, 2)}, Convert("w", "w", lambda w: w * 2 + 1))
    assert found.ok
    assert "computed (aten.mul.Tensor)" in found.explain("w")
    load(model, {"w": counted(2, 2)}, Convert("w", "w", lambda w: w * 2 + 1))
    assert torch.equal(model.w.data, counted(2, 2) * 2 + 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda w: torch.from_numpy(w.numpy().T.copy()),
        lambda w: torch.tensor(w.tolist()).t(),
        lambda w: w.t() * (1.0 if w[0, 0].item() == 0 else 2.0),
        lambda w: w.t() if bool(w.max() > 1) else w,
    ],
)
def test_a_function_that_looks_at_values_is_run_on_real_tensors_too(function: Any) -> None:
    model = Model(w=(3, 2))
    assert plan(model, {"w": counted(2, 3)}, Convert("w", "w", function)).ok
    load(model, {"w": counted(2, 3)}, Convert("w", "w", function))
    assert torch.equal(model.w.data, counted(2, 3).t())


def test_a_function_that_catches_what_a_trace_throws_at_it_is_not_believed() -> None:
    def careless(w: torch.Tensor) -> torch.Tensor:
        try:
            return w * 2
        except Exception:
            return w

    model = Model(w=(2, 2))
    load(model, {"w": counted(2, 2)}, Convert("w", "w", careless))
    assert torch.equal(model.w.data, counted(2, 2) * 2)


def test_a_function_of_another_module_is_named_in_text() -> None:
    model = Model(w=(2, 2))
    load(model, {"w": torch.full((2, 2), 4.0)}, Convert("w", "w", "torch:sqrt"))
    assert torch.equal(model.w.data, torch.full((2, 2), 2.0))


def test_a_conversion_may_be_written_for_renamed_names() -> None:
    model = Model(qk=(4, 2))
    load(
        model,
        {"x.q": counted(2, 2), "x.k": counted(2, 2, start=4)},
        Rename("x", ""),
        Convert(["q", "k"], "qk", lambda q, k: torch.cat([q, k])),
    )
    assert torch.equal(model.qk.data, counted(4, 2))


def test_sizes_that_a_rule_leaves_out_come_from_the_models_config() -> None:
    model = Model(q=(8, 3), k=(4, 3), v=(4, 3))
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=2)  # type: ignore[assignment]
    load(model, {"qkv": counted(16, 3)}, Convert("qkv", ["q", "k", "v"], "split_qkv"))
    assert torch.equal(model.k.data, counted(4, 3, start=24))


def test_sizes_that_nobody_tells_are_asked_for() -> None:
    found = plan(
        Model(q=(8, 3), k=(4, 3), v=(4, 3)), {"qkv": counted(16, 3)}, Convert("qkv", ["q", "k", "v"], "split_qkv")
    )
    assert "needs heads, kv_heads, head_dim" in found.errors[0].message
    assert "heads=..." in str(found.errors[0].hint)


def test_a_function_that_does_not_suit_its_tensors_is_an_error_with_their_shapes() -> None:
    found = plan(
        Model(w=(4, 2)),
        {"a": counted(2, 2), "b": counted(2, 3)},
        Convert(["a", "b"], "w", lambda a, b: torch.cat([a, b])),
    )
    assert found.errors[0].kind == "rule"
    assert "[2, 2] torch.float32, [2, 3] torch.float32" in found.errors[0].message
    assert found.errors[0].tensors == ("w", "a", "b")


@pytest.mark.parametrize(
    ("source", "stored", "targets"), [("a", "a", ["x.x", "x.x"]), ("{i}.{j}", "x.x", ["{i}.{j}", "{j}.{i}"])]
)
def test_a_function_that_would_fill_one_target_twice_is_an_error(source: str, stored: str, targets: list[str]) -> None:
    found = plan(Model(x__x=(2,)), {stored: counted(2)}, Convert(source, targets, lambda a: (a, a.flip(0))))
    assert "would fill x.x twice" in found.errors[0].message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _: None, "returned NoneType"),
        (lambda _: "x", "returned str"),
        (lambda w: (w, w), "returned 2 tensors for 1 targets"),
        (lambda w: {"w": w}, "returned dict"),
    ],
)
def test_a_function_that_returns_something_else_is_an_error(function: Any, message: str) -> None:
    found = plan(Model(w=(2,)), {"w": counted(2)}, Convert("w", "w", function))
    assert message in found.errors[0].message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Convert([], "a", "transpose"), "at least one source"),
        (lambda: Convert("a", [], "transpose"), "at least one target"),
        (lambda: Convert("a", "", "transpose"), "none may be empty"),
        (lambda: Convert(3, "a", "transpose"), "are a pattern or several"),
        (
            lambda: Convert("a", "b", "fuse_qvk"),
            "no ready-made layout 'fuse_qvk' (did you mean 'fuse_qkv'?); there are common, ",
        ),
        (lambda: Convert("a", "b", "no_such_module:f"), "can't be imported"),
        (lambda: Convert("a", "b", "torch:no_such_function"), "can't be imported"),
        (lambda: Convert("a", "b", "torch:__version__"), "is no function"),
        (lambda: Convert("a", "b", ":f"), "no ready-made layout"),
        (lambda: Convert("a.{x}.{y}", "b", "stack_experts"), "several wildcards that no target has: {x}, {y}"),
        (lambda: Convert("a", "b.{x}.{y}", "unstack_experts"), "over just one"),
        (lambda: Convert("a", ["b.{x}", "c"], "unstack_experts"), "the target 'c' has no {x}, which others have"),
        (lambda: Convert("a", "b.**", "unstack_experts"), "can't stand for an index"),
        (lambda: Convert(["a.{i}", "b"], "c.{i}", lambda a, b: a), "every source must have it"),
        (lambda: Convert("a.{i}", ["b.{i}", "c"], lambda a: (a, a)), "several groups would fill it"),
        (lambda: Convert(["a", "b"], "c", "transpose"), "can't be called with 2 tensors"),
        (lambda: Convert("a", "c", "transpose", dim=1), "can't be called with 1 tensors and dim"),
        (lambda: Convert(["a", "b"], "c", "fuse_qkv", v=["d"]), "v is a tensor of fuse_qkv, and not one of its sizes"),
        (lambda: Convert("a", "c", "pad_rows", rows="10"), "rows='10' is no whole number"),
        (lambda: Convert("a", "c", lambda a, *, n: a), "missing a required"),
    ],
)
def test_a_conversion_that_makes_no_sense_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(message)):
        make()


# ------------------------------------------------------------------ no harm, nothing unnoticed


def test_rules_do_no_harm_to_names_that_are_right_already() -> None:
    model = Model(model__w=(2,), model__b=(2,))
    right = {"model.w": counted(2), "model.b": counted(2)}
    for rule in (Rename("", "model"), Rename("model", "")):
        found = plan(model, right, rule)
        assert found.ok
        assert found.loaded == ["model.b", "model.w"]
        notices = [f for f in found.findings if f.kind == "rule"]
        assert [f.severity for f in notices] == ["warning"]
        assert str(rule) in notices[0].message
        assert set(notices[0].tensors) == set(right)


def test_a_conversion_does_no_harm_to_names_that_are_right_already() -> None:
    model = Model(q=(2, 2), k=(2, 2), v=(2, 2))
    found = plan(model, {n: counted(2, 2) for n in "qkv"}, Convert(["q", "k", "v"], "qkv", "fuse_qkv"))
    assert found.ok
    assert found.loaded == ["k", "q", "v"]
    assert "not applied" in next(f for f in found.findings if f.kind == "rule").message


def test_a_fused_checkpoint_passes_a_rule_for_parts_by() -> None:
    found = plan(Model(qkv=(6, 2)), {"qkv": counted(6, 2)}, Convert(["q", "k", "v"], "qkv", "fuse_qkv"))
    assert found.ok


def test_a_name_of_the_models_own_may_be_swapped_for_another() -> None:
    model = Model(gate=(2,), up=(2,))
    load(model, {"gate": counted(2), "up": counted(2, start=5)}, Rename("gate", "up"), Rename("up", "gate"))
    assert torch.equal(model.up.data, counted(2))
    assert torch.equal(model.gate.data, counted(2, start=5))


def test_a_rule_that_matches_nothing_is_reported_and_the_names_shown() -> None:
    rules = [Rename("backbon", ""), Drop("junk"), Convert("q.{i}", "w.{i}", "transpose"), Drop("extra")]
    found = plan(Model(w=(2,)), {"w": counted(2), "extra": counted(1)}, *rules)
    notices = [f for f in found.findings if f.kind == "rule"]
    assert [f.severity for f in notices] == ["warning"] * 3
    assert [str(r) for r in rules[:3]] == [f.message.removesuffix(" matches no tensor of the source") for f in notices]
    assert "'extra'" in str(notices[0].hint)


def test_rules_that_all_match_leave_nothing_to_say() -> None:
    found = plan(Model(w=(2,)), {"x.w": counted(2), "junk": counted(1)}, Rename("x", ""), Drop("junk"))
    assert [f.kind for f in found.findings] == []
    assert found.decided_by[0] == "the caller's rules"


def test_a_conversion_into_nothing_the_model_has_says_so() -> None:
    found = plan(
        Model(w=(2,)),
        {"w": counted(2), "q": counted(2, 2), "k": counted(2, 2)},
        Convert(["q", "k"], "qk", lambda *t: torch.cat(t)),
    )
    assert found.ok
    assert sorted(found.unexpected) == ["k", "q"]
    assert "would make 'qk' of it, which the model does not have" in str(found.findings[0].hint)


def test_an_automatic_mapper_leaves_the_models_own_names_alone() -> None:
    mapper = RuleMapper([Drop("w"), Rename("x", "")], ("w",), automatic=True, origin="some plugin")
    assert claim_name("w", [mapper], ("w",)).dropped is False
    assert claim_name("v.w", [mapper], ("w",)).rules == ("drop 'w' (some plugin)",)
    assert mapper.unused() == ["rename 'x' -> '' (some plugin)"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("lambda w: 1 / 0", "division by zero"),
        ("lambda w: None", "returned NoneType"),
        ("'split_qkv'", "needs heads, kv_heads, head_dim"),
        ("lambda w: w[0]", "the model wants [2, 2]"),
    ],
)
def test_a_plugins_conversion_that_fails_while_planning_is_told_with_the_plugins_name(
    tmp_path: Path, function: str, said: str
) -> None:
    source = f"""
from weightloaders import Convert, hookimpl
@hookimpl
def rules_for(model):
    targets = ["w", "b", "c"] if {function!r} == "'split_qkv'" else "w"
    return Convert("old", targets, {function})
"""
    points = {"weightloaders.hooks": {"ruler": "ruler"}}
    with fake_distribution(tmp_path, "ruler", entry_points=points, modules={"ruler": source}), isolated_registry():
        found = plan_load(Model(w=(2, 2)), {"old": counted(2, 2)})
    assert not found.ok
    assert said in found.errors[0].message
    assert "ruler 1.0" in str(found.errors[0])


# ------------------------------------------------------------------ linear in the number of names


def test_of_hundreds_of_rules_only_those_that_share_a_segment_with_a_name_are_tried_on_it() -> None:
    leaves = ("q", "k", "v", "o", "gate", "up", "down")
    patterns = [Pattern(f"**.layers.{{i}}.{leaf}{n}.weight") for leaf in leaves for n in range(30)]
    patterns += [Pattern(f"model.layers.{n}.*.bias") for n in range(60)]
    index = PatternIndex(patterns)
    names = [
        f"model.layers.{i}.{leaf}{i % 40}.{end}" for i in range(80) for leaf in leaves for end in ("weight", "bias")
    ]
    tried = sum(len(index.candidates(name)) for name in names)
    assert len(patterns) == 270
    # Each name has one pattern of its own at most, and one of its layer.
    assert tried <= 2 * len(names)


def test_a_pattern_without_a_segment_of_its_own_is_tried_on_every_name() -> None:
    index = PatternIndex([Pattern("a.*"), Pattern("**"), Pattern("block{i}"), None, Pattern("b")])
    assert index.candidates("a.b") == [0, 1, 2, 3, 4]
    assert index.candidates("c") == [1, 2, 3]


_SEGMENTS = st.sampled_from(["a", "b", "c1", "c2", "*", "**", "c{i}", "{j}"])


@given(
    st.lists(st.lists(_SEGMENTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12),
    st.lists(st.sampled_from(["a", "b", "c1", "c2", ""]), min_size=1, max_size=5).map(".".join),
)
def test_no_pattern_that_matches_is_passed_over(texts: list[str], name: str) -> None:
    def usable(text: str) -> bool:
        return text.count("{i}") < 2 and text.count("{j}") < 2

    patterns = [Pattern(text) for text in texts if usable(text)]
    candidates = PatternIndex(patterns).candidates(name)
    assert candidates == sorted(set(candidates))
    for at, pattern in enumerate(patterns):
        found = (pattern.whole.match(name + "."), pattern.front.match(name + "."), pattern.anywhere.search(name + "."))
        assert at in candidates or not any(found)


def test_rules_apply_in_their_order_whichever_segment_they_are_looked_up_by() -> None:
    rules = [Rename("**.x", "**.y"), Rename("a.*", "b.*"), Rename("*.x", "*.z"), Rename("b.*", "c.*")]
    assert renamed("a.x", *rules) == "b.y"
    assert renamed("a.x", *reversed(rules)) == "b.z"
    # What a capture carries over may be met by a rule that the name as it was had no segment for.
    assert renamed("block7.w", Rename("block{i}", "h.{i}"), Rename("*.7", "*.seven")) == "h.seven.w"


def test_a_plan_asks_about_each_name_once() -> None:
    class Counting:
        automatic = False

        def __init__(self) -> None:
            self.asked: list[str] = []

        def claim(self, name: str) -> None:
            self.asked.append(name)

    names = [f"layers.{i}.w" for i in range(50)]
    model = Model(**{name.replace(".", "__"): (2,) for name in names})
    mapper = Counting()
    found = Planner(Targets(model), [mapper], Policies()).plan([*as_catalogue({n: counted(2) for n in names}).infos()])
    assert found.ok
    assert sorted(mapper.asked) == sorted(names)


def test_natural_order_counts() -> None:
    names = ["layers.10.w", "layers.9.w", "layers.b", "shard_10", "shard_9", "layers", "9" * 5000, "a" + "1" * 5000]
    assert sorted(names[:5], key=natural_order) == ["layers.9.w", "layers.10.w", "layers.b", "shard_9", "shard_10"]
    assert len(sorted(names, key=natural_order)) == len(names)


# ------------------------------------------------------------------ the YAML form

_YAML = """
rename:
  - {backbone: model}
  - {old: a, new: b}
  - [c, d]
  - {h1: layers.1, h2: layers.2}
drop:
  - inv_freq
  - 7
convert:
  - {sources: [q, k, v], targets: qkv, function: fuse_qkv}
  - sources: w
    targets: w
    function: pad_rows
    rows: 16
"""


def _texts(rules: Any) -> list[str]:
    return [str(rule) for rule in rules]


_RULES = [
    "rename 'backbone' -> 'model'",
    "rename 'a' -> 'b'",
    "rename 'c' -> 'd'",
    "rename 'h1' -> 'layers.1'",
    "rename 'h2' -> 'layers.2'",
    "drop 'inv_freq'",
    "drop '7'",
    "fuse_qkv(q, k, v) -> qkv",
    "pad_rows(w) -> w",
]


def test_rules_may_be_written_in_yaml(tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "my rules.yaml"
    file.write_text(_YAML)
    for form in (_YAML, file, str(file), yaml.safe_load(_YAML), [yaml.safe_load(_YAML)]):
        rules = parse_rules(form)
        assert _texts(rules) == _RULES
    assert rules[-1].sizes == {"rows": 16}


def test_other_forms_of_rules() -> None:
    assert parse_rules(None) == ()
    assert parse_rules([]) == ()
    assert parse_rules({}) == ()
    assert parse_rules(Drop("a")) == (Drop("a"),)
    assert parse_rules(rule for rule in [Drop("a")]) == (Drop("a"),)
    assert parse_rules([Drop("a"), {"rename": {"b": "c"}}]) == (Drop("a"), Rename("b", "c"))
    assert parse_rules("rename: {backbone: }") == (Rename("backbone", ""),)
    assert parse_rules("rename: {'': model}") == (Rename("", "model"),)
    assert parse_rules("drop: a.*") == (Drop("a.*"),)
    assert parse_rules('{"drop": ["a"]}') == (Drop("a"),)


def test_an_empty_rule_file_has_no_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text("# nothing yet\n")
    assert parse_rules(tmp_path / "rules.yml") == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"renames": {}}, "no key 'renames'; there are rename, drop, convert"),
        ({3: {}}, "no key '3'"),
        ({"rename": ["a"]}, "takes old names with new ones, not 'a'"),
        ({"rename": [["a", "b", "c"]]}, "takes old names with new ones"),
        ({"rename": 3}, "takes a list, not 3"),
        ({"rename": {"a": ["b"]}}, "takes names, not ['b']"),
        ({"rename": {"a": True}}, "takes names, not True"),
        ({"drop": [["a"]]}, "takes names, not ['a']"),
        ({"drop": [None]}, "would drop everything"),
        ({"convert": [{"sources": "a", "targets": "b"}]}, "needs sources, targets and function"),
        ({"convert": ["a"]}, "needs sources, targets and function"),
        (["rename"], "this is no rule: 'rename'"),
        ([3], "this is no rule: 3"),
        (3, "these are no rules: 3"),
        ("rename: [", "no valid YAML"),
        ("just: text: here", "no valid YAML"),
        ("a: b", "no key 'a'"),
        ("- plain", "there is no file '- plain' to read rules from"),
    ],
)
def test_malformed_rules_are_refused_with_the_form_they_should_have(value: Any, message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(message)):
        parse_rules(value)


@pytest.mark.parametrize("text", ["rename: {a: b, a: c}", "rename: {a: b}\nrename: {c: d}\n", "drop: [{a: 1, 'a': 2}]"])
@pytest.mark.parametrize("form", ["text", "file"])
def test_a_key_that_occurs_twice_is_refused_for_one_of_the_two_would_be_lost(
    tmp_path: Path, text: str, form: str
) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(RuleError, match=r"the key '(a|rename)' occurs twice"):
        parse_rules(text if form == "text" else tmp_path / "rules.yaml")


@pytest.mark.parametrize(
    "value", ["!!int x", "!!int ''", "!!bool x", "!!timestamp x", "!!float x", "2020-99-99", "9" * 5000, "[" * 20_000]
)
def test_what_yaml_can_not_make_of_a_text_is_our_own_error(value: str) -> None:
    with pytest.raises(RuleError, match="no valid YAML"):
        parse_rules(f"rename: {value}")


def test_aliases_that_stand_for_more_than_fits_in_memory_are_told_in_a_few_words() -> None:
    layers = "".join(f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(30))
    with pytest.raises(RuleError) as caught:
        parse_rules(f"rename:\n{layers}")
    assert len(str(caught.value)) < 2000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_only_a_file_of_a_sensible_size_is_read_for_rules(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with (tmp_path / "sparse.yaml").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    for name, said in (("pipe", "not a regular file"), ("sparse", "too large"), ("binary", "UTF-8"), ("x" * 300, "x")):
        for place in (tmp_path / f"{name}.yaml", str(tmp_path / f"{name}.yaml")):
            with pytest.raises(RuleError, match=said):
                parse_rules(place)


def test_a_mistake_in_a_rule_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("rename: {'a*': b}")
    with pytest.raises(RuleError, match=r"rules\.yaml") as caught:
        parse_rules(str(file))
    assert caught.value.file == str(file)
    assert caught.value.hint
    for missing in ("no_such_file.yaml", tmp_path / "no_such.yaml", tmp_path, "no_such_file"):
        with pytest.raises(RuleError, match=r"the rules can't be read|there is no file"):
            parse_rules(missing)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RuleError, match="the rules can't be read"):
        parse_rules(file)


def test_rules_in_a_file_load_a_model(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        "rename: {backbone: ''}\ndrop: [junk]\nconvert: [{sources: [q, k, v], targets: qkv, function: fuse_qkv}]\n"
    )
    model = Model(qkv=(6, 2), w=(2,))
    tensors = {f"backbone.{n}": counted(2, 2, start=4 * i) for i, n in enumerate("qkv")}
    report = load_into(
        model,
        {**tensors, "backbone.w": counted(2), "junk": counted(1)},
        rules=str(tmp_path / "rules.yaml"),
        progress=False,
    )
    assert sorted(report.loaded) == ["qkv", "w"]
    assert torch.equal(model.qkv.data, counted(6, 2))


def test_a_conversion_takes_the_patterns_of_another():
    first = Convert(["*.gate", "*.up"], "*.gate_up", "fuse_gate_up")
    again = Convert(first.sources, first.targets, first.function)
    assert (again.sources, again.targets) == (first.sources, first.targets)
