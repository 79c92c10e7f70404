"""Joining the parts: from a loader and a model to a filled model and a report."""

from weightloaders.loading.aside import load_aside
from weightloaders.loading.context import LoadContext
from weightloaders.loading.loading import (
    default_weight_loader,
    get_weights,
    is_borrowed,
    load,
    load_given,
    load_planned,
    make_plan,
    prove_plan,
)
from weightloaders.loading.origin import Origin, origin_of
from weightloaders.loading.status import load_origin, load_status, usable
from weightloaders.loading.watching import handed_pairs

__all__ = [
    "LoadContext",
    "Origin",
    "default_weight_loader",
    "get_weights",
    "handed_pairs",
    "is_borrowed",
    "load",
    "load_aside",
    "load_given",
    "load_origin",
    "load_planned",
    "load_status",
    "make_plan",
    "origin_of",
    "prove_plan",
    "usable",
]
