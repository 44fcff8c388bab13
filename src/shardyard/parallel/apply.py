"""The one order in which a model is changed into its parallel form."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardyard.config.formulas import attends_by_length
from shardyard.config.layout import blocks_by_stage
from shardyard.config.schema.recipe import Recipe
from shardyard.families.family import Family
from shardyard.families.shape import ModelShape
from shardyard.models.attention import Attention, attention_by_length, sample_attention
from shardyard.models.batch_norm import BatchNorms, batch_norms_in
from shardyard.models.build import keep_blocks, stage_of
from shardyard.models.forward import ForwardPass
from shardyard.models.grad_scale import LossScale
from shardyard.models.local_shard import local_shard
from shardyard.models.lora import add_adapter_dropout
from shardyard.models.moe import RouterLoss, RouterTotals, RouterWeight
from shardyard.models.random import SampleKeys, add_dropout, add_head_dropout
from shardyard.models.submodules import blocks_of, dropout_modules, part_of
from shardyard.parallel.context import context_attention, context_share
from shardyard.parallel.custom_module import split_by_plan
from shardyard.parallel.ddp import hold_whole, is_replicated
from shardyard.parallel.expert import shard_experts, sparse_blocks
from shardyard.parallel.fsdp import Groups, Placement, groups_of, reshard, shard_groups
from shardyard.parallel.loss import VocabLoss, compute_in_chunks
from shardyard.parallel.low_precision import (
    DTYPES,
    LowPrecisionCopies,
    can_hold_copies,
    low_precision_copies_of,
    mixed_precision,
    return_in,
)
from shardyard.parallel.matmul import multiply_with, reject_wrapped
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.parallel.offload import ActivationOffload
from shardyard.parallel.pipeline import Pipeline, StagePlan
from shardyard.parallel.recompute import apply_recompute, selective_contexts
from shardyard.parallel.tensor import shard_tensors, token_share
from shardyard.parallel.uneven_gradients import handle_uneven_gradients
from shardyard.torch_private import allow_graphs

REMEDY = "Use {}, which gathers all blocks on every rank, or let all ranks call the same blocks."
"""Advice where ranks may not call different blocks."""


def parallelize(
    model: PreTrainedModel, mesh: Mesh, *, recipe: Recipe, shape: ModelShape, family: Family,
    may_copy: bool | None = False,
) -> ParallelModel:  # fmt: skip
    """Change a model in place as a resolved recipe says; weights that it has stay.

    Of a pipeline, only this rank's stages stay of the model.

    Args:
        may_copy: One rank may compute with copies of the weights (``parallel/low_precision.py``);
            the code that changes weights then has to report it.

    Returns:
        The model with all that a task needs to feed it and to make a loss of what it returns.

    Raises:
        RequestError: A matrix that is to be split, or to multiply in fp8, is wrapped.
    """
    if mesh.layout.tp > 1 or recipe.precision.compute == "fp8":  # while ranks have all of it
        reject_wrapped(model, family, blocks_only=mesh.layout.tp == 1)
    keys = SampleKeys()
    keys.computed_l, keys.tokens_l = _own_tokens(recipe, mesh)
    # 1. the modules of this rank, and the way through them: nothing below changes what it calls
    plan = StagePlan.of(recipe.parallel, mesh.layout.pp)
    stages = {0: model}
    if mesh.layout.pp > 1:
        stages = _cut(model, plan, mesh.stage_rank, shape=shape, family=family)
    offload = _offload(recipe, mesh)
    attention = _attention(recipe, mesh, shape, offload)
    for number, stage in stages.items():
        # outside of all that wraps a block: of what is recomputed only the input is kept
        stage.forward = ForwardPass(
            stage, family, keys=keys, attention=attention, tokens_l=keys.computed_l,
            is_first=number == 0,
            logit_softcap=shape.final_logit_softcapping if shape.label_head is None else None,
            embedding_multiplier=shape.embedding_multiplier, logits_scaling=shape.logits_scaling,
            block_types=shape.block_types,
            around=None if offload is None else offload.around,
        )  # fmt: skip
    # 2. what modules compute, before all that wraps them; copies are of modules as they were built
    _compute_in(model, mesh, recipe=recipe, family=family, may_copy=may_copy)
    scale = LossScale()
    router = _add_router_losses(model, mesh, recipe=recipe, family=family, keys=keys, scale=scale)
    shard_experts(model, mesh, family)
    if mesh.layout.tp > 1:
        keeps_sums = recipe.memory.recompute == "selective"
        shard_tensors(model, mesh.dense["tp"], family, keeps_sums=keeps_sums)
    token_losses = _token_losses(model, mesh, family, scale)
    chunk, head = recipe.memory.loss_chunk, part_of(model, family.head)
    loss_in_model = isinstance(chunk, int)
    if isinstance(chunk, int) and head is not None:
        compute_in_chunks(head, token_losses, tokens=chunk, softcap=shape.final_logit_softcapping)
    # 3. dropout: its hooks must see a module's output before FSDP's hooks let go of it
    _drop(model, recipe, family, keys)
    precision = mixed_precision(recipe.precision)
    _wrap(
        [
            (stage, groups_of(stage, mesh, family, precision, loss_in_model=loss_in_model))
            for stage in stages.values()
        ],
        blocks_of(model, family),
        mesh,
        recipe=recipe,
        keys=keys,
        offload=offload,
    )
    pipeline = None
    if mesh.layout.pp > 1:
        pipeline = _pipeline(stages, mesh, plan, recipe=recipe, shape=shape, family=family)
    return ParallelModel(
        model=model,
        token_losses=token_losses,
        loss_in_model=loss_in_model,
        accepts_document_starts=attends_by_length(recipe, shape),
        router_weight=None if router is None else router.weight,
        statistics=() if router is None else (router.totals,),
        tokens_l=keys.computed_l,
        local_l=keys.tokens_l,
        pipeline=pipeline,
    )


def set_sample_form(
    forward_passes: Sequence[ForwardPass], mesh: Mesh, *, recipe: Recipe, shape: ModelShape
) -> Tensor | None:
    """Let a model take samples of another length, or keep documents apart or not, from now on.

    Args:
        recipe: Says both.

    Returns:
        Indices in a sample of the tokens that this rank computes; None: all.
    """
    computed_l, local_l = _own_tokens(recipe, mesh)
    attention = _attention(recipe, mesh, shape, None)
    for each in forward_passes:
        each.set_sample_form(attention, computed_l, local_l)
    return computed_l


def _pipeline(
    stages: dict[int, nn.Module], mesh: Mesh, plan: StagePlan, *,
    recipe: Recipe, shape: ModelShape, family: Family,
) -> Pipeline:  # fmt: skip
    tied = family.embedding.module if shape.tie_word_embeddings else None
    return Pipeline(
        stages, mesh, plan, width=shape.hidden_size, dtype=DTYPES[recipe.precision.compute],
        tied=tied,
    )  # fmt: skip


def _drop(model: PreTrainedModel, recipe: Recipe, family: Family, keys: SampleKeys) -> None:
    drop = recipe.model.dropout
    assert not isinstance(drop, str), "resolved"
    if drop:
        places = dropout_modules(model, family)
        add_dropout(places, drop=drop, seed=recipe.run.seed, keys=keys)
        before_head = part_of(model, family.head_dropout)
        if before_head is not None:
            add_head_dropout(
                before_head, str(family.head_dropout), drop=drop, seed=recipe.run.seed, keys=keys,
                is_of_samples=family.labelled == "samples",
            )  # fmt: skip
    if recipe.model.lora.dropout:
        add_adapter_dropout(model, recipe.model.lora.dropout, seed=recipe.run.seed, keys=keys)


def parallelize_custom(
    module: nn.Module,
    mesh: Mesh,
    *,
    recipe: Recipe,
    blocks: Mapping[str, nn.Module],
    words: Mapping[str, str],
    keys: SampleKeys | None = None,
    remedy: str | None = None,
) -> BatchNorms | None:
    """Change a module in place that is known only by its owner's description.

    Args:
        blocks: Modules that are recomputed, compiled and sharded one by one, by full name.
        words: Split of its matrices by tp: name -> a word of ``tensor_plan``.
        keys: Keys of our own dropout; None: it is torch's.
        remedy: Setting to advise where ranks may not call different blocks; None: they never do.

    Returns:
        Its batch normalisations, which count in the step; None: it has none.
    """
    # 1. it calls its modules itself, and 3. drops what it drops
    # 2. what modules compute
    over_step = recipe.model.batch_norm == "step"
    norms = BatchNorms(module, over_step=over_step) if batch_norms_in(module) else None
    if mesh.layout.tp > 1:
        split_by_plan(module, mesh.dense["tp"], words)
    output_dtype = mixed_precision(recipe.precision).output_dtype
    groups = Groups(blocks=list(blocks.values()), output_dtype=output_dtype)
    _wrap(
        [(module, groups)], blocks, mesh, recipe=recipe, keys=keys, offload=None, has_own_sizes=True
    )
    if remedy is not None:
        handle_uneven_gradients(module, mesh, blocks, remedy=remedy)
    return norms


def shard_script(
    model: nn.Module,
    mesh: Mesh,
    *,
    blocks: Mapping[str, nn.Module],
    precision: MixedPrecisionPolicy,
    placement: Placement | None = None,
) -> None:
    """Change a model in place whose script calls it, and ``loss.backward()``, as before.

    Each gradient is then the mean of the ranks' after every backward pass.

    Args:
        blocks: What is sharded one by one, by full name.
        placement: How parameters are split; None: all along their first dimension.
    """
    groups = Groups(blocks=list(blocks.values()), output_dtype=None, placement=placement)
    shard_groups(model, mesh, groups, precision=precision, prefetch=1, average_gradients=True)
    remedy = REMEDY.format("SHARDYARD_PARALLEL=zero=2")
    if (uneven := handle_uneven_gradients(model, mesh, blocks, remedy=remedy)) is not None:
        uneven.end_each_backward()
    model.register_forward_hook(reshard_without_gradients)


def reshard_without_gradients(model: nn.Module, _args: Any, _output: Any) -> None:
    """Let go of gathered parameters, which a script would see in place of its own."""
    if not torch.is_grad_enabled():
        reshard([model])


def _wrap(
    roots: Sequence[tuple[nn.Module, Groups]],
    blocks: Mapping[str, nn.Module],
    mesh: Mesh,
    *,
    recipe: Recipe,
    keys: SampleKeys | None,
    offload: ActivationOffload | None,
    has_own_sizes: bool = False,
) -> None:
    """The end of the order, for every module.

    Args:
        roots: What is sharded as a whole, and its groups.
        keys: What dropout of ours asks; None: it is torch's own.
        has_own_sizes: Whether blocks of one class may be of several sizes, each of which is then
            compiled for itself: what inductor makes of convolutions and batch normalisations of
            sizes that vary is wrong on a CPU, or ends with an error (torch 2.13).
    """
    # 4. recompute inside compile: the compiler then sees, and may fuse, what is made again
    apply_recompute(dict(blocks), recipe.memory.recompute, keys=keys, offload=offload)
    # 5. compile inside sharding: one small graph a block; gathers stay outside of it
    if recipe.model.compile:
        if has_own_sizes:  # each to train and to evaluate, and for a smaller last micro-batch
            allow_graphs(4 * len(blocks))
        for block in blocks.values():
            block.compile(dynamic=False if has_own_sizes else None)
    # 6. shard last: groups are formed from the parameters as they now are
    precision = mixed_precision(recipe.precision)
    for root, groups in roots:
        if low_precision_copies_of(root) is not None:
            return_in(root, groups.output_dtype)
            continue
        if is_replicated(root, mesh, recipe):
            hold_whole(root, mesh)
            continue
        shard_groups(
            root,
            mesh,
            groups,
            precision=precision,
            prefetch=recipe.parallel.prefetch,
            on_host=recipe.memory.offload == "params",
        )


def _own_tokens(recipe: Recipe, mesh: Mesh) -> tuple[Tensor | None, Tensor | None]:
    """Indices in a sample of this rank's tokens; None: all.

    Returns:
        Of those that it computes, and of those whose residual stream it holds between matrices.
    """
    computed: Tensor | None = None
    residual: Tensor | None = None
    if mesh.layout.cp == mesh.layout.tp == 1:
        return computed, residual  # samples of any length
    assert isinstance(recipe.data.seq_len, int)
    tokens_L = torch.arange(recipe.data.seq_len, device=mesh.dense.device_type)
    if mesh.layout.cp > 1:
        exchanged = recipe.parallel.cp_exchange
        computed = residual = context_share(tokens_L, exchanged=exchanged, group=mesh.group("cp"))
    if mesh.layout.tp > 1:
        residual = token_share(tokens_L if computed is None else computed, mesh.dense["tp"])
    return computed, residual


def _offload(recipe: Recipe, mesh: Mesh) -> ActivationOffload | None:
    if recipe.memory.offload != "activations":
        return None
    return ActivationOffload(
        torch.device(mesh.dense.device_type),
        depth=recipe.memory.offload_depth,
        keeps_last=mesh.layout.pp == 1,  # else other micro-batches may come before its backward
    )


def _compute_in(
    model: PreTrainedModel, mesh: Mesh, *, recipe: Recipe, family: Family, may_copy: bool | None
) -> None:
    """Products in the format that computes: in fp8, by copies of one rank, or both."""
    blocks, in_float8 = blocks_of(model, family), recipe.precision.compute == "fp8"
    matrices: dict[str, nn.Linear] = {}
    product = None
    if in_float8:
        from shardyard.parallel import float8  # torchao: an extra

        float8.patch_compiler()
        # a CPU has no such products; the command line refuses it, tests round as a device would
        emulate = mesh.dense.device_type == "cpu"
        product = float8.Float8Product(recipe.precision.fp8_scaling, emulate=emulate)
        matrices = float8.float8_matrices(blocks, family, tp=mesh.layout.tp)
    if may_copy is not False and can_hold_copies(model, mesh, recipe, anywhere=may_copy is True):
        compiled = blocks.values() if recipe.model.compile else ()
        LowPrecisionCopies(
            model, recipe, compiled=compiled, in_float8=matrices.values(), float8=product
        )
    elif product is not None:
        for module in matrices.values():  # before tensors are split, which ask how to multiply
            multiply_with(module, product)


def _attention(
    recipe: Recipe, mesh: Mesh, shape: ModelShape, offload: ActivationOffload | None
) -> Callable[[Tensor, Tensor | None], Attention]:
    """From the positions of whole samples, and where documents begin, to how tokens attend."""
    # of tokens on both sides, padding must be kept from being seen: it is at position 0
    attend_across = recipe.data.attends_across and shape.is_causal
    window = shape.sliding_window
    if mesh.layout.cp == 1:
        of_samples = partial(
            sample_attention,
            is_causal=shape.is_causal,
            attend_across=attend_across,
            window=window,
        )
        return lambda positions_BL, starts_BS: (
            of_samples(positions_BL)
            if starts_BS is None
            else attention_by_length(starts_BS, positions_BL.shape[1])
        )
    assert isinstance(recipe.data.seq_len, int)
    recomputes = recipe.memory.recompute in ("full", "selective")
    return context_attention(
        recipe.data.seq_len,
        exchanged=recipe.parallel.cp_exchange,
        group=mesh.group("cp"),
        is_causal=shape.is_causal,
        attend_across=attend_across,
        window=window,
        regather_context_fn=None if recomputes else partial(selective_contexts, offload),
    )


def _cut(
    model: nn.Module, plan: StagePlan, rank: int, *, shape: ModelShape, family: Family
) -> dict[int, nn.Module]:
    """Leave of a model the stages of one rank; returns each by its number."""
    blocks, last = blocks_by_stage(shape, plan.num_stages), plan.num_stages - 1
    mine = plan.stages_of(rank)
    kept = [number for stage in mine for number in blocks[stage]]
    keep_blocks(model, family, kept, is_first=0 in mine, is_last=last in mine)
    return {
        stage: stage_of(model, family, blocks[stage], is_first=stage == 0, is_last=stage == last)
        for stage in mine
    }


class _Router(NamedTuple):
    """Objects that the routers of all blocks share."""

    totals: RouterTotals
    weight: RouterWeight


def _add_router_losses(
    model: PreTrainedModel,
    mesh: Mesh,
    *,
    recipe: Recipe,
    family: Family,
    keys: SampleKeys,
    scale: LossScale,
) -> _Router | None:
    """Balance the routers. Returns what they share, or None for a dense model."""
    if family.sparse is None:
        return None
    config = model.config
    totals = RouterTotals(blocks=config.num_hidden_layers, experts=config.num_experts)
    weight = RouterWeight()
    for name, mlp in sparse_blocks(model, family).items():
        mlp.router_loss = RouterLoss(
            block=int(name.rpartition(".")[2]),
            balance=recipe.model.router_aux_loss,
            z=recipe.model.router_z_loss,
            keys=keys,
            totals=totals,
            weight=weight,
            scale=scale,
            copies=mesh.layout.tp,
            tokens_group=mesh.group("cp") if mesh.layout.cp > 1 else None,
        )
    return _Router(totals, weight)


def _token_losses(model: nn.Module, mesh: Mesh, family: Family, scale: LossScale) -> VocabLoss:
    head = part_of(model, family.head)
    if head is None or family.head.split is None or not isinstance(head.weight, DTensor):
        return VocabLoss(scale=scale)
    first = local_shard(head.weight).offsets[0]
    return VocabLoss(group=mesh.group("tp"), first=first, scale=scale)
