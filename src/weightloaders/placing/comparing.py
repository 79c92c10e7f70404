"""Whether two sources come to the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
        SourceError: If one of them can't be read.
    """
    if a.shape != b.shape:
        return False
    if a.is_raw and b.is_raw and a.dtype == b.dtype:
        return same_values(a, b)
    return same_bits(read_tensor(a).to(dtype), read_tensor(b).to(dtype))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits, wherever they lie.

    Tensors on meta have no values, and so none that differ.
    """
    if "meta" in (a.device.type, b.device.type):
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
