"""Where a pipeline is cut: whole blocks to stages, the head in the place of some of them.

The planner and the training half ask here, so that what is predicted is what is trained.
"""

from functools import cache
from typing import NamedTuple

from shardyard.families.shape import ModelShape


class Cut(NamedTuple):
    """Blocks of the stages: whole ones, so that a stage may have to wait for a longer one."""

    first: int
    """Of every stage but the last; some have one less where the blocks do not divide."""
    last: int
    """Of the stage that also has the head."""


def cut_by_cost(shape: ModelShape, stages: int) -> Cut:
    """The cut whose costliest stage costs least; every stage has a block."""
    return _cut_by_cost(shape.num_hidden_layers, stages, _head_in_blocks(shape))


def blocks_by_stage(shape: ModelShape, stages: int) -> list[range]:
    """Numbers of the blocks of each stage. Stages with one less come first: the very first one
    has the embedding too, and early stages hold the most micro-batches at once."""
    last = cut_by_cost(shape, stages).last
    others, left = shape.num_hidden_layers - last, stages - 1
    found, begin = [], 0
    while left:
        size = others // left
        found.append(range(begin, begin + size))
        begin, others, left = begin + size, others - size, left - 1
    return [*found, range(begin, begin + last)]


def rank_of_stage(stage: int, *, pp: int, schedule: str) -> int:
    """The rank that has a stage: in rounds; for zb-v there and back, the first has the last."""
    lap, place = divmod(stage, pp)
    return pp - 1 - place if schedule == "zb-v" and lap % 2 else place


@cache
def _cut_by_cost(blocks: int, stages: int, head: float) -> Cut:
    if stages == 1:
        return Cut(blocks, blocks)
    cuts = (
        (first, max(1, blocks - (stages - 1) * first))
        for first in range(blocks // stages, -(-blocks // (stages - 1)) + 1)
    )
    costs = ((max(first, last + head), last) for first, last in cuts)
    cost, last = min(costs)
    # what the last can take beside the head at that cost, earlier ones need not hold
    last = min(max(last, int(cost - head)), blocks - (stages - 1))
    return Cut(-(-(blocks - last) // (stages - 1)), last)


def _head_in_blocks(shape: ModelShape) -> float:
    """Work of the head, in that of a block: their parameters in products of a token."""
    head = shape.table_parameters
    return head * shape.num_hidden_layers / (shape.matmul_parameters - head)
