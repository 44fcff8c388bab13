"""Is this cluster fit for a run? Its controllers, rights, nodes, claims; nothing is changed."""

from collections.abc import Callable, Iterator

from shardyard.config.secret_reference import parse_references
from shardyard.errors import AccessError, CapacityError, ShardyardError
from shardyard.launch.base import LaunchRequest
from shardyard.launch.doctor import Finding, Verdict
from shardyard.launch.kubernetes.api import PLURALS, Api
from shardyard.launch.kubernetes.names import TARGETS
from shardyard.launch.kubernetes.pod import ZONE
from shardyard.launch.kubernetes.prerequisites import DEVICE_PLUGINS, Prerequisite, needed
from shardyard.launch.kubernetes.resources import chosen_instance, demand_of
from shardyard.launch.kubernetes.state import Object

Check = Callable[[LaunchRequest, Api], Iterator[Finding]]


def kubernetes_checks(request: LaunchRequest, api: Api) -> list[Finding]:
    """All that a cluster can be asked before a job is submitted."""
    checks: dict[str, Check] = {
        "controllers": _controllers, "rights": _rights, "queue": _queue,
        "nodes": _nodes, "claims": _claims, "secrets": _secrets,
    }  # fmt: skip
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check(request, api)
        except CapacityError as error:  # nothing else will be answered either
            return [*found, Finding(name=name, verdict="problem", what=str(error))]
        except AccessError as error:
            verdict: Verdict = "problem" if name == "controllers" else "warning"
            found.append(Finding(name=name, verdict=verdict, what=f"cannot be asked: {error}"))
        except ShardyardError as error:
            found.append(Finding(name=name, verdict="problem", what=str(error)))
    return found


def _install(part: Prerequisite) -> str:
    return f"Install it: {part.install[0]}" if part.install else "Install it as its vendor says"


def _controllers(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    for part in needed(request):
        if part.provides not in PLURALS:
            continue
        if api.serves(part.provides):
            yield Finding(name=part.name, verdict="ok", what=f"the cluster serves {part.provides}")
        else:
            what = f"the cluster serves no {part.provides}: {part.name} is missing"
            yield Finding(name=part.name, verdict="problem", what=what, mend=_install(part))


def _rights(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    version, plural, _ = PLURALS[TARGETS[request.recipe.launch.kubernetes.target].kind]
    group = version.partition("/")[0]
    wanted = [
        *((verb, plural, group) for verb in ("create", "get", "patch", "delete")),
        *((verb, "configmaps", "") for verb in ("create", "get", "patch", "delete")),
        ("list", "pods", ""),
        ("get", "pods/log", ""),
    ]
    lacking = [
        f"{verb} {resource}"
        for verb, resource, group in wanted
        if not api.may(verb, resource, group=group)
    ]
    if lacking:
        what = f"you may not {', '.join(lacking)} in the namespace {api.namespace}"
        mend = "Have an administrator grant it; docs/launch-kubernetes.md has the role"
        yield Finding(name="rights", verdict="problem", what=what, mend=mend)
    else:
        yield Finding(name="rights", verdict="ok", what="all that a run needs is allowed")


def _queue(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    queue = request.recipe.launch.kubernetes.queue
    if queue is None:
        return
    if api.get("LocalQueue", queue) is not None:
        yield Finding(name="queue", verdict="ok", what=f"local queue {queue} exists")
    else:
        yield Finding(
            name="queue",
            verdict="problem",
            what=f"launch.kubernetes.queue={queue}: the namespace {api.namespace} has no such "
            "local queue, so that the job would stay suspended",
            mend=f"kubectl --context {api.context} -n {api.namespace} get localqueues lists them",
        )


def _nodes(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    nodes = _wanted_nodes(request, api)
    machine = chosen_instance(request)
    kind = machine.name if machine else "the wanted kind"
    if len(nodes) < request.nodes:
        yield Finding(
            name="nodes",
            verdict="warning",
            what=f"the cluster has {len(nodes)} nodes of {kind}, and the run wants {request.nodes}",
            mend="It waits until there are enough: scale the node group, or see that an "
            "autoscaler does",
        )
    else:
        yield Finding(name="nodes", verdict="ok", what=f"{len(nodes)} nodes of {kind}")
    for resource, asked in demand_of(request).devices.items() if nodes else ():
        offered = max(int(node["status"]["allocatable"].get(resource, 0)) for node in nodes)
        if offered >= asked:
            yield Finding(name=resource, verdict="ok", what=f"a node offers {offered}")
            continue
        part = DEVICE_PLUGINS[resource]
        what = f"a node offers {offered}, and a pod asks for {asked}, as the catalogue says"
        mend = f"{part.name} {part.version} {part.why}. {_install(part)}"
        yield Finding(name=resource, verdict="problem", what=what, mend=mend)


def _wanted_nodes(request: LaunchRequest, api: Api) -> list[Object]:
    machine = chosen_instance(request)
    labels = {"node.kubernetes.io/instance-type": machine.name} if machine else {}
    labels |= request.recipe.launch.kubernetes.node_selector
    return api.nodes(",".join(f"{key}={value}" for key, value in labels.items()))


def _claims(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    for volume in request.recipe.launch.volumes:
        if volume.claim is None:
            continue
        name = f"claim {volume.claim}"
        claim = api.get("PersistentVolumeClaim", volume.claim)
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
            str(node["metadata"].get("labels", {}).get(ZONE))
            for node in _wanted_nodes(request, api)
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


def _secrets(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    for name, reference in parse_references(request.recipe.secrets).items():
        if reference.kind != "k8s" or reference.name is None:
            continue  # refused when it is rendered
        if api.has_secret(reference.name):
            what = f"Secret {reference.name} exists; whether it has {reference.key} is not read"
            yield Finding(name=f"secrets.{name}", verdict="ok", what=what)
        else:
            yield Finding(
                name=f"secrets.{name}",
                verdict="problem",
                what=f"the namespace {api.namespace} has no Secret {reference.name}, so that no "
                "pod would start",
                mend=f"kubectl --context {api.context} -n {api.namespace} create secret generic "
                f"{reference.name} --from-file={reference.key}=/dev/stdin",
            )
