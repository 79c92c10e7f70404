"""Wrappers, prefixes, nearest names: what is done to names without being asked, and what is only suggested.

Only well-known wrappers and spellings are mended by themselves, and well-known prefixes where that makes the plan
whole. Any other common prefix is pointed out, with the rule that would mend it.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from weightloaders.mapping.names import Claim
from weightloaders.mapping.patterns import shown
from weightloaders.mapping.rules import Rename

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

# Segments that wrappers put into names: DataParallel and DDP, torch.compile, FSDP, activation checkpointing.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Prefixes under which whole models are commonly kept.
KNOWN_PREFIXES = ("model", "transformer", "language_model", "net", "state_dict")
# One parameter's two spellings in torch: weight_norm before and after parametrizations.
_SPELLINGS = (
    ("weight_g", "parametrizations.weight.original0"),
    ("weight_v", "parametrizations.weight.original1"),
)
# Looking for the nearest of more names than this, or of longer ones, is slow and no help.
_MAX_CANDIDATES = 2000
_MAX_LENGTH = 300
# No model is as deep as this; a name that is would cost its length squared.
_MAX_DEPTH = 50
# Of a tail that more prefixes than this stand in front of, no prefix is the one.
_FEW = 8


class WrapperMapper:
    """Makes up for wrappers at any depth: those of the source are removed, those of the model put in."""

    automatic = True

    def __init__(self, own: Collection[str]) -> None:
        self._names: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        for name in own:
            if not WRAPPERS.isdisjoint(name.split(".")):
                self._add(name)

    def _add(self, name: str) -> None:
        """Remember what a name, and each module on its way, is called without wrappers."""
        plain: list[str] = []
        wrapped: list[str] = []
        for segment in name.split("."):
            if segment not in WRAPPERS:
                self._modules.setdefault(".".join(plain), ".".join(wrapped))
                plain.append(segment)
            wrapped.append(segment)
        self._names.setdefault(".".join(plain), name)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        segments = name.split(".")
        kept = [s for s in segments if s not in WRAPPERS]
        plain = ".".join(kept)
        # What is fused or converted later has no counterpart yet, but lies in a module that has one.
        target = self._names.get(plain) or self._in_wrapped_module(kept) or plain
        if target in ("", name):
            return None
        removed = dict.fromkeys(s for s in segments if s in WRAPPERS)
        return Claim(target, (f"wrapper removed: {', '.join(removed)}" if removed else "wrapper added",))

    def _in_wrapped_module(self, segments: Sequence[str]) -> str | None:
        for cut in range(min(len(segments) - 1, _MAX_DEPTH), -1, -1) if self._modules else ():
            module = self._modules.get(".".join(segments[:cut]))
            if module is not None:
                return ".".join((module, *segments[cut:])).removeprefix(".")
        return None


class SpellingMapper:
    """Torch's own old and new spellings of one parameter, whichever of them the model has."""

    automatic = True

    def __init__(self, own: Collection[str]) -> None:
        self._spelled = {
            name.removesuffix(there) + here: name
            for name in own
            for pair in _SPELLINGS
            for here, there in (pair, pair[::-1])
            if name == there or name.endswith("." + there)
        }

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        target = self._spelled.get(name)
        return None if target is None else Claim(target, (f"weight_norm's other spelling: {name} -> {target}",))


class PrefixMapper:
    """Strips or adds one prefix."""

    automatic = True

    def __init__(self, rename: Rename) -> None:
        self.rename = rename

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        renamed = plainly_renamed(self.rename, name)
        return None if renamed is None else Claim(renamed, (f"automatic: {self.rename}",))


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


def plainly_renamed(rename: Rename, name: str) -> str | None:
    """What a rename makes of a name, as it is to be read; None where it doesn't match."""
    renamed = rename.apply(name)
    return None if renamed is None else shown(renamed)


def known_prefixes(base_model_prefix: str | None) -> list[Rename]:
    """The prefixes that may be stripped or added without being asked."""
    prefixes = dict.fromkeys([*([base_model_prefix] if base_model_prefix else []), *KNOWN_PREFIXES])
    return [rename for p in prefixes for rename in (Rename(p, ""), Rename("", p))]


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


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like a name, if one is alike at all."""
    leaf = name.rsplit(".", 1)[-1]
    # Those with the same leaf first.
    pool = [c for c in candidates if c.endswith(leaf)] or candidates
    short = [c for c in pool[:_MAX_CANDIDATES] if len(c) <= _MAX_LENGTH]
    found = difflib.get_close_matches(name[:_MAX_LENGTH], short, n=1, cutoff=0.6)
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
