"""How many tokens' logits exist at once where ``memory.loss_chunk`` is auto: one rule, for a recipe
and for the layouts that the planner tries."""

from typing import NamedTuple

from shardyard.config.masking import MASKED_SHARE
from shardyard.families.shape import ModelShape

LOSS_CHUNK = 2048
"""Tokens of a chunk."""
_WORTH_BYTES = 2**30


class Logits(NamedTuple):
    """What the logits of a micro-batch take on one rank."""

    tokens: int
    whole_bytes: int
    """All at once."""
    chunked_bytes: int
    """In chunks, with what these take beside."""

    @property
    def chunk(self) -> int | None:
        """Tokens at once; None: all."""
        saved_bytes = self.whole_bytes - self.chunked_bytes
        return None if saved_bytes < _WORTH_BYTES else LOSS_CHUNK


def logits_of(shape: ModelShape, *, tokens: int, tp: int, compute_bytes: float) -> Logits:
    """The logits of a micro-batch.

    Args:
        tokens: Of the micro-batch on one rank of cp.
        compute_bytes: Of a number in the computing format.
    """
    entries = shape.vocab_size // tp
    if not shape.is_causal:
        tokens = round(MASKED_SHARE * tokens)
    per_logit = 4 + (4 if compute_bytes == 4 else 2)  # and an fp32 copy
    # the head's gradient in fp32, and the buffer that the head was gathered in
    beside = 6 * entries * shape.hidden_size
    return Logits(tokens, tokens * entries * per_logit, LOSS_CHUNK * entries * per_logit + beside)


def waits_for_logits(schedule: str, *, pp: int) -> bool:
    """Whether a gradient of the head would wait for each micro-batch."""
    return pp > 1 and schedule == "gpipe"
