"""Predicted against measured: one row a term, where a run measured it."""

from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from shardyard.hardware.machine import Machine
from shardyard.planner.plan import Plan
from shardyard.report.against_plan import PlanRow, against_plan, steady
from shardyard.report.page import write_report
from shardyard.report.run_data import read_run
from shardyard.report.walltime import account
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import STEP_S, RunWriter, resolved_run, write_whole_run

H100 = Machine(
    device="cuda", name="NVIDIA H100 80GB HBM3", count=2, memory_bytes=80 * 2**30, cores=16,
    hostname="a",
)  # fmt: skip


def writer_on_h100(folder: Path) -> RunWriter:
    resolved = resolved_run(
        precision={"compute": "bf16", "output": "bf16"}, cluster={"device": "cuda", "devices": 2}
    )
    return RunWriter(RunDir(folder / "run"), resolved, machine=H100)


def whole_run(folder: Path, **finished: Any) -> RunDir:
    """30 steps, with a loss of a worker after 20; ``finished``: fields of its last event."""
    writer = writer_on_h100(folder)
    writer.begin()
    writer.start()
    writer.steps(1, 20)
    writer.save(20)
    writer.lose(after_s=0.5)
    writer.start(load_step=20)
    writer.steps(21, 30)
    for line in writer.lines:
        line["mfu"] = 0.25
    writer.finish(30)
    writer.events[-1].update(finished)
    writer.end(0, "finished")
    return writer.write()


def rows_of(run: RunDir) -> tuple[dict[str, PlanRow], Plan]:
    record = read_run(run)
    assert record.plan is not None
    return {row.name: row for row in against_plan(record, account(record))}, record.plan


def test_a_step_and_its_mfu_stand_beside_their_prediction(tmp_path: Path) -> None:
    rows, plan = rows_of(whole_run(tmp_path))
    step = rows["time of a step"]
    assert (step.predicted, step.measured) == (plan.step_s, STEP_S)
    assert plan.step_s is not None
    assert step.error == pytest.approx(plan.step_s / STEP_S - 1)
    mfu = rows["MFU"]
    assert (mfu.predicted, mfu.measured, mfu.unit) == (plan.mfu, 0.25, "share")
    assert rows["throughput"].predicted == plan.speed.tokens_per_s
    assert rows["time of all steps"].measured == pytest.approx(30 * STEP_S)


def test_reserved_memory_is_compared_where_the_run_recorded_it(tmp_path: Path) -> None:
    rows, _ = rows_of(whole_run(tmp_path / "old"))
    assert "reserved memory, largest rank" not in rows
    recorded = {"reserved_bytes_by_rank": [500 * 2**20, 510 * 2**20]}
    rows, plan = rows_of(whole_run(tmp_path / "new", **recorded))
    reserved = rows["reserved memory, largest rank"]
    assert (reserved.predicted, reserved.measured) == (plan.reserved_bytes, 510 * 2**20)


def test_the_moment_of_the_predicted_peak_is_said(tmp_path: Path) -> None:
    rows, plan = rows_of(whole_run(tmp_path))
    assert plan.memory_moment in rows["peak memory, largest rank"].note


def test_what_saves_and_failures_left_is_compared(tmp_path: Path) -> None:
    rows, plan = rows_of(whole_run(tmp_path))
    assert plan.failures is not None
    record = read_run(RunDir(tmp_path / "run"))
    (attempt,) = account(record)
    effective = rows["effective time"]
    assert effective.predicted == plan.failures.ettr
    # 30 steps stand; their waiting for data belongs to them
    assert effective.measured == pytest.approx(30 * STEP_S / attempt.seconds)
    assert "1 happened" in effective.note
    assert rows["wall time"].measured == attempt.seconds
    assert rows["blocked by saves"].measured == pytest.approx(0.05)


def test_without_predicted_failures_effective_time_is_measured_alone(tmp_path: Path) -> None:
    rows, plan = rows_of(write_whole_run(tmp_path))
    assert plan.failures is None
    assert not {"wall time", "blocked by saves", "MFU"} & set(rows)
    effective = rows["effective time"]
    assert effective.predicted is None
    assert effective.measured is not None and 0 < effective.measured < 1


def test_a_run_under_way_compares_no_sums(tmp_path: Path) -> None:
    writer = writer_on_h100(tmp_path)
    writer.begin()
    writer.start()
    writer.steps(1, 5)
    rows, _ = rows_of(writer.write())
    assert "wall time" not in rows
    assert rows["effective time"].measured is not None  # so far
    assert rows["time of all steps"].measured is None
    assert rows["time of a step"].error is not None


@pytest.mark.heavy
def test_page_and_markdown_print_terms_shares_and_errors(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    write_report(run)
    _, plan = rows_of(run)
    page, markdown = run.report_html.read_text(), run.report_markdown.read_text()
    assert "Predicted time of a step" in page
    for term in plan.time:
        assert str(escape(term.reason)) in page
    assert plan.mfu is not None
    assert f"| MFU | {100 * plan.mfu:.1f} % | 25.0 % |" in markdown


def test_the_first_step_of_each_start_is_no_measure_of_speed() -> None:
    first = tuple({"attempt": 0, "step_time_s": s} for s in (9.0, 1.0, 1.0))
    second = tuple({"attempt": 1, "step_time_s": s} for s in (9.0, 1.0))
    restarted = tuple({"attempt": 1, "generation": 1, "step_time_s": s} for s in (9.0, 2.0))
    assert steady((*first, *second, *restarted), "step_time_s") == [1.0, 1.0, 1.0, 2.0]
    assert steady(first[:1], "step_time_s") == [9.0], "there is no other"


def test_a_run_that_finished_and_was_resumed_for_more_steps_is_whole_only_at_its_new_end(
    tmp_path: Path,
) -> None:
    writer = writer_on_h100(tmp_path)
    writer.begin()
    writer.start()
    writer.steps(1, 30)
    writer.finish(30)
    writer.end(0, "finished")
    assert "wall time" in rows_of(writer.write())[0]
    writer.begin()
    writer.start(load_step=30)
    writer.steps(31, 40)
    writer.end(1, "a rank was lost")
    assert "wall time" not in rows_of(writer.write())[0]
    writer.begin()
    writer.start(load_step=30)
    writer.steps(31, 60)
    writer.finish(60)
    writer.end(0, "finished")
    assert "wall time" in rows_of(writer.write())[0]
