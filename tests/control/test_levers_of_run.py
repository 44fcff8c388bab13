"""Levers of a run that was measured: the planner's, scaled by the measured step time."""

from dataclasses import asdict
from pathlib import Path

import pytest

from shardyard.config.load import dump_recipe
from shardyard.control.suggestions import levers_of_run
from shardyard.hardware.machine import Machine
from shardyard.io.files import read_json, write_json
from shardyard.report.page import write_report
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import STEP_S, RunWriter, resolved_run

H100 = Machine(
    device="cuda", name="NVIDIA H100 80GB HBM3", count=2, memory_bytes=80 * 2**30, cores=16,
    hostname="a",
)  # fmt: skip


def measured_on_h100(folder: Path) -> RunDir:
    """A run that recomputes every block although its memory is nearly empty."""
    resolved = resolved_run(
        precision={"compute": "bf16", "output": "bf16"},
        cluster={"device": "cuda", "devices": 2},
        memory={"recompute": "full"},
    )
    writer = RunWriter(RunDir(folder / "run"), resolved, machine=H100)
    writer.begin()
    writer.start()
    writer.steps(1, 30)
    writer.finish(30)
    writer.end(0, "finished")
    run = writer.write()
    run.attempt_recipe(0).write_text(dump_recipe(resolved.recipe))
    manifest = read_json(run.manifest(0))
    write_json(run.manifest(0), {**manifest, "machine": asdict(H100)})
    return run


def test_the_three_best_levers_start_from_what_was_measured(tmp_path: Path) -> None:
    run = measured_on_h100(tmp_path)
    levers = levers_of_run(read_run(run), STEP_S)
    assert 1 <= len(levers) <= 3
    assert [lever.gain for lever in levers] == sorted((v.gain for v in levers), reverse=True)
    for lever in levers:
        assert lever.settings and all("=" in setting for setting in lever.settings)
        assert lever.gain >= 0.02
        assert lever.step_time_s == pytest.approx(STEP_S * (1 - lever.gain))
        assert "changes what is learnt" not in lever.note


def test_levers_and_findings_are_in_every_form(tmp_path: Path) -> None:
    run = measured_on_h100(tmp_path)
    summary = write_report(run, suggest=levers_of_run)
    assert summary.levers and any(text.startswith("Memory: ") for text in summary.findings)
    page, markdown = run.report_html.read_text(), run.report_markdown.read_text()
    override = " ".join(summary.levers[0].settings)
    assert f'<code class="copy">{override}</code>' in page and 'id="what-to-change-section"' in page
    assert "## What to change" in markdown and f"`{override}`" in markdown
    (first, *_) = summary.to_json()["levers"]
    assert first["gain"] == summary.levers[0].gain
    assert "620 ms measured" in markdown


@pytest.mark.parametrize("lacks", ["recipe", "machine", "plan"])
def test_a_run_that_cannot_be_planned_has_none(tmp_path: Path, lacks: str) -> None:
    run = measured_on_h100(tmp_path)
    if lacks == "recipe":
        run.attempt_recipe(0).unlink()
    elif lacks == "plan":
        run.plan(0).unlink()
    else:
        manifest = read_json(run.manifest(0))
        write_json(run.manifest(0), {**manifest, "machine": {"device": "cuda"}})
    assert levers_of_run(read_run(run), STEP_S) == ()
