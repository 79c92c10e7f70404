"""Which files of a folder make up a checkpoint, and what they hold together."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from weightloaders import load_into, open_weights
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
    SourceError,
    SourceNotFoundError,
    UnsafeCheckpointError,
    WeightLoadersError,
)
from weightloaders.weights.catalogue import catalogue
from weightloaders.weights.file_names import gaps, indexed_name, number_of, variant_of
from weightloaders.weights.files import select_files
from weightloaders.weights.index import parse_index

INDEX = "model.safetensors.index.json"


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def write_index(folder: Path, weight_map: Any, name: str = INDEX) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


def write(path: Path, **tensors: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def shards(count: int, of: int | None = None, stem: str = "model", suffix: str = "safetensors") -> list[str]:
    return [f"{stem}-{i:05}-of-{of or count:05}.{suffix}" for i in range(1, count + 1)]


def message_of(raised: pytest.ExceptionInfo[WeightLoadersError]) -> str:
    return str(raised.value)


# ------------------------------------------------------------------ one family, and only what belongs to it


def test_the_index_wins_over_a_consolidated_copy(tmp_path: Path) -> None:
    a, b = shards(2)
    touch(tmp_path, a, b, "consolidated.safetensors", "config.json")
    write_index(tmp_path, {"x": a, "y": b})
    selection = select_files(tmp_path)
    assert selection.files == (a, b)
    assert selection.skipped == {"consolidated.safetensors": f"{INDEX} is used instead"}


def test_safetensors_win_over_bin_and_the_other_family_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "pytorch_model.bin", "tf_model.h5", "model.pt")
    write_index(tmp_path, {"x": "pytorch_model.bin"}, "pytorch_model.bin.index.json")
    selection = select_files(tmp_path)
    assert (selection.family, selection.files) == ("safetensors", ("model.safetensors",))
    assert set(selection.skipped) == {"pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "model.pt"}


def test_consolidated_comes_last_even_behind_the_other_family(tmp_path: Path) -> None:
    selection = select_files(touch(tmp_path, "consolidated.safetensors", "pytorch_model.bin"))
    assert (selection.family, selection.files) == ("torch", ("pytorch_model.bin",))


def test_a_repository_that_has_only_a_consolidated_index_is_accepted(tmp_path: Path) -> None:
    names = shards(2, stem="consolidated")
    touch(tmp_path, *names)
    write_index(tmp_path, {"x": names[0], "y": names[1]}, "consolidated.safetensors.index.json")
    assert select_files(tmp_path).files == tuple(names)


def test_the_preferred_family_is_the_callers(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "pytorch_model.bin")
    selection = select_files(tmp_path, families=("torch",))
    assert selection.files == ("pytorch_model.bin",)
    assert "only torch files are read here" in selection.skipped["model.safetensors"]


def test_of_torch_files_bin_comes_before_pt(tmp_path: Path) -> None:
    selection = select_files(touch(tmp_path, "vocoder.pt", "pytorch_model.bin", "x.pth"))
    assert selection.files == ("pytorch_model.bin",)
    assert set(selection.skipped) == {"vocoder.pt", "x.pth"}


@pytest.mark.parametrize(
    "name",
    [
        "training_args.bin",
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scaler.pt",
        "rng_state_0.pth",
        "sampler.bin",
        "optimizer.safetensors",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "random_states_0.pt",
    ],
)
def test_what_a_trainer_leaves_behind_is_never_taken(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "pytorch_model.bin", name)
    selection = select_files(tmp_path, file_pattern="*.bin")
    assert selection.files == ("pytorch_model.bin",)
    assert selection.skipped[name] == "it is the state of an optimizer or trainer"


def test_a_model_whose_name_only_resembles_a_trainers_file_is_taken(tmp_path: Path) -> None:
    touch(tmp_path, "optimized.safetensors", "schedulernet.safetensors")
    assert len(select_files(tmp_path).files) == 2


def test_an_adapter_is_not_the_checkpoint(tmp_path: Path) -> None:
    touch(tmp_path, "adapter_model.safetensors", "model.safetensors")
    assert select_files(tmp_path).files == ("model.safetensors",)
    assert select_files(tmp_path, file_pattern="adapter*").files == ("adapter_model.safetensors",)
    assert select_files(tmp_path / "adapter_model.safetensors").files == ("adapter_model.safetensors",)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SourceNotFoundError, match=r"adapter_model\.safetensors: it is an adapter") as raised:
        select_files(tmp_path)
    assert "base model" in message_of(raised)


def test_only_regular_files_count(tmp_path: Path) -> None:
    touch(tmp_path, "good.safetensors", "old.safetensors/inside.txt")
    selection = select_files(tmp_path)
    assert selection.files == ("good.safetensors",)
    assert selection.skipped == {"old.safetensors": "is a folder, not a file"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    touch(tmp_path, "good.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert select_files(tmp_path).skipped == {"pipe.safetensors": "is not a regular file"}


# Those of packages by their classes, so that they need not be what is offered by name.
NPZ, GGUF, DCP = "weightloaders_npz:NpzLoader", "weightloaders_gguf:GgufLoader", "weightloaders_dcp:DcpLoader"
SHARDED, META = "weightloaders_dcp:ShardedStateLoader", "weightloaders_meta:MetaLoader"
TENSORIZER = "weightloaders_engines:TensorizerLoader"


@pytest.mark.parametrize(
    ("loader", "file"), [("local", "model.safetensors"), ("binary", "model.bin"), (NPZ, "m.npz"), (GGUF, "m.gguf")]
)
def test_a_file_that_can_not_be_looked_at_is_named_with_the_cause_and_not_taken_for_absent(
    tmp_path: Path, loader: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in loader:
        pytest.importorskip(loader.partition(":")[0])
    touch(tmp_path, file, "meta.txt")
    usual = Path.stat

    # What a failing disk does, or a network's file system that lost its server; there is none here.
    def failing(path: Path, **options: Any) -> os.stat_result:
        if path.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", failing)
    for place in (tmp_path, tmp_path / file):
        with pytest.raises(SourceError, match=os.strerror(errno.EIO)) as raised:
            open_weights(place, loader)
        assert file in message_of(raised)


@pytest.mark.parametrize("loader", ["local", "binary", "auto", NPZ, GGUF, DCP, SHARDED, META, TENSORIZER])
def test_a_folder_that_can_not_be_looked_at_is_named_with_the_cause(
    tmp_path: Path, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in loader:
        pytest.importorskip(loader.partition(":")[0])
    usual = os.stat
    folder = tmp_path / "model"
    folder.mkdir()

    def failing(path: Any, **options: Any) -> os.stat_result:
        if str(path) == str(folder):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return usual(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(SourceError, match=os.strerror(errno.ESTALE)) as raised:
        open_weights(folder, loader)
    assert str(folder) in message_of(raised)


def test_sub_folders_are_left_alone(tmp_path: Path) -> None:
    touch(tmp_path, "original/model.safetensors", *shards(2))
    assert select_files(tmp_path).files == tuple(shards(2))


def test_names_may_hold_anything_a_file_system_allows(tmp_path: Path) -> None:
    names = ["teil 1 #a.safetensors", "模型\u3000ü.safetensors"]
    folder = touch(tmp_path / "模型 ü", *names)
    assert set(select_files(folder).files) == set(names)
    write_index(folder, {"x": names[0], "y": names[1]})
    assert select_files(folder).files == tuple(names)


def test_files_come_in_natural_order(tmp_path: Path) -> None:
    touch(tmp_path, "part10.safetensors", "part2.safetensors", "part1.safetensors")
    assert select_files(tmp_path).files == ("part1.safetensors", "part2.safetensors", "part10.safetensors")


# ------------------------------------------------------------------ patterns and variants


def test_a_pattern_chooses_files_and_the_index_that_stands_for_them(tmp_path: Path) -> None:
    model, consolidated = shards(2), shards(3, stem="consolidated")
    touch(tmp_path, *model, *consolidated)
    write_index(tmp_path, {"x": model[0], "y": model[1]})
    write_index(tmp_path, {"x": consolidated[0], "y": consolidated[1]}, "consolidated.safetensors.index.json")
    assert select_files(tmp_path, file_pattern="*.safetensors").files == tuple(model)
    assert select_files(tmp_path, file_pattern="consolidated*").files == tuple(consolidated[:2])
    assert select_files(tmp_path, file_pattern="consolidated-*").files == tuple(consolidated)


def test_a_pattern_may_pick_part_of_a_numbered_set_on_purpose(tmp_path: Path) -> None:
    touch(tmp_path, *shards(3))
    assert select_files(tmp_path, file_pattern="*00002*").files == (shards(3)[1],)


def test_a_pattern_may_pick_files_of_any_name(tmp_path: Path) -> None:
    touch(tmp_path, "weights.sft", "config.json")
    selection = select_files(tmp_path, file_pattern="*.sft")
    assert (selection.files, selection.family) == (("weights.sft",), "safetensors")


def test_a_wide_pattern_does_not_take_files_that_are_no_weights(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "model.py", "model_card.md")
    selection = select_files(tmp_path, file_pattern="model*")
    assert selection.files == ("model.safetensors",)
    assert not selection.skipped


def test_files_that_an_index_names_need_not_match_anything(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001.safetensors", "vision-00001.safetensors", "deep/er.weights")
    weight_map = {"a": "model-00001.safetensors", "b": "vision-00001.safetensors", "c": "deep/er.weights"}
    write_index(tmp_path, weight_map)
    assert select_files(tmp_path, file_pattern="model*").files == tuple(weight_map.values())


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model.fp16.safetensors"], None),
        (["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"], None),
        (["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"], None),
        (["model-00001-of-00002.fp16.safetensors"], "model.safetensors.index.fp16.json"),
        (["model.fp16-00001-of-00002.safetensors"], "model.fp16.safetensors.index.json"),
    ],
)
def test_a_variant_is_taken_only_on_request(tmp_path: Path, names: list[str], index: str | None) -> None:
    touch(tmp_path, "model.safetensors", *names)
    if index:
        write_index(tmp_path, dict(zip("ab", names, strict=False)), index)
    assert select_files(tmp_path).files == ("model.safetensors",)
    assert select_files(tmp_path).skipped[names[0]] == "it is the variant 'fp16'"
    assert select_files(tmp_path, variant="fp16").files == tuple(names)


def test_a_variant_may_have_any_name_when_it_is_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "model.special.safetensors")
    assert select_files(tmp_path, variant="special").files == ("model.special.safetensors",)


def test_parts_with_dotted_names_are_not_taken_for_variants(tmp_path: Path) -> None:
    touch(tmp_path, "model.unet.safetensors", "model.vae.safetensors", "model.v0.1.safetensors")
    assert len(select_files(tmp_path).files) == 3


def test_a_variant_that_is_the_only_thing_there_is_taken(tmp_path: Path) -> None:
    assert select_files(touch(tmp_path, "model.bf16.safetensors")).files == ("model.bf16.safetensors",)


def test_several_variants_and_nothing_else_are_ambiguous(tmp_path: Path) -> None:
    touch(tmp_path, "model.bf16.safetensors", "model.fp16.safetensors")
    with pytest.raises(AmbiguousSourceError, match="bf16, fp16"):
        select_files(tmp_path)


def test_a_variant_that_is_not_there_is_an_error_that_names_what_is(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    with pytest.raises(SourceNotFoundError, match=r"variant 'fp16'; model\.safetensors: it is not of the variant"):
        select_files(tmp_path, variant="fp16")


# ------------------------------------------------------------------ numbered sets without an index


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "number 2"),
        (["pytorch_model-00002-of-00002.bin"], "number 1"),
        (["m_1_of_2.safetensors"], "number 2"),
        (["m-0-of-3.safetensors", "m-2-of-3.safetensors"], "number 1"),
        (["m-1-of-999999999.safetensors"], "number 2, 3, 4, 5, 6, 7 and 999999992 more"),
    ],
)
def test_a_number_missing_from_a_set_is_an_error(tmp_path: Path, names: list[str], missing: str) -> None:
    with pytest.raises(IncompleteCheckpointError, match=missing):
        select_files(touch(tmp_path, *names))


@pytest.mark.parametrize("first", [0, 1])
def test_a_whole_set_is_taken_whichever_number_it_starts_from(tmp_path: Path, first: int) -> None:
    names = [f"model-{i:05}-of-00002.safetensors" for i in range(first, first + 2)]
    assert select_files(touch(tmp_path, *names)).files == tuple(names)


def test_one_checkpoint_split_in_two_ways_is_ambiguous(tmp_path: Path) -> None:
    touch(tmp_path, *shards(2), *shards(3))
    with pytest.raises(AmbiguousSourceError, match=re.escape("model-*-of-00002.safetensors")):
        select_files(tmp_path)
    assert select_files(tmp_path, file_pattern="model-*-of-00003.safetensors").files == tuple(shards(3))


def test_a_shard_asked_for_by_name_is_loaded_alone_and_said_to_be_one_of_several(tmp_path: Path) -> None:
    first = shards(2)[0]
    selection = select_files(touch(tmp_path, first) / first)
    assert selection.files == (first,)
    assert "one of a set of 2" in selection.notes[0]


@given(st.integers(1, 40), st.sets(st.integers(1, 40)))
def test_gaps_are_found_just_where_numbers_lack(total: int, there: set[int]) -> None:
    names = [f"m-{i:05}-of-{total:05}.safetensors" for i in there]
    lacking = set(range(1, total + 1)) - there
    found = gaps(names, names)
    if not names or not lacking:
        assert found is None
    else:
        assert found is not None
        assert f"lacks {len(lacking)} of its {total}" in found


@given(st.text(min_size=1, max_size=40))
def test_any_name_can_be_asked_what_it_is(name: str) -> None:
    number_of(name)
    variant_of(name)
    indexed_name(name)


# ------------------------------------------------------------------ the index


def test_a_file_that_is_not_in_the_index_is_reported_and_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "model-1.safetensors", "model-mtp-of-00005.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors"})
    selection = select_files(tmp_path)
    assert selection.files == ("model-1.safetensors",)
    assert selection.skipped == {"model-mtp-of-00005.safetensors": f"present but not in {INDEX}"}
    assert "include_unindexed=True" in selection.notes[0]


def test_a_file_that_is_not_in_the_index_is_taken_on_request(tmp_path: Path) -> None:
    touch(tmp_path, "model-1.safetensors", "model-mtp-of-00005.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors"})
    selection = select_files(tmp_path, include_unindexed=True)
    assert selection.files == ("model-1.safetensors", "model-mtp-of-00005.safetensors")
    assert not selection.skipped


def test_an_absent_shard_is_named_with_its_index_and_the_tensors_it_should_hold(tmp_path: Path) -> None:
    a, b = shards(2)
    touch(tmp_path, a)
    write_index(tmp_path, {"x": a, "y": b, "z": b})
    with pytest.raises(IncompleteCheckpointError) as raised:
        select_files(tmp_path)
    assert f"{INDEX} names 2 files, but {b} is not there: 2 of its 3 tensors" in message_of(raised)
    assert "stale" not in message_of(raised)


def test_a_stale_index_is_told_from_an_interrupted_download(tmp_path: Path) -> None:
    named, there = shards(30), shards(15)
    touch(tmp_path, *there)
    write_index(tmp_path, {str(i): name for i, name in enumerate(named)})
    with pytest.raises(IncompleteCheckpointError, match="stale") as raised:
        select_files(tmp_path)
    text = message_of(raised)
    assert named[0] in text
    assert there[0] in text
    assert "ignore_index=True" in text
    assert select_files(tmp_path, ignore_index=True).files == tuple(there)


def test_a_stale_index_half_of_whose_files_exist_leads_to_no_half_load(tmp_path: Path) -> None:
    named, there = shards(4), shards(3)
    touch(tmp_path, *there, *named[:2])
    write_index(tmp_path, {str(i): name for i, name in enumerate(named)})
    with pytest.raises(IncompleteCheckpointError, match="stale") as raised:
        select_files(tmp_path)
    options = re.search(r"ignore_index=True, file_pattern='([^']+)'", message_of(raised))
    assert options is not None
    # What the message advises works.
    assert select_files(tmp_path, ignore_index=True, file_pattern=options[1]).files == tuple(there)


def test_a_link_that_leads_nowhere_is_an_absent_shard(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(IncompleteCheckpointError, match=r"model\.safetensors is a link that leads nowhere"):
        select_files(tmp_path)
    write_index(tmp_path, {"x": "model.safetensors"})
    with pytest.raises(IncompleteCheckpointError, match=r"model\.safetensors is a link that leads nowhere: 1 of its 1"):
        select_files(tmp_path)


def test_an_index_may_be_given_itself(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors", "b.safetensors")
    write_index(tmp_path, {"x": "b.safetensors"}, "other.safetensors.index.json")
    assert select_files(tmp_path / "other.safetensors.index.json").files == ("b.safetensors",)


def test_the_usual_index_is_preferred_and_unusual_ones_are_ambiguous(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors", "b.safetensors")
    write_index(tmp_path, {"x": "a.safetensors"}, "a.safetensors.index.json")
    write_index(tmp_path, {"x": "b.safetensors"}, "b.safetensors.index.json")
    with pytest.raises(AmbiguousSourceError, match="file_pattern"):
        select_files(tmp_path)
    assert select_files(tmp_path, file_pattern="b.safetensors").files == ("b.safetensors",)
    write_index(tmp_path, {"x": "a.safetensors"})
    assert select_files(tmp_path).files == ("a.safetensors",)


@pytest.mark.parametrize(
    "path",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../b",
        "C:\\x.safetensors",
        "C:x",
        "..\\x",
        "\\\\host\\share",
        "a\0b",
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused_before_anything_is_opened(tmp_path: Path, path: str) -> None:
    folder = touch(tmp_path / "model", "good.safetensors")
    os.mkfifo(tmp_path / "secret.safetensors")  # opening it would hang
    write_index(folder, {"x": "good.safetensors", "y": path})
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint's folder") as raised:
        select_files(folder)
    assert raised.value.tensor == "y"


@pytest.mark.parametrize("name", ["x" * 5000, "9" * 5000, "model-" + "9" * 5000 + "-of-2.safetensors", "\ud800"])
@pytest.mark.parametrize("tensor", ["w", "w" * 100_000])
def test_an_index_that_names_what_no_file_can_be_called_is_incomplete_and_told_in_a_few_words(
    tmp_path: Path, name: str, tensor: str
) -> None:
    write_index(touch(tmp_path, "model.safetensors"), {tensor: name})
    with pytest.raises(IncompleteCheckpointError, match="can't be looked at") as raised:
        select_files(tmp_path)
    # What is no text is escaped.
    assert (name[:100] if name.isprintable() else r"\ud800") in str(raised.value)
    assert len(str(raised.value)) < 2000


def test_a_name_of_any_length_is_told_in_a_few_words_and_kept_whole_for_programs(tmp_path: Path) -> None:
    name = "w" * 100_000
    write_index(tmp_path, {name: "../secret"})
    with pytest.raises(UnsafeCheckpointError) as raised:
        select_files(tmp_path)
    assert raised.value.tensor == name
    assert len(str(raised.value)) < 2000
    assert "(100,0" in str(raised.value), "its length is said"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "not readable as JSON"),
        (b'{"weight_map": {"a": "b"', "not readable as JSON"),
        (b"\xff\xfe\x00", "not readable as JSON"),
        (b"<!doctype html><html>", "not readable as JSON"),
        (b"[" * 200_000, "not readable as JSON"),
        (b'{"weight_map": {"a": ' + b"1" * 10_000 + b"}}", "not readable as JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "Git LFS pointer"),
        (b"[]", "no 'weight_map'"),
        (b"{}", "no 'weight_map'"),
        (b'{"weight_map": null}', "no 'weight_map'"),
        (b'{"weight_map": []}', "no 'weight_map'"),
        (b'{"weight_map": {}}', "names no tensors"),
        (b'{"weight_map": {"a": 1}}', "maps 'a' to 1"),
        (b'{"weight_map": {"a": null}}', "maps 'a' to None"),
        (b'{"weight_map": {"a": ["b"]}}', "maps 'a' to"),
        (b'{"weight_map": {"a": " "}}', "maps 'a' to"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "has the entry 'a' twice"),
    ],
)
def test_a_malformed_index_is_refused_by_name(tmp_path: Path, raw: bytes, complaint: str) -> None:
    touch(tmp_path, "model.safetensors")
    (tmp_path / INDEX).write_bytes(raw)
    with pytest.raises(CheckpointFormatError, match=re.escape(complaint)) as raised:
        select_files(tmp_path)
    assert raised.value.file == str(tmp_path / INDEX)


def test_an_index_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointFormatError, match="too large"):
        select_files(tmp_path)


def test_a_byte_order_mark_and_listed_metadata_do_no_harm(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    raw = '\ufeff{"weight_map": {"__metadata__": {"format": "pt"}, "x": "./model.safetensors"}}'
    (tmp_path / INDEX).write_text(raw, encoding="utf-8")
    index = select_files(tmp_path).index
    assert index is not None
    assert index.weight_map == {"x": "model.safetensors"}


@settings(deadline=None, max_examples=50)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_whatever_json_an_index_holds_it_is_read_or_refused_by_our_own_error(value: Any) -> None:
    for content in (value, {"weight_map": value}):
        try:
            index = parse_index(json.dumps(content).encode(), INDEX, INDEX)
        except WeightLoadersError:
            continue
        assert all(isinstance(name, str) and ".." not in name.split("/") for name in index.files)


# ------------------------------------------------------------------ nothing to load


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["model.gguf"], "loader 'gguf'"),
        (["weights.npz"], "loader 'npz'"),
        (["meta.txt", "model.bin"], "loader 'binary'"),
        (["flax_model.msgpack"], "Flax"),
        (["pytorch_model.bin"], "'torch' and 'hf'"),
        (["original/model.safetensors"], "sub-folder original"),
        (["config.json", "tokenizer.json"], "there is config.json, tokenizer.json"),
    ],
)
def test_a_folder_without_weights_is_told_what_was_looked_for_and_what_is_there(
    tmp_path: Path, names: list[str], advice: str
) -> None:
    with pytest.raises(SourceNotFoundError, match=r"looked for \*\.safetensors") as raised:
        select_files(touch(tmp_path, *names), families=("safetensors",))
    assert advice in message_of(raised)


def test_an_empty_folder_and_an_absent_one_differ(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="the folder is empty"):
        select_files(tmp_path)
    with pytest.raises(SourceNotFoundError, match="is not there"):
        select_files(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        select_files("bad\0name")


def test_a_raw_value_file_is_not_taken_for_a_torch_file(tmp_path: Path) -> None:
    touch(tmp_path, "meta.txt", "model.bin", "pytorch_model.bin")
    selection = select_files(tmp_path)
    assert selection.files == ("pytorch_model.bin",)
    assert "'binary'" in selection.skipped["model.bin"]


# ------------------------------------------------------------------ links


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "hub" / "models--org--name" / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (folder.parents[1] / "blobs").mkdir()
    return folder


def test_in_an_ordinary_folder_links_are_followed(tmp_path: Path) -> None:
    elsewhere = touch(tmp_path / "elsewhere", "blob") / "blob"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(elsewhere)
    assert select_files(folder).files == ("model.safetensors",)


def test_a_link_that_leads_elsewhere_after_it_was_catalogued_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", w=torch.full((3,), float(ord(name))))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "a" / "model.safetensors")
    with open_weights(folder) as weights:
        (folder / "link").symlink_to(tmp_path / "b" / "model.safetensors")
        (folder / "link").replace(folder / "model.safetensors")
        assert weights["w"].tolist() == [ord("a")] * 3
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(3))
        with pytest.raises(WeightLoadersError, match="was changed after it was catalogued"):
            load_into(model, weights, progress=False)


def test_in_the_hubs_cache_links_into_the_repositorys_own_blobs_are_followed(snapshot: Path) -> None:
    (snapshot.parents[1] / "blobs" / "abc").write_bytes(b"")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/abc"))
    assert select_files(snapshot).files == ("model.safetensors",)


def test_in_the_hubs_cache_files_without_links_are_fine(snapshot: Path) -> None:
    assert select_files(touch(snapshot, "model.safetensors")).files == ("model.safetensors",)


@pytest.mark.parametrize("target", ["../../../models--org--other/blobs/abc", "/etc/hostname", "../../../secret"])
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_in_the_hubs_cache_links_to_elsewhere_are_refused(snapshot: Path, target: str, name: str) -> None:
    touch(
        snapshot.parents[2],
        "models--org--other/blobs/abc",
        "secret",
        "models--org--name/snapshots/c0ffee/model.safetensors",
    )
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to(target)
    with pytest.raises(UnsafeCheckpointError, match="outside the blobs of its own repository"):
        select_files(snapshot)


def test_a_linked_sub_folder_does_not_lead_out_of_the_hubs_cache(snapshot: Path, tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "model.safetensors")
    (snapshot / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeCheckpointError):
        select_files(snapshot / "sub")


def test_the_hubs_cache_is_recognised_behind_a_link_to_the_snapshot(snapshot: Path, tmp_path: Path) -> None:
    touch(tmp_path, "secret")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "secret")
    (tmp_path / "shortcut").symlink_to(snapshot)
    with pytest.raises(UnsafeCheckpointError):
        select_files(tmp_path / "shortcut")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_link_that_leads_in_a_circle_is_our_own_error(snapshot: Path, name: str) -> None:
    touch(snapshot, "model.safetensors")
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to(name)
    with pytest.raises((IncompleteCheckpointError, SourceNotFoundError), match=re.escape(name)):
        select_files(snapshot)


def test_blobs_that_the_hub_shares_among_repositories_are_followed_only_through_ones_own(snapshot: Path) -> None:
    repository, cache = snapshot.parents[1], snapshot.parents[2]
    touch(cache, "blobs/ab/abcd", "blobs/.huggingface-shared-blobs")
    (repository / "blobs" / "etag").symlink_to(Path("../../blobs/ab/abcd"))
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/etag"))
    assert select_files(snapshot).files == ("model.safetensors",)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(cache / "blobs/ab/abcd")
    with pytest.raises(UnsafeCheckpointError):
        select_files(snapshot)


# ------------------------------------------------------------------ what the files hold together


def test_shards_are_catalogued_together_without_reading_data(tmp_path: Path) -> None:
    a, b = shards(2)
    write(tmp_path / a, x=torch.arange(4.0), y=torch.ones(2, 3))
    write(tmp_path / b, z=torch.zeros(1, dtype=torch.int8))
    write_index(tmp_path, {"z": b, "x": a, "y": a})
    with catalogue(select_files(tmp_path)) as weights:
        assert set(weights) == {"x", "y", "z"}
        assert torch.equal(weights["x"], torch.arange(4.0))
        assert weights.info("z").dtype == torch.int8


def test_many_shards_are_catalogued_in_order(tmp_path: Path) -> None:
    names = shards(40)
    for number, name in enumerate(names):
        write(tmp_path / name, **{f"t{number}": torch.full((1,), float(number))})
    with catalogue(select_files(tmp_path)) as weights:
        assert list(weights) == [f"t{number}" for number in range(40)]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_name_in_two_shards_with_different_values(tmp_path: Path, indexed: bool) -> None:
    a, b = shards(2)
    write(tmp_path / a, w=torch.zeros(3), x=torch.zeros(1))
    write(tmp_path / b, w=torch.ones(3))
    if indexed:
        # The index decides, and the copy is reported.
        write_index(tmp_path, {"w": b, "x": a})
        with catalogue(select_files(tmp_path)) as weights:
            assert torch.equal(weights["w"], torch.ones(3))
            assert any(a in note and "'w'" in note for note in weights.notes)
        return
    with pytest.raises(DuplicateTensorError, match="different values") as raised:
        catalogue(select_files(tmp_path))
    assert a in message_of(raised)
    assert b in message_of(raised)
    assert raised.value.tensor == "w"


def test_a_name_in_two_shards_with_equal_values_is_tolerated_and_reported(tmp_path: Path) -> None:
    a, b = shards(2)
    write(tmp_path / a, w=torch.tensor([1.0, float("nan")]))
    write(tmp_path / b, w=torch.tensor([1.0, float("nan")]), x=torch.zeros(1))
    with catalogue(select_files(tmp_path)) as weights:
        assert list(weights) == ["w", "x"]
        assert any("equal values" in note for note in weights.notes)


@pytest.mark.parametrize(
    "other", [torch.zeros(3, dtype=torch.float16), torch.zeros(3, 1), torch.zeros(3).view(torch.int32)]
)
def test_a_name_in_two_shards_of_different_kind_is_an_error(tmp_path: Path, other: torch.Tensor) -> None:
    write(tmp_path / "a.safetensors", w=torch.zeros(3))
    write(tmp_path / "b.safetensors", w=other)
    with pytest.raises(DuplicateTensorError, match=r"as \[3\] torch.float32 and as"):
        catalogue(select_files(tmp_path))


def test_a_stray_file_beside_an_indexed_checkpoint_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", w=torch.ones(2, dtype=torch.bfloat16))
    write(tmp_path / "model.safetensors", w=torch.ones(4, dtype=torch.uint8))
    write_index(tmp_path, {"w": "model-1.safetensors"})
    for include_unindexed in (False, True):
        # Even on request a stray file adds only names: the index says where those are that it lists.
        with catalogue(select_files(tmp_path, include_unindexed=include_unindexed)) as weights:
            assert weights.info("w").dtype == torch.bfloat16


@pytest.mark.parametrize("include", [False, True])
def test_tensors_that_the_index_omits_are_never_lost_in_silence(tmp_path: Path, include: bool) -> None:
    write(tmp_path / "a.safetensors", w=torch.ones(1), forgotten=torch.ones(2))
    write(tmp_path / "mtp.safetensors", mtp=torch.ones(3))
    write_index(tmp_path, {"w": "a.safetensors"})
    with catalogue(select_files(tmp_path, include_unindexed=include)) as weights:
        assert set(weights) == ({"w", "forgotten", "mtp"} if include else {"w"})
        assert any("forgotten" in note for note in weights.notes)
        assert any("mtp.safetensors" in note for note in weights.notes)


def test_unindexed_tensors_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", w=torch.ones(1), extra=torch.ones(2))
    write(tmp_path / "b.safetensors", extra=torch.zeros(2))
    write_index(tmp_path, {"w": "a.safetensors"})
    with pytest.raises(DuplicateTensorError):
        catalogue(select_files(tmp_path, include_unindexed=True))


def test_a_tensor_that_is_not_in_the_file_its_index_names_is_told_from_an_absent_file(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", x=torch.ones(1))
    write(tmp_path / "b.safetensors", y=torch.ones(1))
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    with pytest.raises(IncompleteCheckpointError) as raised:
        catalogue(select_files(tmp_path))
    text = message_of(raised)
    assert "tensor 'y' is in a.safetensors, but that file does not hold it; b.safetensors does" in text
    assert "'z'" in text
    assert raised.value.tensor == "y"


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    names = shards(3)
    for name in names:
        write(tmp_path / name, **{name: torch.ones(1)})
    with (tmp_path / names[1]).open("r+b") as file:
        file.truncate(20)
    with pytest.raises(CheckpointFormatError, match=names[1]):
        catalogue(select_files(tmp_path))


def test_torch_shards_are_catalogued_by_their_index(tmp_path: Path) -> None:
    a, b = shards(2, stem="pytorch_model", suffix="bin")
    torch.save({"x": torch.arange(3.0)}, tmp_path / a)
    torch.save({"y": torch.arange(2), "step": 7}, tmp_path / b)
    write_index(tmp_path, {"x": a, "y": b}, "pytorch_model.bin.index.json")
    with catalogue(select_files(tmp_path)) as weights:
        assert torch.equal(weights["x"], torch.arange(3.0))
        assert torch.equal(weights["y"], torch.arange(2))


def test_an_index_may_list_what_is_no_tensor_as_long_as_the_file_has_it(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2), "x._extra_state": None}, tmp_path / "pytorch_model.bin")
    weight_map = {"x": "pytorch_model.bin", "x._extra_state": "pytorch_model.bin"}
    write_index(tmp_path, weight_map, "pytorch_model.bin.index.json")
    with catalogue(select_files(tmp_path)) as weights:
        assert list(weights) == ["x"]
        assert any("x._extra_state" in note for note in weights.notes)
    write_index(tmp_path, {**weight_map, "y": "pytorch_model.bin"}, "pytorch_model.bin.index.json")
    with pytest.raises(IncompleteCheckpointError, match="'y'"):
        catalogue(select_files(tmp_path))


def test_metadata_and_what_was_skipped_travel_with_the_weights(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file({"y": torch.ones(1)}, tmp_path / "b.safetensors", metadata={"format": "pt", "by": "me"})
    touch(tmp_path, "optimizer.pt")
    with catalogue(select_files(tmp_path)) as weights:
        assert weights.metadata == {"format": "pt", "by": "me"}
        assert "optimizer.pt" in weights.skipped_files


def test_a_header_longer_than_the_callers_limit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", **{f"tensor{i}": torch.ones(1) for i in range(20)})
    with pytest.raises(CheckpointFormatError, match="max_header_bytes"):
        catalogue(select_files(tmp_path), max_header_bytes=100)


def test_a_copied_folder_is_the_same_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "one" / "model.safetensors", w=torch.ones(2))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with catalogue(select_files(tmp_path / "two")) as weights:
        assert torch.equal(weights["w"], torch.ones(2))
