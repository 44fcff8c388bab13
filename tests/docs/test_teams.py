"""docs/teams.md: its examples are read as site file and recipe, and do what the page says."""

import re
from pathlib import Path

import pytest
import yaml

from shardyard.config.limits import read_limits
from shardyard.config.load import load_recipe
from shardyard.config.origins import origin_of
from shardyard.config.rules.pass_through import check_pass_through
from shardyard.config.rules.tags import check_tags, tag_words
from shardyard.config.site import SITE_SECTIONS, SITE_SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "teams.md").read_text()
SITE, LIMITS, TAGS, PASSED_ON = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_site_file_gives_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "shardyard.yaml").write_text(SITE)
    (tmp_path / "recipe.yaml").write_text(TAGS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHARDYARD_SITE")

    recipe = load_recipe([tmp_path / "recipe.yaml"], with_site=True)

    assert list(check_tags(recipe)) == []
    assert recipe.run.tags == {"team": "nlp", "project": "search"}
    for name in ("launch.image", "launch.kubernetes.context"):
        assert f"{origin_of(recipe, name)}\n" in PAGE
    assert f"shardyard-run=RUN {tag_words(recipe.run.tags, ' ')}" in PAGE


def test_the_limits_of_the_page_are_read() -> None:
    limits, errors = read_limits(yaml.safe_load(LIMITS)["limits"], lambda name: name)
    assert not errors
    assert [each.name for each in limits] == ["max_nodes", "max_usd", "instances", "launchers"]


def test_what_the_page_passes_on_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(PASSED_ON)
    recipe = load_recipe([tmp_path / "recipe.yaml"])
    assert list(check_pass_through(recipe)) == []
    assert recipe.launch.kubernetes.patches[0].kind == "Pod"


def test_the_page_lists_all_that_a_site_file_may_set() -> None:
    (listed,) = re.findall(r"A site file may set (.*?)\. Other", PAGE, re.DOTALL)
    named = set(re.findall(r"`([a-z_.]+)`", listed)) - {"nodes", "devices"}
    assert named == {*SITE_SECTIONS, *SITE_SETTINGS}


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) < 600
