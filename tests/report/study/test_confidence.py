"""The interval of a mean step time: its coverage, also where steps are alike."""

import math
import random
from statistics import fmean, stdev

import pytest

from shardyard.report.study.rows import Spread, spread_of


def test_it_is_students_interval_of_the_means_of_ten_stretches() -> None:
    times = [1.0 + 0.01 * (number % 7) for number in range(60)]
    means = [fmean(times[first : first + 6]) for first in range(0, 60, 6)]
    found = spread_of(times)
    assert found is not None
    assert found.freedom == 9
    assert found.error == pytest.approx(stdev(means) / math.sqrt(10) / fmean(times))
    assert found.factor == pytest.approx(math.exp(2.262 * found.error), rel=1e-4)


@pytest.mark.parametrize("likeness", [0.0, 0.5])
def test_nineteen_of_twenty_intervals_hold_the_truth(likeness: float) -> None:
    """Steps that follow each other are alike: an interval of single steps would be too narrow."""
    rng, held, alone, runs = random.Random(1), 0, 0, 400
    for _ in range(runs):
        times, last = [], 0.0
        for _ in range(120):
            last = likeness * last + rng.gauss(0, 0.02)
            times.append(1 + last)
        mean, found = fmean(times), spread_of(times)
        assert found is not None
        held += mean / found.factor <= 1 <= mean * found.factor
        alone += abs(mean - 1) <= 1.98 * stdev(times) / math.sqrt(len(times))
    assert 0.90 * runs <= held <= 0.99 * runs
    if likeness:
        assert alone < 0.80 * runs < held


def test_too_few_steps_have_no_interval() -> None:
    assert spread_of([1.0] * 7) is None
    assert spread_of([1.0] * 8) == Spread(error=0.0, freedom=3)


def test_what_is_over_is_left_out_at_the_beginning() -> None:
    assert spread_of([9.0, *([1.0] * 60)]) == Spread(error=0.0, freedom=9)


def test_the_ratio_of_two_means_is_less_sure_than_either() -> None:
    one, other = Spread(error=0.01, freedom=9), Spread(error=0.02, freedom=9)
    both = one.combined_with(other)
    assert both.error == pytest.approx(math.hypot(0.01, 0.02))
    assert 9 < both.freedom < 18  # Welch: between the smaller and the sum
    sure = Spread(error=0.0, freedom=9)
    assert sure.combined_with(sure) == sure


def test_degrees_of_freedom_between_two_numbers_are_those_below() -> None:
    """Welch's are seldom whole; the wider of the two intervals is the safe one."""
    between, below = Spread(error=0.01, freedom=9.9), Spread(error=0.01, freedom=9)
    assert between.factor == below.factor
