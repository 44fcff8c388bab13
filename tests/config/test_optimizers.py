"""A row is all that is known of an optimizer outside of its update."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import shardyard
from shardyard.config.auto import AFTER_LAYOUT, Draft, ResolveContext
from shardyard.config.load import load_recipe
from shardyard.config.optimizers import NAMES, OPTIMIZERS, Average, OptimizerName
from shardyard.config.rules.check import check
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError
from shardyard.families.presets import PRESETS
from shardyard.planner.workload import optimizer_bytes, workload_of
from tests.planner.recipes import resolved_recipe
from tests.planner.workloads import layout

PACKAGE = Path(shardyard.__file__).parent
SHAPE = PRESETS["llama-tiny"].shape


def named(recipe: Recipe, name: str) -> Recipe:
    """With an optimizer that the schema has no word for."""
    return recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"name": name})})


def test_every_name_of_the_schema_has_a_row_and_every_row_a_name() -> None:
    assert tuple(OPTIMIZERS) == get_args(OptimizerName)


def test_a_new_row_is_followed_by_everything_that_depends_on_an_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = replace(
        OPTIMIZERS["adamw"],
        state_tensors=tuple(Average(name=name, factor="betas") for name in ("a", "b", "c")),
        settings=("momentum",),
        knows_lr=False,
        typical_lr="7",
        weight_decay=0.3,
        decay_reason="because",
        moved_bytes=100,
    )
    monkeypatch.setitem(OPTIMIZERS, "new", row)  # type: ignore[misc]
    asked = load_recipe([], ["model.preset=llama-tiny", "optim.eps=1e-8", "optim.momentum=0.5"])
    with pytest.raises(RecipeError) as refused:
        check(named(asked, "new"))
    problems = [str(problem) for problem in refused.value.problems]
    assert len(problems) == 2
    assert problems[0].startswith("optim.lr=auto is known for adamw and muon only. Give one; 7")
    readers = "adamw, lamb, muon and schedule_free_adamw"
    assert f"optim.eps=1e-08 is a setting of {readers}; optim.name is new" in problems[1]
    assert problems[1].endswith("which reads momentum. Leave it out.")
    draft = Draft(recipe=named(asked, "new"), context=ResolveContext(shape=SHAPE))
    assert AFTER_LAYOUT["optim.weight_decay"](draft) == (0.3, "because")
    with pytest.raises(AssertionError, match="new"):  # never the rate of another
        AFTER_LAYOUT["optim.lr"](draft)
    planned = named(resolved_recipe(precision={"optimizer_states": "bf16"}), "new")
    assert optimizer_bytes(planned, "block matrix") == 3 * 2
    assert workload_of(planned, SHAPE, layout()).formats.optimizer_bytes == 3 * 2
    assert workload_of(planned, SHAPE, layout()).formats.update_bytes == 100 + 3 * 8


@pytest.mark.parametrize(
    "ask",
    [
        lambda recipe: check(recipe),
        lambda recipe: optimizer_bytes(recipe, "other"),
        lambda recipe: workload_of(recipe, SHAPE, layout()),
        lambda recipe: AFTER_LAYOUT["optim.lr"](
            Draft(recipe=recipe, context=ResolveContext(shape=SHAPE))
        ),
        lambda recipe: AFTER_LAYOUT["optim.weight_decay"](
            Draft(recipe=recipe, context=ResolveContext(shape=SHAPE))
        ),
    ],
)
def test_a_name_without_a_row_falls_through_nowhere(ask: Any) -> None:
    message = f"no optimizer is called 'nonesuch': {', '.join(OPTIMIZERS)}"
    with pytest.raises(LookupError, match=message):
        ask(named(resolved_recipe(), "nonesuch"))


def test_no_code_but_the_rows_knows_an_optimizer_by_its_name() -> None:
    elsewhere = [name for row in NAMES.values() for names in row.values() for name in names]
    alike = sum(name in OPTIMIZERS for name in elsewhere)  # others call it as we do
    assert list(NAMES) == list(OPTIMIZERS)
    allowed = {
        # the type, the rows, and what others call them
        "config/optimizers.py": 2 * len(OPTIMIZERS) + len(NAMES) + alike,
        "config/schema/recipe.py": 1,  # the default
        "importers/configs/trainer.py": 2,  # an argument of the Trainer
    }
    found: dict[str, int] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        if not any(f'"{name}"' in text or f"'{name}'" in text for name in OPTIMIZERS):
            continue  # to parse all of them takes seconds
        names = [
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and node.value in list(OPTIMIZERS)
        ]
        if names:
            found[file.relative_to(PACKAGE).as_posix()] = len(names)
    assert found == allowed


def test_an_optimizer_that_reads_betas_says_which_it_was_published_with() -> None:
    with_betas = {name for name, row in OPTIMIZERS.items() if row.betas is not None}
    assert with_betas == {name for name, row in OPTIMIZERS.items() if "betas" in row.settings}


@pytest.mark.parametrize(
    ("settings", "betas"),
    [
        ((), (0.9, 0.95)),  # Llama 2, arXiv:2307.09288, section 2.2
        (("optim.name=lamb",), (0.9, 0.999)),  # LAMB, arXiv:1904.00962
        (("optim.name=lamb", "optim.betas=[0.9,0.95]"), (0.9, 0.95)),
        (("optim.betas=[0.8,0.9]",), (0.8, 0.9)),
    ],
)
def test_betas_that_no_recipe_sets_are_the_published_ones(
    settings: tuple[str, ...], betas: tuple[float, float]
) -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny", *settings])
    assert recipe.optim.betas == betas
    assert ("betas" in recipe.optim.model_fields_set) == any("betas" in each for each in settings)
    # What an attempt trains by is read back from its file.
    assert Recipe.model_validate(recipe.model_dump()).optim.betas == betas
