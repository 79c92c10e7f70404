"""Small files of text, beside weights or about them: read whole, but nothing that only lies in such a file's place.

A named pipe would be waited for, and a sparse file of a terabyte would take all memory.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from weightloaders.errors import CheckpointFormatError
from weightloaders.weights.source import FileSource

if TYPE_CHECKING:
    from pathlib import Path

    from weightloaders.weights.source import ByteSource

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 80, 80


def read_small_file(path: Path, limit: int) -> bytes:
    """The content of a file.

    Args:
        path: The file.
        limit: Bytes; a larger file is refused unread.

    Raises:
        SourceNotFoundError: If there is no such file, or it is not a regular one.
        CheckpointFormatError: If it is larger than the limit.
        SourceReadError: If it can't be read.
    """
    return read_small(FileSource(path), limit)


def read_small(source: ByteSource, limit: int) -> bytes:
    """The content of a source; raises as `read_small_file`."""
    if source.size > limit:
        raise CheckpointFormatError(
            f"{source.name} is too large: it has {source.size:,} bytes, where at most {limit:,} make sense",
            file=source.name,
        )
    return source.read(0, source.size)


def read_text(path: Path, limit: int) -> str:
    """The text of a file in UTF-8; raises as `read_small_file`.

    Raises:
        CheckpointFormatError: Also if it is no such text.
    """
    try:
        return read_small_file(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(f"{path} is not UTF-8 text: {error}", file=path) from error


def parse_yaml(text: str) -> Any:
    """The value of a YAML document of plain values, in which no key occurs twice.

    Raises:
        ValueError: If it is not such a document.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, but a key that occurs twice is refused: the first would be lost without a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1} has a key that is no name")
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.YAMLError(f"the key {key.value!r} occurs twice, again in line {key.start_mark.line + 1}")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 -- a subclass of the safe loader
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # What is tagged as a number or a date and is none surfaces as any error of the function that should read it.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def brief(value: Any) -> str:
    """A value for a message, in a few words: aliases in YAML can stand for more than fits in memory."""
    return _short.repr(value)


def is_text(name: str) -> bool:
    """Whether a name can be written in a file: half a surrogate pair, which pickles may hold, can not."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
