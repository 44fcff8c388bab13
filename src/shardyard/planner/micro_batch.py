"""The largest micro-batch that fits a device, for ``optim.micro_batch: auto``."""

from collections.abc import Sequence
from dataclasses import replace

from shardyard.config.auto import Fitting
from shardyard.config.layout import Layout
from shardyard.config.machines import joined_cluster
from shardyard.config.schema import Recipe
from shardyard.hardware.cluster import Cluster
from shardyard.hardware.machine import Machine
from shardyard.planner.kinds import Model, memory_of, work_of, work_with
from shardyard.planner.memory import fit
from shardyard.planner.workload import Workload


def fitting_on(machine: Machine | None) -> Fitting:
    """How many samples fit at once, on a recipe's machines or else on this one.

    Args:
        machine: None: it has not been looked at.
    """

    def largest(recipe: Recipe, model: Model, sizes: Sequence[int]) -> tuple[int, str] | None:
        named = joined_cluster(recipe)
        limit_bytes = _limit_bytes(recipe, named, machine)
        layout = _layout(recipe)
        if limit_bytes is None or layout is None or recipe.precision.compute == "auto":
            return None
        chunk = recipe.memory.loss_chunk
        settled = recipe.model_copy(
            update={
                "optim": recipe.optim.model_copy(update={"micro_batch": sizes[0]}),
                "memory": recipe.memory.model_copy(
                    update={"loss_chunk": "none" if chunk == "auto" else chunk}
                ),
            }
        )
        work = work_of(settled, model, layout, named)
        if isinstance(work, Workload):
            work = replace(work, chunks_by_rule=chunk == "auto")
        for size in reversed(sizes):
            tried = work_with(work, layout, micro_batch=size, recompute=work.recompute)
            room = fit(memory_of(tried).device_bytes, limit_bytes)
            if room.verdict == "fits":
                return size, f"the largest that fits as planned: {room.reason}"
        return sizes[0], f"not even that is sure to fit: {room.reason}"

    return largest


def _limit_bytes(recipe: Recipe, named: Cluster | None, machine: Machine | None) -> int | None:
    """Of one accelerator; None: not known, or processes of a CPU, which share what there is."""
    if named is not None:
        return named.accelerator.memory_bytes
    if machine is None or recipe.cluster.device in ("cpu", "auto"):
        return None
    return machine.memory_bytes if machine.device == recipe.cluster.device else None


def _layout(recipe: Recipe) -> Layout | None:
    """As the recipe says it once its degrees are known."""
    axes = recipe.parallel
    if axes.dp_replicate == "auto" or axes.dp_shard == "auto" or axes.zero == "auto":
        return None
    return Layout(
        dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard, cp=axes.cp, tp=axes.tp,
        pp=axes.pp, ep=axes.ep, zero=axes.zero,
    )  # fmt: skip
