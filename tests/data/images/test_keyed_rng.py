"""Draws of a sample: alike, apart from each other, and of the distributions that they claim."""

import math

import numpy as np
import pytest

from shardyard.data.order import KeyedRng, RngPurpose


def _shares(place: RngPurpose, number: int, samples: int) -> np.ndarray:
    return np.array([KeyedRng(7, 3, sample).uniform(place, number) for sample in range(samples)])


def _distance(drawn: np.ndarray, shares: np.ndarray) -> float:
    """Kolmogorov and Smirnov's, times the root of the number: above 1.95 once in 1,000 times.

    Args:
        shares: What the distribution function says of the sorted numbers.
    """
    steps = np.arange(len(drawn) + 1) / len(drawn)
    return float(np.sqrt(len(drawn)) * max((shares - steps[:-1]).max(), (steps[1:] - shares).max()))


def test_a_draw_is_a_function_of_seed_epoch_sample_place_and_number() -> None:
    one = KeyedRng(1, 2, 3).uniform(RngPurpose.CROP, 4)
    assert KeyedRng(1, 2, 3).uniform(RngPurpose.CROP, 4) == one
    others = {
        KeyedRng(2, 2, 3).uniform(RngPurpose.CROP, 4),
        KeyedRng(1, 3, 3).uniform(RngPurpose.CROP, 4),
        KeyedRng(1, 2, 4).uniform(RngPurpose.CROP, 4),
        KeyedRng(1, 2, 3).uniform(RngPurpose.FLIP, 4),
        KeyedRng(1, 2, 3).uniform(RngPurpose.CROP, 5),
    }
    assert len(others) == 5 and one not in others


def test_the_numbers_never_change() -> None:
    assert KeyedRng(0, 0, 0).uniform(RngPurpose.CROP, 0) == 0.22296006111354705
    assert [KeyedRng(0, 0, sample).randint(RngPurpose.MIX, 1, 10) for sample in range(12)] == [
        7,
        6,
        8,
        0,
        0,
        1,
        9,
        8,
        7,
        7,
        1,
        6,
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_shares_are_uniform_over_samples(number: int) -> None:
    drawn = np.sort(_shares(RngPurpose.FLIP, number, 5000))
    assert _distance(drawn, drawn) < 1.95


def test_neighbouring_samples_and_places_do_not_go_together() -> None:
    crop, flip = _shares(RngPurpose.CROP, 0, 5000), _shares(RngPurpose.FLIP, 0, 5000)
    for other in (flip, np.roll(crop, 1)):
        assert abs(np.corrcoef(crop, other)[0, 1]) < 3.3 / math.sqrt(5000)


def test_a_symmetric_beta_of_one_is_uniform_and_of_a_half_the_arcsine_law() -> None:
    drawn = {
        a: np.sort([KeyedRng(0, 0, n).symmetric_beta(RngPurpose.MIX, 0, a) for n in range(5000)])
        for a in (0.5, 1.0)
    }
    assert _distance(drawn[1.0], drawn[1.0]) < 1.95
    assert _distance(drawn[0.5], 2 / math.pi * np.arcsin(np.sqrt(drawn[0.5]))) < 1.95


@pytest.mark.parametrize("a", [0.01, 0.2, 3.0, 50.0])
def test_a_symmetric_beta_has_the_mean_and_the_variance_of_its_own(a: float) -> None:
    drawn = np.array([KeyedRng(0, 0, n).symmetric_beta(RngPurpose.MIX, 0, a) for n in range(5000)])
    variance = 1 / (4 * (2 * a + 1))
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert abs(drawn.mean() - 0.5) < 4 * math.sqrt(variance / 5000)
    assert drawn.var() == pytest.approx(variance, rel=0.08)
