"""Check that all ranks compute the same bits: one micro-batch, twice on each, compared.

A device that computes wrongly now and then reports no error, and neither does a loss that
is slightly off. Between two steps every rank computes the loss of the same samples with its
weights, twice; their sum, in fp64, moves with the bits of any of them. Checked is the
forward pass, without dropout. A flipped bit in a weight which these samples do not read is
found too, where replicas hold the same weights. Ranks of other axes than data compute
different parts: such layouts are rejected.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardyard.data.loader import step_batches
from shardyard.parallel.gradients import local_part
from shardyard.train.training import Training

_TIMES = 2


@dataclass(frozen=True)
class RankBits:
    """Bits of one rank, which must equal those of others."""

    rank: int
    node: str
    bits: tuple[str, ...]
    """Each time that it was computed."""


def check_determinism(training: Training, step: int) -> None:
    """Compare, and report each rank that is odd. All ranks call it together, between two steps.

    Args:
        step: The one that was given to the device last.
    """
    node, place = socket.gethostname(), training.mesh.data_rank % training.mesh.layout.dp_shard
    told = training.gather((place, _weights(training), _losses(training, step), node))
    causes: dict[int, str] = {}
    # Only ranks at the same place of dp_shard are replicas. Others hold other parts.
    for shard in range(training.mesh.layout.dp_shard):
        weights = [RankBits(r, n, (w,)) for r, (p, w, _, n) in enumerate(told) if p == shard]
        causes |= find_outliers(weights, "its copy of the weights")
    losses = [RankBits(rank, n, each) for rank, (_, _, each, n) in enumerate(told)]
    causes |= find_outliers(losses, "its loss of the same micro-batch")
    for rank, cause in causes.items():
        training.report("device_problem", step=step, rank=rank, node=told[rank][3], cause=cause)


def find_outliers(all_ranks: Sequence[RankBits], what: str) -> dict[int, str]:
    """Return rank -> its report, for ranks whose bits are not those of the others."""
    counts = Counter(bits for each in all_ranks for bits in each.bits)
    usual, most = counts.most_common(1)[0]
    if len(counts) == 1:
        return {}
    # Only a strict majority shows who is wrong: of two ranks that differ, either may be right.
    if 2 * most > counts.total():
        odd = [each.rank for each in all_ranks if {*each.bits} != {usual}]
        return dict.fromkeys(odd, f"{what} has other bits than that of the other ranks")
    why = "no more than half of them agree, so that any of them may be wrong"
    return {
        each.rank: f"{what} has other bits than that of other ranks; {why}" for each in all_ranks
    }


def _weights(training: Training) -> str:
    """A sum that moves with any single bit of this rank's part of the weights."""
    sums = [
        # Bytes as integers: a sum of floats depends on its order, and rounding hides bits.
        local_part(tensor.detach()).contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64)
        for name, tensor in training.tensors.items()
        if name.startswith("model.")
    ]
    return str(int(torch.stack(sums).sum()))


@torch.no_grad()
def _losses(training: Training, step: int) -> tuple[str, ...]:
    """The sum of the losses of one micro-batch, each time, in hexadecimals that hold every bit."""
    size = training.resolved.recipe.optim.micro_batch
    assert isinstance(size, int)
    samples = range(step * size, (step + 1) * size)  # others each time
    task, found = training.task, []
    task.model.eval()
    # Twice: a device that errs now and then also differs from itself.
    for _ in range(_TIMES):
        # As rank 0 of 1, every rank reads the same samples.
        batches = step_batches(
            training.train_source, positions=samples, micro_batch=size, rank=0, world_size=1
        )
        found.append(float(task.computation.forward(batches).loss_sum).hex())
    task.model.train()
    return tuple(found)
