"""Cost of failures for a run: how often, how often to save, and how long it takes with them.

Combines ``failure_rates.py`` (how often) and ``effective_time.py`` (the cost of one, and
what is left). Called once for a plan, not for every layout: a few milliseconds at most.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from shardyard.config.formulas import best_every, daly_interval_s
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.planner.effective_time import (
    MemoryTier,
    NoProgressError,
    RecoverySettings,
    RestartPhase,
    SaveCost,
    TimeShares,
    first_init_s,
    memory_tier,
    replay_phase,
    restart_phases,
    time_shares,
)
from shardyard.planner.failure_rates import (
    HOUR_S,
    REPLACEMENT_HOURS,
    SHORTAGE_RISK,
    Mtbf,
    estimate_mtbf,
    require_not_negative,
    require_positive,
    spare_nodes,
    with_reclaims,
)
from shardyard.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class FailureForecast:
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
    restart: tuple[RestartPhase, ...]
    """Phases of one restart, without ``replay``."""
    replay: RestartPhase
    """Work of one failure that is done again."""
    spare_nodes: int
    spares_reason: str
    wall_s: float
    """The run with failures: the sum of the next five, and of ``reference_s``."""
    init_s: float
    """Until the first step begins: a start takes as long as a restart, without what was lost."""
    productive_s: float
    checkpoint_blocked_s: float
    lost_work_s: float
    restart_s: float
    snapshot_interval_steps: int | None = None
    """Steps between snapshots in memory; None: the run takes none."""
    snapshot_mtbf_s: float | None = None
    """Between failures that snapshots are there for, as their interval is chosen by."""
    checkpoint_mtbf_s: float | None = None
    """Between failures that checkpoints are there for, as their interval is chosen by: all, or
    those that snapshots do not outlive; None: an older plan does not say."""
    reference_s: float = 0.0
    """The pass over the data for a reference's log-probabilities, before the first step."""

    @property
    def restart_s_per_failure(self) -> float:
        """u0 of the formulas."""
        return sum(phase.seconds for phase in self.restart)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "FailureForecast":
        """Read what ``dataclasses.asdict`` wrote."""
        names = FailureForecast.__dataclass_fields__
        fields = {name: content[name] for name in names if name in content}
        fields["mtbf"] = Mtbf(**content["mtbf"])
        fields["restart"] = tuple(RestartPhase(**phase) for phase in content["restart"])
        fields["replay"] = RestartPhase(**content["replay"])
        return FailureForecast(**fields)


def failure_plan(
    *,
    nodes: int,
    devices: int,
    step_s: float,
    steps: int,
    saving: SaveCost,
    recovery: RecoverySettings,
    mtbf_hours_per_node: float | None = None,
    reference_s: float = 0.0,
) -> FailureForecast:
    """Predict the failures of a run and what they cost it.

    Args:
        devices: Of all nodes.
        step_s: One step without saving.
        recovery: What the run does about them.
        mtbf_hours_per_node: Known MTBF of one node; None: what was published for this size.
        reference_s: Of a pass over the data before the first step.

    Raises:
        RequestError: A number is out of range.
        NoProgressError: Failures leave no time to advance.
    """
    every = recovery.checkpoint_every
    known = {"mtbf_hours_per_node": mtbf_hours_per_node, "checkpoint_every": every}
    given = {name: value for name, value in known.items() if value is not None}
    require_positive("failures", nodes=nodes, devices=devices, step_s=step_s, steps=steps, **given)
    _require_costs(saving, recovery)
    mtbf = estimate_mtbf(nodes=nodes, devices=devices, hours_per_node=mtbf_hours_per_node)
    if recovery.is_spot:
        mtbf = with_reclaims(mtbf, nodes=nodes)
    memory = memory_tier(recovery, step_s=step_s, copy_s=saving.blocking_s, mtbf=mtbf)
    # With snapshots, checkpoints only serve failures that take a node and its memory away.
    of_checkpoints_s = mtbf.seconds if memory is None else mtbf.seconds / mtbf.node_share
    # Elastic runs lose nodes for more reasons than published failures, so intervals are capped.
    is_capped = of_checkpoints_s > recovery.longest_mtbf_s
    of_checkpoints_s = min(of_checkpoints_s, recovery.longest_mtbf_s)
    interval = _choose_interval(
        saving, mtbf_s=of_checkpoints_s, step_s=step_s, steps=steps, explicit=every,
        assumed="; elastic: a loss a day is assumed" if is_capped else "",
    )  # fmt: skip
    restart = restart_phases(
        nodes=nodes, devices=devices, checkpoint_bytes=saving.bytes, step_s=step_s,
        recovery=recovery, node_share=mtbf.node_share,
    )  # fmt: skip
    return _forecast(
        mtbf, interval, restart, saving, memory,
        interval_s=interval.steps * step_s, productive_s=steps * step_s,
        init_s=first_init_s(devices), of_checkpoints_s=of_checkpoints_s,
        outlives_nodes=recovery.outlives_nodes, reference_s=reference_s,
    )  # fmt: skip


def failure_outlook(
    recipe: Recipe,
    *,
    step_s: float | None,
    devices: int,
    nodes: int,
    steps: int | None,
    nbytes: int,
    reference_s: float,
) -> tuple[FailureForecast | None, str, bool]:
    """Predict the cost of failures, or say why it is unknown, and whether the run would advance.

    Never keeps a run from starting.

    Args:
        step_s: None: no speed is known.
        steps: None: the length is not known yet.
        nbytes: Of one checkpoint.
        reference_s: As of ``failure_plan``.
    """
    if step_s is None:
        return None, "no speed, so no time in which something could fail", True
    if steps is None:
        return None, "the length is known once the data is prepared", True
    try:
        outlook = failure_plan(
            nodes=nodes,
            devices=devices,
            step_s=step_s,
            steps=steps,
            saving=SaveCost.of(nbytes, devices=devices, nodes=nodes),
            recovery=RecoverySettings.of(recipe),
            reference_s=reference_s,
        )
    # A kind of RequestError, so it has to be caught first.
    except NoProgressError as error:
        return None, str(error), False
    except RequestError as error:
        return None, str(error), True
    return outlook, "", True


def _require_costs(saving: SaveCost, recovery: RecoverySettings) -> None:
    require_not_negative(
        "failures",
        checkpoint_blocking_s=saving.blocking_s,
        checkpoint_write_s=saving.write_s,
        checkpoint_bytes=saving.bytes,
        collective_timeout_s=recovery.collective_timeout_s,
    )


def _forecast(
    mtbf: Mtbf,
    interval: "_Interval",
    restart: tuple[RestartPhase, ...],
    saving: SaveCost,
    memory: MemoryTier | None,
    *,
    interval_s: float,
    productive_s: float,
    init_s: float,
    of_checkpoints_s: float,
    outlives_nodes: bool,
    reference_s: float,
) -> FailureForecast:
    """The shares of a long run, over this one's length and its first start."""
    replay = replay_phase(
        interval_s=interval_s, durable_lag_s=saving.write_s, memory=memory,
        node_share=mtbf.node_share, outlives_nodes=outlives_nodes,
    )  # fmt: skip
    shares = _shares(
        mtbf.seconds, restart, saving, memory, interval_s=interval_s, replay_s=replay.seconds
    )
    # Shares hold for a long run in steady state. The first start is paid once and comes on top.
    training_s = productive_s / shares.productive
    wall_s = init_s + reference_s + training_s
    spares, spares_reason = _spares(mtbf, wall_s=wall_s)
    return FailureForecast(
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
        replay=replay,
        spare_nodes=spares,
        spares_reason=spares_reason,
        wall_s=wall_s,
        init_s=init_s,
        productive_s=productive_s,
        checkpoint_blocked_s=training_s * shares.checkpoint_blocked,
        lost_work_s=training_s * shares.lost_work,
        restart_s=training_s * shares.restart,
        snapshot_interval_steps=None if memory is None else memory.every,
        snapshot_mtbf_s=None if memory is None else memory.mtbf_s,
        checkpoint_mtbf_s=of_checkpoints_s,
        reference_s=reference_s,
    )


def _shares(
    mtbf_s: float,
    restart: tuple[RestartPhase, ...],
    saving: SaveCost,
    memory: MemoryTier | None,
    *,
    interval_s: float,
    replay_s: float,
) -> TimeShares:
    restart_s = sum(phase.seconds for phase in restart)
    blocking_s, lag_s = saving.blocking_s, saving.write_s
    if memory is not None:
        # Snapshots and checkpoints count as one kind of save that blocks as much as both. A failure
        # loses half of an interval, so the interval is twice the work that is done again.
        blocked = saving.blocking_s / interval_s + memory.blocking_s / memory.interval_s
        interval_s, lag_s = 2 * replay_s, 0.0
        blocking_s = blocked * interval_s
    return time_shares(
        mtbf_s=mtbf_s, restart_s=restart_s, interval_s=interval_s, blocking_s=blocking_s,
        lag_s=lag_s,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Interval:
    steps: int
    best_steps: int
    reason: str


def _choose_interval(
    saving: SaveCost,
    *,
    mtbf_s: float,
    step_s: float,
    steps: int,
    explicit: int | None,
    assumed: str,
) -> _Interval:
    """Whole steps between checkpoints, and the best number of them."""
    daly_s = daly_interval_s(blocking_s=saving.blocking_s, mtbf_s=mtbf_s)
    fewest = max(1, math.ceil(saving.write_s / step_s))  # a write ends before the next one begins
    wanted = max(1, round(daly_s / step_s))
    best = best_every(
        step_s=step_s, blocked_s=saving.blocking_s, counts_s=saving.write_s, mtbf_s=mtbf_s
    )
    best = min(best, steps)  # one checkpoint is written at the end
    why = f"Daly: every {format_seconds(daly_s)} of training{assumed}"
    if wanted > steps:
        why = f"one at the end; {why}"
    elif wanted < fewest:
        waits = f"a save takes {format_seconds(saving.write_s)} to become durable before the next"
        why = f"{waits}; {why}"
    if explicit is None:
        return _Interval(steps=best, best_steps=best, reason=why)
    # A save waits until the one before is durable, so a shorter interval cannot be kept.
    kept = min(max(explicit, fewest), steps)
    reason = f"checkpoint.every={explicit}; best: {best:,} ({why})"
    return _Interval(steps=kept, best_steps=best, reason=reason)


def _spares(mtbf: Mtbf, *, wall_s: float) -> tuple[int, str]:
    spares = spare_nodes(
        # Spares only replace lost nodes: a lost process restarts where it was.
        failures_per_s=mtbf.node_share / mtbf.seconds,
        replacement_s=REPLACEMENT_HOURS * HOUR_S,
        run_s=wall_s,
    )
    reason = (
        f"{mtbf.node_share:.0%} of failures take a node away for {REPLACEMENT_HOURS:g} h; waits "
        f"for a node with a probability below {SHORTAGE_RISK:.0%}"
    )
    return spares, reason
