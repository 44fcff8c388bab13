"""All pods of a job placed together or none: by Kueue, by Volcano, or by nobody, which is told.

Fields of PodGroup: volcano-sh/apis, scheduling/v1beta1. Volcano was not run here.
"""

from typing import Any

from shardyard.launchers.base import LaunchRequest

API_VERSION = "scheduling.volcano.sh/v1beta1"
KIND = "PodGroup"

_GROUP = "scheduling.k8s.io/group-name"
"""Annotation of pods: the PodGroup that Volcano counts them to."""


def is_asked(request: LaunchRequest) -> bool:
    """Whether Volcano places the pods; a side job has but one."""
    return request.recipe.launch.kubernetes.scheduler == "volcano" and request.side is None


def pod_group(request: LaunchRequest, metadata: dict[str, Any], *, members: int) -> dict[str, Any]:
    """The group of a job's pods; Volcano starts none before it can start so many."""
    settings = request.recipe.launch.kubernetes
    spec: dict[str, Any] = {"minMember": members}
    if settings.queue is not None:
        spec["queue"] = settings.queue
    if settings.priority_class is not None:
        spec["priorityClassName"] = settings.priority_class
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def join(request: LaunchRequest, template: dict[str, Any], group: str) -> None:
    """Have pods of a template placed with their group, where that is asked."""
    if is_asked(request):
        template["metadata"]["annotations"][_GROUP] = group
        template["spec"]["schedulerName"] = "volcano"


def kueue_labels(request: LaunchRequest) -> dict[str, str]:
    """What hands a job to Kueue, where a queue of it is named."""
    settings = request.recipe.launch.kubernetes
    if settings.queue is None or settings.scheduler == "volcano":
        return {}
    return {"kueue.x-k8s.io/queue-name": settings.queue}


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """That nobody places the pods together."""
    settings = request.recipe.launch.kubernetes
    if request.nodes == 1 or request.side is not None or settings.queue or is_asked(request):
        return ()
    return (
        f"the {request.nodes} pods are placed one by one: where fewer find room, those hold their "
        "nodes, which cost, and wait for the rest; two such jobs can wait for each other for ever. "
        "Name Kueue's queue with launch.kubernetes.queue, or set launch.kubernetes.scheduler="
        "volcano where the cluster has it.",
    )
