"""DescribeJobs in words: every state, how it ended, why it waits."""

from typing import Any

import pytest

from shardyard.errors import ShardyardError
from shardyard.launchers.aws_batch.status import STATES, job_status
from shardyard.launchers.base import JobState, JobStatus

NOW_S = 1_795_000_000.0


def described(status: str, **more: Any) -> dict[str, Any]:
    return {
        "jobId": "j-1",
        "status": status,
        "createdAt": int((NOW_S - 30) * 1000),
        "retryStrategy": {"attempts": 3},
        **more,
    }


def attempt(exit_code: int | None, reason: str = "") -> dict[str, Any]:
    container = {} if exit_code is None else {"exitCode": exit_code}
    return {"container": {**container, "reason": reason}, "statusReason": "Essential container"}


def status_of(job: dict[str, Any]) -> JobStatus:
    return job_status(job, [], now_s=NOW_S)


def test_every_state_that_botocore_knows_has_a_meaning() -> None:
    session = pytest.importorskip("botocore.session").get_session()
    shape = session.get_service_model("batch").shape_for("JobStatus")
    assert set(STATES) == set(shape.enum)


def test_an_unknown_state_is_an_error() -> None:
    with pytest.raises(ShardyardError, match="PAUSED, which this version does not know") as raised:
        status_of(described("PAUSED"))
    assert "Update Shardyard" in str(raised.value)


@pytest.mark.parametrize(
    ("job", "state", "exit_code", "words"),
    [
        (described("SUBMITTED"), JobState.WAITING, None, "not looked at it"),
        (described("PENDING"), JobState.WAITING, None, "another job"),
        (described("RUNNABLE"), JobState.WAITING, None, "waits for instances"),
        (described("STARTING"), JobState.WAITING, None, "image is pulled"),
        (described("RUNNING", attempts=[attempt(1), attempt(None)]), JobState.RUNNING, None,
         "attempt 2 of 3 runs"),
        (described("SUCCEEDED", attempts=[attempt(0)]), JobState.SUCCEEDED, 0, "exit code 0"),
        (described("FAILED", attempts=[attempt(143)]), JobState.DRAINED, 143, "can be resumed"),
        (described("FAILED", attempts=[attempt(130)]), JobState.DRAINED, 143, "exit code 130"),
        (described("FAILED", attempts=[attempt(2)]), JobState.FAILED, 2, "exit code 2"),
        (described("FAILED", attempts=[attempt(1), attempt(143)]), JobState.DRAINED, 143,
         "can be resumed"),
        (described("FAILED", attempts=[attempt(143), attempt(1)]), JobState.FAILED, 1,
         "exit code 1"),
        (described("FAILED", attempts=[attempt(143)], isTerminated=True), JobState.DRAINED, 143,
         "can be resumed"),
        (described("FAILED", attempts=[attempt(137)], isTerminated=True), JobState.CANCELLED, 137,
         "exit code 137"),
        (described("FAILED", isCancelled=True), JobState.CANCELLED, None, "no container ran"),
        (described("FAILED", statusReason="cancelled by shardyard"), JobState.CANCELLED, None,
         "cancelled by shardyard"),
        (described("FAILED", attempts=[attempt(1, "OutOfMemoryError: killed")]), JobState.FAILED, 1,
         "OutOfMemoryError"),
        (described("FAILED", statusReason="Host EC2 (instance i-1) terminated."), JobState.FAILED,
         None, "Host EC2"),
        (described("FAILED", container={"exitCode": 3}), JobState.FAILED, 3, "exit code 3"),
    ],
)  # fmt: skip
def test_states_and_endings(
    job: dict[str, Any], state: JobState, exit_code: int | None, words: str
) -> None:
    status = status_of(job)
    assert (status.state, status.exit_code) == (state, exit_code)
    assert words in status.reason


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - none", "another type or zone"),
        ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - small", "Raise it"),
        ("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - none", "fewer VCPUs"),
        ("MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS - no", "Fix that role"),
    ],
)
def test_batchs_reasons_for_waiting_are_explained(reason: str, remedy: str) -> None:
    said = status_of(described("RUNNABLE", statusReason=reason)).reason
    assert reason in said
    assert remedy in said


def test_a_long_wait_without_a_reason_names_the_usual_causes() -> None:
    long = described("RUNNABLE", createdAt=int((NOW_S - 1500) * 1000))
    assert "25 min" in status_of(long).reason
    assert "quota" in status_of(long).reason
    assert "quota" not in status_of(described("RUNNABLE")).reason


def test_a_job_between_attempts_says_how_the_last_one_ended() -> None:
    said = status_of(described("RUNNABLE", attempts=[attempt(75)], createdAt=1)).reason
    assert "attempt 1 of 3 ended with exit code 75" in said


def test_nodes_have_states_of_their_own() -> None:
    nodes: list[dict[str, Any]] = [
        {"jobId": "j-1#0", "status": "RUNNING"},
        {"jobId": "j-1#1", "status": "FAILED", "attempts": [attempt(137)]},
    ]
    status = job_status(described("RUNNING"), nodes, now_s=NOW_S)
    assert status.nodes == (("node 0", "running"), ("node 1", "failed, exit code 137"))
