"""The table of docs/launch.md says what the launchers say."""

from dataclasses import fields

from docs.generate.launchers import table
from shardyard.launchers.base import Capabilities


def test_every_capability_has_a_row_and_what_asks_for_many_jobs_at_once() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(fields(Capabilities)) + 1
    assert rows[-1].endswith("for each alone | no | yes | yes | yes |")


def test_a_column_is_what_the_launcher_says_of_itself() -> None:
    place = "tests.cli.fake_launcher:FakeLauncher"
    assert [row.split(" | ")[-1] for row in table({"fake": place}).splitlines()[2:]] == [
        "`fake` |", "no |", "no |", "yes |", "no |", "`env` |", "no |",
    ]  # fmt: skip
