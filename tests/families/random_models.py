"""Models as transformers builds them, with weights of no pattern, and ours of the same folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.families.shape import ModelShape
from shardyard.models.attention import SampleAttention
from shardyard.models.build import build_on_meta, fill_weights, hf_config, materialize
from shardyard.models.forward import ForwardPass
from shardyard.models.random import SampleKeys

TOKENS_BL = torch.arange(48).reshape(2, 24) * 5 % 300


def small_shape(model_type: str) -> ModelShape:
    """The tiny preset of a family, else llama-tiny under its name; of 300 tokens."""
    own = [ModelShape.of(preset.shape) for preset in family_of(model_type).presets.values()]
    tiny = next((shape for shape in own if not shape.vocab_size), PRESETS["llama-tiny"].shape)
    return replace(tiny, model_type=model_type, vocab_size=300)


_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "as 3.1": {"rope_scaling": _LLAMA3},
        "as 3.2": {"rope_scaling": _LLAMA3, "tie_word_embeddings": True, "head_dim": 24},
        "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "yarn": {"rope_scaling": _YARN},
        "biases": {"attention_bias": True},
    },
    "mistral": {"window": {"sliding_window": 8}, "long window": {"sliding_window": 24}},
    "mixtral": {"tied": {"tie_word_embeddings": True}, "window": {"sliding_window": 8}},
    "qwen2": {
        "tied": {"tie_word_embeddings": True},
        "window": {"sliding_window": 8, "layer_types": ("full_attention", "sliding_attention")},
    },
    "qwen3": {
        "tied": {"tie_word_embeddings": True},
        "wide heads": {"head_dim": 32},
        "window": {"sliding_window": 8},
    },
    "qwen3_moe": {"window": {"sliding_window": 8}},
    "phi3": {
        "window": {"sliding_window": 8},
        "wide heads": {"head_dim": 24, "tie_word_embeddings": True},
    },
    "gpt_neox": {
        "one after the other": {"use_parallel_residual": False, "hidden_act": "gelu_fast"},
        "whole heads turned": {"partial_rotary_factor": 1.0, "attention_bias": False},
        "linear, tied": {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "tie_word_embeddings": True,
        },
    },
    "olmo2": {
        "wide heads": {"head_dim": 24, "tie_word_embeddings": True},
        "biases, all heads": {"attention_bias": True, "num_key_value_heads": 4},
        "as 3.1": {"rope_scaling": _LLAMA3},
    },
    "granite": {
        "own head, wide heads": {"tie_word_embeddings": False, "head_dim": 24},
        "biases, whole numbers": {
            "attention_bias": True,
            "embedding_multiplier": 2,
            "logits_scaling": 3,
        },
    },
    "gemma2": {
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "own head, biases": {"tie_word_embeddings": False, "attention_bias": True},
        "small caps": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5},
        "window in all": {"sliding_window": 8, "layer_types": None},
    },
    "gemma3_text": {
        "cap, own head": {"final_logit_softcapping": 0.5, "tie_word_embeddings": False},
        "stretched": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "window in all": {"sliding_window": 8, "layer_types": None},
        "no window": {"sliding_window": None, "layer_types": None},
    },
    "bert": {},
    "gpt2": {
        "own head, narrow": {"tie_word_embeddings": False, "intermediate_size": 96},
        "as GPT-1's": {"hidden_act": "gelu"},
    },
}
"""Of each family what its models differ in, beside the plain one."""


def cases(model_type: str) -> dict[str, ModelShape]:
    """Every variant of a family by name; a family that has no line above has no case."""
    plain = small_shape(model_type)
    varied = {name: replace(plain, **more) for name, more in VARIANTS[model_type].items()}
    return {"plain": plain, **varied}


def theirs(shape: ModelShape) -> Any:
    """transformers' own model in fp32; biases and norms are moved from zero and one, too."""
    kind = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    torch.manual_seed(0)
    model = kind.from_config(hf_config(shape), attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.05 * torch.randn_like(param)
    return model


def loaded(shape: ModelShape, folder: Path) -> PreTrainedModel:
    """Our model with the weights of a folder."""
    model = build_on_meta(shape)
    materialize(model, torch.device("cpu"))
    fill_weights(model, folder=folder, seed=0)
    return model


def our_logits(shape: ModelShape, folder: Path) -> Tensor:
    """Logits of our own pass through a model that is loaded from a folder; (B, L, V)."""
    with torch.no_grad():
        return logits_of(loaded(shape, folder), shape)


def logits_of(model: PreTrainedModel, shape: ModelShape) -> Tensor:
    """Logits of our own pass through our model; (B, L, V)."""
    run = ForwardPass(
        model,
        family_of(shape.model_type),
        keys=SampleKeys(),
        attention=lambda *_: SampleAttention(None, is_causal=shape.is_causal),
        logit_softcap=shape.final_logit_softcapping,
        embedding_multiplier=shape.embedding_multiplier,
        logits_scaling=shape.logits_scaling,
        block_types=shape.block_types,
    )
    positions_BL = torch.arange(TOKENS_BL.shape[1]).expand(len(TOKENS_BL), -1)
    logits: Tensor = run(TOKENS_BL, positions_BL, torch.arange(len(TOKENS_BL)))
    return logits
