"""The order of samples: a permutation for every length, shuffled, and the same for ever."""

import math
from collections import Counter

import numpy as np
import pytest

from shardyard.data.order import permute, permute_many, sample_index, sample_indices

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 63, 64, 65, 97, 128, 1000, 1021, 1024]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_every_number_appears_exactly_once(length: int, key: int) -> None:
    numbers = [permute(position, length, key=key) for position in range(length)]
    assert sorted(numbers) == list(range(length))


@pytest.mark.parametrize("length", [*LENGTHS, 2**31 + 11, 2**53 + 1, 2**62])
def test_the_fast_form_equals_the_slow_one(length: int) -> None:
    positions = np.unique(np.linspace(0, length - 1, 50, dtype=np.int64).clip(0, length - 1))
    expected = [permute(position, length, key=7) for position in positions.tolist()]
    assert permute_many(positions, length, key=7).tolist() == expected


def test_a_large_length_is_permuted_too() -> None:
    assert sorted(permute_many(np.arange(100_003), 100_003, key=5).tolist()) == list(range(100_003))


@pytest.mark.heavy
def test_all_orders_of_three_are_about_equally_frequent() -> None:
    orders = Counter(
        tuple(permute(position, 3, key=key) for position in range(3)) for key in range(1200)
    )
    assert len(orders) == 6
    # 1,200 draws of 6: 200 each, standard deviation 12.9; 4.5 of them either way
    assert all(142 < count < 258 for count in orders.values()), orders


def test_positions_and_numbers_are_not_correlated() -> None:
    length = 10_000
    order = permute_many(np.arange(length), length, key=11)
    for lag in (0, 1, 2, 64):
        shifted = np.roll(np.arange(length) if lag == 0 else order, lag)
        correlation = float(np.corrcoef(order, shifted)[0, 1])
        assert abs(correlation) < 4.5 / math.sqrt(length), lag  # noise: 1 / sqrt(length)


def test_each_tenth_of_the_epoch_draws_from_the_whole_corpus() -> None:
    length = 10_000
    tenths = permute_many(np.arange(length), length, key=3).reshape(10, -1) // (length // 10)
    observed = np.array([np.bincount(row, minlength=10) for row in tenths])
    chi_square = ((observed - 100) ** 2 / 100).sum()
    # 81 degrees of freedom: mean 81, standard deviation 12.7; without replacement 0.9 of it
    assert 35 < chi_square < 135


def test_the_order_never_changes() -> None:
    """Pinned on 2026-11-21: another order would make a resumed run read samples twice."""
    assert [permute(position, 10, key=0) for position in range(10)] == [
        9,
        0,
        3,
        4,
        8,
        2,
        5,
        1,
        6,
        7,
    ]
    stream = [sample_index(position, 7, seed=1234) for position in range(14)]
    assert stream == [4, 2, 1, 3, 6, 0, 5, 0, 6, 3, 5, 2, 1, 4]
    assert permute(2**40 + 5, 2**50 + 3, key=42) == 828508353100993


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    epochs = [[sample_index(e * 50 + p, 50, seed=0) for p in range(50)] for e in range(4)]
    other = [sample_index(p, 50, seed=1) for p in range(50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in [*epochs, other])
    assert len({tuple(epoch) for epoch in [*epochs, other]}) == 5


def test_the_stream_goes_over_the_border_of_an_epoch() -> None:
    positions = np.arange(40, 120)
    expected = [sample_index(position, 50, seed=9) for position in positions.tolist()]
    assert sample_indices(positions, 50, seed=9).tolist() == expected
