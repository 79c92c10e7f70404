"""`ShardedStateLoader`: one rank's state, or those of all put together."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from weightloaders_dcp import ShardedStateLoader

import weightloaders as wl
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
    OptionsError,
    SourceNotFoundError,
)

AXES = {
    "qkv_proj": {"axis": 0, "sections": [4, 1, 1]},
    "gate_up_proj": {"axis": 0, "sections": [1, 1]},
    "o_proj": 1,
    "down_proj": 1,
    "embed_tokens": 0,
    "norm": "same",
}


def whole():
    """A layer as vLLM's models have it, whole."""
    torch.manual_seed(0)
    q, k, v = torch.randn(16, 8), torch.randn(4, 8), torch.randn(4, 8)
    gate, up = torch.randn(12, 8), torch.randn(12, 8)
    return {
        "model.embed_tokens.weight": torch.randn(10, 8),
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(8, 16),
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat([gate, up]),
        "model.layers.0.mlp.down_proj.weight": torch.randn(8, 12),
        "model.norm.weight": torch.randn(8),
    }


def of_rank(tensors, rank, ranks=2):
    """What vLLM's parallel layers keep on a rank."""

    def part(name, tensor):
        if "qkv_proj" in name:
            return torch.cat([t.chunk(ranks)[rank] for t in tensor.split([16, 4, 4])])
        if "gate_up_proj" in name:
            return torch.cat([t.chunk(ranks)[rank] for t in tensor.chunk(2)])
        if "norm" in name:
            return tensor
        return tensor.chunk(ranks, 1 if ("o_proj" in name or "down_proj" in name) else 0)[rank]

    return {name: part(name, tensor).clone().contiguous() for name, tensor in tensors.items()}


@pytest.fixture
def folder(tmp_path):
    """Two ranks, of two parts each, as vLLM's `ShardedStateLoader.save_model` lays them out."""
    for rank in range(2):
        items = list(of_rank(whole(), rank).items())
        for part in range(2):
            save_file(dict(items[part::2]), tmp_path / f"model-rank-{rank}-part-{part}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def load(folder, **options):
    with wl.open_weights(folder, ShardedStateLoader, **options) as weights:
        return dict(weights.items())


def assert_same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_one_rank_is_read_as_it_is(folder):
    for rank in range(2):
        assert_same(load(folder, rank=rank), of_rank(whole(), rank))


def test_all_ranks_are_put_together_by_declared_axes(folder):
    assert_same(load(folder, axes=AXES), whole())
    weights = ShardedStateLoader(axes=AXES).get_weights(str(folder))
    assert all(info.is_raw for info in weights.infos())
    assert len(weights.info("model.layers.0.self_attn.qkv_proj.weight").extents) == 6
    assert any("2 ranks" in note for note in weights.notes)


def test_the_state_of_a_single_rank_needs_no_options(tmp_path):
    save_file(whole(), tmp_path / "model-rank-0-part-0.safetensors")
    assert_same(load(tmp_path), whole())
    assert_same(load(tmp_path, world_size=1), whole())


def test_several_ranks_are_never_read_as_one(folder):
    with pytest.raises(AmbiguousSourceError, match="2 tensor-parallel ranks") as refused:
        load(folder)
    assert "rank=0" in refused.value.hint
    assert "axes=" in refused.value.hint


def test_a_tensor_without_a_declared_axis_is_named(folder):
    with pytest.raises(AmbiguousSourceError, match=r"'model\.norm\.weight'"):
        load(folder, axes={name: way for name, way in AXES.items() if name != "norm"})


def test_tensors_that_should_be_the_same_and_are_not_are_refused(folder):
    with pytest.raises(DuplicateTensorError, match="is not the same"):
        load(folder, axes={**AXES, "embed_tokens": "same"})
    assert load(folder, axes={**AXES, "embed_tokens": "first"})["model.embed_tokens.weight"].shape == (5, 8)


def test_axes_that_do_not_fit_are_refused(folder):
    with pytest.raises(CheckpointFormatError, match="can't be divided as 7:1"):
        load(folder, axes={**AXES, "gate_up_proj": {"axis": 0, "sections": [7, 1]}})


@pytest.mark.parametrize(
    ("gone", "options"),
    [
        ("model-rank-0-part-0.safetensors", {"rank": 0}),
        ("model-rank-1-part-0.safetensors", {"axes": AXES}),
        ("model-rank-1-part-0.safetensors", {"rank": 1}),
    ],
)
def test_a_missing_part_is_named(folder, gone, options):
    (folder / gone).unlink()
    with pytest.raises(IncompleteCheckpointError, match=gone):
        load(folder, **options)


def test_a_missing_rank_is_named(folder):
    for part in range(2):
        (folder / f"model-rank-0-part-{part}.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match="model-rank-0-part-0"):
        load(folder, axes=AXES)
    with pytest.raises(SourceNotFoundError, match="no file of rank 0"):
        load(folder, rank=0)
    assert_same(load(folder, rank=1), of_rank(whole(), 1))


def test_a_last_rank_that_is_missing_is_known_by_the_world_size(folder):
    with pytest.raises(IncompleteCheckpointError, match="model-rank-2-part-0"):
        load(folder, axes=AXES, world_size=3)
    with pytest.raises(OptionsError, match="world_size=1"):
        load(folder, axes=AXES, world_size=1)
    assert_same(load(folder, axes=AXES, world_size=2), whole())


def test_a_tensor_in_two_parts_of_a_rank_is_refused(folder):
    save_file(of_rank(whole(), 0), folder / "model-rank-0-part-2.safetensors")
    with pytest.raises(DuplicateTensorError):
        load(folder, rank=0)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 0, "axes": AXES},
        {"rank": -1},
        {"rank": 2, "world_size": 2},
        {"world_size": 0},
        {"axes": {"w": "x"}},
        {"rank": "0"},
    ],
)
def test_options_that_mean_nothing_are_refused(folder, options, registry):
    with pytest.raises(OptionsError):
        registry.create("sharded_state", **options)


def test_a_rank_that_is_not_there_is_named(folder, tmp_path):
    with pytest.raises(SourceNotFoundError, match="no file of rank 7"):
        load(folder, rank=7)
    with pytest.raises(SourceNotFoundError, match="nowhere is not there"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceNotFoundError, match="holds no model-rank"):
        load(tmp_path / "empty")


def test_auto_finds_the_loader(folder, registry):
    loader = registry.resolve("auto", {"rank": 1}, source=str(folder))
    assert isinstance(loader, ShardedStateLoader)
    assert_same(dict(loader.get_weights(str(folder)).items()), of_rank(whole(), 1))
    assert ShardedStateLoader.probe(str(folder.parent)).answer == "no"


def saved(folder, files):
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        save_file({"w": torch.full((2, 2), float(value))}, folder / f"{name}.safetensors")
    return folder


def test_one_ranks_state_needs_no_other_ranks_files(tmp_path):
    saved(tmp_path, {"model-rank-1-part-0": 1})
    with wl.open_weights(tmp_path, ShardedStateLoader, rank=1) as weights:
        assert weights["w"].tolist() == [[1, 1], [1, 1]]
    with pytest.raises(SourceNotFoundError, match="no file of rank 2"):
        wl.open_weights(tmp_path, ShardedStateLoader, rank=2)
    with pytest.raises(IncompleteCheckpointError, match="model-rank-0"):
        wl.open_weights(tmp_path, ShardedStateLoader, axes={"w": 0})
    saved(tmp_path, {"model-rank-1-part-2": 1})
    with pytest.raises(IncompleteCheckpointError, match="model-rank-1-part-1"):
        wl.open_weights(tmp_path, ShardedStateLoader, rank=1)


def test_axes_that_a_lone_rank_has_no_use_for_are_told(tmp_path):
    saved(tmp_path, {"model-rank-0-part-0": 0})
    with wl.open_weights(tmp_path, ShardedStateLoader, axes={"w": 0}) as weights:
        assert any("axes: not used" in note for note in weights.notes)


def test_two_files_with_the_same_numbers_are_refused(tmp_path):
    saved(tmp_path, {"model-rank-0-part-0": 0, "model-rank-00-part-0": 5})
    with pytest.raises(AmbiguousSourceError, match="model-rank-00-part-0"):
        wl.open_weights(tmp_path, ShardedStateLoader)


@pytest.mark.parametrize("kind", ["folder", "dead link"])
def test_what_lies_in_the_place_of_a_ranks_file_is_no_reason_to_read_without_it(tmp_path, kind):
    saved(tmp_path, {"model-rank-0-part-0": 0})
    other = tmp_path / "model-rank-1-part-0.safetensors"
    other.mkdir() if kind == "folder" else other.symlink_to(tmp_path / "nowhere")
    for options in ({"axes": {"w": 0}}, {"rank": 1}):
        with pytest.raises(IncompleteCheckpointError, match=r"model-rank-1-part-0\.safetensors in .* is a"):
            wl.open_weights(tmp_path, ShardedStateLoader, **options)
    assert list(wl.open_weights(tmp_path, ShardedStateLoader, rank=0)) == ["w"]
