"""The model in its parallel form, and its optimizer: of a family, of images, or of one's own.

The order matters: the model on the meta device before any storage, sharding before storage (so
that no rank ever holds the whole), the optimizer after sharding (it must see the shards).
"""

from pathlib import Path
from typing import assert_never

import torch
import torch.distributed as dist

from shardyard.config.resolved import Resolved
from shardyard.config.rules.custom_module import is_generic
from shardyard.config.rules.reproducible import BY_EXACT, micro_batches
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.loader import MicroBatch
from shardyard.families.lora import trained_modules
from shardyard.families.shape import ModelShape
from shardyard.models.build import build_on_meta, freeze, freeze_base, materialize
from shardyard.models.lora import add_adapters
from shardyard.parallel.apply import parallelize
from shardyard.parallel.attention_kernel import choose_attention
from shardyard.parallel.low_precision import DTYPES, low_precision_copies_of
from shardyard.parallel.mesh import Mesh, names_on_all_stages
from shardyard.parallel.reproducible_sums import ExactGradients
from shardyard.tasks.base import task_class
from shardyard.tasks.language import vocabulary
from shardyard.tasks.loss_computation import Computation
from shardyard.train.custom_model import build_custom
from shardyard.train.ema import WeightEma
from shardyard.train.generic_heads import build_with_head
from shardyard.train.optim import ShardOptimizer
from shardyard.train.optimizer_offload import StatesOnHost
from shardyard.train.optimizers.whole_vectors import WholeVectors
from shardyard.train.reproducible_step import ExactStep


def build_computation(
    resolved: Resolved,
    mesh: Mesh,
    *,
    device: torch.device,
    control: dist.ProcessGroup,
    may_copy: bool | None,
) -> Computation[MicroBatch]:
    """The model in parallel form, and how it computes the task.

    Args:
        control: A gloo group of all ranks.
        may_copy: As for ``build_sharded``.
    """
    recipe, shape, network = resolved.recipe, resolved.shape, resolved.network
    # For the whole process: a recomputed block runs outside of any `with`.
    choose_attention(recipe.model.attention)
    if shape is not None:
        return build_sharded(recipe, shape, mesh, device=device, may_copy=may_copy)
    if network is not None:
        from shardyard.train.images import build_image_network  # pillow: an extra

        return build_image_network(resolved, mesh, device=device, control=control)
    if is_generic(recipe) and not task_row(recipe.task.name).is_causal:
        return build_with_head(resolved, mesh, device=device, control=control)
    return build_custom(
        recipe, mesh, vocab_size=vocabulary(resolved), device=device, control=control,
        folder=Path(str(resolved.model_dir)) if is_generic(recipe) else None,
        tokenizer_dir=Path(resolved.data.dir),
    )  # fmt: skip


def build_sharded(
    recipe: Recipe,
    shape: ModelShape,
    mesh: Mesh,
    *,
    device: torch.device,
    may_copy: bool | None = None,
) -> Computation[MicroBatch]:
    """Return the task's computation, with its parallel model on the meta device: without storage.

    Args:
        may_copy: One rank may compute with copies of its weights; None: where that has been tried.
    """
    model, held_in = build_on_meta(shape), DTYPES[recipe.precision.compute]
    if recipe.model.lora.rank is None:
        freeze(model, recipe.model.frozen, storage_dtype=held_in)
    else:
        # Before the adapters are added, as it freezes every parameter that there is.
        trained = trained_modules(shape, recipe.model.lora.modules_to_save)
        freeze_base(model, storage_dtype=held_in, trained=trained)
        add_adapters(model, shape, recipe.model.lora)
    family = shape.family
    parts = parallelize(model, mesh, recipe=recipe, shape=shape, family=family, may_copy=may_copy)
    return task_class(recipe.task.name).compute(parts, mesh, recipe=recipe, device=device)


def build_optimizer(
    recipe: Recipe, computation: Computation[MicroBatch], mesh: Mesh, *, device: torch.device
) -> ShardOptimizer:
    """Give a sharded model its storage, without values yet, and an optimizer.

    A module of the user's own has its storage and its values, and so has a network for images.
    """
    model = computation.model
    if any(param.is_meta for param in model.parameters()):
        materialize(
            model, device, stages=computation.roots, on_host=recipe.memory.offload == "params"
        )
    model.train()
    return ShardOptimizer(
        model,
        recipe.optim,
        states=recipe.precision.optimizer_states,
        tied_across_stages=computation.tied_across_stages,
        names=names_on_all_stages((name for name, _ in model.named_parameters()), mesh),
        on_host=_on_host(recipe, device),
        wrap_update=WholeVectors if recipe.precision.reduce == "exact" else None,
        copies=low_precision_copies_of(model),
    )


def _on_host(recipe: Recipe, device: torch.device) -> StatesOnHost | None:
    offload = recipe.memory.offload
    match offload:
        case "none" | "activations":
            return None
        case "optimizer":
            return StatesOnHost(device)
        case "params":
            return StatesOnHost(device, with_weights=True)
        case _:
            assert_never(offload)


def exact_step_of(
    recipe: Recipe, computation: Computation[MicroBatch], mesh: Mesh, *, device: torch.device
) -> ExactStep | None:
    """Return the step with sums independent of the ranks to the bit, if the recipe asks for it."""
    if recipe.precision.reduce != "exact":
        return None
    # another micro-batch rounds otherwise, so a resume keeps it
    computation.fixed_settings = {"optim.micro_batch": BY_EXACT, **computation.fixed_settings}
    summands = micro_batches(recipe.optim)
    gradients = ExactGradients(computation.model, mesh, summands=summands)
    return ExactStep(computation, gradients, device=device)


def ema_of(recipe: Recipe, computation: Computation[MicroBatch]) -> WeightEma | None:
    """Return averages of a sharded model's weights, with storage, if the recipe asks for them."""
    decay = recipe.optim.ema_decay
    return None if decay is None else WeightEma(computation.model, decay=decay)
