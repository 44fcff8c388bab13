"""ETTR by formula against its paper's values, and by simulation against exact expectations."""

import math
import time
from collections.abc import Callable

import pytest

from shardyard.planner.effective_time import (
    NoProgressError,
    TimeShares,
    formula_shares,
    simulated_shares,
    time_shares,
)

RSC_1_PER_NODE_S = 6.50 / 1000 / 86_400


def shares(
    by: Callable[..., TimeShares] = time_shares,
    *,
    mtbf_s: float = 11_135,
    restart_s: float = 300,
    interval_s: float = 465,
    blocking_s: float = 10,
    lag_s: float = 0,
) -> TimeShares:
    return by(
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        interval_s=interval_s,
        blocking_s=blocking_s,
        lag_s=lag_s,
    )


def exact(
    *, mtbf_s: float, restart_s: float, interval_s: float, blocking_s: float, lag_s: float = 0
) -> float:
    """Daly 2006, eq. 20: T = M e^(R/M) (e^((t+d)/M) - 1) Ts/t, failures during restarts included.

    The lag lengthens what must be survived before the first save counts, as R does.
    """
    growth = math.expm1((interval_s + blocking_s) / mtbf_s)
    return interval_s / mtbf_s / math.exp((restart_s + lag_s) / mtbf_s) / growth


@pytest.mark.parametrize(
    ("nodes", "restart_s", "interval_s", "ettr"),
    [
        (128, 300, 1020, 0.987),
        (512, 300, 510, 0.969),
        (2048, 300, 240, 0.916),
        (2048, 900, 240, 0.826),
        (2048, 60, 240, 0.952),
    ],
)
def test_the_formula_gives_the_values_worked_out_for_rsc_1(
    nodes: int, restart_s: float, interval_s: float, ettr: float
) -> None:
    found = shares(
        formula_shares,
        mtbf_s=1 / (nodes * RSC_1_PER_NODE_S),
        restart_s=restart_s,
        interval_s=interval_s,
        blocking_s=5,
    )
    assert found.productive == pytest.approx(ettr, abs=0.0005)


@pytest.mark.parametrize("mtbf_s", [300, 1800, 11_135, 1e5])
@pytest.mark.parametrize(("restart_s", "lag_s"), [(0, 0), (300, 0), (300, 60), (1800, 60)])
def test_the_simulation_agrees_with_the_exact_expectation(
    mtbf_s: float, restart_s: float, lag_s: float
) -> None:
    given = {"mtbf_s": mtbf_s, "restart_s": restart_s, "interval_s": 465.0, "blocking_s": 10.0}
    found = shares(simulated_shares, **given, lag_s=lag_s)
    assert found.productive == pytest.approx(exact(**given, lag_s=lag_s), abs=0.002)


@pytest.mark.parametrize("mtbf_s", [6000, 11_135, 1e5])
@pytest.mark.parametrize("restart_s", [0, 60, 300])
@pytest.mark.parametrize("lag_s", [0, 60])
def test_simulation_and_formula_agree_where_the_formula_is_used(
    mtbf_s: float, restart_s: float, lag_s: float
) -> None:
    found = shares(mtbf_s=mtbf_s, restart_s=restart_s, lag_s=lag_s)
    assert found.method == "formula"
    played = shares(simulated_shares, mtbf_s=mtbf_s, restart_s=restart_s, lag_s=lag_s)
    assert found.productive == pytest.approx(played.productive, abs=0.006)
    assert found.lost_work == pytest.approx(played.lost_work, abs=0.006)
    assert found.restart == pytest.approx(played.restart, abs=0.006)


def test_where_failures_cost_more_than_a_tenth_they_are_simulated() -> None:
    found = shares(mtbf_s=5000)  # (300 + 232.5) / 5,000 = 10.65 %
    assert found.method == "simulation"
    assert found.reason.startswith("to first order failures would cost 10.7% of the time")
    assert shares(mtbf_s=5400).method == "formula"  # 9.86 %


@pytest.mark.parametrize("mtbf_s", [900, 20_000])
def test_shares_sum_to_the_whole(mtbf_s: float) -> None:
    found = shares(mtbf_s=mtbf_s, lag_s=30)
    parts = found.productive, found.checkpoint_blocked, found.lost_work, found.restart
    assert sum(parts) == pytest.approx(1, abs=1e-12)
    assert min(parts) > 0


def test_the_same_seed_plays_the_same_lives() -> None:
    assert shares(mtbf_s=900) == shares(mtbf_s=900)


def test_a_simulation_takes_at_most_20_ms() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        shares(simulated_shares)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.020


def test_effective_time_falls_with_failures_restarts_and_blocking() -> None:
    by_mtbf = [shares(mtbf_s=mtbf_s).productive for mtbf_s in (1e6, 1e5, 1e4, 3000, 1000, 300)]
    by_restart = [shares(restart_s=restart_s).productive for restart_s in (0, 60, 600, 6000)]
    by_blocking = [shares(blocking_s=blocking_s).productive for blocking_s in (0, 5, 50, 500)]
    for found in (by_mtbf, by_restart, by_blocking):
        assert found == sorted(found, reverse=True)


def test_a_run_that_would_not_advance_is_refused() -> None:
    with pytest.raises(NoProgressError) as refused:
        shares(mtbf_s=20)
    assert str(refused.value) == (
        "failures: with one every 20 s the run would not advance. A restart takes 5 min and the "
        "next checkpoint comes 7 min 45 s after it. Use fewer nodes, save more often, or correct "
        "the MTBF per node."
    )
