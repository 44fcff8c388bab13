"""Bytes one rank holds at its peak, a term each with its reason, and settings that save some.

The rule of the field first: mixed-precision Adam needs 20 bytes a parameter (fp32 weight 4, fp32
gradient 4, two fp32 moments 8, and a 16-bit copy of weight and gradient, 2 each); sharding divides
it, activations come on top. Here every term is counted by itself, at the moment and on the pipeline
stage that need most.

A step has three such moments: the loss (all activations and the logits), the backward pass of a
block (recomputed activations, gathered and unreduced parameters), and its end (all gradients). The
terms are those of the largest. Three numbers come out: what tensors take (allocated), what the
allocator holds for them (reserved), what the driver shows (device).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, assert_never

from shardyard.config.formulas import LOSS_CHUNK
from shardyard.config.layout import Layout
from shardyard.planner.stages import (
    StageTrained,
    block_elements,
    has_ends,
    in_flight,
    small_parameters,
    stage_blocks,
    stage_trained,
    table_parameters,
)
from shardyard.planner.state_memory import (
    earlier_passes,
    gathered_ahead_bytes,
    gathers_per_block,
    gradients_bytes,
    last_pass_residual_bytes,
    logits_bytes,
    logits_reason,
    optimizer_state_bytes,
    parameters_bytes,
    reduce_buffer_bytes,
    splits_gradients,
    splits_weights,
    unreduced_gradient_bytes,
    whole_copy_bytes,
    with_logits,
)
from shardyard.planner.workload import Workload
from shardyard.units import format_bytes

RULE_BYTES_PER_PARAMETER = 20
"""Rule of the field, above; printed next to the terms so that a reader can check their sum."""

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


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand, in bytes, and why it is that large."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The peak of the rank that needs most."""

    terms: tuple[Term, ...]
    """They add up to what is allocated."""
    peak_phase: str
    """When in a step that is."""
    stage: int
    """On which pipeline stage."""
    allocated_bytes: int
    """Tensors."""
    reserved_bytes: int
    """Bytes that the allocator holds for them."""
    device_bytes: int
    """Bytes that the driver shows: with context and communicators."""

    def term(self, name: str) -> int:
        """Bytes of one term; 0 if there is none of that name."""
        return sum(term.bytes for term in self.terms if term.name == name)


Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Distance of a prediction from the available memory: never a bare yes or no."""

    verdict: Verdict
    reason: str

    @property
    def is_safe(self) -> bool:
        """Whether it fits with room for the error of the prediction."""
        return self.verdict == "fits"


class MemoryBreakdown(NamedTuple):
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


def peak(workload: Workload) -> tuple[float, int, int, MemoryBreakdown]:
    """Allocated bytes, stage, moment (index of ``MOMENTS``) and terms: cheap, for a search."""
    pp = workload.layout.pp
    # The first stage holds most micro-batches, the last one the logits. With frozen parameters any
    # stage may train most.
    stages = {0, pp - 1} if workload.trained is None else set(range(pp))
    return max(
        (need.total, stage, moment, need)
        for stage in stages
        for moment, need in enumerate(needs(workload, stage))
    )


# A search over instances asks for the same layout once for each of them with as many devices. With
# this cache, and a verdict without words, it takes half the processor time
# (benchmarks/results/cpu-2core/plan-offers-20261130.txt).
@lru_cache(maxsize=2**15)
def peak_bytes(workload: Workload) -> float:
    """Return the allocated bytes at the peak."""
    return peak(workload)[0]


def reserved_of(allocated: float) -> float:
    """Return the bytes that the allocator holds for so many bytes of tensors."""
    return RESERVED_SHARE * allocated


def device_of(allocated: float, layout: Layout, *, has_standby: bool) -> float:
    """Return the bytes that the driver shows for so many bytes of tensors.

    Args:
        has_standby: A second process waits on the device, with a context and no tensor.
    """
    axes = (layout.data_ranks, layout.cp, layout.tp, layout.ep)
    groups = sum(degree > 1 for degree in axes) + (2 if layout.pp > 1 else 0)
    # A CUDA context cannot be forked, so the standby worker has one of its own.
    contexts = (2 if has_standby else 1) * CONTEXT_BYTES
    return reserved_of(allocated) + contexts + groups * GROUP_BYTES


def memory(workload: Workload) -> MemoryEstimate:
    """All terms of the largest peak, each with its reason."""
    allocated, stage, moment, need = peak(workload)
    return MemoryEstimate(
        terms=_terms(workload, stage, need),
        peak_phase=MOMENTS[moment],
        stage=stage,
        allocated_bytes=round(allocated),
        reserved_bytes=round(reserved_of(allocated)),
        device_bytes=round(
            device_of(allocated, workload.layout, has_standby=workload.techniques.has_standby)
        ),
    )


def fit(device_bytes: float, limit_bytes: int | None) -> Fit:
    """Whether a predicted use fits into the memory of a device, in words.

    ``fits`` leaves room for the error of the prediction, ``tight`` less than that; what is
    predicted to be more than the device has does not fit.
    """
    verdict = fit_verdict(device_bytes, limit_bytes)
    if limit_bytes is None:
        return Fit(verdict=verdict, reason="the memory of the device is not known")
    share = device_bytes / limit_bytes
    reason = f"{format_bytes(device_bytes)} are {share:.0%} of {format_bytes(limit_bytes)}"
    if verdict == "tight":
        spare = f"leaves less free than this prediction's error, {1 - SAFE_SHARE:.0%}"
        reason = f"{reason}, which {spare}"
    return Fit(verdict=verdict, reason=reason)


def fit_verdict(device_bytes: float, limit_bytes: int | None) -> Verdict:
    """Whether a predicted use fits: the one place that says so. A search asks without words."""
    if limit_bytes is None:
        return "unknown"
    share = device_bytes / limit_bytes
    return "fits" if share <= SAFE_SHARE else "tight" if share <= 1 else "does not fit"


# --- the moments --------------------------------------------------------------------------------


class _StageState(NamedTuple):
    """Contents of one stage on one rank: parameters, before the data axes split them, and more."""

    layers: int
    block: float
    """Parameters of one of its blocks."""
    table: float
    """Parameters of the embedding, or of the head."""
    has_head: bool
    elements: float
    """All parameters."""
    trained: StageTrained
    """Trained part of these parameters."""
    saved: float
    """Activations that each block keeps on the device, on average: bytes per token."""
    recomputed: float
    """Activations of a block while it is recomputed; 0 if none is."""
    flying: float
    """Passes whose activations are there at once."""


def needs(w: Workload, stage: int) -> tuple[MemoryBreakdown, ...]:
    """Return the needs of each moment of a step, in the order of ``MOMENTS``."""
    held = _stage_state(w, stage)
    in_block, at_end = _in_block(w, held), _at_end(w, held)
    # A stage without the head has no loss: its forward pass holds no more than its backward pass.
    return (_at_loss(w, held) if held.has_head else in_block, in_block, at_end)


def _at_loss(w: Workload, state: _StageState) -> MemoryBreakdown:
    """The last block has kept what it keeps, and the first gradients are not there yet."""
    # A chunked loss is made in the forward pass, while the head's gather buffer still exists.
    head = w.formats.compute_bytes * state.table if gathers_per_block(w) else 0.0
    earlier = earlier_passes(w)
    return MemoryBreakdown(
        parameters=parameters_bytes(w, state),
        gradients=earlier * gradients_bytes(w, state),
        optimizer=optimizer_state_bytes(w, state),
        gathered=whole_copy_bytes(w, state) + head * (2 if w.techniques.loss_chunk else 1),
        unreduced=earlier * unreduced_gradient_bytes(w, state)
        + last_pass_residual_bytes(w, state)
        + _head_gradient(w, state),
        activations=_saved_activations(w, state) + _ends(w),
        logits=logits_bytes(w, _tokens(w)),
    )


def _in_block(w: Workload, state: _StageState) -> MemoryBreakdown:
    """A block is made again and its gradient computed, while the next ones are gathered."""
    earlier = earlier_passes(w)
    return MemoryBreakdown(
        parameters=parameters_bytes(w, state),
        gradients=earlier * gradients_bytes(w, state),
        optimizer=optimizer_state_bytes(w, state),
        gathered=whole_copy_bytes(w, state) + gathered_ahead_bytes(w, state),
        unreduced=earlier * unreduced_gradient_bytes(w, state)
        + reduce_buffer_bytes(w, state.trained.block),
        activations=_saved_activations(w, state) + _recomputed_activations(w, state),
        logits=0.0,
    )


def _at_end(w: Workload, state: _StageState) -> MemoryBreakdown:
    """The first block's gradients are made; all others are there, and activations are gone."""
    last = w.formats.compute_bytes * (state.block + state.table) if gathers_per_block(w) else 0.0
    return MemoryBreakdown(
        parameters=parameters_bytes(w, state),
        gradients=gradients_bytes(w, state),
        optimizer=optimizer_state_bytes(w, state),
        gathered=whole_copy_bytes(w, state) + last,
        unreduced=unreduced_gradient_bytes(w, state)
        + reduce_buffer_bytes(w, max(state.trained.block, state.trained.table)),
        # Blocks free their activations on the way back: only the first block's are left.
        activations=_tokens(w) * (state.recomputed or state.saved) if state.trained.layers else 0.0,
        logits=0.0,
    )


# --- what is held between steps ------------------------------------------------------------------


def _stage_state(w: Workload, stage: int) -> _StageState:
    shape, layout = w.shape, w.layout
    first, last = has_ends(w, stage)
    # Over a pipeline even a tied table exists twice, once at each end.
    is_tied = first and last and shape.tie_word_embeddings
    has_table = last and shape.label_head is None
    tables = 1 if is_tied else int(first) + int(has_table)
    layers, block = stage_blocks(w, stage), block_elements(shape, layout)
    table = table_parameters(shape, layout)
    outside = tables * table + small_parameters(shape, first=first, last=last)
    elements = layers * block + outside
    trained = stage_trained(w, stage)
    if w.trained is not None and w.trained.adapters is not None:
        assert trained is not None
        block = block + trained.block
        elements = elements + trained.elements - trained.outside
    kept, again = saved_activation_bytes(w)
    flying = in_flight(w, stage)
    if w.techniques.offload == "activations":
        # Forward: the block that computes and one that leaves. Backward: one and those ahead of it.
        kept *= min(1.0, max(2, 1 + w.techniques.offload_depth) / layers)
        flying = 1
    return _StageState(
        layers=layers,
        block=block,
        table=table,
        has_head=last,
        elements=elements,
        trained=trained
        or StageTrained(elements, block, table if tables else 0.0, 0.0, 0.0, layers, 0, outside),
        saved=kept,
        recomputed=again,
        flying=flying,
    )


def _head_gradient(w: Workload, state: _StageState) -> float:
    """With a loss in chunks: its sum in fp32, and what a chunk adds beyond its fp32 logits."""
    chunk, tokens = w.techniques.loss_chunk, with_logits(w, _tokens(w))
    if chunk is None or not state.trained.table:
        return 0.0
    size, table = w.formats.compute_bytes, state.trained.table
    # One chunk needs no sum, so its gradient stays in the computing format.
    if tokens <= chunk:
        return size * table
    logits = 4 * chunk * w.shape.logits_width / w.layout.tp
    # Summed in bf16, each chunk would round the gradient again, so the sum is in fp32.
    return 4 * table + (max(0.0, size * table - logits) if size < 4 else 0.0)


# --- activations of a stage ----------------------------------------------------------------------


def _tokens(w: Workload) -> float:
    """Return the tokens of one pass on one rank."""
    return w.tokens / w.layout.cp


def _saved_activations(w: Workload, state: _StageState) -> float:
    """Return the bytes that all passes in flight keep for their backward passes."""
    return _tokens(w) * (state.trained.layers * state.saved * state.flying + _rotary_bytes(w))


def _recomputed_activations(w: Workload, state: _StageState) -> float:
    """A block's activations beyond what is kept of it, while it is recomputed."""
    if not state.recomputed or not state.trained.layers:
        return 0.0
    # What the block keeps of its first pass is counted with the saved activations already.
    one = _tokens(w) * state.saved * state.flying / max(state.flying, 1.0)
    return _tokens(w) * state.recomputed - one


def _ends(w: Workload) -> float:
    """Return the bytes kept by the norm after all blocks and by the head."""
    split = w.layout.tp if w.techniques.sequence_parallel else 1
    kept = _norm_bytes(w) / split
    if w.techniques.loss_chunk is not None:  # the gradient of what the head multiplies
        kept += w.formats.compute_bytes
    return _tokens(w) * kept * w.shape.hidden_size


# --- activations of a block -----------------------------------------------------------------------


def block_bytes(w: Workload) -> float:
    """Bytes per token that one block keeps for its backward pass, without recompute.

    Source: the method of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (sum over the
    inputs that each operation's backward needs), without its dropout masks where there is no
    dropout, with grouped KV heads, gates and experts, and with flash attention, which keeps q, k,
    v, its output and one fp32 number per head instead of the matrix of scores.
    """
    shape, tech, size, tp = w.shape, w.techniques, w.formats.compute_bytes, w.layout.tp
    hidden, heads, kv_heads = shape.hidden_size, shape.queries_width, shape.keys_width
    split = tp if tech.sequence_parallel else 1
    inner: float = shape.intermediate_size
    dealt: float = 0.0
    if shape.num_experts:
        visits = shape.num_experts_per_tok
        inner = visits * shape.expert_width
        inner += shape.shared_expert_intermediate_size
        dealt = 2 * visits * size * hidden  # tokens as dealt to experts, and what they return
    outside = shape.family.stream_norms * _norm_bytes(w) * hidden + (
        2 * hidden if tech.dropout else 0
    )
    attention = size * (2 * heads + 2 * kv_heads) + _score_bytes(w)
    attention += _norm_bytes(w) * shape.split_norm_width
    kept_inner = 2  # before and after the activation
    if shape.is_gated:  # gate, silu(gate), up, and their product; fused ones make silu(gate) again
        kept_inner = 4 if tech.kernels == "eager" else 3
    return outside / split + (attention + size * kept_inner * inner + dealt) / tp


def entry_bytes(w: Workload) -> float:
    """Bytes per token of a block's input, from which it is recomputed."""
    split = w.layout.tp if w.techniques.sequence_parallel else 1
    return w.formats.compute_bytes * w.shape.hidden_size / split


def _norm_bytes(w: Workload) -> float:
    """Bytes per element that a norm keeps: input and output, and eager RMSNorm one in fp32."""
    size = w.formats.compute_bytes
    if w.shape.is_gated and w.techniques.kernels == "eager":
        return 4 + 2 * size
    return 2 * size


def _rotary_bytes(w: Workload) -> float:
    """Bytes per token of the rotary sines and cosines, which all blocks share."""
    return 2.0 * w.formats.compute_bytes * w.shape.rotated_width


def _score_bytes(w: Workload) -> float:
    """Return the bytes per token that attention keeps in addition to q, k, v and its output."""
    heads, tech = w.shape.num_attention_heads, w.techniques
    if tech.attention != "unfused":
        # cp splits samples, and only whole ones can be described by lengths in place of a mask.
        has_mask = tech.mask and not (tech.uses_varlen and w.layout.cp == 1)
        mask = w.formats.compute_bytes * w.seq_len / w.layout.cp if has_mask else 0.0
        return 4 * heads + mask
    size = w.formats.compute_bytes
    per_score = 2 * size + 1 if tech.dropout else size  # softmax; dropout's mask and result
    if w.shape.attn_logit_softcapping is not None:
        per_score = 2 * size + 4  # tanh, softmax in fp32 and as it multiplies
    return heads * w.seq_len / w.layout.cp * per_score


def _selective_bytes(w: Workload) -> float:
    """Bytes per token that ``selective`` keeps of a block: its input, products and attention."""
    hidden, heads, kv_heads = w.shape.hidden_size, w.shape.queries_width, w.shape.keys_width
    gates = 2 if w.shape.is_gated else 1
    inner = w.shape.intermediate_size
    size, tp, share = w.formats.compute_bytes, w.layout.tp, w.techniques.selective_products
    # Sums over ranks, split by token, are kept in place of products, except those of fp8.
    keeps_sums = w.techniques.sequence_parallel and w.formats.compute not in ("fp8", "fp4")
    summed = 2 * hidden / (tp if keeps_sums else 1)
    products = (heads + 2 * kv_heads + gates * inner) / tp + summed
    attention = (size * heads + 4 * w.shape.num_attention_heads) / tp
    return entry_bytes(w) + size * share * products + attention


def saved_activation_bytes(w: Workload) -> tuple[float, float]:
    """Bytes per token that a block keeps on average, and that one holds while it is recomputed."""
    whole = block_bytes(w) + _adapter_bytes(w)
    match w.recompute:
        case "full":
            return entry_bytes(w), whole
        case "selective":
            return _selective_bytes(w) + _adapter_products(w), whole
        case "attention":
            scores = _score_bytes(w) / w.layout.tp
            return whole - scores, whole
        case "none":
            return whole, 0.0
        case int(every):
            return ((every - 1) * whole + entry_bytes(w)) / every, whole
        case _:
            assert_never(w.recompute)


def _adapter_bytes(w: Workload) -> float:
    """Return the bytes per token that a block's adapters keep in addition to the block (LoRA).

    They are the output of A, which B multiplies; with dropout also what is left of each input,
    and its mask.
    """
    adapters = None if w.trained is None else w.trained.adapters
    if adapters is None:
        return 0.0
    size = w.formats.compute_bytes
    dropped = size + 1 if adapters.has_dropout else 0
    return adapters.average(lambda each: size * adapters.rank + dropped * each.inputs / w.layout.tp)


def _adapter_products(w: Workload) -> float:
    """Bytes per token that ``selective`` keeps of them: their products, as of any matrix."""
    adapters = None if w.trained is None else w.trained.adapters
    if adapters is None:
        return 0.0
    size, tp = w.formats.compute_bytes, w.layout.tp
    return adapters.average(lambda each: size * (adapters.rank + each.outputs / tp))


# --- reasons ------------------------------------------------------------------------------------


def _terms(w: Workload, stage: int, need: MemoryBreakdown) -> tuple[Term, ...]:
    layout, formats = w.layout, w.formats
    shards = layout.dp_shard * layout.cp
    over = f" over {shards} ranks" if shards > 1 else ""
    where = f" of stage {stage}" if layout.pp > 1 else ""
    tokens = w.tokens // layout.cp
    flying = in_flight(w, stage)
    several = f" of {flying:.3g} micro-batches in flight" if layout.pp > 1 else ""
    split = over if splits_weights(w) else " whole on every rank"
    trained = stage_trained(w, stage)
    blocks = stage_blocks(w, stage) if trained is None else trained.layers
    frozen = "" if trained is None else f", {formats.compute_bytes:g} where frozen"
    reasons = {
        "parameters": f"{formats.weight_bytes:g} bytes each{frozen}{where},{split or ' not split'}",
        "gradients": f"{formats.gradient_bytes:g} bytes each"
        + (over if splits_gradients(w) else ", whole on every rank"),
        "optimizer": f"{formats.optimizer_bytes:g} bytes each: {formats.optimizer_reason}"
        + (" and fp32 weights" if formats.optimizer_bytes > 8 else "") + over,
        "gathered parameters": f"whole ones in {formats.compute}, gathered by zero {layout.zero}",
        "unreduced gradients": f"{formats.reduce_bytes:g} bytes each, on their way to their sum",
        "activations": f"{blocks} blocks x {tokens:,} tokens{several}, "
        f"recompute {w.recompute}",
        "logits and loss": logits_reason(w, tokens),
    }  # fmt: skip
    rounded = [round(value) for value in need]
    return tuple(
        Term(name=name, bytes=size, reason=reason)
        for (name, reason), size in zip(reasons.items(), rounded, strict=True)
        if size
    )


_LEAST_SHARE = 0.02
"""Share of the peak below which a saving is not reported."""
_MOST = 3
_MOVED: tuple[Literal["activations", "optimizer"], ...] = ("activations", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One setting with another value, as it is typed, and the bytes that the peak falls by."""

    setting: str
    bytes: int


def savings(workload: Workload, *, on_cpu: bool) -> tuple[Saving, ...]:
    """Return the settings that save most, largest first; none changes the training result.

    Args:
        on_cpu: The device's memory is the host's, so that a move there gains no memory.
    """
    now = peak(workload)[0]
    found = [
        Saving(setting=setting, bytes=round(now - peak(other)[0]))
        for setting, other in _others(workload, on_cpu=on_cpu)
    ]
    return notable_savings(found, of=now)


def notable_savings(candidates: Iterable[Saving], *, of: float) -> tuple[Saving, ...]:
    """The largest, without those that are little of so many bytes."""
    worth = [saving for saving in candidates if saving.bytes > _LEAST_SHARE * of]
    return tuple(sorted(worth, key=lambda saving: -saving.bytes)[:_MOST])


def _others(w: Workload, *, on_cpu: bool) -> Iterator[tuple[str, Workload]]:
    if w.micro_batch > 1:
        size = w.micro_batch // 2
        yield f"optim.micro_batch={size}", replace(w, micro_batch=size)
    if w.recompute != "full":
        yield "memory.recompute=full", replace(w, recompute="full")
    if w.techniques.loss_chunk is None and w.techniques.loss == "in place":
        chunked = replace(w.techniques, loss_chunk=LOSS_CHUNK)
        yield f"memory.loss_chunk={LOSS_CHUNK}", replace(w, techniques=chunked)
    if w.layout.zero < 3 and w.layout.dp_shard * w.layout.cp > 1:
        yield "parallel.zero=3", replace(w, layout=replace(w.layout, zero=3))
    if w.techniques.offload == "none" and not on_cpu:
        for what in _MOVED:
            moved = replace(w.techniques, offload=what)
            yield f"memory.offload={what}", replace(w, techniques=moved)
