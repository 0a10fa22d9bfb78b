"""Sums of squares: near the exact ones, finite wherever those are, the same however layers lie in memory."""

import math

import pytest
import torch

from spantrain.outer.shard.numerics import sum_of_squares


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_near_the_exact_ones(count, dtype):
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    exact = math.fsum(one * one for one in numbers.to(torch.float64).tolist())
    assert sum_of_squares([numbers]) == pytest.approx(exact, rel=1e-6)


def test_large_numbers_do_not_overflow_and_broken_ones_show():
    numbers = torch.full((10_000,), 1e25)
    assert sum_of_squares([numbers]) == pytest.approx(1e54, rel=1e-6)
    for broken in (math.nan, math.inf):
        numbers[5000] = broken
        assert not math.isfinite(sum_of_squares([numbers]))


@pytest.mark.parametrize("shift", [1, 3, 7, 16])
def test_no_bit_depends_on_where_they_lie(shift):
    numbers = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    elsewhere = torch.zeros(9000 + shift)[shift:].copy_(numbers)
    assert sum_of_squares([elsewhere]) == sum_of_squares([numbers])
