"""What a run has cost, costs to its end, and what its target cost: against a simulated clock."""

from pathlib import Path

import pytest

from shardyard.report.cost import RunCost
from shardyard.report.html import render_html
from shardyard.report.markdown import render_markdown
from shardyard.report.page import report_document
from shardyard.report.run_data import read_run
from shardyard.report.summary import summarize
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import BEGAN_T, RunWriter, resolved_run, write_whole_run

USD_PER_HOUR = 110.08


def spend(writer: RunWriter) -> None:
    """Node 0's count; in this run it is paid from the beginning, without waits."""
    usd = round((writer.clock_t - BEGAN_T) / 3600 * USD_PER_HOUR, 4)
    writer.event("spent", usd=usd, usd_per_hour=USD_PER_HOUR)


def begun(folder: Path, *, steps: int = 120, **run: object) -> RunWriter:
    writer = RunWriter(RunDir(folder / "run"), resolved_run(steps=steps, run=run))
    writer.begin()
    writer.start()
    spend(writer)
    return writer


def cost_of(writer: RunWriter) -> RunCost:
    cost = summarize(read_run(writer.write())).cost
    assert cost is not None
    return cost


def lossy(writer: RunWriter, first: int, last: int) -> None:
    """Steps of which five are lost to a worker's end and done again, from a save before them."""
    writer.steps(first, last - 5)
    writer.save(last - 5)
    writer.steps(last - 4, last)
    writer.lose(after_s=0.5)
    writer.start(load_step=last - 5)
    writer.steps(last - 4, last)


def test_what_the_end_costs_holds_when_the_run_goes_on_as_it_did(tmp_path: Path) -> None:
    """Half of a run that loses work every 40 steps predicts the other half within 2 %."""
    writer = begun(tmp_path, steps=160)
    lossy(writer, 1, 40)
    lossy(writer, 41, 80)
    spend(writer)
    half = cost_of(writer)
    assert (half.last_step, half.target, half.why_open) == (160, "", "")
    lossy(writer, 81, 120)
    lossy(writer, 121, 160)
    spend(writer)
    whole = cost_of(writer)
    assert half.to_end_usd is not None
    assert half.so_far_usd + half.to_end_usd == pytest.approx(whole.so_far_usd, rel=0.02)
    assert half.pace_s is not None and half.pace_s > 1.1 * 0.62, "lost time is in it"


def test_the_first_start_and_waiting_between_attempts_are_in_no_pace(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.steps(1, 11)
    writer.end(143, "drained")
    writer.clock_t += 36_000
    writer.begin()
    writer.start()
    writer.steps(12, 21)
    spend(writer)
    pace_s = cost_of(writer).pace_s
    start_s = 0.35 + 1.5 + 0.4 + 2.2  # the end of an attempt and the start of the next are
    assert pace_s == pytest.approx((20 * 0.62 + 0.8 + start_s) / 20)


def test_a_finished_run_says_what_it_cost_and_nothing_more(tmp_path: Path) -> None:
    writer = begun(tmp_path, steps=20)
    writer.steps(1, 20)
    writer.finish(20)
    writer.end(0, "finished")
    spend(writer)
    cost = cost_of(writer)
    assert (cost.to_end_usd, cost.why_open) == (None, "")
    assert cost.words() == f"Cost: ${cost.so_far_usd:,.2f} so far, at $110.08 an hour."
    rows = {row.name: row for row in summarize(read_run(writer.run)).comparisons}
    assert (rows["cost"].measured, rows["cost"].predicted) == (cost.so_far_usd, None)


def test_the_target_costs_what_was_spent_when_an_evaluation_reached_it(tmp_path: Path) -> None:
    writer = begun(tmp_path, target={"loss": 6.0})
    writer.steps(1, 10)
    spend(writer)
    assert cost_of(writer).target_is_open
    assert "run.target (loss 6) would end it sooner" in cost_of(writer).words()
    writer.steps(11, 20)  # its evaluation tells 5.8
    reached_t = writer.clock_t
    writer.finish(20)
    writer.end(0, "the target is met")
    spend(writer)
    cost = cost_of(writer)
    assert cost.target_step == 20
    assert cost.target_usd == pytest.approx((reached_t - BEGAN_T) / 3600 * USD_PER_HOUR, abs=1e-3)
    assert "run.target (loss 6) was reached at step 20 for $" in cost.words()
    assert cost.to_end_usd is None, "it has ended, before its last step"


def test_before_two_steps_no_end_is_guessed(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    assert "what its end costs is not known: no two steps were done" in cost_of(writer).words()
    writer.steps(1, 1)
    assert cost_of(writer).to_end_usd is None


def test_without_a_price_nothing_is_said_of_money(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    summary = summarize(read_run(run))
    assert summary.cost is None and summary.to_json()["cost"] is None
    assert "Cost:" not in render_markdown(report_document(read_run(run), summary, {}))


def test_page_and_markdown_have_the_cost_among_their_first_numbers(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.steps(1, 60)
    spend(writer)
    record = read_run(writer.write())
    summary = summarize(record)
    assert summary.cost is not None and summary.to_json()["cost"]["to_end_usd"] > 0
    document = report_document(record, summary, {})
    for text in (render_markdown(document), render_html(document)):
        assert "at $110.08 an hour, about $" in text and "more to its end" in text
        assert "as since the first one" in text
