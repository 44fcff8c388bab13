"""Share of wall time that trains (ETTR), with failures: by formula, or simulated where it is off.

Both speak of a long run in steady state. ``interval`` is training time between two checkpoints,
``blocking`` the part of a save for which training waits, ``lag`` the time after it until the save
is durable: a failure before that goes back to the save before.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardyard.errors import RequestError
from shardyard.units import format_seconds

FORMULA_LIMIT = 0.1
"""Largest share of lost time for which the formula is used: it is first order in that share, and
up to there within 0.006 of the exact expectation (docs/design/failures.md)."""

SIMULATED_FAILURES = 4_000
"""Failures of one simulation, a few milliseconds; its share of training is then within 0.002."""


class NoProgressError(RequestError):
    """Failures come more often than the run can save: it would not advance."""


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """What wall time goes into; the four shares sum to 1."""

    productive: float
    """ETTR: work that is not lost again."""
    checkpoint_blocked: float
    lost_work: float
    restart: float
    failures_per_s: float
    """Of wall time."""
    method: Literal["formula", "simulation"]
    reason: str


def time_shares(
    *, mtbf_s: float, restart_s: float, interval_s: float, blocking_s: float, lag_s: float
) -> TimeShares:
    """Shares of wall time, by the formula where it holds, else by simulation.

    Raises:
        NoProgressError: The run would not advance.
    """
    lost = lost_share(mtbf_s=mtbf_s, restart_s=restart_s, interval_s=interval_s, lag_s=lag_s)
    by = formula_shares if lost <= FORMULA_LIMIT else simulated_shares
    return by(
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        interval_s=interval_s,
        blocking_s=blocking_s,
        lag_s=lag_s,
    )


def lost_share(*, mtbf_s: float, restart_s: float, interval_s: float, lag_s: float) -> float:
    """Share of wall time that failures cost, to first order; may exceed 1.

    N r_f (u0 + dt / 2) of the source, with its u0 here ``restart_s + lag_s``.
    """
    return (restart_s + lag_s + interval_s / 2) / mtbf_s


def formula_shares(
    *, mtbf_s: float, restart_s: float, interval_s: float, blocking_s: float, lag_s: float
) -> TimeShares:
    """E[ETTR] = (1 - N r_f (u0 + dt / 2)) / (1 + w / dt), and where the rest goes.

    Source: Kokolis et al., HPCA 2025, arXiv:2410.21680 (second hand). Left out: failures during a
    restart, and a second failure in one interval.
    """
    lost = lost_share(mtbf_s=mtbf_s, restart_s=restart_s, interval_s=interval_s, lag_s=lag_s)
    productive = (1 - lost) / (1 + blocking_s / interval_s)
    return TimeShares(
        productive=productive,
        checkpoint_blocked=productive * blocking_s / interval_s,
        lost_work=(lag_s + interval_s / 2) / mtbf_s,
        restart=restart_s / mtbf_s,
        failures_per_s=1 / mtbf_s,
        method="formula",
        reason=f"failures cost {lost:.1%} of the time, at most {FORMULA_LIMIT:.0%}",
    )


def simulated_shares(
    *,
    mtbf_s: float,
    restart_s: float,
    interval_s: float,
    blocking_s: float,
    lag_s: float,
    seed: int = 0,
) -> TimeShares:
    """As ``formula_shares``, by playing one life after another: restart, train, save, fail.

    Failures are Poisson and also strike restarts, which then begin anew.

    Raises:
        NoProgressError: The run would not advance.
    """
    draw = random.Random(seed)
    # one draw from each of so many equal slices of [0, 1): the same mean, far less noise
    slices = ((life + draw.random()) / SIMULATED_FAILURES for life in range(SIMULATED_FAILURES))
    lived = live(
        (-mtbf_s * math.log1p(-slice_) for slice_ in slices),
        restart_s=restart_s, interval_s=interval_s, blocking_s=blocking_s, lag_s=lag_s,
    )  # fmt: skip
    if lived.productive_s == 0:
        raise NoProgressError(_no_progress(mtbf_s, restart_s=restart_s, interval_s=interval_s))
    lost = lost_share(mtbf_s=mtbf_s, restart_s=restart_s, interval_s=interval_s, lag_s=lag_s)
    return TimeShares(
        productive=lived.productive_s / lived.wall_s,
        checkpoint_blocked=lived.blocked_s / lived.wall_s,
        lost_work=(lived.worked_s - lived.productive_s) / lived.wall_s,
        restart=lived.restarting_s / lived.wall_s,
        failures_per_s=SIMULATED_FAILURES / lived.wall_s,
        method="simulation",
        reason=f"to first order failures would cost {lost:.1%} of the time, more than "
        f"{FORMULA_LIMIT:.0%}; {SIMULATED_FAILURES:,} failures, seed {seed}",
    )


@dataclass(frozen=True, kw_only=True)
class Lived:
    """Seconds of many lives, each from one failure to the next."""

    wall_s: float
    restarting_s: float
    blocked_s: float
    worked_s: float
    """Trained, whether it was lost again or not."""
    productive_s: float


def live(
    lives_s: Iterable[float],
    *,
    restart_s: float,
    interval_s: float,
    blocking_s: float,
    lag_s: float,
) -> Lived:
    """Play lives of given lengths, one after another: restart, train, save, fail."""
    cycle_s = interval_s + blocking_s
    wall_s = restarting_s = blocked_s = productive_s = worked_s = 0.0
    for life_s in lives_s:
        running_s = max(0.0, life_s - restart_s)
        cycles = running_s // cycle_s
        trained_s = cycles * interval_s + min(running_s - cycles * cycle_s, interval_s)
        wall_s += life_s
        restarting_s += life_s - running_s
        blocked_s += running_s - trained_s
        worked_s += trained_s
        productive_s += max(0.0, (running_s - lag_s) // cycle_s) * interval_s
    return Lived(
        wall_s=wall_s, restarting_s=restarting_s, blocked_s=blocked_s, worked_s=worked_s,
        productive_s=productive_s,
    )  # fmt: skip


def _no_progress(mtbf_s: float, *, restart_s: float, interval_s: float) -> str:
    return (
        f"failures: with one every {format_seconds(mtbf_s)} the run would not advance. A restart "
        f"takes {format_seconds(restart_s)} and the next checkpoint comes "
        f"{format_seconds(interval_s)} after it. Use fewer nodes, save more often, or correct the "
        "MTBF per node."
    )
