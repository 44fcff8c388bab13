"""The meshes of a layout: which rank is where on each axis. The one place that numbers ranks.

Ranks count like digits, the last axis fastest: ``pp, dp_replicate, dp_shard, cp, tp``. So the ranks
of a tensor group are neighbours (they talk most), those of a shard group are near (gathers stay
inside a node as far as the degree allows), and only gradients of replicas and activations between
stages cross nodes. Parameters are split over dp_shard and cp together: ranks of a context group
hold the same weights, like ranks that read other samples. ``ep`` takes its ranks from those two.
"""

from shardyard.config.layout import Layout

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
