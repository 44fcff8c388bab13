"""The pod that every target runs: one per node, with least rights, and no repeated input."""

import base64
import hashlib
import math
from pathlib import PurePosixPath
from typing import Any

from shardyard.config.endpoints import ADDRESS_VARIABLE, metrics_endpoint
from shardyard.config.machines import capacity_of
from shardyard.config.schema.launch import Volume
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import parse_references
from shardyard.errors import RequestError
from shardyard.image.dockerfile import USER_ID
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.bundle import Bundle
from shardyard.launchers.kubernetes import policies
from shardyard.launchers.kubernetes.names import container_of, job_kind
from shardyard.launchers.kubernetes.ownership import RUN_ID, origin_notes
from shardyard.launchers.kubernetes.policies import node_affinity
from shardyard.launchers.kubernetes.resources import Demand, chosen_instance, demand_of
from shardyard.own_processes import ISOLATED

RECIPE_FOLDER = "/shardyard/recipe"
GRACE_MARGIN_S = 30
"""Beyond elastic.drain_timeout_s: the agent's own end and the kubelet's polling."""
USER = USER_ID
"""The user of our images, never root; claims are made writable for this group."""

# A ConfigMap's data may have 1 MiB (kubernetes.io, ConfigMaps); its other fields need little.
_MAX_CONFIG_BYTES = 1_000_000

INSTANCE = "app.kubernetes.io/instance"
"""Label of all objects of a job: its name."""
_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED = f"{_MANAGED_BY}=shardyard"
"""Selects all objects of all jobs."""
STAYS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""A node is not emptied to save money while a run is on it: every pod that moves restarts all.
Source: karpenter.sh, Disruption; the FAQ of kubernetes/autoscaler."""

EnvVar = dict[str, Any]


def config_map(request: LaunchRequest, name: str) -> dict[str, Any]:
    """Recipe and code, under a name that changes with them, so that no pod reads another's.

    Raises:
        RequestError: They are too large.
    """
    text, code = request.recipe_text, request.code
    _check_config_size(len(text.encode()), 0 if code is None else len(code.archive))
    digest = _digest(text if code is None else text + code.digest)
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(request, f"{name}-{digest}", job=name),
        # A pod that is made later reads the same recipe, and kubelets need not watch for changes.
        "immutable": True,
        "data": {"recipe.yaml": text},
    }
    if code is not None:
        manifest["binaryData"] = {_code_file(code): base64.b64encode(code.archive).decode()}
    return manifest


def _code_file(code: Bundle) -> str:
    """Its name is its digest, which the node holds it to."""
    return f"{code.digest}.tar.gz"


def _check_config_size(recipe_bytes: int, code_bytes: int) -> None:
    if recipe_bytes + code_bytes <= _MAX_CONFIG_BYTES:
        return
    if code_bytes == 0:
        raise RequestError(
            f"the recipe has {recipe_bytes:,} bytes, and a ConfigMap takes {_MAX_CONFIG_BYTES:,}. "
            "Pods read it from there. Move long lists into files on a volume."
        )
    raise RequestError(
        f"launch.code has {code_bytes:,} bytes when packed, and with the recipe a ConfigMap takes "
        f"{_MAX_CONFIG_BYTES:,}. Pods read it from there. List less, or put the code into the "
        "image (FROM the one that `shardyard image build` makes, COPY it, set PYTHONPATH)."
    )


def metadata(request: LaunchRequest, name: str, *, job: str) -> dict[str, Any]:
    """Metadata of an object in the run's namespace."""
    return {
        "name": name,
        "namespace": request.recipe.launch.kubernetes.namespace,
        "labels": {**_added_labels(request), **labels(job)},
        "annotations": {
            **request.recipe.launch.kubernetes.annotations,
            RUN_ID: request.run_id,
            **origin_notes(request),
        },
    }


def _added_labels(request: LaunchRequest) -> dict[str, str]:
    return {**request.recipe.run.tags, **request.recipe.launch.kubernetes.labels}


def labels(job: str) -> dict[str, str]:
    """Labels of all objects of a job."""
    return {
        "app.kubernetes.io/name": "shardyard",
        INSTANCE: job,
        _MANAGED_BY: "shardyard",
    }


def pod_template(
    request: LaunchRequest, name: str, *, config: str, env: list[EnvVar], restarts: bool
) -> dict[str, Any]:
    """The pod template.

    Args:
        name: Of the job.
        config: Name of the recipe's ConfigMap.
        env: What the target adds to the environment: the node's place.
        restarts: Whether a container that failed is started again inside its pod.

    Raises:
        RequestError: The recipe asks what a pod cannot have.
    """
    settings = request.recipe.launch.kubernetes
    demand = demand_of(request)
    spec: dict[str, Any] = {
        # Kubernetes accepts a pod failure policy only with Never.
        "restartPolicy": "OnFailure" if restarts else "Never",
        "terminationGracePeriodSeconds": grace_s(request.recipe),
        # Training calls no API server, so a token would be one more secret to lose.
        "automountServiceAccountToken": False,
        # Each service of the namespace would add variables, such as the ETCD_* of one called etcd.
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": [container(request, demand, env=env)],
        "volumes": volumes(request, demand, config=config),
    }
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.priority_class is not None:
        spec["priorityClassName"] = settings.priority_class
    spec |= placement(request, demand)
    meta: dict[str, Any] = {"labels": {**_added_labels(request), **labels(name)}}
    meta["annotations"] = {
        **settings.annotations,
        RUN_ID: request.run_id,
        **STAYS,
        **({} if request.side else _topology_annotation(request)),
    }
    template = {"metadata": meta, "spec": spec}
    policies.join(request, template, name)
    return template


def container(request: LaunchRequest, demand: Demand, *, env: list[EnvVar]) -> dict[str, Any]:
    """The one container."""
    return {
        "name": container_of(job_kind(request)),
        "image": image(request.recipe),
        # An image by digest cannot change, so one that is on the node is the right one.
        "imagePullPolicy": "IfNotPresent",
        "command": command(request),
        "env": [*env, *environment(request), *_metrics_address(request)],
        **_metrics_port(request),
        "resources": resources(demand),
        "securityContext": container_security(demand),
        "volumeMounts": volume_mounts(request.recipe),
    }


def _metrics_address(request: LaunchRequest) -> list[EnvVar]:
    """Return the variable with the address for Prometheus: loopback would be its own."""
    if request.recipe.observe.prometheus is None or request.side is not None:
        return []
    source = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [{"name": ADDRESS_VARIABLE, "valueFrom": source}]


def _metrics_port(request: LaunchRequest) -> dict[str, Any]:
    """Return the port that a PodMonitor names; port 0 is found only by its file."""
    place = metrics_endpoint(request.recipe.observe.prometheus)
    if place is None or not place.port or request.side is not None:
        return {}
    return {"ports": [{"name": "metrics", "containerPort": place.port}]}


def resources(demand: Demand) -> dict[str, Any]:
    """Requests and limits."""
    limits = demand.whole()
    return {"requests": demand.requests(), **({"limits": limits} if limits else {})}


def image(recipe: Recipe) -> str:
    """The image of the recipe.

    Raises:
        RequestError: It names none.
    """
    if recipe.launch.image is None:
        raise RequestError(
            "launch.image is not given. Pods run containers. Name an image that holds Shardyard "
            "and your requirements, best by digest (name@sha256:...)."
        )
    return recipe.launch.image


def command(request: LaunchRequest) -> list[str]:
    """Return the command of a node, as an argument list, so that no shell reads it."""
    target = request.recipe.launch.kubernetes.target
    module, last = "shardyard.node", ["--place", target]
    # Its operator lets the other pods live and replaces a lost one, so the store can move.
    if target == "pytorchjob":
        last += ["--store-moves"]
    if request.side is not None:
        module, last = "shardyard.node.side_job", ["--side", literal(request.side.to_text())]
    return [
        "python", *ISOLATED, module, f"{RECIPE_FOLDER}/recipe.yaml",
        "--run-dir", literal(request.run_dir), *last,
        *(["--code", f"{RECIPE_FOLDER}/{_code_file(request.code)}"] if request.code else []),
    ]  # fmt: skip


def environment(request: LaunchRequest) -> list[EnvVar]:
    """Return the recipe's variables, and its secrets only as references.

    Raises:
        RequestError: A secret is kept where a pod cannot read it.
    """
    values = {
        # No more for NCCL or libfabric: the plugin has its own values for each instance type.
        "NCCL_DEBUG": "WARN",
        "HOME": "/tmp",  # an image has no home for a user that its passwd does not list
        "USER": "shardyard",  # torch asks for the user's name to find its compile cache
        # A killed process takes with it what Python still buffers.
        "PYTHONUNBUFFERED": "1",
    } | request.environment
    variables: list[EnvVar] = [
        {"name": name, "value": literal(values[name])} for name in sorted(values)
    ]
    recipe = request.recipe
    for name, reference in sorted(parse_references(recipe.secrets).items()):
        if reference.kind != "k8s":
            raise RequestError(
                f"secrets.{name} is kept in {reference.kind}, which a pod cannot read. Put it into "
                f"a Secret of the namespace {recipe.launch.kubernetes.namespace}, such as with "
                "`kubectl create secret generic NAME --from-file=KEY=/dev/stdin`, and write "
                f"secrets.{name}=k8s:NAME/KEY."
            )
        source = {"secretKeyRef": {"name": reference.name, "key": reference.key}}
        variables.append({"name": name, "valueFrom": source})
    return variables


def literal(text: str) -> str:
    """A variable's value or a word of a command that the kubelet hands on as ``text``.

    In both it replaces ``$(NAME)`` by a variable and ``$$`` by one ``$`` (kubernetes.io, Define
    Dependent Environment Variables).
    """
    return text.replace("$", "$$")


def volumes(request: LaunchRequest, demand: Demand, *, config: str) -> list[dict[str, Any]]:
    """Volumes of the pod.

    Raises:
        RequestError: One is not of Kubernetes, is a folder of the node, or none holds the run.
    """
    recipe = request.recipe
    _check_run_dir(request)
    shared_mib = recipe.launch.kubernetes.shared_memory_gib * 1024
    # A larger /dev/shm could not be filled: its pages count as the pod's memory.
    shared_mib = min(shared_mib, demand.memory_mib or shared_mib)
    pod_volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": config}},
        {"name": "shared-memory",
         "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_mib}Mi"}},
    ]  # fmt: skip
    for index, volume in enumerate(recipe.launch.volumes):
        pod_volumes.append({"name": f"volume-{index}", **_volume_source(recipe, volume, index)})
    return pod_volumes


def _volume_source(recipe: Recipe, volume: Volume, index: int) -> dict[str, Any]:
    if volume.claim is not None and volume.host is None and volume.efs is None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host is None or volume.claim is not None or volume.efs is not None:
        raise RequestError(
            f"launch.volumes[{index}] ({volume.path}) does not name one claim, and Kubernetes "
            "mounts persistent volume claims. For EFS or FSx make one with their CSI driver, and "
            "give only claim: NAME."
        )
    if not recipe.launch.kubernetes.allow_host_paths:
        raise RequestError(
            f"launch.volumes[{index}].host={volume.host!r} is a folder of the node. It lets a pod "
            "reach the node's files, and each node has its own. Use a claim, or set "
            "launch.kubernetes.allow_host_paths=true if you know that all nodes share it."
        )
    # With type Directory a missing mount is an error; without a type nothing is checked.
    return {"hostPath": {"path": volume.host, "type": "Directory"}}


def volume_mounts(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the mounts of the volumes of ``volumes``."""
    mounts: list[dict[str, Any]] = [
        {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for index, volume in enumerate(recipe.launch.volumes):
        mounts.append({"name": f"volume-{index}", "mountPath": volume.path})
    return mounts


def _check_run_dir(request: LaunchRequest) -> None:
    folder = PurePosixPath(request.run_dir)
    if any(folder.is_relative_to(volume.path) for volume in request.recipe.launch.volumes):
        return
    raise RequestError(
        f"launch.run_dir: {request.run_dir} is on none of launch.volumes. A pod's own files end "
        "with it, and its checkpoints with them. Mount a claim that all nodes can write, such as "
        "launch.volumes=[{path: /runs, claim: my-claim}], and set launch.run_dir to a folder on it."
    )


def pod_security() -> dict[str, Any]:
    """Security context of the pod: the 'restricted' Pod Security Standard."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",  # a large claim is not walked at each start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(demand: Demand) -> dict[str, Any]:
    """Return the security context; only EFA adds a right: to pin the memory it sends."""
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if demand.has_efa:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def placement(request: LaunchRequest, demand: Demand) -> dict[str, Any]:
    """On which nodes pods may run."""
    settings = request.recipe.launch.kubernetes
    machine = chosen_instance(request)
    selector = {"node.kubernetes.io/instance-type": machine.name} if machine else {}
    selector |= settings.node_selector
    if request.side is not None:
        selector = settings.side_node_selector
    # Node groups with accelerators are tainted with the resource's name by convention.
    taints = [*settings.tolerations, *(key for key in demand.devices if "efa" not in key)]
    constraints: dict[str, Any] = {
        "nodeSelector": selector,
        "tolerations": [toleration(text) for text in dict.fromkeys(taints)],
    }
    capacity = capacity_of(request.recipe.cluster)
    if capacity is not None and request.side is None:
        constraints["affinity"] = node_affinity(capacity)
    return {key: value for key, value in constraints.items() if value}


def toleration(text: str) -> dict[str, str]:
    """The toleration of an entry of launch.kubernetes.tolerations.

    Raises:
        RequestError: It ends in what is no effect.
    """
    effects = ("NoSchedule", "PreferNoSchedule", "NoExecute")
    key, _, effect = text.rpartition(":")
    if not key or effect not in effects:
        if key:
            raise RequestError(
                f"launch.kubernetes.tolerations: {text!r} ends in {effect!r}, which is not an "
                f"effect of a taint. Use {', '.join(effects)}, or leave it out."
            )
        key, effect = text, ""
    key, equals, value = key.partition("=")
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        found["value"] = value
    if effect:
        found["effect"] = effect
    return found


ZONE = "topology.kubernetes.io/zone"
CLOSEST = "topology.k8s.aws/network-node-layer-3"
"""Nodes that AWS has put below one switch."""


def _topology_annotation(request: LaunchRequest) -> dict[str, str]:
    """Kueue's hint: nearest first and wider where that does not fit, or one zone at any price."""
    match request.recipe.launch.kubernetes.topology:
        case "none":
            return {}
        case "required":
            return {"kueue.x-k8s.io/podset-required-topology": ZONE}
        case "preferred":
            return {"kueue.x-k8s.io/podset-preferred-topology": CLOSEST}


def grace_s(recipe: Recipe) -> int:
    """Seconds between SIGTERM and SIGKILL: a drain must fit in."""
    return math.ceil(recipe.elastic.drain_timeout_s) + GRACE_MARGIN_S


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return warnings about settings that are allowed but may be regretted."""
    image, alone = request.recipe.launch.image, policies.warnings(request)
    if "@sha256:" in (image or ""):
        return alone
    return (
        *alone,
        f"launch.image={image} is a tag: it may name another image at a restart or "
        "on another node. Give it by digest (name@sha256:...).",
    )


def field(path: str) -> dict[str, Any]:
    """A variable's value from the pod's own metadata."""
    return {"fieldRef": {"fieldPath": path}}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
