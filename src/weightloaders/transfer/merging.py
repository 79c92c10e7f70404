"""From pieces to jobs: what lies side by side in a file is read at one go, wherever in memory it goes."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import LoadError
from weightloaders.transfer.devices import enough_memory_on
from weightloaders.transfer.job import Job, Piece
from weightloaders.transfer.sources import MAX_GAP, read_runs
from weightloaders.transfer.workspace import writing
from weightloaders.weights.reading import memory_at, memory_of
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightloaders.transfer.workspace import Workspace
    from weightloaders.weights.source import ByteSource


def merged(pieces: Iterable[Piece], chunk: int, space: Workspace) -> Iterator[Job]:
    """Jobs that read these pieces, neighbours together.

    Args:
        pieces: In any order. Those that are placed from a buffer fit into it.
        chunk: Most bytes to read in one job, if they need not be in a buffer all at a time: between two jobs a load can
            be stopped.
        space: Has the buffers.
    """
    straight: list[Piece] = []
    cast: list[Piece] = []
    through_buffer: list[Piece] = []
    staged: list[Piece] = []
    for piece in pieces:
        if piece.where is not None:
            staged.append(piece)
        elif piece.place is not None:
            through_buffer.append(piece)
        else:
            (straight if piece.stored is None else cast).append(piece)
    for batch in _batches(straight, chunk):
        yield _straight_job(batch)
    for batch in _batches(cast, chunk):
        yield _cast_job(batch, space)
    for batch in _batches(through_buffer, space.buffer_bytes):
        yield _placed_job(batch, space, staged=False)
    for batch in _batches(staged, space.buffer_bytes):
        yield _placed_job(batch, space, staged=True)


def _batches(pieces: list[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces that lie side by side in one source, or nearly so. Of those that are placed from a buffer none is cut."""
    pieces.sort(key=_place)
    batch: list[Piece] = []
    start = end = views = 0
    for piece in pieces:
        to_cut = piece.place is None
        while True:
            if batch and not (
                0 <= piece.offset - end <= MAX_GAP
                and end < start + most
                and (to_cut or piece.offset + piece.nbytes <= start + most)
                and (piece.offset - start) % piece.itemsize == 0
                and views + 2 <= piece.source.most_views
                and _is_same(batch[0].source, piece.source)
            ):
                yield batch
                batch = []
            if not batch:
                start, views = piece.offset, 0
            room = start + most - piece.offset
            if not to_cut or piece.nbytes <= room:
                break
            room -= room % piece.itemsize
            if room > 0:
                batch.append(piece._replace(nbytes=room))
                piece = piece._replace(offset=piece.offset + room, nbytes=piece.nbytes - room, start=piece.start + room)
            end = start + most
        batch.append(piece)
        # One for the gap in front of it.
        views += 2
        end = piece.offset + piece.nbytes
    if batch:
        yield batch


def _place(piece: Piece) -> tuple[str, int]:
    return piece.source.name, piece.offset


def _is_same(a: ByteSource, b: ByteSource) -> bool:
    return a is b or (type(a) is type(b) is FileSource and a.name == b.name and a.identity == b.identity)


def _wanted(batch: list[Piece]) -> int:
    """What counts as read: without what is read along and thrown away."""
    return sum([piece.nbytes for piece in batch])


def _straight_job(batch: list[Piece]) -> Job:
    first = batch[0]
    return Job(
        first.source.name,
        first.offset,
        _wanted(batch),
        tuple([piece.target for piece in batch]),
        functools.partial(_read_straight, batch),
        "straight",
        starts=tuple([piece.offset for piece in batch]),
    )


def _read_straight(batch: Sequence[Piece]) -> None:
    runs: list[tuple[int, memoryview]] = []
    # Held until all is read, whatever becomes of the parameters meanwhile.
    storages = []
    offset = address = length = 0
    for piece in batch:
        begin, storage = _memory(piece)
        storages.append(storage)
        if length and piece.offset == offset + length and begin == address + length:
            # Neighbours in memory, too.
            length += piece.nbytes
            continue
        if length:
            runs.append((offset, memory_at(address, length)))
        offset, address, length = piece.offset, begin, piece.nbytes
    runs.append((offset, memory_at(address, length)))
    read_runs(batch[0].source, runs)
    del storages


def _memory(piece: Piece) -> tuple[int, torch.UntypedStorage]:
    """Where a piece goes. Asked for at the last moment, because code of others may have exchanged the memory."""
    tensor = piece.target.tensor
    storage = tensor.untyped_storage()
    first = tensor.data_ptr() + piece.start
    start = storage.data_ptr()
    if not start or not start <= first <= start + storage.nbytes() - piece.nbytes or not tensor.is_contiguous():
        raise LoadError(
            f"{piece.target.name} has less memory now, or another, than when the load began", tensor=piece.target.name
        )
    return first, storage


def _cast_job(batch: list[Piece], space: Workspace) -> Job:
    """A job that reads a buffer full at a time, and casts what it has read into place."""
    first, last = batch[0], batch[-1]
    nbytes = last.offset + last.nbytes - first.offset
    buffer = min(nbytes, space.buffer_bytes)
    return Job(
        first.source.name,
        first.offset,
        _wanted(batch),
        tuple([piece.target for piece in batch]),
        functools.partial(_read_and_cast, batch, nbytes, buffer, space),
        "buffered",
        reads=-(-nbytes // buffer),
        buffer=buffer,
        starts=tuple([piece.offset for piece in batch]),
    )


def _read_and_cast(batch: Sequence[Piece], nbytes: int, at_once: int, space: Workspace) -> None:
    buffer = space.buffer(at_once)
    memory = memory_of(buffer)
    source, first = batch[0].source, batch[0].offset
    waiting = deque(batch)
    for low in range(first, first + nbytes, at_once):
        space.check_stop()
        high = min(low + at_once, first + nbytes)
        source.read_into(memory[: high - low], low)
        while waiting and waiting[0].offset < high:
            piece = waiting[0]
            end = piece.offset + piece.nbytes
            begin, stop = max(piece.offset, low), min(end, high)
            _cast_part(piece, begin, buffer[begin - low : stop - low], space)
            if end > high:
                break
            waiting.popleft()


def _cast_part(piece: Piece, begin: int, stored: torch.Tensor, space: Workspace) -> None:
    """Cast a part of a piece, from this byte of the source on, into its place."""
    if piece.stored is None:
        return
    values = stored.view(piece.stored)
    tensor, at = piece.target.tensor, (piece.start + begin - piece.offset) // piece.itemsize
    with writing(tensor):
        space.store(values, tensor.detach().view(-1)[at : at + values.numel()], piece.target.name)


def _placed_job(batch: list[Piece], space: Workspace, *, staged: bool) -> Job:
    """A job that reads into a buffer of the thread, on the way to an accelerator into a page-locked one."""
    first, last = batch[0], batch[-1]
    nbytes = last.offset + last.nbytes - first.offset
    return Job(
        first.source.name,
        first.offset,
        _wanted(batch),
        tuple([piece.target for piece in batch]),
        functools.partial(_read_and_stage if staged else _read_and_place, batch, nbytes, space),
        "buffered",
        held=max([piece.held for piece in batch]),
        buffer=0 if staged else nbytes,
        staged=nbytes if staged else 0,
        starts=tuple([piece.offset for piece in batch]),
    )


def _read_and_place(batch: Sequence[Piece], nbytes: int, space: Workspace) -> None:
    buffer = space.buffer(nbytes)
    first = batch[0].offset
    batch[0].source.read_into(memory_of(buffer), first)
    for piece in batch:
        if piece.place is not None:
            piece.place(buffer[piece.offset - first : piece.offset - first + piece.nbytes])


def _read_and_stage(batch: Sequence[Piece], nbytes: int, space: Workspace) -> None:
    first = batch[0].offset
    with space.staging.slot() as slot:
        batch[0].source.read_into(slot.view(nbytes), first)
        for piece in batch:
            at = piece.offset - first
            with writing(piece.target.tensor):
                if piece.place is None or piece.where is None:
                    memory = piece.target.tensor.detach().view(-1).view(torch.uint8)
                    slot.upload(at, memory[piece.start : piece.start + piece.nbytes])
                    continue
                name = piece.target.name
                with enough_memory_on(piece.where, f"placing {piece.nbytes:,} bytes of {name!r}", tensor=name):
                    slot.place(piece.where, at, piece.nbytes, piece.place)
