"""Tensors of the wrong shape, taken together: what one cause explains is said once."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from weightloaders.placing.causes import (
    SIZES,
    VOCABULARY,
    is_placeholder,
    is_transposed,
    vocabulary_hint,
    vocabulary_remark,
)
from weightloaders.placing.sizes import Sizes, differences
from weightloaders.plan import Finding, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightloaders.targets import Target

_WORLD_SIZES = (2, 3, 4, 6, 8, 12, 16, 32, 64)
# What tensor parallelism divides: heads, the MLP's width, and mostly the vocabulary.
_HEADS = {"q", "kv"}
_DIVIDED = {*_HEADS, "intermediate_size", "vocab_size"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


class Misfit(NamedTuple):
    """A tensor of another shape than its parameter.

    Attributes:
        target: The parameter.
        shape: The shape that the tensor has, or what rules make of tensors.
        finding: What was said of it alone.
        made: Whether a rule's function has made it.
    """

    target: Target
    shape: tuple[int, ...]
    finding: Finding
    made: bool = False

    @property
    def said(self) -> str:
        """Both shapes."""
        return f"{self.target.name} ({list(self.shape)} for {list(self.target.shape)})"

    @property
    def differing(self) -> list[int]:
        """The dimensions in which the shapes differ."""
        if len(self.shape) != len(self.target.shape):
            return []
        return [at for at, (a, b) in enumerate(zip(self.shape, self.target.shape, strict=True)) if a != b]

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The sizes that differ, and what they should be."""
        return frozenset((self.shape[at], self.target.shape[at]) for at in self.differing)


class _Case(NamedTuple):
    """What is to be explained, and what is known.

    Attributes:
        misfits: Those that nothing has explained yet.
        sizes: What all shapes together say.
        config: The model's config, if it has one.
    """

    misfits: list[Misfit]
    sizes: Sizes
    config: object


class _Together(NamedTuple):
    """Misfits that have one cause, and what is to be said of them."""

    misfits: list[Misfit]
    message: str
    hint: str


def taken_together(misfits: Sequence[Misfit], fitting: Iterable[Target], config: object) -> list[Finding]:
    """What is to be said in the place of what was said of each alone; less, where some have one cause.

    Args:
        misfits: All tensors of wrong shapes, all of one severity.
        fitting: The parameters whose tensors fit.
        config: The model's config, if it has one.
    """
    sizes = Sizes()
    for target in fitting:
        sizes.vote(target.name, target.shape, target.shape)
    for misfit in misfits:
        if not is_placeholder(misfit.shape, misfit.target.shape):
            sizes.vote(misfit.target.name, misfit.shape, misfit.target.shape)
    found: list[Finding] = []
    left = list(misfits)
    for find in (_placeholders, _divided, _vocabularies, _other_size, _experts, _transposed, _one_size):
        for together, message, hint in list(find(_Case(left, sizes, config))):
            names = dict.fromkeys(name for misfit in together for name in misfit.finding.tensors)
            first = together[0].finding
            found.append(Finding("shape", first.severity, message, tuple(names), first.file, hint))
            left = [misfit for misfit in left if misfit not in together]
    return [*found, *(misfit.finding for misfit in left)]


def _placeholders(case: _Case) -> Iterator[_Together]:
    together = [m for m in case.misfits if is_placeholder(m.shape, m.target.shape)]
    if len(together) > 1:
        shapes = ", ".join(dict.fromkeys(str(list(m.shape)) for m in together))
        message = (
            f"{len(together)} parameters have placeholders (of shape {shapes}) in the source, not their values: "
            f"{listed([m.target.name for m in together])}"
        )
        yield _Together(together, message, str(together[0].finding.hint))


def _divided(case: _Case) -> Iterator[_Together]:
    """One rank's part of a tensor-parallel checkpoint, or one rank's model for a whole one."""
    misfits = case.misfits
    ratios = {_ratio(m) for m in misfits}
    ratio = next(iter(ratios), None)
    by_dimension = {at: m for m in reversed(misfits) for at in m.differing}
    if len(misfits) < 2 or len(ratios) > 1 or ratio is None or not _is_divided(case, set(by_dimension)):
        return
    world, is_part = ratio
    shown = "; ".join(f"dim {at} of {m.said}" for at, m in sorted(by_dimension.items()))
    if is_part:
        message = (
            f"of {len(misfits)} parameters the source has 1/{world}, and all of the others: it is one rank's part of a "
            f"tensor-parallel checkpoint of world size {world} ({shown})"
        )
        hint = (
            f"join the files of the {world} ranks into one checkpoint with the tool that wrote them, or fetch the "
            "checkpoint that they were made from"
        )
    else:
        message = (
            f"of {len(misfits)} tensors of the source the model has 1/{world}, and all of the others: it is one rank's "
            f"part of a tensor-parallel model of world size {world} ({shown})"
        )
        hint = (
            "build the whole model, or give rules that cut the rank's slices out: Convert with a function that slices"
        )
    yield _Together(list(misfits), message, hint)


def _is_divided(case: _Case, dimensions: set[int]) -> bool:
    """Whether tensors that all differ by one factor are slices, rather than of a model with another size or two."""
    differing = case.sizes.differing().keys()
    if not differing:
        # Nothing is known by its name. Columns and rows are divided in turn.
        return {0, 1} <= dimensions
    if differing - _DIVIDED:
        return False
    # Another number of heads leaves the MLP as it is, and another width of the MLP the heads.
    strangers = any(not case.sizes.explains(m.target.name, m.shape, m.target.shape) for m in case.misfits)
    return "intermediate_size" in differing and (bool(differing & _HEADS) or strangers)


def _ratio(misfit: Misfit) -> tuple[int, bool] | None:
    """By what factor one dimension is smaller, or larger, than it should be; and whether it is smaller."""
    if len(misfit.differing) != 1:
        return None
    have, want = misfit.shape[misfit.differing[0]], misfit.target.shape[misfit.differing[0]]
    for small, large, is_part in ((have, want, True), (want, have, False)):
        if small and large % small == 0 and large // small in _WORLD_SIZES:
            return large // small, is_part
    return None


def _vocabularies(case: _Case) -> Iterator[_Together]:
    for have, want in dict.fromkeys((m.shape[0], m.target.shape[0]) for m in filter(_is_vocabulary, case.misfits)):
        # Of an embedding and a head only one may have a name by which it is known.
        together = [m for m in case.misfits if m.differing == [0] and m.pairs == {(have, want)}]
        if len(together) > 1:
            message = (
                f"the vocabularies of {have} tokens in the source and {want} in the model differ: "
                f"{listed([m.said for m in together])}{vocabulary_remark(have, want)}"
            )
            yield _Together(together, message, vocabulary_hint([m.target.name for m in together], have, want))


def _is_vocabulary(misfit: Misfit) -> bool:
    return misfit.differing == [0] and VOCABULARY.search(misfit.target.name) is not None


def _other_size(case: _Case) -> Iterator[_Together]:
    together = [m for m in case.misfits if m.differing and not _is_vocabulary(m) and _is_explained(m, case.sizes)]
    if case.config is None or not together:
        return
    found = "; ".join(map(str, differences(case.sizes.differing(), case.config)))
    fit = "1 parameter does" if len(together) == 1 else f"{len(together)} parameters do"
    yield _Together(
        together,
        f"the checkpoint is of a model of another size: {found} ({fit} not fit: {_kinds(together)})",
        "build the model from the checkpoint's own config.json, or fetch the checkpoint that belongs to this config",
    )


def _experts(case: _Case) -> Iterator[_Together]:
    """The last of the experts are missing: those that are there leave no gap, and the rest of the model fits."""
    by_counts: dict[tuple[int, int], list[Misfit]] = defaultdict(list)
    for m in case.misfits:
        if m.made and "experts" in m.target.name and m.differing == [0] and m.shape[0] < m.target.shape[0]:
            by_counts[m.shape[0], m.target.shape[0]].append(m)
    for (have, want), together in by_counts.items():
        absent = f"number {have} is" if have + 1 == want else f"numbers {have} to {want - 1} are"
        yield _Together(
            together,
            f"of {want} experts the source has {have}, and {absent} missing: {_kinds(together)}",
            "look for the missing experts in a shard that is absent; or is the checkpoint of a model with fewer?",
        )


def _is_explained(misfit: Misfit, sizes: Sizes) -> bool:
    if sizes.explains(misfit.target.name, misfit.shape, misfit.target.shape):
        return True
    # Of all experts in one tensor only the first dimension is known; the others may be any of the sizes that differ.
    pairs = {(n * have, n * want) for have, want in sizes.differing().values() for n in (1, 2)}
    have, want = misfit.shape, misfit.target.shape
    return len(have) == 3 and all((have[at], want[at]) in pairs for at in misfit.differing)


def _kinds(misfits: Iterable[Misfit]) -> str:
    """Some of them, those that differ only in their layer once."""
    return listed(list(dict.fromkeys(_NUMBER.sub("*", m.said) for m in misfits)))


def _transposed(case: _Case) -> Iterator[_Together]:
    together = [m for m in case.misfits if not m.made and is_transposed(m.shape, m.target.shape)]
    if len(together) > 1:
        patterns = dict.fromkeys(_NUMBER.sub("*", m.target.name) for m in together)
        rules = ", ".join(f"Convert({pattern!r}, {pattern!r}, 'transpose')" for pattern in patterns)
        yield _Together(
            together,
            f"{len(together)} tensors look transposed: {_kinds(together)}",
            f"load with rules=[{rules}]; square matrices of the same kind have to be transposed too, though their "
            "shapes don't show it",
        )


def _one_size(case: _Case) -> Iterator[_Together]:
    """Of a model of one's own no size is known by its name, but that it is the same one everywhere can be seen."""
    alike: dict[tuple[frozenset[tuple[int, int]], str | None], list[Misfit]] = defaultdict(list)
    for m in case.misfits:
        alike[m.pairs, m.finding.hint].append(m)
    for (pairs, hint), together in alike.items():
        if hint in SIZES and len(pairs) == 1 and len({_NUMBER.sub("*", m.said) for m in together}) > 1:
            ((have, want),) = pairs
            message = f"{len(together)} parameters want {want} where the source has {have}: {_kinds(together)}"
            yield _Together(together, message, str(hint))
