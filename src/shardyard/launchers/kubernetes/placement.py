"""Whether the nodes of a cluster can hold a pod: what it requests against what they can allocate.

A node can allocate less than its type has: the kubelet and the kernel keep some.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from shardyard.errors import AccessError, RequestError
from shardyard.launchers.kubernetes.api import Api
from shardyard.launchers.kubernetes.quota_checks import quantity
from shardyard.launchers.kubernetes.resources import MIB
from shardyard.launchers.kubernetes.state import Object

_TYPE = "node.kubernetes.io/instance-type"
# Not PreferNoSchedule, which the scheduler may ignore.
_BLOCKING = ("NoSchedule", "NoExecute")


def pod_spec(job: Object) -> Object:
    """Spec of the pods of a job that was rendered; of a TrainJob what it says of them itself."""
    spec: Object = job["spec"]
    match job["kind"]:
        case "JobSet":
            found = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        case "PyTorchJob":
            found = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        case "TrainJob":
            patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
            found = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            trainer = {"resources": spec["trainer"]["resourcesPerNode"]}
            found = {**found, "containers": [trainer]}
        case _:
            found = spec["template"]["spec"]
    return dict(found)


def unplaceable_reason(spec: Object, nodes: Iterable[Object]) -> str:
    """Return what no node can allocate, with numbers; empty: a node could, or there is none.

    Args:
        spec: Spec of the pod. Its node selector and tolerations choose among the nodes.
    """
    requests = spec["containers"][0]["resources"]["requests"]
    candidates = [node for node in nodes if _may_hold(spec, node)]
    lacking = [(node, _shortfalls(requests, node)) for node in candidates]
    if not lacking or any(not lacks for _, lacks in lacking):
        return ""
    # The node that comes closest has the numbers that a user can act on.
    node, lacks = min(lacking, key=lambda one: len(one[1]))
    kind = node["metadata"].get("labels", {}).get(_TYPE, "")
    name = node["metadata"]["name"] + (f" ({kind})" if kind else "")
    what = " and ".join(
        f"{_amount(key, requests[key])} of {key}, of which it can allocate {_amount(key, offer)}"
        for key, offer in lacks.items()
    )
    return f"none of {len(candidates)} nodes can hold the pod: {name} would have to give {what}"


def check_placeable(api: Api, job: Object) -> str:
    """Return a warning against submitting a job, if an autoscaler may add larger nodes.

    Raises:
        RequestError: Nodes of the instance type are there, and none could ever hold the pod.
    """
    spec = pod_spec(job)
    try:
        nodes = api.nodes(_selector(spec))
    except AccessError:
        return ""  # doctor says that nodes cannot be read
    why = unplaceable_reason(spec, nodes)
    if not why:
        return ""
    if job["kind"] == "Job":
        return f"{why}. {SIDE_REMEDY}"
    # Without an instance type an autoscaler may add larger nodes; those of one type are alike.
    if _TYPE not in spec.get("nodeSelector", {}):
        return f"{why}. It waits until larger nodes join"
    raise RequestError(
        f"{why}. It would wait for ever. See `shardyard doctor RECIPE --on kubernetes`: the nodes' "
        "device plugins may be missing, or launch.kubernetes.node_selector chooses the wrong nodes."
    )


SIDE_REMEDY = (
    "It waits until larger nodes join. Ask for less: launch.side.memory_gib=8 launch.side.cpus=2"
)


def _selector(spec: Object) -> str:
    return ",".join(f"{key}={value}" for key, value in spec.get("nodeSelector", {}).items())


def _may_hold(spec: Object, node: Object) -> bool:
    labels, about = node["metadata"].get("labels", {}), node.get("spec", {})
    selected = all(labels.get(key) == value for key, value in spec.get("nodeSelector", {}).items())
    taints = [each for each in about.get("taints", []) if each.get("effect") in _BLOCKING]
    tolerations = spec.get("tolerations", [])
    tolerated = all(any(_tolerates(one, taint) for one in tolerations) for taint in taints)
    return selected and tolerated and not about.get("unschedulable")


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        # Exists without a key tolerates every taint.
        return toleration.get("key") in (None, taint["key"])
    asked = (toleration.get("key"), toleration.get("value", ""))
    return asked == (taint["key"], taint.get("value", ""))


def _shortfalls(requests: Mapping[str, str], node: Object) -> dict[str, str]:
    """Resource -> what the node can allocate of it, where that is less than a pod requests."""
    offers = node.get("status", {}).get("allocatable", {})
    return {
        name: offers.get(name, "0")
        for name, asked in requests.items()
        if quantity(asked) > quantity(offers.get(name, "0"))
    }


def _amount(resource: str, text: str) -> str:
    """Memory in MiB, which allocatable ones are not written in."""
    is_memory = resource == "memory" or resource.startswith(("hugepages", "ephemeral"))
    return f"{quantity(text) / MIB:,.0f} MiB" if is_memory else text
