"""The index of a sharded checkpoint (``model.safetensors.index.json``): which tensor is in which file.

The layout is the one that transformers writes: an object with ``weight_map`` (tensor name to file name) and
``metadata``; see https://huggingface.co/docs/transformers/big_models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from weightloaders.errors import CheckpointFormatError, UnsafeCheckpointError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

# Ten times the largest index in the wild (some 100,000 tensors).
MAX_INDEX_BYTES = 128 << 20


@dataclass(frozen=True)
class Index:
    """What an index says.

    Attributes:
        name: The index's own file name.
        weight_map: Tensor name to the file it is in, as a relative path with forward slashes.
    """

    name: str
    weight_map: Mapping[str, str]

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files it names, in the order of their first mention."""
        return tuple(dict.fromkeys(self.weight_map.values()))

    def tensors_in(self, files: Container[str]) -> list[str]:
        """Its tensors that are in these files."""
        return [name for name, file in self.weight_map.items() if file in files]


def parse_index(raw: bytes, name: str, file: str) -> Index:
    """Read an index, and refuse one that is malformed or leads out of its folder.

    Args:
        raw: The content.
        name: The file name, relative to the checkpoint's folder.
        file: The path or address, for messages.

    Raises:
        CheckpointFormatError: If it is no JSON, has no ``weight_map``, or maps a name twice or to no name.
        UnsafeCheckpointError: If it names a file outside the folder.
    """
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointFormatError(
            f"{name} is a Git LFS pointer, not an index", file=file, hint="fetch the files themselves: git lfs pull"
        )
    try:
        content = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except _DuplicateKeyError as error:
        raise CheckpointFormatError(f"{name} has the entry {error.args[0]!r} twice", file=file) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(
            f"{name} is not readable as JSON: {error}",
            file=file,
            hint="it may be truncated, or an error page; fetch it again",
        ) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointFormatError(f"{name} has no 'weight_map' from tensor names to file names", file=file)
    # Some writers list the file's own metadata as if it were a tensor.
    weight_map.pop("__metadata__", None)
    if not weight_map:
        raise CheckpointFormatError(f"the 'weight_map' of {name} names no tensors", file=file)
    # Many tensors name one file, so each file's name is looked at once.
    checked: dict[Any, str] = {}
    for tensor, value in weight_map.items():
        # Only text is looked up: what else there may be can't all be hashed.
        if type(value) is not str or value not in checked:
            checked[value] = _relative(value, tensor, name, file)
    return Index(name, {tensor: checked[value] for tensor, value in weight_map.items()})


class _DuplicateKeyError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def _relative(value: Any, tensor: str, name: str, file: str) -> str:
    if not isinstance(value, str) or value.strip() in ("", "."):
        raise CheckpointFormatError(
            f"{name} maps {tensor!r} to {value!r}, not to a file name", file=file, tensor=tensor
        )
    # Judged by the rules of every system, because an index travels: a backslash separates on Windows.
    path = PurePosixPath(value.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or PureWindowsPath(value).drive or "\0" in value:
        raise UnsafeCheckpointError(
            f"{name} says that tensor {tensor!r} is in {value!r}, which is outside the checkpoint's folder",
            file=file,
            tensor=tensor,
            hint="an index may only name files beside it; do not load this checkpoint unless you know who wrote it",
        )
    return str(path)
