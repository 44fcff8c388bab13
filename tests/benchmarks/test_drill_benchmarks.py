"""What the benchmarks of the drill make of its cases, and that they run, small."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import drill_table, kills
from benchmarks.real_run import write_corpus


def case(fault: str, outcome: str = "equal", **fields: Any) -> dict[str, Any]:
    verdict = {
        "exact": outcome, "left": "", "is_noticed": True, "is_cause_right": fault != "slow",
        "has_recovered": True,
    }  # fmt: skip
    return {"fault": fault, "struck_t": 1.0, "notes": {}, "verdict": verdict, **fields}


def test_a_kill_beside_its_moment_does_not_count() -> None:
    cases = [
        case("kill-in-save", notes={"was_inside": True}),
        case("kill-in-save", "different", notes={"was_inside": False}),
        case("kill-in-save", struck_t=None),
        case("agent", "not proven"),
    ]
    assert kills.hits(cases, "kill-in-save") == 1
    row = kills.row_of(cases, "kill-in-save", 50)
    assert (row["kills"], row["beside_the_moment"], row["equal"], row["different"]) == (1, 2, 1, 0)
    assert kills.row_of(cases, "agent", 20)["not_proven"] == 1


def test_every_fault_is_tried_often_enough_on_the_layouts_that_allow_it() -> None:
    allowed: dict[str, dict[str, tuple[str, ...]]] = {
        "2x1": {"sigkill": (), "agent": ()},
        "2x2": {"sigkill": (), "node-0": ()},
    }
    assert drill_table.repeats(allowed, 5) == {"sigkill": 3, "agent": 5, "node-0": 5}
    rows = drill_table.table([case("sigkill"), case("slow", "not proven")])
    assert rows["all"]["cause_right"] == "1 of 2" and rows["all"]["not proven"] == 1
    assert rows["those that do not die"]["cause_right"] == "0 of 1"


@pytest.mark.slow
def test_the_kills_are_made_small(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    due = {"kill-in-snapshot": 1, "kill-in-load": 1}
    found = [case for drilled in kills.one_round(tmp_path, due, (), seed=1) for case in drilled]
    assert [each["verdict"]["exact"] for each in found] == ["equal", "equal"]
