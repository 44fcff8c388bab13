"""`shardyard profile`: who is refused and why, who is asked, and what is shown of it."""

import json
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.control import profile as operation
from shardyard.launchers.base import JobState
from shardyard.node.ask_profile import main as ask_on_a_node
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from shardyard.rundir.profiles import leave_request, new_request, take_request
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.far_launcher import FarLauncher
from tests.cli.launched_runs import launch, runs_dir, shardyard, status
from tests.rundir.test_profiles import profile_of

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def trained(tmp_path: Path) -> RunDir:
    """A run that `train` has begun; whoever holds its lease trains it."""
    run = RunDir(tmp_path / "runs" / "first")
    run.attempt(0).mkdir(parents=True)
    run.recipe.write_text("model: {preset: llama-tiny}\n")
    events = EventWriter(run.events, attempt=0, generation=0)
    events.write("attempt_started", world_size=2)
    events.close()
    return run


def ask(run: RunDir, *arguments: str) -> int:
    return main(["profile", "first", *arguments, "--runs-dir", str(run.path.parent)])


def answered(run: RunDir, kind: str, **fields: object) -> None:
    """What rank 0 does: it takes the request up, tells of it, and removes it."""
    request = take_request(run)
    assert request is not None
    events = EventWriter(run.events, attempt=0, generation=0)
    events.write(kind, id=request.id, **fields)
    events.close()
    run.profile_request.unlink()


def test_a_run_that_does_not_train_is_refused(trained: RunDir, capsys: Captured) -> None:
    assert ask(trained) == 2
    said = capsys.readouterr().err
    assert "run first does not train now (lost)" in said
    assert "`shardyard resume" in said
    assert "observe.profile.at_step=N" in said
    trained.events.unlink()
    assert ask(trained) == 2
    assert "has not begun, so it has no step to profile" in capsys.readouterr().err
    lease = Lease(trained.lease)
    try:
        trained.attempt(0).rmdir()
        assert ask(trained) == 2
        assert "prepares its first attempt" in capsys.readouterr().err
    finally:
        lease.close()


def test_a_second_wish_and_ranks_that_are_not_there_are_refused(
    trained: RunDir, capsys: Captured
) -> None:
    lease = Lease(trained.lease)
    try:
        assert ask(trained, "--ranks", "2") == 2
        assert "the run has 2 ranks, counted from 0" in capsys.readouterr().err
        assert ask(trained, "--ranks", "some") == 2
        assert "does not say which ranks. Use auto" in capsys.readouterr().err
        assert ask(trained, "--dry-run") == 0
        assert "a profile of 3 steps of run first would be asked for" in capsys.readouterr().out
        assert take_request(trained) is None
        assert ask(trained, "--detach", "--steps", "1", "--json") == 0
        request = take_request(trained)
        assert request is not None
        assert json.loads(capsys.readouterr().out)["id"] == request.id
        assert (request.steps, request.ranks, request.attempt) == (1, "auto", 0)
        assert ask(trained) == 2
        said = capsys.readouterr().err
        assert "a profile of run first is being taken already" in said
        assert "Wait for its end" in said
    finally:
        lease.close()


def test_the_table_is_shown_once_it_is_written(
    trained: RunDir, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = profile_of(7)

    def answers(_seconds: float) -> None:
        answered(trained, "profiled", step=7, profile=taken.to_json())

    monkeypatch.setattr(operation.wait, "__kwdefaults__", {"sleep": answers})
    lease = Lease(trained.lease)
    try:
        assert ask(trained) == 0
    finally:
        lease.close()
    shown = capsys.readouterr().out
    assert "launch" in shown
    assert "Steps 7 to 8 on 1 rank of 1: 500 ms a step, 25% longer than the 400 ms" in shown
    assert f"{trained.profile(7)}/rank-*.json.gz" in shown


def test_a_profile_that_was_given_up_is_told_with_why(
    trained: RunDir, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(_seconds: float) -> None:
        answered(trained, "profile_abandoned", reason="the run ended before another step began")

    monkeypatch.setattr(operation.wait, "__kwdefaults__", {"sleep": answers})
    lease = Lease(trained.lease)
    try:
        assert ask(trained) == 1
    finally:
        lease.close()
    said = capsys.readouterr().err
    assert "no profile was taken: the run ended before another step began" in said
    assert "Ask again while the run trains" in said


def test_a_run_that_ends_without_a_word_is_told(
    trained: RunDir, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation, "_ASK_S", 0.0)
    lease = Lease(trained.lease)
    monkeypatch.setattr(operation.wait, "__kwdefaults__", {"sleep": lambda _: lease.close()})
    assert ask(trained) == 1
    assert "ended before its profile was written" in capsys.readouterr().err


def test_a_job_that_waits_or_is_over_is_refused(tmp_path: Path, capsys: Captured) -> None:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    launcher.statuses = [status(JobState.WAITING, "no free node")]
    assert shardyard(launcher, "profile", "first", *runs_dir(tmp_path)) == 2
    assert "waits for its nodes (no free node)" in capsys.readouterr().err
    launcher.statuses = [status(JobState.FAILED)]
    assert shardyard(launcher, "profile", "first", *runs_dir(tmp_path)) == 2
    assert "does not train now (failed)" in capsys.readouterr().err


def test_nodes_that_cannot_be_reached_are_told_of_the_setting(
    tmp_path: Path, capsys: Captured
) -> None:
    class Unreached(FakeLauncher):
        capabilities = FarLauncher.capabilities

    launcher = Unreached()
    assert launch(tmp_path, launcher, "--yes", "launch.run_dir=/far/runs") == 0
    assert shardyard(launcher, "profile", "first", *runs_dir(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "a run on fake cannot be asked from here" in said
    assert "observe.profile.at_step=N" in said


def test_a_node_asks_where_the_files_are(trained: RunDir, capsys: Captured) -> None:
    words = [str(trained.path), "--steps", "2", "--ranks", "auto"]
    assert ask_on_a_node(words) == 0
    request = take_request(trained)
    assert request is not None
    assert json.loads(capsys.readouterr().out)["id"] == request.id
    assert ask_on_a_node(words) == 0
    assert "is being taken already" in json.loads(capsys.readouterr().out)["error"]


def test_far_nodes_are_asked_beside_the_training(
    tmp_path: Path, capsys: Captured, trained: RunDir
) -> None:
    """The launcher's exec runs the program above in the folder that the nodes see."""
    asked: list[list[str]] = []

    class Reached(FarLauncher):
        def exec(self, job, command):  # type: ignore[no-untyped-def]
            del job
            asked.append(list(command))
            ask_on_a_node([str(trained.path), *command[command.index("/far/runs/first") + 1 :]])
            yield capsys.readouterr().out.encode()

    launcher = Reached(training=status(JobState.RUNNING))
    folder = tmp_path / "here"
    folder.mkdir()
    assert launch(folder, launcher, "--yes", "launch.run_dir=/far/runs") == 0
    capsys.readouterr()
    there = ("--runs-dir", str(folder / "runs"))
    assert shardyard(launcher, "profile", "first", "--detach", *there) == 0, capsys.readouterr()
    assert asked[0][4:] == ["/far/runs/first", "--steps", "3", "--ranks", "auto"]
    assert shardyard(launcher, "profile", "first", "--detach", *there) == 2
    assert "is being taken already" in capsys.readouterr().err


def test_a_request_of_an_attempt_that_is_over_stands_in_nobodys_way(trained: RunDir) -> None:
    leave_request(trained, new_request(0, steps=9, ranks="all"))
    trained.attempt(1).mkdir()
    lease = Lease(trained.lease)
    try:
        assert ask(trained, "--detach") == 0
    finally:
        lease.close()
    request = take_request(trained)
    assert request is not None
    assert (request.attempt, request.steps) == (1, 3)


def test_a_launched_run_is_asked_in_the_folder_that_its_nodes_share(
    tmp_path: Path, capsys: Captured
) -> None:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    assert shardyard(launcher, "profile", "first", "--detach", *runs_dir(tmp_path)) == 2
    assert "prepares its first attempt" in capsys.readouterr().err
    run = RunDir(tmp_path / "runs" / "first")
    run.attempt(0).mkdir(parents=True)
    assert shardyard(launcher, "profile", "first", "--detach", *runs_dir(tmp_path)) == 0
    request = take_request(run)
    assert request is not None
    assert request.attempt == 0
