"""A plan as data: steps, findings, policies; explained, written down and read back."""

from weightloaders.plan.explaining import describe_source
from weightloaders.plan.findings import Finding, Policies, Policy, PolicyOption, Severity, listed, merged
from weightloaders.plan.forecast import Forecast
from weightloaders.plan.plan import LoadPlan
from weightloaders.plan.steps import (
    CallStep,
    ComputeStep,
    CopyStep,
    Step,
    is_whole_copy,
    makes_up_its_target,
    single_run,
    step_infos,
    step_targets,
)

__all__ = [
    "CallStep",
    "ComputeStep",
    "CopyStep",
    "Finding",
    "Forecast",
    "LoadPlan",
    "Policies",
    "Policy",
    "PolicyOption",
    "Severity",
    "Step",
    "describe_source",
    "is_whole_copy",
    "listed",
    "makes_up_its_target",
    "merged",
    "single_run",
    "step_infos",
    "step_targets",
]
