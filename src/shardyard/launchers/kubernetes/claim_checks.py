"""The claims that a run mounts: there, shared, in a zone of the nodes, their driver installed."""

from collections.abc import Iterator

from shardyard.doctor.finding import Finding
from shardyard.errors import AccessError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.api import Api
from shardyard.launchers.kubernetes.node_checks import wanted_nodes
from shardyard.launchers.kubernetes.pod import ZONE
from shardyard.launchers.kubernetes.prerequisites import (
    FSX,
    FSX_DRIVER,
    Prerequisite,
    how_to_install,
)
from shardyard.launchers.kubernetes.state import Object


def check_claims(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    """Every claim of launch.volumes."""
    for claim_name in _names(request):
        name = f"claim {claim_name}"
        claim = api.get("PersistentVolumeClaim", claim_name)
        if claim is None:
            what = f"the namespace {api.namespace} has no such claim, so that no pod would start"
            mend = "Create it, or correct launch.volumes"
            yield Finding(name=name, verdict="problem", what=what, mend=mend)
            continue
        modes = claim["spec"].get("accessModes", [])
        if request.nodes > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            what = f"its access modes are {', '.join(modes)}: one node alone can mount it"
            mend = "Use a claim of FSx for Lustre, EFS or another shared file system"
            yield Finding(name=name, verdict="problem", what=what, mend=mend)
        else:
            yield _zone(request, api, claim, name)
    for part in drivers_missing(request, api):
        what = f"a claim needs the driver {part.provides}, which the cluster does not have"
        mend = how_to_install(part, api.context)
        yield Finding(name=part.name, verdict="problem", what=what, mend=mend)


def drivers_missing(request: LaunchRequest, api: Api) -> list[Prerequisite]:
    """Drivers that claims of the run name and the cluster lacks, of those that we can install."""
    for name in _names(request):
        claim = api.get("PersistentVolumeClaim", name)
        if claim is None or _driver(claim, api) != FSX_DRIVER:
            continue
        if api.get("CSIDriver", FSX_DRIVER) is None:
            return [FSX]
    return []


def _names(request: LaunchRequest) -> list[str]:
    volumes = request.recipe.launch.volumes
    return list(dict.fromkeys(volume.claim for volume in volumes if volume.claim is not None))


def _driver(claim: Object, api: Api) -> str | None:
    """Of the volume that it is bound to, else of its storage class."""
    try:
        if claim["spec"].get("volumeName"):
            volume = api.get("PersistentVolume", claim["spec"]["volumeName"])
            driver = ((volume or {}).get("spec") or {}).get("csi", {}).get("driver")
        else:
            name = claim["spec"].get("storageClassName")
            found = api.get("StorageClass", name) if name else None
            driver = (found or {}).get("provisioner")
    except AccessError:  # objects of the whole cluster, which users often may not read
        return None
    return None if driver is None else str(driver)


def _zone(request: LaunchRequest, api: Api, claim: Object, name: str) -> Finding:
    """Whether some node of the wanted kind is in a zone that the claim's volume can be reached in.

    A volume of FSx for Lustre or EBS is in one zone, and pods elsewhere wait for ever.
    """
    volume_name = claim["spec"].get("volumeName")
    if not volume_name:
        what = "it is not bound yet"
        mend = "It is bound with the first pod if its storage class waits for one"
        return Finding(name=name, verdict="warning", what=what, mend=mend)
    try:
        volume = api.get("PersistentVolume", volume_name)
        nodes = {
            str(node["metadata"].get("labels", {}).get(ZONE)) for node in wanted_nodes(request, api)
        }
    except AccessError:
        return Finding(name=name, verdict="ok", what="bound; its zone may not be asked for")
    zones = _zones_of(volume or {})
    if not zones or not nodes or zones & nodes:
        return Finding(name=name, verdict="ok", what="bound")
    return Finding(
        name=name,
        verdict="problem",
        what=f"its volume is in {', '.join(sorted(zones))}, and the nodes are in "
        f"{', '.join(sorted(nodes))}: no pod could mount it",
        mend="Use nodes or a file system in the same zone",
    )


def _zones_of(volume: Object) -> set[str]:
    terms = (
        volume.get("spec", {}).get("nodeAffinity", {}).get("required", {})
        .get("nodeSelectorTerms", [])
    )  # fmt: skip
    expressions = [expression for term in terms for expression in term.get("matchExpressions", [])]
    return {
        value
        for expression in expressions
        if expression["key"].endswith("/zone") and expression["operator"] == "In"
        for value in expression["values"]
    }
