"""Gemma 2: windows in every second block, soft caps, a norm before and after each half of a block.

Source: Riviere et al. 2024, arXiv:2408.00118, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import FULL, SLIDING, decoder_fields
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, ModuleSpec, Preset, hidden
from shardyard.families.llama import ATTENTION, INPUT_NORM, LLAMA, MLP, MLP_NORM

_ACTIVATION = "gelu_pytorch_tanh"


def _types(layers: int) -> list[str]:
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def _shape(
    width: int, inner: int, layers: int, queries: int, keys: int, head: int,
    *, scalar: float, vocab: int = 256000, context: int = 8192, window: int = 4096,
) -> ModelDimensions:  # fmt: skip
    return ModelDimensions(
        model_type="gemma2", vocab_size=vocab, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=keys,
        head_dim=head, max_position_embeddings=context, rms_norm_eps=1e-6,
        tie_word_embeddings=True, sliding_window=window, layer_types=tuple(_types(layers)),
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=scalar,
    )  # fmt: skip


_SOURCE = "Riviere et al. 2024, arXiv:2408.00118, table 1; config.json of google/{}"
_PRESETS = {
    "gemma2-tiny": Preset(
        shape=_shape(64, 172, 2, 4, 2, 24, scalar=32, vocab=0, context=256, window=16),
        source="ours: the smallest shape; for tests",
    ),
    "gemma2-2b": Preset(
        shape=_shape(2304, 9216, 26, 8, 4, 256, scalar=256), source=_SOURCE.format("gemma-2-2b")
    ),
    "gemma2-9b": Preset(
        shape=_shape(3584, 14336, 42, 16, 8, 256, scalar=256), source=_SOURCE.format("gemma-2-9b")
    ),
    "gemma2-27b": Preset(
        shape=_shape(4608, 36864, 46, 32, 16, 128, scalar=144),
        source=_SOURCE.format("gemma-2-27b"),
    ),
}


def _read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "hidden_act": config.get("hidden_activation", _ACTIVATION)}


def _alternating(config: Mapping[str, Any]) -> list[str]:
    return _types(config["num_hidden_layers"])


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return {
        "use_bidirectional_attention=true: only attention to earlier tokens is built": (
            bool(config.get("use_bidirectional_attention"))
        ),
    }


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    usual = [FULL if shape.sliding_window is None else SLIDING] * shape.num_hidden_layers
    return {
        **decoder_fields(shape),
        "head_dim": shape.head_width,
        "hidden_activation": _ACTIVATION,
        "sliding_window": shape.sliding_window,
        "layer_types": list(shape.layer_types or usual),
        "attn_logit_softcapping": shape.attn_logit_softcapping,
        "final_logit_softcapping": shape.final_logit_softcapping,
        "query_pre_attn_scalar": shape.query_pre_attn_scalar,
        "pad_token_id": None,  # its row of the table would be kept from learning
    }


GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    scales_embedding=True,
    block=(
        INPUT_NORM,
        *ATTENTION,
        MLP_NORM,
        ModuleSpec("pre_feedforward_layernorm", hidden),
        *MLP,
        ModuleSpec("post_feedforward_layernorm", hidden),
    ),
    initial_norm=0.0,  # (1 + weight) multiplies
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
        },
        read=_read,
        activation=_ACTIVATION,
        layer_types=_alternating,
        own=("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        refused=_unsupported,
        written=_fields,
    ),
    presets=_PRESETS,
)
