"""`save_weights(layout="checkpoint")`: a model is written as its checkpoint had it, or it is said why it can't be."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import textwrap
import weakref
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from weightloaders import (
    BaseWeightLoader,
    Convert,
    Drop,
    LoadPlan,
    Rename,
    default_weight_loader,
    load_into,
    plan_load,
    save_weights,
)
from weightloaders.errors import ConfigError, PlanError, SaveError, WeightLoadersError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def module_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, **attributes: Any) -> nn.Module:
    """A module with parameters of these dotted names; all of them are noise."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.randn(shape).to(dtype)))
    for key, value in attributes.items():
        setattr(root, key, value)
    return root


def noise(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: (torch.randn(shape) * 8).to(dtype) for name, shape in shapes.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names, shapes, dtypes and bytes."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def written(model: nn.Module, folder: Path, **options: Any) -> dict[str, Tensor]:
    (file,) = save_weights(model, folder / "back.safetensors", layout="checkpoint", **options)
    return load_file(file)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------ layouts

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 4}
QKV = {"l.0.q.weight": (16, 6), "l.0.k.weight": (8, 6), "l.0.v.weight": (8, 6)}
CASES: dict[str, tuple[dict[str, tuple[int, ...]], Any, dict[str, tuple[int, ...]]]] = {
    "names alone": ({"a.w": (2, 3), "b": (4,)}, [Rename("", "model")], {"model.a.w": (2, 3), "model.b": (4,)}),
    "scalars": ({"s": ()}, [], {"s": (1,)}),
    "nothing in it": ({"w": (0, 4), "b": (3,)}, [], {"w": (0, 4), "b": (3,)}),
    "transposed (Conv1D)": (
        {"h.0.w": (5, 7), "h.1.w": (5, 7)}, [Convert("h.*.w", "h.*.w", "transpose")],
        {"h.0.w": (7, 5), "h.1.w": (7, 5)},
    ),
    "fused": (QKV, [Convert(list(QKV), "l.0.qkv.weight", "fuse_qkv")], {"l.0.qkv.weight": (32, 6)}),
    "fused and interleaved": (
        QKV, [Convert(list(QKV), "l.0.qkv.weight", "fuse_qkv_interleaved", **HEADS)], {"l.0.qkv.weight": (32, 6)},
    ),
    "taken apart": (
        {"qkv.bias": (32,)}, [Convert("qkv.bias", ["q.bias", "k.bias", "v.bias"], "split_qkv", **HEADS)],
        {"q.bias": (16,), "k.bias": (8,), "v.bias": (8,)},
    ),
    "taken apart by groups": (
        {"qkv": (32, 3)}, [Convert("qkv", ["q", "k", "v"], "split_qkv_interleaved", **HEADS)],
        {"q": (16, 3), "k": (8, 3), "v": (8, 3)},
    ),
    "gate and up, row by row": (
        {"gate": (3, 4), "up": (3, 4)}, [Convert(["gate", "up"], "gate_up", "fuse_gate_up_interleaved")],
        {"gate_up": (6, 4)},
    ),
    "rotary, Meta's": (
        {"wq": (16, 6)}, [Convert("wq", "q", "rotary_meta_to_hf", heads=4, head_dim=4)], {"q": (16, 6)},
    ),
    "rotary, of transformers": (
        {"q": (16, 6)}, [Convert("q", "wq", "rotary_hf_to_meta", heads=4, head_dim=4)], {"wq": (16, 6)},
    ),
    "a padded vocabulary": ({"e": (5, 4)}, [Convert("e", "e", "pad_rows", rows=8)], {"e": (8, 4)}),
    "experts stacked": (
        {**{f"e.{i}.w1": (4, 3) for i in range(12)}, **{f"e.{i}.w3": (4, 3) for i in range(12)}},
        [Convert(["e.{i}.w1", "e.{i}.w3"], "w13", "stack_experts")], {"w13": (12, 8, 3)},
    ),
    "experts taken apart": (
        {"w2": (3, 4, 5)}, [Convert("w2", "e.{i}.w2", "unstack_experts")], {f"e.{i}.w2": (4, 5) for i in range(3)},
    ),
    "another shape": ({"w": (4, 6)}, [Convert("w", "w", "reshape", shape=[2, 2, 6])], {"w": (2, 2, 6)}),
    "backwards": ({"w": (4, 6)}, [Convert("w", "w", lambda w: w.flip(0, 1))], {"w": (4, 6)}),
    "shuffled": ({"w": (4, 6)}, [Convert("w", "w", lambda w: w[torch.tensor([2, 0, 3, 1])])], {"w": (4, 6)}),
    "repeated heads": (
        {"k": (2, 3)}, [Convert("k", "k", lambda k: k[:, None].expand(2, 2, 3).reshape(4, 3))], {"k": (4, 3)},
    ),
    "one for two": ({"w": (4, 3)}, [Convert("w", ["a", "b"], lambda w: (w, w))], {"a": (4, 3), "b": (4, 3)}),
    "overlapping": (
        {"w": (6, 2)}, [Convert("w", ["a", "b"], lambda w: (w[:4], w[2:]))], {"a": (4, 2), "b": (4, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_written_back_as_it_was(name: str, tmp_path: Path) -> None:
    shapes, rules, own = CASES[name]
    hub = noise(shapes)
    save_file(hub, tmp_path / "hub.safetensors")
    model = module_of(own)
    load_into(model, tmp_path / "hub.safetensors", rules=rules, progress=False)
    assert_same(written(model, tmp_path), hub)
    # The same out of memory that is not in row-major order.
    for parameter in model.parameters():
        parameter.data = (
            parameter.data.mT.contiguous().mT if parameter.dim() > 1 else parameter.data.repeat_interleave(2)[::2]
        )
    assert_same(written(model, tmp_path), hub)
    again = module_of(own)
    load_into(again, tmp_path / "back.safetensors", rules=rules, progress=False)
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_what_torch_turns_around_in_no_such_dtype_is_turned_around_all_the_same(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    hub = {"w": torch.randint(0, 100, (4, 6)).to(dtype)}
    model = nn.Module()
    model.register_buffer("w", torch.zeros(4, 6, dtype=dtype))
    load_into(model, hub, rules=CASES["backwards"][1], progress=False)
    assert torch.equal(model.w.to(torch.float64), hub["w"].to(torch.float64).flip(0, 1))
    assert_same(written(model, tmp_path), hub)


@st.composite
def layers(draw: Any) -> tuple[dict[str, tuple[int, ...]], list[Any], dict[str, tuple[int, ...]]]:
    """Some of the layouts above side by side, each in a part of its own, with a prefix that comes or goes."""
    hub: dict[str, tuple[int, ...]] = {}
    rules: list[Any] = []
    own: dict[str, tuple[int, ...]] = {}
    for part, name in enumerate(draw(st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4))):
        shapes, conversions, targets = CASES[name]
        converts = [rule for rule in conversions if isinstance(rule, Convert)]
        if not converts and conversions:
            continue
        prefix = f"part{part}"
        hub |= {f"{prefix}.{key}": shape for key, shape in shapes.items()}
        own |= {f"{prefix}.{key}": shape for key, shape in targets.items()}
        rules += [
            Convert(
                [f"{prefix}.{p.text}" for p in c.sources], [f"{prefix}.{p.text}" for p in c.targets],
                c.function if c.function_name == "<lambda>" else c.function_name, **c.sizes,
            )
            for c in converts
        ]  # fmt: skip
    if draw(st.booleans()):
        hub = {f"module.{key}": shape for key, shape in hub.items()}
        rules.insert(0, Rename("module", ""))
    hub["rest"] = own["rest"] = (draw(st.integers(1, 4)),)
    return hub, rules, own


DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn, torch.uint16, torch.complex64]


@settings(max_examples=40, deadline=None)
@given(layers(), st.sampled_from(DTYPES), st.integers(40, 4000))
def test_whatever_rules_led_in_the_way_back_is_the_inverse(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any, dtype: torch.dtype, shard: int
) -> None:
    shapes, rules, own = drawn
    hub = noise(shapes, dtype)
    folder = tmp_path_factory.mktemp("back")
    model = module_of(own)
    if dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
    else:
        model = nn.Module()
        for name, shape in own.items():
            _put_buffer(model, name, torch.zeros(shape, dtype=dtype))
    load_into(model, hub, rules=rules, progress=False)
    save_weights(model, folder, layout="checkpoint", max_shard_size=shard)
    assert_same({k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}, hub)


def _put_buffer(root: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_buffer(leaf, tensor, persistent=persistent)


# ------------------------------------------------------------------ models of transformers

TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "Mixtral, per expert": (
        lambda: MixtralForCausalLM(
            MixtralConfig(
                vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, num_local_experts=11,
            )
        ),
        lambda tensors: tensors,
    ),
    "GPT-2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)),
        lambda tensors: tensors,
    ),
    "GPT-2, tied names both": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)),
        lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()},
    ),
    "GPT-2, without prefix": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)),
        lambda tensors: {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()},
    ),
    "BERT, old names": (
        lambda: BertModel(
            BertConfig(
                vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
                max_position_embeddings=8,
            )
        ),
        lambda tensors: {
            "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
            for name, tensor in tensors.items()
        },
    ),
    "BERT, with its position numbers": (
        lambda: BertModel(
            BertConfig(
                vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
                max_position_embeddings=8,
            )
        ),
        lambda tensors: {**tensors, "embeddings.position_ids": torch.arange(8)[None]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_are_written_back_as_they_were(name: str, tmp_path: Path) -> None:
    make, changed = TRANSFORMERS[name]
    make().save_pretrained(tmp_path / "hub")
    hub = {key: tensor.clone() for key, tensor in changed(load_file(tmp_path / "hub" / "model.safetensors")).items()}
    model = make()
    load_into(model, hub, progress=False)
    assert_same(written(model, tmp_path), hub)


# ------------------------------------------------------------------ models that say themselves how they are filled


class Packed(nn.Module):
    packed_modules_mapping = {"qkv": ["q", "k", "v"]}  # noqa: RUF012 -- as vLLM's models have it

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        self.qkv = nn.Module()
        for name, parameter in parameters.items():
            self.qkv.register_parameter(name, parameter)


def test_packed_modules_are_taken_apart_again(tmp_path: Path) -> None:
    hub = noise({"q.weight": (4, 3), "k.weight": (2, 3), "v.weight": (2, 3)})
    model = Packed(weight=nn.Parameter(torch.empty(8, 3)))
    load_into(model, hub, progress=False)
    assert_same(written(model, tmp_path), hub)


def with_loader(function: Callable[..., Any]) -> Packed:
    """A fused parameter with a loader of its own, which finds in its attributes what it needs."""
    parameter = nn.Parameter(torch.zeros(8, 3))
    parameter.output_dim = 0  # type: ignore[attr-defined]
    parameter.weight_loader = function  # type: ignore[attr-defined]
    return Packed(weight=parameter)


def by_shard(param: Any, loaded: Tensor, shard: str) -> None:
    start, rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[shard]
    view = param.data.narrow(param.output_dim, start, rows)
    assert view.shape == loaded.shape
    view.copy_(loaded)


def halved(param: Any, loaded: Tensor, shard: str) -> None:
    by_shard(param, loaded / 2, shard)


def by_value(param: Any, loaded: Tensor, shard: str) -> None:
    by_shard(param, loaded if loaded.sum() > -1e9 else loaded.flip(0), shard)


HUB = {"q.weight": (4, 3), "k.weight": (2, 3), "v.weight": (2, 3)}


def test_what_a_parameters_own_loader_did_is_found_out_and_undone(tmp_path: Path) -> None:
    hub = noise(HUB)
    model = with_loader(by_shard)
    load_into(model, hub, progress=False)
    before = model.qkv.weight.clone()
    assert_same(written(model, tmp_path), hub)
    assert torch.equal(model.qkv.weight, before)


def test_our_own_default_loader_is_undone(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    model.weight.weight_loader = default_weight_loader  # type: ignore[attr-defined]
    hub = noise({"weight": (3, 2), "bias": (3,)})
    load_into(model, hub, progress=False)
    assert_same(written(model, tmp_path), hub)


@pytest.mark.parametrize("loader", [halved, by_value])
def test_a_loader_that_computes_is_named_as_what_can_not_be_inverted(loader: Any, tmp_path: Path) -> None:
    model = with_loader(loader)
    load_into(model, noise(HUB), progress=False)
    with pytest.raises(
        SaveError, match=r"q\.weight: qkv\.weight's own weight_loader took it, and .* can't be inverted"
    ):
        written(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ what can't be, and is said


def refused(model: nn.Module, folder: Path, **options: Any) -> str:
    """The error; nothing was written."""
    before = sorted(folder.iterdir())
    with pytest.raises(SaveError) as caught:
        save_weights(model, folder / "out", layout="checkpoint", **options)
    assert sorted(folder.iterdir()) == before
    return str(caught.value)


def test_a_tensor_that_was_dropped_is_named_and_can_be_left_out(tmp_path: Path, caplog: Any) -> None:
    model, hub = nn.Linear(2, 3), noise({"weight": (3, 2), "bias": (3,), "extra.weight": (5,)})
    load_into(model, hub, rules=[Drop("extra")], progress=False)
    message = refused(model, tmp_path)
    assert "extra.weight: a rule drops it" in message
    assert "on_missing={'extra.weight': 'warn'}" in message
    del hub["extra.weight"]
    with caplog.at_level(logging.WARNING, "weightloaders"):
        assert_same(written(model, tmp_path, on_missing={"extra": "warn"}), hub)
    assert "extra.weight" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "weightloaders"):
        assert_same(written(model, tmp_path, on_missing="ignore"), hub)
    assert caplog.text == ""


def test_a_tensor_that_the_model_did_not_take_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    load_into(model, noise({"weight": (3, 2), "bias": (3,), "extra": (5,)}), on_unexpected="ignore", progress=False)
    assert "extra: the model did not take it" in refused(model, tmp_path)


def test_a_tensor_that_did_not_fit_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    load_into(model, noise({"weight": (3, 4), "bias": (3,)}), on_mismatch="ignore", progress=False)
    assert "weight: it did not fit weight, and was not loaded" in refused(model, tmp_path)


def test_what_was_computed_is_named_with_what_it_was_computed_from(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    rules = [Convert(["g", "v"], "weight", "weight_norm")]
    load_into(model, noise({"g": (3, 1), "v": (3, 2)}), rules=rules, progress=False)
    message = refused(model, tmp_path)
    assert "g: weight was computed from it" in message
    assert "v: weight was computed from it" in message


def test_elements_that_were_left_behind_are_counted(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    load_into(model, noise({"weight": (5, 2)}), rules=[Convert("weight", "weight", lambda w: w[:3])], progress=False)
    assert "weight: 4 of its 10 elements are not in the model" in refused(model, tmp_path)


def test_a_parameter_that_the_checkpoint_does_not_have_is_not_left_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    load_into(model, noise({"weight": (3, 2)}), on_missing="ignore", progress=False)
    message = refused(model, tmp_path, on_missing="ignore")
    assert "the checkpoint has no place for bias" in message
    assert "layout='model'" in message


def test_a_parameter_of_another_shape_than_was_loaded_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    load_into(model, noise({"weight": (3, 2)}), progress=False)
    model.weight = nn.Parameter(torch.zeros(4, 2))
    assert "weight: it belongs into weight of shape [3, 2], which has [4, 2]" in refused(model, tmp_path)
    model.extra, model.weight = model.weight, None  # type: ignore[assignment]
    assert "weight: it belongs into weight, which is not there" in refused(model, tmp_path)


def test_copies_that_differ_by_now_are_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    hub = noise({"k": (2, 3), "bias": (3,)})
    model = module_of({"k": (4, 3), "bias": (3,)})
    load_into(model, hub, rules=[Convert("k", "k", lambda k: k.repeat_interleave(2, 0))], progress=False)
    assert_same(written(model, tmp_path), hub)
    with torch.no_grad():
        model.k[1, 0] += 1
    with pytest.raises(SaveError, match=r"'k' can't be written back: .* not the same there any more"):
        written(model, tmp_path)
    assert_same(load_file(tmp_path / "back.safetensors"), hub)


def test_a_model_that_was_never_loaded_or_is_a_copy_needs_a_checkpoint_to_be_named(tmp_path: Path) -> None:
    hub = noise({"linear.weight": (3, 2), "linear.bias": (3,)})
    model, rules = nn.Linear(2, 3), [Rename("linear", "")]
    assert "like=" in refused(model, tmp_path)
    load_into(model, hub, rules=rules, progress=False)
    copied = deepcopy(model)
    assert "like=" in refused(copied, tmp_path)
    assert_same(written(copied, tmp_path, like=hub, rules=rules), hub)


def test_a_checkpoint_that_does_not_fit_can_not_be_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not fit the model"):
        written(nn.Linear(2, 3), tmp_path, like=noise({"weight": (4, 2), "bias": (3,)}))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_its_own_code_filled_is_not_guessed_at(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                default_weight_loader(self.get_parameter(name), tensor.flip(0))

    model, hub = Own(2, 3), noise({"weight": (3, 2), "bias": (3,)})
    load_into(model, hub, progress=False)
    assert "code of its own" in refused(model, tmp_path)


def test_a_loader_that_lets_the_default_do_the_work_loses_nothing(tmp_path: Path) -> None:
    class Mine(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            return hub

        def load_weights(self, model: nn.Module, weights: Any) -> Any:
            return super().load_weights(model, weights)

    model, hub = nn.Linear(2, 3), noise({"weight": (3, 2), "bias": (3,)})
    load_into(model, tmp_path, loader=Mine(), progress=False)
    assert_same(written(model, tmp_path), hub)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "hub"}, {"layout": "model", "dtype": "stored"}, {"layout": "model", "like": {}}, {"rules": []},
        {"layout": "checkpoint", "rules": []}, {"layout": "checkpoint", "dtype": "float32"}, {"layout": None},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(options: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    load_into(model, noise({"weight": (3, 2), "bias": (3,)}), progress=False)
    with pytest.raises(ConfigError):
        save_weights(model, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_on_meta_has_nothing_to_be_written(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    assert "meta" in refused(model, tmp_path, like=noise({"weight": (3, 2), "bias": (3,)}))


def test_a_half_loaded_model_is_refused(tmp_path: Path) -> None:
    def failing() -> Any:
        yield "weight", torch.ones(3, 2)
        raise OSError("gone")

    model = nn.Linear(2, 3)
    load_into(model, noise({"weight": (3, 2), "bias": (3,)}), progress=False)
    with pytest.raises(WeightLoadersError):
        load_into(model, failing(), progress=False)
    with pytest.raises(WeightLoadersError, match="half-loaded"):
        written(model, tmp_path)


# ------------------------------------------------------------------ ties, buffers, dtypes


def test_tied_names_and_equal_duplicates_are_written_as_the_checkpoint_had_them(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    value = torch.randn(4, 3)
    for hub in ({"embed.weight": value}, {"head.weight": value}, {"embed.weight": value, "head.weight": value.clone()}):
        model = Tied()
        load_into(model, hub, progress=False)
        with torch.no_grad():
            model.embed.weight.mul_(2)
        assert_same(written(model, tmp_path), {name: tensor * 2 for name, tensor in hub.items()})


def test_derived_buffers_are_written_where_the_model_has_them_and_else_left_out(tmp_path: Path, caplog: Any) -> None:
    model = nn.Linear(2, 3)
    model.rotary = nn.Module()
    model.rotary.register_buffer("inv_freq", torch.tensor([1.0, 0.5]), persistent=False)
    hub = {**noise({"weight": (3, 2), "bias": (3,)}), "rotary.inv_freq": torch.tensor([1.0, 0.5]).half()}
    load_into(model, {**hub, "layers.0.inv_freq": torch.ones(2)}, progress=False)
    with caplog.at_level(logging.WARNING, "weightloaders"):
        assert_same(written(model, tmp_path), hub)
    assert "layers.0.inv_freq" in caplog.text


def test_values_are_written_in_the_models_dtype_or_on_request_in_the_stored_one(tmp_path: Path) -> None:
    hub = {"weight": torch.randn(3, 2).bfloat16(), "bias": torch.randn(3).half()}
    model = nn.Linear(2, 3)
    load_into(model, hub, progress=False)
    assert_same(written(model, tmp_path), {name: tensor.float() for name, tensor in hub.items()})
    assert_same(written(model, tmp_path, dtype="stored"), hub)
    with torch.no_grad():
        model.bias[0] = 1e6
    with pytest.raises(SaveError, match=r"'bias' has values that torch\.float16 has no room for"):
        written(model, tmp_path, dtype="stored")
    assert_same(load_file(tmp_path / "back.safetensors"), hub)


def test_parts_in_several_dtypes_are_joined_in_one_that_loses_nothing(tmp_path: Path) -> None:
    model = module_of({"a": (2, 3), "b": (2, 3)})
    model.b.data = model.b.data.bfloat16()
    hub = {"ab": torch.randn(4, 3).bfloat16()}
    load_into(model, hub, rules=[Convert("ab", ["a", "b"], lambda ab: ab.chunk(2))], progress=False)
    assert_same(written(model, tmp_path), {"ab": hub["ab"].float()})
    assert_same(written(model, tmp_path, dtype="stored"), hub)


@pytest.mark.parametrize("name", ["fused and interleaved", "experts stacked", "one for two", "names alone"])
def test_a_stream_is_remembered_as_well_as_a_catalogue(name: str, tmp_path: Path) -> None:
    shapes, rules, own = CASES[name]
    hub = noise(shapes)
    model = module_of(own)
    load_into(model, iter(hub.items()), rules=rules, progress=False)
    assert_same(written(model, tmp_path), hub)


def test_a_plan_that_is_run_is_remembered(tmp_path: Path) -> None:
    model, hub = module_of({"qkv": (8, 3)}), noise({"q": (4, 3), "kv": (4, 3)})
    plan_load(model, hub, rules=[Convert(["q", "kv"], "qkv", lambda *parts: torch.cat(parts))]).run(model)
    assert_same(written(model, tmp_path), hub)


def test_a_plan_that_was_read_back_is_remembered_as_well(tmp_path: Path) -> None:
    shapes, rules, own = CASES["fused and interleaved"]
    hub = {**noise(shapes), "rotary.inv_freq": torch.ones(2)}
    save_file(hub, tmp_path / "hub.safetensors")
    plan = LoadPlan.from_json(plan_load(module_of(own), tmp_path / "hub.safetensors", rules=rules).to_json())
    model = module_of(own)
    plan_load(model, tmp_path / "hub.safetensors", plan=plan).run(model)
    del hub["rotary.inv_freq"]
    assert_same(written(model, tmp_path), hub)


def test_a_save_that_fails_on_the_way_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    hub = noise({"a": (2, 3), "k": (2, 3)})
    model = module_of({"a": (2, 3), "k": (4, 3)})
    load_into(model, hub, rules=[Convert("k", "k", lambda k: k.repeat_interleave(2, 0))], progress=False)
    save_weights(model, tmp_path, layout="checkpoint", max_shard_size=24)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) >= 3
    with torch.no_grad():
        model.a += 1
        model.k[1, 0] += 1
    with pytest.raises(SaveError, match="not the same there any more"):
        save_weights(model, tmp_path, layout="checkpoint", max_shard_size=24)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_last_load_counts(tmp_path: Path) -> None:
    model, rules = nn.Linear(2, 3), [Rename("linear", "")]
    load_into(model, noise({"linear.weight": (3, 2), "linear.bias": (3,)}), rules=rules, progress=False)
    hub = noise({"weight": (3, 2), "bias": (3,)})
    load_into(model, hub, progress=False)
    assert_same(written(model, tmp_path), hub)


# ------------------------------------------------------------------ what it costs


def test_what_is_remembered_keeps_neither_the_model_nor_the_tensors_that_were_loaded(tmp_path: Path) -> None:
    model, hub = module_of({"qkv": (8, 3)}), noise({"q": (4, 3), "kv": (4, 3)})
    load_into(model, hub, rules=[Convert(["q", "kv"], "qkv", lambda *parts: torch.cat(parts))], progress=False)
    watched = [weakref.ref(tensor) for tensor in hub.values()]
    del hub
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    remains = [weakref.ref(model), weakref.ref(model.qkv)]
    del model
    gc.collect()
    assert [ref() for ref in remains] == [None, None]


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import resource, sys, torch
        from torch import nn
        from weightloaders import Convert, load_into, save_weights

        experts, rows = 64, 1 << 18
        hub = {f"e.{i}.w": torch.full((rows,), float(i)) for i in range(experts)}
        model = nn.Module()
        model.w = nn.Parameter(torch.empty(experts, rows))
        load_into(model, hub, rules=[Convert("e.{i}.w", "w", "stack_experts")], progress=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        del hub
        held = torch.ones(experts, rows)
        save_weights(model, sys.argv[1] + "/plain", layout="checkpoint")
        del held
        # Not in row-major order: the whole must not be copied for each expert, either.
        model.w.data = model.w.data.t().contiguous().t()
        held = torch.ones(experts, rows)
        save_weights(model, sys.argv[1] + "/turned", layout="checkpoint")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    # The model has 64 MiB, and so has what is held beside it, as the tensors were when it was loaded: so what saving
    # takes shows as what comes on top of that peak.
    assert int(result.stdout) < 8 << 10
    for how in ("plain", "turned"):
        assert load_file(tmp_path / how / "model.safetensors")["e.63.w"][7] == 63


def test_shards_have_an_index_in_the_checkpoints_names(tmp_path: Path) -> None:
    shapes, rules, own = CASES["experts stacked"]
    model, hub = module_of(own), noise(shapes)
    load_into(model, hub, rules=rules, progress=False)
    files = save_weights(model, tmp_path / "out", layout="checkpoint", max_shard_size=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == hub.keys()
    assert all(file.stat().st_size < 2000 for file in files[:-1])
    # Four experts' 48 bytes fit in each.
    assert len(files) == 6 + 1


@pytest.mark.gpu
def test_parameters_on_an_accelerator_are_written_back(tmp_path: Path) -> None:
    for name in ("fused and interleaved", "experts stacked", "transposed (Conv1D)"):
        shapes, rules, own = CASES[name]
        hub = noise(shapes)
        model = module_of(own).to("cuda")
        load_into(model, hub, rules=rules, progress=False)
        assert_same(written(model, tmp_path), hub)
