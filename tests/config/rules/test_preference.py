"""Recipes for pairs of answers: settings that have no effect on them, and theirs in others."""

from typing import Any

import pytest

from shardyard.config.rules.check import check
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError


def _recipe(**sections: Any) -> Recipe:
    given: dict[str, Any] = {
        "model": {"preset": "llama-tiny"},
        "task": {"name": "preference"},
        "data": {"format": "preference_pairs", "seq_len": 256},
    }
    names = {*given, *sections}
    return Recipe.model_validate(
        {
            name: sections[name] if name == "phases" else
            {**given.get(name, {}), **sections.get(name, {})}
            for name in names
        }
    )  # fmt: skip


def test_pairs_train_with_their_own_settings() -> None:
    check(_recipe(task={"beta": 0.3, "loss_type": "ipo"}, data={"too_long": "cut"}))
    check(_recipe(task={"label_smoothing": 0.1}, run={"target": {"accuracy": 0.9}}))
    check(_recipe(data={"seq_len": "auto"}))
    check(_recipe(data={"keys": {"chosen": "good"}}, model={"lora": {"rank": 4}}))
    check(_recipe(data={"mixture": [{"name": "a", "source": "x", "weight": 1}]}))
    check(_recipe(task={"name": "reward", "center_rewards": 0.01}, data={"too_long": "cut"}))
    phases = [{"run": {"steps": 2}}, {"run": {"steps": 2}}]
    check(_recipe(task={"name": "reward"}, phases=phases))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"format": "chat"}}, "Use preference_pairs"),
        ({"data": {"pack": "whole"}}, "data.pack=whole has no effect on pairs"),
        ({"data": {"attend_across_documents": False}}, "has no effect on pairs"),
        (
            {"data": {"mixture": [{"name": "a", "source": "x", "weight": 1, "format": "chat"}]}},
            r"data.mixture\[0\].format=chat does not prepare .* Use preference_pairs, or leave",
        ),
        ({"data": {"keys": {"chosn": "x"}}}, r"data.keys=\{chosen: x\}"),
        ({"data": {"loss_on": "all"}}, "data.loss_on=all has no effect"),
        ({"memory": {"loss_chunk": 512}}, "memory.loss_chunk=512 has no effect"),
        ({"task": {"loss_type": "ipo", "label_smoothing": 0.1}}, "is of task.loss_type=sigmoid"),
        ({"run": {"target": {"perplexity": 3}}}, "not a metric of preference"),
        (
            {"task": {"name": "causal_lm", "beta": 0.3}, "data": {"format": "text"}},
            "Use task.name=preference, or leave it out",
        ),
        (
            {"task": {"name": "causal_lm", "loss_type": "orpo"}, "data": {"format": "text"}},
            "task.loss_type=orpo is of pairs",
        ),
        ({"task": {"center_rewards": 0.01}}, "Use task.name=reward, or leave it out"),
        ({"task": {"name": "reward", "beta": 0.3}}, "Use task.name=preference, or leave it out"),
        (
            {"task": {"name": "reward", "label_smoothing": 0.1}},
            "task.label_smoothing=0.1 has no effect on reward models. Leave it out",
        ),
        (
            {"task": {"name": "reward", "generate_tokens": 8}},
            "a model of task.name=reward does not continue text. Use 0",
        ),
        ({"task": {"name": "reward"}, "data": {"format": "chat"}}, "Use preference_pairs"),
        ({"task": {"name": "dpo"}}, "Use task.name=preference task.loss_type=sigmoid"),
        ({"task": {"name": "kto"}}, "is not built"),
        ({"precision": {"reduce": "exact"}}, "precision.reduce"),
        ({"model": {"module": "a:b", "preset": None}}, "known families"),
        (
            {"phases": [{"run": {"steps": 2}}, {"run": {"steps": 2}}]},
            "with run.from",
        ),
    ],
)  # fmt: skip
def test_what_pairs_do_not_read_is_rejected(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        check(_recipe(**sections))
