"""Resolved recipes for the planner's tests: nothing is looked up, nothing is left to ``auto``."""

from typing import Any

from shardyard.config.schema.recipe import Recipe
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape


def resolved_recipe(**sections: dict[str, Any]) -> Recipe:
    """A recipe whose every ``auto`` that the planner reads has a value; sections override."""
    given: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama2-7b", "dropout": 0.0},
        "data": {"seq_len": 4096},
        "optim": {"global_batch": 1024, "micro_batch": 1},
        "precision": {"compute": "bf16", "output": "bf16"},
        "cluster": {"device": "cuda", "devices": 8},
    }
    for name, settings in sections.items():
        given[name] = {**given.get(name, {}), **settings}
    return Recipe.model_validate(given)


def shape_of(preset: str) -> ModelShape:
    return PRESETS[preset].shape
