"""Differences between runs: resolved settings with every default, and environment.

``auto`` is resolved too. Only differences are listed. A setting that a resume changed
differs by itself, and is shown with all the values that it had.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.formulas import Batch
from shardyard.config.resolved import Resolved, flatten, settings_in
from shardyard.report.run_data import AttemptRecord, RunRecord
from shardyard.units import ABSENT

OWN = ("run.id", "run.dir", "run.origins")
"""Settings that every run has a value of its own for."""
_PACKAGES = ("torch", "transformers", "torchao")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting, or one fact about where a run ran."""

    name: str
    values: tuple[str, ...]
    """Value in each run, in the order they were named; `` -> `` where a resume changed it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def settings_that_differ(records: Sequence[RunRecord]) -> list[Difference]:
    """By dotted name, in the order of the schema; and the learning rate that scaling made of it."""
    found = _differing([[_settings(a) for a in r.attempts] for r in records])
    attempts = [[a for a in r.attempts if a.resolved] for r in records]
    scales = any(_scaling(a.resolved) for run in attempts for a in run)
    rates = [[_scaled_rate(a) for a in run] for run in attempts] if scales else []
    return [*found, *_differing(rates)]


def environment_differences(records: Sequence[RunRecord]) -> list[Difference]:
    """Data, size of the model, ranks, devices, versions."""
    return _differing([[_environment(a) for a in r.attempts] for r in records])


def _differing(runs: Sequence[Sequence[dict[str, str]]]) -> list[Difference]:
    """
    Args:
        runs: Of each run, of each attempt: value by name; a name that is missing is not known.
    """
    names = dict.fromkeys(name for run in runs for attempt in run for name in attempt)
    found = []
    for name in names:
        values = tuple(_value_history(name, run) for run in runs)
        if len(set(values)) > 1 or any(" -> " in value for value in values):
            found.append(Difference(name=name, values=values))
    return found


def _value_history(name: str, attempts: Sequence[dict[str, str]]) -> str:
    """Each value once, in the order in which attempts had it."""
    distinct: list[str] = []
    for attempt in attempts:
        value = attempt.get(name)
        if value is not None and (not distinct or distinct[-1] != value):
            distinct.append(value)
    return " -> ".join(distinct) or ABSENT


def _settings(attempt: AttemptRecord) -> dict[str, str]:
    """Settings of a recipe, or the config of a script."""
    if attempt.script is not None:
        return {name: _text(value) for name, value in flatten(attempt.script.config).items()}
    resolved = attempt.resolved
    if resolved is None:
        return {}
    found = settings_in(resolved.recipe.model_dump(mode="json"))
    told = {name: _text(value) for name, value in found.items() if name not in OWN}
    if not resolved.phases:
        return told
    for number, phase in enumerate(resolved.phases, start=1):
        own = settings_in(phase.recipe.model_dump(mode="json"))
        told |= {
            f"phases.{number}.{name}": _text(value)
            for name, value in own.items()
            if value != found.get(name) and name not in OWN
        }
    return told


def _scaling(resolved: Resolved | None) -> bool:
    return resolved is not None and resolved.recipe.optim.lr_scaling != "none"


def _scaled_rate(attempt: AttemptRecord) -> dict[str, str]:
    """The learning rate that the schedule starts from, on the ranks that there were."""
    ranks = (attempt.last("rendezvous") or attempt.last("attempt_started") or {}).get("world_size")
    if attempt.resolved is None or not isinstance(ranks, int):
        return {}
    optim = attempt.resolved.recipe.optim
    if not isinstance(optim.lr, int | float):
        return {}
    rate = optim.lr * Batch.of(optim, devices=ranks).lr_factor
    return {"learning rate, by optim.lr_scaling": f"{rate:g}"}


def _environment(attempt: AttemptRecord) -> dict[str, str]:
    values: dict[str, Any] = {}
    ready, resolved = attempt.last("model_ready") or {}, attempt.resolved
    values["parameters"] = ready.get("parameters")
    if resolved is not None:
        values["data fingerprint"] = resolved.data.fingerprint
        values["steps of the whole run"] = resolved.steps
    rendezvous = attempt.last("rendezvous") or attempt.last("attempt_started") or {}
    values["ranks"] = rendezvous.get("world_size")
    manifest = flatten(attempt.manifest)
    for key, name in (
        ("hostname", "host"), ("machine.name", "device"), ("machine.cores", "cores"),
        ("shardyard", "shardyard"),
        ("git.commit", "commit"), ("python", "python"),
    ):  # fmt: skip
        values[name] = manifest.get(key)
    values |= {name: manifest.get(f"packages.{name}") for name in _PACKAGES}
    return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
