"""Every family against transformers: config.json out and in, weights, logits, count."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardyard.config.model_source import read_shape
from shardyard.config.schema import Model
from shardyard.families.config_json import shape_of_config
from shardyard.families.registry import trained_types
from shardyard.families.shape import ModelShape
from tests.families.random_models import TOKENS_BL, our_logits, small_shape, theirs

pytestmark = pytest.mark.heavy

SHAPES = {
    f"{name}{', tied' * tied}": replace(small_shape(name), tie_word_embeddings=tied)
    for name in trained_types()
    for tied in (False, True)
    if tied or small_shape(name).is_causal
}
HEAD_OF_BERT = 64**2 + 3 * 64 + 300
"""Dense layer, norm and bias, which are not counted."""


def sizes(shape: ModelShape) -> dict[str, Any]:
    """Widths in the place of the settings that they follow from."""
    widths = {"head_dim": shape.head_width, "moe_intermediate_size": shape.expert_width}
    return {**shape.to_dict(), **widths}


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_of_transformers_is_the_same_model_here(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    model = theirs(shape)
    model.save_pretrained(tmp_path, max_shard_size="100KB")  # several files and an index
    read = read_shape(Model(path=str(tmp_path)), tmp_path, 0)
    assert sizes(read) == sizes(shape)
    real = sum(param.numel() for param in model.parameters())
    assert real - (0 if shape.is_causal else HEAD_OF_BERT) == shape.parameters
    with torch.no_grad():
        expected_BLV = model(input_ids=TOKENS_BL).logits
    torch.testing.assert_close(our_logits(read, tmp_path), expected_BLV)


LEFT_OUT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 300,
}  # fmt: skip
SAME = ("max_position_embeddings", "tie_word_embeddings", "num_experts", "num_experts_per_tok")


@pytest.mark.parametrize("switch", [None, False, True])
@pytest.mark.parametrize("model_type", trained_types())
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(
    model_type: str, switch: bool | None
) -> None:
    """Without what the two do apart: dropout of BERT, and weights of experts that add up to 1."""
    config = {"model_type": model_type, **LEFT_OUT, "norm_topk_prob": True}
    if switch is not None:
        config["use_sliding_window"] = switch
    shape = shape_of_config(config, "config.json", is_random=False, says_dropout=True)
    theirs = AutoConfig.for_model(**config)
    assert {name: getattr(shape, name) for name in SAME} == {
        name: getattr(theirs, name, getattr(shape, name)) for name in SAME
    }
    heads = getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
    assert shape.num_key_value_heads == heads
    assert shape.head_width == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert shape.sliding_window == getattr(theirs, "sliding_window", None)
    rope = getattr(theirs, "rope_parameters", {"rope_theta": shape.rope_theta})
    assert shape.rope_theta == rope["rope_theta"]
    eps = {getattr(theirs, name, shape.rms_norm_eps) for name in ("rms_norm_eps", "layer_norm_eps")}
    assert eps == {shape.rms_norm_eps}
    width = theirs.intermediate_size if model_type == "mixtral" else None
    assert shape.expert_width == (width or getattr(theirs, "moe_intermediate_size", 96))
    assert shape.family.initial_std == theirs.initializer_range
