"""GPT-2 and others of its form (GPT-3, BLOOM, MPT, ...): planned, not trained.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3;
Brown et al. 2020, arXiv:2005.14165, section 2.1.
"""

from shardyard.families.family import (
    Family,
    Preset,
    Row,
    always,
    heads,
    hidden,
    inner,
    kv_heads,
    positions,
    vocabulary,
)
from shardyard.families.shape import ModelShape

GPT2 = Family(
    model_type="gpt2",
    is_gated=False,
    embedding=Row("transformer.wte", vocabulary, hidden, split="rows"),
    positions=Row("transformer.wpe", positions, hidden),
    block=(  # in GPT-2's files the first three are one matrix; others of its form have them apart
        Row("ln_1", hidden, bias=always),
        Row("attn.q", heads, hidden, bias=always, split="rows"),
        Row("attn.k", kv_heads, hidden, bias=always, split="rows"),
        Row("attn.v", kv_heads, hidden, bias=always, split="rows"),
        Row("attn.c_proj", hidden, heads, bias=always, split="columns"),
        Row("ln_2", hidden, bias=always),
        Row("mlp.c_fc", inner, hidden, bias=always, split="rows"),
        Row("mlp.c_proj", hidden, inner, bias=always, split="columns"),
    ),
    norm=Row("transformer.ln_f", hidden, bias=always),
    head=Row("lm_head", vocabulary, hidden, split="rows"),
    presets={
        "gpt3-175b": Preset(
            shape=ModelShape(
                model_type="gpt2", vocab_size=50257, hidden_size=12288, intermediate_size=49152,
                num_hidden_layers=96, num_attention_heads=96, num_key_value_heads=96,
                max_position_embeddings=2048, tie_word_embeddings=True,
            ),
            source="Brown et al. 2020, arXiv:2005.14165, table 2.1",
        ),
    },
)  # fmt: skip
