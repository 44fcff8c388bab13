"""`shardyard status`: the job's state, its nodes, and how far the run has come."""

import json
import time
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.errors import CapacityError
from shardyard.launchers.base import JobState, LogLine
from shardyard.launchers.ledger import Ledger, Submission
from tests.cli.fake_launcher import FakeLauncher, fake_that_can
from tests.cli.launched_runs import launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]
STEP = {"step": 3, "loss": 2.5, "attempt": 0, "generation": 0}


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher()
    assert launch(tmp_path, launcher, "--yes") == 0
    capsys.readouterr()
    return launcher


def test_state_reason_and_nodes_are_shown(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(JobState.RUNNING, "on a and b")]
    (tmp_path / "runs" / "first" / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    assert shardyard(fake, "status", "fir", *runs_dir(tmp_path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["state", "running", "on", "a", "and", "b"] in lines
    assert ["job", "8", "sy-first", "on", "fake"] in lines
    assert ["step", "3", "loss", "2.5000"] in lines
    assert ["node", "b", "down"] in lines


def test_a_run_is_found_by_its_path_too(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "status", str(tmp_path / "runs" / "first"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "first"


def test_json_has_exit_code_and_nodes(tmp_path: Path, fake: FakeLauncher, capsys: Captured) -> None:
    fake.statuses = [status(JobState.FAILED, "out of memory", 137)]
    assert shardyard(fake, "status", "first", "--json", *runs_dir(tmp_path)) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["state"], content["exit_code"]) == ("failed", 137)
    assert content["nodes"][0] == {"name": "a", "state": "up"}
    assert content["run"]["state"] == "new"


def test_a_run_whose_folder_is_out_of_reach_is_rebuilt_from_its_output(
    tmp_path: Path, capsys: Captured
) -> None:
    fake = fake_that_can(shares_folder=False)
    where = ("launch.run_dir=/data/runs", "launch.volumes=[{path: /data, claim: c}]")
    assert launch(tmp_path, fake, "--yes", *where) == 0
    fake.lines = [LogLine(source="node 0", text=f"10:00 {fake.marked('metrics', STEP)}")]
    for _ in range(2):
        capsys.readouterr()
        assert shardyard(fake, "status", "first", "--json", *runs_dir(tmp_path)) == 0
        assert json.loads(capsys.readouterr().out)["run"]["step"] == 3
    assert len((tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_run_that_was_trained_here_is_shown_without_a_job(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    assert main(["status", "mine", *runs_dir(tmp_path)]) == 0
    assert "started by `shardyard train`" in capsys.readouterr().out
    assert main(["cancel", "mine", *runs_dir(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "was started by `shardyard train`, not launched" in err
    assert "shardyard report" in err


def test_an_interrupted_submission_says_what_may_exist(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "runs" / "half"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    Ledger(folder / "ledger.jsonl").intend("jobset", "sy-half", launcher="fake")
    assert shardyard(FakeLauncher(), "status", "half", *runs_dir(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "jobset sy-half" in err and "shardyard teardown" in err


def test_a_scheduler_that_does_not_answer_is_an_error_with_its_code(
    tmp_path: Path, capsys: Captured
) -> None:
    assert launch(tmp_path, FakeLauncher(), "--yes") == 0

    class Silent(FakeLauncher):
        def status(self, job: Submission) -> None:  # type: ignore[override]
            raise CapacityError(f"the controller does not answer about {job.id}. Try later.")

    assert shardyard(Silent(), "status", "first", *runs_dir(tmp_path)) == 3
    assert "does not answer about 8" in capsys.readouterr().err


def test_an_unknown_run_names_the_newest(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert shardyard(fake, "status", "zzz", *runs_dir(tmp_path)) == 2
    assert "The newest there is first." in capsys.readouterr().err


def test_what_it_has_cost_and_that_no_step_comes_is_shown(tmp_path: Path, capsys: Captured) -> None:
    far = fake_that_can(shares_folder=False)
    assert launch(tmp_path, far, "--yes", "launch.run_dir=/runs", "launch.max_usd=100") == 2
    assert launch(tmp_path, far, "--yes", "--force", "launch.run_dir=/runs", "--max-usd=100") == 0
    capsys.readouterr()
    place = {"attempt": 0, "generation": 0}
    told = [
        {"t": time.time(), "kind": "attempt_started", **place},
        {"t": time.time(), "kind": "network", "transport": "efa", "said_by": "NCCL", **place}
        | {"interfaces": "4 interfaces"},
        {"t": time.time(), "kind": "spent", "usd": 12.5, "usd_per_hour": 98.32, **place},
        {"t": 1.0, "kind": "node_left_out", "node": "b", "node_rank": 1, "cause": "3 losses"}
        | place,
        {"t": time.time() - 60, "kind": "stalled", "step": 3, "seconds": 660.0, "usual_s": 3.0}
        | place,
    ]
    far.lines = [LogLine(source="node 0", text=far.marked("event", event)) for event in told]
    assert shardyard(far, "status", "first", *runs_dir(tmp_path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "first", "running"] in lines  # its job runs, though no lease is in sight here
    assert ["stalled", "no", "step", "for", "12", "min", "(usual", "3", "s)"] in lines
    assert ["excluded", "node", "1", "b:", "3", "losses"] in lines
    assert ["network", "EFA", "(4", "interfaces)", "according", "to", "NCCL"] in lines
    assert ["spent", "$12.50", "of", "launch.max_usd=100,", "$98.32", "an", "hour"] in lines

    stopping = {"t": 1.0, "kind": "stopping", "reason": "it has cost too much", "session": "s"}
    far.lines.append(LogLine(source="node 0", text=far.marked("event", stopping | place)))
    far.statuses = [status(JobState.DRAINED, exit_code=143)]
    assert shardyard(far, "status", "first", "--json", *runs_dir(tmp_path)) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["spent"] == {"usd": 12.5, "usd_per_hour": 98.32}
    assert content["network"] == {
        "transport": "efa", "said_by": "NCCL", "attempt": 0, "interfaces": "4 interfaces"
    }  # fmt: skip
    assert content["max_usd"] == 100
    assert content["run"]["stop_reason"] == "it has cost too much"
    assert content["run"]["no_step_s"] is None
