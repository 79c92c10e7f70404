"""Prefixes and nearest names: what is only suggested, with the rule that would mend it; and names by their modules."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from weightloaders.mapping.patterns import shown
from weightloaders.mapping.rules import Rename, RuleMapper

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from weightloaders.mapping.rules import Rule

# Looking for the nearest of more names than this, or of longer ones, is slow and no help.
_MAX_CANDIDATES = 2000
_MAX_LENGTH = 300
# No model is as deep as this; a name that is would cost its length squared.
_MAX_DEPTH = 50
# Of a tail that more prefixes than this stand in front of, no prefix is the one.
_FEW = 8
# Rules are tried on so many names.
_SAMPLE = 256


def plainly_renamed(rename: Rename, name: str) -> str | None:
    """What a rename makes of a name, as it is to be read; None where it doesn't match."""
    renamed = rename.apply(name)
    return None if renamed is None else shown(renamed)


def prefix_suggestion(names: Collection[str], own: Collection[str]) -> Rename | None:
    """The one prefix that, exchanged or stripped or added, would make most of the source's names the model's.

    Linear in the number of names: prefixes are compared by the tails that names have in common.
    """
    own_tails: dict[str, list[str]] = defaultdict(list)
    for name in own:
        for prefix, tail in _fronts(name):
            own_tails[tail].append(prefix)
    votes: Counter[tuple[str, str]] = Counter()
    for name in names:
        # The longest tail that the model knows decides; shorter ones ("weight") say nothing.
        for prefix, tail in _fronts(name):
            others = own_tails.get(tail, ())
            if others:
                # One segment ("weight") is no tail to exchange a prefix by: a pooler is no classifier.
                votes.update(
                    (prefix, other)
                    for other in others
                    if other != prefix and len(others) <= _FEW and ("." in tail or not (prefix and other))
                )
                break
    if not votes:
        return None
    (old, new), count = votes.most_common(1)[0]
    return Rename(old, new) if 2 * count > min(len(names), len(own)) else None


def _fronts(name: str) -> Iterator[tuple[str, str]]:
    """The ways to cut a name into a short prefix and a tail, the longest tail first."""
    segments = name.split(".")
    for cut in range(min(len(segments), 4)):
        yield ".".join(segments[:cut]), ".".join(segments[cut:])


def rename_before_rules(rules: Sequence[Rule], names: Sequence[str]) -> Rename | None:
    """The one prefix that rules, of which most match none of some names, were written without or with.

    Args:
        rules: The rules.
        names: The source's names.
    """
    sample = names[:: len(names) // _SAMPLE + 1]
    fronts = Counter(prefix for name in sample for prefix, _ in _fronts(name) if prefix)
    surplus = [Rename(prefix, "") for prefix, count in fronts.items() if count == len(sample)]
    useless = _useless(rules, sample)
    lacking = dict.fromkeys(pattern.split(".")[0] for pattern in useless)
    for rename in (*surplus, *(Rename("", front) for front in lacking if front.isidentifier())):
        renamed = [plainly_renamed(rename, name) or name for name in sample]
        if 2 * len(_useless(rules, renamed)) < len(useless):
            return rename
    return None


def as_first_step(rename: Rename) -> str:
    """How rules have to be changed that were written for names to which this was done."""
    if rename.new:
        # What a rename writes, later ones don't match.
        return f"leave {rename.new + '.'!r} out at the front of the rules' patterns"
    return f"begin with a rename of {str(rename.old)!r} to ''"


def _useless(rules: Sequence[Rule], names: Iterable[str]) -> list[str]:
    """What rules that match none of some names were to match."""
    mapper = RuleMapper(rules, ())
    for name in names:
        mapper.claim(name)
    return mapper.sought()


def nearest(name: str, candidates: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like a name, if one is alike at all.

    Args:
        name: The name.
        candidates: What may be meant.
        cutoff: How alike it must be, from 0 (anything will do) to 1 (equal).
    """
    leaf = name.rsplit(".", 1)[-1]
    # Those with the same leaf first.
    pool = [c for c in candidates if c.endswith(leaf)] or candidates
    short = [c for c in pool[:_MAX_CANDIDATES] if len(c) <= _MAX_LENGTH]
    found = difflib.get_close_matches(name[:_MAX_LENGTH], short, n=1, cutoff=cutoff)
    return found[0] if found else None


def grouped(names: Iterable[str], everything: Collection[str]) -> list[str]:
    """Names, where all that a module has is among them the module instead: ``layers.3.* (9)``.

    Args:
        names: The names.
        everything: All names of which these are some.
    """
    totals = Counter(module for name in everything for module in _modules(name))
    chosen = dict.fromkeys(names)
    counts = Counter(module for name in chosen for module in _modules(name))
    whole = {module for module, count in counts.items() if count == totals[module] > 1}
    result: dict[str, None] = {}
    for name in chosen:
        outermost = next((module for module in _modules(name) if module in whole), None)
        result[name if outermost is None else f"{outermost}.* ({counts[outermost]})"] = None
    return list(result)


def _modules(name: str) -> list[str]:
    """The modules that a name lies in, the outermost first."""
    segments = name.split(".")
    return [".".join(segments[:end]) for end in range(1, min(len(segments), _MAX_DEPTH))]
