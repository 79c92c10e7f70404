"""8-bit floats multiplied by the scales of their blocks, many at a time.

torch converts 8-bit floats one by one. But the bits of a ``float8_e4m3fn`` (OCP 8-bit Floating Point Specification 1.0:
the sign, 4 bits of the exponent with a bias of 7, 3 of the mantissa), moved to the places where a float16 has its own,
are a float16 that is 2 ** -8 of the number, and float16 has a fast way to float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Elements at a time: what they take meanwhile stays in the processor's cache, or near it.
_AT_ONCE = 256 << 10
# Fewer than torch spreads over threads, which would wait for each other after every one of many short operations.
_AT_ONCE_ON_SEVERAL_THREADS = (32 << 10) - 1
_SHIFT = 2.0**8
# The largest number, as its float16; what lies above is NaN.
_LARGEST = 448 / _SHIFT


def can_multiply(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether `multiplied` takes these."""
    return (
        codes.dtype is torch.float8_e4m3fn
        and scales.numel() > 0
        and codes.device.type == scales.device.type == "cpu"
        and codes.dim() == scales.dim() >= 2
        and codes.shape[:-2] == scales.shape[:-2]
        and scales.dtype.is_floating_point
        and bool((scales.float() * _SHIFT).isfinite().all())
    )


def multiplied(codes: torch.Tensor, scales: torch.Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers times scales: exactly ``(codes.float() * scales.float()).to(dtype)``, each scale spread over its block.

    Args:
        codes: ``[..., rows, columns]``, `can_multiply` them.
        scales: One for each block: ``[..., ceil(rows / block[0]), ceil(columns / block[1])]``.
        block: Rows and columns of a block; the last blocks may be smaller.
        dtype: Of the result.
    """
    result = torch.empty(codes.shape, dtype=dtype, device="cpu")
    *_, rows, columns = codes.shape
    if not result.numel():
        return result
    at_once = _AT_ONCE if torch.get_num_threads() == 1 else _AT_ONCE_ON_SEVERAL_THREADS
    height = min(block[0], max(1, at_once // columns))
    half = torch.empty(height * columns, dtype=torch.int16, device="cpu")
    single = torch.empty(height * columns, dtype=torch.float32, device="cpu")
    matrices = zip(*(t.reshape(-1, *t.shape[-2:]) for t in (codes, scales.float() * _SHIFT)), strict=True)
    for matrix, (part, its_scales) in zip(result.view(-1, rows, columns), matrices, strict=True):
        bands = zip(part.split(block[0]), matrix.split(block[0]), its_scales, strict=True)
        for band, target, scale in bands:
            factors = scale.repeat_interleave(block[1])[:columns]
            for piece, place in zip(band.split(height), target.split(height), strict=True):
                count = piece.numel()
                place.copy_(_decoded(piece, half[:count], single[:count]).mul_(factors))
    return result


def _decoded(codes: torch.Tensor, half: torch.Tensor, single: torch.Tensor) -> torch.Tensor:
    """The numbers, divided by `_SHIFT`, in memory of that size."""
    half, single = half.view(codes.shape), single.view(codes.shape)
    # The sign is spread over the upper byte; it belongs to the top, the rest of the code behind the bit that follows.
    half.copy_(codes.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(~0x407F)
    halves = half.view(torch.float16)
    if max(map(abs, map(float, torch.aminmax(halves)))) > _LARGEST:
        return single.copy_(codes).div_(_SHIFT)
    return single.copy_(halves)
