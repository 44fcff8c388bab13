"""What logits take on a rank: of how many tokens they exist, and in which formats."""

from dataclasses import replace

from shardyard.config.masking import MASKED_SHARE
from shardyard.planner.workload import Workload
from shardyard.units import format_bytes

_CHUNKS = 8
"""Chunks of a chunked loss: so much less of the logits is held."""


def with_logits(w: Workload, tokens: float) -> float:
    """Of these tokens, those whose logits are computed."""
    return tokens if w.shape.is_causal else MASKED_SHARE * tokens


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
    tokens = with_logits(w, tokens)
    if tech.loss_chunk is not None:
        tokens = min(tokens, tech.loss_chunk)
    held = tokens * w.shape.vocab_size / w.layout.tp * per_logit
    return held / _CHUNKS if tech.chunked_loss else held


def logits_reason(w: Workload, tokens: int) -> str:
    """What these bytes are, in words."""
    chunk, entries = w.techniques.loss_chunk, w.shape.vocab_size // w.layout.tp
    if chunk is None or chunk >= tokens:
        return f"{tokens:,} tokens x {entries:,} entries: logits, log-probabilities, gradients"
    whole = logits_bytes(replace(w, techniques=replace(w.techniques, loss_chunk=None)), tokens)
    return (
        f"a chunk of {chunk:,} tokens x {entries:,} entries; {format_bytes(whole)} without "
        "memory.loss_chunk"
    )
