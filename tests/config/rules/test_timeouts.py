"""Timeouts have one order; an inverted pair is refused with both settings and values."""

from pathlib import Path

import pytest

from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.rules.timeouts import (
    TIMEOUTS,
    TimeoutOrder,
    check_timeouts,
    hang_min_s,
    hang_slow_s,
    restart_timeout_s,
)
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import settings
from shardyard.errors import RecipeError

TINY = {"model": {"preset": "llama-tiny"}}


def problems(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_checked_recipe(TINY, overrides)
    return str(caught.value)


def test_defaults_are_in_order_on_every_launcher() -> None:
    for on in (None, "slurm"):
        assert not list(check_timeouts(Recipe(), on=on))


@pytest.mark.parametrize("order", TIMEOUTS, ids=lambda order: order.shorter)
def test_every_row_names_settings_and_is_documented(order: TimeoutOrder) -> None:
    assert {order.shorter, order.longer} <= settings().keys()
    page = (Path(__file__).parents[3] / "internals/elastic.md").read_text()
    assert f"| `{order.shorter}` | `{order.longer}`" in page


def test_an_auto_is_made_to_fit() -> None:
    recipe = Recipe.model_validate({"elastic": {"collective_timeout_s": 3600.0}})
    assert not list(check_timeouts(recipe))
    assert restart_timeout_s(recipe.elastic) == 3900
    given = recipe.elastic.model_copy(update={"restart_timeout_s": 7200.0})
    assert restart_timeout_s(given) == 7200


@pytest.mark.parametrize(
    ("given", "least_s", "slow_s"),
    [
        ({}, 3.5, 480.0),
        ({"collective_timeout_s": 5.0}, 2.5, 4.0),
        ({"hang_slow_s": 2.0}, 2.0, 2.0),
        ({"hang_min_s": 500.0}, 500.0, 500.0),
    ],
)
def test_who_hangs_is_named_before_a_collective_ends(
    given: dict[str, float], least_s: float, slow_s: float
) -> None:
    recipe = Recipe.model_validate({"elastic": given})
    assert (hang_min_s(recipe.elastic), hang_slow_s(recipe.elastic)) == (least_s, slow_s)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "elastic.keep_alive_s=600",
            "elastic.keep_alive_s=600 is not below elastic.collective_timeout_s=600. Ranks would",
        ),
        (
            "elastic.hang_min_s=600",
            "elastic.hang_min_s=600 is not below elastic.collective_timeout_s=600. A healthy rank",
        ),
        (
            "elastic.hang_slow_s=600",
            "elastic.hang_slow_s=600 is not below elastic.collective_timeout_s=600. A healthy rank",
        ),
        (
            "elastic.restart_timeout_s=600",
            "elastic.collective_timeout_s=600 is not below elastic.restart_timeout_s=600. Nodes",
        ),
        (
            "launch.slurm.signal_before_s=60",
            "elastic.drain_timeout_s=120 is above launch.slurm.signal_before_s=60. Slurm would",
        ),
    ],
)
def test_an_inverted_pair_is_refused(override: str, words: str) -> None:
    said = problems(override)
    assert words in said and "Lower the one or raise the other." in said


def test_a_usual_step_may_not_take_longer_than_a_save() -> None:
    recipe = Recipe.model_validate({"elastic": {"hang_min_s": 60.0, "hang_slow_s": 30.0}})
    (problem,) = check_timeouts(recipe)
    assert str(problem).startswith("elastic.hang_min_s=60 is above elastic.hang_slow_s=30.")


def test_a_launchers_own_limit_counts_where_the_recipe_speaks_of_it_or_goes_there() -> None:
    patient = Recipe.model_validate({"elastic": {"drain_timeout_s": 600.0}})
    assert not list(check_timeouts(patient))
    (problem,) = check_timeouts(patient, on="slurm")
    assert str(problem).startswith("elastic.drain_timeout_s=600 is above launch.slurm.signal_bef")
