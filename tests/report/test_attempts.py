"""A run of several attempts: every form says what was trained, when, and on how many ranks."""

import json
from pathlib import Path

import pytest

from shardyard.cli.run_attempt import _show
from shardyard.control.train import TrainResult
from shardyard.report.page import tiles, write_report
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.layout import RunDir
from shardyard.units import format_percent
from tests.report.synthetic import STEP_S, RunWriter, resolved_run

WAIT_S = 1481.0
SLOW_S = 2 * STEP_S


def resumed_on_one_rank(folder: Path) -> RunDir:
    """62 steps on two ranks, a drain, 24 min 41 s of nothing, 10 steps on one rank."""
    writer = RunWriter(RunDir(folder / "resumed"), resolved_run(steps=72))
    writer.begin()
    writer.start()
    writer.steps(1, 62)
    writer.save(62)
    writer.end(143, "drained")
    writer.clock_t += WAIT_S
    writer.begin()
    writer.start(load_step=62)
    writer.steps(63, 72)
    writer.clock_t += 10 * (SLOW_S - STEP_S)
    for line in writer.lines:
        if line.get("attempt") == 1:
            line |= {"world_size": 1, "step_time_s": SLOW_S, "tokens_per_s": 3300.0}
            line["peak_memory_bytes"] = 400 * 2**20
        elif "eval" not in line:
            line["peak_memory_bytes"] = 520 * 2**20
    writer.save(72)
    writer.finish(72)
    writer.events[-1]["peak_bytes_by_rank"] = [405 * 2**20]
    writer.end(0, "finished")
    return writer.write()


def summary_of(run: RunDir) -> Summary:
    return summarize(read_run(run))


def test_the_step_time_is_of_the_ranks_that_did_most_steps(tmp_path: Path) -> None:
    summary = summary_of(resumed_on_one_rank(tmp_path))
    assert summary.step_time_s == STEP_S
    assert [(pace.ranks, pace.steps) for pace in summary.paces] == [(2, 62), (1, 10)]
    assert summary.paces[1].step_time_s == SLOW_S and summary.paces[1].tokens_per_s == 3300.0
    by_label = {label: (value, below) for label, value, below in tiles(summary)}
    assert by_label["step time"] == ("620 ms", "median, 62 of 72 steps on 2 ranks")
    assert by_label["tokens per second"][1] == "median, of 2 ranks together"
    assert summary.world_size == 1, "of the last step, as before"


def test_time_between_attempts_is_told_apart_in_every_form(tmp_path: Path) -> None:
    run = resumed_on_one_rank(tmp_path)
    summary = write_report(run)
    assert summary.between_s == pytest.approx(WAIT_S)
    assert summary.running_s + summary.between_s == pytest.approx(summary.wall_s)
    trained_s = 62 * STEP_S + 10 * SLOW_S
    assert summary.trained_s == pytest.approx(trained_s)
    assert summary.effective_share == pytest.approx(trained_s / summary.running_s)
    assert "another 24 min 41 s lie between the attempts" in summary.sentence()
    page, markdown = run.report_html.read_text(), run.report_markdown.read_text()
    for text in (page, markdown):
        assert "2 attempts, 0 restarts; 24 min 41 s of it between attempts" in text
        assert "Effective share = time trained / running time." in text
    content = json.loads(json.dumps(summary.to_json()))
    assert {"running_s", "between_s", "trained_s", "paces"} <= content.keys()
    first, second = content["attempts"]
    assert (first["ranks"], first["steps"], first["between_s"]) == ([2], 62, 0.0)
    assert (second["ranks"], second["steps"]) == ([1], 10)
    assert second["between_s"] == pytest.approx(WAIT_S)
    assert {"began_t", "seconds", "phases", "has_ended"} <= first.keys(), "as before"


def test_shares_of_the_table_add_up_to_the_effective_share(tmp_path: Path) -> None:
    run = resumed_on_one_rank(tmp_path)
    summary = write_report(run)
    rows = [line.strip("| ").split(" | ") for line in run.report_markdown.read_text().splitlines()]
    shares = {row[0]: row[2] for row in rows if len(row) == 4}
    share = sum(float(shares[name].removesuffix(" %")) for name in ("productive", "data wait"))
    assert summary.effective_share is not None
    assert share == pytest.approx(100 * summary.effective_share, abs=0.11)


def test_the_peak_is_of_all_attempts_and_says_whose(tmp_path: Path) -> None:
    summary = summary_of(resumed_on_one_rank(tmp_path))
    assert summary.peak_memory_bytes == 520 * 2**20
    (peak,) = [tile for tile in tiles(summary) if tile[0] == "peak memory"]
    assert peak[1] == "520.0 MiB"
    assert peak[2] == "highest of 2 attempts; attempt 0 520.0 MiB (rank 0); attempt 1 405.0 MiB"


def test_the_plan_is_compared_with_the_steps_that_it_predicts(tmp_path: Path) -> None:
    rows = {row.name: row for row in summary_of(resumed_on_one_rank(tmp_path)).comparisons}
    assert rows["time of a step"].measured == STEP_S, "without the steps on one rank"


def test_the_terminal_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = resumed_on_one_rank(tmp_path)
    summary = summary_of(run)
    _show(TrainResult(run_dir=run, answer={}, summary=summary), summary)
    said = " ".join(capsys.readouterr().out.split())
    assert summary.effective_share is not None
    assert "step time 620 ms median, 62 of 72 steps on 2 ranks" in said
    assert "2 attempts, 0 restarts; 24 min 41 s of it between attempts" in said
    assert f"{format_percent(summary.effective_share)} of " in said and "running time" in said
