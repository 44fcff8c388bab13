"""A Batch job from launch to tear-down, in containers of the project's image.

moto is the service and Docker the instances. What neither has of a multi-node job is played by
tests/launchers/batch_moto.py, which lists it.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardyard.errors import EXIT_DRAINED
from shardyard.launchers.aws_batch.requests import LOG_GROUP, job_name
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Answer, Place
from tests.launchers.batch_docker import DockerBatch, docker_batch
from tests.launchers.batch_requests import EXECUTION_ROLE
from tests.launchers.planted import Planted, planted_secrets

pytest.importorskip("moto.server", reason="needs moto[batch,server]")
pytest.importorskip("docker", reason="needs moto[batch,server]")

pytestmark = pytest.mark.slow

PATIENCE_S = 600.0
NODES = ("cluster.nodes=2", "cluster.devices=1", "data.source=/data")


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerBatch]:
    with docker_batch(tmp_path_factory.mktemp("batch")) as made:
        yield made


@pytest.fixture
def aws(batch: DockerBatch, monkeypatch: pytest.MonkeyPatch) -> DockerBatch:
    """The command line of this test speaks to it."""
    for name, value in batch.server.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return batch


@pytest.fixture
def planted(aws: DockerBatch, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Two secrets in AWS, and the recipe's references to them."""
    made = planted_secrets(tmp_path_factory.mktemp("planted"), kinds=("env", "env"))
    name = f"planted-{time.time_ns()}"
    manager, ssm = aws.server.client("secretsmanager"), aws.server.client("ssm")
    arn = manager.create_secret(Name=name, SecretString=made.values[0])["ARN"]
    ssm.put_parameter(Name=name, Value=made.values[1], Type="SecureString")
    return replace(made, secrets={"PLANTED_0": f"aws-sm:{arn}", "PLANTED_1": f"ssm:{name}"})


def launch(place: Place, aws: DockerBatch, run_id: str, *more: str) -> Answer:
    """`shardyard launch`, of two nodes with one process each."""
    settings = (*NODES, *aws.settings(place.folder / "text"), f"run.id={run_id}", *more)
    return place.run("launch", "tiny.yaml", "--on", "aws-batch", "--json", *settings)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(2.0)


def status(place: Place, run_id: str) -> dict[str, Any]:
    answer = place.run("status", run_id, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = answer.json
    return found


def is_over(place: Place, run_id: str) -> bool:
    return status(place, run_id)["state"] not in ("waiting", "running")


def losses(run_dir: RunDir) -> list[float]:
    return [line["loss"] for line in read_steps(run_dir.metrics)]


def told_by_aws(aws: DockerBatch, run_id: str, job_id: str) -> str:
    """All that Batch and CloudWatch keep of a run."""
    batch, logs = aws.server.client("batch"), aws.server.client("logs")
    name = job_name(run_id)
    definitions = batch.describe_job_definitions(jobDefinitionName=name)["jobDefinitions"]
    jobs = batch.describe_jobs(jobs=[job_id])["jobs"]
    streams = logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=name)
    said = [
        logs.get_log_events(
            logGroupName=LOG_GROUP, logStreamName=stream["logStreamName"], startFromHead=True
        )["events"]
        for stream in streams["logStreams"]
    ]
    return json.dumps([definitions, jobs, said], default=str)


def test_a_job_trains_in_two_containers_and_is_followed_and_removed(
    aws: DockerBatch, place: Place, base: Answer, planted: Planted
) -> None:
    secrets = (f"secrets={json.dumps(planted.secrets)}",
               f"launch.aws_batch.execution_role={EXECUTION_ROLE}")  # fmt: skip
    shown = launch(place, aws, "batched", *secrets, "--dry-run")
    launched = launch(place, aws, "batched", *secrets, "--yes")
    assert launched.code == 0, launched.err
    with place.start("logs", "batched", "--follow", "--all") as following:
        until(lambda: is_over(place, "batched"), "the end of the job")
        followed = following.wait()
    ended = status(place, "batched")
    assert (ended["state"], ended["exit_code"]) == ("succeeded", 0), followed.out
    assert ended["nodes"] == [{"name": f"node {node}", "state": "succeeded"} for node in (0, 1)]
    assert "node 0 | " in followed.out and followed.code == 0
    inside = RunDir(aws.runs / "batched")
    assert losses(inside) == losses(place.run_dir("base"))
    assert losses(place.run_dir("batched")) == losses(inside), "as the log has them"
    (started,) = [line for line in inside.events.read_text().splitlines() if "workers" in line][:1]
    assert len({worker["node"] for worker in json.loads(started)["workers"]}) == 2
    kept = told_by_aws(aws, "batched", launched.json["job_id"])
    removed = place.run("teardown", "batched", "--yes", "--json").json
    assert removed["left"] == [] and aws.server.definitions(job_name("batched")) == []
    things = (shown.out, launched.out, launched.err, followed.out, followed.err, ended, kept,
              place.run_dir("batched").path, inside.path)  # fmt: skip
    assert base.code == 0 and planted.leaks(*things) == []
    assert planted.secrets["PLANTED_0"].removeprefix("aws-sm:") in kept  # the reference is there


def test_a_running_job_is_cancelled_saves_and_is_torn_down(
    aws: DockerBatch, place: Place, prepared: Answer, planted: Planted
) -> None:
    assert prepared.code == 0
    launched = launch(
        place, aws, "endless", "run.steps=1000000", "checkpoint.every=1000000",
        "task.eval_every_steps=null", f"secrets={json.dumps(planted.secrets)}",
        f"launch.aws_batch.execution_role={EXECUTION_ROLE}", "--yes",
    )  # fmt: skip
    assert launched.code == 0, launched.err
    until(lambda: (status(place, "endless")["run"]["step"] or 0) > 2, "the first steps")
    running = status(place, "endless")
    assert running["state"] == "running" and "attempt 1 of" in running["reason"]
    for container in aws.containers():  # a secret is in a process's environment, nowhere else
        for number, value in enumerate(planted.values):
            assert f"PLANTED_{number}={value}" in container["Config"]["Env"]
        assert container["Config"]["User"] == "10001:10001"
    assert place.run("cancel", "endless").code == 0
    until(lambda: is_over(place, "endless"), "the end of the job")
    ended = status(place, "endless")
    assert (ended["state"], ended["exit_code"]) == ("drained", EXIT_DRAINED), ended
    inside = RunDir(aws.runs / "endless")
    assert inside.checkpoint_steps()[-1] == len(losses(inside))
    assert aws.containers() == []
    assert place.run("teardown", "endless", "--yes", "--json").json["left"] == []
    things = (launched.out, launched.err, ended, inside.path, place.run_dir("endless").path)
    assert planted.leaks(*things, told_by_aws(aws, "endless", launched.json["job_id"])) == []
