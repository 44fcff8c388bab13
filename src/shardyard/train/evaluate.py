"""Evaluation on the held-out split: every sample once, on whichever rank, summed exactly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardyard.config import schema
from shardyard.data.loader import Samples, step_batches
from shardyard.data.micro_batch import MicroBatch
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.base import Task
from shardyard.train.totals import sum_over_ranks


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result over the whole split."""

    scores: dict[str, float]
    """Every metric of the task."""
    targets: int
    """What divided the loss."""

    @property
    def loss(self) -> float:
        """Mean over all that was predicted."""
        return self.scores["loss"]


def evaluation_due(
    step: int, *, task: schema.Task, is_last: bool, read: range, samples: int
) -> bool:
    """Whether a run is evaluated after a step, counted from 1.

    Args:
        is_last: Whether it ends the run, which is always evaluated then.
        read: Positions of the stream that the step has read.
        samples: Of an epoch.
    """
    if is_last:
        return True
    if task.eval_every_steps is not None:
        return step % task.eval_every_steps == 0
    if task.eval_every_epochs is None:
        return False
    every = task.eval_every_epochs * samples
    return int(read.start // every) < int(read.stop // every)


@torch.no_grad()
def evaluate(
    task: Task,
    source: Samples,
    *,
    micro_batch: int,
    mesh: Mesh,
    device: torch.device,
) -> Evaluation:
    """Score all samples of a source. All ranks call it together and get the same result."""
    task.model.eval()
    part = task.computation.forward(_batches(source, micro_batch=micro_batch, mesh=mesh))
    task.model.train()
    totals = sum_over_ranks(part, device=device)
    loss_sum, targets = totals.loss_sum.item(), totals.divisor.item()
    means = {name: each.item() for name, each in task.computation.means(totals.sums).items()}
    return Evaluation(scores=task.scores(loss_sum / targets, means), targets=round(targets))


def _batches(source: Samples, *, micro_batch: int, mesh: Mesh) -> Iterator[MicroBatch]:
    """This rank's share of a split, read as it is asked for."""
    data_ranks = mesh.layout.data_ranks
    at_once = micro_batch * data_ranks
    for start in range(0, source.num_samples, at_once):
        yield from step_batches(
            source,
            positions=range(start, min(start + at_once, source.num_samples)),
            micro_batch=micro_batch,
            rank=mesh.data_rank,
            world_size=data_ranks,
        )
