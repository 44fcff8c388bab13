"""Bytes one rank holds at its peak, as a table of terms with a reason each.

The rule of the field first: mixed-precision Adam needs 20 bytes a parameter (fp32 weight 4, fp32
gradient 4, two fp32 moments 8, and a 16-bit copy of weight and gradient, 2 each); sharding divides
it, activations come on top. Here every term is counted by itself.

The total is the sum of the terms, as if all lived at the same instant, which is more than tensors
need. What the allocator wastes or reserves beyond it, and what the driver holds, is in no term.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.config.schema import Recipe

FORMAT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

RULE_BYTES_PER_PARAMETER = 20
"""The rule of the field, above; printed beside the terms so that a reader can check their sum."""

CPU_PROCESS_BYTES = 340 * 2**20
"""Resident memory of one process that has imported torch and transformers and computed nothing:
330 MiB with torch 2.13.0 (CPU) and transformers 5.23.0, measured 2026-11-21, and some for gloo."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand, in bytes, and why it is that large."""

    name: str
    bytes: int
    reason: str


def block_parameter_shapes(shape: ModelShape) -> list[Shape]:
    """Shapes of the parameters of one transformer block (Llama: no bias but attention's)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = shape.num_attention_heads * shape.head_width
    kv_heads = shape.num_key_value_heads * shape.head_width
    biases = [(heads,), (kv_heads,), (kv_heads,), (hidden,)] if shape.attention_bias else []
    return [
        (heads, hidden), (kv_heads, hidden), (kv_heads, hidden), (hidden, heads), *biases,
        (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,),
    ]  # fmt: skip


def root_parameter_shapes(shape: ModelShape) -> list[Shape]:
    """Shapes of what is outside the blocks: embedding, last norm and, unless tied, the head."""
    table = (shape.vocab_size, shape.hidden_size)
    return [table, (shape.hidden_size,), *([] if shape.tie_word_embeddings else [table])]


def largest_shard(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of these parameters on the rank that holds most.

    ``fully_shard`` cuts dim 0 into pieces of ceil(rows / ranks): the first rank is always full, the
    last ones may be short or empty.
    """
    return sum(-(-rows // ranks) * math.prod(rest) for rows, *rest in shapes)


def count(shapes: Iterable[Shape]) -> int:
    """Elements of these parameters."""
    return sum(math.prod(dims) for dims in shapes)


def micro_steps(recipe: Recipe, layout: Layout) -> int:
    """Forward and backward passes of one rank in one step, weightless ones included."""
    micro_batches = -(-_number(recipe.optim.global_batch) // _number(recipe.optim.micro_batch))
    return -(-micro_batches // layout.data_ranks)


def optimizer_bytes_per_parameter(recipe: Recipe) -> int:
    """fp32 state: two moments for AdamW, one for SGD with momentum, none for plain SGD."""
    if recipe.optim.name == "adamw":
        return 8
    return 4 if recipe.optim.momentum > 0 else 0


def memory_terms(
    recipe: Recipe, shape: ModelShape, layout: Layout, *, is_cpu: bool
) -> tuple[Term, ...]:
    """All terms of one rank's peak, the largest rank's where ranks differ.

    Args:
        recipe: Without any ``auto``.
        is_cpu: Whether ranks compute in host memory, where a rank's memory is its process's.
    """
    terms = [*_state_terms(recipe, shape, layout), *_transient_terms(recipe, shape, layout)]
    if is_cpu:
        states = sum(term.bytes for term in terms if term.name in ("parameters", "optimizer"))
        copy = "a checkpoint is written from a copy of parameters and optimizer in host memory"
        process = "Python, torch and transformers themselves, measured 2026-11-21"
        terms.append(Term(name="checkpoint copy", bytes=states, reason=copy))
        terms.append(Term(name="process", bytes=CPU_PROCESS_BYTES, reason=process))
    return tuple(term for term in terms if term.bytes)


def _state_terms(recipe: Recipe, shape: ModelShape, layout: Layout) -> list[Term]:
    """What lives from step to step."""
    ranks = layout.dp_shard
    per_block = largest_shard(block_parameter_shapes(shape), ranks)
    held = shape.num_hidden_layers * per_block + largest_shard(root_parameter_shapes(shape), ranks)
    per_parameter = optimizer_bytes_per_parameter(recipe)
    share = f"{held:,} of {shape.parameters:,}" if ranks > 1 else f"all {held:,}"
    state = {8: "two moments", 4: "momentum", 0: "no state"}[per_parameter]
    return [
        Term(name="parameters", bytes=4 * held, reason=f"fp32 master weights, {share}"),
        Term(name="gradients", bytes=4 * held, reason="fp32, reduced, of the same part"),
        Term(
            name="optimizer",
            bytes=per_parameter * held,
            reason=f"fp32 {recipe.optim.name}, {state}, of the same part",
        ),
    ]


def _transient_terms(recipe: Recipe, shape: ModelShape, layout: Layout) -> list[Term]:
    """What lives within a step."""
    return [
        _gathered(recipe, shape, layout),
        _unreduced(recipe, shape, layout),
        _activations(recipe, shape),
        _logits(recipe, shape),
    ]


def _gathered(recipe: Recipe, shape: ModelShape, layout: Layout) -> Term:
    compute = recipe.precision.compute
    if layout.zero == 3:
        blocks = min(shape.num_hidden_layers, 1 + recipe.parallel.prefetch)
        # embedding and head are never whole at the same time, unless they are one tied table
        elements = blocks * shape.block_parameters + _table(shape)
        where = f"{blocks} blocks (1 computes, {blocks - 1} ahead) and the vocabulary's table"
    else:
        elements = shape.parameters
        where = f"the whole model: zero {layout.zero} keeps it from forward to backward"
    return Term(
        name="gathered parameters",
        bytes=FORMAT_BYTES[compute] * elements,
        reason=f"whole parameters in {compute}, {where}",
    )


def _unreduced(recipe: Recipe, shape: ModelShape, layout: Layout) -> Term:
    """Whole gradients before they are summed over ranks."""
    compute, reduce = recipe.precision.compute, recipe.precision.reduce
    if layout.zero == 1 and micro_steps(recipe, layout) > 1:
        size = FORMAT_BYTES[reduce] * shape.parameters
        why = f"the whole model's in {reduce}, reduced once a step"
    else:
        largest = max(_table(shape), shape.block_parameters)
        size = (FORMAT_BYTES[compute] + FORMAT_BYTES[reduce]) * largest
        size += FORMAT_BYTES[reduce] * shape.block_parameters
        why = (
            f"the largest group's in {compute} and again in {reduce} to send, one block on its way"
        )
    return Term(name="unreduced gradients", bytes=size, reason=why)


def _table(shape: ModelShape) -> int:
    """Elements of the embedding, or of the head."""
    return shape.vocab_size * shape.hidden_size


def block_activation_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """Bytes per token that one block keeps for its backward pass, without recompute.

    Source: the method of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (sum over the
    inputs that each operation's backward needs), for a Llama block: no dropout masks; grouped
    KV heads; the three matrices of SwiGLU; flash attention, which keeps q, k, v, its output and
    one fp32 number per head instead of the attention matrix; RMSNorm as transformers computes it,
    which keeps its input in fp32, the normalised input, and its output for the next matrix.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = shape.num_attention_heads * shape.head_width
    kv_heads = shape.num_key_value_heads * shape.head_width
    norms = 2 * (4 * hidden + 2 * compute_bytes * hidden)
    attention = compute_bytes * (2 * heads + 2 * kv_heads) + 4 * shape.num_attention_heads
    mlp = compute_bytes * 4 * inner  # gate, silu(gate), up, and their product
    return norms + attention + mlp


def _matmul_output_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """Bytes per token of a block's matrix products and attention: what ``selective`` keeps."""
    heads = shape.num_attention_heads * shape.head_width
    kv_heads = shape.num_key_value_heads * shape.head_width
    outputs = 2 * heads + 2 * kv_heads + 2 * shape.intermediate_size + 2 * shape.hidden_size
    return compute_bytes * outputs + 4 * shape.num_attention_heads


def _activations(recipe: Recipe, shape: ModelShape) -> Term:
    tokens = _number(recipe.optim.micro_batch) * _number(recipe.data.seq_len)
    compute_bytes = FORMAT_BYTES[recipe.precision.compute]
    whole = block_activation_bytes(shape, compute_bytes)
    entry = compute_bytes * shape.hidden_size  # the input of a block, from which it is recomputed
    layers = shape.num_hidden_layers
    recompute = recipe.memory.recompute
    if recompute == "full":
        per_token, how = layers * entry + whole, "block inputs, and one block recomputed"
    elif recompute == "selective":
        kept = entry + _matmul_output_bytes(shape, compute_bytes)
        per_token, how = layers * kept + whole, "matrix products kept, one block recomputed"
    elif isinstance(recompute, int):
        redone = -(-layers // recompute)  # the first, and every n-th after it
        per_token = (layers - redone) * whole + redone * entry + (whole if redone else 0)
        how = f"{redone} of {layers} blocks recomputed"
    elif recompute == "none":
        per_token, how = layers * whole, "all kept"
    else:
        per_token = layers * whole
        how = f"all kept: what recomputing {', '.join(recompute)} saves is not predicted"
    reason = f"{layers} blocks x {tokens:,} tokens of a micro-batch, {how}"
    return Term(name="activations", bytes=tokens * per_token, reason=reason)


def _logits(recipe: Recipe, shape: ModelShape) -> Term:
    tokens = _number(recipe.optim.micro_batch) * _number(recipe.data.seq_len)
    compute_bytes = FORMAT_BYTES[recipe.precision.compute]
    fp32_copy = 0 if compute_bytes == 4 else 4
    per_logit = compute_bytes + fp32_copy + 4 + 4
    copy = "an fp32 copy, " if fp32_copy else ""
    reason = (
        f"{tokens:,} tokens x {shape.vocab_size:,} entries: logits, {copy}log-probabilities and "
        "their gradient in fp32"
    )
    return Term(name="logits and loss", bytes=tokens * shape.vocab_size * per_logit, reason=reason)


def _number(value: int | str) -> int:
    assert isinstance(value, int), value  # a resolved recipe holds no "auto"
    return value
