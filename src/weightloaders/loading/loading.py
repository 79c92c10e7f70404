"""The one place that joins: a loader describes, the plan decides, the transfer moves, the report tells."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from weightloaders import hooks
from weightloaders.errors import LoaderContractError, PlanError
from weightloaders.loading.context import LoadContext, current_context, marking, within
from weightloaders.loading.preparing import mappers_for, prepare_memory, report_of, show_progress, targets_of
from weightloaders.loading.streaming import load_stream
from weightloaders.loading.watching import load_by_loader, load_by_model, own_load_weights, raise_if_uncovered, watching
from weightloaders.mapping import transformers as hf
from weightloaders.plan import CallStep, LoadPlan, step_infos, step_targets
from weightloaders.planner import Planner
from weightloaders.transfer.engine import Transfer
from weightloaders.transfer.verify import check_finite, check_sha256
from weightloaders.weights.weights import Stream, Weights, as_weights

if TYPE_CHECKING:
    from torch import nn

    from weightloaders.report import LoadReport

logger = logging.getLogger(__name__)


def load(model: nn.Module, loader: Any, source: str, context: LoadContext) -> LoadReport:
    """Let a loader describe a source and fill a model from it.

    Args:
        model: Filled in place.
        loader: A `BaseWeightLoader`.
        source: What the loader is to open.
        context: What was asked for.

    Raises:
        PlanError: If something is missing or does not fit; nothing was touched.
        LoadError: If something failed on the way; the model is marked then.
    """
    weights = loader.get_weights(source)
    try:
        if getattr(type(loader).load_weights, "is_default", False):
            with within(context):
                return load_planned(model, weights, borrowed=bool(loader.borrowed))
        return load_by_loader(model, loader, weights, context)
    finally:
        if isinstance(weights, Weights):
            weights.close()


def load_planned(model: nn.Module, weights: Any, *, borrowed: bool = False) -> LoadReport:
    """The default way: plan and transfer, or stream, or let the model's own ``load_weights`` do it.

    Args:
        model: Filled in place.
        weights: Anything the contract accepts as weights.
        borrowed: Whether tensors belong to a buffer that is reused.
    """
    context = current_context()
    wrapped = as_weights(weights, borrowed=borrowed)
    own = own_load_weights(model)
    if own is not None and not context.rules:
        return load_by_model(model, own, wrapped, context)
    if isinstance(wrapped, Stream):
        return load_stream(model, wrapped, context)
    return run(make_plan(model, wrapped, context), model, context)


def make_plan(model: nn.Module, weights: Weights, context: LoadContext) -> LoadPlan:
    """The plan for a catalogue. No data is read, except to compare two sources of one parameter.

    Raises:
        RuleError: If a rule can't be understood.
        ModelError: If the model can't be filled at all.
    """
    weights.check_open()
    targets = targets_of(model, context)
    mappers, decided_by, position = mappers_for(model, targets, context)
    ignore_missing, ignore_unexpected = hf.ignored_patterns(model)
    planner = Planner(
        targets,
        mappers,
        context.policies,
        base_model_prefix=getattr(model, "base_model_prefix", None) or None,
        ignore_missing=ignore_missing,
        ignore_unexpected=ignore_unexpected,
        automatic_from=position,
    )
    plan = planner.plan(weights.infos(), notes=weights.notes, skipped=weights.skipped_files)
    plan.decided_by[:0] = decided_by
    plan.runner = lambda plan, model: run(plan, model, context)
    return plan


def run(plan: LoadPlan, model: nn.Module, context: LoadContext) -> LoadReport:
    """Carry a plan out.

    Raises:
        PlanError: If it has errors, a hook refuses, or the model is another one than it was made for.
        LoadError: If something fails on the way.
    """
    start = time.perf_counter()
    hooks.before_load(plan)
    plan.raise_if_errors()
    _check_same_model(plan, model)
    _warn(plan)
    sources = list({e.source.name: e.source for s in plan.steps for i in step_infos(s) for e in i.extents}.values())
    if context.verify == "sha256":
        check_sha256(sources)
    prepared = prepare_memory(model, context, plan.unfilled, set(plan.tied))
    called = [step.target.name for step in plan.steps if isinstance(step, CallStep)]
    with marking(model), show_progress(context) as progress:
        if called:
            with watching(model, context, only=set(called)) as watch:
                moved = Transfer(plan.steps, progress=progress).run()
            raise_if_uncovered(watch, model, context, "the parameters' own weight_loader", only=set(called))
        else:
            moved = Transfer(plan.steps, progress=progress).run()
        filled = [target for step in plan.steps for target in step_targets(step)]
        if context.coverage is not None:
            for target in filled:
                context.coverage.wrote(target.tensor)
        if context.verify == "finite":
            check_finite(filled)
    report = report_of(plan, moved, context, prepared, time.perf_counter() - start)
    hooks.after_load(report)
    return report


def _check_same_model(plan: LoadPlan, model: nn.Module) -> None:
    current = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for step in plan.steps:
        for target in step_targets(step):
            if current.get(target.name) is not target.tensor:
                raise PlanError(
                    f"the plan was made for another model, or the model changed since: {target.name!r} is another tensor",
                    plan=plan, tensor=target.name, hint="make the plan again",
                )  # fmt: skip


def _warn(plan: LoadPlan) -> None:
    for finding in plan.findings:
        if finding.severity == "warning":
            logger.warning("%s", finding.message)
        elif finding.severity == "info":
            logger.debug("%s", finding.message)


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a tensor into a parameter, in place.

    Args:
        param: The parameter.
        loaded_weight: Of the same shape; cast to the parameter's dtype.

    Raises:
        PlanError: If the shapes differ; the parameter is untouched.
        LoaderContractError: If either is no tensor.
    """
    if not isinstance(param, torch.Tensor) or not isinstance(loaded_weight, torch.Tensor):
        raise LoaderContractError("default_weight_loader takes a parameter and a tensor")
    if param.shape != loaded_weight.shape:
        # A scalar in a file and a parameter of one element are the same thing.
        if param.numel() == loaded_weight.numel() == 1:
            loaded_weight = loaded_weight.reshape(param.shape)
        else:
            raise PlanError(f"the tensor has shape {list(loaded_weight.shape)}, the parameter {list(param.shape)}")
    with torch.no_grad():
        param.copy_(loaded_weight)
