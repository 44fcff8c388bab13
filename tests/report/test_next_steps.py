"""Findings beyond their thresholds, and the commands to copy."""

import shlex
from pathlib import Path

import pytest

from shardyard.report.next_steps import DATA_WAIT_SHARE
from shardyard.report.page import write_report
from shardyard.report.run_data import read_run
from shardyard.report.summary import Summary, summarize
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import STEP_S, RunWriter, resolved_run, write_whole_run
from tests.report.test_against_plan import writer_on_h100


def summary_with(writer: RunWriter, **line: float) -> Summary:
    writer.begin()
    writer.start()
    writer.steps(1, 10)
    for each in writer.lines:
        if "eval" not in each:
            each |= line
    return summarize(read_run(writer.write()))


@pytest.mark.parametrize(("share", "is_finding"), [(0.9, False), (1.1, True)])
def test_data_wait_is_a_finding_from_its_threshold(
    tmp_path: Path, share: float, is_finding: bool
) -> None:
    writer = RunWriter(RunDir(tmp_path / "run"), resolved_run())
    found = summary_with(writer, data_wait_s=share * DATA_WAIT_SHARE * STEP_S).findings
    assert bool(found) is is_finding
    if found:
        assert found[0].startswith("Data wait: 5.5 % of the step time") and "from 5%" in found[0]


def test_a_full_and_an_empty_device_are_findings(tmp_path: Path) -> None:
    full = summary_with(writer_on_h100(tmp_path / "full"), peak_memory_bytes=78 * 2**30)
    assert any("a finding from 92%" in text for text in full.findings)
    empty = summary_with(writer_on_h100(tmp_path / "empty"), peak_memory_bytes=10 * 2**30)
    assert any("a finding below 50%" in text for text in empty.findings)


def test_predicted_communication_says_that_it_is_predicted(tmp_path: Path) -> None:
    found = summary_with(writer_on_h100(tmp_path)).findings
    told = [text for text in found if text.startswith("Communication: ")]
    assert all("predicted by the plan, not measured" in text for text in told)


def test_commands_follow_the_state_of_the_run(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    summary = write_report(run)
    purposes = [each.purpose for each in summary.commands]
    assert purposes == [
        "train as many steps again", "compare it with another run", "open this page",
    ]  # fmt: skip
    page, markdown = run.report_html.read_text(), run.report_markdown.read_text()
    for each in summary.commands:
        assert f'<pre class="copy">{each.command}</pre>' in page
        assert f"\n{each.command}\n" in markdown
    assert 'id="commands-section"' in page


def test_a_drained_run_is_resumed_and_its_checkpoint_exported(tmp_path: Path) -> None:
    writer = RunWriter(RunDir(tmp_path / "a run"), resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 5)
    writer.end(143, "drained")
    run = writer.write()
    run.checkpoint(5).mkdir(parents=True)
    run.latest.write_text(run.checkpoint(5).name)
    commands = {c.purpose: c.command for c in summarize(read_run(run)).commands}
    assert shlex.split(commands["continue the run"]) == ["shardyard", "resume", str(run.path)]
    assert "export the model in Hugging Face format" in commands
