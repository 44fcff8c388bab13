"""Models as transformers builds them, with weights of no pattern, and ours of the same folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of, trained_family_of
from shardyard.families.shape import ModelShape
from shardyard.models.attention import SampleAttention
from shardyard.models.build import build_on_meta, fill_weights, give_storage, hf_config
from shardyard.models.dropout import SampleKeys
from shardyard.models.forward import ForwardPass

TOKENS_BL = torch.arange(48).reshape(2, 24) * 5 % 300


def small_shape(model_type: str) -> ModelShape:
    """The tiny preset of a family, else llama-tiny under its name; of 300 tokens."""
    own = [preset.shape for preset in family_of(model_type).presets.values()]
    tiny = next((shape for shape in own if not shape.vocab_size), PRESETS["llama-tiny"].shape)
    return replace(tiny, model_type=model_type, vocab_size=300)


def theirs(shape: ModelShape) -> Any:
    """transformers' own model in fp32; biases and norms are moved from zero and one, too."""
    kind = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    torch.manual_seed(0)
    model = kind.from_config(hf_config(shape), attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.05 * torch.randn_like(param)
    return model


def our_logits(shape: ModelShape, folder: Path) -> Tensor:
    """Logits of our own pass through a model that is loaded from a folder; (B, L, V)."""
    model = build_on_meta(shape)
    give_storage(model, torch.device("cpu"))
    fill_weights(model, folder=folder, seed=0)
    run = ForwardPass(
        model,
        trained_family_of(shape.model_type),
        keys=SampleKeys(),
        attention=lambda _: SampleAttention(None, is_causal=shape.is_causal),
    )
    positions_BL = torch.arange(TOKENS_BL.shape[1]).expand(len(TOKENS_BL), -1)
    with torch.no_grad():
        return run(TOKENS_BL, positions_BL, torch.arange(len(TOKENS_BL)))
