"""Models on meta, and what a source leaves out: first values come before bytes, and nothing is left as raw memory."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders import load_into, load_status, plan_load
from weightloaders.errors import CoverageError, LoadError, ModelError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def filled(model: nn.Module, value: float = 7.0) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(tensor.shape, value).to(tensor.dtype)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


class Rotary(nn.Module):
    """As in language models: its buffer belongs into no checkpoint, only `reset_parameters` can make it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)))


class Assigning(Rotary):
    def reset_parameters(self) -> None:
        self.inv_freq = 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8))


class Forgetful(Rotary):
    def reset_parameters(self) -> None:
        """Forgets the buffer."""


class Helpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)


class Block(nn.Module):
    def __init__(self, rotary: type[nn.Module] = Rotary) -> None:
        super().__init__()
        self.rotary = rotary()
        self.proj = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


def sources(tensors: Mapping[str, torch.Tensor], tmp_path: Path) -> Iterator[Any]:
    """The same tensors as a file, as a dict and as a stream."""
    save_file(dict(tensors), tmp_path / "m.safetensors")
    yield tmp_path / "m.safetensors"
    yield dict(tensors)
    yield iter(tensors.items())


# ------------------------------------------------------------------ buffers


@pytest.mark.parametrize("rotary", [Rotary, Assigning])
def test_a_buffer_that_only_its_module_can_compute_is_computed(tmp_path: Path, rotary: type[nn.Module]) -> None:
    for source in sources(filled(Block()), tmp_path):
        model = on_meta(lambda: Block(rotary))
        load_into(model, source, progress=False)
        assert torch.equal(model.rotary.inv_freq, 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)))
        assert not any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers()))
        assert all(bool((t == 7).all()) for t in model.state_dict().values())


def test_persistent_buffers_come_from_the_source_with_their_own_dtypes(tmp_path: Path) -> None:
    tensors = filled(Block())
    tensors["norm.num_batches_tracked"] = torch.tensor(12345678901)
    save_file(tensors, tmp_path / "m.safetensors")
    for model in (on_meta(Block), Block()):
        load_into(model, tmp_path / "m.safetensors", progress=False)
        assert int(model.norm.num_batches_tracked) == 12345678901
        assert bool((model.norm.running_var == 7).all())


def test_an_absent_persistent_buffer_is_missing(tmp_path: Path) -> None:
    tensors = filled(Block())
    del tensors["norm.running_var"]
    save_file(tensors, tmp_path / "m.safetensors")
    for model in (on_meta(Block), Block()):
        with pytest.raises(PlanError, match=r"norm\.running_var"):
            load_into(model, tmp_path / "m.safetensors", progress=False)


def test_a_buffer_that_nobody_can_compute_is_an_error_by_name_and_nothing_is_touched(tmp_path: Path) -> None:
    for source in sources(filled(Block()), tmp_path):
        model = on_meta(lambda: Block(Helpless))
        before = dict(model.named_parameters())
        with pytest.raises((ModelError, CoverageError), match=r"rotary\.inv_freq") as caught:
            load_into(model, source, progress=False)
        assert "reset_parameters" in str(caught.value)
        if not isinstance(source, dict | type(tmp_path)):
            continue  # a stream tells only at its end
        assert all(p.device.type == "meta" and p is before[n] for n, p in model.named_parameters())
        assert load_status(model) is None


def test_a_buffer_that_nobody_can_compute_comes_from_the_source_where_that_has_it(tmp_path: Path) -> None:
    tensors = {**filled(Block()), "rotary.inv_freq": torch.arange(4.0)}
    for source in sources(tensors, tmp_path):
        model = on_meta(lambda: Block(Helpless))
        load_into(model, source, progress=False)
        assert torch.equal(model.rotary.inv_freq, torch.arange(4.0))


def test_what_is_computed_is_not_taken_from_an_old_checkpoint(tmp_path: Path) -> None:
    tensors = {**filled(Block()), "rotary.inv_freq": torch.zeros(4)}
    for build in (lambda: on_meta(Block), Block):
        for source in sources(tensors, tmp_path):
            model = build()
            if model.rotary.inv_freq.device.type != "meta":
                model.rotary.reset_parameters()
            report = load_into(model, source, progress=False)
            assert bool(model.rotary.inv_freq.all())
            assert report.unexpected == []


def test_a_reset_that_forgets_a_buffer_is_an_error_and_leaves_a_mark(tmp_path: Path) -> None:
    for source in sources(filled(Block()), tmp_path):
        model = on_meta(lambda: Block(Forgetful))
        with pytest.raises(ModelError, match=r"rotary\.inv_freq .*does not initialise it") as caught:
            load_into(model, source, progress=False)
        assert caught.value.tensor == "rotary.inv_freq"
        assert load_status(model) == "failed"


def test_a_reset_that_fails_is_an_error_with_the_modules_name(tmp_path: Path) -> None:
    class Failing(Rotary):
        def reset_parameters(self) -> None:
            raise KeyError("theta")

    save_file(filled(Block()), tmp_path / "m.safetensors")
    model = on_meta(lambda: Block(Failing))
    with pytest.raises(ModelError, match=r"Failing\.reset_parameters\(\) of rotary failed: KeyError"):
        load_into(model, tmp_path / "m.safetensors", progress=False)


# ------------------------------------------------------------------ parameters left out on purpose


@pytest.mark.parametrize("policy", ["warn", "ignore", {"proj.bias": "warn"}, {"**.bias": "ignore"}], ids=str)
def test_a_missing_parameter_on_meta_starts_as_its_module_would_start_it(tmp_path: Path, policy: Any) -> None:
    tensors = filled(Block())
    del tensors["proj.bias"]
    for source in sources(tensors, tmp_path):
        model = on_meta(Block)
        torch.manual_seed(5)
        report = load_into(model, source, on_missing=policy, progress=False)
        assert report.missing == ["proj.bias"]
        assert report.initialised == ["proj.bias"]
        bound = 1 / 3**0.5
        assert bool(((model.proj.bias != 7) & (model.proj.bias.abs() <= bound)).all())
        assert len(set(model.proj.bias.tolist())) == 2
        # `reset_parameters` also starts the weight, so it has to come before the bytes.
        assert bool((model.proj.weight == 7).all())


def test_a_missing_parameter_of_a_model_with_values_keeps_them(tmp_path: Path) -> None:
    tensors = filled(Block())
    del tensors["proj.bias"]
    for source in sources(tensors, tmp_path):
        model = Block()
        before = model.proj.bias.detach().clone()
        report = load_into(model, source, on_missing="ignore", progress=False)
        assert torch.equal(model.proj.bias, before)
        assert report.missing == ["proj.bias"]
        assert report.initialised == []


def test_values_beside_a_gap_on_meta_are_kept() -> None:
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    model.add_module("child", nn.Linear(2, 2))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.child.bias.fill_(3)
    tensors = {"child.weight": torch.ones(2, 2)}
    report = load_into(model, tensors, on_missing="ignore", progress=False)
    assert torch.equal(model.weight, before)
    assert bool((model.child.bias == 3).all())
    assert model.bias.device.type == "cpu"
    assert report.initialised == ["bias"]


def test_a_gap_on_meta_that_nobody_can_start_is_an_error_whatever_the_policy(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.proj = nn.Linear(3, 2)

    tensors = {"proj.weight": torch.ones(2, 3), "proj.bias": torch.ones(2)}
    for source in sources(tensors, tmp_path):
        model = on_meta(Scale)
        with pytest.raises((ModelError, LoadError), match="scale") as caught:
            load_into(model, source, on_missing="ignore", progress=False)
        assert caught.value.tensor == "scale"
    # Where the source has it, a stream need not know that beforehand.
    model = on_meta(Scale)
    load_into(model, iter({**tensors, "scale": torch.ones(3)}.items()), on_missing="ignore", progress=False)
    assert bool((model.scale == 1).all())


def test_no_gap_no_random_numbers(tmp_path: Path) -> None:
    save_file(filled(Block()), tmp_path / "m.safetensors")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    load_into(on_meta(Block), tmp_path / "m.safetensors", progress=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_meta_is_no_place_to_load_to(tmp_path: Path) -> None:
    save_file(filled(Block()), tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="can't be loaded onto the meta device"):
        load_into(on_meta(Block), tmp_path / "m.safetensors", device="meta", progress=False)


# ------------------------------------------------------------------ ties, plans


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]], ids=str)
def test_tied_parameters_on_meta_are_filled_by_either_name(tmp_path: Path, names: list[str]) -> None:
    for source in sources({name: torch.arange(15.0).view(5, 3) for name in names}, tmp_path):
        model = on_meta(Tied)
        report = load_into(model, source, progress=False)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.embed.weight, torch.arange(15.0).view(5, 3))
        assert report.missing == []


def test_a_plan_made_on_meta_is_carried_out_twice(tmp_path: Path) -> None:
    save_file(filled(Block()), tmp_path / "m.safetensors")
    model = on_meta(Block)
    plan = plan_load(model, tmp_path / "m.safetensors")
    assert all(p.device.type == "meta" for p in model.parameters())
    for _ in range(2):
        plan.run(model)
        assert bool((model.proj.weight == 7).all())
        with torch.no_grad():
            model.proj.weight.zero_()


def test_a_model_of_transformers_on_meta_gets_its_computed_buffers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    load_into(model, tmp_path, progress=False)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens).logits, reference(tokens).logits)


def test_a_gap_in_a_model_of_transformers_starts_as_transformers_starts_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_config(config)
    tensors = {name: t.clone() for name, t in reference.state_dict().items()}
    for gap, moved in itertools.product(("model.layers.0.mlp.up_proj.weight", "model.norm.weight"), (False, True)):
        rest = {name: t for name, t in tensors.items() if name != gap}
        with torch.device("cpu" if moved else "meta"):
            model = AutoModelForCausalLM.from_config(config)
        # One that had values once carries transformers' marks of that.
        model.to("meta")
        report = load_into(model, rest, on_missing={gap: "warn"}, progress=False)
        assert report.initialised == [gap]
        value = model.get_parameter(gap).detach()
        if gap.endswith("norm.weight"):
            assert bool((value == 1).all())
        else:
            assert 0.3 < float(value.std()) < 0.7
        assert all(torch.equal(model.state_dict()[name], t) for name, t in rest.items())


def test_a_plan_whose_parameters_had_to_be_replaced_is_carried_out_twice_too(tmp_path: Path) -> None:
    save_file(filled(Block()), tmp_path / "m.safetensors")
    model = on_meta(Block)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    plan = plan_load(model, tmp_path / "m.safetensors")
    for expected in (["norm.bias", "norm.weight", "proj.bias", "proj.weight"], []):
        assert sorted(plan.run(model).replaced) == expected
        assert bool((model.proj.weight == 7).all())
        with torch.no_grad():
            model.proj.weight.zero_()
    assert len(references) == 4


def test_a_parameter_that_grew_after_the_plan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_file(filled(Block()), tmp_path / "m.safetensors")
    model = Block()
    plan = plan_load(model, tmp_path / "m.safetensors")
    model.proj.bias.data = torch.zeros(5)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises((LoadError, PlanError), match=r"proj\.bias") as caught:
        plan.run(model)
    assert "make it again" in str(caught.value.hint)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert load_status(model) is None


@pytest.mark.parametrize("change", ["another parameter", "another dtype", "one more", "one less", "another model"])
def test_a_plan_is_refused_where_the_model_is_not_what_it_was(tmp_path: Path, change: str) -> None:
    save_file(filled(Block()), tmp_path / "m.safetensors")
    model = Block()
    plan = plan_load(model, tmp_path / "m.safetensors")
    if change == "another parameter":
        model.proj.weight = nn.Parameter(torch.zeros(2, 3))
    elif change == "another dtype":
        model.proj.weight.data = model.proj.weight.data.double()
    elif change == "one more":
        model.proj.scale = nn.Parameter(torch.zeros(1))
    elif change == "one less":
        model.proj.bias = None
    else:
        model = Block()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(PlanError, match="made for another model, or the model changed") as caught:
        plan.run(model)
    assert caught.value.tensor is not None
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert load_status(model) is None
