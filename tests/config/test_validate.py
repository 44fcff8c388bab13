"""A recipe from a file, from a dict and from an object: the same one, refused in the same words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.schema.data import Data
from shardyard.config.schema.launch import Launch, Volume
from shardyard.config.schema.recipe import Model, Optim, Recipe, RunSettings
from shardyard.config.validate import recipe_of
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.io.yaml import write_yaml

Tree = dict[str, Any]


def in_file(tree: Tree, folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(write_yaml(tree))
    return path


def as_object(tree: Tree) -> Recipe:
    """Built without pydantic's own look at it, as ``model_copy`` lets wrong values pass too."""
    kinds = {name: field.annotation for name, field in Recipe.model_fields.items()}
    sections: Tree = {}
    for name, content in tree.items():
        kind: Any = kinds.get(name)
        is_typed = isinstance(content, dict) and hasattr(kind, "model_construct")
        sections[name] = kind.model_construct(**content) if is_typed else content
    return Recipe.model_construct(**sections)


def problems_of(ask: Callable[[], Recipe]) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as refused:
        ask()
    return tuple(refused.value.problems)


WRONG: list[tuple[Tree, str]] = [
    ({"optim": {"lr": "fast"}}, "optim.lr='fast' is not a number above 0, or auto."),
    ({"optim": {"lr": -1.0, "betas": [0.9]}}, "optim.betas=[0.9] is not a list of 2"),
    ({"parallel": {"tp": 0}, "run": {"steps": 1.5}}, "run.steps=1.5 is not a whole number"),
    ({"run": {"id": 17}}, 'Put it in quotes: "17"'),
    ({"secrets": {"HF_TOKEN": 3}}, "a secret is a name and a text"),
    ({"launch": {"slurm": {"partition": 3}}}, "launch.slurm.partition=3 is not text"),
    (
        {"launch": {"volumes": [{"path": 3}]}},
        "settings of its own (path, claim, efs, access_point, host)",
    ),
    ({"model": {"preset": "llama-tini"}}, "Did you mean llama-tiny?"),
    ({"run": {"steps": 3, "epochs": 1.0}}, "run.steps, run.epochs are all lengths"),
    ({"optim": {"name": "sgd"}}, "optim.lr=auto is known for"),
    ({"launch": {"env": {"TOKEN": "hf_" + "a" * 34}}}, "holds a Hugging Face token (not shown)"),
]
"""Sections with wrong settings, and words of one of the messages."""

MISSPELT: list[tuple[Tree, str]] = [
    ({"optim": {"learning_rate": 0.1}}, "Did you mean optim.lr?"),
    ({"opt": {"lr": 0.1}}, "opt: unknown section. Did you mean optim?"),
    ({"optim.lr": 0.1}, "write it as `optim: {lr: value}`"),
    ({"checkpoint": 3}, "checkpoint: holds a number, not settings"),
    ({"task": {"vowelz": {"weight": 1}}}, "no installed package adds a task of this name"),
    ({"run": {"target_loss": 2.5}}, "this setting was replaced"),
    ({"model": {"quantization": "nf4"}}, "a base in 4 or 8 bit (QLoRA) is not supported. On"),
    ({"model": {"lora": {"load_in_4bit": True}}}, "model.lora.load_in_4bit: unknown setting"),
    ({"quantization": {"bits": 4}}, "unknown section: training adapters on a base in 4 or 8"),
    ({"model": {"lora": {"lora_alpha": 8}}}, "Did you mean model.lora.alpha?"),
]
"""What no object can hold."""


@pytest.mark.parametrize(("tree", "words"), WRONG + MISSPELT)
def test_a_dict_is_refused_in_the_words_of_a_file(tree: Tree, words: str, tmp_path: Path) -> None:
    told = problems_of(lambda: load_checked_recipe(in_file(tree, tmp_path)))
    assert problems_of(lambda: load_checked_recipe(tree)) == told
    assert any(words in str(problem) for problem in told), told


@pytest.mark.parametrize(("tree", "words"), WRONG)
def test_an_object_is_refused_in_the_words_of_a_file(
    tree: Tree, words: str, tmp_path: Path
) -> None:
    told = problems_of(lambda: load_checked_recipe(in_file(tree, tmp_path)))
    assert problems_of(lambda: load_checked_recipe(as_object(tree))) == told
    assert any(words in str(problem) for problem in told), told


def test_a_dict_and_an_object_are_called_recipe_and_a_file_by_its_path(tmp_path: Path) -> None:
    tree = {"optim": {"lr": "fast"}}
    file = in_file(tree, tmp_path)
    for source, name in ((tree, "recipe"), (as_object(tree), "recipe"), (file, str(file))):
        with pytest.raises(RecipeError) as refused:
            load_recipe(source)
        assert str(refused.value).startswith(f"{name} has 1 problem:\n  optim.lr='fast'")


RIGHT: list[tuple[Tree, Recipe]] = [
    ({"optim": {"lr": 3e-4, "betas": (0.8, 0.9)}}, Recipe(optim=Optim(lr=3e-4, betas=(0.8, 0.9)))),
    ({"run": {"tokens": 1e9}}, Recipe(run=RunSettings(tokens=1_000_000_000))),
    ({"data": {"source": Path("text")}}, Recipe(data=Data(source="text"))),
    (
        {"launch": {"volumes": [Volume(path="/data", claim="texts")]}},
        Recipe(launch=Launch(volumes=(Volume(path="/data", claim="texts"),))),
    ),
    (
        {"model": Model(preset="llama-tiny"), "optim": None},
        Recipe(model=Model(preset="llama-tiny")),
    ),
    ({}, Recipe()),
]


@pytest.mark.parametrize(("tree", "recipe"), RIGHT)
def test_a_dict_and_an_object_say_the_same_and_keep_what_was_given(
    tree: Tree, recipe: Recipe
) -> None:
    for found in (load_recipe(tree), load_recipe(recipe), recipe_of(tree)):
        assert found == recipe
        given = found.model_dump(exclude_unset=True)
        assert {name: section for name, section in given.items() if section} == recipe.model_dump(
            exclude_unset=True
        )


def test_sources_of_all_kinds_merge_from_left_to_right_and_overrides_win(tmp_path: Path) -> None:
    file = in_file({"optim": {"lr": 1e-3, "eps": 1e-6}, "run": {"seed": 1}}, tmp_path)
    built = Recipe(run=RunSettings(seed=2))
    recipe = load_recipe([file, {"optim": {"lr": 2e-3}}, built], ["optim.grad_clip=0.5"])
    assert (recipe.optim.lr, recipe.optim.eps, recipe.optim.grad_clip) == (2e-3, 1e-6, 0.5)
    assert recipe.run.seed == 2
    assert load_recipe([built, str(file)]).run.seed == 1


def test_a_dict_is_left_as_it_was() -> None:
    tree: Tree = {"run": {"target_loss": 2.5}, "optim": {"lr": "fast"}}
    with pytest.raises(RecipeError):
        load_recipe(tree)
    load_recipe({"run": tree["run"]}, of_run=True)
    load_recipe({"launch": {"aws_batch": {"ami": "ami-1", "queue": "trainers"}}}, of_run=True)
    for straggler, rules in (("leave_out", ("slow_rank",)), ("report", ())):
        recipe = load_recipe({"elastic": {"straggler": straggler}}, of_run=True)
        assert recipe.elastic.leave_out_for == rules
    assert tree == {"run": {"target_loss": 2.5}, "optim": {"lr": "fast"}}


@pytest.mark.parametrize("sources", [3, [3], [{}, 3]])
def test_what_is_no_recipe_is_named(sources: Any) -> None:
    with pytest.raises(RequestError, match=r"3 is int, not a recipe\. Give the path"):
        load_recipe(sources)


def test_a_wrong_part_of_an_item_is_named_and_all_of_a_list_only_where_no_part_is() -> None:
    part = {"name": "A b", "source": "x", "weight": 1}
    for mixture, words in (
        ([part], "data.mixture[0].name='A b' is wrong: "),
        ([{"name": "a"}], "data.mixture=[{'name': 'a'}] is not a list"),
        ([3], "data.mixture=[3] is not a list"),
        ({}, "data.mixture={} is not a list"),
    ):
        with pytest.raises(RecipeError) as raised:
            load_recipe({"data": {"mixture": mixture}})
        assert str(raised.value.problems[0]).startswith(words), mixture
