"""`Weights`: a lazy, closable mapping over a catalogue, and the wrapping of plain dicts and iterables of pairs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import DuplicateTensorError, LoaderContractError, SourceClosedError, UnknownTensorError
from weightloaders.weights.info import TensorInfo
from weightloaders.weights.reading import checked_read, enough_memory, no_plain_values, read_tensor
from weightloaders.weights.source import close_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightloaders.weights.source import ByteSource


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of a source, by name. Nothing is read until a tensor is asked for.

    ``in``, ``len`` and ``keys`` answer from the catalogue. ``items()`` and ``values()`` stream in storage order, one
    tensor at a time. A tensor handed out belongs to whoever got it: it is never reused, and outlives `close`. Equality
    is identity. Several threads may read at once.

    Make one with `Weights.describe`.

    Attributes:
        metadata: What the source says about itself, as text (safetensors' ``__metadata__``, for one).
        skipped_files: Files of the source that were left out, each with the reason.
        notes: Remarks for the report: sentences about how the source was read.
        borrowed: Whether tensors that ``read`` and `stream` hand out are reused.
        stream: The source's own way to read many tensors; see `describe`.
        described_by: What says which tensors there are and where: an index, metadata; see `describe`.
    """

    def __init__(
        self,
        infos: Iterable[TensorInfo],
        *,
        close: Callable[[], object] | None = None,
        borrowed: bool = False,
        metadata: Mapping[str, str] | None = None,
        skipped_files: Mapping[str, str] | None = None,
        notes: Iterable[str] = (),
        stream: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]] | None = None,
        described_by: Iterable[ByteSource] = (),
    ) -> None:
        catalogue: dict[str, TensorInfo] = {}
        for info in infos:
            if not isinstance(info, TensorInfo):
                raise LoaderContractError(f"Weights are described by TensorInfo objects, not {type(info).__name__}")
            if info.name in catalogue:
                raise DuplicateTensorError(
                    f"the source has two tensors named {info.name!r}",
                    tensor=info.name,
                    file=info.extents[0].source.name if info.extents else None,
                )
            catalogue[info.name] = info
        self._catalogue = dict(sorted(catalogue.items(), key=_storage_order(catalogue)))
        self._close = close
        self.borrowed = borrowed
        self.stream = stream
        self._closed = False
        # Format readers that are not ours rarely expect to be called by two threads at once.
        self._read_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self.metadata = dict(metadata or {})
        self.skipped_files = dict(skipped_files or {})
        self.notes = tuple(notes)
        self.described_by = tuple(described_by)

    @classmethod
    def describe(
        cls,
        infos: Iterable[TensorInfo],
        close: Callable[[], object] | None = None,
        *,
        borrowed: bool = False,
        metadata: Mapping[str, str] | None = None,
        skipped_files: Mapping[str, str] | None = None,
        notes: Iterable[str] = (),
        stream: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]] | None = None,
        described_by: Iterable[ByteSource] = (),
    ) -> Weights:
        """Make weights from a catalogue: the ten-line route for loader authors.

        Args:
            infos: One `TensorInfo` a tensor.
            close: Called once when the weights are closed.
            borrowed: The tensors that ``read`` returns and ``stream`` yields are reused or belong to somebody else:
                what is handed out, or waits for others, is copied.
            metadata: Text about the source.
            skipped_files: Files left out, with the reason.
            notes: Remarks for the report.
            stream: For a source that reads many tensors faster than one after the other by their ``read``: given names,
                yields ``(name, tensor)`` for each of them, in an order of its own. A load whose plan has been checked
                asks it once, for all that it needs; single tensors are still had by ``read``.
            described_by: Files that no tensor lies in, but that say which there are and where, such as an index: what
                holds files against checksums asks for these, too.

        Raises:
            DuplicateTensorError: If a name occurs twice.
        """
        return cls(
            infos, close=close, borrowed=borrowed, metadata=metadata, skipped_files=skipped_files, notes=notes,
            stream=stream, described_by=described_by,
        )  # fmt: skip

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{sum(i.nbytes for i in self._catalogue.values()):,} bytes"
        return f"<Weights: {len(self._catalogue)} tensors, {state}>"

    # -- what the catalogue answers

    def __len__(self) -> int:
        return len(self._catalogue)

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalogue)

    def __contains__(self, name: object) -> bool:
        return name in self._catalogue

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def keys(self) -> KeysView[str]:
        """The names, in storage order."""
        return self._catalogue.keys()

    def info(self, name: str) -> TensorInfo:
        """What is known of one tensor.

        Raises:
            UnknownTensorError: If there is no tensor of that name.
        """
        try:
            return self._catalogue[name]
        except KeyError:
            raise UnknownTensorError(f"the source has no tensor named {name!r}", tensor=name) from None

    def infos(self) -> list[TensorInfo]:
        """The whole catalogue, in storage order."""
        return list(self._catalogue.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, in the dtypes that are handed out."""
        return sum(info.nbytes for info in self._catalogue.values())

    # -- what reads

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self.info(name)
        self.check_open()
        if info.read is None:
            return read_tensor(info)
        with self._read_lock:
            tensor = checked_read(info)
            if not self.borrowed:
                return tensor
            with enough_memory(name, info.nbytes):
                # Detached: a copy of a model's own parameter is data, not a step of its autograd graph.
                return tensor.detach().clone()

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Pairs of name and tensor, read one at a time in storage order, or by `stream` in its order."""
        return _StreamedItems(self)

    def values(self) -> ValuesView[torch.Tensor]:
        """The tensors, in the same order."""
        return _StreamedValues(self)

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.stream is None:
            for name in self._catalogue:
                yield name, self[name]
            return
        from weightloaders.weights.supplied import Supplied  # which builds on this module

        self.check_open()
        with contextlib.closing(iter(Supplied(self.infos(), self.stream))) as tensors:
            for info, tensor in tensors:
                self.check_open()
                yield info.name, tensor.detach().clone() if self.borrowed else tensor

    # -- life time

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise `SourceClosedError` if the weights were closed."""
        if self._closed:
            raise SourceClosedError(
                "these weights were closed",
                hint="read inside the `with` block; a tensor that was handed out stays valid, the rest is gone",
            )

    def close(self) -> None:
        """Let go of files; a second call does nothing. Tensors that were handed out stay valid."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        extents = (extent for info in self._catalogue.values() for extent in info.extents)
        close_files(frozenset(extent.source.origin.name for extent in extents))
        if self._close is not None:
            self._close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _storage_order(catalogue: Mapping[str, TensorInfo]) -> Callable[[tuple[str, TensorInfo]], Any]:
    # Sources keep the order in which they were first named (shards in the order of the index), which is written down;
    # a tensor without extents keeps its place in the catalogue, behind those that have them.
    rank: dict[str, int] = {}
    for info in catalogue.values():
        for extent in info.extents:
            rank.setdefault(extent.source.name, len(rank))

    def key(item: tuple[str, TensorInfo]) -> tuple[int, int]:
        extents = item[1].extents
        return (rank[extents[0].source.name], extents[0].offset) if extents else (len(rank), 0)

    return key


class _StreamedItems(ItemsView[str, torch.Tensor]):
    _mapping: Weights

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._mapping._pairs()  # noqa: SLF001 -- a part of that class


class _StreamedValues(ValuesView[torch.Tensor]):
    _mapping: Weights

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in self._mapping._pairs())  # noqa: SLF001 -- a part of that class


class Stream:
    """An iterable of pairs: no catalogue, read once, in the order it comes.

    Args:
        pairs: ``(name, tensor)`` pairs; anything else among them is refused when it comes.
        borrowed: The tensors are reused by whoever yields them.
    """

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]], *, borrowed: bool = False) -> None:
        # What comes is only promised to be pairs, so it is checked.
        self._pairs: Iterator[Any] = iter(pairs)
        self.borrowed = borrowed

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._pairs:
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise _not_a_pair(type(pair).__name__)
            name, tensor = pair
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise _not_a_pair(f"({type(name).__name__}, {type(tensor).__name__})")
            problem = no_plain_values(tensor)
            if problem is not None:
                raise _without_values(name, problem)
            if tensor.layout is not torch.strided:
                with enough_memory(name, tensor.numel() * tensor.dtype.itemsize):
                    tensor = tensor.detach().to_dense()
            yield name, tensor


def _not_a_pair(what: str) -> LoaderContractError:
    return LoaderContractError(f"an iterable of weights yields (name, tensor) pairs, not {what}")


def _without_values(name: str, problem: str) -> LoaderContractError:
    return LoaderContractError(f"tensor {name!r} {problem}", tensor=name, hint="give plain tensors as weights")


def _unwrapping_hint(value: object) -> str:
    if type(value).__module__.partition(".")[0] == "numpy":
        return "make a tensor of it: torch.from_numpy(array)"
    return "unwrap the state dict first, e.g. checkpoint['state_dict']"


def as_weights(value: Any, *, borrowed: bool = False) -> Weights | Stream:
    """Anything the contract accepts as weights: `Weights` as they are, a dict wrapped, an iterable as a `Stream`.

    A dict is catalogued without copying; sparse tensors in it are made dense when they are read. A mapping that is not
    a dict may read on access, so it is streamed.

    Raises:
        LoaderContractError: If it is none of these, or a tensor has no values or not those of one box.
    """
    if isinstance(value, Weights | Stream):
        return value
    if isinstance(value, dict):
        for name, tensor in value.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise LoaderContractError(
                    f"a dict of weights maps names to tensors; the entry {name!r} is a {type(tensor).__name__}",
                    tensor=str(name),
                    hint=_unwrapping_hint(tensor),
                )
            problem = no_plain_values(tensor)
            if problem is not None:
                raise _without_values(name, problem)
        return _held(value)
    if isinstance(value, Mapping):
        return Stream(((name, value[name]) for name in value), borrowed=borrowed)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | torch.Tensor):
        return Stream(value, borrowed=borrowed)
    raise LoaderContractError(
        f"weights are Weights, a dict of tensors or an iterable of (name, tensor) pairs, not {type(value).__name__}"
    )


def as_catalogue(value: Any, *, borrowed: bool = False) -> Weights:
    """The same, but a stream, which has no catalogue, is read whole and held in memory.

    Raises:
        LoaderContractError: See `as_weights`.
    """
    weights = as_weights(value, borrowed=borrowed)
    if isinstance(weights, Weights):
        return weights
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in held:
            raise DuplicateTensorError(f"the source has two tensors named {name!r}", tensor=name)
        held[name] = tensor.clone() if weights.borrowed else tensor
    return _held(held)


def _held(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Weights that are in memory already."""
    sparse = [repr(name) for name, tensor in tensors.items() if tensor.layout is not torch.strided]
    return Weights.describe(
        (TensorInfo(name, t.dtype, tuple(t.shape), read=_Held(t)) for name, t in tensors.items()),
        borrowed=True,
        notes=[f"sparse tensors, made dense when read: {', '.join(sparse)}"] if sparse else [],
    )


class _Held:
    """A tensor in memory as a `read` function."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor
