"""From a source's names to a model's: `Claim` and `Group`, and the pipeline that asks each mapper in turn.

A *mapper* answers for one name at a time, so that a catalogue and a stream go through the same code. It may rename the
tensor, drop it, make it a member of a *group* (tensors that become other tensors together), or have nothing to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
        lists: For each slot whether it takes a list of tensors, in index order, rather than one.
        targets: Names of the results, where they are known before the function runs (for messages).
        function: Gets one tensor or list of tensors a slot; returns target name -> tensor.
        rule: How the group is called in messages and reports.
        indexed: Whether list slots must have exactly the indices 0 to E-1.
    """

    key: Hashable
    slots: tuple[str, ...]
    lists: tuple[bool, ...]
    targets: tuple[str, ...]
    function: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]] = field(compare=False)
    rule: str = ""
    indexed: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """What becomes of one source tensor.

    Attributes:
        target: The parameter it fills, unless it is dropped or a member of a group.
        rules: The rules that were applied, for the report.
        dropped: Nothing is to become of it.
        group: The group it belongs to, with its slot and, in a list slot, its index or sort key.
        remark: Something to report, e.g. a rename that was not applied.
    """

    target: str = ""
    rules: tuple[str, ...] = ()
    dropped: bool = False
    group: Group | None = None
    slot: int = 0
    index: Any = None
    shard_id: Any = None
    call_loader: bool = False
    remark: str = ""


class Mapper(Protocol):
    """Says what becomes of a name."""

    automatic: bool
    """Whether names that the model already has are left alone."""

    def claim(self, name: str) -> Claim | None:
        """What becomes of the tensor of this name; None where this mapper has nothing to say."""


def claim_name(name: str, mappers: Sequence[Mapper], own: Container[str]) -> Claim:
    """Ask each mapper in turn; a rename is handed on to those that follow, a group or a drop ends the matter."""
    current, rules, remarks = name, (), []
    for mapper in mappers:
        if mapper.automatic and current in own:
            continue
        claim = mapper.claim(current)
        if claim is None:
            continue
        rules += claim.rules
        if claim.remark:
            remarks.append(claim.remark)
        if claim.dropped or claim.group is not None or claim.call_loader:
            return Claim(
                claim.target, rules, claim.dropped, claim.group, claim.slot, claim.index, claim.shard_id,
                claim.call_loader, "; ".join(remarks),
            )  # fmt: skip
        current = claim.target
    return Claim(current, rules, remark="; ".join(remarks))
