"""Mixtral: a Mistral with experts in the place of each block's MLP.

Source: Jiang et al. 2024, arXiv:2401.04088, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import (
    decoder_fields,
    without_attention_bias,
    without_mixture_options,
)
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import (
    ConfigJson,
    ModuleSpec,
    Preset,
    expert_inner,
    experts,
    hidden,
    shared_inner,
)
from shardyard.families.llama import ATTENTION, INPUT_NORM, LLAMA, MLP_NORM

# a model here has no expert that every token visits; the planner counts those of other people's
SHARED_EXPERT = (
    ModuleSpec("mlp.shared_expert.gate_proj", shared_inner, hidden, split="rows", is_built=False),
    ModuleSpec("mlp.shared_expert.up_proj", shared_inner, hidden, split="rows", is_built=False),
    ModuleSpec(
        "mlp.shared_expert.down_proj", hidden, shared_inner, split="columns", is_built=False
    ),
)


def expert_rows(router: str, gate: str, up: str, down: str) -> tuple[ModuleSpec, ...]:
    """The rows of ``models/moe.py``, which has one tensor of all experts, by their file names."""
    return (
        ModuleSpec("mlp.router", experts, hidden, in_files=router),
        *SHARED_EXPERT,
        ModuleSpec(
            "mlp.experts", expert_inner, hidden,
            parameter="gate", split="rows", per_expert=True, in_files=gate,
        ),
        ModuleSpec(
            "mlp.experts", expert_inner, hidden,
            parameter="up", split="rows", per_expert=True, in_files=up,
        ),
        ModuleSpec(
            "mlp.experts", hidden, expert_inner,
            parameter="down", split="columns", per_expert=True, in_files=down,
        ),
    )  # fmt: skip


_EXPERTS = expert_rows(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)

_PRESETS = {
    "mixtral-tiny": Preset(
        shape=ModelDimensions(
            model_type="mixtral", vocab_size=0, hidden_size=64, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, num_experts=8, num_experts_per_tok=2,
        ),
        source="ours: llama-tiny with eight experts, of which a token visits two; for tests",
    ),
    "mixtral-8x7b": Preset(
        shape=ModelDimensions(
            model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336,
            num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            max_position_embeddings=32768, rope_theta=1e6, num_experts=8, num_experts_per_tok=2,
        ),
        source="Jiang et al. 2024, arXiv:2401.04088, table 1; config.json of "
        "mistralai/Mixtral-8x7B-v0.1",
    ),
    "mixtral-8x22b": Preset(
        shape=ModelDimensions(
            model_type="mixtral", vocab_size=32768, hidden_size=6144, intermediate_size=16384,
            num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
            max_position_embeddings=65536, rope_theta=1e6, num_experts=8, num_experts_per_tok=2,
        ),
        source="config.json of mistralai/Mixtral-8x22B-Instruct-v0.1; its sizes also in "
        "benchmarks/groundtruth/model_architectures.csv",
    ),
}  # fmt: skip


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return {**without_attention_bias(config, "mixtral"), **without_mixture_options(config)}


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    fields = {**decoder_fields(shape), "intermediate_size": shape.expert_width}
    del fields["moe_intermediate_size"]
    return {**fields, "sliding_window": shape.sliding_window}


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    is_one_graph=False,  # its router tells its losses aside, which a compiler does not follow
    block=(INPUT_NORM, *ATTENTION, MLP_NORM, *_EXPERTS),
    operators=("self_attn", "mlp"),
    gathered=("self_attn",),  # parallel/expert.py gathers tokens before the experts
    sparse="mlp",
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        refused=_unsupported,
        written=_fields,
    ),
    presets=_PRESETS,
)
