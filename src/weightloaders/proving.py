"""A plan that was read back is proved: it speaks of this model and this source, and fills each parameter exactly once.

What comes out speaks of the model's own parameters and the source's own bytes, and can be run. Nothing is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weightloaders.errors import PlanError, RuleError, WeightLoadersError
from weightloaders.mapping.dtypes import may_cast
from weightloaders.mapping.recipes import FunctionMaker
from weightloaders.placing import overlaps
from weightloaders.placing.groups import looks_at_values, made_of, without_values
from weightloaders.plan import CallStep, CopyStep, LoadPlan, Step, makes_up_its_target, step_targets
from weightloaders.plan.reading import DescribedFunction
from weightloaders.plan.writing import source_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.mapping.recipes import GroupFunction, Trusted
    from weightloaders.targets import Target, Targets
    from weightloaders.weights.info import TensorInfo

_AGAIN = "make the plan again, for this model and source"


def proved(
    plan: LoadPlan, targets: Targets, catalogue: Sequence[TensorInfo], trust: Sequence[Trusted] = ()
) -> LoadPlan:
    """A plan for the model and the source at hand, from one that was made for their like.

    Args:
        plan: The plan.
        targets: What the model wants filled.
        catalogue: What the source holds.
        trust: Functions that the plan may run, beside ready-made layouts and what transformers declares.

    Raises:
        PlanError: If model or source are not what they were, or a step is not what it must be. Nothing was read.
        RuleError: If the plan would run a function that is unknown, or that nobody trusts.
    """
    if not isinstance(plan, LoadPlan):
        raise PlanError(f"plan= takes a LoadPlan, not {type(plan).__name__}", hint="LoadPlan.from_json(text) reads one")
    _check_same_model(plan, targets)
    _check_same_source(plan, catalogue)
    maker = FunctionMaker(targets.model, targets.by_name, trust)
    infos = {info.name: info for info in catalogue}
    steps = [_step(step, targets.by_name, infos, maker) for step in plan.steps]
    _check_filled_once(plan, steps, targets)
    return replace(
        plan, steps=steps, targets=targets.by_name, ties=targets.ties(), catalogue=tuple(catalogue), _forecast=None
    )


def _refused(what: str, tensor: str | None = None, file: str | None = None) -> PlanError:
    return PlanError(f"the plan can't be carried out: {what}", tensor=tensor, file=file, hint=_AGAIN)


# ------------------------------------------------------------------ the same model, the same source


def _check_same_model(plan: LoadPlan, targets: Targets) -> None:
    own, ties = targets.by_name, targets.ties()
    for name in [*plan.targets, *own]:
        then, now = plan.targets.get(name), own.get(name)
        if then is None or now is None:
            what = f"the model {f'has a new {name!r}' if then is None else f'has no {name!r} any more'}"
            raise _refused(what, name)
        for what, before, after in (
            ("shape", list(then.shape), list(now.shape)),
            ("dtype", then.dtype, now.dtype),
            ("kind", then.kind, now.kind),
            ("tie", _tie(plan.ties, name), _tie(ties, name)),
        ):
            if before != after:
                raise _refused(f"{name!r} of the model had the {what} {before}, and now has {after}", name)


def _tie(ties: Mapping[str, str], name: str) -> str:
    return ties.get(name, name)


def _check_same_source(plan: LoadPlan, catalogue: Sequence[TensorInfo]) -> None:
    then, now = source_data(plan.catalogue), source_data(catalogue)
    for kind, before, after in (
        ("file", {file.name: file for file in then.files}, {file.name: file for file in now.files}),
        ("tensor", {t.name: t for t in then.tensors}, {t.name: t for t in now.tensors}),
    ):
        for name in [*before, *after]:
            tensor, file = (name, None) if kind == "tensor" else (None, now.root + name)
            if name not in after:
                there = f"; it has {next(iter(after))!r}" if len(before) == len(after) == 1 else ""
                raise _refused(f"the source has no {kind} {name!r} any more{there}", tensor, file)
            if name not in before:
                raise _refused(f"the source has a new {kind}, {name!r}", tensor, file)
    sizes = {file.name: file.size for file in then.files}
    for file in now.files:
        if file.size != sizes[file.name]:
            where = now.root + file.name
            raise _refused(f"{where} had {sizes[file.name]:,} bytes, and now has {file.size:,}", file=where)
    for a, b in zip(then.tensors, now.tensors, strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise _refused(f"{a.name!r} of the source was {a.shape} {a.dtype}, and now is {b.shape} {b.dtype}", a.name)
        if a.extents != b.extents:
            raise _refused(f"{a.name!r} does not lie where it lay in the source's files", a.name)


# ------------------------------------------------------------------ steps


def _step(step: Step, targets: Mapping[str, Target], infos: Mapping[str, TensorInfo], maker: FunctionMaker) -> Step:
    if isinstance(step, CopyStep):
        sources = tuple(infos[info.name] for info in step.sources)
        return _checked_copy(replace(step, target=targets[step.target.name], sources=sources))
    if isinstance(step, CallStep):
        target = targets[step.target.name]
        if not callable(getattr(target.tensor, "weight_loader", None)):
            raise _refused(f"{target.name!r} has no weight_loader of its own", target.name)
        return replace(step, target=target, info=infos[step.info.name])
    arguments = tuple(
        tuple(infos[info.name] for info in s) if isinstance(s, tuple) else infos[s.name] for s in step.sources
    )
    function = step.function
    if isinstance(function, DescribedFunction):
        try:
            function = maker.function(function.as_data())
        except RuleError as error:
            raise RuleError(
                f"{'; '.join(step.rules)}: {error.message}", tensor=next(iter(step.targets), None), hint=error.hint
            ) from error
    wanted = {name: targets[name] for name in step.targets}
    _check_results(function, arguments, wanted, "; ".join(step.rules))
    return replace(step, targets=wanted, sources=arguments, function=function)


def _checked_copy(step: CopyStep) -> CopyStep:
    name = step.target.name
    if not makes_up_its_target(step):
        raise _refused(f"its copies don't fill {name!r} exactly once, with what is in their sources", name)
    for info in step.sources:
        if not may_cast(info.dtype, step.target.dtype):
            raise _refused(f"{info.dtype} values of {info.name!r} can't become {step.target.dtype} in {name!r}", name)
    return step


def _check_results(
    function: GroupFunction,
    arguments: Sequence[TensorInfo | tuple[TensorInfo, ...]],
    wanted: Mapping[str, Target],
    rule: str,
) -> None:
    """Run a function on tensors without values, where it can be: what it makes must be what is to be filled."""
    try:
        results = function(made_of(arguments, without_values))
    except WeightLoadersError:
        raise
    except Exception as error:
        if looks_at_values(error):
            # So it is known by its results only.
            return
        raise _refused(f"{rule} can't be applied: {error}", next(iter(wanted), None)) from error
    for name, target in wanted.items():
        result = results.get(name)
        if result is None or tuple(result.shape) != target.shape or not may_cast(result.dtype, target.dtype):
            made = "nothing" if result is None else f"{list(result.shape)} {result.dtype}"
            raise _refused(f"{rule} makes {made} for {name!r}, not {list(target.shape)} {target.dtype}", name)


# ------------------------------------------------------------------ all of the model, and nothing twice


def _check_filled_once(plan: LoadPlan, steps: Sequence[Step], targets: Targets) -> None:
    filled: dict[str, str] = {}
    parts: set[tuple[str, Any]] = set()
    for step in steps:
        for target in step_targets(step):
            canonical = targets.canonical[target.name]
            by = "its own weight_loader" if isinstance(step, CallStep) else target.name
            part = (canonical, step.shard_id if isinstance(step, CallStep) else None)
            if filled.setdefault(canonical, by) != by or part in parts:
                raise _refused(f"two steps would fill {target.name!r}", target.name)
            parts.add(part)
    fillers = [targets.by_name[name] for name in filled]
    rest = [target for name, target in targets.by_name.items() if targets.canonical[name] not in filled]
    views, partners = overlaps.covered(rest, fillers), targets.declared_partners()
    left_out = {*plan.unfilled, *plan.missing}
    for target in rest:
        comes_along = target.name in views or any(
            targets.canonical.get(partner) in filled for partner in partners.get(target.name, ())
        )
        if not comes_along and target.name not in left_out:
            raise _refused(f"it does not fill {target.name!r}, and does not say so", target.name)
    if targets.by_name and not filled:
        raise _refused("it fills nothing at all")
