"""A unit that takes longer than is usual for it beside its peers is told, and noise is not."""

from collections.abc import Callable
from statistics import median

import numpy as np
import pytest

from shardyard.telemetry.health.outliers import (
    FEWEST,
    OutlierDetector,
    OutlierTransition,
    blocks_needed,
    medians_of_others,
)

Seconds = Callable[[int], "np.typing.NDArray[np.float64]"]
"""Number of the block -> what each unit took in its one step."""


def watched(
    seconds: Seconds, *, blocks: int, groups: list[int]
) -> list[tuple[int, OutlierTransition]]:
    found, track = [], OutlierDetector(np.array(groups), level=1.25, least_s=0.0)
    for block in range(blocks):
        found += [(block, turn) for turn in track.update(seconds(block)[None])]
    return found


def noise(seed: int, size: float, units: int = 8) -> Seconds:
    draw = np.random.default_rng(seed)
    return lambda _: np.exp(draw.normal(0.0, size, units))


def with_slow(seconds: Seconds, unit: int, factor: float, begin: int, end: int = 999) -> Seconds:
    def slow(block: int) -> "np.typing.NDArray[np.float64]":
        found = seconds(block)
        found[unit] *= factor if begin <= block < end else 1.0
        return found

    return slow


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_the_median_of_all_others_leaves_each_one_itself_out(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    naive = [median(np.delete(values, k).tolist()) for k in range(count)]
    assert medians_of_others(values).tolist() == pytest.approx(naive)
    assert medians_of_others(np.stack([values, -values]))[1].tolist() == pytest.approx(
        [median(np.delete(-values, k).tolist()) for k in range(count)]
    )


@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
def test_ten_percent_more_is_told_in_the_second_block_and_when_it_is_over(factor: float) -> None:
    slow = with_slow(noise(1, 0.004), 3, factor, 20, 40)
    (begun, named), (ended, well) = watched(slow, blocks=60, groups=[0] * 8)
    assert (begun, named.unit, named.is_over, named.is_level) == (21, 3, False, False)
    assert np.exp(named.deviation) == pytest.approx(factor, rel=0.03)
    assert (ended, well.unit, well.is_over) == (41, 3, True)


def test_what_all_share_and_what_one_always_had_is_nothing_new() -> None:
    share = np.array([1.0, 1.0, 1.2, 1.0, 0.7, 1.0, 1.0, 1.0])
    swings = np.exp(np.random.default_rng(0).normal(0.0, 0.5, 120))
    quiet = noise(2, 0.004)
    assert watched(lambda b: quiet(b) * share * swings[b], blocks=120, groups=[0] * 8) == []


@pytest.mark.parametrize("size", [0.01, 0.1, 0.4])
def test_noise_of_any_size_is_told_of_nobody(size: float) -> None:
    assert watched(noise(3, size), blocks=150, groups=[0] * 8) == []


def test_one_block_that_is_long_is_told_of_nobody() -> None:
    quiet = noise(4, 0.004)
    hiccups = np.random.default_rng(5).integers(8, size=150)

    def seconds(block: int) -> "np.typing.NDArray[np.float64]":
        found = quiet(block)
        found[hiccups[block]] *= 3.0 if block % 4 == 0 else 1.0
        return found

    assert watched(seconds, blocks=150, groups=[0] * 8) == []


def test_a_level_that_was_always_there_is_told_beyond_a_quarter_and_as_what_it_is() -> None:
    ((block, turn),) = watched(with_slow(noise(6, 0.004), 2, 1.4, 0), blocks=60, groups=[0] * 8)
    assert (block, turn.unit, turn.is_level, turn.is_since_start) == (7, 2, True, True)
    assert np.exp(turn.deviation) == pytest.approx(1.4, rel=0.03)
    assert watched(with_slow(noise(6, 0.004), 2, 1.2, 0), blocks=60, groups=[0] * 8) == []


@pytest.mark.parametrize("begin", range(1, FEWEST + 1))
def test_what_begins_before_there_is_a_baseline_is_told_as_a_level(begin: int) -> None:
    slow = with_slow(noise(7, 0.004), 5, 2.0, begin, 40)
    (begun, named), (ended, well) = watched(slow, blocks=60, groups=[0] * 8)
    assert begun <= begin + 7 and named.unit == well.unit == 5
    assert 40 < ended <= 47 and named.is_since_start == (begin <= 2)


def test_of_two_one_that_is_well_again_does_not_make_the_other_one_slow() -> None:
    slow = with_slow(noise(11, 0.004, units=2), 1, 2.0, 0, 30)
    found = watched(slow, blocks=60, groups=[0, 0])
    assert [(turn.unit, turn.is_over) for _, turn in found] == [(1, False), (1, True)]


def test_groups_are_compared_apart_and_one_alone_with_nobody() -> None:
    quiet = noise(8, 0.004, units=5)
    share = np.array([1.0, 1.0, 3.0, 3.0, 9.0])
    groups = [0, 0, 1, 1, 2]
    slow = with_slow(with_slow(quiet, 3, 1.5, 20), 4, 1.5, 20)
    found = watched(lambda b: slow(b) * share, blocks=60, groups=groups)
    assert [turn.unit for _, turn in found] == [3]


def test_steps_are_compared_one_by_one_so_that_their_lengths_cancel() -> None:
    """Three long steps of one unit, among steps that are long or short for all."""
    draw = np.random.default_rng(9)
    found, track = [], OutlierDetector(np.zeros(8, dtype=np.int64), level=1.25, least_s=0.0)
    for block in range(40):
        steps_s = np.exp(draw.normal(0.0, 0.003, (8, 8)) + draw.normal(0.0, 0.1, (8, 1)))
        if block in (20, 21):
            steps_s[:3, 3] *= 1.5
        found += track.update(steps_s)
    assert found == []


def test_half_of_the_peers_becomes_slow_and_well_again_and_the_other_half_is_never_told() -> None:
    slow = noise(10, 0.004)
    for unit in range(4):
        slow = with_slow(slow, unit, 1.4, 20, 60)
    found = watched(slow, blocks=120, groups=[0] * 8)
    assert {turn.unit for _, turn in found} == {0, 1, 2, 3} and len(found) == 8


def test_a_burst_of_two_blocks_on_a_loud_machine_is_told_of_nobody() -> None:
    loud, quiet = noise(12, 0.05), noise(12, 0.004)
    for seconds, told in ((loud, []), (quiet, [(3, False), (3, True)])):
        burst = with_slow(seconds, 3, 4.0, 40, 42)
        found = watched(burst, blocks=60, groups=[0] * 8)
        assert [(turn.unit, turn.is_over) for _, turn in found] == told


def test_a_large_change_needs_fewer_blocks_where_nothing_comes_in_bursts() -> None:
    limit = np.full(3, 0.5)
    assert blocks_needed(limit, np.array([1.5, 2.5, 4.5])).tolist() == [6, 3, 2]


def test_a_loud_machine_needs_more_blocks_in_a_row() -> None:
    assert blocks_needed(np.array([0.05, 0.075, 0.1, 0.15, 0.5])).tolist() == [2, 2, 3, 3, 6]
