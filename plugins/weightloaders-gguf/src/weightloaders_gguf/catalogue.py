"""From the files of a model to its `Weights`: headers held against each other, tensors named and arranged."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

from weightloaders import Weights
from weightloaders.errors import CheckpointFormatError, DuplicateTensorError, IncompleteCheckpointError
from weightloaders.weights.threads import in_parallel
from weightloaders_gguf.arranging import Properties, arranged
from weightloaders_gguf.header import Header, read_header
from weightloaders_gguf.made import MadeSource
from weightloaders_gguf.names import ARCHITECTURES, HELPERS, Names, split
from weightloaders_gguf.parts import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightloaders import ByteSource, TensorInfo
    from weightloaders_gguf.files import Files

Naming = Literal["transformers", "gguf"]


def headers_of(files: Files) -> list[tuple[ByteSource, Header]]:
    """The headers of a model's files, which are parts of one.

    Raises:
        SourceError: If a file is not what it should be, or is none of this model's.
    """
    sources = [files.listing.open(name) for name in files.names]
    headers = in_parallel(read_header, sources)
    _check_set(files.names, headers)
    return list(zip(sources, headers, strict=True))


def _check_set(names: Sequence[str], headers: Sequence[Header]) -> None:
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        count, at = _stated(header, "split.count") or 0, _stated(header, "split.no")
        if len(names) == 1 and count not in (0, 1):
            raise IncompleteCheckpointError(
                f"{header.file} is part {at or 0} (from 0) of {count}, "
                "but its name does not say how the others are called",
                file=header.file,
                hint=f"give it back its name, which ends like -00001-of-{count:0>5}.gguf",
            )
        if len(names) > 1 and (count, at) != (len(names), number):
            what = "no part of anything" if at is None else f"part {at} (from 0) of {count}"
            raise CheckpointFormatError(
                f"{name} should be part {number} (from 0) of {len(names)}, but says that it is {what}",
                file=header.file,
                hint="a file of another model lies in its place: fetch it again",
            )
    total, found = _stated(headers[0], "split.tensors.count"), sum(len(header.tensors) for header in headers)
    if len(names) > 1 and total is not None and total != found:
        raise CheckpointFormatError(
            f"{names[0]} says that the parts have {total} tensors together, but they have {found}",
            file=headers[0].file,
            hint="parts of different models lie side by side: fetch them again",
        )


def _stated(header: Header, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise CheckpointFormatError(
            f"{header.file} says {key}: {value!r}, where a whole number is needed",
            file=header.file,
            hint="split the model again with llama.cpp's llama-gguf-split",
        )
    return value


def catalogue(files: Files, names: Naming = "transformers") -> Weights:
    """What the files of a model hold. Nothing but their headers is read.

    Args:
        files: The files.
        names: ``"transformers"``: each tensor as transformers names and arranges it, as far as the architecture is
            known. ``"gguf"``: as the file has it.

    Raises:
        SourceError: If a file is not what it should be.
    """
    found = headers_of(files)
    # What is said of the model is said in the first part.
    metadata = found[0][1].metadata
    properties = Properties(found[0][1].file, metadata)
    table = ARCHITECTURES.get(properties.architecture) if names == "transformers" else None
    parts = list(_parts(found))
    notes: list[str] = []
    if table is None:
        infos = [part.numbers().whole(part.name, part.shape) for part in parts]
        if names == "transformers":
            known = ", ".join(sorted(ARCHITECTURES))
            notes.append(
                f"{properties.architecture or 'no architecture'!r} is not among those whose names in transformers are "
                f"known ({known}), so tensors have the file's own names"
            )
    else:
        infos = list(_arranged(parts, table, properties, notes))
    texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
    return Weights.describe(infos, metadata=texts, skipped_files=files.skipped, notes=notes)


def _parts(found: Sequence[tuple[ByteSource, Header]]) -> Iterator[Part]:
    seen: dict[str, str] = {}
    for source, header in found:
        made = MadeSource(source)
        for stored in header.tensors:
            if stored.name in seen:
                raise DuplicateTensorError(
                    f"{header.file} and {seen[stored.name]} both have a tensor named {stored.name!r}",
                    file=header.file,
                    tensor=stored.name,
                )
            seen[stored.name] = header.file
            yield Part(source, made, header, stored)


def _arranged(parts: Sequence[Part], table: Names, properties: Properties, notes: list[str]) -> Iterator[TensorInfo]:
    left_out = _left_out(properties)
    groups: defaultdict[str, list[Part]] = defaultdict(list)
    helpers = []
    for part in parts:
        layer = split(part.name)[1]
        if HELPERS.fullmatch(part.name) or (layer is not None and layer in left_out):
            helpers.append(part.name)
        else:
            # What transformers has no name for keeps its own, and is then reported as unexpected.
            groups[table.of(part.name) or part.name].append(part)
    if helpers:
        rest = f" and {len(helpers) - 3} more" if len(helpers) > 3 else ""
        notes.append(f"left out, for transformers has no use for it: {', '.join(helpers[:3])}{rest}")
    for name, group in groups.items():
        yield arranged(group, name, properties)


def _left_out(properties: Properties) -> range:
    """Layers that predict several tokens at once, which transformers' models don't have."""
    if properties.architecture not in ("qwen35", "qwen35moe"):
        return range(0)
    layers = properties.number("block_count")
    return range(layers - min(layers, properties.number("nextn_predict_layers", 0)), layers)


def described(header: Header) -> dict[str, Any]:
    """The metadata of a header, arrays as lists."""
    from weightloaders_gguf.header import Array

    return {key: value.values if isinstance(value, Array) else value for key, value in header.metadata.items()}
