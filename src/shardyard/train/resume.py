"""Resume point of a run: a snapshot in memory, or the newest or an earlier checkpoint.

The newer of snapshot and checkpoint counts. After ``resume --step`` some settings may differ, and
data may be skipped.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardyard.checkpoint.download import fetch_newer
from shardyard.checkpoint.load import (
    SelectedCheckpoint,
    agreed_steps,
    load_tensors,
    read_values,
    select_sound_checkpoint,
    wait_for_all_ranks,
)
from shardyard.checkpoint.retention import pointer_problem
from shardyard.checkpoint.snapshots.load import (
    RejectedSnapshot,
    RestorableSnapshot,
    latest_snapshot,
)
from shardyard.checkpoint.snapshots.slot import SnapshotId
from shardyard.checkpoint.staging_protocol import MemoryProvider
from shardyard.checkpoint.uploads import Uploads
from shardyard.config.fingerprint import MAY_CHANGE_FROM_AN_EARLIER_STEP
from shardyard.config.formulas import snapshots_enabled, step_samples
from shardyard.config.optimizers import UNAVERAGED, evaluation_share
from shardyard.config.resolved import Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import CheckpointError
from shardyard.parallel.gradients import local_part
from shardyard.train.best import with_saved_best
from shardyard.train.state import Progress


class Fill(Protocol):
    """Gives tensors the values that were saved; returns names of buffers that were not."""

    def __call__(
        self, tensors: dict[str, Tensor], /, *, of_others: set[str], allow_extra: bool
    ) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A state that the run has saved, its tensors unread."""

    where: str
    values: dict[str, Any]
    fill: Fill
    event: str
    """The kind that tells of it once it is loaded."""
    event_fields: dict[str, Any]
    """Fields of that event."""
    durable_step: int
    """The newest checkpoint's; 0: there is none."""
    snapshot: SnapshotId | None
    """If it is one."""

    @property
    def progress(self) -> Progress:
        return Progress.of_checkpoint(self.values["progress"])


def find_saved(
    checkpoints_dir: Path,
    memory: MemoryProvider,
    recipe: Recipe,
    uploads: Uploads | None = None,
    *,
    group: dist.ProcessGroup,
) -> Saved | None:
    """Return the newest step that all ranks find, checked; None: no step is saved.

    All ranks call it.

    While a snapshot is the newest no checkpoint is opened.
    """
    saved = _find_latest(checkpoints_dir, memory, recipe, uploads, group=group)
    if saved is not None and recipe.checkpoint.keep_best:
        gone = pointer_problem(checkpoints_dir, "best")
        progress = with_saved_best(checkpoints_dir, saved.progress, group=group)
        notes = [each for each in (saved.event_fields.get("note"), gone) if each]
        saved = replace(
            saved,
            values={**saved.values, "progress": asdict(progress)},
            event_fields={**saved.event_fields, "note": "; ".join(notes) or None},
        )
    return saved


def _find_latest(
    checkpoints_dir: Path, memory: MemoryProvider, recipe: Recipe, uploads: Uploads | None, *,
    group: dist.ProcessGroup,
) -> Saved | None:  # fmt: skip
    assert isinstance(recipe.cluster.devices, int)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timeout_s = recipe.elastic.collective_timeout_s
    snapshot: RestorableSnapshot | None = None
    rejected: tuple[RejectedSnapshot, ...] = ()
    if snapshots_enabled(recipe):
        snapshot, rejected = latest_snapshot(
            memory, local_ranks=recipe.cluster.devices, group=group, rank=rank,
            world_size=world_size, timeout_s=timeout_s,
        )  # fmt: skip
        durable_step = max(agreed_steps(checkpoints_dir, group), default=0)
        # Of the same step the snapshot wins: it is in memory, and its checksum was compared.
        if snapshot is not None and snapshot.snapshot_id.step >= durable_step:
            return _of_snapshot(snapshot, rejected, durable_step)
    wait_for_all_ranks(group, timeout_s)
    newer_than = 0 if snapshot is None else snapshot.snapshot_id.step
    notes = _fetch_newer(uploads, checkpoints_dir, newer_than=newer_than, group=group)
    chosen = select_sound_checkpoint(
        checkpoints_dir, group=group, rank=rank, world_size=world_size, timeout_s=timeout_s
    )
    if chosen is not None and chosen.damaged and uploads is not None:
        # Those have been put aside, and the bucket may hold sound ones of their steps.
        damaged = chosen.damaged
        notes += _fetch_newer(uploads, checkpoints_dir, newer_than=newer_than, group=group)
        chosen = select_sound_checkpoint(
            checkpoints_dir, group=group, rank=rank, world_size=world_size, timeout_s=timeout_s
        )
        chosen = None if chosen is None else replace(chosen, damaged=(*damaged, *chosen.damaged))
    if chosen is not None and notes:
        chosen = replace(chosen, note="; ".join([*filter(None, [chosen.note]), *notes]))
    # The folders newer than the snapshot may all have turned out damaged.
    if snapshot is not None and (chosen is None or chosen.step <= snapshot.snapshot_id.step):
        return _of_snapshot(snapshot, rejected, 0 if chosen is None else chosen.step)
    return None if chosen is None else _of_checkpoint(chosen, rejected)


def _fetch_newer(
    uploads: Uploads | None, checkpoints_dir: Path, *, newer_than: int, group: dist.ProcessGroup
) -> list[str]:
    """Download what the bucket has and the run folder lacks; notes on it. All ranks call it."""
    if uploads is None:
        return []
    return fetch_newer(uploads.bucket, checkpoints_dir, newer_than=newer_than, group=group)


def _of_snapshot(
    snapshot: RestorableSnapshot, rejected: tuple[RejectedSnapshot, ...], durable_step: int
) -> Saved:
    def fill(tensors: dict[str, Tensor], /, *, of_others: set[str], allow_extra: bool) -> list[str]:
        snapshot.fill(tensors, of_others=of_others, allow_extra=allow_extra)
        return []

    told = {
        "step": snapshot.snapshot_id.step,
        "source": "neighbour" if snapshot.is_from_peer else "agent",
        "taken_in": snapshot.snapshot_id.generation,
    }
    if snapshot.fetched_bytes:
        told["fetched_bytes"] = snapshot.fetched_bytes
    return Saved(
        where=str(snapshot),
        values=snapshot.values,
        fill=fill,
        event="snapshot_restored",
        event_fields={**told, **_rejected_fields(rejected)},
        durable_step=durable_step,
        snapshot=snapshot.snapshot_id,
    )


def _of_checkpoint(chosen: SelectedCheckpoint, rejected: tuple[RejectedSnapshot, ...]) -> Saved:
    values = read_values(chosen.path)
    if "fingerprint" not in values:
        raise CheckpointError(
            f"{chosen.path} was written by save_checkpoint() and not by a run: it does not say "
            "what was trained, nor how far. Move the folder away; load_checkpoint() opens it."
        )

    def fill(tensors: dict[str, Tensor], /, *, of_others: set[str], allow_extra: bool) -> list[str]:
        return load_tensors(chosen.path, tensors, of_others=of_others, allow_extra=allow_extra)

    told = {
        "step": chosen.step,
        "damaged": [passed_over._asdict() for passed_over in chosen.damaged],
        "note": chosen.note,
    }
    return Saved(
        where=str(chosen.path),
        values=values,
        fill=fill,
        event="checkpoint_loaded",
        event_fields={**told, **_rejected_fields(rejected)},
        durable_step=chosen.step,
        snapshot=None,
    )


def _rejected_fields(rejected: tuple[RejectedSnapshot, ...]) -> dict[str, Any]:
    """For the event: newer snapshots that were passed over."""
    return {"snapshots_refused": [each._asdict() for each in rejected]} if rejected else {}


def may_differ(changed: str, whole: Resolved, saved: Saved) -> bool:
    """Whether a setting, as ``compare`` words it, may differ from that of a saved state."""
    setting = changed.partition(":")[0]
    return setting in MAY_CHANGE_FROM_AN_EARLIER_STEP and _is_gone_back_to(saved, whole)


def from_earlier_step(saved: Saved, whole: Resolved, *, devices: int) -> Progress:
    """Progress of a saved state, with the samples that ``--skip-steps`` passes over."""
    progress, back_to = saved.progress, whole.back_to
    if back_to is None or not _is_gone_back_to(saved, whole):
        return progress
    optim = whole.of_phases[progress.phase].recipe.optim
    samples = back_to.skip_steps * step_samples(optim, devices=devices)
    return replace(progress, passed_over=progress.passed_over + samples)


def _is_gone_back_to(saved: Saved, whole: Resolved) -> bool:
    back_to = whole.back_to
    return back_to is not None and saved.snapshot is None and saved.progress.step == back_to.step


def unaveraged_of(saved: Saved, whole: Resolved, model: nn.Module) -> dict[str, Tensor]:
    """Room for the weights next to those of a phase whose optimizer averages its steps."""
    optim = whole.of_phases[saved.progress.phase].recipe.optim
    if evaluation_share(optim) is None:
        return {}
    return {
        f"optim.{UNAVERAGED}.{name}": torch.empty_like(param.detach())
        for name, param in model.named_parameters()
        if param.requires_grad
    }


@torch.no_grad()
def take_evaluated(
    saved: Saved, whole: Resolved, model: nn.Module, unaveraged: Mapping[str, Tensor]
) -> None:
    """Give a phase the weights that the one before it was evaluated by."""
    share = evaluation_share(whole.of_phases[saved.progress.phase].recipe.optim)
    if share is None:
        return
    for name, param in model.named_parameters():
        other = unaveraged.get(f"optim.{UNAVERAGED}.{name}")
        if other is not None:
            local_part(param.detach()).lerp_(local_part(other), share)
