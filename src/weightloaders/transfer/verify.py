"""Verification on request: finite values after a load, checksums of the files before it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weightloaders.errors import ConfigError, LoadError, SourceReadError
from weightloaders.transfer.copying import boxes_of
from weightloaders.weights.folder import real_path
from weightloaders.weights.texts import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 24
_ELEMENTS_AT_ONCE = 1 << 18
# A line takes a hundred bytes, so this lists far more files than any checkpoint has.
_MAX_LIST_BYTES = 1 << 24


def check_finite(targets: Iterable[Target]) -> None:
    """Raise `LoadError` naming the parameters that hold NaN or infinity."""
    bad, written = [], []
    for target in targets:
        written.append(target.name)
        tensor = target.tensor.detach()
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        if not all(_is_finite(tensor[box]) for box in boxes_of(tensor, _ELEMENTS_AT_ONCE)):
            bad.append(target.name)
    if bad:
        raise LoadError(
            f"verify='finite': {len(bad)} parameters hold NaN or infinity: {', '.join(bad[:8])}",
            tensor=bad[0],
            written=tuple(written),
            hint="the checkpoint is damaged, or a cast overflowed; load it in the dtype it is stored in",
        )


def _is_finite(part: torch.Tensor) -> bool:
    # Codes of 8 bits have no isfinite of their own.
    part = part.float() if part.element_size() == 1 else part
    # Nothing is faster than a sum, and one with an infinity or NaN is never finite. It may overflow itself, though.
    return bool(part.sum().isfinite()) or bool(torch.isfinite(part).all())


def check_sha256(infos: Iterable[TensorInfo]) -> dict[str, str]:
    """Hold each file that tensors come from against the sha256 that is known for it.

    Known are: the blob's name in the hub's cache, ``<file>.sha256`` beside the file, and ``SHA256SUMS`` in its folder.

    Returns:
        File -> its sha256.

    Raises:
        ConfigError: If it isn't known which file a tensor comes from, so that nothing could be checked.
        SourceReadError: If a file has another sha256, or none is known for it. Nothing was touched.
        SourceError: If what should list the checksums is no text file.
    """
    infos = list(infos)
    from_nowhere = next((info.name for info in infos if info.numel and not info.extents), None)
    if from_nowhere is not None or not infos:
        raise ConfigError(
            "verify='sha256': this loader does not say in which files its tensors lie, so there is nothing to check",
            tensor=from_nowhere,
            hint="load without verify, or check the files before",
        )
    sources = {origin.name: origin for info in infos for extent in info.extents for origin in (extent.source.origin,)}
    found = {}
    for source in sources.values():
        expected = expected_sha256(Path(source.name))
        if expected is None:
            raise SourceReadError(
                f"verify='sha256': no checksum is known for {source.name}",
                file=source.name,
                hint="put <file>.sha256 beside it or SHA256SUMS into its folder, or load without verify",
            )
        digest = hashlib.sha256()
        for at in range(0, source.size, _CHUNK):
            digest.update(source.read(at, min(_CHUNK, source.size - at)))
        if digest.hexdigest() != expected:
            raise SourceReadError(
                f"verify='sha256': {source.name} has the checksum {digest.hexdigest()}, not {expected}",
                file=source.name,
                hint="the file is damaged or was exchanged; fetch it again",
            )
        found[source.name] = expected
    return found


def expected_sha256(path: Path) -> str | None:
    """The sha256 that is known for a file, if any is.

    Raises:
        SourceError: If a file that should say it can't be read.
    """
    resolved = real_path(path).name
    if _SHA256.fullmatch(resolved):
        return resolved
    for manifest in (path.parent / f"{path.name}.sha256", path.parent / "SHA256SUMS"):
        if not os.path.lexists(manifest):
            continue
        for line in read_text(manifest, _MAX_LIST_BYTES).splitlines():
            digest, _, name = line.strip().partition(" ")
            alone = manifest.name != "SHA256SUMS" and not name.strip()
            if _SHA256.fullmatch(digest) and (alone or name.strip().lstrip("*") == path.name):
                return digest
    return None
