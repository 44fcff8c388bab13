"""Phi-3 with short context, and Phi-4: a Llama whose files fuse q, k and v, and gate and up.

Source: Abdin et al. 2024, arXiv:2404.14219, section 2; Phi-4: arXiv:2412.08905, section 3.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardyard.families.config_json import decoder_fields, without_attention_bias
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, Fused, Preset
from shardyard.families.llama import ATTENTION, INPUT_NORM, LLAMA, MLP, MLP_NORM

_QKV = Fused("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
_GATE_UP = Fused("mlp.gate_up_proj", ("gate_proj", "up_proj"))
*_INPUTS, _OUTPUT = ATTENTION
*_GATED, _DOWN = MLP

_PRESETS = {
    "phi3-mini-4k": Preset(
        shape=ModelDimensions(
            model_type="phi3", vocab_size=32064, hidden_size=3072, intermediate_size=8192,
            num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
            max_position_embeddings=4096, sliding_window=2047,
        ),
        source="config.json of microsoft/Phi-3-mini-4k-instruct; arXiv:2404.14219, section 2",
    ),
    "phi3-medium-4k": Preset(
        shape=ModelDimensions(
            model_type="phi3", vocab_size=32064, hidden_size=5120, intermediate_size=17920,
            num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10,
            max_position_embeddings=4096, sliding_window=2047,
        ),
        source="config.json of microsoft/Phi-3-medium-4k-instruct; arXiv:2404.14219, section 2",
    ),
    "phi4": Preset(
        shape=ModelDimensions(
            model_type="phi3", vocab_size=100352, hidden_size=5120, intermediate_size=17920,
            num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10,
            max_position_embeddings=16384, rope_theta=250000.0,
        ),
        source="config.json of microsoft/phi-4",
    ),
}  # fmt: skip


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    drops = {key: config.get(key) for key in ("resid_pdrop", "embd_pdrop") if config.get(key)}
    return {
        **without_attention_bias(config, "phi3"),
        f"rope_type={kind!r}: of Phi-3 the models of short context are built; longrope turns by "
        "the length of the sample": kind != "default",
        f"{drops}: set them to 0 and say with model.dropout what is dropped": bool(drops),
    }


def _fields(shape: ModelDimensions) -> dict[str, Any]:
    fields = {**decoder_fields(shape), "sliding_window": shape.sliding_window}
    del fields["attention_bias"]
    if shape.head_dim is None:  # transformers asks whether there is one
        del fields["head_dim"]
    return {**fields, "pad_token_id": None}  # its row of the table would be kept from learning


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    block=(
        INPUT_NORM,
        *(replace(row, bias=None, fused=_QKV) for row in _INPUTS),
        replace(_OUTPUT, bias=None),
        MLP_NORM,
        *(replace(row, fused=_GATE_UP) for row in _GATED),
        _DOWN,
    ),
    operators=("self_attn", "mlp", "mlp.act_fn", "resid_attn_dropout", "resid_mlp_dropout"),
    unfused={"self_attn": "attention", "mlp": "gated_mlp"},
    config_json=ConfigJson(
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        refused=_unsupported,
        written=_fields,
    ),
    presets=_PRESETS,
)
