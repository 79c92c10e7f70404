"""`Pattern`: a dotted pattern that matches names by whole segments."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from weightloaders.errors import RuleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# While rules go over a name, the segments that a rule wrote are moved up to this plane of private characters, which no
# checkpoint's names contain. There wildcards still match them, but literal text doesn't.
_HIDING_PLACE = 0xF0000
_HIDEABLE = 0xF000
_HIDDEN = "\U000f0000-\U000fffff"
_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)\}")


def hidden(text: str) -> str:
    """Text that a rule wrote, as no literal text of a later rule matches it."""
    return "".join(chr(ord(c) + _HIDING_PLACE) if ord(c) < _HIDEABLE else c for c in text)


def shown(text: str) -> str:
    """Text with all that was hidden as it is to be read."""
    if text.isascii():
        return text
    return "".join(chr(ord(c) - _HIDING_PLACE) if _HIDING_PLACE <= ord(c) < 0x100000 else c for c in text)


class Pattern:
    """A dotted pattern, compiled.

    ``*`` stands for one segment, ``**`` for any run of them, ``{name}`` captures a segment or a part of one.

    Args:
        text: The pattern.

    Attributes:
        names: What its wildcards are called, in order: captures by their name, ``*`` and ``**`` by their number.

    Raises:
        RuleError: If it is malformed.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise RuleError(f"a pattern is a string, not {text!r}", hint="in YAML, put quotes around it")
        self.text = text
        self.segments = tuple(text.split(".")) if text else ()
        self.names: list[str] = []
        if "" in self.segments:
            raise RuleError(f"the pattern {text!r} has an empty segment", hint="leave out dots at its ends")
        # Names are matched with a dot at their end, so that every segment brings its own.
        self._chunks = self._compiled_chunks()

    def _compiled_chunks(self) -> list[str]:
        """The segments as regular expressions, cut before each ``**``."""
        chunks = [""]
        for segment in self.segments:
            if segment == "**":
                chunks.append(self._numbered(r"(?:[^.]*\.)*?"))
            elif segment == "*":
                chunks[-1] += self._numbered(r"[^.]*") + r"\."
            else:
                chunks[-1] += self._literal(segment) + r"\."
        return chunks

    def _numbered(self, regex: str) -> str:
        self.names.append(str(len(self.numbered) + 1))
        return f"({regex})"

    def _literal(self, segment: str) -> str:
        parts = _CAPTURE.split(segment)
        for text in parts[::2]:
            if "*" in text:
                raise RuleError(
                    f"'*' stands for a whole segment, so {segment!r} in the pattern {self.text!r} means nothing",
                    hint="capture a part of a segment by name, e.g. 'block{i}'",
                )
            if "{" in text or "}" in text:
                raise RuleError(
                    f"the braces in {segment!r} of the pattern {self.text!r} hold no name",
                    hint="a capture is a word in braces, e.g. '{i}'",
                )
        for name in parts[1::2]:
            if name in self.names:
                raise RuleError(f"the pattern {self.text!r} captures {{{name}}} twice")
            self.names.append(name)
        # A part of a segment can be captured only where its text may be seen.
        if _CAPTURE.fullmatch(segment):
            return "([^.]+)"
        # What a capture ends at is found once and kept, as behind a `**`; only the last goes on to the segment's end.
        captures = [f"([^.{_HIDDEN}]+?){re.escape(text)}" for text in parts[2::2]]
        *middle, last = captures or [""]
        return re.escape(parts[0]) + "".join(f"(?>{capture})" for capture in middle) + last

    @property
    def numbered(self) -> list[str]:
        """The wildcards without a name, in order."""
        return [name for name in self.names if name.isdecimal()]

    def _regex(self, chunks: Sequence[str]) -> str:
        # If anything matches, then what comes first behind a `**` does too, unless the end is still to be met. So no
        # earlier choice need ever be taken back, and matching stays linear for any number of `**`.
        first, *middle = chunks
        return first + "".join(f"(?>{chunk})" for chunk in middle)

    @functools.cached_property
    def literals(self) -> frozenset[str]:
        """The segments that a name must have as they stand."""
        return frozenset(s for s in self.segments if "*" not in s and "{" not in s)

    @functools.cached_property
    def whole(self) -> re.Pattern[str]:
        """Matches a whole name (with its final dot)."""
        *chunks, last = self._chunks
        body = self._regex(chunks) if chunks else ""
        return re.compile(rf"{body}{last}\Z", re.DOTALL)

    @functools.cached_property
    def front(self) -> re.Pattern[str]:
        """Matches the front of a name, by whole segments."""
        return re.compile(self._regex(self._chunks), re.DOTALL)

    @functools.cached_property
    def anywhere(self) -> re.Pattern[str]:
        """Matches segments side by side anywhere in a name."""
        first, *middle = self._chunks
        # As if a `**` stood in front, so that here too what is found first is kept.
        return re.compile(rf"\A(?>(?:[^.]*\.)*?{first})" + "".join(f"(?>{chunk})" for chunk in middle), re.DOTALL)

    def values(self, match: re.Match[str]) -> dict[str, str]:
        """What each wildcard took."""
        return dict(zip(self.names, (group.removesuffix(".") for group in match.groups()), strict=True))

    def filled(self, values: Mapping[str, str], *, hide: bool = False) -> str:
        """The pattern with its wildcards replaced; those without a value stay as they stand.

        Args:
            values: What each stands for, by name or number.
            hide: Hide the segments that the pattern itself writes.
        """
        return ".".join(self._filled_segments(values, hide))

    def _filled_segments(self, values: Mapping[str, str], hide: bool) -> Iterator[str]:
        numbers = iter(self.numbered)
        for segment in self.segments:
            capture = _CAPTURE.fullmatch(segment)
            if segment in ("*", "**"):
                value = values.get(next(numbers), segment)
                # `**` may have taken nothing.
                if value or segment == "*":
                    yield value
            elif capture is not None:
                yield values.get(capture[1], segment)
            else:
                written = _CAPTURE.sub(lambda match: values.get(match[1], match[0]), segment)
                yield hidden(written) if hide else written


class PatternIndex:
    """Tells which of many patterns may match a name, so that not every one has to be tried on every name.

    Each pattern is kept under one segment that a name must have for it to match: the one that fewest of the others
    need. What needs no segment as it stands, a regular expression for one, may always match.

    Args:
        patterns: The patterns; None for what isn't one.
    """

    def __init__(self, patterns: Sequence[Pattern | None]) -> None:
        self._anywhere: list[int] = []
        by_segment: dict[str, list[int]] = defaultdict(list)
        literals = [sorted(pattern.literals) if pattern else [] for pattern in patterns]
        needed = Counter(segment for segments in literals for segment in segments)
        for at, segments in enumerate(literals):
            kept = by_segment[min(segments, key=needed.__getitem__)] if segments else self._anywhere
            kept.append(at)
        self._by_segment = dict(by_segment)

    def candidates(self, name: str) -> list[int]:
        """The positions of those that may match, in order."""
        if not self._by_segment:
            return self._anywhere
        found = [kept for segment in name.split(".") if (kept := self._by_segment.get(segment)) is not None]
        return sorted({*self._anywhere, *itertools.chain.from_iterable(found)}) if found else self._anywhere
