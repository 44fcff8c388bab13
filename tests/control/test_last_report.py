"""The report at the end of an attempt: in time, or not at all, and never the end's reason."""

import signal
import sys
import time
from pathlib import Path

import pytest

from shardyard.cli.run_attempt import _show, _show_sample
from shardyard.config.schema.recipe import Elastic, Recipe
from shardyard.control import train
from shardyard.control.train import TrainResult, write_last_report
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import SAMPLE, write_whole_run

RECIPE = Recipe(elastic=Elastic(drain_timeout_s=60.0))

pytestmark = pytest.mark.usefixtures("talk_on_stderr")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_whole_run(tmp_path)


@pytest.mark.heavy
def test_a_report_that_cannot_be_written_is_a_warning_and_the_numbers_are_there(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.report_html.mkdir()
    summary = write_last_report(run, 1, RECIPE, remaining_s=None)
    assert summary is not None and summary.steps_done == 120
    said = capsys.readouterr().err
    assert said.startswith(f"warning: no report was written: {run.report_html} cannot be written")


@pytest.mark.heavy
def test_no_path_is_printed_of_a_report_that_is_not_there(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = write_last_report(run, 1, RECIPE, remaining_s=None)
    assert summary is not None
    trained = TrainResult(run_dir=run, answer={}, summary=summary)
    _show(trained, summary)
    assert f"report_html: {run.report_html}" in capsys.readouterr().out
    run.report_html.unlink()
    _show(trained, summary)
    assert "report_html" not in capsys.readouterr().out


def test_the_prompt_and_what_the_model_wrote_after_it_are_printed_apart(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    _show_sample(run)
    out = capsys.readouterr().out
    assert SAMPLE.startswith("def <script>")
    assert out.startswith("\nprompt:\n\n    def <script>\n\nthe model continues, greedy:\n\n    ")
    run.sample.write_text("another <text>\n    of two lines\n")
    _show_sample(run)
    assert capsys.readouterr().out == (
        "\na sample of generated text, greedy:\n\n    another <text>\n        of two lines\n"
    )


@pytest.mark.heavy
def test_a_report_without_pictures_is_a_warning_and_is_there(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert (
        write_last_report(run, 1, RECIPE, remaining_s=None) is not None
        and run.report_html.is_file()
    )
    said = capsys.readouterr().err
    assert said.startswith("warning: matplotlib is not installed")
    assert "pip install 'shardyard[plots]'" in said


@pytest.mark.heavy
@pytest.mark.parametrize("clock_ahead_s", [-3600.0, 3600.0])
def test_a_drain_writes_its_report_if_time_remains_whatever_a_clock_says(
    run: RunDir, clock_ahead_s: float
) -> None:
    """Another node may have written the event, or this one's clock was set since."""
    events = EventWriter(run.events, attempt=1, generation=0)
    events.write("draining", t=time.time() + clock_ahead_s)
    events.close()
    assert write_last_report(run, 1, RECIPE, remaining_s=59.0) is not None
    assert run.report_html.is_file()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_falls_into_a_finalizer_holds_all_the_same() -> None:
    class Busy:
        def __del__(self) -> None:
            time.sleep(0.2)

    began_s = time.monotonic()
    with pytest.raises(train._OutOfTime), train._limited_to(0.05):
        Busy()
        time.sleep(5.0)
    assert time.monotonic() - began_s < 2.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("left_s", [-1.0, 0.01])
def test_a_drain_whose_time_is_over_leaves_without_a_report(
    run: RunDir, left_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    write_last_report(run, 1, RECIPE, remaining_s=left_s)  # the second: while it is written
    assert not run.report_html.exists()
    said = capsys.readouterr().err
    assert "the 60 s of elastic.drain_timeout_s are over; `shardyard report " in said


def test_a_folder_that_is_gone_gets_no_report_and_no_second_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_last_report(RunDir(tmp_path / "gone"), 0, RECIPE, remaining_s=None) is None
    assert not (tmp_path / "gone").exists()
    assert capsys.readouterr().err == ""
