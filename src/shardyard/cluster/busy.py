"""Pods that the end of a cluster's accelerators, or of its file system, would end."""

from typing import Any

from shardyard.cluster.eksctl import NAME_TAG
from shardyard.cluster.existing_resources import AddedClaim
from shardyard.cluster.existing_spec import AdoptedCluster
from shardyard.cluster.prices import ACCELERATORS
from shardyard.cluster.reach import kubectl_json
from shardyard.cluster.world import World
from shardyard.launchers.kubernetes.resources import device_resource

_ALIVE = ("Pending", "Running")


def busy_pods(world: World) -> list[str]:
    """Pods that use what is to be removed: of the whole cluster, or of what was added to it.

    Raises:
        RequestError: The kubeconfig names another cluster.
        ShardyardError: kubectl does not say it.
    """
    listed = kubectl_json(world, "pods", "--all-namespaces") or {"items": []}
    alive = [pod for pod in listed["items"] if pod.get("status", {}).get("phase") in _ALIVE]
    resource = device_resource(world.given.instance.accelerator)
    if isinstance(world.given, AdoptedCluster):
        nodes = _added_nodes(world) if alive else set()
        uses = [pod for pod in alive if _uses_added(pod, world, nodes, resource)]
    else:
        uses = [pod for pod in alive if _asks(pod, resource)]
    return [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in uses]


def _added_nodes(world: World) -> set[str]:
    listed = kubectl_json(world, "nodes", "--selector", f"{NAME_TAG}={world.given.name}")
    return {node["metadata"]["name"] for node in (listed or {"items": []})["items"]}


def _uses_added(pod: dict[str, Any], world: World, nodes: set[str], resource: str) -> bool:
    """On our nodes with devices, or on our claim; what waits for others' nodes is not ours."""
    assert isinstance(world.given, AdoptedCluster)
    adds, storage, spec = world.given.adds, world.given.storage, pod["spec"]
    is_on_nodes = ACCELERATORS in adds and spec.get("nodeName") in nodes and _asks(pod, resource)
    claims = {
        volume.get("persistentVolumeClaim", {}).get("claimName")
        for volume in spec.get("volumes", ())
    }
    place = pod["metadata"]["namespace"]
    is_on_claim = AddedClaim.kind in adds and storage.claim in claims
    return is_on_nodes or (is_on_claim and place == storage.namespace)


def _asks(pod: dict[str, Any], resource: str) -> bool:
    return any(
        resource in container.get("resources", {}).get("requests", {})
        or resource in container.get("resources", {}).get("limits", {})
        for container in pod["spec"]["containers"]
    )
