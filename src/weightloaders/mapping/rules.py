"""`Rename`, `Drop`, `Convert`: what a caller, a config file or a hook says about names and layouts.

Patterns are dotted and match whole segments: ``*`` one segment, ``**`` any run of them, ``{name}`` a capture (also
inside a segment). A compiled regular expression is accepted where that isn't enough.

Rules go over the source's names once. A segment that a rule produced is not matched by a later rule, so ``gate`` and
``up`` can be swapped by two renames.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightloaders.errors import RuleError
from weightloaders.mapping.conversion import WEIGHTS, Convert
from weightloaders.mapping.names import Claim
from weightloaders.mapping.patterns import Pattern, PatternIndex, hidden, shown

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from weightloaders.mapping.names import Group

__all__ = ["Convert", "Drop", "Rename", "Rule", "RuleMapper"]

# What goes with a weight lies beside it (`weight_scale`) or below it (`weight.quant_state.bitsandbytes__nf4`).
_COMPANION_SEGMENTS = 3


@dataclass(frozen=True)
class Rename:
    """Names that begin like ``old`` begin like ``new`` instead.

    The pattern matches from the front and by whole segments; what follows is kept. ``Rename("backbone", "")`` strips a
    prefix, ``Rename("", "model")`` adds one. With wildcards the n-th of ``new`` takes what the n-th of ``old`` matched.

    Args:
        old: A pattern, or a compiled regular expression (substituted with `re.Pattern.sub`).
        new: A pattern, or the replacement of the regular expression.

    Raises:
        RuleError: If a pattern is malformed, or ``new`` has a wildcard that ``old`` has not.
    """

    old: str | re.Pattern[str]
    new: str
    _patterns: tuple[Pattern, Pattern] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.new, str):
            raise RuleError(f"the new name of a rename is a string, not {self.new!r}")
        patterns = None
        if isinstance(self.old, re.Pattern):
            _check_replacement(self.old, self.new)
        else:
            patterns = Pattern(self.old), Pattern(self.new)
            lacking = [name for name in patterns[1].names if name not in patterns[0].names]
            if lacking:
                what = ", ".join(f"its wildcard number {n}" if n.isdecimal() else f"{{{n}}}" for n in lacking)
                raise RuleError(
                    f"{self} can't be applied: {self.new!r} has nothing to put in for {what}",
                    hint="the n-th wildcard of the new name takes what the n-th of the old one matched",
                )
        object.__setattr__(self, "_patterns", patterns)

    def __str__(self) -> str:
        old = self.old.pattern if isinstance(self.old, re.Pattern) else self.old
        return f"rename {old!r} -> {self.new!r}"

    def is_whole_weight(self, name: str) -> bool:
        """Whether a name is a module's weight, and the rule is written for just that."""
        leaf = self._patterns[0].segments[-1:] if self._patterns is not None else ()
        return leaf in WEIGHTS and name.endswith(f".{leaf[0]}")

    def apply(self, name: str) -> str | None:
        """The new name, with the segments that this rule wrote hidden; None where the rule doesn't match."""
        if self._patterns is None:
            return self._substituted(name)
        old, new = self._patterns
        dotted = name + "."
        match = old.whole.match(dotted) or old.front.match(dotted)
        if match is None:
            return None
        front = new.filled(old.values(match), hide=True)
        # A name that would be stripped as a whole is not what the prefix was meant for.
        return ".".join(part for part in (front, dotted[match.end() :].removesuffix(".")) if part) or None

    def _substituted(self, name: str) -> str | None:
        if not isinstance(self.old, re.Pattern):
            return None
        renamed = self.old.sub(self.new, name)
        if renamed == name:
            return None
        kept = Counter(name.split("."))
        segments = []
        for segment in renamed.split("."):
            kept[segment] -= 1
            segments.append(segment if kept[segment] >= 0 else hidden(segment))
        return ".".join(segments)


def _check_replacement(pattern: re.Pattern[str], replacement: str) -> None:
    if not isinstance(pattern.pattern, str):
        raise RuleError(f"names are text, but {pattern.pattern!r} is a regular expression for bytes")
    # With an empty alternative it matches anything, so the replacement can be tried now rather than at the first name.
    match = re.compile(pattern.pattern + "|", pattern.flags).search("")
    try:
        if match is not None:
            match.expand(replacement)
    except (re.error, IndexError) as error:
        raise RuleError(f"{replacement!r} can't replace what {pattern.pattern!r} matches: {error}") from error


@dataclass(frozen=True)
class Drop:
    """Tensors whose name has these segments, side by side anywhere, are left out.

    Args:
        pattern: A pattern, or a compiled regular expression (searched).

    Raises:
        RuleError: If the pattern is malformed.
    """

    pattern: str | re.Pattern[str]
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pattern == "":
            raise RuleError("Drop needs a pattern; an empty one would drop everything", hint="'**' drops everything")
        if isinstance(self.pattern, re.Pattern):
            _check_replacement(self.pattern, "")
        regex = self.pattern if isinstance(self.pattern, re.Pattern) else Pattern(self.pattern).anywhere
        object.__setattr__(self, "_regex", regex)

    def __str__(self) -> str:
        return f"drop {self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern!r}"

    def matches(self, name: str) -> bool:
        """Whether the tensor of this name is left out."""
        return self._regex.search(name if isinstance(self.pattern, re.Pattern) else name + ".") is not None


Rule = Rename | Drop | Convert


class RuleMapper:
    """Rules as a mapper.

    Args:
        rules: In the order in which they apply: all renames in turn, then at most one conversion.
        own: The model's names. A rule that leads from one of them to none is not applied.
        config: The model's config, for sizes.
        automatic: Whether names that the model already has are left alone.
        origin: Who gave the rules, for reports; empty for the caller.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        own: Container[str],
        *,
        config: Any = None,
        automatic: bool = False,
        origin: str = "",
    ) -> None:
        self.rules = tuple(rules)
        self.automatic = automatic
        self.origin = origin
        self._own = own
        self._config = config
        self._suffix = f" ({origin})" if origin else ""
        self._drops = [r for r in rules if isinstance(r, Drop)]
        self._renames = [r for r in rules if isinstance(r, Rename)]
        converts = [r for r in rules if isinstance(r, Convert)]
        self._sources = [(convert, slot) for convert in converts for slot in range(len(convert.sources))]
        self._drop_index = PatternIndex([_pattern(drop.pattern) for drop in self._drops])
        self._rename_index = PatternIndex([_pattern(rename.old) for rename in self._renames])
        self._source_index = PatternIndex([convert.sources[slot] for convert, slot in self._sources])
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._unused: dict[int, Rule] = {id(rule): rule for rule in rules}
        self._count = len(self._unused)
        # Module -> the rule that takes its weight and nothing else of it.
        self._without_companions: dict[str, Rule] = {}

    @property
    def used(self) -> bool:
        """Whether any of the rules matched a name so far."""
        return len(self._unused) < self._count

    def unused(self) -> list[str]:
        """The rules that matched nothing, once all names have been claimed."""
        return [f"{rule}{self._suffix}" for rule in self._unused.values()]

    def sought(self) -> list[str]:
        """What each of these was to match."""
        return [_sought(rule) for rule in self._unused.values()]

    def overtaken(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Renames that matched nothing because another one was applied before, as `unused` tells them.

        Args:
            names: The source's.

        Returns:
            For each a name that it would have matched, and what that had become by then.
        """
        found = {}
        for rule in [rule for rule in self._unused.values() if isinstance(rule, Rename)]:
            name = next((name for name in names if rule.apply(name) is not None), None)
            if name is None:
                continue
            others = RuleMapper([other for other in self.rules if other is not rule], self._own, config=self._config)
            claim = others.claim(name)
            if claim is not None and claim.target not in ("", name):
                found[f"{rule}{self._suffix}"] = name, claim.target
        return found

    def left_behind(self, names: Iterable[str]) -> list[tuple[str, list[str], str | None]]:
        """What belongs to weights that a rule takes, but not by that rule: biases, scales, zero points.

        Args:
            names: Those of which nothing became.

        Returns:
            For each rule that leaves some behind its text, their names, and the rule that would take them along, as
            Python, where it can be told.
        """
        found: dict[int, tuple[Rule, list[str]]] = {}
        for name in names if self._without_companions else ():
            module = name
            for _ in range(_COMPANION_SEGMENTS):
                module = module.rpartition(".")[0]
                rule = self._without_companions.get(module)
                # A rename takes along what lies below the weight.
                if rule is not None and not (isinstance(rule, Rename) and rule.apply(name)):
                    found.setdefault(id(rule), (rule, []))[1].append(name)
                    break
        return [(f"{rule}{self._suffix}", taken, _with_companions(rule, taken)) for rule, taken in found.values()]

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        for at in self._drop_index.candidates(name):
            drop = self._drops[at]
            if drop.matches(name):
                self._unused.pop(id(drop), None)
                return Claim(rules=(f"{drop}{self._suffix}",), dropped=True)
        renamed, applied = self._renamed(name)
        # A conversion may be written for the source's own names or for the renamed ones.
        claim = self._converted(name, [])
        if (claim is None or claim.group is None) and renamed != name:
            claim = self._converted(renamed, applied) or claim
        if claim is not None and claim.group is not None:
            return claim
        if self._does_harm(name, (renamed,)):
            return Claim(name, remark=_spared("; ".join(applied)))
        remark = "" if claim is None else claim.remark
        return Claim(renamed, tuple(applied), remark=remark) if renamed != name or remark else None

    def _renamed(self, name: str) -> tuple[str, list[str]]:
        current, applied = name, []
        pending = iter(self._rename_index.candidates(name))
        while (at := next(pending, None)) is not None:
            rename = self._renames[at]
            renamed = rename.apply(current)
            if renamed is None:
                continue
            self._unused.pop(id(rename), None)
            applied.append(f"{rename}{self._suffix}")
            if rename.is_whole_weight(name):
                self._without_companions[name.rpartition(".")[0]] = rename
            current = renamed
            # What a capture has carried over may be a segment that another rule waits for.
            pending = iter([later for later in self._rename_index.candidates(current) if later > at])
        return shown(current), applied

    def _converted(self, name: str, applied: Sequence[str]) -> Claim | None:
        """The claim of a conversion; one without a group where a conversion would have done harm."""
        spared = None
        for at in self._source_index.candidates(name):
            convert, slot = self._sources[at]
            match = convert.match(slot, name)
            if match is None:
                continue
            self._unused.pop(id(convert), None)
            key = id(convert), match.shared
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = convert.group(match.shared, self._config, self._suffix)
            if self._does_harm(name, group.targets):
                spared = Claim(remark=_spared(str(convert)))
                continue
            if match.module is not None:
                self._without_companions[match.module] = convert
            return Claim(group=group, slot=slot, index=match.position, rules=(*applied, group.rule))
        return spared

    def _does_harm(self, name: str, targets: Sequence[str]) -> bool:
        """Whether a rule leads from a name that the model has to none that it has."""
        return name in self._own and not any(target in self._own for target in targets)


def _sought(rule: Rule) -> str:
    pattern = rule.old if isinstance(rule, Rename) else rule.pattern if isinstance(rule, Drop) else rule.sources[0].text
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def _pattern(pattern: str | re.Pattern[str]) -> Pattern | None:
    return Pattern(pattern) if isinstance(pattern, str) else None


def _spared(rules: str) -> str:
    return f"{rules}: not applied to names that the model has as they are, and would not have afterwards"


def _with_companions(rule: Rule, names: Sequence[str]) -> str | None:
    if isinstance(rule, Rename):
        old, new = str(rule.old).rpartition("."), rule.new.rpartition(".")
        return f"Rename({old[0]!r}, {new[0]!r})" if old[2] == new[2] else None
    return rule.with_companions(names) if isinstance(rule, Convert) else None
