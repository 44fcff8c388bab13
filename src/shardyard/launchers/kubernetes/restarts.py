"""What a whole-job restart is worth: which ends of a pod start the job again, and how often."""

from typing import Any

from shardyard.errors import EXIT_INTERRUPTED, RequestError
from shardyard.launchers.base import LaunchRequest

HOPELESS_EXIT_CODES = (1, 2, 4, EXIT_INTERRUPTED)
"""A failed training, a wrong request and a missing permission would end the same way; 130 has
stopped itself."""


def pod_failure_policy(container: str) -> dict[str, Any]:
    """Of a Job with backoffLimit 0: any lost pod fails it, and these codes say so by name.

    Everything else (75 of a node that lost another, 143 of a drained one, a killed or evicted pod)
    fails the Job for BackoffLimitExceeded, and that restarts the JobSet.
    """
    codes = {
        "containerName": container, "operator": "In", "values": list(HOPELESS_EXIT_CODES)
    }  # fmt: skip
    return {"rules": [{"action": "FailJob", "onExitCodes": codes}]}


def jobset_failure_policy(max_restarts: int) -> dict[str, Any]:
    """All pods start again, and only when all old ones are gone: two sets would share a run."""
    return {
        "maxRestarts": max_restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "hopeless",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
            }
        ],
    }


def time_limit_s(request: LaunchRequest) -> int | None:
    """Whole seconds that the job may last."""
    limit_s = request.time_limit_s
    return None if limit_s is None else int(limit_s)


def refuse_elastic(request: LaunchRequest) -> None:
    """Refuse a range of nodes where the target keeps the number it started with.

    Raises:
        RequestError: ``elastic`` asks for a range.
    """
    elastic, target = request.recipe.elastic, request.recipe.launch.kubernetes.target
    for name, value in (("min_nodes", elastic.min_nodes), ("max_nodes", elastic.max_nodes)):
        if value not in ("auto", request.nodes):
            raise RequestError(
                f"elastic.{name}={value}, but a job of launch.kubernetes.target={target} keeps the "
                f"{request.nodes} nodes that it starts with: one lost pod starts all again. Leave "
                f"{name} out, or use launch.kubernetes.target=pytorchjob, whose pods come and go "
                "one by one."
            )
