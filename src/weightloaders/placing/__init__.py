"""Holding tensors against what a model wants, and saying what does not fit and why."""

from weightloaders.placing.groups import GroupState
from weightloaders.placing.placing import Placing

__all__ = ["GroupState", "Placing"]
