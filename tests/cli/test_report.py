"""`shardyard report`: both files in the run folder, their paths on stdout."""

import json
import sys
from html import unescape
from pathlib import Path

import pytest

from shardyard.cli import main
from tests.report.synthetic import write_whole_run
from tests.trackers.runs import begin, new_run


@pytest.mark.heavy
def test_the_paths_are_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_whole_run(tmp_path)
    assert main(["report", "quickstart", "--runs-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == [str(run.report_html), str(run.report_markdown)]
    assert "Finished: 120 of 120 steps" in shown.err
    assert run.report_html.is_file() and run.report_markdown.is_file()


@pytest.mark.heavy
def test_json_holds_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_whole_run(tmp_path)
    assert main(["report", str(run.path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["state"] == "finished"
    assert content["report_html"] == str(run.report_html)
    assert sum(content["phases"].values()) == pytest.approx(content["wall_s"])
    assert {"name", "predicted", "measured", "error"} <= content["comparisons"][0].keys()


@pytest.mark.heavy
def test_without_matplotlib_there_is_a_page_without_pictures_that_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_whole_run(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run.path)]) == 0
    shown = capsys.readouterr()
    (warning,) = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    assert "matplotlib is not installed" in warning
    assert warning.endswith("pip install 'shardyard[plots]'")
    page = unescape(run.report_html.read_text())
    assert warning.removeprefix("warning: ") in page and "<svg" not in page
    assert "Where the time went" in page and "no step" not in page.lower()


def test_a_run_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "nothing", "--runs-dir", str(tmp_path)]) == 2
    assert "nothing" in capsys.readouterr().err


def test_a_run_that_asks_for_no_service_is_sent_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_whole_run(tmp_path)
    assert main(["report", str(run.path), "--send"]) == 2
    said = capsys.readouterr().err
    assert "neither observe.wandb.project nor observe.mlflow.url" in said and "resume" in said
    assert not run.report_html.exists()


def test_a_folder_without_attempts_does_not_say_where_its_run_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_whole_run(tmp_path)
    for number in run.attempts():
        run.resolved(number).unlink()
    assert main(["report", str(run.path), "--send"]) == 2
    said = capsys.readouterr().err
    assert "so it is not known where the run is sent" in said and "shardyard fetch" in said


def test_a_run_is_not_sent_without_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = begin(new_run(tmp_path, wandb={"project": "tests"}))
    assert main(["report", str(run.path), "--send"]) == 2
    said = capsys.readouterr().err
    assert "secrets.WANDB_API_KEY" in said and "export WANDB_API_KEY" in said
    assert "HF_TOKEN" not in said, "what the services do not need is not asked for"
