"""8-bit floats times the scales of their blocks: what plain torch makes of them, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightloaders.mapping import float8
from weightloaders.mapping.float8 import can_multiply, multiplied

EVERY_CODE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def by_torch(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    rows, columns = codes.shape[-2:]
    spread = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :rows, :columns]
    return (codes.float() * spread).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    number = ~a.isnan()
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a[number].view(bits), b[number].view(bits))
    )


@settings(deadline=None, max_examples=150)
@given(
    data=st.data(),
    shape=st.one_of(*[st.tuples(*[st.integers(0, 9)] * dims) for dims in (2, 3, 4)]),
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    at_once=st.integers(1, 40),
)
def test_blocks_of_any_size_are_multiplied_as_torch_does_it(
    data: st.DataObject,
    shape: tuple[int, ...],
    block: tuple[int, int],
    kind: torch.dtype,
    dtype: torch.dtype,
    at_once: int,
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    codes = EVERY_CODE[torch.randint(0, data.draw(st.sampled_from([100, 256])), shape, generator=generator)]
    grid = [math.ceil(size / by) for size, by in zip(shape[-2:], block, strict=True)]
    scales = torch.randn((*shape[:-2], *grid), generator=generator).exp().to(kind)
    if not scales.numel():
        assert not can_multiply(codes, scales)
        return
    assert can_multiply(codes, scales)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "_AT_ONCE", at_once)
        patch.setattr(float8, "_AT_ONCE_ON_SEVERAL_THREADS", at_once)
        assert same(multiplied(codes, scales, block, dtype), by_torch(codes, scales, block, dtype))


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-140, 2.0**-126, 1e-3, -1.0, 0.0, 2.0**119])
def test_every_code_is_multiplied_exactly_by_small_and_by_large_scales(scale: float) -> None:
    # Without NaN, and with it.
    for codes in (EVERY_CODE[:127].view(1, 127), EVERY_CODE.view(16, 16)):
        scales = torch.full((1, 1), scale)
        assert can_multiply(codes, scales)
        for dtype in (torch.float32, torch.bfloat16):
            result = multiplied(codes, scales, codes.shape, dtype)
            assert same(result, by_torch(codes, scales, tuple(codes.shape), dtype))


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (EVERY_CODE.view(16, 16), torch.full((1, 1), 2.0**120)),
        (EVERY_CODE.view(16, 16), torch.full((1, 1), math.nan)),
        (EVERY_CODE.view(16, 16), torch.full((1, 1), 127, dtype=torch.uint8)),
        (EVERY_CODE.view(16, 16), torch.ones(1)),
        (EVERY_CODE.view(1, 16, 16), torch.ones(2, 1, 1)),
        (EVERY_CODE.view(16, 16), torch.ones(1, 1, device="meta")),
        (EVERY_CODE.view(torch.float8_e5m2).view(16, 16), torch.ones(1, 1)),
        (EVERY_CODE.view(torch.int8).view(16, 16), torch.ones(1, 1)),
    ],
)
def test_what_would_come_out_differently_is_left_to_others(codes: torch.Tensor, scales: torch.Tensor) -> None:
    assert not can_multiply(codes, scales)


def test_a_matrix_of_usual_size_is_multiplied() -> None:
    codes = EVERY_CODE[torch.randint(0, 127, (1000, 3000), generator=torch.Generator().manual_seed(0))]
    scales = torch.rand(8, 24)
    assert same(
        multiplied(codes, scales, (128, 128), torch.bfloat16), by_torch(codes, scales, (128, 128), torch.bfloat16)
    )
