"""Which dtypes may become which."""

from __future__ import annotations

import torch

# Casting among these is a matter of rounding; between any other two dtypes values would change their meaning.
_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def may_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of one dtype may become another: real floating point only, never 8-bit codes or integers."""
    return source == target or (source in _PRECISION and target in _PRECISION)


def is_codes(dtype: torch.dtype) -> bool:
    """Whether values of a dtype may stand for something else than themselves, so that no cast may touch them."""
    return dtype not in _PRECISION


def changes_meaning(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a plain copy makes other values of what it copies: of codes, or of complex numbers; or whole numbers.

    Less is refused than by `may_cast`: one integer may be as good as another, and ``float8_e8m0fnu`` holds the powers
    of two that it means (OCP Microscaling Formats Specification 1.0), which is how scales are stored.
    """
    if may_cast(source, target) or source is torch.float8_e8m0fnu:
        return False
    return source in _PRECISION or target in _PRECISION or (source.is_complex and not target.is_complex)


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast loses precision or range.

    bfloat16 and float16 each hold numbers that the other does not.
    """
    if source == target or is_codes(source) or is_codes(target):
        # What a function makes of numbers, or of codes, is no cast.
        return False
    return {source, target} == {torch.bfloat16, torch.float16} or _PRECISION[source] > _PRECISION[target]
