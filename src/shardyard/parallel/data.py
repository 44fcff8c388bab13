"""Sharded data parallelism: replicate, ZeRO 1-3 and hybrid, all by FSDP2's ``fully_shard``.

What the zero levels mean for a step of several micro-batches:

====  ===========================  ==============================  ============================
zero  parameters                   gradients                       collectives of a step
====  ===========================  ==============================  ============================
1     whole from first to last     whole, reduced after the last   1 gather, 1 reduction
2     whole from first to last     sharded after every one         1 gather, n reductions
3     gathered block by block      sharded after every one         2n gathers, n reductions
====  ===========================  ==============================  ============================

Between optimizer steps all three keep parameters sharded; a mesh with dp_shard 1 replicates.
Gradients are summed, not averaged: the loss is a sum, and the step divides it once.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # named in fully_shard's own docs
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Shard

from shardyard.config.legality import Layout
from shardyard.models.families import Family, blocks_of, is_tied, part_of
from shardyard.parallel.expert import sparse_blocks
from shardyard.parallel.mesh import Mesh


def shard_data_parallel(
    model: nn.Module,
    mesh: Mesh,
    *,
    family: Family,
    precision: MixedPrecisionPolicy,
    prefetch: int,
) -> None:
    """Shard a model or a stage in place: a group for each block, so that one at a time is whole."""
    # logits are a view of a matrix product; nothing here changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    sharding = mesh.sharding()
    # on one rank resharding still frees the copies in the compute format
    reshard = mesh.layout.zero == 3
    placement = _expert_placement(model, mesh, family)

    def shard(
        modules: nn.Module | list[nn.Module],
        *,
        reshard_after_forward: bool,
        precision: MixedPrecisionPolicy = precision,
    ) -> None:
        fully_shard(
            modules,
            mesh=sharding,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placement,
        )

    blocks = list(blocks_of(model, family).values())
    embedding, norm, head = (
        part_of(model, name) for name in (family.embedding, family.norm, family.head)
    )
    # tied ones stay in the root's group: two groups would untie them silently
    tied = is_tied(model, family)
    if embedding is not None and not tied:
        shard(embedding, reshard_after_forward=reshard)
    for block in blocks:
        shard(block, reshard_after_forward=reshard)
    if norm is not None and head is not None and not tied:
        # backward begins here: freeing them after forward would gather twice for nothing
        shard([norm, head], reshard_after_forward=False)
    if head is None:  # what a pipeline stage returns goes into blocks
        precision = replace(precision, output_dtype=precision.param_dtype)
    shard(model, reshard_after_forward=False, precision=precision)

    if sharding.size() > 1:  # over one rank torch averages nothing, but would divide a copy
        for module in _groups(model):
            module.set_gradient_divide_factor(1.0)
            # without it gloo refuses the factor (it would need a pre-multiplied sum)
            module.set_force_sum_reduction_for_comms(True)
    _set_prefetch([block for block in blocks if isinstance(block, FSDPModule)], prefetch)


def _expert_placement(
    model: nn.Module, mesh: Mesh, family: Family
) -> Callable[[nn.Parameter], Any] | None:
    """How parameters are split that are not split along their first dimension over all shards."""
    experts = {
        param for mlp in sparse_blocks(model, family).values() for param in mlp.experts.parameters()
    }
    if not experts:
        return None
    sharding = mesh.sharding(of_experts=True)
    # with ep, fewer ranks hold the same expert than the same block: a mesh of its own, yet in the
    # block's group: FSDP hooks inside a block would run again, and differ, under recompute
    other_mesh = None if mesh.experts is None else _mesh_info(sharding)

    def placement(param: nn.Parameter) -> Any:
        if param not in experts:
            return None
        where = _even_dimension(param, ranks=sharding.shape[-1])
        return where if other_mesh is None else ShardPlacementResult(where, other_mesh)

    return placement


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


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


class GradientSync:
    """Tells FSDP, micro-batch by micro-batch, when to communicate (table above)."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        self._zero = layout.zero

    def before_backward(self, *, is_last: bool) -> None:
        """Call before the backward pass of each micro-batch."""
        if self._zero == 1:
            self._model.set_requires_gradient_sync(is_last)
        else:
            # shards are summed over replicas once, after the last
            self._model.set_requires_all_reduce(is_last)
        if self._zero < 3:
            self._model.set_reshard_after_backward(is_last)
        self._model.set_is_last_backward(is_last)

    def sum_gradients(self) -> None:
        """Do what FSDP does after a backward pass; for one in which its hooks are not called."""
        # torch 2.13 has no public function for this; its pipeline stages do the same
        state = fully_shard.state(self._model)  # type: ignore[attr-defined]
        for group_state in state._state_ctx.all_states:
            for group in group_state._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters after a forward pass that no backward pass follows."""
    for module in _groups(model):
        module.reshard()


def _groups(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_prefetch(blocks: Sequence[FSDPModule], prefetch: int) -> None:
    """Gather ``prefetch`` blocks ahead. FSDP's own default is 1; setting it costs nothing there."""
    if prefetch == 1:
        return
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + prefetch]))
        before = blocks[max(0, index - prefetch) : index]
        block.set_modules_to_backward_prefetch(list(reversed(before)))
