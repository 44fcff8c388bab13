"""Survey of an existing cluster: what a recipe needs, what of it exists, and what to add.

A survey only asks. The parts to add are those of ``existing_resources.py``; they are made and
removed like those of a cluster of ours.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardyard.cluster.clients import World, folder_of, kubectl_json, spec_file, world_at
from shardyard.cluster.eksctl import GROUP, OWNER_TAG
from shardyard.cluster.existing_resources import (
    EFS_DRIVER,
    AddedClaim,
    AddedEfaPlugin,
    AddedNodes,
    FsxDriver,
    GpuPlugin,
)
from shardyard.cluster.resources import FileSystem
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec, Vpc
from shardyard.config.load import load_recipe
from shardyard.errors import AccessError, CapacityError, RequestError
from shardyard.launchers.kubernetes.prerequisites import DEVICE_PLUGINS, FSX
from shardyard.launchers.kubernetes.resources import EFA, device_resource

_PAGE = "verbs/cluster#existing-clusters"


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One thing that runs need of a cluster."""

    what: str
    found: str
    """Existing part of it, in words; empty: none."""
    adds: tuple[str, ...] = ()
    """Kinds of the parts that are added for it."""
    by_hand: str = ""
    """Instruction for the user, where it is missing and no part is added for it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Result of a survey."""

    cluster: AdoptedCluster
    needs: tuple[Requirement, ...]


def existing_adoption(requested: ClusterSpec, clusters: Path) -> World | None:
    """The same adoption, begun from here; None: there is none.

    Raises:
        RequestError: The cluster was made from here, or adopted by another description.
    """
    folder = folder_of(requested, clusters)
    if not spec_file(folder).exists():
        return None
    world = world_at(folder)
    spec = world.spec
    if not isinstance(spec, AdoptedCluster):
        raise RequestError(
            f"{requested.name} was made from here, see {folder}, so all of it is ours already and "
            "needs no adoption. `shardyard cluster create` with its description continues; "
            "`shardyard cluster show` shows its state."
        )
    if spec.asked == requested:
        return world
    if world.ledger.live():
        raise RequestError(
            f"{folder} is of a cluster that was adopted by another description. Give that one, "
            f"{spec_file(folder)}, or remove what was added with `shardyard cluster delete "
            f"{requested.name}` first; the cluster stays."
        )
    return None


def survey(world: World) -> Survey:
    """Look at a cluster that is there.

    Args:
        world: With the description that was asked for; its folder gets a kubeconfig.

    Raises:
        RequestError: There is no such cluster, or what is there cannot be used.
        AccessError: It is somebody else's of this program, or something has our name.
        CapacityError: It is not ACTIVE.
    """
    asked = world.spec
    cluster = _describe_cluster(world)
    needs = tuple(_needs(world))
    adds = {kind for need in needs for kind in need.adds}
    network = cluster["resourcesVpcConfig"]
    own = str(network["clusterSecurityGroupId"])
    found = AdoptedCluster(
        **{name: getattr(asked, name) for name in ClusterSpec.model_fields if name not in _READ},
        version=str(cluster["version"]),
        vpc=Vpc(id=str(network["vpcId"]), subnets={asked.zone: _subnet(world, network)}),
        arn=str(cluster["arn"]),
        control_group=str((network.get("securityGroupIds") or [own])[0]),
        node_group=own,
        adds=tuple(kind for kind in _ORDER if kind in adds),
        asked=asked,
    )
    _check_names_free(world, adds)
    return Survey(cluster=found, needs=needs)


_READ = ("version", "vpc")
_ORDER = (
    FsxDriver.kind, FileSystem.kind, AddedClaim.kind, GpuPlugin.kind, f"{GROUP} nodes",
    AddedEfaPlugin.kind,
)  # fmt: skip


def _describe_cluster(world: World) -> dict[str, Any]:
    spec = world.spec
    answer = world.ask("eks", "describe_cluster", name=spec.name)
    if answer is None:
        raise RequestError(
            f"these credentials see no EKS cluster {spec.name} in {spec.region}, so it cannot be "
            f"adopted. `aws eks list-clusters --region {spec.region}` lists yours; `shardyard "
            "cluster create` makes one."
        )
    cluster: dict[str, Any] = answer["cluster"]
    tags = cluster.get("tags") or {}
    if OWNER_TAG in tags:
        raise AccessError(
            f"{spec.name} in {spec.region} was made by `shardyard cluster create` (its tag "
            f"{OWNER_TAG} is {tags[OWNER_TAG]}), which keeps its ledger elsewhere. It was not "
            "changed. Work in the folder that made it.",
            page=_PAGE,
        )
    if cluster["status"] not in ("ACTIVE", "UPDATING"):
        raise CapacityError(
            f"{spec.name} is {cluster['status']}, so it cannot be extended now. Run the same "
            "command again once it is ACTIVE."
        )
    return cluster


def _needs(world: World) -> Iterator[Requirement]:
    yield from _storage(world)
    daemons = kubectl_json(world, "daemonset", "--all-namespaces") or {"items": []}
    resource = device_resource(world.spec.instance.accelerator)
    yield _plugin(resource, GpuPlugin.kind, daemons["items"])
    yield _nodes(world)
    if world.spec.has_efa:
        yield _plugin(EFA, AddedEfaPlugin.kind, daemons["items"])


def _plugin(resource: str, kind: str, daemons: list[dict[str, Any]]) -> Requirement:
    """Find a device plugin by its image, by whomever it was installed."""
    plugin = DEVICE_PLUGINS[resource]
    for daemon in daemons:
        images = [one.get("image", "") for one in daemon["spec"]["template"]["spec"]["containers"]]
        if any(plugin.image in image for image in images):
            place = f"{daemon['metadata']['namespace']}/{daemon['metadata']['name']}"
            return Requirement(what=f"what offers {resource}", found=f"daemon set {place}")
    by_hand = "" if plugin.release is not None else f"install the {plugin.name} as its vendor says"
    adds = (kind,) if plugin.release is not None else ()
    return Requirement(what=f"what offers {resource}", found="", adds=adds, by_hand=by_hand)


def _nodes(world: World) -> Requirement:
    """Managed groups of this type in the zone that are large enough count."""
    spec = world.spec
    name, most = spec.instance.name, spec.nodes.max or 1
    what = f"{most} x {name} in {spec.zone}"
    short: list[str] = []
    for group in world.listed("eks", "list_nodegroups", "nodegroups", clusterName=spec.name):
        answer = world.ask(
            "eks", "describe_nodegroup", clusterName=spec.name, nodegroupName=group
        ) or {"nodegroup": {}}
        found = answer["nodegroup"]
        if found.get("instanceTypes") != [name]:
            continue
        size = int((found.get("scalingConfig") or {}).get("maxSize", 0))
        why_not = _group_mismatch(world, found, group, size=size)
        if not why_not:
            return Requirement(what=what, found=f"group {group}, at most {size}")
        short.append(f"group {group}, {why_not}")
    return Requirement(what=what, found="; ".join(short), adds=(f"{GROUP} nodes",))


def _group_mismatch(world: World, nodegroup: dict[str, Any], group: str, *, size: int) -> str:
    """Why a group of the type does not do; empty: it does."""
    spec = world.spec
    if size < (spec.nodes.max or 1):
        return f"at most {size}"
    answer = world.ask("ec2", "describe_subnets", SubnetIds=list(nodegroup.get("subnets", ())))
    zones = {one["AvailabilityZone"] for one in (answer or {}).get("Subnets", ())}
    if zones != {spec.zone}:
        return f"in {', '.join(sorted(zones)) or 'no zone'}"
    if spec.has_efa and not _has_efa(world, group):
        return f"no node of which is seen to offer {spec.instance.efa_count} EFA interfaces"
    return ""


def _has_efa(world: World, group: str) -> bool:
    """Check whether a running node of the group offers them: the group itself does not say."""
    label = f"eks.amazonaws.com/nodegroup={group}"
    nodes = kubectl_json(world, "nodes", "--selector", label) or {"items": []}
    wanted = str(world.spec.instance.efa_count)
    return any(
        node.get("status", {}).get("allocatable", {}).get(EFA) == wanted for node in nodes["items"]
    )


def _storage(world: World) -> Iterator[Requirement]:
    spec = world.spec
    storage = spec.storage
    recipe = load_recipe(spec.recipe or ())
    namespace = recipe.launch.kubernetes.namespace
    claims = [volume.claim for volume in recipe.launch.volumes if volume.claim is not None]
    wanted = [(namespace, claim) for claim in claims]
    if storage.kind != "none":
        wanted.append((storage.namespace, storage.claim))
    for place, claim in dict.fromkeys(wanted):
        yield _claim(world, place, claim)


def _claim(world: World, namespace: str, name: str) -> Requirement:
    storage = world.spec.storage
    what = f"claim {namespace}/{name}"
    found = kubectl_json(world, "persistentvolumeclaim", name, "--namespace", namespace)
    if found:
        phase = found.get("status", {}).get("phase", "of no phase")
        if phase != "Bound":
            raise RequestError(
                f"{what} exists and is {phase}: no pod could mount it, and Shardyard did not make "
                f"it. Look at it (`kubectl describe pvc {name} --namespace {namespace}`), or have "
                "another one made with storage.claim."
            )
        return Requirement(what=what, found="it is there, Bound")
    if storage.kind == "none" or (namespace, name) != (storage.namespace, storage.claim):
        raise RequestError(
            f"the recipe mounts {what} (launch.volumes), which is not in {world.spec.name}, and "
            f"storage makes none of that name. Have it made: storage.kind=fsx storage.claim={name} "
            f"storage.namespace={namespace}; or make it yourself."
        )
    driver = FSX.provides if storage.kind == "fsx" else EFS_DRIVER
    has_driver = kubectl_json(world, "csidriver", driver) is not None
    adds = (FileSystem.kind, AddedClaim.kind)
    return Requirement(
        what=what,
        found=f"its driver {driver}" if has_driver else "",
        adds=adds if has_driver else (FsxDriver.kind, *adds),
    )


def _subnet(world: World, network: dict[str, Any]) -> str:
    """Return the subnet of nodes and file system: the named one, or a private one of the zone."""
    spec, vpc = world.spec, str(network["vpcId"])
    named = spec.vpc.subnets.get(spec.zone)
    ids = [named] if named else list(network["subnetIds"])
    answer = world.ask("ec2", "describe_subnets", SubnetIds=ids) or {"Subnets": []}
    fit = [
        subnet
        for subnet in answer["Subnets"]
        if (subnet["VpcId"], subnet["AvailabilityZone"]) == (vpc, spec.zone)
        and (named or not subnet.get("MapPublicIpOnLaunch"))
    ]
    if fit:
        return str(max(fit, key=lambda one: int(one["AvailableIpAddressCount"]))["SubnetId"])
    raise RequestError(
        f"{spec.name} has no private subnet in {spec.zone} among {', '.join(ids)}, and nodes and "
        f"file system need one of its network {vpc}. Take another zone, or name the subnet: "
        f"'vpc.subnets={{{spec.zone}: subnet-...}}'."
    )


def _check_names_free(world: World, adds: set[str]) -> None:
    """Check names before anything is made: parts with our name but another id stay as they are."""
    for part in (FileSystem(), AddedClaim(), AddedNodes(GROUP)):
        if part.kind in adds:
            part.state(world)
