"""Everything a training process needs before its first step, built in order.

The order matters: data before the model (its vocabulary is known then), the model on the meta
device before any storage, sharding before storage (so that no rank ever holds the whole), the
optimizer after sharding (it must see the shards), the checkpoint last (it overwrites all of it).
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.buffers import buffers_of, is_ema
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.snapshots.take import Snapshots
from shardyard.checkpoint.uploads import Uploads
from shardyard.config.fingerprint import CODE, compare
from shardyard.config.formulas import (
    step_samples,
    steps_between_checkpoints,
    steps_between_snapshots,
)
from shardyard.config.layout import Layout
from shardyard.config.resolved import Resolved, fingerprint
from shardyard.config.rules.layout import resolve_layout
from shardyard.config.rules.reproducible import require_reproducible
from shardyard.config.schema.recipe import Parallel, Recipe
from shardyard.config.tasks import task_row
from shardyard.data.loader import Loader, Samples
from shardyard.errors import CheckpointError
from shardyard.families.lora import is_adapter, trained_modules
from shardyard.log import warn
from shardyard.models.build import (
    fill_weights,
)
from shardyard.models.lora import adapter_parameters
from shardyard.observe.callbacks import Callbacks
from shardyard.observe.metrics import MetricLines, Sink, open_sinks, read_flop_budget
from shardyard.parallel.attention_kernel import attention_kernel
from shardyard.parallel.device import peak_memory_bytes, select_device, set_deterministic
from shardyard.parallel.mesh import Mesh, build_mesh, names_on_all_stages
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import LOSSES, LOST_WITH_MEMORY, LOST_WITHOUT_MEMORY
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import Task, task_class
from shardyard.train.build import build_computation, build_optimizer, ema_of, exact_step_of
from shardyard.train.determinism_check import check_determinism
from shardyard.train.ema import WeightEma
from shardyard.train.eval_tasks import open_eval_tasks
from shardyard.train.hooks import Hooks, WorkerPhase
from shardyard.train.intervals import open_interval
from shardyard.train.loss_scaling import LossScaling
from shardyard.train.own_code import changed_words, with_own_code
from shardyard.train.reference import ReferenceValues, open_reference
from shardyard.train.resume import (
    Saved,
    find_saved,
    from_earlier_step,
    may_differ,
    take_evaluated,
    unaveraged_of,
)
from shardyard.train.saving import open_saver, open_uploads
from shardyard.train.snapshot_room import cannot_hold_snapshots
from shardyard.train.state import Progress, memory_by_kind
from shardyard.train.step import Stepper
from shardyard.train.training import Training


@dataclass(frozen=True, kw_only=True)
class ProcessContext:
    """Place of a process among the others: the same in all phases."""

    resolved: Resolved
    """Resolved recipe of the whole run."""
    device: torch.device
    mesh: Mesh
    local_rank: int
    """Among the workers of this node."""
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    """Process group for writing checkpoints, while training continues."""
    uploads: Uploads | None
    """Uploads to checkpoint.to, which go on between phases."""
    may_copy: bool | None = None
    """Whether to compute with copies of weights, see ``build_sharded``."""


def init_process_context(run_dir: RunDir, attempt: int, *, local_rank: int) -> ProcessContext:
    """Select this process's device and form the groups of all ranks. All ranks call it."""
    resolved = read_resolved(run_dir.resolved(attempt))
    recipe = resolved.recipe
    assert isinstance(recipe.cluster.devices, int)
    layout, _ = resolve_layout(
        _with_open_degrees(resolved),
        world_size=dist.get_world_size(),
        devices_per_node=recipe.cluster.devices,
    )
    device = select_device(recipe.cluster.device, local_rank)
    # new_group is a collective: every rank makes both, in this order. The thread that saves has
    # its own, as collectives of two threads on one group would mix.
    control, saving = (_gloo_group(recipe.elastic.collective_timeout_s) for _ in range(2))
    mesh = build_mesh(layout, device.type)
    return ProcessContext(
        resolved=resolved, device=device, mesh=mesh, local_rank=local_rank, control=control,
        saving=saving, uploads=open_uploads(run_dir, resolved, control),
    )  # fmt: skip


def set_up(
    run_dir: RunDir, attempt: int, hooks: Hooks, *, local_rank: int, may_copy: bool | None = None
) -> Training:
    """Take this process's place, and set up what is to be trained next.

    Args:
        may_copy: As of ``build_sharded``.
    """
    place = init_process_context(run_dir, attempt, local_rank=local_rank)
    return set_up_phase(run_dir, attempt, hooks, replace(place, may_copy=may_copy))


def set_up_phase(
    run_dir: RunDir,
    attempt: int,
    hooks: Hooks,
    context: ProcessContext,
    *,
    since_t: float | None = None,
) -> Training:
    """Build everything, and load the newest step that is saved, in memory or in a checkpoint.

    That says which phase is to be trained: its own or, where that is complete, the one after it.
    So a run that is killed between two phases goes the way of one that is not.

    Args:
        since_t: Where another phase was trained before in this process: when its last step ended,
            by the monotonic clock.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, mesh, control = context.device, context.mesh, context.control
    started = time.monotonic()
    saved = _find_saved(run_dir, hooks, context)
    phase = 0 if saved is None else _phase_after(context.resolved, saved.progress)
    resolved = context.resolved.of_phases[phase]
    recipe = resolved.recipe
    opening = time.monotonic()
    kind = task_class(recipe.task.name)
    data = kind.open_data(resolved)
    eval_tasks = open_eval_tasks(resolved, group=control)
    data_s = time.monotonic() - opening
    require_reproducible(resolved)
    set_deterministic(device, on=recipe.precision.reduce == "exact")
    computation = build_computation(
        resolved, mesh, device=device, control=control, may_copy=context.may_copy
    )
    task = kind(with_own_code(computation, recipe, group=control))
    stepper, averages = _open_stepper(recipe, task, mesh, device=device)
    held = {**stepper.state_tensors(), **buffers_of(task.model)}
    tensors = _saved_of(held, resolved)
    reference = open_reference(run_dir, resolved, data, saved, mesh, hooks, group=control)
    with hooks.heartbeat.during(WorkerPhase.RESTORE):
        begin = _begin(context, saved, task, tensors, stepper, phase=phase, reference=reference)
    if saved is None or phase > saved.progress.phase:
        stepper.begin()
    snapshots = _open_snapshots(run_dir, attempt, hooks, context, tensors, saved)
    training = Training(
        run_dir=run_dir,
        resolved=resolved,
        is_last=resolved is context.resolved.of_phases[-1],
        hooks=hooks,
        rank=rank,
        world_size=world_size,
        device=device,
        mesh=mesh,
        task=task,
        task_row=task_row(recipe.task.name),
        stepper=stepper,
        ema=averages,
        data=data,
        eval_tasks=eval_tasks,
        loader=_open_loader(resolved, data.train, begin.progress, mesh),
        saver=open_saver(run_dir, recipe, context.saving, snapshots, context.uploads),
        uploads=context.uploads,
        save_interval=_open_save_interval(run_dir, attempt, hooks, context, saved, snapshots),
        snapshots=snapshots,
        check_bits=check_determinism,
        tensors=tensors,
        control=control,
        progress=begin.progress,
        durable_step=0 if saved is None else saved.durable_step,
        metric_lines=_metric_lines(run_dir, attempt, hooks, context.resolved, phase),
        sinks=_open_sinks(run_dir, recipe, begin.progress) if rank == 0 else [],
        callbacks=Callbacks.load(recipe.observe.callbacks, hooks.events) if rank == 0 else None,
    )
    _report_phase(training, phase, of=len(context.resolved.phases), since_t=since_t)
    training.report("data_ready", seconds=data_s, samples=data.train.num_samples)
    _report_model(training, context, held, seconds=time.monotonic() - started)
    if saved is not None:
        training.report(saved.event, **saved.event_fields, **begin.loaded)
    return training


def _find_saved(run_dir: RunDir, hooks: Hooks, context: ProcessContext) -> Saved | None:
    recipe, uploads = context.resolved.recipe, context.uploads
    return find_saved(run_dir.checkpoints, hooks.memory, recipe, uploads, group=context.control)


def _open_sinks(run_dir: RunDir, recipe: Recipe, progress: Progress) -> list[Sink]:
    return open_sinks(run_dir, tensorboard=recipe.observe.tensorboard, after_step=progress.step)


def _open_stepper(
    recipe: Recipe, task: Task, mesh: Mesh, *, device: torch.device
) -> tuple[Stepper, WeightEma | None]:
    optimizer = build_optimizer(recipe, task.computation, mesh, device=device)  # gives storage
    averages = ema_of(recipe, task.computation)
    stepper = Stepper(
        task,
        optimizer,
        mesh,
        device=device,
        grad_clip=recipe.optim.grad_clip,
        ema=averages,
        scaling=LossScaling.of(recipe, device=device),
        exact=exact_step_of(recipe, task.computation, mesh, device=device),
    )
    return stepper, averages


def _open_save_interval(
    run_dir: RunDir, attempt: int, hooks: Hooks, context: ProcessContext, saved: Saved | None,
    snapshots: Snapshots | None,
) -> Interval:  # fmt: skip
    """Return the interval that decides when a checkpoint is due. All ranks call it."""
    every = steps_between_checkpoints(context.resolved.recipe)
    return open_interval(
        "checkpoint_interval",
        every,
        run_dir,
        attempt,
        first_step=0 if saved is None else saved.durable_step,
        # With snapshots, a checkpoint is needed only where the memory is lost as well.
        losses=LOSSES if snapshots is None else LOST_WITH_MEMORY,
        group=context.control,
        events=hooks.events,
    )


def _open_snapshots(
    run_dir: RunDir, attempt: int, hooks: Hooks, context: ProcessContext,
    tensors: dict[str, Tensor],
    saved: Saved | None,
) -> Snapshots | None:  # fmt: skip
    """Return the snapshot taker, if the recipe asks for snapshots. All ranks call it."""
    elastic = context.resolved.recipe.elastic
    every = steps_between_snapshots(context.resolved.recipe)
    if every is None:
        return None
    # A setting has a reason where the user did not give it. Only such snapshots may be left out.
    if "elastic.snapshot_every" in context.resolved.reasons and cannot_hold_snapshots(
        tensors, context.resolved.recipe, hooks.memory, hooks.events,
        local_rank=context.local_rank, group=context.control,
    ):  # fmt: skip
        return None
    interval = open_interval(
        "snapshot_interval",
        every,
        run_dir,
        attempt,
        first_step=0 if saved is None else saved.progress.step,
        # A peer's copy survives the loss of a node. Without one, only its own agent has it.
        losses=LOSSES if elastic.snapshot_neighbour is True else LOST_WITHOUT_MEMORY,
        group=context.control,
        events=hooks.events,
    )
    return Snapshots(
        tensors,
        hooks.memory,
        local_rank=context.local_rank,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        generation=hooks.generation,
        names=len(names_on_all_stages(tensors, context.mesh)),
        restored=None if saved is None else saved.snapshot,
        interval=interval,
    )


def _metric_lines(
    run_dir: RunDir, attempt: int, hooks: Hooks, whole: Resolved, phase: int
) -> MetricLines:
    is_planned = whole.shape is not None or whole.network is not None
    return MetricLines(
        read_flop_budget(run_dir.plan(attempt), phase) if is_planned else None,
        phase=phase + 1 if whole.phases else None,
        attempt=attempt,
        generation=hooks.generation,
        world_size=dist.get_world_size(),
    )


def _report_phase(training: Training, phase: int, *, of: int, since_t: float | None) -> None:
    if not of:
        return
    training.report(
        "phase_started",
        phase=phase + 1,
        phases=of,
        step=training.progress.step,
        seq_len=training.resolved.recipe.data.seq_len,
        seconds=0.0 if since_t is None else time.monotonic() - since_t,
    )


def _saved_of(tensors: dict[str, Tensor], resolved: Resolved) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint.

    With adapters the base is left out, which is filled as at the beginning.
    """
    lora, shape = resolved.recipe.model.lora, resolved.shape
    if lora.rank is None or shape is None:
        return tensors
    kept = {f"model.{name}" for name in trained_modules(shape, lora.modules_to_save)}
    return {
        name: each
        for name, each in tensors.items()
        if is_adapter(name) or name in kept or not name.startswith("model.")
    }


def _last_step(context: ProcessContext, progress: Progress) -> int:
    """The step at which the run ends, if the number of devices stays."""
    steps = progress.step
    for number, phase in enumerate(context.resolved.of_phases[progress.phase :]):
        left = phase.samples - (0 if number else progress.position)
        batch = step_samples(phase.recipe.optim, devices=context.mesh.layout.world_size)
        steps += max(0, -(-left // batch))
    return steps


def _report_model(
    training: Training, context: ProcessContext, tensors: dict[str, Tensor], *, seconds: float
) -> None:
    """Say what every rank holds before the first step. All ranks call it."""
    layout = context.mesh.layout
    mine = {
        "rank": training.rank,
        **memory_by_kind(tensors, training.device),
        "peak_bytes": peak_memory_bytes(training.device),
    }
    training.report(
        "model_ready",
        seconds=seconds,
        memory_by_rank=training.gather(mine),
        parameters=_parameters(training),
        last_step=_last_step(context, training.progress),
        layout=asdict(layout),
        attention=_attention(training.resolved, layout, training.device),
        compiles=training.resolved.recipe.model.compile is True,
    )


def _attention(resolved: Resolved, layout: Layout, device: torch.device) -> str | None:
    """The kernel by which tokens attend; None: not known of such models, and of parts of samples.

    Raises:
        RequestError: The one that the recipe names cannot be used.
    """
    if resolved.shape is None or layout.cp > 1:
        return None
    return attention_kernel(resolved.recipe, resolved.shape, tp=layout.tp, device=device)


def _parameters(training: Training) -> int:
    shape = training.resolved.shape
    if shape is not None:  # a rank may hold one stage of it
        return shape.parameters + adapter_parameters(shape, training.resolved.recipe.model.lora)
    return sum(param.numel() for param in training.task.model.parameters())


def _gloo_group(timeout_s: float) -> dist.ProcessGroup:
    """A group of all ranks in host memory, apart from training's own."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def _with_open_degrees(resolved: Resolved) -> Parallel:
    """The degrees that were asked for; those that were auto follow the world size again.

    Nodes may have come or gone since the recipe was resolved.
    """
    names = [name for name in Parallel.model_fields if f"parallel.{name}" in resolved.reasons]
    return resolved.recipe.parallel.model_copy(update=dict.fromkeys(names, "auto"))


@dataclass(frozen=True, kw_only=True)
class _Begin:
    """Point at which this process resumes the run."""

    progress: Progress
    loaded: dict[str, Any]
    """Fields of the event that reports it."""


def _phase_after(whole: Resolved, progress: Progress) -> int:
    """The phase to be trained from a checkpoint on: the next one where that is complete."""
    phases = whole.of_phases
    is_complete = progress.position >= phases[progress.phase].samples
    return min(progress.phase + is_complete, len(phases) - 1)


def _begin(
    context: ProcessContext, saved: Saved | None, task: Task, tensors: dict[str, Tensor],
    stepper: Stepper,
    *, phase: int, reference: ReferenceValues | None,
) -> _Begin:  # fmt: skip
    """Fill the weights, from a checkpoint if there is one. All ranks call it.

    No checkpoint holds the base of adapters. The reference is of the weights of the beginning.
    """
    started = time.monotonic()
    resolved = context.resolved
    has_adapters = resolved.recipe.model.lora.rank is not None
    begins = saved is None or not (reference is None or reference.is_complete)
    if resolved.shape is not None and (begins or has_adapters):  # else its maker has
        folder = None if resolved.model_dir is None else Path(resolved.model_dir)
        start = resolved.recipe.model.lora.path if begins else None
        adapters = None if start is None else Path(start)
        recipe = resolved.recipe
        fill_weights(
            task.model, folder=folder, seed=recipe.run.seed, family=resolved.shape.family,
            adapters=adapters, new_embeddings=recipe.model.new_embeddings,
        )  # fmt: skip
    if reference is not None:
        reference.hand_over(task)
    if saved is None:
        return _Begin(progress=Progress(), loaded={})
    is_next = phase > saved.progress.phase
    if is_next:  # the optimizer keeps its initial state, and averages restart
        tensors = {
            name: each
            for name, each in tensors.items()
            if not name.startswith("optim.") and not is_ema(name)
        }
    unaveraged = unaveraged_of(saved, context.resolved, task.model) if is_next else {}
    tensors = {**tensors, **unaveraged}
    of_others = names_on_all_stages(tensors, context.mesh)
    gaps = _fill(context.resolved, task, tensors, saved, of_others=of_others, weights_only=is_next)
    if is_next:
        take_evaluated(saved, context.resolved, task.model, unaveraged)
    else:
        stepper.skipped_in_row.fill_(saved.values["skipped_in_row"])
    if stepper.scaling is not None and saved.values.get("loss_scale") is not None:
        stepper.scaling.load(saved.values["loss_scale"])
    if stepper.exact is not None:
        stepper.exact.load(saved.values.get("exponents") or {})
    devices = context.mesh.layout.world_size
    progress = from_earlier_step(saved, context.resolved, devices=devices)
    told = {"seconds": time.monotonic() - started, **gaps}
    return _Begin(progress=progress.next_phase() if is_next else progress, loaded=told)


def _fill(
    whole: Resolved,
    task: Task,
    tensors: dict[str, Tensor],
    saved: Saved,
    *,
    of_others: set[str],
    weights_only: bool,
) -> dict[str, list[str]]:
    """Give tensors the values that a checkpoint has, if it is one of this run.

    Returns:
        What the checkpoint could not say, for the event that tells of it.
    """
    held = task.computation.fixed_settings
    its_phase = whole.of_phases[saved.progress.phase]
    now = fingerprint(its_phase, held, task.computation.code_digests)
    compared = compare(saved.values["fingerprint"], now)
    changed = [each for each in compared.changed if not may_differ(each, whole, saved)]
    changed_code = [each for each in changed if each.startswith(CODE)]
    changed = [each for each in changed if each not in changed_code]
    if changed:
        told = [f"{each}{_fixed_reason(each, held)}" for each in changed]
        raise CheckpointError(
            f"{saved.where} was written by a run with another model, data, order or optimisation "
            f"({'; '.join(told)}). Resuming from it would be neither run. Give these the values "
            "that they had, move the folder away, or start a new run from its weights (run.from)."
        )
    lacked = saved.fill(tensors, of_others=of_others, allow_extra=weights_only)
    if changed_code:
        warn(changed_words(changed_code))
    gaps = {
        "not_compared": list(compared.not_compared),
        "lacked_buffers": lacked,
        "changed_code": [each.removeprefix(CODE) for each in changed_code],
    }
    return {name: found for name, found in gaps.items() if found}


def _fixed_reason(changed: str, fixed_settings: Mapping[str, str]) -> str:
    """Return why a setting that often may change may not here; empty for any other."""
    why = fixed_settings.get(changed.partition(":")[0])
    return "" if why is None else f", and {why}"


def _open_loader(resolved: Resolved, source: Samples, progress: Progress, mesh: Mesh) -> Loader:
    optim = resolved.recipe.optim
    assert isinstance(optim.micro_batch, int)
    data = resolved.data
    has_items = any(each.item_kind is not None for each in (data, *data.by_name.values()))
    has_readers = resolved.network is not None or has_items
    return Loader(
        source,
        # Both ends move: the run still reads as many samples as it was planned with.
        start=progress.position + progress.passed_over,
        end=resolved.samples + progress.passed_over,
        step_samples=step_samples(optim, devices=mesh.layout.world_size),
        micro_batch=optim.micro_batch,
        rank=mesh.data_rank,
        world_size=mesh.layout.data_ranks,
        prefetch_steps=resolved.recipe.data.prefetch_steps,
        steps_at_once=resolved.recipe.data.prefetch_steps if has_readers else 1,
    )
