"""The one order in which a model is changed into its parallel form."""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardyard.config.schema import Recipe
from shardyard.models.attention import sample_attention
from shardyard.models.dropout import SampleKeys, add_dropout
from shardyard.models.families import Family, blocks_of, dropout_places, part_of
from shardyard.models.forward import ForwardPass
from shardyard.models.local_shard import local_shard
from shardyard.models.router_loss import RouterLoss, RouterTotals
from shardyard.parallel.data import shard_data_parallel
from shardyard.parallel.expert import shard_experts, sparse_blocks
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.precision import mixed_precision
from shardyard.parallel.recompute import apply_recompute
from shardyard.parallel.tensor import shard_tensors, token_share
from shardyard.parallel.vocab_loss import VocabLoss
from shardyard.tasks import TASKS
from shardyard.tasks.causal_lm import CausalLM


def parallelize(model: PreTrainedModel, mesh: Mesh, *, recipe: Recipe, family: Family) -> CausalLM:
    """Change a model on the meta device, in place, as a resolved recipe says.

    Returns:
        The model with the task that feeds it and makes a loss of what it returns.
    """
    keys = SampleKeys()
    # 1. the way through the modules that are there: nothing below changes what it calls
    model.forward = ForwardPass(
        model,
        family,
        keys=keys,
        attention=partial(
            sample_attention,
            is_causal=family.is_causal,
            attend_across=recipe.data.attend_across_documents,
        ),
    )
    # 2. experts and tensors before all that wraps modules: they change what modules compute
    router = _add_router_losses(model, mesh, recipe=recipe, family=family, keys=keys)
    shard_experts(model, mesh, family)
    if mesh.layout.tp > 1:
        shard_tensors(model, mesh.dense["tp"], family)
        assert isinstance(recipe.data.seq_len, int)
        keys.tokens_l = token_share(torch.arange(recipe.data.seq_len), mesh.dense["tp"])
    task = _task(model, mesh, recipe=recipe, family=family, router=router)
    # 3. dropout: its hooks must see a module's output before FSDP's hooks let go of it
    if recipe.model.dropout:
        places = dropout_places(model, family)
        add_dropout(places, drop=recipe.model.dropout, seed=recipe.run.seed, keys=keys)
    blocks = blocks_of(model, family)
    # 4. recompute inside compile: the compiler then sees, and may fuse, what is made again
    apply_recompute(blocks, recipe.memory.recompute, keys=keys)
    # 5. compile inside sharding: one small graph a block; gathers stay outside of it
    if recipe.model.compile:
        for block in blocks.values():
            block.compile()
    # 6. shard last: groups are formed from the parameters as they now are
    shard_data_parallel(
        model,
        mesh,
        family=family,
        precision=mixed_precision(recipe.precision),
        prefetch=recipe.parallel.prefetch,
    )
    return task


def _add_router_losses(
    model: PreTrainedModel, mesh: Mesh, *, recipe: Recipe, family: Family, keys: SampleKeys
) -> RouterTotals | None:
    """Balance the routers. Returns where they count, or None for a dense model."""
    if family.sparse is None:
        return None
    config = model.config
    totals = RouterTotals(blocks=config.num_hidden_layers, experts=config.num_experts)
    for name, mlp in sparse_blocks(model, family).items():
        mlp.router_loss = RouterLoss(
            block=int(name.rpartition(".")[2]),
            balance=recipe.model.router_aux_loss,
            z=recipe.model.router_z_loss,
            keys=keys,
            totals=totals,
            copies=mesh.layout.tp,
            tokens_group=mesh.group("cp") if mesh.layout.cp > 1 else None,
        )
    return totals


def _task(
    model: nn.Module, mesh: Mesh, *, recipe: Recipe, family: Family, router: RouterTotals | None
) -> CausalLM:
    head = part_of(model, family.head)
    losses = VocabLoss()
    if head is not None and isinstance(head.weight, DTensor):
        losses = VocabLoss(group=mesh.group("tp"), first=local_shard(head.weight).offsets[0])
    return TASKS[recipe.task.name](model, token_losses=losses, router=router)
