"""The plan of a request: as it is asked, and again with some of its settings changed.

One way from a recipe to its plan for both, so that a changed recipe comes to what `shardyard plan`
says of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardyard.config.phases import of_phases
from shardyard.config.published_pictures import train_pictures
from shardyard.config.resolve import Preview
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.control.request import Request, refuse_misfits
from shardyard.errors import RecipeError
from shardyard.hardware.machine import Machine
from shardyard.planner.calibration import Calibration
from shardyard.planner.images.image_recipe import uncounted
from shardyard.planner.phases import plan_phases
from shardyard.planner.plan import Plan


def refuse_unplannable(request: Request, preview: Preview) -> None:
    """Hold what is settled of a request against its model.

    Raises:
        RecipeError: All that does not fit, or that a plan of images does not count.
    """
    for phase in preview.of_phases:
        refuse_misfits(phase.recipe, request.shape)
        if request.network is not None and (problems := list(uncounted(phase.recipe))):
            raise RecipeError(problems)


def plan_of(
    request: Request,
    preview: Preview,
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
        epoch_samples=train_pictures(request.recipe),
    )


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """A recipe with other settings, settled, and its plan."""

    settings: tuple[str, ...]
    """What was changed, as overrides."""
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
        settled: Recipe,
        *,
        phase: int,
        machine: Machine | None,
        calibration: Calibration | None,
        priced: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        """Args:
        settled: What the recipe, or its phase, came to.
        phase: Which of the phases, from 0; 0 of a run without.
        priced: Puts in another price than the table's.
        """
        self.asked = of_phases(request.recipe)[phase]
        self.settled = settled
        self._request, self._machine = request, machine
        self._calibration, self._priced = calibration, priced
        self._held = _held(self.asked, settled)
        self._known: dict[tuple[str, ...], Replanned] = {}

    def plan(self, settings: Sequence[str]) -> Replanned:
        """The plan with these overrides.

        Raises:
            RequestError: The recipe would be wrong, or cannot be planned.
        """
        key = tuple(settings)
        if key not in self._known:
            self._known[key] = self._planned(key)
        return self._known[key]

    def _planned(self, settings: tuple[str, ...]) -> Replanned:
        changed = load_checked_recipe(self.asked, [*self._held, *settings], to_train=False)
        request = replace(self._request, recipe=changed)
        preview = request.preview(self._machine)
        refuse_unplannable(request, preview)
        plan = plan_of(request, preview, self._machine, self._calibration)
        return Replanned(settings=settings, recipe=preview.recipe, plan=self._priced(plan))


def _held(asked: Recipe, settled: Recipe) -> list[str]:
    """The batch that was settled, as overrides of what was asked."""
    held = []
    if asked.optim.micro_batch == "auto":
        held.append(f"optim.micro_batch={settled.optim.micro_batch}")
    if asked.optim.global_batch == "auto" and asked.optim.batch_per_device is None:
        held.append(f"optim.global_batch={settled.optim.global_batch}")
    return held
