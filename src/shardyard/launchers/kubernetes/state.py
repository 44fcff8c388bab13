"""State of a job, from its object and its pods; a state that no table knows is an error."""

from typing import Any

from shardyard.errors import EXIT_DRAINED, EXIT_INTERRUPTED, ShardyardError
from shardyard.launchers.base import JobState, JobStatus

Object = dict[str, Any]

_PHASES = {"Pending", "Running", "Succeeded", "Failed", "Unknown"}
# State of a job whose condition of this type is True. None: the condition does not decide it.
_CONDITIONS: dict[str, dict[str, JobState | None]] = {
    "Job": {
        "Complete": JobState.SUCCEEDED,
        "Failed": JobState.FAILED,
        "Suspended": JobState.WAITING,
        "SuccessCriteriaMet": None,  # its last pods still end
        "FailureTarget": None,
    },
    "JobSet": {
        "Completed": JobState.SUCCEEDED,
        "Failed": JobState.FAILED,
        "Suspended": JobState.WAITING,
        "StartupPolicyInProgress": None,
        "StartupPolicyCompleted": None,
        "RestartingJobSet": None,
    },
    "TrainJob": {
        "Complete": JobState.SUCCEEDED,
        "Failed": JobState.FAILED,
        "Suspended": JobState.WAITING,
        "Created": None,
    },
    "PyTorchJob": {
        "Succeeded": JobState.SUCCEEDED,
        "Failed": JobState.FAILED,
        "Suspended": JobState.WAITING,
        "Created": None,
        "Running": None,
        "Restarting": None,
    },
}
# As labels or annotations: the label of an Indexed Job is of Kubernetes 1.28.
_INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
)
# What Kubernetes gives as reason while a container waits: nothing is wrong yet.
_STARTING = {"ContainerCreating", "PodInitializing"}


def node_rank(pod: Object) -> int:
    """Return the node rank of a pod in its job."""
    meta = pod["metadata"]
    for label in _INDEX_LABELS:
        value = meta.get("labels", {}).get(label) or meta.get("annotations", {}).get(label)
        if value is not None:
            return int(value)
    return 0


def latest_pods(pods: list[Object]) -> list[Object]:
    """The newest pod of each node, by rank; a restart leaves older ones for a while."""
    by_rank: dict[int, Object] = {}
    # Kubernetes writes times in UTC and in one form, which sorts as text.
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        by_rank[node_rank(pod)] = pod
    return [by_rank[rank] for rank in sorted(by_rank)]


def is_running(pod: Object) -> bool:
    """Return whether its container runs and will continue to."""
    # A pod that is being deleted runs until its grace ends, and would end under a command in it.
    if pod["metadata"].get("deletionTimestamp"):
        return False
    states = pod.get("status", {}).get("containerStatuses", [])
    return any("running" in state.get("state", {}) for state in states)


def status_of(kind: str, job: Object | None, pods: list[Object], *, cancelled: bool) -> JobStatus:
    """The status of a job.

    Args:
        kind: Job, JobSet, TrainJob or PyTorchJob.
        job: As the API server has it; None: it has none.
        pods: All that are there.
        cancelled: Whether we were asked to cancel it.

    Raises:
        ShardyardError: It is in a state that is not known.
    """
    newest = latest_pods(pods)
    nodes = tuple((f"node {node_rank(pod)}", _pod_words(pod)) for pod in newest)
    if job is None or "deletionTimestamp" in job["metadata"]:
        return _without_job(job, newest, nodes, cancelled=cancelled)
    state, words = _by_condition(kind, job)
    if state is JobState.FAILED:
        # A plain Job makes a lost pod again, so only its last pod counts.
        code = _failing_exit_code(newest if kind == "Job" else pods)
        # 130: the run stopped itself, with a code that no policy restarts.
        if code in (EXIT_DRAINED, EXIT_INTERRUPTED):
            code = EXIT_DRAINED
            state, words = JobState.DRAINED, f"asked to stop, saved, can be resumed ({words})"
        return JobStatus(state=state, reason=words, exit_code=code, nodes=nodes)
    if state is JobState.SUCCEEDED:
        return JobStatus(state=state, reason=words, exit_code=0, nodes=nodes)
    if state is JobState.WAITING:
        return JobStatus(state=state, reason=f"not admitted yet: {words}", nodes=nodes)
    running = [pod for pod in newest if _phase(pod) == "Running"]
    if running:
        reason = f"{len(running)} of {len(newest)} pods run"
        return JobStatus(state=JobState.RUNNING, reason=reason, nodes=nodes)
    return JobStatus(
        state=JobState.WAITING,
        reason=_waiting_reason(newest),
        is_unplaced=any(_unscheduled(pod) for pod in newest),
        nodes=nodes,
    )


def _without_job(
    job: Object | None,
    pods: list[Object],
    nodes: tuple[tuple[str, str], ...],
    *,
    cancelled: bool,
) -> JobStatus:
    if pods or job is not None:
        return JobStatus(state=JobState.RUNNING, reason="ending: its pods drain", nodes=nodes)
    if cancelled:
        return JobStatus(state=JobState.CANCELLED, reason="cancelled")
    return JobStatus(
        state=JobState.GONE,
        reason="the cluster has no such job: it was deleted, or its time to be kept "
        "(launch.kubernetes.ttl_s) is over",
    )


def _by_condition(kind: str, job: Object) -> tuple[JobState | None, str]:
    """Return the job's state from the last condition that gives one, and its words."""
    result: tuple[JobState | None, str] = (None, "")
    for condition in job.get("status", {}).get("conditions", []):
        name = condition["type"]
        if name not in _CONDITIONS[kind]:
            raise ShardyardError(
                f"{kind} {job['metadata']['name']} has the condition {name!r}, which this version "
                "of Shardyard does not know. What it means for the run would be a guess. Look at "
                "it with kubectl describe, and update Shardyard."
            )
        state = _CONDITIONS[kind][name]
        if state is None or condition["status"] != "True":
            continue
        words = condition.get("message") or condition.get("reason") or name.lower()
        # An end stays: an older Suspended may still be True.
        if result[0] is None or not result[0].is_over:
            result = (state, words)
    return result


def _phase(pod: Object) -> str:
    phase = str(pod.get("status", {}).get("phase", "Pending"))
    if phase not in _PHASES:
        raise ShardyardError(
            f"pod {pod['metadata']['name']} is in the phase {phase!r}, which this version of "
            "Shardyard does not know. What it means would be a guess. Look at it with kubectl "
            "describe, and update Shardyard."
        )
    return phase


def _terminated(pod: Object) -> Object | None:
    for container in pod.get("status", {}).get("containerStatuses", []):
        ended: Object | None = container.get("state", {}).get("terminated")
        if ended is not None:
            return ended
    return None


def _failing_exit_code(pods: list[Object]) -> int | None:
    """Return the exit code of the container that failed first; the others were stopped for it."""
    ends = [end for pod in pods if (end := _terminated(pod)) and end["exitCode"] != 0]
    ends.sort(key=lambda end: str(end.get("finishedAt", "")))
    return int(ends[0]["exitCode"]) if ends else None


def _pod_words(pod: Object) -> str:
    ended = _terminated(pod)
    if ended is not None:
        return f"exited {ended['exitCode']}"
    return _trouble(pod) or _phase(pod).lower()


def _trouble(pod: Object) -> str:
    """Return why a pod does not start; empty: it has no known problem."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _STARTING:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return _unscheduled(pod)


def _unscheduled(pod: Object) -> str:
    """Why the scheduler finds no node for a pod; empty: it has one, or was not looked at yet."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    return ""


def _waiting_reason(pods: list[Object]) -> str:
    if not pods:
        return "its pods are not made yet"
    troubles = [trouble for pod in pods if (trouble := _trouble(pod))]
    return troubles[0] if troubles else "its containers start"
