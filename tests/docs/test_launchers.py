"""The table of docs/launch.md says what the launchers say."""

from dataclasses import fields

from docs.generate.launchers import table
from shardyard.launchers.base import Capabilities


def test_every_capability_has_a_row_and_so_have_the_powers_beside_them() -> None:
    rows = table().splitlines()
    assert len(rows) == 2 + len(fields(Capabilities)) + 2
    assert rows[-2].endswith("one call for each | no | yes | yes | yes | no |")
    assert rows[-1].endswith("run's folder is gone | no | yes | yes | yes | yes |")


def test_a_column_is_what_the_launcher_says_of_itself() -> None:
    place = "tests.cli.fake_launcher:FakeLauncher"
    assert [row.split(" | ")[-1] for row in table({"fake": place}).splitlines()[2:]] == [
        "`fake` |", "no |", "no |", "yes |", "no |", "`env` |", "no |", "no |",
    ]  # fmt: skip
