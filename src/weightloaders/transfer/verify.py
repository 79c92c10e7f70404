"""Verification on request: finite values after a load, checksums of the files before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightloaders.errors import ConfigError, LoadError, SourceReadError
from weightloaders.transfer.copying import boxes_of
from weightloaders.weights.checksums import Checksum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightloaders.targets import Target
    from weightloaders.weights.info import TensorInfo
    from weightloaders.weights.source import ByteSource

_ELEMENTS_AT_ONCE = 1 << 18


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


def check_sha256(infos: Iterable[TensorInfo], described_by: Iterable[ByteSource] = ()) -> dict[str, str]:
    """Hold each file that tensors come from against the checksum that is known for it; see `Checksum.known`.

    Args:
        infos: The tensors.
        described_by: Files that say where they are, which are compared where a checksum is known.

    Returns:
        File -> its checksum.

    Raises:
        ConfigError: If it isn't known which file a tensor comes from, so that nothing could be checked.
        SourceReadError: If a file has another checksum, or none is known for it. Nothing was touched.
        SourceError: If what should list the checksums is no such list.
    """
    infos = list(infos)
    from_nowhere = next((info.name for info in infos if info.numel and not info.origins), None)
    if from_nowhere is not None or not infos:
        raise ConfigError(
            "verify='sha256': this loader does not say in which files its tensors lie, so there is nothing to check",
            tensor=from_nowhere,
            hint="load without verify, or check the files before",
        )
    sources = {origin.name: origin for info in infos for origin in info.origins}
    expected = {source: known for source in described_by if (known := Checksum.known(source.name)) is not None}
    for source in sources.values():
        known = Checksum.known(source.name)
        if known is None:
            raise SourceReadError(
                f"verify='sha256': no checksum is known for {source.name}",
                file=source.name,
                hint="put <file>.sha256 beside it or SHA256SUMS into its folder, or load without verify",
            )
        expected[source] = known
    for source, known, found in Checksum.mismatches(expected):
        raise SourceReadError(
            f"verify='sha256': {source.name} has the checksum {found}, not {known.digest}",
            file=source.name,
            hint="the file is damaged or was exchanged; fetch it again",
        )
    return {source.name: known.digest for source, known in expected.items()}
