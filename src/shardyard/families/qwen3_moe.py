"""Qwen3 with experts in the place of each block's MLP.

Source: Yang et al. 2025, arXiv:2505.09388, section 2.
"""

from dataclasses import replace
from typing import Any

from shardyard.families.config_json import without_mixture_options
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, Preset
from shardyard.families.llama import INPUT_NORM, MLP_NORM
from shardyard.families.mixtral import MIXTRAL, expert_rows
from shardyard.families.qwen3 import NORMED_ATTENTION, fields_with_head

_EXPERTS = expert_rows(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)

_PRESETS = {
    "qwen3-moe-tiny": Preset(
        shape=ModelDimensions(
            model_type="qwen3_moe", vocab_size=0, hidden_size=64, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=256, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=48,
        ),
        source="ours: the smallest shape of its kind, with heads wider than hidden / heads; for "
        "tests",
    ),
    "qwen3-30b-a3b": Preset(
        shape=ModelDimensions(
            model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
            max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
        source="config.json of Qwen/Qwen3-30B-A3B; its sizes also in "
        "benchmarks/groundtruth/model_architectures.csv",
    ),
}  # fmt: skip


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    fields = fields_with_head(shape)
    window = shape.sliding_window
    return {
        **fields, "moe_intermediate_size": shape.expert_width, "norm_topk_prob": True,
        "sliding_window": window, "use_sliding_window": window is not None,
    }  # fmt: skip


QWEN3_MOE = replace(
    MIXTRAL,
    model_type="qwen3_moe",
    block=(INPUT_NORM, *NORMED_ATTENTION, MLP_NORM, *_EXPERTS),
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        window_switch="use_sliding_window",
        refused=without_mixture_options,
        written=_fields,
    ),
    presets=_PRESETS,
)
