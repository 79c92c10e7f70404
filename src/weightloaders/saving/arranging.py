"""What rules make of a catalogue where there is no model: a plan of its own, and weights that are read by it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import RuleError, SaveError, WeightLoadersError
from weightloaders.loading import origin_of
from weightloaders.mapping.names import claim_name, natural_order
from weightloaders.mapping.rules import Rule, RuleMapper
from weightloaders.placing.groups import GroupState, Incomplete, outcome_of
from weightloaders.plan import ComputeStep, CopyStep, Finding, LoadPlan, Step, listed, step_infos, step_targets
from weightloaders.saving.gathering import gathered, in_files
from weightloaders.saving.inverting import invert_origin
from weightloaders.targets import Target
from weightloaders.transfer.engine import Transfer
from weightloaders.weights.info import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from weightloaders.plan import Policies
    from weightloaders.saving.gathering import Fetch
    from weightloaders.saving.inverting import Written

_INCOMPLETE = "is a pattern misspelt? else leave the rest out by a drop rule"


def arrange(infos: Sequence[TensorInfo], rules: Sequence[Rule], config: Any = None) -> LoadPlan:
    """What rules make of a catalogue, without a model that would want anything of it.

    Args:
        infos: The catalogue.
        rules: The rules.
        config: A model's config, which tells the sizes that rules leave out.

    Returns:
        A plan with a step for each tensor that comes out, in natural order of the names that they are made of. Its
        targets have no memory.

    Raises:
        RuleError: If a conversion can't be applied, two tensors come out under one name, or none of the rules matches.
    """
    mapper = RuleMapper(rules, (), config=config)
    plan = LoadPlan()
    groups: dict[Any, GroupState] = {}
    for info in sorted(infos, key=lambda info: natural_order(info.name)):
        claim = claim_name(info.name, [mapper], ())
        if claim.dropped:
            plan.dropped.append(info.name)
        elif claim.group is not None:
            state = groups.setdefault(claim.group.key, GroupState.of(claim.group))
            state.members[claim.slot].append((claim.index, info))
            state.rules = claim.rules
        else:
            if claim.target != info.name:
                plan.renamed[info.name] = claim.target
            plan.steps.append(CopyStep.whole(_target(claim.target, info.shape, info.dtype), info, claim.rules))
    for state in groups.values():
        plan.steps.extend(_steps_of(state))
    _check_names(plan)
    unused = mapper.unused()
    if infos and len(unused) == len(rules) > 0:
        raise RuleError(
            f"none of the rules matches a tensor: {listed(unused)}",
            hint=f"the source's names look like {infos[0].name!r}",
        )
    plan.findings.extend(Finding("rule", "warning", f"{rule} matches no tensor") for rule in unused)
    return plan


def _target(name: str, shape: Sequence[int], dtype: torch.dtype) -> Target:
    return Target(name, torch.empty(tuple(shape), dtype=dtype, device="meta"), "buffer", True, dtype)


def _steps_of(state: GroupState) -> Iterator[Step]:
    infos = state.infos
    try:
        outcome = outcome_of(state, {})
    except Incomplete as problem:
        raise RuleError(str(problem), tensor=infos[0].name, hint=_INCOMPLETE) from problem
    except WeightLoadersError as error:
        error.tensor = error.tensor or infos[0].name
        raise
    targets = {}
    for name, result in outcome.results.items():
        if result is None:
            raise RuleError(
                f"{state.group.rule} can't be applied without a model: the shape of {name!r} is not known before it is "
                f"computed ({outcome.computed})",
                tensor=name,
            )
        targets[name] = _target(name, result.shape, result.dtype)
    if outcome.computed:
        yield ComputeStep(targets, tuple(state.arguments()), state.group.function, state.rules, outcome.computed)
        return
    for name, target in targets.items():
        never = sum(p.numel for p in outcome.placements[name] if p.source is None)
        if never:
            raise RuleError(f"{state.group.rule} leaves {never} elements of {name} unwritten", tensor=name)
        yield CopyStep.of(target, infos, outcome.placements[name], state.rules)


def _check_names(plan: LoadPlan) -> None:
    seen: set[str] = set()
    for step in plan.steps:
        for target in step_targets(step):
            if target.name in seen:
                by = f" by {'; '.join(step.rules)}" if step.rules else ""
                raise RuleError(
                    f"two tensors come out as {target.name!r}: {listed([info.name for info in step_infos(step)])}{by}",
                    tensor=target.name,
                )
            seen.add(target.name)


def rearranged(plan: LoadPlan) -> list[TensorInfo]:
    """The tensors that come out of such a plan; each is read by its step when it is asked for."""
    return [info for step in plan.steps for info in _infos_of(step)]


def laid_out_like(
    infos: Iterable[TensorInfo], like: Sequence[TensorInfo], rules: Sequence[Rule], config: Any, policies: Policies
) -> list[TensorInfo]:
    """Tensors in the layout of another catalogue, of which rules would make them.

    Args:
        infos: The tensors.
        like: The other catalogue; none of its values are read.
        rules: The rules that lead from its names to those of the tensors.
        config: A model's config, which tells the sizes that rules leave out.
        policies: What is done about tensors of the other catalogue whose values are nowhere.

    Returns:
        The tensors that come out; each is put together when it is asked for.

    Raises:
        RuleError: If a rule can't be applied.
        SaveError: If a tensor can't be put together and may not be left out, or one has no place in the other layout.
    """
    origin = origin_of(arrange(like, rules, config), like)
    own = {info.name: info for info in infos}
    written = invert_origin(origin, own, policies)
    homeless = [name for name in own if name not in origin.shapes]
    if homeless:
        raise SaveError(
            f"the other layout has no place for {listed(homeless)}; nothing was written",
            tensor=homeless[0],
            hint="the rules are to lead from the other layout's names to these",
        )
    fetch = in_files(own)
    return [_out_of_pieces(tensor, own, fetch) for tensor in written]


def _out_of_pieces(tensor: Written, own: Mapping[str, TensorInfo], fetch: Fetch) -> TensorInfo:
    if len(tensor.pieces) == 1:
        name, piece = tensor.pieces[0]
        if piece.is_contiguous and (own[name].shape, own[name].dtype) == (tensor.shape, tensor.dtype):
            # Its bytes are read as they lie.
            return own[name].renamed(tensor.name)
    return TensorInfo(tensor.name, tensor.dtype, tensor.shape, read=functools.partial(gathered, tensor, fetch))


def _infos_of(step: Step) -> Iterator[TensorInfo]:
    if isinstance(step, CopyStep) and _is_whole(step):
        # Its bytes are read as they lie.
        yield step.sources[0].renamed(step.target.name)
        return
    for target in step_targets(step):
        yield TensorInfo(target.name, target.dtype, target.shape, read=functools.partial(_read, step, target))


def _is_whole(step: CopyStep) -> bool:
    if not len(step.placements) == len(step.sources) == 1:
        return False
    placed, info = step.placements[0], step.sources[0]
    return (
        placed.is_contiguous
        and placed.numel == info.numel
        and (info.shape, info.dtype) == (step.target.shape, step.target.dtype)
    )


def _read(step: Step, target: Target) -> torch.Tensor:
    filled = replace(target, tensor=torch.empty(target.shape, dtype=target.dtype))
    if isinstance(step, ComputeStep):
        # All of it is computed for each of its results: to keep the others could come to keeping everything.
        step = replace(step, targets={filled.name: filled})
    else:
        step = replace(step, target=filled)
    Transfer([step]).run()
    return filled.tensor
