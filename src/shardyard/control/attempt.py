"""One attempt of a run on this machine: written down, started, followed, summed up."""

import sys
from dataclasses import dataclass

from shardyard.config.image_classes import class_notes
from shardyard.config.load import dump_recipe
from shardyard.config.plug_ins_used import plug_ins_of
from shardyard.config.resolved import DataFacts, Resolved
from shardyard.config.rules.own_module import NO_SHAPE
from shardyard.config.schema.recipe import Recipe
from shardyard.control.mixture import mixture_lines, mixture_warnings
from shardyard.control.model_check import refuse_other_weights
from shardyard.control.prepare import prepare_data
from shardyard.control.request import Request
from shardyard.control.run_length import length_lines
from shardyard.control.splits import split_lines
from shardyard.doctor.storage import check_room, lock_warning
from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine
from shardyard.hardware.probe import probe
from shardyard.io.files import break_links, write_json, write_text
from shardyard.log import say, warn
from shardyard.planner.phases import plan
from shardyard.planner.plan import Plan
from shardyard.plugins import PlugIn
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from shardyard.rundir.manifest import write_manifest
from shardyard.rundir.resolved import write_resolved


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Everything that is known before an attempt starts."""

    run_dir: RunDir
    number: int
    asked: Recipe
    """With the overrides of this attempt, before resolving."""
    resolved: Resolved
    machine: Machine
    lease: Lease | None = None
    """Held from before its first file is written; the agent takes it over."""

    def plan(self) -> Plan | None:
        """The prediction for this attempt; None for a module of the user's own."""
        if self.resolved.shape is None and self.resolved.network is None:
            return None
        devices = self.resolved.recipe.cluster.devices
        assert isinstance(devices, int)
        return plan(
            self.resolved,
            world_size=devices * self.resolved.recipe.cluster.nodes,
            devices_per_node=devices,
            machine=self.machine,
        )


def resolve_here(
    request: Request, *, previous: Resolved | None = None, data: DataFacts | None = None
) -> tuple[Machine, Resolved]:
    """Look at this machine, refuse what it cannot do, prepare the data, resolve everything.

    In this order: what is wrong is told before anything is tokenised.

    Args:
        previous: The last attempt, on a resume.
        data: A data set that is prepared already; None: prepare it, or find it prepared.

    Raises:
        RecipeError: Recipe, machine, model and data do not fit each other or ``previous``.
    """
    machine = probe()
    request.refuse_misfits(machine, previous)
    refuse_other_weights(request)
    data = data or prepare_data(request, previous=previous)
    resolved = request.resolve(machine, data, previous=previous)
    for line in (*split_lines(data), *mixture_lines(resolved), *length_lines(resolved)):
        say(line)
    notes = class_notes(resolved) if previous is None else []  # else a checkpoint has the head
    for warning in [*mixture_warnings(resolved), *notes]:
        warn(warning)
    return machine, resolved


def check_storage(attempt: Attempt) -> None:
    """Warn where the run folder has no file locks, or room for too few checkpoints.

    Raises:
        StorageError: Not even one checkpoint fits there.
    """
    folder, prediction = attempt.run_dir.path, attempt.plan()
    if prediction is not None:
        warning = check_room(
            folder,
            attempt.resolved.recipe.checkpoint,
            checkpoint_bytes=prediction.checkpoint_bytes,
            written=len(attempt.run_dir.checkpoint_steps()),
        )
        if warning is not None:
            warn(warning)
    if (warning := lock_warning(folder)) is not None:
        warn(warning)


def no_plan() -> str:
    """What stands where a plan would."""
    return f"no plan: {NO_SHAPE}"


def write_down(
    attempt: Attempt, prediction: Plan | None, *, launched_by: PlugIn | None = None
) -> None:
    """Write the attempt's files; resolved.json last: an attempt that has it is whole.

    Args:
        launched_by: The launcher, where a package adds it.
    """
    run_dir, number = attempt.run_dir, attempt.number
    for shared in (run_dir.events, run_dir.metrics):  # before several processes append to them
        break_links(shared)
    write_text(run_dir.asked(number), dump_recipe(attempt.asked))
    if prediction is not None:
        write_json(run_dir.plan(number), prediction.to_json())
    nodes = plug_ins_of(attempt.resolved.recipe, attempt.resolved.shape)
    used = [*nodes, *([] if launched_by is None else [launched_by])]
    write_manifest(
        run_dir,
        number,
        command=sys.argv,
        machine=attempt.machine,
        plug_ins=[*(each.to_json() for each in used), *attempt.resolved.data.readers],
    )
    write_resolved(run_dir.resolved(number), attempt.resolved)


def refuse_other_nodes(recipe: Recipe) -> None:
    """Raise if a recipe wants more machines than this one.

    Raises:
        RequestError: It does.
    """
    if recipe.cluster.nodes > 1:
        raise RequestError(
            f"cluster.nodes={recipe.cluster.nodes} but this verb trains on one node, this machine. "
            "Use cluster.nodes=1 here; `shardyard launch RECIPE --on local` starts several nodes "
            "on this machine, and --on slurm, kubernetes or aws-batch elsewhere."
        )
