"""How each parameter of a model is filled, in a word: for the table, the tree and the comparison of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightloaders.cli.common import counted
from weightloaders.weights.file_names import natural

if TYPE_CHECKING:
    from weightloaders.plan import LoadPlan, Step
    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo


@dataclass(frozen=True, slots=True)
class Way:
    """How one parameter is filled.

    Attributes:
        target: The parameter.
        steps: The steps that fill it; several where its own loader gets it in parts, none where nothing does.
        how: ``read``, ``strided``, ``computed``, ``handed over``, ``tied``, or ``not filled``.
    """

    target: Target
    steps: tuple[Step, ...]
    how: str

    @property
    def nbytes(self) -> int:
        """Its size; 0 where it shares another's memory."""
        return 0 if self.how == "tied" else self.target.tensor.numel() * self.target.dtype.itemsize

    @property
    def sources(self) -> list[TensorInfo]:
        """What it is filled from."""
        from weightloaders.plan import step_infos

        return [info for step in self.steps for info in step_infos(step)]


def ways_of(plan: LoadPlan) -> dict[str, Way]:
    """Name -> how it is filled, for all that the model wants; as names are counted: layer 2 before layer 10."""
    from weightloaders.plan import step_targets

    steps: dict[str, list[Step]] = {name: [] for name in plan.targets}
    for step in plan.steps:
        for target in step_targets(step):
            steps[target.name].append(step)
    ways = {}
    for name in sorted(steps, key=natural):
        found = tuple(steps[name])
        how = ", ".join(dict.fromkeys(map(_how, found))) or ("tied" if name in plan.tied else "not filled")
        ways[name] = Way(plan.targets[name], found, how)
    return ways


def _how(step: Step) -> str:
    from weightloaders.plan import CallStep, CopyStep

    if isinstance(step, CopyStep):
        return "read" if all(placed.is_contiguous for placed in step.placements) else "strided"
    return "handed over" if isinstance(step, CallStep) else "computed"


def forecast_text(plan: LoadPlan) -> str:
    """What running a plan takes, in a line."""
    from weightloaders.report import bytes_text

    told = plan.forecast
    parts = [
        f"{nbytes:,} {what}"
        for nbytes, what in (
            (told.straight, "straight into the parameters"),
            (told.buffered, "through a buffer"),
            (told.assembled, "put together beside the parameter"),
            (told.computed, "computed"),
            (told.handed_over, "handed over"),
        )
        if nbytes
    ]
    where = f": {', '.join(parts)}" if parts else ""
    return (
        f"{counted(told.bytes_to_read, 'byte')} in {counted(told.reads, 'read')}{where}; "
        f"at most {bytes_text(told.extra_memory)} of memory beside the model"
    )
