"""From a source's names to a model's: `Claim` and `Group`, and the pipeline that asks each mapper in turn.

A *mapper* answers for one name at a time, so that a catalogue and a stream go through the same code. It may rename the
tensor, drop it, make it a member of a *group* (tensors that become other tensors together), or have nothing to say.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class Group:
    """Source tensors that become one or several target tensors together.

    Attributes:
        key: What tells this group from the others of its mapper.
        slots: A description (a pattern) of each source that the function gets.
        lists: For each slot whether it takes a list of tensors with the indices 0 to E-1 rather than just one.
        targets: Names of the results, where they are known before the function runs.
        function: Gets one tensor or list of tensors a slot; returns target name -> tensor.
        rule: How the group is called in messages and reports.
        lenient: Whether the function may do without some of its sources; an empty list stands for each of these.
        suffices: Tells of a lenient group, from the dtypes of what has come in each slot, whether it may do without the
            rest; a stream then need not be read to its end. Default: it waits for all.
        alike: Given by groups whose functions do the same to tensors of the same shapes and dtypes; None where that is
            not known, as of a function of the caller's, which may count its calls.
    """

    key: Hashable
    slots: tuple[str, ...]
    lists: tuple[bool, ...]
    targets: tuple[str, ...]
    function: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]] = field(compare=False)
    rule: str = ""
    lenient: bool = False
    suffices: Callable[[Mapping[str, Sequence[torch.dtype]]], bool] | None = field(default=None, compare=False)
    alike: Hashable = field(default=None, compare=False)


# Not frozen, which would take most of the time: there is one for each of a hundred thousand names.
@dataclass(slots=True)
class Claim:
    """What becomes of one source tensor.

    Attributes:
        target: The parameter it fills, unless it is dropped or a member of a group.
        rules: The rules that were applied, for the report.
        dropped: Nothing is to become of it.
        group: The group it belongs to.
        slot: Its place among the group's slots.
        index: Its index in a slot that takes a list.
        call_loader: It is handed to the parameter's own ``weight_loader``.
        shard_id: What that loader gets besides, where the tensor is one part of several.
        parts: The names of all these parts.
        remark: Something to report, e.g. a rule that was not applied.
        automatic: What was done to the name without being asked, as words to follow "the names".
    """

    target: str = ""
    rules: tuple[str, ...] = ()
    dropped: bool = False
    group: Group | None = None
    slot: int = 0
    index: int | None = None
    call_loader: bool = False
    shard_id: Any = None
    parts: tuple[str, ...] = ()
    remark: str = ""
    automatic: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether no further mapper is asked."""
        return self.dropped or self.group is not None or self.call_loader


class Mapper(Protocol):
    """Says what becomes of a name."""

    automatic: bool
    """Whether names that the model already has are left alone."""

    def claim(self, name: str) -> Claim | None:
        """What becomes of the tensor of this name; None where this mapper has nothing to say."""


def claim_name(name: str, mappers: Sequence[Mapper], own: Container[str]) -> Claim:
    """Ask each mapper in turn; a rename is handed on to those that follow, anything else ends the matter."""
    current = Claim(name)
    for mapper in mappers:
        if mapper.automatic and current.target in own:
            continue
        claim = mapper.claim(current.target)
        if claim is None:
            continue
        # Mostly there is nothing to carry over, and a copy is dear for one of a hundred thousand names.
        if current.rules or current.remark:
            claim = replace(
                claim,
                rules=current.rules + claim.rules,
                remark=current.remark or claim.remark,
                automatic=current.automatic + claim.automatic,
            )
        current = claim
        if current.is_final:
            break
    return current


def natural_order(name: str) -> str:
    """A sort key in which ``layers.2`` comes before ``layers.10``, and ``shard_2`` before ``shard_10``."""
    return "\0".join(map(_segment_order, name.split(".")))


# Names are many, their segments few.
@functools.lru_cache(maxsize=4096)
def _segment_order(segment: str) -> str:
    """Text that sorts as the segment does: numbers first, and by their values."""
    text = segment.rstrip("0123456789")
    # What lies behind the first few digits decides nothing here.
    number = segment[len(text) :][:_DIGITS].rjust(_DIGITS, "0") if len(text) < len(segment) else ""
    return f"1{text}\0{number}" if text else f"0{number}"


def as_index(text: str) -> int | None:
    """The number that a segment is; None where it is none, or an absurd one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


_DIGITS = 9
