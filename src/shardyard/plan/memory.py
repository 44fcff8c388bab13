"""Bytes one rank holds at its peak, as a table of terms with a reason each.

The rule of the field first: mixed-precision Adam needs 20 bytes a parameter (fp32 weight 4, fp32
gradient 4, two fp32 moments 8, and a 16-bit copy of weight and gradient, 2 each); sharding divides
it, activations come on top. Here every term is counted by itself, at the moment and on the pipeline
stage that need most.

A step has three such moments: the loss (all activations and the logits), the backward pass of a
block (recomputed activations, gathered and unreduced parameters), and its end (all gradients). The
terms are those of the largest. Three numbers come out: what tensors take (allocated), what the
allocator holds for them (reserved), what the driver shows (device).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape
from shardyard.plan.stages import (
    block_elements,
    has_ends,
    in_flight,
    small_parameters,
    stage_blocks,
    table_parameters,
)
from shardyard.plan.workload import MASKED_SHARE, Workload
from shardyard.units import format_bytes

RULE_BYTES_PER_PARAMETER = 20
"""The rule of the field, above; printed beside the terms so that a reader can check their sum."""

RESERVED_SHARE = 1.12
"""Reserved over allocated: blocks that do not fit each other. torchtitan's published reserved
memory; with ``expandable_segments`` it is less."""

CONTEXT_BYTES = 0.9 * 2**30
"""Context and libraries of a process on its device, as nvidia-smi shows them with no tensor."""

GROUP_BYTES = 0.4 * 2**30
"""Buffers of one communicator: NCCL's channels, some MiB for each protocol and peer."""

SAFE_SHARE = 0.92
"""Share of a device that its predicted use may fill and still be said to fit: the rest is the error
of this prediction (docs/accuracy.md)."""

CHUNKS = 8
"""Chunks of a chunked loss: so much less of the logits is held."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand, in bytes, and why it is that large."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peak of the rank that needs most."""

    terms: tuple[Term, ...]
    """They add up to what is allocated."""
    moment: str
    """When in a step that is."""
    stage: int
    """On which pipeline stage."""
    allocated_bytes: int
    """Tensors."""
    reserved_bytes: int
    """What the allocator holds for them."""
    device_bytes: int
    """What the driver shows: with context and communicators."""

    def term(self, name: str) -> int:
        """Bytes of one term; 0 if there is none of that name."""
        return sum(term.bytes for term in self.terms if term.name == name)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How near a prediction comes to the memory there is: never a bare yes or no."""

    verdict: Literal["fits", "tight", "does not fit", "unknown"]
    reason: str


class Need(NamedTuple):
    """Bytes of one moment on one stage, by term."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    unreduced: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


MOMENTS = ("at the loss", "in the backward pass of a block", "at the end of the backward pass")


def peak(workload: Workload) -> tuple[float, int, int, Need]:
    """Allocated bytes, stage, moment (index of ``MOMENTS``) and terms: cheap, for a search."""
    stages = (0,) if workload.layout.pp == 1 else (0, workload.layout.pp - 1)
    return max(
        (need.total, stage, moment, need)
        for stage in stages
        for moment, need in enumerate(needs(workload, stage))
    )


def reserved_of(allocated: float) -> float:
    """What the allocator holds for so many bytes of tensors."""
    return RESERVED_SHARE * allocated


def device_of(allocated: float, layout: Layout) -> float:
    """What the driver shows for so many bytes of tensors."""
    axes = (layout.data_ranks, layout.cp, layout.tp, layout.ep)
    groups = sum(degree > 1 for degree in axes) + (2 if layout.pp > 1 else 0)
    return reserved_of(allocated) + CONTEXT_BYTES + groups * GROUP_BYTES


def memory(workload: Workload) -> Memory:
    """All terms of the largest peak, each with its reason."""
    allocated, stage, moment, need = peak(workload)
    return Memory(
        terms=_terms(workload, stage, need),
        moment=MOMENTS[moment],
        stage=stage,
        allocated_bytes=round(allocated),
        reserved_bytes=round(reserved_of(allocated)),
        device_bytes=round(device_of(allocated, workload.layout)),
    )


def fit(device_bytes: float, limit_bytes: int | None) -> Fit:
    """A word for how near the use of a device comes to its memory, and its reason."""
    if limit_bytes is None:
        return Fit(verdict="unknown", reason="the memory of the device is not known")
    share = device_bytes / limit_bytes
    reason = f"{format_bytes(device_bytes)} are {share:.0%} of {format_bytes(limit_bytes)}"
    if share <= SAFE_SHARE:
        return Fit(verdict="fits", reason=reason)
    if share <= 2 - SAFE_SHARE:
        return Fit(verdict="tight", reason=f"{reason}, which is within this prediction's error")
    return Fit(verdict="does not fit", reason=reason)


# --- the moments --------------------------------------------------------------------------------


def needs(w: Workload, stage: int) -> tuple[Need, ...]:
    """What each moment of a step needs, in the order of ``MOMENTS``."""
    layout, formats, tech, shape = w.layout, w.formats, w.techniques, w.shape
    shards, tokens = layout.dp_shard * layout.cp, w.tokens / layout.cp
    first, last = has_ends(w, stage)
    layers = stage_blocks(w, stage)
    block, table = block_elements(shape, layout), table_parameters(shape, layout)
    tables = (1 if first else 0) + (1 if last else 0)
    if first and last and shape.tie_word_embeddings:
        tables = 1
    held = layers * block + tables * table + small_parameters(shape, first=first, last=last)

    splits_weight = layout.zero >= formats.weight_split_from
    parameters = held * formats.weight_bytes / (shards if splits_weight else 1)
    optimizer = held * formats.optimizer_bytes / shards
    if tech.offload in ("optimizer", "params"):
        optimizer = 0.0
    if tech.offload == "params":
        parameters = 0.0

    compute, reduce = formats.compute_bytes, formats.reduce_bytes
    gathers = layout.zero == 3 and (shards > 1 or compute != formats.weight_bytes)
    gathers |= tech.offload == "params"
    whole = 0.0  # a copy of the whole stage in the computing format
    if not gathers and formats.weight_split_from == 1 and (shards > 1 or compute < 4):
        whole = compute * held
    is_first_pass = w.micro_batches == 1 and formats.weight_split_from == 1
    sums_late = formats.weight_split_from == 1 and layout.zero == 1 and layout.data_ranks > 1
    sums_late &= not is_first_pass
    gradients = held * formats.gradient_bytes / (shards if _splits_gradients(w) else 1)
    unreduced = tech.bucket_bytes if layout.data_ranks * layout.cp > 1 else 0.0
    if sums_late:
        unreduced, gradients = reduce * held, 0.0
    sums_early = gathers or (formats.weight_split_from == 1 and not sums_late)
    leftover = reduce * table if sums_early and tables and not is_first_pass else 0.0

    kept, again = kept_bytes(w)
    if tech.offload == "activations":
        # forward the block that computes and one that leaves, backward one and those that come
        kept *= min(1.0, max(2, 1 + tech.offload_depth) / layers)
    flying = 1 if tech.offload == "activations" else in_flight(w, stage)
    activations = tokens * (layers * kept * flying + _rotary_bytes(w))
    split = layout.tp if tech.sequence_parallel else 1
    ends = tokens * _norm_bytes(w) * shape.hidden_size / split if last else 0.0
    logits = _logits_bytes(w, tokens) if last else 0.0
    before = 0.0 if is_first_pass else 1.0  # gradients of earlier micro-batches

    at_loss = Need(
        parameters, before * gradients, optimizer,
        whole + (compute * table if gathers and last else 0.0),
        before * unreduced + leftover, activations + ends, logits,
    )  # fmt: skip
    ahead = min(layers, 1 + tech.prefetch) * block
    largest = max(block, table if tables else 0.0)
    in_sum = (compute + reduce) if sums_early else 0.0
    one = tokens * kept * flying / max(flying, 1.0)
    in_block = Need(
        parameters, before * gradients, optimizer,
        whole + (compute * ahead if gathers else 0.0),
        before * unreduced + in_sum * block,
        activations + (tokens * again - one if again else 0.0), 0.0,
    )  # fmt: skip
    at_end = Need(
        parameters, gradients, optimizer,
        whole + (compute * (block + table) if gathers else 0.0),
        unreduced + in_sum * largest,
        tokens * (again or kept), 0.0,
    )  # fmt: skip
    return (at_loss, in_block, at_end) if last else (in_block, in_block, at_end)


def _splits_gradients(w: Workload) -> bool:
    """``fully_shard`` splits them at every level; below zero 2 it sums once, in the last pass."""
    return w.layout.zero >= 2 or w.formats.weight_split_from == 1


# --- activations --------------------------------------------------------------------------------


def block_bytes(w: Workload) -> float:
    """Bytes per token that one block keeps for its backward pass, without recompute.

    Source: the method of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (sum over the
    inputs that each operation's backward needs), without its dropout masks where there is no
    dropout, with grouped KV heads, gates and experts, and with flash attention, which keeps q, k,
    v, its output and one fp32 number per head instead of the matrix of scores.
    """
    shape, tech, size, tp = w.shape, w.techniques, w.formats.compute_bytes, w.layout.tp
    hidden, heads, kv_heads = _widths(shape)
    split = tp if tech.sequence_parallel else 1
    inner: float = shape.intermediate_size
    dealt: float = 0.0
    if shape.num_experts:
        visits = shape.num_experts_per_tok
        inner = visits * (shape.moe_intermediate_size or inner)
        inner += shape.shared_expert_intermediate_size
        dealt = 2 * visits * size * hidden  # tokens as dealt to experts, and what they return
    outside = 2 * _norm_bytes(w) * hidden + (2 * hidden if tech.dropout else 0)
    attention = size * (2 * heads + 2 * kv_heads) + _score_bytes(w)
    kept_inner = 2  # before and after the activation
    if shape.is_gated:  # gate, silu(gate), up, and their product; fused ones make silu(gate) again
        kept_inner = 4 if tech.kernels == "eager" else 3
    return outside / split + (attention + size * kept_inner * inner + dealt) / tp


def entry_bytes(w: Workload) -> float:
    """Bytes per token of a block's input, from which it is recomputed."""
    split = w.layout.tp if w.techniques.sequence_parallel else 1
    return w.formats.compute_bytes * w.shape.hidden_size / split


def _widths(shape: ModelShape) -> tuple[int, int, int]:
    """Elements of the residual stream, of the queries, of the keys."""
    heads = shape.num_attention_heads * shape.head_width
    return shape.hidden_size, heads, shape.num_key_value_heads * shape.head_width


def _norm_bytes(w: Workload) -> float:
    """Bytes per element that a norm keeps: input and output, and eager RMSNorm one in fp32."""
    size = w.formats.compute_bytes
    if w.shape.is_gated and w.techniques.kernels == "eager":
        return 4 + 2 * size
    return 2 * size


def _rotary_bytes(w: Workload) -> float:
    """Bytes per token of the rotary sines and cosines, which all blocks share."""
    return 2 * w.formats.compute_bytes * w.shape.head_width if w.shape.is_gated else 0.0


def _score_bytes(w: Workload) -> float:
    """Bytes per token that attention keeps beside q, k, v and its output."""
    heads, tech = w.shape.num_attention_heads, w.techniques
    if tech.attention != "unfused":
        mask = w.formats.compute_bytes * w.seq_len / w.layout.cp if tech.mask else 0.0
        return 4 * heads + mask
    size = w.formats.compute_bytes
    per_score = 2 * size + 1 if tech.dropout else size  # softmax; dropout's mask and result
    return heads * w.seq_len / w.layout.cp * per_score


def _selective_bytes(w: Workload) -> float:
    """Bytes per token that ``selective`` keeps of a block: its input, products and attention."""
    hidden, heads, kv_heads = _widths(w.shape)
    gates = 2 if w.shape.is_gated else 1
    inner = w.shape.intermediate_size
    size, tp, share = w.formats.compute_bytes, w.layout.tp, w.techniques.selective_products
    # sums over ranks, split by token, are kept in place of their products; not of fp8 products
    keeps_sums = w.techniques.sequence_parallel and w.formats.compute != "fp8"
    summed = 2 * hidden / (tp if keeps_sums else 1)
    products = (heads + 2 * kv_heads + gates * inner) / tp + summed
    attention = (size * heads + 4 * w.shape.num_attention_heads) / tp
    return entry_bytes(w) + size * share * products + attention


def kept_bytes(w: Workload) -> tuple[float, float]:
    """Bytes per token that a block keeps on average, and that one holds while it is recomputed."""
    whole = block_bytes(w)
    match w.recompute:
        case "full":
            return entry_bytes(w), whole
        case "selective":
            return _selective_bytes(w), whole
        case "attention":
            scores = _score_bytes(w) / w.layout.tp
            return whole - scores, whole
        case "none":
            return whole, 0.0
        case int(every):
            return ((every - 1) * whole + entry_bytes(w)) / every, whole
        case _:
            assert_never(w.recompute)


def _logits_bytes(w: Workload, tokens: float) -> float:
    """Logits, fp32 log-probabilities, and the gradients of both as the backward pass starts.

    Megatron's loss overwrites its logits: the 16-bit ones and one fp32 copy.
    """
    size, tech = w.formats.compute_bytes, w.techniques
    per_logit = 3 * size if tech.kernels == "fused" and not w.shape.is_gated else 12
    if tech.loss == "in place":
        per_logit = size + 4
    if tech.loss == "fused":
        per_logit = 2 * size
    if not w.shape.is_causal and tech.masked_tokens_alone:
        tokens *= MASKED_SHARE
    held = tokens * w.shape.vocab_size / w.layout.tp * per_logit
    return held / CHUNKS if tech.chunked_loss else held


# --- reasons ------------------------------------------------------------------------------------


def _terms(w: Workload, stage: int, need: Need) -> tuple[Term, ...]:
    layout, formats = w.layout, w.formats
    shards = layout.dp_shard * layout.cp
    over = f" over {shards} ranks" if shards > 1 else ""
    where = f" of stage {stage}" if layout.pp > 1 else ""
    tokens = w.tokens // layout.cp
    flying = in_flight(w, stage)
    several = f" of {flying:.3g} micro-batches in flight" if layout.pp > 1 else ""
    split = over if layout.zero >= formats.weight_split_from else " whole on every rank"
    reasons = {
        "parameters": f"{formats.weight_bytes:g} bytes each{where},{split or ' not split'}",
        "gradients": f"{formats.gradient_bytes:g} bytes each"
        + (over if _splits_gradients(w) else ", whole on every rank"),
        "optimizer": f"{formats.optimizer_bytes:g} bytes each: moments"
        + (" and fp32 weights" if formats.optimizer_bytes > 8 else "") + over,
        "gathered parameters": f"whole ones in {formats.compute}, gathered by zero {layout.zero}",
        "unreduced gradients": f"{formats.reduce_bytes:g} bytes each, on their way to their sum",
        "activations": f"{stage_blocks(w, stage)} blocks x {tokens:,} tokens{several}, "
        f"recompute {w.recompute}",
        "logits and loss": f"{tokens:,} tokens x {w.shape.vocab_size // layout.tp:,} entries: "
        "logits, log-probabilities, gradients",
    }  # fmt: skip
    rounded = [round(value) for value in need]
    return tuple(
        Term(name=name, bytes=size, reason=reason)
        for (name, reason), size in zip(reasons.items(), rounded, strict=True)
        if size
    )
