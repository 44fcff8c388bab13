"""Metrics of a run for Prometheus: a row a metric.

Every sample has only the labels ``run_id`` and ``node``; text written by users never
becomes a label.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shardyard.rundir.jsonl import METRIC_KEYS, ROUTER_KEYS


@dataclass(frozen=True, kw_only=True)
class RunMetric:
    """One metric."""

    name: str
    """With its unit, as Prometheus names them; a counter's ends in ``_total``."""
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    key: str = ""
    """In a step's line of metrics.jsonl; empty: it is counted elsewhere."""
    label: str = ""
    """Label next to run_id and node, whose values Shardyard sets."""


STEPS = (
    RunMetric(name="shardyard_step", key="step", help="Last finished step."),
    RunMetric(name="shardyard_loss", key="loss", help="Loss of that step."),
    RunMetric(name="shardyard_learning_rate", key="lr", help="Learning rate of that step."),
    RunMetric(name="shardyard_gradient_norm", key="grad_norm", help="Norm before clipping."),
    RunMetric(
        name="shardyard_tokens_total",
        key="tokens",
        kind="counter",
        help="Tokens read since the beginning of the run; steps done twice count once.",
    ),
    RunMetric(
        name="shardyard_samples_total",
        key="samples",
        kind="counter",
        help="Samples read since the beginning of the run; steps done twice count once.",
    ),
    RunMetric(name="shardyard_tokens_per_second", key="tokens_per_s", help="Of that step."),
    RunMetric(name="shardyard_samples_per_second", key="samples_per_s", help="Of that step."),
    RunMetric(name="shardyard_mfu_ratio", key="mfu", help="Model FLOP utilisation, 0 to 1."),
    RunMetric(
        name="shardyard_step_seconds",
        key="step_time_s",
        help="Of that step, without evaluation and checkpoint.",
    ),
    RunMetric(
        name="shardyard_data_wait_seconds",
        key="data_wait_s",
        help="Of that step: waiting for data.",
    ),
    RunMetric(
        name="shardyard_checkpoint_blocked_seconds",
        key="checkpoint_blocked_s",
        help="Training stood still for a checkpoint after that step.",
    ),
    RunMetric(
        name="shardyard_peak_memory_bytes",
        key="peak_memory_bytes",
        help="Most that the fullest rank had allocated.",
    ),
    RunMetric(name="shardyard_world_size", key="world_size", help="Ranks of that step."),
)
"""Metrics of the newest step's line."""

STATES = ("running", "draining", "finished", "drained", "failed")
"""States of ``state.py`` that an agent knows of its own attempt."""

STATE = RunMetric(
    name="shardyard_run_state",
    label="state",
    help="The attempt, counted from 1, where its state is this one (running, draining, finished, "
    "drained, failed), else 0.",
)
STEP_AGE = RunMetric(
    name="shardyard_step_age_seconds",
    help="Since the newest step or evaluation, or the start of this node's agent, was seen.",
)
CHECKPOINT_STEP = RunMetric(
    name="shardyard_checkpoint_step", help="Step of the newest durable checkpoint."
)
CHECKPOINT_EVERY = RunMetric(
    name="shardyard_checkpoint_every_steps",
    help="Steps between checkpoints; with checkpoint.every=auto what the run came to last.",
)
CHECKPOINT_AGE = RunMetric(
    name="shardyard_checkpoint_age_seconds",
    help="Since the newest durable checkpoint, or the start of this node's agent, was seen.",
)
EVENTS = RunMetric(
    name="shardyard_events_total",
    kind="counter",
    label="kind",
    help="Events of the run: worker_lost, worker_hung, node_lost, node_left_out, straggler, "
    "device_problem, ...",
)
COST = RunMetric(name="shardyard_cost_usd", help="What the run has cost, all attempts together.")
COST_RATE = RunMetric(name="shardyard_cost_usd_per_hour", help="What it costs now, all nodes.")
RANK_STEP = RunMetric(
    name="shardyard_rank_step", label="local_rank", help="Step that a rank of this node is in."
)
RANK_COMPUTE = RunMetric(
    name="shardyard_rank_compute_seconds",
    label="local_rank",
    help="Of a rank's last step, what it did not spend in collectives.",
)

_Kind = Literal["gauge", "counter"]
_OF_A_DEVICE: tuple[tuple[str, str, _Kind, str], ...] = (
    ("utilisation_ratio", "utilisation", "gauge", "Share of the time in which any kernel ran."),
    ("memory_used_bytes", "memory_used_bytes", "gauge", "Of its memory."),
    (
        "memory_copy_ratio",
        "memory_copy_utilisation",
        "gauge",
        "Share of the time in which memory was read or written.",
    ),
    ("sm_clock_megahertz", "sm_clock_mhz", "gauge", "Clock of its multiprocessors."),
    ("temperature_celsius", "temperature_c", "gauge", "Its temperature."),
    ("power_watts", "power_w", "gauge", "Its power."),
    ("ecc_errors_total", "ecc_uncorrected", "counter", "Memory errors not corrected."),
    ("pcie_sent_bytes_total", "pcie_sent_bytes", "counter", "Over PCIe."),
    ("pcie_received_bytes_total", "pcie_received_bytes", "counter", "Over PCIe."),
    ("nvlink_sent_bytes_total", "nvlink_sent_bytes", "counter", "Over all its links."),
    ("nvlink_received_bytes_total", "nvlink_received_bytes", "counter", "Over all its links."),
)
DEVICES = tuple(
    RunMetric(name=f"shardyard_device_{name}", key=key, kind=kind, label="device", help=words)
    for name, key, kind, words in _OF_A_DEVICE
)
"""Metrics of the newest line of the node's telemetry, where it has devices."""

ALL = (
    STATE, *STEPS, STEP_AGE, CHECKPOINT_STEP, CHECKPOINT_AGE, CHECKPOINT_EVERY, EVENTS, COST,
    COST_RATE, RANK_STEP, RANK_COMPUTE, *DEVICES,
)  # fmt: skip


# What of a line of metrics.jsonl is a point of a curve, whoever draws it.

_OF_STEPS = (
    "loss",
    "grad_norm",
    "loss_scale",
    "lr",
    "tokens_per_s",
    "step_time_s",
    "data_wait_s",
    "mfu",
    "peak_memory_bytes",
    *ROUTER_KEYS,
)
_AXES = ("epoch", "tokens", "samples")


def scalars_of(line: dict[str, Any]) -> dict[str, float]:
    """Name -> value: ``train/loss``, ``eval/loss``, ``eval/SOURCE/loss`` of a source of a mixture
    or a set of data.eval_sets; what a task adds to its lines too.

    A null is no point of a curve, and left out.
    """
    if "eval" in line:
        groups = {"eval": line["eval"]}
        groups |= {f"eval/{name}": each for name, each in line.get("eval_sources", {}).items()}
        found = {f"{at}/{name}": each[name] for at, each in groups.items() for name in each}
    else:
        names = [*_OF_STEPS, *(name for name in line if name not in METRIC_KEYS)]
        found = {f"train/{name}": line.get(name) for name in names}
    return {name: value for name, value in found.items() if _is_number(value)}


def axes_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the axes of a line's curves, next to the step; empty for an evaluation's line."""
    if "eval" in line:
        return {}
    return {name: line[name] for name in _AXES if _is_number(line.get(name))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
