"""Bytes of one rank's states and logits, and of a checkpoint of all ranks.

States are parameters, gradients and optimizer state, as the data axes split them. For
logits, it counts for how many tokens they exist, and in which formats.
"""

from dataclasses import replace
from typing import Protocol, assert_never

from shardyard.config.data_choices import MASKED_SHARE
from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.registry import operators_of
from shardyard.families.shape import ModelShape
from shardyard.planner.stages import StageTrained
from shardyard.planner.trainable_parameters import trained_of
from shardyard.planner.workload import FORMAT_BYTES, Formats, Techniques, Workload, state_bytes
from shardyard.units import format_bytes

_CHUNKS = 8
"""Chunks of a chunked loss: so much less of the logits is held."""


def with_logits(w: Workload, tokens: float) -> float:
    """Return the number of these tokens whose logits are computed."""
    match w.shape.label_head:
        case None:
            return tokens if w.shape.is_causal else MASKED_SHARE * tokens
        case "samples":
            return tokens / w.seq_len
        case "tokens":
            return tokens
        case _:
            assert_never(w.shape.label_head)


def logits_bytes(w: Workload, tokens: float) -> float:
    """Logits, fp32 log-probabilities, and the gradients of both as the backward pass starts.

    A loss that writes over its logits holds the 16-bit ones and one fp32 copy.
    """
    size, tech = w.formats.compute_bytes, w.techniques
    per_logit = 3 * size if tech.kernels == "fused" and not w.shape.is_gated else 12
    if tech.loss == "in place":
        per_logit = size + 4
    if tech.loss == "fused":
        per_logit = 2 * size
    if tech.logit_bytes is not None:
        per_logit = tech.logit_bytes
    tokens = with_logits(w, tokens)
    if tech.loss_chunk is not None:
        tokens = min(tokens, tech.loss_chunk)
    held = tokens * w.shape.logits_width / w.layout.tp * per_logit
    return held / _CHUNKS if tech.chunked_loss else held


def logits_reason(w: Workload, tokens: int) -> str:
    """Describe these bytes in words."""
    chunk, entries = w.techniques.loss_chunk, -(-w.shape.logits_width // w.layout.tp)
    if chunk is None or chunk >= tokens:
        return f"{tokens:,} tokens x {entries:,} entries: logits, log-probabilities, gradients"
    whole = logits_bytes(replace(w, techniques=replace(w.techniques, loss_chunk=None)), tokens)
    return (
        f"a chunk of {chunk:,} tokens x {entries:,} entries; {format_bytes(whole)} without "
        "memory.loss_chunk"
    )


# The data axes split parameters, gradients and optimizer state in the same way for every network,
# whatever its blocks compute. Copies that are whole for a while and gradients on their way count
# too. ``parallel/fsdp.py`` has a table of the zero levels.


class ShardedStep(Protocol):
    """A step whose data axes may split parameters."""

    @property
    def layout(self) -> Layout:
        """Degrees of the axes."""

    @property
    def formats(self) -> Formats:
        """Bytes of a parameter in each role."""

    @property
    def techniques(self) -> Techniques:
        """Techniques of the step."""

    @property
    def micro_batches(self) -> int:
        """Passes of one data rank in one step."""


class Parameters(Protocol):
    """Parameters of one stage of the model on one rank, before the data axes split them."""

    @property
    def layers(self) -> int:
        """Its blocks."""

    @property
    def block(self) -> float:
        """Parameters of one of them."""

    @property
    def elements(self) -> float:
        """All parameters."""

    @property
    def trained(self) -> StageTrained:
        """Trained part of these parameters."""


def shards(w: ShardedStep) -> int:
    """Ranks that split the states of one stage."""
    return w.layout.dp_shard * w.layout.cp


def keeps_full_copy(w: ShardedStep) -> bool:
    """Check whether one rank keeps a copy of all that computes, without shards."""
    return w.formats.keeping.copies_on_one_rank and w.layout.world_size == 1


def splits_weights(w: ShardedStep) -> bool:
    """Check whether a rank holds only its part of the weights between steps."""
    return w.layout.zero >= w.formats.keeping.splits_weights_from


def splits_gradients(w: ShardedStep) -> bool:
    """The same of gradients, from pass to pass."""
    return w.layout.zero >= w.formats.keeping.splits_gradients_from


def parameters_bytes(w: ShardedStep, stage: Parameters) -> float:
    """Return the bytes of parameters as they are held between steps."""
    if w.techniques.offload == "params":
        return 0.0
    formats = w.formats
    frozen = stage.elements - stage.trained.elements
    each = formats.compute_bytes if formats.frozen_bytes is None else formats.frozen_bytes
    size = stage.trained.elements * formats.weight_bytes + frozen * each
    return size / (shards(w) if splits_weights(w) else 1)


def optimizer_state_bytes(w: ShardedStep, stage: Parameters) -> float:
    """All that zero 1 splits."""
    if w.techniques.offload in ("optimizer", "params"):
        return 0.0
    trained, formats = stage.trained, w.formats
    split = formats.all_optimizer_bytes(trained.elements, trained.outside) / shards(w)
    return split + formats.whole_optimizer_bytes(trained.elements, trained.outside)


# --- parameters that are whole for a while -------------------------------------------------------


def gathers_per_block(w: ShardedStep) -> bool:
    """Whether blocks are made whole, or into the computing format, one by one and freed again."""
    if w.techniques.offload == "params":
        return True
    if keeps_full_copy(w):
        return False
    # Even one shard makes a copy of each block where it computes in another format.
    is_other_format = w.formats.compute_bytes != w.formats.weight_bytes
    return w.layout.zero == 3 and (shards(w) > 1 or is_other_format)


def whole_copy_bytes(w: ShardedStep, stage: Parameters) -> float:
    """The stage in the computing format, where it stays so from the first pass to the last."""
    if gathers_per_block(w) or not w.formats.keeping.copies_whole_stage:
        return 0.0
    # A single rank in fp32 computes with the weights themselves.
    is_needed = shards(w) > 1 or w.formats.compute_bytes < 4
    return w.formats.compute_bytes * stage.elements if is_needed else 0.0


def gathered_ahead_bytes(w: ShardedStep, stage: Parameters) -> float:
    """The block that computes and those that are gathered ahead of it."""
    if not gathers_per_block(w):
        return 0.0
    return w.formats.compute_bytes * min(stage.layers, 1 + w.techniques.prefetch) * stage.block


# --- gradients -----------------------------------------------------------------------------------


def is_first_pass(w: ShardedStep) -> bool:
    """Whether the pass at its peak finds no memory of gradients."""
    keeping = w.formats.keeping
    has_buffers = keeping.has_gradient_buffers and (
        not keeping.copies_on_one_rank or keeps_full_copy(w)
    )
    return w.micro_batches == 1 and not has_buffers


def earlier_passes(w: ShardedStep) -> float:
    """Return 1 if gradients of earlier passes, or their buffers, coexist with a pass."""
    return 0.0 if is_first_pass(w) else 1.0


def reduces_in_last_pass(w: ShardedStep) -> bool:
    """Whether whole gradients are added up over passes, to be summed over ranks in the last."""
    is_one_of_several = w.layout.zero == 1 and w.layout.data_ranks > 1 and not is_first_pass(w)
    return is_one_of_several and w.formats.keeping.sums_zero_1_at_end


def reduces_per_block(w: ShardedStep) -> bool:
    """Whether a block's gradient is made whole, sent and freed before the next block's."""
    if keeps_full_copy(w):
        return False
    return gathers_per_block(w) or (
        w.formats.keeping.sums_each_block and not reduces_in_last_pass(w)
    )


def gradients_bytes(w: ShardedStep, stage: Parameters) -> float:
    """In the format in which they are held from pass to pass."""
    # FSDP2's offload sends each gradient to the host as soon as it is summed.
    on_host = w.techniques.offload == "params" and not w.techniques.updates_on_host
    if reduces_in_last_pass(w) or on_host:
        return 0.0
    size = stage.trained.elements * w.formats.gradient_bytes
    return size / (shards(w) if splits_gradients(w) else 1)


def unreduced_gradient_bytes(w: ShardedStep, stage: Parameters) -> float:
    """Whole gradients that wait for the last pass, or buffers that are set aside for sending."""
    if reduces_in_last_pass(w):
        return w.formats.reduce_bytes * stage.trained.elements
    return w.techniques.bucket_bytes if w.layout.data_ranks * w.layout.cp > 1 else 0.0


def reduce_buffer_bytes(w: ShardedStep, elements: float) -> float:
    """A gradient as it was computed, and as it is sent."""
    return (
        (w.formats.compute_bytes + w.formats.reduce_bytes) * elements
        if reduces_per_block(w)
        else 0.0
    )


def last_pass_residual_bytes(w: ShardedStep, stage: Parameters) -> float:
    """The last gradient of the pass before, the table's, is freed when the next one is sent."""
    if not reduces_per_block(w) or is_first_pass(w):
        return 0.0
    return w.formats.reduce_bytes * stage.trained.table


def checkpoint_bytes(recipe: Recipe, model: ModelShape | ImageNetwork) -> int:
    """One checkpoint on disk, all ranks: fp32 weights, optimizer states and averages.

    Args:
        recipe: May still hold an ``auto``; frozen weights then count as fp32.
    """
    trained, frozen = trained_and_frozen(recipe, model)
    shape = model if isinstance(model, ModelShape) else None
    each, other = (sum(state_bytes(recipe, shape, in_blocks=where)) for where in (True, False))
    saved = trained * (4 + each) + trained_outside(recipe, model) * (other - each)
    if recipe.model.lora.rank is None:  # the base of adapters is in no checkpoint
        compute = recipe.precision.compute
        saved += frozen * (4 if compute == "auto" else FORMAT_BYTES[compute])
    return round(saved)


def trained_outside(recipe: Recipe, model: ModelShape | ImageNetwork) -> int:
    """Trained parameters outside of the blocks; of a network for images all."""
    if isinstance(model, ImageNetwork):
        return trained_and_frozen(recipe, model)[0]
    trained = trained_of(model, recipe.model)
    if trained is None:
        return model.tables * model.table_parameters + sum(model.small_parameters)
    ends = (trained.table, trained.before, trained.norm, trained.head, trained.after)
    return sum(sum(each) for each in ends)


def trained_and_frozen(recipe: Recipe, model: ModelShape | ImageNetwork) -> tuple[int, int]:
    """Parameters of each kind."""
    if isinstance(model, ImageNetwork):
        return sum(row.parameters for row in operators_of(model)), 0
    trained = trained_of(model, recipe.model)
    if trained is None:
        return model.parameters, 0
    return trained.parameters, model.parameters + trained.added - trained.parameters
