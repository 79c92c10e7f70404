"""`Convert`: source tensors become target tensors by a function of torch code."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weightloaders.errors import RuleError
from weightloaders.mapping.layouts import LAYOUTS, sizes_from_config
from weightloaders.mapping.names import Group, as_index
from weightloaders.mapping.patterns import Pattern

# What a module's weight is called; what else a checkpoint has of the module (bias, scales, zero points) goes with it.
WEIGHTS = frozenset({("weight",), ("qweight",), ("weight_packed",)})


class Match(NamedTuple):
    """What a source pattern makes of a name.

    Attributes:
        shared: What tells the group from others, in the order of the conversion's own wildcards.
        position: The place in a list.
        module: The module whose weight this is, where the pattern takes weights only and nothing that goes with them.
    """

    shared: tuple[str, ...]
    position: int | None
    module: str | None


class Convert:
    """Source tensors become target tensors by a function of torch code.

    The function gets one tensor a source pattern, and returns a tensor or a tuple, one a target. A source with a
    capture that no target has gives a list, in index order, the indices proved to be 0 to E-1. A target with a capture
    that no source has takes one result an index; several of them take a list each.

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
        sources: str | Sequence[str | Pattern],
        targets: str | Sequence[str | Pattern],
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
        index_names = [next(iter(set(p.names) - in_targets), None) for p in self.sources]
        self._lists = tuple(name is not None for name in index_names)
        self._check_wildcards(in_targets & in_some - in_all, in_targets)
        self._check_call()
        # Where in a match to find what, so that not every name needs a dict of all.
        self._places = [[p.names.index(name) for name in self._shared] for p in self.sources]
        self._index_places = [
            None if name is None else p.names.index(name) for p, name in zip(self.sources, index_names, strict=True)
        ]
        self._takes_weights_only = [pattern.segments[-1:] in WEIGHTS for pattern in self.sources]

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
            if set(self._spread) - set(pattern.names):
                raise RuleError(
                    f"{self}: the target {pattern.text!r} has no {_named(set(self._spread))}, which others have"
                )
            if self._spread and "**" in pattern.filled(dict.fromkeys(self._shared, "x")).split("."):
                raise RuleError(f"{self}: '**' can't stand for an index", hint="use '*' or a capture")
        if len(self._spread) > 1:
            raise RuleError(f"{self}: targets may spread over just one index, not over {_named(set(self._spread))}")

    def _check_call(self) -> None:
        """Whether the function takes that many tensors and these sizes, where it can be told."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return
        known = {p.name: p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        # A layout's sizes may come from the config, later.
        sizes = {**dict.fromkeys(known if self.is_layout else ()), **self.sizes}
        try:
            signature.bind(*self.sources, **sizes)
        except TypeError as error:
            raise RuleError(
                f"{self}: the function can't be called with {len(self.sources)} tensors"
                + (f" and {', '.join(self.sizes)}" if self.sizes else "")
                + f": {error}",
                hint=f"it is {self.function_name}{signature}",
            ) from error
        if self.is_layout:
            for name, value in self.sizes.items():
                if name not in known:
                    raise RuleError(
                        f"{self}: {name} is a tensor of {self.function_name}, and not one of its sizes",
                        hint=f"name it among the sources; it is {self.function_name}{signature}",
                    )
                _check_size(f"{self}: {name}={value!r}", value, str(known[name].annotation))

    @property
    def is_layout(self) -> bool:
        """Whether the function is one of the ready-made ones."""
        return LAYOUTS.get(self.function_name) is self.function

    @functools.cached_property
    def _text(self) -> str:
        sources, targets = (", ".join(p.text for p in patterns) for patterns in (self.sources, self.targets))
        return f"{self.function_name}({sources}) -> {targets}"

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def match(self, slot: int, name: str) -> Match | None:
        """What the source pattern of this number makes of a name; None where it doesn't match.

        An index has to be a number.
        """
        match = self.sources[slot].whole.match(name + ".")
        if match is None:
            return None
        values = match.groups()
        place = self._index_places[slot]
        index = None if place is None else as_index(values[place].removesuffix("."))
        if place is not None and index is None:
            return None
        module = name.rpartition(".")[0] if self._takes_weights_only[slot] else None
        return Match(tuple([values[at].removesuffix(".") for at in self._places[slot]]), index, module)

    def group(self, shared: tuple[str, ...], config: Any, origin: str = "") -> Group:
        """The group of what matches with these values.

        Args:
            shared: See `Match`.
            config: The model's config, for sizes.
            origin: Who gave the rule, for messages: empty, or text to follow the rule's.
        """
        values = dict(zip(self._shared, shared, strict=True))
        targets = tuple(p.filled(values) for p in self.targets)
        rule = f"{self}{origin}"
        return Group(
            key=(id(self), shared),
            slots=tuple(p.filled(values) for p in self.sources),
            lists=self._lists,
            # One that spreads over an index has at least the first.
            targets=tuple(_numbered(target, 0) for target in targets) if self._spread else targets,
            function=_Call(self, shared, targets, config, rule),
            rule=rule,
            # What spreads over an index has names that are not known yet.
            alike=id(self) if self.is_layout and not self._spread else None,
        )

    def call(self, tensors: Sequence[Any], targets: tuple[str, ...], config: Any, rule: str) -> dict[str, torch.Tensor]:
        """Run the function for one group.

        Raises:
            RuleError: If it does not return what it should, or the config does not tell its sizes.
        """
        returned = self.function(*tensors, **self.known_sizes(config, rule))
        results = list(returned) if isinstance(returned, list | tuple) else [returned]
        if self._spread:
            lists = [results] if len(targets) == 1 else results
            if len(lists) != len(targets) or not all(isinstance(part, list | tuple) for part in lists):
                raise RuleError(f"{rule} did not return {len(targets)} lists, one for each target")
            targets = tuple(_numbered(t, at) for t, part in zip(targets, lists, strict=True) for at in range(len(part)))
            results = [result for part in lists for result in part]
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise RuleError(f"{rule} returned {type(returned).__name__}, not a tensor or a tuple of tensors")
        if len(results) != len(targets):
            raise RuleError(f"{rule} returned {len(results)} tensors for {len(targets)} targets")
        if len(set(targets)) < len(targets):
            twice = next(target for at, target in enumerate(targets) if target in targets[:at])
            raise RuleError(f"{rule} would fill {twice} twice", hint="each of its targets needs a name of its own")
        return dict(zip(targets, results, strict=True))

    def known_sizes(self, config: Any, rule: str) -> dict[str, Any]:
        """The function's sizes: those given, and those that the config tells.

        Raises:
            RuleError: If it does not tell all that a ready-made layout needs.
        """
        if not self.is_layout:
            return self.sizes
        parameters = inspect.signature(self.function).parameters.values()
        wanted = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        sizes = {**sizes_from_config(config, wanted), **self.sizes}
        lacking = [name for name in wanted if name not in sizes]
        if lacking:
            python, yaml = (", ".join(f"{name}{sign}..." for name in lacking) for sign in ("=", ": "))
            raise RuleError(
                f"{rule} needs {', '.join(lacking)}, which the model's config doesn't tell",
                hint=f"give them in the rule: Convert(..., {self.function_name!r}, {python}), or in YAML "
                f"{{..., function: {self.function_name}, {yaml}}}",
            )
        return sizes

    def with_companions(self, names: Sequence[str]) -> str | None:
        """The rule, as Python, that would take along what goes with the weights that this one takes.

        Args:
            names: What it leaves behind.
        """
        leaves = {pattern.segments[-1] for pattern in (*self.sources, *self.targets)}
        if len(leaves) > 1 or "leaf" in self._shared:
            return None
        # What bitsandbytes keeps with a weight has longer names than the weight.
        tail = "**" if any(f".{leaf}." in name for name in names for leaf in leaves) else "{leaf}"
        texts = [[".".join((*p.segments[:-1], tail)) for p in patterns] for patterns in (self.sources, self.targets)]
        sources, targets = (repr(text[0] if len(text) == 1 else text) for text in texts)
        sizes = "".join(f", {name}={value!r}" for name, value in self.sizes.items())
        function = repr(self.function_name) if self.is_layout else self.function_name
        return f"Convert({sources}, {targets}, {function}{sizes})"


@dataclass(frozen=True, slots=True)
class _Call:
    """A conversion's function for one group, which can say what makes it again (see `mapping.recipes`)."""

    convert: Convert
    shared: tuple[str, ...]
    targets: tuple[str, ...]
    config: Any
    rule: str

    def __call__(self, tensors: Sequence[Any]) -> dict[str, torch.Tensor]:
        return self.convert.call(tensors, self.targets, self.config, self.rule)

    def as_data(self) -> dict[str, Any]:
        convert = self.convert
        name = convert.function_name if convert.is_layout else dotted_name(convert.function)
        if name is None:
            raise RuleError(
                f"{self.rule} computes, and its function has no name by which it could be found again",
                hint="define it in a module, at the top, so that 'package.module:function' leads to it",
            )
        sizes = convert.known_sizes(self.config, self.rule)
        if convert.is_layout:
            sizes = {key: list(value) if isinstance(value, tuple) else value for key, value in sizes.items()}
        if not _is_plain_data(sizes):
            raise RuleError(
                f"{self.rule} computes, and its sizes can't be written down: {sizes}",
                hint="give it numbers, text and lists of these",
            )
        return {
            "kind": "convert",
            "sources": [pattern.text for pattern in convert.sources],
            "targets": [pattern.text for pattern in convert.targets],
            "function": name,
            "sizes": sizes,
            "shared": list(self.shared),
        }


def _is_plain_data(value: Any) -> bool:
    """Whether JSON gives back what it is given."""
    try:
        same: bool = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False
    return same


def dotted_name(function: Callable[..., Any]) -> str | None:
    """``"package.module:function"``, where that leads back to this very function; else None (a lambda, for one)."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not isinstance(module, str) or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is function else None


def _check_size(what: str, value: Any, annotation: str) -> None:
    wanted: tuple[type, ...]
    if annotation.startswith("Sequence"):
        values, wanted, kind = (value if isinstance(value, list | tuple) else [value]), (int,), "no whole number"
    else:
        kinds = {"bool": (bool, "neither true nor false"), "str": (str, "no text")}
        known, kind = kinds.get(annotation, (int, "no whole number"))
        values, wanted = [value], (known,)
    # `type`, because true is a number to `isinstance`.
    if not all(type(one) in wanted for one in values):
        raise RuleError(f"{what} is {kind}")


def _numbered(text: str, index: int) -> str:
    """A pattern with one wildcard left, for one index."""
    pattern = Pattern(text)
    return pattern.filled(dict.fromkeys(pattern.names, str(index)))


def _patterns(texts: str | Sequence[str | Pattern], what: str) -> tuple[Pattern, ...]:
    if not isinstance(texts, str | Sequence):
        raise RuleError(f"the {what}s of a conversion are a pattern or several, not {texts!r}")
    given = [texts] if isinstance(texts, str) else texts
    # Those of another rule are patterns already.
    patterns = tuple(text if isinstance(text, Pattern) else Pattern(text) for text in given)
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
        near = difflib.get_close_matches(str(function), LAYOUTS, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise RuleError(
            f"there is no ready-made layout {function!r}{meant}; there are {', '.join(sorted(LAYOUTS))}",
            hint="name one of these, or give your own function as 'package.module:function'",
        )
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError) as error:
        raise RuleError(f"the function {function!r} of a rule can't be imported: {error}") from error
    if not callable(found):
        raise RuleError(f"{function!r} is no function, but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]
