"""Check model settings: layout, optimizer and memory against the model, and LoRA adapters."""

from collections.abc import Iterable

from shardyard.config.formulas import batch_or_none, check_attention
from shardyard.config.optimizers import OPTIMIZERS, optimizer_of
from shardyard.config.rules.layout import FP8_MULTIPLE, SPLIT_BACKWARD, requested_zero
from shardyard.config.rules.layout import check_layout as layout_problems
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row, tasks_of
from shardyard.errors import Problem
from shardyard.families.lora import lora_target_errors, trained_module_errors
from shardyard.families.shape import ModelShape
from shardyard.families.trainable import frozen_pattern_errors, parameters_of


def check_lora(recipe: Recipe) -> Iterable[Problem]:
    """Everything that is wrong with ``model.lora`` before the model's shape is known."""
    model, lora = recipe.model, recipe.model.lora
    if lora.rank is None:
        for key in sorted(lora.model_fields_set - {"rank"}):
            text = "is for adapters, which need model.lora.rank. Give"
            yield Problem(f"model.lora.{key}", f"{text} model.lora.rank too, or leave it out.")
        return
    setting = "model.lora.rank"
    if model.module is not None:
        text = f"={lora.rank} adds adapters to known matrices, and what is inside of "
        yield Problem(setting, f"{text}model.module is not known. Put them into the module.")
    if model.frozen:
        text = f"={', '.join(model.frozen)} with model.lora.rank={lora.rank}: only adapters are "
        text += "trained, and all else is frozen. Leave it out."
        yield Problem("model.frozen", text)
    if recipe.precision.compute == "fp8":
        text = f"={lora.rank} with precision.compute=fp8: adapters with fp8 products are not "
        yield Problem(setting, f"{text}built. Use precision.compute=bf16.")


# What a recipe asks of its model, and the model cannot do: known as soon as its shape is.
#
# Asked by the check of a recipe (of a preset), again when a model's folder was read and every
# ``auto`` that needs no data has its value, and by the planner's search.


def check_model(
    recipe: Recipe, shape: ModelShape | None, *, devices_per_node: int | None
) -> list[Problem]:
    """All that the settings say against each other and against the model; data left out.

    What is still ``auto`` is not looked at.

    Args:
        shape: The model's; None: not known yet, or a module of the user's own.
        devices_per_node: Ranks of a node; None: not known yet (``machines.devices_of_node``).
    """
    optim, seq_len = recipe.optim, recipe.data.seq_len
    devices = None if devices_per_node is None else recipe.cluster.nodes * devices_per_node
    return [
        *layout_problems(
            recipe.parallel,
            world_size=devices,
            devices_per_node=devices_per_node,
            shape=shape,
            seq_len=None if seq_len == "auto" else seq_len,
            global_batch=batch_or_none(optim, devices=devices),
            micro_batch=None if optim.micro_batch == "auto" else optim.micro_batch,
        ),
        *check_attention(recipe, shape),
        *_check_compile(recipe, shape),
        *_check_fp8(recipe, shape),
        *_check_offload(recipe),
        *([] if shape is None else _check_task_support(recipe, shape)),
        *(
            frozen_pattern_errors(recipe.model.frozen, parameters_of(shape))
            if shape is not None and recipe.model.frozen
            else []
        ),
        *([] if shape is None else _check_adapters(recipe, shape)),
        *([] if shape is None else _check_router_losses(recipe, shape)),
    ]


def _check_offload(recipe: Recipe) -> Iterable[Problem]:
    """Weights on the host come up to be gathered, and a part at a time to be updated."""
    if recipe.memory.offload != "params":
        return
    zero, optim = requested_zero(recipe.parallel), recipe.optim
    if zero != 3:
        said = "auto" if zero is None else str(zero)
        yield Problem(
            "memory.offload",
            f"=params with parallel.zero={said}: weights would stay on the device for a whole "
            "step. Set parallel.zero=3, which gathers and frees them block by block, on one "
            "device too.",
        )
    if optim.ema_decay is not None:
        yield Problem(
            "optim.ema_decay",
            f"={optim.ema_decay} with memory.offload=params: averages of weights in host memory "
            "are not built. Use memory.offload=optimizer, or leave it out.",
        )
    if optimizer_of(optim).needs_all:
        partwise = " or ".join(name for name, row in OPTIMIZERS.items() if not row.needs_all)
        yield Problem(
            "memory.offload",
            f"=params with optim.name={optim.name}, which reads or moves all weights at once, "
            "and only some of them are on the device at a time. Use "
            f"memory.offload=optimizer, or optim.name={partwise}.",
        )


def _check_adapters(recipe: Recipe, shape: ModelShape) -> list[Problem]:
    lora = recipe.model.lora
    if lora.rank is None:
        return []
    return [
        *lora_target_errors(shape, lora.targets),
        *trained_module_errors(shape, lora.modules_to_save),
    ]


def _check_router_losses(recipe: Recipe, shape: ModelShape) -> Iterable[Problem]:
    """The losses of routers are shares of the task's loss, which task.loss replaces."""
    model = recipe.model
    has_losses = bool(model.router_aux_loss or model.router_z_loss)
    if recipe.task.loss is not None and shape.num_experts and has_losses:
        text = f"={recipe.task.loss} replaces the loss that a mixture's router losses are shares "
        text += "of. Set model.router_aux_loss=0 and model.router_z_loss=0."
        yield Problem("task.loss", text)


def _check_task_support(recipe: Recipe, shape: ModelShape) -> Iterable[Problem]:
    """A task, samples or names that the model has no room for."""
    model, task, seq_len = recipe.model, recipe.task.name, recipe.data.seq_len
    if task_row(task).is_causal not in (None, shape.is_causal):
        fits = " or ".join(tasks_of(is_causal=shape.is_causal))
        sees = "only earlier tokens" if shape.is_causal else "tokens on both sides"
        name = model.preset or model.path or model.hub or f"a model of type {shape.model_type}"
        yield Problem("task.name", f"={task}: in {name} a token sees {sees}. Use task.name={fits}.")
    elif task_row(task).judges_pairs and shape.family.pair_head is None:
        others = " or ".join(
            name for name in tasks_of(is_causal=shape.is_causal) if not task_row(name).judges_pairs
        )
        text = f"={task}: a {shape.model_type} has no head for pairs. Use task.name={others}."
        yield Problem("task.name", text)
    if seq_len != "auto" and seq_len > shape.max_position_embeddings:
        text = (
            f"={seq_len} is more than the model's context of {shape.max_position_embeddings} "
            f"tokens. Use at most {shape.max_position_embeddings}."
        )
        yield Problem("data.seq_len", text)
    recompute = recipe.memory.recompute
    if isinstance(recompute, tuple):
        known = shape.family.block_modules
        for name in recompute:
            if name not in known:
                text = (
                    f" names the module {name!r}, which no block has. Name some of: "
                    f"{', '.join(known)}."
                )
                yield Problem("memory.recompute", text.strip())


def _check_compile(recipe: Recipe, shape: ModelShape | None) -> Iterable[Problem]:
    parallel = recipe.parallel
    if recipe.model.compile is True and parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD:
        text = (
            f"=true with parallel.schedule={parallel.schedule}: a compiled block has one backward "
            "pass, which cannot be split. Use false, or parallel.schedule=1f1b or interleaved."
        )
        yield Problem("model.compile", text)
    recompute, tp = recipe.memory.recompute, parallel.tp
    if recipe.model.compile is not True or not falls_back_to_eager(recompute, tp=tp, shape=shape):
        return
    what = f"parallel.tp={tp}" if tp > 1 else "experts"
    text = (
        f"=true with memory.recompute={recompute} and {what}: torch compiles what is recomputed as "
        "a whole or not at all, and cannot trace this. No block would be compiled. Use false, or "
        "memory.recompute=none."
    )
    yield Problem("model.compile", text)


def falls_back_to_eager(recompute: object, *, tp: int, shape: ModelShape | None) -> bool:
    """Whether torch would run compiled blocks operator by operator, and say so nowhere.

    So it does with what is recomputed where it cannot trace a block as a whole.
    """
    has_experts = shape is not None and shape.num_experts > 0
    return recompute not in ("none", "auto") and (tp > 1 or has_experts)


def _check_fp8(recipe: Recipe, shape: ModelShape | None) -> Iterable[Problem]:
    if recipe.precision.compute != "fp8":
        return
    cp, tp, seq_len = recipe.parallel.cp, recipe.parallel.tp, recipe.data.seq_len
    pieces = FP8_MULTIPLE * cp
    if seq_len != "auto" and seq_len % pieces:
        text = (
            f"=fp8 needs samples of a multiple of {pieces} tokens ({FP8_MULTIPLE} x cp): tokens "
            f"are a side of what is multiplied in the backward pass. data.seq_len is {seq_len}. "
            f"Use data.seq_len={-(-seq_len // pieces) * pieces}, or bf16."
        )
        yield Problem("precision.compute", text)
    if shape is not None and not multiplies_in_fp8(shape, tp=tp):
        text = (
            f"=fp8 but no matrix of a block has two sides of a multiple of {FP8_MULTIPLE} on each "
            "rank, which fp8 products need. Use bf16, or less parallel.tp."
        )
        yield Problem("precision.compute", text)


def is_fp8_legal(shape: ModelShape, *, seq_len: int, tp: int, cp: int) -> bool:
    """Whether a layout leaves matrices of a model with sides that fp8 kernels take."""
    return seq_len % (FP8_MULTIPLE * cp) == 0 and multiplies_in_fp8(shape, tp=tp)


def multiplies_in_fp8(shape: ModelShape, *, tp: int) -> bool:
    """Whether any matrix of a block has sides that fp8 kernels take, on each rank of tp."""
    return any(
        outputs % (FP8_MULTIPLE * (tp if product.split == "rows" else 1)) == 0
        and product.inputs % (FP8_MULTIPLE * (tp if product.split == "columns" else 1)) == 0
        for product in shape.products
        if product.split is not None and not product.per_expert  # those of experts stay as they are
        for outputs in product.outputs
    )
