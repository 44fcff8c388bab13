"""Evaluation on the held-out split: every sample once, on whichever rank, summed exactly."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from shardyard.config.schema import recipe
from shardyard.data.loader import MicroBatch, Samples, step_batches
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.base import Task
from shardyard.train.loss_reduction import Totals, sum_over_ranks


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result over the whole split."""

    scores: dict[str, float]
    """Every metric of the task."""
    targets: int
    """Divisor of the loss."""
    parts: "dict[str, Evaluation]" = field(default_factory=dict)
    """Result of each source of a mixture and each set of data.eval_sets, by name."""
    confusion: Tensor | None = None
    """How often each class was predicted as each other (``tasks/confusion.py``)."""

    @property
    def loss(self) -> float:
        """Mean over all that was predicted."""
        return self.scores["loss"]


def evaluation_due(
    step: int, *, task: recipe.TaskSettings, is_last: bool, read: range, samples: int
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
    # A step rarely ends where an epoch does. An evaluation is due when a step crosses that point.
    every = task.eval_every_epochs * samples
    return int(read.start // every) < int(read.stop // every)


@torch.no_grad()
def evaluate(
    task: Task,
    source: Samples,
    parts: Mapping[str, Samples] = MappingProxyType({}),
    sets: Mapping[str, Samples] = MappingProxyType({}),
    *,
    micro_batch: int,
    mesh: Mesh,
    device: torch.device,
) -> Evaluation:
    """Score all samples of a source. All ranks call it together and get the same result.

    Args:
        parts: What the source is made of, if each is scored by itself, too.
        sets: Samples that are scored by themselves, and count for nothing else.
    """
    task.model.eval()
    totals = {
        name: sum_over_ranks(
            task.computation.forward(_batches(each, micro_batch=micro_batch, mesh=mesh)),
            device=device,
        )
        for name, each in {**(parts or {"": source}), **sets}.items()
    }
    task.model.train()
    by_name = {name: _evaluation(task, [each]) for name, each in totals.items() if name}
    whole = [each for name, each in totals.items() if name not in sets]
    return replace(_evaluation(task, whole), parts=by_name)


def _evaluation(task: Task, totals: Sequence[Totals]) -> Evaluation:
    """Result over all samples that the totals are of."""
    targets = round(sum(each.divisor.item() for each in totals))
    confusion = task.computation.confusion(totals[0].sums) if len(totals) == 1 else None
    return Evaluation(scores=_scores(task, totals), targets=targets, confusion=confusion)


def _scores(task: Task, totals: Sequence[Totals]) -> dict[str, float]:
    """Metrics of all samples that the totals are of."""
    # Sums first, then one division: a mean of means would weigh a small source like a large one.
    loss_sum = sum(each.loss_sum.item() for each in totals)
    targets = sum(each.divisor.item() for each in totals)
    sums = {
        name: torch.stack([each.sums[name] for each in totals]).sum(0) for name in totals[0].sums
    }
    means = {name: each.item() for name, each in task.computation.means(sums).items()}
    scores = task.scores(loss_sum / targets if targets else math.nan, means)
    return {**scores, **task.computation.objective.means(sums)}


def _batches(source: Samples, *, micro_batch: int, mesh: Mesh) -> Iterator[MicroBatch]:
    """Yield this rank's share of a split, read on demand."""
    data_ranks = mesh.layout.data_ranks
    # Each rank takes as many micro-batches as the others: a forward pass gathers weights.
    at_once = micro_batch * data_ranks
    for start in range(0, source.num_samples, at_once):
        yield from step_batches(
            source,
            positions=range(start, min(start + at_once, source.num_samples)),
            micro_batch=micro_batch,
            rank=mesh.data_rank,
            world_size=data_ranks,
        )
