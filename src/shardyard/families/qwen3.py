"""Qwen3, dense: a Llama whose queries and keys are normed head by head.

Source: Yang et al. 2025, arXiv:2505.09388, section 2.
"""

from dataclasses import replace
from typing import Any

from shardyard.families.config_json import decoder_fields, windows_by_number, windows_from_block
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, ModuleSpec, Preset, head
from shardyard.families.llama import ATTENTION, INPUT_NORM, LLAMA, MLP, MLP_NORM

*_PROJECTIONS, _OUTPUT = ATTENTION
NORMED_ATTENTION = (
    *_PROJECTIONS,
    ModuleSpec("self_attn.q_norm", head),
    ModuleSpec("self_attn.k_norm", head),
    _OUTPUT,
)

_PRESETS = {
    "qwen3-8b": Preset(
        shape=ModelDimensions(
            model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288,
            num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
        ),
        source="config.json of Qwen/Qwen3-8B; its sizes also in "
        "benchmarks/groundtruth/model_architectures.csv",
    ),
}  # fmt: skip


def fields_with_head(shape: ModelDimensions) -> dict[str, Any]:
    """With the width of a head, which is a constant to transformers where it is left out."""
    return {**decoder_fields(shape), "head_dim": shape.head_width}


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    return {**fields_with_head(shape), **windows_by_number(shape)}


QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    block=(INPUT_NORM, *NORMED_ATTENTION, MLP_NORM, *MLP),
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        window_switch="use_sliding_window",
        layer_types=windows_from_block,
        written=_fields,
    ),
    presets=_PRESETS,
)
