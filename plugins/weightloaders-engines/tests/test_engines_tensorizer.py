"""Files of tensorizer's: what it writes is read, by it and without it, and what a damaged file claims is refused."""

from __future__ import annotations

import contextlib
import struct
import sys

import pytest
import torch
import weightloaders_engines.tensorized as tensorized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorizer import TensorSerializer
from weightloaders_engines import TensorizerLoader
from weightloaders_engines.tensorizer_header import read_index

from weightloaders import Extent, FolderListing, load_into, open_weights
from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    OptionsError,
    UnsupportedDtypeError,
    WeightLoadersError,
)

NAMES = ["tensorizer", "weightloaders"]
HEAD = 73  # bytes in front of the entries


def save(path, found):
    serializer = TensorSerializer(str(path))
    if isinstance(found, torch.nn.Module):
        serializer.write_module(found)
    else:
        serializer.write_state_dict(found)
    serializer.close()
    return path


def read(path, **options):
    with open_weights(path, "tensorizer", **options) as weights:
        return dict(weights.items())


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize(
    "module", [torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))]
)
def test_a_module_that_was_saved_fills_its_like(tmp_path, engine, module):
    save(tmp_path / "model.tensors", module)
    twin = type(module)(*module) if isinstance(module, torch.nn.Sequential) else torch.nn.Linear(3, 2)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    load_into(twin, tmp_path, loader="tensorizer", loader_kwargs={"engine": engine}, progress=False)
    assert all(torch.equal(value, state[name]) for name, value in twin.state_dict().items())


@pytest.mark.parametrize("engine", NAMES)
def test_nested_state_dicts_have_the_keys_that_lead_to_a_tensor_as_its_name(tmp_path, engine):
    nested = {"model": {"layers": [{"w": torch.ones(2)}, {"w": torch.zeros(3)}]}, "step": torch.tensor(7)}
    found = read(save(tmp_path / "x.tensors", nested), engine=engine)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "model.layers.0.w": (2,), "model.layers.1.w": (3,), "step": (),
    }  # fmt: skip
    assert found["step"].item() == 7


def test_two_names_that_come_to_the_same_are_refused(tmp_path):
    save(tmp_path / "x.tensors", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)})
    with pytest.raises(DuplicateTensorError, match=r"a\.b"):
        read(tmp_path / "x.tensors")


def test_tensors_that_were_saved_without_values_are_left_out_and_named(tmp_path):
    save(tmp_path / "x.tensors", {"real": torch.ones(2), "meta": torch.empty(3, device="meta")})
    with open_weights(tmp_path / "x.tensors", "tensorizer") as weights:
        assert list(weights) == ["real"]
        assert any("meta" in note for note in weights.notes)


def test_a_file_is_read_in_parts_so_that_not_all_of_it_is_in_memory(tmp_path, monkeypatch):
    found = {f"t{i}": torch.full((100,), float(i)) for i in range(10)}
    save(tmp_path / "x.tensors", found)
    monkeypatch.setattr(tensorized, "_AT_ONCE", 1000)
    opened = []
    original = TensorizerLoader._opened
    monkeypatch.setattr(TensorizerLoader, "_opened", lambda *args: opened.append(args) or original(*args))
    loaded = read(tmp_path / "x.tensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.items())
    assert len(opened) == 5


def test_one_of_several_files_is_chosen_by_a_pattern(tmp_path):
    for rank in range(2):
        save(tmp_path / f"model-rank-00{rank}.tensors", {"w": torch.full((2,), float(rank))})
    with pytest.raises(AmbiguousSourceError, match="model-rank-000"):
        read(tmp_path)
    assert read(tmp_path, file_pattern="*rank-001*")["w"][0] == 1


def test_values_that_do_not_match_their_hashes_are_refused_if_asked_for(tmp_path):
    path = save(tmp_path / "x.tensors", {"w": torch.ones(64)})
    with open_weights(path, "tensorizer") as weights:
        offset = weights.info("w").extents[0].offset
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert not torch.equal(read(path)["w"], torch.ones(64))
    with pytest.raises(WeightLoadersError, match=r"x\.tensors: HashMismatchError"):
        read(path, verify_hash=True)


def test_a_file_wherever_it_lies_is_read_without_tensorizer(tmp_path, monkeypatch):
    save(tmp_path / "model.tensors", {"w": torch.arange(6.0)})
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    listing = FolderListing(tmp_path)
    for name in ("", "model.tensors"):
        with TensorizerLoader().get_listed_weights(listing, name) as weights:
            assert torch.equal(weights["w"], torch.arange(6.0))
        assert TensorizerLoader.probe_listing(listing, name).answer == "yes"
    assert TensorizerLoader.probe_listing(listing, "other").answer == "no"
    with pytest.raises(OptionsError, match="verify_hash"):
        TensorizerLoader(verify_hash=True).get_listed_weights(listing)


def entry(name, dtype, shape, header, offset, length, kind=2):
    return (
        struct.pack("<H", len(name)) + name + bytes([kind, len(dtype)]) + dtype
        + struct.pack(f"<B{len(shape)}IQQQ", len(shape), *shape, header, offset, length)
    )  # fmt: skip


def file(path, *entries, version=1, flags=0, count=None, length=None, tail=b""):
    body = b"".join(entries)
    head = struct.pack("<5sI32s16sQQ", b"|TZR|", version, flags.to_bytes(32, "little"), b"",
                       len(entries) if count is None else count, len(body) if length is None else length)  # fmt: skip
    path.write_bytes(head + body + tail)
    return path


def with_values(path, dtype=b"<f4", shape=(2,), values=bytes(8), **changes):
    """One tensor, whose own header has nothing but its length."""
    begin = HEAD + len(entry(b"w", dtype, shape, 0, 0, 0))
    fields = {"header": begin, "offset": begin + 8, "length": len(values), **changes}
    return file(path, entry(b"w", dtype, shape, **fields), tail=struct.pack("<Q", 8) + values)


def test_a_file_written_by_hand_is_read(tmp_path):
    path = with_values(tmp_path / "x.tensors", values=struct.pack("<2f", 1.5, 2.5))
    assert read(path, engine="weightloaders")["w"].tolist() == [1.5, 2.5]
    path = with_values(tmp_path / "y.tensors", b">f4", values=struct.pack(">2f", 1.5, 2.5))
    assert read(path, engine="weightloaders")["w"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"|TZR|"), "ends within its header"),
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(100)), "no file of tensorizer's"),
        (lambda path: file(path, version=9), "version"),
        (lambda path: file(path, version=4, flags=1 << 7), "flags"),
        (lambda path: file(path, version=4, flags=1), "is encrypted"),
        (lambda path: file(path, version=3), "is encrypted"),
        (lambda path: file(path, length=1 << 60), "claims an index"),
        (lambda path: file(path, length=1 << 30), "claims an index"),
        (lambda path: file(path, count=1 << 60), "claims an index"),
        (lambda path: file(path, b"\xff" * 60, count=1), "ends in the middle of an entry"),
        (lambda path: with_values(path, shape=(3,)), "takes 12 bytes, but the index says 8"),
        (lambda path: with_values(path, shape=(1 << 31,) * 8), "takes"),
        (lambda path: with_values(path, header=1 << 62), "header of tensor 'w'"),
        (lambda path: with_values(path, header=80), "header of tensor 'w'"),
        (lambda path: with_values(path, offset=1 << 62), "lies at bytes"),
        (lambda path: file(path, entry(b"\x1e[1.5]", b"<f4", (), 0, 0, 4)), "a name that is none"),
        (lambda path: file(path, entry(b"\x1e" + b"[" * 9000, b"<f4", (), 0, 0, 4)), "a name that is none"),
        (lambda path: file(path, entry(b"\xff\xfe", b"<f4", (), 0, 0, 4)), "a name that is none"),
    ],
)
def test_an_index_that_lies_is_refused_before_tensorizer_sees_it(tmp_path, write, message):
    path = tmp_path / "x.tensors"
    write(path)
    with pytest.raises(CheckpointFormatError, match=message) as caught:
        read(path)
    assert caught.value.file == str(path)


FIELDS = {  # of the header of a tensor "w" of shape [4, 2] in <f4, from its first byte
    "kind": (10, b"\0"), "name": (13, b"v"), "byte order": (15, b">"), "dtype": (16, b"i"), "dimensions": (18, b"\1"),
    "shape": (19, struct.pack("<2I", 2, 4)), "larger shape": (19, b"\5"), "hashes": (27, b"\1"),
    "no values": (-8, bytes(8)), "fewer values": (-8, struct.pack("<q", 16)), "more values": (-8, b"\x21"),
    "absurdly many values": (-3, b"\x10"), "less than none": (-1, b"\x80"),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"verify_hash": True}])
@pytest.mark.parametrize("field", FIELDS)
def test_a_tensors_own_header_that_says_anything_else_than_the_index_is_refused(tmp_path, field, options):
    path = save(tmp_path / "x.tensors", {"w": torch.ones(4, 2)})
    assert torch.equal(read(path, **options)["w"], torch.ones(4, 2))
    (entry,) = read_index(Extent(path).source).entries
    place, value = FIELDS[field]
    place += entry.header if place >= 0 else entry.info.extents[0].offset
    data = bytearray(path.read_bytes())
    assert data[place : place + len(value)] != value
    data[place : place + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="does not go with the file's index") as caught:
        open_weights(path, "tensorizer", **options)
    assert (caught.value.file, caught.value.tensor) == (str(path), "w")


@pytest.mark.parametrize(
    "dtype", [b"O8", b"<U4", b"<V2\0torch.load", b"<V2\0torch.float64", b"<V2", b"<f3", b"", b"\xff", b"<V1\0torch.nn"]
)
def test_dtypes_that_torch_lacks_are_refused_by_name(tmp_path, dtype):
    with pytest.raises(UnsupportedDtypeError, match="'w'"):
        read_index(Extent(with_values(tmp_path / "x.tensors", dtype)).source)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("sound") / "x.tensors", {"w": torch.ones(4, 2), "v": torch.ones(3).bfloat16()})
    return path.read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), engine=st.sampled_from(NAMES))
def test_damage_is_refused_or_harmless_but_never_anything_else(tmp_path, sound, data, engine):
    damaged = bytearray(sound)
    # The index lies at the beginning, the headers of the tensors with their values at the end.
    places = st.integers(0, 200) | st.integers(len(sound) - 250, len(sound) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(places)] = data.draw(st.integers(0, 255))
    (tmp_path / "x.tensors").write_bytes(damaged)
    with contextlib.suppress(WeightLoadersError):
        read(tmp_path / "x.tensors", engine=engine)
