"""Conditions and pods as Kubernetes writes them -> where the job stands."""

from typing import Any

import pytest

from shardyard.errors import ShardyardError
from shardyard.launchers.base import JobState, JobStatus
from shardyard.launchers.kubernetes.state import latest_pods, status_of
from tests.launchers.kubernetes.api_server import RUNNING, exited


def job_with(*conditions: tuple[str, str]) -> dict[str, Any]:
    found = [{"type": kind, "status": "True", "message": words} for kind, words in conditions]
    return {"metadata": {"name": "demo"}, "status": {"conditions": found}}


def pod_with(status: dict[str, Any], *, rank: int = 0, created: str = "1") -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(rank)}
    meta = {"name": f"p-{rank}-{created}", "labels": labels, "creationTimestamp": created}
    return {"metadata": meta, "status": status}


def pending(**status: Any) -> dict[str, Any]:
    return {"phase": "Pending", **status}


def status(
    job: dict[str, Any] | None, *pods: dict[str, Any], kind: str = "JobSet", cancelled: bool = False
) -> JobStatus:
    return status_of(kind, job, list(pods), cancelled=cancelled)


# jobset.sigs.k8s.io, trainer.kubeflow.org and kubeflow.org: the condition types of each API.
@pytest.mark.parametrize(
    ("kind", "condition", "state"),
    [
        ("JobSet", "Completed", JobState.SUCCEEDED),
        ("JobSet", "Failed", JobState.FAILED),
        ("JobSet", "Suspended", JobState.WAITING),
        ("JobSet", "RestartingJobSet", JobState.WAITING),
        ("TrainJob", "Complete", JobState.SUCCEEDED),
        ("TrainJob", "Failed", JobState.FAILED),
        ("TrainJob", "Suspended", JobState.WAITING),
        ("PyTorchJob", "Created", JobState.WAITING),
        ("PyTorchJob", "Succeeded", JobState.SUCCEEDED),
        ("PyTorchJob", "Failed", JobState.FAILED),
    ],
)
def test_every_condition_is_a_state(kind: str, condition: str, state: JobState) -> None:
    assert status(job_with((condition, "words")), kind=kind).state is state


def test_an_unknown_condition_is_an_error_and_not_a_guess() -> None:
    with pytest.raises(ShardyardError, match=r"condition 'Paused'.*kubectl describe, and update"):
        status(job_with(("Paused", "")))


def test_an_unknown_phase_of_a_pod_is_an_error() -> None:
    with pytest.raises(ShardyardError, match="phase 'Sleeping'"):
        status(job_with(), pod_with({"phase": "Sleeping"}))


def test_a_condition_that_is_not_true_says_nothing() -> None:
    job = job_with(("Suspended", "resumed"))
    job["status"]["conditions"][0]["status"] = "False"
    assert status(job, pod_with(RUNNING)).state is JobState.RUNNING


def test_the_end_counts_more_than_an_older_suspension() -> None:
    job = job_with(("Suspended", "by Kueue"), ("Completed", "done"))
    assert status(job).state is JobState.SUCCEEDED


def test_a_suspended_job_waits_and_says_for_what() -> None:
    found = status(job_with(("Suspended", "jobset is suspended")))
    assert found.reason == "not admitted yet: jobset is suspended"


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            pending(conditions=[{
                "type": "PodScheduled", "status": "False",
                "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            }]),
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            pending(containerStatuses=[{
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
            }]),
            "ImagePullBackOff: not found",
        ),
        (
            pending(containerStatuses=[{
                "state": {"waiting": {"reason": "CreateContainerConfigError",
                                      "message": 'secret "hf" not found'}},
            }]),
            'CreateContainerConfigError: secret "hf" not found',
        ),
        (
            pending(containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}]),
            "its containers start",
        ),
    ],
)  # fmt: skip
def test_a_waiting_job_says_why(pod: dict[str, Any], reason: str) -> None:
    found = status(job_with(), pod_with(pod))
    assert (found.state, found.reason) == (JobState.WAITING, reason)


def test_a_job_with_some_pods_running_runs() -> None:
    found = status(job_with(), pod_with(RUNNING, rank=0), pod_with(pending(), rank=1))
    assert (found.state, found.reason) == (JobState.RUNNING, "1 of 2 pods run")
    assert found.nodes == (("node 0", "running"), ("node 1", "pending"))


@pytest.mark.parametrize("code", [143, 130])  # 130: it stopped itself, no restart is wanted
def test_a_job_that_was_asked_to_stop_is_drained(code: int) -> None:
    found = status(job_with(("Failed", "deadline")), pod_with(exited(code)))
    assert (found.state, found.exit_code) == (JobState.DRAINED, 143)


def test_a_failed_job_without_pods_has_no_exit_code() -> None:
    assert status(job_with(("Failed", "words"))).exit_code is None


def test_a_job_being_deleted_still_drains() -> None:
    job = job_with()
    job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert status(job, pod_with(RUNNING), cancelled=True).reason == "ending: its pods drain"


def test_no_job_is_cancelled_or_gone() -> None:
    assert status(None, cancelled=True).state is JobState.CANCELLED
    assert status(None).state is JobState.GONE


def test_the_newest_pod_of_a_node_counts() -> None:
    old, new = pod_with(exited(1), created="1"), pod_with(RUNNING, created="2")
    other = pod_with(RUNNING, rank=1)
    assert latest_pods([new, other, old]) == [new, other]
