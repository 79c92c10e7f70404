"""`Space`: what symbols are views of, and the copies that filled it; and `Untraceable`, for what is no copy."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from weightloaders.mapping.composing import MAX_PLACEMENTS, TooManyPlacements, compose
from weightloaders.mapping.placement import Constant, Placement, is_empty, placement, whole

if TYPE_CHECKING:
    from collections.abc import Iterable


class Untraceable(Exception):  # noqa: N818 -- a signal between our own parts, not an error that a user meets
    """The code does something that is not a rearrangement; the message is the operation's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        refused = refusals.get()
        if refused is not None:
            refused.append(reason)


#: What the code that runs now was refused; None outside a trace.
refusals: ContextVar[list[str] | None] = ContextVar("weightloaders_refusals", default=None)


class Space:
    """What a symbol is a view of.

    Attributes:
        layers: The copies that filled it. Where they overlap, the last counts.
        is_cast: Whether elements were cast on the way here.
        is_source: Whether it is a source, which is never written to.
        filled: How many elements it has, where the layers fill each just once; 0 where that is not known.
        refusals: What the code that made it was refused; it is of no use to any other code.
    """

    __slots__ = ("_overwritten", "filled", "is_cast", "is_source", "layers", "refusals")

    def __init__(self, layers: list[Placement], *, is_cast: bool = False, is_source: bool = False) -> None:
        self.layers = layers
        self.is_cast = is_cast
        self.is_source = is_source
        self.filled = 0
        self.refusals = refusals.get()
        self._overwritten = False

    def write(self, other: Space, view: torch.Tensor, steps: Iterable[int], start: int, *, cast: bool = False) -> None:
        """Copy what a view of another space sees to where these steps, one a dimension, lead from ``start`` on.

        Raises:
            Untraceable: If it is cast, and was cast before; or it takes too many separate pieces.
        """
        if cast and other.is_cast:
            raise Untraceable("a cast of what was cast before")
        self.copy(
            other, placement(0, int(view.storage_offset()), start, zip(view.shape, view.stride(), steps, strict=True))
        )
        self.is_cast |= cast

    def copy(self, other: Space, reading: Placement) -> None:
        """Copy out of another space.

        Raises:
            Untraceable: If it takes too many separate pieces.
        """
        self.is_cast |= other.is_cast
        if other.filled and reading.is_contiguous and reading.source_start == 0 and reading.numel == other.filled:
            start = reading.target_start
            found = [
                Placement(source, source_start, target_start + start, dims)
                for source, source_start, target_start, dims in other.layers
            ]
        elif other.is_source:
            # A source is all there, in order.
            _, source_start, target_start, dims = reading
            source = other.layers[0].source
            found = [] if is_empty(reading) else [Placement(source, source_start, target_start, dims)]
        else:
            try:
                found, _ = compose(other.layers, reading)
            except TooManyPlacements:
                raise too_many() from None
        self.filled = 0
        self.layers += found
        self._overwritten |= other.overwritten
        if len(self.layers) > MAX_PLACEMENTS:
            raise too_many()

    def fill(self, value: Any, view: torch.Tensor) -> None:
        """Write one value wherever a view of this space looks."""
        constant = rounded(value, view.dtype)
        dims = [(size, 0, step) for size, step in zip(view.shape, view.stride(), strict=True)]
        self.filled = 0
        self.layers.append(placement(constant, 0, int(view.storage_offset()), dims))

    @property
    def overwritten(self) -> bool:
        """Whether anything that came from a source was written over."""
        if self._overwritten or self.is_source or self.filled:
            return self._overwritten
        copies = [layer for layer in self.layers if isinstance(layer.source, int)]
        if len(copies) > 1:
            end = max(layer.target_end for layer in self.layers)
            seen, _ = compose(self.layers, whole(0, end))
            self._overwritten = sum(s.numel for s in seen if isinstance(s.source, int)) < sum(
                layer.numel for layer in copies
            )
        return self._overwritten


def rounded(value: Any, dtype: torch.dtype) -> Constant:
    """What a value is once it was written to memory of a dtype.

    Raises:
        Untraceable: If that is a complex number that is not real, which a plan can't say.
    """
    result = torch.empty((), dtype=dtype, device="cpu").fill_(value).item()
    if isinstance(result, complex):
        if complex(result.real) != result or math.copysign(1, result.imag) < 0:
            raise Untraceable("a complex constant")
        result = result.real
    return Constant(result)


def too_many() -> Untraceable:
    """What is said of code that takes tensors into too many pieces."""
    return Untraceable(f"more than {MAX_PLACEMENTS} separate pieces")
