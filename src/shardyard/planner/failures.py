"""What failures will cost a run: how often, how often to save, and how long it takes with them.

Put together from ``failure_rates.py`` (how often), ``restart.py`` (what one costs) and
``effective_time.py`` (what is left). Called once for a plan, not for every layout: a few
milliseconds at most.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from shardyard.config.daly import daly_interval_s
from shardyard.planner.effective_time import TimeShares, time_shares
from shardyard.planner.failure_rates import (
    HARDWARE_SHARE,
    HOUR_S,
    REPLACEMENT_HOURS,
    SHORTAGE_RISK,
    Mtbf,
    estimate_mtbf,
    require_not_negative,
    require_positive,
    spare_nodes,
)
from shardyard.planner.restart import Phase, first_init_s, replay_phase, restart_phases
from shardyard.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class FailureOutlook:
    """Failures of one run, predicted. Seconds are of the whole job, not summed over ranks."""

    mtbf: Mtbf
    expected_failures: float
    """Over the whole run, restarts included."""
    best_interval_steps: int
    """Steps between checkpoints that lose the least time."""
    interval_steps: int
    """Steps between checkpoints on which all below rests."""
    interval_s: float
    """The same in training time."""
    interval_reason: str
    ettr: float
    """Share of wall time that trains and is not lost again."""
    method: Literal["formula", "simulation"]
    method_reason: str
    restart: tuple[Phase, ...]
    """Of one failure, without ``replay``."""
    replay: Phase
    """Work of one failure that is done again."""
    spare_nodes: int
    spares_reason: str
    wall_s: float
    """The run with failures: the sum of the next five."""
    init_s: float
    """Until the first step begins: a start takes as long as a restart, without what was lost."""
    productive_s: float
    checkpoint_blocked_s: float
    lost_work_s: float
    restart_s: float

    @property
    def restart_s_per_failure(self) -> float:
        """u0 of the formulas."""
        return sum(phase.seconds for phase in self.restart)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "FailureOutlook":
        """What ``dataclasses.asdict`` wrote, back."""
        fields = {name: content[name] for name in FailureOutlook.__dataclass_fields__}
        fields["mtbf"] = Mtbf(**content["mtbf"])
        fields["restart"] = tuple(Phase(**phase) for phase in content["restart"])
        fields["replay"] = Phase(**content["replay"])
        return FailureOutlook(**fields)


def failure_plan(
    *,
    nodes: int,
    devices: int,
    step_s: float,
    steps: int,
    checkpoint_blocking_s: float,
    checkpoint_write_s: float,
    checkpoint_bytes: float,
    mtbf_hours_per_node: float | None = None,
    checkpoint_every: int | None = None,
    collective_timeout_s: float = 600.0,
) -> FailureOutlook:
    """Predict the failures of a run and what they cost it.

    Args:
        devices: Of all nodes.
        step_s: One step without saving.
        checkpoint_blocking_s: One save, as long as training waits for it.
        checkpoint_write_s: From then until the save is durable; 0 where saving is synchronous.
        checkpoint_bytes: One checkpoint on disk, all ranks.
        mtbf_hours_per_node: Known MTBF of one node; None: what was published for this size.
        checkpoint_every: ``checkpoint.every``, in steps; None: the best.
        collective_timeout_s: ``elastic.collective_timeout_s``.

    Raises:
        RequestError: A number is out of range.
        NoProgressError: Failures leave no time to advance.
    """
    known = {"mtbf_hours_per_node": mtbf_hours_per_node, "checkpoint_every": checkpoint_every}
    given = {name: value for name, value in known.items() if value is not None}
    require_positive("failures", nodes=nodes, devices=devices, step_s=step_s, steps=steps, **given)
    require_not_negative(
        "failures",
        checkpoint_blocking_s=checkpoint_blocking_s,
        checkpoint_write_s=checkpoint_write_s,
        checkpoint_bytes=checkpoint_bytes,
        collective_timeout_s=collective_timeout_s,
    )
    mtbf = estimate_mtbf(nodes=nodes, devices=devices, hours_per_node=mtbf_hours_per_node)
    interval = _choose_interval(
        daly_s=daly_interval_s(blocking_s=checkpoint_blocking_s, mtbf_s=mtbf.seconds),
        step_s=step_s,
        steps=steps,
        write_s=checkpoint_write_s,
        given=checkpoint_every,
    )
    restart = restart_phases(
        nodes=nodes,
        devices=devices,
        checkpoint_bytes=checkpoint_bytes,
        collective_timeout_s=collective_timeout_s,
    )
    shares = time_shares(
        mtbf_s=mtbf.seconds,
        restart_s=sum(phase.seconds for phase in restart),
        interval_s=interval.steps * step_s,
        blocking_s=checkpoint_blocking_s,
        lag_s=checkpoint_write_s,
    )
    return _outlook(
        mtbf, interval, restart, shares,
        interval_s=interval.steps * step_s, productive_s=steps * step_s,
        lag_s=checkpoint_write_s,
    )  # fmt: skip


def _outlook(
    mtbf: Mtbf,
    interval: "_Interval",
    restart: tuple[Phase, ...],
    shares: TimeShares,
    *,
    interval_s: float,
    productive_s: float,
    lag_s: float,
) -> FailureOutlook:
    """The shares of a long run, over this one's length and its first start."""
    init_s, training_s = first_init_s(restart), productive_s / shares.productive
    wall_s = init_s + training_s
    spares, spares_reason = _spares(mtbf.seconds, wall_s=wall_s)
    return FailureOutlook(
        mtbf=mtbf,
        expected_failures=training_s * shares.failures_per_s,
        best_interval_steps=interval.best_steps,
        interval_steps=interval.steps,
        interval_s=interval_s,
        interval_reason=interval.reason,
        ettr=productive_s / wall_s,
        method=shares.method,
        method_reason=shares.reason,
        restart=restart,
        replay=replay_phase(interval_s=interval_s, durable_lag_s=lag_s),
        spare_nodes=spares,
        spares_reason=spares_reason,
        wall_s=wall_s,
        init_s=init_s,
        productive_s=productive_s,
        checkpoint_blocked_s=training_s * shares.checkpoint_blocked,
        lost_work_s=training_s * shares.lost_work,
        restart_s=training_s * shares.restart,
    )


@dataclass(frozen=True, kw_only=True)
class _Interval:
    steps: int
    best_steps: int
    reason: str


def _choose_interval(
    *, daly_s: float, step_s: float, steps: int, write_s: float, given: int | None
) -> _Interval:
    """Whole steps between checkpoints.

    Rounding the best time to whole steps stays the optimum to first order, also where step times
    vary (hal-02514107).
    """
    fewest = max(1, math.ceil(write_s / step_s))  # a write ends before the next one begins
    wanted = max(1, round(daly_s / step_s))
    best = min(max(wanted, fewest), steps)  # one checkpoint is written at the end
    why = f"Daly: every {format_seconds(daly_s)} of training"
    if wanted > steps:
        why = f"one at the end; {why}"
    elif wanted < fewest:
        why = f"a save takes {format_seconds(write_s)} to become durable before the next; {why}"
    if given is None:
        return _Interval(steps=best, best_steps=best, reason=why)
    kept = min(max(given, fewest), steps)
    reason = f"checkpoint.every={given}; best: {best:,} ({why})"
    return _Interval(steps=kept, best_steps=best, reason=reason)


def _spares(mtbf_s: float, *, wall_s: float) -> tuple[int, str]:
    spares = spare_nodes(
        failures_per_s=HARDWARE_SHARE / mtbf_s,
        replacement_s=REPLACEMENT_HOURS * HOUR_S,
        run_s=wall_s,
    )
    reason = (
        f"{HARDWARE_SHARE:.0%} of failures take a node away for {REPLACEMENT_HOURS:g} h; waits "
        f"for a node with a probability below {SHORTAGE_RISK:.0%}"
    )
    return spares, reason
