"""Qwen2 and Qwen2.5: a Llama whose queries, keys and values have biases.

Source: Yang et al. 2024, arXiv:2407.10671, section 2.2.1; Qwen2.5: arXiv:2412.15115, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import (
    decoder_fields,
    windows_by_number,
    windows_from_block,
    without_attention_bias,
)
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, Preset, always
from shardyard.families.llama import ATTENTION, INPUT_NORM, LLAMA, MLP, MLP_NORM

*_INPUTS, _OUTPUT = ATTENTION
_BIASED = (*(replace(row, bias=always) for row in _INPUTS), replace(_OUTPUT, bias=None))

_PRESETS = {
    "qwen2.5-0.5b": Preset(
        shape=ModelDimensions(
            model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864,
            num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
            max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6,
            tie_word_embeddings=True,
        ),
        source="config.json of Qwen/Qwen2.5-0.5B; arXiv:2412.15115, table 1",
    ),
    "qwen2.5-7b": Preset(
        shape=ModelDimensions(
            model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944,
            num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
            max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1e6,
        ),
        source="config.json of Qwen/Qwen2.5-7B; its sizes also in "
        "benchmarks/groundtruth/model_architectures.csv",
    ),
}  # fmt: skip


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return without_attention_bias(config, "qwen2")


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    windows = windows_by_number(shape)
    fields = {**decoder_fields(shape), **windows, "head_dim": shape.head_width}
    del fields["attention_bias"]  # its biases are no choice
    return fields


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    block=(INPUT_NORM, *_BIASED, MLP_NORM, *MLP),
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
        },
        window_switch="use_sliding_window",
        layer_types=windows_from_block,
        refused=_unsupported,
        written=_fields,
    ),
    presets=_PRESETS,
)
