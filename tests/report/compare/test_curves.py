"""A run on every axis: each step once, gaps where nothing was measured, time as events say."""

import json
from pathlib import Path

import pytest

from shardyard.report.compare.curves import RunCurves, curves_of
from shardyard.report.compare.statistics import EVALUATION, OTHER, SAVE, START, pace_of
from shardyard.report.run_data import RunRecord, read_run
from shardyard.report.walltime import account
from shardyard.rundir.layout import RunDir
from tests.report.compare.some_runs import USD_PER_HOUR, record_of
from tests.report.synthetic import STEP_S, RunWriter, resolved_run, write_whole_run


def curves(record: RunRecord) -> RunCurves:
    return curves_of(record, account(record))


def test_a_step_that_was_done_twice_is_there_once_as_it_was_done_last(tmp_path: Path) -> None:
    record = read_run(write_whole_run(tmp_path))
    steps = record.steps
    assert [line["step"] for line in steps] == list(range(1, 121))
    assert {line["generation"] for line in steps if 41 <= line["step"] <= 45} == {1}
    assert record.lost  # and they were there


def test_steps_that_were_lost_and_not_done_again_are_not_shown(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 60)
    writer.lose(after_s=0.5)
    writer.start(load_step=40)
    writer.steps(41, 50)
    found = curves(read_run(writer.write()))
    assert [line["step"] for line in found.steps] == list(range(1, 51))
    assert [place["steps"] for place, _ in found.evaluations] == [20, 40]
    hours = [hours for place in found.positions if (hours := place["hours"]) is not None]
    assert len(hours) == 50 and hours == sorted(hours)


def test_hours_and_dollars_follow_the_events_without_waiting_between_attempts(
    tmp_path: Path,
) -> None:
    record = read_run(write_whole_run(tmp_path))
    found = curves(record)
    last = found.positions[-1]["hours"]
    saved = [e["t"] for e in record.all("checkpoint_started")][-1]
    # 600 s passed between the attempts, and the last step ended 0.05 s (and an evaluation) earlier
    waited_s = sum(time.phases.get("waiting", 0.0) for time in account(record))
    assert waited_s > 590 and last is not None
    assert last * 3600 == pytest.approx(saved - 0.05 - 0.8 - account(record)[0].began_t - waited_s)
    assert found.positions[0]["dollars"] is None  # no price was known

    priced = curves(record_of(tmp_path, "priced"))
    first, second = (priced.positions[n]["dollars"] for n in (0, 1))
    assert first is not None and second is not None
    assert second - first == pytest.approx(STEP_S / 3600 * USD_PER_HOUR)


def test_an_evaluation_is_where_it_ended(tmp_path: Path) -> None:
    found = curves(record_of(tmp_path, "run"))
    place, scores = found.evaluations[0]
    step = found.positions[19]
    assert (place["steps"], place["tokens"]) == (20, step["tokens"])
    assert place["hours"] is not None and step["hours"] is not None
    assert (place["hours"] - step["hours"]) * 3600 == pytest.approx(0.8)
    assert scores["loss"] == found.of_evaluations("loss").values[0]


def test_what_is_missing_is_a_gap_and_never_zero(tmp_path: Path) -> None:
    run = record_of(tmp_path, "run", steps=30).run
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if line["step"] in (10, 11) and "eval" not in line:
            line["loss"] = None
    kept = [line for line in lines if line["step"] != 20]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    stretches = curves(read_run(run)).of_steps("loss").segments("steps")
    assert [(s[0][0], s[-1][0]) for s in stretches] == [(1, 9), (12, 19), (21, 30)]
    assert all(y > 0 for stretch in stretches for _, y in stretch)


def test_a_place_that_is_not_known_has_no_point(tmp_path: Path) -> None:
    found = curves(record_of(tmp_path, "run", usd_per_hour=None))
    assert found.of_steps("loss").segments("dollars") == []
    assert len(found.of_steps("loss").segments("hours")) == 1


def test_steps_beside_starts_evaluations_and_saves_do_not_count(tmp_path: Path) -> None:
    record = read_run(write_whole_run(tmp_path))
    pace, left_out = pace_of(record, account(record))
    # three starts of five steps: 1, 41 and 81. Evaluations at 20, 40, ... 120; the steps after
    # those at 40 and 80 are the first of a start. Saves at 40, 80 and 120 are evaluations, too.
    assert left_out == {START: 15, EVALUATION: 6 + 3}
    assert len(pace.seconds) + sum(left_out.values()) == 120
    assert pace.started_t == account(record)[0].began_t


def test_steps_that_a_save_was_written_beside_do_not_count(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 10)
    writer.event("checkpoint_started", step=10, blocked_s=0.05)
    writer.event("checkpoint_durable", step=10, seconds=2.2 * STEP_S, bytes=1)
    writer.steps(11, 19)
    record = read_run(writer.write())
    assert pace_of(record, account(record))[1] == {START: 5, SAVE: 4}  # 10 to 13


def test_steps_on_fewer_ranks_do_not_count_as_those_on_all(tmp_path: Path) -> None:
    run = record_of(tmp_path, "run", steps=60).run
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if line["step"] > 50 and "eval" not in line:
            line["world_size"] = 1
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(run)
    assert pace_of(record, account(record))[1][OTHER] == 10


def test_saves_and_evaluations_of_lost_steps_leave_no_step_out(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 13)
    writer.evaluate(13)
    writer.steps(14, 17)
    writer.save(17)
    writer.lose(after_s=0.5)
    writer.start(load_step=2)  # the later save is damaged
    writer.steps(3, 19)
    record = read_run(writer.write())
    assert pace_of(record, account(record))[1] == {START: 2 + 5}
