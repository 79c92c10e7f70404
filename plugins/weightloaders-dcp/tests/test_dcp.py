"""`DcpLoader` against what torch itself saves and loads."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from weightloaders_dcp import DcpLoader
from weightloaders_dcp.pickled import Record, read_pickle

import weightloaders as wl
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
    OptionsError,
    SourceNotFoundError,
    UnsafeCheckpointError,
    WeightLoadersError,
)
from weightloaders.weights.remote import Answer, RemoteSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

TENSORS = {
    "a.weight": torch.randn(4, 6),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "view": torch.arange(20.0)[3:9:2],
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "half": torch.randn(3, dtype=torch.bfloat16),
    "codes": torch.randn(3, 3).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
}


def save(folder, state, **options):
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def load(path, **options):
    with wl.open_weights(path, DcpLoader, **options) as weights:
        return dict(weights.items())


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        plain = (found[name].contiguous(), tensor.resolve_conj().contiguous())
        a, b = (t.reshape(-1).view(torch.uint8) if t.numel() else t for t in plain)
        assert torch.equal(a, b), name


# ------------------------------------------------------------------ what torch saves


def test_what_one_process_saved_is_what_is_loaded(tmp_path):
    assert_same(load(save(tmp_path, TENSORS)), TENSORS)
    weights = DcpLoader().get_weights(str(tmp_path))
    # Values behind a lazy conjugation don't lie there as they are.
    assert {name for name in weights if not weights.info(name).is_raw} == {"conjugate"}


@pytest.mark.parametrize("kind", ["nested", "several-files", "own-metadata"])
def test_slices_of_two_ranks_are_put_together(two_ranks, kind):
    whole = {name: t for name, t in torch.load(two_ranks / "whole.pt").items() if not name.startswith("fsdp.")}
    assert_same(load(two_ranks / kind), whole)
    with wl.open_weights(two_ranks / kind, DcpLoader) as weights:
        assert all(info.is_raw for info in weights.infos())
        assert [e.at for e in weights.info("rows").extents] == [(0, 0), (3, 0)]
        assert [e.at for e in weights.info("columns").extents] == [(0, 0), (0, 3)]
        # What every rank has was stored once, or is read once.
        assert len(weights.info("replicated").extents) == len(weights.info("plain").extents) == 1


def test_the_tensors_of_torchs_older_fsdp_are_put_together(two_ranks):
    with wl.open_weights(two_ranks / "older", DcpLoader) as weights:
        assert [e.shape for e in weights.info("rows").extents] == [(4, 4), (2, 4)]
        assert torch.equal(weights["rows"], torch.load(two_ranks / "whole.pt")["rows"])


@pytest.mark.parametrize("kind", ["hf", "safetensors"])
def test_slices_in_the_format_of_safetensors_are_put_together(two_ranks, kind):
    left_out = ("fsdp.", "empty", "one_row")
    whole = {name: t for name, t in torch.load(two_ranks / "whole.pt").items() if not name.startswith(left_out)}
    assert_same(load(two_ranks / kind), whole)
    with wl.open_weights(two_ranks / kind, DcpLoader) as weights:
        assert len(weights.info("uneven").extents) == 2


def stored(folder, chunks, shape, deflated):
    """A checkpoint of one tensor ``w`` of such chunks, each given with its place; packed as torch itself does not."""
    data, places = b"", {}
    for at, tensor in chunks:
        item = io.BytesIO()
        torch.save(tensor, item)
        if deflated:
            packed = io.BytesIO()
            with zipfile.ZipFile(item) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in plain.namelist():
                    archive.writestr(name, plain.read(name))
            item = packed
        places[MetadataIndex("w", torch.Size(at))] = _StorageInfo("__0_0.distcp", len(data), len(item.getvalue()))
        data += item.getvalue()
    boxes = [ChunkStorageMetadata(torch.Size(at), tensor.shape) for at, tensor in chunks]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), boxes)
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": tensor}, {"w": ("w",)}, places)))


@pytest.mark.parametrize("deflated", [False, True])
def test_chunks_fill_their_tensor_and_each_element_once_however_they_are_packed(tmp_path, deflated):
    stored(tmp_path, [((0,), torch.full((5,), 1.0)), ((5,), torch.full((3,), 2.0))], (8,), deflated)
    assert load(tmp_path)["w"].tolist() == [1, 1, 1, 1, 1, 2, 2, 2]
    # As many elements as it needs, but one of them twice and another never.
    stored(tmp_path, [((0,), torch.full((7,), 1.0)), ((1,), torch.full((1,), 2.0))], (8,), deflated)
    with pytest.raises(CheckpointFormatError, match="fill the same elements") as caught:
        load(tmp_path)
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "__0_0.distcp"), "w")


def data_first(tensor):
    """An item whose data stands before the pickle that says how it is strided."""
    plain, turned = io.BytesIO(), io.BytesIO()
    torch.save(tensor, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(turned, "w") as out:
        for name in sorted(archive.namelist(), key=lambda name: "data/0" not in name):
            out.writestr(zipfile.ZipInfo(name), archive.read(name))
    return turned.getvalue()


def test_items_that_differ_behind_their_data_are_each_read_as_they_are(tmp_path):
    tensors = {"a": torch.arange(9.0).view(3, 3), "b": (torch.arange(9.0) + 100).view(3, 3).t()}
    data, places, entries = b"", {}, {}
    for name, tensor in tensors.items():
        item = data_first(tensor)
        places[MetadataIndex(name, torch.Size((0, 0)))] = _StorageInfo("__0_0.distcp", len(data), len(item))
        box = ChunkStorageMetadata(torch.Size((0, 0)), tensor.shape)
        entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), tensor.shape, [box])
        data += item
    (tmp_path / "__0_0.distcp").write_bytes(data)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, {"a": ("a",), "b": ("b",)}, places)))
    assert_same(load(tmp_path), tensors)


def shards(folder, files):
    """Ranks' parts in the format of safetensors: name -> the tensor ``w``, and where it begins if that is said."""
    for name, (tensor, at) in files.items():
        said = {} if at is None else {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": at}})}
        save_file({"w": tensor}, folder / f"{name}.safetensors", metadata={"format": "pt", **said})
    return folder


@pytest.mark.parametrize("at", [[0, 0], None])
def test_a_slice_that_several_ranks_stored_is_the_same_in_all_of_them(tmp_path, at):
    a, b = torch.zeros(2, 2), torch.ones(2, 2)
    names = [f"shard-0000{rank}-model-00001-of-00001" for rank in (1, 2)]
    assert torch.equal(load(shards(tmp_path, {names[0]: (a, [0, 0]), names[1]: (a, at)}))["w"], a)
    with pytest.raises(DuplicateTensorError, match="not the same") as caught:
        load(shards(tmp_path, {names[0]: (a, [0, 0]), names[1]: (b, at)}))
    assert caught.value.tensor == "w"
    assert caught.value.file == str(tmp_path / f"{names[1]}.safetensors")


def test_a_file_that_no_rank_has_is_named(tmp_path):
    shards(tmp_path, {"shard-00001-model-00001-of-00002": (torch.zeros(2, 2), [0, 0])})
    with pytest.raises(IncompleteCheckpointError, match="model-00002-of-00002"):
        load(tmp_path)


def test_two_files_of_ranks_with_the_same_numbers_are_refused(tmp_path):
    part = (torch.zeros(2, 2), [0, 0])
    shards(tmp_path, {"shard-00001-model-00001-of-00001": part, "shard-1-model-00001-of-00001": part})
    with pytest.raises(AmbiguousSourceError, match="the same numbers"):
        load(tmp_path)


def test_a_key_that_leads_nowhere_is_refused_in_every_format(tmp_path):
    shards(tmp_path, {"shard-00001-model-00001-of-00001": (torch.zeros(2, 2), [0, 0])})
    with pytest.raises(OptionsError, match="nonsense"):
        load(tmp_path, key="nonsense")


def test_it_is_what_torch_itself_loads(two_ranks):
    found = load(two_ranks / "nested")
    expected = {"model": {name: torch.empty_like(tensor) for name, tensor in found.items()}}
    dcp.load(expected, checkpoint_id=two_ranks / "nested", no_dist=True)
    assert_same(found, expected["model"])


def test_fsdp_is_loaded_straight_into_a_model_that_is_not_sharded(two_ranks):
    whole = {n.removeprefix("fsdp."): t for n, t in torch.load(two_ranks / "whole.pt").items() if "fsdp" in n}
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    report = wl.load_into(model, two_ranks / "fsdp", loader="weightloaders_dcp:DcpLoader")
    assert_same(model.state_dict(), whole)
    assert report.bytes_read == sum(tensor.nbytes for tensor in whole.values())
    assert any("optim (" in note for note in report.notes)


def test_only_the_beginnings_of_items_that_are_alike_are_read(tmp_path, monkeypatch):
    save(tmp_path, {f"w{i}": torch.full((200, 300), float(i)) for i in range(40)})
    read = []
    real = os.preadv

    def counted(descriptor, views, offset):
        read.append(sum(map(len, views)))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    weights = DcpLoader().get_weights(str(tmp_path))
    # A directory, some 64 KiB of it at most, for the first of them; and .metadata.
    assert sum(read) < (tmp_path / ".metadata").stat().st_size + 40 * 1280 + 3 * 65536
    monkeypatch.undo()
    assert all(torch.equal(weights[f"w{i}"], torch.full((200, 300), float(i))) for i in range(40))


class Far(RemoteSource):
    """A file far away, which notes the requests that it gets."""

    def __init__(self, path, asked):
        super().__init__(f"far://{path.name}")
        self.content, self.asked = path.read_bytes(), asked

    @contextlib.contextmanager
    def ask(self, start, end):
        self.asked.append((start, end))
        yield Answer(len(self.content), "tag", min(end, len(self.content)), [self.content[start:end]])


class FarFolder(wl.FolderListing):
    def __init__(self, folder):
        super().__init__(folder)
        self.asked, self.opened = [], {}

    def open(self, name):
        return self.opened.setdefault(name, Far(self.folder / name, self.asked))


def test_a_folder_far_away_is_described_by_few_requests(tmp_path):
    tensors = {f"{i}.{j}": torch.randn(i + 1, 200, j) for i in range(12) for j in (3, 20, 40)}
    listing = FarFolder(save(tmp_path, tensors))
    weights = DcpLoader().get_listed_weights(listing)
    # The beginning of two files, and what lies around each tensor, of which 16 are asked for at once: its own 36 kinds
    # would take ten requests each.
    assert len(listing.asked) <= 16 + 3
    assert_same(dict(weights), tensors)


def test_what_lies_between_far_away_tensors_is_not_read_beyond_measure(tmp_path):
    tensors = {f"{i}": torch.randn(500, 1000 + i) for i in range(12)}
    listing = FarFolder(save(tmp_path, tensors))
    weights = DcpLoader().get_listed_weights(listing)
    assert len(listing.asked) <= 12 + 3
    assert sum(end - start for start, end in listing.asked) < (4 << 20) + (200 << 10)
    assert_same(dict(weights), tensors)


def test_items_that_begin_alike_but_are_not_are_told_apart(tmp_path):
    tensors = {f"a{i}": torch.randn(4, 6) for i in range(3)} | {"b": torch.randn(6, 4), "c": torch.randn(24)}
    tensors |= {"t": torch.randn(6, 4).t(), "i": torch.arange(24, dtype=torch.int32).view(4, 6)}
    assert_same(load(save(tmp_path, tensors)), tensors)


def test_minilm_saved_by_torch_as_dcp_bin_and_legacy_bin_is_the_same_model(tmp_path, minilm):
    transformers = pytest.importorskip("transformers")
    original = transformers.AutoModel.from_pretrained(minilm)
    state = original.state_dict()
    save(tmp_path / "dcp", state)
    for name, zipped in (("zip", True), ("legacy", False)):
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    for kind, loader in (("dcp", "weightloaders_dcp:DcpLoader"), ("zip", "auto"), ("legacy", "auto")):
        shutil.copy(minilm / "config.json", tmp_path / kind)
        model, report = wl.from_pretrained(tmp_path / kind, loader=loader, auto_class="AutoModel")
        assert not report.missing
        assert not report.unexpected
        assert_same(model.state_dict(), state)


# ------------------------------------------------------------------ which part of it


def test_the_model_is_found_beside_an_optimizer(tmp_path):
    model = {"a.weight": torch.randn(2, 2)}
    optimizer = {"state": {"a.weight": {"exp_avg": torch.randn(2, 2), "step": torch.tensor(3.0)}}, "param_groups": [1]}
    for state in (
        {"model": model, "optimizer": optimizer, "epoch": 3},
        {"state_dict": model, "optimizer_0": optimizer, "step": torch.tensor(3)},
        {"app": {"model": model, "optim": optimizer}},
        {**model, "optimizer": optimizer, "train_state": {"step": torch.tensor(3)}},
        model,
    ):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        assert_same(load(save(tmp_path / "c", state)), model)


def test_nested_modules_keep_their_place_in_names(tmp_path):
    state = {"model": {"encoder": {"w": torch.ones(1)}, "decoder": {"w": torch.zeros(1)}}}
    assert set(load(save(tmp_path, state))) == {"encoder.w", "decoder.w"}
    save(tmp_path / "flat", state["model"])
    assert set(load(tmp_path / "flat")) == {"encoder.w", "decoder.w"}


def test_several_sets_of_weights_are_a_question_that_key_answers(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}, "optimizer": {"w": torch.ones(2)}}
    save(tmp_path, state)
    with pytest.raises(AmbiguousSourceError, match=r"'model'.*'ema'") as refused:
        load(tmp_path)
    assert "key='model'" in refused.value.hint
    assert load(tmp_path, key="ema")["w"].tolist() == [0.0, 0.0]
    assert set(load(tmp_path, key="")) == {"model.w", "ema.w", "optimizer.w"}
    with pytest.raises(OptionsError, match="no tensors") as refused:
        load(tmp_path, key="other")
    assert "model (1 tensor)" in refused.value.hint


def test_weights_beside_a_wrapper_are_not_lost_silently(tmp_path):
    save(tmp_path, {"model": {"w": torch.ones(2)}, "head.weight": torch.ones(2, 2)})
    with pytest.raises(AmbiguousSourceError, match="1 tensors beside"):
        load(tmp_path)


def test_an_optimizer_alone_is_no_model(tmp_path):
    save(tmp_path, {"optimizer": {"state": {"w": torch.ones(2)}}})
    with pytest.raises(CheckpointFormatError, match=r"no weights: optimizer \(1 tensor\)"):
        load(tmp_path)


def test_names_that_nobody_wrote_the_keys_of_are_understood(tmp_path):
    save(tmp_path, {"model": {"a.w": torch.ones(2)}, "optimizer": {"a.w": torch.zeros(2)}})
    change(tmp_path, lambda metadata: setattr(metadata, "planner_data", None))
    assert set(load(tmp_path)) == {"a.w"}
    save(tmp_path / "plain", {"model.a.w": torch.ones(2)})
    change(tmp_path / "plain", lambda metadata: setattr(metadata, "planner_data", None))
    assert set(load(tmp_path / "plain")) == {"model.a.w"}


# ------------------------------------------------------------------ what is missing or contradicts itself


def change(folder, how):
    """Change what a ``.metadata`` says."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = how(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))


@pytest.fixture
def sharded(two_ranks, tmp_path):
    shutil.copytree(two_ranks / "nested", tmp_path / "nested")
    return tmp_path / "nested"


def test_a_missing_file_is_named_before_any_parameter_changes(sharded):
    (sharded / "__1_0.distcp").unlink()
    model = torch.nn.Module()
    model.rows = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(IncompleteCheckpointError, match=r"__1_0\.distcp is not there") as refused:
        wl.load_into(model, sharded, loader=DcpLoader)
    assert "all ranks" in refused.value.hint
    assert not model.rows.any()


def test_files_of_the_optimizer_alone_need_not_be_there(tmp_path):
    save(tmp_path, {"model": {"w": torch.ones(2)}, "optimizer": {"w": torch.ones(3)}},
         storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False))  # fmt: skip
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("optimizer"):
            (tmp_path / info.relative_path).unlink()
    assert load(tmp_path)["w"].tolist() == [1.0, 1.0]


def test_a_folder_without_metadata_says_so(sharded, tmp_path):
    (sharded / ".metadata").unlink()
    with pytest.raises(SourceNotFoundError, match=r"lacks \.metadata") as refused:
        load(sharded)
    assert "interrupted" in refused.value.hint
    with pytest.raises(SourceNotFoundError, match="nowhere is not there"):
        load(tmp_path / "nowhere")


def test_metadata_of_a_rank_that_is_missing_is_named(two_ranks, tmp_path):
    shutil.copytree(two_ranks / "own-metadata", tmp_path / "c")
    (tmp_path / "c/__0.metadata").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"__0\.metadata is missing"):
        load(tmp_path / "c")


def test_the_last_ranks_metadata_missing_shows_as_a_gap(two_ranks, tmp_path):
    shutil.copytree(two_ranks / "own-metadata", tmp_path / "c")
    (tmp_path / "c/__1.metadata").unlink()
    with pytest.raises(CheckpointFormatError, match="fill 12 of its 24 elements") as refused:
        load(tmp_path / "c")
    assert refused.value.tensor == "rows"


@pytest.mark.parametrize("kind", ["gap", "overlap", "outside", "other dims", "negative"])
def test_chunks_that_do_not_make_up_their_tensor_are_refused(sharded, kind):
    def broken(metadata: Metadata):
        tensor = metadata.state_dict_metadata["model.rows"]
        second = tensor.chunks[1]
        at = {"outside": (4, 0), "overlap": (2, 0), "other dims": (3,), "negative": (-3, 0)}.get(kind, (3, 0))
        if kind == "gap":
            del tensor.chunks[1]
        else:
            tensor.chunks[1] = ChunkStorageMetadata(torch.Size(at), second.sizes)
            info = metadata.storage_data[MetadataIndex("model.rows", second.offsets)]
            metadata.storage_data[MetadataIndex("model.rows", at)] = info

    change(sharded, broken)
    with pytest.raises(CheckpointFormatError) as refused:
        load(sharded)
    assert refused.value.tensor in ("rows", "model.rows")


def test_a_chunk_that_is_stored_nowhere_is_named(sharded):
    change(sharded, lambda m: m.storage_data.pop(MetadataIndex("model.rows", (3, 0))) and None)
    with pytest.raises(CheckpointFormatError, match=r"where the chunk of tensor 'model\.rows' from \[3, 0\]"):
        load(sharded)


def test_an_optimizer_with_gaps_is_no_concern(sharded):
    change(sharded, lambda m: m.state_dict_metadata["optimizer.state.rows"].chunks.pop() and None)
    assert "rows" in load(sharded)


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/../../b", "C:\\b", "..\\b", ""])
def test_a_file_outside_the_folder_is_never_opened(sharded, path):
    def outside(metadata):
        metadata.storage_data[MetadataIndex("model.rows", (3, 0))].relative_path = path

    change(sharded, outside)
    with pytest.raises(UnsafeCheckpointError, match="outside its folder"):
        load(sharded)


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", -1), ("offset", 1 << 70), ("length", 1 << 40), ("length", -5), ("offset", "0"), ("length", 10)],
)
def test_places_that_can_not_be_are_refused(sharded, field, value):
    change(sharded, lambda m: setattr(m.storage_data[MetadataIndex("model.rows", (3, 0))], field, value))
    with pytest.raises(CheckpointFormatError):
        load(sharded)


def test_files_of_another_checkpoint_are_noticed(sharded):
    def swapped(metadata):
        data = metadata.storage_data
        rows, columns = MetadataIndex("model.rows", (3, 0)), MetadataIndex("model.uneven", (3, 0))
        data[rows], data[columns] = data[columns], data[rows]

    change(sharded, swapped)
    with pytest.raises(CheckpointFormatError, match=r"is \[2, 3\].*where the metadata says \[3, 4\]"):
        load(sharded)


def test_a_truncated_file_is_named(sharded):
    path = sharded / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(CheckpointFormatError, match="lies at bytes") as refused:
        load(sharded)
    assert refused.value.file.endswith("__1_0.distcp")


def test_transformed_bytes_are_refused_by_name(sharded):
    info = MetadataIndex("model.rows", (3, 0))
    change(sharded, lambda m: setattr(m.storage_data[info], "transform_descriptors", ["stream.zstd/1"]))
    with pytest.raises(CheckpointFormatError, match=r"stream\.zstd"):
        load(sharded)


def test_a_missing_shard_of_the_safetensors_form_is_named(two_ranks, tmp_path):
    shutil.copytree(two_ranks / "hf", tmp_path / "hf")
    first, second = sorted((tmp_path / "hf").iterdir())
    second.rename(second.with_name(second.name.replace("00002-model", "00003-model")))
    with pytest.raises(IncompleteCheckpointError, match="none of shard-00002"):
        load(tmp_path / "hf")
    first.unlink()
    with pytest.raises(IncompleteCheckpointError, match="none of shard-00001"):
        load(tmp_path / "hf")


# ------------------------------------------------------------------ what may not run


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ.get("DCP_EVIL", "evil"),)


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "version", "key"])
def test_nothing_in_the_metadata_ever_runs(tmp_path, monkeypatch, where):
    monkeypatch.setenv("DCP_EVIL", str(tmp_path / "evil"))
    save(tmp_path / "c", {"w": torch.ones(2)})

    metadata = pickle.loads((tmp_path / "c/.metadata").read_bytes())
    if where == "key":
        metadata.state_dict_metadata[("w", Evil())] = metadata.state_dict_metadata["w"]
    else:
        setattr(metadata, where, Evil())
    (tmp_path / "c/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.mkdir|nt\.mkdir"):
        load(tmp_path / "c")
    assert not (tmp_path / "evil").exists()


def test_nothing_in_an_item_ever_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("DCP_EVIL", str(tmp_path / "evil"))
    save(tmp_path / "c", {"w": torch.ones(2)})
    item = io.BytesIO()
    torch.save(Evil(), item)
    (tmp_path / "c/__0_0.distcp").write_bytes(item.getvalue())

    def replaced(metadata):
        (info,) = metadata.storage_data.values()
        info.offset, info.length = 0, len(item.getvalue())

    change(tmp_path / "c", replaced)
    with pytest.raises(UnsafeCheckpointError):
        load(tmp_path / "c")
    assert not (tmp_path / "evil").exists()


def test_items_that_are_no_tensors_are_refused(tmp_path):
    save(tmp_path, {"w": torch.ones(2)})
    item = io.BytesIO()
    torch.save({"w": torch.ones(2)}, item)
    (tmp_path / "__0_0.distcp").write_bytes(item.getvalue())

    def replaced(metadata):
        (info,) = metadata.storage_data.values()
        info.offset, info.length = 0, len(item.getvalue())

    change(tmp_path, replaced)
    with pytest.raises(CheckpointFormatError, match="'dict' where tensor 'w' should be"):
        load(tmp_path)


def bomb(levels: int) -> bytes:
    """A tuple of tuples of tuples, which share their parts, as a key of a dict."""
    return b"\x80\x04})\x94" + b"h\x00h\x00\x86q\x00" * levels + b"K\x01s."


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04}.",
        b"\x80\x04N.",
        b".",
        b"0.",
        b"t.",
        b"\x80\x04)R.",
        b"\x80\x04K\x01K\x02\x93.",
        b"\x80\x04]}K\x01K\x01us.",
        bomb(60),
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60),
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04j\xff\xff\xff\x7f.",
        b"I" + b"9" * 5000 + b"\n.",
        b"ctorch\nload\n.",
        b"ctorch\n__getattr__\n.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}b.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n.",
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_a_pickle_that_is_none_of_dcps_is_refused_at_once(tmp_path, pickled):
    save(tmp_path, {"w": torch.ones(2)})
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises((CheckpointFormatError, UnsafeCheckpointError)):
        load(tmp_path)


def test_metadata_cut_off_anywhere_is_refused(tmp_path):
    save(tmp_path, {"model": {"w": torch.ones(2)}, "epoch": 1})
    raw = (tmp_path / ".metadata").read_bytes()
    for cut in range(0, len(raw) - 1, 5):
        (tmp_path / ".metadata").write_bytes(raw[:cut])
        with pytest.raises(CheckpointFormatError):
            load(tmp_path)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damaged_metadata_is_read_right_or_refused_by_our_own_error(data, pristine):
    folder, raw = pristine
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(damaged)
    with contextlib.suppress(WeightLoadersError):
        load(folder)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    state = {"model": {"w": torch.ones(2, 3), "v": torch.ones(4)}, "epoch": 1}
    folder = save(tmp_path_factory.mktemp("pristine"), state)
    return folder, (folder / ".metadata").read_bytes()


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_pickle_is_understood(tmp_path, protocol):
    save(tmp_path, {"model": {"w": torch.ones(2)}, "epoch": 1})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    if protocol < 2:
        # Then Python itself makes objects, by functions that are none of DCP's.
        with pytest.raises(UnsafeCheckpointError, match=r"copyreg|copy_reg"):
            load(tmp_path)
    else:
        assert list(load(tmp_path)) == ["w"]


def test_the_pickle_is_read_as_python_reads_it(two_ranks):
    """The stand-ins hold just what the real objects do."""

    def plain(value):
        if isinstance(value, Record):
            return value.kind, plain(value.state)
        if isinstance(value, dict):
            return {str(plain(key)): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if type(value).__module__.startswith(("torch.distributed", "pathlib")):
            kind = type(value).__name__
            if "Path" in kind or "ENCODING" in kind:
                return kind if "ENCODING" in kind else "Path", None
            state = value.__reduce_ex__(4)[2]
            return kind, plain(state)
        return None if str(value) == "torch.strided" else value

    raw = (two_ranks / "nested/.metadata").read_bytes()
    found = plain(read_pickle(raw, "x"))
    assert str(found).replace("('layout', None)", "None") == str(plain(pickle.loads(raw)))
    assert len(list(pickletools.genops(raw))) > 100


# ------------------------------------------------------------------ where it lies


class Memory(wl.ByteSource):
    def __init__(self, path):
        self.name, self._content = f"shelf://{path.name}", path.read_bytes()

    @property
    def size(self):
        return len(self._content)

    @property
    def identity(self):
        return id(self)

    def read_into(self, view, offset):
        view[:] = self._content[offset : offset + len(view)]


class Shelf(wl.FolderListing):
    """A folder whose files are in memory, so that nothing can be read but through their sources."""

    def open(self, name):
        return Memory(self.folder / name)


@pytest.mark.parametrize("kind", ["nested", "own-metadata", "hf", "safetensors"])
def test_it_is_read_from_wherever_a_listing_can_be_made(two_ranks, kind):
    weights = DcpLoader().get_listed_weights(Shelf(two_ranks / kind))
    assert {e.source.name.partition("://")[0] for info in weights.infos() for e in info.extents} == {"shelf"}
    assert_same(dict(weights.items()), load(two_ranks / kind))
    assert DcpLoader.probe_listing(Shelf(two_ranks / kind)).answer == "yes"


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_in_the_hubs_cache_a_link_out_of_the_repository_is_not_followed(two_ranks, tmp_path, name):
    snapshot = tmp_path / "models--org--name/snapshots" / ("0" * 40)
    shutil.copytree(two_ranks / "nested", snapshot)
    (snapshot / name).rename(tmp_path / "elsewhere")
    (snapshot / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeCheckpointError, match="is a link to"):
        load(snapshot)


# ------------------------------------------------------------------ recognising it


def test_probing_recognises_such_folders_only(two_ranks, tmp_path):
    def answer(path):
        return DcpLoader.probe(str(path)).answer

    folders = [two_ranks / kind for kind in ("nested", "own-metadata", "hf", "safetensors")]
    assert {answer(folder) for folder in folders} == {"yes"}
    assert answer(two_ranks / "nested/.metadata") == answer(two_ranks / "nested/__0_0.distcp") == "yes"
    torch.save({}, tmp_path / "model.pt")
    (tmp_path / ".metadata").write_bytes(b"something of another program")
    assert answer(tmp_path) == answer(tmp_path / "model.pt") == answer(tmp_path / "nowhere") == "no"


def test_auto_finds_the_loader_and_leaves_other_folders_alone(two_ranks, registry):
    for kind in ("nested", "hf"):
        loader = registry.resolve("auto", source=str(two_ranks / kind))
        assert type(loader).__name__ == "DcpLoader"


def test_a_file_of_the_folder_means_the_folder(two_ranks):
    assert set(load(two_ranks / "nested/.metadata")) == set(load(two_ranks / "nested"))
