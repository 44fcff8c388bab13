"""Faster, slower or inconclusive: what the verdict is made of, and how often it is wrong."""

import math
import random
from collections import Counter

import pytest

from benchmarks.compare_verdicts import Noise, Plan, slowed, traces
from shardyard.report.compare.statistics import (
    BETWEEN_RUNS,
    MIN_STEPS,
    Pace,
    alternating_pairs,
    compare_speed,
    t_half_width,
)

SHARED = Noise()
TURNS = Plan(pairs=4, steps=100)
TRIES = 25


def pace(name: str, seconds: list[float], began_t: float = 0.0) -> Pace:
    return Pace(name=name, started_t=began_t, seconds=tuple(seconds))


def steady(name: str, step_s: float, *, steps: int = 200, began_t: float = 0.0) -> Pace:
    """Steps that differ by a thousandth, by chance."""
    draw = random.Random(name)
    return pace(name, [step_s * math.exp(draw.gauss(0, 1e-3)) for _ in range(steps)], began_t)


def test_a_run_beside_itself_is_inconclusive_and_a_slower_one_is_found() -> None:
    said: Counter[str] = Counter()
    for seed in range(TRIES):
        baseline, other = traces(SHARED, TURNS, seed)
        slower = [slowed(each, 1.08) for each in other]
        said[f"A/A {compare_speed(baseline, other).verdict}"] += 1
        said[f"slower {compare_speed(baseline, slower).verdict}"] += 1
        said[f"faster {compare_speed(slower, baseline).verdict}"] += 1
    assert said["A/A inconclusive"] >= TRIES - 2
    assert min(said["slower slower"], said["faster faster"]) >= TRIES - 2
    assert said["slower faster"] == said["faster slower"] == 0


def test_a_real_effect_below_two_per_cent_is_inconclusive_and_not_equal() -> None:
    turns = [[steady(f"{side}{n}", 0.2, began_t=2.0 * n + i) for n in range(4)]
             for i, side in enumerate("ab")]  # fmt: skip
    speed = compare_speed(turns[0], [slowed(each, 1.01) for each in turns[1]])
    assert speed.low is not None and speed.low > 1
    assert speed.verdict == "inconclusive"
    assert "less than 2% is not a verdict, though not equal" in speed.why


def test_one_run_each_is_not_trusted_beyond_what_runs_of_one_recipe_differ_by() -> None:
    a, b = steady("a", 0.2), steady("b", 0.2)
    assert compare_speed([a], [slowed(b, 1.025)]).verdict == "inconclusive"
    speed = compare_speed([a], [slowed(b, 1.05)])
    assert speed.verdict == "slower"
    assert speed.low is not None and speed.high is not None and speed.ratio is not None
    assert speed.ratio == pytest.approx(1.05, rel=2e-3)
    half = (math.log(speed.high) - math.log(speed.low)) / 2
    assert half == pytest.approx(1.96 * math.sqrt(2) * BETWEEN_RUNS, rel=0.02)
    assert "1% between runs" in speed.how


def test_neighbouring_steps_that_are_alike_widen_the_interval() -> None:
    """Fifty times the same four values say less than two hundred that differ."""
    draw = random.Random(3)
    apart = [0.2 * math.exp(draw.gauss(0, 0.1)) for _ in range(400)]
    alike = [each for each in apart[:20] for _ in range(20)]

    def width(seconds: list[float]) -> float:
        speed = compare_speed([pace("a", seconds)], [pace("b", seconds)])
        assert speed.low is not None and speed.high is not None
        return speed.high / speed.low

    assert width(alike) - 1 > 2 * (width(apart) - 1)


def test_a_machine_that_slows_down_over_a_run_widens_the_interval() -> None:
    drifting = [0.2 * (1 + 0.1 * n / 400) for n in range(400)]
    still = compare_speed([steady("a", 0.2)], [steady("b", 0.21)])
    moved = compare_speed([pace("a", drifting)], [slowed(pace("b", drifting), 1.05)])
    assert (still.verdict, moved.verdict) == ("slower", "inconclusive")


def test_spikes_move_the_ratio_of_all_steps_and_not_the_verdict() -> None:
    spiky = list(steady("b", 0.2).seconds)
    for step in range(0, 200, 25):
        spiky[step] *= 6
    speed = compare_speed([steady("a", 0.2)], [pace("b", spiky)])
    assert speed.verdict == "inconclusive"
    assert speed.ratio == pytest.approx(1, abs=0.01)
    assert speed.ratio_of_means == pytest.approx(1.2, abs=0.01)


def test_too_few_steps_are_no_verdict() -> None:
    speed = compare_speed([steady("a", 0.2)], [steady("b", 0.4, steps=MIN_STEPS - 1)])
    assert (speed.verdict, speed.ratio) == ("inconclusive", None)
    assert f"b has {MIN_STEPS - 1}, and {MIN_STEPS} are needed" in speed.why


def test_runs_are_paired_where_they_took_turns() -> None:
    def sides(order: str) -> list[list[Pace]]:
        return [[steady(f"{s}{t}", 0.2, began_t=t) for t, each in enumerate(order) if each == s]
                for s in "ab"]  # fmt: skip

    found = alternating_pairs(*sides("abbaab"))
    assert [(a.name, b.name) for a, b in found] == [("a0", "b1"), ("a3", "b2"), ("a4", "b5")]
    assert alternating_pairs(*sides("aaabbb")) == []
    assert alternating_pairs(*sides("aab")) == []
    in_turn = compare_speed(*sides("abab" + "ba"))
    assert "3 pairs of runs that alternate" in in_turn.how
    assert "do not alternate" in compare_speed(*sides("aaabbb")).how


def test_drift_between_pairs_is_taken_out_and_between_blocks_of_runs_is_not() -> None:
    """The machine gets 3 % slower with every run; b is no slower than a."""

    def sides(order: str) -> list[list[Pace]]:
        return [[steady(f"{s}{t}", 0.2 * 1.03**t, began_t=t)
                 for t, each in enumerate(order) if each == s] for s in "ab"]  # fmt: skip

    assert compare_speed(*sides("abbaabba")).verdict == "inconclusive"
    blocks = compare_speed(*sides("aaaabbbb"))
    assert blocks.ratio == pytest.approx(1.03**4, rel=0.01)
    assert blocks.high is not None and blocks.low is not None
    assert blocks.high / blocks.low > 1.05


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.30265), (4, 2.77645), (14, 2.14479), (100, 1.98397)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_half_width(degrees, 0.95) == pytest.approx(expected, rel=1e-5)
