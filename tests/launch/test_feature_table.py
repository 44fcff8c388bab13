"""The table of docs/launch.md says what the launchers say."""

from dataclasses import fields
from pathlib import Path

from shardyard.launch.base import Capabilities
from shardyard.launch.feature_table import feature_table

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"


def test_the_page_has_the_table_of_now() -> None:
    assert feature_table() in PAGE.read_text(), (
        "put the output of `python -m shardyard.launch.feature_table` into docs/launch.md"
    )


def test_every_capability_has_a_row() -> None:
    assert len(feature_table().splitlines()) == 2 + len(fields(Capabilities))


def test_a_column_is_what_the_launcher_says_of_itself() -> None:
    place = "tests.cli.fake_launcher:FakeLauncher"
    assert [row.split(" | ")[-1] for row in feature_table({"fake": place}).splitlines()[2:]] == [
        "`fake` |", "no |", "no |", "yes |", "`env` |",
    ]  # fmt: skip
