"""Meta's tensor-parallel parts: put together by proof or by declaration, or refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from weightloaders import ByteSource, Extent, TensorInfo, WeightLoaderRegistry, load_into, open_weights
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
    OptionsError,
    SourceNotFoundError,
    UnknownLoaderError,
)
from weightloaders.loaders.axes import Axes
from weightloaders.loaders.hf import HuggingFaceLoader
from weightloaders.loaders.torch import TorchLoader
from weightloaders.weights.meta_llama import LlamaShapes
from weightloaders.weights.reading import read_tensor
from weightloaders.weights.tensor_parallel import Split, put_together

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 20, "multiple_of": 8, "norm_eps": 1e-5}
HIDDEN = 48  # 2/3 of four times 16, rounded up to a multiple of 8


def llama(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The tensors of a whole Llama, by Meta's names."""
    torch.manual_seed(0)
    whole = {"tok_embeddings.weight": torch.randn(20, 16)}
    for i in range(2):
        at = f"layers.{i}."
        whole |= {
            at + "attention.wq.weight": torch.randn(16, 16),
            at + "attention.wk.weight": torch.randn(8, 16),
            at + "attention.wv.weight": torch.randn(8, 16),
            at + "attention.wo.weight": torch.randn(16, 16),
            at + "feed_forward.w1.weight": torch.randn(HIDDEN, 16),
            at + "feed_forward.w2.weight": torch.randn(16, HIDDEN),
            at + "feed_forward.w3.weight": torch.randn(HIDDEN, 16),
            at + "attention_norm.weight": torch.randn(16),
            at + "ffn_norm.weight": torch.randn(16),
        }
    whole |= {"norm.weight": torch.randn(16), "output.weight": torch.randn(20, 16), "rope.freqs": torch.randn(2)}
    return {name: tensor.to(dtype) for name, tensor in whole.items()}


def axis_of(name: str, embedding: int = 0) -> int | None:
    """What Meta's code splits along."""
    if name == "tok_embeddings.weight":
        return embedding
    if "norm" in name or name == "rope.freqs":
        return None
    return 1 if name.endswith(("wo.weight", "w2.weight")) else 0


def parts_of(whole: dict[str, torch.Tensor], count: int, embedding: int = 0) -> list[dict[str, torch.Tensor]]:
    def part(name: str, tensor: torch.Tensor, number: int) -> torch.Tensor:
        axis = axis_of(name, embedding)
        return tensor if axis is None else tensor.chunk(count, axis)[number].clone()

    return [{name: part(name, tensor, number) for name, tensor in whole.items()} for number in range(count)]


def write(folder: Path, parts: list[dict[str, torch.Tensor]], params: Any = PARAMS, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02}.pth", **options)
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


def assert_holds(weights: Any, whole: dict[str, torch.Tensor]) -> None:
    assert set(weights) == set(whole)
    for name, tensor in whole.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor), name


# ------------------------------------------------------------------ what shapes prove


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("embedding", [0, 1], ids=["llama 3", "llama 2"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_llama_in_parts_is_put_together_by_what_its_shapes_prove(
    tmp_path: Path, count: int, embedding: int, legacy: bool
) -> None:
    whole = llama()
    if count == 4:
        # As many heads of keys as parts.
        whole = {n: torch.cat([t, t]) if n.endswith(("wk.weight", "wv.weight")) else t for n, t in whole.items()}
    params = {**PARAMS, "n_kv_heads": 4 if count == 4 else 2, "vocab_size": 20 if embedding == 0 else -1}
    write(tmp_path, parts_of(whole, count, embedding), params, _use_new_zipfile_serialization=not legacy)
    with open_weights(str(tmp_path)) as weights:
        assert_holds(weights, whole)
        assert all(info.is_raw for info in weights.infos())
        assert len(weights.info("layers.0.attention.wo.weight").extents) == count
        assert any("put together" in note for note in weights.notes)


def test_parts_are_read_straight_into_a_model_and_as_the_whole_would_be(tmp_path: Path) -> None:
    whole = llama(torch.float32)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in whole.items():
                module: torch.nn.Module = self
                *path, leaf = name.split(".")
                for step in path:
                    if not hasattr(module, step):
                        module.add_module(step, torch.nn.Module())
                    module = getattr(module, step)
                module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor)))

    model = Layers()
    report = load_into(model, write(tmp_path, parts_of(whole, 2)))
    assert report.loader == "torch"
    assert_holds(model.state_dict(), whole)
    assert not report.missing
    # All but the norms, of which one copy is loaded, is read once.
    assert report.bytes_read == sum(tensor.nbytes for tensor in whole.values())


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    parts = parts_of(llama(), 2)
    write(tmp_path, parts)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.01\.pth is missing beside .*00\.pth"):
        open_weights(str(tmp_path))
    write(tmp_path, parts)
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.00\.pth is missing beside .*01\.pth"):
        open_weights(str(tmp_path))


def test_a_last_part_that_is_missing_is_known_from_the_shapes(tmp_path: Path) -> None:
    whole = llama()
    write(tmp_path, parts_of(whole, 2)[:1])
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.01\.pth.*there are 2 parts"):
        open_weights(str(tmp_path))
    write(tmp_path, parts_of(whole, 1) * 2)
    with pytest.raises(IncompleteCheckpointError, match="those of 1 tensor-parallel parts"):
        open_weights(str(tmp_path))


@pytest.mark.parametrize("params", [PARAMS, None, {"a": 1}, ["no"], {"dim": True, "n_heads": 4}])
def test_a_checkpoint_of_one_part_is_loaded_as_it_is(tmp_path: Path, params: Any) -> None:
    whole = llama()
    with open_weights(str(write(tmp_path, [whole], params))) as weights:
        assert_holds(weights, whole)


def test_a_part_that_is_named_itself_is_loaded_alone_and_that_is_said(tmp_path: Path) -> None:
    parts = parts_of(llama(), 2)
    write(tmp_path, parts)
    with open_weights(str(tmp_path / "consolidated.01.pth")) as weights:
        assert_holds(weights, parts[1])
        assert any("one of 2 tensor-parallel parts" in note for note in weights.notes)


def test_a_pattern_that_leaves_parts_out_is_refused(tmp_path: Path) -> None:
    whole = {n: torch.cat([t, t]) if n.endswith(("wk.weight", "wv.weight")) else t for n, t in llama().items()}
    write(tmp_path, parts_of(whole, 4), {**PARAMS, "n_kv_heads": 4})
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.02\.pth, consolidated\.03\.pth are parts"):
        TorchLoader(file_pattern="consolidated.0[01].pth").get_weights(str(tmp_path))


@pytest.mark.parametrize("other", [{"dim": 32}, {"n_heads": 8}, {"vocab_size": 21}, {"hidden_dim": 64}])
def test_sizes_of_another_model_beside_the_parts_are_named_as_that(tmp_path: Path, other: dict[str, int]) -> None:
    write(tmp_path, parts_of(llama(), 2), {**PARAMS, **other})
    with pytest.raises(CheckpointFormatError, match=r"by params\.json, tensor '.*' is .* as a whole") as refused:
        open_weights(str(tmp_path))
    assert refused.value.file == f"{tmp_path}/params.json"
    assert refused.value.tensor is not None
    assert "axes={" in (refused.value.hint or "")


@pytest.mark.parametrize("params", [None, {"model": "another"}, {**PARAMS, "n_kv_heads": 1}])
def test_what_no_shape_proves_is_refused_with_what_to_declare(tmp_path: Path, params: Any) -> None:
    write(tmp_path, parts_of(llama(), 2), params)
    with pytest.raises(AmbiguousSourceError, match=r"nothing says how the parts") as refused:
        open_weights(str(tmp_path))
    assert "axes={" in (refused.value.hint or "")
    assert refused.value.tensor is not None


def test_hf_puts_proved_parts_together_and_leaves_them_to_torch_otherwise(tmp_path: Path) -> None:
    whole = llama()
    write(tmp_path, parts_of(whole, 2))
    assert HuggingFaceLoader.probe(str(tmp_path)).answer == "maybe"
    assert_holds(HuggingFaceLoader().get_weights(str(tmp_path)), whole)


def test_a_copy_under_other_names_is_read_before_the_parts(tmp_path: Path) -> None:
    write(tmp_path, parts_of(llama(), 2))
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_weights(str(tmp_path)) as weights:
        assert list(weights) == ["model.norm.weight"]
        assert "consolidated.00.pth" in weights.skipped_files


def test_norms_that_differ_between_parts_are_refused(tmp_path: Path) -> None:
    parts = parts_of(llama(), 2)
    parts[1]["norm.weight"] = parts[1]["norm.weight"] + 1
    write(tmp_path, parts)
    with pytest.raises(DuplicateTensorError, match=r"'norm\.weight' is not the same"):
        open_weights(str(tmp_path))
    with open_weights(str(tmp_path), axes={"norm.weight": "first"}) as weights:
        assert torch.equal(weights["norm.weight"], parts[0]["norm.weight"])


def test_a_tensor_that_a_part_lacks_is_named_with_that_part(tmp_path: Path) -> None:
    parts = parts_of(llama(), 2)
    del parts[1]["layers.1.attention.wq.weight"]
    write(tmp_path, parts)
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.01\.pth has no tensor 'layers\.1\.attention"):
        open_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("params", "hidden"),
    [
        ({"dim": 4096, "n_heads": 32, "multiple_of": 256}, 11008),
        ({"dim": 8192, "n_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),
        ({"dim": 4096, "n_heads": 32, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),
        ({"dim": 4096, "n_heads": 32, "hidden_dim": 14336, "head_dim": 128}, 14336),
    ],
    ids=["7B", "70B", "llama 3 8B", "mistral"],
)
def test_the_feed_forward_size_is_the_one_that_the_models_have(params: dict[str, Any], hidden: int) -> None:
    shapes = LlamaShapes.read(json.dumps(params).encode())
    assert shapes is not None
    assert shapes.whole("layers.0.feed_forward.w1.weight") == (hidden, params["dim"])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4))
def test_any_params_are_understood_or_ignored(value: Any) -> None:
    for params in (value, {"dim": value, "n_heads": 4}, {"dim": 16, "n_heads": 4, "multiple_of": value}):
        LlamaShapes.read(json.dumps(params).encode())


# ------------------------------------------------------------------ what is declared


def test_any_files_are_put_together_by_declared_axes(tmp_path: Path) -> None:
    a, b, common = torch.randn(4, 6), torch.randn(3, 8, dtype=torch.float64), torch.randn(5)
    for number in range(2):
        part = {"x.a": a.chunk(2, 0)[number].clone(), "b": b.chunk(2, 1)[number].clone(), "norm": common}
        torch.save(part, tmp_path / f"part{number}.pt")
    with open_weights(str(tmp_path), "torch", axes={"a": 0, "b": -1, "norm": "same", "gone": 0}) as weights:
        assert_holds(weights, {"x.a": a, "b": b, "norm": common})
        assert any("'gone' matches no tensor" in note for note in weights.notes)


def test_the_sections_of_fused_tensors_are_put_in_order(tmp_path: Path) -> None:
    q, k, v = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    for number in range(2):
        fused = torch.cat([t.chunk(2)[number] for t in (q, k, v)])
        torch.save({"qkv": fused, "t": fused.t()}, tmp_path / f"consolidated.{number:02}.pth")
    way = {"axis": 0, "sections": [2, 1, 1]}
    with open_weights(str(tmp_path), axes={"qkv": way, "t": {**way, "axis": 1}}) as weights:
        assert_holds(weights, {"qkv": torch.cat([q, k, v]), "t": torch.cat([q, k, v]).t()})
    with pytest.raises(CheckpointFormatError, match="can't be divided as 5:1"):
        open_weights(str(tmp_path), axes={"qkv": {"axis": 0, "sections": [5, 1]}, "t": 0})


def test_parts_that_are_not_raw_are_put_together_when_read(tmp_path: Path) -> None:
    whole = torch.randn(4, 3, dtype=torch.complex64)
    for number in range(2):
        torch.save({"w": whole[2 * number : 2 * number + 2].clone().conj()}, tmp_path / f"consolidated.{number:02}.pth")
    with open_weights(str(tmp_path), axes={"w": 0}) as weights:
        assert_holds(weights, {"w": whole.conj().resolve_conj()})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"w": 2}, "no dimension 2"),
        ({"w": -3}, "no dimension -3"),
        ({"w": 0}, "don't fit each other"),
    ],
)
def test_axes_that_the_slices_contradict_are_refused(tmp_path: Path, axes: dict[str, Any], message: str) -> None:
    for number in range(2):
        torch.save({"w": torch.randn(2, 2 + number)}, tmp_path / f"consolidated.{number:02}.pth")
    with pytest.raises(CheckpointFormatError, match=message):
        open_weights(str(tmp_path), axes=axes)


def of_ranks(folder: Path, *names: str) -> str:
    """Files that hold one row each: the first a zero, the second a one, ..."""
    for number, name in enumerate(names):
        torch.save({"w": torch.full((1, 2), float(number))}, folder / name)
    return str(folder)


@pytest.mark.parametrize("stray", ["extra.pth", "model.bin", "consolidated.pt", "consolidated.pth"])
@pytest.mark.parametrize("pattern", [None, "*"])
def test_a_file_beside_the_parts_is_neither_taken_for_one_nor_loaded_instead(
    tmp_path: Path, stray: str, pattern: str | None
) -> None:
    path = of_ranks(tmp_path, "consolidated.00.pth", "consolidated.01.pth", stray)
    with pytest.raises(AmbiguousSourceError, match=stray) as refused:
        TorchLoader(axes={"w": 0}, file_pattern=pattern).get_weights(path)
    assert "file_pattern" in (refused.value.hint or "")
    weights = TorchLoader(axes={"w": 0}, file_pattern="consolidated.0*").get_weights(path)
    assert weights["w"].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("twin", ["consolidated.1.pth", "consolidated.01.pt", "Consolidated.01.pth"])
def test_two_files_of_one_number_are_no_two_ranks(tmp_path: Path, twin: str) -> None:
    path = of_ranks(tmp_path, "consolidated.00.pth", "consolidated.01.pth", twin)
    with pytest.raises(AmbiguousSourceError, match="are the same part") as refused:
        TorchLoader(axes={"w": 0}).get_weights(path)
    assert twin in refused.value.message


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["rank0.pt", "rank2.pt"], "rank1.pt is missing"),
        (["mp_rank_01_states.pt", "mp_rank_03_states.pt"], "mp_rank_02_states.pt is missing"),
        (["tp4_rank2.pt", "tp4_rank3.pt"], "tp4_rank1.pt is missing"),
        (["r0.pt", f"r{10**40}.pt"], "r1.pt, r2.pt, .* are missing"),
    ],
)
def test_a_gap_among_numbered_ranks_is_named_whatever_they_are_called(
    tmp_path: Path, names: list[str], missing: str
) -> None:
    with pytest.raises(IncompleteCheckpointError, match=missing):
        TorchLoader(axes={"w": 0}, file_pattern="*").get_weights(of_ranks(tmp_path, *names))


@pytest.mark.parametrize("names", [[f"rank{n}.pt" for n in range(12)], ["part-1.pt", "part-2.pt"]])
def test_numbered_ranks_are_put_together_in_the_order_of_their_numbers(tmp_path: Path, names: list[str]) -> None:
    weights = TorchLoader(axes={"w": 0}, file_pattern="*").get_weights(of_ranks(tmp_path, *names))
    assert weights["w"][:, 0].tolist() == list(range(len(names)))


@pytest.mark.parametrize(
    "names", [["a.pt", "b.pt"], ["one.pt", "ten.pt", "two.pt"], ["of4_rank0.pt", "of2_rank1.pt"], ["r0.pt", "r1x.pt"]]
)
def test_ranks_that_no_number_puts_in_order_are_refused_rather_than_taken_in_that_of_the_alphabet(
    tmp_path: Path, names: list[str]
) -> None:
    path = of_ranks(tmp_path, *names)
    with pytest.raises(AmbiguousSourceError, match="in which order these parts go together") as refused:
        TorchLoader(axes={"w": 0}, file_pattern="*").get_weights(path)
    assert all(name in refused.value.message for name in names)
    assert TorchLoader(axes={"w": 0}, file_pattern=names[1]).get_weights(path)["w"].tolist() == [[1, 1]]


def test_a_part_that_is_no_regular_file_is_a_part_that_is_missing(tmp_path: Path) -> None:
    path = of_ranks(tmp_path, "consolidated.00.pth", "consolidated.01.pth")
    (tmp_path / "consolidated.02.pth").mkdir()
    with pytest.raises(IncompleteCheckpointError, match=r"consolidated\.02\.pth"):
        TorchLoader(axes={"w": 0}).get_weights(path)


def test_a_part_that_is_named_itself_needs_no_axes_and_nothing_false_is_said_of_them(tmp_path: Path) -> None:
    of_ranks(tmp_path, "consolidated.00.pth", "consolidated.01.pth", "extra.pth")
    (note,) = TorchLoader(axes={"w": 0}).get_weights(str(tmp_path / "consolidated.01.pth")).notes
    assert "one of 2 tensor-parallel parts" in note
    assert not TorchLoader(axes={"w": 0}).get_weights(str(tmp_path / "extra.pth")).notes


def test_options_that_the_loader_chosen_automatically_lacks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = of_ranks(tmp_path, "consolidated.00.pth", "consolidated.01.pth", "model.bin")
    with pytest.raises(OptionsError, match="'hf' can't take") as refused:
        open_weights(path, axes={"w": 0})
    assert "'hf' was chosen automatically" in (refused.value.hint or "")


@pytest.mark.parametrize("loader", ["auto", "hf", "torch"])
def test_what_to_declare_is_said_with_the_loader_that_takes_it_and_the_file_with_its_folder(
    tmp_path: Path, loader: str
) -> None:
    with pytest.raises(AmbiguousSourceError) as refused:
        open_weights(of_ranks(tmp_path, "consolidated.00.pth", "consolidated.01.pth"), loader)
    assert "loader 'torch'" in (refused.value.hint or "")
    assert refused.value.file == str(tmp_path / "consolidated.00.pth")


@pytest.mark.parametrize(
    "axes", [{"w": "other"}, {"w": 1.0}, {"w": True}, {"w": {"axis": 0, "sections": [0]}}, {"w": {"axes": 0}}, {"": []}]
)
def test_axes_that_mean_nothing_are_refused_when_the_loader_is_made(axes: Any) -> None:
    with pytest.raises(OptionsError, match="axes"):
        WeightLoaderRegistry.create("torch", axes=axes)
    with pytest.raises(OptionsError, match="axes"):
        WeightLoaderRegistry.create("torch", axes=3)


def test_axes_and_an_index_contradict_each_other(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "pytorch_model.bin"}}))
    with pytest.raises(OptionsError, match="ignore_index"):
        TorchLoader(axes={"w": 0}).get_weights(str(tmp_path))


def test_the_first_pattern_that_matches_counts() -> None:
    axes = Axes({"layers.0.w": 1, "w": 0, "**": "same"})
    assert [axes.way_of(n) for n in ("layers.0.w", "layers.1.w", "x")] == [Split(1), Split(0), "same"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slices_make_up_what_they_were_cut_from(data: st.DataObject) -> None:
    ranks, dims = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, dims - 1))
    sections = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    units = [data.draw(st.integers(0, 2)) for _ in range(ranks)]
    rest = [data.draw(st.integers(1, 3)) for _ in range(dims)]

    def shape(size: int) -> list[int]:
        return [*rest[:axis], size, *rest[axis + 1 :]]

    # Each section of the whole is what all ranks have of it.
    wholes = [torch.randn(shape(section * sum(units))) for section in sections]
    cut = [w.split([s * u for u in units], axis) for w, s in zip(wholes, sections, strict=True)]
    slices = [torch.cat([pieces[rank] for pieces in cut], axis) for rank in range(ranks)]
    if data.draw(st.booleans()):
        slices = [s.transpose(0, -1).contiguous().transpose(0, -1) for s in slices]
    parts = {}
    for rank, piece in enumerate(slices):
        source = _Memory(piece)
        strides = piece.stride()
        extents = (Extent(source, strides=strides),) if piece.numel() else ()
        parts[f"rank {rank}"] = [TensorInfo("w", piece.dtype, piece.shape, extents)]
    (info,) = put_together(parts, lambda _: Split(axis, tuple(sections)))
    assert torch.equal(read_tensor(info), torch.cat(wholes, axis))


class _Memory(ByteSource):
    """The storage of a tensor as a source."""

    name = "memory"

    def __init__(self, tensor: torch.Tensor) -> None:
        self._data = bytes(tensor.untyped_storage().tolist())

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def identity(self) -> int:
        return id(self)

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self._data[offset : offset + len(view)]


@pytest.mark.parametrize(
    ("files", "loader"),
    [
        (["model-rank-0-part-0.safetensors"], "sharded_state"),
        (["shard-00001-model-00001-of-00001.safetensors"], "dcp"),
        ([".metadata", "__0_0.distcp"], "dcp"),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_that_ranks_wrote_names_the_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], loader: str, relative: bool
) -> None:
    # Relative, the path could as well be a repository's name.
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/step-1000"
    folder.mkdir(parents=True)
    for file in files:
        save_file({"w": torch.ones(2)}, folder / file)
    for name in ("auto", "local") if relative else ("auto", "local", "hf", "torch"):
        with pytest.raises(SourceNotFoundError, match=f"(?s){loader}.*weightloaders-dcp") as refused:
            open_weights("runs/step-1000" if relative else folder, name)
        assert "weightloaders-dcp" in (refused.value.hint or "")
    with pytest.raises(UnknownLoaderError) as unknown:
        open_weights(folder, loader)
    assert unknown.value.hint == "pip install weightloaders-dcp"
