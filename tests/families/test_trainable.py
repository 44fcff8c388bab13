"""Names of what is frozen: which they mean, and what is said of one that means nothing."""

from dataclasses import replace

import pytest
import torch

from shardyard.errors import Problem, RecipeError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.families.trainable import frozen_pattern_errors, is_frozen, parameters_of
from shardyard.models.build import build_on_meta, freeze
from shardyard.planner.trainable_parameters import trainable_after_freezing

TINY = ["llama-tiny", "llama-pocket", "mixtral-tiny", "qwen3-moe-tiny"]


def _shape(preset: str) -> ModelShape:
    return replace(PRESETS[preset].shape, vocab_size=512)


def _problems(*patterns: str, preset: str = "llama-tiny") -> list[Problem]:
    return frozen_pattern_errors(patterns, parameters_of(_shape(preset)))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.embed_tokens", "model.embed_tokens.weight", True),
        ("model.embed*", "model.embed_tokens.weight", True),
        ("embed*", "model.embed_tokens.weight", False),
        ("model.layers.[0-7]", "model.layers.3.mlp.up_proj.weight", True),
        ("model.layers.[0-7]", "model.layers.13.mlp.up_proj.weight", False),
        ("model.layers.1", "model.layers.13.mlp.up_proj.weight", False),
        ("model.layers.*.mlp", "model.layers.13.mlp.up_proj.weight", True),
        ("model.layers.*.mlp", "model.layers.13.self_attn.q_proj.weight", False),
        ("*.*.*.*.*.bias", "model.layers.0.self_attn.q_proj.bias", True),
        ("model", "lm_head.weight", False),
        ("lm_head.weight.more", "lm_head.weight", False),
    ],
)
def test_a_name_means_what_is_inside_of_it(pattern: str, name: str, expected: bool) -> None:
    assert is_frozen(name, [pattern]) is expected


def test_a_name_of_nothing_is_told_with_the_nearest() -> None:
    (found,) = _problems("model.embed_token", "model.norm")
    assert found.path == "model.frozen"
    assert "='model.embed_token' names no module or parameter" in str(found)
    assert "Did you mean model.embed_tokens?" in str(found)
    assert "Did you mean model.layers?" in str(_problems("layers.0")[0])


def test_a_model_of_which_all_is_frozen_is_refused() -> None:
    (found,) = _problems("model", "lm_head")
    assert "freezes all of the model, so no parameter would be trained" in str(found)
    assert _problems("model") == []
    (tied,) = _problems("model", preset="llama-pocket")  # its head is the table
    assert "freezes all" in str(tied)


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize(
    "patterns",
    [
        ("model.embed_tokens",),
        ("model.layers.0", "lm_head"),
        ("model.layers.*.mlp",),
        ("model.layers.*.self_attn.*.weight", "model.norm"),
    ],
)
def test_the_plan_freezes_what_the_model_does(preset: str, patterns: tuple[str, ...]) -> None:
    shape = _shape(preset)
    model = build_on_meta(shape)
    freeze(model, patterns, storage_dtype=torch.bfloat16)
    params = list(model.parameters())
    trained = trainable_after_freezing(shape, patterns)
    assert trained is not None
    assert trained.parameters == sum(each.numel() for each in params if each.requires_grad)
    assert {(each.requires_grad, each.dtype) for each in params} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }
    assert parameters_of(shape).keys() == dict(model.named_parameters()).keys()


def test_a_model_of_ones_own_is_asked_for_its_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    with pytest.raises(RecipeError, match=r"='2' names no module or parameter.*Did you mean"):
        freeze(model, ["2"], storage_dtype=torch.float32)
    with pytest.raises(RecipeError, match="freezes all of the model"):
        freeze(model, ["*"], storage_dtype=torch.float32)
    model[1].bias.requires_grad_(False)  # its maker has frozen it
    freeze(model, ["0"], storage_dtype=torch.bfloat16)
    found = {name: (p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert found == {
        "0.weight": (False, torch.bfloat16),
        "0.bias": (False, torch.bfloat16),
        "1.weight": (True, torch.float32),
        "1.bias": (False, torch.bfloat16),
    }
