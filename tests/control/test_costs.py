"""Costs of runs by tag, owner and month, against sums made by hand."""

import calendar
import json
import os
import pwd
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.control.costs import account_of, add_up
from shardyard.launchers.ledger import Ledger, LedgerEntry, Submission
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import shardyard

ME = pwd.getpwuid(os.geteuid()).pw_name
OCTOBER = calendar.timegm((2026, 10, 31, 12, 0, 0))
NOVEMBER = calendar.timegm((2026, 11, 30, 12, 0, 0))
SOURCE = "p5.48xlarge on demand"


def make_run(folder: Path, name: str, counts: list[tuple[int, float]], **details: str) -> RunDir:
    """A run with counts of node 0 (unix seconds, dollars in all); launched if by details."""
    run = RunDir(folder / name)
    run.plan(0).parent.mkdir(parents=True)
    run.recipe.touch()
    (run.plan(0).parent / "recipe.yaml").touch()
    run.plan(0).write_text(json.dumps({"price": {"usd_per_hour": 98.3, "source": SOURCE}}))
    lines = [{"kind": "run_started", "tags": {"team": "vision"}, "t": OCTOBER}]
    lines += [{"kind": "spent", "t": t, "usd": usd, "usd_per_hour": 98.3} for t, usd in counts]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if details:
        job = Submission(launcher="fake", run_id=name, id="8", name="sy", details=details)
        Ledger(run.ledger).record(job)
    return run


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    tagged = {"tags": "project=search,team=nlp", "owner": "ada"}
    # of a run that was resumed each count is of all attempts together
    make_run(tmp_path, "a", [(OCTOBER, 10.0), (NOVEMBER, 25.5)], **tagged)
    make_run(tmp_path, "b", [(NOVEMBER, 4.25)], tags="team=nlp", owner="bob")
    make_run(tmp_path, "c", [(NOVEMBER, 1.0)])
    make_run(tmp_path, "d", [])
    return tmp_path


def _entry(run: RunDir) -> LedgerEntry | None:
    jobs = Ledger(run.ledger).jobs() if run.ledger.exists() else []
    return jobs[-1] if jobs else None


def test_a_count_belongs_to_its_month_and_is_counted_once(runs_dir: Path) -> None:
    run = RunDir(runs_dir / "a")
    account = account_of(run, _entry(run))
    assert account.usd_by_month == {"2026-10": 10.0, "2026-11": 15.5}
    assert (account.usd, account.owner, account.launcher) == (25.5, "ada", "fake")
    assert account.tags == {"project": "search", "team": "nlp"}
    assert SOURCE in account.source


def test_a_run_that_was_not_launched_has_its_folder_s_owner(runs_dir: Path) -> None:
    account = account_of(RunDir(runs_dir / "c"), None)
    assert (account.owner, account.tags, account.usd) == (ME, {"team": "vision"}, 1.0)


def test_an_unknown_cost_is_said_and_is_no_zero(runs_dir: Path) -> None:
    account = account_of(RunDir(runs_dir / "d"), None)
    assert account.usd is None and account.unknown_reason == "no step has run yet"
    (row,) = add_up([account], ["team"], month=None)
    assert (row.group, row.runs, row.usd, row.unknown) == ({"team": "vision"}, 1, 0.0, 1)


def _costs(runs_dir: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    arguments = ("runs", "--runs-dir", str(runs_dir), "--cost", "--json", *options)
    assert shardyard(FakeLauncher(), *arguments) == 0
    content: dict[str, object] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--by", "team"), {("nlp",): 29.75, ("vision",): 1.0}),
        (("--by", "project"), {("search",): 25.5, ("",): 5.25}),
        (("--by", "owner"), {("ada",): 25.5, ("bob",): 4.25, (ME,): 1.0}),
        (("--by", "launcher"), {("fake",): 29.75, ("",): 1.0}),
        (("--by", "month"), {("2026-11",): 20.75, ("2026-10",): 10.0, ("",): 0.0}),
        (("--by", "team", "--month", "2026-11"), {("nlp",): 19.75, ("vision",): 1.0}),
        (
            ("--by", "team", "--by", "month"),
            {("nlp", "2026-11"): 19.75, ("nlp", "2026-10"): 10.0, ("vision", "2026-11"): 1.0,
             ("vision", ""): 0.0},
        ),
    ],
)  # fmt: skip
def test_costs_add_up(
    runs_dir: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    wanted: dict[tuple[str, ...], float],
) -> None:
    content = _costs(runs_dir, *options, capsys=capsys)
    rows = content["rows"]
    assert isinstance(rows, list)
    assert {tuple(row["group"].values()): row["usd"] for row in rows} == wanted
    assert content["usd"] == pytest.approx(sum(wanted.values()))


def test_the_table_names_what_is_not_known(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("runs", "--runs-dir", str(runs_dir), "--cost", "--by", "team")
    assert shardyard(FakeLauncher(), *arguments) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines == [
        ["team", "runs", "cost", "cost", "not", "known"],
        ["nlp", "2", "$29.75"],
        ["vision", "2", "$1.00", "1"],
        ["total:", "$30.75"],
    ]
    assert "1 runs whose cost is not known" in captured.err
    assert "not counted: storage" in captured.err


def test_the_list_in_json_has_owner_tags_and_cost(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardyard(FakeLauncher(), "runs", "--runs-dir", str(runs_dir), "--json") == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["b"]["owner"] == "bob" and rows["b"]["tags"] == {"team": "nlp"}
    assert rows["b"]["cost"]["usd"] == 4.25 and rows["d"]["cost"]["usd"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cost", "--by", "teem"), "Use one of owner, launcher, month, project, team"),
        (("--cost", "--month", "November"), "Write it as 20"),
        (("--by", "team"), "--cost is not given"),
        (("--cost", "--on", "slurm"), "asks a scheduler"),
    ],
)
def test_a_wrong_question_is_rejected(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert main(["runs", "--runs-dir", str(runs_dir), *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
