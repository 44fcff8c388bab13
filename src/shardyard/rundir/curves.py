"""What of a line of metrics.jsonl is a point of a curve, whoever draws it."""

from typing import Any

from shardyard.rundir.metric_keys import METRIC_KEYS, ROUTER_KEYS

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
    """Name -> value: ``train/loss``, ``eval/loss``; what a task adds to its lines too.

    A null is no point of a curve, and left out.
    """
    if "eval" in line:
        found = {f"eval/{name}": value for name, value in line["eval"].items()}
    else:
        names = [*_OF_STEPS, *(name for name in line if name not in METRIC_KEYS)]
        found = {f"train/{name}": line.get(name) for name in names}
    return {name: value for name, value in found.items() if _is_number(value)}


def axes_of(line: dict[str, Any]) -> dict[str, float]:
    """What curves can be drawn against beside the step; empty for an evaluation's line."""
    if "eval" in line:
        return {}
    return {name: line[name] for name in _AXES if _is_number(line.get(name))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
