"""What of a model of a known family is gathered together, and how its experts are split."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardyard import torch_private
from shardyard.families.family import Family
from shardyard.models.submodules import blocks_of, is_tied, part_of
from shardyard.parallel.data import Groups, Placement
from shardyard.parallel.expert import sparse_blocks
from shardyard.parallel.mesh import Mesh


def groups_of(
    model: nn.Module,
    mesh: Mesh,
    family: Family,
    precision: MixedPrecisionPolicy,
    *,
    loss_in_model: bool,
) -> Groups:
    """The groups of a model or a stage of a known family.

    Args:
        loss_in_model: What it returns is a sum of losses, which stays in fp32.
    """
    embedding, norm, head = (
        part_of(model, name) for name in (family.embedding, family.norm, family.head)
    )
    # tied ones stay in the root's group: two groups would untie them silently
    tied = is_tied(model, family)
    of_end = None if loss_in_model else precision.output_dtype
    return Groups(
        first=[embedding] if embedding is not None and not tied else [],
        blocks=list(blocks_of(model, family).values()),
        last=[norm, head] if norm is not None and head is not None and not tied else [],
        # what a pipeline stage returns goes into blocks
        output_dtype=precision.param_dtype if head is None else of_end,
        placement=_expert_placement(model, mesh, family),
    )


def _expert_placement(model: nn.Module, mesh: Mesh, family: Family) -> Placement | None:
    """How parameters are split that are not split along their first dimension over all shards."""
    experts = {
        param for mlp in sparse_blocks(model, family).values() for param in mlp.experts.parameters()
    }
    if not experts:
        return None
    sharding = mesh.sharding(of_experts=True)
    # with ep, fewer ranks hold the same expert than the same block: a mesh of its own, yet in the
    # block's group: FSDP hooks inside a block would run again, and differ, under recompute
    of_mesh = None if mesh.experts is None else torch_private.placed_over(sharding)

    def placement(param: nn.Parameter) -> Any:
        if param not in experts:
            return None
        where = _even_dimension(param, ranks=sharding.shape[-1])
        return where if of_mesh is None else of_mesh(where)

    return placement


def _even_dimension(param: nn.Parameter, *, ranks: int) -> Shard | None:
    """Which dimension of experts is split: the first (None) if it divides, else another.

    Eight experts over 64 ranks would leave 56 of them without any.
    """
    sizes = param.to_local().shape if isinstance(param, DTensor) else param.shape
    if sizes[0] % ranks == 0:
        return None
    taken = [place.dim for place in getattr(param, "placements", ()) if isinstance(place, Shard)]
    free = [dim for dim in (1, 2) if dim not in taken and sizes[dim] % ranks == 0]
    return Shard(free[0]) if free else None
