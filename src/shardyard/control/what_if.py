"""Plan a recipe again with other settings, with measurements of earlier runs.

A run has these settings where its model, batch, layout, formats, memory settings and
machines are the same. What it was trained on, how long and where it was saved may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from shardyard.config.phases import of_phases
from shardyard.config.published_pictures import train_image_count
from shardyard.config.resolve import PartialResolution
from shardyard.config.resolved import settings_in
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.request import Request, check_compatibility
from shardyard.errors import RecipeError, ShardyardError
from shardyard.hardware.machine import Machine
from shardyard.io.files import read_json
from shardyard.planner.calibration import Calibration
from shardyard.planner.images.step import check_unplanned_settings
from shardyard.planner.phases import plan_phases
from shardyard.planner.plan import Plan
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


# The plan of a request: as it is asked, and again with some of its settings changed.
#
# One way from a recipe to its plan for both, so that a changed recipe comes to what `shardyard
# plan` says of it.


def check_plannable(request: Request, preview: PartialResolution) -> None:
    """Hold what is settled of a request against its model.

    Raises:
        RecipeError: All that does not fit, or that a plan of images does not count.
    """
    for phase in preview.of_phases:
        check_compatibility(phase.recipe, request.shape)
        if request.network is not None and (
            problems := list(check_unplanned_settings(phase.recipe))
        ):
            raise RecipeError(problems)


def plan_of(
    request: Request,
    preview: PartialResolution,
    machine: Machine | None,
    calibration: Calibration | None,
) -> Plan:
    """The plan of what is settled of a request, which must be all that needs no data."""
    devices = preview.recipe.cluster.devices
    assert isinstance(devices, int)  # an instance and a machine both say how many
    return plan_phases(
        preview.of_phases,
        shape=request.planned_model,
        world_size=preview.recipe.cluster.nodes * devices,
        devices_per_node=devices,
        machine=machine,
        calibration=calibration,
        epoch_samples=train_image_count(request.recipe),
    )


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """A recipe with other settings, settled, and its plan."""

    settings: tuple[str, ...]
    """Changed settings, as overrides."""
    recipe: Recipe
    plan: Plan


class Replanner:
    """Plans a request again and again with other settings; of a run with phases, one of them.

    What the recipe leaves open stays open, but for the batch: another micro-batch would hide what a
    setting does to memory.
    """

    def __init__(
        self,
        request: Request,
        resolved: Recipe,
        *,
        phase: int,
        machine: Machine | None,
        calibration: Calibration | None,
        priced: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        """Args:
        resolved: What the recipe, or its phase, came to.
        phase: Which of the phases, from 0; 0 of a run without.
        priced: Puts in another price than the table's.
        """
        self.requested = of_phases(request.recipe)[phase]
        self.resolved = resolved
        self._request, self._machine = request, machine
        self._calibration, self._priced = calibration, priced
        self._batch_overrides = _batch_overrides(self.requested, resolved)
        self._cache: dict[tuple[str, ...], Replanned] = {}

    def plan(self, settings: Sequence[str]) -> Replanned:
        """The plan with these overrides.

        Raises:
            RequestError: The recipe would be wrong, or cannot be planned.
        """
        key = tuple(settings)
        if key not in self._cache:
            self._cache[key] = self._planned(key)
        return self._cache[key]

    def _planned(self, settings: tuple[str, ...]) -> Replanned:
        changed = load_checked_recipe(
            self.requested, [*self._batch_overrides, *settings], to_train=False
        )
        request = replace(self._request, recipe=changed)
        preview = request.preview(self._machine)
        check_plannable(request, preview)
        plan = plan_of(request, preview, self._machine, self._calibration)
        return Replanned(settings=settings, recipe=preview.recipe, plan=self._priced(plan))


def _batch_overrides(requested: Recipe, resolved: Recipe) -> list[str]:
    """The batch that was settled, as overrides of what was asked."""
    settings = []
    if requested.optim.micro_batch == "auto":
        settings.append(f"optim.micro_batch={resolved.optim.micro_batch}")
    if requested.optim.global_batch == "auto" and requested.optim.batch_per_device is None:
        settings.append(f"optim.global_batch={resolved.optim.global_batch}")
    return settings
