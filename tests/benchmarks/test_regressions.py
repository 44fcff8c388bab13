"""Verdicts on ratios of two checkouts."""

from benchmarks.regressions import compared


def test_a_measure_is_slower_when_every_round_says_so() -> None:
    before = {"step": 1.0, "save": 1.0, "plan": 1.0}
    rounds = [
        {"now": {"step": 1.2, "save": save, "plan": 0.5}, "before": before}
        for save in (1.5, 0.9, 1.3)
    ]
    found = compared(rounds)
    assert {name: row["is_slower"] for name, row in found.items()} == {
        "step": True, "save": False, "plan": False,
    }  # fmt: skip
    assert (found["save"]["ratio"], found["save"]["interval"]) == (1.3, [0.9, 1.5])
    assert found["step"]["now_s"] == [1.2, 1.2, 1.2]
