"""What is known of a file's checksum, against the programs that write such lists."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from weightloaders import Checksum, ChecksumList, Extent
from weightloaders.errors import CheckpointFormatError, SourceNotFoundError, SourceReadError

CONTENTS = {"model.safetensors": b"weights" * 1000, "a b.bin": b"", "großes ö.bin": b"\0" * 5_000_000}


def source(path):
    return Extent(path).source


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    return folder


def run(folder, *command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, encoding="utf-8").stdout


@pytest.mark.parametrize("options", [[], ["--tag"], ["--binary"]])
def test_lists_that_sha256sum_writes_are_understood(files, options):
    odd = "odd\\name\nof two lines"
    (files / odd).write_bytes(b"odd")
    listed = run(files, "sha256sum", *options, *CONTENTS, odd)
    (files / "SHA256SUMS").write_text(listed, encoding="utf-8")
    for name in (*CONTENTS, odd):
        known = Checksum.known(files / name)
        assert known == Checksum("sha256", hashlib.sha256((files / name).read_bytes()).hexdigest(),
                                 str(files / "SHA256SUMS"))  # fmt: skip
        assert known.of(source(files / name)) == known.digest
    assert Checksum.known(files / "unlisted") is None


def test_gits_own_checksum_is_what_git_computes(files):
    blobs = files / "blobs"
    blobs.mkdir()
    for name, content in CONTENTS.items():
        digest = run(files, "git", "hash-object", "--no-filters", name).strip()
        (blobs / digest).write_bytes(content)
        (files / name).unlink()
        (files / name).symlink_to(blobs / digest)
        known = Checksum.known(files / name)
        assert (known.algorithm, known.digest) == ("git", digest)
        assert known.of(source(files / name)) == digest


@pytest.mark.parametrize(
    "listed",
    [
        lambda sums: sums,
        lambda sums: {"version": 1, "files": sums},
        lambda sums: {name: {"size": 3, "sha256": digest.upper()} for name, digest in sums.items()},
        lambda sums: {f"./{name}": f"sha256:{digest}" for name, digest in sums.items()},
    ],
)
def test_lists_in_json_are_understood(files, listed):
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
    (files / "SHA256SUMS.json").write_text(json.dumps(listed(sums)))
    assert {name: Checksum.known(files / name).digest for name in CONTENTS} == sums


def test_names_are_relative_to_the_list_or_to_a_folder_that_is_given(files, tmp_path, monkeypatch):
    file, digest = files / "model.safetensors", "a" * 64
    (tmp_path / "here").write_text(f"{digest}  model/model.safetensors\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sums").write_text(f"{digest}  model.safetensors\n")
    (tmp_path / "absolute").write_text(f"{digest}  {file}\n")
    (tmp_path / "link").symlink_to(files)
    monkeypatch.chdir(tmp_path)
    for listed in (ChecksumList("here"), ChecksumList("elsewhere/sums", "link"), ChecksumList(tmp_path / "absolute")):
        for path in (file, "model/model.safetensors", "link/model.safetensors", "link/../model/model.safetensors"):
            assert listed.of(path) == digest
        assert listed.of("model.safetensors") is None
    assert ChecksumList("elsewhere/sums").of(file) is None


def test_who_says_it_first_counts(files, tmp_path):
    file = files / "model.safetensors"
    digests = {name: str(at) * 64 for at, name in enumerate(["given", "blob", "own", "list", "json"], 1)}
    (tmp_path / "given").write_text(f"{digests['given']}  model/model.safetensors\n")
    (files / "model.safetensors.sha256").write_text(digests["own"])
    (files / "SHA256SUMS").write_text(f"{digests['list']}  model.safetensors\n")
    (files / "SHA256SUMS.json").write_text(json.dumps({"model.safetensors": digests["json"]}))
    (tmp_path / digests["blob"]).write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / digests["blob"])
    assert Checksum.known(file, [ChecksumList(tmp_path / "given")]).digest == digests["given"]
    assert Checksum.known(file).digest == digests["blob"]
    file.unlink()
    file.write_bytes(b"")
    for name, path in (("own", "model.safetensors.sha256"), ("list", "SHA256SUMS"), ("json", "SHA256SUMS.json")):
        assert Checksum.known(file).digest == digests[name]
        (files / path).unlink()
    assert Checksum.known(file) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("SHA256SUMS", f"{'a' * 64}  x\n{'b' * 64}  ./x\n", "two checksums for"),
        ("sums.json", "{", "is no JSON"),
        ("sums.json", "[" * 100_000, "is no JSON"),
        ("sums.json", "[1]", "no object"),
        ("sums.json", '{"x": "abc"}', "no sha256 for x"),
        ("sums.json", '{"x": 3}', "no sha256 for x"),
        ("sums.json", '{"x": {"md5": "3"}}', "no sha256 for x"),
    ],
)
def test_a_list_that_is_none_is_refused_by_name(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointFormatError, match=message) as caught:
        ChecksumList(tmp_path / name)
    assert caught.value.file == str(tmp_path / name)
    with pytest.raises(SourceNotFoundError, match="nowhere"):
        ChecksumList(tmp_path / "nowhere")


def test_comments_and_entries_by_other_algorithms_are_passed_over(tmp_path):
    others = f"{'b' * 40}  x\n{'c' * 128} *x\nSHA512 (x) = {'c' * 128}\nMD5 (x) = {'d' * 32}\n"
    (tmp_path / "SHA256SUMS").write_text(f"# made by hand\n; or not\n\n{others}{'A' * 64}  x\r\n", newline="")
    listed = ChecksumList(tmp_path / "SHA256SUMS")
    assert (len(listed), listed.of(tmp_path / "x")) == (1, "a" * 64)


@pytest.mark.parametrize("entry", [f"{'a' * 64}  model.safetensors", f"SHA256 (model.safetensors) = {'a' * 64}"])
def test_a_list_that_was_cut_anywhere_within_a_line_never_passes_for_one_that_lists_less(tmp_path, entry):
    whole = f"{'b' * 64}  other\n{entry}\n"
    start = whole.index("\n") + 1
    listed = tmp_path / "SHA256SUMS"
    for end in range(start + 1, len(whole) - 1):
        listed.write_text(whole[:end])
        with pytest.raises(CheckpointFormatError, match=r"SUMS(: line 2 is no entry| ends in the middle)") as caught:
            Checksum.known(tmp_path / "model.safetensors")
        assert caught.value.file == str(listed)
    for text in (whole, whole.rstrip("\n")):
        listed.write_text(text)
        assert Checksum.known(tmp_path / "model.safetensors").digest == "a" * 64
    # One that ends between two lines is a list like another.
    listed.write_text(whole[:start])
    assert Checksum.known(tmp_path / "model.safetensors") is None


def test_a_line_that_is_none_in_the_middle_of_a_list_is_named(tmp_path):
    for odd in ("hello", f"{'a' * 63}  short", f"{'a' * 64}", "SHA256 (x) = abc"):
        (tmp_path / "SHA256SUMS").write_text(f"{'b' * 64}  y\n{odd}\n{'c' * 64}  z\n")
        with pytest.raises(CheckpointFormatError, match="line 2 is no entry"):
            ChecksumList(tmp_path / "SHA256SUMS")


def test_lists_signed_in_clear_text_are_understood(tmp_path):
    (tmp_path / "SHA256SUMS").write_text(
        f"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\n{'a' * 64}  x\n"
        "-----BEGIN PGP SIGNATURE-----\n\niQIzBAEBCgAdFiEE\n=abcd\n-----END PGP SIGNATURE-----\n"
    )
    listed = ChecksumList(tmp_path / "SHA256SUMS")
    assert (len(listed), listed.of(tmp_path / "x")) == (1, "a" * 64)


def test_all_files_are_compared_and_those_that_differ_are_told(files):
    sources = {name: source(files / name) for name in CONTENTS}
    due = {name: Checksum("sha256", hashlib.sha256(content).hexdigest(), "test") for name, content in CONTENTS.items()}
    assert Checksum.mismatches({sources[name]: due[name] for name in CONTENTS}) == []
    (files / "model.safetensors").write_bytes(b"other")
    changed = source(files / "model.safetensors")
    [found] = Checksum.mismatches({**{sources[n]: due[n] for n in ("a b.bin", "großes ö.bin")},
                                   changed: due["model.safetensors"]})  # fmt: skip
    assert (found.source, found.expected) == (changed, due["model.safetensors"])
    assert found.found == hashlib.sha256(b"other").hexdigest()
    with pytest.raises(SourceReadError, match=r"model\.safetensors"):
        Checksum.mismatches({sources[name]: due[name] for name in CONTENTS})
    assert Checksum.mismatches({}) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_nobody_waits_for_a_pipe_in_the_place_of_a_list(files):
    os.mkfifo(files / "SHA256SUMS")
    with pytest.raises(SourceNotFoundError, match="not a regular file"):
        Checksum.known(files / "model.safetensors")
