"""The raw binary format: meta.txt and model.bin."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    DuplicateTensorError,
    OptionsError,
    SaveError,
    SourceError,
    SourceNotFoundError,
)
from weightloaders.loaders.binary import BinaryLoader
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.raw import named_dtype, write_raw

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, meta: str | bytes, data: bytes, name: str = "model.bin", meta_name: str = "meta.txt") -> Path:
    (folder / meta_name).write_bytes(meta.encode() if isinstance(meta, str) else meta)
    (folder / name).write_bytes(data)
    return folder


def load(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    with BinaryLoader(**options).get_weights(str(source)) as weights:
        return dict(weights.items())


def infos_of(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(n, t.dtype, tuple(t.shape), read=lambda t=t: t) for n, t in tensors.items()]


def floats(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(count).standard_normal(count).astype("<f4")


# ------------------------------------------------------------------ reading


def test_values_are_read_in_the_order_of_the_lines(tmp_path: Path) -> None:
    values = floats(6 + 4 + 1)
    write(tmp_path, "a.weight:2,3\nb:4\nscale:\n", values.tobytes())
    loaded = load(tmp_path)
    assert list(loaded) == ["a.weight", "b", "scale"]
    assert np.array_equal(loaded["a.weight"].numpy(), values[:6].reshape(2, 3))
    assert np.array_equal(loaded["b"].numpy(), values[6:10])
    assert loaded["scale"].shape == ()
    assert loaded["scale"].item() == values[10]


def test_the_data_file_itself_may_be_named(tmp_path: Path) -> None:
    values = floats(3)
    write(tmp_path, "a:3", values.tobytes())
    assert np.array_equal(load(tmp_path / "model.bin")["a"].numpy(), values)


def test_blank_lines_comments_windows_line_ends_and_a_byte_order_mark_are_no_matter(tmp_path: Path) -> None:
    values = floats(5)
    write(tmp_path, b"\xef\xbb\xbf# made by hand\r\n\r\na : 2\r\n   \r\n  # more\r\nb:1, 3\r\n", values.tobytes())
    loaded = load(tmp_path)
    assert np.array_equal(loaded["a"].numpy(), values[:2])
    assert np.array_equal(loaded["b"].numpy(), values[2:].reshape(1, 3))


@pytest.mark.parametrize(
    ("line", "name", "shape", "dtype"),
    [
        ("a:2", "a", (2,), torch.float32),
        ("a:2:bfloat16", "a", (2,), torch.bfloat16),
        ("a:2:torch.float16", "a", (2,), torch.float16),
        ("a:2:fp16", "a", (2,), torch.float16),
        ("a::int64", "a", (), torch.int64),
        ("a:", "a", (), torch.float32),
        ("ns:block:0:w:2,1", "ns:block:0:w", (2, 1), torch.float32),
        ("ns:w:2:bf16", "ns:w", (2,), torch.bfloat16),
        ("w:float16:2", "w:float16", (2,), torch.float32),
        ("step:1:2", "step:1", (2,), torch.float32),
        ("größe x:2", "größe x", (2,), torch.float32),
        ("a:0", "a", (0,), torch.float32),
        ("a:0,4:uint8", "a", (0, 4), torch.uint8),
        ("a:2:float8_e4m3fn", "a", (2,), torch.float8_e4m3fn),
        ("a:2:complex64", "a", (2,), torch.complex64),
        ("a:2:bool", "a", (2,), torch.bool),
    ],
)
def test_a_line_is_taken_apart_from_its_end(
    tmp_path: Path, line: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    write(tmp_path, line, bytes(int(np.prod(shape)) * dtype.itemsize))
    loaded = load(tmp_path)
    assert list(loaded) == [name]
    assert (tuple(loaded[name].shape), loaded[name].dtype) == (shape, dtype)


def test_nothing_is_read_to_make_the_catalogue(tmp_path: Path) -> None:
    """A sparse file of a terabyte is catalogued as fast as a small one."""
    size = 1 << 40
    write(tmp_path, f"a:{size // 8}\nb:{size // 8}", b"")
    with (tmp_path / "model.bin").open("r+b") as file:
        file.truncate(size)
    with BinaryLoader().get_weights(str(tmp_path)) as weights:
        a, b = weights.infos()
    assert (a.extents[0].offset, b.extents[0].offset) == (0, size // 2)
    assert a.is_raw


# ------------------------------------------------------------------ dtypes


def test_the_stored_dtype_is_what_lies_there_where_the_line_does_not_say(tmp_path: Path) -> None:
    values = floats(4).astype("<f2")
    write(tmp_path, "a:2\nb:1:float32", values.tobytes())
    loaded = load(tmp_path, stored_dtype="float16")
    assert np.array_equal(loaded["a"].numpy(), values[:2])
    assert loaded["b"].item() == values[2:].view("<f4")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16"])
def test_the_dtype_asked_for_is_handed_out_for_real_floats_alone(tmp_path: Path, dtype: Any) -> None:
    tensors = {
        "f": torch.randn(3),
        "h": torch.randn(3).half(),
        "d": torch.randn(3, dtype=torch.float64),
        "i": torch.arange(3),
        "u": torch.tensor([255], dtype=torch.uint8),
        "t": torch.tensor([True, False]),
        "c": torch.randn(2, dtype=torch.complex64),
        "e": torch.randn(4).to(torch.float8_e4m3fn),
    }
    write_raw(tmp_path, infos_of(tensors), tensors.__getitem__)
    loaded = load(tmp_path, dtype=dtype)
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if name in "fhd" else tensor
        assert loaded[name].dtype == expected.dtype, name
        assert torch.equal(loaded[name].view(torch.uint8), expected.view(torch.uint8)), name


def test_the_extent_keeps_the_stored_dtype(tmp_path: Path) -> None:
    write(tmp_path, "a:2", bytes(8))
    with BinaryLoader(dtype=torch.bfloat16).get_weights(str(tmp_path)) as weights:
        info = weights.info("a")
    assert (info.dtype, info.extents[0].stored_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("code", ["f4", "f8", "f2", "i8", "u2", "c8"])
def test_big_endian_values_are_read_right(tmp_path: Path, code: str) -> None:
    values = np.arange(1, 7).astype(f">{code}")
    dtype = torch.from_numpy(values.astype(f"<{code}")).dtype
    write(tmp_path, f"a:2,3:{str(dtype).removeprefix('torch.')}", values.tobytes())
    assert np.array_equal(load(tmp_path, byteorder="big")["a"].numpy(), values.reshape(2, 3))


def test_bfloat16_and_float32_of_the_same_values_agree(tmp_path: Path) -> None:
    values = torch.randn(5).bfloat16()
    for name, stored in (("a", values), ("b", values.float()), ("c", values.double())):
        folder = tmp_path / name
        write_raw(folder, infos_of({"w": stored}), {"w": stored}.__getitem__)
        assert torch.equal(load(folder, dtype=torch.float32)["w"], values.float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "flot32"}, "did you mean 'float32'"),
        ({"dtype": torch.int8}, "nothing that values are cast to"),
        ({"dtype": "float8_e4m3fn"}, "nothing that values are cast to"),
        ({"dtype": 16}, "is no dtype"),
        ({"stored_dtype": "qint8"}, "is no dtype"),
        ({"byteorder": "middle"}, "byteorder"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        BinaryLoader(**options)


def test_dtype_names_are_torchs_own_and_a_few_short_ones() -> None:
    assert named_dtype("torch.int16") is torch.int16
    assert named_dtype("fp32") is named_dtype("f32") is torch.float32
    assert named_dtype("Tensor") is None
    assert named_dtype("") is None


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("meta", "line"),
    [
        ("a:2\nnonsense\n", 2),
        ("a:2\n\n:3\n", 3),
        ("a:2,\n", 1),
        ("a:2,,3\n", 1),
        ("a:-2\n", 1),
        ("a:+2\n", 1),
        ("a:2x\n", 1),
        ("a:1_0\n", 1),
        ("a:٣\n", 1),
        ("a:[2, 3]\n", 1),
        ("a:2:flot32\n", 1),
        ("a:2:qint8\n", 1),
        ("a:2:Tensor\n", 1),
        ("a:2:float32:x\n", 1),
        ("a:" + "9" * 5000 + "\n", 1),
    ],
)
def test_a_line_that_can_not_be_understood_is_named_by_its_number(tmp_path: Path, meta: str, line: int) -> None:
    write(tmp_path, meta, bytes(8))
    with pytest.raises(CheckpointFormatError, match=f"line {line} of ") as caught:
        load(tmp_path)
    assert caught.value.file == str(tmp_path / "meta.txt")


def test_an_unknown_dtype_comes_with_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path, "a:2:bfloat61", bytes(8))
    with pytest.raises(CheckpointFormatError, match="did you mean 'bfloat16'"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 19, 23, 25, 4000])
def test_a_data_file_of_another_size_is_refused_with_both_sizes(tmp_path: Path, size: int) -> None:
    write(tmp_path, "a:2\n# the rest\nb:4\n", bytes(size))
    with pytest.raises(CheckpointFormatError, match=f"has {size} bytes, but .* describes 24") as caught:
        load(tmp_path)
    if 8 <= size < 24:
        assert "'b' (line 3)" in str(caught.value)


def test_a_size_that_another_dtype_explains_says_so(tmp_path: Path) -> None:
    write(tmp_path, "a:2\nb:4\n", bytes(12))
    with pytest.raises(CheckpointFormatError, match="stored_dtype='float16'"):
        load(tmp_path)


def test_a_data_file_that_is_something_else_is_told_for_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, "a:2000", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8000\n")
    with pytest.raises(CheckpointFormatError, match="Git LFS pointer"):
        load(tmp_path)


def test_one_name_in_two_lines_is_refused_with_both(tmp_path: Path) -> None:
    write(tmp_path, "a:1\nb:1\na:1\n", bytes(12))
    with pytest.raises(DuplicateTensorError, match=r"'a' twice, in lines 1 and 3"):
        load(tmp_path)


@pytest.mark.parametrize("meta", ["", "# nothing\n\n"])
def test_a_description_of_nothing_is_refused(tmp_path: Path, meta: str) -> None:
    write(tmp_path, meta, b"")
    with pytest.raises(CheckpointFormatError, match="no tensors"):
        load(tmp_path)


def test_a_description_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, b"a:2\n\xff\xfe", bytes(8))
    with pytest.raises(CheckpointFormatError, match="UTF-8"):
        load(tmp_path)


def test_absurd_sizes_are_refused_without_allocating(tmp_path: Path) -> None:
    write(tmp_path, f"a:{10**18},{10**18}\n", bytes(8))
    with pytest.raises(CheckpointFormatError, match="describes 4000000000000000000000000000000000000"):
        load(tmp_path)


@settings(max_examples=200, deadline=None)
@given(meta=st.one_of(st.text(), st.text(alphabet="ab:,0123 \n#float16", max_size=40)), size=st.integers(0, 64))
def test_any_description_is_read_or_refused_by_our_own_error(tmp_path_factory: Any, meta: str, size: int) -> None:
    folder = write(tmp_path_factory.mktemp("any"), meta.encode("utf-8", "surrogatepass"), bytes(size))
    try:
        loaded = load(folder)
    except SourceError:
        return
    assert sum(t.numel() * t.element_size() for t in loaded.values()) == size


# ------------------------------------------------------------------ which files


def test_a_folder_without_data_or_description_says_which_is_absent(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="no data file"):
        load(tmp_path)
    (tmp_path / "model.bin").write_bytes(bytes(4))
    with pytest.raises(SourceNotFoundError, match="no description"):
        load(tmp_path)
    with pytest.raises(SourceNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_several_data_files_are_ambiguous_unless_each_is_described(tmp_path: Path) -> None:
    write(tmp_path, "a:1", floats(1).tobytes(), "first.bin", "first.meta.txt")
    write(tmp_path, "b:2", floats(2).tobytes(), "second.bin", "meta.txt")
    with pytest.raises(AmbiguousSourceError, match=r"second\.bin") as caught:
        load(tmp_path)
    assert "file_pattern=" in str(caught.value)
    assert list(load(tmp_path, file_pattern="second*")) == ["b"]
    (tmp_path / "meta.txt").rename(tmp_path / "second.meta.txt")
    loaded = load(tmp_path)
    assert np.array_equal(loaded["a"].numpy(), floats(1))
    assert np.array_equal(loaded["b"].numpy(), floats(2))


def test_one_name_in_two_data_files_is_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(tmp_path, "a:1", bytes(4), f"{name}.bin", f"{name}.meta.txt")
    with pytest.raises(DuplicateTensorError, match="'a'"):
        load(tmp_path)


def test_other_names_of_both_files_are_options(tmp_path: Path) -> None:
    write(tmp_path, "a:1", floats(1).tobytes(), "weights.dat", "names.lst")
    assert list(load(tmp_path, file_pattern="*.dat", meta_file="names.lst")) == ["a"]


def test_trainer_files_beside_the_data_are_no_candidates(tmp_path: Path) -> None:
    write(tmp_path, "a:1", floats(1).tobytes())
    (tmp_path / "training_args.bin").write_bytes(b"x")
    (tmp_path / "old.bin").mkdir()
    assert list(load(tmp_path)) == ["a"]


def test_probes_tell_this_format_from_others(tmp_path: Path) -> None:
    assert BinaryLoader.probe(str(tmp_path / "nowhere")).answer == "no"
    assert BinaryLoader.probe(str(tmp_path)).answer == "no"
    torch.save({"a": torch.ones(2)}, tmp_path / "model.bin")
    assert BinaryLoader.probe(str(tmp_path)).answer == "no"
    (tmp_path / "meta.txt").write_text("this folder holds weights\n")
    assert BinaryLoader.probe(str(tmp_path)).answer == "no"
    (tmp_path / "meta.txt").write_text("a:2\n")
    assert BinaryLoader.probe(str(tmp_path)).answer == "no"
    (tmp_path / "model.bin").write_bytes(struct.pack("<2f", 1, 2))
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert BinaryLoader.probe(str(tmp_path)).answer == "yes"
    assert BinaryLoader.probe(str(tmp_path / "model.bin")).answer == "yes"
    (tmp_path / "model.safetensors").touch()
    assert BinaryLoader.probe(str(tmp_path)).answer == "maybe"


# ------------------------------------------------------------------ writing


def test_what_is_written_reads_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {
        "plain": base,
        "transposed": base.t(),
        "slice": base[1:5:2, ::3],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "bf16": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "fp8": torch.randn(4).to(torch.float8_e5m2),
    }
    write_raw(tmp_path / "new" / "folder", infos_of(tensors), tensors.__getitem__)
    loaded = load(tmp_path / "new" / "folder")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].tolist() == tensor.tolist(), name


def test_the_description_is_as_short_as_it_can_be(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2, 3), "s": torch.tensor(1.0), "b": torch.ones(2).bfloat16()}
    write_raw(tmp_path, infos_of(tensors), tensors.__getitem__)
    assert (tmp_path / "meta.txt").read_text() == "w:2,3\ns:\nb:2:bfloat16\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.txt", "model.bin"]


def test_one_tensor_is_asked_for_at_a_time_in_the_order_given(tmp_path: Path) -> None:
    asked: list[str] = []
    infos = [TensorInfo(name, torch.float32, (2,), read=lambda: torch.ones(2)) for name in "cab"]

    def tensors(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.full((2,), float(len(asked)))

    write_raw(tmp_path, iter(infos), tensors)
    assert asked == ["c", "a", "b"]
    assert np.array_equal(np.fromfile(tmp_path / "model.bin", "<f4"), [1, 1, 2, 2, 3, 3])


def test_saving_over_the_loaded_source_is_safe(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(1000)}
    write_raw(tmp_path, infos_of(tensors), tensors.__getitem__)
    with BinaryLoader().get_weights(str(tmp_path)) as weights:
        write_raw(tmp_path, reversed(weights.infos()), weights.__getitem__)
    loaded = load(tmp_path)
    assert list(loaded) == ["b", "a"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_failure_on_the_way_leaves_the_old_files_as_they_were(tmp_path: Path) -> None:
    old = {"a": torch.ones(2)}
    write_raw(tmp_path, infos_of(old), old.__getitem__)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def failing(name: str) -> torch.Tensor:
        if name == "second":
            raise RuntimeError("the source went away")
        return torch.zeros(2)

    infos = infos_of({"first": torch.zeros(2), "second": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="went away"):
        write_raw(tmp_path, infos, failing)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["", " a", "a ", "#a", "a\nb", "\ufeffa"])
def test_a_name_that_would_not_read_back_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SaveError, match=r"can't stand in meta\.txt"):
        write_raw(tmp_path / "x", infos_of({name: torch.ones(1)}), lambda _: torch.ones(1))
    assert not (tmp_path / "x").exists()


def test_a_tensor_that_is_not_as_described_is_refused(tmp_path: Path) -> None:
    infos = infos_of({"a": torch.ones(2)})
    for wrong in (torch.ones(3), torch.ones(2).half()):
        with pytest.raises(SaveError, match="'a'"):
            write_raw(tmp_path / "x", infos, lambda _, wrong=wrong: wrong)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    infos = infos_of({"a": torch.ones(2)})
    with pytest.raises(SaveError, match="two tensors"):
        write_raw(tmp_path / "x", [*infos, *infos], lambda _: torch.ones(2))


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_names_and_shapes_read_back_or_are_refused(
    tmp_path_factory: Any, content: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tensors = {name: torch.full(shape, 3, dtype=dtype) for name, (shape, dtype) in content.items()}
    try:
        write_raw(folder, infos_of(tensors), tensors.__getitem__)
    except SaveError:
        assert any(n != n.strip() or n.startswith(("#", "\ufeff")) or "\n" in n for n in tensors)
        return
    loaded = load(folder)
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
