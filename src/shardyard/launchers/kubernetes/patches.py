"""Patches of rendered objects (``launch.kubernetes.patches``), before anything is sent or recorded.

The ledger, `--dry-run` and teardown therefore know the objects as they are. A patch may add and
change what is the site's own. It may not change what teardown finds an object by (kind, name,
namespace, labels, annotations, owner), nor what the recipe says (image, command, nodes).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardyard.config.schema.launch import Patch
from shardyard.errors import RequestError
from shardyard.launchers.base import LaunchRequest

Object = dict[str, Any]

_MERGE_KEYS = {
    "containers": "name", "env": "name", "hostAliases": "ip", "imagePullSecrets": "name",
    "initContainers": "name", "ports": "containerPort", "replicatedJobs": "name",
    "topologySpreadConstraints": "topologyKey", "volumeDevices": "devicePath",
    "volumeMounts": "mountPath", "volumes": "name",
}  # fmt: skip
"""List -> key by which a strategic merge finds its items. Source: patchMergeKey in k8s.io/api."""

_POD_OF_TRAINJOB = (
    "volumes", "initContainers", "containers", "imagePullSecrets", "nodeSelector", "tolerations",
    "affinity", "securityContext", "schedulingGates", "serviceAccountName",
    "terminationGracePeriodSeconds",
)  # fmt: skip
"""Fields of a pod that a TrainJob may change. Source: the CRD of Kubeflow Trainer 2.3."""
_CONTAINER_OF_TRAINJOB = ("name", "securityContext", "volumeMounts", "env")
"""Patches of a container of the runtime; Trainer rejects env of the one that it fills."""

_KEPT = {
    "JobSet": ("spec.replicatedJobs",),
    "PyTorchJob": ("spec.pytorchReplicaSpecs", "spec.elasticPolicy"),
    "TrainJob": ("spec.runtimeRef", "spec.trainer", "spec.runtimePatches"),
    "Job": ("spec.template", "spec.completions", "spec.parallelism"),
    "NetworkPolicy": ("spec.podSelector",),
    "PodGroup": ("spec.minMember",),
}
"""Kind -> parts that a patch may not change: nodes, and pods, which patches of kind Pod change."""
_NOT_ADDED = ("metadata.ownerReferences", "metadata.finalizers", "metadata.generateName")


def with_patches(request: LaunchRequest, objects: tuple[Object, ...]) -> tuple[Object, ...]:
    """Return the objects with the request's patches.

    Raises:
        RequestError: A patch does not apply, or changes what it may not.
    """
    patches = request.recipe.launch.kubernetes.patches
    if not patches:
        return objects
    patched = copy.deepcopy(objects)
    for number, patch in enumerate(patches):
        where = f"launch.kubernetes.patches[{number}]"
        if patch.kind == "Pod":
            pod = pod_of(patched[-1])
            before = copy.deepcopy(pod)
            _apply(patch, pod, where)
            _check_pod(request, before, pod, patched[-1]["kind"], where)
            continue
        for item in patched:
            if item["kind"] == patch.kind:
                before = copy.deepcopy(item)
                _apply(patch, item, where)
                _check_object(before, item, where)
    return patched


def pod_of(job: Object) -> Object:
    """Return the pod template of a job object, or what a TrainJob changes of its runtime's."""
    spec = job["spec"]
    match job["kind"]:
        case "JobSet":
            (replicated,) = spec["replicatedJobs"]
            found = replicated["template"]["spec"]["template"]
        case "PyTorchJob":
            found = spec["pytorchReplicaSpecs"]["Worker"]["template"]
        case "TrainJob":
            (patch,) = spec["runtimePatches"]
            (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
            found = replicated["template"]["spec"]["template"]
        case _:
            found = spec["template"]
    assert isinstance(found, dict)
    return found


def _apply(patch: Patch, item: Object, where: str) -> None:
    if patch.merge is not None:
        merge(item, patch.merge)
        return
    for place, operation in enumerate(patch.operations):
        apply_operation(item, operation, f"{where}.operations[{place}]")


def merge(item: Object, patch: Mapping[str, Any]) -> None:
    """Merge strategically, in place, as `kubectl patch` does: null removes a field.

    Items of a list with a merge key are found by it, others replace the whole list.
    """
    for key, value in patch.items():
        old = item.get(key)
        if value is None:
            item.pop(key, None)
        elif isinstance(value, Mapping):
            item[key] = old = old if isinstance(old, dict) else {}
            merge(old, value)
        elif isinstance(value, list | tuple) and isinstance(old, list) and key in _MERGE_KEYS:
            _merge_items(old, value, _MERGE_KEYS[key])
        else:
            item[key] = copy.deepcopy(list(value) if isinstance(value, tuple) else value)


def _merge_items(items: list[Any], patches: Sequence[Any], key: str) -> None:
    for patch in patches:
        is_one = isinstance(patch, Mapping) and key in patch
        found = [one for one in items if is_one and one.get(key) == patch[key]]
        if found:
            merge(found[0], patch)
        else:
            items.append(copy.deepcopy(patch))


def apply_operation(item: Object, operation: Mapping[str, Any], where: str) -> None:
    """Apply one operation of a JSON patch in place: add, remove, replace or test (RFC 6902).

    Raises:
        RequestError: Its path does not exist, or a test fails.
    """
    path, kind = str(operation["path"]), operation["op"]
    *above, key = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    parent: Any = item
    for part in above:
        parent = _child(parent, part, where, path)
    if kind == "add" and isinstance(parent, dict):
        parent[key] = copy.deepcopy(operation["value"])
        return
    if kind == "add" and isinstance(parent, list):
        place = len(parent) if key == "-" else _position(key, len(parent), where, path)
        parent.insert(place, copy.deepcopy(operation["value"]))
        return
    old = _child(parent, key, where, path)
    place_or_key = _position(key, len(parent) - 1, where, path) if isinstance(parent, list) else key
    if kind == "remove":
        del parent[place_or_key]
    elif kind == "replace":
        parent[place_or_key] = copy.deepcopy(operation["value"])
    elif old != operation["value"]:
        raise RequestError(f"{where}: test of {path} fails: it is {old!r}.")


def _child(parent: Any, part: str, where: str, path: str) -> Any:
    if isinstance(parent, dict) and part in parent:
        return parent[part]
    if isinstance(parent, list):
        return parent[_position(part, len(parent) - 1, where, path)]
    fields = f" There are {', '.join(parent)}." if isinstance(parent, dict) else ""
    raise RequestError(f"{where}: path {path} does not exist: no {part!r}.{fields}")


def _position(part: str, most: int, where: str, path: str) -> int:
    if part.isascii() and part.isdigit() and (part == "0" or part[0] != "0") and int(part) <= most:
        return int(part)
    raise RequestError(f"{where}: path {path} does not exist: {part!r} is not 0 to {most}.")


_MISSING = object()


def _at(item: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(item, dict) or part not in item:
            return _MISSING
        item = item[part]
    return item


def _protected_paths(item: Object) -> Iterator[tuple[str, ...]]:
    """Labels by which teardown finds an object or a pod; no patch may change them."""
    yield from (("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"))
    yield from (tuple(path.split(".")) for path in _NOT_ADDED)
    for notes in ("labels", "annotations"):
        for name in item["metadata"].get(notes, {}):
            yield ("metadata", notes, name)


def _check_object(before: Object, item: Object, where: str) -> None:
    paths = [*_protected_paths(before), *(tuple(p.split(".")) for p in _KEPT[before["kind"]])]
    for path in paths:
        if _at(before, path) != _at(item, path):
            shown = ".".join(path)
            hint = "Use a patch of kind Pod for pods, and the recipe's settings for the rest."
            raise RequestError(_change_message(where, before["kind"], shown, hint))


def _check_pod(request: LaunchRequest, before: Object, pod: Object, kind: str, where: str) -> None:
    for path in [*_protected_paths(before), ("spec", "restartPolicy")]:
        if _at(before, path) != _at(pod, path):
            hint = "Use launch.kubernetes.labels or annotations for more of them."
            raise RequestError(_change_message(where, "Pod", ".".join(path), hint))
    spec = pod.get("spec")
    _check_items(before["spec"], spec, "volumes", where)
    (container,) = before["spec"]["containers"]
    now = _item(spec, "containers", container["name"])
    for field in ("image", "command", "args", "workingDir"):
        if _at(container, [field]) != _at(now, [field]):
            hint = "Use launch.image, launch.env and launch.code."
            raise RequestError(_change_message(where, "container", field, hint))
    for field in ("env", "volumeMounts"):
        _check_items(container, now, field, where)
    _check_host_paths(request, spec, where)
    if kind == "TrainJob":
        _check_trainjob(spec, now, where)


def _check_items(before: Object, now: Any, field: str, where: str) -> None:
    """Raise if an item of ours is not in a list any more, or is another."""
    rows = _at(now, [field])
    for item in before.get(field, []):
        if not isinstance(rows, list) or item not in rows:
            name = item.get("mountPath", item["name"])
            hint = "Add items of your own under other names."
            raise RequestError(_change_message(where, "Pod", f"{field}[{name}]", hint))


def _item(spec: Any, field: str, name: str) -> Any:
    rows = _at(spec, [field])
    found = [row for row in rows if _at(row, ["name"]) == name] if isinstance(rows, list) else []
    return found[0] if len(found) == 1 else None


def _check_host_paths(request: LaunchRequest, spec: Any, where: str) -> None:
    if request.recipe.launch.kubernetes.allow_host_paths:
        return
    for volume in spec["volumes"]:
        if isinstance(volume, dict) and "hostPath" in volume:
            raise RequestError(
                f"{where} mounts a folder of the node (hostPath), which lets a pod reach the "
                "node's files. Use a claim, or set launch.kubernetes.allow_host_paths=true."
            )


def _check_trainjob(spec: Any, container: Any, where: str) -> None:
    wrong = [name for name in spec if name not in _POD_OF_TRAINJOB]
    for field in ("containers", "initContainers"):
        for one in spec.get(field, []):
            wrong += [f"{field}.{name}" for name in one if name not in _CONTAINER_OF_TRAINJOB]
    wrong += ["containers.env"] * ("env" in container)
    if wrong:
        raise RequestError(
            f"{where} sets {', '.join(wrong)}, which a TrainJob cannot change. It can change "
            f"{', '.join(_POD_OF_TRAINJOB)}. Use launch.env for variables, or "
            "launch.kubernetes.target=jobset."
        )


def _change_message(where: str, kind: str, what: str, hint: str) -> str:
    return (
        f"{where} changes {what} of the {kind}, which Shardyard needs to find, run and remove the "
        f"job. Leave it out of the patch. {hint}"
    )
