"""Unpickling what `torch.save` wrote: by torch's own weights-only unpickler, with every storage on the meta device.

So nothing but the pickle itself is read, and no code of the file runs. Where torch's unpickler (which is private to
torch) is absent, `Unpickler` is None and `weightloaders.weights.torch_zip` asks `torch.load` instead.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import pickletools
import re
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import CheckpointFormatError, OptionsError, UnsafeCheckpointError, WeightLoadersError
from weightloaders.weights.pickle_guard import PickleGuard

try:
    from torch._weights_only_unpickler import Unpickler
except ImportError:  # pragma: no cover -- no torch that is released lacks it
    Unpickler = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

# What is admitted is a setting of the whole process in torch, so two threads must not change it at once.
_lock = threading.RLock()

# Where the classes of tensors that are spread over processes live. Where they were imported torch admits them,
# but what such a file holds is one process's part.
_SHARDED = re.compile(r"torch\.distributed\.(?:_?tensor|_shard)\b")

_RESAVE = "where it was made: torch.save(model.state_dict(), path)"


@dataclass(frozen=True, slots=True)
class StoragePart:
    """The bytes that a storage stands for.

    Args:
        record: Key of the record of the file that holds them.
        offset: First byte within the record.
        nbytes: How many the pickle says there are.
    """

    record: str
    offset: int
    nbytes: int


class MetaStorages:
    """The storages that a file's pickle names, as meta storages of the claimed size.

    Args:
        file: The file, for messages.

    Attributes:
        claims: Elements and bytes an element of each record, as the pickle claims them.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.claims: dict[str, tuple[int, int]] = {}
        self._storages: dict[StoragePart, torch.UntypedStorage] = {}
        self._parts: dict[int, StoragePart] = {}

    def persistent_load(self, saved_id: Any) -> torch.TypedStorage:
        """Make the storage for a persistent id ``("storage", type, record, location, numel[, view])``."""
        try:
            kind, record, _location, numel, *more = saved_id[1:]
            view = more[0] if more else None
            # A storage type is a stand-in that knows its dtype; the dtypes of recent years come untyped.
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            start, size = (0, numel) if view is None else view[1:]
            consistent = 0 <= start <= start + size <= numel
            # Only what is plain is made text of: nested tuples may have more of it than fits in memory.
            plain = type(record) in (str, int)
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointFormatError(f"{self.file} names a storage in an unknown way", file=self.file) from error
        if not plain:
            raise CheckpointFormatError(f"{self.file} names a storage in an unknown way", file=self.file)
        claim = (numel, dtype.itemsize)
        if not consistent or self.claims.setdefault(str(record), claim) != claim:
            raise CheckpointFormatError(
                f"{self.file} contradicts itself about the size of its storage {record!r}", file=self.file
            )
        part = StoragePart(str(record), start * dtype.itemsize, size * dtype.itemsize)
        storage = self._storages.get(part)
        if storage is None:
            storage = self._storages[part] = torch.UntypedStorage(part.nbytes, device="meta")  # type: ignore[no-untyped-call]
            self._parts[id(storage)] = part
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    def part_of(self, tensor: torch.Tensor) -> StoragePart | None:
        """The bytes behind a tensor's storage; None where it is no storage of this file."""
        # A storage has one Python object as long as that is alive, and `_storages` keeps it alive.
        return self._parts.get(id(tensor.untyped_storage()))


def unpickle(file: IO[bytes], storages: MetaStorages, *, limit: int, safe_globals: Sequence[Any] = ()) -> Any:
    """One object of a pickle stream, weights-only, its tensors on the meta device.

    Args:
        file: The stream, at the object's first byte; seekable.
        storages: Gets the storages that the object names.
        limit: How many elements the calls in it may allocate; see `PickleGuard`.
        safe_globals: Further classes and functions to admit; see `admitted`.

    Raises:
        UnsafeCheckpointError: If it needs globals that are not admitted.
        CheckpointFormatError: If it is damaged, holds tensors that have no raw bytes, or would cost more than its size
            explains.
        SlowPathNeededError: If this torch has no such unpickler.
    """
    if Unpickler is None:
        raise SlowPathNeededError
    name, start = storages.file, file.tell()
    unpickler: Any = Unpickler(file, encoding="utf-8")
    unpickler.persistent_load = storages.persistent_load
    unpickler.readline = _without_shards(file.readline)
    PickleGuard(unpickler, file, limit, name)
    with admitted(safe_globals), _on_meta(), undisturbed(), warnings.catch_warnings():
        # torch warns of other protocols and of sparse tensors; what matters of that is in our errors and notes.
        warnings.simplefilter("ignore")
        try:
            return unpickler.load()
        except WeightLoadersError:
            raise
        except pickle.UnpicklingError as error:
            file.seek(start)
            raise _refused(str(error), name, *_globals_of(file)) from error
        except MemoryError as error:
            raise CheckpointFormatError(f"{name} claims objects that do not fit into memory", file=name) from error
        except Exception as error:
            raise _not_understood(error, unpickler.stack, name) from error
        finally:
            # torch remembers sparse tensors to check them after loading; ones without data can't be checked.
            getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()  # noqa: SLF001


class SlowPathNeededError(Exception):
    """This torch can't unpickle with the tensors on the meta device."""


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """A context in which the user's default device, be it that of a ``with`` statement, has no say."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()  # noqa: SLF001
    return context


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """A context in which tensors that were saved from a device without storages (XLA) stay on the meta device, too."""
    setting = getattr(torch.serialization, "_serialization_tls", None)
    before = getattr(setting, "map_location", None)
    if setting is not None:
        setting.map_location = "meta"
    try:
        yield
    finally:
        if setting is not None:
            setting.map_location = before


@contextlib.contextmanager
def admitted(safe_globals: Sequence[Any]) -> Iterator[None]:
    """A context in which torch's weights-only unpickler admits these classes and functions too.

    Args:
        safe_globals: Classes, functions, ``(object, "module.name")`` pairs, or names ``"package.module:name"``.

    Raises:
        OptionsError: If something else is among them, or a name can't be imported.
    """
    wanted = [_checked_global(item) for item in safe_globals]
    with _lock:
        # What the process admits anyway is not ours to take away afterwards.
        already = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([item for item in wanted if item not in already]):
            yield


def _checked_global(item: Any) -> Any:
    if isinstance(item, str):
        module, _, name = item.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise OptionsError(
                f"safe_globals: can't import {item!r}: {error}",
                hint='write "package.module:name", or pass the class itself',
            ) from error
    if callable(item) or (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], str)):
        return item
    raise OptionsError(f"safe_globals holds classes and functions, not {item!r}")


def _without_shards(readline: Callable[[], bytes]) -> Callable[[], bytes]:
    """The unpickler's ``readline``, by which it reads the names of globals; it stops at those of sharded tensors."""

    def read() -> bytes:
        line = readline()
        if _SHARDED.match(line.decode("utf-8", "replace")):
            raise pickle.UnpicklingError("it holds tensors that are sharded over processes")
        return line

    return read


def _refused(reason: str, name: str, wanted: list[str], complete: bool) -> WeightLoadersError:
    if any(g.startswith(("torch.nn.modules.", "torch.nn.parallel.")) for g in wanted):
        return UnsafeCheckpointError(
            f"{name} is a whole pickled model, not a state dict; it needs {', '.join(wanted)}", file=name, hint=_RESAVE
        )
    if any(g.startswith("torch.distributed.") for g in wanted):
        return UnsafeCheckpointError(
            f"{name} holds tensors that are sharded over processes; it needs {', '.join(wanted)}",
            file=name,
            hint="save whole tensors: get_model_state_dict of torch.distributed.checkpoint, with full_state_dict=True",
        )
    if wanted:
        return UnsafeCheckpointError(
            f"{name} is a pickle that would run code to make objects of: {', '.join(wanted)}",
            file=name,
            hint=f'if you trust them: safe_globals=["package.module:name", ...]; else {_RESAVE}',
        )
    if not complete:
        return _damaged(reason, name)
    if "operand" in reason:
        return CheckpointFormatError(
            f"{name} uses a pickle protocol that torch does not read weights-only ({reason})",
            file=name,
            hint="save it with torch.save's default pickle protocol",
        )
    return UnsafeCheckpointError(f"torch's weights-only unpickler refuses {name}: {reason}", file=name, hint=_RESAVE)


def _damaged(reason: str, name: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"the pickle in {name} is damaged: {reason}",
        file=name,
        hint="the file is truncated or corrupted; fetch it again",
    )


def _not_understood(error: Exception, stack: list[Any], name: str) -> Exception:
    """What to raise for an error from within; what the unpickler was making is still on its stack."""
    making = getattr(stack[-1] if stack else None, "__name__", "")
    kind = {
        "_rebuild_qtensor": "quantized",
        "_rebuild_nested_tensor": "nested",
        "_rebuild_wrapper_subclass": "a tensor subclass without data of its own",
    }.get(making)
    if kind is not None:
        tensor = next((o for o in reversed(stack) if isinstance(o, str)), None)
        return CheckpointFormatError(
            f"tensor {tensor!r} of {name} is {kind}; its values are not raw numbers that could be loaded",
            file=name,
            tensor=tensor,
            hint="save it dequantized and dense" if kind != "nested" else "save its parts as tensors of their own",
        )
    return _damaged(f"{type(error).__name__}: {error}", name)


def _globals_of(pickled: IO[bytes]) -> tuple[list[str], bool]:
    """Names of the globals of a pickle that torch does not admit, and whether it could be followed to its end."""
    module = importlib.import_module("torch._weights_only_unpickler")
    known = {*getattr(module, "_get_allowed_globals", dict)(), *getattr(module, "_get_user_allowed_globals", dict)()}
    found: dict[str, None] = {}
    strings: list[str] = []
    complete = False
    # Of a damaged pickle, what was seen until then is what can be told.
    with contextlib.suppress(Exception):
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in ("GLOBAL", "INST"):
                found[str(argument).replace(" ", ".")] = None
            elif opcode.name == "STACK_GLOBAL":
                found[".".join(strings[-2:])] = None
            elif isinstance(argument, str):
                strings = [*strings[-1:], argument]
        complete = True
    return [name for name in found if name not in known or _SHARDED.match(name)], complete
