"""A side job: one pod of a plain Job, without devices. Needs neither JobSet nor Kubeflow.

Fields: batch/v1.
"""

from typing import Any

from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.names import SIDE_KIND
from shardyard.launchers.kubernetes.restarts import pod_failure_policy, time_limit_s

JOB_API_VERSION = "batch/v1"
_RESTARTS = 1
"""A pod that was evicted or lost is made again once; whoever waits for the answer may ask again."""


def side_job(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """The Job of a request.

    Raises:
        RequestError: The recipe asks what a pod cannot have.
    """
    settings = request.recipe.launch.kubernetes
    template = pod.pod_template(request, name, config=config, env=[], restarts=False)
    spec: dict[str, Any] = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _RESTARTS,
        "podFailurePolicy": pod_failure_policy(template["spec"]["containers"][0]["name"]),
        "ttlSecondsAfterFinished": settings.ttl_s,
        "template": template,
    }
    limit_s = time_limit_s(request)
    if limit_s is not None:
        spec["activeDeadlineSeconds"] = limit_s
    return {
        "apiVersion": JOB_API_VERSION,
        "kind": SIDE_KIND,
        "metadata": pod.metadata(request, name, job=name),
        "spec": spec,
    }
