"""Queues in which a multi-node job would wait for ever are refused."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.errors import CapacityError, RequestError
from shardyard.launchers.aws_batch.queue import check_queue
from shardyard.launchers.aws_batch.requests import job_definition, job_submission
from shardyard.launchers.base import SideJob
from tests.launchers.batch_requests import batch_request

pytest.importorskip("botocore", reason="needs shardyard[aws]")


class Meta:
    region_name = "us-east-1"


class FakeBatch:
    """One queue on some compute environments."""

    meta = Meta()

    def __init__(self, *environments: dict[str, Any], **queue: Any) -> None:
        self.environments = [
            {
                "computeEnvironmentName": f"e{number}", "type": "MANAGED", "state": "ENABLED",
                "status": "VALID", **environment,
            }
            for number, environment in enumerate(environments)
        ]  # fmt: skip
        names = [{"computeEnvironment": e["computeEnvironmentName"]} for e in self.environments]
        self.queue = {
            "jobQueueName": "trainers", "state": "ENABLED", "status": "VALID",
            "computeEnvironmentOrder": names, **queue,
        }  # fmt: skip

    def describe_job_queues(self, jobQueues: list[str] | None = None) -> dict[str, Any]:
        is_asked = jobQueues is None or self.queue["jobQueueName"] in jobQueues
        return {"jobQueues": [self.queue] if is_asked else []}

    def describe_compute_environments(self, computeEnvironments: list[str]) -> dict[str, Any]:
        found = [e for e in self.environments if e["computeEnvironmentName"] in computeEnvironments]
        return {"computeEnvironments": found}


def resources(**more: Any) -> dict[str, Any]:
    return {"computeResources": {"type": "EC2", "maxvCpus": 4096, **more}}


def check(batch: FakeBatch, name: str = "trainers") -> None:
    request = batch_request("cluster.instance=p4d.24xlarge", "cluster.nodes=2")
    check_queue(batch, name, job_definition(request))


@pytest.mark.parametrize("types", [["p4d.24xlarge"], ["p4d"], ["optimal"], []])
def test_a_queue_that_can_run_the_job_is_taken(types: list[str]) -> None:
    check(FakeBatch(resources(instanceTypes=types)))


def test_one_good_environment_is_enough() -> None:
    check(FakeBatch(resources(type="SPOT"), resources()))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (FakeBatch(state="DISABLED"), "is disabled and takes no jobs. Enable it"),
        (FakeBatch(status="INVALID", statusReason="role gone"), "is INVALID: role gone"),
        (FakeBatch(resources(type="SPOT")), "of type SPOT; multi-node jobs need EC2 on demand"),
        (FakeBatch(resources(type="FARGATE")), "of type FARGATE"),
        (FakeBatch({**resources(), "type": "UNMANAGED"}), "need a managed one"),
        (FakeBatch({**resources(), "state": "DISABLED"}), "e0 is disabled"),
        (FakeBatch({**resources(), "status": "INVALID"}), "e0 is INVALID"),
        (FakeBatch(resources(instanceTypes=["p5.48xlarge"])), "has p5.48xlarge, not p4d.24xlarge"),
    ],
)
def test_a_queue_that_cannot_is_refused(batch: FakeBatch, words: str) -> None:
    with pytest.raises(RequestError, match=r"launch\.aws_batch\.queue='trainers'") as raised:
        check(batch)
    assert words in str(raised.value)


def test_a_queue_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(RequestError, match=r"'others' does not exist.*There is trainers"):
        check(FakeBatch(resources()), "others")


def test_too_few_vcpus_are_no_capacity() -> None:
    with pytest.raises(CapacityError, match=r"at most 191 vCPUs.*needs 192.*Raise maxvCpus"):
        check(FakeBatch(resources(maxvCpus=191)))
    check(FakeBatch(resources(maxvCpus=192)))


def check_side(batch: FakeBatch, *settings: str) -> None:
    side = SideJob(kind="probe")
    request = replace(batch_request("cluster.instance=p4d.24xlarge", *settings), side=side, nodes=1)
    check_queue(batch, job_submission(request)["jobQueue"], job_definition(request))


@pytest.mark.parametrize("kind", ["EC2", "SPOT"])
def test_a_side_job_is_content_with_any_instance_on_demand_or_not(kind: str) -> None:
    environment = {**resources(type=kind, instanceTypes=["m7i.large"], maxvCpus=4)}
    check_side(FakeBatch(environment, jobQueueName="cpus"), "launch.aws_batch.side_queue=cpus")
    check_side(FakeBatch({**environment, "type": "UNMANAGED"}))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (FakeBatch(resources(type="FARGATE")), "side job needs EC2, whose containers mount what"),
        (FakeBatch(resources(maxvCpus=2)), "side_queue='trainers' has at most 2 vCPUs"),
        (FakeBatch(jobQueueName="x"), "side_queue='trainers' does not exist in us-east-1. There"),
        (FakeBatch(state="DISABLED"), "side_queue='trainers' is disabled and takes no jobs"),
    ],
)
def test_a_queue_in_which_a_side_job_would_wait_for_ever_is_refused(
    batch: FakeBatch, words: str
) -> None:
    with pytest.raises((RequestError, CapacityError), match=words):
        check_side(batch)
