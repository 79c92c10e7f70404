"""Loads of files that are what they must be, and of others: what is refused, and that nothing was touched then."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
import weightloaders_checksum
from safetensors.torch import save_file
from weightloaders_checksum import hooks
from weightloaders_checksum import settings as settings_of

from weightloaders import BaseWeightLoader, WeightLoaderRegistry, load_into, open_weights, plan_load
from weightloaders.errors import ConfigError, PlanError, SourceError, SourceReadError
from weightloaders.testing import only_plugins

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
FILES = (*SHARDS, INDEX)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    monkeypatch.setattr(settings_of, "_configured", None)
    monkeypatch.setattr(hooks, "_told", False)
    for name in [name for name in os.environ if name.startswith("WEIGHTLOADERS_CHECKSUM")]:
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    state = Model().state_dict()
    files = {name: SHARDS[name.startswith("b")] for name in state}
    for shard in SHARDS:
        save_file({name: tensor for name, tensor in state.items() if files[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listed(folder, path, **changes):
    path.write_text("".join(f"{changes.get(name[:11], sha256(folder / name))}  {name}\n" for name in FILES))
    return path


def load(source, model=None, **options):
    model = Model() if model is None else model
    return load_into(model, source, progress=False, **options)


def refused(source, match, error=SourceReadError, **options):
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=match) as caught:
        load(source, model, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return caught.value


@pytest.mark.parametrize("kind", ["SHA256SUMS", "SHA256SUMS.json", "of each file"])
def test_files_that_are_what_a_list_beside_them_says_are_loaded_and_others_refused(folder, kind):
    def write(digests):
        if kind == "of each file":
            for name, digest in digests.items():
                (folder / f"{name}.sha256").write_text(f"{digest}  {name}\n")
        elif kind == "SHA256SUMS":
            (folder / kind).write_text("".join(f"{digest} *{name}\n" for name, digest in digests.items()))
        else:
            (folder / kind).write_text(json.dumps(digests))

    write({name: sha256(folder / name) for name in FILES})
    report = load(folder)
    assert any(note.startswith("checksums compared and right: 3 files") for note in report.notes)
    assert not report.warnings
    found, expected = sha256(folder / SHARDS[1]), "0" * 64
    write({name: expected if name == SHARDS[1] else sha256(folder / name) for name in FILES})
    error = refused(folder, SHARDS[1])
    assert found in error.message
    assert expected in error.message
    assert SHARDS[0] not in error.message
    assert error.file == str(folder / SHARDS[1])
    assert "weightloaders-checksum" in error.plugin


def test_an_index_is_held_against_its_checksum_too(folder):
    listed(folder, folder / "SHA256SUMS")
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    assert refused(folder, INDEX).file == str(folder / INDEX)
    refused(folder, INDEX, verify="sha256")


def test_who_refuses_is_named_rather_than_whoever_reads_the_format(tmp_path):
    npz = pytest.importorskip("weightloaders_npz")
    np.savez_compressed(tmp_path / "m.npz", **{name: t.numpy() for name, t in Model().state_dict().items()})
    weightloaders_checksum.configure(unknown="error")
    (tmp_path / "SHA256SUMS").write_text(f"{sha256(tmp_path / 'm.npz')}  m.npz\n")
    assert any("compared and right: 1 file" in note for note in load(tmp_path / "m.npz", loader=npz.NpzLoader).notes)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  m.npz\n")
    with only_plugins("weightloaders-checksum", "weightloaders-npz"):
        error = refused(tmp_path / "m.npz", r"m\.npz has the checksum", loader="npz")
    assert "weightloaders-checksum" in error.plugin


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")
def test_metadata_that_says_whose_bytes_are_where_is_held_against_its_checksum(tmp_path):
    dcp = pytest.importorskip("weightloaders_dcp")
    torch.distributed.checkpoint.save(Model().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    data, metadata = tmp_path / "__0_0.distcp", tmp_path / ".metadata"
    (tmp_path / "SHA256SUMS").write_text("".join(f"{sha256(file)}  {file.name}\n" for file in (data, metadata)))
    assert any("compared and right: 2 files" in note for note in load(tmp_path, loader=dcp.DcpLoader).notes)
    metadata.write_bytes(metadata.read_bytes() + b" ")
    refused(tmp_path, r"\.metadata has the checksum", loader=dcp.DcpLoader)


def deflated(path, state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("m.bin", deflated),
        ("m.pt", lambda path, state: torch.save({name: tensor.to_sparse() for name, tensor in state.items()}, path)),
    ],
)
def test_files_whose_values_are_not_raw_are_held_against_their_checksums(tmp_path, name, write):
    write(tmp_path / name, Model().state_dict())
    (tmp_path / "SHA256SUMS").write_text(f"{sha256(tmp_path / name)}  {name}\n")
    weightloaders_checksum.configure(unknown="error")
    for verify in (None, "sha256"):
        assert any("compared and right: 1 file" in note for note in load(tmp_path / name, verify=verify).notes)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    error = refused(tmp_path / name, f"{name} has the checksum")
    assert "weightloaders-checksum" in error.plugin


@pytest.mark.parametrize("name", ["mo\u2028del.safetensors", " model.safetensors", "model.safetensors"])
@pytest.mark.parametrize("form", ["{digest}  {name}\n", "{digest} *{name}\r\n", "SHA256 ({name}) = {digest}\n"])
def test_files_are_found_in_a_list_whatever_they_are_called(tmp_path, name, form):
    save_file(Model().state_dict(), tmp_path / name)
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(form.format(digest=sha256(tmp_path / name), name=name), newline="", encoding="utf-8")
    assert any("compared and right: 1 file" in note for note in load(tmp_path).notes)
    sums.write_text(form.format(digest="0" * 64, name=name), newline="", encoding="utf-8")
    refused(tmp_path, "has the checksum")


@pytest.mark.parametrize("content", ["", "0" * 60, "garbage\n"])
def test_a_files_own_checksum_that_is_cut_short_is_an_error_rather_than_unknown(tmp_path, content):
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.sha256").write_text(content)
    error = refused(tmp_path, "holds no sha256", SourceError)
    assert error.file == str(tmp_path / "model.safetensors.sha256")


def test_every_file_that_differs_is_named(folder):
    (folder / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in SHARDS))
    error = refused(folder, SHARDS[0])
    assert SHARDS[1] in error.message


@pytest.mark.parametrize("engine", [{}, {"transfer": "mmap"}, {"transfer": "stream"}])
def test_one_bit_of_a_file_is_enough_whatever_the_way_it_is_read(folder, engine):
    listed(folder, folder / "SHA256SUMS")
    load(folder, **engine)
    data = bytearray((folder / SHARDS[0]).read_bytes())
    data[-1] ^= 1
    (folder / SHARDS[0]).write_bytes(data)
    refused(folder, SHARDS[0], **engine)


def test_only_files_that_are_read_are_asked_for(folder):
    (folder / "SHA256SUMS").write_text(f"{sha256(folder / SHARDS[0])}  {SHARDS[0]}\n{'0' * 64}  {SHARDS[1]}\n")
    half = torch.nn.Module()
    half.a = torch.nn.Linear(8, 8)
    load(folder, half, on_unexpected="ignore")


def test_blobs_of_the_hubs_cache_are_held_against_their_names(tmp_path, folder):
    cache = tmp_path / "hub"
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    for place in (repository / "blobs", repository / "refs", snapshot):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    blobs = {}
    for name in (*SHARDS, "model.safetensors.index.json"):
        content = (folder / name).read_bytes()
        # One as a large file, the other as git has small ones.
        is_large = name == SHARDS[0]
        digest = (
            hashlib.sha256(content) if is_large else hashlib.sha1(b"blob %d\0" % len(content) + content)
        ).hexdigest()
        blobs[name] = repository / "blobs" / digest
        blobs[name].write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blobs[name], snapshot))
    weightloaders_checksum.configure(unknown="error")
    options = {"loader": "hf", "loader_kwargs": {"cache_dir": str(cache), "local_files_only": True}}
    report = load("org/name", **options)
    assert any("3 files, by the name of its blob" in note for note in report.notes)
    for name, what in ((SHARDS[0], "sha256"), (SHARDS[1], "git's")):
        sound = blobs[name].read_bytes()
        blobs[name].write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        error = refused("org/name", name, **options)
        assert blobs[name].name in error.message
        assert what in error.message
        blobs[name].write_bytes(sound)


def test_a_list_that_is_named_counts_before_all_others(folder, tmp_path, monkeypatch):
    listed(folder, folder / "SHA256SUMS", **{SHARDS[0][:11]: "0" * 64})
    refused(folder, SHARDS[0])
    sums = listed(folder, tmp_path / "sums")
    weightloaders_checksum.configure(sums, root=folder)
    load(folder)
    weightloaders_checksum.configure()
    refused(folder, SHARDS[0])
    monkeypatch.setattr(settings_of, "_configured", None)
    monkeypatch.setenv("WEIGHTLOADERS_CHECKSUM_LIST", str(sums))
    refused(folder, SHARDS[0])
    monkeypatch.setenv("WEIGHTLOADERS_CHECKSUM_ROOT", str(folder))
    load(folder)


@pytest.mark.parametrize("by", ["configure", "environment"])
def test_what_is_done_about_a_file_that_nobody_has_a_checksum_of_is_a_choice(folder, by, caplog, monkeypatch):
    def choose(unknown):
        if by == "configure":
            weightloaders_checksum.configure(unknown=unknown)
        else:
            monkeypatch.setenv("WEIGHTLOADERS_CHECKSUM_UNKNOWN", unknown)

    own = folder / f"{SHARDS[0]}.sha256"
    own.write_text(f"{sha256(folder / SHARDS[0])}  {SHARDS[0]}\n")
    with caplog.at_level(logging.WARNING):
        report = load(folder)
    assert any("no checksum is known" in warning and SHARDS[1] in warning for warning in report.warnings)
    assert any("no checksum is known" in record.message for record in caplog.records)
    own.unlink()
    choose("ignore")
    assert not load(folder).warnings
    choose("error")
    error = refused(folder, "no checksum is known")
    assert SHARDS[0] in error.message
    (folder / "SHA256SUMS").write_text(f"{sha256(folder / SHARDS[0])}  {SHARDS[0]}\n")
    refused(folder, SHARDS[1])


def test_where_there_are_no_checksums_at_all_that_is_said_once_and_noted_in_each_report(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        reports = [load(source) for source in (folder, folder, Model().state_dict())]
    assert len(caplog.records) == 1
    assert "no checksum is known" in caplog.records[0].message
    assert "\n" not in caplog.records[0].message
    for report in reports:
        assert not report.warnings
        assert [note for note in report.notes if "no checksum" in note]
    caplog.clear()
    weightloaders_checksum.configure(listed(folder, tmp_path / "sums"))
    assert any(SHARDS[0] in warning for warning in load(folder).warnings)


def test_what_comes_from_no_file_is_refused_only_where_all_must_be_known(folder):
    class Streaming(BaseWeightLoader):
        def get_weights(self, model_name_or_path):
            return iter(Model().state_dict().items())

    class Own(Model):
        def load_weights(self, weights):
            self.load_state_dict(dict(weights))

    state = Model().state_dict()
    for report in (load(state), load("x", loader=Streaming)):
        assert any("nothing says which files" in note for note in report.notes)
        assert not any("compared and right" in note for note in report.notes)
        assert not report.warnings
    weightloaders_checksum.configure(listed(folder, folder / "SHA256SUMS"))
    assert any("nothing says which files" in warning for warning in load(state).warnings)
    weightloaders_checksum.configure(unknown="error")
    refused(state, r"a\.weight|a\.bias")
    refused("x", "stream", loader=Streaming)
    load(folder, Own())
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {SHARDS[0]}\n")
    with pytest.raises(SourceReadError, match=SHARDS[1]):
        load(folder, Own())


def test_settings_and_lists_that_can_not_be_are_refused(folder, tmp_path, monkeypatch):
    for wrong in ({"lists": 5}, {"lists": ["sums", None]}, {"root": 5}):
        with pytest.raises(ConfigError, match="by its path, not as"):
            weightloaders_checksum.configure(**wrong)
    with pytest.raises(ConfigError, match="unknown is 'never'"):
        weightloaders_checksum.configure(unknown="never")
    monkeypatch.setenv("WEIGHTLOADERS_CHECKSUM_UNKNOWN", "never")
    refused(folder, "WEIGHTLOADERS_CHECKSUM_UNKNOWN is 'never'", ConfigError)
    monkeypatch.delenv("WEIGHTLOADERS_CHECKSUM_UNKNOWN")
    monkeypatch.setenv("WEIGHTLOADERS_CHECKSUM_LIST", os.pathsep.join([str(tmp_path / "no such list")]))
    refused(folder, "no such list", SourceError)
    (tmp_path / "sums.json").write_text("{")
    monkeypatch.setenv("WEIGHTLOADERS_CHECKSUM_LIST", str(tmp_path / "sums.json"))
    refused(folder, r"sums\.json is no JSON", SourceError)


def test_a_plan_with_errors_is_told_as_such_and_a_plan_may_run_twice(folder):
    listed(folder, folder / "SHA256SUMS")
    wrong = Model()
    wrong.c = torch.nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"c\.weight"):
        load(folder, wrong)
    model = Model()
    with open_weights(folder) as weights:
        plan = plan_load(model, weights)
        for _ in range(2):
            assert len([note for note in plan.run(model).notes if "checksums" in note]) == 1


def test_it_is_a_hook_that_can_be_switched_off_and_imports_little(folder):
    assert not [found for found in WeightLoaderRegistry.describe() if found.name == "checksum"]
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {SHARDS[0]}\n")
    code = (
        "import sys, weightloaders_checksum.hooks\n"
        "print({'torch', 'numpy', 'transformers'} & set(sys.modules) or 'light')\n"
        "import torch, weightloaders\n"
        f"model = torch.nn.Module(); model.a = torch.nn.Linear(8, 8)\n"
        f"weightloaders.load_into(model, {str(folder)!r}, on_unexpected='ignore', progress=False)\n"
        "print('loaded')"
    )
    environment = {**os.environ, "WEIGHTLOADERS_DISABLE": "checksum", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["light", "loaded"]
    del environment["WEIGHTLOADERS_DISABLE"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout.split(), "SourceReadError" in done.stderr) == (["light"], True)
