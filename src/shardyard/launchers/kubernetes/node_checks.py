"""The nodes that a run wants: how many, what they offer, of which architecture."""

from collections.abc import Iterator
from contextlib import suppress

from shardyard.config.machines import capacity_of
from shardyard.doctor.finding import Finding
from shardyard.errors import AccessError
from shardyard.image.registry import find_image
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.api import Api
from shardyard.launchers.kubernetes.placement import SIDE_REMEDY, unplaceable_reason
from shardyard.launchers.kubernetes.pod import toleration
from shardyard.launchers.kubernetes.policies import RESERVATION, is_from_capacity
from shardyard.launchers.kubernetes.prerequisites import DEVICE_PLUGINS, install_instructions
from shardyard.launchers.kubernetes.resources import chosen_instance, demand_of
from shardyard.launchers.kubernetes.state import Object

ARCHITECTURE = "kubernetes.io/arch"


def matching_nodes(request: LaunchRequest, api: Api) -> list[Object]:
    """Nodes of the instance type, with the labels and rented as the recipe asks."""
    machine = chosen_instance(request)
    labels = {"node.kubernetes.io/instance-type": machine.name} if machine else {}
    labels |= request.recipe.launch.kubernetes.node_selector
    nodes = api.nodes(",".join(f"{key}={value}" for key, value in labels.items()))
    capacity = capacity_of(request.recipe.cluster)
    if capacity is None:
        return nodes
    # Chosen here, because a label selector knows no alternatives.
    return [
        node for node in nodes if is_from_capacity(capacity, node["metadata"].get("labels", {}))
    ]


def _label_hint(request: LaunchRequest) -> str:
    capacity = capacity_of(request.recipe.cluster)
    if capacity is None or capacity.id is None:
        return ""
    return (
        f". Nodes of cluster.capacity={request.recipe.cluster.capacity} are known by Karpenter's "
        f"labels or, of other node groups, by the group's label {RESERVATION}={capacity.id}"
    )


def allocatable_count(node: Object, resource: str) -> int:
    """Return the number of devices a node offers to pods."""
    return int(node["status"]["allocatable"].get(resource, 0))


def check_nodes(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    """Their number, and their devices against the catalogue."""
    nodes = matching_nodes(request, api)
    machine = chosen_instance(request)
    kind = machine.name if machine else "the wanted kind"
    if len(nodes) < request.nodes:
        yield Finding(
            name="nodes",
            # An autoscaler may add the missing ones.
            verdict="warning",
            what=f"the cluster has {len(nodes)} nodes of {kind}, and the run wants {request.nodes}",
            mend="It waits until there are enough: scale the node group, or see that an "
            "autoscaler does" + _label_hint(request),
        )
    else:
        yield Finding(name="nodes", verdict="ok", what=f"{len(nodes)} nodes of {kind}")
    for resource, asked in demand_of(request).devices.items() if nodes else ():
        most = max(allocatable_count(node, resource) for node in nodes)
        if most >= asked:
            yield Finding(name=resource, verdict="ok", what=f"a node offers {most}")
            continue
        part = DEVICE_PLUGINS[resource]
        what = f"a node offers {most}, and a pod asks for {asked}, as the catalogue says"
        mend = f"{part.label} {part.purpose}. {install_instructions(part, api.context)}"
        yield Finding(name=resource, verdict="problem", what=what, mend=mend)

    yield from _memory(request, nodes)


def _memory(request: LaunchRequest, nodes: list[Object]) -> Iterator[Finding]:
    """CPU, memory and huge pages of a node against a pod's requests."""
    demand = demand_of(request)
    asked = {key: text for key, text in demand.requests().items() if key not in demand.devices}
    spec = {"containers": [{"resources": {"requests": asked}}]}
    # Without taints and cordons, which do not change what a node can allocate.
    free = [{**node, "spec": {}} for node in nodes]
    if why := unplaceable_reason(spec, free):
        mend = "Use another cluster.instance, or nodes that reserve less"
        yield Finding(name="requests", verdict="problem", what=why, mend=mend)
    elif nodes:
        what = ", ".join(f"{text} of {key}" for key, text in asked.items())
        yield Finding(name="requests", verdict="ok", what=f"a node can allocate {what}")


def check_side_nodes(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    """Nodes for side jobs, such as the one that prepares the data."""
    settings, side = request.recipe.launch.kubernetes, request.recipe.launch.side
    asked = {"cpu": str(side.cpus), "memory": f"{side.memory_gib}Gi"}
    spec = {
        "containers": [{"resources": {"requests": asked}}],
        "nodeSelector": settings.side_node_selector,
        "tolerations": [toleration(text) for text in settings.tolerations],
    }
    if why := unplaceable_reason(spec, api.nodes()):
        yield Finding(name="side nodes", verdict="warning", what=why, mend=SIDE_REMEDY)
    else:
        what = f"a side job asks for {side.cpus} cores and {side.memory_gib} GiB"
        yield Finding(name="side nodes", verdict="ok", what=what)


def check_image(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    """Is it named for good, is it there, may the nodes pull it, and can they run it?"""
    image = str(request.recipe.launch.image)
    if "@sha256:" in image:
        yield Finding(name="image", verdict="ok", what="named by digest")
    else:
        yield Finding(
            name="image",
            verdict="warning",
            what=f"launch.image={image} is a tag, which may name another image at a restart",
            mend="Give it by digest, name@sha256:...: `shardyard image push` prints it",
        )
    account = api.get("ServiceAccount", _service_account(request))
    yield find_image(image, has_password=bool((account or {}).get("imagePullSecrets")))
    yield from _pull_secrets(request, api, account)
    with suppress(AccessError):  # `check_nodes` has reported that nodes may not be listed
        yield from _architecture(request, api)


def _architecture(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    kinds = {
        str(node["metadata"].get("labels", {}).get(ARCHITECTURE, "amd64"))
        for node in matching_nodes(request, api)
    }
    if kinds - {"amd64"}:
        yield Finding(
            name="architecture",
            verdict="warning",
            what=f"nodes are of {', '.join(sorted(kinds))}; an image of another does not start",
            mend="Build the image for it, or choose nodes with launch.kubernetes.node_selector="
            f"{{{ARCHITECTURE}: amd64}}",
        )


def _service_account(request: LaunchRequest) -> str:
    return request.recipe.launch.kubernetes.service_account or "default"


def _pull_secrets(request: LaunchRequest, api: Api, account: Object | None) -> Iterator[Finding]:
    name = _service_account(request)
    if account is None:
        what = f"the namespace {api.namespace} has no service account {name}: no pod would be made"
        mend = (
            f"kubectl --context {api.context} -n {api.namespace} create serviceaccount {name}, or "
            "correct launch.kubernetes.service_account"
        )
        yield Finding(name="service account", verdict="problem", what=what, mend=mend)
        return
    for entry in account.get("imagePullSecrets", []):
        if not api.has_secret(entry["name"]):
            yield Finding(
                name="pull secret",
                verdict="problem",
                what=f"service account {name} pulls images with Secret {entry['name']}, which the "
                f"namespace {api.namespace} does not have",
                mend=f"kubectl --context {api.context} -n {api.namespace} create secret "
                f"docker-registry {entry['name']} makes it",
            )
