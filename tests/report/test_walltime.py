"""Phases against a run whose simulated clock says what every second was."""

import dataclasses
from pathlib import Path

import pytest

from shardyard.report.run_data import read_run
from shardyard.report.walltime import PHASES, account, effective_share, total_phases
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import (
    DATA_WAIT_S,
    STEP_S,
    RunWriter,
    resolved_run,
    write_whole_run,
)


def test_the_phases_of_a_run_are_what_its_clock_said(tmp_path: Path) -> None:
    first, second = account(read_run(write_whole_run(tmp_path)))
    assert first.phases == pytest.approx(
        {
            "productive": 80 * (STEP_S - DATA_WAIT_S),
            "data wait": 80 * DATA_WAIT_S,
            "evaluation": 4 * 0.8,
            "checkpoint-blocked": 2 * 0.05 + 0.2,
            "init": 1.5 + 2 * 2.2,
            "rendezvous": 2 * 0.4,
            "load": 0.3,
            "lost work": 5 * STEP_S,
            "detect": 0.5,
            "restart": 0.7,
            "teardown": 0.35,
            "unexplained": 0.0,
        },
        abs=1e-4,
    )
    assert second.phases["waiting"] == pytest.approx(600)
    assert second.phases["sample"] == pytest.approx(1.1)
    assert second.phases["productive"] == pytest.approx(40 * (STEP_S - DATA_WAIT_S))
    assert "lost work" not in second.phases


def test_what_a_compiler_took_of_the_first_step_is_a_phase_of_its_own(tmp_path: Path) -> None:
    record = read_run(write_whole_run(tmp_path))
    before = account(record)[0]
    told = record.attempts[0].first("first_step")
    assert told is not None and "compile" not in before.phases
    told["compile_s"] = 0.75 * STEP_S
    after = account(record)[0]
    assert after.phases["compile"] == pytest.approx(0.75 * STEP_S)
    assert sum(after.phases.values()) == pytest.approx(sum(before.phases.values()))
    assert after.phases["productive"] == pytest.approx(before.phases["productive"] - 0.75 * STEP_S)
    told["compile_s"] = 100 * STEP_S  # a clock that counted more than there was
    assert account(record)[0].phases["compile"] == pytest.approx(STEP_S - DATA_WAIT_S)


def test_the_phases_add_up_to_the_wall_time_of_each_attempt(tmp_path: Path) -> None:
    for attempt in account(read_run(write_whole_run(tmp_path))):
        assert sum(attempt.phases.values()) == pytest.approx(attempt.seconds, abs=1e-3)
        assert abs(attempt.phases["unexplained"]) < 0.01 * attempt.seconds
        assert set(attempt.phases) <= set(PHASES)


def test_the_attempts_add_up_to_the_wall_time_of_the_run(tmp_path: Path) -> None:
    record = read_run(write_whole_run(tmp_path))
    attempts = account(record)
    began_t = record.attempts[0].manifest["started_at"]
    ended_t = record.attempts[-1].events[-1]["t"]
    assert sum(attempt.seconds for attempt in attempts) == pytest.approx(ended_t - began_t)
    assert sum(total_phases(attempts).values()) == pytest.approx(ended_t - began_t, abs=1e-3)


def test_effective_time_leaves_out_what_is_waited_between_attempts() -> None:
    phases = {"productive": 70.0, "data wait": 5.0, "lost work": 25.0, "waiting": 900.0}
    assert effective_share(phases) == pytest.approx(0.75)
    assert effective_share({"waiting": 900.0}) is None


def test_a_pause_is_a_phase_of_its_own_and_no_productive_time(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 10)
    writer.clock_t += 3600.0
    writer.event("paused", step=10, what="suspended", seconds=3600.0)
    writer.save(10)
    writer.end(143, "drained")
    [attempt] = account(read_run(writer.write()))
    assert attempt.phases["paused"] == pytest.approx(3600.0)
    assert attempt.phases["productive"] == pytest.approx(10 * (STEP_S - DATA_WAIT_S))
    assert attempt.phases["unexplained"] == pytest.approx(0.0, abs=1e-4)


def test_text_generated_during_training_counts_as_evaluation(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 10)
    writer.clock_t += 2.5
    writer.event("generated", step=10, seconds=2.5, texts=[{"prompt": "a", "text": "b"}])
    writer.save(10)
    writer.end(143, "drained")
    [attempt] = account(read_run(writer.write()))
    assert attempt.phases["evaluation"] == pytest.approx(2.5)
    assert attempt.phases["unexplained"] == pytest.approx(0.0, abs=1e-4)


def test_time_that_nothing_measured_is_called_unexplained(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 10)
    writer.clock_t += 3.0  # nobody says what happened here
    writer.save(10)
    writer.end(143, "drained")
    [attempt] = account(read_run(writer.write()))
    assert attempt.phases["unexplained"] == pytest.approx(3.0, abs=1e-4)


def test_steps_that_a_resume_did_again_are_lost_work_of_the_earlier_attempt(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 10)  # and then killed: no attempt_ended
    writer.clock_t += 60
    writer.begin()
    writer.start(load_step=5)
    writer.steps(6, 12)
    first, second = account(read_run(writer.write()))
    assert first.phases["lost work"] == pytest.approx(5 * STEP_S)
    assert first.phases["productive"] == pytest.approx(5 * (STEP_S - DATA_WAIT_S))
    assert not first.has_ended
    assert "lost work" not in second.phases


def test_steps_that_were_lost_and_never_done_again_are_lost_work(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 30)  # and then killed
    writer.clock_t += 60
    writer.begin()
    writer.start(load_step=5)
    writer.steps(6, 12)
    first, _ = account(read_run(writer.write()))
    assert first.phases["lost work"] == pytest.approx(25 * STEP_S + 0.8)
    assert "evaluation" not in first.phases
    assert first.phases["productive"] == pytest.approx(5 * (STEP_S - DATA_WAIT_S))


def test_an_attempt_that_just_began_has_begun_and_nothing_else(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    run = writer.write()
    early = [event for event in writer.events if event["kind"] == "attempt_started"]
    writer.events = early
    writer.write()
    [attempt] = account(read_run(run))
    assert attempt.seconds == pytest.approx(1.9, abs=1e-4)  # 1.5 s, and the meeting after it
    assert not attempt.has_ended


def test_totals_leave_out_what_did_not_happen(tmp_path: Path) -> None:
    attempts = account(read_run(write_whole_run(tmp_path)))
    totals = total_phases([dataclasses.replace(attempts[1])])
    assert "detect" not in totals
    assert "unexplained" in totals
