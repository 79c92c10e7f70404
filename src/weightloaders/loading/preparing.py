"""What every way of loading needs: the model's wants, who is asked about names, progress, the report."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from weightloaders import hooks
from weightloaders.loading.initialising import Groundwork, can_initialise
from weightloaders.loading.nesting import apart
from weightloaders.mapping import transformers as hf
from weightloaders.mapping.automatic import SpellingMapper, WrapperMapper
from weightloaders.mapping.modules import ModuleMapper
from weightloaders.mapping.rules import RuleMapper
from weightloaders.plan import LoadPlan, describe_source, step_infos, step_targets
from weightloaders.progress import Progress
from weightloaders.report import LoadReport
from weightloaders.targets import Target, Targets, declared_partners, held_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from weightloaders.loading.context import LoadContext
    from weightloaders.loading.initialising import Prepared
    from weightloaders.mapping.names import Mapper
    from weightloaders.transfer.engine import ProgressEvent, Transferred

logger = logging.getLogger(__name__)

# A parameter fused of many parts names only some of them in the report; the plan has all.
_SHOWN = 4


def targets_of(model: nn.Module, context: LoadContext, before: Targets | None = None) -> Targets:
    """What the model wants filled, in this load.

    Args:
        model: The model.
        context: What was asked for.
        before: The same from before meta parameters were given memory: what was wanted then still is.
    """
    targets = Targets(model, dtypes=context.dtypes, declared_ties=_declared_ties(model, context))
    wanted = {name for name, target in before.by_name.items() if not target.persistent} if before is not None else set()
    for name, buffer in targets.derived.items():
        # It belongs into no checkpoint, but if nobody can compute it, the source is asked all the same.
        lacks_value = buffer.is_meta and not can_initialise(model, name)
        if name in wanted or lacks_value:
            targets.by_name[name] = Target(name, buffer, "buffer", False, context.dtypes.get(name, buffer.dtype))
            targets.canonical[name] = name
    return targets


def _declared_ties(model: nn.Module, context: LoadContext) -> Mapping[str, str]:
    return hf.pending_ties(model) if context.ties is None else context.ties


def groundwork(
    model: nn.Module, targets: Targets, context: LoadContext, gaps: Iterable[str], tied: Iterable[str]
) -> Groundwork:
    """What has to be done to the model first, where the plan tells what the source leaves out."""
    return Groundwork(model, targets, context.device, context.dtypes, gaps, tied)


def groundwork_for_all(model: nn.Module, targets: Targets, context: LoadContext) -> Groundwork:
    """The same where nobody can tell beforehand what the source leaves out: all that may be is initialised."""
    ignored = hf.ignored_patterns(model)[0]
    gaps = [
        name for name in targets.by_name
        if context.policies.missing(name) != "error"
        or targets.is_derived(name) or (ignored is not None and ignored.search(name))
    ]  # fmt: skip
    return Groundwork(model, targets, context.device, context.dtypes, gaps, certain=False)


def mappers_for(model: nn.Module, targets: Targets, context: LoadContext) -> tuple[list[Mapper], list[str], int | None]:
    """Who is asked about names, in order; what they are called; and where automatic prefixes belong among them.

    Where nothing is to be automatic, only the caller and the model itself are asked; then prefixes belong nowhere.
    """
    own = targets.by_name
    config = getattr(model, "config", None)
    mappers: list[Mapper] = []
    decided_by: list[str] = []
    if context.rules:
        mappers.append(RuleMapper(context.rules, own, config=config))
        decided_by.append("the caller's rules")
    if context.automatic:
        mappers.append(WrapperMapper(own))
    position = len(mappers) if context.automatic else None
    declared = ModuleMapper((module for _, module in targets.modules), own)
    if declared.used:
        mappers.append(declared)
        decided_by.append("the model's own declarations")
    if hf.is_transformers_model(model):
        mappers.append(hf.ConversionMapper(model, own))
        decided_by.append("transformers' conversions")
    if context.automatic:
        for plugin, rules in hooks.rules_for(model):
            mappers.append(RuleMapper(rules, own, config=config, automatic=True, origin=plugin))
            decided_by.append(rules_of(plugin))
        mappers.append(SpellingMapper(own))
    decided_by.append("names")
    return mappers, decided_by, position


def rules_of(plugin: str) -> str:
    """How a plugin's rules are called among what decided."""
    return f"rules of {plugin}"


def make_ties(model: nn.Module, context: LoadContext, filled: Iterable[str]) -> None:
    """Make the ties that the model declares, where one of them was filled and the other was not."""
    partners_of = declared_partners(_declared_ties(model, context))
    if not partners_of:
        return
    now, given = held_by(model).parameters, set(filled)
    for name, partners in partners_of.items():
        other = next((partner for partner in sorted(partners) if partner in given), None)
        if name not in given and other is not None:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, now[other])


@contextlib.contextmanager
def show_progress(context: LoadContext) -> Iterator[Callable[[ProgressEvent], object]]:
    """Who is told about progress: the bar or function that was asked for, and the hooks."""
    start = time.perf_counter()
    with Progress(context.progress) as shown:

        def tell(event: ProgressEvent) -> None:
            if not event.seconds:
                event = replace(event, seconds=time.perf_counter() - start)
            with apart():
                shown(event)
                hooks.on_progress(event)

        yield tell


def warn_of(plan: LoadPlan) -> None:
    """Log what the plan found and the load goes on in spite of."""
    for finding in plan.findings:
        if finding.severity == "warning":
            logger.warning("%s", finding.message)
        elif finding.severity == "info":
            logger.debug("%s", finding.message)


def sources_of(plan: LoadPlan) -> dict[str, str]:
    """Parameter -> where its bytes come from and by which rules, as text."""
    sources: dict[str, str] = {}
    for step in plan.steps:
        infos = step_infos(step)
        described = "; ".join([describe_source(info) for info in infos[:_SHOWN]])
        if len(infos) > _SHOWN:
            described += f"; and {len(infos) - _SHOWN} more"
        if step.rules:
            described += f" (by {'; '.join(step.rules)})"
        for target in step_targets(step):
            # A parameter's own loader takes one part at a time.
            earlier = sources.get(target.name)
            sources[target.name] = described if earlier is None else f"{earlier}; {described}"
    return sources


def _overflow(name: str, plan: LoadPlan) -> str:
    stored, own = plan.cast.get(name, ("what the source has", "its dtype"))
    return f"{name}: the cast from {stored} to {own} made new infinities, of values too large for that"


def report_of(
    plan: LoadPlan, moved: Transferred, context: LoadContext, prepared: Prepared, seconds: float
) -> LoadReport:
    """The report of a load that a plan describes."""
    overflown = [_overflow(name, plan) for name in moved.infinities]
    for warning in overflown:
        logger.warning("%s", warning)
    return LoadReport(
        loaded=plan.loaded,
        missing=list(plan.missing),
        unexpected=list(plan.unexpected),
        mismatched=list(plan.mismatched),
        initialised=prepared.initialised,
        skipped_files=dict(plan.skipped_files),
        cast={name: (str(a), str(b)) for name, (a, b) in plan.cast.items()},
        tied=dict(plan.tied),
        renamed=dict(plan.renamed),
        dropped=list(plan.dropped),
        automatic=[f.message for f in plan.findings if f.kind == "rename"],
        replaced=prepared.replaced,
        warnings=[*(f.message for f in plan.findings if f.severity == "warning"), *overflown, *moved.warnings],
        notes=[*(f.message for f in plan.findings if f.kind == "note"), *moved.notes],
        decided_by=list(plan.decided_by),
        loader=context.loader,
        sources=sources_of(plan),
        files=dict(context.compared),
        bytes_read=moved.bytes_read,
        bytes_by_path=dict(sorted(moved.bytes_by_path.items())),
        reads=moved.reads,
        transfer=moved.how,
        seconds=seconds,
        phases=dict(context.phases),
        page_faults=moved.page_faults,
        extra_memory=moved.extra_memory,
    )
