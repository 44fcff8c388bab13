"""A drill of real runs: what it finds of two faults, and what is left of it."""

import json
import re
import signal

import pytest

from tests.e2e.shardyard import Answer, Place, wait_for

BRIEF = ("--steps", "30", "task.eval_every_steps=null", "task.generate_tokens=0")


def test_a_killed_rank_is_noticed_named_and_mended(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    folder = place.folder / "drill"
    answer = place.run(
        "drill", "tiny.yaml", "--faults", "sigkill", *BRIEF, "--dir", str(folder), "--json"
    )
    assert answer.code == 0, (answer.err, answer.out)
    (row,) = answer.json["rows"]
    assert (row["noticed"], row["cause_right"], row["equal"], row["good"]) == (1, 1, 1, 1)
    (case,) = answer.json["cases"]
    assert case["resumes"] == 0 and not any(case["left"].values())
    assert case["verdict"]["next_step_s"] > case["verdict"]["noticed_s"]
    page = (folder / "drill.html").read_text()
    assert 'badge finished">good' in page and "a rank is killed" in page
    assert json.loads((folder / "drill.json").read_text())["is_good"] is True
    assert not list((folder / "runs").glob("*/checkpoints"))


@pytest.mark.slow
def test_what_ends_a_run_is_resumed_and_what_hangs_is_ended(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    answer = place.run(
        "drill", "tiny.yaml", "--faults", "power,damaged-checkpoint,vanished-folder,command-line",
        *BRIEF, "--dir", str(place.folder / "drill-slow"), "--json",
    )  # fmt: skip
    assert answer.code == 0, (answer.err, answer.out)
    assert {case["fault"]: case["resumes"] for case in answer.json["cases"]} == {
        "power": 1, "damaged-checkpoint": 0, "vanished-folder": 1, "command-line": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_drill_ends_what_it_has_started(place: Place, prepared: Answer) -> None:
    assert prepared.code == 0
    folder = place.folder / "interrupted"
    words = ("drill", "tiny.yaml", "--faults", "sleep", *BRIEF, "--dir", str(folder))
    with place.start(*words) as running:
        wait_for(lambda: (folder / "runs" / "sleep-0" / "metrics.jsonl").is_file())
        running.send(signal.SIGINT)
        stopped = running.wait()
    assert stopped.code == 130 and re.search(r"^interrupted$", stopped.err, re.MULTILINE)
    place.assert_nothing_left()


@pytest.mark.slow
def test_a_rank_that_is_stopped_now_and_then_is_named_and_nothing_is_lost(
    place: Place, prepared: Answer
) -> None:
    assert prepared.code == 0
    words = ("drill", "tiny.yaml", "--faults", "pulses", *BRIEF, "--steps", "600")
    answer = place.run(*words, "--dir", str(place.folder / "pulses"), "--json")
    assert answer.code == 0, (answer.err, answer.out)
    (case,) = answer.json["cases"]
    assert case["verdict"]["steps_lost"] == 0 and case["verdict"]["exact"] == "equal"
