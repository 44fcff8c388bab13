"""Llama (1 to 3.3) and Mistral; the parts that most decoders after them share.

Sources: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Grattafiori et al. 2024,
arXiv:2407.21783; Jiang et al. 2023, arXiv:2310.06825.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import decoder_fields, without_attention_bias
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import (
    ConfigJson,
    Family,
    ModuleSpec,
    Preset,
    has_attention_bias,
    heads,
    hidden,
    inner,
    kv_heads,
    vocabulary,
)

INPUT_NORM, MLP_NORM = (
    ModuleSpec("input_layernorm", hidden),
    ModuleSpec("post_attention_layernorm", hidden),
)
ATTENTION = (
    ModuleSpec("self_attn.q_proj", heads, hidden, bias=has_attention_bias, split="rows"),
    ModuleSpec("self_attn.k_proj", kv_heads, hidden, bias=has_attention_bias, split="rows"),
    ModuleSpec("self_attn.v_proj", kv_heads, hidden, bias=has_attention_bias, split="rows"),
    ModuleSpec("self_attn.o_proj", hidden, heads, bias=has_attention_bias, split="columns"),
)
MLP = (
    ModuleSpec("mlp.gate_proj", inner, hidden, split="rows"),
    ModuleSpec("mlp.up_proj", inner, hidden, split="rows"),
    ModuleSpec("mlp.down_proj", hidden, inner, split="columns"),
)


def _shape(
    vocab: int,
    width: int,
    inner_width: int,
    layers: int,
    queries: int,
    keys: int,
    context: int,
    *,
    theta: float = 10000.0,
    eps: float = 1e-5,
    tied: bool = False,
    positions_stretched: float = 0,
) -> ModelDimensions:
    """A Llama; ``positions_stretched``: the factor of its scaled rotary positions (3.1 and 3.2)."""
    scaling = {"factor": positions_stretched, **_LLAMA31_ROPE} if positions_stretched else None
    return ModelDimensions(
        model_type="llama", vocab_size=vocab, hidden_size=width, intermediate_size=inner_width,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=keys,
        max_position_embeddings=context, rms_norm_eps=eps, rope_theta=theta,
        tie_word_embeddings=tied, rope_scaling=scaling,
    )  # fmt: skip


def _llama31_70b() -> ModelDimensions:
    """Return the shape of 3.1 and 3.3, which is the same model trained further."""
    return _shape(128256, 8192, 28672, 80, 64, 8, 131072, theta=500000.0, positions_stretched=8.0)


_LLAMA31_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA1 = "Touvron et al. 2023, arXiv:2302.13971, table 2; config.json of "
_LLAMA2 = "Touvron et al. 2023, arXiv:2307.09288, table 1; config.json of meta-llama/Llama-2-{}-hf"
_LLAMA3 = "Grattafiori et al. 2024, arXiv:2407.21783, table 3; config.json of meta-llama/{}"

_PRESETS = {
    "llama-tiny": Preset(
        shape=_shape(0, 64, 172, 2, 4, 2, 256),
        source="ours: the smallest shape with grouped KV heads; for tests",
    ),
    "llama-laptop": Preset(
        shape=_shape(0, 192, 512, 4, 6, 2, 512, tied=True),
        source="ours: learns Python text on two CPU cores in about two minutes",
    ),
    "llama-pocket": Preset(
        shape=_shape(0, 128, 384, 4, 4, 2, 512, tied=True),
        source="ours: learns most of Python text that two CPU cores can teach in two minutes",
    ),
    "llama-tiny-deep": Preset(
        shape=_shape(0, 32, 88, 8, 4, 2, 256),
        source="ours: enough blocks for a pipeline of up to eight stages; for tests",
    ),
    "llama-1b": Preset(
        shape=_shape(32000, 2048, 5504, 24, 16, 16, 4096),
        source="ours: the 1.3 B shape of GPT-3 XL (Brown et al. 2020, arXiv:2005.14165, table 2.1) "
        "with a SwiGLU MLP of equal size",
    ),
    "llama1-7b": Preset(
        shape=_shape(32000, 4096, 11008, 32, 32, 32, 2048, eps=1e-6),
        source=f"{_LLAMA1}huggyllama/llama-7b",
    ),
    "llama1-13b": Preset(
        shape=_shape(32000, 5120, 13824, 40, 40, 40, 2048, eps=1e-6),
        source=f"{_LLAMA1}huggyllama/llama-13b",
    ),
    "llama1-33b": Preset(
        shape=_shape(32000, 6656, 17920, 60, 52, 52, 2048, eps=1e-6),
        source=f"{_LLAMA1}huggyllama/llama-30b",
    ),
    "llama1-65b": Preset(
        shape=_shape(32000, 8192, 22016, 80, 64, 64, 2048),
        source=f"{_LLAMA1}huggyllama/llama-65b",
    ),
    "llama2-7b": Preset(
        shape=_shape(32000, 4096, 11008, 32, 32, 32, 4096), source=_LLAMA2.format("7b")
    ),
    "llama2-13b": Preset(
        shape=_shape(32000, 5120, 13824, 40, 40, 40, 4096), source=_LLAMA2.format("13b")
    ),
    "llama2-70b": Preset(
        shape=_shape(32000, 8192, 28672, 80, 64, 8, 4096), source=_LLAMA2.format("70b")
    ),
    "llama3-8b": Preset(
        shape=_shape(128256, 4096, 14336, 32, 32, 8, 8192, theta=500000.0),
        source=_LLAMA3.format("Meta-Llama-3-8B"),
    ),
    "llama3-70b": Preset(
        shape=_shape(128256, 8192, 28672, 80, 64, 8, 8192, theta=500000.0),
        source=_LLAMA3.format("Meta-Llama-3-70B"),
    ),
    "llama3.1-8b": Preset(
        shape=_shape(
            128256, 4096, 14336, 32, 32, 8, 131072, theta=500000.0, positions_stretched=8.0
        ),
        source=_LLAMA3.format("Llama-3.1-8B"),
    ),
    "llama3.1-70b": Preset(shape=_llama31_70b(), source=_LLAMA3.format("Llama-3.1-70B")),
    "llama3.1-405b": Preset(
        shape=_shape(
            128256, 16384, 53248, 126, 128, 8, 131072, theta=500000.0, positions_stretched=8.0
        ),
        source=_LLAMA3.format("Llama-3.1-405B"),
    ),
    "llama3.2-1b": Preset(
        shape=_shape(
            128256, 2048, 8192, 16, 32, 8, 131072,
            theta=500000.0, tied=True, positions_stretched=32.0,
        ),
        source="config.json of meta-llama/Llama-3.2-1B; its sizes also in "
        "benchmarks/groundtruth/model_architectures.csv",
    ),
    "llama3.2-3b": Preset(
        shape=_shape(
            128256, 3072, 8192, 28, 24, 8, 131072,
            theta=500000.0, tied=True, positions_stretched=32.0,
        ),
        source="config.json of meta-llama/Llama-3.2-3B",
    ),
    "llama3.3-70b": Preset(
        shape=_llama31_70b(), source="config.json of meta-llama/Llama-3.3-70B-Instruct"
    ),
}  # fmt: skip


LLAMA = Family(
    model_type="llama",
    embedding=ModuleSpec("model.embed_tokens", vocabulary, hidden, split="rows"),
    block=(INPUT_NORM, *ATTENTION, MLP_NORM, *MLP),
    norm=ModuleSpec("model.norm", hidden),
    head=ModuleSpec("lm_head", vocabulary, hidden, split="rows"),
    blocks="model.layers",
    operators=("self_attn", "mlp", "mlp.act_fn"),
    rotary="model.rotary_emb",
    dropped=("self_attn", "mlp"),
    gathered=("self_attn", "mlp"),
    is_one_graph=True,
    config_json=ConfigJson(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "sliding_window": None},
        written=decoder_fields,
    ),
    presets=_PRESETS,
)


def _mistral_unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return without_attention_bias(config, "mistral")


def _mistral_fields(shape: ModelDimensions) -> dict[str, Any]:
    return {**decoder_fields(shape), "sliding_window": shape.sliding_window}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
        },
        refused=_mistral_unsupported,
        written=_mistral_fields,
    ),
    presets={},
)
