"""Step, time and cost at which each run reached a target: the first evaluation that counts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.tasks import BITS_PER_BYTE, Metric, metrics_of
from shardyard.errors import RequestError
from shardyard.report.compare.curves import AXES, RunCurves
from shardyard.report.run_data import RunRecord

Target = Mapping[str, float]
"""Metric -> value, as run.target has it: all of them at once."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """One run and one target."""

    target: dict[str, float]
    run: str
    at: dict[str, float | None]
    """By axis; empty: the target was not reached."""
    why_not: str
    """And what it came to; empty where it was reached."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def parse_target(text: str) -> tuple[str, float]:
    """``loss=2.0``, as ``--target`` takes it.

    Raises:
        RequestError: It is not a metric and a number.
    """
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not name or not equals or number != number:
        raise RequestError(
            f"--target {text!r} is not a metric and a number. Give it as --target loss=2.0; "
            "several are reached together."
        )
    return name, number


def targets_of(records: Sequence[RunRecord], requested: Target) -> list[dict[str, float]]:
    """Return the requested targets; without any, each target of the runs' recipes, once.

    Raises:
        RequestError: No run is evaluated by a requested metric.
    """
    if requested:
        _check_metrics(records, requested)
        return [dict(requested)]
    targets: list[dict[str, float]] = []
    for record in records:
        own = None if record.resolved is None else record.resolved.recipe.run.target
        if own and dict(own) not in targets:
            targets.append(dict(own))
    return targets


def reached(record: RunRecord, curves: RunCurves, target: Target) -> Reached:
    """Return the first evaluation that counts and meets the whole target."""

    def result(reason: str, at: Mapping[str, float | None]) -> Reached:
        return Reached(target=dict(target), run=record.run.run_id, at=dict(at), why_not=reason)

    metrics = _metrics(record)
    if not curves.evaluations:
        return result("never evaluated", {})
    scored = {name for _, scores in curves.evaluations for name in scores}
    unknown = [name for name in target if name not in metrics or name not in scored]
    if unknown:
        return result(f"not evaluated by {', '.join(unknown)}", {})
    for place, scores in curves.evaluations:
        values = {name: scores.get(name) for name in target}
        if all(
            value is not None and metrics[name].is_reached(value, target[name])
            for name, value in values.items()
        ):
            return result("", {axis: place[axis] for axis in AXES})
    best = ", ".join(_best(curves, name, metrics[name]) for name in target)
    return result(f"not reached: {best}", {})


def _best(curves: RunCurves, name: str, metric: Metric) -> str:
    found = [
        (value, place["steps"])
        for place, scores in curves.evaluations
        if (value := scores.get(name)) is not None
    ]
    if not found:
        return f"{name} was never a number"
    value, step = (max if metric.is_better_higher else min)(found, key=lambda each: each[0])
    return f"best {name} {value:.4g} at step {step:,.0f}"


def _metrics(record: RunRecord) -> Mapping[str, Metric]:
    """Return the metrics of the run's task; for an unknown task, those that all text tasks have."""
    usual = {"loss": Metric(), "perplexity": Metric(), BITS_PER_BYTE: Metric()}
    if record.resolved is None:
        return usual
    try:
        recipe = record.resolved.recipe
        return metrics_of(recipe.task, recipe.data.eval_sets, recipe.data.eval_tasks)
    except RequestError:  # of a package that is not here
        return usual


def _check_metrics(records: Sequence[RunRecord], requested: Target) -> None:
    known = dict.fromkeys(name for record in records for name in _metrics(record))
    for name in requested:
        if name not in known:
            raise RequestError(
                f"--target {name}={requested[name]:g}: no run of these is evaluated by {name!r}. "
                f"They are by {', '.join(known)}."
            )
