"""What is predicted: one training step, said without the words of any framework.

A recipe becomes a workload in ``plan/plan.py``; a row of the table of published runs becomes one in
``benchmarks/planner_accuracy.py``. The models of memory and time read nothing else.
"""

from dataclasses import dataclass
from typing import Literal

from shardyard.config.legality import Layout
from shardyard.config.presets import ModelShape

Recompute = Literal["none", "selective", "full"] | int
"""``selective`` recomputes what is cheap and keeps matrix products; an int n: every n-th block."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes of one parameter in each role, and the format that computes."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    weight_bytes: float
    """The parameter that is trained as it is held between steps, split by zero 3."""
    gradient_bytes: float
    """The gradient that is held from pass to pass, split by zero 2."""
    optimizer_bytes: float
    """All that zero 1 splits: moments, and an fp32 master copy where the weight is 16 bit."""
    reduce_bytes: float
    """The gradient on the wire."""
    compute_bytes: float = 2
    """A gathered parameter and an activation."""


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How the step is carried out, where frameworks differ."""

    attention: Literal["flash", "unfused"] = "flash"
    """``unfused`` writes the matrix of scores to memory, as before FlashAttention."""
    kernels: Literal["eager", "fused", "compiled"] = "fused"
    """Of element-wise operators: one kernel each; hand-fused; fused by a compiler."""
    sequence_parallel: bool = True
    """With tp: norms and dropout are split along the sequence."""
    overlap_data: bool = True
    """Collectives of the data axes run beside compute."""
    overlap_tensor: bool = False
    """Collectives of tp run beside matrix products (asynchronous TP)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    virtual_stages: int = 1
    """Model chunks of one pipeline rank."""
    offload: Literal["none", "params", "optimizer", "activations"] = "none"
    dropout: bool = False
    prefetch: int = 1
    """Blocks gathered ahead, zero 3."""
    chunked_loss: bool = False
    """The loss is computed in chunks, so that the full logits are never held."""


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

    @property
    def micro_batches(self) -> int:
        """Passes of one data rank in one step."""
        per_rank = -(-self.global_batch // self.layout.data_ranks)
        return -(-per_rank // self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one pass of one data rank, over all ranks of its model group."""
        return self.micro_batch * self.seq_len
