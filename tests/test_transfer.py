"""The transfer engine: bytes arrive in parameters as they should, by whatever way they have to take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from weightloaders import Weights, load_into
from weightloaders.errors import LoadError, SourceReadError
from weightloaders.mapping.placement import placement
from weightloaders.plan import CallStep, ComputeStep, CopyStep
from weightloaders.targets import Target
from weightloaders.transfer import jobs, workspace
from weightloaders.transfer.engine import ProgressEvent, Transfer
from weightloaders.weights.info import Extent, TensorInfo
from weightloaders.weights.source import ByteSource, FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write(path: Path, *tensors: torch.Tensor, gap: int = 3) -> list[int]:
    """Tensors one behind the other, with a few bytes between them, so that nothing is aligned; where each begins."""
    data, offsets = b"", []
    for tensor in tensors:
        data += b"\xab" * gap
        offsets.append(len(data))
        data += bytes_of(tensor)
    path.write_bytes(data + b"\xab")
    return offsets


def stored(path: Path, tensor: torch.Tensor, name: str = "w") -> TensorInfo:
    (offset,) = write(path, tensor)
    return TensorInfo(name, tensor.dtype, tensor.shape, Extent(path, offset))


def target(tensor: torch.Tensor, name: str = "w") -> Target:
    return Target(name, tensor, "parameter", True, tensor.dtype)


def whole(info: TensorInfo, tensor: torch.Tensor, name: str = "w") -> CopyStep:
    return CopyStep.whole(target(tensor, name), info)


class Piece(NamedTuple):
    """A run of a source's elements, and where it goes."""

    info: TensorInfo
    source_start: int
    target_start: int
    length: int


def pieced(target: Target, pieces: Sequence[Piece]) -> CopyStep:
    infos = list({id(piece.info): piece.info for piece in pieces}.values())
    runs = [placement(infos.index(p.info), p.source_start, p.target_start, [(p.length, 1, 1)]) for p in pieces]
    return CopyStep(target, tuple(infos), tuple(runs))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a.detach()) == bytes_of(b.detach())


# Sources that are no files are read on as many threads as a network is.
THREADS = 16


def small_limits(monkeypatch: pytest.MonkeyPatch, buffer: int = 64, chunk: int = 100, small: int = 24) -> None:
    """Limits so small that a tensor of a few hundred bytes meets them all."""
    monkeypatch.setattr(workspace, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(jobs, "STRAIGHT_CHUNK", chunk)
    monkeypatch.setattr(jobs, "_SMALL", small)
    monkeypatch.setattr(jobs, "_MAX_GAP", 16)


# ------------------------------------------------------------------ straight reads


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_values_of_the_same_dtype_arrive_bit_for_bit_and_without_a_buffer(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = values(5, 7, dtype=dtype)
    parameter = torch.zeros(5, 7, dtype=dtype)
    moved = Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert same(parameter, expected)
    assert (moved.extra_memory, moved.bytes_read, moved.written) == (0, expected.nbytes, {"w"})


def test_nan_payloads_survive_a_straight_read(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC1, 0xFFFF, 0x7F80, 0x8000], dtype=torch.int32).to(torch.int16)
    expected = bits.view(torch.bfloat16)
    parameter = torch.zeros(4, dtype=torch.bfloat16)
    Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert torch.equal(parameter.view(torch.int16), bits)


def test_a_tensor_of_many_chunks_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)
    expected = values(1000)
    parameter = torch.zeros(1000)
    Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert same(parameter, expected)


def test_an_element_that_is_repeated_is_read_straight_to_each_of_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_limits(monkeypatch, small=1)
    expected = values(3)
    parameter = torch.zeros(3, 4)
    placements = (placement(0, 0, 0, [(3, 1, 4), (4, 0, 1)]),)
    moved = Transfer([CopyStep(target(parameter), (stored(tmp_path / "f", expected),), placements)]).run()
    assert same(parameter, expected[:, None].expand(3, 4).contiguous())
    assert set(moved.bytes_by_path) == {"straight"}


def test_nothing_beside_the_parameter_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)
    memory = torch.full((300,), 7.0)
    expected = values(100)
    Transfer([whole(stored(tmp_path / "f", expected), memory[100:200])]).run()
    assert same(memory[100:200], expected)
    assert bool((memory[:100] == 7).all())
    assert bool((memory[200:] == 7).all())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)], ids=str)
def test_scalars_and_empty_tensors_arrive(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = values(*shape)
        parameter = torch.zeros(shape, dtype=dtype)
        Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
        assert same(parameter, expected.to(dtype))


# ------------------------------------------------------------------ casts


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("wanted", FLOATS, ids=str)
def test_a_cast_is_the_one_that_torch_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: torch.dtype, wanted: torch.dtype
) -> None:
    small_limits(monkeypatch)
    expected = torch.cat([values(301, dtype=source), torch.tensor([0.0, -0.0, 1e-30, 65519.9, 3e38]).to(source)])
    parameter = torch.zeros(306, dtype=wanted)
    Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert same(parameter, expected.to(wanted))


def test_a_dtype_that_is_handed_out_and_differs_from_the_stored_one_comes_in_between(tmp_path: Path) -> None:
    numbers = values(50)
    (offset,) = write(tmp_path / "f", numbers)
    info = TensorInfo("w", torch.bfloat16, (50,), Extent(tmp_path / "f", offset, dtype=torch.float32))
    parameter = torch.zeros(50)
    Transfer([whole(info, parameter)]).run()
    assert same(parameter, numbers.to(torch.bfloat16).float())


def test_infinities_that_a_cast_makes_are_named_and_those_of_the_file_are_not(tmp_path: Path) -> None:
    large, infinite = torch.tensor([1.0, 70000.0]), torch.tensor([1.0, float("inf"), float("nan")])
    steps = [
        whole(stored(tmp_path / "a", large, "a"), torch.zeros(2, dtype=torch.float16), "a"),
        whole(stored(tmp_path / "b", infinite, "b"), torch.zeros(3, dtype=torch.float16), "b"),
        whole(stored(tmp_path / "c", large, "c"), torch.zeros(2, dtype=torch.bfloat16), "c"),
    ]
    assert Transfer(steps).run().infinities == ["a"]


# ------------------------------------------------------------------ pieces


def test_three_tensors_fill_one_fused_parameter_and_one_tensor_fills_three(tmp_path: Path) -> None:
    q, k, v = values(8, 6, seed=1), values(2, 6, seed=2), values(2, 6, seed=3)
    offsets = write(tmp_path / "f", q, k, v)
    infos = [
        TensorInfo(name, t.dtype, t.shape, Extent(tmp_path / "f", offset))
        for name, t, offset in zip("qkv", (q, k, v), offsets, strict=True)
    ]
    for dtype in (torch.float32, torch.float16):
        fused = torch.zeros(12, 6, dtype=dtype)
        pieces = (Piece(infos[0], 0, 0, 48), Piece(infos[1], 0, 48, 12), Piece(infos[2], 0, 60, 12))
        Transfer([pieced(target(fused), pieces)]).run()
        assert same(fused, torch.cat([q, k, v]).to(dtype))
    whole_file = stored(tmp_path / "g", torch.cat([q, k, v]))
    parts = [torch.zeros_like(t) for t in (q, k, v)]
    steps = [
        pieced(target(part, name), (Piece(whole_file, start, 0, part.numel()),))
        for part, name, start in zip(parts, "qkv", (0, 48, 60), strict=True)
    ]
    Transfer(steps).run()
    assert all(same(a, b) for a, b in zip(parts, (q, k, v), strict=True))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 80), st.integers(0, 40)), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    swapped=st.booleans(),
    turned=st.booleans(),
)
def test_any_pieces_of_any_sources_arrive_where_they_were_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: list[tuple[int, int, int]],
    dtype: torch.dtype,
    swapped: bool,
    turned: bool,
) -> None:
    small_limits(monkeypatch)
    sources = [values(120, seed=1), values(120, seed=2)]
    infos = []
    for number, tensor in enumerate(sources):
        path = tmp_path / f"s{number}{swapped}"
        if not path.exists():
            path.write_bytes(b"abc" + (tensor.numpy().byteswap().tobytes() if swapped else tensor.numpy().tobytes()))
        infos.append(
            TensorInfo(f"s{number}", torch.float32, (120,), Extent(path, 3, byteorder="big" if swapped else "little"))
        )
    pieces, at = [], 0
    for number, start, length in cuts:
        pieces.append(Piece(infos[number], start, at, length))
        at += length
    expected = torch.cat([sources[number][start : start + length] for number, start, length in cuts])
    # In a parameter whose memory is not in row-major order, every way ends in a copy.
    parameter = torch.zeros(2, at, dtype=dtype).t()[:, 0] if turned else torch.zeros(at, dtype=dtype)
    Transfer([pieced(target(parameter), tuple(pieces))]).run()
    assert same(parameter, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matrix_turned_takes_few_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = values(250, 250)
    counted = Counted(FileSource(tmp_path / "f") if write(tmp_path / "f", matrix, gap=0) else None)
    info = TensorInfo("w", torch.float32, (250, 250), Extent(counted, 0))
    turned = placement(0, 0, 0, [(250, 1, 250), (250, 250, 1)])
    parameter = torch.zeros(250, 250, dtype=dtype)
    Transfer([CopyStep(target(parameter), (info,), (turned,))]).run()
    assert same(parameter, matrix.t().to(dtype))
    assert len(counted.reads) == 1


def test_interleaved_rows_are_read_together_and_large_blocks_by_themselves(tmp_path: Path) -> None:
    gate, up = values(4, 30000, seed=1), values(4, 30000, seed=2)
    path = tmp_path / "f"
    write(path, torch.stack([gate, up], 1), gap=0)
    counted = Counted(FileSource(path))
    info = TensorInfo("w", torch.float32, (8, 30000), Extent(counted, 0))
    steps = [
        pieced(
            target(parameter, name),
            tuple(Piece(info, (2 * row + first) * 30000, row * 30000, 30000) for row in range(4)),
        )
        for name, first, parameter in (("gate", 0, torch.zeros(4, 30000)), ("up", 1, torch.zeros(4, 30000)))
    ]
    moved = Transfer(steps).run()
    assert same(steps[0].target.tensor, gate)
    assert same(steps[1].target.tensor, up)
    assert sorted(counted.reads) == [(row * 120000, 120000) for row in range(8)]
    assert moved.extra_memory == 0


def test_small_pieces_far_apart_are_read_apart(tmp_path: Path) -> None:
    source = values(1 << 20)
    write(tmp_path / "f", source, gap=0)
    counted = Counted(FileSource(tmp_path / "f"))
    info = TensorInfo("w", torch.float32, (1 << 20,), Extent(counted, 0))
    parameter = torch.zeros(30)
    starts = (0, 100, 1_000_000)
    Transfer([pieced(target(parameter), tuple(Piece(info, s, 10 * i, 10) for i, s in enumerate(starts)))]).run()
    assert same(parameter, torch.cat([source[s : s + 10] for s in starts]))
    assert sorted(counted.reads) == [(0, 440), (4_000_000, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_of_one_size_need_not_start_at_multiples_of_it(tmp_path: Path, dtype: torch.dtype, shift: int) -> None:
    source = values(200)
    info = stored(tmp_path / "f", source)
    starts = [(7 * i) % 60 * 3 + (shift if i else 0) for i in range(20)]
    parameter = torch.zeros(60, dtype=dtype)
    Transfer([pieced(target(parameter), tuple(Piece(info, s, 3 * i, 3) for i, s in enumerate(starts)))]).run()
    assert same(parameter, torch.cat([source[s : s + 3] for s in starts]).to(dtype))


def test_pieces_that_do_not_make_up_their_parameter_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    info = stored(tmp_path / "f", values(10))
    for pieces in (
        (Piece(info, 0, 0, 9),), (Piece(info, 1, 0, 10),), (Piece(info, 0, 5, 10),), (Piece(info, 0, 0, 11),),
        (Piece(info, 0, -1, 10),),
    ):  # fmt: skip
        other, parameter = torch.zeros(10), torch.zeros(10)
        steps = [whole(info, other, "other"), pieced(target(parameter), pieces)]
        with pytest.raises(LoadError, match="don't make up") as caught:
            Transfer(steps).run()
        assert caught.value.tensor == "w"
        assert caught.value.written == ()
        assert not other.any()
        assert not parameter.any()


def test_a_parameter_on_meta_is_refused_rather_than_filled_with_nothing(tmp_path: Path) -> None:
    step = whole(stored(tmp_path / "f", values(3)), torch.empty(3, device="meta"))
    with pytest.raises(LoadError, match="meta device") as caught:
        Transfer([step]).run()
    assert caught.value.written == ()


# ------------------------------------------------------------------ sources that do not lie in one row


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_strided_extents_arrive(tmp_path: Path, wanted: torch.dtype) -> None:
    storage = values(6, 8)
    (offset,) = write(tmp_path / "f", storage)
    transposed = TensorInfo("w", torch.float32, (8, 6), Extent(tmp_path / "f", offset, strides=(1, 8)))
    column = TensorInfo("w", torch.float32, (6, 2), Extent(tmp_path / "f", offset + 12, strides=(8, 1)))
    expanded = TensorInfo("w", torch.float32, (3, 8), Extent(tmp_path / "f", offset, strides=(0, 1)))
    for info, expected in ((transposed, storage.t()), (column, storage[:, 3:5]), (expanded, storage[:1].expand(3, 8))):
        parameter = torch.zeros(info.shape, dtype=wanted)
        Transfer([whole(info, parameter)]).run()
        assert same(parameter, expected.to(wanted))


def test_a_tensor_in_several_boxes_arrives_also_in_pieces(tmp_path: Path) -> None:
    expected = values(6, 8)
    boxes = [(0, 0, 4, 8), (4, 0, 2, 5), (4, 5, 2, 3)]
    parts = [expected[r : r + h, c : c + w] for r, c, h, w in boxes]
    offsets = write(tmp_path / "f", *parts)
    extents = [
        Extent(tmp_path / "f", offset, shape=(h, w), at=(r, c))
        for offset, (r, c, h, w) in zip(offsets, boxes, strict=True)
    ]
    info = TensorInfo("w", torch.float32, (6, 8), extents)
    parameter, top, rest = torch.zeros(6, 8), torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.float16)
    Transfer(
        [
            whole(info, parameter),
            pieced(target(top, "top"), (Piece(info, 0, 0, 24),)),
            pieced(target(rest, "rest"), (Piece(info, 24, 0, 24),)),
        ]
    ).run()
    assert same(parameter, expected)
    assert same(top, expected[:3])
    assert same(rest, expected[3:].half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.uint8], ids=str)
def test_the_other_byte_order_arrives_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    small_limits(monkeypatch)
    expected = values(77, dtype=dtype)
    (tmp_path / "f").write_bytes(expected.numpy().byteswap().tobytes())
    info = TensorInfo("w", dtype, (77,), Extent(tmp_path / "f", 0, byteorder="big"))
    parameter = torch.zeros(77, dtype=dtype)
    Transfer([whole(info, parameter)]).run()
    assert same(parameter, expected)


def test_a_tensor_made_by_its_loader_is_made_once_for_all_its_parts() -> None:
    calls = []

    def read() -> torch.Tensor:
        calls.append(threading.current_thread())
        return values(9, 4)

    info = TensorInfo("qkv", torch.float32, (9, 4), read=read)
    parts = [torch.zeros(3, 4) for _ in range(3)]
    Transfer(
        [pieced(target(p, n), (Piece(info, 12 * i, 0, 12),)) for i, (p, n) in enumerate(zip(parts, "qkv", strict=True))]
    ).run()
    assert same(torch.cat(parts), values(9, 4))
    # Code of others is called on the caller's thread.
    assert calls == [threading.current_thread()]


# ------------------------------------------------------------------ parameters of all kinds


class Plain(nn.Parameter):
    """A parameter class as inference engines have them: no storage of its own kind, only attributes."""


class Wrapper(torch.Tensor):
    """A tensor that only claims to be one, and holds two halves."""

    halves: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Any:
        shape = (*left.shape[:-1], left.shape[-1] + right.shape[-1])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=left.dtype, device=left.device)
        made.halves = (left, right)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self, source = args[0], args[1]
            width = self.halves[0].shape[-1]
            self.halves[0].copy_(source[..., :width])
            self.halves[1].copy_(source[..., width:])
            return self
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Wrapper(*args[0].halves)
        if func is torch.ops.aten.empty_like.default:
            device = (kwargs or {}).get("device")
            return Wrapper(*(torch.empty_like(half, device=device) for half in args[0].halves))
        raise NotImplementedError(str(func))


PARAMETERS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.zeros(4, 6).t(),
    "every other column": lambda: torch.zeros(6, 8)[:, ::2],
    "a slice of rows": lambda: torch.zeros(12, 4)[3:9],
    "parameter": lambda: nn.Parameter(torch.zeros(6, 4)),
    "parameter class": lambda: Plain(torch.zeros(6, 4)),
    "bfloat16, transposed": lambda: torch.zeros(4, 6, dtype=torch.bfloat16).t(),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_of_all_layouts_and_classes_are_filled_in_place(tmp_path: Path, kind: str) -> None:
    expected = values(6, 4)
    info = stored(tmp_path / "f", expected)
    for pieces in ((Piece(info, 0, 0, 24),), (Piece(info, 12, 12, 12), Piece(info, 0, 0, 12))):
        parameter = PARAMETERS[kind]()
        strides, address = parameter.stride(), parameter.data_ptr()
        Transfer([pieced(target(parameter), pieces)]).run()
        assert torch.equal(parameter, expected.to(parameter.dtype))
        assert (parameter.stride(), parameter.data_ptr()) == (strides, address)


def test_a_channels_last_parameter_stays_so(tmp_path: Path) -> None:
    expected = values(4, 3, 5, 5)
    parameter = nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last))
    Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert torch.equal(parameter, expected)
    assert parameter.is_contiguous(memory_format=torch.channels_last)


def test_a_class_that_holds_other_tensors_is_filled_through_its_own_copy(tmp_path: Path) -> None:
    expected = values(6, 5)
    parameter = nn.Parameter(Wrapper(torch.zeros(6, 2), torch.zeros(6, 3)), requires_grad=False)
    Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert torch.equal(torch.cat(parameter.halves, dim=-1), expected)


@pytest.mark.parametrize("pieces", [1, 10])
def test_a_conjugated_view_is_filled_with_the_values_themselves(tmp_path: Path, pieces: int) -> None:
    expected = values(20, dtype=torch.complex64)
    parameter = torch.zeros(20, dtype=torch.complex64).conj()
    info, size = stored(tmp_path / "f", expected), 20 // pieces
    parts = [Piece(info, i * size, (pieces - 1 - i) * size, size) for i in range(pieces)]
    Transfer([pieced(target(parameter), tuple(parts))]).run()
    assert torch.equal(parameter.resolve_conj(), torch.cat(list(expected.split(size))[::-1]))


# ------------------------------------------------------------------ autograd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_stay_and_versions_move_on(tmp_path: Path, dtype: torch.dtype) -> None:
    parameter, frozen = nn.Parameter(torch.zeros(4, dtype=dtype)), nn.Parameter(torch.zeros(4, dtype=dtype), False)
    parameter.grad = torch.ones(4, dtype=dtype)
    before = parameter._version, frozen._version
    info = stored(tmp_path / "f", values(4))
    Transfer([whole(info, parameter, "a"), whole(info, frozen, "b")]).run()
    assert parameter._version > before[0]
    assert frozen._version > before[1]
    assert parameter.requires_grad
    assert not frozen.requires_grad
    assert parameter.is_leaf
    assert parameter.grad_fn is None
    assert torch.equal(parameter.grad, torch.ones(4, dtype=dtype))


def test_a_backward_through_the_old_values_is_an_error_rather_than_wrong(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(4))
    loss = (parameter**2).sum()
    Transfer([whole(stored(tmp_path / "f", values(4)), parameter)]).run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("around", [False, True], ids=["load outside", "load inside"])
def test_parameters_made_in_inference_mode_are_filled(tmp_path: Path, dtype: torch.dtype, around: bool) -> None:
    expected = values(6, 4)
    with torch.inference_mode():
        made = [torch.zeros(6, 4, dtype=dtype), torch.zeros(4, 6, dtype=dtype).t()]
    info = stored(tmp_path / "f", expected)
    for parameter in made:
        with torch.inference_mode(around):
            Transfer([whole(info, parameter)]).run()
        assert torch.equal(parameter, expected.to(dtype))


# ------------------------------------------------------------------ systems that lack something


@pytest.mark.parametrize("lacking", [("preadv",), ("preadv", "pread")], ids="+".join)
def test_a_system_without_positioned_reads_reads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: Sequence[str]
) -> None:
    small_limits(monkeypatch)
    for name in lacking:
        monkeypatch.delattr(os, name)
    expected = [values(500, seed=i) for i in range(8)]
    offsets = write(tmp_path / "f", *expected)
    parameters = [torch.zeros(500, dtype=torch.float32 if i % 2 else torch.float64) for i in range(8)]
    source = FileSource(tmp_path / "f")
    steps = [
        whole(TensorInfo(str(i), torch.float32, (500,), Extent(source, offset)), parameter, str(i))
        for i, (offset, parameter) in enumerate(zip(offsets, parameters, strict=True))
    ]
    Transfer(steps).run()
    assert all(torch.equal(p, e.to(p.dtype)) for p, e in zip(parameters, expected, strict=True))


def test_one_processor_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    parameter = torch.zeros(10)
    Transfer([whole(stored(tmp_path / "f", values(10)), parameter)]).run()
    assert same(parameter, values(10))


# ------------------------------------------------------------------ what goes wrong on the way


class Counted(ByteSource):
    """A source that remembers what was read, and can fail or wait on the way."""

    def __init__(self, inner: ByteSource | None, before: Callable[[int], object] | None = None) -> None:
        assert inner is not None
        self.inner, self.before, self.name = inner, before, "counted"
        self.reads: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def identity(self) -> Any:
        return self.inner.identity

    def read_into(self, view: memoryview, offset: int) -> None:
        self.reads.append((offset, len(view)))
        if self.before is not None:
            self.before(len(self.reads))
        self.inner.read_into(view, offset)


def test_a_file_that_shrinks_on_the_way_is_named_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_limits(monkeypatch)
    expected = [values(100, seed=i) for i in range(6)]
    offsets = write(tmp_path / "f", *expected)
    source = FileSource(tmp_path / "f")
    steps = [
        whole(TensorInfo(f"t{i}", torch.float32, (100,), Extent(source, offset)), torch.zeros(100), f"t{i}")
        for i, offset in enumerate(offsets)
    ]

    def progress(event: ProgressEvent) -> None:
        if event.done_bytes:
            os.truncate(tmp_path / "f", 900)

    with pytest.raises(LoadError) as caught:
        Transfer(steps, progress=progress).run()
    assert caught.value.file == str(tmp_path / "f")
    assert caught.value.tensor in caught.value.written
    assert 1 <= len(caught.value.written) < 6
    assert isinstance(caught.value.__cause__, SourceReadError)


def test_a_file_that_ends_early_is_an_error_even_where_nobody_noticed_that_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = stored(tmp_path / "f", values(100))
    os.truncate(tmp_path / "f", 50)
    monkeypatch.setattr(FileSource, "check_same", lambda self, status: None)
    with pytest.raises(LoadError, match="too early") as caught:
        Transfer([whole(info, torch.zeros(100))]).run()
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "f"), "w")


def test_a_file_rewritten_after_it_was_catalogued_is_refused(tmp_path: Path) -> None:
    info = stored(tmp_path / "f", values(100))
    write(tmp_path / "f", values(100, seed=9))
    os.utime(tmp_path / "f", ns=(1, 1))
    with pytest.raises(LoadError, match="changed after it was catalogued") as caught:
        Transfer([whole(info, torch.zeros(100))]).run()
    assert caught.value.file == str(tmp_path / "f")


def test_a_file_replaced_while_it_is_read_is_noticed_at_the_end(tmp_path: Path) -> None:
    info = stored(tmp_path / "f", values(100))

    def replace_it(event: ProgressEvent) -> None:
        if event.done_bytes == event.total_bytes:
            write(tmp_path / "new", values(100, seed=9))
            (tmp_path / "new").replace(tmp_path / "f")

    with pytest.raises(LoadError, match="changed after it was catalogued"):
        Transfer([whole(info, torch.zeros(100))], progress=replace_it).run()


@pytest.mark.parametrize(
    "error", [RuntimeError("a plugin's own"), KeyError("x"), MemoryError(), OSError(5, "I/O")], ids=repr
)
def test_what_a_foreign_source_or_reader_raises_comes_as_a_load_error_with_the_tensor(
    tmp_path: Path, error: Exception
) -> None:
    def fail(count: int = 0) -> Any:
        raise error

    write(tmp_path / "f", values(4), gap=0)
    raw = TensorInfo("raw", torch.float32, (4,), Extent(Counted(FileSource(tmp_path / "f"), fail), 0))
    made = TensorInfo("made", torch.float32, (4,), read=fail)
    computed = ComputeStep(
        {"w": target(torch.zeros(4))},
        (TensorInfo("in", torch.float32, (4,), read=lambda: values(4)),),
        fail,
        ("a rule",),
    )
    for step in (whole(raw, torch.zeros(4)), whole(made, torch.zeros(4)), computed):
        with pytest.raises(LoadError) as caught:
            Transfer([step]).run()
        assert caught.value.tensor in ("w", "made")
        cause: BaseException | None = caught.value
        while cause is not None and cause is not error:
            cause = cause.__cause__
        assert cause is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_asks_the_program_to_end_is_no_load_error(tmp_path: Path, error: BaseException) -> None:
    def fail(count: int = 0) -> Any:
        raise error

    write(tmp_path / "f", values(4), gap=0)
    raw = TensorInfo("raw", torch.float32, (4,), Extent(Counted(FileSource(tmp_path / "f"), fail), 0))
    for info in (raw, TensorInfo("made", torch.float32, (4,), read=fail)):
        with pytest.raises(type(error)):
            Transfer([whole(info, torch.zeros(4))]).run()


def test_the_other_threads_stop_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "STRAIGHT_CHUNK", 400)
    write(tmp_path / "f", values(100_000), gap=0)

    def fail_early(count: int) -> None:
        time.sleep(0.001)
        if count == 5:
            raise OSError("gone")

    counted = Counted(FileSource(tmp_path / "f"), fail_early)
    info = TensorInfo("w", torch.float32, (100_000,), Extent(counted, 0))
    with pytest.raises(LoadError, match="gone"):
        Transfer([whole(info, torch.zeros(100_000))]).run()
    assert len(counted.reads) <= 5 + 2 * THREADS
    assert not any(thread.name.startswith("weightloaders") for thread in threading.enumerate())


def test_a_function_that_returns_something_else_than_it_promised_is_refused() -> None:
    info = TensorInfo("in", torch.float32, (4,), read=lambda: values(4))
    for result, words in (
        (torch.zeros(5), "shape"),
        (None, "no tensor"),
        (torch.zeros(4, dtype=torch.int64), "can't become"),
        (7, "no tensor"),
    ):
        parameter = torch.ones(4)
        step = ComputeStep(
            {"w": target(parameter)}, (info,), lambda _, result=result: {"w": result}, ("my_rule(a) -> w",)
        )  # type: ignore[misc]
        with pytest.raises(LoadError, match=words) as caught:
            Transfer([step]).run()
        assert "my_rule" in str(caught.value)
        assert caught.value.tensor == "w"
        assert torch.equal(parameter, torch.ones(4))


def test_a_computed_step_writes_all_its_targets_and_casts() -> None:
    info = TensorInfo("in", torch.float32, (4,), read=lambda: values(4))
    double, half = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float16)
    step = ComputeStep(
        {"a": target(double, "a"), "b": target(half, "b")}, ((info, info), info),
        lambda arguments: {"a": arguments[0][0] + arguments[0][1], "b": arguments[1] * 3},
    )  # fmt: skip
    moved = Transfer([step]).run()
    assert torch.equal(double, (values(4) * 2).double())
    assert torch.equal(half, (values(4) * 3).half())
    assert moved.written == {"a", "b"}


def test_a_parameters_own_loader_gets_the_parameter_the_tensor_and_the_shard() -> None:
    got: list[tuple[Any, ...]] = []
    parameter = nn.Parameter(torch.zeros(4))
    parameter.weight_loader = lambda *arguments: got.append(arguments)  # type: ignore[attr-defined]
    info = TensorInfo("q", torch.float32, (4,), read=lambda: values(4))
    handed: list[str] = []
    Transfer(
        [
            CallStep(target(parameter), info, "q"),
            CallStep(target(parameter), info, 0),
            CallStep(target(parameter), info),
        ],
        handed=lambda name, tensor: handed.append(name),
    ).run()
    assert [arguments[0] is parameter for arguments in got] == [True] * 3
    assert [arguments[2:] for arguments in got] == [("q",), (0,), ()]
    assert handed == ["q", "q", "q"]


# ------------------------------------------------------------------ progress, threads, memory


def test_progress_only_grows_and_ends_at_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)
    expected = [values(150, seed=i) for i in range(10)]
    offsets = write(tmp_path / "f", *expected)
    steps: list[Any] = []
    for i, offset in enumerate(offsets):
        info = TensorInfo(str(i), torch.float32, (150,), Extent(tmp_path / "f", offset))
        steps.append(whole(info, torch.zeros(150, dtype=FLOATS[i % 4]), str(i)))
    strided = TensorInfo("s", torch.float32, (50, 3), Extent(tmp_path / "f", offsets[0], strides=(1, 50)))
    steps.append(whole(strided, torch.zeros(3, 50).t(), "s"))
    steps.append(ComputeStep({"c": target(torch.zeros(50, 3), "c")}, (strided,), lambda a: {"c": a[0]}))
    steps.append(whole(TensorInfo("m", torch.float32, (4,), read=lambda: values(4)), torch.zeros(4), "m"))
    events: list[ProgressEvent] = []
    inside = threading.Lock()

    def progress(event: ProgressEvent) -> None:
        assert inside.acquire(blocking=False), "two threads report at once"
        events.append(event)
        time.sleep(0.0002)
        inside.release()

    moved = Transfer(steps, progress=progress).run()
    done = [event.done_bytes for event in events]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == moved.bytes_read == events[0].total_bytes
    assert len({event.total_bytes for event in events}) == 1
    assert events[-1].file in (str(tmp_path / "f"), None)
    assert events[1].file is not None


def test_nothing_to_do_is_progress_too() -> None:
    events: list[ProgressEvent] = []
    Transfer([], progress=events.append).run()
    assert events == [ProgressEvent(0, 0)]


def test_a_progress_function_that_raises_stops_the_load_and_says_so(tmp_path: Path) -> None:
    def progress(event: ProgressEvent) -> None:
        if event.done_bytes:
            raise ValueError("no more")

    with pytest.raises(LoadError, match="progress function failed: ValueError: no more") as caught:
        Transfer([whole(stored(tmp_path / "f", values(4)), torch.zeros(4))], progress=progress).run()
    assert caught.value.written == ("w",)


def test_buffers_are_bounded_whatever_the_size_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch, buffer=1024)
    expected = values(100_000)
    parameter = torch.zeros(100_000, dtype=torch.bfloat16)
    moved = Transfer([whole(stored(tmp_path / "f", expected), parameter)]).run()
    assert same(parameter, expected.bfloat16())
    assert 0 < moved.extra_memory <= THREADS * 1024


def test_files_are_read_from_front_to_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "rotational")
    expected = [values(50, seed=i) for i in range(6)]
    offsets = write(tmp_path / "f", *expected)
    counted = Counted(FileSource(tmp_path / "f"))
    steps = [
        whole(TensorInfo(str(i), torch.float32, (50,), Extent(counted, offsets[i])), torch.zeros(50), str(i))
        for i in (3, 0, 5, 1, 4, 2)
    ]
    Transfer(steps).run()
    assert [offset for offset, _ in counted.reads] == offsets


def test_one_tensor_at_a_time_is_held_and_none_afterwards() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def read() -> torch.Tensor:
        assert not any(reference() is not None for reference in made), "the one before is still held"
        tensor = values(100)
        made.append(weakref.ref(tensor))
        return tensor

    infos = [TensorInfo(str(i), torch.float32, (100,), read=read) for i in range(5)]
    transfer = Transfer([whole(info, torch.zeros(100), info.name) for info in infos])
    moved = transfer.run()
    assert moved.extra_memory == 400
    assert len(made) == 5
    assert all(reference() is None for reference in made)


def test_transfers_in_several_threads_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_limits(monkeypatch)
    expected = [values(3000, seed=i) for i in range(4)]
    infos = [stored(tmp_path / str(i), tensor) for i, tensor in enumerate(expected)]
    parameters = [torch.zeros(3000, dtype=torch.float64) for _ in expected]
    threads = [
        threading.Thread(target=Transfer([whole(info, parameter)]).run)
        for info, parameter in zip(infos, parameters, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(p, e.double()) for p, e in zip(parameters, expected, strict=True))


def test_torch_computes_on_as_many_processors_after_a_load_as_before(tmp_path: Path) -> None:
    program = """
        import sys, threading, torch
        from weightloaders.plan import CopyStep
        from weightloaders.targets import Target
        from weightloaders.transfer.engine import Transfer
        from weightloaders.weights.info import Extent, TensorInfo

        def load(i):
            info = TensorInfo("w", torch.float32, (1 << 16,), Extent(sys.argv[1], 0))
            parameter = torch.zeros(1 << 16, dtype=torch.float64)
            target = Target("w", parameter, "parameter", True, parameter.dtype)
            Transfer([CopyStep.whole(target, info)]).run()

        torch.set_num_threads(3)
        threads = [threading.Thread(target=load, args=(i,)) for i in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        seen = [torch.get_num_threads()]
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start(), later.join()
        print(seen)
    """
    (tmp_path / "f").write_bytes(bytes(1 << 18))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "f")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "[3, 3]"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_ctrl_c_stops_a_load_at_once_and_leaves_no_thread(tmp_path: Path) -> None:
    program = """
        import sys, threading, time, torch
        from weightloaders import Extent, TensorInfo, Weights, load_into, load_status
        from weightloaders.weights.source import FileSource

        class Slow(FileSource):
            def read_into(self, view, offset):
                time.sleep(0.05)
                super().read_into(view, offset)

        class Many(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 4, bias=False) for _ in range(2000))
        model, source = Many(), Slow(sys.argv[1])
        weights = Weights.describe(
            TensorInfo(f"layers.{i}.weight", torch.float32, (4, 1), Extent(source, 16 * i)) for i in range(2000)
        )
        try:
            load_into(model, weights, progress=lambda event: event.done_bytes and print("started", flush=True))
        except KeyboardInterrupt:
            print("interrupted", load_status(model), [t.name for t in threading.enumerate()], flush=True)
    """
    (tmp_path / "f").write_bytes(bytes(16 * 2000))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "f")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "interrupted failed ['MainThread']" in rest
    # All of it would have taken twenty-five seconds or more.
    assert time.monotonic() - start < 12
    assert process.returncode == 0


def test_ctrl_c_while_threads_are_started_ends_those_that_run(tmp_path, monkeypatch):
    read, interrupted = [], threading.Event()

    class Slow(FileSource):
        def read_into(self, view, offset):
            interrupted.wait(10)
            time.sleep(0.05)
            super().read_into(view, offset)
            read.append(self.name)

    start = threading.Thread.start

    def interrupt(thread):
        start(thread)
        if thread.name == "weightloaders_1":
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    model, infos = nn.Module(), []
    for number in range(40):
        (tmp_path / f"{number}").write_bytes(torch.randn(1000).numpy().tobytes())
        model.register_parameter(f"w{number}", nn.Parameter(torch.zeros(1000)))
        infos.append(TensorInfo(f"w{number}", torch.float32, (1000,), Extent(Slow(tmp_path / f"{number}"), 0)))
    with pytest.raises(KeyboardInterrupt):
        load_into(model, Weights.describe(infos), transfer={"threads": 2}, progress=False)
    assert len(read) < 40
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weightloaders")]
