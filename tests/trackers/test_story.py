"""What is sent of a run follows from its files, whoever reads them and when."""

from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.rundir.layout import RunDir
from shardyard.trackers.run_feed import Lines, end_of, read_attempt_metadata
from shardyard.trackers.service import MetricsRow, flat
from tests.trackers.runs import begin, lose_and_drain, new_run, resume_and_finish, steps_of


def rows_of(run: RunDir, *, most: int = 1000) -> list[MetricsRow]:
    """All rows, so many lines at a time."""
    lines, found = Lines(run), []
    while True:
        before = lines.seen
        found += lines.read(after=0, most=most)
        if lines.seen == before:
            return found


def test_each_line_is_a_row_steps_that_were_done_again_too(tmp_path: Path) -> None:
    writer = new_run(tmp_path)
    begin(writer)
    run = lose_and_drain(writer)
    rows = rows_of(run)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8] == steps_of(writer)
    assert [row.number for row in rows] == list(range(1, 13))
    assert rows[0].values["train/loss"] == writer.lines[0]["loss"]
    assert "train/mfu" not in rows[0].values, "null is no point of a curve"
    assert {"epoch", "tokens", "samples"} <= rows[0].values.keys()


def test_read_as_it_grows_a_run_has_the_rows_that_it_has_when_read_at_once(tmp_path: Path) -> None:
    writer = new_run(tmp_path)
    lines = Lines(begin(writer))
    live = lines.read(after=0)
    for go_on in (lose_and_drain, resume_and_finish):
        run = go_on(writer)
        live += lines.read(after=0, most=7)
        live += lines.read(after=0)
    assert live == rows_of(run) == rows_of(run, most=3)
    assert [row.t for row in live] == sorted(row.t for row in live)


def test_times_are_those_of_the_steps(tmp_path: Path) -> None:
    writer = new_run(tmp_path)
    begin(writer)
    run = resume_and_finish(writer, last=24)
    rows = rows_of(run)
    told = {e["step"]: e["t"] for e in writer.events if e["kind"] in ("first_step", "evaluated")}
    ends = {row.step: row.t for row in rows if "train/loss" in row.values}
    evaluated = {row.step: row.t for row in rows if "eval/loss" in row.values}
    assert (ends[1], ends[9]) == (told[1], told[9])
    assert evaluated[20] == told[20]
    assert ends[21] == pytest.approx(told[20] + 0.62), "the evaluation lies between"


def test_what_a_service_has_had_is_left_out(tmp_path: Path) -> None:
    run = begin(new_run(tmp_path))
    lines = Lines(run)
    assert [row.number for row in lines.read(after=3)] == [4] and lines.seen == 4
    assert lines.read(after=3) == []


def test_a_torn_line_counts_and_one_that_is_being_written_waits(tmp_path: Path) -> None:
    run = begin(new_run(tmp_path))
    whole = run.metrics.read_bytes()
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 5, "loss"\n' + whole.splitlines()[3].replace(b": 4,", b": 5,", 1))
    lines = Lines(run)
    assert [row.number for row in lines.read(after=0)] == [1, 2, 3, 4] and lines.seen == 5
    with run.metrics.open("ab") as file:
        file.write(b"\n")
    (row,) = lines.read(after=0)
    assert (row.number, row.step) == (6, 5)


def test_settings_say_nothing_of_secrets(tmp_path: Path) -> None:
    facts = read_attempt_metadata(begin(new_run(tmp_path)), 0)
    settings = flat(facts.settings)
    assert settings["optim.lr"] == 1e-3 and settings["model.preset"] == "llama-laptop"
    assert not [name for name in settings if name.startswith(("secrets", "launch.env"))]
    assert facts.predicted["parameters"] > 1e6 and facts.predicted["memory_bytes"] > 0


def test_an_attempt_that_nobody_wrote_down_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"resume the run to make a new attempt"):
        read_attempt_metadata(begin(new_run(tmp_path)), 1)


def test_an_end_has_the_numbers_of_the_report(tmp_path: Path) -> None:
    writer = new_run(tmp_path)
    begin(writer)
    drained = end_of(lose_and_drain(writer), 0, now_t=1.0)
    assert (drained.outcome, drained.exit_code) == ("drained", 143)
    assert drained.t == writer.events[-1]["t"]
    run = resume_and_finish(writer)
    done = end_of(run, 1, now_t=1.0)
    assert (done.outcome, done.exit_code, done.reason) == ("finished", 0, "finished")
    assert done.result["steps_done"] == 20 and done.result["restarts"] == 1
    assert done.result["eval_loss"] == pytest.approx(writer.lines[-1]["eval"]["loss"])


def test_an_attempt_without_a_last_word_is_lost(tmp_path: Path) -> None:
    end = end_of(begin(new_run(tmp_path)), 0, now_t=7.0)
    assert (end.outcome, end.exit_code, end.t) == ("lost", 255, 7.0)
