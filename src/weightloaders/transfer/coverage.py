"""Watching code that is not ours fill a model, so that what it leaves out, or cuts to fit, is noticed.

Three sources are joined: writes that torch dispatches (``copy_`` and all others that change a tensor), regions that our
own engine filled meanwhile, and storages that were replaced. A parameter that none of them saw is compared with a
digest from before: changed means that it was written outside torch's sight (through numpy, on another thread).

A copy of a parameter, as ``model.half()`` makes it, counts as filled as far as the original was.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weightloaders.mapping.dtypes import changes_meaning
from weightloaders.targets import held_by
from weightloaders.transfer.memory import is_plain, wraps_others
from weightloaders.transfer.regions import Regions, View, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

# Memory without values.
_RAW = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
}
# What has gone is forgotten whenever there are twice as many, from this number on.
_PRUNED_FROM = 1024
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)  # noqa: SLF001 -- the operation's name


# What hands a tensor's values to something that torch does not dispatch to.
_WAYS_OUT = {getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__array__", "__dlpack__")}


class _WaysOut(TorchFunctionMode):
    """Tells of the tensors whose memory somebody looks at past torch."""

    def __init__(self, tell: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WAYS_OUT and isinstance(args[0], torch.Tensor):
            self._tell(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Memory:
    """A storage that is watched. Addresses are used again, so it is told from a later one by a weak reference."""

    reference: StorageWeakRef
    regions: Regions
    # Names and views of the tensors in it that were handed to foreign code.
    handed: list[tuple[str, View]] = field(default_factory=list)
    # Of a copy of a parameter: what it held when it was made.
    digest: int | None = None
    # Whether somebody looked at it past torch, and so may have written to it.
    shown: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return cls(reference, Regions(storage.nbytes(), tensor.element_size()))

    @property
    def alive(self) -> bool:
        return not self.reference.expired()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Before:
    """A parameter as it was: the object, its shape, its storage's address, a digest of its values, its version."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    key: int | None
    digest: object
    version: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of which only a part was used.

    Attributes:
        shape: Its shape.
        view: How it lay in its memory.
        used: Which parts of that memory were used.
    """

    shape: tuple[int, ...]
    view: View
    used: tuple[View, ...]

    def is_made_whole_by(self, others: Iterable[Cut]) -> bool:
        """Whether the rest of it was used by others, who had it at the same place of a memory."""
        pieces = [piece for cut in (self, *others) if cut.view == self.view for piece in cut.used]
        regions = Regions(max(view.span[1] for view in (self.view, *pieces)), self.view.itemsize)
        for piece in pieces:
            regions.add(piece)
        return regions.covers(self.view)


@dataclass(frozen=True, slots=True)
class Covered:
    """What foreign code did.

    Attributes:
        filled: Names of what was filled.
        missing: Names of what was not.
        touched: Names of what was written, in whole or in part.
        changed: What has gone, or has another shape now, with how it was and is.
        unseen: Names of what was filled out of our sight, and so perhaps only in part.
        used: Whether anything of what was handed out was used; True where it can't be told.
        unused: Tensors that were handed out and not used. Empty where it can't be told.
        untaken: Tensors that were there and not asked for.
        cut: Tensors of which only a part was used.
        recast: Tensors that were copied into a parameter of another kind of dtype, with both dtypes.
    """

    filled: list[str]
    missing: list[str]
    touched: list[str]
    changed: dict[str, str]
    unseen: list[str]
    used: bool
    unused: list[str]
    untaken: list[str]
    cut: dict[str, Cut]
    recast: dict[str, tuple[torch.dtype, torch.dtype]]


def _key_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's storage; None where it has none of its own."""
    if wraps_others(tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage().data_ptr() or None


@functools.lru_cache(maxsize=4096)
def _roles(func: Any) -> tuple[tuple[str, ...], tuple[bool, ...], bool]:
    """The names of an operation's arguments, which of them it writes, and whether it only makes a view."""
    arguments = func._schema.arguments  # noqa: SLF001 -- torch has no public word for what an operation writes
    # Those that change what a tensor looks like, not its values, are no writes.
    reshapes = torch.Tag.inplace_view in func.tags or func is torch.ops.aten.resize_.default
    writes = tuple(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
    return tuple(a.name for a in arguments), tuple(w and not reshapes for w in writes), views or reshapes


class Coverage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Used as a context around foreign loading code.

    Args:
        tensors: Name -> the parameter or buffer that is to be filled.
        any_values: Whether new memory counts as filled with whatever values, not only with those of a source.

    Attributes:
        last_name: The tensor that was handed out last.
        last_shape: Its shape.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, any_values: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last_name: str | None = None
        self.last_shape: tuple[int, ...] = ()
        self._any_values = any_values
        self._before: dict[str, _Before] = {}
        self._written: dict[int, _Memory] = {}
        self._written_objects: set[int] = set()
        self._offered: list[str] = []
        self._names_handed: set[str] = set()
        self._handed: dict[int, _Memory] = {}
        self._unused: list[str] = []
        self._used_any = False
        self._cut: dict[str, Cut] = {}
        self._recast: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self._parameters: set[int] = set()
        self._ways_out = _WaysOut(self._shown)
        self._prune_at = 2 * len(tensors) + _PRUNED_FROM
        digests: dict[int, object] = {}
        for name, tensor in tensors.items():
            key = _key_of(tensor)
            if key is not None:
                self._written.setdefault(key, _Memory.of(tensor))
                self._parameters.add(key)
            if id(tensor) not in digests:
                digests[id(tensor)] = _digest(tensor)
            self._before[name] = _Before(tensor, tuple(tensor.shape), key, digests[id(tensor)], _version(tensor))

    # -- what torch does

    def __enter__(self) -> Self:
        self._ways_out.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._ways_out.__exit__(*exc)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Loading is not compiled, and keeping the compiler away from it means importing it, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names, writes, is_view = _roles(func)
        if func is torch.ops.aten.copy_.default:
            self._note_recast(args[1], args[0])
        for position, (name, is_written) in enumerate(zip(names, writes, strict=True)):
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is None or (is_view and not is_written):
                continue
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    (self.wrote if is_written else self._used)(leaf)
        if not is_view and not any(writes):
            inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if func not in _COPIES or not self._copied(args[0], result):
                is_filled = func.overloadpacket not in _RAW and (
                    any(map(self._has_values, inputs)) or (self._any_values and not inputs)
                )
                for leaf in pytree.tree_leaves(result):
                    if isinstance(leaf, torch.Tensor):
                        self._made(leaf, is_filled=is_filled)
        return result

    def _has_values(self, tensor: torch.Tensor) -> bool:
        """Whether what an operation makes of a tensor has values that came from elsewhere than the model itself."""
        key = _key_of(tensor)
        if key is None or self._is_handed(key):
            return True
        memory = self._written.get(key)
        return memory is None or not memory.alive or memory.regions.covers(View.of(tensor))

    def _is_handed(self, key: int) -> bool:
        memory = self._handed.get(key)
        return memory is not None and memory.alive

    def _made(self, tensor: torch.Tensor, *, is_filled: bool) -> None:
        """New memory, which may become a parameter's."""
        key = _key_of(tensor)
        if key is None or ((known := self._written.get(key)) is not None and known.alive):
            return
        memory = self._written[key] = _Memory.of(tensor)
        if is_filled:
            memory.regions.add(View.of(tensor))
        else:
            memory.digest = digest(tensor)
        if len(self._written) > self._prune_at:
            self._written = {key: memory for key, memory in self._written.items() if memory.alive}
            self._prune_at = 2 * len(self._written) + _PRUNED_FROM

    def filled_by_us(self, tensor: torch.Tensor) -> None:
        """Our own engine filled all of a tensor from the source."""
        self._used_any = True
        self._made(tensor, is_filled=True)
        self.wrote(tensor)

    def wrote(self, tensor: torch.Tensor) -> None:
        """A tensor, or a view of one, was written."""
        key = _key_of(tensor)
        if key is None:
            self._written_objects.add(id(tensor))
        elif (memory := self._written.get(key)) is not None and memory.alive:
            memory.regions.add(View.of(tensor))

    def _note_recast(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if changes_meaning(source.dtype, target.dtype) and _key_of(target) in self._parameters:
            memory = self._handed.get(_key_of(source) or 0)
            names = [name for name, _ in memory.handed] if memory is not None and memory.alive else []
            if len(names) == 1:
                self._recast[names[0]] = source.dtype, target.dtype

    def _used(self, tensor: torch.Tensor) -> None:
        key = _key_of(tensor)
        if key is not None and (memory := self._handed.get(key)) is not None and memory.alive:
            memory.regions.add(View.of(tensor))

    def _shown(self, tensor: torch.Tensor) -> None:
        self._used(tensor)
        key = _key_of(tensor)
        if key is not None and key in self._written:
            self._written[key].shown = True

    def _copied(self, source: torch.Tensor, result: torch.Tensor) -> bool:
        """A parameter may be exchanged for a copy of itself: another dtype, another device."""
        key, new_key = _key_of(source), _key_of(result)
        if key is None or new_key is None or key == new_key or self._is_handed(key):
            return False
        original = self._written.get(key)
        if original is None or not original.alive:
            return False
        copy = _Memory.of(result)
        copy.regions = original.regions.copied(View.of(source), View.of(result), result.untyped_storage().nbytes())
        copy.digest = digest(result)
        self._written[new_key] = copy
        return True

    # -- what is handed out

    def track(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand pairs on, and remember how much of each tensor is used."""
        previous: int | None = None
        for name, tensor in pairs:
            if previous is not None and previous in self._handed and not self._handed[previous].alive:
                # Usually the last one is gone by now. What else has gone is settled at the end.
                self._settle(self._handed.pop(previous))
            previous = _key_of(tensor)
            self.hand_out(name, tensor)
            yield name, tensor
            del tensor

    def offer(self, names: Iterable[str]) -> None:
        """These may be asked for."""
        self._offered.extend(names)

    def hand_out(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor goes to foreign code."""
        self.last_name, self.last_shape = name, tuple(tensor.shape)
        self._names_handed.add(name)
        key = _key_of(tensor)
        if key is None or tensor.numel() == 0:
            self._used_any = True  # what becomes of it can't be told
            return
        memory = self._handed.get(key)
        if memory is not None and not memory.alive:
            self._settle(memory)
            memory = None
        if memory is None:
            memory = self._handed[key] = _Memory.of(tensor)
        memory.handed.append((name, View.of(tensor)))

    def _settle(self, memory: _Memory) -> None:
        for name, view in memory.handed:
            self._used_any = self._used_any or memory.regions.touches(view)
            if memory.regions.covers(view):
                continue
            if not memory.regions.touches(view):
                self._unused.append(name)
            elif not any(other.meets(view) for n, other in memory.handed if n != name):
                # Of names that share memory it can't be told which was used.
                # What other tensors have of this memory is not kept.
                self._cut[name] = Cut(view.shape, view, tuple(p for p in memory.regions.pieces if p.meets(view)))

    # -- the end

    def finish(self, model: nn.Module) -> Covered:
        """What was filled, and how much of what was handed out was used for it."""
        now = held_by(model).everything
        for tensor in now.values():
            # A parameter that lives on in what was handed out uses it.
            self._used(tensor)
        states: dict[str, str] = {}
        changed: dict[str, str] = {}
        for name, before in self._before.items():
            current = now.get(name)
            if current is None:
                states[name], changed[name] = "changed", "has gone"
            elif is_plain(current) and tuple(current.shape) != before.shape:
                states[name] = "changed"
                changed[name] = f"had shape {list(before.shape)} and has {list(current.shape)}"
            else:
                states[name] = self._state(before, current) if math.prod(before.shape) else "empty"
        for memory in self._handed.values():
            self._settle(memory)
        self._handed.clear()
        unseen = [name for name, state in states.items() if state == "unseen"]
        untaken = [name for name in self._offered if name not in self._names_handed]
        return Covered(
            filled=[name for name, state in states.items() if state in ("filled", "unseen", "empty")],
            missing=[name for name, state in states.items() if state in ("partly", "untouched")],
            touched=[name for name, state in states.items() if state not in ("untouched", "empty")],
            changed=changed,
            unseen=unseen,
            used=self._used_any or bool(unseen) or not (self._names_handed or self._offered),
            # Where something was written out of our sight, something was used out of our sight.
            unused=[] if unseen else self._unused,
            untaken=untaken,
            cut=self._cut,
            recast=self._recast,
        )

    def _state(self, before: _Before, current: torch.Tensor) -> str:
        """``filled``, ``partly``, ``unseen`` (filled out of our sight) or ``untouched``."""
        if current.device.type == "meta":
            return "untouched"
        key = _key_of(current)
        if key is None:
            if current is not before.tensor or id(current) in self._written_objects:
                return "filled"
            return "untouched" if _digest(current) == before.digest else "unseen"
        if self._is_handed(key):
            return "filled"
        memory = self._written.get(key)
        if memory is None or not memory.alive:
            return "unseen"  # memory that we don't know: somebody put it there
        view = View.of(current)
        if memory.regions.covers(view):
            return "filled"
        if memory.regions.touches(view):
            return "partly"
        # The values that were there already may have been written again, which no digest shows.
        if memory.shown or (current is before.tensor and key == before.key and _version(current) != before.version):
            return "unseen"
        earlier = memory.digest if memory.digest is not None else before.digest
        return "untouched" if _digest(current) == earlier else "unseen"


def _version(tensor: torch.Tensor) -> int:
    """How often torch has written a tensor, on whatever thread; those of inference mode don't count."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 -- torch has no public word for it


def _digest(tensor: torch.Tensor) -> object:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    if _key_of(tensor) is not None:
        return digest(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return _version(tensor)  # all that can be asked of a class that we know nothing of
    return tuple(_digest(getattr(tensor, name)) for name in flatten()[0])
