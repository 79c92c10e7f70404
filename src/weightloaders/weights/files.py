"""Which files of a folder or repository make up the checkpoint. Decided from names and the index alone.

The rules, in order:

* The index decides. Files that lie there without being in it are named, and are taken only on request.
* Without an index all files of one family make up the checkpoint, and a numbered set must be whole.
* One family: safetensors before ``.bin`` before ``.pt`` before ``.pth``; the model's own names before ``consolidated``.
* Optimizer and trainer files, adapters, other precision variants and sub-folders are left alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weightloaders.discovery import KNOWN_PACKAGES
from weightloaders.errors import AmbiguousSourceError, IncompleteCheckpointError, SourceError, SourceNotFoundError
from weightloaders.weights.candidates import Candidate, Wanted, is_raw, sort_out
from weightloaders.weights.file_names import (
    SUFFIXES,
    Family,
    family_of,
    gaps,
    indexed_name,
    is_adapter,
    is_training_state,
    natural,
    number_of,
    of_a_rank,
    reader_of,
    variant_of,
)
from weightloaders.weights.folder import A_FOLDER, FolderListing, kind_of
from weightloaders.weights.index import Index, parse_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightloaders.weights.candidates import Listing

# Names in a message: enough to recognise the set, few enough to read.
_SHOWN = 6


@dataclass(frozen=True)
class Selection:
    """The files that make up a checkpoint.

    Attributes:
        listing: What they lie in, and are opened by.
        files: Their relative paths, in the order of the index, or in natural order.
        family: The format of all of them.
        index: What their index says, if there is one.
        include_unindexed: Whether tensors that the index omits are wanted too.
        skipped: Files that were left out, each with the reason.
        notes: Remarks for the report.
    """

    listing: Listing
    files: tuple[str, ...]
    family: Family
    index: Index | None = None
    include_unindexed: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def select_files(
    path: str | Path,
    *,
    families: tuple[Family, ...] = ("safetensors", "torch"),
    file_pattern: str | None = None,
    variant: str | None = None,
    ignore_index: bool = False,
    include_unindexed: bool = False,
) -> Selection:
    """Choose the files of a checkpoint on disk. Only names and the index are looked at.

    Args:
        path: A folder, one weights file, or an index.
        families: The formats that the caller reads, the preferred one first.
        file_pattern: A glob that the file names must match; see `Wanted`.
        variant: A precision variant: ``"fp16"`` asks for ``model.fp16.safetensors``.
        ignore_index: Take all files, whatever an index says.
        include_unindexed: Take also the tensors and files that the index omits.

    Raises:
        SourceNotFoundError: If there is no such path or no weights in it.
        IncompleteCheckpointError: If a file that the index names, or that a numbered set needs, is not there.
        AmbiguousSourceError: If several checkpoints lie in the folder and nothing decides.
        UnsafeCheckpointError: If the index, or a link in the hub's cache, leads out of the checkpoint.
        CheckpointFormatError: If the index is malformed.
    """
    wanted = Wanted(families, file_pattern, variant, ignore_index, include_unindexed)
    return select_listed(*listed(path), wanted)


def listed(path: str | Path) -> tuple[FolderListing, str]:
    """What lies at a path: the listing of the folder, and the name of the file in it; empty for the folder itself.

    Raises:
        SourceNotFoundError: If there is no such path.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind not in (None, A_FOLDER):
        raise SourceNotFoundError(
            f"{path} {kind}",
            file=path,
            hint="check the path; a repository on the hub is read by the loader 'hf', an https address by 'http'",
        )
    return (FolderListing(path), "") if kind else (FolderListing(path.parent), path.name)


def select_listed(listing: Listing, name: str, wanted: Wanted) -> Selection:
    """Choose the files of a checkpoint wherever it lies; see `select_files`.

    Args:
        listing: What lies in the folder.
        name: The weights file, or the index, that was named; empty for the folder.
        wanted: What is asked for.
    """
    if not name:
        selection = choose_files(listing, wanted)
    elif indexed_name(name):
        selection = by_index(listing, name, wanted)
    else:
        selection = one_file(listing, name, wanted)
    if isinstance(listing, FolderListing):
        listing.check_links(selection.files)
    return selection


def holds_weights(listing: Listing, wanted: Wanted) -> bool:
    """Whether the names in a folder promise weights, or an index of some; nothing is opened."""
    try:
        return any(not candidate.reason for candidate in sort_out(listing, wanted))
    except AmbiguousSourceError:
        return True
    except SourceError:
        return False


def first_file(listing: Listing, wanted: Wanted) -> tuple[str, Family] | None:
    """The first of the files that names alone promise, and its format; None where there is none. Nothing is opened."""
    try:
        candidates = [candidate for candidate in sort_out(listing, wanted) if not candidate.reason]
    except SourceError:
        return None
    files = sorted((c for c in candidates if not c.is_index), key=lambda c: (c.group, natural(c.name)))
    return (files[0].name, files[0].family) if files else None


def head_of(listing: Listing, name: str, length: int) -> bytes:
    """The first bytes of a file, for telling what it is; none where it can't be read."""
    try:
        source = listing.open(name)
        return source.read(0, min(length, source.size))
    except SourceError:
        return b""


def choose_files(listing: Listing, wanted: Wanted) -> Selection:
    """Choose the files of a checkpoint from a listing; see `select_files`."""
    candidates = sort_out(listing, wanted)
    skipped = {candidate.name: candidate.reason for candidate in candidates if candidate.reason}
    groups: dict[tuple[bool, int, int], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if not candidate.reason:
            groups[candidate.group].append(candidate)
    if not groups:
        raise _nothing_found(listing, wanted, skipped)
    best, *others = (groups[key] for key in sorted(groups))
    files = sorted((candidate.name for candidate in best if not candidate.is_index), key=natural)
    index = _choose_index(listing, [candidate for candidate in best if candidate.is_index])
    chosen = by_index(listing, index, wanted, files) if index else _all_files(listing, files, best[0].family)
    reason = f"{index or _listed(chosen.files)} is used instead"
    skipped |= {candidate.name: reason for group in others for candidate in group}
    return replace(chosen, skipped={**skipped, **chosen.skipped})


# ------------------------------------------------------------------ with an index


def _choose_index(listing: Listing, candidates: list[Candidate]) -> str | None:
    if len(candidates) <= 1:
        return candidates[0].name if candidates else None
    # The names that transformers writes; a second index beside them belongs to something else.
    usual = [c for c in candidates if variant_of(c.subject).base in ("model.safetensors", "pytorch_model.bin")]
    if len(usual) == 1:
        return usual[0].name
    raise AmbiguousSourceError(
        f"{listing.where} holds several indexes: {', '.join(c.name for c in candidates)}",
        file=listing.where,
        hint=f"choose one with file_pattern, e.g. file_pattern={candidates[0].subject!r}",
    )


def by_index(listing: Listing, name: str, wanted: Wanted, present: Sequence[str] = ()) -> Selection:
    """The files that an index names, all of which must be there; ``present`` is what lies beside it.

    Raises:
        IncompleteCheckpointError: If one is not there.
        UnsafeCheckpointError: If it names a file outside its folder.
        CheckpointFormatError: If it is malformed.
    """
    index = parse_index(listing.read(name), name, f"{listing.where}/{name}")
    unindexed = [file for file in present if file not in index.files]
    problems = listing.problems(index.files)
    if problems:
        raise _index_lies(listing, index, problems, unindexed)
    family = family_of(indexed_name(name) or "")
    chosen = Selection(
        listing,
        index.files,
        family if family in wanted.families and family else wanted.families[0],
        index,
        include_unindexed=wanted.include_unindexed,
    )
    if not unindexed:
        return chosen
    if wanted.include_unindexed:
        note = f"{_listed(unindexed)}: not in {name}, but included as asked"
        return replace(chosen, files=(*index.files, *unindexed), notes=(note,))
    note = f"{_listed(unindexed)}: present but not in {name}, so left out; include_unindexed=True takes it"
    return replace(chosen, skipped=dict.fromkeys(unindexed, f"present but not in {name}"), notes=(note,))


def _index_lies(
    listing: Listing, index: Index, problems: Mapping[str, str], unindexed: list[str]
) -> IncompleteCheckpointError:
    there = [file for file in index.files if file not in problems]
    what = _listed([f"{file} {problem}" for file, problem in problems.items()])
    tensors = index.tensors_in(problems)
    message = (
        f"{index.name} names {_count(len(index.files), 'file')}, but {what}: "
        f"{len(tensors)} of its {_count(len(index.weight_map), 'tensor')} should be in there"
    )
    hint = "fetch what is missing; a download may have stopped half-way"
    sets = {number.set if number else None for number in map(number_of, unindexed)}
    # Another whole set beside it says that the index is what is out of date, not the files.
    if unindexed and gaps(unindexed, unindexed) is None and (None not in sets or not there):
        message += (
            f". The index looks stale: of the files that it names there is {_listed(there) or 'none'}, "
            f"while {_listed(unindexed)} make up a whole set that it does not name"
        )
        pattern = next(iter(sets)) if there and len(sets) == 1 else None
        options = "ignore_index=True" + (f", file_pattern={pattern!r}" if pattern else "")
        hint = f"to load what is there without the index, pass {options}; otherwise fetch the files that it names"
    # The first of them stands for all.
    return IncompleteCheckpointError(
        message, file=f"{listing.where}/{index.name}", tensor=next(iter(tensors), None), hint=hint
    )


# ------------------------------------------------------------------ without one


def _all_files(listing: Listing, files: list[str], family: Family) -> Selection:
    for file, problem in listing.problems(files).items():
        raise IncompleteCheckpointError(
            f"{file} {problem}", file=f"{listing.where}/{file}", hint="fetch it again, or remove it"
        )
    sets: dict[str, set[str]] = defaultdict(set)
    for number in filter(None, map(number_of, files)):
        sets[number.base].add(number.set)
    for splits in sets.values():
        if len(splits) > 1:
            raise AmbiguousSourceError(
                f"{listing.where} holds one checkpoint split in several ways: {', '.join(sorted(splits))}",
                file=listing.where,
                hint=f"choose one, e.g. file_pattern={min(splits)!r}",
            )
    lacking = gaps(files, listing.names)
    if lacking is not None:
        raise IncompleteCheckpointError(
            f"{lacking}; there is no index", file=listing.where, hint="fetch what is missing"
        )
    return Selection(listing, tuple(files), family)


def one_file(listing: Listing, name: str, wanted: Wanted) -> Selection:
    """A file that was asked for itself."""
    family, number = family_of(name), number_of(name)
    return Selection(
        listing,
        (name,),
        family if family in wanted.families and family else wanted.families[0],
        notes=(f"{name} is one of a set of {number.of} files; it was loaded alone, as asked",) if number else (),
    )


# ------------------------------------------------------------------ messages


def _listed(files: Iterable[str]) -> str:
    files = list(files)
    rest = len(files) - _SHOWN
    return ", ".join(files[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _nothing_found(listing: Listing, wanted: Wanted, skipped: Mapping[str, str]) -> SourceNotFoundError:
    looked_for = wanted.file_pattern or ", ".join(f"*{s}" for family in wanted.families for s in SUFFIXES[family])
    if wanted.variant:
        looked_for += f" of the variant {wanted.variant!r}"
    others = [name for name in sorted({*listing.names, *listing.odd}, key=natural) if name not in skipped]
    parts = [f"no weights in {listing.where}: looked for {looked_for}"]
    parts += [f"{name}: {reason}" for name, reason in list(skipped.items())[:_SHOWN]]
    if others:
        parts.append(f"there is {'also ' if skipped else ''}{_listed(others)}")
    elif not skipped:
        parts.append("the folder is empty")
    return SourceNotFoundError("; ".join(parts), file=listing.where, hint=_way_out(listing, wanted, skipped))


def _way_out(listing: Listing, wanted: Wanted, skipped: Mapping[str, str]) -> str:
    if any(is_raw(name, listing) for name in skipped):
        return "use the loader 'binary'"
    families = {family_of(n) for n in skipped if not (is_training_state(n) or is_adapter(n) or of_a_rank(n))}
    if "torch" not in wanted.families and "torch" in families:
        return "PyTorch files are read by the loaders 'torch' and 'hf'"
    if "safetensors" not in wanted.families and "safetensors" in families:
        return "safetensors files are read by the loaders 'local' and 'hf'"
    if any(is_adapter(name) for name in skipped):
        return "give the base model's folder; or name the adapter's file itself, if it is what you want"
    subfolders = listing.subfolders_with_weights()
    if subfolders:
        return f"weights lie in the sub-folder {_listed(subfolders)}: give that path"
    readers = [loader for loader in map(reader_of, skipped) if loader in KNOWN_PACKAGES]
    if readers:
        return f"use the loader {readers[0]!r} (pip install {KNOWN_PACKAGES[readers[0]]})"
    return "give a folder that holds the weights files themselves"
