"""`Axes`: the option that says how the parts of tensor-parallel ranks are put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightloaders.errors import OptionsError, RuleError
from weightloaders.mapping.patterns import Pattern

if TYPE_CHECKING:
    from weightloaders.weights.tensor_parallel import Way

_ALLOWED = (
    "a value is the dimension that was split, {'axis': 0, 'sections': [4, 1, 1]} for a fused tensor, 'same' where "
    "every part holds the whole, or 'first' to take that of the first part"
)


class Axes:
    """How the parts of each tensor are put together, by name.

    Args:
        axes: Name pattern -> the dimension that was split, ``{"axis": ..., "sections": [...]}``, ``"same"`` or
            ``"first"``. A pattern matches whole segments, side by side anywhere in a name; the first that matches
            counts.

    Raises:
        OptionsError: If a pattern or a value is none.
    """

    def __init__(self, axes: Mapping[str, Any] | None) -> None:
        self._ways: list[tuple[str, Any, Way]] = []
        for pattern, value in (axes or {}).items():
            try:
                self._ways.append((pattern, Pattern(pattern).anywhere, _way(pattern, value)))
            except RuleError as error:
                raise OptionsError(f"axes: {error.message}", hint=error.hint) from error
        self._used: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._ways)

    def way_of(self, name: str) -> Way | None:
        """How the parts of the tensor of this name are put together; None if no pattern matches."""
        for pattern, regex, way in self._ways:
            if regex.search(name + "."):
                self._used.add(pattern)
                return way
        return None

    def notes(self) -> list[str]:
        """Remarks for the report, after all names were asked for: patterns that counted for none."""
        return [f"axes: {pattern!r} matches no tensor" for pattern, *_ in self._ways if pattern not in self._used]


def _way(pattern: str, value: Any) -> Way:
    from weightloaders.weights.tensor_parallel import Split

    if value == "same":
        return "same"
    if value == "first":
        return "first"
    axis, sections = value, [1]
    if isinstance(value, Mapping) and value.keys() <= {"axis", "sections"}:
        axis, sections = value.get("axis"), value.get("sections", [1])
    if not _is_number(axis) or not _are_sizes(sections):
        raise OptionsError(f"axes: {pattern!r} can't be put together by {value!r}", hint=_ALLOWED)
    return Split(axis, tuple(sections))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(size) and size > 0 for size in value)
