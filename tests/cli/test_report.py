"""`shardyard report`: both files in the run folder, their paths on stdout."""

import json
import sys
from html import unescape
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
    assert "Where the wall time went" in page and "no step" not in page.lower()


def test_a_run_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "nothing", "--runs-dir", str(tmp_path)]) == 2
    assert "nothing" in capsys.readouterr().err
