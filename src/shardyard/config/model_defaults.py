"""Values of ``auto`` by a model's sizes and a kind of device, each with its reason.

The same in a recipe (``config/auto.py``) and in a script of one's own (``library/supported.py``).
"""

import math
from typing import Literal

from shardyard.config.model_sizes import Sizes
from shardyard.families.shape import ModelShape

CONTEXT_LIMIT_TOKENS = 4096
"""Longest sample that ``data.seq_len: auto`` chooses: attention's cost grows with its square."""


def seq_len_of(shape: Sizes) -> tuple[int, str]:
    """``data.seq_len``."""
    context = shape.max_position_embeddings
    if context > CONTEXT_LIMIT_TOKENS:
        return CONTEXT_LIMIT_TOKENS, f"auto goes no further; the model's context is {context:,}"
    return context, "the model's context length"


def step_tokens_of(parameters: int) -> tuple[int, str]:
    """Tokens of one step by model size, with the source."""
    if parameters < 20e6:
        return 2**14, "small models learn fastest from small steps (ours)"
    if parameters < 1e9:
        return 2**19, "GPT-3 below 1 B (arXiv:2005.14165, table 2.1)"
    if parameters < 5e9:
        return 2**20, "GPT-3 at 1.3 B and 2.7 B (arXiv:2005.14165, table 2.1)"
    return 2**22, "Llama 2 (arXiv:2307.09288, section 2.2)"


def lr_of(shape: Sizes) -> tuple[float, str]:
    """``optim.lr`` of Adam for new weights."""
    if shape.parameters > 20e9:
        return 1.5e-4, "Llama 2 at 34 B and 70 B (arXiv:2307.09288, table 1)"
    if shape.parameters >= 1e9:
        return 3e-4, "Llama 2 at 7 B and 13 B (arXiv:2307.09288, table 1)"
    # Kaplan et al. fit Adam's best rate over the parameters without embeddings.
    rate = 0.003239 - 0.0001395 * math.log(shape.num_hidden_layers * shape.block_parameters)
    return float(f"{rate:.1e}"), "by model size (Kaplan et al., arXiv:2001.08361, eq. D.1)"


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
