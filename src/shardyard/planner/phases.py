"""The plan of a run: of its recipe, or of its phases, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shardyard.config.formulas import is_elastic, steps_between_snapshots
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.hardware.machine import Machine
from shardyard.planner.calibration import Calibration
from shardyard.planner.dispatch import Model
from shardyard.planner.plan import Plan, plan_recipe
from shardyard.planner.throughput import sum_or_none


def plan(
    resolved: Resolved, *, world_size: int, devices_per_node: int, machine: Machine | None
) -> Plan:
    """Predict a resolved recipe.

    Args:
        machine: A machine of the run; not asked where ``cluster.instance`` or ``cluster.file``
            names one. None: what depends on the device stays open.

    Raises:
        RequestError: The degrees do not fit the world size, or the instance is not known.
    """
    return plan_phases(
        resolved.of_phases,
        shape=resolved.network or require_shape(resolved.shape),
        world_size=world_size,
        devices_per_node=devices_per_node,
        machine=machine,
        epoch_samples=resolved.data.train_samples if resolved.network else None,
        data=resolved.data,
    )


class Phase(Protocol):
    """A phase of a run, or a run without phases, resolved as far as it can be."""

    @property
    def recipe(self) -> Recipe:
        """Its settings."""

    @property
    def reasons(self) -> Mapping[str, str]:
        """Dotted setting -> reason, for each that was open."""

    @property
    def steps(self) -> int | None:
        """Steps at the batch that it begins with. None: not known before the data is prepared."""


def plan_phases(
    phases: Sequence[Phase],
    *,
    shape: Model,
    world_size: int,
    devices_per_node: int,
    machine: Machine | None,
    calibration: Calibration | None = None,
    epoch_samples: int | None = None,
    data: DatasetMetadata | None = None,
) -> Plan:
    """Plan like ``plan``, before the data is prepared: ``steps`` and ``data`` may still be open."""
    plans = [
        replace(
            plan_recipe(
                phase.recipe,
                shape=shape,
                steps=phase.steps,
                world_size=world_size,
                devices_per_node=devices_per_node,
                machine=machine,
                calibration=calibration,
                epoch_samples=epoch_samples,
                data=data,
            ),
            snapshots_reason=_snapshots_reason(phase),
        )
        for phase in phases
    ]
    if len(plans) == 1:
        return plans[0]
    return replace(
        # The run has to get through each phase, so the one that needs most memory decides the fit.
        max(plans, key=lambda each: each.device_bytes),
        steps=sum_or_none(each.steps for each in plans),
        failures=None,
        failures_reason="each phase has its own",
        advances=all(each.advances for each in plans),
        phases=tuple(plans),
    )


def _snapshots_reason(phase: Phase) -> str:
    """Why an elastic run takes snapshots, or none; empty: its size is fixed."""
    if not is_elastic(phase.recipe):
        return ""
    every = steps_between_snapshots(phase.recipe)
    asked = f"elastic.snapshot_every={'null' if every is None else every}"
    return phase.reasons.get("elastic.snapshot_every", asked)
