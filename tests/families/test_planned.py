"""Families that the planner knows and training does not, against transformers' own models."""

from dataclasses import replace

import pytest
import torch
import transformers

from shardyard.families.presets import PRESETS
from shardyard.families.registry import PLANNED, family_of, is_family
from shardyard.families.shape import ModelShape


def small(name: str) -> ModelShape:
    """A preset with the same kinds of matrices and few of each."""
    return replace(
        PRESETS[name].shape,
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=24, qk_rope_head_dim=8,
        v_head_dim=16, kv_lora_rank=32, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        q_lora_rank=48 if PRESETS[name].shape.q_lora_rank else None,
    )  # fmt: skip


def theirs(shape: ModelShape) -> torch.nn.Module:
    config = transformers.DeepseekV3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        q_lora_rank=shape.q_lora_rank, kv_lora_rank=shape.kv_lora_rank,
        qk_rope_head_dim=shape.qk_rope_head_dim, v_head_dim=shape.v_head_dim,
        qk_nope_head_dim=shape.head_width - (shape.qk_rope_head_dim or 0),
        n_routed_experts=shape.num_experts, num_experts_per_tok=shape.num_experts_per_tok,
        n_shared_experts=1, moe_intermediate_size=shape.moe_intermediate_size,
        first_k_dense_replace=0, n_group=1, topk_group=1, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: torch.nn.Module = transformers.DeepseekV3ForCausalLM(config)
    return model


@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight-16b-a3b"])
def test_parameters_are_those_of_transformers(name: str) -> None:
    shape = small(name)
    assert shape.parameters == sum(each.numel() for each in theirs(shape).parameters())


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # arXiv:2412.19437, abstract; the card of Moonlight-16B-A3B; arXiv:2507.20534, abstract
        ("deepseek-v3", 671, 37), ("moonlight-16b-a3b", 16, 3), ("kimi-k2", 1040, 32),
        ("deepseek-v2-lite", 16, 2.4),
    ],
)  # fmt: skip
def test_published_sizes(name: str, billions: float, active: float) -> None:
    shape = PRESETS[name].shape
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.05)  # dense blocks: see there
    assert shape.matmul_parameters / 1e9 == pytest.approx(active, rel=0.15)


def test_they_have_presets_and_are_no_families_of_training() -> None:
    for model_type in PLANNED:
        assert family_of(model_type).model_type == model_type and not is_family(model_type)
        assert all(PRESETS[name].shape.is_planned_only for name in family_of(model_type).presets)
    assert not PRESETS["qwen3-30b-a3b"].shape.is_planned_only


def test_other_shapes_are_written_without_sizes_of_latent_attention() -> None:
    assert not [key for key in PRESETS["llama2-7b"].shape.to_dict() if "lora" in key]
    again = ModelShape(**PRESETS["kimi-k2"].shape.to_dict())
    assert again == PRESETS["kimi-k2"].shape
