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

from shardyard.config.formulas import (
    ELASTIC_MTBF_S,
    best_every,
    is_elastic,
    steps_between_checkpoints,
    steps_between_snapshots,
)
from shardyard.config.rules.timeouts import hang_min_s
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.planner.failure_rates import HARDWARE_SHARE, Mtbf, log_log
from shardyard.units import format_seconds

FORMULA_LIMIT = 0.1
"""Largest share of lost time for which the formula is used: it is first order in that share, and
up to there within 0.006 of the exact expectation (internals/failures.md)."""

SIMULATED_FAILURES = 4_000
"""Failures of one simulation, a few milliseconds; its share of training is then within 0.002."""


class NoProgressError(RequestError):
    """Failures come more often than the run can save: it would not advance."""


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """Shares of wall time; all four sum to 1."""

    productive: float
    """ETTR: work that is not lost again."""
    checkpoint_blocked: float
    lost_work: float
    restart: float
    failures_per_s: float
    """Failures per second of wall time."""
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
    """Compute ``formula_shares`` by simulating one life after another: restart, train, save, fail.

    Failures are Poisson and also strike restarts, which then begin again.

    Raises:
        NoProgressError: The run would not advance.
    """
    draw = random.Random(seed)
    # One draw from each of so many equal slices of [0, 1) keeps the mean and has far less noise.
    slices = ((life + draw.random()) / SIMULATED_FAILURES for life in range(SIMULATED_FAILURES))
    lived = simulate_failures(
        # Inverse of the exponential distribution; log1p stays exact for short lives.
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
class SimulatedTime:
    """Seconds of many lives, each from one failure to the next."""

    wall_s: float
    restarting_s: float
    blocked_s: float
    worked_s: float
    """Trained, whether it was lost again or not."""
    productive_s: float


def simulate_failures(
    lives_s: Iterable[float],
    *,
    restart_s: float,
    interval_s: float,
    blocking_s: float,
    lag_s: float,
) -> SimulatedTime:
    """Play lives of given lengths, one after another: restart, train, save, fail."""
    cycle_s = interval_s + blocking_s
    wall_s = restarting_s = blocked_s = productive_s = worked_s = 0.0
    for life_s in lives_s:
        running_s = max(0.0, life_s - restart_s)
        cycles = running_s // cycle_s
        # A cycle trains first and then saves, so a life may end while training waits for a save.
        trained_s = cycles * interval_s + min(running_s - cycles * cycle_s, interval_s)
        wall_s += life_s
        restarting_s += life_s - running_s
        blocked_s += running_s - trained_s
        worked_s += trained_s
        # A save counts once it is durable, lag_s later: a failure before that goes back one more.
        productive_s += max(0.0, (running_s - lag_s) // cycle_s) * interval_s
    return SimulatedTime(
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


# A save has two parts: training waits while the state is copied to host memory, then the files are
# written in the background.

CHECKPOINT_BYTES_PER_S = 1.2e9
"""Rate at which a node writes its part to shared storage: BLOOM-176B wrote 2.3 TB from 48 nodes in
40 s (bigscience-workshop/bigscience, tr11 chronicles)."""

STAGING_BYTES_PER_S = 10e9
"""Rate at which a device's state is copied to host memory while training waits: some 40 % of PCIe 4
in one direction."""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """Cost of one checkpoint."""

    bytes: float
    """On disk, all ranks."""
    blocking_s: float
    """Time that training waits for it."""
    write_s: float
    """From then until it is durable; 0 where saving is synchronous."""

    @classmethod
    def of(cls, nbytes: float, *, devices: int, nodes: int) -> "SaveCost":
        """Training waits for the copy to host memory, which each device makes of its own part;
        behind it, each node writes its part."""
        return cls(
            bytes=nbytes,
            blocking_s=nbytes / devices / STAGING_BYTES_PER_S,
            write_s=nbytes / nodes / CHECKPOINT_BYTES_PER_S,
        )


# A failure costs a restart, phase by phase, and the work that is done again.
#
# There are two kinds of failures. A lost node takes its processes and the memory of its agent with
# it. A lost process leaves its agent, which restarts the group at once, from a snapshot in memory
# if there is one. Each phase is the mean of both, weighted by how often they come. The events of a
# run use the same names, so that a plan and a run can be compared.


@dataclass(frozen=True, kw_only=True)
class RestartPhase:
    """One part of a restart: seconds of one failure, and why so many."""

    name: str
    seconds: float
    reason: str
    source: str


SILENT_SHARE = 5_948 / (38_236 + 5_948)
"""Share of failures without a dying process (hangs, mostly), found because ranks do not move.

Source: ByteRobust, SOSP 2025 (second hand): 5,948 implicit next to 38,236 explicit
failures.
"""

POLL_S = 0.1
"""Between two looks of the agent at its workers (``elastic/agent.py``)."""

NODE_SILENT_S = 3.0
"""Silence of a node's agent after which the node counts as gone (``elastic/monitoring.py``)."""

TEARDOWN_S = 0.5
"""Destroying process groups; workers are killed, so no kernel is waited for.
Source: NVIDIA Resiliency Extension, usage guide of in-process restart, "Restart latency"."""

RENDEZVOUS_S = 1.0
"""0.5 s to give out ranks and 0.5 s for a barrier of 16k ranks; the source of ``TEARDOWN_S``."""

PUBLISHED_RESTARTS = ((16.0, 310.0), (256.0, 292.0), (2304.0, 1350.0))
"""(GPUs, seconds) from a crash to training again, by restarting the job; the last is the middle of
"15 to 30 min". Source: AWS Machine Learning Blog, 2025-12-15, checkpointless training on HyperPod,
its baselines."""

PUBLISHED_IN_PLACE = ((16.0, 50.0), (256.0, 47.0), (2304.0, 120.0))
"""(GPUs, seconds) where processes are restarted on nodes that stay, without the job.

These are the results next to those baselines; the last is "under 2 min".
"""

PARKED_SAVES_S = 0.421 - 0.254
"""Time that standby workers save in a restart in place.

It takes 0.25 s and not 0.42 s for llama-tiny on 2 CPU processes
(restart-phases-20261123.json). It has not been measured on accelerators.
"""

READ_BYTES_PER_S_PER_NODE = 2.3e12 / 40 / 48
"""1.2 GB/s: 48 nodes wrote BLOOM's 2.3 TB in 40 s, on GPFS over NVMe; reading is taken to be as
fast. Source: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md."""

_NVRX = "NVIDIA Resiliency Extension, in-process usage guide, Restart latency"
_HYPERPOD = "AWS ML blog 2025-12-15, HyperPod checkpointless training, and its baselines"


@dataclass(frozen=True, kw_only=True)
class RecoverySettings:
    """Settings of a run against failures, from its recipe; the defaults are the recipe's."""

    checkpoint_every: int | None = None
    """Steps; None: the best."""
    hang_steps: float | None = 8.0
    hang_min_s: float = 3.5
    collective_timeout_s: float = 600.0
    snapshot_every: int | Literal["auto"] | None = None
    outlives_nodes: bool = False
    """Whether other nodes continue from snapshots when one is lost: the next has its replica."""
    longest_mtbf_s: float = math.inf
    """Time between losses above which intervals grow no further."""
    has_standby: bool = False
    is_spot: bool = False
    """Whether its nodes are spot instances, which AWS takes back."""

    @classmethod
    def of(cls, recipe: Recipe) -> "RecoverySettings":
        """Return the recovery of a recipe."""
        elastic, every = recipe.elastic, steps_between_checkpoints(recipe)
        # A fixed number of nodes makes the scheduler start a new job after a lost node. The replica
        # in its peer's memory is lost with the old job.
        goes_on = isinstance(elastic.min_nodes, int) and elastic.min_nodes < recipe.cluster.nodes
        return cls(
            checkpoint_every=None if every == "auto" else every,
            hang_steps=elastic.hang_steps,
            hang_min_s=hang_min_s(elastic),
            collective_timeout_s=elastic.collective_timeout_s,
            snapshot_every=steps_between_snapshots(recipe),
            outlives_nodes=goes_on and elastic.snapshot_neighbour is True,
            longest_mtbf_s=ELASTIC_MTBF_S if is_elastic(recipe) else math.inf,
            has_standby=elastic.parked is True,
            is_spot=recipe.cluster.capacity == "spot",
        )

    def hang_s(self, step_s: float) -> tuple[float, str]:
        """Until a hang in a usual step is found, and what finds it."""
        if self.hang_steps is None:
            words = f"elastic.collective_timeout_s, {self.collective_timeout_s:g} s"
            return self.collective_timeout_s, words
        seconds = max(self.hang_min_s, self.hang_steps * step_s)
        return seconds, f"{format_seconds(seconds)} without a move (elastic.hang_steps)"


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """Snapshots in memory: a run continues from them while its agents live."""

    every: int
    """Steps."""
    interval_s: float
    blocking_s: float
    """Training waits for one copy."""
    mtbf_s: float
    """Between failures that they are there for, as the interval is chosen by."""
    reason: str


def memory_tier(
    recovery: RecoverySettings, *, step_s: float, copy_s: float, mtbf: Mtbf
) -> MemoryTier | None:
    """Snapshots of a run; None: it takes none.

    Args:
        copy_s: Of one rank's state into host memory.
        mtbf: Of failures of any kind.
    """
    every = recovery.snapshot_every
    if every is None:
        return None
    # Without a replica on another node, snapshots only help where a process dies alone.
    mtbf_s = mtbf.seconds if recovery.outlives_nodes else mtbf.seconds / (1 - mtbf.node_share)
    mtbf_s = min(mtbf_s, recovery.longest_mtbf_s)
    reason = f"elastic.snapshot_every={every}"
    if every == "auto":
        every = best_every(step_s=step_s, blocked_s=copy_s, counts_s=copy_s, mtbf_s=mtbf_s)
        reason += f": a copy takes {format_seconds(copy_s)}, Daly"
    return MemoryTier(
        every=every, interval_s=every * step_s, blocking_s=copy_s, mtbf_s=mtbf_s, reason=reason
    )


def restart_phases(
    *,
    nodes: int,
    devices: int,
    checkpoint_bytes: float,
    step_s: float,
    recovery: RecoverySettings,
    node_share: float = HARDWARE_SHARE,
) -> tuple[RestartPhase, ...]:
    """Phases of one restart with a spare node at hand, without the work done again.

    Args:
        checkpoint_bytes: One checkpoint on disk, all ranks.
        step_s: A usual one, by which a hang is found.
        node_share: Of failures, those that take a node away.
    """
    return (
        _detect(recovery, step_s=step_s, node_share=node_share),
        RestartPhase(
            name="teardown",
            seconds=TEARDOWN_S,
            reason="workers are killed, not asked",
            source=_NVRX,
        ),
        RestartPhase(
            name="reschedule",
            seconds=0.0,
            reason="a spare node waits; without one, its replacement's time",
            source="assumed",
        ),
        RestartPhase(
            name="rendezvous",
            seconds=RENDEZVOUS_S,
            reason="ranks given out, one barrier",
            source=_NVRX,
        ),
        _init(devices, recovery, node_share=node_share),
        _load(
            checkpoint_bytes,
            nodes=nodes,
            devices=devices,
            recovery=recovery,
            node_share=node_share,
        ),
    )


def _detect(recovery: RecoverySettings, *, step_s: float, node_share: float) -> RestartPhase:
    hang_s, by = recovery.hang_s(step_s)
    return RestartPhase(
        name="detect",
        seconds=POLL_S + SILENT_SHARE * hang_s + node_share * NODE_SILENT_S,
        reason=f"a dead process at once; {SILENT_SHARE:.1%} are silent and found by {by}; "
        f"{_of_nodes(node_share)}, which is gone after {NODE_SILENT_S:g} s of silence",
        source="ByteRobust, SOSP 2025 (second hand)",
    )


def _init(devices: int, recovery: RecoverySettings, *, node_share: float) -> RestartPhase:
    whole_s = log_log(devices, PUBLISHED_RESTARTS)
    in_place_s = log_log(devices, PUBLISHED_IN_PLACE) - (
        PARKED_SAVES_S if recovery.has_standby else 0.0
    )
    before_s = POLL_S + TEARDOWN_S + RENDEZVOUS_S
    parked = ", by parked processes" if recovery.has_standby else ""
    return RestartPhase(
        name="init",
        # Published times run from the crash to the next step: earlier phases must not count twice.
        seconds=max(0.0, _mean(node=whole_s, process=in_place_s, node_share=node_share) - before_s),
        reason=f"processes, imports, communicators, data, first step: what the phases before leave "
        f"of {whole_s:.0f} s with another node ({_of_nodes(node_share)}) and {in_place_s:.0f} s "
        f"in place{parked}, published for about this size",
        source=_HYPERPOD,
    )


def _load(
    checkpoint_bytes: float,
    *,
    nodes: int,
    devices: int,
    recovery: RecoverySettings,
    node_share: float,
) -> RestartPhase:
    from_storage_s = checkpoint_bytes / (nodes * READ_BYTES_PER_S_PER_NODE)
    reason = f"one checkpoint at {READ_BYTES_PER_S_PER_NODE / 1e9:.1f} GB/s per node"
    in_place_s = from_storage_s
    if recovery.snapshot_every is not None:
        # Every device copies its own part back over its own PCIe link, so no storage is read.
        in_place_s = checkpoint_bytes / devices / STAGING_BYTES_PER_S
        reason += f"; from memory where the node stays, {format_seconds(in_place_s)}"
    return RestartPhase(
        name="load",
        seconds=_mean(node=from_storage_s, process=in_place_s, node_share=node_share),
        reason=reason,
        source="BLOOM 176B: 2.3 TB in 40 s from 48 nodes, bigscience chronicles",
    )


def _mean(*, node: float, process: float, node_share: float) -> float:
    """Return the mean cost of a lost node and a lost process."""
    return node_share * node + (1 - node_share) * process


def _of_nodes(node_share: float) -> str:
    return f"{node_share:.0%} of failures take a node away"


def first_init_s(devices: int) -> float:
    """Return the seconds before a run's first step: a restart without detection or teardown."""
    return max(RENDEZVOUS_S, log_log(devices, PUBLISHED_RESTARTS) - POLL_S - TEARDOWN_S)


def replay_phase(
    *,
    interval_s: float,
    durable_lag_s: float,
    memory: MemoryTier | None,
    node_share: float = HARDWARE_SHARE,
    outlives_nodes: bool = False,
) -> RestartPhase:
    """Compute the work of one failure that is done again, on average.

    Args:
        interval_s: Training time between two checkpoints.
        durable_lag_s: Time from the end of a save's blocking until that save can be resumed from.
        memory: Snapshots. If a process is lost and no node, only work since the last one is lost.
        outlives_nodes: The same where a node is lost, whose peer has its snapshots.
    """
    lag = f" and {format_seconds(durable_lag_s)} until a save is durable" if durable_lag_s else ""
    seconds = interval_s / 2 + durable_lag_s
    reason = f"half of the {format_seconds(interval_s)} between checkpoints{lag}"
    if memory is not None and outlives_nodes:
        seconds = memory.interval_s / 2
        reason = (
            f"half of the {memory.every:,} steps between snapshots ({memory.reason}), of a lost "
            "node by its neighbour's copy"
        )
    elif memory is not None:
        seconds = _mean(node=seconds, process=memory.interval_s / 2, node_share=node_share)
        reason += (
            f"; where the node stays half of the {memory.every:,} steps between snapshots "
            f"({memory.reason})"
        )
    return RestartPhase(
        name="replay",
        seconds=seconds,
        reason=reason,
        source="failures fall anywhere in an interval",
    )
