"""Creation of a cluster, scaling of its nodes, and the settings that launch a recipe on it.

Scaling down first names the pods that a smaller cluster would end.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardyard.cluster.batch import queue
from shardyard.cluster.batch.environment import file_system_of
from shardyard.cluster.batch.queue import block_ends, check_preflight, launch_settings
from shardyard.cluster.batch.stack import SHARED, stack_name
from shardyard.cluster.clients import (
    Act,
    World,
    check_same_account,
    context_of,
    kubectl_json,
    program,
)
from shardyard.cluster.cost_report import NODE_COUNT, requested_nodes
from shardyard.cluster.eksctl import GROUP, NAME_TAG
from shardyard.cluster.existing_resources import AddedClaim
from shardyard.cluster.part import ClusterPart, State, stack_outputs
from shardyard.cluster.part_order import parts_of
from shardyard.cluster.prices import ACCELERATORS, BATCH_ENVIRONMENT
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.errors import CapacityError, RequestError, ShardyardError
from shardyard.hardware import nvidia
from shardyard.io.polling import wait_for
from shardyard.launchers.kubernetes.objects import to_yaml
from shardyard.launchers.kubernetes.resources import EFA, device_resource
from shardyard.launchers.ledger import Ledger
from shardyard.log import info, warn

_ALIVE = ("Pending", "Running")


def busy_pods(world: World) -> list[str]:
    """Pods that use what is to be removed: of the whole cluster, or of what was added to it.

    Raises:
        RequestError: The kubeconfig names another cluster.
        ShardyardError: kubectl does not say it.
    """
    listed = kubectl_json(world, "pods", "--all-namespaces") or {"items": []}
    alive = [pod for pod in listed["items"] if pod.get("status", {}).get("phase") in _ALIVE]
    resource = device_resource(world.spec.instance.accelerator)
    if isinstance(world.spec, AdoptedCluster):
        nodes = _added_nodes(world) if alive else set()
        uses = [pod for pod in alive if _uses_added(pod, world, nodes, resource)]
    else:
        uses = [pod for pod in alive if _asks(pod, resource)]
    return [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in uses]


def _added_nodes(world: World) -> set[str]:
    listed = kubectl_json(world, "nodes", "--selector", f"{NAME_TAG}={world.spec.name}")
    return {node["metadata"]["name"] for node in (listed or {"items": []})["items"]}


def _uses_added(pod: dict[str, Any], world: World, nodes: set[str], resource: str) -> bool:
    """On our nodes with devices, or on our claim; what waits for others' nodes is not ours."""
    assert isinstance(world.spec, AdoptedCluster)
    adds, storage, spec = world.spec.adds, world.spec.storage, pod["spec"]
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


# Make a cluster part by part; killed anywhere, the same call goes on.

LAUNCHER = "cluster"
"""Launcher in the ledger's entries."""

POLL_S = 15.0
LIMIT_S = 3600.0
"""For one part to come or to go."""


def make(world: World, *, poll_s: float = POLL_S, limit_s: float = LIMIT_S) -> None:
    """Make what is missing, in order, each once the one before is seen to be there.

    Raises:
        AccessError: A right is missing, or something of the name is somebody else's.
        CapacityError: There is no capacity, or something has not come in time.
        ShardyardError: A part failed.
    """
    check_same_account(world)
    if world.spec.kind == "batch":
        check_preflight(world)
    for part in parts_of(world.spec):
        _create_part(part, world, poll_s=poll_s, limit_s=limit_s)
    if world.spec.nodes.count and nodes_part(world.spec) is not None:
        wait_for_nodes(world, world.spec.nodes.count, poll_s=poll_s, limit_s=limit_s)


def _create_part(part: ClusterPart, world: World, *, poll_s: float, limit_s: float) -> None:
    name = part.name(world.spec)
    entry = entry_of(part, world.ledger, name)
    if entry == "created" and part.state(world).word == "there":
        return
    state = _wait_until_stable(part, world, poll_s=poll_s, limit_s=limit_s)
    if state.word == "failed":
        raise ShardyardError(
            f"{part.kind} {name} failed: {state.reason}. Shardyard cannot repair it. Remove the "
            "cluster with `shardyard cluster delete`, fix the cause, and create it again."
        )
    intended = world.ledger.intend(part.kind, name, launcher=LAUNCHER)
    if state.word == "absent":
        info(f"making {part.kind} {name}")
        part.make(world)
    else:
        info(f"{part.kind} {name} was begun before; continuing")
        part.finish_setup(world)
    state = _wait_until_stable(part, world, poll_s=poll_s, limit_s=limit_s)
    if state.word != "there":
        raise ShardyardError(
            f"{part.kind} {name} is not there: {state.word} {state.reason}".rstrip()
            + (
                f" (asked: {state.source}). Look at {world.log}, fix what it names, and run the "
                "same command again."
            )
        )
    world.ledger.confirm(intended, name, **part.details(world))


def entry_of(part: ClusterPart, ledger: Ledger, name: str) -> str | None:
    """Return ``created``, ``intended``, or None: the ledger has no open entry of it."""
    for entry in ledger.live():
        if (entry.kind, entry.name) == (part.kind, name):
            return "created" if entry.is_confirmed else "intended"
    return None


def _wait_until_stable(part: ClusterPart, world: World, *, poll_s: float, limit_s: float) -> State:
    """Wait until a part neither comes nor goes, and return its state."""
    state = part.state(world)
    if state.word in ("coming", "going"):
        info(f"waiting for {part.kind} {part.name(world.spec)}, which is {state.word}")
        settled = wait_for(lambda: _stable_state(part, world), every_s=poll_s, within_s=limit_s)
        if settled is None:
            raise CapacityError(
                f"{part.kind} {part.name(world.spec)} is still {state.word} after "
                f"{limit_s / 60:.0f} minutes ({state.source}). Look in the console of AWS, and run "
                "the same command again."
            )
        return settled
    return state


def _stable_state(part: ClusterPart, world: World) -> State | None:
    state = part.state(world)
    return None if state.word in ("coming", "going") else state


def wait_for_nodes(
    world: World, count: int, *, poll_s: float = POLL_S, limit_s: float = LIMIT_S
) -> None:
    """Until so many accelerator nodes are ready and offer all their devices and EFA interfaces.

    Raises:
        CapacityError: They do not in time; says what is short of what.
    """
    said = ""

    def ready() -> bool:
        nonlocal said
        found = node_report(world)
        if found != said:
            info(f"accelerator nodes: {found or 'none yet'}")
            said = found
        return ready_nodes(world) >= count

    if not wait_for(ready, every_s=poll_s, within_s=limit_s):
        raise CapacityError(
            f"of {count} accelerator nodes {ready_nodes(world)} are ready with all their devices "
            f"after {limit_s / 60:.0f} minutes: {said or 'none has come'}. Where none comes, AWS "
            "has no capacity in the zone or the quota is too small (EC2 console, Auto Scaling "
            f"group, Activity); where devices are missing, look at {_OFFERED_BY[world.spec.kind]}. "
            "The nodes that are up cost money: `shardyard cluster scale` removes them."
        )


_OFFERED_BY = {
    "eks": "the device plugins in kube-system",
    "batch": "the drivers of the instances' image",
}


def _required_devices(world: World) -> dict[str, int]:
    machine = world.spec.instance
    if world.spec.kind == "batch":
        return {queue.GPU: machine.count} if machine.accelerator in nvidia.ROWS else {}
    wanted = {device_resource(machine.accelerator): machine.count}
    return wanted | ({EFA: machine.efa_count} if world.spec.has_efa else {})


def _nodes(world: World) -> list[dict[str, Any]]:
    if world.spec.kind == "batch":
        return queue.instances_of(world)
    label = f"shardyard-cluster={world.spec.name}"
    listed = kubectl_json(world, "nodes", "--selector", label) or {"items": []}
    found = []
    for node in listed["items"]:
        status = node.get("status", {})
        conditions = {item["type"]: item["status"] for item in status.get("conditions", [])}
        offered = status.get("allocatable", {})
        devices = {name: int(offered.get(name, 0)) for name in _required_devices(world)}
        ready = conditions.get("Ready") == "True"
        found.append({"name": node["metadata"]["name"], "ready": ready, **devices})
    return found


def ready_nodes(world: World) -> int:
    """Accelerator nodes that are ready and offer what the catalogue says."""
    wanted = _required_devices(world)
    return sum(
        bool(node["ready"]) and all(node[name] == count for name, count in wanted.items())
        for node in _nodes(world)
    )


def node_report(world: World) -> str:
    """Each accelerator node and what it offers, in words."""
    wanted = _required_devices(world)
    words = []
    for node in _nodes(world):
        offers = ", ".join(f"{node[name]} of {count} {name}" for name, count in wanted.items())
        words.append(f"{node['name']} {'ready' if node['ready'] else 'not ready'}, {offers}")
    return "; ".join(words)


def nodes_part(spec: ClusterSpec) -> ClusterPart | None:
    """The part that has the accelerator nodes; None: they were there before."""
    kinds = (ACCELERATORS, BATCH_ENVIRONMENT)
    return next((part for part in parts_of(spec) if part.kind in kinds), None)


def scale_act(world: World, nodes: int) -> Act:
    """Return the call that sets another number of accelerator nodes.

    Raises:
        RequestError: The group does not take that many, is missing, or is not ours.
    """
    spec = world.spec
    if not 0 <= nodes <= (spec.nodes.max or 0):
        raise RequestError(
            f"{spec.name} takes 0 to {spec.nodes.max} accelerator nodes (nodes.max), not "
            f"{nodes}. Take a number in it, or make a cluster with a larger nodes.max."
        )
    check_same_account(world)
    part = nodes_part(spec)
    if part is None:
        raise RequestError(
            f"the accelerator nodes of {spec.name} existed when it was adopted, so Shardyard does "
            "not start or end them. Ask the owner of their group, or use `eksctl scale nodegroup`."
        )
    state = part.state(world)
    if state.word != "there":
        raise RequestError(
            f"the {part.kind} of {spec.name} is {state.word}. Run `shardyard cluster create` with "
            "the same description first; it continues where it ended."
        )
    if spec.kind == "batch":
        return queue.resize_act(spec, nodes)
    _nodes(world)  # a kubeconfig of another cluster is refused before anything is paid
    return program(
        "eksctl", "scale", "nodegroup", "--cluster", spec.name, "--region", spec.region,
        "--name", GROUP, "--nodes", str(nodes),
    )  # fmt: skip


def warn_of_pods(world: World, nodes: int) -> None:
    """Say whose pods a smaller number of nodes may end: AWS chooses the nodes that go."""
    if world.spec.kind != "eks" or nodes >= requested_nodes(world.spec, world.ledger):
        return
    if busy := busy_pods(world):
        warn(
            f"{len(busy)} pods use accelerators of {world.spec.name} ({', '.join(busy[:5])}); "
            "those on nodes that go are ended. `shardyard scale` and `cancel` end runs in order"
        )


def scale(
    world: World,
    nodes: int,
    *,
    agree: Callable[[str], None],
    poll_s: float = POLL_S,
    limit_s: float = LIMIT_S,
) -> None:
    """Set another number of accelerator nodes, and wait until they are ready.

    Raises:
        RequestError: The group does not take that many, is missing, or is not ours.
        CapacityError: They do not come.
    """
    spec = world.spec
    act = scale_act(world, nodes)
    warn_of_pods(world, nodes)
    agree(f"have {nodes} x {spec.instance.name} in {spec.name}?")
    is_more = nodes > requested_nodes(spec, world.ledger)
    if is_more:  # they cost from now on, whether this comes to its end or not
        world.ledger.note(NODE_COUNT, str(nodes), launcher=LAUNCHER)
    started = time.monotonic()
    act.do(world)
    wait_for_nodes(world, nodes, poll_s=poll_s, limit_s=limit_s)
    if not is_more:
        world.ledger.note(NODE_COUNT, str(nodes), launcher=LAUNCHER)
    info(f"{nodes} nodes are ready after {time.monotonic() - started:.0f} s")


def write_settings(world: World) -> Path:
    """Write the settings that launch a recipe on the cluster, as a file to give next to it.

    Raises:
        ShardyardError: A stack is gone, or AWS does not say when the capacity block ends.
    """
    spec = world.spec
    if spec.kind == "batch":
        outputs = stack_outputs(world, stack_name(spec))
        settings = launch_settings(world, outputs, file_system_of(world))
    else:
        settings = kubernetes_settings(world)
    path = world.folder / "launch.yaml"
    path.write_text(to_yaml((settings,)), encoding="utf-8")
    return path


def kubernetes_settings(world: World) -> dict[str, Any]:
    """Context, namespace, claim and machines of an EKS cluster, as a part of a recipe."""
    spec = world.spec
    place = {"namespace": spec.storage.namespace}
    if context := context_of(world):
        place["context"] = context
    launch: dict[str, Any] = {"kubernetes": place}
    if spec.storage.kind != "none":
        volume = {"path": SHARED, "claim": spec.storage.claim}
        launch |= {"run_dir": f"{SHARED}/runs", "volumes": [volume]}
    cluster: dict[str, Any] = {}
    if spec.nodes.instance is not None:
        cluster["instance"] = spec.nodes.instance
        if spec.capacity.kind != "on-demand":  # on-demand nodes of others may have no label of it
            cluster["capacity"] = spec.nodes.capacity
        if spec.capacity.kind == "block":
            cluster["block_ends"] = block_ends(world)
    return {"cluster": cluster, "launch": launch} if cluster else {"launch": launch}
