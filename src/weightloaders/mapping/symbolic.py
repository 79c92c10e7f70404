"""`SymbolicTensor`: runs ordinary torch code and records where every element comes from.

A symbol has no values. It holds *runs*: pieces of its row-major element order that are pieces of a source's row-major
element order. Views leave the runs alone, `cat` and `stack` join them, slices cut them. What comes out says which bytes
of which source go where in the target, so that nothing needs to be computed to fill it.

What can't be said in a bounded number of runs (arithmetic, a cast, a large transpose) raises `Untraceable`; the caller
then runs the same code on real tensors.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# A transpose has a run an element. Beyond this many, runs cost more than the computation that they would save.
MAX_RUNS = 1 << 16


class Untraceable(Exception):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """The code does something that is not a rearrangement; the message is the operation's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        refusals = _refusals.get()
        if refusals is not None:
            refusals.append(reason)


_refusals: ContextVar[list[str] | None] = ContextVar("weightloaders_refusals", default=None)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Run torch code on symbols within this: then what it may not do is noticed even if it catches every exception.

    Raises:
        Untraceable: At the end, if the code met one and went on.
    """
    token = _refusals.set([])
    try:
        yield
        refusals = _refusals.get()
    finally:
        _refusals.reset(token)
    if refusals:
        raise Untraceable(refusals[0])


# The number of a source, the first element in its row-major order, and how many. Plain tuples of numbers, because a
# layout may come to tens of thousands, and such tuples are spared by Python's garbage collector.
Run = tuple[int, int, int]


class SymbolicTensor(torch.Tensor):
    """A tensor without values that knows where its elements would come from.

    Attributes:
        runs: Where they come from, in row-major order; neighbours are joined.
    """

    runs: tuple[Run, ...]
    _starts: list[int] | None

    # Torch code goes straight to `__torch_dispatch__`, below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 -- how torch's own subclasses say so

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, runs: Iterable[Run]) -> SymbolicTensor:
        """Make a symbol.

        Raises:
            Untraceable: If there are more than `MAX_RUNS` runs.
        """
        # Strides are always claimed to be row-major, so `reshape` and `contiguous` never copy.
        symbol: SymbolicTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 -- the only way to make one
            cls, tuple(shape), dtype=dtype, device=torch.device("meta")
        )
        # What a view passes on is joined already.
        symbol.runs = runs if isinstance(runs, tuple) else _joined(runs)
        symbol._starts = None
        return symbol

    @classmethod
    def of(cls, source: int, shape: Sequence[int], dtype: torch.dtype) -> SymbolicTensor:
        """The symbol for a whole source tensor."""
        return cls(shape, dtype, [(source, 0, math.prod(shape))])

    @property
    def starts(self) -> list[int]:
        """Where each run begins in the symbol's own order, and where the last one ends."""
        if self._starts is None:
            self._starts = list(itertools.accumulate((length for _, _, length in self.runs), initial=0))
        return self._starts

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch declares no types
        return f"SymbolicTensor(shape={list(self.shape)}, dtype={self.dtype}, runs={len(self.runs)})"

    # These would get at memory without asking torch's dispatcher.
    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise Untraceable("numpy")

    def tolist(self) -> NoReturn:
        """Refused."""
        raise Untraceable("tolist")

    def data_ptr(self) -> NoReturn:
        """Refused."""
        raise Untraceable("data_ptr")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a plain function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _OPERATIONS.get(func)
        if handler is None:
            raise Untraceable(str(func))
        return handler(func, args, kwargs or {})


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbours that are neighbours in the source too become one run."""
    # A layout may well come to tens of thousands of runs, so this is written for speed.
    result: list[Run] = []
    source, start, end = -1, 0, 0
    for next_source, next_start, length in runs:
        if next_source == source and next_start == end:
            end += length
        elif length:
            if end > start:
                result.append((source, start, end - start))
            source, start, end = next_source, next_start, next_start + length
            if len(result) >= MAX_RUNS:
                raise _too_many_runs()
    if end > start:
        result.append((source, start, end - start))
    return tuple(result)


def _too_many_runs() -> Untraceable:
    return Untraceable(f"more than {MAX_RUNS} separate pieces")


def _cut(symbol: SymbolicTensor, ranges: Iterable[tuple[int, int]]) -> Iterator[Sequence[Run]]:
    """For each range (start, length) of a symbol's element order its runs."""
    runs = symbol.runs
    if len(runs) == 1:
        source, first, _ = runs[0]
        for start, length in ranges:
            yield ((source, first + start, length),)
        return
    starts = symbol.starts
    for start, length in ranges:
        end = start + length
        at = bisect.bisect_right(starts, start) - 1
        found = []
        while start < end:
            source, first, size = runs[at]
            offset = start - starts[at]
            count = min(size - offset, end - start)
            found.append((source, first + offset, count))
            start += count
            at += 1
        yield found


def _by_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch says about the result, or about a mistake: the same operation on plain meta tensors."""
    plain = pytree.tree_map_only(
        SymbolicTensor, lambda s: torch.empty(s.shape, dtype=s.dtype, device="meta"), (args, kwargs)
    )
    return func(*plain[0], **plain[1])


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _same_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """What leaves the row-major order of elements, and their values, alone."""
    symbol: SymbolicTensor = args[0]
    return SymbolicTensor(_by_meta(func, args, kwargs).shape, symbol.dtype, symbol.runs)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """A move to another device or memory format changes nothing here; a cast would change values."""
    symbol: SymbolicTensor = args[0]
    if kwargs.get("dtype") not in (None, symbol.dtype):
        raise Untraceable(f"{func} to {kwargs['dtype']}")
    return SymbolicTensor(symbol.shape, symbol.dtype, symbol.runs)


def _part(symbol: SymbolicTensor, dim: int, chosen: range, shape: Sequence[int]) -> SymbolicTensor:
    """What lies at some positions along one dimension."""
    if chosen == range(symbol.shape[dim]):
        return SymbolicTensor(shape, symbol.dtype, symbol.runs)
    outer, size, inner = math.prod(symbol.shape[:dim]), symbol.shape[dim], math.prod(symbol.shape[dim + 1 :])
    slabs = [(chosen.start, len(chosen))] if chosen.step == 1 else [(at, 1) for at in chosen]
    if not math.prod(shape):
        return SymbolicTensor(shape, symbol.dtype, ())
    if outer * len(slabs) > MAX_RUNS:
        raise _too_many_runs()
    ranges = (((i * size + start) * inner, count * inner) for i in range(outer) for start, count in slabs)
    return SymbolicTensor(shape, symbol.dtype, itertools.chain.from_iterable(_cut(symbol, ranges)))


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    result = _by_meta(func, args, kwargs)
    dim = _argument(args, kwargs, 1, "dim", 0) % symbol.dim()
    limits = [_argument(args, kwargs, at, name, None) for at, name in ((2, "start"), (3, "end"), (4, "step"))]
    return _part(symbol, dim, range(symbol.shape[dim])[slice(*limits)], result.shape)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    result = _by_meta(func, args, kwargs)
    dim = args[1] % symbol.dim()
    at = args[2] % symbol.shape[dim]
    return _part(symbol, dim, range(at, at + 1), result.shape)


def _parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SymbolicTensor]:
    """split, split_with_sizes, unbind: several slices along one dimension."""
    symbol: SymbolicTensor = args[0]
    results = _by_meta(func, args, kwargs)
    unbinds = func is torch.ops.aten.unbind.int
    dim = _argument(args, kwargs, 1 if unbinds else 2, "dim", 0) % symbol.dim()
    sizes = [1 if unbinds else result.shape[dim] for result in results]
    starts = itertools.accumulate(sizes, initial=0)
    return [
        _part(symbol, dim, range(start, start + size), result.shape)
        for start, size, result in zip(starts, sizes, results, strict=False)
    ]


def _symbols(func: Any, tensors: Sequence[torch.Tensor]) -> list[SymbolicTensor]:
    symbols = [t for t in tensors if isinstance(t, SymbolicTensor)]
    if len(symbols) != len(tensors):
        raise Untraceable(f"{func} with a tensor that does not come from the source")
    if len({s.dtype for s in symbols}) > 1:
        raise Untraceable(f"{func} of different dtypes")
    return symbols


def _side_by_side(
    symbols: Sequence[SymbolicTensor], outer: int, shape: Sequence[int], dtype: torch.dtype
) -> SymbolicTensor:
    """For each index of the outer dimensions what each symbol has there, one behind the other."""
    if not math.prod(shape):
        return SymbolicTensor(shape, dtype, ())
    if outer * len(symbols) > MAX_RUNS:
        raise _too_many_runs()
    in_turn = itertools.chain.from_iterable(zip(*(_blocks(symbol, outer) for symbol in symbols), strict=True))
    return SymbolicTensor(shape, dtype, itertools.chain.from_iterable(in_turn))


def _blocks(symbol: SymbolicTensor, count: int) -> Iterator[Sequence[Run]]:
    size = symbol.numel() // count
    return _cut(symbol, ((i * size, size) for i in range(count)))


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbols = _symbols(func, args[0])
    result = _by_meta(func, args, kwargs)
    dim = _argument(args, kwargs, 1, "dim", 0) % result.dim()
    # torch lets empty vectors pass among tensors of any shape; they add nothing.
    symbols = [s for s in symbols if s.numel()]
    return _side_by_side(symbols, math.prod(result.shape[:dim]), result.shape, result.dtype)


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbols = _symbols(func, args[0])
    # Where all have one shape, which is nearly always, torch need not be shown every one of hundreds of experts.
    shown = symbols if len({s.shape for s in symbols}) > 1 else symbols[:1]
    result = _by_meta(func, (shown, *args[1:]), kwargs)
    dim = _argument(args, kwargs, 1, "dim", 0) % result.dim()
    shape = [*result.shape[:dim], len(symbols), *result.shape[dim + 1 :]]
    return _side_by_side(symbols, math.prod(shape[:dim]), shape, result.dtype)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    result = _by_meta(func, args, kwargs)
    rank = symbol.dim()
    if func is torch.ops.aten.permute.default:
        order = [dim % rank for dim in args[1]]
    else:
        order = list(range(rank))
        if rank > 1 or func is not torch.ops.aten.t.default:
            first, second = (0, 1) if func is torch.ops.aten.t.default else (args[1] % rank, args[2] % rank)
            order[first], order[second] = order[second], order[first]
    # A dimension of one element may go anywhere without anything moving.
    wide = [dim for dim in range(rank) if symbol.shape[dim] != 1]
    shape = [symbol.shape[dim] for dim in wide]
    moved = [wide.index(dim) for dim in order if symbol.shape[dim] != 1]
    # The innermost dimensions that stay where they are move as blocks.
    while moved and moved[-1] == len(moved) - 1:
        moved.pop()
    if not moved or not symbol.numel():
        return SymbolicTensor(result.shape, symbol.dtype, symbol.runs)
    block = math.prod(shape[len(moved) :])
    if symbol.numel() // block > MAX_RUNS:
        raise _too_many_runs()
    steps = [math.prod(shape[dim + 1 :]) for dim in moved]
    axes = [range(0, shape[dim] * step, step) for dim, step in zip(moved, steps, strict=True)]
    ranges = ((sum(position), block) for position in itertools.product(*axes))
    return SymbolicTensor(result.shape, symbol.dtype, itertools.chain.from_iterable(_cut(symbol, ranges)))


_aten = torch.ops.aten
_copy_to = _aten._to_copy.default  # noqa: SLF001 -- torch's own name for what `Tensor.to` does
_OPERATIONS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (
            _aten.view.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
            _aten.clone.default, _aten.detach.default, _aten.alias.default,
        ),
        _same_order,
    ),
    _copy_to: _to_copy,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int), _parts),
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    **dict.fromkeys((_aten.permute.default, _aten.transpose.int, _aten.t.default), _permute),
}  # fmt: skip
