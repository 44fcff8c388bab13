"""JobSet: one Indexed Job, a pod a node, started again as a whole. Needs no Kubeflow.

Fields: jobset.sigs.k8s.io, API v1alpha2.
"""

from typing import Any

from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.gang import kueue_labels
from shardyard.launchers.kubernetes.names import JOB
from shardyard.launchers.kubernetes.restarts import (
    jobset_failure_policy,
    pod_failure_policy,
    refuse_elastic,
    time_limit_s,
)

JOBSET_API_VERSION = "jobset.x-k8s.io/v1alpha2"

JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""The Job's, which JobSet makes anew at each restart: the same on all pods of one start."""


def jobset(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """The JobSet of a request.

    Raises:
        RequestError: The recipe asks what a JobSet cannot do.
    """
    refuse_elastic(request)
    settings = request.recipe.launch.kubernetes
    meta = pod.metadata(request, name, job=name)
    meta["labels"] |= kueue_labels(request)
    template = pod.pod_template(
        request, name, config=config, env=_place(request, name), restarts=False
    )
    return {
        "apiVersion": JOBSET_API_VERSION,
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": jobset_failure_policy(settings.max_restarts),
            "ttlSecondsAfterFinished": settings.ttl_s,
            "replicatedJobs": [
                {"name": JOB, "replicas": 1, "template": {"spec": _job(request, template)}}
            ],
        },
    }


def _job(request: LaunchRequest, template: dict[str, Any]) -> dict[str, Any]:
    container = template["spec"]["containers"][0]["name"]
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(container),
        "template": template,
    }
    limit_s = time_limit_s(request)
    if limit_s is not None:
        spec["activeDeadlineSeconds"] = limit_s
    return spec


def _place(request: LaunchRequest, name: str) -> list[pod.EnvVar]:
    """What `--place jobset` reads beside JOB_COMPLETION_INDEX, which Kubernetes sets."""
    return [
        {"name": "SHARDYARD_NODES", "value": str(request.nodes)},
        {"name": "SHARDYARD_HOST", "value": f"{name}-{JOB}-0-0.{name}"},
        {"name": "SHARDYARD_SESSION", "valueFrom": pod.field(JOB_UID)},
    ]
