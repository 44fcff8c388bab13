"""Checks a cluster, its claims and its API versions for a run before it costs.

They change nothing. Nodes, policies and quotas are checked in files of their own.
"""

from collections.abc import Iterator
from functools import partial

from shardyard.config.endpoints import secret_name, service_name
from shardyard.config.secrets import parse_references
from shardyard.doctor.finding import Finding, gather
from shardyard.errors import AccessError, RequestError, ShardyardError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.access import missing_rights, needed_rights
from shardyard.launchers.kubernetes.api import PLURALS, Api
from shardyard.launchers.kubernetes.node_checks import (
    check_image,
    check_nodes,
    check_side_nodes,
    matching_nodes,
)
from shardyard.launchers.kubernetes.pod import ZONE
from shardyard.launchers.kubernetes.policy_checks import check_policies
from shardyard.launchers.kubernetes.prerequisites import (
    ETCD,
    FSX,
    FSX_DRIVER,
    Prerequisite,
    install_command,
    install_hint,
    install_instructions,
    needed,
)
from shardyard.launchers.kubernetes.quota_checks import check_quota
from shardyard.launchers.kubernetes.refusals import ForbiddenError
from shardyard.launchers.kubernetes.state import Object
from shardyard.launchers.kubernetes.targets import RUNTIME_RIGHT, Schema, has_content_of, runtime

# Claims: each claim must exist, be shared, lie in a zone of the nodes and have its driver.


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
            what = f"its access modes are {', '.join(modes)}: only one node can mount it"
            mend = "Use a claim of FSx for Lustre, EFS or another shared file system"
            yield Finding(name=name, verdict="problem", what=what, mend=mend)
        else:
            yield _zone(request, api, claim, name)
    for part in drivers_missing(request, api):
        what = f"a claim needs the driver {part.provides}, which the cluster does not have"
        mend = install_instructions(part, api.context)
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
    """Return the driver of the volume that it is bound to, else of its storage class."""
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
            str(node["metadata"].get("labels", {}).get(ZONE))
            for node in matching_nodes(request, api)
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
        # Some drivers have keys of their own, such as topology.ebs.csi.aws.com/zone.
        if expression["key"].endswith("/zone") and expression["operator"] == "In"
        for value in expression["values"]
    }


def kubernetes_checks(request: LaunchRequest, api: Api) -> list[Finding]:
    """All that a cluster can be asked before a job is submitted."""
    try:
        found = list(_credentials(request, api))
    except ShardyardError as error:  # nothing else will be answered either
        return [Finding(name="credentials", verdict="problem", what=str(error))]
    checks = {
        "namespace": _namespace, "controllers": _controllers, "rights": _rights,
        "runtime": _runtime, "queue": _queue,
        "quota": check_quota, "nodes": check_nodes, "side nodes": check_side_nodes,
        "image": check_image, "claims": check_claims, "secrets": _secrets,
        "network policies": check_policies,
    }  # fmt: skip
    asked = {name: partial(check, request, api) for name, check in checks.items()}
    return [*found, *gather(asked, essential="controllers")]


def _credentials(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    # /version needs no rights, so it comes first: it tells whether the cluster answers at all.
    major, minor = api.kubernetes_version()
    user = api.user()
    who = f"context {api.context}" + ("" if user is None else f" is {user}")
    yield Finding(name="credentials", verdict="ok", what=who)
    target = request.recipe.launch.kubernetes.target
    oldest = OLDEST[target]
    needs = f"launch.kubernetes.target={target} needs {oldest[0]}.{oldest[1]}"
    if (major, minor) < oldest:
        what = f"the API server is of {major}.{minor}, and {needs}"
        mend = "Have the cluster upgraded, or use another launch.kubernetes.target"
        yield Finding(name="Kubernetes", verdict="problem", what=what, mend=mend)
    else:
        yield Finding(name="Kubernetes", verdict="ok", what=f"{major}.{minor}; {needs}")


def _namespace(_: LaunchRequest, api: Api) -> Iterator[Finding]:
    if api.has_namespace():
        yield Finding(name="namespace", verdict="ok", what=f"{api.namespace} exists")
    else:
        what = f"launch.kubernetes.namespace={api.namespace} does not exist"
        mend = f"kubectl --context {api.context} create namespace {api.namespace}"
        yield Finding(name="namespace", verdict="problem", what=what, mend=mend)


def _controllers(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    for part in needed(request):
        if part is ETCD:
            yield from _etcd(request, api)
        if part.provides not in PLURALS:
            continue
        mend = install_instructions(part, api.context)
        version = PLURALS[part.provides][0]
        if api.serves(part.provides):
            fields = f" with the fields of {trainjob_schema(api)}" * (part.provides == "TrainJob")
            what = f"the cluster serves {part.provides} as {version}{fields}"
            yield Finding(name=part.name, verdict="ok", what=what)
        elif others := api.versions_of(part.provides):
            what = f"the cluster serves {part.provides} as {', '.join(others)}, not as {version}"
            mend = f"Others may use it, so ask before it is replaced. {mend}"
            yield Finding(name=part.name, verdict="problem", what=what, mend=mend)
        else:
            what = f"the cluster serves no {part.provides}: {part.name} is missing"
            yield Finding(name=part.name, verdict="problem", what=what, mend=mend)


def _etcd(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    settings = request.recipe.launch.kubernetes
    name, secret = service_name(settings), secret_name(settings)
    # Without the service, `--install` makes both: the certificate is no problem of its own.
    if secret is not None and (name is None or api.get("Service", name) is not None):
        yield _certificate(secret, api)
    if name is None:
        what = f"{settings.etcd} is not in the namespace {api.namespace}, and is not asked"
        yield Finding(name="etcd", verdict="ok", what=what)
    elif api.get("Service", name) is not None:
        yield Finding(name="etcd", verdict="ok", what=f"service {name} exists")
    else:
        what = f"launch.kubernetes.etcd={settings.etcd}: service {name} does not exist"
        mend = "Install it: shardyard doctor RECIPE --on kubernetes --install"
        yield Finding(name="etcd", verdict="problem", what=what, mend=mend)


def _certificate(secret: str, api: Api) -> Finding:
    """The Secret without which no pod of the run starts."""
    if api.has_secret(secret):
        return Finding(name="etcd certificate", verdict="ok", what=f"Secret {secret} exists")
    what = f"the namespace {api.namespace} has no Secret {secret}, so that no pod would start"
    mend = (
        "If this etcd has no TLS: launch.kubernetes.etcd_secret=null. If `doctor --install` made "
        "it: shardyard doctor RECIPE --on kubernetes --uninstall, then --install"
    )
    return Finding(name="etcd certificate", verdict="problem", what=what, mend=mend)


def _rights(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    lacking = missing_rights(api, needed_rights(request.recipe.launch.kubernetes))
    if lacking:
        what = f"you may not {', '.join(lacking)} in the namespace {api.namespace}"
        mend = "Have an administrator grant it; docs/launch-kubernetes.md has the role"
        yield Finding(name="rights", verdict="problem", what=what, mend=mend)
    else:
        yield Finding(name="rights", verdict="ok", what="all that a run needs is allowed")
    for name, rights, who in _RIGHTS_BESIDE:
        lacking = missing_rights(api, rights)
        if lacking:
            what = f"you may not {', '.join(lacking)} in the namespace {api.namespace}"
            mend = f"Training needs it not; {who}. docs/launch-kubernetes.md has the role"
            yield Finding(name=name, verdict="warning", what=what, mend=mend)


def _runtime(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    """The ClusterTrainingRuntime of a TrainJob: its content can be read, and is the wanted one."""
    if request.recipe.launch.kubernetes.target != "trainjob" or not api.serves("TrainJob"):
        return
    item = runtime(request)
    kind, name = item["kind"], item["metadata"]["name"]
    resource, group = PLURALS[kind][1], PLURALS[kind][0].partition("/")[0]
    try:
        found = api.get(kind, name)
    except ForbiddenError:
        what = f"you may not get {resource}, which the launch of a TrainJob reads"
        yield Finding(name="runtime", verdict="problem", what=what, mend=RUNTIME_RIGHT)
        return
    if found is not None and has_content_of(found, item):
        yield Finding(name="runtime", verdict="ok", what=f"{kind} {name} exists")
    elif found is not None:
        what = f"{kind} {name} exists with other content, and other runs may use it"
        mend = "Give launch.kubernetes.runtime another name"
        yield Finding(name="runtime", verdict="problem", what=what, mend=mend)
    elif api.may("create", resource, group=group, everywhere=True):
        yield Finding(name="runtime", verdict="ok", what=f"the launch creates {kind} {name}")
    else:
        what = f"{kind} {name} does not exist, and you may not create it"
        mend = "Have an administrator apply it, as shardyard launch --dry-run prints it"
        yield Finding(name="runtime", verdict="problem", what=what, mend=mend)


_RIGHTS_BESIDE = (
    (
        "network policy",
        [(verb, "networkpolicies", "networking.k8s.io") for verb in ("create", "get", "delete")],
        "without one every pod of the cluster reaches the ports of a run",
    ),
    (
        "side jobs",
        [(verb, "jobs", "batch") for verb in ("create", "get", "delete")],
        "prepare --on, export and fetch of far runs and doctor --probe are plain Jobs",
    ),
    (
        "exec",
        [("get", "pods/exec", "")],
        "shardyard fetch, and export to a folder here, read files so",
    ),
)
"""Needs of verbs other than training: name of the finding, rights, which verbs."""


def _queue(request: LaunchRequest, api: Api) -> Iterator[Finding]:
    queue = request.recipe.launch.kubernetes.queue
    if queue is None or request.recipe.launch.kubernetes.scheduler == "volcano":
        return
    if not api.serves("LocalQueue"):
        return  # a problem of Kueue
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


# Versions: a cluster would drop or reject fields and kinds of another one.

OLDEST = {"jobset": (1, 28), "trainjob": (1, 31), "pytorchjob": (1, 28)}
"""Kubernetes of each target. Sources: the pod index label, which logs are found by, is of 1.28;
installation pages of Kubeflow Trainer (1.31) and of the training operator (1.28)."""


def require_served(api: Api, kind: str) -> None:
    """Raise unless the cluster serves a kind in the version that is rendered.

    Raises:
        RequestError: Its controller is missing, or of another version.
    """
    if api.serves(kind):
        return
    version = PLURALS[kind][0]
    others = api.versions_of(kind)
    if others:
        raise RequestError(
            f"context {api.context!r}: the cluster serves {kind} as {', '.join(others)}, not as "
            f"{version}. Its controller is of another version and shared with other users. Ask the "
            f"cluster's administrator to replace it: {install_command(kind, api.context)}"
        )
    raise RequestError(
        f"context {api.context!r}: the cluster does not serve {kind} ({version}). "
        f"{install_hint(kind, api.context)}"
    )


def trainjob_schema(api: Api) -> Schema:
    """Return the version whose fields the cluster's TrainJob has.

    They differ under one API version.

    Raises:
        RequestError: The fields are of no known version.
    """
    fields = api.fields_of_spec("TrainJob")
    # The API version is the same in all of them, so a field's name has to tell.
    if "runtimePatches" in fields:
        return "2.3"
    if "podTemplateOverrides" in fields:
        return "2.1"
    if "podSpecOverrides" in fields:
        return "2.0"
    raise RequestError(
        f"context {api.context!r}: the cluster's TrainJob has neither runtimePatches (Kubeflow "
        "Trainer 2.2, 2.3) nor podTemplateOverrides (2.1) nor podSpecOverrides (2.0). Another "
        "version's fields would be dropped or rejected. Ask the cluster's administrator to "
        f"replace it: {install_command('TrainJob', api.context)}"
    )
