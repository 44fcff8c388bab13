"""A layout: how many ranks each axis has. Which are legal: ``config/rules/layout.py``."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from shardyard.families.shape import ModelShape

WHY_NOT = {
    "cp": "attention would have to exchange keys and values, and where that is is not known",
    "tp": "how its matrices may be split is not known",
    "pp": "where it can be cut, and what passes there, is not known",
    "ep": "which of its tensors are experts, and how tokens reach them, is not known",
}
"""Axis -> why a module of one's own has none."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, and what dp_shard keeps split between uses."""

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int
    """1 optimizer state; 2 also gradients; 3 also parameters."""

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data_ranks * self.cp * self.tp * self.pp


# Where a pipeline is cut: whole blocks to stages, the head in the place of some of them.
#
# The planner and the training half ask here, so that what is predicted is what is trained.


class Cut(NamedTuple):
    """Blocks of the stages: whole ones, so that a stage may have to wait for a longer one."""

    first: int
    """Blocks of every stage but the last; some have one less where the blocks do not divide."""
    last: int
    """Blocks of the stage that also has the head."""


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
    head = shape.head_parameters
    return head * shape.num_hidden_layers / (shape.matmul_parameters - head)


# The meshes of a layout: which rank is where on each axis. The one place that numbers ranks.
#
# Ranks count like digits, the last axis fastest: ``pp, dp_replicate, dp_shard, cp, tp``. So the
# ranks of a tensor group are neighbours (they talk most), those of a shard group are near (gathers
# stay inside a node as far as the degree allows), and only gradients of replicas and activations
# between stages cross nodes. Parameters are split over dp_shard and cp together: ranks of a context
# group hold the same weights, like ranks that read other samples. ``ep`` takes its ranks from those
# two.

Shape = dict[str, int]
"""Name of each axis of a mesh and its degree, the slowest first."""


def dense_shape(layout: Layout) -> Shape:
    """The mesh where most parameters live; ``fsdp`` is dp_shard x cp."""
    copies, fsdp = layout.dp_replicate, layout.dp_shard * layout.cp
    return {"pp": layout.pp, "dp_replicate": copies, "fsdp": fsdp, "tp": layout.tp}


def expert_shape(layout: Layout) -> Shape:
    """The mesh of experts: ``expert_shard`` x ``ep`` is the ``fsdp`` of the dense one."""
    copies, shards = layout.dp_replicate, layout.dp_shard * layout.cp // layout.ep
    split = {"expert_shard": shards, "ep": layout.ep, "tp": layout.tp}
    return {"pp": layout.pp, "dp_replicate": copies, **split}


def context_shape(layout: Layout) -> Shape:
    """The mesh in which ranks that read one sample find each other."""
    others = layout.world_size // (layout.cp * layout.tp)
    return {"others": others, "cp": layout.cp, "tp": layout.tp}
