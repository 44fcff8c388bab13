"""GPT-NeoX and Pythia: attention and MLP side by side, biases, positions turn a part of a head.

Files have queries, keys and values of a head one below the other, and the heads below each other.
So a share of the rows is a share of the heads, and tp splits the matrix as it is.

Source: Black et al. 2022, arXiv:2204.06745, section 2; Biderman et al. 2023, arXiv:2304.01373.
"""

from collections.abc import Mapping
from typing import Any

from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import (
    ConfigJson,
    Family,
    LabelHead,
    ModuleSpec,
    Preset,
    always,
    has_attention_bias,
    heads,
    hidden,
    inner,
    vocabulary,
)


def _queries_keys_values(shape: ModelDimensions) -> int:
    return 3 * shape.queries_width


def _shape(
    vocab: int, width: int, layers: int, queries: int, *, act: str | None
) -> ModelDimensions:
    return ModelDimensions(
        model_type="gpt_neox", vocab_size=vocab, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=queries,
        max_position_embeddings=2048, attention_bias=True, partial_rotary_factor=0.25,
        use_parallel_residual=True, hidden_act=act,
    )  # fmt: skip


_PYTHIA = "Biderman et al. 2023, arXiv:2304.01373, table 1; config.json of EleutherAI/{}"
_PRESETS = {
    "gpt-neox-tiny": Preset(
        shape=_shape(0, 64, 2, 4, act=None), source="ours: the smallest shape; for tests"
    ),
    "pythia-160m": Preset(
        shape=_shape(50304, 768, 12, 12, act=None), source=_PYTHIA.format("pythia-160m")
    ),
    "pythia-1.4b": Preset(
        shape=_shape(50304, 2048, 24, 16, act=None), source=_PYTHIA.format("pythia-1.4b")
    ),
    "pythia-6.9b": Preset(
        shape=_shape(50432, 4096, 32, 32, act=None), source=_PYTHIA.format("pythia-6.9b")
    ),
    "gpt-neox-20b": Preset(
        shape=_shape(50432, 6144, 44, 64, act="gelu_fast"),
        source="Black et al. 2022, arXiv:2204.06745, section 2.1; config.json of "
        "EleutherAI/gpt-neox-20b",
    ),
}


def _read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    theta, share = config.get("rotary_emb_base", 10000.0), config.get("rotary_pct", 0.25)
    return {**config, "rope_theta": theta, "partial_rotary_factor": share}


def _written(shape: ModelDimensions) -> dict[str, Any]:
    scaling = shape.rope_scaling or {"rope_type": "default"}
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": shape.attention_bias,
        "hidden_act": shape.hidden_act or "gelu",
        "use_parallel_residual": shape.use_parallel_residual,
        "rope_parameters": {
            **scaling,
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
        },
        "hidden_dropout": 0.0,  # ours is model.dropout
        "attention_dropout": 0.0,
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    is_one_graph=True,
    is_gated=False,
    embedding=ModuleSpec("gpt_neox.embed_in", vocabulary, hidden, split="rows"),
    block=(
        ModuleSpec("input_layernorm", hidden, bias=always),
        ModuleSpec(
            "attention.query_key_value",
            _queries_keys_values,
            hidden,
            bias=has_attention_bias,
            split="rows",
        ),
        ModuleSpec("attention.dense", hidden, heads, bias=has_attention_bias, split="columns"),
        ModuleSpec("post_attention_layernorm", hidden, bias=always),
        ModuleSpec("mlp.dense_h_to_4h", inner, hidden, bias=always, split="rows"),
        ModuleSpec("mlp.dense_4h_to_h", hidden, inner, bias=always, split="columns"),
    ),
    norm=ModuleSpec("gpt_neox.final_layer_norm", hidden, bias=always),
    head=ModuleSpec("lm_head", vocabulary, hidden, split="rows", in_files="embed_out.weight"),
    label_head=LabelHead(of_tokens="classifier"),
    blocks="gpt_neox.layers",
    operators=("attention", "mlp", "mlp.act", "post_attention_dropout", "post_mlp_dropout"),
    rotary="gpt_neox.rotary_emb",
    dropped=("attention", "mlp"),
    gathered=("attention", "mlp"),
    other_names={"lm_head.weight": "embed_out.weight"},
    ignored_names={
        r"(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias": "they are the causal mask, which "
        "is computed",
    },
    config_json=ConfigJson(
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "sliding_window": None,
            "attention_bias": True,
            "use_parallel_residual": True,
            "hidden_dropout": 0.0,
        },
        read=_read,
        norm_eps="layer_norm_eps",
        activation="gelu",
        other_activations=("gelu_fast", "gelu_new"),
        partial_rotary=True,
        dropout="hidden_dropout",
        written=_written,
    ),
    presets=_PRESETS,
)
