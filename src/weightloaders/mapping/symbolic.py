"""`SymbolicTensor`: runs ordinary torch code and records where every element comes from.

A symbol has no values. It is a strided view of a *space*, as a tensor is of its storage, and the space knows by which
strided copies (`placement`) it was filled. Views only look at the space in another way, and torch itself works out how;
`cat`, `stack`, `clone` and the like fill a space of their own by copies composed with those before. What comes out says
which bytes of which source go where in the target, so that nothing needs to be computed to fill it.

What is no such copy (arithmetic, a second cast, a look at values) raises `Untraceable`; the caller then runs the same
code on real tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from weightloaders.mapping.composing import MAX_PLACEMENTS
from weightloaders.mapping.dtypes import may_cast
from weightloaders.mapping.placement import Placement, coalesce, may_overlap, placement, whole
from weightloaders.mapping.spaces import Space, Untraceable, refusals, rounded, too_many
from weightloaders.weights.info import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Run torch code on symbols within this.

    New memory (``empty``, ``zeros``) that the code asks for is a symbol too, and what the code may not do is noticed
    even if it catches every exception.

    Raises:
        Untraceable: At the end, if the code met one and went on.
    """
    refused: list[str] = []
    token = refusals.set(refused)
    try:
        # In inference mode, operations come here whole that torch otherwise takes apart first.
        with torch.inference_mode(mode=False), _Tracing():  # type: ignore[no-untyped-call]  # torch declares no types
            yield
    finally:
        refusals.reset(token)
    if refused:
        raise Untraceable(refused[0])


# Tens of thousands of symbols are made, of a few shapes; what they look at is only ever looked at.
@functools.lru_cache(maxsize=256)
def _plain_source(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # None of it is for whoever looks on as torch code runs.
    with no_dispatch(), torch.inference_mode(mode=False):
        return torch.empty(shape, dtype=dtype, device="meta")


class SymbolicTensor(torch.Tensor):
    """A tensor without values that knows where its elements would come from.

    Attributes:
        space: What it is a view of.
        plain: How it looks at it: a plain tensor on meta with the same sizes, strides and offset.
    """

    space: Space
    plain: torch.Tensor

    # Torch code goes straight to `__torch_dispatch__`, below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 -- how torch's own subclasses say so

    @staticmethod
    def __new__(cls, plain: torch.Tensor, space: Space) -> SymbolicTensor:
        """Make a symbol that looks at a space as a plain tensor on meta does at its storage."""
        symbol: SymbolicTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 -- the only way to make one
            cls, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype, device=torch.device("cpu")
        )
        symbol.plain = plain
        symbol.space = space
        return symbol

    @classmethod
    def of(cls, source: int, shape: Sequence[int], dtype: torch.dtype) -> SymbolicTensor:
        """The symbol for a whole source tensor."""
        plain = _plain_source(tuple(shape), dtype)
        return cls(plain, Space([whole(source, plain.numel())], is_source=True))

    @property
    def is_cast(self) -> bool:
        """Whether its elements were cast on the way; at most once."""
        return self.space.is_cast

    def placements(self) -> list[Placement]:
        """Where its elements come from, in its own row-major order; of what was never written, from None.

        Raises:
            Untraceable: If there are too many separate pieces.
        """
        if refusals.get() is not None:
            _check_current(self)
        result = Space([])
        result.write(self.space, self.plain, contiguous_strides(self.shape), 0)
        return coalesce(result.layers)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch declares no types
        return f"SymbolicTensor(shape={list(self.shape)}, dtype={self.dtype}, layers={len(self.space.layers)})"

    # These would get at memory without asking torch's dispatcher.
    @property
    def data(self) -> torch.Tensor:
        """What it is without its history; it can't be exchanged."""
        return self.detach()

    @data.setter
    def data(self, _: Any) -> NoReturn:
        raise Untraceable("an assignment to .data")

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise Untraceable("numpy")

    def tolist(self) -> NoReturn:
        """Refused."""
        raise Untraceable("tolist")

    def data_ptr(self) -> NoReturn:
        """Refused."""
        raise Untraceable("data_ptr")

    def untyped_storage(self) -> NoReturn:
        """Refused."""
        raise Untraceable("untyped_storage")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a plain function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return _dispatch(func, args, kwargs, _symbols_in(args, kwargs))


class _Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types
    """Sees to it that new memory is a symbol."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Refused: to keep its compiler away from here, where it is not, torch would import it, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What symbols are made of is on meta, and no other code has a use for that.
        if func in _FACTORIES and kwargs.get("device") != torch.device("meta"):
            return _new(func, args, kwargs, _FACTORIES[func])
        symbols = _symbols_in(args, kwargs)
        return _dispatch(func, args, kwargs, symbols) if symbols else func(*args, **kwargs)


def _symbols_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SymbolicTensor]:
    return [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, SymbolicTensor)]


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Sequence[SymbolicTensor]) -> Any:
    for symbol in symbols:
        _check_current(symbol)
    handler = _OPERATIONS.get(func)
    if handler is None:
        if not _is_view(func):
            raise Untraceable(str(func))
        handler = _view
    return handler(func, args, kwargs)


def _check_current(symbol: SymbolicTensor) -> None:
    """Refuse what comes from the sources of another run of the code: they are not those of this one."""
    refused = symbol.space.refusals
    if refused is None or refused is refusals.get():
        return
    if any(isinstance(layer.source, int) for layer in symbol.space.layers):
        reason = "a tensor kept from an earlier call, or used in another thread"
        # Whoever made it learns of it, too: in another thread nobody else would.
        refused.append(reason)
        raise Untraceable(reason)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether what an operation returns is, by its own declaration, always a view of what it is given."""
    returns = func._schema.returns  # noqa: SLF001 -- torch's only word on it
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _plain(tree: Any) -> Any:
    """Views instead of symbols: what torch works out on these holds for the symbols, and so do its errors."""
    return pytree.tree_map_only(SymbolicTensor, lambda symbol: symbol.plain, tree)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    symbol = args[0]
    if not isinstance(symbol, SymbolicTensor):
        raise Untraceable(f"{func} with a tensor that does not come from the source")
    plain_args, plain_kwargs = _plain((args, kwargs))
    result = func(*plain_args, **plain_kwargs)

    memory = symbol.plain.untyped_storage()._cdata  # noqa: SLF001 -- torch's only way to tell one memory from another

    def seen(view: torch.Tensor) -> SymbolicTensor:
        # Some views are of other values: of bits as another dtype, conjugates. And some are copies where need be.
        same_values = view.dtype == symbol.dtype and not view.is_conj() and not view.is_neg()
        if not same_values or view.untyped_storage()._cdata != memory:  # noqa: SLF001 -- see above
            raise Untraceable(str(func))
        return SymbolicTensor(view, symbol.space)

    return pytree.tree_map_only(torch.Tensor, seen, result)


def _filled(result: torch.Tensor, parts: Iterable[tuple[SymbolicTensor, Sequence[int], int]]) -> SymbolicTensor:
    """A symbol of a space of its own.

    Args:
        result: How it looks at it.
        parts: The symbols that fill it, each with the steps by which it goes in, and where it starts.
    """
    space = Space([])
    for symbol, steps, start in parts:
        space.write(symbol.space, symbol.plain, steps, start, cast=_needs_cast(symbol.dtype, result.dtype))
    space.layers = coalesce(space.layers)
    space.filled = result.numel()
    return SymbolicTensor(result, space)


def _needs_cast(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target:
        return False
    if not may_cast(source, target):
        raise Untraceable(f"a cast from {source} to {target}")
    return True


def _symbols(func: Any, tensors: Sequence[torch.Tensor]) -> list[SymbolicTensor]:
    symbols = [t for t in tensors if isinstance(t, SymbolicTensor)]
    if len(symbols) != len(tensors):
        raise Untraceable(f"{func} with a tensor that does not come from the source")
    return symbols


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """clone, and what `Tensor.to` does: a move to another device changes nothing here."""
    symbol: SymbolicTensor = args[0]
    result = func(symbol.plain, **{**kwargs, "device": "meta"} if func is _copy_to else kwargs)
    return _filled(result, [(symbol, result.stride(), 0)])


def _unsafe_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """How `reshape` ends where it had to copy."""
    return SymbolicTensor(args[0].plain.view(args[1]), args[0].space)


def _in_rows(symbols: Sequence[SymbolicTensor], dims: int) -> bool:
    """Whether torch lays out in row-major order what is put together of these; with channels there are other orders."""
    return dims < len("NCHW") or all(symbol.plain.is_contiguous() for symbol in symbols)


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbols = _symbols(func, args[0])
    dim = _argument(args, kwargs, 1, "dim", 0)
    first = symbols[0]
    if (
        len({(s.dtype, s.dim(), s.shape[:dim], s.shape[dim:][1:]) for s in symbols}) == 1
        and -first.dim() <= dim < first.dim()
        and _in_rows(symbols, first.dim())
    ):
        # Nearly always; see `_stack`.
        dim %= first.dim()
        shape = (*first.shape[:dim], sum(symbol.shape[dim] for symbol in symbols), *first.shape[dim + 1 :])
        result = torch.empty(shape, dtype=first.dtype, device="meta")
    else:
        result = func([symbol.plain for symbol in symbols], dim)
        dim %= result.dim()
    steps = result.stride()
    # torch lets empty vectors pass among tensors of any shape; they add nothing.
    symbols = [symbol for symbol in symbols if symbol.numel()]
    starts = itertools.accumulate((symbol.shape[dim] * steps[dim] for symbol in symbols), initial=0)
    return _filled(result, ((symbol, steps, start) for symbol, start in zip(symbols, starts, strict=False)))


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbols = _symbols(func, args[0])
    dim = _argument(args, kwargs, 1, "dim", 0)
    if len({(symbol.shape, symbol.dtype) for symbol in symbols}) == 1 and _in_rows(symbols, symbols[0].dim() + 1):
        # Nearly always. torch's own way on meta imports its compiler first, which takes seconds.
        one = symbols[0].plain.unsqueeze(dim)
        dim %= one.dim()
        shape = (*one.shape[:dim], len(symbols), *one.shape[dim + 1 :])
        result = torch.empty(shape, dtype=one.dtype, device="meta")
    else:
        result = func([symbol.plain for symbol in symbols], dim)
        dim %= result.dim()
    steps = result.stride()
    others = (*steps[:dim], *steps[dim + 1 :])
    return _filled(result, ((symbol, others, at * steps[dim]) for at, symbol in enumerate(symbols)))


def _flip(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    result = func(symbol.plain, args[1])
    flipped = {dim % symbol.dim() for dim in args[1]}
    steps = [-step if dim in flipped else step for dim, step in enumerate(result.stride())]
    start = sum((result.shape[dim] - 1) * result.stride(dim) for dim in flipped) if result.numel() else 0
    return _filled(result, [(symbol, steps, start)])


def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    pads = args[1]
    result = func(symbol.plain, pads)
    space = Space([whole(rounded(_argument(args, kwargs, 2, "value", 0), result.dtype), result.numel())])
    inside, outside = symbol.plain, result
    for number, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = symbol.dim() - 1 - number
        # A negative pad cuts off.
        kept = symbol.shape[dim] + min(before, 0) + min(behind, 0)
        inside = inside.narrow(dim, max(-before, 0), kept)
        outside = outside.narrow(dim, max(before, 0), kept)
    space.write(symbol.space, inside, outside.stride(), int(outside.storage_offset()))
    return SymbolicTensor(result, space)


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    symbol: SymbolicTensor = args[0]
    result = func(symbol.plain, args[1])
    source = symbol.plain[(None,) * (result.dim() - symbol.dim())]
    sizes = [n for dim in range(source.dim()) for n in (args[1][dim], source.shape[dim])]
    for dim in range(source.dim()):
        source = source.unsqueeze(2 * dim)
    return _filled(result, [(SymbolicTensor(source.expand(sizes), symbol.space), result.view(sizes).stride(), 0)])


def _chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """Rows by their numbers, where the numbers are known."""
    symbol: SymbolicTensor = args[0]
    if func is _aten.index.Tensor:
        given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if len(given) != 1:
            raise Untraceable(f"{func} with several indices")
        dim, index = given[0]
    else:
        dim, index = args[1] % symbol.dim(), args[2]
    if isinstance(index, SymbolicTensor) or index.dtype != torch.int64 or index.dim() != 1 or index.is_meta:
        raise Untraceable(f"{func} by an index that is no list of numbers")
    if len(index) > MAX_PLACEMENTS:
        raise too_many()
    result = torch.ops.aten.index_select.default(symbol.plain, dim, index.to("meta"))
    view, numbers = symbol.plain, index.tolist()
    size = view.shape[dim]
    least = -size if func is _aten.index.Tensor else 0
    if any(not least <= number < size for number in numbers):
        raise IndexError(f"an index is out of range for dimension {dim} of size {size}")
    dims = [d for at, d in enumerate(zip(view.shape, view.stride(), result.stride(), strict=True)) if at != dim]
    start, step, out_step = view.storage_offset(), view.stride(dim), result.stride(dim)
    space = Space([])
    for reading in coalesce(
        placement(0, start + number % size * step, at * out_step, dims) for at, number in enumerate(numbers)
    ):
        space.copy(symbol.space, reading)
    space.layers = coalesce(space.layers)
    return SymbolicTensor(result, space)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> SymbolicTensor:
    """New memory, of one value or not yet written."""
    plain_args, plain_kwargs = _plain((args, kwargs))
    result = func(*plain_args, **{**plain_kwargs, "device": "meta"})
    if value is _GIVEN:
        value = _argument(args, kwargs, 2 if func is _aten.new_full.default else 1, "fill_value", None)
    source = None if value is _UNWRITTEN else rounded(value, result.dtype)
    return SymbolicTensor(result, Space([whole(source, math.prod(result.shape))]))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor:
    """copy_, fill_ and zero_, into memory that the code made itself."""
    symbol = args[0]
    if not isinstance(symbol, SymbolicTensor):
        raise Untraceable(f"{func} into a tensor that does not come from the source")
    if symbol.space.is_source:
        raise Untraceable(f"{func} into what it was given")
    if symbol.numel() and may_overlap(symbol.plain.shape, symbol.plain.stride()):
        raise Untraceable(f"{func} into a tensor that has one element at several places")
    if func is _aten.copy_.default:
        (source,) = _symbols(func, args[1:2])
        spread = source.plain.expand(symbol.shape)
        cast = _needs_cast(source.dtype, symbol.dtype)
        symbol.space.write(source.space, spread, symbol.plain.stride(), int(symbol.plain.storage_offset()), cast=cast)
        return symbol
    value = 0 if func is _aten.zero_.default else args[1]
    if isinstance(value, torch.Tensor):
        if isinstance(value, SymbolicTensor) or value.is_meta:
            raise Untraceable(f"{func} with a value that is not known yet")
        value = value.item()
    symbol.space.fill(value, symbol.plain)
    return symbol


_aten = torch.ops.aten
_copy_to = _aten._to_copy.default  # noqa: SLF001 -- torch's own name for what `Tensor.to` does
_OPERATIONS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.clone.default: _copied,
    _copy_to: _copied,
    _aten._unsafe_view.default: _unsafe_view,  # noqa: SLF001 -- torch's own name
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.flip.default: _flip,
    _aten.constant_pad_nd.default: _pad,
    _aten.repeat.default: _repeat,
    **dict.fromkeys((_aten.index_select.default, _aten.index.Tensor), _chosen),
    **dict.fromkeys((_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default), _written),
}
_GIVEN, _UNWRITTEN = object(), object()
_FACTORIES: dict[Any, Any] = {
    **dict.fromkeys(
        (
            _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
            _aten.new_empty.default, _aten.new_empty_strided.default,
        ),
        _UNWRITTEN,
    ),
    **dict.fromkeys((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), 0),
    **dict.fromkeys((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default), 1),
    **dict.fromkeys((_aten.full.default, _aten.full_like.default, _aten.new_full.default), _GIVEN),
}  # fmt: skip
