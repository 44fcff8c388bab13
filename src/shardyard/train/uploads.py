"""Uploads of a run's checkpoints to a bucket: what has ended, and the wait for the last of them."""

import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from shardyard.checkpoint.load import raise_on_all
from shardyard.checkpoint.retention import complete_steps
from shardyard.checkpoint.upload_protocol import NotUploaded, Uploaded, UploadQueue
from shardyard.errors import StorageError
from shardyard.log import warn
from shardyard.train.hooks import WorkerPhase
from shardyard.train.training import Training

_AGREE_S = 0.2


def report_uploads(training: Training) -> list[Uploaded | NotUploaded]:
    """Report the uploads that have ended, on rank 0."""
    outcomes = [] if training.uploads is None else training.uploads.poll()
    for each in outcomes:
        if isinstance(each, NotUploaded):
            warn(f"the checkpoint of step {each.step} is not in the bucket: {each.reason}")
            training.report("checkpoint_not_uploaded", **asdict(each))
        else:
            told = {name: value for name, value in asdict(each).items() if value is not None}
            training.report("checkpoint_uploaded", **told)
    return outcomes


def finish_uploads(training: Training, *, is_finished: bool) -> None:
    """Wait until the newest checkpoint is in the bucket. All ranks call it.

    Raises:
        StorageError: The run is finished and its last checkpoint is only on disk. A run that is
            drained will be resumed, so then it is a warning.
    """
    uploads = training.uploads
    if uploads is None:
        return
    _add_newest(training, uploads)
    problem, waiting = None, torch.ones(1)
    while waiting.item():
        for each in report_uploads(training):
            if isinstance(each, NotUploaded):
                problem = each
            elif problem is not None and each.step >= problem.step:
                problem = None
        waiting = torch.tensor([float(bool(uploads.unfinished))])
        # Agreed on each time: a rank would otherwise wait in one collective for hours.
        dist.all_reduce(waiting, group=training.control)
        training.hooks.heartbeat.enter(WorkerPhase.WRITE)
        time.sleep(_AGREE_S if waiting.item() else 0)
    if not is_finished:
        return
    error = None if problem is None else StorageError(
        f"training is finished, and the checkpoint of step {problem.step} is in "
        f"{training.run_dir.checkpoints} only: {problem.reason}. Once that is fixed, resume the "
        "run: it uploads the checkpoint."
    )  # fmt: skip
    raise_on_all(error, training.control)


def _add_newest(training: Training, uploads: UploadQueue) -> None:
    """Upload the newest checkpoint if it was left out, or its upload was killed."""
    missing = [-1, 0]
    if training.rank == 0:
        here = complete_steps(training.run_dir.checkpoints)
        if here and uploads.is_missing(here[-1]):
            is_best = training.progress.best_step == here[-1]
            missing = [here[-1], int(is_best)]
    agreed = torch.tensor(missing)
    dist.broadcast(agreed, src=0, group=training.control)
    step, is_best = agreed.tolist()
    if step >= 0:
        uploads.add(step, is_best=bool(is_best))
