"""Whether a cluster enforces the NetworkPolicy of a run: by its network plug-in's pods."""

from collections.abc import Iterator

from shardyard.doctor.finding import Finding
from shardyard.errors import AccessError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.api import Api
from shardyard.launchers.kubernetes.state import Object

_ENFORCERS = {
    "calico-node": "Calico", "canal": "Canal", "cilium": "Cilium", "antrea-agent": "Antrea",
    "kube-router": "kube-router", "weave-net": "Weave Net", "anetd": "GKE's Dataplane V2",
    "azure-npm": "Azure's network policy manager", "ovnkube-node": "OVN-Kubernetes",
}  # fmt: skip
"""DaemonSet -> the plug-in that enforces policies, as each one's own manifests name it."""
_VPC_CNI = "aws-node"
_FLAG = "--enable-network-policy=true"
"""Flag of its second container. Source: charts/aws-vpc-cni of aws/amazon-vpc-cni-k8s."""


def check_policies(_: LaunchRequest, api: Api) -> Iterator[Finding]:
    """Report the plug-in that enforces policies, or that none does."""
    try:
        found = {each["metadata"]["name"]: each for each in api.everywhere("DaemonSet")}
    except AccessError:
        what = "unknown whether the cluster enforces them: you may not list daemonsets"
        yield Finding(name="network policies", verdict="ok", what=what)
        return
    if not found:  # a plug-in that runs elsewhere, as on some managed clusters
        return
    names = [words for name, words in _ENFORCERS.items() if name in found]
    if _VPC_CNI in found and _enforces(found[_VPC_CNI]):
        names.append("the add-on vpc-cni")
    if names:
        what = f"{' and '.join(names)} enforces them"
        yield Finding(name="network policies", verdict="ok", what=what)
        return
    if _VPC_CNI in found:
        what = "the add-on vpc-cni ignores them: every pod of the cluster reaches a run's ports"
        mend = (
            "aws eks update-addon --cluster-name NAME --addon-name vpc-cni --configuration-values "
            """'{"enableNetworkPolicy": "true"}' --resolve-conflicts PRESERVE"""
        )
    else:
        what = (
            "no network plug-in is known here that enforces them: every pod of the cluster may "
            "reach a run's ports"
        )
        mend = "Ask the cluster's administrator; Calico and Cilium enforce them"
    yield Finding(name="network policies", verdict="warning", what=what, mend=mend)


def _enforces(daemon_set: Object) -> bool:
    containers = daemon_set["spec"]["template"]["spec"]["containers"]
    return any(_FLAG in each.get("args", []) for each in containers)
