"""Evaluation on the held-out split: every sample once, on whichever rank, summed exactly."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
