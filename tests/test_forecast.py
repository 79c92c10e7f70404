"""What a plan says it will take, held against what it takes: reads and bytes are exact, memory is a bound."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightloaders import ByteSource, Convert, Extent, LoadPlan, TensorInfo, Weights, open_weights, plan_load
from weightloaders.transfer.copying import SCRATCH_BYTES
from weightloaders.transfer.jobs import STRAIGHT_CHUNK
from weightloaders.transfer.workspace import BUFFER_BYTES
from weightloaders.weights import habits

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

MIB = 1 << 20


class CountingSource(ByteSource):
    """Bytes in memory, and an account of what was asked for."""

    name = "counted"

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._lock = threading.Lock()
        self.reads = self.bytes_read = 0

    @property
    def size(self) -> int:
        return len(self._content)

    @property
    def identity(self) -> Hashable:
        return id(self)

    def read_into(self, view: memoryview, offset: int) -> None:
        with self._lock:
            self.reads += 1
            self.bytes_read += len(view)
        view[:] = self._content[offset : offset + len(view)]


def catalogue(source: ByteSource, *described: tuple[str, torch.dtype, Sequence[int]]) -> Weights:
    infos, at = [], 0
    for name, dtype, shape in described:
        info = TensorInfo(name, dtype, shape, Extent(source, at))
        infos.append(info)
        at += info.nbytes
    return Weights.describe(infos)


def module(**parameters: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model


def doubled(w: torch.Tensor) -> torch.Tensor:
    return w * 2


def in_turns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A hundred rows of the one, then a hundred of the other."""
    return torch.stack([a.view(20, 100, 1000), b.view(20, 100, 1000)], 1).flatten(0, 2)


BF16, F32 = torch.bfloat16, torch.float32

# What a model may look like: its parameter, what is stored, the rule, and where the bytes go.
CASES: dict[str, tuple[Callable[[], torch.Tensor], list[tuple[str, torch.dtype, tuple[int, ...]]], Any, str]] = {
    "as it is": (lambda: torch.zeros(3000, 4000), [("w", F32, (3000, 4000))], None, "straight"),
    "cast": (lambda: torch.zeros(3000, 4000), [("w", BF16, (3000, 4000))], None, "buffered"),
    "transposed": (
        lambda: torch.zeros(1500, 2000), [("w", F32, (2000, 1500))], Convert("w", "w", "transpose"), "buffered",
    ),
    "fused": (
        lambda: torch.zeros(3000, 1000),
        [("q", F32, (2000, 1000)), ("k", F32, (500, 1000)), ("v", F32, (500, 1000))],
        Convert(["q", "k", "v"], "w", "fuse_qkv"), "straight",
    ),
    "interleaved in long runs": (
        lambda: torch.zeros(4000, 1000), [("g", F32, (2000, 1000)), ("u", F32, (2000, 1000))],
        Convert(["g", "u"], "w", in_turns), "straight",
    ),
    "interleaved row by row": (
        lambda: torch.zeros(4000, 1000), [("g", F32, (2000, 1000)), ("u", F32, (2000, 1000))],
        Convert(["g", "u"], "w", "fuse_gate_up_interleaved"), "buffered",
    ),
    "a part of it": (
        lambda: torch.zeros(1000, 100), [("w", F32, (1000, 1000))], Convert("w", "w", lambda w: w[:, 100:200]),
        "buffered",
    ),
    "padded": (
        lambda: torch.zeros(2000, 1000), [("w", F32, (1500, 1000))], Convert("w", "w", "pad_rows", rows=2000),
        "straight",
    ),
    "computed": (lambda: torch.zeros(2000, 1000), [("w", F32, (2000, 1000))], Convert("w", "w", doubled), "computed"),
    "not in row-major order": (lambda: torch.zeros(2000, 1000).t(), [("w", F32, (1000, 2000))], None, "assembled"),
    "not in row-major order, and cast": (
        lambda: torch.zeros(2000, 1000).t(), [("w", BF16, (1000, 2000))], None, "assembled",
    ),
    "nothing": (lambda: torch.zeros(0, 4), [("w", F32, (0, 4))], None, "straight"),
    "a scalar": (lambda: torch.zeros(()), [("w", F32, ())], None, "straight"),
}  # fmt: skip


def held_against_a_run(plan: LoadPlan, model: nn.Module, source: CountingSource) -> Any:
    """Run the plan: reads and bytes are as forecast; memory is no more than that."""
    told = plan.forecast
    assert (source.reads, source.bytes_read) == (0, 0)
    report = plan.run(model)
    assert (told.reads, told.bytes_to_read) == (source.reads, source.bytes_read)
    assert told.bytes_to_read == report.bytes_read == plan.bytes_to_read
    parts = {name.replace("_", " "): getattr(told, name) for name in PARTS}
    assert {name: nbytes for name, nbytes in parts.items() if nbytes} == report.bytes_by_path
    assert sum(parts.values()) == told.bytes_to_read
    assert report.extra_memory <= told.extra_memory
    return report


PARTS = ("straight", "buffered", "assembled", "computed", "handed_over")


@pytest.mark.parametrize("on_meta", [False, True], ids=["", "meta"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_forecast_is_what_it_takes(case: str, on_meta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # On one thread it is known which buffers are taken, so that the bound can be held to be a close one.
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "rotational")
    make, stored, rule, path = CASES[case]
    source = CountingSource(bytes(sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in stored)))
    model = module(w=make().to("meta") if on_meta else make())
    plan = plan_load(model, catalogue(source, *stored), rules=[rule] if rule else None)
    assert plan.ok, str(plan)
    report = held_against_a_run(plan, model, source)
    assert set(report.bytes_by_path) <= {path}
    assert plan.forecast.extra_memory <= 2 * report.extra_memory


def test_small_pieces_are_counted_with_the_gaps_that_are_read_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "local")
    source = CountingSource(bytes(4 * MIB))
    model = module(w=torch.zeros(1000, 100))
    plan = plan_load(model, catalogue(source, ("w", F32, (1000, 1000))), rules=[CASES["a part of it"][2]])
    # All rows but the end of the last.
    assert plan.forecast.bytes_to_read == 4 * (999 * 1000 + 100)
    assert plan.forecast.reads == 1
    held_against_a_run(plan, model, source)


def test_large_tensors_are_read_in_chunks() -> None:
    source = CountingSource(bytes(40 * MIB))
    model = module(w=torch.zeros(10 * MIB))
    plan = plan_load(model, catalogue(source, ("w", F32, (10 * MIB,))))
    assert plan.forecast.reads == -(-40 * MIB // STRAIGHT_CHUNK) == 3
    held_against_a_run(plan, model, source)


def test_contiguous_and_strided_pieces_are_told_apart() -> None:
    source = CountingSource(bytes(4 * 64))
    model = module(a=torch.zeros(4, 4), b=torch.zeros(4, 4), c=torch.zeros(8, 4))
    described = [(name, F32, (4, 4)) for name in ("a", "b", "x", "y")]
    rules = [Convert("b", "b", "transpose"), Convert(["x", "y"], "c", lambda x, y: torch.cat([x, y]))]
    plan = plan_load(model, catalogue(source, *described), rules=rules)
    assert (plan.forecast.contiguous, plan.forecast.strided) == (3, 1)
    held_against_a_run(plan, model, source)


def test_tensors_that_their_loader_makes_are_bytes_without_reads() -> None:
    model = nn.Linear(4, 4, bias=False)
    plan = plan_load(model, {"weight": torch.rand(4, 4)})
    assert (plan.forecast.reads, plan.forecast.bytes_to_read, plan.forecast.assembled) == (0, 64, 64)
    report = plan.run(model)
    assert report.bytes_by_path == {"assembled": 64}
    assert report.extra_memory <= plan.forecast.extra_memory


def test_parts_for_a_parameters_own_loader_are_told() -> None:
    source = CountingSource(bytes(64))
    model = module(w=torch.zeros(4, 4))
    model.w.weight_loader = lambda parameter, tensor: parameter.copy_(tensor)  # type: ignore[attr-defined, union-attr]
    plan = plan_load(model, catalogue(source, ("w", F32, (4, 4))))
    assert plan.forecast.handed_over == 64
    held_against_a_run(plan, model, source)


def test_buffers_of_all_threads_are_in_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(habits, "usable_processors", lambda: 3)
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "local")
    source = CountingSource(bytes(48 * MIB))
    model = module(w=torch.zeros(24 * MIB))
    plan = plan_load(model, catalogue(source, ("w", BF16, (24 * MIB,))))
    assert plan.forecast.extra_memory == 3 * (BUFFER_BYTES + SCRATCH_BYTES)
    held_against_a_run(plan, model, source)


def test_a_step_that_is_never_carried_out_takes_nothing() -> None:
    """A function that leaves memory unwritten is an error of the plan, which can be looked at all the same."""

    def half(w: torch.Tensor) -> torch.Tensor:
        result = w.new_empty(4)
        result[:2] = w[:2]
        return result

    source = CountingSource(bytes(32))
    plan = plan_load(
        module(w=torch.zeros(4), v=torch.zeros(4)),
        catalogue(source, ("w", F32, (4,)), ("v", F32, (4,))),
        rules=[Convert("w", "w", half)],
    )
    assert not plan.ok
    assert plan.forecast.bytes_to_read == 16
    assert str(plan)
    assert LoadPlan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert "w[2:4] is never written" in plan.explain("w")


def test_of_a_stream_nothing_is_known_beforehand() -> None:
    assert (LoadPlan().bytes_to_read, LoadPlan().forecast.reads) == (0, 0)


def test_a_model_of_terabytes_on_meta_is_forecast_from_headers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "local")

    class Endless(CountingSource):
        @property
        def size(self) -> int:
            return 1 << 50

    source = Endless(b"")
    size = 1 << 20
    with torch.device("meta"):
        model = module(a=torch.empty(size, size), b=torch.empty(size, 1024, dtype=BF16))
    plan = plan_load(model, catalogue(source, ("a", F32, (size, size)), ("b", F32, (size, 1024))))
    assert plan.forecast.straight == 4 << 40
    assert plan.forecast.buffered == 4 << 30
    assert plan.forecast.reads == (4 << 40) // STRAIGHT_CHUNK + (4 << 30) // BUFFER_BYTES
    assert plan.forecast.extra_memory <= 4 * (BUFFER_BYTES + SCRATCH_BYTES)
    assert source.reads == 0


_dims = st.integers(1, 6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_mixture_takes_what_is_forecast(data: st.DataObject) -> None:
    parameters, described, rules = {}, [], []
    for number in range(data.draw(st.integers(1, 5))):
        name = f"p{number}"
        rows, columns = data.draw(_dims), data.draw(_dims)
        own, stored = (data.draw(st.sampled_from([F32, BF16, torch.float64])) for _ in range(2))
        kind = data.draw(st.sampled_from(["plain", "transpose", "computed", "sliced", "two", "strided"]))
        tensor = torch.zeros(rows, columns, dtype=own)
        shape: tuple[int, ...] = (rows, columns)
        if kind == "transpose":
            shape = (columns, rows)
            rules.append(Convert(name, name, "transpose"))
        elif kind == "computed":
            rules.append(Convert(name, name, doubled))
        elif kind == "sliced":
            shape = (rows + 1, columns + 2)
            rules.append(Convert(name, name, lambda w: w[1:, 1:-1]))
        elif kind == "two":
            tensor = torch.zeros(2 * rows, columns, dtype=own)
            described.append((f"{name}.other", stored, shape))
            rules.append(Convert([name, f"{name}.other"], name, lambda a, b: torch.cat([a, b])))
        elif kind == "strided":
            tensor = torch.zeros(columns, rows, dtype=own).t()
        described.append((name, stored, shape))
        parameters[name] = tensor.to("meta") if data.draw(st.booleans()) else tensor
    source = CountingSource(bytes(sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in described)))
    model = module(**parameters)
    plan = plan_load(model, catalogue(source, *described), rules=rules)
    assert plan.ok, str(plan)
    held_against_a_run(plan, model, source)


def test_a_real_model_takes_what_is_forecast(smollm2_folder: Path) -> None:
    from weightloaders.skeleton import build_skeleton

    model = build_skeleton(str(smollm2_folder)).model
    with open_weights(smollm2_folder) as weights:
        plan = plan_load(model, weights)
        told = plan.forecast
        assert (told.straight, told.strided, told.extra_memory) == (weights.nbytes, 0, 0)
        report = plan.run(model)
    assert (report.bytes_read, report.extra_memory) == (told.bytes_to_read, 0)
    assert report.bytes_by_path == {"straight": weights.nbytes}
