"""Rules for `run.tags`, against those of the places that tags go to."""

import re

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.tags import check_tags, read_tag_words, tag_words

# kubernetes.io, Labels and Selectors: the pattern that its API server prints in its errors
_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_OF_AWS = re.compile(r"[\w .:/=+@-]{1,256}")  # Tag naming limits and requirements of AWS


@pytest.mark.parametrize(
    ("tag", "hint"),
    [
        ("Team: nlp", "Did you mean team"),
        ("team: my team", "Did you mean my-team"),
        ("team: ''", "1 to 40"),
        (f"team: {'x' * 41}", "1 to 40"),
        (f"{'t' * 21}: a", "at most 20"),
        ("shardyard-run: a", "reserved"),
        ("job-name: a", "reserved"),
        ("aws: a", "reserved"),
        ("team: é", "letters"),
        ('team: "a\\nb"', "Did you mean a-b"),
    ],
)
def test_a_tag_that_some_place_could_not_hold_is_rejected(tag: str, hint: str) -> None:
    (problem,) = check_tags(load_recipe([], [f"run.tags={{{tag}}}"]))
    assert hint in problem.text


def test_too_many_tags_are_rejected() -> None:
    many = ", ".join(f"t{number}: a" for number in range(11))
    (problem,) = check_tags(load_recipe([], [f"run.tags={{{many}}}"]))
    assert "11 tags" in problem.text


@pytest.mark.parametrize("value", ["nlp", "a.b_c-d", "2", "x" * 40])
def test_an_accepted_tag_suits_all_places(value: str) -> None:
    recipe = load_recipe([], [f"run.tags={{team: {value}, {'n' * 20}: {value}}}"])
    assert list(check_tags(recipe)) == []
    for name, text in recipe.run.tags.items():
        assert _LABEL.fullmatch(text) and _LABEL.fullmatch(name) and len(text) <= 63
        assert _OF_AWS.fullmatch(text) and _OF_AWS.fullmatch(name)
        assert len(f"{name}:{text}") <= 64  # W&B


def test_tags_are_read_back_from_their_words() -> None:
    tags = {"team": "nlp", "project": "search"}
    assert tag_words(tags) == "project=search,team=nlp"
    assert read_tag_words(tag_words(tags)) == tags
    assert read_tag_words("", ",") == {}
    assert read_tag_words("run-1 team=nlp", " ") == {"team": "nlp"}
