"""Joining the parts: from a loader and a model to a filled model and a report."""

from weightloaders.loading.context import LoadContext, check_usable, load_status
from weightloaders.loading.loading import default_weight_loader, load, load_planned, make_plan

__all__ = [
    "LoadContext",
    "check_usable",
    "default_weight_loader",
    "load",
    "load_planned",
    "load_status",
    "make_plan",
]
