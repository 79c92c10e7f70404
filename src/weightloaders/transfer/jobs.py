"""From the steps of a plan to jobs: which bytes are read into which memory, and what becomes of them on the way.

A piece whose bytes lie in the source as they are to lie in the parameter is read straight into the parameter's memory.
What is to be cast, or is scattered in small pieces, goes through a small buffer. What has no raw bytes in one run is
read whole; a parameter whose own memory is not in row-major order is put together beside it and copied.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightloaders.errors import LoaderContractError, LoadError
from weightloaders.mapping.dtypes import may_cast
from weightloaders.mapping.placement import Constant, Placement, Source, is_empty, placement
from weightloaders.plan import (
    CallStep,
    ComputeStep,
    CopyStep,
    Step,
    makes_up_its_target,
    single_run,
    step_infos,
    step_targets,
)
from weightloaders.transfer.memory import is_dense, is_plain
from weightloaders.transfer.workspace import BUFFER_BYTES
from weightloaders.weights.reading import memory_of, native_order, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightloaders.targets import Target
    from weightloaders.transfer.workspace import Workspace
    from weightloaders.weights.info import Extent, TensorInfo

STRAIGHT_CHUNK = 16 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Pieces smaller than this are read together with what lies between them: a read of their own costs more than that.
_SMALL = 64 << 10
_MAX_GAP = 256 << 10

# How bytes get where they belong.
Path = Literal["straight", "buffered", "assembled", "computed", "handed over"]


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for a thread to do.

    Attributes:
        file: What it reads.
        offset: Where it starts to read; jobs are done in the order of file and offset.
        nbytes: How much it reads.
        targets: What it writes.
        work: Does it.
        path: How its bytes get where they belong.
        reads: In how many positioned reads.
        held: Memory that it holds meanwhile, in bytes; beside the thread's own buffer.
        pooled: Whether any thread may do it; else it runs code of others, and is done on the caller's thread.
        buffers: Whether it takes the thread's own buffer.
    """

    file: str
    offset: int
    nbytes: int
    targets: tuple[Target, ...]
    work: Callable[[], object]
    path: Path
    reads: int = 1
    held: int = 0
    pooled: bool = True
    buffers: bool = False


def jobs_of(step: Step, space: Workspace) -> Iterable[Job]:
    """The jobs of a step. What is on meta is thought of as on the CPU: its jobs can be told, and not be done.

    Raises:
        LoadError: If the step does not fit its target as it is now; nothing was touched.
    """
    if isinstance(step, CopyStep):
        _check_placements(step)
        return _copying(step, space)
    infos, targets = step_infos(step), step_targets(step)
    nbytes, reads, held = (sum(count) for count in zip(*map(_taken_by, infos), strict=True)) if infos else (0, 0, 0)
    place = _place(infos)
    if isinstance(step, CallStep):
        work = functools.partial(_call, step, space)
        return [Job(*place, nbytes, tuple(targets), work, "handed over", reads, held, pooled=False)]
    held += sum(target.tensor.numel() * target.dtype.itemsize for target in targets)
    compute = functools.partial(_compute, step, space)
    return [Job(*place, nbytes, tuple(targets), compute, "computed", reads, held, pooled=False)]


def _taken_by(info: TensorInfo) -> tuple[int, int, int]:
    """What reading a tensor whole takes: bytes, positioned reads, memory."""
    return info.bytes_stored, sum(0 not in (extent.shape or ()) for extent in info.extents), info.nbytes


def _check_placements(step: CopyStep) -> None:
    # Writing past the end of a parameter would corrupt memory, so the plan is not taken at its word.
    if not makes_up_its_target(step):
        raise LoadError(
            f"the pieces planned for {step.target.name} don't make up a tensor of shape {list(step.target.shape)}",
            tensor=step.target.name,
            hint="the model changed since the plan was made; make it again",
        )


# ------------------------------------------------------------------ copying


def _copying(step: CopyStep, space: Workspace) -> Iterator[Job]:
    tensor = step.target.tensor
    if is_plain(tensor) and tensor.is_contiguous():
        yield from _into_rows(step, step.target, space)
    elif tensor.numel():
        without_memory = torch.empty(tensor.shape, dtype=_dtype(step.target), device="meta")
        jobs = list(_into_rows(step, replace(step.target, tensor=without_memory), space))
        yield Job(
            *_place(step.sources),
            sum(job.nbytes for job in jobs),
            (step.target,),
            functools.partial(_assemble, step, space),
            "assembled",
            sum(job.reads for job in jobs),
            without_memory.nbytes + max((job.held for job in jobs), default=0),
            # Classes of others run code of others.
            pooled=is_plain(tensor) and all(info.is_raw for info in step.sources),
            buffers=any(job.buffers for job in jobs),
        )


def _dtype(target: Target) -> torch.dtype:
    """The dtype that a target has, or will have."""
    return target.dtype if target.tensor.is_meta else target.tensor.dtype


def _assemble(step: CopyStep, space: Workspace) -> None:
    """Put a tensor together in row-major order, and let `copy_` see to how the parameter itself is laid out."""
    target = step.target
    whole = torch.empty(target.shape, dtype=target.tensor.dtype, device="cpu")
    for job in _into_rows(step, replace(target, tensor=whole), space):
        job.work()
    target.tensor.copy_(whole)


def _into_rows(step: CopyStep, target: Target, space: Workspace) -> Iterator[Job]:
    """Into memory in row-major order."""
    by_source: dict[Source, list[Placement]] = defaultdict(list)
    for placed in step.placements:
        if not is_empty(placed):
            by_source[placed.source].append(placed)
    for source, parts in by_source.items():
        if isinstance(source, Constant):
            yield Job("", 0, 0, (target,), functools.partial(_fill, source.value, parts, target), "straight", 0)
        if not isinstance(source, int):
            continue
        info = step.sources[source]
        extent = single_run(info)
        if extent is None:
            nbytes, reads, held = _taken_by(info)
            # Boxes are read one by one and put together.
            held += max((extent.length for extent in info.extents), default=0)
            work = functools.partial(_whole, info, parts, target, space)
            yield Job(*_place([info]), nbytes, (target,), work, "assembled", reads, held, pooled=info.is_raw)
            continue
        straight = [p for p in parts if _reads_straight(p, len(parts), info, extent, target)]
        for placed in straight:
            yield from _straight(placed, extent, target)
        if len(straight) < len(parts):
            rest = [p for p in parts if p not in straight] if straight else parts
            yield from _through_buffer(info, rest, extent, target, space)


def _fill(value: float, parts: Sequence[Placement], target: Target) -> None:
    flat = target.tensor.detach().view(-1)
    for placed in parts:
        strided(flat, placed, 2, 0).fill_(value)


def _reads_straight(placed: Placement, parts: int, info: TensorInfo, extent: Extent, target: Target) -> bool:
    """Whether the bytes lie as they are to lie in the parameter, in runs that are worth a read of their own."""
    if not (extent.stored_dtype == info.dtype == _dtype(target) and extent.is_native and _takes_bytes(target.tensor)):
        return False
    run = placed.dims[-1][0] if placed.dims and placed.dims[-1][1:] == (1, 1) else 1
    return (parts == 1 and placed.is_contiguous) or run * info.dtype.itemsize >= _SMALL


def _takes_bytes(tensor: torch.Tensor) -> bool:
    """Whether bytes may be written straight into a tensor's memory, or into that which it will have."""
    return is_dense(tensor) or (tensor.is_meta and is_plain(tensor) and tensor.is_contiguous())


def _straight(placed: Placement, extent: Extent, target: Target) -> Iterator[Job]:
    size = extent.stored_dtype.itemsize
    # The innermost loop is the run, where it goes on side by side; else each element is one.
    goes_on = bool(placed.dims) and placed.dims[-1][1:] == (1, 1)
    *outer, (run, _, _) = placed.dims if goes_on else (*placed.dims, (1, 1, 1))
    for indices in itertools.product(*(range(count) for count, _, _ in outer)):
        steps = [(at * dim[1], at * dim[2]) for at, dim in zip(indices, outer, strict=True)]
        source = placed.source_start + sum(step for step, _ in steps)
        start = placed.target_start + sum(step for _, step in steps)
        for at in range(0, run * size, STRAIGHT_CHUNK):
            count = min(STRAIGHT_CHUNK, run * size - at)
            offset = extent.offset + source * size + at
            work = functools.partial(_read_straight, extent, offset, target, start * size + at, count)
            yield Job(extent.source.name, offset, count, (target,), work, "straight")


def _read_straight(extent: Extent, offset: int, target: Target, start: int, count: int) -> None:
    extent.source.read_into(memory_of(target.tensor)[start : start + count], offset)


def _through_buffer(
    info: TensorInfo, parts: Sequence[Placement], extent: Extent, target: Target, space: Workspace
) -> Iterator[Job]:
    size = extent.stored_dtype.itemsize
    for start, end, inside in _spans(parts, BUFFER_BYTES // size, _MAX_GAP // size):
        offset, count = extent.offset + start * size, end - start
        work = functools.partial(_bounce, info, extent, (start, end), offset, inside, target, space)
        # What is handed out may differ from what is stored; the cast to the parameter's own dtype makes no copy.
        held = count * info.dtype.itemsize if info.dtype != extent.stored_dtype else 0
        yield Job(extent.source.name, offset, count * size, (target,), work, "buffered", held=held, buffers=True)


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
        rounds = min(count, (limit - reach) // abs(step) + 1)
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


def _bounce(
    info: TensorInfo,
    extent: Extent,
    span: tuple[int, int],
    offset: int,
    parts: Sequence[Placement],
    target: Target,
    space: Workspace,
) -> None:
    start, end = span
    buffer = space.buffer(end - start, extent.stored_dtype)
    extent.source.read_into(memory_of(buffer), offset)
    _spread(native_order(buffer, extent).to(info.dtype), start, parts, target, space)


def _whole(info: TensorInfo, parts: Sequence[Placement], target: Target, space: Workspace) -> None:
    values = read_tensor(info) if info.is_raw else space.read(info).detach()
    _spread(values.reshape(-1), 0, parts, target, space)


def _spread(values: torch.Tensor, start: int, parts: Sequence[Placement], target: Target, space: Workspace) -> None:
    """Copy parts of a source, of which ``values`` has the elements from ``start`` on, to where they belong."""
    flat = target.tensor.detach().view(-1)
    for placed in parts:
        _store(strided(values, placed, 1, start), strided(flat, placed, 2, 0), target, space)


def strided(flat: torch.Tensor, placed: Placement, side: Literal[1, 2], first: int) -> torch.Tensor:
    """One side of a copy as a view of a flat tensor, of which the first element has the address ``first``."""
    low = placed.source_range[0] if side == 1 else placed.target_start
    sizes, steps = [dim[0] for dim in placed.dims], [abs(dim[side]) for dim in placed.dims]
    view = flat.as_strided(sizes, steps, flat.storage_offset() + low - first)
    backwards = [at for at, dim in enumerate(placed.dims) if dim[side] < 0]
    if not backwards:
        return view
    # torch turns no codes around (fp8, fp4, unsigned integers), but it does their bits.
    return view.view(_BITS.get(view.element_size(), view.dtype)).flip(backwards).view(view.dtype)


def _store(values: torch.Tensor, destination: torch.Tensor, target: Target, space: Workspace) -> None:
    destination.copy_(values)
    space.check_cast(values, destination, target.name)


# ------------------------------------------------------------------ code of others


def _compute(step: ComputeStep, space: Workspace) -> None:
    rule = "; ".join(step.rules)
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
                f"{rule} returned {result.dtype} values for {name}, which can't become {dtype} by a cast", tensor=name
            )
        _store(result.detach(), target.tensor, target, space)


def _own(info: TensorInfo) -> torch.Tensor:
    """A tensor that code of others may write to: what a `read` returned may still be somebody else's."""
    tensor = read_tensor(info)
    return tensor.detach().clone() if info.read is not None else tensor


def _call(step: CallStep, space: Workspace) -> None:
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
