"""The pickle in a ``.metadata``, read as data: its classes are never imported, and nothing in it is called.

Only what DCP itself writes is known; see ``torch/distributed/checkpoint/metadata.py``. All else is refused by name.
"""

from __future__ import annotations

import pickletools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightloaders.errors import CheckpointFormatError, UnsafeCheckpointError, WeightLoadersError

if TYPE_CHECKING:
    from collections.abc import Callable

# The classes of DCP's metadata; those of the module ``torch.distributed._shard`` are from before torch 2.0.
_CLASSES = frozenset(
    {"Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"}
    | {"BytesStorageMetadata", "TensorProperties", "MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING", "_StorageInfo"}
)
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"})
_DAMAGED = "the file is truncated or damaged; fetch it again"


class Kind(NamedTuple):
    """A class that a pickle names."""

    name: str


class Record:
    """What stands for an object of such a class.

    Attributes:
        kind: The name of its class.
        state: What its attributes were set from: a dict, or a tuple.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None


class _Refused(Exception):  # noqa: N818 -- never leaves this module
    """The pickle does something that none of DCP's does."""


def read_pickle(raw: bytes, file: str) -> Any:
    """The object of a pickle, of dicts, lists, tuples, plain values and `Record`.

    Args:
        raw: The pickle.
        file: The file, for messages.

    Raises:
        UnsafeCheckpointError: If it names what is none of DCP's own.
        CheckpointFormatError: If it is damaged.
    """
    machine = _Machine(file)
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "STOP":
                return machine.stack.pop()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise _Refused(f"it has the opcode {opcode.name}")
            step(machine, argument)
    except WeightLoadersError:
        raise
    except (_Refused, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(
            f"the pickle in {file} is damaged, or not one of DCP's: {error}", file=file, hint=_DAMAGED
        ) from error
    raise CheckpointFormatError(f"the pickle in {file} has no end", file=file, hint=_DAMAGED)


_MARK = object()


class _Machine:
    def __init__(self, file: str) -> None:
        self.file = file
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise _Refused("a mark is missing")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[len(self.stack) - count :])
        if len(items) != count:
            raise _Refused("a tuple lacks items")
        del self.stack[len(self.stack) - count :]
        self.push(items)

    def memoize(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise _Refused("it appends to what is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _Refused("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples that share their parts would take for ever.
            if type(key) not in (str, int, Record):
                raise _Refused("it has a dict with odd keys")
            target[key] = value

    def pop_many(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def named(self, module: Any, name: Any) -> None:
        known: Any = None
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Refused("it names what has no name")
        if module == "torch":
            dtype = vars(torch).get(name)
            known = dtype if isinstance(dtype, torch.dtype) else Kind("Size") if name == "Size" else None
        elif (module, name) == ("torch.serialization", "_get_layout"):
            known = Kind("layout")
        elif (module, name) == ("collections", "OrderedDict"):
            known = Kind("OrderedDict")
        elif module in ("pathlib", "pathlib._local") and name in _PATHS:
            known = Kind("Path")
        elif module.startswith("torch.distributed.") and name in _CLASSES:
            known = Kind(name)
        if known is None:
            raise UnsafeCheckpointError(
                f"the pickle in {self.file} needs {module}.{name}, which is no part of DCP's metadata; it is not read",
                file=self.file,
                hint="load it with the program that wrote it, and save it by torch.distributed.checkpoint.save",
            )
        self.push(known)

    def made(self) -> None:
        kind, arguments = self.pop_many(2)
        if not isinstance(kind, Kind) or type(arguments) is not tuple:
            raise _Refused("it calls what is no class of DCP's metadata")
        if kind.name == "Size":
            (sizes,) = arguments
            if type(sizes) is not tuple or not all(type(size) is int for size in sizes):
                raise _Refused("it has a shape that is none")
            self.push(sizes)
        else:
            self.push({} if kind.name == "OrderedDict" else Record(kind.name))

    def build(self) -> None:
        (state,) = self.pop_many(1)
        if not isinstance(self.stack[-1], Record):
            raise _Refused("it sets attributes of what has none")
        self.stack[-1].state = state


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda _machine, _argument: None),
    **dict.fromkeys(
        (
            *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
            *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        ),
        lambda machine, argument: machine.push(argument),
    ),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "MEMOIZE": lambda machine, _: machine.memoize(None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, index: machine.memoize(index)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine.push(machine.memo[index])),
    "APPEND": lambda machine, _: machine.append(machine.pop_many(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop_many(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, names: machine.named(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.named(*machine.pop_many(2)),
    "REDUCE": lambda machine, _: machine.made(),
    "NEWOBJ": lambda machine, _: machine.made(),
    "BUILD": lambda machine, _: machine.build(),
}
