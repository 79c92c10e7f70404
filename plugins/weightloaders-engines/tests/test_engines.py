"""The engines against what weightloaders reads itself: models filled, buffers reused, files and packages missing."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tensorizer import TensorSerializer

from weightloaders import WeightLoaderRegistry, load_into, open_weights
from weightloaders.errors import (
    LoadError,
    MissingDependencyError,
    OptionsError,
    PlanError,
    SourceNotFoundError,
    SourceReadError,
    WeightLoadersError,
)

ENGINES = ["runai", "fastsafetensors", "tensorizer"]
LAYERS = 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.out = torch.nn.Linear(64, 64, bias=False)


class Fused(torch.nn.Module):
    """Query, key and value in one: what comes first has to wait for the others."""

    packed_modules_mapping: ClassVar = {"qkv": ["q", "k", "v"]}

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.embed = torch.nn.Embedding(100, 64)


def tensors(seed):
    torch.manual_seed(seed)
    names = [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("q", "k", "v")]
    found = {"embed.weight": torch.randn(100, 64), "a.vector.of.odd.length": torch.ones(3, dtype=torch.uint8)}
    for name in names:
        found |= {f"{name}.weight": torch.randn(64, 64), f"{name}.bias": torch.randn(64)}
    return found | {f"layers.{i}.out.weight": torch.randn(64, 64) for i in range(LAYERS)}


def write(folder, engine, found):
    folder.mkdir(parents=True)
    if engine == "tensorizer":
        serializer = TensorSerializer(str(folder / "model.tensors"))
        serializer.write_state_dict(found)
        serializer.close()
        return folder
    # Two files, and a second copy of a tensor in the one that the index does not name for it.
    halves = list(found)[::2], list(found)[1::2]
    files = {}
    for number, names in enumerate(halves, 1):
        files |= dict.fromkeys(names, f"model-0000{number}-of-00002.safetensors")
    stray = {"embed.weight": torch.zeros(100, 64)} if files["embed.weight"].startswith("model-00001") else {}
    save_file({name: found[name] for name in halves[0]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: found[name] for name in halves[1]} | stray, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def digests(model):
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in values.items()}


def expected(found):
    model = Fused()
    load_into(model, {name: t for name, t in found.items() if "odd" not in name}, progress=False)
    return digests(model)


def load(source, engine, model=None, **options):
    model = Fused() if model is None else model
    kwargs = {"loader_kwargs": options}
    return model, load_into(model, source, loader=engine, on_unexpected="ignore", progress=False, **kwargs)


# Buffers of the least size are reused as often as can be.
OPTIONS = {"runai": {"memory_limit": 1}, "fastsafetensors": {}, "tensorizer": {}}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_loaded_stays_as_it_is_while_others_are_loaded_and_reloaded(tmp_path, engine):
    one, other = tensors(1), tensors(2)
    sources = write(tmp_path / "one", engine, one), write(tmp_path / "other", engine, other)
    first, report = load(sources[0], engine, **OPTIONS[engine])
    assert digests(first) == expected(one)
    assert (report.loader, list(report.bytes_by_path)) == (engine, ["streamed"])
    second, _ = load(sources[1], engine, **OPTIONS[engine])
    assert (digests(first), digests(second)) == (expected(one), expected(other))
    load(sources[1], engine, first, **OPTIONS[engine])
    assert (digests(first), digests(second)) == (expected(other), expected(other))
    load(sources[0], engine, first, **OPTIONS[engine])
    assert (digests(first), digests(second)) == (expected(one), expected(other))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_on_meta_is_filled_in_another_dtype(tmp_path, engine):
    found = tensors(1)
    with torch.device("meta"):
        model = Fused().bfloat16()
    load(write(tmp_path / "one", engine, found), engine, model)
    reference = Fused().bfloat16()
    load_into(reference, found, on_unexpected="ignore", progress=False)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in reference.named_parameters())


@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_fit_is_told_before_the_library_reads(tmp_path, engine):
    found = tensors(1)
    del found["layers.2.out.weight"]
    model = Fused()
    before = digests(model)
    with pytest.raises(PlanError, match=r"layers\.2\.out\.weight"):
        load(write(tmp_path / "one", engine, found), engine, model)
    assert digests(model) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(tmp_path, engine, monkeypatch):
    source = write(tmp_path / "one", engine, tensors(1))
    module = {"runai": "runai_model_streamer"}.get(engine, engine)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=module) as caught:
        load(source, engine)
    assert caught.value.hint == f"pip install 'weightloaders-engines[{engine}]'"
    assert WeightLoaderRegistry.describe(engine).status == "incomplete"
    assert WeightLoaderRegistry.describe(engine).error == f"not installed: {module}; {caught.value.hint}"
    monkeypatch.undo()
    assert WeightLoaderRegistry.describe(engine).status == "ok"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_source_that_is_not_there_is_named(tmp_path, engine):
    with pytest.raises(SourceNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere", engine)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceNotFoundError, match="empty"):
        load(tmp_path / "empty", engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_changes_after_it_was_catalogued_is_named(tmp_path, engine, gone):
    source = write(tmp_path / "one", engine, tensors(1))
    file = next(path for path in sorted(source.iterdir()) if path.suffix in (".safetensors", ".tensors"))
    with open_weights(source, engine) as weights:
        if gone:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(WeightLoadersError, match=file.name):
            load_into(Fused(), weights, on_unexpected="ignore", progress=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path, engine):
    source = write(tmp_path / "one", engine, tensors(1))
    file = max(source.iterdir(), key=lambda path: path.stat().st_size)
    # The end of a file of tensorizer's is a mark of eight bytes, without which nothing is lost.
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(WeightLoadersError, match=file.name):
        load(source, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_other_loaders_are_not_disturbed_and_auto_takes_none_of_them_for_safetensors(tmp_path, engine):
    probe = WeightLoaderRegistry.get(engine).probe
    assert probe(str(write(tmp_path / "one", "runai", tensors(1)))).answer == "no"
    answer = probe(str(write(tmp_path / "two", "tensorizer", tensors(1)))).answer
    assert answer == ("yes" if engine == "tensorizer" else "no")


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("runai", {"memory_limit": 0}, "memory_limit"),
        ("runai", {"memory_limit": "1GB"}, "memory_limit"),
        ("fastsafetensors", {"max_threads": 0}, "max_threads"),
        ("fastsafetensors", {"bounce_buffer_kb": -1}, "bounce_buffer_kb"),
        ("tensorizer", {"num_readers": 0}, "num_readers"),
        ("tensorizer", {"engine": "other"}, "engine"),
        ("tensorizer", {"engine": "weightloaders", "verify_hash": True}, "verify_hash"),
        ("tensorizer", {"verify_hash": 1}, "verify_hash"),
    ],
)
def test_options_that_can_not_be_are_refused(engine, options, message):
    with pytest.raises(OptionsError, match=message):
        WeightLoaderRegistry.create(engine, **options)


def test_an_error_of_a_library_while_it_reads_says_what_was_written(tmp_path, monkeypatch):
    import fastsafetensors

    source = write(tmp_path / "one", "fastsafetensors", tensors(1))
    copy_files, calls = fastsafetensors.SafeTensorsFileLoader.copy_files_to_device, []

    def failing(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 2:
            raise RuntimeError("the disk is on fire")
        return copy_files(self, *args, **kwargs)

    monkeypatch.setattr(fastsafetensors.SafeTensorsFileLoader, "copy_files_to_device", failing)
    with pytest.raises(LoadError, match="fire") as caught:
        load(source, "fastsafetensors")
    assert isinstance(caught.value.__cause__, SourceReadError)
    assert "model-0000" in str(caught.value.file)
    assert 0 < len(caught.value.written) < 3 * LAYERS + 1
