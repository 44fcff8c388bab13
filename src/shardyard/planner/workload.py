"""Workload of a prediction: one training step, independent of any framework.

A recipe becomes a workload here. A row of the table of published runs becomes one in
``benchmarks/planner_rows.py``. The models of memory and time read only this.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardyard.config.formulas import (
    allows_compute_copies,
    attends_by_length,
    copies,
    logits_of,
    needs_mask,
    step_samples,
    waits_for_logits,
)
from shardyard.config.layout import Layout
from shardyard.config.optimizers import (
    ParamKind,
    has_factored_states,
    moved_bytes,
    optimizer_of,
    param_kind,
    shape_of_state,
    states_of,
)
from shardyard.config.schema.recipe import Recipe
from shardyard.families.file_tensors import parameter_shapes
from shardyard.families.shape import ModelShape
from shardyard.planner.trainable_parameters import TrainableElements, trained_of

FORMAT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an activation and of a gathered parameter; fp8 is the format of products only."""
REDUCE_BYTES = {"fp32": 4, "bf16": 2, "exact": 8}
"""Bytes of a gradient on the wire, by ``precision.reduce``."""

Recompute = Literal["none", "attention", "selective", "full"] | int
"""Recompute mode of activation checkpointing.

``attention`` recomputes only softmax(QK)V (Korthikanti et al. 2022); ``selective``
recomputes what is cheap and keeps matrix products; an int n: every n-th block.
"""


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """States of a step that ranks sharing parameters keep, and for how long.

    The defaults are ours: FSDP2's ``fully_shard`` at every zero level.
    """

    splits_weights_from: Literal[1, 3] = 1
    """Lowest zero level at which a rank holds only its part of the weights between steps."""
    splits_gradients_from: Literal[1, 2] = 1
    """The same of the gradients that are held from pass to pass."""
    copies_whole_stage: bool = True
    """Below zero 3 a copy of the stage in the computing format stays for the whole step."""
    has_gradient_buffers: bool = False
    """Gradients have their memory before the first backward pass; else from that pass on."""
    sums_zero_1_at_end: bool = True
    """At zero 1 gradients of all passes are added up whole, in the format of the wire, and summed
    over ranks in the last one."""
    copies_on_one_rank: bool = False
    """Whether a single rank keeps copies instead of shards.

    It keeps a copy of all in the computing format, and products add to the gradients themselves
    (``parallel/low_precision.py``).
    """
    sums_each_block: bool = True
    """Each block's gradient is made whole, sent and freed; else only where blocks are gathered."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes of one parameter in each role, and the format that computes."""

    compute: Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
    """fp8 and fp4 are formats of the blocks' products only."""
    weight_bytes: float
    """The parameter as it is held between steps."""
    gradient_bytes: float
    """The gradient that is held from pass to pass, split by zero 2."""
    optimizer_bytes: float
    """All that zero 1 splits: moments, and an fp32 master copy where the weight is 16 bit."""
    outside_optimizer_bytes: float | None = None
    """The same outside of the blocks, where Muon leaves the update to AdamW; None: no other."""
    column_bytes: tuple[float, float] = (0.0, 0.0)
    """Optimizer state of a parameter that zero does not split, in and outside of blocks: numbers
    of whole columns."""
    optimizer_reason: str = "moments"
    """Words for what these are."""
    reduce_bytes: float
    """The gradient on the wire."""
    update_bytes: float = 40
    """Bytes that the optimizer reads and writes in its update. AdamW with two fp32 moments: 40."""
    one_pass_bytes: float | None = None
    """The same where one rank keeps copies, which the update writes; None: as it always is."""
    compute_bytes: float = 2
    """A gathered parameter and an activation."""
    frozen_bytes: float | None = None
    """A frozen parameter, which has no master copy; None: as it computes. NF4: 0.5 and its scales
    (Dettmers et al. 2023, arXiv:2305.14314, section 3)."""
    keeping: ShardingPolicy = ShardingPolicy()
    """States that a rank holds whole, and when."""

    def all_optimizer_bytes(self, elements: float, outside: float) -> float:
        """Return ``optimizer_bytes`` of all parameters, ``outside`` of which are in no block."""
        each, other = self.optimizer_bytes, self.outside_optimizer_bytes
        return elements * each + outside * (0.0 if other is None else other - each)

    def whole_optimizer_bytes(self, elements: float, outside: float) -> float:
        """Return ``column_bytes`` of all parameters, ``outside`` of which are in no block."""
        inside, other = self.column_bytes
        return (elements - outside) * inside + outside * other


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """Techniques of a step, where frameworks differ."""

    attention: Literal["unfused", "flash", "fused"] = "flash"
    """``unfused`` writes the matrix of scores to memory, as before FlashAttention; ``flash`` is its
    version 2, which PyTorch calls; ``fused`` is written for the device (cuDNN, version 3)."""
    kernels: Literal["eager", "fused", "compiled"] = "fused"
    """Kernels of element-wise operators: one kernel each; hand-fused; fused by a compiler."""
    sequence_parallel: bool = True
    """With tp: norms and dropout are split along the sequence."""
    overlap_data: bool = True
    """Whether collectives of the data axes overlap compute."""
    overlap_tensor: bool = False
    """Whether collectives of tp overlap matrix products (asynchronous TP)."""
    experts_over_tensor: bool = False
    """Whether ranks of ep are those of tp, too, each with whole experts (Megatron's
    expert_tensor_parallel_size of 1); else ep splits the data ranks."""
    deduplicated_dispatch: bool = False
    """Whether a token goes once to each node and rank of its experts (DeepEP, HybridEP); else once
    for each expert."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"] = "1f1b"
    virtual_stages: int = 1
    """Model chunks of one pipeline rank."""
    balanced_stages: bool = True
    """Stages are cut by cost, the embedding and the head included; else by number of blocks."""
    cp_exchange: Literal["keys_values", "heads"] = "keys_values"
    """Tensors that cp ranks exchange for attention."""
    offload: Literal["none", "params", "optimizer", "activations"] = "none"
    updates_on_host: bool = True
    """With offload of the optimizer or params: gradients go down and parameters up (DeepSpeed's
    ZeRO-Offload); ours moves the state up for an update on the device, and down again."""
    offload_depth: int = 1
    """Blocks whose offloaded activations come back ahead of the one that needs them."""
    snapshots: int = 0
    """Copies of a rank's state that stay in host memory, on its node and the next."""
    has_standby: bool = False
    """A second process of each device waits to take over."""
    dropout: bool = False
    prefetch: int = 1
    """Blocks gathered ahead, zero 3."""
    fp8_gather: bool = False
    """With fp8: zero 3 gathers parameters in fp8."""
    fp8_rows: bool = False
    """With fp8: one scale a row instead of one a tensor."""
    selective_products: float = 1.0
    """Share of matrix products that ``selective`` recompute keeps (torchtitan: every second)."""
    bucket_bytes: float = 0.0
    """Buffers in which gradients wait to be sent, where a framework sets them aside."""
    mask: bool = False
    """Attention is given a mask of its own, such as one that keeps documents apart."""
    uses_varlen: bool = False
    """Whether attention receives lengths instead of that mask, where no cp splits samples."""
    loss: Literal["torch", "in place", "fused"] = "torch"
    """Loss implementation.

    ``in place`` is ours: probabilities become the gradient; ``fused`` is one kernel that keeps
    only 16-bit logits and writes their gradient over them.
    """
    logit_bytes: float | None = None
    """Bytes of a logit at the loss, where a framework's own loss is known; None: by ``loss``."""
    chunked_loss: bool = False
    """Whether the loss is computed in chunks of unknown size: an eighth each is assumed."""
    loss_chunk: int | None = None
    """Ours: tokens whose logits are held at once, and then the head's gradient; None: all."""
    orthogonalizes: bool = False
    """Whether the update exchanges whole matrices of blocks and iterates on them (Muon)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of one model under one layout."""

    shape: ModelShape
    layout: Layout
    seq_len: int
    micro_batch: int
    """Samples in one pass of one data rank."""
    global_batch: int
    formats: Formats
    recompute: Recompute = "none"
    techniques: Techniques = Techniques()
    trained: TrainableElements | None = None
    """Trained part where some of the model is frozen. None: all of it."""
    batch_per_device: int | None = None
    """Samples of a device in a step, where ``global_batch`` follows the devices."""
    chunks_by_rule: bool = False
    """Whether ``memory.loss_chunk`` is auto: another layout has the chunk that it would get."""

    @property
    def micro_batches(self) -> int:
        """Passes of one data rank in one step."""
        # FSDP needs equal numbers of passes on all ranks, so a short share is padded.
        per_rank = -(-self.global_batch // self.layout.data_ranks)
        return -(-per_rank // self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one pass of one data rank, over all ranks of its model group."""
        return self.micro_batch * self.seq_len


def with_layout(
    workload: Workload, layout: Layout, *, micro_batch: int, recompute: Recompute
) -> Workload:
    """The same model and batch under another layout."""
    techniques = workload.techniques
    if workload.chunks_by_rule and workload.techniques.loss == "in place":
        logits = logits_of(
            workload.shape,
            tokens=micro_batch * workload.seq_len // layout.cp,
            tp=layout.tp,
            compute_bytes=workload.formats.compute_bytes,
        )
        # With GPipe each micro-batch would have a gradient of the head waiting: no chunks.
        waits = waits_for_logits(techniques.schedule, pp=layout.pp)
        techniques = replace(techniques, loss_chunk=None if waits else logits.chunk)
    return replace(
        on_devices(workload, layout.world_size),
        layout=layout,
        micro_batch=micro_batch,
        recompute=recompute,
        techniques=techniques,
    )


def on_devices(workload: Workload, devices: int) -> Workload:
    """The same work with the batch that it has on so many devices."""
    if workload.batch_per_device is None:
        return workload
    return replace(workload, global_batch=workload.batch_per_device * devices)


def workload_of(recipe: Recipe, shape: ModelShape, layout: Layout) -> Workload:
    """The step of a recipe without any ``auto``, as the training half carries it out.

    Named modules in ``memory.recompute`` are counted as kept: what they save is not known here.
    """
    micro_batch = recipe.optim.micro_batch
    seq_len = recipe.data.seq_len
    assert isinstance(micro_batch, int) and isinstance(seq_len, int)
    recompute, chunk = recipe.memory.recompute, recipe.memory.loss_chunk
    assert recipe.model.dropout != "auto" and recompute != "auto"
    return Workload(
        shape=shape,
        layout=layout,
        seq_len=seq_len,
        micro_batch=micro_batch,
        global_batch=step_samples(recipe.optim, devices=layout.world_size),
        batch_per_device=recipe.optim.batch_per_device,
        formats=_with_copies(formats_of(recipe, shape), recipe, shape),
        recompute="none" if isinstance(recompute, tuple) else recompute,
        techniques=Techniques(
            # No flash kernel of torch bends scores by a soft cap, so they are written to memory.
            attention="flash" if shape.attn_logit_softcapping is None else "unfused",
            kernels="compiled" if recipe.model.compile is True else "eager",
            loss="in place" if recipe.task.loss is None else "torch",
            loss_chunk=chunk if isinstance(chunk, int) else None,
            schedule=recipe.parallel.schedule,
            virtual_stages=recipe.parallel.virtual_stages,
            cp_exchange=recipe.parallel.cp_exchange,
            dropout=recipe.model.dropout > 0,
            mask=needs_mask(recipe, shape) or attends_by_length(recipe, shape),
            uses_varlen=attends_by_length(recipe, shape),
            prefetch=recipe.parallel.prefetch,
            offload=recipe.memory.offload,
            updates_on_host=False,
            snapshots=copies(recipe),
            has_standby=recipe.elastic.parked is True,
            fp8_rows=recipe.precision.fp8_scaling == "rowwise",
            offload_depth=recipe.memory.offload_depth,
            orthogonalizes=optimizer_of(recipe.optim).gathers_matrices,
        ),
        trained=trained_of(shape, recipe.model),
    )


def formats_of(recipe: Recipe, shape: ModelShape | None = None) -> Formats:
    """Bytes of a parameter in each role, of a recipe without any ``auto``.

    Args:
        shape: None: of a network for images.
    """
    compute = recipe.precision.compute
    assert compute != "auto"
    inside, outside = (state_bytes(recipe, shape, in_blocks=each) for each in (True, False))
    return Formats(
        compute=compute,
        weight_bytes=4,
        gradient_bytes=8
        if recipe.precision.reduce == "exact"
        else 4,  # integers until they are summed
        optimizer_bytes=inside.split,
        outside_optimizer_bytes=outside.split,
        column_bytes=(inside.columns, outside.columns),
        optimizer_reason=_optimizer_reason(recipe),
        # An average is read and written, and the weight is read once more for it.
        update_bytes=moved_bytes(recipe.optim) + 3 * _average_bytes(recipe),
        reduce_bytes=REDUCE_BYTES[recipe.precision.reduce],
        compute_bytes=FORMAT_BYTES[compute],
    )


def _with_copies(formats: Formats, recipe: Recipe, shape: ModelShape) -> Formats:
    """With what one rank keeps, where the model can be trained in copies of its matrices."""
    if not allows_compute_copies(recipe) or shape.num_experts:
        return formats
    one_pass = optimizer_of(recipe.optim).one_pass
    averages = moved_bytes(recipe.optim) - optimizer_of(recipe.optim).moved_bytes
    moved = None if one_pass is None else one_pass.moved_bytes + averages
    return replace(
        formats,
        one_pass_bytes=None if moved is None else moved + 3 * _average_bytes(recipe),
        keeping=replace(
            formats.keeping,
            copies_on_one_rank=True,
            # Only compiled blocks have buffers: a graph cannot create the sum, so it is given one.
            has_gradient_buffers=recipe.model.compile is True,
        ),
    )


def optimizer_bytes(recipe: Recipe, kind: ParamKind) -> int:
    """State of each element of a parameter, and its own average.

    Norms and biases of blocks are so few that they count as matrices of blocks.
    """
    averages = FORMAT_BYTES[recipe.precision.optimizer_states]
    states = [each for each in states_of(recipe.optim, kind) if each.form == "element"]
    return sum(4 if each.is_fp32 else averages for each in states) + _average_bytes(recipe)


class StateBytes(NamedTuple):
    """Optimizer state of a parameter, on average over those in blocks or over all others."""

    split: float
    """Split by zero 1: states of elements and of rows, and the average of weights."""
    columns: float
    """Not split by zero: numbers of whole columns."""


def state_bytes(recipe: Recipe, shape: ModelShape | None, *, in_blocks: bool) -> StateBytes:
    """Return the state of a parameter in blocks, or of one outside of them."""
    if not has_factored_states(recipe.optim):
        return StateBytes(optimizer_bytes(recipe, "block matrix" if in_blocks else "other"), 0.0)
    if shape is None:  # convolutions; matrices of a transformer for images have less
        return StateBytes(optimizer_bytes(recipe, "other"), 0.0)
    elements, split, columns = 0, 0, 0
    for name, sizes in parameter_shapes(shape).items():
        if any(map(str.isdecimal, name.split("."))) != in_blocks:
            continue
        elements += math.prod(sizes)
        for each in states_of(recipe.optim, param_kind(name, len(sizes))):
            numbers = math.prod(shape_of_state(each.form, sizes))
            if each.form == "column":
                columns += numbers
            else:
                split += numbers
    return StateBytes(4 * split / elements + _average_bytes(recipe), 4 * columns / elements)


def _optimizer_reason(recipe: Recipe) -> str:
    optim = recipe.optim
    if optim.module is None:
        is_mixed = optimizer_of(optim).gathers_matrices
        if optimizer_of(optim).is_schedule_free:
            return "weights without an average, moments"
        if has_factored_states(optim):
            return "moments of rows and columns"
        return "momentum, outside of blocks moments" if is_mixed else "moments"
    if optim.module_states:
        return f"states of optim.module ({', '.join(optim.module_states)})"
    assumed = len(optimizer_of(optim).state_tensors)
    return (
        f"{assumed} states assumed, as optim.module declares none: name them in optim.module_states"
    )


def _average_bytes(recipe: Recipe) -> int:
    return 0 if recipe.optim.ema_decay is None else 4
