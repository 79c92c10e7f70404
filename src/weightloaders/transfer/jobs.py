"""From the steps of a plan to jobs: which bytes are read into which memory, and what becomes of them on the way.

A piece whose bytes lie in the source as they are to lie in the parameter is read straight into the parameter's memory.
What is to be cast, or is scattered in small pieces, goes through a small buffer. What has no raw bytes is read whole;
a parameter whose own memory is not in row-major order is put together beside it, a few rows at a time, and copied.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from weightloaders.errors import LoadError
from weightloaders.mapping.composing import TooManyPlacements, compose, restrict
from weightloaders.mapping.placement import Constant, Placement, Source, is_empty, placement
from weightloaders.plan import CallStep, CopyStep, Step, is_whole_copy, makes_up_its_target, single_run
from weightloaders.transfer.copying import BITS, evenly
from weightloaders.transfer.foreign import call, compute, place_of
from weightloaders.transfer.job import Job, Piece
from weightloaders.transfer.memory import has_bytes, is_dense, is_plain
from weightloaders.transfer.merging import merged
from weightloaders.transfer.sources import reads_of
from weightloaders.weights.info import contiguous_strides
from weightloaders.weights.reading import native_order, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightloaders.targets import Target
    from weightloaders.transfer.workspace import Workspace
    from weightloaders.weights.info import Extent, TensorInfo

STRAIGHT_CHUNK = 16 << 20
# Pieces smaller than this are read together with what lies between them: a view of its own costs more than that.
_SMALL = 64 << 10
_MAX_GAP = 256 << 10


def jobs_of(
    steps: Iterable[Step], space: Workspace, *, unfit: Callable[[LoadError], object] | None = None
) -> list[Job]:
    """The jobs of all steps, in the order of file and offset.

    Args:
        steps: The steps. What is on meta is thought of as on the CPU: its jobs can be told, and not be done.
        space: What the jobs share.
        unfit: Told of a step that does not fit its target, which then has no jobs.

    Raises:
        LoadError: If a step does not fit its target as it is now; nothing was touched.
    """
    pieces: list[Piece] = []
    jobs: list[Job] = []
    for step in steps:
        piece = _whole_run(step, space)
        if piece is not None:
            pieces.append(piece)
            continue
        try:
            _sort_out(_of_step(step, space), pieces, jobs)
        except LoadError as error:
            if unfit is None:
                raise
            unfit(error)
    jobs += merged(pieces, STRAIGHT_CHUNK, space)
    jobs.sort(key=_position)
    return jobs


def _position(job: Job) -> tuple[str, int]:
    return job.file, job.offset


def _whole_run(step: Step, space: Workspace) -> Piece | None:
    """The piece of what most steps are: a whole tensor, in one run, that is to lie in memory as it lies in its file.

    What `_of_step` comes to there, told with a few questions: there may be a hundred thousand such steps.
    """
    if not isinstance(step, CopyStep) or not is_whole_copy(step):
        return None
    target, info = step.target, step.sources[0]
    tensor, extent = target.tensor, single_run(info)
    if extent is None or not is_dense(tensor):
        return None
    dtype, nbytes = tensor.dtype, tensor.nbytes
    if not (extent.dtype is info.dtype is dtype and extent.is_native) or not nbytes:
        return None
    return Piece(space.reader(extent.source), extent.offset, nbytes, target, where=space.accelerator_of(target))


def _sort_out(found: Iterable[Piece | Job], pieces: list[Piece], jobs: list[Job]) -> None:
    for part in found:
        if isinstance(part, Piece):
            pieces.append(part)
        else:
            jobs.append(part)


def _of_step(step: Step, space: Workspace) -> Iterable[Piece | Job]:
    if isinstance(step, CopyStep):
        _check_placements(step)
        return _copying(step, space)
    return [call(step, space) if isinstance(step, CallStep) else compute(step, space)]


def _check_placements(step: CopyStep) -> None:
    # Writing past the end of a parameter would corrupt memory, so the plan is not taken at its word.
    if not makes_up_its_target(step):
        raise LoadError(
            f"the pieces planned for {step.target.name} don't make up a tensor of shape {list(step.target.shape)}",
            tensor=step.target.name,
            hint="the model changed since the plan was made; make it again",
        )


def _copying(step: CopyStep, space: Workspace) -> Iterable[Piece | Job]:
    tensor = step.target.tensor
    if is_plain(tensor) and tensor.is_contiguous():
        return _as_it_is(step, space) or _into_rows(step, step.target, space)
    return _in_blocks(step, space) if tensor.numel() else []


def _dtype(target: Target) -> torch.dtype:
    """The dtype that a target has, or will have."""
    return target.dtype if target.tensor.is_meta else target.tensor.dtype


# ------------------------------------------------------------------ into memory that is not in row-major order


def _in_blocks(step: CopyStep, space: Workspace) -> Iterator[Job]:
    """Put a tensor together in row-major order, a block at a time; `copy_` sees to how the parameter is laid out."""
    tensor = step.target.tensor
    # Classes of others run code of others, and only they know what their blocks are.
    pooled = is_plain(tensor) and all(info.is_raw for info in step.sources)
    for start, size in _blocks(tensor.shape, space.buffer_bytes // _dtype(step.target).itemsize if pooled else None):
        try:
            placements = restrict(step.placements, tensor.shape, start, size)
        except TooManyPlacements:
            yield _block_job(step, step.placements, [0] * tensor.dim(), list(tensor.shape), space, pooled=pooled)
            return
        yield _block_job(step, placements, start, size, space, pooled=pooled)


def _blocks(shape: Sequence[int], most: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Boxes of at most so many elements (one is the least) that make up a tensor: where each starts, and its size."""
    cut = 0
    while most is not None and cut < len(shape) and math.prod(shape[cut + 1 :]) > most:
        cut += 1
    if most is None or cut == len(shape) or math.prod(shape) <= most:
        cut, rows = 0, max(shape[:1], default=1)
    else:
        rows = max(1, most // max(1, math.prod(shape[cut + 1 :])))
    for outer in itertools.product(*(range(n) for n in shape[:cut])):
        for at in range(0, shape[cut] if shape else 1, rows):
            if not shape:
                yield [], []
                continue
            rest = shape[cut + 1 :]
            yield [*outer, at, *(0 for _ in rest)], [*(1 for _ in outer), min(rows, shape[cut] - at), *rest]


def _block_job(
    step: CopyStep,
    placements: Sequence[Placement],
    start: Sequence[int],
    size: Sequence[int],
    space: Workspace,
    *,
    pooled: bool,
) -> Job:
    def inner(memory: torch.Tensor) -> list[Job]:
        pieces: list[Piece] = []
        jobs: list[Job] = []
        block = replace(step, target=replace(step.target, tensor=memory), placements=tuple(placements))
        _sort_out(_into_rows(block, block.target, space), pieces, jobs)
        return [*jobs, *merged(pieces, STRAIGHT_CHUNK, space)]

    def assemble() -> None:
        tensor = step.target.tensor
        whole = torch.empty(tuple(size), dtype=tensor.dtype, device="cpu")
        for job in inner(whole):
            space.check_stop()
            job.work()
        destination = tensor.detach() if is_plain(tensor) else tensor
        for dim, (at, count) in enumerate(zip(start, size, strict=True)):
            if count != destination.shape[dim]:
                destination = destination.narrow(dim, at, count)
        space.write(step.target, lambda: destination.copy_(whole))

    # Told by the jobs for memory that is not there.
    told = inner(torch.empty(tuple(size), dtype=_dtype(step.target), device="meta"))
    return Job(
        *place_of(step.sources),
        sum(job.nbytes for job in told),
        (step.target,),
        assemble,
        "assembled",
        sum(job.reads for job in told),
        math.prod(size) * _dtype(step.target).itemsize + max((job.held for job in told), default=0),
        pooled=pooled,
        buffer=max((job.buffer for job in told), default=0),
    )


# ------------------------------------------------------------------ into memory in row-major order


def _as_it_is(step: CopyStep, space: Workspace) -> list[Piece] | None:
    """The pieces of what is put together of others, each a run of a file that lies there as it is to lie in memory.

    What `_into_rows` comes to there, told with a few questions, for the same reason as `_whole_run`.
    """
    target = step.target
    tensor = target.tensor
    if not tensor.is_cpu or not tensor.numel() or not has_bytes(tensor):
        return None
    dtype, size, where = tensor.dtype, tensor.element_size(), space.accelerator_of(target)
    pieces = []
    for source, source_start, target_start, dims in step.placements:
        if not isinstance(source, int) or not (not dims or (len(dims) == 1 and dims[0][1:] == (1, 1))):
            return None
        extent = single_run(step.sources[source])
        if extent is None or not (extent.stored_dtype is step.sources[source].dtype is dtype and extent.is_native):
            return None
        offset, count = extent.offset + source_start * size, dims[0][0] if dims else 1
        pieces.append(
            Piece(space.reader(extent.source), offset, count * size, target, target_start * size, where=where)
        )
    # Of one source there may be many small ones, for which `_into_rows` knows better.
    alone = len(pieces) == 1 or len({placed.source for placed in step.placements}) == len(pieces)
    return pieces if alone else None


def _into_rows(step: CopyStep, target: Target, space: Workspace) -> Iterator[Piece | Job]:
    takes_bytes, dtype = _takes_bytes(target, space), _dtype(target)
    for source, parts in _by_source(step.placements).items():
        if isinstance(source, Constant):
            fill = functools.partial(_fill, source.value, parts, target, space)
            yield Job("", 0, 0, (target,), fill, "straight", 0)
        if not isinstance(source, int):
            continue
        info = step.sources[source]
        runs = _runs_of(info, parts)
        if runs is None:
            # Boxes are read one by one and put together.
            held = info.nbytes + max((extent.length for extent in info.extents), default=0)
            work = functools.partial(_whole, info, parts, target, space)
            nbytes, reads = info.bytes_stored, reads_of(info)
            yield Job(*place_of([info]), nbytes, (target,), work, "assembled", reads, held, pooled=info.is_raw)
            continue
        for extent, copies in runs:
            rest = copies
            if takes_bytes and extent.stored_dtype is info.dtype is dtype and extent.is_native:
                rest = []
                for placed in copies:
                    if _is_worth_a_view(placed, len(copies), dtype.itemsize):
                        yield from _straight(placed, extent, target, space)
                    else:
                        rest.append(placed)
            if rest:
                yield from _through_buffer(info, rest, extent, target, space)


def _by_source(placements: Sequence[Placement]) -> dict[Source, list[Placement]]:
    if len(placements) == 1:
        return {placements[0].source: [*placements]} if not is_empty(placements[0]) else {}
    found: dict[Source, list[Placement]] = {}
    for placed in placements:
        if not is_empty(placed):
            found.setdefault(placed.source, []).append(placed)
    return found


def _runs_of(info: TensorInfo, parts: list[Placement]) -> list[tuple[Extent, list[Placement]]] | None:
    """The extents that copies out of a tensor read, each with the same copies out of the extent itself.

    None where a tensor has no raw bytes, or the way through its extents is too odd to be told in a few copies.
    """
    extent = single_run(info)
    if extent is not None:
        return [(extent, parts)]
    if not info.is_raw:
        return None
    steps = contiguous_strides(info.shape)
    runs = []
    try:
        for extent in info.extents:
            box, at = extent.shape or (), extent.at or ()
            if 0 in box:
                continue
            first = sum(index * step for index, step in zip(at, steps, strict=True))
            layer = placement(0, 0, first, zip(box, extent.strides or (), steps, strict=True))
            copies = [found for part in parts for found in compose([layer], part)[0]]
            if copies:
                runs.append((extent, copies))
    except TooManyPlacements:
        return None
    return runs


def _fill(value: float, parts: Sequence[Placement], target: Target, space: Workspace) -> None:
    def fill() -> None:
        flat = target.tensor.detach().view(-1)
        for placed in parts:
            strided(flat, placed, 2, 0).fill_(value)

    space.write(target, fill)


def _is_worth_a_view(placed: Placement, parts: int, itemsize: int) -> bool:
    """Whether a copy is all of its kind, or comes in runs so long that a view of memory for each of them pays."""
    if parts == 1 and placed.is_contiguous:
        return True
    run = placed.dims[-1][0] if placed.dims and placed.dims[-1][1:] == (1, 1) else 1
    return run * itemsize >= _SMALL


def _takes_bytes(target: Target, space: Workspace) -> bool:
    """Whether bytes may be written as they are into a target's memory, or into that which it will have."""
    tensor = target.tensor
    if tensor.is_meta or space.accelerator_of(target) is not None:
        return is_plain(tensor) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_dense(tensor)


def _straight(placed: Placement, extent: Extent, target: Target, space: Workspace) -> Iterator[Piece]:
    size, reader, where = extent.stored_dtype.itemsize, space.reader(extent.source), space.accelerator_of(target)
    if placed.is_contiguous:
        count = placed.dims[0][0] if placed.dims else 1
        offset = extent.offset + placed.source_start * size
        yield Piece(reader, offset, count * size, target, placed.target_start * size, where=where)
        return
    # The innermost loop is the run, where it goes on side by side; else each element is one.
    goes_on = placed.dims[-1][1:] == (1, 1)
    *outer, (run, _, _) = placed.dims if goes_on else (*placed.dims, (1, 1, 1))
    for indices in itertools.product(*(range(count) for count, _, _ in outer)):
        steps = [(at * dim[1], at * dim[2]) for at, dim in zip(indices, outer, strict=True)]
        source = placed.source_start + sum(step for step, _ in steps)
        start = placed.target_start + sum(step for _, step in steps)
        yield Piece(reader, extent.offset + source * size, run * size, target, start * size, where=where)


def _through_buffer(
    info: TensorInfo, parts: Sequence[Placement], extent: Extent, target: Target, space: Workspace
) -> Iterator[Piece]:
    size, reader, where = extent.stored_dtype.itemsize, space.reader(extent.source), space.accelerator_of(target)
    if where is not None and not space.staging.can_cast(where, extent.stored_dtype, info.dtype, _dtype(target)):
        where = None
    is_mere_cast = extent.is_native and extent.stored_dtype is info.dtype
    if (
        where is None
        and is_mere_cast
        and all(_is_worth_a_view(placed, len(parts), size) for placed in parts)
        and all(placed.is_contiguous for placed in parts)
    ):
        for placed in parts:
            offset, nbytes = extent.offset + placed.source_start * size, placed.numel * size
            yield Piece(reader, offset, nbytes, target, placed.target_start * size, extent.stored_dtype, itemsize=size)
        return
    for start, end, inside in _spans(parts, space.buffer_bytes // size, _MAX_GAP // size):
        place: Callable[[torch.Tensor], object] = functools.partial(
            _place_span, info, extent, start, inside, target, space
        )
        if where is None:
            place = functools.partial(_write_from_host, place, target, space)
        # What is handed out may differ from what is stored; the cast to the parameter's own dtype makes no copy.
        held = (end - start) * info.dtype.itemsize if info.dtype != extent.stored_dtype else 0
        if any(step < 0 for placed in inside for _, step, _ in placed.dims):
            # What is read backwards is turned around first.
            held += (end - start) * info.dtype.itemsize
        offset, nbytes = extent.offset + start * size, (end - start) * size
        yield Piece(reader, offset, nbytes, target, 0, None, place, size, held, where)


def _spans(parts: Sequence[Placement], limit: int, gap: int) -> Iterator[tuple[int, int, list[Placement]]]:
    """Runs of a source, each small enough for the buffer, with what is to be copied out of them; long ones are cut."""
    cut = [(*chunk.source_range, chunk) for placed in parts for chunk in _cut(placed, limit, gap)]
    cut.sort(key=lambda entry: entry[0])
    inside: list[Placement] = []
    start = end = 0
    for low, high, chunk in cut:
        if inside and (high - start > limit or low > end + gap):
            yield start, end, inside
            inside = []
        if not inside:
            start, end = low, high
        inside.append(chunk)
        end = max(end, high)
    if inside:
        yield start, end, inside


def _cut(placed: Placement, limit: int, gap: int) -> Iterator[Placement]:
    """The same copy in pieces that each read no more than ``limit`` elements side by side, gaps included."""
    loops = sorted(placed.dims, key=lambda dim: -abs(dim[1]))
    if not loops:
        yield placed
        return
    (count, step, written), inner = loops[0], loops[1:]
    reach = 1 + sum((n - 1) * abs(source) for n, source, _ in inner)
    rounds = 1
    if step == 0:
        rounds = count
    elif reach <= limit and abs(step) - reach <= gap:
        rounds = evenly(count, (limit - reach) // abs(step) + 1)
    if rounds == count and reach <= limit:
        yield placed
        return
    for at in range(0, count, rounds):
        dims = [(min(rounds, count - at), step, written), *inner]
        chunk = placement(placed.source, placed.source_start + at * step, placed.target_start + at * written, dims)
        if rounds == 1:
            yield from _cut(chunk, limit, gap)
        else:
            yield chunk


def _place_span(
    info: TensorInfo,
    extent: Extent,
    start: int,
    parts: Sequence[Placement],
    target: Target,
    space: Workspace,
    stored: torch.Tensor,
) -> None:
    values = native_order(stored.view(extent.stored_dtype), extent)
    if info.dtype != target.tensor.dtype:
        values = values.to(info.dtype)
    _spread(values, start, parts, target, space)


def _write_from_host(
    place: Callable[[torch.Tensor], object], target: Target, space: Workspace, stored: torch.Tensor
) -> None:
    space.write(target, lambda: place(stored))


def _whole(info: TensorInfo, parts: Sequence[Placement], target: Target, space: Workspace) -> None:
    values = read_tensor(info) if info.is_raw else space.read(info).detach()
    # Not `reshape`, which leaves every second element of something what it is: a view with steps.
    flat = values.contiguous().view(-1)
    space.write(target, lambda: _spread(flat, 0, parts, target, space))


def _spread(values: torch.Tensor, start: int, parts: Sequence[Placement], target: Target, space: Workspace) -> None:
    """Copy parts of a source, of which ``values`` has the elements from ``start`` on, to where they belong."""
    flat = target.tensor.detach().view(-1)
    for placed in parts:
        space.store(strided(values, placed, 1, start), strided(flat, placed, 2, 0), target.name)


def strided(flat: torch.Tensor, placed: Placement, side: Literal[1, 2], first: int) -> torch.Tensor:
    """One side of a copy as a view of a flat tensor, of which the first element has the address ``first``."""
    low = placed.source_range[0] if side == 1 else placed.target_start
    sizes, steps = [dim[0] for dim in placed.dims], [abs(dim[side]) for dim in placed.dims]
    view = flat.as_strided(sizes, steps, flat.storage_offset() + low - first)
    backwards = [at for at, dim in enumerate(placed.dims) if dim[side] < 0]
    if not backwards:
        return view
    # torch turns no codes around (fp8, fp4, unsigned integers), but it does their bits.
    return view.view(BITS.get(view.element_size(), view.dtype)).flip(backwards).view(view.dtype)
