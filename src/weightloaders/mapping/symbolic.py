"""`SymbolicTensor`: runs ordinary torch code and records where every element comes from.

A symbol has no values. It holds *runs*: pieces of its row-major element order that are pieces of a source's row-major
element order. Views leave the runs alone, `cat` and `stack` join them, slices cut them. What comes out says which bytes
of which source go where in the target, so that nothing needs to be computed to fill it.

What can't be said in a bounded number of runs (arithmetic, a cast, a large transpose) raises `Untraceable`; the caller
then runs the same code on real tensors.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# A transpose has a run an element. Up to here the runs are cheaper than a computation, beyond they are not.
MAX_RUNS = 1 << 16


class Untraceable(Exception):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """The code does something that is not a rearrangement; the message is the operation's name."""


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` elements from ``start`` on, in the row-major order of source number ``source``."""

    source: int
    start: int
    length: int


class SymbolicTensor(torch.Tensor):
    """A tensor without values that knows where its elements would come from."""

    runs: tuple[Run, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, runs: Iterable[Run]) -> SymbolicTensor:
        # Strides are always claimed to be row-major, so `reshape` and `contiguous` never copy.
        symbol: SymbolicTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # noqa: SLF001
            cls, tuple(shape), dtype=dtype, device="meta"
        )
        symbol.runs = _joined(runs)
        return symbol

    @classmethod
    def of(cls, source: int, shape: Sequence[int], dtype: torch.dtype) -> SymbolicTensor:
        """The symbol for a whole source tensor."""
        return cls(shape, dtype, (Run(source, 0, math.prod(shape)),))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SymbolicTensor(shape={list(self.shape)}, dtype={self.dtype}, runs={len(self.runs)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _OPERATIONS.get(func)
        if handler is None:
            raise Untraceable(str(func))
        return handler(func, args, kwargs or {})


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbours that are neighbours in the source too become one run."""
    result: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        last = result[-1] if result else None
        if last is not None and last.source == run.source and last.start + last.length == run.start:
            result[-1] = Run(last.source, last.start, last.length + run.length)
        else:
            result.append(run)
            if len(result) > MAX_RUNS:
                raise Untraceable("more than a bounded number of runs")
    return tuple(result)


def _taken(symbol: SymbolicTensor, ranges: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """The runs of some ranges (start, length) of a symbol's element order, one range behind the other."""
    starts = list(itertools.accumulate((run.length for run in symbol.runs), initial=0))
    for start, length in ranges:
        end = start + length
        at = bisect.bisect_right(starts, start) - 1
        while start < end:
            run, offset = symbol.runs[at], start - starts[at]
            count = min(run.length - offset, end - start)
            yield Run(run.source, run.start + offset, count)
            start += count
            at += 1


def _shape_by_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch says about the result: the same operation on plain meta tensors."""
    plain = pytree.tree_map_only(
        SymbolicTensor, lambda s: torch.empty(s.shape, dtype=s.dtype, device="meta"), (args, kwargs)
    )
    return func(*plain[0], **plain[1])


def _same_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """Views that leave the row-major order of elements alone."""
    symbol: SymbolicTensor = args[0]
    result = _shape_by_meta(func, args, kwargs)
    if result.dtype != symbol.dtype:
        raise Untraceable(f"{func} to {result.dtype}")
    return SymbolicTensor(result.shape, symbol.dtype, symbol.runs)


def _ranges_of(shape: Sequence[int], dim: int, positions: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Element ranges of slices (start, size) along a dimension, in the order of the result."""
    outer, size, inner = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    pieces = [(start * inner, count * inner) for start, count in positions]
    if outer * len(pieces) > MAX_RUNS:
        raise Untraceable("more than a bounded number of runs")
    for block in range(outer):
        for start, count in pieces:
            yield block * size * inner + start, count


def _part(symbol: SymbolicTensor, dim: int, positions: list[tuple[int, int]], shape: Sequence[int]) -> SymbolicTensor:
    return SymbolicTensor(shape, symbol.dtype, _taken(symbol, _ranges_of(symbol.shape, dim, positions)))


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % symbol.dim()
    start = args[2] if len(args) > 2 else kwargs.get("start")
    end = args[3] if len(args) > 3 else kwargs.get("end")
    step = args[4] if len(args) > 4 else kwargs.get("step", 1)
    chosen = range(symbol.shape[dim])[slice(start, end, step)]
    positions = [(chosen.start, len(chosen))] if step == 1 else [(at, 1) for at in chosen]
    return _part(symbol, dim, positions, _shape_by_meta(func, args, kwargs).shape)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol, dim, index = args
    result = _shape_by_meta(func, args, kwargs)  # also checks the index
    dim %= symbol.dim()
    return _part(symbol, dim, [(index % symbol.shape[dim], 1)], result.shape)


def _parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SymbolicTensor]:
    """split, split_with_sizes, unbind: several slices along one dimension."""
    symbol: SymbolicTensor = args[0]
    results = _shape_by_meta(func, args, kwargs)
    position = 1 if func is torch.ops.aten.unbind.int else 2
    dim = (args[position] if len(args) > position else kwargs.get("dim", 0)) % symbol.dim()
    parts, at = [], 0
    for result in results:
        size = 1 if func is torch.ops.aten.unbind.int else result.shape[dim]
        parts.append(_part(symbol, dim, [(at, size)], result.shape))
        at += size
    return parts


def _symbols(func: Any, tensors: Sequence[torch.Tensor]) -> list[SymbolicTensor]:
    symbols = [t for t in tensors if isinstance(t, SymbolicTensor)]
    if len(symbols) != len(tensors):
        raise Untraceable(f"{func} with a tensor that does not come from the source")
    if len({s.dtype for s in symbols}) > 1:
        raise Untraceable(f"{func} of different dtypes")
    return symbols


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    tensors = _symbols(func, args[0])
    result = _shape_by_meta(func, args, kwargs)
    # torch lets one-dimensional empty tensors pass among others; they add nothing.
    tensors = [t for t in tensors if t.numel() or t.dim() == result.dim()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
    outer = math.prod(result.shape[:dim])
    if outer * len(tensors) > MAX_RUNS:
        raise Untraceable("more than a bounded number of runs")
    blocks = [(t, t.numel() // outer if outer else 0) for t in tensors]
    runs = (run for i in range(outer) for t, n in blocks for run in _taken(t, [(i * n, n)]))
    return SymbolicTensor(result.shape, result.dtype, runs)


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    tensors = _symbols(func, args[0])
    result = _shape_by_meta(func, args, kwargs)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
    joined = _cat(torch.ops.aten.cat.default, ([t.unsqueeze(dim) for t in tensors], dim), {})
    return SymbolicTensor(result.shape, result.dtype, joined.runs)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    result = _shape_by_meta(func, args, kwargs)
    rank = symbol.dim()
    if func is torch.ops.aten.permute.default:
        order = [dim % rank for dim in args[1]]
    else:
        first, second = (0, min(1, rank - 1)) if func is torch.ops.aten.t.default else (args[1] % rank, args[2] % rank)
        order = list(range(rank))
        order[first], order[second] = order[second], order[first]
    # The innermost dimensions that keep their place move as blocks.
    kept = rank
    while kept > 0 and order[kept - 1] == kept - 1:
        kept -= 1
    block = math.prod(symbol.shape[kept:])
    strides = [math.prod(symbol.shape[dim + 1 :]) for dim in range(rank)]
    if symbol.numel() and symbol.numel() // block > MAX_RUNS and any(symbol.shape[d] != 1 for d in range(kept)):
        moved = [d for d in order if symbol.shape[d] != 1]
        if moved != sorted(moved):
            raise Untraceable(f"{func} of a large tensor")
        return SymbolicTensor(result.shape, symbol.dtype, symbol.runs)
    axes = [[i * strides[d] for i in range(symbol.shape[d])] for d in order[:kept]]
    ranges = ((sum(position), block) for position in itertools.product(*axes))
    return SymbolicTensor(result.shape, symbol.dtype, _taken(symbol, ranges))


_aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (
            _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.reshape.default,
            _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
            _aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.contiguous.default,
            _aten.lift_fresh.default,
        ),
        _same_order,
    ),
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int), _parts),
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    **dict.fromkeys((_aten.permute.default, _aten.transpose.int, _aten.t.default), _permute),
}  # fmt: skip
