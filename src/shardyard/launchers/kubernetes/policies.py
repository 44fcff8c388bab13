"""Policies of a Kubernetes job: restarts, gang scheduling, capacity and network traffic."""

from typing import Any

from shardyard.config.endpoints import metrics_endpoint
from shardyard.config.machines import PurchaseOption
from shardyard.errors import EXIT_INTERRUPTED, RequestError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.names import POD_LABELS, job_kind
from shardyard.launchers.kubernetes.prerequisites import PROMETHEUS

HOPELESS_EXIT_CODES = (1, 2, 4, EXIT_INTERRUPTED)
"""A failed training, a wrong request and a missing permission would end the same way; 130 has
stopped itself."""


def pod_failure_policy(container: str) -> dict[str, Any]:
    """Return the policy of a Job with backoffLimit 0: exit codes that fail it by name.

    Any lost pod fails the Job. Other codes fail it for BackoffLimitExceeded, and that restarts the
    JobSet. Examples are 75 of a node that lost another, 143 of a drained one, and a killed or
    evicted pod.
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
                # A restart makes a new Job, for which the time limit would begin again.
                "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
            }
        ],
    }


def time_limit_s(request: LaunchRequest) -> int | None:
    """Whole seconds that the job may last."""
    limit_s = request.time_limit_s
    return None if limit_s is None else int(limit_s)


def reject_elastic(request: LaunchRequest) -> None:
    """Reject a range of nodes if the target keeps the number it started with.

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


# Gang scheduling: Kueue or Volcano places all pods of a job or none. Without either, launch warns.
#
# The fields of PodGroup are those of volcano-sh/apis, scheduling/v1beta1. They were compared with
# that API only: Volcano itself was not run.

API_VERSION = "scheduling.volcano.sh/v1beta1"
KIND = "PodGroup"

_GROUP = "scheduling.k8s.io/group-name"
"""Annotation of pods: the PodGroup that Volcano counts them to."""


def uses_volcano(request: LaunchRequest) -> bool:
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
    """Have pods of a template placed with their group, if the request asks for it."""
    if uses_volcano(request):
        template["metadata"]["annotations"][_GROUP] = group
        template["spec"]["schedulerName"] = "volcano"


def kueue_labels(request: LaunchRequest) -> dict[str, str]:
    """Return the labels that hand a job to Kueue, if a queue of it is named."""
    settings = request.recipe.launch.kubernetes
    if settings.queue is None or settings.scheduler == "volcano":
        return {}
    return {"kueue.x-k8s.io/queue-name": settings.queue}


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return a warning if no scheduler places the pods together."""
    settings = request.recipe.launch.kubernetes
    if request.nodes == 1 or request.side is not None or settings.queue or uses_volcano(request):
        return ()
    return (
        f"the {request.nodes} pods are placed one by one: where fewer find room, those hold their "
        "nodes, which cost, and wait for the rest; two such jobs can wait for each other for ever. "
        "Name Kueue's queue with launch.kubernetes.queue, or set launch.kubernetes.scheduler="
        "volcano where the cluster has it.",
    )


# Node affinity: labels of a node tell whether it is rented as ``cluster.capacity`` asks.
#
# As in Kubernetes, one term is enough, and all expressions of that term must hold.

RESERVATION = "shardyard/capacity-reservation"
"""Label of node groups, with the reservation's id: for groups that Karpenter has not made."""

_OF_KARPENTER = "karpenter.k8s.aws/capacity-reservation-id"
"""Source: karpenter.sh, Scheduling, well-known labels."""
_TYPES = {"karpenter.sh/capacity-type": ("spot", "reserved"), "eks.amazonaws.com/capacityType":
          ("SPOT", "CAPACITY_BLOCK")}  # fmt: skip
"""Labels of Karpenter and of EKS's managed node groups, and the values that are not on demand."""

Term = list[dict[str, Any]]


def selector_terms(capacity: PurchaseOption) -> list[Term]:
    """Return the terms that the labels of a node must match."""
    match capacity.kind:
        case "on-demand":  # self-managed groups have neither label
            return [[_one(label, "NotIn", others) for label, others in _TYPES.items()]]
        case "spot":
            return [[_one(label, "In", values[:1])] for label, values in _TYPES.items()]
        case "reservation" | "block":
            ids = (str(capacity.id),)
            return [[_one(label, "In", ids)] for label in (_OF_KARPENTER, RESERVATION)]


def node_affinity(capacity: PurchaseOption) -> dict[str, Any]:
    """Return the ``affinity`` of a pod that takes only such nodes."""
    terms = [{"matchExpressions": term} for term in selector_terms(capacity)]
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def is_from_capacity(capacity: PurchaseOption, labels: dict[str, str]) -> bool:
    """Whether a node with these labels is rented so."""
    return any(all(_holds(one, labels) for one in term) for term in selector_terms(capacity))


def _one(label: str, operator: str, values: tuple[str, ...]) -> dict[str, Any]:
    return {"key": label, "operator": operator, "values": list(values)}


def _holds(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    is_in = labels.get(expression["key"]) in expression["values"]
    return is_in if expression["operator"] == "In" else not is_in


# Only a run's own pods may reach its pods, and Prometheus, if it reads their metrics.
# torch's store, gloo and NCCL require no password, and use free ports. A cluster whose network
# plug-in knows no policies takes the object and ignores it.
# Source: kubernetes.io, Network Policies.

_NETWORK_API_VERSION = "networking.k8s.io/v1"
NETWORK_POLICY_KIND = "NetworkPolicy"


def network_policy(request: LaunchRequest, metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the network policy of a job's pods.

    Args:
        name: Name of the job.
    """
    # The label of the controller, since Trainer 2.0 gives pods none of ours.
    own = {"matchLabels": {POD_LABELS[job_kind(request)]: name}}
    allowed: list[dict[str, Any]] = [{"from": [{"podSelector": own}]}]
    place = metrics_endpoint(request.recipe.observe.prometheus)
    # Port 0 is any free one, which no policy can name in advance.
    if place is not None and place.port:
        assert PROMETHEUS.release is not None
        # Kubernetes itself gives each namespace this label.
        watcher = {"kubernetes.io/metadata.name": PROMETHEUS.release.namespace}
        allowed.append({
            "from": [{"namespaceSelector": {"matchLabels": watcher}}],
            "ports": [{"protocol": "TCP", "port": place.port}],
        })  # fmt: skip
    return ingress_policy(metadata, own, allowed)


def ingress_policy(
    metadata: dict[str, Any], pods: dict[str, Any], allowed: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a policy that lets only the allowed traffic in; outgoing traffic is not limited."""
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": allowed}
    return {
        "apiVersion": _NETWORK_API_VERSION,
        "kind": NETWORK_POLICY_KIND,
        "metadata": metadata,
        "spec": spec,
    }


NO_NETWORK_POLICY = (
    "this run has no NetworkPolicy, because you may not create one: every pod of the cluster can "
    "reach its ports. Ask for `create`, `get` and `delete` of networkpolicies in "
    "networking.k8s.io (docs/launch-kubernetes.md)."
)
