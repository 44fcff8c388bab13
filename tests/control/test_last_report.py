"""The report at the end of an attempt: in time, or not at all, and never the end's reason."""

import sys
import time
from pathlib import Path

import pytest

from shardyard.cli.train_here import _show
from shardyard.config.schema import Elastic, Recipe
from shardyard.control.last_report import write_last_report
from shardyard.control.train import Trained
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import EventWriter
from tests.report.synthetic import write_whole_run

RECIPE = Recipe(elastic=Elastic(drain_timeout_s=60.0))

pytestmark = pytest.mark.usefixtures("talk_on_stderr")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_whole_run(tmp_path)


def ask_to_stop(run: RunDir, *, ago_s: float) -> None:
    """Attempt 1 was asked to stop so long ago."""
    events = EventWriter(run.events, attempt=1, generation=0)
    events.write("draining", t=time.time() - ago_s)
    events.close()


@pytest.mark.heavy
def test_a_report_that_cannot_be_written_is_a_warning_and_the_numbers_are_there(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.report_html.mkdir()
    summary = write_last_report(run, 1, RECIPE)
    assert summary is not None and summary.steps_done == 120
    said = capsys.readouterr().err
    assert said.startswith(f"warning: there is no report: {run.report_html} cannot be written")


@pytest.mark.heavy
def test_no_path_is_printed_of_a_report_that_is_not_there(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = write_last_report(run, 1, RECIPE)
    assert summary is not None
    trained = Trained(run_dir=run, answer={}, summary=summary)
    _show(trained, summary)
    assert f"report_html: {run.report_html}" in capsys.readouterr().out
    run.report_html.unlink()
    _show(trained, summary)
    assert "report_html" not in capsys.readouterr().out


@pytest.mark.heavy
def test_a_report_without_pictures_is_a_warning_and_is_there(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_last_report(run, 1, RECIPE) is not None and run.report_html.is_file()
    said = capsys.readouterr().err
    assert said.startswith("warning: matplotlib is not installed")
    assert "pip install 'shardyard[plots]'" in said


@pytest.mark.heavy
def test_a_drain_writes_its_report_if_time_remains(run: RunDir) -> None:
    ask_to_stop(run, ago_s=1.0)
    assert write_last_report(run, 1, RECIPE) is not None
    assert run.report_html.is_file()


@pytest.mark.parametrize("ago_s", [61.0, 59.99])
def test_a_drain_whose_time_is_over_leaves_without_a_report(
    run: RunDir, ago_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_to_stop(run, ago_s=ago_s)  # the second: while it is written
    write_last_report(run, 1, RECIPE)
    assert not run.report_html.exists()
    said = capsys.readouterr().err
    assert "the 60 s of elastic.drain_timeout_s are over; `shardyard report " in said


@pytest.mark.heavy
def test_the_drain_of_another_attempt_limits_nothing(run: RunDir) -> None:
    assert write_last_report(run, 1, Recipe(elastic=Elastic(drain_timeout_s=0.001))) is not None
    assert run.report_html.is_file()


def test_a_folder_that_is_gone_gets_no_report_and_no_second_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_last_report(RunDir(tmp_path / "gone"), 0, RECIPE) is None
    assert not (tmp_path / "gone").exists()
    assert capsys.readouterr().err == ""
