"""The benchmark of verdicts: its traces, its dealing of recorded runs, and that it can fail."""

from functools import partial
from statistics import stdev

import numpy as np
import pytest

from benchmarks.compare_verdicts import Noise, Plan, neighbours, traces
from benchmarks.compare_verdicts import _judged as judged
from shardyard.report.compare.statistics import Pace, alternating_pairs


def test_neighbouring_steps_of_a_trace_are_alike_and_runs_take_turns() -> None:
    noise = Noise(spikes=0, drift=0, between_runs=0, step_noise=0.05, correlation=0.8)
    baseline, other = traces(noise, Plan(pairs=3, steps=4000), seed=1)
    assert len(alternating_pairs(baseline, other)) == 3
    logs = np.log(baseline[0].seconds)
    assert stdev(logs.tolist()) == pytest.approx(0.05, rel=0.1)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] == pytest.approx(0.8, abs=0.05)


def test_recorded_runs_are_dealt_to_both_sides_in_turn() -> None:
    paces = [Pace(name=str(n), started_t=n, seconds=(0.1,) * 99) for n in range(12)]
    firsts = set()
    for seed in range(20):
        baseline, other = neighbours(paces, 3, seed)
        places = sorted(int(pace.name) for pace in (*baseline, *other))
        assert places == list(range(places[0], places[0] + 6))
        assert len(alternating_pairs(baseline, other)) == 3
        firsts.add(places[0])
    assert len(firsts) > 3


def test_verdicts_that_are_wrong_miss_the_bar() -> None:
    """Where runs of one recipe differ by more than they are allowed to."""
    wild = partial(traces, Noise(between_runs=0.05, step_noise=0.005, drift=0))
    told = judged(partial(wild, Plan(pairs=1, steps=64)), 20, must_find=False)
    assert not told["is_met"] and told["verdicts"]["A/A"]["inconclusive"] < 0.8
    blind = partial(traces, Noise(step_noise=0.2), Plan(pairs=1, steps=64))
    assert judged(blind, 5, must_find=False)["is_met"]
    assert not judged(blind, 5, must_find=True)["is_met"]
    fine = partial(traces, Noise(between_runs=0.001, step_noise=0.01, drift=0, spikes=0))
    assert judged(partial(fine, Plan(pairs=1, steps=400)), 20, must_find=True)["is_met"]
