"""What ``auto`` stands for where a model's sizes and a kind of device say it, each with its reason.

The same in a recipe (``config/auto.py``) and in a script of one's own (``library/known.py``).
"""

from typing import Literal

from shardyard.families.shape import ModelShape

CONTEXT_LIMIT_TOKENS = 4096
"""Longest sample that ``data.seq_len: auto`` chooses: attention's cost grows with its square."""


def seq_len_of(shape: ModelShape) -> tuple[int, str]:
    """``data.seq_len``."""
    context = shape.max_position_embeddings
    if context > CONTEXT_LIMIT_TOKENS:
        return CONTEXT_LIMIT_TOKENS, f"auto goes no further; the model's context is {context:,}"
    return context, "the model's context length"


def dropout_of(shape: ModelShape) -> tuple[float, str]:
    """``model.dropout``."""
    own, key = shape.hidden_dropout, shape.family.config_json.dropout
    return own, f"{key} of the model's config.json" if own else "the usual value"


def compute_on(device: str, *, without_bf16: str | None = None) -> tuple[str, str]:
    """``precision.compute``.

    Args:
        device: Kind of device.
        without_bf16: Name of the device if it computes in no bf16.
    """
    if device == "cpu":
        return "fp32", "a CPU gains little from 16 bits"
    if without_bf16 is not None:
        return "fp16", f"{without_bf16} has no bf16; the loss is scaled"
    return "bf16", "the accelerator's fast format, without loss scaling"


def output_of(compute: Literal["fp32", "bf16", "fp16", "fp8"]) -> tuple[str, str]:
    """``precision.output``."""
    if compute == "fp16":
        return "fp32", "losses are summed outside of the model, and fp16 ends at 65,504"
    return ("bf16" if compute == "fp8" else compute), "as precision.compute"
