"""Network policy of a run's pods, which only its own pods and Prometheus may reach.

Prometheus may if it reads their metrics. torch's store, gloo and NCCL require no password,
and use free ports. Fields: kubernetes.io, Network Policies. A cluster whose network plug-in
knows no policies takes the object and ignores it.
"""

from typing import Any

from shardyard.config.endpoints import metrics_endpoint
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.names import POD_LABELS, job_kind
from shardyard.launchers.kubernetes.prerequisites import PROMETHEUS

API_VERSION = "networking.k8s.io/v1"
KIND = "NetworkPolicy"


def network_policy(request: LaunchRequest, metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """The policy of a job.

    Args:
        name: Of the job.
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
    return policy(metadata, own, allowed)


def policy(
    metadata: dict[str, Any], pods: dict[str, Any], allowed: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a policy that lets only the allowed traffic in; outgoing traffic is not limited."""
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": allowed}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


NOT_ALLOWED = (
    "this run has no NetworkPolicy, because you may not create one: every pod of the cluster can "
    "reach its ports. Ask for `create`, `get` and `delete` of networkpolicies in "
    "networking.k8s.io (docs/launch-kubernetes.md)."
)
