"""`Inspection`: looks at values that have just been loaded: is each finite, and what do they come to?

A parameter is looked at by the thread that wrote the last of it, while others still read, in boxes that stay in the
processor's cache from one question to the next.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from weightloaders.errors import LoadError
from weightloaders.transfer.copying import rows_of
from weightloaders.weights.reading import memory_of, swap_bytes
from weightloaders.weights.threads import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.targets import Target

_ELEMENTS_AT_ONCE = 1 << 18
_SHOWN = 8


class NotFinite(NamedTuple):
    """What of a tensor is not finite.

    Attributes:
        nans: How many elements are not a number.
        infinities: How many are infinite.
        first: The index of the first of them, in row-major order.
    """

    nans: int
    infinities: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        counts = [f"{count:,} {what}" for count, what in ((self.nans, "NaN"), (self.infinities, "infinite")) if count]
        return f"{' and '.join(counts)}, the first at {list(self.first)}"


@dataclass(frozen=True, slots=True)
class Values:
    """What looking at a tensor's values came to.

    Attributes:
        sha256: Of its elements in row-major order, little-endian; None where that was not asked for.
        not_finite: What of it is not finite; None if all is, or that was not asked for.
    """

    sha256: str | None = None
    not_finite: NotFinite | None = None


def values_of(tensor: torch.Tensor, *, finite: bool = True, checksum: bool = True) -> Values:
    """Look at the values of a tensor, in bounded memory wherever it lies.

    Args:
        tensor: Of any device and strides.
        finite: Whether to look for NaN and infinity.
        checksum: Whether to compute the checksum.
    """
    tensor = tensor.detach()
    finite = finite and (tensor.is_floating_point() or tensor.is_complex())
    sum_ = hashlib.sha256() if checksum else None
    nans = infinities = at = 0
    first: int | None = None
    for part in rows_of(tensor, _ELEMENTS_AT_ONCE):
        if sum_ is not None:
            _add(sum_, part)
        if finite and not _is_finite(part):
            part = part.float() if part.element_size() == 1 else part
            odd = ~torch.isfinite(part).reshape(-1)
            nans += (mine := int(part.isnan().sum()))
            infinities += int(odd.sum()) - mine
            first = at + int(odd.int().argmax()) if first is None else first
        at += part.numel()
    found = None if first is None else NotFinite(nans, infinities, _index(first, tensor.shape))
    return Values(sum_.hexdigest() if sum_ is not None else None, found)


def _add(sum_: hashlib._Hash, part: torch.Tensor) -> None:
    part = part.resolve_conj().resolve_neg().cpu().contiguous()
    if sys.byteorder == "big":
        part = part.clone()
        swap_bytes(part)
    sum_.update(memory_of(part))


def _is_finite(part: torch.Tensor) -> bool:
    # Codes of 8 bits have no isfinite of their own.
    part = part.float() if part.element_size() == 1 else part
    # Nothing is faster than a sum, and one with an infinity or NaN is never finite. It may overflow itself, though.
    return bool(part.sum().isfinite()) or bool(torch.isfinite(part).all())


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


class Inspection:
    """Looks at parameters once they are filled. Several threads may look at several of them.

    Args:
        finite: Whether to look for NaN and infinity.
        checksum: Whether to compute checksums.

    Attributes:
        found: What each came to, by its name.
    """

    def __init__(self, *, finite: bool, checksum: bool) -> None:
        self.found: dict[str, Values] = {}
        self._finite, self._checksum = finite, checksum

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to look for."""
        return self._finite or self._checksum

    def look(self, target: Target) -> None:
        """Look at a parameter, all of which was written."""
        self.found[target.name] = values_of(target.tensor, finite=self._finite, checksum=self._checksum)

    def look_at_rest(self, targets: Iterable[Target]) -> None:
        """Look at those that nobody has looked at yet."""
        if self.is_wanted:
            rest = {target.name: target for target in targets if target.name not in self.found}
            for _ in in_turn(self.look, list(rest.values())):
                pass

    def raise_if_not_finite(self) -> None:
        """Refuse NaN and infinities.

        Raises:
            LoadError: With the parameters that have some, how many, and where.
        """
        bad = {name: values.not_finite for name, values in self.found.items() if values.not_finite is not None}
        if not bad:
            return
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        many = "1 parameter holds" if len(bad) == 1 else f"{len(bad)} parameters hold"
        raise LoadError(
            f"verify='finite': {many} NaN or infinity: "
            + "; ".join(f"{name} ({odd})" for name, odd in list(bad.items())[:_SHOWN])
            + more,
            tensor=next(iter(bad)),
            written=tuple(self.found),
            hint="the checkpoint is damaged, or a cast overflowed; load it in the dtype it is stored in",
        )
