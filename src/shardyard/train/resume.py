"""Where a run is taken up: from a snapshot in memory or a checkpoint, whichever is newer."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.load import Chosen, agreed_steps, choose, load_tensors, read_values
from shardyard.checkpoint.retention import pointer_problem
from shardyard.checkpoint.snapshots.load import FoundSnapshot, Refused, newest_snapshot
from shardyard.checkpoint.snapshots.slot import Moment
from shardyard.checkpoint.staging import Memory
from shardyard.config.formulas import takes_snapshots
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import CheckpointError
from shardyard.train.best import with_best_kept
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
    told: dict[str, Any]
    """Of that event."""
    durable_step: int
    """The newest checkpoint's; 0: there is none."""
    snapshot: Moment | None
    """If it is one."""

    @property
    def progress(self) -> Progress:
        return Progress.of_checkpoint(self.values["progress"])


def find_saved(
    checkpoints_dir: Path,
    memory: Memory,
    recipe: Recipe,
    *,
    group: dist.ProcessGroup,
) -> Saved | None:
    """The newest step that all ranks find, checked; None: nothing is saved. All ranks call it.

    While a snapshot is the newest no checkpoint is opened.
    """
    saved = _newest(checkpoints_dir, memory, recipe, group=group)
    if saved is not None and recipe.checkpoint.keep_best:
        gone = pointer_problem(checkpoints_dir, "best")
        progress = with_best_kept(checkpoints_dir, saved.progress, group=group)
        notes = [each for each in (saved.told.get("note"), gone) if each]
        saved = replace(
            saved,
            values={**saved.values, "progress": asdict(progress)},
            told={**saved.told, "note": "; ".join(notes) or None},
        )
    return saved


def _newest(
    checkpoints_dir: Path, memory: Memory, recipe: Recipe, *, group: dist.ProcessGroup
) -> Saved | None:
    assert isinstance(recipe.cluster.devices, int)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timeout_s = recipe.elastic.collective_timeout_s
    snapshot: FoundSnapshot | None = None
    refused: tuple[Refused, ...] = ()
    if takes_snapshots(recipe):
        snapshot, refused = newest_snapshot(
            memory, local_ranks=recipe.cluster.devices, group=group, rank=rank,
            world_size=world_size, timeout_s=timeout_s,
        )  # fmt: skip
        durable_step = max(agreed_steps(checkpoints_dir, group), default=0)
        if snapshot is not None and snapshot.moment.step >= durable_step:
            return _of_snapshot(snapshot, refused, durable_step)
    chosen = choose(
        checkpoints_dir, group=group, rank=rank, world_size=world_size, timeout_s=timeout_s
    )
    if snapshot is not None and (chosen is None or chosen.step <= snapshot.moment.step):
        return _of_snapshot(snapshot, refused, 0 if chosen is None else chosen.step)
    return None if chosen is None else _of_checkpoint(chosen, refused)


def _of_snapshot(found: FoundSnapshot, refused: tuple[Refused, ...], durable_step: int) -> Saved:
    def fill(tensors: dict[str, Tensor], /, *, of_others: set[str], allow_extra: bool) -> list[str]:
        found.fill(tensors, of_others=of_others, allow_extra=allow_extra)
        return []

    told = {
        "step": found.moment.step,
        "source": "neighbour" if found.is_of_neighbour else "agent",
        "taken_in": found.moment.generation,
    }
    if found.fetched_bytes:
        told["fetched_bytes"] = found.fetched_bytes
    return Saved(
        where=str(found),
        values=found.values,
        fill=fill,
        event="snapshot_restored",
        told={**told, **_refused(refused)},
        durable_step=durable_step,
        snapshot=found.moment,
    )


def _of_checkpoint(chosen: Chosen, refused: tuple[Refused, ...]) -> Saved:
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
        told={**told, **_refused(refused)},
        durable_step=chosen.step,
        snapshot=None,
    )


def _refused(refused: tuple[Refused, ...]) -> dict[str, Any]:
    """For the event: newer snapshots that were passed over."""
    return {"snapshots_refused": [each._asdict() for each in refused]} if refused else {}
