"""From the steps of a plan to jobs: which bytes are read into which memory, and what becomes of them on the way.

A piece whose bytes lie in the source as they are to lie in the parameter is read straight into the parameter's memory.
What is to be cast, or is scattered in small pieces, goes through a small buffer. What has no raw bytes in one run is
read whole; a parameter whose own memory is not in row-major order is put together beside it and copied.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import LoaderContractError, LoadError
from weightloaders.mapping.dtypes import may_cast
from weightloaders.plan import CallStep, ComputeStep, CopyStep, Piece, Step, step_infos, step_targets
from weightloaders.transfer.memory import is_dense, is_plain
from weightloaders.transfer.workspace import BUFFER_BYTES
from weightloaders.weights.reading import memory_of, native_order, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightloaders.targets import Target
    from weightloaders.transfer.workspace import Workspace
    from weightloaders.weights.info import Extent, TensorInfo

STRAIGHT_CHUNK = 16 << 20
# Pieces smaller than this are read together with what lies between them: a read of their own costs more than that.
_SMALL = 64 << 10
_MAX_GAP = 256 << 10
# From so many pieces of one size on, one indexed copy beats copying them one by one.
_MANY = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for a thread to do.

    Attributes:
        file: What it reads.
        offset: Where it starts to read; jobs are done in the order of file and offset.
        nbytes: How much it reads.
        targets: What it writes.
        work: Does it.
        pooled: Whether any thread may do it; else it runs code of others, and is done on the caller's thread.
    """

    file: str
    offset: int
    nbytes: int
    targets: tuple[Target, ...]
    work: Callable[[], object]
    pooled: bool = True


def jobs_of(step: Step, space: Workspace) -> Iterable[Job]:
    """The jobs of a step.

    Raises:
        LoadError: If the step does not fit its target as it is now; nothing was touched.
    """
    for target in step_targets(step):
        if target.tensor.device.type == "meta":
            raise LoadError(f"{target.name} is on the meta device and has no memory to be filled", tensor=target.name)
    if isinstance(step, CopyStep):
        _check_pieces(step)
        return _copying(step, space)
    infos = step_infos(step)
    work = (lambda: _compute(step, space)) if isinstance(step, ComputeStep) else (lambda: _call(step, space))
    nbytes = sum(info.bytes_stored for info in infos)
    return [Job(*_place(infos), nbytes, tuple(step_targets(step)), work, pooled=False)]


def _check_pieces(step: CopyStep) -> None:
    # Writing past the end of a parameter would corrupt memory, so the plan is not taken at its word.
    size = step.target.tensor.numel()
    inside = all(
        p.source_start >= 0 and p.target_start >= 0 and p.length >= 0
        and p.source_start + p.length <= p.info.numel and p.target_start + p.length <= size
        for p in step.pieces
    )  # fmt: skip
    if not inside or sum(p.length for p in step.pieces) != size:
        raise LoadError(
            f"the pieces planned for {step.target.name} don't make up a tensor of shape {list(step.target.shape)}",
            tensor=step.target.name,
            hint="the model changed since the plan was made; make it again",
        )


# ------------------------------------------------------------------ copying


def _copying(step: CopyStep, space: Workspace) -> Iterator[Job]:
    tensor = step.target.tensor
    if is_plain(tensor) and tensor.is_contiguous():
        yield from _into_rows(step.target, step.pieces, space)
    elif step.pieces:
        yield Job(
            *_place([p.info for p in step.pieces]),
            sum(p.length * _stored_dtype(p.info).itemsize for p in step.pieces),
            (step.target,),
            lambda: _assemble(step, space),
            # Classes of others run code of others.
            pooled=is_plain(tensor) and all(p.info.is_raw for p in step.pieces),
        )


def _assemble(step: CopyStep, space: Workspace) -> None:
    """Put a tensor together in row-major order, and let `copy_` see to how the parameter itself is laid out."""
    target = step.target
    whole = torch.empty(target.shape, dtype=target.tensor.dtype, device="cpu")
    with space.holding(whole.nbytes):
        for job in _into_rows(replace(target, tensor=whole), step.pieces, space):
            job.work()
        target.tensor.copy_(whole)


def _into_rows(target: Target, pieces: Sequence[Piece], space: Workspace) -> Iterator[Job]:
    """Into memory in row-major order."""
    by_source: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.length:
            by_source[id(piece.info)].append(piece)
    for parts in by_source.values():
        info = parts[0].info
        extent = _single_run(info)
        if extent is None:
            yield Job(
                *_place([info]), info.bytes_stored, (target,),
                lambda info=info, parts=parts: _whole(info, parts, target, space),  # type: ignore[misc]
                pooled=info.is_raw,
            )  # fmt: skip
        elif _is_straight(info, extent, target) and not _is_scattered(parts):
            for piece in parts:
                yield from _straight(piece, extent, target)
        else:
            yield from _through_buffer(info, parts, extent, target, space)


def _is_straight(info: TensorInfo, extent: Extent, target: Target) -> bool:
    return extent.stored_dtype == info.dtype == target.tensor.dtype and extent.is_native and is_dense(target.tensor)


def _is_scattered(pieces: Sequence[Piece]) -> bool:
    size = sum(p.length for p in pieces) * pieces[0].info.dtype.itemsize
    return len(pieces) > 1 and size < _SMALL * len(pieces)


def _straight(piece: Piece, extent: Extent, target: Target) -> Iterator[Job]:
    size = target.tensor.element_size()
    for at in range(0, piece.length * size, STRAIGHT_CHUNK):
        count = min(STRAIGHT_CHUNK, piece.length * size - at)
        start = piece.target_start * size + at
        offset = extent.offset + piece.source_start * size + at
        yield Job(
            extent.source.name, offset, count, (target,),
            lambda start=start, end=start + count, offset=offset: (  # type: ignore[misc]
                extent.source.read_into(memory_of(target.tensor)[start:end], offset)
            ),
        )  # fmt: skip


def _through_buffer(
    info: TensorInfo, pieces: Sequence[Piece], extent: Extent, target: Target, space: Workspace
) -> Iterator[Job]:
    size = extent.stored_dtype.itemsize
    for start, end, parts in _spans(pieces, BUFFER_BYTES // size, _MAX_GAP // size):
        offset = extent.offset + start * size
        yield Job(
            extent.source.name, offset, (end - start) * size, (target,),
            lambda start=start, end=end, parts=parts, offset=offset: (  # type: ignore[misc]
                _bounce(info, extent, (start, end), offset, parts, target, space)
            ),
        )  # fmt: skip


def _spans(pieces: Sequence[Piece], limit: int, gap: int) -> Iterator[tuple[int, int, list[Piece]]]:
    """Runs of a source, each small enough for the buffer, with the pieces in them; a long piece is cut."""
    run: list[Piece] = []
    start = end = 0
    for piece in sorted(_cut(pieces, limit), key=lambda p: p.source_start):
        last = piece.source_start + piece.length
        if run and (last - start > limit or piece.source_start > end + gap):
            yield start, end, run
            run = []
        if not run:
            start, end = piece.source_start, last
        run.append(piece)
        end = max(end, last)
    if run:
        yield start, end, run


def _cut(pieces: Iterable[Piece], limit: int) -> Iterator[Piece]:
    for piece in pieces:
        for at in range(0, piece.length, limit):
            count = min(limit, piece.length - at)
            yield Piece(piece.info, piece.source_start + at, piece.target_start + at, count)


def _bounce(
    info: TensorInfo,
    extent: Extent,
    span: tuple[int, int],
    offset: int,
    pieces: Sequence[Piece],
    target: Target,
    space: Workspace,
) -> None:
    start, end = span
    buffer = space.buffer(end - start, extent.stored_dtype)
    extent.source.read_into(memory_of(buffer), offset)
    # What is handed out may differ from what is stored; the cast to the parameter's own dtype makes no copy.
    with space.holding(buffer.numel() * info.dtype.itemsize if info.dtype != buffer.dtype else 0):
        _spread(native_order(buffer, extent).to(info.dtype), start, pieces, target, space)


def _whole(info: TensorInfo, pieces: Sequence[Piece], target: Target, space: Workspace) -> None:
    if info.is_raw:
        # Boxes are read one by one and put together.
        with space.holding(info.nbytes + max((e.length for e in info.extents), default=0)):
            _spread(read_tensor(info).reshape(-1), 0, pieces, target, space)
    else:
        with space.holding(info.nbytes):
            _spread(space.read(info).detach().reshape(-1), 0, pieces, target, space)


def _spread(values: torch.Tensor, start: int, pieces: Sequence[Piece], target: Target, space: Workspace) -> None:
    """Copy pieces of a source, of which ``values`` has the elements from ``start`` on, to where they belong."""
    flat = target.tensor.detach().view(-1)
    size = pieces[0].length
    regular = len(pieces) >= _MANY and all(
        p.length == size and (p.source_start - start) % size == 0 and p.target_start % size == 0 for p in pieces
    )
    if regular:
        sources = torch.tensor([(p.source_start - start) // size for p in pieces], device="cpu")
        destinations = torch.tensor([p.target_start // size for p in pieces], device="cpu")
        rows = _rows(values, size)[sources.to(values.device)]
        cast = rows.to(device=flat.device, dtype=flat.dtype)
        _rows(flat, size)[destinations.to(flat.device)] = cast
        space.check_cast(rows, cast, target.name)
        return
    for piece in pieces:
        at = piece.source_start - start
        _store(
            values[at : at + piece.length], flat[piece.target_start : piece.target_start + piece.length], target, space
        )


def _rows(flat: torch.Tensor, size: int) -> torch.Tensor:
    return flat[: flat.numel() // size * size].view(-1, size)


def _store(values: torch.Tensor, destination: torch.Tensor, target: Target, space: Workspace) -> None:
    destination.copy_(values)
    space.check_cast(values, destination, target.name)


# ------------------------------------------------------------------ code of others


def _compute(step: ComputeStep, space: Workspace) -> None:
    results_size = sum(target.tensor.nbytes for target in step.targets.values())
    rule = "; ".join(step.rules)
    with space.holding(sum(info.nbytes for info in step_infos(step)) + results_size):
        arguments = [
            [_own(info) for info in source] if isinstance(source, tuple) else _own(source) for source in step.sources
        ]
        try:
            results = step.function(arguments)
        except Exception as error:
            raise LoadError(
                f"{rule} failed: {type(error).__name__}: {error}", tensor=next(iter(step.targets), None)
            ) from error
        for name, target in step.targets.items():
            result = results.get(name)
            if not isinstance(result, torch.Tensor) or tuple(result.shape) != target.shape:
                found = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else "no tensor"
                raise LoaderContractError(
                    f"{rule} returned {found} for {name}, not one of shape {list(target.shape)}", tensor=name
                )
            dtype = target.tensor.dtype
            if not may_cast(result.dtype, dtype):
                raise LoaderContractError(
                    f"{rule} returned {result.dtype} values for {name}, which can't become {dtype} by a cast",
                    tensor=name,
                )
            _store(result.detach(), target.tensor, target, space)


def _own(info: TensorInfo) -> torch.Tensor:
    """A tensor that code of others may write to: what a `read` returned may still be somebody else's."""
    tensor = read_tensor(info)
    return tensor.detach().clone() if info.read is not None else tensor


def _call(step: CallStep, space: Workspace) -> None:
    with space.holding(step.info.nbytes):
        tensor = _own(step.info)
        if space.handed is not None:
            space.handed(step.info.name, tensor)
        loader: Any = step.target.tensor.weight_loader  # type: ignore[attr-defined]
        shard = () if step.shard_id is None else (step.shard_id,)
        loader(step.target.tensor, tensor, *shard)


# ------------------------------------------------------------------ where tensors lie


def _place(infos: Sequence[TensorInfo]) -> tuple[str, int]:
    extents = infos[0].extents if infos else ()
    return (extents[0].source.name, extents[0].offset) if extents else ("", 0)


def _single_run(info: TensorInfo) -> Extent | None:
    """The extent, where the whole tensor lies in one run in row-major order."""
    if info.is_raw and len(info.extents) == 1 and info.extents[0].is_contiguous:
        return info.extents[0]
    return None


def _stored_dtype(info: TensorInfo) -> torch.dtype:
    return info.extents[0].stored_dtype if info.is_raw and info.extents else info.dtype
