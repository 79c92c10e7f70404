"""Which names in a folder may be part of the checkpoint, and why the others are not."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from weightloaders.errors import AmbiguousSourceError
from weightloaders.weights.file_names import (
    OTHER_FORMATS,
    SUFFIXES,
    Family,
    family_of,
    indexed_name,
    is_adapter,
    is_consolidated,
    is_training_state,
    natural,
    of_a_rank,
    part_number,
    suffix_of,
    variant_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.weights.source import ByteSource


class Listing(Protocol):
    """What lies in a folder, be it on disk or on a hub."""

    @property
    def where(self) -> str:
        """The folder, for messages."""

    @property
    def names(self) -> frozenset[str]:
        """The files that lie in it directly."""

    @property
    def odd(self) -> Mapping[str, str]:
        """Names of things in it that are no regular files, with what they are ("is a folder")."""

    def problems(self, names: Sequence[str]) -> dict[str, str]:
        """What is wrong with files of these relative paths ("is not there"); those that can be read are left out."""

    def read(self, name: str) -> bytes:
        """The content of an index."""

    def open(self, name: str) -> ByteSource:
        """A file of that relative path."""

    def subfolders_with_weights(self) -> list[str]:
        """Sub-folders in which files look like weights, for a hint."""


@dataclass(frozen=True)
class Wanted:
    """Which files of a folder are asked for.

    Args:
        families: The formats that the caller reads, the preferred one first.
        file_pattern: A glob that the file names must match; an index counts as the file it stands in for. Files that
            an index names need not match.
        variant: A precision variant: ``"fp16"`` asks for ``model.fp16.safetensors``.
        ignore_index: Take all files, whatever an index says.
        include_unindexed: Take also the tensors and files that the index omits.
    """

    families: tuple[Family, ...] = ("safetensors", "torch")
    file_pattern: str | None = None
    variant: str | None = None
    ignore_index: bool = False
    include_unindexed: bool = False

    def picks(self, subject: str) -> bool:
        """Whether a pattern was given and a file name matches it."""
        return self.file_pattern is not None and self.may_be(subject)

    def may_be(self, subject: str) -> bool:
        """Whether no pattern was given, or a file name matches it."""
        return self.file_pattern is None or fnmatch.fnmatchcase(subject, self.file_pattern)


@dataclass(frozen=True)
class Candidate:
    """A file that may be weights or their index.

    Attributes:
        name: Its name.
        subject: The weights file that the name is about: itself, or the one that an index stands in for.
        family: The format that it is read as.
        rank: The family's place in the caller's order.
        reason: Why it is no part of the checkpoint; empty if it may be.
    """

    name: str
    subject: str
    family: Family
    rank: int = 0
    reason: str = ""

    @property
    def is_index(self) -> bool:
        """Whether it is an index rather than weights."""
        return self.name != self.subject

    @property
    def group(self) -> tuple[bool, int, int]:
        """What may be read together, and the order of preference among such groups."""
        # `consolidated` comes last even behind the other family: its tensors have the original code's names.
        # Tensor-parallel parts belong together, whatever their suffixes.
        suffix = ".pth" if part_number(self.subject) is not None else suffix_of(self.subject)
        return is_consolidated(self.subject), self.rank, _suffix_rank(suffix)


def _suffix_rank(suffix: str) -> int:
    order = [suffix for suffixes in SUFFIXES.values() for suffix in suffixes]
    return order.index(suffix) if suffix in order else len(order)


def is_raw(name: str, listing: Listing) -> bool:
    """Whether it is the value file of the raw binary format."""
    return name == "model.bin" and "meta.txt" in listing.names


def sort_out(listing: Listing, wanted: Wanted) -> list[Candidate]:
    """Every name that has to do with weights; those that are not wanted with the reason.

    Raises:
        AmbiguousSourceError: If there are several precision variants, and none was asked for.
    """
    found = []
    subjects = {name: indexed_name(name) or name for name in sorted(listing.names, key=natural)}
    # A pattern that picks files of the right format ("model*") is not about whatever else it matches.
    strict = any(wanted.picks(s) and family_of(s) in wanted.families for s in subjects.values())
    for name, subject in subjects.items():
        family = family_of(subject)
        picked = wanted.picks(subject) and (family in wanted.families or not strict)
        if family is None and not picked:
            if suffix_of(name) in OTHER_FORMATS:
                reason = f"its format is {OTHER_FORMATS[suffix_of(name)]}"
                found.append(Candidate(name, name, wanted.families[0], reason=reason))
            continue
        # What a pattern picks is read as the caller's format, whatever it is called.
        read_as = family if family in wanted.families and family else wanted.families[0]
        reason = _reason_against(subject, family, listing, wanted, picked=picked)
        if not reason and subject != name and wanted.ignore_index:
            reason = "the index is ignored, as asked"
        found.append(Candidate(name, subject, read_as, wanted.families.index(read_as), reason))
    found += [
        Candidate(name, name, wanted.families[0], reason=kind)
        for name, kind in sorted(listing.odd.items())
        if family_of(name) in wanted.families
    ]
    return _one_variant(listing, found, wanted.variant)


def _reason_against(subject: str, family: Family | None, listing: Listing, wanted: Wanted, *, picked: bool) -> str:
    if is_training_state(subject):
        return "it is the state of an optimizer or trainer"
    if is_adapter(subject) and not any(word in (wanted.file_pattern or "").lower() for word in ("adapter", "lora")):
        return "it is an adapter, not the checkpoint itself"
    of_rank = of_a_rank(subject)
    if of_rank and not picked:
        return f"it is {of_rank}"
    if family == "torch" and is_raw(subject, listing):
        return "it holds raw values described by meta.txt, which the loader 'binary' reads"
    if not picked and family not in wanted.families:
        return f"only {' and '.join(wanted.families)} files are read here"
    if not picked and wanted.file_pattern is not None:
        return f"it does not match file_pattern {wanted.file_pattern!r}"
    return ""


def _one_variant(listing: Listing, found: list[Candidate], wanted: str | None) -> list[Candidate]:
    """Of ``model.safetensors``, ``model.fp16.safetensors`` and their shards and indexes, keep those that are wanted."""
    by_base: dict[str, dict[str | None, list[Candidate]]] = defaultdict(lambda: defaultdict(list))
    result = []
    for candidate in found:
        if candidate.reason:
            result.append(candidate)
        else:
            base, variant = variant_of(candidate.subject, wanted)
            by_base[base][variant].append(candidate)
    for base, variants in by_base.items():
        if wanted is None and None not in variants and len(variants) > 1:
            raise AmbiguousSourceError(
                f"{listing.where} holds {base} only in variants: {', '.join(sorted(filter(None, variants)))}",
                file=listing.where,
                hint="choose one: variant=... in the loader 'hf', or file_pattern=...",
            )
        keep = wanted if wanted is not None or None in variants else next(iter(variants))
        for variant, candidates in variants.items():
            if variant != keep:
                reason = f"it is the variant {variant!r}" if variant else f"it is not of the variant {keep!r}"
                candidates = [replace(candidate, reason=reason) for candidate in candidates]
            result += candidates
    return result
