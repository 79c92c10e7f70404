"""`GroupState`: the tensors of a group as they are found, and what its function makes of them, without reading any."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightloaders.errors import RuleError, WeightLoadersError
from weightloaders.mapping.spaces import Untraceable
from weightloaders.mapping.symbolic import SymbolicTensor, tracing
from weightloaders.plan import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from weightloaders.mapping.names import Group
    from weightloaders.mapping.placement import Placement
    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo

ABSENT = "look for the missing part under another name (is a pattern misspelt?), or in a shard that is absent"
_SURPLUS = "leave all but one out by a drop rule"


@dataclass(slots=True)
class GroupState:
    """The sources of a group found so far.

    Attributes:
        group: The group.
        members: For each slot pairs of index (None where the slot takes just one tensor) and tensor.
        rules: The rules that led here, for the report.
    """

    group: Group
    members: list[list[tuple[int | None, TensorInfo]]]
    rules: tuple[str, ...] = ()

    @classmethod
    def of(cls, group: Group) -> GroupState:
        """An empty one."""
        return cls(group, [[] for _ in group.slots])

    @property
    def infos(self) -> list[TensorInfo]:
        """All sources, in the order in which the function gets them."""
        return [
            info for argument in self.arguments() for info in (argument if isinstance(argument, tuple) else [argument])
        ]

    def absence(self) -> str | None:
        """Which parts are missing, if any are."""
        absent = [slot for slot, members in zip(self.group.slots, self.members, strict=True) if not members]
        if not absent:
            return None
        present = [info.name for members in self.members for _, info in members]
        return f"of the parts of {listed(self.group.targets)}, {listed(absent)} is missing; there is {listed(present)}"

    def problem(self) -> str | None:
        """Why the function can't be run: parts missing, twice, or indices that are not 0 to E-1."""
        if not self.group.lenient and (absence := self.absence()):
            return absence
        title = listed(self.group.targets)
        counts: dict[str, int] = {}
        numbers: dict[str, set[int | None]] = {}
        for slot, is_list, members in zip(self.group.slots, self.group.lists, self.members, strict=True):
            if is_list and members:
                counts[slot], numbers[slot] = len(members), {index for index, _ in members}
                fault = _index_fault(members)
                if fault is not None:
                    return f"of the {len(members)} tensors {slot} for {title}, {fault}"
            elif len(members) > 1:
                return f"{listed([info.name for _, info in members])} all take the place of {slot} in {title}"
        if len(set(counts.values())) > 1:
            there = ", ".join(f"{count} of {slot}" for slot, count in counts.items())
            most = set[int | None]().union(*numbers.values())
            absent = ", ".join(f"{slot} has no {min(most - n, key=str)}" for slot, n in numbers.items() if most - n)
            return f"the parts of {title} don't pair: {absent}; there are {there}"
        return None

    @property
    def has_surplus(self) -> bool:
        """Whether several tensors take one place."""
        return any(
            len(members) > (len({index for index, _ in members}) if is_list else 1)
            for is_list, members in zip(self.group.lists, self.members, strict=True)
        )

    def arguments(self) -> list[TensorInfo | tuple[TensorInfo, ...]]:
        """What the function gets: one source a slot, or a tuple of them in index order."""
        return [
            tuple(info for _, info in sorted(members, key=lambda member: member[0] or 0))
            if is_list or not members
            else members[0][1]
            for is_list, members in zip(self.group.lists, self.members, strict=True)
        ]


def _index_fault(members: Sequence[tuple[int | None, TensorInfo]]) -> str | None:
    """What keeps indices from being 0 to E-1."""
    last = -1
    for index, info in sorted(members, key=lambda member: -1 if member[0] is None else member[0]):
        if index is None:
            return f"{info.name!r} has no index"
        if index == last:
            return f"the index {index} comes twice: in {info.name!r} too"
        if index != last + 1:
            return f"the index {last + 1} is missing: next is {info.name!r}"
        last = index
    return None


class Incomplete(Exception):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """Parts of a group are missing, or there are too many; the message says which.

    Attributes:
        hint: What to do about it.
    """

    def __init__(self, message: str, hint: str = ABSENT) -> None:
        super().__init__(message)
        self.hint = hint


class Outcome(NamedTuple):
    """What a group's function makes of its sources.

    Attributes:
        results: Target name -> a tensor without values, or None where its shape is not known before it is computed.
        placements: Target name -> the copies that make it up, where it is a mere rearrangement.
        computed: Why it must be computed; empty where it is a mere rearrangement.
        overwritten: Targets of which the function wrote parts twice.
    """

    results: Mapping[str, torch.Tensor | None]
    placements: Mapping[str, tuple[Placement, ...]]
    computed: str = ""
    overwritten: tuple[str, ...] = ()

    def renamed(self, names: Sequence[str]) -> Outcome:
        """The same for other targets, in the order of these."""
        new = dict(zip(self.results, names, strict=True))
        return Outcome(
            {new[name]: result for name, result in self.results.items()},
            {new[name]: placements for name, placements in self.placements.items()},
            self.computed,
            tuple([new[name] for name in self.overwritten]),
        )


def outcome_of(
    state: GroupState, targets: Mapping[str, Target], traces: dict[Hashable, Outcome] | None = None
) -> Outcome:
    """What a group's function makes of what has been found.

    Args:
        state: The group.
        targets: What the model wants filled.
        traces: What was found of groups before, for those that are alike: the layers of a model mostly are.

    Raises:
        Incomplete: If parts are missing, or there are too many.
        RuleError: If the function can't be applied to tensors of these shapes.
    """
    problem, absence = state.problem(), state.absence()
    if problem is not None:
        raise Incomplete(problem, _SURPLUS if state.has_surplus else ABSENT)
    try:
        outcome = _run_without_values(state, targets, {} if traces is None else traces)
    except RuleError as error:
        if absence is not None:
            raise Incomplete(f"{absence}; and without it, {error.message}") from error
        raise
    results = {name: result for name, result in outcome.results.items() if result is not None and name in targets}
    if absence is not None and any(tuple(r.shape) != targets[name].shape for name, r in results.items()):
        raise Incomplete(absence)
    return outcome


def _run_without_values(state: GroupState, targets: Mapping[str, Target], traces: dict[Hashable, Outcome]) -> Outcome:
    """Run the function on symbols, and where that can't be, on tensors without values."""
    key = _likeness(state, targets)
    if key in traces:
        return traces[key].renamed(state.group.targets)
    try:
        outcome = _traced(state, targets)
        if key is not None:
            traces[key] = outcome
        return outcome
    except WeightLoadersError:
        raise
    except Exception as error:  # noqa: BLE001 -- whatever foreign code does with a symbol, real tensors decide
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    try:
        results = state.group.function(made_of(state.arguments(), without_values))
        if any(isinstance(result, SymbolicTensor) for result in results.values()):
            raise _keeps_tensors(state)
        return Outcome(results, {}, reason)
    except WeightLoadersError:
        raise
    except Untraceable as error:
        raise _keeps_tensors(state) from error
    except Exception as error:
        if looks_at_values(error):
            return Outcome(dict.fromkeys(state.group.targets), {}, f"it looks at values: {reason}")
        odd = _odd_one(state)
        if odd is not None:
            hint = "the checkpoint is damaged or put together from several: fetch or export it again"
            raise RuleError(f"{state.group.rule} takes tensors of one shape, but {odd}", hint=hint) from error
        shapes = [f"{list(info.shape)} {info.dtype}" for info in state.infos]
        raise RuleError(
            f"{state.group.rule} can't be applied to tensors of shapes {listed(shapes)}: {error}",
            hint="check what the function does with such tensors, and the rule's sizes against the model's config",
        ) from error


def _likeness(state: GroupState, targets: Mapping[str, Target]) -> Hashable:
    """What is the same of groups of which the same becomes, but for the names; None where that can't be told."""
    if state.group.alike is None:
        return None
    sources = tuple([
        tuple([(info.shape, info.dtype) for info in argument])
        if isinstance(argument, tuple)
        else (argument.shape, argument.dtype)
        for argument in state.arguments()
    ])  # fmt: skip
    wanted = tuple([targets[name].dtype if name in targets else None for name in state.group.targets])
    return state.group.alike, sources, wanted


def _keeps_tensors(state: GroupState) -> RuleError:
    return RuleError(
        f"{state.group.rule} keeps a tensor from one call to the next, which has no values yet",
        hint="let the function make its tensors anew in each call (no cache around what makes them)",
    )


def _odd_one(state: GroupState) -> str | None:
    """Which of the tensors of one slot is of another shape than most of them."""
    for slot, is_list, members in zip(state.group.slots, state.group.lists, state.members, strict=True):
        shapes = Counter(info.shape for _, info in members)
        if is_list and len(shapes) > 1:
            usual = shapes.most_common(1)[0][0]
            info = next(info for _, info in members if info.shape != usual)
            return f"{info.name!r} has {list(info.shape)}, where others of {slot} have {list(usual)}"
    return None


def _traced(state: GroupState, targets: Mapping[str, Target]) -> Outcome:
    """Run the function on symbols."""
    numbers = {id(info): number for number, info in enumerate(state.infos)}
    with tracing():
        symbols = made_of(state.arguments(), lambda info: SymbolicTensor.of(numbers[id(info)], info.shape, info.dtype))
        results = state.group.function(symbols)
        return _outcome(results, targets)


def _outcome(results: Mapping[str, torch.Tensor], targets: Mapping[str, Target]) -> Outcome:
    placements: dict[str, tuple[Placement, ...]] = {}
    overwritten = []
    for name, symbol in results.items():
        if not isinstance(symbol, SymbolicTensor):
            raise Untraceable("a result that does not come from the source")
        if symbol.is_cast and name in targets and targets[name].dtype != symbol.dtype:
            # One cast straight to the target's dtype would round otherwise than by way of this one.
            raise Untraceable(f"a cast to {symbol.dtype}, which is not what the model has")
        placements[name] = tuple(symbol.placements())
        if symbol.space.overwritten:
            overwritten.append(name)
    return Outcome(results, placements, overwritten=tuple(overwritten))


def made_of(
    arguments: Sequence[TensorInfo | tuple[TensorInfo, ...]], make: Callable[[TensorInfo], torch.Tensor]
) -> list[Any]:
    """What a group's function gets, of tensors that are made for its sources."""
    return [[make(info) for info in part] if isinstance(part, tuple) else make(part) for part in arguments]


def without_values(info: TensorInfo) -> torch.Tensor:
    """A tensor that has the shape and dtype of a source's, and no memory."""
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def looks_at_values(error: Exception) -> bool:
    """Whether a function that failed on tensors without values asked for some: torch then names the meta device."""
    return re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None
