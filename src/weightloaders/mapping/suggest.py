"""Wrappers, prefixes, nearest names: what is done to names without being asked, and what is only suggested.

Only well-known wrappers are removed or added by themselves, and only when that makes the plan whole. Any other common
prefix is pointed out, with the rule that would mend it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING

from weightloaders.mapping.names import Claim
from weightloaders.mapping.rules import Rename

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

# Segments that wrappers put into names: DataParallel and DDP, torch.compile, FSDP, activation checkpointing.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Prefixes under which whole models are commonly kept.
KNOWN_PREFIXES = ("model", "transformer", "language_model", "net", "state_dict")


class WrapperMapper:
    """Removes wrappers' segments at any depth, where the model has no such segment itself."""

    automatic = True

    def __init__(self, own: Iterable[str]) -> None:
        self._removable = WRAPPERS - {segment for name in own for segment in name.split(".")}

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        segments = name.split(".")
        kept = [s for s in segments if s not in self._removable]
        if len(kept) == len(segments) or not kept:
            return None
        removed = dict.fromkeys(s for s in segments if s in self._removable)
        return Claim(".".join(kept), (f"wrapper removed: {', '.join(removed)}",))


class PrefixMapper:
    """Strips or adds one prefix."""

    automatic = True

    def __init__(self, rename: Rename) -> None:
        self.rename = rename

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        renamed = self.rename.apply(name)
        if renamed is None:
            return None
        target = renamed.replace("\x00", "")
        return Claim(target, (f"automatic: {self.rename}",)) if target else None


def known_prefixes(base_model_prefix: str | None) -> list[Rename]:
    """The prefixes that may be stripped or added without being asked."""
    prefixes = dict.fromkeys([*([base_model_prefix] if base_model_prefix else []), *KNOWN_PREFIXES])
    return [rename for p in prefixes for rename in (Rename(p, ""), Rename("", p))]


def prefix_suggestion(names: Collection[str], own: Collection[str]) -> Rename | None:
    """The one prefix that, exchanged or stripped or added, would make most of the source's names the model's.

    Linear in the number of names: prefixes are compared by the tails that names have in common.
    """
    own_tails: dict[str, set[str]] = {}
    for name in own:
        for prefix, tail in _fronts(name):
            own_tails.setdefault(tail, set()).add(prefix)
    votes: Counter[tuple[str, str]] = Counter()
    for name in names:
        # The longest tail that the model knows decides; shorter ones ("weight") say nothing.
        for prefix, tail in _fronts(name):
            if tail in own_tails:
                votes.update((prefix, other) for other in own_tails[tail] if other != prefix)
                break
    if not votes:
        return None
    (old, new), count = votes.most_common(1)[0]
    return Rename(old, new) if 2 * count > min(len(names), len(own)) else None


def _fronts(name: str) -> Iterable[tuple[str, str]]:
    """The ways to cut a name into a short prefix and a tail, the longest tail first."""
    segments = name.split(".")
    for cut in range(min(len(segments), 4)):
        yield ".".join(segments[:cut]), ".".join(segments[cut:])


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like a name, if one is alike at all."""
    leaf = name.rsplit(".", 1)[-1]
    # Names with the same leaf first, and a bound on the work: thousands of candidates would be slow.
    pool = [c for c in candidates if c.endswith(leaf)][:2000] or list(candidates[:2000])
    found = difflib.get_close_matches(name, pool, n=1, cutoff=0.6)
    return found[0] if found else None


class FirstFitMapper:
    """Strips or adds a known prefix for one name at a time, where exactly one result is the model's own name.

    For streams, which can't be looked at as a whole.
    """

    automatic = True

    def __init__(self, own: Collection[str], base_model_prefix: str | None) -> None:
        self._own = own
        self._prefixes = [PrefixMapper(rename) for rename in known_prefixes(base_model_prefix)]

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        claims = {c.target: c for mapper in self._prefixes if (c := mapper.claim(name)) and c.target in self._own}
        return next(iter(claims.values())) if len(claims) == 1 else None
