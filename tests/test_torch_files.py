"""Files of torch.save: what is catalogued, what is refused, and that nothing of them ever runs."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import pickle
import random
import struct
import threading
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders.errors import (
    AmbiguousSourceError,
    CheckpointFormatError,
    IncompleteCheckpointError,
    OptionsError,
    SourceError,
    SourceNotFoundError,
    UnsafeCheckpointError,
)
from weightloaders.loaders.torch import TorchLoader
from weightloaders.weights import torch_pickle
from weightloaders.weights.reading import read_tensor
from weightloaders.weights.source import ByteSource, FileSource
from weightloaders.weights.torch_zip import TorchFile, read_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

# torch says so of every sparse or nested tensor that is made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


class CountingSource(ByteSource):
    """Bytes in memory, which remembers how many were read."""

    def __init__(self, data: bytes, name: str = "memory.pt") -> None:
        self.data, self.name, self.bytes_read = data, name, 0

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def identity(self) -> Hashable:
        return id(self.data)

    def read_into(self, view: memoryview, offset: int) -> None:
        self.bytes_read += len(view)
        view[:] = self.data[offset : offset + len(view)]


def saved(content: Any, **options: Any) -> CountingSource:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return CountingSource(buffer.getvalue())


def values(file: TorchFile) -> dict[str, torch.Tensor]:
    return {info.name: read_tensor(info) for info in file.infos}


def read(content: Any, *, key: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
    return values(read_torch(saved(content, **options), key=key))


def bits(tensor: torch.Tensor) -> bytes:
    """Its bytes, so that a NaN equals itself, and dtypes without arithmetic can be compared."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(actual[name]) == bits(tensor), name


def rezipped(data: bytes, change: Callable[[str, bytes], bytes | None], **options: Any) -> bytes:
    """The same zip with each record changed, or left out where the change returns None."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **options) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return out.getvalue()


def zip_of(pickled: bytes, **records: bytes) -> CountingSource:
    """A file as torch.save lays it out, around a pickle of one's own."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        for key, data in records.items():
            archive.writestr(f"archive/data/{key.removeprefix('s')}", data)
    return CountingSource(out.getvalue())


ALL_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.bits"))
        and str(dtype) not in {f"torch.{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
    },
    key=str,
)


def random_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)
    return raw.bitwise_and(1).view(torch.bool).view(shape) if dtype is torch.bool else raw.view(dtype).view(shape)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_reads_bit_for_bit(dtype: torch.dtype, legacy: bool) -> None:
    content = {"a": random_of(dtype, 3, 5), "b": random_of(dtype, 4)}
    assert_same(read(content, _use_new_zipfile_serialization=not legacy), content)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_every_kind_of_tensor_reads_as_torch_load_gives_it(legacy: bool) -> None:
    base = torch.arange(60.0).view(5, 12)
    complex_base = torch.randn(4, 3, dtype=torch.complex64)
    content = OrderedDict(
        base=base,
        rows=base[1:3],
        columns=base[:, 2:9:3],
        transposed=base.t(),
        channels_last=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        expanded=base[0, :1].expand(3, 4),
        overlapping=base.as_strided((4, 4), (2, 1), 3),
        scalar=torch.tensor(1.5),
        one_of_many=base[2, 3],
        empty=torch.empty(0, 3),
        empty_slice=base[5:],
        parameter=torch.nn.Parameter(torch.randn(3)),
        conjugate=complex_base.conj(),
        negative=torch.randn(4, 3, dtype=torch.complex64).conj().imag,
        conjugate_view=complex_base.t()[1:].conj(),
    )
    source = saved(content, _use_new_zipfile_serialization=not legacy)
    assert_same(values(read_torch(source)), torch.load(io.BytesIO(source.data), weights_only=True))


def test_no_tensor_is_read_to_make_the_catalogue() -> None:
    source = saved({f"layer.{i}.weight": torch.randn(1 << 18) for i in range(8)})
    file = read_torch(source)
    assert all(info.is_raw for info in file.infos)
    # The file is 8 MiB; the buffer over it reads 64 KiB at a time.
    assert source.bytes_read < 300_000


def test_the_catalogue_of_a_legacy_file_reads_no_tensor_either() -> None:
    source = saved({f"w{i}": torch.randn(1 << 18) for i in range(8)}, _use_new_zipfile_serialization=False)
    file = read_torch(source)
    assert all(info.is_raw for info in file.infos)
    assert source.bytes_read < 300_000


def test_a_view_of_a_large_storage_is_read_alone() -> None:
    large = torch.randn(1 << 18)
    source = saved({"view": large[1000:1010]})
    file = read_torch(source)
    before = source.bytes_read
    assert torch.equal(read_tensor(file.infos[0]), large[1000:1010])
    assert source.bytes_read - before == 40


def test_a_strided_view_reads_only_its_span() -> None:
    table = torch.randn(1000, 10)
    source = saved({"view": table[100:110, ::2]})
    (info,) = read_torch(source).infos
    before = source.bytes_read
    assert torch.equal(read_tensor(info), table[100:110, ::2])
    assert source.bytes_read - before == (9 * 10 + 4 * 2 + 1) * 4


def test_tied_tensors_have_one_extent() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    source = saved({"embed": weight, "head": weight, "other": torch.randn(4, 4)})
    embed, head, other = read_torch(source).infos
    assert embed.extents == head.extents
    assert other.extents != head.extents


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d.itemsize > 1], ids=str)
def test_a_big_endian_file_is_read_as_the_values_that_were_written(dtype: torch.dtype) -> None:
    tensor = random_of(dtype, 4, 3)
    width = dtype.itemsize // (2 if dtype.is_complex else 1)

    def swapped(name: str, content: bytes) -> bytes:
        if name.endswith("/byteorder"):
            return b"big"
        if "/data/" in name:
            return np.frombuffer(content, f"<u{width}").astype(f">u{width}").tobytes()
        return content

    data = rezipped(saved({"t": tensor, "view": tensor[1:, ::2]}).data, swapped)
    assert_same(values(read_torch(CountingSource(data))), {"t": tensor, "view": tensor[1:, ::2]})


def test_a_file_without_a_byte_order_is_little_endian() -> None:
    content = {"t": torch.randn(3)}
    data = rezipped(saved(content).data, lambda name, c: None if name.endswith("/byteorder") else c)
    assert_same(values(read_torch(CountingSource(data))), content)


def test_an_unknown_byte_order_is_refused() -> None:
    data = rezipped(saved({"t": torch.randn(3)}).data, lambda name, c: b"mixed" if name.endswith("/byteorder") else c)
    with pytest.raises(CheckpointFormatError, match="byte order 'mixed'"):
        read_torch(CountingSource(data))


def test_a_deflated_file_is_read_the_slow_way_and_says_so() -> None:
    content = {"a": torch.randn(100), "b": torch.zeros(3, 4, dtype=torch.bfloat16), "c": torch.arange(20.0)[3:9:2]}
    data = rezipped(saved(content).data, lambda _, c: c, compression=zipfile.ZIP_DEFLATED)
    file = read_torch(CountingSource(data))
    assert not any(info.is_raw for info in file.infos)
    assert_same(values(file), content)
    assert any("compressed" in note and "'a'" not in note for note in file.notes)


def test_a_file_repacked_by_a_zip_tool_without_compression_stays_raw() -> None:
    content = {"a": torch.randn(100)}
    data = rezipped(saved(content).data, lambda _, c: c)
    file = read_torch(CountingSource(data))
    assert file.infos[0].is_raw
    assert_same(values(file), content)


def test_a_file_written_without_checksums_loads() -> None:
    content = {"a": torch.randn(100)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        source = saved(content)
    finally:
        torch.serialization.set_crc32_options(before)
    assert_same(values(read_torch(source)), content)


def test_offsets_beyond_four_gigabytes_are_torchs_own(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    # A sparse file: torch leaves the space for the data, and none is taken.
    with torch.serialization.skip_data():
        torch.save({n: torch.empty(3 << 30, dtype=torch.uint8) for n in "ab"} | {"c": torch.empty(5)}, path)
    reader = torch._C.PyTorchFileReader(str(path))
    offsets = [info.extents[0].offset for info in read_torch(FileSource(path)).infos]
    assert offsets == [reader.get_record_offset(f"data/{key}") for key in range(3)]
    assert offsets[2] > 1 << 32


def test_the_values_stay_after_the_weights_are_closed(tmp_path: Path) -> None:
    content = {"a": torch.randn(10), "v": torch.randn(10)[2:4]}
    torch.save(content, tmp_path / "m.pt")
    with TorchLoader().get_weights(str(tmp_path)) as weights:
        kept = dict(weights.items())
    assert_same(kept, content)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_view_reads_as_torch_would_index_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64]))
    tensor = random_of(dtype, *shape)
    for dim, size in enumerate(shape):
        start = data.draw(st.integers(0, size))
        tensor = tensor[
            (slice(None),) * dim + (slice(start, data.draw(st.integers(start, size)), data.draw(st.integers(1, 3))),)
        ]
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
    legacy = data.draw(st.booleans())
    assert_same(read({"t": tensor}, _use_new_zipfile_serialization=not legacy), {"t": tensor})


# ------------------------------------------------------------------ sparse, quantized and stranger tensors


def dense(rows: int = 4, columns: int = 6) -> torch.Tensor:
    tensor = torch.zeros(rows, columns)
    tensor[1, 2], tensor[3, 0], tensor[0, 5] = 1.5, -2.0, 3.25
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda t: t.to_sparse_bsr((2, 3)),
        lambda t: t.to_sparse_bsc((2, 3)),
        lambda t: t.to_sparse(1),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc", "hybrid"],
)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_sparse_tensors_are_made_dense_and_reported(make: Callable[[torch.Tensor], torch.Tensor], legacy: bool) -> None:
    content = {"sparse": make(dense()), "plain": torch.randn(3)}
    file = read_torch(saved(content, _use_new_zipfile_serialization=not legacy))
    assert_same(values(file), {"sparse": dense(), "plain": content["plain"]})
    assert any("sparse" in note and "made dense" in note for note in file.notes)


def test_sparse_indices_beyond_the_shape_are_refused_when_read() -> None:
    source = saved({"s": torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (2,))})
    data = rezipped(source.data, lambda n, c: struct.pack("<2q", 0, 1 << 40) if n.endswith("/data/0") else c)
    (info,) = read_torch(CountingSource(data)).infos
    with pytest.raises(CheckpointFormatError, match="'s'"):
        read_tensor(info)


def test_reading_sparse_tensors_leaves_nothing_for_torch_to_trip_over() -> None:
    source = saved({"s": dense().to_sparse()})
    with torch.sparse.check_sparse_tensor_invariants():
        read_torch(source)
        assert torch.equal(torch.load(io.BytesIO(source.data), weights_only=True)["s"].to_dense(), dense())


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_tensor_that_a_few_numbers_are_blown_up_to_is_refused_before_memory_is_asked_for(legacy: bool) -> None:
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (1 << 57,), check_invariants=True)
    large = {"expanded": torch.ones(1).expand(1 << 57), "sparse": sparse, "gigabyte": torch.ones(1).expand(1 << 28)}
    for name, tensor in large.items():
        source = saved({name: tensor}, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(CheckpointFormatError, match="too many for a file of") as refused:
            read_torch(source)
        assert (refused.value.tensor, refused.value.file) == (name, "memory.pt")
    # What each may, all may not together.
    with pytest.raises(CheckpointFormatError, match="too many for a file of"):
        read_torch(saved({f"e{i}": torch.ones(1).expand(1 << 20) for i in range(5)}))


def test_an_expanded_mask_is_read() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool).expand(2048, 2048)
    assert torch.equal(values(read_torch(saved({"mask": mask})))["mask"], mask)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_a_default_device_has_no_say_in_what_is_read(device: str, legacy: bool) -> None:
    content = {
        "sparse": dense().to_sparse(),
        "compressed": dense().to_sparse_csr(),
        "view": torch.arange(6.0).reshape(2, 3).t(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    source = saved(content, _use_new_zipfile_serialization=not legacy)
    with torch.device(device):
        found = {info.name: read_tensor(info) for info in read_torch(source).infos}
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    assert torch.equal(found["sparse"], dense())
    assert torch.equal(found["compressed"], dense())
    assert torch.equal(found["view"], content["view"])


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.quantize_per_tensor(dense(), 0.1, 0, torch.qint8), "quantized"),
        (
            lambda: torch.quantize_per_channel(
                dense(), torch.ones(4), torch.zeros(4, dtype=torch.long), 0, torch.quint8
            ),
            "quantized",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
    ],
    ids=["per tensor", "per channel", "nested", "meta"],
)
def test_a_tensor_without_raw_values_is_refused_by_name(make: Callable[[], Any], word: str, legacy: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = saved({"good": torch.ones(2), "layer.odd": make()}, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointFormatError, match=word) as caught:
        read_torch(source)
    assert caught.value.tensor == "layer.odd"
    assert caught.value.file == "memory.pt"


# ------------------------------------------------------------------ which state dict


def weights_of(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.randn(2, 2) for name in names}


@pytest.mark.parametrize(
    "wrapper",
    [
        "state_dict",
        "model_state_dict",
        "model",
        "module",
        "params",
        "weights",
        "ema",
        "params_ema",
        "network",
        "model_ema",
    ],
)
def test_a_known_wrapper_is_unwrapped(wrapper: str) -> None:
    inner = weights_of("a.weight", "a.bias")
    file = read_torch(saved({"epoch": 3, wrapper: inner, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}))
    assert_same(values(file), inner)
    assert file.key == wrapper
    notes = " ".join(file.notes)
    assert f"{wrapper!r}" in notes
    assert "epoch (an int)" in notes
    assert "optimizer (a dict)" in notes


def test_wrappers_within_wrappers_are_unwrapped() -> None:
    inner = weights_of("a.weight")
    assert_same(read({"model": {"state_dict": inner}}), inner)


def test_a_trainers_checkpoint_with_two_state_dicts_asks_which() -> None:
    content = {
        "epoch": 1,
        "state_dict": weights_of("a", "b"),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}}],
        "state_dict_ema": weights_of("module.a", "module.b"),
    }
    source = saved(content)
    with pytest.raises(AmbiguousSourceError) as caught:
        read_torch(source)
    message = str(caught.value)
    assert "'state_dict' (2 tensors)" in message
    assert "'state_dict_ema' (2 tensors)" in message
    assert "key=" in message
    assert_same(values(read_torch(source, key="state_dict_ema")), content["state_dict_ema"])


def test_one_dict_under_two_names_is_no_question() -> None:
    inner = weights_of("a")
    assert_same(read({"model": inner, "state_dict": inner}), inner)


def test_a_dotted_key_leads_to_a_nested_dict() -> None:
    content = {"nets": {"a": weights_of("w"), "b.c": weights_of("w", "v")}}
    assert_same(read(content, key="nets.a"), content["nets"]["a"])
    assert_same(read(content, key="nets.b.c"), content["nets"]["b.c"])


def test_a_key_that_leads_nowhere_names_what_there_is() -> None:
    with pytest.raises(OptionsError, match=r"key='ema'") as caught:
        read({"state_dict": weights_of("w")}, key="ema")
    assert "'state_dict'" in str(caught.value)


def test_a_key_that_leads_to_no_dict_is_refused() -> None:
    with pytest.raises(CheckpointFormatError, match="an int"):
        read({"state_dict": weights_of("w"), "epoch": 3}, key="epoch")


def test_nested_dicts_that_are_no_wrapper_are_explained() -> None:
    content = {"encoder": weights_of("w"), "decoder": weights_of("w", "v")}
    with pytest.raises(AmbiguousSourceError) as caught:
        read(content)
    assert "'encoder' (1 tensors)" in str(caught.value)
    assert "key='decoder'" in str(caught.value)


def test_megatrons_nested_model_is_explained_with_full_keys() -> None:
    with pytest.raises(AmbiguousSourceError, match=r"'model.language_model.encoder'"):
        read({"model": {"language_model": {"encoder": weights_of("w")}}, "iteration": 3})


def test_scalars_and_random_state_beside_a_wrapper_are_left_out() -> None:
    inner = weights_of("w")
    content = {"state_dict": inner, "step": torch.tensor(3.0), "rng_state": torch.get_rng_state(), "best": 0.5}
    file = read_torch(saved(content))
    assert_same(values(file), inner)
    assert "rng_state (a Tensor)" in " ".join(file.notes)


def test_weights_beside_a_wrapper_are_not_lost_silently() -> None:
    content = {"logits": torch.randn(4), "model": weights_of("w")}
    with pytest.raises(AmbiguousSourceError, match="'model'"):
        read(content)
    assert_same(read(content, key=""), {"logits": content["logits"]})


def test_other_values_in_a_state_dict_are_named() -> None:
    file = read_torch(saved({"w": torch.ones(2), "version": 3, "_extra_state": None, 7: torch.ones(1)}))
    assert [info.name for info in file.infos] == ["w"]
    note = " ".join(file.notes)
    assert "version (an int)" in note
    assert "_extra_state (a NoneType)" in note
    assert "7 (a Tensor)" in note


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([torch.ones(2)], "a list"),
        (torch.ones(2), "a Tensor"),
        ({}, "nothing in it"),
        ({"epoch": 3}, "'epoch'"),
        ({"optimizer": {"w": torch.ones(2)}}, "'optimizer'"),
        (3, "an int"),
    ],
    ids=["list", "tensor", "empty", "numbers", "optimizer", "int"],
)
def test_a_file_without_a_state_dict_says_what_it_holds(content: Any, what: str) -> None:
    with pytest.raises(CheckpointFormatError, match=what):
        read(content)


def test_a_dict_that_contains_itself_is_no_endless_search() -> None:
    content: dict[str, Any] = {"w": {"deep": 1}}
    content["self"] = content
    with pytest.raises(CheckpointFormatError, match="no tensors"):
        read(content)


# ------------------------------------------------------------------ safety


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


class System:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("evil", [Marker, System])
def test_a_malicious_pickle_never_runs(tmp_path: Path, evil: type, legacy: bool) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(2), "x": evil(marker)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsafeCheckpointError) as caught:
        TorchLoader().get_weights(str(tmp_path))
    assert str(path) in str(caught.value)
    assert not marker.exists()


def test_a_plain_pickle_is_not_opened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "model.pt").write_bytes(pickle.dumps({"w": Marker(marker)}))
    with pytest.raises(CheckpointFormatError, match=r"[Pp]ickle"):
        TorchLoader().get_weights(str(tmp_path))
    assert not marker.exists()


def test_os_functions_are_refused_even_when_admitted(tmp_path: Path) -> None:
    source = saved({"w": torch.ones(2), "x": System(tmp_path / "marker")})
    with pytest.raises(UnsafeCheckpointError):
        read_torch(source, safe_globals=[os.system])
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_unsafe_objects_are_named_with_the_way_to_admit_them(legacy: bool) -> None:
    content = {"state_dict": weights_of("w"), "args": argparse.Namespace(lr=0.1), "when": Path("x")}
    with pytest.raises(UnsafeCheckpointError) as caught:
        read(content, _use_new_zipfile_serialization=not legacy)
    assert "argparse.Namespace" in str(caught.value)
    assert "pathlib" in str(caught.value)
    assert "safe_globals=" in str(caught.value)


@pytest.mark.parametrize(
    "admit", [argparse.Namespace, "argparse:Namespace", (argparse.Namespace, "argparse.Namespace")]
)
def test_what_the_caller_trusts_is_admitted_and_left_out(admit: Any) -> None:
    content = {"state_dict": weights_of("w"), "args": argparse.Namespace(lr=0.1)}
    # torch keeps them as a set, whose order is nobody's promise.
    before = set(torch.serialization.get_safe_globals())
    file = read_torch(saved(content), safe_globals=[admit])
    assert_same(values(file), content["state_dict"])
    assert "args (a Namespace)" in " ".join(file.notes)
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("value", ["argparse:Namespace", argparse.Namespace])
def test_safe_globals_must_be_a_list(value: Any) -> None:
    with pytest.raises(OptionsError, match="safe_globals is a list"):
        TorchLoader(safe_globals=value)


def test_what_the_process_admits_already_stays_admitted() -> None:
    source = saved({"state_dict": weights_of("w"), "args": argparse.Namespace(lr=0.1)})
    with torch.serialization.safe_globals([argparse.Namespace]):
        read_torch(source)
        read_torch(source, safe_globals=[argparse.Namespace])
        assert argparse.Namespace in torch.serialization.get_safe_globals()


def test_what_one_file_admits_another_read_at_once_does_not() -> None:
    source = saved({"state_dict": weights_of("w"), "args": argparse.Namespace(lr=0.1)})
    outcomes: list[str] = []

    def run(safe_globals: list[Any], expected: type[Exception] | None) -> None:
        for _ in range(20):
            try:
                read_torch(source, safe_globals=safe_globals)
                outcomes.append("read" if expected is None else "wrongly read")
            except UnsafeCheckpointError:
                outcomes.append("wrongly refused" if expected is None else "refused")

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in ([[argparse.Namespace], None], [[], UnsafeCheckpointError])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(outcomes)) == ["read", "refused"]


@pytest.mark.parametrize("item", [3, "no_such_module:Name", "argparse:NoSuchName", "argparse"])
def test_safe_globals_that_are_none_are_refused(item: Any) -> None:
    with pytest.raises(OptionsError, match="safe_globals"):
        read_torch(saved({"w": torch.ones(1)}), safe_globals=[item])


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_whole_pickled_model_is_refused_with_the_way_to_save_it(legacy: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(UnsafeCheckpointError, match="whole pickled model") as caught:
        read_torch(saved(model, _use_new_zipfile_serialization=not legacy))
    assert "state_dict()" in str(caught.value)


def test_a_pickled_model_whose_classes_are_trusted_is_still_no_state_dict() -> None:
    trusted = [torch.nn.Sequential, torch.nn.Linear, OrderedDict, set]
    with pytest.raises(CheckpointFormatError, match="whole pickled model"):
        read_torch(saved(torch.nn.Sequential(torch.nn.Linear(2, 2))), safe_globals=trusted)


class Call:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def test_tensors_saved_from_a_device_without_storages_are_read_raw() -> None:
    """How torch pickles XLA tensors: as a CPU tensor, to be moved."""
    tensor = torch.randn(3)
    moved = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, tensor, torch.float32, "xla:0", False)
    file = read_torch(saved({"w": moved}))
    assert file.infos[0].is_raw
    assert_same(values(file), {"w": tensor})


def test_numpy_scalars_beside_the_weights_can_be_admitted_by_name() -> None:
    content = {"state_dict": weights_of("w"), "best": np.float64(0.5)}
    with pytest.raises(UnsafeCheckpointError, match="numpy"):
        read(content)
    names = ["numpy._core.multiarray:scalar", "numpy:dtype", "numpy.dtypes:Float64DType"]
    assert_same(values(read_torch(saved(content), safe_globals=names)), content["state_dict"])


@pytest.mark.parametrize("imported", [False, True])
def test_tensors_sharded_over_processes_are_refused_with_the_way_to_gather_them(imported: bool) -> None:
    """Importing their module makes torch admit their classes, for the whole process."""
    if imported:
        importlib.import_module("torch.distributed.tensor")
    source = zip_of(b"\x80\x02ctorch.distributed.tensor\nDTensor\n.")
    with pytest.raises(UnsafeCheckpointError, match="sharded over processes") as caught:
        read_torch(source)
    assert "full_state_dict" in str(caught.value)


GREEDY = {
    "a bytearray": lambda: Call(bytearray, 1 << 38),
    "a tensor": lambda: Call(torch.Tensor, 1 << 19, 1 << 19),
    "a storage": lambda: Call(torch.UntypedStorage, 1 << 38),
    "a bytearray in disguise": lambda: Call(torch._tensor._rebuild_from_type_v2, bytearray, bytearray, (1 << 38,), {}),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("what", GREEDY)
def test_a_small_file_cannot_ask_for_all_memory(what: str, legacy: bool) -> None:
    source = saved({"w": torch.ones(2), "x": GREEDY[what]()}, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointFormatError, match="more than it can hold"):
        read_torch(source)


def test_harmless_uses_of_what_can_allocate_are_read() -> None:
    tagged = torch.ones(2, 3)
    tagged.tag = "x"  # an attribute makes torch pickle the tensor's class beside it
    content = {"state_dict": {"w": tagged, "f8": torch.ones(4).to(torch.float8_e4m3fn)}, "blob": bytearray(b"abc")}
    assert_same(read(content), content["state_dict"])


def test_a_watched_file_is_not_refused_for_bytes_that_look_like_calls() -> None:
    """Memo numbers take every value, also those of the opcodes for calls, while a tensor's class is on the stack."""
    base = torch.randn(64, 64)
    for shift in range(24):
        tagged = {}
        for number in range(20):
            tagged[f"w{number}"] = base[1 + number :, 1:].view_as(base[1 + number :, 1:])
            tagged[f"w{number}"].tag = number
        content = {"state_dict": tagged, "other": [f"x{i}" for i in range(shift)]}
        reordered = dict(reversed(content.items()))
        assert_same(read(reordered), tagged)


P2 = b"\x80\x02"


def text(value: str) -> bytes:
    """The opcode that pushes a text."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def legacy_of(pickled: bytes) -> CountingSource:
    """A file as an old torch lays it out, without storages, around a pickle of one's own."""
    system = {"protocol_version": 1001, "little_endian": True}
    start = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, system))
    return CountingSource(start + pickled + pickle.dumps([], 2))


LAYOUTS = pytest.mark.parametrize("lay_out", [zip_of, legacy_of], ids=["zip", "legacy"])


@LAYOUTS
@pytest.mark.parametrize(
    "call",
    [
        b"ctorch\nFloatTensor\nK\x03K\x04\x86R",
        b"ctorch\nFloatTensor\nK\x03K\x04\x86\x81",
        b"ctorch\nTensor\nK\x03\x85R",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nTensor\nctorch\nTensor\nK\x03\x85}tR",
    ],
    ids=["call", "new", "plain", "in disguise"],
)
def test_a_tensor_of_a_size_alone_is_refused_for_the_file_has_no_bytes_for_it(
    lay_out: Callable[[bytes], CountingSource], call: bytes
) -> None:
    with pytest.raises(CheckpointFormatError, match="no data for the tensor 'weight'") as refused:
        read_torch(lay_out(P2 + b"}" + text("weight") + call + b"s."))
    assert refused.value.tensor == "weight"


def shared_lists(times: int, levels: int) -> bytes:
    """Pushes lists, each of which holds the one before so many times."""
    lists = b"]q\x00"
    for level in range(1, levels):
        lists += b"]q" + bytes([level]) + b"(" + (b"h" + bytes([level - 1])) * times + b"e"
    return lists


@LAYOUTS
@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (b"})" + b"\x85" * 200_000 + b"K\x01s.", "deep"),
        (b"})" + b"N\x86" * 200_000 + b"K\x01s.", "deep"),
        (b"}(" + b"(" * 200_000 + b"t" * 200_000 + b"K\x01u.", "deep"),
        (b"}(" + b")" + b"\x85" * 200_000 + b"K\x01u.", "deep"),
        (b"cbuiltins\nset\n])" + b"\x85" * 200_000 + b"a\x85R.", "deep"),
        (b"ccollections\nOrderedDict\n)R])" + b"\x85" * 200_000 + b"K\x01\x86ab.", "deep"),
        (b"(" + shared_lists(200, 8) + b"ccollections\nOrderedDict\nh\x07\x85Rt.", "without end"),
        (text("x" * 9999) + b"q\x00]("
         + (b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R") * 5000 + b"e.", "without end"),
        (b"](cbuiltins\nbytearray\nq\x00J" + struct.pack("<i", 20_000) + b"\x85q\x01" + b"h\x00h\x01R" * 5000
         + b"e.", "more than it can hold"),
        (b"cbuiltins\nbytearray\n(" + (b"\x8a\xff" + b"\x7f" * 255) * 2000 + b"tR.", "more than it can hold"),
        (b"}" + text("a") + b"c_codecs\nencode\n" + text("ü") + text("punycode") + b"\x86Rs.", "latin1"),
        (b"}" + text("a") + b"ctorch._tensor\n_rebuild_from_type_v2\n(c_codecs\nencode\nctorch\nTensor\n"
         + text("ü") + text("idna") + b"\x86}tRs.", "latin1"),
    ],
    ids=["key", "pairs", "marks", "keys", "set", "state", "lists", "encoded", "bytearrays",
         "product", "codec", "disguise"],
)  # fmt: skip
def test_a_pickle_that_costs_more_than_its_size_explains_is_refused_at_once(
    lay_out: Callable[[bytes], CountingSource], pickled: bytes, reason: str
) -> None:
    with pytest.raises(CheckpointFormatError, match=reason):
        read_torch(lay_out(P2 + pickled))


def test_a_key_that_is_no_name_is_told_by_its_kind_not_by_all_that_is_in_it() -> None:
    doubled = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(15))
    with pytest.raises(CheckpointFormatError, match="with a tuple") as refused:
        read_torch(zip_of(P2 + b"}(" + doubled + b"u."))
    assert len(str(refused.value)) < 500


def test_bytes_beside_the_weights_are_read() -> None:
    small = [(bytes([i]) * 3, bytearray([i]) * 2) for i in range(256)]  # memo numbers look like calls, too
    large = [bytes(range(256)) * 1000, bytearray(b"x" * 100_000)]
    content = {"small": small, "state_dict": {"w": torch.ones(2)}, "large": large}
    assert_same(read(content), content["state_dict"])


def deflated(**records: bytes) -> CountingSource:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in records.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", data)
    return CountingSource(out.getvalue())


@pytest.mark.parametrize(
    "records",
    [
        {"data_pkl": P2 + b"]" * (20 << 20) + b"."},
        {"data_pkl": pickle.dumps({}, 2), "byteorder": b"\x80" * (20 << 20)},
    ],
    ids=["pickle", "byte order"],
)
def test_a_small_file_that_unpacks_to_a_huge_record_is_refused_before_it_is_unpacked(records: dict[str, bytes]) -> None:
    with pytest.raises(CheckpointFormatError, match="make sense"):
        read_torch(deflated(**records))


def test_a_deflated_storage_is_unpacked_once_for_all_that_view_it() -> None:
    base = torch.arange(1000.0)
    content = {f"w{i}": base[i : i + 5] for i in range(50)}
    source = CountingSource(rezipped(saved(content).data, lambda _, c: c, compression=zipfile.ZIP_DEFLATED))
    file = read_torch(source)
    before = source.bytes_read
    assert_same(values(file), content)
    assert source.bytes_read - before < base.nbytes


@pytest.mark.parametrize("name", ["stride", "storage_offset", "untyped_storage", "is_conj", "detach", "clone"])
def test_attributes_that_are_called_like_methods_do_not_matter(name: str) -> None:
    tensor = torch.arange(6.0)[1:4]
    content = {"w": tensor.view_as(tensor)}
    arguments = (torch.arange(6.0).storage(), 1, (3,), (1,), False, OrderedDict())
    made = Call(
        torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, torch.Tensor, arguments, {name: 5}
    )
    assert_same(read({"w": made}), content)


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A sparse file of a terabyte, whose pickle breaks off within the name of a global."""
    path = tmp_path / "model.pt"
    header = saved({"w": torch.ones(1)}, _use_new_zipfile_serialization=False).data
    with path.open("wb") as file:
        file.write(header[: header.index(b"c", 20) + 3])
        file.truncate(1 << 40)
    with pytest.raises(SourceError):
        read_torch(FileSource(path))


# ------------------------------------------------------------------ damaged files


def storage_pickle(key: str, numel: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """A pickle of ``{"w": tensor}`` with claims of one's own."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if obj == "STORAGE" else None

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            return (
                torch._utils._rebuild_tensor_v2,
                ("STORAGE", offset, shape, strides, False, OrderedDict()),
            )

    out = io.BytesIO()
    Pickler(out, 2).dump({"w": Tensor()})
    return out.getvalue()


def test_the_hand_made_pickle_is_as_torch_reads_it() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    source = zip_of(storage_pickle("0", 6, (2, 3), (3, 1)), s0=data)
    assert torch.equal(values(read_torch(source))["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(torch.load(io.BytesIO(source.data), weights_only=True)["w"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (("0", 7, (7,), (1,)), "24 bytes for its storage '0', but its pickle says 28"),
        (("0", 5, (5,), (1,)), "24 bytes for its storage '0', but its pickle says 20"),
        (("0", 6, (7,), (1,)), "ends at byte 28 of a storage of 24"),
        (("0", 6, (2, 3), (4, 1)), "ends at byte 28 of a storage of 24"),
        (("0", 6, (6,), (1,), 1), "ends at byte 28 of a storage of 24"),
        (("1", 6, (6,), (1,)), "lacks the record of its storage '1'"),
        (("0", 1 << 55, (1 << 55,), (1,)), "storage '0'"),
        (("0", 1 << 62, (1 << 62,), (1,)), "storage|damaged"),
        (("0", 6, (1 << 61,), (0,)), "too many for a file"),
        (("0", -6, (1,), (1,)), "contradicts itself"),
    ],
    ids=["longer", "shorter", "beyond", "stride", "offset", "absent", "huge", "overflow", "expanded", "negative"],
)
def test_a_pickle_that_lies_about_its_storages_is_refused(claims: tuple[Any, ...], message: str) -> None:
    source = zip_of(storage_pickle(*claims), s0=np.arange(6, dtype="<f4").tobytes())
    with pytest.raises(CheckpointFormatError, match=message):
        read_torch(source)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    for legacy in (False, True):
        whole = saved({"a": torch.randn(50), "b": torch.randn(50)}, _use_new_zipfile_serialization=not legacy).data
        cuts = range(0, len(whole) - 1, 7)
        for cut in cuts:
            with pytest.raises(CheckpointFormatError):
                read_torch(CountingSource(whole[:cut]))


def test_an_empty_file_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointFormatError, match="empty"):
        TorchLoader().get_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4096\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>", "HTML"),
        (struct.pack("<Q", 2) + b"{}", "safetensors"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"\x01\x02\x03\x04" * 10, "no known format"),
    ],
    ids=["lfs", "html", "safetensors", "gguf", "garbage"],
)
def test_a_file_that_is_something_else_is_told_for_what_it_is(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=what) as caught:
        TorchLoader().get_weights(str(path))
    assert caught.value.file == str(path)


def test_a_numpy_archive_named_pt_is_told_for_what_it_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", w=np.ones(3))
    (tmp_path / "model.npz").rename(tmp_path / "model.pt")
    with pytest.raises(CheckpointFormatError, match="NumPy archive"):
        TorchLoader().get_weights(str(tmp_path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_program_is_told_for_what_it_is(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "model.pt")
    with pytest.raises(CheckpointFormatError, match="TorchScript"):
        TorchLoader().get_weights(str(tmp_path))


def test_another_pickle_protocol_is_refused_with_the_reason() -> None:
    with pytest.raises(CheckpointFormatError, match="protocol"):
        read_torch(saved({"w": torch.ones(2)}, pickle_protocol=4))


def test_two_records_of_one_name_are_refused() -> None:
    out = io.BytesIO(saved({"w": torch.ones(2)}).data)
    with warnings.catch_warnings(), zipfile.ZipFile(out, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("archive/data/0", b"\0" * 8)
    with pytest.raises(CheckpointFormatError, match="two records named 'archive/data/0'"):
        read_torch(CountingSource(out.getvalue()))


def edited_directory(data: bytes, name: str, field: int, packing: str, value: int) -> bytes:
    """The zip with one number of one central directory entry replaced."""
    at = data.rfind(b"PK\x01\x02", 0, data.rfind(name.encode()))
    return data[: at + field] + struct.pack(packing, value) + data[at + field + struct.calcsize(packing) :]


def test_records_that_overlap_are_refused() -> None:
    data = zip_of(storage_pickle("0", 6, (6,), (1,)), s0=bytes(24), s1=bytes(24)).data
    # The second storage's entry points at the first one's bytes, as zip bombs do.
    at = data.find(b"PK\x03\x04", data.find(b"archive/version"))
    renamed = data.replace(b"archive/data/1", b"archive/data/0")
    directory = renamed.rfind(b"archive/data/0")
    lying = renamed[:directory] + b"archive/data/0" + renamed[directory + 14 :]
    lying = edited_directory(lying, "archive/data/0", 42, "<I", at)
    with pytest.raises(SourceError, match=r"overlap|two records"):
        read_torch(CountingSource(lying))


def test_a_directory_entry_that_points_elsewhere_is_refused() -> None:
    data = zip_of(storage_pickle("0", 6, (6,), (1,)), s0=bytes(24)).data
    for value in (0, 5, len(data) - 4):
        with pytest.raises(SourceError, match=r"where the directory says|outside|overlap"):
            read_torch(CountingSource(edited_directory(data, "archive/data/0", 42, "<I", value)))


def test_a_stored_record_whose_sizes_disagree_is_refused() -> None:
    data = zip_of(storage_pickle("0", 6, (6,), (1,)), s0=bytes(24)).data
    with pytest.raises(CheckpointFormatError, match="claims 1000 bytes, but 24 are stored"):
        read_torch(CountingSource(edited_directory(data, "archive/data/0", 24, "<I", 1000)))


def test_an_encrypted_record_is_refused() -> None:
    data = zip_of(storage_pickle("0", 6, (6,), (1,)), s0=bytes(24)).data
    with pytest.raises(CheckpointFormatError, match="encrypted"):
        read_torch(CountingSource(edited_directory(data, "archive/data/0", 8, "<H", 1)))


def test_another_compression_is_refused() -> None:
    data = rezipped(saved({"w": torch.zeros(1000)}).data, lambda _, c: c, compression=zipfile.ZIP_BZIP2)
    with pytest.raises(CheckpointFormatError, match="method 12"):
        read_torch(CountingSource(data))


def test_a_pickle_that_unpacks_to_more_than_makes_sense_is_refused() -> None:
    data = rezipped(saved({"w": torch.zeros(4)}).data, lambda _, c: c, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointFormatError, match="impossible"):
        read_torch(CountingSource(edited_directory(data, "archive/data.pkl", 24, "<I", (1 << 32) - 2)))


def test_a_record_that_unpacks_to_another_size_is_refused_when_read() -> None:
    content = {"w": torch.randn(100)}
    data = rezipped(saved(content).data, lambda _, c: c, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointFormatError, match=r"404|unpack"):
        read_torch(CountingSource(edited_directory(data, "archive/data/0", 24, "<I", 404)))


def test_a_huge_pickle_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of 300 MB, of which the pickle is nearly all."""
    path = tmp_path / "model.pt"
    size = 300 << 20
    name = b"archive/data.pkl"
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, size, size, len(name), 0) + name
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, size, size, len(name), *[0] * 6) + name
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), len(local) + size, 0)
    with path.open("wb") as file:
        file.write(local)
        file.seek(size, os.SEEK_CUR)
        file.write(entry + end)
    with pytest.raises(CheckpointFormatError, match="at most"):
        TorchLoader().get_weights(str(path))


def test_a_directory_that_claims_a_huge_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(1 << 31)
        file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, (1 << 31) - 4, 4, 0))
    with pytest.raises(CheckpointFormatError):
        TorchLoader().get_weights(str(path))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_right_or_refused_by_our_own_error(data: st.DataObject) -> None:
    content = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int64)}
    whole = saved(content, _use_new_zipfile_serialization=data.draw(st.booleans())).data
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        for info in read_torch(CountingSource(bytes(damaged))).infos:
            read_tensor(info)
    except (SourceError, OptionsError):
        pass


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_any_pickle_is_refused_by_our_own_error_or_harmless(pickled: bytes) -> None:
    with pytest.raises(SourceError):
        read_torch(zip_of(b"\x80\x02" + pickled))


# ------------------------------------------------------------------ without torch's private parts


def test_without_torchs_unpickler_torch_load_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.randn(6, 4)
    content = {
        "state_dict": {
            "a": base,
            "t": base.t()[1:],
            "s": dense().to_sparse(),
            "c": torch.randn(2, dtype=torch.complex64).conj(),
        }
    }
    expected = {**content["state_dict"], "s": dense()}
    monkeypatch.setattr(torch_pickle, "Unpickler", None)
    for legacy in (False, True):
        path = tmp_path / "model.pt"
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        file = read_torch(FileSource(path))
        assert "loaded whole by torch.load" in " ".join(file.notes)
        assert_same(values(file), expected)
        assert_same(values(read_torch(CountingSource(path.read_bytes()))), expected)


def test_without_torchs_unpickler_nothing_runs_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "Unpickler", None)
    marker = tmp_path / "marker"
    for legacy in (False, True):
        source = saved({"w": torch.ones(2), "x": Marker(marker)}, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(UnsafeCheckpointError):
            read_torch(source)
        assert not marker.exists()


def test_without_torchs_unpickler_the_tensors_are_owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "Unpickler", None)
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    with TorchLoader().get_weights(str(tmp_path)) as weights:
        weights["a"].zero_()
        assert torch.equal(weights["a"], torch.ones(3))


def test_without_torchs_unpickler_quantized_tensors_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "Unpickler", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(dense(), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointFormatError, match="'q', which is quantized"):
        read({"q": quantized})


# ------------------------------------------------------------------ the loader


def test_a_folder_loads_its_one_file_and_leaves_trainer_files_alone(tmp_path: Path) -> None:
    content = weights_of("a", "b")
    torch.save(content, tmp_path / "pytorch_model.bin")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(pickle.dumps({"x": Marker(tmp_path / "marker")}))
    with TorchLoader().get_weights(str(tmp_path)) as weights:
        assert_same({name: weights[name] for name in content}, content)
        assert "training_args.bin" in weights.skipped_files
    assert not (tmp_path / "marker").exists()


def test_a_folder_with_only_trainer_files_has_no_weights(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "optimizer.pt")
    with pytest.raises(SourceNotFoundError):
        TorchLoader().get_weights(str(tmp_path))


def sharded(folder: Path, index: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    first, second = weights_of("a", "b"), weights_of("c")
    torch.save(first, folder / "pytorch_model-00001-of-00002.bin")
    torch.save(second, folder / "pytorch_model-00002-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 + (name == 'c')}-of-00002.bin" for name in "abc"}
    text = json.dumps({"metadata": {}, "weight_map": {**weight_map, **(index or {})}})
    (folder / "pytorch_model.bin.index.json").write_text(text)
    return {**first, **second}


def test_shards_load_by_their_index(tmp_path: Path) -> None:
    content = sharded(tmp_path)
    with TorchLoader().get_weights(str(tmp_path)) as weights:
        assert_same(dict(weights.items()), content)


def test_a_tensor_that_is_not_in_the_shard_the_index_names_is_an_error(tmp_path: Path) -> None:
    sharded(tmp_path, {"c": "pytorch_model-00001-of-00002.bin"})
    with pytest.raises(IncompleteCheckpointError, match="'c'"):
        TorchLoader().get_weights(str(tmp_path))


def test_a_key_counts_for_every_shard(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({"a": weights_of(f"w{number}"), "b": weights_of("x")}, tmp_path / f"part-{number}-of-2.pt")
    with TorchLoader(key="a").get_weights(str(tmp_path)) as weights:
        assert set(weights) == {"w1", "w2"}


def test_paths_with_blanks_and_other_scripts_load(tmp_path: Path) -> None:
    folder = tmp_path / "模型 ü #1"
    folder.mkdir()
    content = weights_of("größe")
    torch.save(content, folder / "模型 1.pt")
    with TorchLoader().get_weights(str(folder)) as weights:
        assert_same(dict(weights.items()), content)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="nowhere"):
        TorchLoader().get_weights(str(tmp_path / "nowhere"))


def test_probes_tell_by_names_and_first_bytes(tmp_path: Path) -> None:
    assert TorchLoader.probe(str(tmp_path)).answer == "no"
    torch.save(weights_of("a"), tmp_path / "optimizer.pt")
    assert TorchLoader.probe(str(tmp_path)).answer == "no"
    torch.save(weights_of("a"), tmp_path / "model.pth")
    assert TorchLoader.probe(str(tmp_path)).answer == "yes"
    assert TorchLoader.probe(str(tmp_path / "model.pth")).answer == "yes"
    (tmp_path / "model.pth").rename(tmp_path / "model.weird")
    assert TorchLoader.probe(str(tmp_path / "model.weird")).answer == "maybe"
    (tmp_path / "pointer.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert TorchLoader.probe(str(tmp_path / "pointer.bin")).answer == "maybe"
    (tmp_path / "notes.txt").write_text("hello")
    assert TorchLoader.probe(str(tmp_path / "notes.txt")).answer == "no"
    assert TorchLoader.probe(str(tmp_path / "nowhere")).answer == "no"
    assert TorchLoader.probe("org/name").answer == "no"


def test_many_tensors_are_catalogued_at_once() -> None:
    content = {f"layers.{i}.weight": torch.randn(2) for i in range(3000)}
    assert_same(read(content), content)
