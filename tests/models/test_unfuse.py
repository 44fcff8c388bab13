"""Matrices that transformers fuses are taken apart, with the same weights."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from shardyard.errors import RequestError
from shardyard.families.family import Family
from shardyard.families.registry import FAMILIES, family_of
from shardyard.models.attention import NAME
from shardyard.models.unfuse import split_fused
from tests.families.random_models import TOKENS_BL, small_shape, theirs

FUSED = [name for name in FAMILIES if family_of(name).unfused]


@pytest.mark.parametrize("model_type", FUSED)
def test_a_model_that_is_taken_apart_computes_what_it_did(model_type: str) -> None:
    shape = small_shape(model_type)
    model = theirs(shape)
    first = next(iter(model.parameters()))
    last = family_block(model, shape.family)[-1]
    for param in last.parameters():
        param.requires_grad_(False)
    with torch.no_grad():
        expected_BLV = model(TOKENS_BL).logits
    apart = deepcopy(model)
    apart.set_attn_implementation(NAME)
    split_fused(apart, shape)
    with torch.no_grad():
        torch.testing.assert_close(apart(TOKENS_BL).logits, expected_BLV)
    assert sum(p.numel() for p in apart.parameters()) == sum(p.numel() for p in model.parameters())
    assert not any(p.requires_grad for p in family_block(apart, shape.family)[-1].parameters())
    assert first.requires_grad and next(iter(apart.parameters())).requires_grad


def family_block(model: Any, family: Family) -> Any:
    return model.get_submodule(family.blocks)


class Wrapper(torch.nn.Linear):
    """As of a package that adds something to a matrix."""


def test_what_somebody_put_into_a_fused_module_is_refused() -> None:
    shape = small_shape("phi3")
    model = theirs(shape)
    model.model.layers[1].mlp.gate_up_proj = Wrapper(64, 344, bias=False)
    with pytest.raises(
        RequestError,
        match=r"a Wrapper at model.layers.1.mlp.gate_up_proj, which transformers did not put "
        r"there.*Merge it into the weights first",
    ):
        split_fused(model, shape)
