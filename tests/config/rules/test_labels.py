"""Recipes for labels: settings that have no effect on them, and labels in other recipes."""

from typing import Any

import pytest

from shardyard.config.rules.check import check
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError


def _recipe(**sections: dict[str, Any]) -> Recipe:
    given = {"model": {"preset": "bert-tiny"}, "task": {"name": "sequence_classification"}}
    names = {*given, *sections}
    return Recipe.model_validate(
        {name: {**given.get(name, {}), **sections.get(name, {})} for name in names}
    )


def test_either_kind_of_model_has_labels() -> None:
    check(_recipe(data={"keys": {"label": "stars"}, "too_long": "cut"}))
    check(_recipe(model={"preset": "llama-tiny"}, run={"target": {"matthews": 0.5}}))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"pack": "whole", "seq_len": 8}}, "data.pack=whole has no effect"),
        ({"data": {"keys": {"lable": "x"}}}, r"data.keys=\{label: x\}"),
        ({"data": {"labels": ["a", "a"]}}, "names a label twice"),
        ({"model": {"lora": {"rank": 4}}}, "leave model.lora out"),
        ({"run": {"target": {"perplexity": 3}}}, "not a metric of sequence_classification"),
        (
            {"data": {"labels": ["a", "b"]}, "task": {"problem_type": "regression"}},
            "names classes",
        ),
        (
            {"task": {"name": "token_classification", "problem_type": "regression"}},
            "each token has a class",
        ),
        (
            {"task": {"name": "token_classification"}, "data": {"text_key": "body"}},
            "data.keys={tokens: COLUMN}",
        ),
        (
            {"task": {"name": "masked_lm"}, "data": {"labels": ["a", "b"]}},
            "Use task.name=sequence_classification or token_classification",
        ),
    ],
)
def test_what_labels_do_not_read_is_rejected(
    sections: dict[str, dict[str, Any]], says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        check(_recipe(**sections))
