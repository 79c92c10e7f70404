"""Bounds to what a pickle may cost: how deep it nests, how much it repeats, what its calls allocate and copy.

A few hundred bytes of a pickle are enough to ask for more memory than any machine has, for a hash that takes for ever,
or for one that overflows the C stack. So torch's unpickler is looked over the shoulder.
"""

from __future__ import annotations

import _codecs
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import CheckpointFormatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

# Far more than any pickle of weights has; a hash of tuples some thousands deep overflows a thread's stack.
_DEEPEST = 100
# Steps of taking apart what the pickle repeats or passes to calls. By its size, they take as long as unpickling it.
_FREE_STEPS, _STEPS_PER_BYTE = 1 << 20, 16
_SET_ITEM = b"s"
_WATCHED = frozenset({_SET_ITEM, b"R", b"\x81", b"b"})  # the opcodes SETITEM, REDUCE, NEWOBJ and BUILD
_TUPLE, _NESTING, _SIZED = (tuple,), (tuple, list), (str, bytes, bytearray, dict, set)
_ALLOCATORS = (bytearray, torch.Tensor, torch.UntypedStorage, torch.TypedStorage)


class PickleGuard:
    """Watches one object being unpickled.

    Args:
        unpickler: torch's unpickler; it is made to ask here.
        stream: What it reads, at the object's first byte.
        limit: How many elements the calls in the pickle may allocate, all together.
        file: The file, for messages.

    Raises:
        CheckpointFormatError: While unpickling, if the object would cost more than a file of its size explains.
    """

    def __init__(self, unpickler: Any, stream: IO[bytes], limit: int, file: str) -> None:
        self._unpickler, self._stream, self._start, self._file = unpickler, stream, stream.tell(), file
        self._limit = self._elements_left = limit
        self._steps = 0
        unpickler.read, unpickler.pop_mark = self._watched_read(unpickler.read), self._watched_pop(unpickler.pop_mark)
        unpickler.memo = _Memo(self)

    def _watched_read(self, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
        """The unpickler's ``read``, which looks at calls, and at a key, before they are made."""
        unpickler = self._unpickler

        def watched(size: int) -> bytes:
            data = read(size)
            # An argument byte may look like one of the opcodes, so what is found here need not be a call at all.
            if data in _WATCHED and size == 1:
                stack = unpickler.stack
                if len(stack) > 1:
                    if data == _SET_ITEM:
                        self.check_tuples(stack[-2])
                    else:
                        self._check_call(stack[-2], stack[-1])
            return data

        return watched

    def _watched_pop(self, pop_mark: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """The unpickler's ``pop_mark``, which yields the items of tuples, lists and dicts."""

        def watched() -> list[Any]:
            items = pop_mark()
            for item in items:
                if type(item) is tuple:
                    self.check_tuples(item)
            return items

        return watched

    def check_tuples(self, value: Any) -> None:
        """Refuse tuples of tuples that nobody could hash. Others, which may become keys, are let through."""
        if type(value) is tuple:
            self._leaves(value, _TUPLE)

    def _check_call(self, called: Any, arguments: Any) -> None:
        if type(arguments) is tuple and (not arguments or _is_view(called, arguments[0])):
            return
        leaves = self._leaves(arguments, _NESTING)
        arguments = _unpacked(arguments)
        # It calls its first argument with its third.
        while called is torch._tensor._rebuild_from_type_v2 and len(arguments) > 2:  # noqa: SLF001
            called, arguments = arguments[0], _unpacked(arguments[2])
            leaves = self._leaves(arguments, _NESTING)
        # Pickles of bytes use latin1; some other codecs take time that grows with the square of a text's length.
        if called is _codecs.encode and arguments and arguments[1:] not in (("latin1",), ("latin-1",)):
            raise self._refusal("encodes text by another codec than latin1, which bytes are pickled with")
        sizes = [value for value in leaves if type(value) is int]
        made_by_size = _allocates(called) and len(sizes) == len(leaves)
        if made_by_size or _is_real(called) or any(map(_is_real, leaves)):
            self._elements_left -= _product(sizes, self._limit)
            if self._elements_left < 0:
                raise self._refusal(f"asks for more than {self._limit} elements, more than it can hold")

    def _leaves(self, value: Any, into: tuple[type[tuple[Any, ...] | list[Any]], ...]) -> list[Any]:
        """What a value is made of, with what is nested in it taken apart."""
        leaves, level = [], [value]
        for _ in range(_DEEPEST):
            inner: list[Any] = []
            for item in level:
                if isinstance(item, into):
                    self._spend(1 + len(item))
                    inner += item
                else:
                    # A call may copy what it is given.
                    if isinstance(item, _SIZED):
                        self._spend(len(item))
                    leaves.append(item)
            if not inner:
                return leaves
            level = inner
        raise self._refusal(f"nests tuples or lists more than {_DEEPEST} deep")

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _FREE_STEPS and self._steps > _STEPS_PER_BYTE * (self._stream.tell() - self._start):
            raise self._refusal("repeats what it holds without end")

    def _refusal(self, what: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"the pickle in {self._file} {what}", file=self._file, hint="no checkpoint does so: don't trust the file"
        )


class _Memo(dict[int, Any]):
    """What a pickle may refer to again: for each tuple, those in it count anew."""

    def __init__(self, guard: PickleGuard) -> None:
        super().__init__()
        self._guard = guard

    def __getitem__(self, index: int) -> Any:
        value = super().__getitem__(index)
        self._guard.check_tuples(value)
        return value


def _unpacked(arguments: Any) -> tuple[Any, ...]:
    """What a function gets that is called with ``*arguments``."""
    return tuple(arguments) if isinstance(arguments, (*_NESTING, dict, set, bytes, bytearray)) else ()


def _is_view(called: Any, storage: Any) -> bool:
    """Whether a call makes a tensor over a storage of the file, as nearly all calls do."""
    return called is torch._utils._rebuild_tensor_v2 and not _is_real(storage)  # noqa: SLF001


def _allocates(called: Any) -> bool:
    return isinstance(called, type) and issubclass(called, _ALLOCATORS)


def _is_real(value: Any) -> bool:
    """Whether it has memory of its own: nothing that the file stores has, before it is read."""
    if isinstance(value, torch.TypedStorage):
        value = value._untyped_storage  # noqa: SLF001 -- its public twin warns
    return isinstance(value, torch.Tensor | torch.UntypedStorage) and value.device.type != "meta"


def _product(sizes: list[int], limit: int) -> int:
    """The product of sizes, as far as it is needed to see that it is above a limit."""
    product = 0 if 0 in sizes else 1
    for size in sizes:
        if product > limit:
            break
        product *= abs(size)
    return product
