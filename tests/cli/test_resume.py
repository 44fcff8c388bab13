"""`shardyard resume` of launched runs: another job of the same run, never two at once."""

import json
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.resolved import RollbackTarget
from shardyard.errors import CapacityError, RequestError
from shardyard.launchers.base import JobState, LaunchRequest, Rendered, pop_back_to
from shardyard.launchers.ledger import Ledger, Submission
from shardyard.rundir.lease import Lease
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import RECIPE, launch, runs_dir, shardyard, status

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def fake(tmp_path: Path, capsys: Captured) -> FakeLauncher:
    launcher = FakeLauncher(statuses=[status(JobState.DRAINED)])
    assert launch(tmp_path, launcher, "--yes") == 0
    capsys.readouterr()
    return launcher


def resume(fake: FakeLauncher, folder: Path, *arguments: str) -> int:
    return shardyard(fake, "resume", "first", *runs_dir(folder), *arguments)


def test_a_launched_run_is_submitted_again_where_it_was(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert resume(fake, tmp_path, "--yes", "cluster.nodes=3") == 0
    assert "job: 8 (sy-first) on fake" in capsys.readouterr().out
    first, again = fake.submitted
    assert (first.is_resume, first.submission) == (False, 1)
    assert (again.is_resume, again.submission, again.nodes) == (True, 2, 3)
    assert again.run_dir == first.run_dir
    run = tmp_path / "runs" / "first"
    assert load_recipe([run / "recipe.yaml"]).cluster.nodes == 2, "what was asked first stays"
    assert len(Ledger(run / "ledger.jsonl").jobs()) == 2


def test_what_a_resume_asked_stays_for_the_next_one(tmp_path: Path, fake: FakeLauncher) -> None:
    assert resume(fake, tmp_path, "--yes", "cluster.nodes=3") == 0
    assert resume(fake, tmp_path, "--yes", "launch.time_limit=2h") == 0
    last = fake.submitted[-1]
    assert (last.nodes, last.recipe.launch.time_limit, last.submission) == (3, "2h", 3)
    fake.statuses = [status(JobState.RUNNING)]
    elastic = ("elastic.max_nodes=6",)
    assert shardyard(fake, "scale", "first", "6", *runs_dir(tmp_path)) == 2
    fake.statuses = [status(JobState.DRAINED)]
    assert resume(fake, tmp_path, "--yes", *elastic) == 0
    fake.statuses = [status(JobState.RUNNING)]
    assert shardyard(fake, "scale", "first", "6", *runs_dir(tmp_path)) == 0


def test_of_two_who_resume_at_once_one_is_refused(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    codes: list[int] = []

    class Racing(FakeLauncher):
        def submit(self, rendered: Rendered, ledger: Ledger) -> Submission:
            codes.append(resume(fake, tmp_path, "--yes"))
            return super().submit(rendered, ledger)

    first = Racing(statuses=[status(JobState.DRAINED)])
    codes.append(resume(first, tmp_path, "--yes"))
    assert codes == [2, 0]
    assert "was submitted by another command meanwhile" in capsys.readouterr().err
    assert len(Ledger(tmp_path / "runs" / "first" / "ledger.jsonl").jobs()) == 2


def test_a_resume_that_another_one_overtook_while_it_was_looked_at_is_refused(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    class Overtaken(FakeLauncher):
        def render(self, request: LaunchRequest) -> Rendered:
            if not self.submitted:
                assert resume(fake, tmp_path, "--yes") == 0
            return super().render(request)

    slow = Overtaken(statuses=[status(JobState.DRAINED)])
    assert resume(slow, tmp_path, "--yes") == 2
    assert "was submitted by another command meanwhile" in capsys.readouterr().err
    assert slow.created == set()


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.RUNNING])
def test_a_live_job_is_not_joined_by_a_second_one(
    state: JobState, tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.statuses = [status(state)]
    assert resume(fake, tmp_path, "--yes") == 2
    err = capsys.readouterr().err
    assert f"job 8 of run first is {state} on fake" in err
    assert "shardyard watch" in err and "shardyard cancel" in err
    assert len(fake.submitted) == 1


def test_a_dry_run_prints_the_request_and_submits_nothing(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    assert resume(fake, tmp_path, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["launcher"] == "fake"
    assert len(Ledger(tmp_path / "runs" / "first" / "ledger.jsonl").jobs()) == 1


def test_nobody_to_ask_is_nothing_submitted(tmp_path: Path, fake: FakeLauncher) -> None:
    assert resume(fake, tmp_path) == 2


def test_a_refused_resume_keeps_the_run(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    fake.refuses = CapacityError("the queue is full.")
    assert resume(fake, tmp_path, "--yes") == 3
    assert (tmp_path / "runs" / "first" / "recipe.yaml").exists()
    assert "note:" not in capsys.readouterr().err, "nothing new is left over"


def test_a_run_that_was_trained_here_goes_on_elsewhere(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    fake = FakeLauncher()
    lease = Lease(folder / "lease.json")
    assert resume(fake, tmp_path, "--on", "fake", "--yes") == 2
    assert "is being trained already" in capsys.readouterr().err
    lease.close()
    assert resume(fake, tmp_path, "--on", "fake", "--yes") == 0
    assert fake.submitted[-1].is_resume
    assert Ledger(folder / "ledger.jsonl").jobs()[0].launcher == "fake"


@pytest.mark.parametrize("other", ["run.name=second", "run.id=second", "run.dir=elsewhere"])
def test_a_run_that_goes_on_keeps_its_name_and_folder(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured, other: str
) -> None:
    assert resume(fake, tmp_path, "--yes", other) == 2
    said = capsys.readouterr().err
    assert f"{other}: run first continues in its own folder, {tmp_path}/runs/first" in said
    assert "Leave that out" in said and len(fake.submitted) == 1
    same = ("run.id=first", f"run.dir={tmp_path}/runs")
    assert resume(fake, tmp_path, "--yes", *same) == 0


def test_what_others_may_have_written_is_not_submitted_in_your_name(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    (tmp_path / "runs" / "first" / "recipe.yaml").chmod(0o666)
    assert resume(fake, tmp_path, "--yes") == 4
    said = capsys.readouterr().err
    assert "recipe.yaml may be written by everybody" in said and "chmod go-w" in said
    assert len(fake.submitted) == 1
    assert resume(fake, tmp_path, "--yes", "--trust-folder") == 0
    assert len(fake.submitted) == 2


def test_a_launched_run_goes_back_to_a_step_by_a_variable_that_node_0_reads(
    tmp_path: Path, fake: FakeLauncher
) -> None:
    assert resume(fake, tmp_path, "--yes", "--step", "4", "--skip-steps", "2") == 0
    given = dict(fake.submitted[-1].environment)
    back_to = pop_back_to(given)
    assert back_to == RollbackTarget(step=4, skip_steps=2, is_requested=True, submission=2)
    assert pop_back_to(given) is None
    assert resume(fake, tmp_path, "--yes") == 0
    assert pop_back_to(dict(fake.submitted[-1].environment)) is None


def test_a_step_whose_checkpoint_is_seen_to_be_missing_is_rejected_before_it_is_submitted(
    tmp_path: Path, fake: FakeLauncher, capsys: Captured
) -> None:
    (tmp_path / "runs" / "first" / "checkpoints").mkdir()
    assert resume(fake, tmp_path, "--yes", "--step", "4") == 2
    assert "--step 4: run first has no such checkpoint" in capsys.readouterr().err
    assert len(fake.submitted) == 1


@pytest.mark.parametrize(
    "text", ["4", '{"step": 0}', '{"step": "4"}', '{"step": 4, "skip_steps": -1}', '{"steps": 4}']
)
def test_a_variable_that_names_no_step_is_rejected(text: str) -> None:
    with pytest.raises(RequestError, match="names no step to go back to"):
        pop_back_to({"SHARDYARD_BACK_TO": text})
