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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightloaders.errors import RuleError
from weightloaders.mapping.layouts import LAYOUTS, sizes_from_config
from weightloaders.mapping.names import Claim, Group

# Stands before a segment that a rule produced, while the rules go over a name. No checkpoint's name contains it.
_PRODUCED = "\x00"
_CAPTURE = re.compile(r"\{(\w+)\}")


class Pattern:
    """A dotted pattern, compiled.

    Args:
        text: The pattern.

    Attributes:
        names: What its wildcards are called, in order: captures by their name, ``*`` and ``**`` by their number.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise RuleError(f"a pattern is a string, not {text!r}")
        self.text = text
        self.names: list[str] = []
        # Names are matched with a dot at their end, so that every segment brings its own.
        self.body = "".join(self._segment(segment) for segment in text.split(".")) if text else ""

    def _segment(self, segment: str) -> str:
        if segment == "**":
            return self._group(r"(?:[^.]*\.)*?")
        if segment == "*":
            return self._group(r"[^.]*") + r"\."
        if "*" in segment:
            raise RuleError(
                f"'*' stands for a whole segment, so {segment!r} in the pattern {self.text!r} means nothing",
                hint="capture a part of a segment by name, e.g. 'block{i}'",
            )
        parts = _CAPTURE.split(segment)
        regex = "".join(re.escape(p) if i % 2 == 0 else self._capture(p) for i, p in enumerate(parts))
        return regex + r"\."

    def _group(self, regex: str) -> str:
        self.names.append(str(sum(name.isdigit() for name in self.names) + 1))
        return f"({regex})"

    def _capture(self, name: str) -> str:
        if name in self.names:
            raise RuleError(f"the pattern {self.text!r} captures {{{name}}} twice")
        self.names.append(name)
        return r"([^.]+?)"

    @functools.cached_property
    def whole(self) -> re.Pattern[str]:
        """Matches a whole name (with its final dot)."""
        return re.compile(f"{self.body}\\Z", re.DOTALL)

    @functools.cached_property
    def front(self) -> re.Pattern[str]:
        """Matches the front of a name, by whole segments."""
        return re.compile(self.body, re.DOTALL)

    @functools.cached_property
    def anywhere(self) -> re.Pattern[str]:
        """Matches segments side by side anywhere in a name."""
        return re.compile(rf"(?:\A|(?<=\.)){self.body}", re.DOTALL)

    def values(self, match: re.Match[str]) -> dict[str, str]:
        """What each wildcard took."""
        return dict(zip(self.names, (group.removesuffix(".") for group in match.groups()), strict=True))

    def fill(self, values: Mapping[str, str], ordered: Sequence[str]) -> str:
        """The pattern with its wildcards replaced: captures by name, else the n-th by the n-th of the other side."""
        taken = iter(ordered)
        segments = []
        for segment in self.text.split(".") if self.text else []:
            if segment in ("*", "**"):
                value = next(taken, None)
                if value is None:
                    raise RuleError(f"the pattern {self.text!r} has more wildcards than the one it takes them from")
                if value or segment == "*":
                    segments.append(value)
            else:
                segments.append(_CAPTURE.sub(lambda m: self._named(m.group(1), values), segment))
        return ".".join(segments)

    def _named(self, name: str, values: Mapping[str, str]) -> str:
        if name not in values:
            raise RuleError(f"the pattern {self.text!r} uses {{{name}}}, which the other side does not capture")
        return values[name]


@dataclass(frozen=True)
class Rename:
    """Names that begin like ``old`` begin like ``new`` instead.

    The pattern matches from the front and by whole segments; what follows is kept. ``Rename("backbone", "")`` strips a
    prefix, ``Rename("", "model")`` adds one. With wildcards the n-th of ``new`` takes what the n-th of ``old`` matched.

    Args:
        old: A pattern, or a compiled regular expression (substituted with `re.Pattern.sub`).
        new: A pattern, or the replacement of the regular expression.

    Raises:
        RuleError: If a pattern is malformed.
    """

    old: str | re.Pattern[str]
    new: str
    _old: Pattern | None = field(init=False, repr=False, compare=False)
    _new: Pattern | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.new, str):
            raise RuleError(f"Rename takes two patterns, not {self.new!r}")
        compiled = not isinstance(self.old, re.Pattern)
        object.__setattr__(self, "_old", Pattern(self.old) if not isinstance(self.old, re.Pattern) else None)
        object.__setattr__(self, "_new", Pattern(self.new) if compiled else None)
        if self._old is not None and self._new is not None:
            # A wildcard that nothing fills shows itself now, not at the first matching name.
            self._new.fill(dict.fromkeys(self._old.names, "0"), ["0"] * sum(n.isdigit() for n in self._old.names))

    def __str__(self) -> str:
        old = self.old.pattern if isinstance(self.old, re.Pattern) else self.old
        return f"rename {old!r} -> {self.new!r}"

    def apply(self, name: str) -> str | None:
        """The new name; None where the rule doesn't match."""
        if isinstance(self.old, re.Pattern):
            renamed = self.old.sub(self.new, name)
            return None if renamed == name else renamed
        if self._old is None or self._new is None:
            return None
        dotted = name + "."
        match = self._old.whole.match(dotted) or self._old.front.match(dotted)
        if match is None:
            return None
        values = self._old.values(match)
        ordered = [value for key, value in values.items() if key.isdigit()]
        front = _marked(self._new.fill(values, ordered), set(values.values()))
        rest = dotted[match.end() :].removesuffix(".")
        return ".".join(part for part in (front, rest) if part)


def _marked(text: str, carried: set[str]) -> str:
    """Mark the segments that the rule itself wrote; those that a wildcard carried over stay matchable."""
    carried = {segment for value in carried for segment in value.split(".")}
    return ".".join(s if s in carried or not s or s[0] == _PRODUCED else _PRODUCED + s for s in text.split("."))


@dataclass(frozen=True)
class Drop:
    """Tensors whose name has these segments, side by side anywhere, are left out.

    Args:
        pattern: A pattern, or a compiled regular expression (searched).

    Raises:
        RuleError: If the pattern is malformed.
    """

    pattern: str | re.Pattern[str]
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str) and not self.pattern:
            raise RuleError("Drop needs a pattern; an empty one would drop everything")
        compiled = self.pattern if isinstance(self.pattern, re.Pattern) else Pattern(self.pattern).anywhere
        object.__setattr__(self, "_compiled", compiled)

    def __str__(self) -> str:
        return f"drop {self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern!r}"

    def matches(self, name: str) -> bool:
        """Whether the tensor of this name is left out."""
        return self._compiled.search(name if isinstance(self.pattern, re.Pattern) else name + ".") is not None


class Convert:
    """Source tensors become target tensors by a function of torch code.

    The function gets one tensor a source pattern, and returns a tensor or a tuple, one a target. A source with a capture
    that no target has gives a list, in index order, the indices proved to be 0 to E-1. A target with a capture that no
    source has takes one result an index.

    Args:
        sources: A pattern or several. Each matches whole names.
        targets: A pattern or several.
        function: Torch code, the name of a ready-made layout, or ``"package.module:function"``.
        sizes: Keyword arguments of the function; a ready-made layout's that are left out come from the model's config.

    Raises:
        RuleError: If a pattern is malformed or the function is unknown.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        targets: str | Sequence[str],
        function: str | Callable[..., Any],
        **sizes: Any,
    ) -> None:
        self.sources = tuple(Pattern(s) for s in ([sources] if isinstance(sources, str) else sources))
        self.targets = tuple(Pattern(t) for t in ([targets] if isinstance(targets, str) else targets))
        if not self.sources or not self.targets:
            raise RuleError("Convert needs at least one source and one target")
        self.function = _function(function)
        self.function_name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
        self.sizes = sizes
        source_names = [set(p.names) for p in self.sources]
        target_names = set().union(*(p.names for p in self.targets))
        # What all sources and some target know tells one group from the next; the rest is an index into a list.
        self.shared = tuple(sorted(set.intersection(*source_names) & target_names))
        self.spread = tuple(sorted(target_names - set.union(*source_names)))
        indices = [names - set(self.shared) for names in source_names]
        for pattern, names in zip(self.sources, indices, strict=True):
            if len(names) > 1:
                raise RuleError(
                    f"the source {pattern.text!r} has several wildcards that no target has: {', '.join(sorted(names))}",
                    hint="one of them can be an index; the others must also be in a target",
                )
        if len(self.spread) > 1 or (self.spread and len(self.targets) > 1):
            raise RuleError(f"{self}: only a single target may spread over an index that no source has")
        self.lists = tuple(bool(names) for names in indices)
        self._index_name = tuple(next(iter(names), None) for names in indices)

    def __str__(self) -> str:
        sources = ", ".join(p.text for p in self.sources)
        return f"{self.function_name}({sources}) -> {', '.join(p.text for p in self.targets)}"

    __repr__ = __str__

    def claim(self, name: str, config: Any) -> Claim | None:
        """The tensor's place in a group; None where no source pattern matches."""
        for slot, pattern in enumerate(self.sources):
            match = pattern.whole.match(name + ".")
            if match is not None:
                values = pattern.values(match)
                shared = {key: values[key] for key in self.shared}
                index_name = self._index_name[slot]
                index = values[index_name] if index_name else None
                if index is not None and not index.isdecimal():
                    continue
                return Claim(
                    group=self._group(shared, config),
                    slot=slot,
                    index=None if index is None else int(index),
                    rules=(str(self),),
                )
        return None

    def _group(self, shared: dict[str, str], config: Any) -> Group:
        slots = tuple(_partly_filled(p, shared) for p in self.sources)
        targets = tuple(_partly_filled(p, shared) for p in self.targets)
        return Group(
            key=(id(self), tuple(shared.items())),
            slots=slots,
            lists=self.lists,
            targets=() if self.spread else targets,
            function=functools.partial(self._call, targets=targets, config=config),
            rule=str(self),
        )

    def _call(self, tensors: Sequence[Any], *, targets: tuple[str, ...], config: Any) -> dict[str, torch.Tensor]:
        results = self.function(*tensors, **self._sizes(config))
        results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        if self.spread:
            placeholder = "*" if self.spread[0].isdigit() else "{" + self.spread[0] + "}"
            targets = tuple(targets[0].replace(placeholder, str(i), 1) for i in range(len(results)))
        if len(results) != len(targets):
            raise RuleError(f"{self} returned {len(results)} tensors for {len(targets)} targets")
        return dict(zip(targets, results, strict=True))

    def _sizes(self, config: Any) -> dict[str, Any]:
        if LAYOUTS.get(self.function_name) is not self.function:
            return self.sizes
        wanted = [
            p.name
            for p in inspect.signature(self.function).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        sizes = {**sizes_from_config(config, wanted), **self.sizes}
        lacking = [name for name in wanted if name not in sizes]
        if lacking:
            raise RuleError(
                f"{self} needs {', '.join(lacking)}, which the model's config doesn't tell",
                hint=f"give it in the rule, e.g. Convert(..., {self.function_name!r}, {lacking[0]}=...)",
            )
        return sizes


def _partly_filled(pattern: Pattern, values: Mapping[str, str]) -> str:
    """The pattern with the wildcards that are known replaced, and the others left as they stand."""
    numbered = iter(name for name in pattern.names if name.isdigit())
    segments = []
    for segment in pattern.text.split("."):
        if segment in ("*", "**"):
            value = values.get(next(numbered), segment)
            if value:
                segments.append(value)
        else:
            segments.append(_CAPTURE.sub(lambda m: values.get(m.group(1), m.group(0)), segment))
    return ".".join(segments)


Rule = Rename | Drop | Convert


def _function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(function):
        return function
    if function in LAYOUTS:
        return LAYOUTS[function]
    module, colon, attribute = str(function).partition(":")
    if not colon:
        raise RuleError(
            f"there is no ready-made layout {function!r}; there are {', '.join(sorted(LAYOUTS))}",
            hint="name one of these, or give your own function as 'package.module:function'",
        )
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuleError(f"the function {function!r} of a rule can't be imported: {error}") from error
    return found


class RuleMapper:
    """Rules as a mapper.

    Args:
        rules: In the order in which they apply: all renames in turn, then at most one conversion.
        own: The model's names; a rename that leads from one of them to none is not applied.
        config: The model's config, for sizes.
        automatic: Whether names that the model already has are left alone.
        origin: Who gave the rules, for reports.
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
        self._own = own
        self._config = config
        self._suffix = f" ({origin})" if origin else ""
        self._drops = [r for r in rules if isinstance(r, Drop)]
        self._renames = [r for r in rules if isinstance(r, Rename)]
        self._converts = [r for r in rules if isinstance(r, Convert)]
        self._unused: dict[int, Rule] = {id(rule): rule for rule in rules}

    def unused(self) -> list[str]:
        """The rules that matched nothing, once all names have been claimed."""
        return [str(rule) for rule in self._unused.values()]

    def claim(self, name: str) -> Claim | None:
        """See `Mapper.claim`."""
        for drop in self._drops:
            if drop.matches(name):
                self._unused.pop(id(drop), None)
                return Claim(rules=(f"{drop}{self._suffix}",), dropped=True)
        renamed, applied = self._renamed(name)
        # A conversion may be written for the source's own names or for the renamed ones.
        for candidate in dict.fromkeys((name, renamed)):
            for convert in self._converts:
                claim = convert.claim(candidate, self._config)
                if claim is not None:
                    self._unused.pop(id(convert), None)
                    before = applied if candidate == renamed else []
                    return Claim(
                        rules=(*before, f"{convert}{self._suffix}"),
                        group=claim.group,
                        slot=claim.slot,
                        index=claim.index,
                    )
        if renamed == name:
            return None
        if name in self._own and renamed not in self._own:
            return Claim(name, remark=f"{name!r} is the model's own name and was not renamed to {renamed!r}")
        return Claim(renamed, tuple(applied))

    def _renamed(self, name: str) -> tuple[str, list[str]]:
        current, applied = name, []
        for rename in self._renames:
            renamed = rename.apply(current)
            if renamed is not None:
                self._unused.pop(id(rename), None)
                applied.append(f"{rename}{self._suffix}")
                current = renamed
        return current.replace(_PRODUCED, ""), applied


_FORM = (
    "rules are a list of Rename, Drop and Convert objects, or a mapping with `rename:`, `drop:` and `convert:` "
    "(from YAML, or the path of a YAML file)"
)


def parse_rules(value: Any) -> tuple[Rule, ...]:
    """Rules from what a user gives: objects, a mapping in the YAML form, YAML text or the path of a YAML file.

    Raises:
        RuleError: If it is none of these, with the place at fault.
    """
    if value is None:
        return ()
    if isinstance(value, Rename | Drop | Convert):
        return (value,)
    if isinstance(value, Path) or (isinstance(value, str) and "\n" not in value and ":" not in value):
        value = _read_yaml(Path(value))
    elif isinstance(value, str):
        value = _parse_yaml(value, "the rules")
    if isinstance(value, Mapping):
        return tuple(_rules_from_mapping(value))
    if isinstance(value, Iterable):
        rules: list[Rule] = []
        for item in value:
            rules.extend(_rules_from_mapping(item) if isinstance(item, Mapping) else (_checked(item),))
        return tuple(rules)
    raise RuleError(f"these are no rules: {value!r}", hint=_FORM)


def _checked(item: Any) -> Rule:
    if isinstance(item, Rename | Drop | Convert):
        return item
    raise RuleError(f"this is no rule: {item!r}", hint=_FORM)


def _read_yaml(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"the rules can't be read from {path}: {error}", file=path, hint=_FORM) from error
    return _parse_yaml(text, str(path))


def _parse_yaml(text: str, name: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RuleError(f"{name}: this is no valid YAML: {error}") from error


def _rules_from_mapping(value: Mapping[str, Any]) -> Iterable[Rule]:
    unknown = sorted(map(str, set(value) - {"rename", "drop", "convert"}))
    if unknown:
        raise RuleError(
            f"rules have no key {', '.join(map(repr, unknown))}; there are rename, drop, convert", hint=_FORM
        )
    for entry in _entries(value.get("rename"), "rename"):
        if isinstance(entry, Mapping):
            # Either one {old: ..., new: ...} or any number of old: new.
            pairs = [(entry["old"], entry["new"])] if set(entry) == {"old", "new"} else list(entry.items())
        elif isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2:
            pairs = [(entry[0], entry[1])]
        else:
            raise RuleError(f"`rename:` takes old: new pairs, not {entry!r}")
        for old, new in pairs:
            yield Rename(str(old or ""), str(new or ""))
    for entry in _entries(value.get("drop"), "drop"):
        yield Drop(entry)
    for entry in _entries(value.get("convert"), "convert"):
        if not isinstance(entry, Mapping) or not {"sources", "targets", "function"} <= set(entry):
            raise RuleError(f"an entry of `convert:` needs sources, targets and function, not {entry!r}")
        sizes = {str(k): v for k, v in entry.items() if k not in ("sources", "targets", "function")}
        yield Convert(entry["sources"], entry["targets"], entry["function"], **sizes)


def _entries(value: Any, key: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping | str):
        return [value]
    raise RuleError(f"`{key}:` takes a list, not {value!r}")
