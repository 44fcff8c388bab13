"""Vision Transformer: Dosovitskiy et al., arXiv:2010.11929, without a pooler, as transformers."""

from collections.abc import Mapping
from typing import Any

from shardyard.families.images.network import (
    ImageKind,
    ImageNetwork,
    network_of,
    refuse_other_values,
)

MODEL_TYPE = "vit"


def _of_config(config: Mapping[str, Any], source: str) -> ImageNetwork:
    none = (0.0,)
    refuse_other_values(
        config,
        source,
        {"num_channels": (3,), "hidden_dropout_prob": none, "attention_probs_dropout_prob": none},
    )
    return network_of(MODEL_TYPE, config, source, size=config.get("image_size", 224))


_B16 = {
    "model_type": MODEL_TYPE,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-6,  # of the paper's own code; transformers' default is 1e-12
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}

VIT = ImageKind(
    model_type=MODEL_TYPE,
    weights="truncated_normal",
    presets={"vit-b16": _of_config(_B16, "a preset").with_classes(1000)},
    block_classes=("ViTLayer",),
    branches=("attention", "mlp"),
    of_config=_of_config,
)
