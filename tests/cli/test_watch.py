"""`shardyard watch` and `logs`: output as it comes, the job's exit code at the end."""

import json
from pathlib import Path

import pytest

from shardyard.cli.watch import watch
from shardyard.control.job import find_launched
from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.launchers.base import JobState, LogLine
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.log_markers import mark
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("talk_on_stderr")


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    event = {"kind": "run_started", "t": 1.0}
    launcher.lines = [
        LogLine(source="node 0", text="step 1"),
        LogLine(source="node 1", text="hello"),
        LogLine(source="node 0", text=launcher.marked("event", event)),
        LogLine(source="node 0", text="step 2"),
    ]
    capsys.readouterr()
    return launcher


def test_logs_are_those_of_node_0_without_what_is_meant_for_programs(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "logs", "first", *runs_dir(tmp_path)) == 0
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    assert shardyard(fake, "logs", "first", "--node", "1", *runs_dir(tmp_path)) == 0
    assert capsys.readouterr().out == "hello\n"


def test_logs_of_all_nodes_say_whose_line_it_is(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "logs", "first", "--all", "--follow", *runs_dir(tmp_path)) == 0
    assert capsys.readouterr().out == "node 0 | step 1\nnode 1 | hello\nnode 0 | step 2\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--node", "4"),
            "--node 4: run first has at most 4 nodes, numbered from 0. Give at most 3",
        ),
        (("--node", "1", "--all"), "--node and --all exclude each other"),
    ],
)
def test_logs_that_cannot_be_are_refused(
    options: tuple[str, ...], words: str, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "logs", "first", *options, *runs_dir(tmp_path)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "exit_code", "code", "words"),
    [
        (JobState.SUCCEEDED, None, 0, "shardyard report"),
        (JobState.SUCCEEDED, 0, 0, "shardyard report"),
        (JobState.DRAINED, None, 143, "shardyard resume"),
        (JobState.CANCELLED, None, 143, "shardyard resume"),
        (JobState.FAILED, None, 1, "shardyard resume"),
        (JobState.FAILED, 137, 137, "(exit code 137)"),
        (JobState.GONE, None, 1, "gone"),
    ],
)
def test_watching_returns_the_jobs_exit_code(
    state: JobState,
    exit_code: int | None,
    code: int,
    words: str,
    tmp_path: Path,
    fake: FakeLauncher,
    capsys: Captured,
) -> None:
    fake.statuses = [status(state, "as it ended", exit_code)]
    assert shardyard(fake, "watch", "first", *runs_dir(tmp_path)) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert ("step 2" in captured.out) == (state != JobState.GONE)


@pytest.mark.parametrize(
    ("exit_code", "steps", "words"),
    [
        (1, None, "continues from the newest durable checkpoint, if there is one"),
        (1, [], "begins again at step 0, as no checkpoint is durable"),
        (1, [8, 16], "continues from the checkpoint of step 16"),
        (2, [8], "Correct what its output names; then `shardyard resume "),
    ],
)
def test_the_last_words_advise_what_a_resume_can_do(
    exit_code: int,
    steps: list[int] | None,
    words: str,
    tmp_path: Path,
    fake: FakeLauncher,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """steps: Of its checkpoints; None: its folder is on the cluster."""
    if steps is not None:
        RunDir(tmp_path / "runs" / "first").attempt(0).mkdir(parents=True)
    monkeypatch.setattr(RunDir, "checkpoint_steps", lambda _: steps or [])
    fake.statuses = [status(JobState.FAILED, "as it ended", exit_code)]
    assert shardyard(fake, "watch", "first", *runs_dir(tmp_path)) == exit_code
    assert words in capsys.readouterr().err


def test_a_waiting_job_says_why_and_once_and_is_polled_less_and_less(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    waiting = status(JobState.WAITING, "no nodes free")
    fake.statuses = [*[waiting] * 12, status(JobState.RUNNING), status(JobState.SUCCEEDED)]
    slept: list[float] = []
    launched = find_launched("first", tmp_path / "runs", {"fake": fake})
    assert watch(launched, node=None, sleep=slept.append) == 0
    captured = capsys.readouterr()
    assert captured.err.count("waiting: no nodes free") == 1
    assert slept == sorted(slept) and slept[-1] == 10
    assert "node 1 | hello" in captured.out


def test_a_scheduler_that_is_away_for_a_while_is_asked_again(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.unanswered = [CapacityError("the controller does not answer.")] * 5
    fake.statuses = [status(JobState.SUCCEEDED)]
    slept: list[float] = []
    launched = find_launched("first", tmp_path / "runs", {"fake": fake})
    assert watch(launched, node=0, sleep=slept.append) == 0
    assert capsys.readouterr().err.count("does not answer. Trying again.") == 1
    assert sum(slept) == 50


@pytest.mark.parametrize(("error", "code"), [(RequestError("wrong"), 2), (AccessError("no"), 4)])
def test_a_refusal_ends_the_watching_at_once(
    error: ShardyardError, code: int, tmp_path: Path, fake: FakeLauncher
) -> None:
    fake.unanswered = [error]
    assert shardyard(fake, "watch", "first", *runs_dir(tmp_path)) == code


def test_a_scheduler_that_stays_away_ends_the_watching_with_its_code(
    tmp_path: Path, fake: FakeLauncher
) -> None:
    fake.unanswered = [CapacityError("the controller does not answer.")] * 99
    launched = find_launched("first", tmp_path / "runs", {"fake": fake})
    with pytest.raises(CapacityError):
        watch(launched, node=0, sleep=lambda _: None)


def test_ctrl_c_ends_the_watching_and_not_the_job(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fake.at_end_of_logs = interrupt
    assert shardyard(fake, "watch", "first", *runs_dir(tmp_path)) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("step 2\n")
    assert "the job continues" in captured.err and "shardyard cancel" in captured.err
    assert fake.cancelled == 0


def test_watching_a_run_out_of_reach_keeps_its_events(tmp_path: Path, capsys: Captured) -> None:
    fake = fake_that_can(shares_folder=False)
    where = ("launch.run_dir=/data/runs", "launch.volumes=[{path: /data, claim: c}]")
    assert launch(tmp_path, fake, "--yes", *where) == 0
    fake.lines = [
        LogLine(source="node 0", text=fake.marked("event", {"kind": "run_started", "t": 1.0}))
    ]
    fake.statuses = [status(JobState.SUCCEEDED)]
    capsys.readouterr()
    assert shardyard(fake, "watch", "first", *runs_dir(tmp_path)) == 0
    assert capsys.readouterr().out == ""
    events = (tmp_path / "runs" / "first" / "events.jsonl").read_text()
    assert json.loads(events)["kind"] == "run_started"


def test_a_line_of_the_training_that_looks_like_an_event_is_only_printed(
    tmp_path: Path, capsys: Captured
) -> None:
    fake = fake_that_can(shares_folder=False)
    where = ("launch.run_dir=/data/runs", "launch.volumes=[{path: /data, claim: c}]")
    assert launch(tmp_path, fake, "--yes", *where) == 0
    forged = mark("event", {"kind": "run_finished", "t": 1.0, "attempt": 0, "generation": 0})
    fake.lines = [LogLine(source="node 0", text=forged)]
    capsys.readouterr()
    assert shardyard(fake, "logs", "first", *runs_dir(tmp_path)) == 0
    assert capsys.readouterr().out == f"{forged}\n"
    assert (tmp_path / "runs" / "first" / "events.jsonl").read_text() == ""


def test_a_job_of_before_there_was_a_nonce_is_still_read(tmp_path: Path, capsys: Captured) -> None:
    fake = fake_that_can(shares_folder=False)
    where = ("launch.run_dir=/data/runs", "launch.volumes=[{path: /data, claim: c}]")
    assert launch(tmp_path, fake, "--yes", *where) == 0
    ledger = Ledger(tmp_path / "runs" / "first" / "ledger.jsonl")
    text = ledger.path.read_text()
    given = f'"mark": "{fake.submitted[-1].nonce}"'
    assert given in text
    ledger.path.write_text(text.replace(f", {given}", "").replace(f"{given}, ", ""))
    event = {"kind": "run_started", "t": 1.0}
    fake.lines = [LogLine(source="node 0", text=mark("event", event))]
    capsys.readouterr()
    assert shardyard(fake, "logs", "first", *runs_dir(tmp_path)) == 0
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "runs" / "first" / "events.jsonl").read_text()) == event
