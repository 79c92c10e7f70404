"""`Provenance`: where a parameter's bytes came from, and what they came to; and the manifest of a whole load.

A manifest says what does not differ from one load of the same files to the next, and nothing else: it can be signed,
kept, and held against another.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MANIFEST_FORMAT = "weightloaders-manifest"
MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the source that a parameter was made of.

    Attributes:
        tensor: Its name there.
        file: The file or address that it lies in; None where nobody says.
        extents: Offset and length of its bytes there, in bytes; empty where they don't lie raw.
    """

    tensor: str
    file: str | None = None
    extents: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a parameter came from, and what it came to.

    Attributes:
        dtype: As the model has it, e.g. ``"bfloat16"``.
        shape: As the model has it.
        sha256: Of its elements as loaded, in row-major order, little-endian. Of a parameter that lies in its file as it
            does in the model, that is the sha256 of those bytes of the file.
        parts: The tensors it was made of; empty where code of others filled it.
        rules: The rules by which it was made of them.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    parts: tuple[Part, ...] = ()
    rules: tuple[str, ...] = ()


def manifest(provenance: Mapping[str, Provenance], tied: Mapping[str, str], files: Mapping[str, str]) -> str:
    """The document of a load; the same bytes for the same load, on any machine.

    Args:
        provenance: Parameter -> where it came from.
        tied: Parameter -> the one that it is one with.
        files: File -> what it was found to come to before the load.
    """
    paths = {*files, *(part.file for found in provenance.values() for part in found.parts if part.file)}
    names = _names(paths)
    document = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "files": {names[path]: digest for path, digest in files.items()},
        "parameters": {
            name: {
                "dtype": found.dtype,
                "shape": list(found.shape),
                "sha256": found.sha256,
                "from": [_part(part, names) for part in found.parts],
            }
            for name, found in provenance.items()
        },
        "tied": dict(tied),
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _part(part: Part, names: Mapping[str, str]) -> dict[str, Any]:
    file = None if part.file is None else names[part.file]
    return {"tensor": part.tensor, "file": file, "extents": [list(extent) for extent in part.extents]}


def _names(paths: Iterable[str]) -> dict[str, str]:
    """Each path relative to the folder that all of them lie in: where that is, is no part of what was loaded."""
    split = {path: path.replace(os.sep, "/").split("/") for path in paths}
    folders = [parts[:-1] for parts in split.values()]
    depth = 0
    while folders and all(len(folder) > depth and folder[depth] == folders[0][depth] for folder in folders):
        depth += 1
    return {path: "/".join(parts[depth:]) for path, parts in split.items()}
