"""Partial sums of squares: exact enough, the same in any chunks, and non-finite values show."""

import math

import pytest
import torch

from zft.optim import NORM_BLOCK, sumsq_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 3, 1023, 1025, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK - 1])
def test_against_float64(dtype, numel):
    grad = (torch.randn(numel) * torch.logspace(-18, 18, numel)).to(dtype)
    sums = sumsq_blocks(grad)
    assert sums.shape == (-(-numel // NORM_BLOCK),) and sums.dtype == torch.float64
    expected = [math.fsum((part.double() ** 2).tolist()) for part in grad.split(NORM_BLOCK)] if numel else []
    assert sums.tolist() == pytest.approx(expected, rel=1e-13)


def test_blocks_do_not_depend_on_the_call():
    grad = torch.randn(5 * NORM_BLOCK + 9)
    parts = [sumsq_blocks(part) for part in grad.split(2 * NORM_BLOCK)]
    assert torch.equal(torch.cat(parts), sumsq_blocks(grad))
    out = torch.empty(6, dtype=torch.float64)
    assert sumsq_blocks(grad, out) is out and torch.equal(out, torch.cat(parts))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1023, 70_000, 99_999])
def test_one_bad_element_shows(bad, dtype, place):
    grad = torch.ones(100_000, dtype=dtype)
    grad[place] = bad
    assert sumsq_blocks(grad).isfinite().tolist() == [place >= NORM_BLOCK, place < NORM_BLOCK]


def test_the_largest_floats_do_not_overflow():
    assert sumsq_blocks(torch.full((1000,), 3e38)).item() == pytest.approx(1000 * 9e76, rel=1e-6)


def test_out_must_fit():
    with pytest.raises(AssertionError, match=r"float64 \[1\]"):
        sumsq_blocks(torch.ones(5), torch.empty(2, dtype=torch.float64))
