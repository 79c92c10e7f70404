"""The one place that joins: a loader describes, the plan decides, the transfer moves, the report tells."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.errors import (
    LoaderContractError,
    LoadError,
    PlanError,
    SourceError,
    SourceNotFoundError,
    SourceReadError,
    WeightLoadersError,
    summary,
)
from weightloaders.loading.context import LoadContext, current_context, within
from weightloaders.loading.nesting import alone
from weightloaders.loading.preparing import make_ties, mappers_for, rules_of, targets_of
from weightloaders.loading.running import run
from weightloaders.loading.streaming import load_stream
from weightloaders.loading.watching import load_by_loader, load_by_model, own_load_weights
from weightloaders.mapping import transformers as hf
from weightloaders.mapping.dtypes import may_cast
from weightloaders.mapping.rules import RuleMapper
from weightloaders.planner import Planner
from weightloaders.proving import proved
from weightloaders.targets import check_is_module
from weightloaders.transfer.forecast import forecast
from weightloaders.weights.collector import collector_paused
from weightloaders.weights.system_errors import advice
from weightloaders.weights.weights import Stream, Weights, as_weights

if TYPE_CHECKING:
    from torch import nn

    from weightloaders.mapping.recipes import Trusted
    from weightloaders.plan import LoadPlan
    from weightloaders.report import LoadReport
    from weightloaders.targets import Targets

logger = logging.getLogger(__name__)


def load(model: nn.Module, loader: Any, source: str, context: LoadContext) -> LoadReport:
    """Let a loader describe a source and fill a model from it.

    Args:
        model: Filled in place.
        loader: A `BaseWeightLoader`.
        source: What the loader is to open.
        context: What was asked for.

    Raises:
        SourceError: If the source can't be opened.
        PlanError: If something is missing or does not fit; nothing was touched.
        LoadError: If something failed on the way; the model is marked then. Or if another load of it is running.
    """
    check_is_module(model)
    with alone(model):
        context = context.changed(phases={}, compared={})
        with context.timed("open"):
            weights = get_weights(loader, source)
        is_default = True
        try:
            with _naming(loader, "load_weights", source):
                is_default = getattr(type(loader).load_weights, "is_default", False)
            context = context.changed(ties=hf.pending_ties(model))
            with within(context, model):
                if is_default:
                    report = load_planned(model, weights, borrowed=is_borrowed(loader, source))
                else:
                    report = load_by_loader(model, loader, weights, context)
            make_ties(model, context, report.loaded)
            return report
        except (SourceError, LoadError) as error:
            # What a loader's own code does wrong is its plugin's; else somebody may have refused who said so.
            error.plugin = (error.plugin if is_default else None) or _plugin_of(loader) or error.plugin
            raise
        finally:
            _close(weights)


def load_given(model: nn.Module, weights: Any, context: LoadContext) -> LoadReport:
    """Fill a model from weights that the caller has, and keeps: they are not closed.

    Raises:
        PlanError: If something is missing or does not fit; nothing was touched.
        LoadError: If something failed on the way; the model is marked then. Or if another load of it is running.
    """
    check_is_module(model)
    with alone(model):
        context = context.changed(ties=hf.pending_ties(model), phases={}, compared={})
        with within(context, model):
            report = load_planned(model, weights)
        make_ties(model, context, report.loaded)
        return report


def get_weights(loader: Any, source: str) -> Any:
    """What a loader says that a source holds.

    Raises:
        SourceError: If it fails in any way; with the loader's name.
    """
    with _naming(loader, f"get_weights({source!r})", source):
        return loader.get_weights(source)


def is_borrowed(loader: Any, source: str) -> bool:
    """Whether the tensors that a loader hands out belong to a buffer that is reused.

    Raises:
        SourceError: If it can't say.
    """
    with _naming(loader, "borrowed", source):
        return bool(loader.borrowed)


@contextlib.contextmanager
def _naming(loader: Any, what: str, source: str) -> Iterator[None]:
    """Turn whatever a loader's code raises into an error of ours that names it; an interrupt passes."""
    try:
        yield
    except WeightLoadersError as error:
        error.plugin = error.plugin or _plugin_of(loader)
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        name = type(loader).__name__
        where: dict[str, Any] = {"file": source, "plugin": _plugin_of(loader) or name}
        kind: type[SourceError] = SourceError
        if isinstance(error, OSError):
            kind = SourceNotFoundError if isinstance(error, FileNotFoundError) else SourceReadError
            where["hint"] = advice(error)
        raise kind(f"{name}.{what} failed: {summary(error)}", **where) from error


def _plugin_of(loader: Any) -> str | None:
    """Who offers a third party's loader; None for others."""
    # The registry wrote it there, with the name, when it created the loader.
    created_as = getattr(loader, "_created_as", None)
    return created_as[1] if created_as else None


def _close(weights: Any) -> None:
    # A generator that nobody ran to its end holds what it opened until somebody says that no more is wanted.
    if isinstance(weights, Weights) or (isinstance(weights, Iterator) and hasattr(weights, "close")):
        try:
            weights.close()
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception("closing the weights failed")


def load_planned(model: nn.Module, weights: Any, *, borrowed: bool = False) -> LoadReport:
    """The default way: plan and transfer, or stream, or let the model's own ``load_weights`` do it.

    Args:
        model: Filled in place.
        weights: Anything the contract accepts as weights.
        borrowed: Whether tensors belong to a buffer that is reused.

    Raises:
        LoaderContractError: If these are no weights.
        PlanError: If something is missing or does not fit; nothing was touched.
        LoadError: If something failed on the way; the model is marked then.
    """
    context = current_context(model)
    wrapped = as_weights(weights, borrowed=borrowed)
    own = own_load_weights(model)
    if own is not None and not context.rules:
        return load_by_model(model, own, wrapped, context)
    if isinstance(wrapped, Stream):
        return load_stream(model, wrapped, context)
    return _load_by_plan(model, wrapped, context)


# The plan goes before the collector comes back, which then has little to look at.
@collector_paused()
def _load_by_plan(model: nn.Module, weights: Weights, context: LoadContext) -> LoadReport:
    with context.timed("plan"):
        targets = targets_of(model, context)
        plan = _plan(model, weights, targets, context)
    return run(plan, model, targets, context, weights)


def make_plan(model: nn.Module, weights: Weights, context: LoadContext) -> LoadPlan:
    """The plan for a catalogue. No data is read, except to compare two sources of one parameter.

    Raises:
        RuleError: If a rule can't be understood.
        ModelError: If the model can't be filled at all.
    """
    check_is_module(model)
    context = context.changed(ties=hf.pending_ties(model))
    targets = targets_of(model, context)
    return _runnable(_plan(model, weights, targets, context), weights, targets, context)


def prove_plan(
    model: nn.Module, weights: Weights, plan: LoadPlan, trust: Sequence[Trusted], context: LoadContext
) -> LoadPlan:
    """A plan that was read back, proved against a model and a catalogue. No data is read.

    Raises:
        PlanError: If they are not those that it was made for, or it is not what a plan must be.
        RuleError: If it would run a function that is not known, and not trusted.
    """
    check_is_module(model)
    context = context.changed(ties=hf.pending_ties(model))
    targets = targets_of(model, context)
    weights.check_open()
    return _runnable(proved(plan, targets, weights.infos(), trust), weights, targets, context)


def _runnable(plan: LoadPlan, weights: Weights, targets: Targets, context: LoadContext) -> LoadPlan:
    """The plan, with what carries it out as long as the weights are open."""

    def runner(plan: LoadPlan, model: nn.Module) -> LoadReport:
        check_is_module(model)
        with alone(model):
            weights.check_open()
            report = run(plan, model, targets, context.changed(phases={}, compared={}), weights)
            make_ties(model, context, report.loaded)
            return report

    plan.runner, plan.forecaster = runner, partial(forecast, options=context.transfer, devices=context.device)
    return plan


def _plan(model: nn.Module, weights: Weights, targets: Targets, context: LoadContext) -> LoadPlan:
    weights.check_open()
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
    idle = {rules_of(m.origin) for m in mappers if isinstance(m, RuleMapper) and m.origin and not m.used}
    plan.decided_by[:0] = [who for who in decided_by if who not in idle]
    plan.forecaster = partial(forecast, options=context.transfer, devices=context.device)
    return plan


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a tensor into a parameter, in place.

    Args:
        param: The parameter.
        loaded_weight: Of the same shape; cast to the parameter's dtype, if both are real floating point.

    Raises:
        PlanError: If shapes or kinds of number differ, or the parameter is on meta; it is untouched.
        LoaderContractError: If either is no tensor.
    """
    given: tuple[Any, ...] = (param, loaded_weight)
    if not all(isinstance(value, torch.Tensor) for value in given):
        raise LoaderContractError("default_weight_loader takes a parameter and a tensor")
    if param.device.type == "meta":
        raise PlanError("the parameter is on the meta device and has no memory to be filled")
    if param.shape != loaded_weight.shape:
        # A scalar in a file and a parameter of one element are the same thing.
        if not param.numel() == loaded_weight.numel() == 1:
            raise PlanError(f"the tensor has shape {list(loaded_weight.shape)}, the parameter {list(param.shape)}")
        loaded_weight = loaded_weight.reshape(param.shape)
    if not may_cast(loaded_weight.dtype, param.dtype):
        raise PlanError(f"{loaded_weight.dtype} values can't become {param.dtype} by a cast")
    with torch.inference_mode(param.is_inference()), torch.no_grad():
        param.copy_(loaded_weight)
