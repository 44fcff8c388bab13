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
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardyard.config.legality import Layout
from shardyard.models.families import Family, blocks_of, part_of
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
        )

    blocks = list(blocks_of(model, family).values())
    embedding, norm, head = (
        part_of(model, name) for name in (family.embedding, family.norm, family.head)
    )
    # tied ones stay in the root's group: two groups would untie them silently
    is_tied = embedding is not None and head is not None and embedding.weight is head.weight
    if embedding is not None and not is_tied:
        shard(embedding, reshard_after_forward=reshard)
    for block in blocks:
        shard(block, reshard_after_forward=reshard)
    if norm is not None and head is not None and not is_tied:
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
