"""OLMo 2: a Llama that norms what attention and MLP return, and all queries and keys of a token.

Source: Walsh et al. 2024, arXiv:2501.00656, section 2.
"""

from dataclasses import replace
from typing import Any

from shardyard.families.config_json import decoder_fields
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, ModuleSpec, Preset, heads, hidden, kv_heads
from shardyard.families.llama import ATTENTION, LLAMA, MLP, MLP_NORM

*_PROJECTIONS, _OUTPUT = ATTENTION


def _shape(
    vocab: int, width: int, inner: int, layers: int, queries: int, keys: int, *, context: int = 4096
) -> ModelDimensions:
    return ModelDimensions(
        model_type="olmo2", vocab_size=vocab, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=keys,
        max_position_embeddings=context, rms_norm_eps=1e-6, rope_theta=500000.0,
    )  # fmt: skip


_SOURCE = "Walsh et al. 2024, arXiv:2501.00656, section 2; config.json of allenai/{}"
_PRESETS = {
    "olmo2-tiny": Preset(
        shape=_shape(0, 64, 172, 2, 4, 2, context=256), source="ours: the smallest shape; for tests"
    ),
    "olmo2-7b": Preset(
        shape=_shape(100352, 4096, 11008, 32, 32, 32), source=_SOURCE.format("OLMo-2-1124-7B")
    ),
    "olmo2-13b": Preset(
        shape=_shape(100352, 5120, 13824, 40, 40, 40), source=_SOURCE.format("OLMo-2-1124-13B")
    ),
    "olmo2-32b": Preset(
        shape=_shape(100352, 5120, 27648, 64, 40, 8),
        source="config.json of allenai/OLMo-2-0325-32B",
    ),
}


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    # Its own are of another vocabulary, and the row of the padding would be kept from learning.
    fields = {**decoder_fields(shape), "eos_token_id": None, "pad_token_id": None}
    if shape.head_dim is None:  # transformers asks whether there is one
        del fields["head_dim"]
    return fields


OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    block=(
        *_PROJECTIONS,
        ModuleSpec("self_attn.q_norm", heads, split="rows"),
        ModuleSpec("self_attn.k_norm", kv_heads, split="rows"),
        _OUTPUT,
        MLP_NORM,
        *MLP,
        ModuleSpec("post_feedforward_layernorm", hidden),
    ),
    labels=("samples",),
    config_json=ConfigJson(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": None},
        written=_fields,
    ),
    presets=_PRESETS,
)
