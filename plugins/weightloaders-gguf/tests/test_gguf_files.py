"""Which files: one, all parts of a split one, one of several; and who finds them."""

import json

import gguf_models
import pytest
import torch
import transformers
from typer.testing import CliRunner
from weightloaders_gguf import GgufLoader

import weightloaders as wl
from weightloaders.cli.main import app
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    IncompleteCheckpointError,
    SourceNotFoundError,
    WeightLoadersError,
)

TENSORS = {f"t{i}": torch.full((2, 32), float(i)) for i in range(5)}


def one(path, value=0.0):
    path.parent.mkdir(exist_ok=True)
    return gguf_models.write(path, {"w": torch.full((2, 32), value)})


def value_of(source, **options):
    with wl.open_weights(source, "gguf", **options) as weights:
        return float(weights["w"][0, 0])


@pytest.fixture
def split(tmp_path):
    names = list(TENSORS)
    paths = []
    for number, part in enumerate((names[:2], names[2:3], names[3:])):
        said = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        path = tmp_path / f"model-Q8_0-{number + 1:05d}-of-00003.gguf"
        paths.append(gguf_models.write(path, {name: TENSORS[name] for name in part}, properties=said))
    return paths


# ------------------------------------------------------------------ parts


@pytest.mark.parametrize("number", [0, 1, 2, None])
@pytest.mark.parametrize("loader", ["gguf", "auto"])
def test_a_split_model_is_read_from_any_of_its_parts_and_from_its_folder(split, number, loader):
    with wl.open_weights(split[0].parent if number is None else split[number], loader) as weights:
        assert sorted(weights) == sorted(TENSORS)
        assert all(torch.equal(weights[name], value) for name, value in TENSORS.items())


def test_a_missing_part_is_named(split):
    split[1].unlink()
    for source in (split[0], split[2], split[0].parent, f"{split[0].parent}:Q8_0"):
        with pytest.raises(IncompleteCheckpointError, match=r"00002-of-00003.gguf is not there") as raised:
            wl.open_weights(source)
        assert raised.value.file.endswith(split[1].name)


def test_a_part_of_another_model_is_named(split):
    split[1].write_bytes(split[2].read_bytes())
    with pytest.raises(CheckpointFormatError, match=r"should be part 1 .* of 3, but says that it is part 2") as raised:
        wl.open_weights(split[0])
    assert raised.value.file == str(split[1])


def test_a_file_that_is_no_part_in_the_place_of_one_is_named(split):
    one(split[1])
    with pytest.raises(CheckpointFormatError, match="no part of anything"):
        wl.open_weights(split[0])


def test_parts_of_two_models_are_told_by_their_number_of_tensors(split, tmp_path):
    said = {"split.no": 1, "split.count": 3}
    gguf_models.write(split[1], {"t2": TENSORS["t2"], "x": TENSORS["t2"]}, properties=said)
    with pytest.raises(CheckpointFormatError, match="5 tensors together, but they have 6"):
        wl.open_weights(split[0])


def test_one_name_in_two_parts_is_refused(split):
    said = {"split.no": 1, "split.count": 3}
    gguf_models.write(split[1], {"t0": TENSORS["t2"]}, properties=said)
    with pytest.raises(DuplicateTensorError, match="'t0'") as raised:
        wl.open_weights(split[0])
    assert raised.value.tensor == "t0"


def test_a_part_under_another_name_says_what_it_is(split, tmp_path):
    path = split[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(IncompleteCheckpointError, match=r"part 0 .* of 3") as raised:
        wl.open_weights(path)
    assert "-00001-of-00003.gguf" in raised.value.hint


def test_metadata_comes_from_the_first_part(split, tmp_path):
    said = {"split.no": 0, "split.count": 3, "split.tensors.count": 5, "general.name": "the model"}
    gguf_models.write(split[0], {name: TENSORS[name] for name in ("t0", "t1")}, properties=said)
    with wl.open_weights(split[2]) as weights:
        assert weights.metadata["general.name"] == "the model"


# ------------------------------------------------------------------ one of several


@pytest.fixture
def many(tmp_path):
    for number, kind in enumerate(["Q4_K_M", "Q4_K_S", "Q4_K", "IQ4_XS", "f16"]):
        one(tmp_path / f"model-{kind}.gguf", number)
    one(tmp_path / "mmproj-model-f16.gguf", 99)
    one(tmp_path / "Q6_K" / "model-Q6_K.gguf", 6)
    one(tmp_path / "BF16" / "weights.gguf", 16)
    return tmp_path


@pytest.mark.parametrize(
    ("tag", "value"),
    [("Q4_K_M", 0), ("q4_k_m", 0), ("Q4_K_S", 1), ("Q4_K", 2), ("IQ4_XS", 3), ("F16", 4), ("Q6_K", 6), ("BF16", 16),
     ("model-Q4_K.gguf", 2)],
)  # fmt: skip
def test_a_tag_picks_one_of_several(many, tag, value):
    for loader in ("gguf", "auto"):
        with wl.open_weights(f"{many}:{tag}", loader) as weights:
            assert float(weights["w"][0, 0]) == value
            assert (tag == "F16") <= ("mmproj-model-f16.gguf" in weights.skipped_files)


def test_several_are_an_error_that_lists_them(many):
    for loader in ("gguf", "auto"):
        with pytest.raises(
            AmbiguousSourceError, match=r"model-IQ4_XS.gguf, model-Q4_K.gguf, model-Q4_K_M.gguf"
        ) as raised:
            wl.open_weights(many, loader)
        assert ":IQ4_XS" in raised.value.hint
        assert "mmproj" not in raised.value.message


def test_what_to_say_instead_is_written_as_the_files_have_it(tmp_path):
    for name in ("m-q4_k_m.gguf", "m-q8_0.gguf"):
        one(tmp_path / name)
    with pytest.raises(AmbiguousSourceError) as raised:
        wl.open_weights(tmp_path)
    assert raised.value.hint.endswith(f"{tmp_path}:q4_k_m, or file_pattern='*q4_k_m*'")
    with wl.open_weights(tmp_path, "gguf", file_pattern="*q4_k_m*") as weights:
        assert weights.skipped_files == {}


def test_a_tag_that_fits_several_is_an_error(many):
    one(many / "other-Q4_K_M.gguf")
    with pytest.raises(
        AmbiguousSourceError, match=r"several models that 'Q4_K_M' may mean: model-Q4_K_M.*other-Q4_K_M"
    ):
        wl.open_weights(f"{many}:Q4_K_M")


def test_a_tag_that_fits_nothing_lists_what_there_is(many):
    with pytest.raises(SourceNotFoundError, match=r"no model 'Q2_K'; there is .*Q4_K"):
        wl.open_weights(f"{many}:Q2_K", "gguf")


def test_a_pattern_picks_one_too(many):
    assert value_of(many, file_pattern="*IQ4*") == 3
    with pytest.raises(SourceNotFoundError, match=r"'\*Q9\*'"):
        value_of(many, file_pattern="*Q9*")


def test_a_colon_in_a_name_is_no_tag(tmp_path):
    folder = tmp_path / "a:b"
    one(folder / "model.gguf", 5)
    assert value_of(folder) == value_of(folder / "model.gguf") == 5


def test_a_tag_of_the_working_directory(many, monkeypatch):
    monkeypatch.chdir(many)
    assert value_of(".:Q4_K_S") == value_of("./:Q4_K_S") == 1


@pytest.mark.parametrize("name", ["nowhere.gguf", "nowhere:Q4_K", "org/name:Q4_K_M"])
def test_what_is_not_there_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceNotFoundError, match="is not there"):
        wl.open_weights(name, "gguf")
    with pytest.raises(WeightLoadersError):
        wl.open_weights(name)


def test_a_tag_that_no_file_has_brings_those_that_there_are_and_nothing_else(many):
    with pytest.raises(SourceNotFoundError, match=r"holds no model 'Q9_X'; there is .*Q4_K_S") as refused:
        wl.open_weights(f"{many}:Q9_X")
    said = str(refused.value).splitlines()
    assert str(many) in said[0]
    assert len(said) <= 3, said


def test_a_repository_with_a_quantisation_is_told_what_to_do_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceNotFoundError, match="org/name:Q4_K_M is not there") as refused:
        wl.open_weights("org/name:Q4_K_M")
    assert "files on the hub have to be downloaded first" in refused.value.hint


def test_a_tag_behind_a_file_is_told_from_a_file_that_is_not_there(tmp_path):
    path = one(tmp_path / "model.gguf")
    for loader in ("gguf", "auto"):
        with pytest.raises(SourceNotFoundError, match=r"model\.gguf is a file, of which 'Q4_0' can't pick one"):
            wl.open_weights(f"{path}:Q4_0", loader)


def test_a_file_that_is_not_there_is_no_repository_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for load in (wl.LLM, wl.open_weights):
        with pytest.raises(SourceNotFoundError, match=r"nothing\.gguf: there is no such file or folder") as refused:
            load("nothing.gguf")
        assert "hub" not in str(refused.value)
        assert len(str(refused.value).splitlines()) <= 5, str(refused.value)


def test_a_folder_without_any_is_named(tmp_path):
    with pytest.raises(SourceNotFoundError, match=r"no model '\*.gguf'"):
        wl.open_weights(tmp_path, "gguf")


# ------------------------------------------------------------------ who finds them


def test_auto_finds_it_by_its_first_bytes_whatever_it_is_called(tmp_path):
    path = one(tmp_path / "weights.whatever", 3)
    with wl.open_weights(path) as weights:
        assert float(weights["w"][0, 0]) == 3
    assert GgufLoader.probe(str(path)).answer == "yes"


@pytest.mark.parametrize("content", [b"", b"<html>", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_gguf_by_its_name_alone_is_refused_by_name(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert GgufLoader.probe(str(path)).answer == "maybe"
    with pytest.raises(CheckpointFormatError, match="no GGUF file"):
        wl.open_weights(path)


def test_other_files_are_left_to_others(tmp_path):
    from weightloaders.testing import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "llama")
    assert GgufLoader.probe(str(folder)).answer == "no"
    assert GgufLoader.probe(str(folder / "model.safetensors")).answer == "no"
    one(folder / "model.gguf")
    # Where both lie, the folder is Hugging Face's.
    with wl.open_weights(folder) as weights:
        assert "lm_head.weight" in weights


def test_files_are_read_from_any_listing(tmp_path):
    one(tmp_path / "model.gguf", 4)
    listing = wl.FolderListing(tmp_path)
    assert GgufLoader.probe_listing(listing).answer == "yes"
    assert GgufLoader.probe_listing(listing, "model.gguf").answer == "yes"
    with GgufLoader().get_listed_weights(listing) as weights:
        assert float(weights["w"][0, 0]) == 4


def test_a_config_is_made_from_any_listing_and_anew_for_another_file(tmp_path):
    model = gguf_models.tiny("llama")
    said = gguf_models.properties_of("llama", model.config)
    path = gguf_models.write(tmp_path / "model.gguf", gguf_models.as_gguf(model, "llama"), "llama", said)
    loader, listing = GgufLoader(), wl.FolderListing(tmp_path)
    folder = loader.get_listed_model_files(listing, "model.gguf", "config.json")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 128
    assert folder == loader.get_model_files(str(tmp_path), "config.json")
    gguf_models.write(path, gguf_models.as_gguf(model, "llama"), "llama", said | {"llama.context_length": 512})
    folder = loader.get_model_files(str(tmp_path), "config.json")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 512


def test_names_with_blanks_and_umlauts(tmp_path):
    folder = tmp_path / "Größe 模型 #1"
    assert value_of(one(folder / "a b-Q8_0.gguf", 2)) == value_of(f"{folder}:Q8_0") == 2


def test_it_is_converted_into_a_folder_that_transformers_loads(tmp_path):
    model = gguf_models.tiny("llama")
    said = gguf_models.properties_of("llama", model.config)
    gguf_models.write(tmp_path / "model.gguf", gguf_models.as_gguf(model, "llama"), "llama", said)
    command = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--to", "safetensors", "--quiet"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_file_of_no_known_model_is_converted_without_a_config(tmp_path):
    path = one(tmp_path / "model.gguf", 2)
    found = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "out"), "--to", "safetensors", "--quiet"])
    assert found.exit_code == 0, found.output
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


# ------------------------------------------------------------------ what lies beside it, and what is said oddly


@pytest.mark.parametrize("said", [[3, 4], "x", 2.5, True], ids=str)
@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_a_number_of_parts_that_is_none_is_named(tmp_path, key, said):
    properties = {"split.no": 0, "split.count": 2, "split.tensors.count": 2}
    for number in range(2):
        gguf_models.write(
            tmp_path / f"m-{number + 1:05d}-of-00002.gguf",
            {f"t{number}": torch.ones(4)},
            properties={**properties, "split.no": number, key: said},
        )
    with pytest.raises(CheckpointFormatError, match=f"says {key}: .*whole number") as raised:
        wl.open_weights(tmp_path)
    assert raised.value.file.startswith(str(tmp_path))


@pytest.mark.parametrize("source", ["~nosuchuser/x.gguf", "~nosuchuser:Q4_0"])
def test_a_home_that_nobody_has_is_not_there(source):
    with pytest.raises(SourceNotFoundError, match="is not there"):
        wl.open_weights(source, "gguf")


def test_a_link_that_leads_nowhere_is_no_model(tmp_path):
    (tmp_path / "gone.gguf").symlink_to("nothing")
    with pytest.raises(SourceNotFoundError, match=r"gone\.gguf \(is a link that leads nowhere\)"):
        wl.open_weights(tmp_path, "gguf")
    assert GgufLoader.probe(str(tmp_path)).answer == "no"
    one(tmp_path / "there.gguf", 3)
    assert value_of(tmp_path) == 3


def test_a_part_that_is_a_link_to_nowhere_is_missing(split):
    split[1].unlink()
    split[1].symlink_to("nothing")
    with pytest.raises(IncompleteCheckpointError, match="is a link that leads nowhere"):
        wl.open_weights(split[0].parent)


def test_only_of_a_folder_on_disk_a_tag_is_suggested(tmp_path):
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        one(tmp_path / name)

    class Elsewhere:
        where, odd = "s3://bucket/models", {}
        names = frozenset({"a-Q4_0.gguf", "a-Q8_0.gguf"})

        def problems(self, names):
            return {}

    for listing, tagged in ((Elsewhere(), False), (wl.FolderListing(tmp_path), True)):
        with pytest.raises(AmbiguousSourceError) as raised:
            GgufLoader().get_listed_weights(listing)
        assert (":Q4_0" in raised.value.hint) is tagged
        assert "file_pattern" in raised.value.hint
