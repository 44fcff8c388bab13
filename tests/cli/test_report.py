"""`shardyard report`: both files in the run folder, their paths on stdout."""

import json
from pathlib import Path

import pytest

from shardyard.cli import main
from tests.report.synthetic import write_whole_run


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


def test_a_run_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "nothing", "--runs-dir", str(tmp_path)]) == 2
    assert "nothing" in capsys.readouterr().err
