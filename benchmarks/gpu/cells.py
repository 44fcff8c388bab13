"""What is measured: models, contenders, recompute, and where to begin the search for a fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardyard.config.presets import ModelShape
from shardyard.config.schema import Recipe
from shardyard.plan.memory import activation_bytes

RECOMPUTES = ("none", "selective", "full")
CONTENDERS = ("shardyard", "bare", "trainer")


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of one model: the same for every contender."""

    preset: str
    seq_len: int
    sequences: int
    """Samples of one optimizer step on each device, in however many micro-batches."""


LOADS = {
    "llama-1b": Load(preset="llama-1b", seq_len=4096, sequences=8),
    "llama2-7b": Load(preset="llama2-7b", seq_len=4096, sequences=4),
}
REHEARSAL = Load(preset="llama-tiny", seq_len=64, sequences=4)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender at one load with one recompute setting."""

    load: Load
    contender: str
    recompute: str
    micro_batch: int

    def halved(self) -> "Cell":
        """The same cell with half the samples in a micro-batch."""
        return replace(self, micro_batch=self.micro_batch // 2)
