"""A checkpoint's tensors out of a model's parameters: every copy of a load the other way round, and the proof.

Everything is proved before a byte is written: each element of each tensor comes from exactly one place in the model, or
from several that are held against each other.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from weightloaders.errors import SaveError
from weightloaders.mapping.composing import TooManyPlacements, compose, cover
from weightloaders.mapping.dtypes import may_cast
from weightloaders.mapping.placement import Placement, invert, whole
from weightloaders.plan import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.loading.origin import Origin, Stored
    from weightloaders.plan import Policies

logger = logging.getLogger(__name__)

# An error shows this many tensors that can't be written back.
_SHOWN = 8


class Sized(Protocol):
    """What there is of a name: a parameter, or a tensor of a catalogue."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""


class Written(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: Its name.
        dtype: The dtype that it is written in.
        shape: Its shape.
        values: The dtype that it is put together in.
        pieces: The parameters that it is made of, each with the copy that leads from it.
        doubles: Where its elements lie at several places in the model: all the copies that led there.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: torch.dtype
    pieces: tuple[tuple[str, Placement], ...]
    doubles: tuple[tuple[str, Placement], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Losses:
    """Tensors that can't be written back, and what is done about them.

    Args:
        policies: What is done about tensors whose values are missing.
    """

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._fatal: dict[str, str] = {}
        self._told: dict[str, list[str]] = defaultdict(list)

    def add(self, name: str, reason: str, *, derived: bool = False) -> None:
        """One more, with the reason."""
        severity = "warning" if derived else self._policies.missing(name)
        if severity == "error":
            self._fatal[name] = reason
        elif severity == "warning":
            self._told[reason].append(name)

    def settle(self) -> None:
        """Raise, or warn of what is left out.

        Raises:
            SaveError: If one of them may not be left out.
        """
        if self._fatal:
            shown = [f"- {name}: {reason}" for name, reason in list(self._fatal.items())[:_SHOWN]]
            more = len(self._fatal) - len(shown)
            body = "\n".join([*shown, *([f"- and {more} more"] if more else [])])
            first = next(iter(self._fatal))
            raise SaveError(
                f"{len(self._fatal)} of the checkpoint's tensors can't be written back; nothing was written\n{body}",
                tensor=first,
                hint=f"on_missing={{{first!r}: 'warn'}} leaves a tensor out",
            )
        for reason, names in self._told.items():
            logger.warning("left out, for %s: %s", reason, listed(names))


def invert_origin(
    origin: Origin, own: Mapping[str, Sized], policies: Policies, *, stored_dtype: bool = False
) -> list[Written]:
    """The checkpoint's tensors, each as pieces of what there is now.

    Args:
        origin: What was made of what.
        own: What there is now, by name.
        policies: What is done about tensors whose values are nowhere.
        stored_dtype: Write each in the dtype that the checkpoint had; default: that of the values now.

    Raises:
        SaveError: If a tensor can't be put together, and may not be left out.
    """
    written, losses = [], Losses(policies)
    for stored in origin.tensors:
        problem = stored.loss or _changed(stored, origin, own)
        result = problem or _inverted(stored, own, stored_dtype)
        if isinstance(result, Written):
            written.append(result)
        else:
            losses.add(stored.name, result, derived=stored.derived)
    losses.settle()
    return written


def _changed(stored: Stored, origin: Origin, own: Mapping[str, Sized]) -> str:
    """What is not there as the tensor needs it; empty where everything is."""
    for name, _ in stored.ways:
        there = own.get(name)
        if there is None:
            return f"it belongs into {name}, which is not there"
        if tuple(there.shape) != origin.shapes[name]:
            return f"it belongs into {name} of shape {list(origin.shapes[name])}, which has {list(there.shape)}"
    return ""


def _inverted(stored: Stored, own: Mapping[str, Sized], stored_dtype: bool) -> Written | str:
    """The copies back; or why there are none."""
    dtypes = {own[name].dtype for name, _ in stored.ways} or {stored.dtype}
    # What one tensor became in several dtypes is gathered in one that loses nothing.
    values = functools.reduce(torch.promote_types, dtypes)
    keep = (stored_dtype or stored.derived) and may_cast(values, stored.dtype)
    pieces = [invert(placed, number) for number, (_, placed) in enumerate(stored.ways)]
    size = math.prod(stored.shape)
    try:
        found = cover(pieces, size)
        if found.twice:
            pieces, _ = compose(pieces, whole(0, size))
    except TooManyPlacements:
        return "its elements lie so irregularly in the model that it can't be proved whole"
    missing = sum(left.numel for left in found.never)
    if missing:
        return f"{missing} of its {size} elements are not in the model"
    repeated = found.twice or any(not step for _, placed in stored.ways for _, step, _ in placed.dims)
    return Written(
        stored.name,
        stored.dtype if keep else values,
        stored.shape,
        values,
        tuple((stored.ways[number][0], piece) for piece in pieces if isinstance(number := piece.source, int)),
        stored.ways if repeated else (),
    )
