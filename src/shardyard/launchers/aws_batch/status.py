"""Status of a multi-node job of AWS Batch, and whether a job or definition is the ledger's own.

Both read what Batch describes. Anybody can take a name, and a ledger can be changed; tags are what
a submission wrote.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, AccessError, ShardyardError
from shardyard.launchers.aws_batch.requests import ORIGIN_TAG, RUN_TAG
from shardyard.launchers.base import ORIGIN_DETAIL, JobState, JobStatus
from shardyard.launchers.ledger import LedgerEntry
from shardyard.units import format_seconds

_PAGE = "verbs/cancel#teardown"

CANCEL_REASON = "cancelled by shardyard"

# Source: botocore's model of DescribeJobs. A state missing here is an error, never a guess.
STATES: dict[str, JobState] = {
    "SUBMITTED": JobState.WAITING,
    "PENDING": JobState.WAITING,
    "RUNNABLE": JobState.WAITING,
    "STARTING": JobState.WAITING,
    "RUNNING": JobState.RUNNING,
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
}

_WAITS = {
    "SUBMITTED": "Batch has taken the job and not looked at it yet",
    "PENDING": "the job waits for another job",
    "RUNNABLE": "the job waits for instances",
    "STARTING": "an instance is there; the image is pulled and the container created",
}

# Beginnings of a RUNNABLE job's statusReason. Source: AWS Batch User Guide, "stuck in RUNNABLE".
_STUCK = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": (
        "AWS has no capacity of this instance type there now. Wait, reserve capacity, or name "
        "another type or zone"
    ),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": (
        "maxvCpus of the compute environment is less than the job needs. Raise it"
    ),
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": (
        "no instance type of the compute environment is as large as the container. Let it have "
        "the type of cluster.instance, or ask for fewer VCPUs and less memory"
    ),
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS": (
        "the service role of the compute environment lacks permissions. Fix that role"
    ),
}

LONG_WAIT_S = 600
_LONG_WAIT = (
    "The usual causes: no capacity of this type in the subnet's zone, a vCPU quota of the account "
    "below what all nodes need, instances that cannot reach ECS (no NAT or endpoint in the "
    "subnet), or a compute environment that is not VALID. Its activity history in the EC2 console "
    "(Auto Scaling groups) says which"
)


def job_status(
    job: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], *, now_s: float
) -> JobStatus:
    """The state of a job and of its nodes.

    Args:
        job: The job's entry in DescribeJobs.
        nodes: Those of its nodes, as far as Batch knows them.
        now_s: Unix time.

    Raises:
        ShardyardError: Batch names a state that is not in ``STATES``.
    """
    exit_code = _exit_code(job)
    state = _state(job, exit_code)
    return JobStatus(
        state=state,
        reason=_reason(job, state, exit_code, now_s=now_s),
        exit_code=_reported_exit_code(state, exit_code),
        nodes=tuple((f"node {_index(node)}", _node_state(node)) for node in nodes),
    )


def _state(job: Mapping[str, Any], exit_code: int | None) -> JobState:
    word = str(job.get("status"))
    state = STATES.get(word)
    if state is None:
        raise ShardyardError(
            f"Batch says that job {job.get('jobId')} is {word}, which this version does not know. "
            "It knows " + ", ".join(STATES) + ". Update Shardyard, and look in the AWS console "
            "meanwhile."
        )
    if state is not JobState.FAILED:
        return state
    # 130: the run stopped itself, with a code that no retry rule starts again.
    if exit_code in (EXIT_DRAINED, EXIT_INTERRUPTED):
        return JobState.DRAINED
    return JobState.CANCELLED if _was_cancelled(job) else JobState.FAILED


def _reported_exit_code(state: JobState, exit_code: int | None) -> int | None:
    if not state.is_over:
        return None
    # A run that stopped itself ends with 130 and is resumed in the same way.
    return EXIT_DRAINED if state is JobState.DRAINED else exit_code


def _was_cancelled(job: Mapping[str, Any]) -> bool:
    said = str(job.get("statusReason", ""))
    return bool(job.get("isTerminated") or job.get("isCancelled")) or said.startswith(CANCEL_REASON)


def _exit_code(job: Mapping[str, Any]) -> int | None:
    """Return the exit code of the main node's newest attempt; None: no container ran."""
    attempts = job.get("attempts") or [{}]
    for holder in (attempts[-1], job):
        code = (holder.get("container") or {}).get("exitCode")
        if code is not None:
            return int(code)
    return None


def _reason(job: Mapping[str, Any], state: JobState, exit_code: int | None, *, now_s: float) -> str:
    said = str(job.get("statusReason") or "").rstrip(".")
    if state is JobState.WAITING:
        return _waiting_reason(job, said, now_s=now_s)
    if state is JobState.RUNNING:
        return f"attempt {max(1, len(job.get('attempts') or []))} of {_allowed(job)} runs"
    if state is JobState.SUCCEEDED:
        return "the main node ended with exit code 0"
    ending = "no container ran" if exit_code is None else f"exit code {exit_code}"
    container = str((_last_attempt(job).get("container") or {}).get("reason") or "").rstrip(".")
    words = [word for word in (said, container) if word]
    if state is JobState.DRAINED:
        words.append("it saved before it ended and can be resumed")
    return "; ".join([ending, *words])


def _waiting_reason(job: Mapping[str, Any], status_reason: str, *, now_s: float) -> str:
    word = str(job["status"])
    parts = [_WAITS[word]]
    attempts = job.get("attempts") or []
    if attempts:
        code = _exit_code(job)
        ending = "without an exit code" if code is None else f"with exit code {code}"
        parts.append(f"attempt {len(attempts)} of {_allowed(job)} ended {ending}")
    # createdAt (ms) is the submission's time, so it says nothing of the wait for a second attempt.
    waited_s = now_s - job["createdAt"] / 1000 if "createdAt" in job and not attempts else 0.0
    known = next((text for start, text in _STUCK.items() if status_reason.startswith(start)), None)
    if status_reason:
        parts.append(status_reason)
    if known:
        parts.append(known)
    elif word == "RUNNABLE" and waited_s > LONG_WAIT_S:
        parts.append(f"it has waited {format_seconds(waited_s)}. {_LONG_WAIT}")
    return "; ".join(parts)


def _last_attempt(job: Mapping[str, Any]) -> Mapping[str, Any]:
    attempts = job.get("attempts") or [{}]
    last: Mapping[str, Any] = attempts[-1]
    return last


def _allowed(job: Mapping[str, Any]) -> int:
    return int((job.get("retryStrategy") or {}).get("attempts") or 1)


def _index(node: Mapping[str, Any]) -> int:
    return int(str(node["jobId"]).partition("#")[2] or 0)


def _node_state(node: Mapping[str, Any]) -> str:
    code = _exit_code(node)
    word = str(node.get("status", "")).lower()
    return word if code is None else f"{word}, exit code {code}"


def is_owned(described: Mapping[str, Any], entry: LedgerEntry, *, run_id: str, region: str) -> bool:
    """Return whether what Batch describes is the entry's; others of its name are not touched.

    Args:
        described: Result of DescribeJobs or DescribeJobDefinitions.
        run_id: The run of the ledger.

    Raises:
        AccessError: It has the entry's id and is tagged as another run's; or the entry has no id,
            as the answer to its creation was lost, and no tag decides it.
    """
    ids = (described.get("jobId"), described.get("jobDefinitionArn"))
    if entry.id is not None and entry.id not in ids:
        return False
    tags = described.get("tags") or {}
    is_of_run = tags.get(RUN_TAG) == run_id
    if entry.id is not None:
        if not is_of_run:
            tagged = f"its tag {RUN_TAG} is {tags.get(RUN_TAG)!r}, not {run_id!r}"
            raise AccessError(_not_owned_message(entry, tagged, described, region), page=_PAGE)
        return True
    origin = entry.details.get(ORIGIN_DETAIL)
    if origin or not is_of_run:
        return is_of_run and tags.get(ORIGIN_TAG) == origin
    # Ledgers of earlier versions have no origin, and another user's run may have the same id.
    why = "whether its creation succeeded was never known, nor who made this"
    raise AccessError(_not_owned_message(entry, why, described, region), page=_PAGE)


def _not_owned_message(
    entry: LedgerEntry, reason: str, described: Mapping[str, Any], region: str
) -> str:
    job_id = described.get("jobId")
    definition = f"deregister-job-definition --job-definition {described.get('jobDefinitionArn')}"
    end = f"terminate-job --job-id {job_id} --reason mine" if job_id else definition
    return (
        f"{entry.kind} {job_id or entry.name} in {region} is left as it is: {reason}. What others "
        f"made is not ended. If it is yours: aws --region {region} batch {end}."
    )
