"""Sums that have no order, and how many summands their integers hold."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shardyard.config.rules.reproducible import MOST_MICRO_BATCHES
from shardyard.parallel.fsdp import summable
from shardyard.parallel.reproducible_sums import (
    BITS,
    HEADROOM,
    LEAST_BITS,
    MOST_SUMMANDS,
    bits_below,
    of_integers,
    to_integers,
)


def _numbers(count: int = 1000) -> Tensor:
    """From 1e-12 to 1e12, both signs."""
    draw = torch.Generator().manual_seed(0)
    size = 10.0 ** (24.0 * torch.rand(count, generator=draw, dtype=torch.float64) - 12.0)
    return size * torch.randn(count, generator=draw, dtype=torch.float64)


def test_a_sum_is_the_same_in_any_order_and_right() -> None:
    numbers = _numbers()
    sums = []
    for seed in range(5):
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
        parts = torch.split(numbers[order], 7 + seed)  # ranks that add up their own first
        ranks = [to_integers(part).sum(dim=0) for part in parts]
        sums.append(of_integers(torch.stack(ranks).sum(dim=0)[None]).item())
    assert len(set(sums)) == 1
    exact = sum(Fraction(number) for number in numbers.tolist())
    assert sums[0] == pytest.approx(float(exact), rel=1e-15)
    # a test that cannot fail is none
    rounded = {sum(sorted(numbers.tolist(), key=key)) for key in (float, abs, lambda x: -x)}
    assert len(rounded) > 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**62])
def test_what_is_no_number_makes_its_sum_none_and_no_other(wrong: float) -> None:
    numbers = torch.tensor([[1.0, 2.0], [wrong, 4.0]], dtype=torch.float64)
    total = of_integers(sum(to_integers(row) for row in numbers))  # type: ignore[arg-type]
    assert math.isnan(total[0]) and total[1] == 6.0


def test_losses_of_micro_batches_add_up_in_any_order() -> None:
    losses = torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 1e4
    total = {summable(losses)[order].cumsum(0)[-1].item() for order in (
        torch.arange(5000), torch.arange(5000).flip(0),
    )}  # fmt: skip
    assert len(total) == 1
    assert torch.equal(summable(losses[losses > 16]), losses[losses > 16].double())
    assert (summable(losses) - losses.double()).abs().max() <= 5e-7


@pytest.mark.parametrize("summands", [1, 2, 3, 8, 8192, 8193, MOST_SUMMANDS])
def test_no_sum_wraps(summands: int) -> None:
    bits = bits_below(summands)
    largest = 2 ** (bits + HEADROOM)  # a contribution that just fits, rounded up
    assert summands * largest <= 2**BITS < 2**63
    assert 2 * summands * largest > 2**BITS or bits == BITS, "no bit is given away"
    assert bits >= LEAST_BITS > 24


def test_recipes_and_sums_agree_on_the_most_micro_batches() -> None:
    assert MOST_MICRO_BATCHES == MOST_SUMMANDS


@pytest.mark.parametrize("length", [1, 3, 7, 16, 61, 64, 1000])
def test_kernels_round_an_element_the_same_wherever_a_part_begins(length: int) -> None:
    # a processor takes the last few elements of a part with other instructions
    values = (_numbers(4096) * 1e-12).float()
    scaled = values * 2.0**37
    integers = scaled.round().to(torch.int64) * 12345 + 6789
    sums = (integers.double() * 2.0**-37).float()
    for start in (0, 1, 5, 100):
        part = slice(start, start + length)
        assert torch.equal((values[part].clone() * 2.0**37).round_().to(torch.int64) * 12345 + 6789,
                           integers[part])  # fmt: skip
        assert torch.equal((integers[part].clone().double() * 2.0**-37).float(), sums[part])
        assert torch.equal(scaled[part].clone().square_(), scaled.square()[part])
