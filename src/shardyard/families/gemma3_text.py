"""Gemma 3 without images: Gemma 2 with normed queries and keys in place of soft caps, and other
angles in blocks with a window.

Source: Kamath et al. 2025, arXiv:2503.19786, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import FULL, SLIDING, decoder_fields
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, ModuleSpec, Preset, hidden
from shardyard.families.gemma2 import GEMMA2
from shardyard.families.llama import INPUT_NORM, MLP, MLP_NORM
from shardyard.families.qwen3 import NORMED_ATTENTION

_ACTIVATION = "gelu_pytorch_tanh"
_THETA, _LOCAL_THETA = 1e6, 1e4
_FLAT = "rope_parameters_are_flat"


def _types(layers: int, pattern: int = 6) -> list[str]:
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]


def _shape(
    width: int, inner: int, layers: int, queries: int, keys: int, head: int,
    *, vocab: int = 262144, context: int = 32768, window: int = 512, pattern: int = 6,
) -> ModelDimensions:  # fmt: skip
    return ModelDimensions(
        model_type="gemma3_text", vocab_size=vocab, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=keys,
        head_dim=head, max_position_embeddings=context, rms_norm_eps=1e-6, rope_theta=_THETA,
        rope_local_base_freq=_LOCAL_THETA, tie_word_embeddings=True, sliding_window=window,
        layer_types=tuple(_types(layers, pattern)), query_pre_attn_scalar=head,
    )  # fmt: skip


_PRESETS = {
    "gemma3-tiny": Preset(
        shape=_shape(64, 172, 2, 4, 2, 24, vocab=0, context=256, window=16, pattern=2),
        source="ours: the smallest shape; for tests",
    ),
}


def _read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the angles of blocks without a window where other families have all of theirs."""
    rope = config.get("rope_parameters") or {}
    full, local = (dict(rope.get(kind) or {}) for kind in (FULL, SLIDING))
    theta = config.get("rope_theta", _THETA)
    return {
        **config,
        "hidden_act": config.get("hidden_activation", _ACTIVATION),
        "rope_parameters": {"rope_theta": theta, **(config.get("rope_scaling") or {}), **full},
        "rope_local_base_freq": float(
            local.get("rope_theta", config.get("rope_local_base_freq", _LOCAL_THETA))
        ),
        "local_rope_type": local.get("rope_type", "default"),
        _FLAT: not rope.keys() <= {FULL, SLIDING},
    }


def _by_pattern(config: Mapping[str, Any]) -> list[str]:
    return _types(config["num_hidden_layers"], config.get("sliding_window_pattern", 6))


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return {
        "use_bidirectional_attention=true: only attention to earlier tokens is built": (
            bool(config.get("use_bidirectional_attention"))
        ),
        f"rope_type={config['local_rope_type']!r} in blocks with a window: only default is built": (
            config["local_rope_type"] != "default"
        ),
        f"rope_parameters without an entry for {FULL} and {SLIDING}: their angles differ": (
            config[_FLAT]
        ),
    }


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    fields = decoder_fields(shape)
    local = shape.rope_local_base_freq or _LOCAL_THETA
    return {
        **fields,
        "head_dim": shape.head_width,
        "hidden_activation": _ACTIVATION,
        "sliding_window": shape.sliding_window or 4096,  # transformers needs one without a use, too
        "layer_types": list(shape.block_types),
        "rope_parameters": {
            FULL: fields["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": shape.final_logit_softcapping,
        "query_pre_attn_scalar": shape.query_pre_attn_scalar or shape.head_width,
        "pad_token_id": None,  # its row of the table would be kept from learning
    }


GEMMA3_TEXT = replace(
    GEMMA2,
    model_type="gemma3_text",
    block=(
        INPUT_NORM,
        *NORMED_ATTENTION,
        MLP_NORM,
        ModuleSpec("pre_feedforward_layernorm", hidden),
        *MLP,
        ModuleSpec("post_feedforward_layernorm", hidden),
    ),
    rotary_by_type=True,
    labels=("samples",),
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 256,
        },
        read=_read,
        activation=_ACTIVATION,
        layer_types=_by_pattern,
        own=("final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"),
        refused=_unsupported,
        written=_fields,
    ),
    presets=_PRESETS,
)
