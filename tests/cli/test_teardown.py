"""`shardyard teardown`: what the ledger names is removed, and what is left is said."""

import json
from pathlib import Path

import pytest

from shardyard.errors import EXIT_INTERRUPTED, CapacityError
from shardyard.launchers.base import JobState, Removal
from shardyard.launchers.ledger import Ledger, Submission
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]
OBJECTS = ["fake job sy-first", "fake service sy-first"]
"""In the order of removal."""


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher(statuses=[status(JobState.SUCCEEDED)])
    volumes = "launch.volumes=[{path: /a, claim: texts}, {path: /b, efs: fs-1}]"
    assert launch(tmp_path, launcher, "--yes", volumes) == 0
    capsys.readouterr()
    return launcher


def teardown(fake: FakeLauncher, folder: Path, *arguments: str) -> int:
    return shardyard(fake, "teardown", "first", *runs_dir(folder), *arguments)


def test_everything_is_removed_the_newest_first_and_a_repeat_finds_nothing(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert teardown(fake, tmp_path, "--yes", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["removed"], content["left"]) == (OBJECTS, [])
    assert fake.created == set()
    assert teardown(fake, tmp_path) == 0
    out = capsys.readouterr().out
    assert "all objects of run first are removed" in out and "stays" in out
    assert (tmp_path / "runs" / "first" / "recipe.yaml").exists()


def test_what_another_has_made_in_its_place_is_left_alone_and_named(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    ledger = tmp_path / "runs" / "first" / "ledger.jsonl"
    before = ledger.read_text()
    fake.anothers = {"fake service"}
    assert teardown(fake, tmp_path, "--yes") == 0
    out = capsys.readouterr().out
    assert "not this run's, so kept: fake service sy-first" in out.splitlines()
    assert "removed: fake service" not in out
    ledger.write_text(before)
    assert teardown(fake, tmp_path, "--yes", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["removed"], content["foreign"]) == (OBJECTS[:1], OBJECTS[1:])


def test_a_dry_run_lists_what_would_be_removed_and_what_costs_money(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(JobState.RUNNING)]
    assert teardown(fake, tmp_path, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"still there, and may cost money: {name}" for name in OBJECTS]
    assert lines[2].startswith("not created by this run, so not removed")
    assert [line.split(": ")[1] for line in lines[2:]] == [
        "persistent volume claim texts", "EFS file system fs-1",
    ]  # fmt: skip
    assert len(fake.created) == 2


def test_of_a_job_that_ended_a_dry_run_does_not_say_that_it_may_cost_money(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert teardown(fake, tmp_path, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ended, so it costs no money") and lines[0].endswith(OBJECTS[0])
    assert lines[1] == f"still there, and may cost money: {OBJECTS[1]}"
    assert teardown(fake, tmp_path, "--dry-run", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["over"], content["left"]) == ([OBJECTS[0]], [OBJECTS[1]])
    assert len(fake.created) == 2


def test_a_job_whose_scheduler_does_not_answer_may_cost_money(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.unanswered = [CapacityError("the controller is away.")]
    assert teardown(fake, tmp_path, "--dry-run") == 0
    said = capsys.readouterr()
    assert "whether job 8 is over is not known: the controller is away." in said.err
    assert [line for line in said.out.splitlines() if "over" in line] == []


def test_what_cannot_be_removed_is_named_and_the_exit_code_says_so(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.stuck = {"fake service"}
    assert teardown(fake, tmp_path, "--yes") == 1
    out = capsys.readouterr().out
    assert "removed: fake job sy-first" in out
    assert "still there, and may cost money: fake service sy-first" in out
    fake.stuck = set()
    assert teardown(fake, tmp_path, "--yes") == 0


def test_without_a_terminal_it_needs_yes(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert teardown(fake, tmp_path) == 2
    err = capsys.readouterr().err
    assert "to be removed: fake job sy-first" in err and "--yes" in err
    assert len(fake.created) == 2


def test_a_running_job_is_to_be_cancelled_first(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(JobState.RUNNING)]
    assert teardown(fake, tmp_path, "--yes") == 2
    err = capsys.readouterr().err
    assert "job 8 of run first is running" in err and "shardyard cancel" in err
    assert teardown(fake, tmp_path, "--yes", "--force") == 0


def test_an_interrupted_submission_is_removed_too(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.intend("fake service", "sy-first", launcher="fake")
    assert teardown(FakeLauncher(), tmp_path, "--yes") == 0
    assert "removed: fake service sy-first" in capsys.readouterr().out


class Interrupted(FakeLauncher):
    """Ctrl-C comes when one object is removed."""

    def remove(self, job: Submission, ledger: Ledger) -> Removal:
        assert job.run_id == "first"
        entry = ledger.live()[-1]
        self.created.discard(entry.kind)
        ledger.remove(entry)
        raise KeyboardInterrupt


def test_ctrl_c_in_a_teardown_says_that_it_may_be_repeated(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    stopped = Interrupted(statuses=fake.statuses, created=fake.created)
    assert teardown(stopped, tmp_path, "--yes") == EXIT_INTERRUPTED
    err = capsys.readouterr().err
    assert "not finished: 1 object of the run may still exist, and cost money" in err
    assert f"Repeat `shardyard teardown {tmp_path}/runs/first` to remove the rest" in err
    assert teardown(fake, tmp_path, "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == OBJECTS[1:]
