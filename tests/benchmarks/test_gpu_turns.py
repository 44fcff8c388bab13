"""Arithmetic of what is compared by turns, and of what saves cost."""

from typing import Any

import pytest

from benchmarks.gpu.saving import saving
from benchmarks.gpu.turns import compared


def ok(*step_times_s: float) -> dict[str, Any]:
    return {
        "status": "ok", "step_times_s": list(step_times_s), "attention": "flash", "losses": [1.0],
    }  # fmt: skip


def test_a_setting_is_held_to_the_first_of_its_own_turn() -> None:
    # the device gets slower from turn to turn: medians over all would tell of the turns
    first, second = compared([[ok(1, 1, 9), ok(2), ok(3)], [ok(1.1), ok(2.2), None]])
    assert first["times_the_first"] == 1.0 and first["step_s"] == [1, 2, 3]
    assert second["times_the_first"] == pytest.approx(1.1)
    assert second["step_s"] == [1.1, 2.2, None] and second["status"] == "ok"


def test_what_fails_once_has_failed_and_what_was_not_begun_says_so() -> None:
    full = {"status": "out of memory", "message": "20 GiB"}
    first, second, third = compared([[ok(1), ok(1)], [full, ok(1)], [None, None]])
    assert first["status"] == "ok"
    assert (second["status"], second["message"]) == ("out of memory", "20 GiB")
    assert second["times_the_first"] == 1.0  # of the turn that went well
    assert third["status"] == "not run" and third["times_the_first"] is None


def step(number: int, seconds: float) -> dict[str, Any]:
    return {"step": number, "step_time_s": seconds}


def save(number: int, *, blocked_s: float, seconds: float) -> list[dict[str, Any]]:
    return [
        {"kind": "checkpoint_started", "step": number, "blocked_s": blocked_s},
        {"kind": "checkpoint_durable", "step": number, "seconds": seconds, "bytes": 4000},
    ]


def test_steps_beside_a_save_are_those_that_end_before_it_is_written() -> None:
    steps = [step(n, 1.2 if n in (3, 4, 7) else 1.0) for n in range(1, 11)]
    events = [
        {"kind": "started"},
        *save(2, blocked_s=9.0, seconds=12.0),  # 3 s after the copy: steps 3 and 4, not all of 5
        *save(6, blocked_s=1.1, seconds=2.5),  # 1.4 s: step 7
        *save(9, blocked_s=1.25, seconds=2.35),
    ]
    found = saving(steps, events, bytes_per_s=4000.0)
    assert found["steps_beside"] == 4  # and step 10 beside the last
    assert found["slower"] == pytest.approx(1.2)
    assert [each["times_a_copy"] for each in found["saves"]] == [9.0, 1.1, 1.25]
    assert found["times_a_copy"] == pytest.approx(1.175)  # the first one takes the memory, too
    assert found["is_met"] == {"blocked": True, "slower": False}


def test_one_save_alone_says_nothing_of_the_usual_one() -> None:
    found = saving([step(1, 1.0)], save(1, blocked_s=1.0, seconds=1.0), bytes_per_s=4000.0)
    assert found["times_a_copy"] is None and found["slower"] is None
    assert found["is_met"] == {"blocked": None, "slower": None}
