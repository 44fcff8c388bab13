"""What a recipe may say in data.eval_sets and eval_tasks, and where paths and names are known."""

from pathlib import Path
from typing import Any

import pytest

from shardyard.config.dataset_name import dataset_words
from shardyard.config.fingerprint import may_change
from shardyard.config.load import load_recipe
from shardyard.config.paths import check_local_paths, make_paths_absolute
from shardyard.config.rules.check import load_checked_recipe
from shardyard.errors import RecipeError

SETS = {"code": ["code/*.py", "s3://bucket/code"], "hard": "/hard"}


def sections(sets: Any = SETS, **more: Any) -> dict[str, Any]:
    data = {"source": "/text", "eval_sets": sets, **more.pop("data", {})}
    return {"model": {"preset": "llama-tiny"}, "data": data, **more}


def test_all_places_of_sets_are_known() -> None:
    recipe = load_checked_recipe(sections())
    assert recipe.data.entries == (
        ("data.source", "/text"),
        ("data.eval_sets.code", "code/*.py"),
        ("data.eval_sets.code", "s3://bucket/code"),
        ("data.eval_sets.hard", "/hard"),
    )
    absolute = make_paths_absolute(recipe).data.eval_sets
    assert absolute == {
        "code": (f"{Path.cwd()}/code/*.py", "s3://bucket/code"), "hard": "/hard",
    }  # fmt: skip
    missing = {problem.path for problem in check_local_paths(recipe)}
    assert missing == {"data.source", "data.eval_sets.hard"}
    assert [*dataset_words(recipe)] == ["data", "hard", "text"]
    assert may_change("data.eval_sets")


def test_one_set_is_added_by_an_override() -> None:
    recipe = load_recipe(sections({"hard": "/hard"}), ["data.eval_sets.code=code"])
    assert recipe.data.eval_sets == {"hard": "/hard", "code": "code"}


MIXTURE = [{"name": "web", "source": "/web", "weight": 1.0}]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (sections({"a b": "/x"}), r"the name 'a b'. A set's name .* Did you mean a-b\?"),
        (sections({"x" * 33: "/x"}), r"has 1 to 32 letters, .* Did you mean x{32}\?"),
        (sections({"": "/x"}), "the name ''. A set's name has 1 to 32 letters"),
        (sections({"loss": "/x"}), "is a metric of causal_lm. Call it loss-set"),
        (sections({"x": "/text"}), "x: and data.source are the same"),
        (sections({"x": 3}), "data.eval_sets"),
        (sections({"x": "s4://bucket/x"}), "data.eval_sets.x='s4://bucket/x' is a URL that is not"),
        (sections({"x": " "}), "data.eval_sets.x=' ' is empty"),
        (
            sections(data={"eval_fraction": 0.0}),
            "data.eval_fraction=0 leaves no validation split, but data.eval_sets needs",
        ),
        (
            {"data": {"mixture": MIXTURE, "eval_sets": {"web": "/x"}}},
            "is a source of data.mixture. Call it web-set",
        ),
        (
            sections(task={"name": "image_classification"}, model={"preset": "resnet50"}),
            "scored by task.name=causal_lm and masked_lm, and not by image_classification. Leave",
        ),
        (
            sections(
                task={"name": "bert_pretraining"}, model={"preset": "bert-base"},
                data={"format": "documents"},
            ),
            "and not by bert_pretraining",
        ),
        (
            sections(task={"name": "preference"}, data={"format": "preference"}),
            "and not by preference",
        ),
        (
            sections(task={"name": "sequence_classification"}, model={"preset": "bert-base"}),
            "and not by sequence_classification",
        ),
        (
            {"data": {"module": "mine:data", "eval_sets": SETS}},
            "data.eval_sets: and data.module=mine:data both say where data comes from",
        ),
    ],
)  # fmt: skip
def test_sets_that_cannot_be_scored_are_errors(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_checked_recipe(recipe)


def tasks(named: Any, **more: Any) -> dict[str, Any]:
    return sections({}, **more | {"data": {"eval_tasks": named, **more.get("data", {})}})


def test_files_of_tasks_are_paths_and_names_of_tasks_are_none() -> None:
    recipe = load_checked_recipe(
        tasks({"arc": "arc.yaml", "facts": "shardyard_facts"}, run={"target": {"arc/acc": 0.5}})
    )
    absolute = make_paths_absolute(recipe).data.eval_tasks
    assert absolute == {"arc": f"{Path.cwd()}/arc.yaml", "facts": "shardyard_facts"}
    assert "data.eval_tasks.arc" in {problem.path for problem in check_local_paths(recipe)}
    assert may_change("data.eval_tasks")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (tasks({"a b": "x.yaml"}), r"the name 'a b'. A task's name .* Did you mean a-b\?"),
        (tasks({"loss": "x.yaml"}), "is a metric of causal_lm. Call it loss-task"),
        (
            tasks({"x": "x.yaml"}, data={"eval_sets": {"x": "/x"}}),
            "has the name x, which is in data.eval_sets, too. Call it x-task",
        ),
        (
            tasks({"x": "x.yaml"}, task={"name": "masked_lm"}, model={"preset": "bert-tiny"}),
            "for models that continue text, and task.name=masked_lm trains none. Leave it out",
        ),
        (
            {"data": {"module": "mine:data", "eval_tasks": {"x": "x.yaml"}}},
            "needs the tokenizer of text data, and data.module=mine:data makes its own. Leave it",
        ),
        (
            tasks({"x": "x.yaml"}, data={"eval_fraction": 0.0}),
            "data.eval_fraction=0 leaves no validation split, but data.eval_tasks needs",
        ),
        (
            tasks({"x": "x.yaml"}, run={"target": {"x/ac": 0.5}}),
            "names x/ac, which is not a metric of causal_lm. Did you mean x/acc",
        ),
    ],
)
def test_tasks_that_cannot_be_scored_are_errors(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_checked_recipe(recipe)
