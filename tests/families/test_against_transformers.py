"""Every family against transformers: config.json out and in, weights, logits, count."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.config.model_source import read_shape
from shardyard.config.schema import Model
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
