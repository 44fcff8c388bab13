"""The plan of a request: as it is asked, and again with some of its settings changed.

One way from a recipe to its plan for both, so that a changed recipe comes to what `shardyard
plan` says of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardyard.config.phases import of_phases
from shardyard.config.resolve import PartialResolution
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.run_length import train_image_count
from shardyard.config.schema.recipe import Recipe
from shardyard.control.request import Request, check_compatibility
from shardyard.errors import RecipeError
from shardyard.hardware.machine import Machine
from shardyard.planner.calibration import Calibration
from shardyard.planner.images.step import check_unplanned_settings
from shardyard.planner.phases import plan_phases
from shardyard.planner.plan import Plan


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
