"""The module of ``examples/own-module``, wide enough that a step has something to compute."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch import Tensor, nn

EXAMPLE = Path(__file__).parents[1] / "examples" / "own-module" / "convolutions.py"


def build(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, Any]:  # noqa: ARG001
    """As ``model.module`` asks for it: the model, and its loss function."""
    spec = spec_from_file_location("convolutions", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.Convolutions(vocab_size, width=128, blocks=4, dropout=0.0), example.loss_sum


def logits(model: nn.Module, tokens_BL: Tensor) -> Tensor:
    """As a loop by hand calls it."""
    logits_BLV: Tensor = model(tokens_BL)
    return logits_BLV
