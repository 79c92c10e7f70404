"""Values that people write, in a config file or in code: checked without coercion, and refused in sentences."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from weightloaders.discovery import did_you_mean
from weightloaders.errors import ConfigError
from weightloaders.weights.texts import brief

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# What lets somebody in is not told, wherever it was put by mistake.
_SECRET = re.compile(
    r"(?:^|[._])(?:token|\w*secret\w*|\w*password|credentials?|headers|storage_options)$", re.IGNORECASE
)
_TOKEN = re.compile(r"\bhf_\w{6,}")


class Checked(BaseModel):
    """A pydantic model that neither coerces nor ignores anything, and complains by `ConfigError`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    if not TYPE_CHECKING:  # type checkers shall see the fields as the signature

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError("; ".join(_complaints(error, values, type(self)))) from None


def parse_size(size: int | str) -> int:
    """Bytes from a number or a text like ``"5GB"`` or ``"500 MiB"``.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    # Of a number with more digits a float might be infinite.
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    nbytes = int(float(match.group(1)) * unit) if match and unit else 0
    if nbytes < 1:
        raise ConfigError(f"{size!r} is no size", hint="e.g. 5000000000, '5GB' or '500 MiB'")
    return nbytes


def unknown(name: str, known: Iterable[str]) -> str:
    """What is to be said of a name that is none of these."""
    known = sorted(known)
    return f"{name!r} is unknown{did_you_mean(name, known)} (there are {', '.join(known)})"


def complaint(found: Iterable[Any], place: str = "") -> str:
    """What pydantic found wrong with one value, as one phrase; a union brings a complaint for each of its members.

    Args:
        found: What it found.
        place: The name that the value was given by. That of a secret keeps it from being told.
    """
    phrases: dict[str, None] = {}
    for item in found:
        if item["type"] == "missing":
            phrases["is required"] = None
            continue
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        if item["type"] in ("float_type", "int_type"):
            message += _for_text(item["input"])
        # All fields together are no value that somebody wrote.
        phrases[message if phrases or not item["loc"] else f"{_told(item['input'], place)}: {message}"] = None
    return " or ".join(phrases)


def _for_text(value: Any) -> str:
    """What is to be said of a number that YAML takes for text."""
    match = re.fullmatch(r"([-+]?\d+)[eE]([-+]?)(\d+)", value) if isinstance(value, str) else None
    return f" (in YAML it is text without a dot and a sign: {match[1]}.0e{match[2] or '+'}{match[3]})" if match else ""


def _told(value: Any, place: str) -> str:
    if _SECRET.search(place):
        return f"what was given ({type(value).__name__})"
    return _TOKEN.sub("hf_…", brief(value))


def _complaints(error: ValidationError, values: dict[str, Any], kind: type[BaseModel]) -> list[str]:
    """One sentence for each place that pydantic complains about."""
    by_place: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_place.setdefault(_place(item["loc"], values), []).append(item)
    return [
        unknown(place, kind.model_fields)
        if found[0]["type"] == "extra_forbidden"
        else ": ".join(filter(None, (place, complaint(found, place)))) + _nearest(found)
        for place, found in by_place.items()
    ]


def _nearest(found: Iterable[Any]) -> str:
    """Where one of a few words is expected, the one that was probably meant."""
    for item in found:
        if item["type"] == "literal_error" and isinstance(item["input"], str):
            return did_you_mean(item["input"], re.findall(r"'([^']*)'", item["ctx"]["expected"]))
    return ""


def _place(loc: tuple[int | str, ...], values: Any) -> str:
    # pydantic puts the alternatives of a union among the keys (`dict[str,any]`, `[key]`); only what is in the input,
    # or is missing at its top level, is a place that the user knows.
    parts = []
    for i, part in enumerate(loc):
        inside = isinstance(values, dict) and part in values
        if inside or i == 0:
            parts.append(str(part))
            values = values[part] if inside else None
    return ".".join(parts)
