"""`Rename`, `Drop`, `Convert`: what a caller, a config file or a hook says about names and layouts.

Patterns are dotted and match whole segments: ``*`` one segment, ``**`` any run of them, ``{name}`` a capture (also
inside a segment). A compiled regular expression is accepted where that isn't enough.

Rules go over the source's names once. A segment that a rule produced is not matched by a later rule, so ``gate`` and
``up`` can be swapped by two renames.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightloaders.errors import RuleError
from weightloaders.mapping.layouts import LAYOUTS, sizes_from_config
from weightloaders.mapping.names import Claim, Group, as_index
from weightloaders.mapping.patterns import Pattern, hidden, shown


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


class Convert:
    """Source tensors become target tensors by a function of torch code.

    The function gets one tensor a source pattern, and returns a tensor or a tuple, one a target. A source with a
    capture that no target has gives a list, in index order, the indices proved to be 0 to E-1. A target with a capture
    that no source has takes one result an index.

    Args:
        sources: A pattern or several. Each matches whole names.
        targets: A pattern or several.
        function: Torch code, the name of a ready-made layout, or ``"package.module:function"``. It must not change what
            it is given.
        sizes: Keyword arguments of the function; a ready-made layout's that are left out come from the model's config.

    Raises:
        RuleError: If a pattern is malformed, the wildcards don't fit each other, or the function is unknown.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        targets: str | Sequence[str],
        function: str | Callable[..., Any],
        **sizes: Any,
    ) -> None:
        self.sources = _patterns(sources, "source")
        self.targets = _patterns(targets, "target")
        self.function = _function(function)
        self.function_name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
        self.sizes = sizes
        in_all = set.intersection(*(set(p.names) for p in self.sources))
        in_some = set[str]().union(*(set(p.names) for p in self.sources))
        in_targets = set[str]().union(*(set(p.names) for p in self.targets))
        # What all sources and the targets know tells one group from the next; the rest is an index into a list.
        self._shared = tuple(sorted(in_all & in_targets))
        self._spread = tuple(sorted(in_targets - in_some))
        self._index_names = tuple(next(iter(set(p.names) - in_targets), None) for p in self.sources)
        self._lists = tuple(name is not None for name in self._index_names)
        self._check_wildcards(in_targets & in_some - in_all, in_targets)
        self._check_call()

    def _check_wildcards(self, unsure: set[str], in_targets: set[str]) -> None:
        if unsure:
            raise RuleError(f"{self}: {_named(unsure)} is in a target, so every source must have it")
        for pattern in self.sources:
            indices = set(pattern.names) - in_targets
            if len(indices) > 1:
                raise RuleError(
                    f"{self}: the source {pattern.text!r} has several wildcards that no target has: {_named(indices)}",
                    hint="one of them can be an index; the others must also be in a target",
                )
        for pattern in self.targets:
            lacking = set(self._shared) - set(pattern.names)
            if lacking:
                raise RuleError(
                    f"{self}: the target {pattern.text!r} has no {_named(lacking)}, so several groups would fill it"
                )
        if len(self._spread) > 1 or (self._spread and len(self.targets) > 1):
            raise RuleError(f"{self}: only a single target may spread over an index, and over just one")
        if self._spread and "**" in self.targets[0].filled(dict.fromkeys(self._shared, "x")).split("."):
            raise RuleError(f"{self}: '**' can't stand for an index", hint="use '*' or a capture")

    def _check_call(self) -> None:
        """Whether the function takes that many tensors and these sizes, where it can be told."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return
        is_layout = self._is_layout
        known = {p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        # A layout's sizes may come from the config, later.
        sizes = {**dict.fromkeys(known if is_layout else ()), **self.sizes}
        try:
            signature.bind(*self.sources, **sizes)
        except TypeError as error:
            raise RuleError(
                f"{self}: the function can't be called with {len(self.sources)} tensors"
                + (f" and {', '.join(self.sizes)}" if self.sizes else "")
                + f": {error}",
                hint=f"it is {self.function_name}{signature}",
            ) from error
        if is_layout:
            for name, value in self.sizes.items():
                numbers = value if isinstance(value, list | tuple) else [value]
                if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
                    raise RuleError(f"{self}: {name}={value!r} is no whole number")

    @property
    def _is_layout(self) -> bool:
        return LAYOUTS.get(self.function_name) is self.function

    def __str__(self) -> str:
        sources, targets = (", ".join(p.text for p in patterns) for patterns in (self.sources, self.targets))
        return f"{self.function_name}({sources}) -> {targets}"

    __repr__ = __str__

    def claim(self, name: str, config: Any) -> Claim | None:
        """The tensor's place in a group; None where no source pattern matches."""
        for slot, pattern in enumerate(self.sources):
            match = pattern.whole.match(name + ".")
            if match is None:
                continue
            values = pattern.values(match)
            index_name = self._index_names[slot]
            index = None if index_name is None else as_index(values[index_name])
            if index_name is None or index is not None:
                group = self._group({key: values[key] for key in self._shared}, config)
                return Claim(group=group, slot=slot, index=index, rules=(str(self),))
        return None

    def _group(self, shared: dict[str, str], config: Any) -> Group:
        targets = tuple(p.filled(shared) for p in self.targets)
        return Group(
            key=(id(self), tuple(shared.items())),
            slots=tuple(p.filled(shared) for p in self.sources),
            lists=self._lists,
            # One that spreads over an index has at least the first.
            targets=tuple(_numbered(t, 0) for t in targets) if self._spread else targets,
            function=functools.partial(self._call, targets=targets, config=config),
            rule=str(self),
        )

    def _call(self, tensors: Sequence[Any], *, targets: tuple[str, ...], config: Any) -> dict[str, torch.Tensor]:
        returned = self.function(*tensors, **self._sizes(config))
        results = list(returned) if isinstance(returned, list | tuple) else [returned]
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise RuleError(f"{self} returned {type(returned).__name__}, not a tensor or a tuple of tensors")
        if self._spread:
            targets = tuple(_numbered(targets[0], at) for at in range(len(results)))
        if len(results) != len(targets):
            raise RuleError(f"{self} returned {len(results)} tensors for {len(targets)} targets")
        return dict(zip(targets, results, strict=True))

    def _sizes(self, config: Any) -> dict[str, Any]:
        if not self._is_layout:
            return self.sizes
        parameters = inspect.signature(self.function).parameters.values()
        wanted = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        sizes = {**sizes_from_config(config, wanted), **self.sizes}
        lacking = [name for name in wanted if name not in sizes]
        if lacking:
            python, yaml = (", ".join(f"{name}{sign}..." for name in lacking) for sign in ("=", ": "))
            raise RuleError(
                f"{self} needs {', '.join(lacking)}, which the model's config doesn't tell",
                hint=f"give them in the rule: Convert(..., {self.function_name!r}, {python}), or in YAML "
                f"{{..., function: {self.function_name}, {yaml}}}",
            )
        return sizes


Rule = Rename | Drop | Convert


def _numbered(text: str, index: int) -> str:
    """A pattern with one wildcard left, for one index."""
    pattern = Pattern(text)
    return pattern.filled(dict.fromkeys(pattern.names, str(index)))


def _patterns(texts: str | Sequence[str], what: str) -> tuple[Pattern, ...]:
    if not isinstance(texts, str | Sequence):
        raise RuleError(f"the {what}s of a conversion are a pattern or several, not {texts!r}")
    patterns = tuple(Pattern(text) for text in ([texts] if isinstance(texts, str) else texts))
    if not patterns or not all(pattern.text for pattern in patterns):
        raise RuleError(f"Convert needs at least one {what}, and none may be empty")
    return patterns


def _named(wildcards: set[str]) -> str:
    return ", ".join(f"wildcard number {n}" if n.isdecimal() else f"{{{n}}}" for n in sorted(wildcards))


def _function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(function):
        return function
    if function in LAYOUTS:
        return LAYOUTS[function]
    module, colon, attribute = str(function).partition(":")
    if not (module and colon and attribute):
        raise RuleError(
            f"there is no ready-made layout {function!r}; there are {', '.join(sorted(LAYOUTS))}",
            hint="name one of these, or give your own function as 'package.module:function'",
        )
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError) as error:
        raise RuleError(f"the function {function!r} of a rule can't be imported: {error}") from error
    if not callable(found):
        raise RuleError(f"{function!r} is no function, but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


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
        self.automatic = automatic
        self.origin = origin
        self._own = own
        self._config = config
        self._suffix = f" ({origin})" if origin else ""
        self._drops = [r for r in rules if isinstance(r, Drop)]
        self._renames = [r for r in rules if isinstance(r, Rename)]
        self._converts = [r for r in rules if isinstance(r, Convert)]
        self._unused: dict[int, Rule] = {id(rule): rule for rule in rules}

    def unused(self) -> list[str]:
        """The rules that matched nothing, once all names have been claimed."""
        return [f"{rule}{self._suffix}" for rule in self._unused.values()]

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        for drop in self._drops:
            if drop.matches(name):
                self._unused.pop(id(drop), None)
                return Claim(rules=(f"{drop}{self._suffix}",), dropped=True)
        renamed, applied = self._renamed(name)
        remark = ""
        # A conversion may be written for the source's own names or for the renamed ones.
        for candidate in dict.fromkeys((name, renamed)):
            for convert in self._converts:
                claim = convert.claim(candidate, self._config)
                if claim is None or claim.group is None:
                    continue
                self._unused.pop(id(convert), None)
                if self._does_harm(candidate, claim.group.targets):
                    remark = _spared(str(convert))
                    continue
                before = applied if candidate == renamed else []
                return replace(claim, rules=(*before, f"{convert}{self._suffix}"))
        if self._does_harm(name, (renamed,)):
            return Claim(name, remark=_spared("; ".join(applied)))
        return Claim(renamed, tuple(applied), remark=remark) if renamed != name or remark else None

    def _renamed(self, name: str) -> tuple[str, list[str]]:
        current, applied = name, []
        for rename in self._renames:
            renamed = rename.apply(current)
            if renamed is not None:
                self._unused.pop(id(rename), None)
                applied.append(f"{rename}{self._suffix}")
                current = renamed
        return shown(current), applied

    def _does_harm(self, name: str, targets: Sequence[str]) -> bool:
        """Whether a rule leads from a name that the model has to none that it has."""
        return name in self._own and not any(target in self._own for target in targets)


def _spared(rules: str) -> str:
    return f"{rules}: not applied to names that the model has as they are, and would not have afterwards"
