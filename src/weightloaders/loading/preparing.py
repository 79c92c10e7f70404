"""What every way of loading needs: the model's wants, who is asked about names, memory, progress, the report."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightloaders import hooks
from weightloaders.errors import ModelError
from weightloaders.mapping import suggest
from weightloaders.mapping import transformers as hf
from weightloaders.mapping.modules import ModuleMapper
from weightloaders.mapping.rules import RuleMapper, parse_rules
from weightloaders.plan import LoadPlan, describe_source, step_infos, step_targets
from weightloaders.progress import Progress
from weightloaders.report import LoadReport
from weightloaders.targets import Targets
from weightloaders.transfer.memory import materialise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from weightloaders.loading.context import LoadContext
    from weightloaders.mapping.names import Mapper
    from weightloaders.transfer.engine import ProgressEvent, Transferred

logger = logging.getLogger(__name__)


def targets_of(model: nn.Module, context: LoadContext) -> Targets:
    """What the model wants filled, in this load."""
    return Targets(model, dtypes=context.dtypes, declared_ties=hf.tied_names(model))


def mappers_for(model: nn.Module, targets: Targets, context: LoadContext) -> tuple[list[Mapper], list[str], int]:
    """Who is asked about names, in order; what they are called; and where automatic prefixes belong among them."""
    own = targets.tensors
    config = getattr(model, "config", None)
    mappers: list[Mapper] = []
    decided_by: list[str] = []
    if context.rules:
        mappers.append(RuleMapper(context.rules, own, config=config))
        decided_by.append("the caller's rules")
    mappers.append(suggest.WrapperMapper(own))
    position = len(mappers)
    declared = ModuleMapper(model, own)
    if declared.used:
        mappers.append(declared)
        decided_by.append("the model's own declarations")
    if hf.is_transformers_model(model):
        mappers.append(hf.ConversionMapper(model, own))
        decided_by.append("transformers' conversions")
    for plugin, rules in hooks.rules_for(model):
        mappers.append(RuleMapper(parse_rules(rules), own, config=config, automatic=True, origin=plugin))
        decided_by.append(f"rules of {plugin}")
    decided_by.append("names")
    return mappers, decided_by, position


@contextlib.contextmanager
def show_progress(context: LoadContext) -> Iterator[Callable[[ProgressEvent], object] | None]:
    """Who is told about progress: the bar or function that was asked for, and the hooks."""
    with Progress(context.progress) as shown:

        def tell(event: ProgressEvent) -> None:
            shown(event)
            hooks.on_progress(event)

        yield tell


# ------------------------------------------------------------------ memory


def allowed_gaps(model: nn.Module, context: LoadContext) -> list[str]:
    """Parameters that may be left out. Where nobody can tell beforehand which will be, all are initialised first."""
    return [name for name in targets_of(model, context).by_name if context.policies.missing(name) != "error"]


@dataclass(slots=True)
class Prepared:
    """What was done to the model before the first byte moved."""

    initialised: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


def prepare_memory(model: nn.Module, context: LoadContext, unfilled: Iterable[str], tied: set[str]) -> Prepared:
    """Materialise what is on meta, and initialise what the source leaves out, before any byte moves.

    Raises:
        ModelError: If something on meta would be left without a value; nothing was touched.
    """
    device = context.device or torch.device("cpu")
    if device.type == "meta":
        raise ModelError("weights can't be loaded onto the meta device", hint="name a real device, e.g. device='cpu'")
    targets = targets_of(model, context)
    partners = targets.declared_partners()
    on_meta = {
        name: target.tensor
        for name, target in targets.by_name.items()
        # A declared tie is made when the model is finalised; until then its meta parameter stays.
        if target.tensor.device.type == "meta"
        and not (name in tied and name in partners)
    }
    prepared = Prepared()
    gaps = [name for name in unfilled if name in on_meta]
    if context.initialise is None:
        derived = {n: b for n, b in model.named_buffers() if n in targets.derived and b.device.type == "meta"}
        owners = _owners_to_reset(model, [*gaps, *derived])
        prepared.replaced = materialise(model, {**on_meta, **derived}, device, context.dtypes)
        for prefix, module in owners.items():
            module.reset_parameters()  # type: ignore[operator]
            prepared.initialised.extend(n for n in gaps if n.rpartition(".")[0] == prefix)
    else:
        prepared.replaced = materialise(model, on_meta, device, context.dtypes)
        context.initialise(model, gaps)
        prepared.initialised = gaps
    return prepared


def _owners_to_reset(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that can initialise these meta tensors; an error by name where one can't."""
    owners: dict[str, nn.Module] = {}
    for name in names:
        prefix = name.rpartition(".")[0]
        module = model.get_submodule(prefix)
        if not callable(getattr(module, "reset_parameters", None)):
            raise ModelError(
                f"{name} is on the meta device, the source does not fill it, and {type(module).__name__} has no "
                "reset_parameters() that could",
                tensor=name,
                hint="build the model on a real device, or give the module a reset_parameters() that fills it",
            )
        owners[prefix] = module
    return owners


# ------------------------------------------------------------------ reports


def report_of(
    plan: LoadPlan, moved: Transferred, context: LoadContext, prepared: Prepared, seconds: float
) -> LoadReport:
    sources = {}
    for step in plan.steps:
        described = "; ".join(describe_source(info) for info in step_infos(step)[:4])
        for target in step_targets(step):
            sources[target.name] = described + (f" (by {'; '.join(step.rules)})" if step.rules else "")
    notes = [f.message for f in plan.findings if f.severity == "warning" or f.kind == "note"]
    notes += [f"{name}: the cast to its dtype made new infinities" for name in moved.infinities]
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
        replaced=prepared.replaced,
        warnings=notes,
        decided_by=list(plan.decided_by),
        loader=context.loader,
        sources=sources,
        bytes_read=moved.bytes_read,
        seconds=seconds,
        extra_memory=moved.extra_memory,
    )
