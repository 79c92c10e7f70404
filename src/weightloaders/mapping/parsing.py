"""`parse_rules`: rules from what a user gives, be it objects, a mapping, YAML or a file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightloaders.errors import RuleError, SourceError
from weightloaders.mapping.rules import Convert, Drop, Rename, Rule
from weightloaders.weights.texts import brief, parse_yaml, read_text

_FORM = (
    "rules are a list of Rename, Drop and Convert objects, or a mapping with `rename:`, `drop:` and `convert:` "
    "(from YAML, or the path of a YAML file)"
)
_QUOTES = "in YAML a pattern with '*' or braces needs quotes, e.g. drop: ['*.bias', 'layers.{i}.bias']"
_SUFFIXES = (".yaml", ".yml", ".json")
_KEYS = ("rename", "drop", "convert")
# Rules are written by people; more than this is another kind of file.
_MAX_BYTES = 1 << 24


def parse_rules(value: Any) -> tuple[Rule, ...]:
    """Rules from what a user gives: objects, a mapping in the YAML form, YAML text or the path of a YAML file.

    Raises:
        RuleError: If it is none of these, with the place at fault.
    """
    if isinstance(value, Path) or (isinstance(value, str) and _is_path(value)):
        return _from_file(Path(value))
    if isinstance(value, str):
        return tuple(_rules(_parse_yaml(value, "the rules")))
    return tuple(_rules(value))


def _is_path(text: str) -> bool:
    return "\n" not in text and (text.lower().endswith(_SUFFIXES) or ":" not in text)


def _from_file(path: Path) -> tuple[Rule, ...]:
    try:
        text = read_text(path, _MAX_BYTES)
    except SourceError as error:
        # What is plainly meant for a file needs no lesson in what rules look like.
        hint = None if path.suffix.lower() in _SUFFIXES else _FORM
        if not os.path.lexists(path):
            raise RuleError(f"there is no file {str(path)!r} to read rules from", file=path, hint=hint) from error
        raise RuleError(f"the rules can't be read: {error.message}", file=path, hint=hint) from error
    try:
        return tuple(_rules(_parse_yaml(text, str(path))))
    except RuleError as error:
        error.file = error.file or str(path)
        raise


def _parse_yaml(text: str, name: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        hint = _QUOTES if "*" in text or "{" in text else _FORM
        raise RuleError(f"{name}: this is no valid YAML: {error}", hint=hint) from error


def _rules(value: Any) -> Iterator[Rule]:
    if value is None:
        return
    if isinstance(value, Rename | Drop | Convert):
        yield value
    elif isinstance(value, Mapping):
        yield from _from_mapping(value)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            if not isinstance(item, Rename | Drop | Convert | Mapping):
                raise RuleError(f"this is no rule: {brief(item)}", hint=_FORM)
            yield from _rules(item)
    else:
        raise RuleError(f"these are no rules: {brief(value)}", hint=_FORM)


def _from_mapping(value: Mapping[Any, Any]) -> Iterator[Rule]:
    unknown = sorted(str(key) for key in value if key not in _KEYS)
    if unknown:
        raise RuleError(
            f"rules have no key {', '.join(map(repr, unknown))}; there are {', '.join(_KEYS)}{_meant(unknown, _KEYS)}",
            hint=_FORM,
        )
    for entry in _entries(value.get("rename"), "rename"):
        for old, new in _pairs(entry):
            yield Rename(_text(old, "rename"), _text(new, "rename"))
    for entry in _entries(value.get("drop"), "drop"):
        yield Drop(_text(entry, "drop"))
    for entry in _entries(value.get("convert"), "convert"):
        yield _conversion(entry)


def _entries(value: Any, key: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping | str):
        return [value]
    raise RuleError(f"`{key}:` takes a list, not {brief(value)}", hint=_FORM)


def _pairs(entry: Any) -> list[tuple[Any, Any]]:
    if isinstance(entry, Mapping):
        # Either one {old: ..., new: ...} or any number of old: new.
        return [(entry["old"], entry["new"])] if set(entry) == {"old", "new"} else list(entry.items())
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2:
        return [(entry[0], entry[1])]
    raise RuleError(
        f"`rename:` takes old names with new ones, not {brief(entry)}", hint="e.g. `rename: {backbone: model}`"
    )


def _text(value: Any, key: str) -> str:
    # YAML reads an empty value as null, and a name of digits as a number.
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise RuleError(f"`{key}:` takes names, not {brief(value)}", hint="put quotes around it")


def _conversion(entry: Any) -> Convert:
    needed = ("sources", "targets", "function")
    lacking = [key for key in needed if key not in entry] if isinstance(entry, Mapping) else needed
    if lacking:
        others = [str(key) for key in entry if key not in needed] if isinstance(entry, Mapping) else []
        raise RuleError(
            f"an entry of `convert:` needs sources, targets and function, not {brief(entry)}{_meant(others, lacking)}",
            hint="e.g. {sources: [q, k, v], targets: qkv, function: fuse_qkv}; whatever else it has are sizes",
        )
    sizes = {str(key): value for key, value in entry.items() if key not in needed}
    return Convert(entry["sources"], entry["targets"], entry["function"], **sizes)


def _meant(given: Iterable[str], known: Collection[str]) -> str:
    """What was probably meant by keys that are not known."""
    near = [match for key in given for match in difflib.get_close_matches(key, known, n=1)]
    return f" (did you mean {', '.join(map(repr, near))}?)" if near else ""
