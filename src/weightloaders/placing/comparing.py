"""Whether two sources come to the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightloaders.errors import SourceReadError, WeightLoadersError, summary
from weightloaders.weights.reading import read_tensor, same_values

if TYPE_CHECKING:
    from weightloaders.weights.info import TensorInfo


def agree(a: TensorInfo, b: TensorInfo, dtype: torch.dtype) -> bool:
    """Whether two sources of one parameter come to the same there, bit for bit.

    Args:
        a: One.
        b: The other.
        dtype: The parameter's dtype.

    Raises:
        WeightLoadersError: If one of them can't be read.
    """
    if a.shape != b.shape:
        return False
    if a.is_raw and b.is_raw and a.dtype == b.dtype:
        return same_values(a, b)
    return same_bits(values_of(a).to(dtype), values_of(b).to(dtype))


def values_of(info: TensorInfo) -> torch.Tensor:
    """A tensor, read.

    Raises:
        WeightLoadersError: If it can't be read, in whatever way its reader says so.
    """
    try:
        return read_tensor(info).detach()
    except WeightLoadersError:
        raise
    except Exception as error:
        raise SourceReadError(f"{info.name!r} can't be read: {summary(error)}", tensor=info.name) from error


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits, wherever they lie."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
