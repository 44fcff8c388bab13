"""`shardyard runs`: one row a run, the most recently changed last."""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import CapacityError
from shardyard.launchers.base import JobState, JobStatus, SchedulerJob
from shardyard.launchers.ledger import Ledger, Submission
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import shardyard
from tests.processor_time import REFERENCE, processor_s


def make_run(
    runs_dir: Path, name: str, *, changed_at: float, events: Sequence[Mapping[str, object]]
) -> None:
    folder = runs_dir / name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1200, "loss": 2.34567}) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for file in ("metrics.jsonl", "events.jsonl"):
        os.utime(folder / file, (changed_at, changed_at))


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    started: dict[str, object] = {"kind": "attempt_started"}
    make_run(tmp_path, "b-new", changed_at=2e9, events=[started])
    make_run(tmp_path, "c-old", changed_at=1e9, events=[started, {"kind": "run_finished"}])
    (tmp_path / "no-run").mkdir()
    return tmp_path


def test_runs_are_listed_with_state_step_and_loss(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--runs-dir", str(runs_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "c-old", "b-new"]
    assert lines[1].split()[1:4] == ["finished", "1,200", "2.3457"]
    assert lines[2].split()[1] == "lost"


def test_json_holds_the_same(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs-dir", str(runs_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["state"], row["step"]) for row in rows] == [
        ("c-old", "finished", 1200),
        ("b-new", "lost", 1200),
    ]


def test_no_runs_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs-dir", str(tmp_path / "none")]) == 0
    captured = capsys.readouterr()
    assert (captured.out, "no runs in" in captured.err) == ("", True)


def add_job(folder: Path, launcher: str = "fake", job_id: str = "8") -> None:
    Ledger(folder / "ledger.jsonl").record(
        Submission(
            launcher=launcher, run_id=folder.name, id=job_id, name="sy", details={"zone": "here"}
        )
    )


def test_a_launched_run_shows_its_job(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(runs_dir / "b-new")
    add_job(runs_dir / "c-old")
    assert shardyard(FakeLauncher(), "runs", "--runs-dir", str(runs_dir)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "job"]
    assert lines[1].split()[1:4] == ["finished", "fake:", "over"]
    assert lines[2].split()[1:4] == ["lost", "fake:", "running"]
    assert shardyard(FakeLauncher(), "runs", "--runs-dir", str(runs_dir), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[1]["job"] == {"launcher": "fake", "id": "8", "state": "running"}


def test_a_launcher_that_fails_or_hangs_does_not_keep_the_list(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()

    class Slow(FakeLauncher):
        def status(self, job: Submission) -> JobStatus:
            if job.run_id == "b-new":
                never.wait(30)
            raise CapacityError("the controller is down.")

    make_run(runs_dir, "d-third", changed_at=1.5e9, events=[])
    add_job(runs_dir / "b-new")
    add_job(runs_dir / "d-third")
    began = time.monotonic()
    assert shardyard(Slow(), "runs", "--runs-dir", str(runs_dir)) == 0
    assert time.monotonic() - began < 5
    out = capsys.readouterr().out
    assert "fake: no answer in time" in out and "fake: no answer" in out
    never.set()


@pytest.mark.heavy
def test_a_thousand_launched_runs_are_listed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with 2,000 steps and 100 checkpoints; half of them with a job that may still run."""
    saved = {"kind": "checkpoint_durable", "step": 1}
    events: list[dict[str, object]] = [{"kind": "attempt_started"}, *[saved] * 100]
    for name, end in (("running", []), ("finished", [{"kind": "run_finished"}])):
        make_run(tmp_path / "first", name, changed_at=1e9, events=[*events, *end])
        with (tmp_path / "first" / name / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "loss": 2.0}) + "\n" for step in range(2000))
        add_job(tmp_path / "first" / name)
    for number in range(1000):
        (folder := tmp_path / "all" / f"run-{number}").mkdir(parents=True)
        for file_of_one in (tmp_path / "first" / ("running", "finished")[number % 2]).iterdir():
            (folder / file_of_one.name).hardlink_to(file_of_one)
    began_s = time.process_time()  # the machine may be busy with other tests
    assert shardyard(FakeLauncher(), "runs", "--runs-dir", str(tmp_path / "all")) == 0
    took_s = time.process_time() - began_s
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1001
    assert sum("fake: running" in line for line in lines) == 500
    assert took_s < 10 * processor_s(REFERENCE, tmp_path)


class Finds(FakeLauncher):
    """Has two jobs of ours, one of which the run ``b-new`` knows."""

    def find(self, recipe: Recipe) -> list[SchedulerJob]:
        where = f"namespace {recipe.launch.kubernetes.namespace}"
        return [
            SchedulerJob(id=number, name="sy", run_id=f"r{number}", state=JobState.RUNNING,
                     where=where, end=f"end {number}")
            for number in ("8", "9")
        ]  # fmt: skip


def test_jobs_that_no_run_of_the_folder_knows_are_listed_with_what_ends_them(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_job(runs_dir / "b-new")
    words = ("runs", "--runs-dir", str(runs_dir), "--on", "fake", "launch.kubernetes.namespace=t")
    assert shardyard(Finds(), *words) == 0
    said = capsys.readouterr()
    *_, head, row = said.out.splitlines()
    assert "jobs of ours on fake that no run in" in said.out and "ends with" in head
    assert row.split() == ["r9", "9", "running", "namespace", "t", "end", "9"]
    assert "--runs-dir takes the one that it is in now" in said.err
    assert shardyard(Finds(), *words, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert [job["id"] for job in content["strays"]] == ["9"] and len(content["runs"]) == 2
    add_job(runs_dir / "c-old", job_id="9")
    assert shardyard(Finds(), *words) == 0
    assert "fake has no job of ours that no run in" in capsys.readouterr().err


def test_settings_without_on_are_refused(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--runs-dir", str(runs_dir), "launch.kubernetes.namespace=t"]) == 2
    assert "settings say where --on looks" in capsys.readouterr().err
