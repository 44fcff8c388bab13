"""Check a recipe's requests against the description of the EKS cluster made from here.

Nodes of an autoscaled group may not exist yet, so that the cluster itself cannot say that
none will ever hold a pod. Its folder (``clusters/NAME.REGION``) can.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shardyard.cluster.clients import spec_file, world_at
from shardyard.cluster.spec import LARGEST_GROUP, AdoptedCluster, ClusterSpec
from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.launchers.base import LaunchRequest, SideJob
from shardyard.launchers.kubernetes.prerequisites import eks_cluster
from shardyard.launchers.kubernetes.quota_checks import quantity
from shardyard.launchers.kubernetes.resources import EFA, MIB, demand_of

CLUSTERS = Path("clusters")
"""Folder in which `shardyard cluster` keeps a folder for each cluster."""

_SYSTEM_TYPES = {"c5.2xlarge": (8, 16), "m5.8xlarge": (32, 128)}
"""vCPUs and GiB. Source: EC2's instance types."""
_KUBELET_MIB = 255 + 100
_KUBELET_CORES = 0.06
"""The least that a node of EKS keeps for itself: for the kubelet, and as its eviction threshold.
Source: bootstrap.sh of awslabs/amazon-eks-ami. The kernel takes more, so these are upper bounds."""


def against_description(request: LaunchRequest, clusters: Path = CLUSTERS) -> list[str]:
    """Why no node of the described cluster can hold a training's pod or a side job's.

    Args:
        clusters: Folder of the clusters that were made from here.

    Returns:
        Empty: a node can, or the context is not that of a cluster with a folder here.
    """
    found = _description(request, clusters)
    if found is None:
        return []
    file, given = found
    judge = _of_training if request.side is None else _of_side_job
    return [f"{file}: {why}" for why in judge(request, given)]


def against_side_jobs(request: LaunchRequest, clusters: Path = CLUSTERS) -> list[str]:
    """The same of the side jobs that a training's recipe leads to, such as `prepare`.

    Before the training only the cluster's nodes without accelerators need to be there.
    """
    side = replace(request, side=SideJob(kind="prepare", arguments={}))
    found = _description(side, clusters)
    if found is None:
        return []
    return [f"{found[0]}: {why}" for why in _of_side_job(side, found[1], before_training=True)]


def _description(request: LaunchRequest, clusters: Path) -> tuple[Path, ClusterSpec] | None:
    context = request.recipe.launch.kubernetes.context
    with suppress(RequestError):  # another context, or a file that `cluster` reports
        region, name = eks_cluster(context or "")
        folder = clusters / f"{name}.{region}"
        if spec_file(folder).is_file():
            return spec_file(folder), world_at(folder).spec
    return None


def _of_training(request: LaunchRequest, spec: ClusterSpec) -> Iterator[str]:
    wanted, kind = request.recipe.cluster.instance, spec.nodes.instance
    if kind is None or request.recipe.launch.kubernetes.node_selector:
        return  # other nodes of the cluster, which are not described
    if wanted is not None and wanted != kind:
        yield (
            f"the cluster has nodes of {kind}, none of {wanted}, so no pod would start. Set "
            f"cluster.instance={kind}, or make a cluster with nodes.instance={wanted}"
        )
    most = spec.nodes.max or LARGEST_GROUP
    if wanted is not None and request.nodes > most:
        yield (
            f"the cluster has at most {most} nodes of {kind}, and {request.nodes} are requested. "
            f"Set cluster.nodes={most}, or make it with nodes.max={request.nodes}"
        )
    if wanted not in (None, kind):
        return  # what a pod requests follows the other type
    demand = demand_of(request)
    if demand.has_efa and not spec.has_efa:
        yield (
            f"its nodes have no EFA (nodes.efa), and each pod requests {demand.devices[EFA]} of "
            f"{EFA}. Set launch.kubernetes.efa=0"
        )
    kinds = [kind] if wanted is not None else [kind, spec.system.instance]
    lacking = [_shortfall(demand.requests(), each) for each in kinds]
    if all(lacking):
        yield (
            f"a pod requests {lacking[0]}. Make the cluster with a larger nodes.instance, or lower "
            "cluster.devices"
        )


def _of_side_job(
    request: LaunchRequest, spec: ClusterSpec, *, before_training: bool = False
) -> Iterator[str]:
    is_elsewhere = isinstance(spec, AdoptedCluster)  # it has nodes that are not described
    if is_elsewhere or request.recipe.launch.kubernetes.side_node_selector:
        return
    requests = demand_of(request).requests()
    kinds: list[str] = [spec.system.instance]
    if spec.nodes.instance is not None and not (before_training and spec.nodes.count == 0):
        kinds.append(spec.nodes.instance)
    lacking = [_shortfall(requests, kind) for kind in kinds]
    if all(lacking):
        yield (
            f"the pod of a side job requests {lacking[0]}. Ask for less: "
            "launch.side.memory_gib=8 launch.side.cpus=2"
        )


def _shortfall(requests: dict[str, str], kind: str) -> str:
    """Describe what a pod requests beyond the most that a type of node can allocate; else empty."""
    if kind in _SYSTEM_TYPES:
        cores, gib = _SYSTEM_TYPES[kind]
        memory_mib = gib * 1024
    else:
        machine = instance(kind)
        cores, memory_mib = machine.vcpus, machine.host_memory_bytes // MIB
    asked_cores = float(quantity(requests["cpu"]))
    asked_mib = float(quantity(requests.get("memory", "0"))) / MIB
    words = []
    if asked_cores > cores - _KUBELET_CORES:
        words.append(f"{asked_cores:g} CPUs of {kind}, which has {cores} and keeps some")
    if asked_mib > memory_mib - _KUBELET_MIB:
        words.append(f"{asked_mib:,.0f} MiB of {kind}, which has {memory_mib:,} and keeps some")
    return " and ".join(words)
