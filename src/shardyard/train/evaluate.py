"""Evaluation on the held-out split: every sample once, on whichever rank, summed exactly."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardyard.config.schema import Task
from shardyard.data.loader import EvalSource, step_batches
from shardyard.parallel.data import reshard
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result over the whole split."""

    loss: float
    """Mean over all predicted tokens, nats."""
    targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluation_due(step: int, *, task: Task, steps: int, global_batch: int, samples: int) -> bool:
    """Whether a run is evaluated after a step, counted from 1.

    Args:
        steps: Of the whole run; the last one is always evaluated.
        global_batch: Samples of a step.
        samples: Of an epoch.
    """
    if step == steps:
        return True
    if task.eval_every_steps is not None:
        return step % task.eval_every_steps == 0
    if task.eval_every_epochs is None:
        return False
    every = task.eval_every_epochs * samples
    before = (step - 1) * global_batch
    return int(before // every) < int(step * global_batch // every)


@torch.no_grad()
def evaluate(
    task: CausalLM,
    source: EvalSource,
    *,
    micro_batch: int,
    mesh: Mesh,
    device: torch.device,
) -> Evaluation:
    """Loss over all samples of a source. All ranks call it together and get the same result."""
    task.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    data_ranks = mesh.layout.data_ranks
    at_once = micro_batch * data_ranks
    for start in range(0, source.num_samples, at_once):
        positions = range(start, min(start + at_once, source.num_samples))
        for batch in step_batches(
            source,
            positions=positions,
            micro_batch=micro_batch,
            rank=mesh.data_rank,
            world_size=data_ranks,
        ):
            loss_sum = task.loss_sum(batch.to(device))
            if mesh.tensor_rank == 0:  # the others have computed the same
                sums[0] += loss_sum
            if mesh.speaks_for_samples:
                sums[1] += batch.num_targets
    task.model.train()
    reshard(task.roots)
    dist.all_reduce(sums)
    total, targets = sums.tolist()
    return Evaluation(loss=total / targets, targets=round(targets))
