"""`NpzLoader` against what NumPy itself writes and reads."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from weightloaders_npz import NpzLoader

import weightloaders as wl
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    SourceNotFoundError,
    SourceReadError,
    UnsupportedDtypeError,
    WeightLoadersError,
)
from weightloaders.weights.remote import Answer, RemoteSource

DTYPES = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ARRAYS = {
    "layer.0.weight": np.arange(12, dtype="f4").reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(24, dtype="f4").reshape(2, 3, 4)),
    "big": np.arange(6, dtype=">i4").reshape(2, 3),
    "big.fortran": np.asfortranarray(np.arange(6, dtype=">c16").reshape(2, 3)),
    "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3), "f2"),
    "flag": np.array([True, False]),
}


def tensor(array):
    array = np.asarray(array)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def load(path, **options):
    with NpzLoader(**options).get_weights(str(path)) as weights:
        return {name: weights[name] for name in weights}


def assert_same(loaded, arrays):
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        expected = tensor(array)
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].shape == expected.shape
        assert torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_saved_is_what_is_loaded(tmp_path, save):
    save(tmp_path / "model.npz", **ARRAYS)
    assert_same(load(tmp_path / "model.npz"), ARRAYS)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_both_have_is_loaded_in_either_byte_order(tmp_path, dtype, order):
    arrays = {"x": np.array([0, 1, 100], dtype=order + dtype), "y": np.ones((2, 2), order + dtype, order="F")}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "model.npz", **arrays)
        assert_same(load(tmp_path / "model.npz"), arrays)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    array=npst.arrays(
        st.sampled_from([np.dtype(order + kind) for order in "<>" for kind in DTYPES]),
        npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        elements={"allow_nan": False},
    ),
    fortran=st.booleans(),
    save=st.sampled_from([np.savez, np.savez_compressed]),
)
def test_any_array_makes_the_round_trip(tmp_path, array, fortran, save):
    array = np.asarray(array, order="F" if fortran else "C")
    save(tmp_path / "model.npz", x=array)
    assert_same(load(tmp_path / "model.npz"), {"x": array})


def test_stored_arrays_are_described_by_their_place_and_compressed_ones_are_unpacked(tmp_path):
    np.savez(tmp_path / "stored.npz", **ARRAYS)
    np.savez_compressed(tmp_path / "deflated.npz", **ARRAYS)
    assert all(info.is_raw for info in NpzLoader().get_weights(str(tmp_path / "stored.npz")).infos())
    assert not any(info.is_raw for info in NpzLoader().get_weights(str(tmp_path / "deflated.npz")).infos())


def test_an_archive_behind_other_bytes_is_read_from_its_place(tmp_path):
    np.savez(tmp_path / "model.npz", **ARRAYS)
    (tmp_path / "behind.npz").write_bytes(b"#!" + bytes(100) + (tmp_path / "model.npz").read_bytes())
    assert_same(load(tmp_path / "behind.npz"), ARRAYS)


def test_members_that_are_no_arrays_are_named_as_skipped(tmp_path):
    np.savez(tmp_path / "model.npz", w=np.ones(2))
    with zipfile.ZipFile(tmp_path / "model.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
        archive.mkdir("folder")
    weights = NpzLoader().get_weights(str(tmp_path / "model.npz"))
    assert (list(weights), list(weights.skipped_files)) == (["w"], ["notes.txt"])


def test_members_are_not_compared_with_each_other(tmp_path, monkeypatch):
    """There may be very many."""
    np.savez(tmp_path / "model.npz", **{f"{i}": ONES for i in range(5)})
    monkeypatch.setattr("weightloaders.weights.zip_directory.Record.__eq__", lambda *_: pytest.fail("compared"))
    assert len(NpzLoader().get_weights(str(tmp_path / "model.npz"))) == 5


# ------------------------------------------------------------------ which file


def test_the_one_archive_of_a_folder_is_found_and_of_several_one_must_be_named(tmp_path):
    (tmp_path / "dir.npz").mkdir()
    np.savez(tmp_path / "a.npz", a=np.ones(1))
    assert list(load(tmp_path)) == ["a"]
    np.savez(tmp_path / "b.npz", b=np.ones(1))
    with pytest.raises(AmbiguousSourceError, match=r"a\.npz, b\.npz"):
        load(tmp_path)
    assert list(load(tmp_path, file_pattern="b*")) == ["b"]
    assert list(load(tmp_path / "b.npz")) == ["b"]


def test_where_there_is_no_archive_that_is_said(tmp_path):
    with pytest.raises(SourceNotFoundError, match=r"holds no \*\.npz"):
        load(tmp_path)
    with pytest.raises(SourceNotFoundError, match="nowhere is not there"):
        load(tmp_path / "nowhere")


def test_probing_recognises_archives_only(tmp_path):
    def answer(path):
        return NpzLoader.probe(str(path)).answer

    np.savez(tmp_path / "model.npz", w=np.ones(1))
    assert answer(tmp_path) == answer(tmp_path / "model.npz") == "yes"
    torch.save({}, tmp_path / "model.pt")
    (tmp_path / "false.npz").write_bytes(b"no zip")
    assert {answer(tmp_path / name) for name in ("model.pt", "false.npz", "nowhere")} == {"no"}
    assert answer(tmp_path) == "no"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.array([{}, None]), "object"),
        (np.zeros(2, [("a", "f4"), ("b", "i2")]), "a"),
        (np.zeros(2, [("ä", "f4")]), "ä"),
        (np.zeros(2, [("\u0431", "f4")]), "version"),
        (np.array(["text"]), "<U4"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.zeros(2, "V2"), "V2"),
        (np.zeros(2, np.longdouble), "float128"),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_torch_has_no_dtype_for_is_refused_by_name(tmp_path, save, array, kind):
    if kind == "float128" and array.dtype.itemsize == 8:
        pytest.skip("long double is double here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy's, about the format version of the third
        save(tmp_path / "model.npz", good=np.ones(1), odd=array)
    with pytest.raises(CheckpointFormatError, match=f"'odd'.*{kind}") as caught:
        NpzLoader().get_weights(str(tmp_path / "model.npz"))
    assert caught.value.tensor == "odd"
    assert isinstance(caught.value, UnsupportedDtypeError) or kind == "version"


def npy(array=None, header=None):
    """A .npy file; with a header, one whose header says something else."""
    buffer = io.BytesIO()
    if header is None:
        np.lib.format.write_array(buffer, array, allow_pickle=True)
    else:
        text = header.encode() + b"\n"
        buffer.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        buffer.write(array.tobytes())
    return buffer.getvalue()


def archive(path, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x.npy", content)


ONES = np.ones(4, "<f4")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 4}",
        "{'descr': '<f4', 'fortran_order': 3, 'shape': (4,)}",
        "{'descr': '<f4', 'shape': (4,)}",
        "{'descr': 'nothing', 'fortran_order': False, 'shape': (4,)}",
        "__import__('os').abort()",
        "{",
        "",
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_lies_is_refused_before_anything_is_read(tmp_path, header, compression):
    archive(tmp_path / "model.npz", npy(ONES, header), compression)
    with pytest.raises(CheckpointFormatError, match=r"model\.npz"):
        NpzLoader().get_weights(str(tmp_path / "model.npz"))


def test_a_member_that_claims_more_than_it_can_unpack_to_is_refused(tmp_path):
    size = 1 << 44
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size // 4},)}}"
    content = npy(ONES, header)
    archive(tmp_path / "model.npz", content, zipfile.ZIP_DEFLATED)
    data = bytearray((tmp_path / "model.npz").read_bytes())
    claimed = len(content) - ONES.nbytes + size
    # The directory's entry is given a zip64 field with the size that the header claims.
    entry = data.index(b"PK\x01\x02")
    name_length = struct.unpack_from("<H", data, entry + 28)[0]
    struct.pack_into("<I", data, entry + 24, 0xFFFFFFFF)
    extra = struct.pack("<HHQ", 1, 8, claimed)
    struct.pack_into("<H", data, entry + 30, len(extra))
    data[entry + 46 + name_length : entry + 46 + name_length] = extra
    end = data.index(b"PK\x05\x06")
    struct.pack_into("<I", data, end + 12, struct.unpack_from("<I", data, end + 12)[0] + len(extra))
    (tmp_path / "model.npz").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="impossible"):
        NpzLoader().get_weights(str(tmp_path / "model.npz"))


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused_by_name(tmp_path, compression):
    archive(tmp_path / "model.npz", npy(ONES), compression)
    with pytest.raises(CheckpointFormatError, match=r"'x\.npy' .*is compressed by method"):
        load(tmp_path / "model.npz")


def test_an_encrypted_member_is_refused(tmp_path):
    archive(tmp_path / "model.npz", npy(ONES))
    data = bytearray((tmp_path / "model.npz").read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "model.npz").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="encrypted"):
        load(tmp_path / "model.npz")


def test_one_name_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        file.writestr("x.npy", npy(ONES))
        file.writestr("x.npy", npy(ONES + 1))
    with pytest.raises(WeightLoadersError, match=r"two records named 'x\.npy'"):
        load(tmp_path / "model.npz")


def test_an_archive_that_changes_before_a_compressed_array_is_read_is_an_error_of_ours(tmp_path):
    np.savez_compressed(tmp_path / "model.npz", w=np.ones(1000))
    weights = NpzLoader().get_weights(str(tmp_path / "model.npz"))
    np.savez_compressed(tmp_path / "model.npz", w=np.zeros(2000))
    with pytest.raises(SourceReadError, match=r"model\.npz was changed"):
        weights["w"]


def test_a_compressed_array_that_unpacks_to_other_values_than_were_packed_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "model.npz", w=np.random.default_rng(0).integers(0, 255, 4096, "u1"))
    data = bytearray((tmp_path / "model.npz").read_bytes())
    # Of what can't be compressed the values themselves lie in the stream.
    data[3000] ^= 1
    (tmp_path / "model.npz").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="does not unpack to the 4224 bytes"):
        load(tmp_path / "model.npz")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_longer_than_any_of_an_array_of_numbers_is_refused(tmp_path, compression):
    many = np.zeros(1, [(f"field {i}", "f4") for i in range(300)])
    archive(tmp_path / "model.npz", npy(many), compression)
    with pytest.raises(CheckpointFormatError, match=r"'x' in .*has no header that can be understood") as refused:
        load(tmp_path / "model.npz")
    assert "none of numbers" in refused.value.hint


@pytest.mark.parametrize("header", ['{"a":' * 200 + "descr': '|O', }", "[" * 190 + "0" + "]" * 190, "(" * 250])
def test_a_header_of_brackets_within_brackets_is_refused_with_the_reason(tmp_path, header):
    archive(tmp_path / "model.npz", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n")
    reasons = "has a header that is nested too deeply|has no header that can be understood: .+"
    with pytest.raises(CheckpointFormatError, match=reasons) as refused:
        load(tmp_path / "model.npz")
    # Python's parser says so of the first one, and no memory was lacking.
    assert not isinstance(refused.value.__context__, MemoryError)


class Far(RemoteSource):
    """A file far away, which counts the requests that it gets."""

    def __init__(self, path):
        super().__init__(f"far://{path.name}")
        self.content, self.asked = path.read_bytes(), []

    @contextlib.contextmanager
    def ask(self, start, end):
        self.asked.append(end - start)
        yield Answer(len(self.content), "tag", min(end, len(self.content)), [self.content[start:end]])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_far_away_is_described_by_few_requests(tmp_path, save):
    arrays = {f"layer.{i}": np.random.default_rng(i).standard_normal((40, 50)) for i in range(200)}
    save(tmp_path / "model.npz", **arrays)
    far = Far(tmp_path / "model.npz")

    class Listing(wl.FolderListing):
        def open(self, name):
            return far

    listing = Listing(tmp_path)
    assert NpzLoader.probe_listing(listing).answer == "yes"
    weights = NpzLoader().get_listed_weights(listing)
    # Its beginning, its end twice, what stands before each array.
    assert len(far.asked) <= 6
    assert_same(dict(weights), arrays)


@pytest.fixture(scope="module", params=[np.savez, np.savez_compressed])
def sound(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "model.npz"
    request.param(path, w=np.arange(6, dtype="f4").reshape(2, 3), v=np.ones(2, ">i2"))
    return path.read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless_but_never_anything_else(tmp_path, sound, data):
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))]
    (tmp_path / "model.npz").write_bytes(damaged)
    with contextlib.suppress(WeightLoadersError):
        load(tmp_path / "model.npz")


def test_no_descriptor_stays_open(tmp_path):
    np.savez_compressed(tmp_path / "model.npz", **ARRAYS)
    np.savez(tmp_path / "stored.npz", **ARRAYS)
    before = len(list(Path("/dev/fd").iterdir()))
    load(tmp_path / "model.npz")
    load(tmp_path / "stored.npz")
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_importing_the_plugin_imports_neither_torch_nor_numpy():
    code = "import sys, weightloaders_npz; print({'torch', 'numpy'} & set(sys.modules) or 'light')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert done.stdout.strip() == "light"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_objects_are_refused_by_name_and_what_they_pickle_never_runs(tmp_path, save):
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    save(tmp_path / "a.npz", w=np.ones(2), x=np.array([Evil()], dtype=object))
    with pytest.raises(WeightLoadersError, match="x"), NpzLoader().get_weights(str(tmp_path / "a.npz")) as weights:
        dict(weights)
    assert not marker.exists()


def test_what_unpacking_says_of_damaged_data_is_no_fault_of_the_disk(tmp_path):
    """bz2 raises an OSError of damaged data, and zipfile one of a directory that lies before the file."""
    path = tmp_path / "a.npz"
    np.savez(path, w=np.ones(2))
    stored = path.read_bytes()
    bzip = bytearray(stored)
    for signature, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = stored.index(signature) + at
        bzip[place : place + 2] = (12).to_bytes(2, "little")
    end = stored.rindex(b"PK\x05\x06")
    before = stored[: end + 12] + (1 << 31).to_bytes(4, "little") + stored[end + 16 :]
    for damaged in (bytes(bzip), before):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointFormatError):
            NpzLoader().get_weights(str(path))
