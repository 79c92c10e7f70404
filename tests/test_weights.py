"""The catalogue of a source: what is known without reading, how it is read, and for how long."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import mmap
import os
import pickle
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders import open_weights
from weightloaders.errors import (
    CheckpointFormatError,
    DuplicateTensorError,
    LoaderContractError,
    SourceClosedError,
    SourceNotFoundError,
    SourceReadError,
    UnknownTensorError,
)
from weightloaders.weights.info import Extent, TensorInfo, contiguous_strides
from weightloaders.weights.reading import memory_of, read_tensor
from weightloaders.weights.safetensors import read_safetensors
from weightloaders.weights.source import MAX_OPEN_FILES, ByteSource, FileSource, close_files
from weightloaders.weights.weights import Stream, Weights, as_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POSIX_ONLY = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


class Memory(ByteSource):
    """Bytes in memory; notes each read."""

    def __init__(self, content: bytes, name: str = "memory") -> None:
        self.name = name
        self.content = content
        self.reads: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return len(self.content)

    @property
    def identity(self) -> int:
        return id(self)

    def read_into(self, view: memoryview, offset: int) -> None:
        self.reads.append((offset, len(view)))
        view[:] = self.content[offset : offset + len(view)]


def f32(*values: float, order: str = "<") -> bytes:
    return np.array(values, dtype=f"{order}f4").tobytes()


def open_file(path: Path) -> Weights:
    return Weights.describe(read_safetensors(FileSource(path)).infos)


def open_descriptors(path: Path) -> int:
    """How many descriptors of this process lead to a file."""
    return sum(os.path.realpath(link) == os.path.realpath(path) for link in Path("/proc/self/fd").iterdir())


# More than any machine can address.
TOO_MANY = 1 << 57


# ------------------------------------------------------------------ the catalogue


def test_the_catalogue_answers_without_reading_anything() -> None:
    source = Memory(f32(*range(6)))
    weights = Weights.describe([TensorInfo("a", torch.float32, (2, 3), Extent(source))])
    assert "a" in weights
    assert "b" not in weights
    assert list(weights) == list(weights.keys()) == ["a"]
    assert len(weights) == 1
    assert weights.info("a").shape == (2, 3)
    assert [info.nbytes for info in weights.infos()] == [weights.nbytes] == [24]
    assert "1 tensors" in repr(weights)
    assert len(weights.items()) == len(weights.values()) == 1
    assert weights != {"a": 1}
    assert weights == weights
    assert hash(weights) == hash(weights)
    assert source.reads == []


def test_only_the_tensor_that_is_asked_for_is_read() -> None:
    source = Memory(f32(*range(6)))
    weights = Weights.describe(
        [TensorInfo(name, torch.float32, (3,), Extent(source, offset)) for name, offset in (("a", 0), ("b", 12))]
    )
    assert weights["b"].tolist() == [3, 4, 5]
    assert source.reads == [(12, 12)]


def test_tensors_stream_in_storage_order_one_at_a_time() -> None:
    first, second = Memory(f32(*range(4)), "first"), Memory(f32(*range(4)), "second")
    infos = [
        TensorInfo("late", torch.float32, (1,), Extent(first, 12)),
        TensorInfo("other", torch.float32, (1,), Extent(second, 8)),
        TensorInfo("computed", torch.float32, (1,), read=lambda: torch.ones(1)),
        TensorInfo("early", torch.float32, (1,), Extent(first, 4)),
    ]
    weights = Weights.describe(infos)
    assert list(weights) == ["early", "late", "other", "computed"]
    items = iter(weights.items())
    assert next(items)[0] == "early"
    assert first.reads == [(4, 4)], "no tensor is read before its turn"
    assert [name for name, _ in items] == ["late", "other", "computed"]
    assert [value.item() for value in weights.values()] == [1, 3, 2, 1]


def test_a_tensor_handed_out_is_owned_and_outlives_the_source(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.arange(1000.0)}, path)
    with open_file(path) as weights:
        one, two = weights["a"], weights["a"]
        one += 1
        assert torch.equal(two, torch.arange(1000.0)), "two readings do not share memory"
    path.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    assert torch.equal(one, torch.arange(1000.0) + 1)
    assert torch.equal(two, torch.arange(1000.0))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_nothing_stays_open_or_mapped_after_close(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1000), "b": torch.ones(3)}, path)
    weights = open_file(path)
    dict(weights.items())
    assert open_descriptors(path) == 1
    assert str(path) not in Path("/proc/self/maps").read_text()
    weights.close()
    assert open_descriptors(path) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_closing_while_another_thread_reads_lets_it_finish_and_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1000)}, path)
    source = FileSource(path)
    weights = Weights.describe(read_safetensors(source).infos)
    from weightloaders.weights import source as module

    with module._open_files.use(source) as descriptor:
        weights.close()
        assert os.pread(descriptor, 8, 0) == path.read_bytes()[:8]
    assert open_descriptors(path) == 0


def test_after_close_the_catalogue_still_answers_and_reading_is_refused(tmp_path: Path) -> None:
    closed: list[int] = []
    source = Memory(f32(1))
    infos = [TensorInfo("a", torch.float32, (1,), Extent(source)), TensorInfo("r", torch.int8, (1,), read=lambda: None)]
    weights = Weights.describe(infos, close=lambda: closed.append(1))
    with weights as same:
        assert same is weights
    weights.close()
    assert closed == [1], "the second close does nothing"
    assert weights.closed
    assert weights.info("a").shape == (1,)
    assert "closed" in repr(weights)
    for read in (
        lambda: weights["a"],
        lambda: weights["r"],
        lambda: list(weights.items()),
        lambda: list(weights.values()),
    ):
        with pytest.raises(SourceClosedError):
            read()
    assert source.reads == []


def test_closing_from_many_threads_closes_once() -> None:
    closed: list[int] = []
    weights = Weights.describe([], close=lambda: closed.append(1))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: weights.close(), range(64)))
    assert closed == [1]


def test_an_unknown_name_is_our_own_error_and_get_gives_the_default() -> None:
    weights = Weights.describe([])
    with pytest.raises(UnknownTensorError, match="layer"):
        weights["layer.0"]
    with pytest.raises(UnknownTensorError):
        weights.info("layer.0")
    assert weights.get("layer.0") is None


def test_one_name_twice_is_refused_with_its_file() -> None:
    source = Memory(f32(1, 2), "shard-2")
    with pytest.raises(DuplicateTensorError) as refused:
        Weights.describe([TensorInfo("a", torch.float32, (1,), Extent(source, offset)) for offset in (0, 4)])
    assert refused.value.tensor == "a"
    assert refused.value.file == "shard-2"


def test_what_is_no_description_is_refused() -> None:
    with pytest.raises(LoaderContractError, match="tuple"):
        Weights.describe([("a", torch.ones(1))])  # type: ignore[list-item]


# ------------------------------------------------------------------ dicts and iterables


def test_a_dict_is_wrapped_without_copying_and_what_is_handed_out_is_a_copy() -> None:
    tensor = torch.nn.Parameter(torch.arange(3.0))
    weights = as_weights({"a": tensor})
    assert isinstance(weights, Weights)
    handed_out = weights["a"]
    assert torch.equal(handed_out, tensor)
    assert not handed_out.requires_grad
    assert handed_out.grad_fn is None
    handed_out.zero_()
    assert tensor.tolist() == [0, 1, 2]
    assert weights.info("a").read().data_ptr() == tensor.data_ptr(), "the engine can read it in place"


def test_weights_and_streams_are_taken_as_they_are() -> None:
    weights, stream = Weights.describe([]), Stream([])
    assert as_weights(weights) is weights
    assert as_weights(stream) is stream


def test_an_iterable_is_streamed_and_advanced_only_as_far_as_it_is_used() -> None:
    made: list[int] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(10):
            made.append(i)
            yield f"w{i}", torch.full((1,), float(i))

    stream = as_weights(pairs())
    assert isinstance(stream, Stream)
    assert made == []
    iterator = iter(stream)
    assert [next(iterator)[0] for _ in range(3)] == ["w0", "w1", "w2"]
    assert made == [0, 1, 2]
    assert len(list(iterator)) == 7


def test_a_mapping_that_reads_on_access_is_streamed_not_gathered() -> None:

    from collections.abc import Mapping

    class OnAccess(Mapping[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads += 1
            return torch.ones(1)

        def __iter__(self) -> Iterator[str]:
            return iter("abc")

        def __len__(self) -> int:
            return 3

    mapping = OnAccess()
    stream = as_weights(mapping)
    assert isinstance(stream, Stream)
    assert mapping.reads == 0
    next(iter(stream))
    assert mapping.reads == 1


def test_borrowed_is_passed_on() -> None:
    assert as_weights(iter([]), borrowed=True).borrowed
    assert not as_weights(iter([])).borrowed


@pytest.mark.parametrize("value", [None, 3, "path", b"bytes", torch.ones(2), object()], ids=lambda v: type(v).__name__)
def test_what_is_no_weights_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(LoaderContractError, match=type(value).__name__):
        as_weights(value)


@pytest.mark.parametrize("entry", [("a", 3), (3, torch.ones(1)), ("state_dict", {"a": torch.ones(1)})], ids=repr)
def test_a_dict_of_something_else_is_refused(entry: tuple[Any, Any]) -> None:
    with pytest.raises(LoaderContractError, match="state"):
        as_weights(dict([entry]))


@pytest.mark.parametrize("pair", ["ab", 3, ("a",), ("a", 3), (3, torch.ones(1)), ("a", torch.ones(1), 0)], ids=repr)
def test_a_stream_of_something_else_is_refused_when_it_comes(pair: Any) -> None:
    iterator = iter(as_weights([("good", torch.ones(1)), pair]))
    next(iterator)
    with pytest.raises(LoaderContractError, match="pairs"):
        next(iterator)


def without_values() -> dict[str, torch.Tensor]:
    return {
        "meta": torch.ones(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }


@pytest.mark.parametrize("kind", without_values())
def test_a_tensor_without_plain_values_is_refused_by_name(kind: str) -> None:
    tensor = without_values()[kind]
    with pytest.raises(LoaderContractError, match=f"'layer.w' is .*{kind}") as refused:
        as_weights({"good": torch.ones(1), "layer.w": tensor})
    assert refused.value.tensor == "layer.w"
    stream = iter(as_weights([("good", torch.ones(1)), ("layer.w", tensor)]))
    next(stream)
    with pytest.raises(LoaderContractError, match=f"'layer.w' is .*{kind}"):
        next(stream)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_made_dense_when_it_is_read_and_that_is_noted(layout: torch.layout) -> None:
    dense = torch.eye(3)
    sparse = dense.to_sparse(layout=layout).requires_grad_()
    weights = as_weights({"plain": torch.ones(1), "layer.w": sparse})
    assert isinstance(weights, Weights)
    assert weights.info("layer.w").shape == (3, 3)
    assert [note for note in weights.notes if "sparse" in note and "'layer.w'" in note and "plain" not in note]
    for read in (weights["layer.w"], read_tensor(weights.info("layer.w")), dict(as_weights([("w", sparse)]))["w"]):
        assert read.layout is torch.strided
        assert not read.requires_grad
        assert torch.equal(read, dense)
    assert as_weights({"plain": torch.ones(1)}).notes == ()


# ------------------------------------------------------------------ memory


def lacking_memory() -> dict[str, Callable[[], object]]:
    data = Memory(f32(1), "few.bin")
    expanded = torch.ones(1).expand(TOO_MANY)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (TOO_MANY,), check_invariants=True)
    one = (Extent(data, 0, 4, shape=(TOO_MANY,), strides=(0,)),)
    two = (Extent(data, shape=(1,), at=(0,)), Extent(data, 0, 4, shape=(TOO_MANY - 1,), strides=(0,), at=(1,)))
    return {
        "an extent": lambda: Weights.describe([TensorInfo("w", torch.float32, (TOO_MANY,), one)])["w"],
        "two extents": lambda: Weights.describe([TensorInfo("w", torch.float32, (TOO_MANY,), two)])["w"],
        "a function": lambda: Weights.describe([TensorInfo("w", torch.float32, (2,), read=expanded.clone)])["w"],
        "a tensor of a dict": lambda: as_weights({"w": expanded})["w"],  # type: ignore[index]
        "a sparse tensor of a dict": lambda: as_weights({"w": sparse})["w"],  # type: ignore[index]
        "a sparse tensor of a stream": lambda: list(as_weights([("w", sparse)])),
    }


@pytest.mark.parametrize("way", lacking_memory())
def test_a_tensor_for_which_there_is_no_memory_is_named_with_its_size(way: str) -> None:
    with pytest.raises(SourceReadError, match=r"not enough memory for tensor 'w', which takes [\d,]+ bytes") as refused:
        lacking_memory()[way]()
    assert refused.value.tensor == "w"
    assert "extent" not in way or refused.value.file == "few.bin"


def test_an_error_that_has_nothing_to_do_with_memory_is_handed_on_as_it_is() -> None:
    error = RuntimeError("the format is broken")

    def read() -> torch.Tensor:
        raise error

    with pytest.raises(RuntimeError) as raised:
        Weights.describe([TensorInfo("w", torch.float32, (2,), read=read)])["w"]
    assert raised.value is error


@pytest.fixture(params=["a with statement", "for good"])
def another_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever uses the library has set another default device, and another default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        if request.param == "for good":
            torch.set_default_device("meta")
            yield
        else:
            with torch.device("meta"):
                yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("another_default")
def test_default_device_and_dtype_have_no_say_in_what_is_read() -> None:
    data = Memory(f32(1, 2, 3, 4) + np.array([5], ">f4").tobytes())
    infos = [
        TensorInfo("plain", torch.float32, (4,), Extent(data)),
        TensorInfo("strided", torch.float32, (2,), Extent(data, strides=(2,))),
        TensorInfo("cast", torch.float16, (4,), Extent(data, dtype=torch.float32)),
        TensorInfo("swapped", torch.float32, (), Extent(data, 16, byteorder="big")),
        TensorInfo("pieces", torch.float32, (2,), [Extent(data, at=(i,), shape=(1,), offset=4 * i) for i in (0, 1)]),
    ]
    for name, tensor in Weights.describe(infos).items():
        assert tensor.device.type == "cpu", name
        assert tensor.dtype is (torch.float16 if name == "cast" else torch.float32)
    assert {name: tensor.tolist() for name, tensor in Weights.describe(infos).items()} == {
        "plain": [1, 2, 3, 4],
        "strided": [1, 3],
        "cast": [1, 2, 3, 4],
        "swapped": 5,
        "pieces": [1, 2],
    }


# ------------------------------------------------------------------ tensors that are read by a function


def test_a_borrowed_buffer_is_copied_before_it_is_reused() -> None:
    buffer = torch.zeros(2)

    def reader(value: float) -> Any:
        return lambda: buffer.fill_(value)

    infos = [TensorInfo(name, torch.float32, (2,), read=reader(i)) for i, name in enumerate("abc")]
    weights = Weights.describe(infos, borrowed=True)
    assert {name: tensor.tolist() for name, tensor in dict(weights.items()).items()} == {
        "a": [0, 0],
        "b": [1, 1],
        "c": [2, 2],
    }


@pytest.mark.parametrize(
    "returned", [torch.ones(3), torch.ones(2).half(), torch.ones(2, device="meta"), [1.0, 2.0], None], ids=repr
)
def test_a_read_that_returns_something_else_than_described_is_refused(returned: Any) -> None:
    weights = Weights.describe([TensorInfo("t", torch.float32, (2,), read=lambda: returned)])
    with pytest.raises(LoaderContractError) as refused:
        weights["t"]
    assert refused.value.tensor == "t"


def test_reads_that_are_not_ours_are_called_one_at_a_time() -> None:
    busy = threading.Lock()

    def read() -> torch.Tensor:
        assert busy.acquire(blocking=False), "two at once"
        try:
            return torch.ones(1)
        finally:
            busy.release()

    weights = Weights.describe([TensorInfo(str(i), torch.float32, (1,), read=read) for i in range(200)])
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda name: weights[name].item(), weights)) == 200


# ------------------------------------------------------------------ extents


def test_big_endian_values_are_turned_round() -> None:
    for dtype, numpy_dtype in (
        (torch.float32, ">f4"),
        (torch.float16, ">f2"),
        (torch.int64, ">i8"),
        (torch.uint16, ">u2"),
        (torch.complex64, ">c8"),
        (torch.uint8, ">u1"),
    ):
        values = np.array([[1, 2, 3], [4, 5, 250]], dtype=numpy_dtype)
        source = Memory(b"head" + values.tobytes())
        info = TensorInfo("t", dtype, (2, 3), Extent(source, 4, byteorder="big"))
        assert Weights.describe([info])["t"].tolist() == values.tolist()
        column = TensorInfo("t", dtype, (2,), Extent(source, 4 + dtype.itemsize, byteorder="big", strides=(3,)))
        assert Weights.describe([column])["t"].tolist() == values[:, 1].tolist()


def test_values_stored_in_another_dtype_are_converted() -> None:
    source = Memory(torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    info = TensorInfo("t", torch.float32, (2,), Extent(source, dtype=torch.bfloat16))
    tensor = Weights.describe([info])["t"]
    assert tensor.dtype is torch.float32
    assert tensor.tolist() == [1.5, -2.0]
    assert (info.nbytes, info.bytes_stored) == (8, 4)


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((3, 4), (1, 3), 0),
        ((4,), (3,), 2),
        ((2, 3), (6, 2), 1),
        ((3, 2), (0, 1), 5),
        ((1, 3), (99, 1), 4),
        ((0, 3), (5, 1), 2),
    ],
    ids=str,
)
def test_strided_extents_read_as_numpy_strides_do(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    stored = np.arange(12, dtype="<f4")
    expected = np.lib.stride_tricks.as_strided(stored[offset:], shape, [4 * s for s in strides])
    source = Memory(stored.tobytes())
    info = TensorInfo("t", torch.float32, shape, Extent(source, 4 * offset, strides=strides))
    tensor = Weights.describe([info])["t"]
    assert tensor.tolist() == expected.tolist()
    assert tensor.is_contiguous()
    if source.reads:
        assert source.reads[0][1] == info.bytes_stored <= 48 - 4 * offset, "no byte behind the last element is read"


def test_several_extents_fill_one_tensor() -> None:
    left, right = Memory(f32(0, 1, 4, 5), "left"), Memory(f32(6, 2, 7, 3, order=">"), "right")
    extents = (
        Extent(left, shape=(2, 2), at=(0, 0)),
        Extent(right, 4, shape=(1, 2), at=(0, 2), strides=(9, 2), byteorder="big"),
        Extent(right, shape=(1, 2), at=(1, 2), strides=(9, 2), byteorder="big"),
    )
    info = TensorInfo("t", torch.float32, (2, 4), extents)
    assert Weights.describe([info])["t"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert info.bytes_stored == 16 + 12 + 12


def test_extents_may_lie_in_several_files_in_several_dtypes() -> None:
    halves = (
        Extent(Memory(np.array([1, 2], "<f2").tobytes()), dtype=torch.float16, shape=(2,), at=(0,)),
        Extent(Memory(np.array([3, 4], "<f8").tobytes()), dtype=torch.float64, shape=(2,), at=(2,)),
    )
    assert Weights.describe([TensorInfo("t", torch.float32, (4,), halves)])["t"].tolist() == [1, 2, 3, 4]


def test_a_path_will_do_as_a_source(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(f32(7, 8))
    for path in (tmp_path / "raw.bin", str(tmp_path / "raw.bin")):
        assert Weights.describe([TensorInfo("t", torch.float32, (2,), [Extent(path)])])["t"].tolist() == [7, 8]


def test_empty_tensors_need_no_bytes() -> None:
    source = Memory(b"")
    shapes = {"no extent": (0, 3), "dense": (3, 0), "a view from anywhere": (2, 0)}
    extents = {"dense": Extent(source), "a view from anywhere": Extent(source, 999, strides=(7, 3))}
    infos = [TensorInfo(name, torch.int8, shape, extents.get(name, ())) for name, shape in shapes.items()]
    assert {name: tuple(tensor.shape) for name, tensor in Weights.describe(infos).items()} == shapes
    assert source.reads == []


@pytest.mark.parametrize("tensor", [torch.ones(2, 3).t(), torch.ones(2, device="meta")], ids=["strided", "meta"])
def test_the_memory_of_a_tensor_that_has_none_is_refused_and_never_touched(tensor: torch.Tensor) -> None:
    with pytest.raises(LoaderContractError):
        memory_of(tensor)


SOURCE = Memory(bytes(48), "file.bin")

LIES = {
    "beyond the end": lambda: TensorInfo("t", torch.float32, (13,), Extent(SOURCE)),
    "offset beyond the end": lambda: TensorInfo("t", torch.float32, (1,), Extent(SOURCE, 48)),
    "negative offset": lambda: TensorInfo("t", torch.float32, (1,), Extent(SOURCE, -4)),
    "too few bytes": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, 0, 8)),
    "too many bytes": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, 0, 16)),
    "strides beyond its length": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, 0, 12, strides=(2,))),
    "strides beyond the end": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, strides=(6,))),
    "negative stride": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, 8, strides=(-1,))),
    "box outside": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, shape=(2,), at=(2,))),
    "box before": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, shape=(3,), at=(-1,))),
    "negative box": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, shape=(-1,))),
    "box too small": lambda: TensorInfo("t", torch.float32, (3,), Extent(SOURCE, shape=(2,))),
    "overlap": lambda: TensorInfo(
        "t", torch.float32, (4,), [Extent(SOURCE, shape=(3,)), Extent(SOURCE, shape=(1,), at=(2,))]
    ),
    "overlap in two dimensions": lambda: TensorInfo(
        "t", torch.int8, (2, 2), [Extent(SOURCE, shape=(2, 1)), Extent(SOURCE, shape=(1, 2), at=(1, 0))]
    ),
    "hole": lambda: TensorInfo(
        "t", torch.float32, (4,), [Extent(SOURCE, shape=(1,)), Extent(SOURCE, shape=(1,), at=(2,))]
    ),
    "negative size": lambda: TensorInfo("t", torch.float32, (2, -1)),
    "absurd size": lambda: TensorInfo("t", torch.float32, (1 << 40, 1 << 40), read=lambda: None),
    "absurd size of nothing": lambda: TensorInfo("t", torch.float32, (0, 1 << 40, 1 << 40)),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_extent_that_cannot_be_is_refused_with_tensor_and_file(lie: str) -> None:
    with pytest.raises(CheckpointFormatError) as refused:
        LIES[lie]()
    assert refused.value.tensor == "t"
    if "size" not in lie:
        assert refused.value.file == "file.bin"


MISTAKES = {
    "no name": lambda: TensorInfo(3, torch.float32, ()),  # type: ignore[arg-type]
    "dtype as text": lambda: TensorInfo("t", "float32", ()),  # type: ignore[arg-type]
    "shape of floats": lambda: TensorInfo("t", torch.float32, (2.0,)),  # type: ignore[arg-type]
    "shape is a number": lambda: TensorInfo("t", torch.float32, 3),  # type: ignore[arg-type]
    "nothing to read": lambda: TensorInfo("t", torch.float32, (2,)),
    "read is no function": lambda: TensorInfo("t", torch.float32, (2,), read=torch.ones(2)),  # type: ignore[arg-type]
    "extents are paths": lambda: TensorInfo("t", torch.float32, (2,), ["file.bin"]),  # type: ignore[list-item]
    "extents are none": lambda: TensorInfo("t", torch.float32, (2,), None),  # type: ignore[arg-type]
    "source is bytes": lambda: Extent(b"bytes"),  # type: ignore[arg-type]
    "byteorder": lambda: Extent(SOURCE, byteorder="middle"),  # type: ignore[arg-type]
    "offset": lambda: Extent(SOURCE, 1.5),  # type: ignore[arg-type]
    "stored dtype": lambda: Extent(SOURCE, dtype="f4"),  # type: ignore[arg-type]
    "strides": lambda: Extent(SOURCE, strides=(1.0,)),  # type: ignore[arg-type]
    "dimensions": lambda: TensorInfo("t", torch.float32, (2,), Extent(SOURCE, shape=(1, 2))),
    "dtype not known yet": lambda: Extent(SOURCE).stored_dtype,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_description_of_the_wrong_types_is_the_authors_error(mistake: str) -> None:
    with pytest.raises(LoaderContractError):
        MISTAKES[mistake]()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_any_view_of_a_stored_tensor_reads_as_torch_views_it(sizes: list[int], data: st.DataObject) -> None:
    whole = torch.arange(max(1, torch.Size(sizes).numel()), dtype=torch.int32).reshape(sizes)
    view = whole.permute(data.draw(st.permutations(range(len(sizes)))))
    for dim, size in enumerate(view.shape):
        start = data.draw(st.integers(0, size))
        view = view.narrow(dim, start, data.draw(st.integers(0, size - start)))
    source = Memory(whole.numpy().tobytes())
    info = TensorInfo("v", torch.int32, view.shape, Extent(source, 4 * view.storage_offset(), strides=view.stride()))
    assert torch.equal(Weights.describe([info])["v"], view)
    assert contiguous_strides(sizes) == whole.stride()


def test_descriptions_can_be_renamed_copied_and_sent_to_another_process(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(f32(7, 8))
    info = TensorInfo("t", torch.float32, (2,), Extent(tmp_path / "raw.bin"))
    for again in (info.renamed("u"), copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert again.extents[0].length == 8
        assert Weights.describe([again])[again.name].tolist() == [7, 8]
    assert info.renamed("u").name == "u"
    with pytest.raises(AttributeError):
        info.name = "other"  # type: ignore[misc]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_boxes_are_accepted_just_where_they_fill_their_tensor_once(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    edges = [[0, *sorted(data.draw(st.sets(st.integers(1, 3), max_size=2))), size] for size in shape]
    # A grid of boxes, of which some may then be moved, or be there once more.
    spans = [
        [(a, max(0, min(b, size) - a)) for a, b in itertools.pairwise(e)] for e, size in zip(edges, shape, strict=True)
    ]
    boxes = [list(box) for box in itertools.product(*spans)]
    for _ in range(data.draw(st.integers(0, 2))):
        box, dim = data.draw(st.sampled_from(boxes)), data.draw(st.integers(0, dims - 1))
        begin, size = box[dim]
        moved = [*box[:dim], (max(0, begin + data.draw(st.integers(-1, 1))), size), *box[dim + 1 :]]
        boxes = data.draw(st.sampled_from([[*boxes, moved], [moved if b is box else b for b in boxes]]))
    within = all(begin + size <= whole for box in boxes for (begin, size), whole in zip(box, shape, strict=True))
    filled = [cell for box in boxes for cell in itertools.product(*(range(begin, begin + size) for begin, size in box))]
    source = Memory(bytes(4 * math.prod(shape)))
    extents = [Extent(source, shape=[n for _, n in box], at=[begin for begin, _ in box]) for box in boxes]
    if within and len(filled) == len(set(filled)) == math.prod(shape):
        TensorInfo("w", torch.float32, shape, extents)
    else:
        with pytest.raises(CheckpointFormatError):
            TensorInfo("w", torch.float32, shape, extents)


# ------------------------------------------------------------------ files


def test_a_header_only_sparse_file_of_a_terabyte_is_catalogued(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[1048576,262144],"data_offsets":[0,1099511627776]}}'
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + (1 << 40))
        except OSError:
            pytest.skip("no sparse files of that size here")
    weights = open_file(path)
    assert weights.nbytes == 1 << 40
    last = Extent(path, 8 + len(header) + (1 << 40) - 8)
    assert Weights.describe([TensorInfo("end", torch.float32, (2,), last)])["end"].tolist() == [0, 0]


FEW_DESCRIPTORS = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from weightloaders.weights.reading import memory_of, read_tensor
from weightloaders.weights.safetensors import read_safetensors
from weightloaders.weights.source import FileSource
from weightloaders.weights.weights import Weights

paths = sorted(Path(sys.argv[1]).glob("*.safetensors"))
infos = [info for path in paths for info in read_safetensors(FileSource(path)).infos]
spare = int(sys.argv[2])
limit = max(int(p.name) for p in Path("/proc/self/fd").iterdir()) + 1 + spare
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
with Weights.describe(infos) as weights, ThreadPoolExecutor(4) as pool:
    for _ in range(3):
        assert sum(pool.map(lambda name: weights[name].item(), weights)) == sum(range(len(paths)))
print(len(paths))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("spare", [MAX_OPEN_FILES + 4, 6], ids=["as many as are kept", "fewer than are kept"])
def test_a_hundred_files_are_read_under_a_low_limit_of_descriptors(tmp_path: Path, spare: int) -> None:
    for i in range(100):
        safetensors.torch.save_file({f"w{i}": torch.tensor([i])}, tmp_path / f"{i}.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, tmp_path, str(spare)], check=False, capture_output=True, text=True
    )
    assert done.stdout.strip() == "100", done.stderr


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_open_descriptors_are_bounded(tmp_path: Path) -> None:
    close_files()
    alive = []
    for i in range(MAX_OPEN_FILES * 2):
        safetensors.torch.save_file({"w": torch.tensor([i])}, tmp_path / f"{i}.safetensors")
        alive.append(open_file(tmp_path / f"{i}.safetensors"))
        assert alive[i]["w"].item() == i
    assert sum(open_descriptors(path) for path in tmp_path.iterdir()) == MAX_OPEN_FILES


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_weights_that_are_dropped_unclosed_leave_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path)
    weights = open_file(path)
    tensor = weights["w"]
    assert open_descriptors(path) == 1
    del weights
    assert open_descriptors(path) == 0
    assert tensor.tolist() == [1, 1, 1]
    # The garbage collector's turn, in whatever thread, while others read.
    circle: list[Any] = [open_file(path)]
    circle.append(circle)
    assert circle[0]["w"].tolist() == [1, 1, 1]
    del circle
    gc.collect()
    assert open_descriptors(path) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_file_stays_open_for_whoever_else_still_reads_from_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path)
    first, second = open_file(path), open_file(path)
    assert first["w"].tolist() == second["w"].tolist()
    # Its name is gone, so that it can't be opened again.
    before = Weights.describe(first.infos())
    path.rename(tmp_path / "moved")
    del first
    assert second["w"].tolist() == [1, 1, 1]
    del second
    assert before["w"].tolist() == [1, 1, 1]
    del before
    assert open_descriptors(tmp_path / "moved") == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_file_is_closed_with_the_weights_also_where_no_tensor_lies_raw_in_it(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": torch.eye(3).to_sparse()}, path)
    with open_weights(path) as weights:
        assert torch.equal(weights["w"], torch.eye(3))
        assert open_descriptors(path) == 1
    assert open_descriptors(path) == 0


def test_many_threads_may_drop_weights_while_others_read(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")

    def use(_: int) -> float:
        # In a circle, so that it is for the garbage collector, which begins anywhere.
        circle: list[Any] = [open_file(tmp_path / "x.safetensors")]
        circle.append(circle)
        return circle[0]["w"].sum().item()

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(use, range(400))) == {3.0}
    finally:
        gc.set_threshold(*before)


def test_many_threads_read_one_file_at_once(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((5000,), i) for i in range(64)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    weights = open_file(tmp_path / "x.safetensors")
    with ThreadPoolExecutor(8) as pool:
        for name, tensor in pool.map(lambda name: (name, weights[name]), list(weights) * 4):
            assert torch.equal(tensor, tensors[name])


@POSIX_ONLY
@pytest.mark.parametrize("lacking", [["preadv"], ["preadv", "pread"]], ids=["no preadv", "no pread either"])
def test_systems_without_positioned_reads_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: list[str]
) -> None:
    for name in lacking:
        monkeypatch.delattr(os, name, raising=False)
    tensors = {f"w{i}": torch.full((5000,), i) for i in range(16)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    weights = open_file(tmp_path / "x.safetensors")
    with ThreadPoolExecutor(4) as pool:
        for name, tensor in pool.map(lambda name: (name, weights[name]), list(weights) * 4):
            assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("read_first", [False, True], ids=["never opened", "open already"])
@pytest.mark.parametrize("change", ["rewritten in place", "shortened", "grown"])
def test_a_file_that_was_changed_after_it_was_catalogued_is_refused(
    tmp_path: Path, change: str, read_first: bool
) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(10), "b": torch.ones(10)}, path)
    weights = open_file(path)
    if read_first:
        weights["a"]
    content = path.read_bytes()
    content = {"rewritten in place": content, "shortened": content[:-4], "grown": content + b"x"}[change]
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceReadError) as refused:
        weights["b"]
    assert refused.value.file == str(path)
    with pytest.raises(SourceReadError):
        weights.info("b").extents[0].source.check_unchanged()  # type: ignore[attr-defined]


def test_a_replaced_or_removed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for fate in ("replaced", "removed"):
        safetensors.torch.save_file({"a": torch.ones(10)}, path)
        weights = open_file(path)
        weights.close()
        weights = open_file(path)
        close_files()
        if fate == "replaced":
            safetensors.torch.save_file({"a": torch.zeros(10)}, tmp_path / "new")
            (tmp_path / "new").replace(path)
        else:
            path.unlink()
        with pytest.raises(SourceReadError, match=r"x\.safetensors"):
            weights["a"]
        with pytest.raises(SourceReadError, match=r"x\.safetensors"):
            weights.info("a").extents[0].source.check_unchanged()  # type: ignore[attr-defined]


def test_a_file_that_ends_too_early_is_our_own_error(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"12345678")
    source = FileSource(path)
    with pytest.raises(SourceReadError, match="4 bytes too early"):
        source.read_into(memoryview(bytearray(8)), 4)
    for offset, length in ((4, 8), (-1, 2), (0, -1), (9, 0)):
        with pytest.raises(SourceReadError, match="8 bytes"):
            source.read(offset, length)
    assert source.read(2, 3) == b"345"


@POSIX_ONLY
def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceNotFoundError, match="not a regular file"):
        FileSource(tmp_path / "pipe")

    path = tmp_path / "file"
    path.write_bytes(b"1234")
    source = FileSource(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceReadError, match="changed"):
        source.read(0, 4)


@pytest.mark.parametrize("name", ["absent", ".", "nul\0", "x" * 5000], ids=["absent", "folder", "nul", "too long"])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceNotFoundError) as refused:
        FileSource(tmp_path / name)
    assert isinstance(refused.value, FileNotFoundError)
    assert refused.value.file == str(tmp_path / name)


@pytest.mark.parametrize("name", ["模型 ü", "with space #1%20", "quote'\"", "-rf", "emoji 🙂"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    path = tmp_path / name / f"{name} #.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    assert open_file(path)["a"].tolist() == [1, 1]


@POSIX_ONLY
def test_a_forked_child_reads_what_its_parent_opened(tmp_path: Path) -> None:
    # In a process of its own, because forking one that has threads is not for tests.
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.arange(5)}, path)
    program = (
        "import os, sys\n"
        "from weightloaders.weights import source\n"
        "s = source.FileSource(sys.argv[1]); before = s.read(0, 8)\n"
        "source._open_files._lock.acquire()\n"  # as if another thread were just opening a file
        "child = os.fork()\n"
        "if not child: os._exit(0 if s.read(0, 8) == before else 1)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0"


# ------------------------------------------------------------------ several views at once


@pytest.mark.parametrize("system", ["preadv", "pread", "neither"])
def test_views_side_by_side_in_a_file_are_filled_by_one_call_however_the_system_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    content = os.urandom(50_000)
    (tmp_path / "f").write_bytes(content)
    if system != "preadv":
        monkeypatch.delattr(os, "preadv")
    if system == "neither":
        monkeypatch.delattr(os, "pread")
    sizes = [0, 1, 4000, 0, 37, *[3] * 2500, 0]
    views = [memoryview(bytearray(size)) for size in sizes]
    FileSource(tmp_path / "f").read_vectors(views, 1234)
    assert b"".join(views) == content[1234 : 1234 + sum(sizes)]


def test_reads_that_come_back_short_are_taken_up_where_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(5000)
    (tmp_path / "f").write_bytes(content)
    whole = os.preadv

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        first = next(view for view in views if len(view))
        return whole(descriptor, [first[:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    views = [memoryview(bytearray(size)) for size in (10, 0, 1, 990, 7, 3000)]
    FileSource(tmp_path / "f").read_vectors(views, 100)
    assert b"".join(views) == content[100:4108]


def test_views_behind_the_end_of_a_file_are_an_error_that_says_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(SourceReadError, match="ends at byte 100, 20 bytes too early"):
        FileSource(tmp_path / "f").read_vectors([memoryview(bytearray(60)), memoryview(bytearray(60))], 0)


def test_memory_that_cannot_be_written_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(8192))
    with (tmp_path / "f").open("rb") as file, mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_READ) as mapping:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this is read-only memory, which is what it is here for
            tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        with pytest.raises(SourceReadError, match="can't be written"):
            FileSource(tmp_path / "f").read_into(memory_of(tensor), 0)
        del tensor
