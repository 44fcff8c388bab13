"""The model family `helium`: blocks as Llama's, by the names of transformers' own Helium."""

from dataclasses import replace
from typing import Any

from shardyard.families.config_json import decoder_fields
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, Preset
from shardyard.families.llama import LLAMA


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    return {
        **decoder_fields(shape),
        "head_dim": shape.head_width,
    }  # which Helium does not work out


HELIUM = replace(
    LLAMA,
    model_type="helium",
    config_json=ConfigJson(
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "sliding_window": None},
        written=_fields,
    ),
    presets={
        "helium-mini": Preset(
            shape=ModelDimensions(
                model_type="helium", vocab_size=0, hidden_size=32, intermediate_size=64,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=64,
            ),
            source="as small as can be",
        )
    },
)  # fmt: skip
