"""What is done to names without being asked: wrappers, torch's two spellings of one parameter, a well-known prefix.

Each is told to whoever asked for the load, and all can be switched off. A name that the model has is left alone. None
may guess: where two of the model's names, or two ways to read the source's, would do, none is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from weightloaders.mapping.names import Claim
from weightloaders.mapping.rules import Rename
from weightloaders.mapping.suggest import plainly_renamed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

# Segments that wrappers put into names: DataParallel and DDP, torch.compile, FSDP, activation checkpointing.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Prefixes under which whole models are commonly kept.
KNOWN_PREFIXES = ("model", "transformer", "language_model", "net", "state_dict")
# One parameter's two spellings in torch: weight_norm before and after parametrizations.
_SPELLINGS = (
    ("weight_g", "parametrizations.weight.original0"),
    ("weight_v", "parametrizations.weight.original1"),
)
_SPELLED = tuple(spelling for pair in _SPELLINGS for spelling in pair)
# No model is as deep as this; a name that is would cost its length squared.
_MAX_DEPTH = 50
# So many names are shown of those that something was done to.
_SHOWN = 2


class WrapperMapper:
    """Makes up for wrappers at any depth: those of the source are removed, those of the model put in.

    Where two of the model's own names differ by wrappers alone, neither is taken for the other.
    """

    automatic = True

    def __init__(self, own: Collection[str]) -> None:
        self._names: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self._ambiguous: set[str] = set()
        # Names that the model has but for torch's spelling have their wrappers where it has them.
        self._spelled = _by_other_spelling(own)
        if not any(is_wrapped(name) for name in own):
            return
        for name in own:
            self._add(name)
        self._ambiguous.update(plain for plain, count in Counter(map(_plain, own)).items() if count > 1)
        for known in (self._names, self._modules):
            for plain in self._ambiguous & known.keys():
                del known[plain]

    def _add(self, name: str) -> None:
        """Remember what a name, and each module on its way, is called without wrappers."""
        plain: list[str] = []
        wrapped: list[str] = []
        for segment in name.split("."):
            if segment not in WRAPPERS:
                self._remember(self._modules, plain, wrapped)
                plain.append(segment)
            wrapped.append(segment)
        self._remember(self._names, plain, wrapped)

    def _remember(self, known: dict[str, str], plain: Sequence[str], wrapped: Sequence[str]) -> None:
        short, full = ".".join(plain), ".".join(wrapped)
        if known.setdefault(short, full) != full:
            self._ambiguous.add(short)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        if name in self._spelled:
            return None
        segments = name.split(".")
        kept = [s for s in segments if s not in WRAPPERS]
        plain = ".".join(kept)
        if plain in self._ambiguous or _plain(name) in self._ambiguous:
            return None
        # What is fused or converted later has no counterpart yet, but lies in a module that has one.
        target = self._names.get(plain) or self._in_wrapped_module(kept) or plain
        if target in ("", name):
            return None
        removed = ", ".join(dict.fromkeys(s for s in segments if s in WRAPPERS))
        if removed:
            return Claim(
                target,
                (f"wrapper removed: {removed}",),
                automatic=(f"carry a wrapper ({removed}), which was left out",),
            )
        return Claim(target, ("wrapper added",), automatic=("lack a wrapper of the model's, which was put in",))

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
        self._spelled = _by_other_spelling(own)

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        target = self._spelled.get(name)
        if target is None:
            return None
        rule = f"weight_norm's other spelling: {name} -> {target}"
        return Claim(target, (rule,), automatic=("have weight_norm's other spelling, which was exchanged",))


class PrefixMapper:
    """Strips or adds one prefix, and puts in the wrappers that the model then has in the name.

    Args:
        rename: What strips or adds it.
        own: The model's names.
        wrappers: Who knows about the model's wrappers.
    """

    automatic = True

    def __init__(self, rename: Rename, own: Collection[str], wrappers: WrapperMapper) -> None:
        self.rename = rename
        self._own, self._wrappers = own, wrappers
        old, new = f"{rename.old}", rename.new
        self._said = (
            f"begin with {old + '.'!r}, which was left out"
            if old
            else f"lack the prefix {new + '.'!r}, which was added"
        )

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        renamed = plainly_renamed(self.rename, name)
        if renamed is None:
            return None
        rules, said = (f"automatic: {self.rename}",), (self._said,)
        within = None if renamed in self._own else self._wrappers.claim(renamed)
        if within is None:
            return Claim(renamed, rules, automatic=said)
        return Claim(within.target, rules + within.rules, automatic=said + within.automatic)


class FirstFitMapper:
    """Strips or adds a known prefix for one name at a time, where exactly one result is the model's own name.

    For streams, which can't be looked at as a whole. Whether it was right is known at their end.

    Attributes:
        taken: Each prefix that was stripped or added so far, with the names.
    """

    automatic = True

    def __init__(self, own: Collection[str], base_model_prefix: str | None) -> None:
        self.taken: dict[Rename, list[str]] = defaultdict(list)
        self._own = own
        wrappers = WrapperMapper(own)
        self._prefixes = [PrefixMapper(rename, own, wrappers) for rename in known_prefixes(base_model_prefix)]

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        claims = {
            c.target: (mapper.rename, c)
            for mapper in self._prefixes
            if (c := mapper.claim(name)) and c.target in self._own
        }
        if len(claims) != 1:
            return None
        rename, claim = next(iter(claims.values()))
        self.taken[rename].append(name)
        return claim


class Applied:
    """What was done to names without being asked, for the report."""

    def __init__(self) -> None:
        self.names: dict[str, dict[str, str]] = defaultdict(dict)

    def note(self, name: str, claim: Claim) -> None:
        """Remember what has become of a name."""
        if not claim.dropped:
            result = claim.target or (claim.group.targets[0] if claim.group and claim.group.targets else "")
            for step in claim.automatic:
                self.names[step][name] = result

    def told(self, total: int) -> dict[str, tuple[str, ...]]:
        """A sentence for each thing that was done, with the names that it was done to.

        Args:
            total: How many names the source has.
        """
        sentences = {}
        for step, names in self.names.items():
            count = f"all {total}" if len(names) == total > 1 else f"{len(names)} of {total}"
            examples = ", ".join(f"{old} -> {new}" for old, new in list(names.items())[:_SHOWN])
            more = ", ..." if len(names) > _SHOWN else ""
            sentences[f"{count} names of the source {step}: {examples}{more}"] = tuple(names)
        return sentences


def _by_other_spelling(own: Iterable[str]) -> dict[str, str]:
    """The other spelling of each name that has one -> the name."""
    return {
        name.removesuffix(there) + here: name
        for name in own
        if name.endswith(_SPELLED)
        for pair in _SPELLINGS
        for here, there in (pair, pair[::-1])
        if name == there or name.endswith("." + there)
    }


def is_wrapped(name: str) -> bool:
    """Whether a name has segments that wrappers put there."""
    return not WRAPPERS.isdisjoint(name.split("."))


def known_prefixes(base_model_prefix: str | None) -> list[Rename]:
    """The prefixes that may be stripped or added without being asked."""
    prefixes = dict.fromkeys([*([base_model_prefix] if base_model_prefix else []), *KNOWN_PREFIXES])
    # A wrapper is a prefix like another where the model has names with it and without.
    wrappers = [Rename(wrapper, "") for wrapper in sorted(WRAPPERS)]
    return [rename for p in prefixes for rename in (Rename(p, ""), Rename("", p))] + wrappers


def rivals(rename: Rename, taken: Iterable[str], others: Collection[str]) -> list[Rename]:
    """Renames of other prefixes that would do as well as this one: under each the source has all of it again.

    Args:
        rename: A prefix that is stripped or added.
        taken: The source's names that it leads to the model's.
        others: The source's names that the model then has no use for.
    """
    if not others:
        return []
    old = f"{rename.old}."
    tails = [_plain(name.removeprefix(old)) for name in taken]
    longest = max(tails, key=len, default="")
    there = {_plain(name): name for name in others}
    fronts = dict.fromkeys(
        plain.removesuffix(longest) for plain in there if plain == longest or plain.endswith("." + longest)
    )
    return [
        Rename(_front(there[front + longest], front), rename.new)
        for front in fronts
        if (front or rename.new) and all(front + tail in there for tail in tails)
    ]


def twins(taken: Iterable[str], others: Iterable[str]) -> list[str]:
    """Those of other names that are the same as one that was taken, but for wrappers and spellings."""
    known = set(map(_plain, taken))
    return [name for name in others if _plain(name) in known]


def _plain(name: str) -> str:
    """A name without wrappers, in the older of two spellings: what two copies of one parameter have in common."""
    plain = ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)
    for old, new in _SPELLINGS:
        if plain == new or plain.endswith("." + new):
            return plain.removesuffix(new) + old
    return plain


def _front(name: str, plain: str) -> str:
    """The front of a name that is this without wrappers."""
    segments = name.split(".")
    fronts = (".".join(segments[:cut]) for cut in range(len(segments)))
    return next(front for front in fronts if _plain(front + ".") == plain)
