"""GPT-2: learned positions, norms before attention and MLP, the head is the table of tokens.

The planner takes it for others of its form too (GPT-3, BLOOM, MPT, ...). Files have queries, keys
and values in one matrix, and every matrix of a block transposed.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3;
Brown et al. 2020, arXiv:2005.14165, section 2.1.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import (
    ConfigJson,
    Family,
    Fused,
    LabelHead,
    ModuleSpec,
    Preset,
    always,
    heads,
    hidden,
    inner,
    kv_heads,
    positions,
    vocabulary,
)

_Input = partial(ModuleSpec, bias=always, split="rows", is_transposed=True)
_Output = partial(ModuleSpec, bias=always, split="columns", is_transposed=True)
_QKV = Fused("attn.c_attn", ("q_proj", "k_proj", "v_proj"))


def _shape(width: int, layers: int, queries: int, *, vocab: int = 50257) -> ModelDimensions:
    return ModelDimensions(
        model_type="gpt2", vocab_size=vocab, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=queries, num_key_value_heads=queries,
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip


_SOURCE = "Radford et al. 2019, table 2; config.json of openai-community/{}"
_PRESETS = {
    "gpt2-tiny": Preset(
        shape=_shape(64, 2, 4, vocab=0), source="ours: the smallest shape; for tests"
    ),
    "gpt2": Preset(shape=_shape(768, 12, 12), source=_SOURCE.format("gpt2")),
    "gpt2-medium": Preset(shape=_shape(1024, 24, 16), source=_SOURCE.format("gpt2-medium")),
    "gpt2-large": Preset(shape=_shape(1280, 36, 20), source=_SOURCE.format("gpt2-large")),
    "gpt2-xl": Preset(shape=_shape(1600, 48, 25), source=_SOURCE.format("gpt2-xl")),
    "gpt3-175b": Preset(
        shape=ModelDimensions(
            model_type="gpt2", vocab_size=50257, hidden_size=12288, intermediate_size=49152,
            num_hidden_layers=96, num_attention_heads=96, num_key_value_heads=96,
            max_position_embeddings=2048, tie_word_embeddings=True,
        ),
        source="Brown et al. 2020, arXiv:2005.14165, table 2.1; every block sees the whole sample",
    ),
}  # fmt: skip

_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
"""GPT-2's words for what other families call otherwise."""


def _read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {ours: config[theirs] for theirs, ours in _NAMES.items() if config.get(theirs)}
    width = own.get("hidden_size", config.get("hidden_size"))
    inner_width = 4 * width if isinstance(width, int) else None
    return {**config, "intermediate_size": inner_width, **own}


def _unsupported(config: Mapping[str, Any]) -> Mapping[str, bool]:
    return {
        "scale_attn_weights=false: scores that are not divided by the root of the width of a head "
        "are not built": not config["scale_attn_weights"],
        "scale_attn_by_inverse_layer_idx=true: scores that are divided by the number of their "
        "block are not built": bool(config.get("scale_attn_by_inverse_layer_idx")),
    }


def _written(shape: ModelDimensions) -> dict[str, Any]:
    is_usual = shape.intermediate_size == 4 * shape.hidden_size
    return {
        "vocab_size": shape.vocab_size,
        "n_embd": shape.hidden_size,
        "n_layer": shape.num_hidden_layers,
        "n_head": shape.num_attention_heads,
        "n_positions": shape.max_position_embeddings,
        "n_inner": None if is_usual else shape.intermediate_size,
        "activation_function": shape.hidden_act or "gelu_new",
        "layer_norm_epsilon": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "bos_token_id": None,  # transformers would name the last token of GPT-2's own vocabulary
        "eos_token_id": None,
        "resid_pdrop": 0.0,  # ours is model.dropout
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


GPT2 = Family(
    model_type="gpt2",
    is_one_graph=True,
    is_gated=False,
    embedding=ModuleSpec("transformer.wte", vocabulary, hidden, split="rows"),
    positions=ModuleSpec("transformer.wpe", positions, hidden),
    embedding_end="transformer.drop",
    block=(
        ModuleSpec("ln_1", hidden, bias=always),
        _Input("attn.q_proj", heads, hidden, fused=_QKV),
        _Input("attn.k_proj", kv_heads, hidden, fused=_QKV),
        _Input("attn.v_proj", kv_heads, hidden, fused=_QKV),
        _Output("attn.c_proj", hidden, heads),
        ModuleSpec("ln_2", hidden, bias=always),
        _Input("mlp.c_fc", inner, hidden),
        _Output("mlp.c_proj", hidden, inner),
    ),
    norm=ModuleSpec("transformer.ln_f", hidden, bias=always),
    head=ModuleSpec("lm_head", vocabulary, hidden, split="rows"),
    label_head=LabelHead(of_tokens="classifier"),
    blocks="transformer.h",
    operators=("attn", "mlp", "mlp.act_fn"),
    dropped=("attn", "mlp"),
    gathered=("attn", "mlp"),
    unfused={"attn": "attention", "mlp": "mlp"},
    ignored_names={
        r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias": "they are the causal mask, which is "
        "computed",
    },
    config_json=ConfigJson(
        defaults={
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "layer_norm_epsilon": 1e-5,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
        },
        read=_read,
        norm_eps="layer_norm_epsilon",
        activation="gelu_new",
        other_activations=("gelu", "gelu_fast", "gelu_pytorch_tanh", "relu"),
        dropout="resid_pdrop",
        refused=_unsupported,
        written=_written,
    ),
    begins_smaller_by_depth=True,
    presets=_PRESETS,
)
