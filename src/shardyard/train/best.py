"""The best checkpoint after a restart: ``best`` names the evaluation that the run compares with."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from shardyard.checkpoint.load import read_values
from shardyard.checkpoint.retention import (
    complete_steps,
    mark_best,
    read_pointer,
    step_name,
)
from shardyard.errors import CheckpointError, StorageError
from shardyard.train.state import Progress


def with_saved_best(
    checkpoints_dir: Path, progress: Progress, *, group: dist.ProcessGroup
) -> Progress:
    """Compare later evaluations with a checkpoint that is there. All ranks call it.

    A kill may come after the evaluation and before its checkpoint is on disk, or before ``best``
    names it. A snapshot in memory then knows a best evaluation whose weights are lost.

    Raises:
        StorageError: ``best`` cannot be written.
    """
    result: list[Progress | str] = [progress]
    # Rank 0 reads and writes for all: between the reads of two ranks `best` could change.
    if dist.get_rank(group) == 0:
        try:
            result = [_reconcile_best(checkpoints_dir, progress)]
        except StorageError as error:
            result = [str(error)]
    dist.broadcast_object_list(result, group=group, group_src=0)
    if isinstance(result[0], str):
        raise StorageError(result[0])
    return result[0]


def _reconcile_best(checkpoints_dir: Path, progress: Progress) -> Progress:
    """With the best evaluation whose weights are on disk, or are those of the restored step."""
    step, named = progress.best_step, read_pointer(checkpoints_dir, "best")
    if step in (None, named):
        return progress
    if step in complete_steps(checkpoints_dir):
        mark_best(checkpoints_dir, step)
        return progress
    if step == progress.step:
        return progress  # the loop saves it
    if named is None:
        _remove_pointer(checkpoints_dir / "best")
    older = Progress() if named is None else _saved_in(checkpoints_dir / step_name(named))
    # The score of another phase is of other data, and that of another step of other weights.
    # Neither can be compared with the evaluations to come.
    if (older.phase, older.best_step) != (progress.phase, named):
        older = Progress()
    return replace(
        progress, best_step=older.best_step, best_score=older.best_score, best_by=older.best_by
    )


def _remove_pointer(pointer: Path) -> None:
    """``best`` names a checkpoint that is gone: until the next evaluation there is none."""
    if pointer.is_dir():
        return  # the next best one moves it away
    try:
        pointer.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{pointer} cannot be removed: {error.strerror}.") from error


def _saved_in(checkpoint: Path) -> Progress:
    try:
        return Progress.of_checkpoint(read_values(checkpoint)["progress"])
    except CheckpointError:  # damaged: the next evaluation is compared with none
        return Progress()
