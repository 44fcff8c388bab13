"""Granite 3: a Llama whose embedding, scores, residual sums and logits have multipliers.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import decoder_fields
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, Preset
from shardyard.families.llama import LLAMA

_MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
)  # fmt: skip


def _shape(
    vocab: int, width: int, inner: int, layers: int, queries: int, keys: int,
    *, scores: float, logits: float, context: int = 4096,
) -> ModelDimensions:  # fmt: skip
    return ModelDimensions(
        model_type="granite", vocab_size=vocab, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=keys,
        max_position_embeddings=context, tie_word_embeddings=True, embedding_multiplier=12.0,
        attention_multiplier=scores, residual_multiplier=0.22, logits_scaling=logits,
    )  # fmt: skip


_PRESETS = {
    "granite-tiny": Preset(
        shape=_shape(0, 64, 172, 2, 4, 2, scores=0.0625, logits=6.0, context=256),
        source="ours: the smallest shape; for tests",
    ),
}


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return {
        f"{key}={config[key]!r}: not a positive number": not _is_positive(config[key])
        for key in _MULTIPLIERS
    }


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    # The row of the padding would be kept from learning.
    fields = {**decoder_fields(shape), "pad_token_id": None}
    if shape.head_dim is None:  # transformers asks whether there is one
        del fields["head_dim"]
    given = {key: getattr(shape, key) for key in _MULTIPLIERS}
    usual = {**dict.fromkeys(_MULTIPLIERS, 1.0), "attention_multiplier": shape.head_width**-0.5}
    return {
        **fields,
        **{key: usual[key] if value is None else value for key, value in given.items()},
    }


GRANITE = replace(
    LLAMA,
    model_type="granite",
    labels=(),
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "sliding_window": None,
            **dict.fromkeys(_MULTIPLIERS, 1.0),
        },
        own=_MULTIPLIERS,
        refused=_unsupported,
        written=_fields,
    ),
    presets=_PRESETS,
)
