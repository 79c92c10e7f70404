"""Watching code that is not ours fill a model, so that what it leaves out, or cuts to fit, is noticed.

Three sources are joined: writes that torch dispatches (``copy_`` and all others that change a tensor), regions that our
own engine filled meanwhile, and storages that were replaced. A parameter that none of them saw is compared with a
digest from before: changed means that it was written outside torch's sight.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weightloaders.transfer.memory import is_dense
from weightloaders.weights.reading import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from weightloaders.targets import Targets


@dataclass(slots=True)
class _Regions:
    """Which elements of a storage have been touched."""

    size: int
    whole: bool = False
    intervals: list[tuple[int, int]] = field(default_factory=list)
    mask: torch.Tensor | None = None

    def add(self, tensor: torch.Tensor) -> None:
        if self.whole or tensor.numel() == 0:
            return
        start = tensor.storage_offset()
        if tensor.is_contiguous():
            self.intervals.append((start, start + tensor.numel()))
            self._join()
        else:
            if self.mask is None:
                self.mask = torch.zeros(self.size, dtype=torch.bool)
            self.mask.as_strided(tensor.shape, tensor.stride(), start).fill_(True)

    def _join(self) -> None:
        self.intervals.sort()
        joined: list[tuple[int, int]] = []
        for start, end in self.intervals:
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        self.intervals = joined
        self.whole = joined == [(0, self.size)]

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether all elements of a view were touched."""
        if self.whole or tensor.numel() == 0:
            return True
        start, end = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
        if tensor.is_contiguous() and any(a <= start and end <= b for a, b in self.intervals):
            return True
        if self.mask is None and tensor.is_contiguous():
            return False
        mask = torch.zeros(self.size, dtype=torch.bool) if self.mask is None else self.mask
        for a, b in self.intervals:
            mask[a:b] = True
        return bool(mask.as_strided(tensor.shape, tensor.stride(), start).all())

    def touched(self) -> bool:
        return bool(self.whole or self.intervals or self.mask is not None)


@dataclass(slots=True)
class _Yielded:
    """A tensor that was handed to foreign code, and how much of it was used."""

    name: str
    shape: tuple[int, ...]
    storage: StorageWeakRef
    regions: _Regions
    view: tuple[tuple[int, ...], tuple[int, ...], int]


def _storage_size(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_storage(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.untyped_storage().nbytes() > 0
    )


class Coverage(TorchDispatchMode):
    """Used as a context around foreign loading code.

    Args:
        targets: What the model wants filled.
    """

    def __init__(self, targets: Targets) -> None:
        super().__init__()
        self._targets = targets
        self._before: dict[str, tuple[torch.Tensor, int | None]] = {}
        self._written: dict[tuple[int, torch.dtype], _Regions] = {}
        self._yielded: dict[int, _Yielded] = {}
        self._digests: dict[int, int] = {}
        self.cut: list[tuple[str, tuple[int, ...]]] = []
        self.unused: list[str] = []
        self.last_name: str | None = None
        self._used: set[str] = set()
        for name, target in targets.by_name.items():
            tensor = target.tensor
            key = _storage_key(tensor) if _has_storage(tensor) else None
            self._before[name] = (tensor, key)
            if key is not None:
                self._written.setdefault((key, tensor.dtype), _Regions(_storage_size(tensor)))
                if is_dense(tensor) and id(tensor) not in self._digests:
                    self._digests[id(tensor)] = zlib.crc32(memory_of(tensor))

    # -- what torch dispatches

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Loading is not compiled, and keeping the compiler away from it means importing it, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        arguments = func._schema.arguments  # noqa: SLF001 -- torch has no public word for what an operation writes
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
        for position, argument in enumerate(arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if value is None:
                continue
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors:
                    self.wrote(tensor)
            elif not is_view:
                for tensor in tensors:
                    self._use(tensor)
        return result

    def wrote(self, tensor: torch.Tensor) -> None:
        """A tensor, or a view of one, was written."""
        if _has_storage(tensor):
            regions = self._written.get((_storage_key(tensor), tensor.dtype))
            if regions is not None:
                regions.add(tensor)

    def _use(self, tensor: torch.Tensor) -> None:
        if not _has_storage(tensor):
            return
        record = self._yielded.get(_storage_key(tensor))
        if record is not None and not record.storage.expired() and _storage_size(tensor) == record.regions.size:
            record.regions.add(tensor)

    # -- what is handed out

    def track(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand pairs on, and remember how much of each tensor is used."""
        for name, tensor in pairs:
            self._settle(expired_only=True)
            self.last_name = name
            self.hand_out(name, tensor)
            yield name, tensor
            del tensor

    def hand_out(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor goes to foreign code."""
        if not _has_storage(tensor):
            self._used.add(name)
            return
        key = _storage_key(tensor)
        earlier = self._yielded.pop(key, None)
        if earlier is not None:
            if not earlier.storage.expired():
                # Two names share memory; which of them is used can't be told apart.
                self._used.update((name, earlier.name))
                return
            self._judge(earlier)
        self._yielded[key] = _Yielded(
            name,
            tuple(tensor.shape),
            StorageWeakRef(tensor.untyped_storage()),
            _Regions(_storage_size(tensor)),
            (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())),
        )

    def _settle(self, *, expired_only: bool) -> None:
        for key in [k for k, r in self._yielded.items() if not expired_only or r.storage.expired()]:
            self._judge(self._yielded.pop(key))

    def _judge(self, record: _Yielded) -> None:
        shape, stride, offset = record.view
        if math.prod(shape) == 0:
            return
        if not record.regions.touched():
            self.unused.append(record.name)
            return
        view = torch.empty(0, device="meta").new_empty(record.regions.size).as_strided(shape, stride, offset)
        if not record.regions.covers(view):
            self.cut.append((record.name, record.shape))

    # -- the end

    def finish(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """Names that were filled, and names that were not."""
        self._settle(expired_only=False)
        now: Mapping[str, torch.Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        filled, missing = [], []
        for name, (tensor, key) in self._before.items():
            current = now.get(name)
            (filled if self._is_filled(tensor, key, current) else missing).append(name)
        return filled, missing

    def _is_filled(self, before: torch.Tensor, key: int | None, current: torch.Tensor | None) -> bool:
        if current is None or before.numel() == 0:
            return True
        if current.device.type == "meta":
            return False
        if not _has_storage(current):
            return current is not before
        if key is None or _storage_key(current) != key:
            return True  # it has other memory than before: somebody put it there
        regions = self._written.get((key, current.dtype))
        if regions is not None and regions.covers(current):
            return True
        if regions is not None and regions.touched():
            return False
        digest = self._digests.get(id(before))
        return digest is not None and is_dense(current) and zlib.crc32(memory_of(current)) != digest
