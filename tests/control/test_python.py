"""The control half from Python: the operations of the verbs as calls, with the same sentences."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardyard
from shardyard.cli import main
from shardyard.config.resolved import RollbackTarget
from shardyard.errors import RecipeError, RequestError, ShardyardError
from shardyard.launchers.base import JobState, LogLine, pop_back_to
from shardyard.planner import instance_search
from tests.cli.fake_launcher import FakeLauncher
from tests.cli.launched_runs import status

SMALL: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "run": {"steps": 10},
    "optim": {"global_batch": 8, "micro_batch": 1},
    "cluster": {"device": "cpu", "devices": 2, "nodes": 2},
    "elastic": {"min_nodes": 1, "max_nodes": 4},
}
PLANNED = {"model": {"preset": "llama2-7b"}, "cluster": {"nodes": 2, "instance": "p5.48xlarge"}}


@pytest.fixture
def fake() -> FakeLauncher:
    return FakeLauncher(statuses=[status(JobState.RUNNING)])


def launch(fake: FakeLauncher, folder: Path, *overrides: str) -> shardyard.Job:
    where = f"run.dir={folder / 'runs'}"
    return shardyard.launch(SMALL, where, *overrides, on="fake", launchers={"fake": fake})


def test_a_recipe_is_resolved_as_the_verb_resolves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shardyard.resolve(PLANNED, "run.steps=7")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(PLANNED))
    assert main(["config", str(recipe), "run.steps=7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert found.steps == told["steps"]["value"] == 7
    shown = {name: entry["reason"] for name, entry in told["settings"].items()}
    assert found.reasons.items() <= shown.items()
    assert found.recipe.cluster.devices == told["settings"]["cluster.devices"]["value"] == 8


@pytest.mark.heavy  # offers are looked at twice
def test_all_that_the_command_prints_of_a_plan_is_in_the_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_search, "instance_names", lambda: ("p5.48xlarge", "g5.12xlarge"))
    found = shardyard.plan(PLANNED, "run.steps=1000", with_offers=True, critical_batch=1e3)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(PLANNED))
    words = ["run.steps=1000", "--offers", "--critical-batch", "1000", "--json"]
    assert main(["plan", str(recipe), *words]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_json()))
    assert found.plan.usd is not None and found.search is not None and found.offers is not None


@pytest.mark.parametrize("call", [shardyard.resolve, shardyard.plan, shardyard.launch])
def test_a_wrong_recipe_is_refused_in_the_words_of_a_file(call: Any) -> None:
    with pytest.raises(RecipeError) as refused:
        call({"model": {"preset": "llama-tini"}, "optim": {"lr": "fast"}}, "run.sede=1")
    assert {problem.path for problem in refused.value.problems} >= {"optim.lr", "run.sede"}
    assert "Did you mean llama-tiny?" in str(refused.value)


def test_a_job_is_submitted_and_followed_without_a_question(
    fake: FakeLauncher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shardyard")
    fake.lines = [LogLine(source="node 0", text="step 1")]
    job = launch(fake, tmp_path, "run.id=first")
    assert "plan: llama-tiny" in caplog.text and "launch: run first" in caplog.text
    assert (job.run_id, job.on, job.state()) == ("first", "fake", JobState.RUNNING)
    assert list(job.logs()) == ["step 1"] and list(job.logs(node=None)) == ["node 0 | step 1"]
    assert job.wait(timeout_s=0).state is JobState.RUNNING
    job.cancel()
    assert fake.cancelled == 1
    (run,) = shardyard.runs(tmp_path / "runs", launchers={"fake": fake})
    assert (run.state.state, run.job_state) == ("new", "running")
    assert run.job is not None and run.job.id == job.id


def test_the_metrics_and_the_result_are_read_from_the_run(
    fake: FakeLauncher, tmp_path: Path
) -> None:
    job = launch(fake, tmp_path)
    fake.statuses = [status(JobState.FAILED, "exit code 1", 1)]
    with pytest.raises(ShardyardError, match="has no result: it is failed \\(exit code 1\\)"):
        job.result()
    line = {"step": 1, "loss": 2.5, "t": 1.0}
    job.run_dir.metrics.write_text(
        f"{json.dumps(line)}\n{json.dumps({'step': 1, 'epoch': 0, 'eval': {'loss': 2.0}})}\n"
    )
    assert [each["step"] for each in job.metrics()] == [1]
    assert [each["eval"] for each in job.evaluations()] == [{"loss": 2.0}]


def test_many_are_all_looked_at_before_one_is_submitted(fake: FakeLauncher, tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'runs'}"
    asked: dict[str, Any] = {"on": "fake", "launchers": {"fake": fake}}
    with pytest.raises(RecipeError, match=r"optim\.lr"):
        shardyard.launch([SMALL, (SMALL, "optim.lr=-1")], where, **asked)
    assert not fake.created
    many = [(SMALL, f"optim.lr={lr}") for lr in (0.1, 0.2)]
    jobs = shardyard.launch(many, where, **asked)
    assert [request.recipe.optim.lr for request in fake.submitted[-2:]] == [0.1, 0.2]
    assert len({job.run_id for job in jobs}) == 2


def test_what_was_submitted_before_one_failed_is_told(
    fake: FakeLauncher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = f"run.dir={tmp_path / 'runs'}"
    asked: dict[str, Any] = {"on": "fake", "launchers": {"fake": fake}}
    many = [(SMALL, "run.id=a"), (SMALL, "run.id=b")]
    submit = fake.submit

    def second_is_refused(*given: Any) -> Any:
        if fake.created:
            raise ShardyardError("the queue is full")
        return submit(*given)

    fake.submit = second_is_refused  # type: ignore[method-assign, assignment]
    with pytest.raises(ShardyardError, match="the queue is full"):
        shardyard.launch(many, where, **asked)
    assert "submitted before this: a" in caplog.text


def test_what_would_be_asked_about_is_refused_unless_forced(
    fake: FakeLauncher, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"on": "fake", "launchers": {"fake": fake}}
    words = (PLANNED, "run.steps=1000", f"run.dir={tmp_path / 'runs'}")
    with pytest.raises(RequestError, match=r"above launch\.max_usd=1\. No job was submitted"):
        shardyard.launch(*words, max_usd=1, **asked)
    assert not fake.created
    assert shardyard.launch(*words, max_usd=1, force=True, **asked).on == "fake"


def test_a_job_is_scaled_and_resumed(fake: FakeLauncher, tmp_path: Path) -> None:
    job = launch(fake, tmp_path)
    assert job.scale(3).id == job.id and fake.scaled == [3]
    with pytest.raises(RequestError, match=r"elastic\.max_nodes"):
        job.scale(9)
    fake.statuses = [status(JobState.DRAINED)]
    again = job.resume("run.steps=20")
    assert len(again.ledger.jobs()) == 2 and fake.submitted[-1].recipe.run.steps == 20


def test_a_job_goes_back_to_a_step_and_passes_over_data(fake: FakeLauncher, tmp_path: Path) -> None:
    job = launch(fake, tmp_path)
    fake.statuses = [status(JobState.DRAINED)]
    for wrong, words in (
        ({"skip_steps": 2}, r"needs the step to go back to: job\.resume\(step=100, skip_steps=2\)"),
        ({"step": 0}, "step=0, skip_steps=0: steps are counted from 1"),
        ({"step": 4, "skip_steps": -1}, "passed over backwards"),
    ):
        with pytest.raises(RequestError, match=words):
            job.resume(**wrong)  # type: ignore[arg-type]
    job.resume("optim.lr=1e-4", step=4, skip_steps=2)
    back_to = pop_back_to(dict(fake.submitted[-1].environment))
    assert back_to == RollbackTarget(step=4, skip_steps=2, is_requested=True, submission=2)
    assert fake.submitted[-1].recipe.optim.lr == 1e-4


@pytest.mark.heavy
def test_no_torch_is_imported_for_a_plan() -> None:
    code = (
        "import sys, shardyard; shardyard.plan("
        f"{PLANNED!r}, 'run.steps=5'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
