"""State that survives a restart: tensors under their checkpoint names, and plain values."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardyard.config.tasks import Metric


@dataclass(kw_only=True)
class Progress:
    """Progress of the run. Data order only needs the position: it has no state."""

    step: int = 0
    """Optimizer steps done."""
    position: int = 0
    """Samples read so far; the next step begins here."""
    phase: int = 0
    """Phase of the run, from 0: ``position`` counts in its stream."""
    samples_before: int = 0
    """Samples read in the phases before."""
    passed_over: int = 0
    """Samples of this phase's stream that were passed over (``resume --step N --skip-steps K``)."""
    tokens: int = 0
    """Tokens that went through the model so far, padding left out."""
    best_step: int | None = None
    """Step of the best evaluation of this phase: others have other samples."""
    best_score: float | None = None
    best_by: str = "loss"
    """The metric that ``best_score`` is of."""
    evaluations_since_best: int = 0
    """Evaluations of this phase after its best one."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Finite metrics of the evaluation after this step, by name; empty: there was none."""

    @classmethod
    def of_checkpoint(cls, values: Mapping[str, Any]) -> "Progress":
        """Read a checkpoint's values; earlier ones compared evaluations only by their loss."""
        values = dict(values)
        if "best_loss" in values:
            values["best_score"] = values.pop("best_loss")
        return cls(**values)

    def is_best(self, score: float, *, by: str, metric: Metric) -> bool:
        """Whether no evaluation before was as good as this one of the step just done; keeps it."""
        before = self.best_score if self.best_by == by else None
        if not math.isfinite(score) or (before is not None and not metric.is_better(score, before)):
            return False
        self.best_step, self.best_score, self.best_by = self.step, score, by
        return True

    def next_phase(self) -> "Progress":
        """Return the start of the phase after this one."""
        return Progress(
            step=self.step,
            phase=self.phase + 1,
            samples_before=self.samples_before + self.position,
            tokens=self.tokens,
        )


def checkpoint_values(
    progress: Progress,
    *,
    seed: int,
    skipped_in_row: int,
    loss_scale: dict[str, float] | None,
    exponents: dict[str, int] | None,
    fingerprint: dict[str, Any],
) -> dict[str, Any]:
    """Everything of a checkpoint that is no tensor.

    Args:
        loss_scale: Of a run in fp16, with the steps that count towards its growth.
        exponents: Of gradients' scales by name, where they are summed as integers.
    """
    return {
        "progress": asdict(progress),
        "seed": seed,
        "skipped_in_row": skipped_in_row,
        "loss_scale": loss_scale,
        "exponents": exponents,
        "fingerprint": fingerprint,
    }


OF_OPTIMIZER = ("optim.", "average.")
"""Prefixes of names in an optimizer's state; averages of weights are next to its own."""


def memory_by_kind(tensors: dict[str, Tensor], device: torch.device) -> dict[str, int]:
    """Bytes of parameters and optimizer state that this rank holds on its device."""
    held = {
        name: local_bytes(tensor)
        for name, tensor in tensors.items()
        # Offloaded state lies in host memory, and takes nothing of the device.
        if tensor.device.type == device.type
    }
    return {
        "parameters_bytes": sum(size for name, size in held.items() if name.startswith("model.")),
        "optimizer_bytes": sum(
            size for name, size in held.items() if name.startswith(OF_OPTIMIZER)
        ),
    }


def local_bytes(tensor: Tensor) -> int:
    """Bytes of what this rank holds of it."""
    local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return local.numel() * local.element_size()
