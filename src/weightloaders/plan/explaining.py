"""How one parameter is filled, in words: which file, which bytes, by which rules, into which slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weightloaders.mapping.placement import Constant
from weightloaders.plan.steps import CallStep, CopyStep, single_run, step_infos

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightloaders.mapping.placement import Placement
    from weightloaders.plan.steps import Step
    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo

# So many pieces and sources are shown; the plan's document has them all.
_SHOWN = 6


def describe_source(info: TensorInfo) -> str:
    """Where a tensor lies, in words."""
    if not info.is_raw:
        return f"{info.name} (made by its loader)"
    if not info.extents:
        return f"{info.name} (empty)"
    first = info.extents[0]
    more = f" and {len(info.extents) - 1} more extents" if len(info.extents) > 1 else ""
    return f"{info.name} in {first.source.name}, bytes {first.offset} to {first.offset + first.length}{more}"


def explain_step(step: Step, target: Target) -> str:
    """How a step fills one of its targets."""
    lines = [f"{target.name}  {list(target.shape)} {target.dtype}"]
    if isinstance(step, CopyStep):
        shown = step.placements[:_SHOWN]
        lines += [f"  {_piece(placed, step)}" for placed in shown]
        if len(step.placements) > len(shown):
            lines.append(f"  and {len(step.placements) - len(shown)} more pieces")
    else:
        if isinstance(step, CallStep):
            shard = "" if step.shard_id is None else f" as shard {step.shard_id!r}"
            lines.append(f"  handed to the parameter's own weight_loader{shard}, from:")
        else:
            lines.append(f"  computed ({step.reason}) from:")
        infos = step_infos(step)
        lines += [f"    {describe_source(info)}" for info in infos[:_SHOWN]]
        if len(infos) > _SHOWN:
            lines.append(f"    and {len(infos) - _SHOWN} more tensors")
    lines.extend(f"  by {rule}" for rule in step.rules)
    return "\n".join(lines)


def _piece(placed: Placement, step: CopyStep) -> str:
    where = _place(step.target.name, step.target.shape, placed, 2) or "all of it"
    if placed.source is None:
        return f"{where} is never written"
    if isinstance(placed.source, Constant):
        return f"{where} is {placed.source.value:g} everywhere"
    info = step.sources[placed.source]
    what = _place(info.name, info.shape, placed, 1)
    return f"{where} from {_described(info, what, placed) if what else describe_source(info)}{_order(placed)}"


def _described(info: TensorInfo, what: str, placed: Placement) -> str:
    """The part of a tensor that is read, and where it lies."""
    extent = single_run(info)
    if extent is None:
        return what + describe_source(info).removeprefix(info.name)
    start, end = (extent.offset + at * extent.stored_dtype.itemsize for at in placed.source_range)
    return f"{what} in {extent.source.name}, {'' if placed.is_contiguous else 'among '}bytes {start} to {end}"


def _order(placed: Placement) -> str:
    """What there is to say of the order in which elements are read."""
    steps = [step for _, step, _ in placed.dims if step]
    said = []
    if len(steps) < len(placed.dims):
        said.append("repeated")
    if any(step < 0 for step in steps):
        said.append("backwards")
    if steps != sorted(steps, key=abs, reverse=True):
        said.append("transposed" if len(placed.dims) == len(steps) == 2 else "in another order")
    return f", {', '.join(said)}" if said else ""


def _place(name: str, shape: Sequence[int], placed: Placement, side: Literal[1, 2]) -> str:
    """One side of a copy as a slice of its tensor; empty where it is all of it."""
    loops = [(count, abs(dim[side])) for dim in placed.dims if dim[side] for count in dim[:1]]
    start = placed.source_range[0] if side == 1 else placed.target_start
    # As an index is written: the largest steps first, and what goes on as one.
    loops = _joined(sorted(loops, key=_step, reverse=True))
    ranges = _ranges(start, loops, shape)
    if ranges is not None:
        return "" if all(text == ":" for text in ranges) else f"{name}[{', '.join(ranges)}]"
    for outer in range(1, len(loops)):
        ranges = _ranges(start, loops[outer:], shape)
        if ranges is not None:
            times = ", ".join(f"{count} times, each {_further(step, shape)}" for count, step in loops[:outer])
            return f"{name}[{', '.join(ranges)}] ({times})"
    runs = ", ".join(f"{count} times, each {step} further" for count, step in loops)
    return f"{name}.flatten()[{start}] ({runs})"


def _step(loop: tuple[int, int]) -> int:
    return loop[1]


def _joined(loops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Loops of which the outer one goes on where the inner one ends, as one."""
    result: list[tuple[int, int]] = []
    for count, step in loops:
        if result and result[-1][1] == count * step:
            result[-1] = result[-1][0] * count, step
        else:
            result.append((count, step))
    return result


def _further(step: int, shape: Sequence[int]) -> str:
    """A step of a loop as one along a dimension."""
    stride = 1
    best = step, len(shape) - 1
    for dim in range(len(shape) - 1, -1, -1):
        if step % stride == 0 and step // stride < shape[dim]:
            best = step // stride, dim
        stride *= shape[dim]
    return f"{best[0]} further in dimension {best[1]}"


def _ranges(start: int, loops: Sequence[tuple[int, int]], shape: Sequence[int]) -> list[str] | None:
    """The addresses of a nest of loops as index ranges of a tensor in row-major order; None where they are no box.

    Args:
        start: The lowest address.
        loops: Counts and steps, largest step first.
        shape: The tensor's.
    """
    if 0 in shape:
        return [":"] * len(shape)
    left = list(loops)
    ranges = []
    stride = 1
    for size in reversed(shape):
        at = start // stride % size
        count = every = 1
        if left and left[-1][1] % stride == 0 and left[-1][1] < stride * size:
            count, step = left.pop()
            every = step // stride
            fitting = -(-(size - at) // every)
            if count > fitting:
                # It goes on in the dimension outside of this one, where it goes round evenly.
                rounds, over = divmod(count, fitting)
                if over or size % every or at >= every:
                    return None
                left.append((rounds, stride * size))
                count = fitting
        ranges.append(_range(at, count, every, size))
        stride *= size
    return None if left else ranges[::-1]


def _range(at: int, count: int, every: int, size: int) -> str:
    if count == size:
        return ":"
    if count == 1:
        return str(at)
    return f"{at}:{at + (count - 1) * every + 1}" + (f":{every}" if every > 1 else "")
