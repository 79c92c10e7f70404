"""Copies and casts on the processor: what torch's `copy_` makes, whatever the layouts on either side."""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from weightloaders.transfer import copying
from weightloaders.transfer.copying import SCRATCH_BYTES, copy_values
from weightloaders.weights.reading import swap_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL = tuple(d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q"))
PAIRS = [(source, target) for source, target in itertools.product(FLOATS, FLOATS) if source != target]


def scratch(nbytes: int = SCRATCH_BYTES) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all numbers are the same, zeros by their signs too; NaN is NaN, whichever it is."""
    number = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a[number]), bits(b[number]))


@pytest.fixture
def every_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that tensors of a few hundred bytes meet them all."""
    monkeypatch.setattr(copying, "SMALL_BYTES", 0)
    monkeypatch.setattr(copying, "_LINE_BYTES", 16)
    monkeypatch.setattr(copying, "_RUN_BYTES", 32)
    monkeypatch.setattr(copying, "_LINES_AT_ONCE", 3)
    monkeypatch.setattr(copying, "_CAST_AT_ONCE", 50)
    monkeypatch.setattr(copying, "_LOOKED_AT_CLOSELY", 7)


def laid_out(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, *, repeats: bool) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in any order, with steps and gaps; one of them may repeat one value."""
    order = data.draw(st.permutations(range(len(shape))))
    steps = data.draw(st.tuples(*[st.integers(1, 3)] * len(shape)))
    gaps = data.draw(st.tuples(*[st.integers(0, 2)] * len(shape)))
    start = data.draw(st.integers(0, 2))
    spans = [size * step + gap for size, step, gap in zip(shape, steps, gaps, strict=True)]
    memory = torch.zeros(start + math.prod(spans), dtype=dtype)
    box = memory[start:].view([spans[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    box = box[tuple(slice(0, size * step, step) for size, step in zip(shape, steps, strict=True))]
    dim = data.draw(st.integers(-1, len(shape) - 1)) if repeats else -1
    return box.narrow(dim, 0, 1).expand(shape) if dim >= 0 and shape[dim] else box


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Everything in the storage of a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


# ------------------------------------------------------------------ the same values as torch's


@pytest.mark.usefixtures("every_size_counts")
@settings(deadline=None, max_examples=150)
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from([*FLOATS, torch.int64, torch.complex64, torch.complex128]))
def test_bits_arrive_as_they_are_from_any_layout_in_any_other_and_nowhere_else(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = laid_out(data, shape, dtype, repeats=True)
    memory = memory_of(source)
    memory.copy_(torch.randint(0, 256, memory.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8))
    destination = laid_out(data, shape, dtype, repeats=False)
    expected = memory_of(destination).clone()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize, dtype)
    strides, start = destination.stride(), destination.storage_offset()
    expected.view(kind).as_strided(shape, strides, start).copy_(source.view(kind))
    made = copy_values(destination, source, scratch(data.draw(st.sampled_from([0, 32, 200, 4096]))))
    assert torch.equal(memory_of(destination), expected)
    assert made is False


@pytest.mark.usefixtures("every_size_counts")
@settings(deadline=None, max_examples=150)
@given(data=st.data(), shape=SHAPES, kinds=st.sampled_from(PAIRS))
def test_a_cast_is_the_one_that_torch_makes_and_its_new_infinities_are_noticed(
    data: st.DataObject, shape: tuple[int, ...], kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    source = laid_out(data, shape, kinds[0], repeats=True)
    numbers = torch.randn(source.untyped_storage().nbytes() // kinds[0].itemsize, dtype=torch.float64)
    odd = data.draw(st.sampled_from([0.0, -0.0, 1e-7, 1e-40, 65519.0, -7e4, 3.3961e38, -1e300, math.inf, math.nan]))
    if numbers.numel():
        numbers[data.draw(st.integers(0, numbers.numel() - 1))] = odd
    memory_of(source).view(kinds[0]).copy_(numbers)
    destination = laid_out(data, shape, kinds[1], repeats=False)
    expected = source.to(kinds[1])
    made = copy_values(destination, source, scratch(data.draw(st.sampled_from([0, 32, 200, 4096]))))
    assert same_numbers(destination, expected)
    assert made == bool((expected.isinf() & source.isfinite()).any())


@pytest.mark.parametrize(("rows", "columns"), [(700, 1024), (300, 1100), (5, 20_000), (20_000, 5)])
@pytest.mark.parametrize("kinds", [(d, d) for d in FLOATS] + PAIRS, ids=lambda kinds: "-".join(map(str, kinds)))
def test_a_transpose_of_full_size_arrives(kinds: tuple[torch.dtype, torch.dtype], rows: int, columns: int) -> None:
    source = torch.randn(rows, columns, dtype=torch.float32).to(kinds[0])
    # Columns of a larger matrix, as a piece of a file's rows is in the end.
    whole = torch.zeros(columns, rows + 9, dtype=kinds[1])
    assert not copy_values(whole[:, 5:-4], source.t(), scratch())
    assert same_numbers(whole[:, 5:-4], source.t().to(kinds[1]))
    assert not whole[:, :5].any()
    assert not whole[:, -4:].any()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    count = 64 * 1000
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    memory = torch.zeros_like(data)
    copy_values(memory.view(dtype).view(1000, 64), data.view(dtype).view(64, 1000).t(), scratch())
    elements = data.view(64, 1000, dtype.itemsize).transpose(0, 1).reshape(-1)
    assert torch.equal(memory, elements)


@pytest.mark.parametrize("change", [torch.conj, lambda tensor: tensor.conj().imag], ids=["conjugate", "negative"])
def test_what_torch_has_put_off_is_done(change: Any) -> None:
    source = change(torch.randn(200, 100, dtype=torch.complex64))
    destination = torch.zeros(100, 200, dtype=source.dtype)
    copy_values(destination, source.t(), scratch())
    assert torch.equal(destination, source.t().resolve_conj().resolve_neg())


def test_a_parameter_of_a_class_of_its_own_is_written_by_its_own_copy() -> None:
    class Doubling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                args = (args[0], args[1] * 2)
            return super().__torch_function__(func, types, args, kwargs or {})

    destination = torch.zeros(3).as_subclass(Doubling)
    copy_values(destination, torch.ones(3), scratch())
    assert destination.tolist() == [2, 2, 2]


# ------------------------------------------------------------------ infinities


@pytest.mark.parametrize(
    ("value", "kinds", "infinite"),
    [
        # Half way between the largest bfloat16 and what would come next, and just below.
        (float.fromhex("0x1.ffp127"), (torch.float32, torch.bfloat16), True),
        (float.fromhex("0x1.fefffep127"), (torch.float32, torch.bfloat16), False),
        (-float.fromhex("0x1.ffp127"), (torch.float32, torch.bfloat16), True),
        (65520.0, (torch.float32, torch.float16), True),
        (65519.0, (torch.float32, torch.float16), False),
        (65536.0, (torch.bfloat16, torch.float16), True),
        (1e39, (torch.float64, torch.float32), True),
        (math.inf, (torch.float32, torch.bfloat16), False),
        (math.nan, (torch.float32, torch.float16), False),
    ],
)
@pytest.mark.parametrize("place", [0, 123_456, 499_999])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_value_beyond_the_range_of_the_target_is_noticed_among_many(
    value: float, kinds: tuple[torch.dtype, torch.dtype], infinite: bool, place: int, transposed: bool
) -> None:
    source = torch.ones(500_000, dtype=kinds[0])
    source[place] = value
    read = source.view(500, 1000).t() if transposed else source.view(1000, 500)
    assert copy_values(torch.zeros(1000, 500, dtype=kinds[1]), read, scratch()) == infinite


def test_a_new_infinity_is_noticed_beside_old_ones() -> None:
    source = torch.full((100_000,), -math.inf)
    source[70_000] = 1e6
    assert copy_values(torch.zeros(100_000, dtype=torch.float16), source, scratch())


def test_a_sum_beyond_the_range_of_the_target_is_no_infinity() -> None:
    source = torch.full((100_000,), 60_000.0)
    assert not copy_values(torch.zeros(100_000, dtype=torch.float16), source, scratch())


# ------------------------------------------------------------------ byte order


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype.itemsize <= 8 or dtype.is_complex], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 300_001])
def test_the_bytes_of_each_real_number_are_reversed_in_place(dtype: torch.dtype, count: int) -> None:
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    expected = data.view(-1, width).flip(1).reshape(-1)
    swap_bytes(data.view(dtype))
    assert torch.equal(data, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128], ids=str)
def test_reversing_bytes_takes_little_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1_000_000, dtype=dtype)
    with Allocations() as allocations:
        swap_bytes(tensor)
    assert 0 < allocations.largest <= SCRATCH_BYTES // 4


# ------------------------------------------------------------------ threads and memory


def test_threads_do_not_disturb_each_other() -> None:
    sources = [torch.randn(600, 1024) for _ in range(4)]
    destinations = [torch.zeros(1024, 600, dtype=torch.bfloat16) for _ in sources]

    def work(at: int) -> None:
        own = scratch()
        for _ in range(5):
            copy_values(destinations[at].zero_(), sources[at].t(), own)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(d, s.t().bfloat16()) for d, s in zip(destinations, sources, strict=True))


class Allocations(TorchDispatchMode):
    """Notices the largest tensor that an operation makes new memory for."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.nbytes)
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_beside_the_scratch_memory_next_to_none_is_taken(kinds: tuple[torch.dtype, torch.dtype], value: float) -> None:
    source = torch.full((2000, 1000), value, dtype=kinds[0])
    own, destination = scratch(), torch.zeros(1000, 2000, dtype=kinds[1])
    with Allocations() as allocations:
        copy_values(destination, source.t(), own)
        copy_values(destination.view(2000, 1000), source, own)
    assert 0 < allocations.largest <= SCRATCH_BYTES // 8
