"""Measured speed and memory of earlier runs, which a plan compares with its prediction.

A run has a recipe's settings where its model, batch, layout, formats, memory settings and
machines are the same. What it was trained on, how long and where it was saved may differ.
"""

from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from shardyard.config.resolved import settings_in
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import ShardyardError
from shardyard.io.files import read_json
from shardyard.planner.plan_diff import RunMeasurement
from shardyard.report.against_plan import median_tokens_per_s, memory_by_rank, steady
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir

MOST_RUNS = 200
"""Folders that are looked at, the newest."""

LEAST_STEPS = 3
"""After the first; the median of fewer is chance."""

_SECTIONS = ("model", "parallel", "precision", "memory")
_SETTINGS = (
    "task.name", "data.seq_len", "data.attend_across_documents", "data.pack", "optim.name",
    "optim.micro_batch", "optim.global_batch", "optim.batch_per_device", "optim.ema_decay",
    "cluster.nodes", "cluster.devices", "cluster.device", "cluster.instance", "cluster.file",
)  # fmt: skip
_SAID_OTHERWISE = ("parallel.strategy", "model.revision", "model.dir", "model.config")
"""Settings of these sections that change no speed, or that another setting also says."""


class PastRuns:
    """The runs in a folder, by the settings that their speed and memory hang on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, recipe: Recipe) -> RunMeasurement | None:
        """Return what the newest run of a settled recipe's kind measured; None: there is none."""
        wanted = _kind(settings_in(recipe.model_dump(mode="json")))
        for run, kind in self._kinds:
            if kind == wanted and (found := _measured(run)) is not None:
                return found
        return None

    @cached_property
    def _kinds(self) -> list[tuple[RunDir, dict[str, Any]]]:
        """Each run and its kind, the newest first."""
        try:
            entries = [e for e in self._folder.iterdir() if (e / "recipe.yaml").is_file()]
            newest = sorted(entries, key=lambda each: -each.stat().st_mtime)[:MOST_RUNS]
        except OSError:  # a folder that is not there, or not ours, holds nothing to compare
            return []
        found = [(run, _kind_of_run(run)) for run in map(RunDir, newest)]
        return [(run, kind) for run, kind in found if kind is not None]


def _kind_of_run(run: RunDir) -> dict[str, Any] | None:
    """None: it has not begun, was changed between attempts, has phases, or cannot be read."""
    kinds = []
    for number in run.attempts():
        try:
            content = read_json(run.resolved(number))
            if content["phases"]:
                return None
            settings = {name: entry["value"] for name, entry in content["settings"].items()}
            kinds.append(_kind(settings))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return kinds[-1] if kinds and all(kind == kinds[-1] for kind in kinds) else None


def _kind(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that speed and memory depend on, out of settings in JSON form."""
    return {
        name: value
        for name, value in settings.items()
        if (name.partition(".")[0] in _SECTIONS or name in _SETTINGS)
        and name not in _SAID_OTHERWISE
    }


def _measured(run: RunDir) -> RunMeasurement | None:
    try:
        record = read_run(run)
    except ShardyardError:
        return None
    times = steady(record.steps, "step_time_s")
    if len(times) < LEAST_STEPS:
        return None
    peaks = [int(row["peak_bytes"]) for row in memory_by_rank(record) if row.get("peak_bytes")]
    return RunMeasurement(
        run_id=run.run_id,
        steps=len(times),
        step_s=median(times),
        tokens_per_s=median_tokens_per_s(record),
        memory_bytes=max(peaks, default=None),
    )
