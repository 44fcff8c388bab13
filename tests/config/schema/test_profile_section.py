"""``observe.profile``, and which ranks are meant by words."""

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.config.rules.observe import MOST_RANKS, ranks_of
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError, RequestError


@pytest.mark.parametrize(
    ("words", "world_size", "ranks"),
    [
        ("auto", 2, (0, 1)),
        ("auto", 8, tuple(range(8))),
        ("auto", 512, (0, 64, 128, 192, 256, 320, 384, 448)),
        ("auto", 12, (0, 1, 3, 4, 6, 7, 9, 10)),
        ("all", 3, (0, 1, 2)),
        ("5,0-2,1", 6, (0, 1, 2, 5)),
        ("3", 4, (3,)),
    ],
)
def test_ranks_are_those_that_words_mean(
    words: str, world_size: int, ranks: tuple[int, ...]
) -> None:
    assert ranks_of(words, world_size) == ranks


@pytest.mark.parametrize(
    ("words", "world_size", "says"),
    [
        ("first", 2, "does not say which ranks. Use auto"),
        ("0-", 2, "does not say"),
        ("4", 4, "has 4 ranks, counted from 0. Use numbers up to 3"),
        ("0-9999999", 4, "Use numbers up to 3"),
        ("all", MOST_RANKS + 1, "65 ranks, and a profile is taken of 64 at most"),
        ("3-1", 4, ""),
    ],
)
def test_other_words_are_refused_with_what_to_do(words: str, world_size: int, says: str) -> None:
    if not says:
        assert ranks_of(words, world_size) == (3,)
        return
    with pytest.raises(RequestError, match=says):
        ranks_of(words, world_size)


def test_a_recipe_names_a_step() -> None:
    assert Recipe().observe.profile.at_step is None
    recipe = Recipe.model_validate({"observe": {"profile": {"at_step": 20}}})
    assert (recipe.observe.profile.steps, recipe.observe.profile.ranks) == (3, "auto")


@pytest.mark.parametrize(
    ("observe", "says"),
    [
        ({"profile": {"at_step": 11}}, "observe.profile.at_step=11 but the run ends after"),
        ({"profile": {"at_step": 1, "ranks": "x"}}, "observe.profile.ranks=x does not say"),
    ],
)
def test_what_could_not_be_followed_is_refused(observe: dict[str, object], says: str) -> None:
    recipe = Recipe.model_validate({"run": {"steps": 10}, "observe": observe})
    with pytest.raises(RecipeError, match=says):
        check(recipe)


def test_a_setting_of_it_out_of_bounds_is_named() -> None:
    with pytest.raises(
        RecipeError, match=r"observe\.profile\.steps=99 is not a whole number from 1 to 20"
    ):
        load_recipe(
            [{"observe": {"profile": {"at_step": 1, "steps": 99}}}],
            [],
        )
