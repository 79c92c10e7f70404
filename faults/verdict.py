"""What came of an execution."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """An execution in which nothing was lost.

    Attributes:
        fault: What was to go wrong.
        outcome: ``"right"``: it went on, and the result is right. ``"refused"``: with an error of ours.
            ``"interrupted"``, ``"killed"``: as was asked for.
        injected: How often it did go wrong.
    """

    fault: str
    outcome: str
    injected: int


class Lost(Exception):  # noqa: N818 -- it is what is counted
    """A wrong result, an error that is not ours, or something that was left behind."""
