"""Search for settings that fit a device: the largest micro-batch, and the least recompute.

For ``optim.micro_batch: auto`` and ``memory.recompute: auto``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardyard.config.auto import Recompute as Mode
from shardyard.config.cluster_choice import joined_cluster
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.machine import Machine
from shardyard.planner.cpu_memory import fit_on_cpu, on_cpu
from shardyard.planner.dispatch import (
    Model,
    Work,
    host_shortage_of,
    memory_of,
    work_of,
    work_with,
)
from shardyard.planner.memory import fit
from shardyard.planner.workload import Recompute, Workload


@dataclass(frozen=True)
class ClusterMemoryFitter:
    """Search for settings that fit a recipe's machines, or else this one."""

    machine: Machine | None
    """None: it has not been looked at."""

    def micro_batch(
        self, recipe: Recipe, model: Model, sizes: Sequence[int]
    ) -> tuple[int, str] | None:
        """The largest of some micro-batches, smallest first, that fits."""
        found = self._work(recipe, model, micro_batch=sizes[0], recompute=None)
        if found is None:
            return None
        work, limit_bytes = found
        for size in reversed(sizes):
            tried = work_with(work, work.layout, micro_batch=size, recompute=work.recompute)
            room = fit(memory_of(tried).device_bytes, limit_bytes)
            if room.is_safe:
                return size, f"the largest that fits as planned: {room.reason}"
        return sizes[0], f"not even that is sure to fit: {room.reason}"

    def recompute(
        self, recipe: Recipe, model: Model, modes: Sequence[Mode], *, micro_batch: int
    ) -> tuple[Mode, str] | None:
        """The first of some modes that fits; of none the last."""
        found = self._work(recipe, model, micro_batch=micro_batch, recompute="none")
        if found is None:
            return None
        work, limit_bytes = found
        for mode in modes:
            tried = work_with(work, work.layout, micro_batch=micro_batch, recompute=mode)
            room = fit(memory_of(tried).device_bytes, limit_bytes)
            if room.is_safe:
                return mode, f"the first that fits as planned: {room.reason}"
        return modes[-1], f"not even that is sure to fit: {room.reason}"

    def without_snapshots(self, recipe: Recipe, model: Model) -> str:
        """Why snapshots have no room in host memory; empty: they have, or that is not known."""
        layout = _layout(recipe)
        # A step cannot be computed while one of these is open; snapshots are then not judged.
        is_open = "auto" in (
            recipe.precision.compute, recipe.memory.recompute, recipe.model.dropout
        )  # fmt: skip
        if layout is None or is_open or not isinstance(recipe.optim.micro_batch, int):
            return ""
        # Snapshots are still off when this is asked, so the step is planned as if they were on.
        neighbour = recipe.elastic.snapshot_neighbour is not False
        elastic = recipe.elastic.model_copy(
            update={"snapshot_every": "auto", "snapshot_neighbour": neighbour}
        )
        named = joined_cluster(recipe)
        work = work_of(recipe.model_copy(update={"elastic": elastic}), model, layout, named)
        if named is not None:
            short = host_shortage_of(work, named)
            return "" if short is None else short.reason
        machine, devices = self.machine, recipe.cluster.devices
        if machine is None or machine.device != "cpu" or not isinstance(devices, int):
            return ""
        needed = on_cpu(
            memory_of(work),
            snapshots=work.techniques.snapshots,
            has_standby=work.techniques.has_standby,
        )
        # All ranks of a CPU node share its memory.
        room = fit_on_cpu(needed, machine.memory_bytes // devices)
        return "" if room.verdict == "fits" else f"snapshots have no room: {room.reason}"

    def _work(
        self, recipe: Recipe, model: Model, *, micro_batch: int, recompute: Recompute | None
    ) -> tuple[Work, int] | None:
        """A recipe's step, and the memory that it has; None: not known.

        Args:
            recompute: In place of the recipe's.
        """
        named = joined_cluster(recipe)
        limit_bytes = _limit_bytes(recipe, named, self.machine)
        layout = _layout(recipe)
        if limit_bytes is None or layout is None or recipe.precision.compute == "auto":
            return None
        # The chunk of an open loss_chunk depends on the micro-batch, so each size gets its own.
        chunk = recipe.memory.loss_chunk
        memory: dict[str, int | str] = {"loss_chunk": "none" if chunk == "auto" else chunk}
        if recompute is not None:
            memory["recompute"] = recompute
        settled = recipe.model_copy(
            update={
                "optim": recipe.optim.model_copy(update={"micro_batch": micro_batch}),
                "memory": recipe.memory.model_copy(update=memory),
            }
        )
        work = work_of(settled, model, layout, named)
        if isinstance(work, Workload):
            work = replace(work, chunks_by_rule=chunk == "auto")
        return work, limit_bytes


def _limit_bytes(
    recipe: Recipe, named: ClusterHardware | None, machine: Machine | None
) -> int | None:
    """Return the memory of one accelerator.

    None if it is not known, or for processes of a CPU, which share its memory.
    """
    if named is not None:
        return named.accelerator.memory_bytes
    if machine is None or recipe.cluster.device in ("cpu", "auto"):
        return None
    return machine.memory_bytes if machine.device == recipe.cluster.device else None


def _layout(recipe: Recipe) -> Layout | None:
    """Return the recipe's layout once its degrees are known."""
    axes = recipe.parallel
    if axes.dp_replicate == "auto" or axes.dp_shard == "auto" or axes.zero == "auto":
        return None
    return Layout(
        dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard, cp=axes.cp, tp=axes.tp,
        pp=axes.pp, ep=axes.ep, zero=axes.zero,
    )  # fmt: skip
