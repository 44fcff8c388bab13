"""DeepSeek V3 and what is built like it: latent attention, and experts beside a shared one.

The planner knows these models; training does not. Queries and keys with values are compressed to a
few hundred elements and expanded for all heads, as in training no cache is read. The first blocks,
which have one wide MLP instead of experts (three of 61), are counted like the others: it is as wide
as the experts that a token visits, so times are the same and 4 % too many parameters are counted.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1, and 2405.04434, section 2.1.
"""

from dataclasses import replace
from typing import Any

from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ModuleSpec, Preset, heads, hidden
from shardyard.families.llama import INPUT_NORM, MLP_NORM
from shardyard.families.mixtral import MIXTRAL, expert_rows


def _query_rank(shape: ModelDimensions) -> int:
    return shape.q_lora_rank or 0


def _latent(shape: ModelDimensions) -> int:
    return shape.kv_lora_rank or 0


def _latent_and_rotated(shape: ModelDimensions) -> int:
    return _latent(shape) + (shape.qk_rope_head_dim or 0)


def _keys_and_values(shape: ModelDimensions) -> int:
    """All heads' keys without the part that is turned by position, which they share; and values."""
    still = shape.head_width - (shape.qk_rope_head_dim or 0)
    return shape.num_attention_heads * (still + shape.value_width)


def _values(shape: ModelDimensions) -> int:
    return shape.num_attention_heads * shape.value_width


def _compresses_queries(shape: ModelDimensions) -> bool:
    return shape.q_lora_rank is not None


def _has_whole_queries(shape: ModelDimensions) -> bool:
    return shape.q_lora_rank is None


_ATTENTION = (
    ModuleSpec("self_attn.q_proj", heads, hidden, split="rows", only_if=_has_whole_queries),
    ModuleSpec("self_attn.q_a_proj", _query_rank, hidden, only_if=_compresses_queries),
    ModuleSpec("self_attn.kv_a_proj_with_mqa", _latent_and_rotated, hidden),
    ModuleSpec("self_attn.q_a_layernorm", _query_rank, only_if=_compresses_queries),
    ModuleSpec("self_attn.kv_a_layernorm", _latent),
    ModuleSpec("self_attn.q_b_proj", heads, _query_rank, split="rows", only_if=_compresses_queries),
    ModuleSpec("self_attn.kv_b_proj", _keys_and_values, _latent, split="rows"),
    ModuleSpec("self_attn.o_proj", hidden, _values, split="columns"),
)

_EXPERTS = expert_rows(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)


def _shape(*, shared: int, q_lora_rank: int | None = 1536, **sizes: Any) -> ModelDimensions:
    """Sizes that these models have in common: heads of 128 and 64 elements, values of 128."""
    return ModelDimensions(
        model_type="deepseek_v3", max_position_embeddings=4096, rms_norm_eps=1e-6,
        head_dim=192, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512,
        q_lora_rank=q_lora_rank, shared_expert_intermediate_size=shared,
        num_key_value_heads=sizes["num_attention_heads"], **sizes,
    )  # fmt: skip


_PRESETS = {
    "deepseek-v3": Preset(
        shape=_shape(
            vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
            num_attention_heads=128, num_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=2048, shared=2048,
        ),
        source="arXiv:2412.19437, section 4.2; config.json of deepseek-ai/DeepSeek-V3",
    ),
    "kimi-k2": Preset(
        shape=_shape(
            vocab_size=163840, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
            num_attention_heads=64, num_experts=384, num_experts_per_tok=8,
            moe_intermediate_size=2048, shared=2048,
        ),
        source="Kimi Team 2025, arXiv:2507.20534, table 2; config.json of moonshotai/Kimi-K2-Base",
    ),
    "moonlight-16b-a3b": Preset(
        shape=_shape(
            vocab_size=163840, hidden_size=2048, intermediate_size=11264, num_hidden_layers=27,
            num_attention_heads=16, num_experts=64, num_experts_per_tok=6,
            moe_intermediate_size=1408, shared=2816, q_lora_rank=None,
        ),
        source="config.json of moonshotai/Moonlight-16B-A3B",
    ),
    "deepseek-v2-lite": Preset(
        shape=_shape(
            vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
            num_attention_heads=16, num_experts=64, num_experts_per_tok=6,
            moe_intermediate_size=1408, shared=2816, q_lora_rank=None,
        ),
        source="arXiv:2405.04434, appendix B; config.json of deepseek-ai/DeepSeek-V2-Lite",
    ),
}  # fmt: skip

DEEPSEEK_V3 = replace(
    MIXTRAL,
    model_type="deepseek_v3",
    block=(INPUT_NORM, *_ATTENTION, MLP_NORM, *_EXPERTS),
    presets=_PRESETS,
)
