"""What one failure costs, phase by phase: the restart, and the work that is done again.

The names are those that the events of a run account for, so that a plan and a run can be compared.
"""

from dataclasses import dataclass

from shardyard.planner.failure_rates import log_log
from shardyard.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One part of a restart: seconds of one failure, and why so many."""

    name: str
    seconds: float
    reason: str
    source: str


SILENT_SHARE = 5_948 / (38_236 + 5_948)
"""Of failures, those that no process dies of (hangs, mostly): found by a timeout.
Source: ByteRobust, SOSP 2025 (second hand): 5,948 implicit beside 38,236 explicit failures."""

POLL_S = 0.1
"""Between two looks of the agent at its workers (``elastic/agent.py``)."""

TEARDOWN_S = 0.5
"""Destroying process groups; workers are killed, so no kernel is waited for.
Source: NVIDIA Resiliency Extension, usage guide of in-process restart, "Restart latency"."""

RENDEZVOUS_S = 1.0
"""0.5 s to give out ranks and 0.5 s for a barrier of 16k ranks; the source of ``TEARDOWN_S``."""

PUBLISHED_RESTARTS = ((16.0, 310.0), (256.0, 292.0), (2304.0, 1350.0))
"""(GPUs, seconds) from a crash to training again, by restarting the job; the last is the middle of
"15 to 30 min". Source: AWS Machine Learning Blog, 2025-12-15, checkpointless training on HyperPod,
its baselines."""

READ_BYTES_PER_S_PER_NODE = 2.3e12 / 40 / 48
"""1.2 GB/s: 48 nodes wrote BLOOM's 2.3 TB in 40 s, on GPFS over NVMe; reading is taken to be as
fast. Source: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md."""

_NVRX = "NVIDIA Resiliency Extension, in-process usage guide, Restart latency"
_HYPERPOD = "AWS ML blog 2025-12-15, HyperPod checkpointless training, baselines"


def restart_phases(
    *, nodes: int, devices: int, checkpoint_bytes: float, collective_timeout_s: float
) -> tuple[Phase, ...]:
    """Phases of one restart with a spare node at hand, without the work done again.

    Args:
        checkpoint_bytes: One checkpoint on disk, all ranks.
        collective_timeout_s: ``elastic.collective_timeout_s``: how long a silent failure lasts.
    """
    published_s = log_log(devices, PUBLISHED_RESTARTS)
    init_s = max(0.0, published_s - POLL_S - TEARDOWN_S - RENDEZVOUS_S)
    read_bytes_per_s = nodes * READ_BYTES_PER_S_PER_NODE
    return (
        Phase(
            name="detect",
            seconds=POLL_S + SILENT_SHARE * collective_timeout_s,
            reason=f"a dead process at once; {SILENT_SHARE:.1%} are silent and take "
            f"elastic.collective_timeout_s, {collective_timeout_s:g} s",
            source="ByteRobust, SOSP 2025 (second hand)",
        ),
        Phase(
            name="teardown",
            seconds=TEARDOWN_S,
            reason="workers are killed, not asked",
            source=_NVRX,
        ),
        Phase(
            name="reschedule",
            seconds=0.0,
            reason="a spare node waits; without one, its replacement's time",
            source="assumed",
        ),
        Phase(
            name="rendezvous",
            seconds=RENDEZVOUS_S,
            reason="ranks given out, one barrier",
            source=_NVRX,
        ),
        Phase(
            name="init",
            seconds=init_s,
            reason=f"job, processes, imports, communicators, data, first step: what the phases "
            f"before leave of {published_s:.0f} s, published for restarts at about this size",
            source=_HYPERPOD,
        ),
        Phase(
            name="load",
            seconds=checkpoint_bytes / read_bytes_per_s,
            reason=f"one checkpoint at {READ_BYTES_PER_S_PER_NODE / 1e9:.1f} GB/s per node",
            source="BLOOM 176B: 2.3 TB in 40 s from 48 nodes, bigscience chronicles",
        ),
    )


def first_init_s(phases: tuple[Phase, ...]) -> float:
    """Seconds before the first step of a run: what a restart also does, and nothing to load."""
    return sum(phase.seconds for phase in phases if phase.name in ("rendezvous", "init"))


def replay_phase(*, interval_s: float, durable_lag_s: float) -> Phase:
    """Work of one failure that is done again, on average.

    Args:
        interval_s: Training time between two checkpoints.
        durable_lag_s: From going on after a save until that save can be resumed from.
    """
    lag = f" and {format_seconds(durable_lag_s)} until a save is durable" if durable_lag_s else ""
    return Phase(
        name="replay",
        seconds=interval_s / 2 + durable_lag_s,
        reason=f"half of the {format_seconds(interval_s)} between checkpoints{lag}",
        source="failures fall anywhere in an interval",
    )
