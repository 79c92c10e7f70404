"""Loads that code of others carries out: classic loaders and models work unchanged, what they leave out is noticed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightloaders import (
    LLM,
    BaseWeightLoader,
    LoadReport,
    Rename,
    SamplingParams,
    WeightLoaderRegistry,
    default_weight_loader,
    from_pretrained,
    load_into,
    load_model,
    load_status,
    open_weights,
)
from weightloaders.errors import CoverageError, HalfLoadedModelError, LoaderContractError, LoadError, PlanError
from weightloaders.loading.context import LoadContext, current_context, within
from weightloaders.targets import Targets
from weightloaders.testing.isolation import isolated_registry
from weightloaders.transfer.coverage import Coverage, Cut
from weightloaders.transfer.regions import Regions, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 6)
        self.o_proj = nn.Linear(6, 6, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 10, bias=False)
        self.register_buffer("scale", torch.ones(3))


def reference(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator) for name, t in Model().state_dict().items()}


def assert_filled(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert {name for name in tensors if not torch.equal(state[name], tensors[name].to(state[name].dtype))} == set()


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


# ------------------------------------------------------------------ classic loaders


class Classic(BaseWeightLoader):
    """As tutorials write them: plain keyword arguments, a dict, `load_state_dict`."""

    def __init__(self, file_pattern: str = "*.bin", dtype: torch.dtype | None = None) -> None:
        self.file_pattern = file_pattern
        self.dtype = dtype

    def get_weights(self, model_name_or_path: str) -> Any:
        from pathlib import Path

        weights: dict[str, torch.Tensor] = {}
        for file in sorted(Path(model_name_or_path).glob(self.file_pattern)):
            weights.update(torch.load(file, weights_only=True))
        if self.dtype is not None:
            weights = {name: tensor.to(self.dtype) for name, tensor in weights.items()}
        return weights

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        model.load_state_dict(weights, strict=False)


class ParameterByParameter(Classic):
    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name in weights:
                parameter.data.copy_(weights[name])


class Lazy(Classic):
    """One pair at a time."""

    def get_weights(self, model_name_or_path: str) -> Any:
        yield from super().get_weights(model_name_or_path).items()

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in weights:
            if name in state:
                default_weight_loader(state[name], tensor)


class AsPairs(Lazy):
    def get_weights(self, model_name_or_path: str) -> Any:
        return list(super().get_weights(model_name_or_path))

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        assert isinstance(weights, list)
        super().load_weights(model, weights)


class APath(Classic):
    """Its `get_weights` returns whatever its own `load_weights` understands."""

    def get_weights(self, model_name_or_path: str) -> Any:
        return model_name_or_path

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        assert isinstance(weights, str)
        model.load_state_dict(Classic.get_weights(self, weights))


class ThroughWeights(Classic):
    def get_weights(self, model_name_or_path: str) -> Any:
        return open_weights(model_name_or_path, "torch")

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        state = model.state_dict()
        for name in weights:
            if name in state:
                state[name].copy_(weights[name])


CLASSICS = [Classic, ParameterByParameter, Lazy, AsPairs, APath, ThroughWeights]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = list(reference().items())
    torch.save(dict(tensors[:4]), tmp_path / "a.bin")
    torch.save(dict(tensors[4:]), tmp_path / "b.bin")
    return tmp_path


@pytest.mark.parametrize("loader", CLASSICS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_classic_loaders_run_unchanged(folder: Path, loader: type[Classic], device: str) -> None:
    with torch.device(device):
        model = Model()
    report = load_into(model, folder, loader=loader, progress=False)
    assert_filled(model, reference())
    assert sorted(report.loaded) == sorted(reference())
    assert report.decided_by == [f"the loader's own load_weights ({loader.__name__}.load_weights)"]
    assert (report.missing, report.unexpected) == ([], [])
    assert load_status(model) == "loaded"
    if loader is not APath:
        assert report.bytes_read == sum(t.nbytes for t in reference().values())


def test_a_classic_loader_is_registered_chosen_by_name_and_given_its_options(folder: Path) -> None:
    with isolated_registry():
        WeightLoaderRegistry.register("my_custom", Classic)
        model = Model().to(torch.bfloat16)
        report = load_into(
            model,
            folder,
            loader="my_custom",
            loader_kwargs={"dtype": torch.bfloat16, "file_pattern": "*.bin"},
            progress=False,
        )
        assert_filled(model, reference())
        assert report.loader == "my_custom"


def test_the_whole_way_from_a_classic_loader_to_text(smollm2_folder: Path) -> None:
    class Mine(Classic):
        def get_weights(self, model_name_or_path: str) -> Any:
            assert (self.file_pattern, self.dtype) == ("*.bin", torch.bfloat16)
            from safetensors.torch import load_file

            return {k: t for file in sorted(smollm2_folder.glob("*.safetensors")) for k, t in load_file(file).items()}

    options = {"dtype": torch.bfloat16, "file_pattern": "*.bin"}
    with isolated_registry():
        WeightLoaderRegistry.register("my_custom", Mine)
        llm = LLM(str(smollm2_folder), weight_loader="my_custom", weight_loader_kwargs=options, progress=False)
        plain = LLM(str(smollm2_folder), progress=False)
        model, report = from_pretrained(smollm2_folder, loader="my_custom", loader_kwargs=options, progress=False)
    sampling = SamplingParams(max_tokens=6, temperature=0)
    texts = [engine.generate(["The capital of France is"], sampling)[0].outputs[0].text for engine in (llm, plain)]
    assert texts[0] == texts[1]
    assert len(llm.load_report.loaded) >= 272
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    )
    assert "lm_head.weight" not in report.missing


@pytest.mark.parametrize("loader", [Classic, ParameterByParameter, Lazy, AsPairs, ThroughWeights])
def test_a_parameter_that_a_classic_loader_skips_silently_is_an_error(folder: Path, loader: type[Classic]) -> None:
    weights = torch.load(folder / "b.bin", weights_only=True)
    del weights["layers.1.o_proj.weight"]
    weights["something.else"] = torch.zeros(3)
    torch.save(weights, folder / "b.bin")
    model = Model()
    with pytest.raises(CoverageError, match=r"left 1 parameters unfilled: layers\.1\.o_proj\.weight") as caught:
        load_into(model, folder, loader=loader, progress=False)
    assert caught.value.missing == ("layers.1.o_proj.weight",)
    assert set(caught.value.written) == set(reference()) - {"layers.1.o_proj.weight"}
    assert "something.else" in str(caught.value)
    assert loader.__name__ in str(caught.value.plugin)
    assert load_status(model) == "failed"
    report = load_into(model, folder, loader=loader, on_missing="warn", progress=False)
    assert report.missing == ["layers.1.o_proj.weight"]
    assert report.unexpected == ["something.else"]
    assert load_status(model) == "loaded"
    with pytest.raises(CoverageError, match=r"something\.else"):
        load_into(model, folder, loader=loader, on_missing="warn", on_unexpected="error", progress=False)
    assert load_status(model) == "failed"


def own(load: Callable[[nn.Module, dict[str, torch.Tensor]], Any], given: Any = None) -> type[BaseWeightLoader]:
    """A loader with this `load_weights`."""

    class Own(BaseWeightLoader):
        def get_weights(self, model_name_or_path: str) -> Any:
            return reference() if given is None else given()

        def load_weights(self, model: nn.Module, weights: Any) -> Any:
            return load(model, weights)

    return Own


def by_numpy(model: nn.Module, weights: Any) -> None:
    for name, tensor in model.state_dict().items():
        tensor.numpy()[...] = weights[name].numpy()


def by_data(model: nn.Module, weights: Any) -> None:
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        parameter.data = weights[name]


def by_assign(model: nn.Module, weights: Any) -> None:
    model.load_state_dict(weights, assign=True)


def by_new_parameters(model: nn.Module, weights: Any) -> None:
    for name in list(model.state_dict()):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, key, nn.Parameter(weights[name]) if key in module._parameters else weights[name])


def by_threads(model: nn.Module, weights: Any) -> None:
    threads = [threading.Thread(target=t.copy_, args=(weights[n],)) for n, t in model.state_dict().items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_foreach(model: nn.Module, weights: Any) -> None:
    state = model.state_dict()
    torch._foreach_copy_(list(state.values()), [weights[name] for name in state])


def by_out(model: nn.Module, weights: Any) -> None:
    for name, tensor in model.state_dict().items():
        torch.mul(weights[name], 1, out=tensor)


def by_indexing(model: nn.Module, weights: Any) -> None:
    for name, tensor in model.state_dict().items():
        for row in range(tensor.shape[0]):
            tensor[row] = weights[name][row]


def by_index_put(model: nn.Module, weights: Any) -> None:
    for name, tensor in model.state_dict().items():
        tensor[torch.arange(len(tensor))] = weights[name]


def by_columns(model: nn.Module, weights: Any) -> None:
    for name, tensor in model.state_dict().items():
        for column in range(tensor.shape[-1]):
            tensor[..., column] = weights[name][..., column]


def by_other_dtype(model: nn.Module, weights: Any) -> None:
    for name, tensor in model.state_dict().items():
        tensor.view(torch.int32).copy_(weights[name].view(torch.int32))


def after_moving(model: nn.Module, weights: Any) -> None:
    model.double()
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])


def before_moving(model: nn.Module, weights: Any) -> None:
    model.load_state_dict(weights)
    model.double()


def moving_half_way(model: nn.Module, weights: Any) -> None:
    state = model.state_dict()
    for name in list(state)[::2]:
        state[name].copy_(weights[name])
    for tensor in state.values():
        if tensor.dim() > 1:
            tensor[:, :2] = 1
    model.double()
    for name, tensor in model.state_dict().items():
        tensor[..., 1:].copy_(weights[name][..., 1:])
        tensor[..., :1].copy_(weights[name][..., :1])


HABITS = [
    by_numpy, by_data, by_assign, by_new_parameters, by_threads, by_foreach, by_out, by_indexing, by_index_put,
    by_columns, by_other_dtype, after_moving, before_moving, moving_half_way,
]  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_way_to_fill_a_parameter_counts(habit: Any, device: str) -> None:
    with torch.device(device):
        model = Model()
    # The second time the values are there already, and written again all the same.
    for _ in range(2):
        report = load_into(model, "anywhere", loader=own(habit), progress=False)
        assert_filled(model, reference())
        assert report.missing == []
        assert report.unexpected == []


@pytest.mark.parametrize("habit", HABITS)
def test_every_way_to_leave_a_parameter_out_is_noticed(habit: Any) -> None:
    def without_one(model: nn.Module, weights: Any) -> None:
        # The code sees a model without the parameter, so it can't fill it.
        layer: Any = model.layers[1]
        kept, layer.o_proj = layer.o_proj, nn.Identity()
        try:
            habit(model, {name: t for name, t in weights.items() if name != "layers.1.o_proj.weight"})
        finally:
            layer.o_proj = kept

    for model in (Model(), zeroed(Model())):
        with pytest.raises(CoverageError) as caught:
            load_into(model, "anywhere", loader=own(without_one), progress=False)
        assert caught.value.missing == ("layers.1.o_proj.weight",)


def test_a_model_that_is_only_moved_is_not_filled() -> None:
    for move in (lambda model: model.half(), lambda model: model.double().float(), lambda model: model.to("cpu")):
        with pytest.raises(CoverageError, match="left 9 parameters unfilled"):
            load_into(Model(), "anywhere", loader=own(lambda model, weights, move=move: move(model)), progress=False)


@pytest.mark.parametrize("what", ["nothing", "looks at all"])
def test_a_loader_that_fills_nothing_is_an_error_whatever_the_policy(what: str) -> None:
    def load(model: nn.Module, weights: Any) -> None:
        if what == "looks at all":
            assert sum(tensor.sum() for tensor in weights.values()) != 0

    with pytest.raises(CoverageError):
        load_into(Model(), "anywhere", loader=own(load), on_missing="ignore", progress=False)


@pytest.mark.parametrize(
    "part", [lambda t: t[:-1], lambda t: t[..., :-1], lambda t: t[1:], lambda t: t[::2]], ids=range(4)
)
def test_a_parameter_filled_in_part_is_not_filled(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def load(model: nn.Module, weights: Any) -> None:
        for name, tensor in model.state_dict().items():
            where = part if name == "layers.0.q_proj.weight" else lambda t: t
            where(tensor).copy_(where(weights[name]))
            where(tensor).copy_(where(weights[name]))  # twice the part is not the whole

    with pytest.raises(CoverageError) as caught:
        load_into(Model(), "anywhere", loader=own(load), progress=False)
    assert caught.value.missing == ("layers.0.q_proj.weight",)
    assert "layers.0.q_proj.weight" in caught.value.written


# ------------------------------------------------------------------ parameters that are replaced


def replacing(make: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], None]:
    """Fill a linear layer, but give it another weight: made from that of the source."""

    def load(model: nn.Module, weights: Any) -> None:
        with torch.no_grad():
            model.bias.copy_(weights["bias"])
        model.weight = make(weights["weight"])

    return load


def linear() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(16.0).view(4, 4), "bias": torch.ones(4)}


def half_of(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(4, 4)
    memory[:2] = tensor[:2]
    return memory


@pytest.mark.parametrize(
    "make",
    [lambda w: torch.empty(4, 4), lambda w: torch.empty_like(w), lambda w: torch.zeros(4, 4), half_of],
    ids=["empty", "empty_like", "zeros", "half"],
)
def test_a_new_parameter_without_the_sources_values_is_not_filled(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CoverageError) as caught:
        load_into(nn.Linear(4, 4), "x", loader=own(replacing(lambda w: nn.Parameter(make(w))), linear), progress=False)
    assert caught.value.missing == ("weight",)


@pytest.mark.parametrize("form", ["dict", "pairs", "weights"])
@pytest.mark.parametrize(
    "make",
    [
        lambda w: w, lambda w: w.half(), lambda w: torch.cat([w[:2], w[2:]]), lambda w: w + torch.zeros(4, 4),
        lambda w: torch.empty(4, 4).copy_(w), lambda w: w.t().contiguous().t(),
    ],
    ids=["itself", "cast", "put together", "computed", "copied", "laid out anew"],
)  # fmt: skip
def test_a_new_parameter_made_of_the_sources_values_is_filled(
    tmp_path: Path, make: Callable[[torch.Tensor], torch.Tensor], form: str
) -> None:
    save_file(linear(), tmp_path / "m.safetensors")

    def given() -> Any:
        return {"dict": linear, "pairs": lambda: iter(linear().items())}.get(
            form, lambda: open_weights(tmp_path / "m.safetensors")
        )()

    load = replacing(lambda w: nn.Parameter(make(w)))
    model = nn.Linear(4, 4)
    by_pairs = own(lambda model, weights: load(model, dict(weights)), given)
    report = load_into(model, "x", loader=by_pairs if form == "pairs" else own(load, given), progress=False)
    assert sorted(report.loaded) == ["bias", "weight"]
    assert report.warnings == []
    assert torch.equal(model.weight.float(), linear()["weight"])


@pytest.mark.parametrize(
    "make", [lambda w: nn.Parameter(w[:2]), lambda w: nn.Parameter(torch.zeros(8, 8)), lambda w: None], ids=range(3)
)
def test_a_parameter_that_is_resized_or_gone_afterwards_is_an_error(make: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CoverageError, match=r"changed what the model has: 'weight' (had shape|has gone)") as caught:
        load_into(model, "x", loader=own(replacing(make), linear), progress=False)
    assert caught.value.tensor == "weight"
    assert load_status(model) == "failed"


def test_the_memory_of_a_parameter_exchanged_for_one_of_another_shape_is_an_error() -> None:
    def load(model: nn.Module, weights: Any) -> None:
        model.load_state_dict(weights)
        model.weight.data = torch.zeros(2, 2)

    with pytest.raises(CoverageError, match=r"'weight' had shape \[4, 4\] and has \[2, 2\]"):
        load_into(nn.Linear(4, 4), "x", loader=own(load, linear), progress=False)


@pytest.mark.parametrize("form", ["loader", "model"])
def test_a_load_that_uses_nothing_of_its_source_is_an_error(form: str) -> None:
    class Ignoring(nn.Linear):
        def load_weights(self, weights: Any) -> None:
            initialised(self, dict(weights))

    def initialised(model: nn.Module, weights: Any) -> None:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)

    ways: dict[str, Callable[[], Any]] = {
        "loader": lambda: load_into(
            nn.Linear(4, 4), "x", loader=own(initialised, linear), on_missing="ignore", progress=False
        ),
        "model": lambda: load_into(Ignoring(4, 4), linear(), on_missing="ignore", progress=False),
    }
    with pytest.raises(CoverageError, match="used nothing of what the source holds: weight, bias"):
        ways[form]()


@pytest.mark.parametrize("where", ["thread", "numpy"])
def test_what_could_not_be_watched_is_named_in_the_report(where: str) -> None:
    def load(model: nn.Module, weights: Any) -> None:
        model.bias.data.copy_(weights["bias"])
        if where == "numpy":
            model.weight.data.numpy()[:2] = weights["weight"].numpy()[:2]
        else:
            thread = threading.Thread(target=model.weight.data[:2].copy_, args=(weights["weight"][:2],))
            thread.start()
            thread.join()

    report = load_into(nn.Linear(4, 4), "x", loader=own(load, linear), progress=False)
    assert any("filled weight in a way that can't be watched" in warning for warning in report.warnings)


def test_a_parameter_that_was_only_turned_is_not_taken_for_filled() -> None:
    def turn(model: nn.Module, weights: Any) -> None:
        for name, tensor in model.state_dict().items():
            if name == "layers.0.q_proj.weight":
                # torch counts these as writes; what was written can't be told.
                tensor.t_().unsqueeze_(0).squeeze_(0).detach_()
            else:
                tensor.copy_(weights[name])

    report = load_into(Model(), "anywhere", loader=own(turn), progress=False)
    (warning,) = report.warnings
    assert "layers.0.q_proj.weight" in warning
    assert "can't be watched" in warning


def test_values_that_were_there_already_count_where_nothing_tells_that_they_were_written_again() -> None:
    with torch.inference_mode():
        model = zeroed(Model())
    given = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}

    class Zeros(Super):
        def get_weights(self, model_name_or_path: str) -> Any:
            return given

    assert load_into(model, "anywhere", loader=Zeros, progress=False).missing == []


# ------------------------------------------------------------------ sources cut to fit


def larger() -> dict[str, torch.Tensor]:
    return {**reference(), "layers.0.q_proj.weight": torch.randn(8, 6)}


def fitted(model: nn.Module, weights: Any) -> None:
    pairs = weights.items() if hasattr(weights, "items") else weights
    state = model.state_dict()
    for name, tensor in pairs:
        state[name].copy_(tensor.narrow(0, 0, len(state[name])))


@pytest.mark.parametrize("form", ["dict", "pairs", "list", "weights", "one memory"])
def test_a_source_cut_to_fit_is_an_error(tmp_path: Path, form: str) -> None:
    def given() -> Any:
        tensors = larger()
        if form == "one memory":
            memory = torch.cat([t.reshape(-1) for t in tensors.values()])
            views = memory.split([t.numel() for t in tensors.values()])
            return {name: view.view(t.shape) for (name, t), view in zip(tensors.items(), views, strict=True)}
        if form == "weights":
            save_file(tensors, tmp_path / "m.safetensors")
            return open_weights(tmp_path / "m.safetensors")
        return {"dict": tensors, "pairs": iter(tensors.items()), "list": list(tensors.items())}[form]

    model = Model()
    with pytest.raises(CoverageError, match=r"only a part of 'layers\.0\.q_proj\.weight' of shape \[8, 6\]") as caught:
        load_into(model, "anywhere", loader=own(fitted, given), progress=False)
    assert caught.value.tensor == "layers.0.q_proj.weight"
    assert load_status(model) == "failed"
    load_into(model, "anywhere", loader=own(fitted, given), on_mismatch={"**.q_proj.weight": "warn"}, progress=False)


def test_a_view_of_what_was_handed_out_that_lives_on_as_the_parameter_counts_as_far_as_it_goes() -> None:
    def by_view(model: nn.Module, weights: Any) -> None:
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            parameter.data = weights[name][: len(parameter)]

    load_into(Model(), "anywhere", loader=own(by_view), progress=False)
    with pytest.raises(CoverageError, match="only a part"):
        load_into(Model(), "anywhere", loader=own(by_view, larger), progress=False)


def test_of_two_names_for_one_memory_one_may_be_left_alone() -> None:
    def given() -> Any:
        tensors = reference()
        memory = torch.cat([tensors["head.weight"], torch.zeros(5, 6)])
        return {**tensors, "head.weight": memory[:10], "head.padded": memory}

    def load(model: nn.Module, weights: Any) -> None:
        model.load_state_dict(weights, strict=False)

    report = load_into(Model(), "anywhere", loader=own(load, given), progress=False)
    assert report.missing == []


def test_tensors_that_were_used_are_not_called_unexpected() -> None:
    def in_odd_ways(model: nn.Module, weights: Any) -> None:
        for name, tensor in model.state_dict().items():
            value = weights[name]
            way = list(weights).index(name) % 5
            if way == 0:
                tensor.copy_(value.t().contiguous().t() if value.dim() == 2 else value)
            elif way == 1:
                tensor.copy_(torch.cat(list(value.split(1))))
            elif way == 2:
                tensor.copy_(torch.stack(list(value)))
            elif way == 3:
                tensor.copy_(torch.tensor(value.tolist()))
            else:
                tensor.copy_(value.view(torch.uint8).clone().view(torch.float32))

    report = load_into(Model(), "anywhere", loader=own(in_odd_ways), progress=False)
    assert report.unexpected == []
    assert report.missing == []


# ------------------------------------------------------------------ super(), _auto_match_and_load, failures


def prefixed() -> dict[str, torch.Tensor]:
    return {f"backbone.{name}": tensor for name, tensor in reference().items()}


class Super(BaseWeightLoader):
    def get_weights(self, model_name_or_path: str) -> Any:
        return prefixed()

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        return super().load_weights(model, weights)


class AutoMatch(Super):
    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        return self._auto_match_and_load(model, weights)


class InAThread(Super):
    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        found: list[Any] = []
        call = super().load_weights
        thread = threading.Thread(target=lambda: found.append(call(model, weights)))
        thread.start()
        thread.join()
        return found[0] if found else None


class ThenMore(Super):
    """The default for most, and the rest by hand."""

    def load_weights(self, model: nn.Module, weights: Any) -> Any:
        rest = {name: t for name, t in weights.items() if "head" not in name}
        report = super().load_weights(model, rest)
        model.head.weight.data.copy_(weights["backbone.head.weight"])  # type: ignore[union-attr,operator]
        return report


@pytest.mark.parametrize("loader", [Super, AutoMatch, InAThread])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_called_from_an_override_obeys_the_rules_and_policies_of_the_load(
    loader: type[Super], device: str
) -> None:
    with torch.device(device):
        model = Model()
    report = load_into(model, "anywhere", loader=loader, rules=[Rename("backbone", "")], progress=False)
    assert_filled(model, reference())
    assert "the caller's rules" in report.decided_by
    assert sorted(report.loaded) == sorted(reference())


def test_the_default_called_from_an_override_obeys_a_policy() -> None:
    tensors = prefixed()
    del tensors["backbone.head.weight"]

    class Less(Super):
        def get_weights(self, model_name_or_path: str) -> Any:
            return tensors

    rules = [Rename("backbone", "")]
    model = Model()
    with pytest.raises(PlanError, match=r"head\.weight"):
        load_into(model, "anywhere", loader=Less, rules=rules, progress=False)
    # The plan was wrong, so nothing was touched and nothing is marked.
    assert load_status(model) is None
    report = load_into(
        model, "anywhere", loader=Less, rules=rules, on_missing={"head.weight": "ignore"}, progress=False
    )
    assert report.missing == ["head.weight"]


def test_what_an_override_adds_to_the_default_is_counted() -> None:
    model = Model()
    report = load_into(
        model,
        "anywhere",
        loader=ThenMore,
        rules=[Rename("backbone", "")],
        on_missing={"head.weight": "warn"},
        progress=False,
    )
    assert_filled(model, reference())
    assert report.missing == []
    assert "head.weight" in report.loaded


def test_the_default_called_outside_of_a_load_uses_the_defaults() -> None:
    model = Model()
    report = Super().load_weights(model, reference())
    assert isinstance(report, LoadReport)
    assert_filled(model, reference())


def test_an_override_that_loads_another_model_too_does_not_mix_them_up() -> None:
    other = nn.Linear(2, 2)
    given = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}

    class Two(Classic):
        def get_weights(self, model_name_or_path: str) -> Any:
            return reference()

        def load_weights(self, model: nn.Module, weights: Any) -> Any:
            load_into(other, given, progress=False)
            super().load_weights(model, weights)

    model = Model()
    report = load_into(model, "anywhere", loader=Two, progress=False)
    assert sorted(report.loaded) == sorted(reference())
    assert_filled(other, given)


def test_a_failure_in_foreign_code_names_it_the_tensor_and_what_was_written() -> None:
    def fail(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        state = model.state_dict()
        for name, tensor in weights:
            if name == "layers.0.q_proj.bias":
                raise KeyError(name)
            state[name].copy_(tensor)

    model = Model()
    with pytest.raises(
        LoadError, match=r"Own\.load_weights failed at the tensor 'layers\.0\.q_proj\.bias' of shape \[6\]: KeyError"
    ) as caught:
        load_into(model, "anywhere", loader=own(fail, lambda: iter(reference().items())), progress=False)
    assert caught.value.tensor == "layers.0.q_proj.bias"
    assert set(caught.value.written) == {"embed.weight", "layers.0.q_proj.weight", "scale"} & set(
        list(reference())[: list(reference()).index("layers.0.q_proj.bias")]
    )
    assert load_status(model) == "failed"


def test_what_is_said_of_one_model_by_its_parameters_names_is_not_said_of_another() -> None:
    model, other = Model(), nn.Linear(2, 2)
    context = LoadContext(dtypes={"weight": torch.float64}, loader="mine")
    with within(context, model):
        assert current_context(model) is context
        for part in (other, model.layers):
            assert current_context(part) == context.changed(dtypes={})
        with within(LoadContext(), model):
            assert current_context(model).loader is None
        assert current_context(model) is context
    assert current_context(model).dtypes == {}


def test_a_failure_with_a_whole_dict_at_hand_blames_no_tensor_of_it() -> None:
    def fail(model: nn.Module, weights: Any) -> None:
        raise RuntimeError("no such thing")

    with pytest.raises(LoadError, match=r"Own\.load_weights failed: RuntimeError") as caught:
        load_into(Model(), "anywhere", loader=own(fail), progress=False)
    assert caught.value.tensor is None


def test_foreign_code_that_fails_before_it_writes_leaves_a_usable_model() -> None:
    def fail(model: nn.Module, weights: Any) -> None:
        raise RuntimeError("no such thing")

    model = Model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(LoadError, match="no such thing"):
        load_into(model, "anywhere", loader=own(fail), progress=False)
    assert load_status(model) is None
    assert_filled(model, before)
    # On meta it was given memory, and nothing to hold in it.
    with torch.device("meta"):
        model = Model()
    with pytest.raises(LoadError):
        load_into(model, "anywhere", loader=own(fail), progress=False)
    assert load_status(model) == "failed"


def test_generate_refuses_a_model_that_a_reload_left_half_loaded(smollm2_folder: Path) -> None:
    llm = LLM(str(smollm2_folder), progress=False)
    good = [(name, tensor.clone()) for name, tensor in llm.model.state_dict().items()]

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from good[:5]
        raise OSError("gone")

    with pytest.raises(LoadError, match="gone"):
        llm.reload_weights(pairs())
    with pytest.raises(HalfLoadedModelError):
        llm.generate(["Hello"], SamplingParams(max_tokens=1))
    llm.reload_weights()
    assert llm.generate(["Hello"], SamplingParams(max_tokens=1))[0].outputs[0].token_ids


# ------------------------------------------------------------------ models with their own load_weights


class Stacked(nn.Module):
    """Parameters as inference engines stack them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.qkv_proj = nn.Linear(6, 10)
        self.gate_up_proj = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(6)


SIZES = {"q": (0, 6), "k": (6, 2), "v": (8, 2)}


def separate() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = {"q_proj": 6, "k_proj": 2, "v_proj": 2, "gate_proj": 4, "up_proj": 4}
    tensors = {f"{name}.weight": torch.randn(n, 6, generator=generator) for name, n in rows.items()}
    tensors |= {f"{name}.bias": torch.randn(n, generator=generator) for name, n in rows.items() if name[0] in "qkv"}
    return {
        **tensors, "embed.weight": torch.randn(10, 6, generator=generator),
        "norm.weight": torch.randn(6, generator=generator), "norm.bias": torch.randn(6, generator=generator),
    }  # fmt: skip


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        **{name: tensors[name] for name in ("embed.weight", "norm.weight", "norm.bias")},
        "qkv_proj.weight": torch.cat([tensors[f"{n}_proj.weight"] for n in "qkv"]),
        "qkv_proj.bias": torch.cat([tensors[f"{n}_proj.bias"] for n in "qkv"]),
        "gate_up_proj.weight": torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]]),
    }  # fmt: skip


class ByOffset(Stacked):
    """The classic style: offsets computed in the model's own `load_weights`."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            for part, (start, size) in SIZES.items():
                if f"{part}_proj" in name:
                    parameter = parameters[name.replace(f"{part}_proj", "qkv_proj")]
                    parameter.data.narrow(0, start, size).copy_(tensor)
                    break
            else:
                if "gate_proj" in name or "up_proj" in name:
                    parameters["gate_up_proj.weight"].data[4 * ("up" in name) :][:4].copy_(tensor)
                elif name in parameters:
                    parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


class ByShard(Stacked):
    """The engines' style: each parameter carries its loader, which is given the shard."""

    mapping = (
        ("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.qkv_proj.weight, self.qkv_proj.bias):
            parameter.weight_loader = self.load_qkv
        self.gate_up_proj.weight.weight_loader = self.load_gate_up

    def load_qkv(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        start, size = SIZES[shard]
        # Cuts what is too large, as engines do.
        parameter.data.narrow(0, start, size).copy_(loaded.narrow(0, 0, size))

    def load_gate_up(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        parameter.data.narrow(0, 4 * shard, 4).copy_(loaded)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for fused, part, shard in self.mapping:
                if part in name:
                    parameter = parameters[name.replace(part, fused)]
                    parameter.weight_loader(parameter, tensor, shard)
                    break
            else:
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


class Declaring(ByShard):
    """Without `load_weights`, only with what its parameters and the model declare."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012 -- as engines write it
    load_weights = None  # type: ignore[assignment]


STYLES = [ByOffset, ByShard, Declaring]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("form", ["folder", "dict", "stream"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_loads_itself_equals_the_reference(
    tmp_path: Path, style: type[Stacked], form: str, device: str
) -> None:
    save_file(separate(), tmp_path / "model.safetensors")
    source: Any = {"folder": tmp_path, "dict": separate(), "stream": iter(separate().items())}[form]
    with torch.device(device):
        model = style()
    assert load_model(model, source, progress=False) is model
    assert_filled(model, stacked(separate()))
    assert not model.training


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("form", ["dict", "stream"])
@pytest.mark.parametrize("lost", ["k_proj.weight", "v_proj.bias", "up_proj.weight", "norm.weight", "embed.weight"])
def test_what_a_model_that_loads_itself_does_not_get_is_noticed(style: type[Stacked], form: str, lost: str) -> None:
    tensors = separate()
    del tensors[lost]
    model = zeroed(style())
    source: Any = tensors if form == "dict" else iter(tensors.items())
    name = lost.replace(
        lost.split(".")[0], {"k": "qkv_proj", "v": "qkv_proj", "u": "gate_up_proj"}.get(lost[0], lost.split(".")[0])
    )
    with pytest.raises((CoverageError, PlanError), match=name.replace(".", r"\.")):
        load_into(model, source, progress=False)


@pytest.mark.parametrize("style", [ByShard, Declaring])
@pytest.mark.parametrize("form", ["dict", "stream"])
def test_a_tensor_that_a_parameters_own_loader_cuts_is_an_error(style: type[Stacked], form: str) -> None:
    tensors = {**separate(), "q_proj.weight": torch.randn(9, 6)}
    model = style()
    source: Any = tensors if form == "dict" else iter(tensors.items())
    with pytest.raises(CoverageError, match=r"only a part of 'q_proj\.weight' of shape \[9, 6\]"):
        load_into(model, source, progress=False)
    assert load_status(model) == "failed"


def test_a_reload_works_after_an_engine_took_the_loaders_off_its_parameters() -> None:
    model = Declaring()
    load_into(model, separate(), progress=False)
    for parameter in model.parameters():
        if hasattr(parameter, "weight_loader"):
            del parameter.weight_loader
    for source in (separate(), iter(separate().items())):
        zeroed(model)
        load_into(model, source, progress=False)
        assert_filled(model, stacked(separate()))


def test_progress_and_the_report_tell_of_a_model_that_loads_itself(tmp_path: Path) -> None:
    save_file(
        {**separate(), "rotary_emb.inv_freq": torch.zeros(2), "extra": torch.zeros(1)}, tmp_path / "m.safetensors"
    )

    class Choosy(ByOffset):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return super().load_weights((n, t) for n, t in weights if n not in ("extra", "rotary_emb.inv_freq"))

    events: list[Any] = []
    report = load_into(Choosy(), tmp_path / "m.safetensors", progress=events.append)
    assert report.unexpected == ["extra"]
    assert "Choosy.load_weights" in report.decided_by[0]
    assert events[-1].done_bytes == events[-1].total_bytes == report.bytes_read
    done = [event.done_bytes for event in events]
    assert done == sorted(done)


def test_a_model_whose_load_weights_yields_names_loads_too() -> None:
    class Yielding(Stacked):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
            state = self.state_dict()
            for name, tensor in weights:
                state[name].copy_(tensor)
                yield name

    model = Yielding()
    load_into(model, stacked(separate()), progress=False)
    assert_filled(model, stacked(separate()))


def test_a_report_of_another_model_is_not_taken_for_this_ones() -> None:
    class Helping(Classic):
        def get_weights(self, model_name_or_path: str) -> Any:
            return reference()

        def load_weights(self, model: nn.Module, weights: Any) -> Any:
            super().load_weights(model, weights)
            return load_into(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}, progress=False)

    report = load_into(Model(), "anywhere", loader=Helping, progress=False)
    assert sorted(report.loaded) == sorted(reference())


def test_rules_of_the_caller_come_before_a_models_own_way() -> None:
    class Never(Stacked):
        def load_weights(self, weights: Any) -> None:
            raise AssertionError("not asked for")

    model = Never()
    load_into(model, {f"x.{k}": v for k, v in stacked(separate()).items()}, rules=[Rename("x", "")], progress=False)
    assert_filled(model, stacked(separate()))


def test_a_model_may_ask_for_the_default_in_its_own_load_weights() -> None:
    class Asking(Stacked):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            load_into(self, {name.removeprefix("old."): tensor for name, tensor in weights}, progress=False)

    model = Asking()
    load_into(model, {f"old.{k}": v for k, v in stacked(separate()).items()}, progress=False)
    assert_filled(model, stacked(separate()))


def test_a_model_that_keeps_what_it_is_given_is_not_given_a_buffer_that_is_reused() -> None:
    class Collecting(Stacked):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.load_state_dict(dict(weights))

    class Reusing(BaseWeightLoader):
        borrowed = True

        def get_weights(self, model_name_or_path: str) -> Any:
            buffer = torch.empty(100)
            for name, tensor in stacked(separate()).items():
                view = buffer[: tensor.numel()].view(tensor.shape)
                yield name, view.copy_(tensor)
                view.fill_(float("nan"))

    model = Collecting()
    load_into(model, "anywhere", loader=Reusing, progress=False)
    assert_filled(model, stacked(separate()))


def _path(self: Any, path: str) -> None: ...
def _weights_path(self: Any, weights_path: Any) -> None: ...
def _annotated(self: Any, source: Path) -> None: ...
def _two(self: Any, weights: Any, prefix: str) -> None: ...
def _either(self: Any, source: str | Path) -> None: ...
def _none(self: Any) -> None: ...
def _keyword(self: Any, weights: Any, *, strict: bool) -> None: ...
async def _async(self: Any, weights: Any) -> None: ...


@pytest.mark.parametrize(
    "method", [_path, _weights_path, _annotated, _either, _two, _none, _keyword, _async, nn.Identity(), 3]
)
def test_a_load_weights_that_is_another_thing_is_not_mistaken_for_it(method: Any) -> None:
    class Other(Stacked):
        load_weights = method

    model = Other()
    report = load_into(model, stacked(separate()), progress=False)
    assert_filled(model, stacked(separate()))
    assert report.decided_by == ["names"]


# ------------------------------------------------------------------ the watch itself


def test_a_watch_costs_little_however_large_the_model() -> None:
    import time

    model = nn.ParameterList(torch.zeros(1 << 20) for _ in range(50))
    start = time.process_time()
    Coverage(Targets(model).tensors)
    # Reading all of its 200 MB would take longer.
    assert time.process_time() - start < 0.05


def test_many_tensors_that_are_kept_cost_no_more_than_few() -> None:
    import time

    def run(count: int) -> float:
        model = nn.ParameterList(torch.zeros(2) for _ in range(count))
        watch = Coverage(dict(model.named_parameters()))
        start = time.process_time()
        with watch:
            kept = dict(watch.track((name, torch.ones(2)) for name, _ in model.named_parameters()))
            for name, parameter in model.named_parameters():
                parameter.data.copy_(kept[name])
        assert watch.finish(model).missing == []
        return time.process_time() - start

    run(100)
    few = min(run(500) for _ in range(3))
    assert run(8000) < 16 * few * 3


def test_regions_join_and_tell_what_is_covered() -> None:
    memory = torch.zeros(10, 10)
    regions = Regions(400, 4)
    for row in (3, 5, 4, 0, 9, 1, 8, 2, 7):
        regions.add(View.of(memory[row]))
    assert regions.covers(View.of(memory[:6]))
    assert not regions.covers(View.of(memory))
    assert not regions.covers(View.of(memory[:, 1]))
    assert regions.touches(View.of(memory))
    assert not regions.touches(View.of(memory[6]))
    regions.add(View.of(memory[:, :5]))
    regions.add(View.of(memory[6, 5:]))
    assert regions.covers(View.of(memory))
    assert regions.covers(View.of(memory.t()))
    assert regions.covers(View.of(memory.view(torch.int16)))


@pytest.mark.parametrize("seed", range(20))
def test_regions_agree_with_a_mask(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    memory, mask, regions = torch.zeros(12, 9), torch.zeros(12, 9, dtype=torch.bool), Regions(432, 4)
    for _ in range(12):
        rows, columns = (
            slice(number(12), 1 + number(12), 1 + number(3)),
            slice(number(9), 1 + number(9), 1 + number(2)),
        )
        turn = number(2)
        view, part = memory[rows, columns], mask[rows, columns]
        if turn:
            view, part = view.t(), part.t()
        if number(3):
            regions.add(View.of(view))
            part.fill_(True)
        elif view.numel():
            assert regions.covers(View.of(view)) == bool(part.all())
            if view.is_contiguous():
                assert regions.touches(View.of(view)) == bool(part.any())


def test_parts_that_several_processes_used_of_a_tensor_make_it_whole_or_not() -> None:
    def cut(rows: slice, columns: slice) -> Cut:
        watch = Coverage({})
        with watch:
            for _, tensor in watch.track([("weight", torch.ones(4, 6))]):
                part = tensor[rows, columns]
                torch.empty_like(part).copy_(part)
        return watch.finish(nn.Module()).cut["weight"]

    every = slice(None)
    for first, second in (
        (cut(slice(0, 2), every), cut(slice(2, 4), every)),
        (cut(every, slice(0, 3)), cut(every, slice(3, 6))),
    ):
        assert first.is_made_whole_by([second])
        assert not first.is_made_whole_by([first])
        assert not first.is_made_whole_by([cut(slice(3, 4), slice(5, 6))])


# ------------------------------------------------------------------ dtypes, and streams that are none


class Takes(nn.Module):
    """Fills itself by copying, whatever comes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_that_are_copied_as_if_they_were_values_are_refused_by_name(dtype: torch.dtype) -> None:
    codes = {"weight": torch.ones(2, 4).to(dtype)}
    with pytest.raises(CoverageError, match=rf"copied 'weight', whose dtype is {dtype}, .*torch\.float32") as caught:
        load_into(Takes(), codes, progress=False)
    assert caught.value.tensor == "weight"
    model = Takes()
    load_into(model, codes, progress=False, on_mismatch="ignore")
    assert torch.equal(model.weight, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float16, torch.float32), (torch.float64, torch.bfloat16), (torch.int64, torch.int32),
        (torch.float8_e8m0fnu, torch.float32), (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_what_stays_the_same_number_may_be_copied(stored: torch.dtype, wanted: torch.dtype) -> None:
    model = Takes(wanted)
    load_into(model, {"weight": torch.full((2, 4), 2.0).to(stored)}, progress=False)
    assert torch.equal(model.weight.float(), torch.full((2, 4), 2.0))


def test_codes_may_be_turned_into_numbers_by_whoever_knows_them() -> None:
    class Scales(Takes):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.weight.data.copy_(tensor.float() * 0.5)

    model = Scales()
    load_into(model, {"weight": torch.full((2, 4), 6, dtype=torch.int8)}, progress=False)
    assert torch.equal(model.weight, torch.full((2, 4), 3.0))


def test_a_stream_with_a_name_twice_is_refused_where_the_model_fills_itself() -> None:
    pairs = [("weight", torch.ones(2, 4)), ("weight", torch.zeros(2, 4))]
    with pytest.raises(LoaderContractError, match="two tensors named 'weight'"):
        load_into(Takes(), iter(pairs), progress=False)


def test_a_stream_that_fails_is_not_laid_to_the_model_that_takes_it() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(2, 4)
        raise OSError("gone")

    with pytest.raises(
        LoadError, match=r"the stream of weights failed after 1 tensors, .*'weight': OSError: gone"
    ) as caught:
        load_into(Takes(), broken(), progress=False)
    assert caught.value.written == ("weight",)
