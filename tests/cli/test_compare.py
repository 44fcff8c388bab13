"""`shardyard compare`: tables, a page beside the runs, JSON, and what it refuses."""

import json
import sys
from html import unescape
from pathlib import Path

import pytest

from shardyard.cli import main
from tests.report.compare.some_runs import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path, "first-1")
    write_run(tmp_path, "second-2", optim={"lr": 2e-3})
    return tmp_path


@pytest.mark.heavy
def test_tables_are_told_and_the_page_is_written_beside_the_runs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "first", "second", "--runs-dir", str(runs), "--target", "loss=4"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == str(runs / "compare.html")
    for words in ("first-1", "second-2", "inconclusive", "optim.lr", "loss 4", "interval"):
        assert words in shown.out
    assert "Steps left out: of first-1" in shown.err
    page = (runs / "compare.html").read_text()
    assert "<svg" in page and "against-dollars" in page


def test_json_holds_the_numbers_and_page_says_where_also_without_matplotlib(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = runs / "elsewhere.html"
    paths = [str(runs / name) for name in ("first-1", "second-2")]
    assert main(["compare", *paths, "--json", "--page", str(page)]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert "warning: matplotlib is not installed" in shown.err
    assert "pip install 'shardyard[plots]'" in unescape(page.read_text())
    assert told["page"] == str(page) and page.is_file()
    assert [run["run"] for run in told["runs"]] == ["first-1", "second-2"]
    assert told["speeds"][0]["verdict"] == "inconclusive"
    assert told["settings"] == [{"name": "optim.lr", "values": ["0.001", "0.002"]}]


@pytest.mark.parametrize(
    ("words", "said"), [(["first", "s3://b/x"], "is a URL"), ([], "Missing argument")]
)
def test_words_that_name_no_runs_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["compare", *words, "--runs-dir", str(runs)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_many_repeats_may_be_named_though_no_path_is_that_long(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name of a file has 255 bytes at most; what commas join are several."""
    names = ",".join(f"run-{number:030d}" for number in range(20))
    assert main(["compare", "first", names, "--runs-dir", str(runs)]) == 2
    assert "RUN 'run-000000000000000000000000000000' is neither" in capsys.readouterr().err
