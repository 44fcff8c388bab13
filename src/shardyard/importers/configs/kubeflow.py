"""PyTorchJob (kubeflow.org/v1) and TrainJob (trainer.kubeflow.org/v1alpha1): what they become.

Source: the CRDs of the training operator 1.9 and of Kubeflow Trainer 2.0 to 2.3. A Master is a node
like the workers; ``nprocPerNode`` is a text.
"""

import math
import re
from typing import Any

from shardyard.hardware.catalogue import instance_names
from shardyard.importers.configs import scripts, shell
from shardyard.importers.configs.rules import (
    ConfigEntry,
    OutcomeKind,
    Rows,
    Rule,
    RuleResult,
    SourceConfig,
    choose,
    mapped,
    none,
    nowhere,
    rejected,
    same,
    to,
)

_PLACES = "a launch names its objects itself, and labels them so that it finds them again"
_GANG = "pods of a job are admitted together: launch.kubernetes.queue (Kueue) or scheduler=volcano"
_RIGHTS = "pods run with least rights, never as root"
_WORK = "is read as a command: its parts are listed by themselves"
_OPERATOR = "the launch decides how pods are cleaned up and started again (launch.kubernetes.*)"

_MEMORY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1, "K": 1e3, "M": 1e6,
           "G": 1e9, "k": 1e3}  # fmt: skip


def _nodes(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """The Master is a node like the workers."""
    found = [config.get(f"{_SPECS}.{kind}.replicas", 0) for kind in ("Master", "Worker")]
    if not all(isinstance(count, int) for count in found):
        return to("cluster.nodes", convert=int)(entry, config)
    return mapped({"cluster.nodes": sum(found)})


_SPECS = "spec.pytorchReplicaSpecs"


def _processes(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    match str(entry.value).lower():
        case "auto" | "gpu":
            return same("all devices of a node")
        case "cpu":
            return mapped({"cluster.device": "cpu"})
        case text if text.isdigit():
            return mapped({"cluster.devices": int(text)})
    return rejected(f"={entry.value!r} is not auto, cpu, gpu or a number.", "cluster.devices")


def _time_limit(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    return mapped({"launch.time_limit": scripts.time_limit_of(float(entry.value))})


def _rendezvous(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if str(entry.value) == "c10d":
        return same("elastic.rendezvous=tcp")
    host, port = (config.get(f"spec.elasticPolicy.{key}") for key in ("rdzvHost", "rdzvPort"))
    if host is None:
        return rejected("without rdzvHost: give elastic.rendezvous=...", "elastic.rendezvous")
    return mapped({"elastic.rendezvous": f"etcd://{host}:{port or 2379}"})


def _restarts(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """The operator adds up the restarts of all pods."""
    return to("launch.kubernetes.max_restarts", convert=int)(entry, config)


def _image(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """An image of another program lacks what a launch starts in it."""
    found = to("launch.image")(entry, config)
    if found.kind is not OutcomeKind.MAPPED:
        return found
    return mapped(found.settings, "made for another program: it needs Shardyard inside, " + _BUILD)


_BUILD = "`shardyard image build` makes one"


def _variable(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """Name and value of a variable: each says the whole of it."""
    base = entry.path.rpartition(".")[0]
    if entry.path.split(".")[-1] not in ("name", "value"):
        base = re.sub(r"\.valueFrom\..*$", "", entry.path)
    name, value = str(config.get(f"{base}.name")), config.get(f"{base}.value")
    secret = config.get(f"{base}.valueFrom.secretKeyRef.name")
    key = config.get(f"{base}.valueFrom.secretKeyRef.key")
    if secret is not None:
        return mapped({f"secrets.{name}": f"k8s:{secret}/{key}"})
    if value is None:
        return none(f"comes from elsewhere: give launch.env={{{name}: ...}} or secrets.{name}")
    return scripts.environment(ConfigEntry(path=f"environment.{name}", value=value), config)


def _accelerators(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    return to("cluster.devices", convert=int)(entry, config)


def _volume(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """A volume or its mount: all of them together are one setting."""
    pod = re.match(r"(.*?\.spec)\.(?:volumes|containers)\.", entry.path)
    if pod is None:
        return none("give launch.volumes")
    name, base = _volume_name(entry, config), entry.path.rpartition(".")[0]
    if config.get(f"{base}.subPath") is not None:
        return none("a volume is mounted as a whole: launch.volumes")
    volumes = {**_volumes(pod[1], config)}
    volume = volumes.get(name)
    if volume is None:
        return none("of a kind that is not mounted: give a claim in launch.volumes")
    if "memory" in volume:
        gib = _gib(volume["memory"])
        if volume.get("path") == "/dev/shm" and gib:
            return mapped({"launch.kubernetes.shared_memory_gib": gib})
        return none("scratch in memory: /dev/shm has launch.kubernetes.shared_memory_gib")
    whole = [each for each in volumes.values() if each and "memory" not in each and "path" in each]
    return mapped({"launch.volumes": whole}) if whole else none("is mounted nowhere")


def _volume_name(entry: ConfigEntry, config: SourceConfig) -> Any:
    found = re.match(r"(.*\.(?:volumes|volumeMounts)\.\d+)\.", entry.path + ".")
    return None if found is None else config.get(f"{found[1]}.name")


def _volumes(pod: str, config: SourceConfig) -> dict[str, dict[str, Any] | None]:
    """Name -> launch.volumes' entry; ``memory`` for what is in memory; None: another kind."""
    volumes: dict[str, dict[str, Any] | None] = {}
    paths = _mounts(pod, config)
    below = config.below(f"{pod}.volumes")
    for number in {key.partition(".")[0] for key in below}:
        name = str(below.get(f"{number}.name"))
        claim = below.get(f"{number}.persistentVolumeClaim.claimName")
        host = below.get(f"{number}.hostPath.path")
        path = {"path": paths[name]} if name in paths else {}
        if claim is not None:
            volumes[name] = {**path, "claim": claim}
        elif below.get(f"{number}.emptyDir.medium") == "Memory":
            volumes[name] = {**path, "memory": below.get(f"{number}.emptyDir.sizeLimit")}
        elif host is not None and path.get("path") == "/dev/shm":
            volumes[name] = {**path, "memory": None}
        elif host is not None:
            volumes[name] = {**path, "host": host}
        else:
            volumes[name] = None
    return volumes


def _mounts(pod: str, config: SourceConfig) -> dict[str, str]:
    below = config.below(f"{pod}.containers")
    mounts: dict[str, str] = {}
    for key, value in below.items():
        found = re.fullmatch(r"(\d+\.volumeMounts\.\d+)\.mountPath", key)
        if found and below.get(f"{found[1]}.subPath") is None:
            mounts.setdefault(str(below.get(f"{found[1]}.name")), str(value))
    return mounts


def _gib(text: Any) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text))
    if found is None or found[2] not in _MEMORY:
        return None
    return max(1, math.ceil(float(found[1]) * _MEMORY[found[2]] / 2**30))


def _node_label(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    name = entry.path.partition(".nodeSelector.")[2]
    if name == "node.kubernetes.io/instance-type" and str(entry.value) in instance_names():
        return mapped({"cluster.instance": entry.value})
    return mapped({f"launch.kubernetes.node_selector.{name}": str(entry.value)})


def _tolerations(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    base = re.match(r"(.*\.tolerations)\.", entry.path)
    if base is None:
        return same("none")
    below, found = config.below(base[1]), []
    for number in sorted({key.partition(".")[0] for key in below}):
        key, value, effect = (below.get(f"{number}.{name}") for name in ("key", "value", "effect"))
        if key is None:
            return rejected(
                "tolerates every taint. Name those that count in launch.kubernetes.tolerations.",
                "launch.kubernetes.tolerations",
            )
        text = f"{key}={value}" if value not in (None, "") else str(key)
        found.append(text if effect is None or value not in (None, "") else f"{text}:{effect}")
    return mapped({"launch.kubernetes.tolerations": found})


def _queue(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    return mapped({"launch.kubernetes.queue": str(entry.value)})


_LABELS: Rows = {
    "metadata.labels.kueue.x-k8s.io/queue-name": _queue,
    "metadata.name": scripts.run_name,
    "metadata.generateName": nowhere("run.name is the first part of a run's id"),
    "metadata.namespace": to("launch.kubernetes.namespace"),
    "metadata*": nowhere(_PLACES),
    "apiVersion": lambda entry, config: _kind(entry, config),
    "kind": lambda entry, config: _kind(entry, config),
    "status*": nowhere("is written by the cluster"),
}


def _kind(_: ConfigEntry, config: SourceConfig) -> RuleResult:
    return mapped({"launch.kubernetes.target": str(config.get("kind")).lower()})


def _resource(prefix: str) -> dict[str, Rule]:
    """Limits and requests of a container."""
    return {
        f"{prefix}.nvidia.com/gpu": _accelerators,
        f"{prefix}.amd.com/gpu": _accelerators,
        f"{prefix}.habana.ai/gaudi": _accelerators,
        f"{prefix}.vpc.amazonaws.com/efa": to("launch.kubernetes.efa", convert=int),
        f"{prefix}.*": nowhere("pods take whole nodes, or what cluster.instance can give"),
    }


def _container(pod: str) -> dict[str, Rule]:
    """A pod's rows, below its own spec."""
    one = f"{pod}.containers.*"
    return {
        f"{pod}.containers.*.env.*": _variable,
        f"{pod}.containers.*.envFrom*": nowhere("give launch.env, and secrets for what is secret"),
        f"{one}.volumeMounts.*": _volume,
        **{
            name: rule
            for part in ("limits", "requests")
            for name, rule in _resource(f"{one}.resources.{part}").items()
        },
        f"{one}.resources": nowhere("pods take what cluster.instance can give"),
        f"{one}.image": _image,
        f"{one}.imagePullPolicy": nowhere("an image by its digest never changes"),
        f"{one}.command": lambda _entry, _config: RuleResult(kind=OutcomeKind.MAPPED, words=_WORK),
        f"{one}.args": lambda _entry, _config: RuleResult(kind=OutcomeKind.MAPPED, words=_WORK),
        f"{one}.name": nowhere("the container's name is the operator's"),
        f"{one}.securityContext*": nowhere(_RIGHTS),
        f"{one}.ports*": nowhere("nodes find each other by themselves"),
        f"{one}.workingDir": nowhere("paths of a recipe are absolute in a container"),
        f"{one}.*Probe*": nowhere("agents tell whether they live (elastic.*)"),
        f"{one}.lifecycle*": nowhere("SIGTERM drains a run"),
        f"{one}.termination*": nowhere("the last words of a pod are in its log"),
        f"{one}.tty": nowhere("runs are not interactive"),
        f"{one}.stdin": nowhere("runs are not interactive"),
        f"{pod}.volumes.*": _volume,
        f"{pod}.volumes": nowhere("none"),
        f"{pod}.nodeSelector.*": _node_label,
        f"{pod}.tolerations*": _tolerations,
        f"{pod}.serviceAccount*": to("launch.kubernetes.service_account"),
        f"{pod}.schedulerName": choose(
            {
                "volcano": mapped({"launch.kubernetes.scheduler": "volcano"}),
                "default-scheduler": same("default"),
            },
            none("is not spoken to: launch.kubernetes.scheduler or queue"),
        ),
        f"{pod}.priorityClassName": to("launch.kubernetes.priority_class"),
        f"{pod}.restartPolicy": nowhere(_OPERATOR),
        f"{pod}.imagePullSecrets*": nowhere(
            "pods pull with their service account's: launch.kubernetes.service_account"
        ),
        f"{pod}.initContainers*": nowhere("is not run; what it prepares belongs on a volume"),
        f"{pod}.affinity*": nowhere("launch.kubernetes.node_selector and topology say it"),
        f"{pod}.topologySpreadConstraints*": nowhere("launch.kubernetes.topology says it"),
        f"{pod}.securityContext*": nowhere(_RIGHTS),
        f"{pod}.host*": nowhere("pods have a network of their own, with EFA where there is one"),
        f"{pod}.dnsPolicy": nowhere("pods have a network of their own"),
        f"{pod}.terminationGracePeriodSeconds": nowhere("elastic.drain_timeout_s says it"),
        f"{pod}.automountServiceAccountToken": nowhere(_RIGHTS),
        f"{pod}.enableServiceLinks": nowhere(_RIGHTS),
        f"{pod}.shareProcessNamespace": nowhere(_RIGHTS),
        f"{pod}.runtimeClassName": nowhere("the nodes' own runtime"),
        f"{pod}.overhead*": nowhere("the nodes' own runtime"),
    }


PYTORCHJOB: Rows = {
    **_LABELS,
    "spec.nprocPerNode": _processes,
    "spec.runPolicy.ttlSecondsAfterFinished": to("launch.kubernetes.ttl_s", convert=int),
    "spec.runPolicy.activeDeadlineSeconds": _time_limit,
    "spec.runPolicy.backoffLimit": _restarts,
    "spec.runPolicy.schedulingPolicy.priorityClass": to("launch.kubernetes.priority_class"),
    "spec.runPolicy.schedulingPolicy*": nowhere(_GANG),
    "spec.runPolicy.cleanPodPolicy": nowhere(_OPERATOR),
    "spec.runPolicy.suspend": nowhere("Kueue suspends and admits: launch.kubernetes.queue"),
    "spec.runPolicy*": nowhere(_OPERATOR),
    "spec.cleanPodPolicy": nowhere("deprecated: of runPolicy"),
    "spec.ttlSecondsAfterFinished": to("launch.kubernetes.ttl_s", convert=int),
    "spec.elasticPolicy.minReplicas": to("elastic.min_nodes", convert=int),
    "spec.elasticPolicy.maxReplicas": to("elastic.max_nodes", convert=int),
    "spec.elasticPolicy.rdzvBackend": _rendezvous,
    "spec.elasticPolicy.maxRestarts": to("elastic.max_restarts", convert=int),
    "spec.elasticPolicy.nProcPerNode": _processes,
    "spec.elasticPolicy.metrics*": nowhere("`shardyard scale` changes a run's nodes"),
    "spec.elasticPolicy*": nowhere("nodes find each other by themselves"),
    f"{_SPECS}.Master.replicas": _nodes,
    f"{_SPECS}.Worker.replicas": _nodes,
    f"{_SPECS}.*.restartPolicy": nowhere(_OPERATOR),
    f"{_SPECS}.*.template.metadata*": nowhere(_PLACES),
    **_container(f"{_SPECS}.*.template.spec"),
}

TRAINJOB: Rows = {
    **_LABELS,
    "spec.runtimeRef.name": to("launch.kubernetes.runtime"),
    "spec.runtimeRef.*": nowhere("a ClusterTrainingRuntime, which a launch renders too"),
    "spec.trainer.numNodes": to("cluster.nodes", convert=int),
    "spec.trainer.numProcPerNode": _processes,
    "spec.trainer.image": _image,
    "spec.trainer.command": lambda _entry, _config: RuleResult(
        kind=OutcomeKind.MAPPED, words=_WORK
    ),
    "spec.trainer.args": lambda _entry, _config: RuleResult(kind=OutcomeKind.MAPPED, words=_WORK),
    "spec.trainer.env.*": _variable,
    **_resource("spec.trainer.resourcesPerNode.limits"),
    **_resource("spec.trainer.resourcesPerNode.requests"),
    "spec.suspend": nowhere("Kueue suspends and admits: launch.kubernetes.queue"),
    "spec.managedBy": nowhere(_PLACES),
    "spec.activeDeadlineSeconds": _time_limit,
    "spec.labels*": nowhere(_PLACES),
    "spec.annotations*": nowhere(_PLACES),
    "spec.initializer.*": nowhere("data.source and model.hub say what is fetched"),
    "spec.podTemplateOverrides*": nowhere("give launch.volumes and launch.kubernetes.*"),
    "spec.podSpecOverrides*": nowhere("give launch.volumes and launch.kubernetes.*"),
    "spec.runtimePatches*": nowhere("give launch.volumes and launch.kubernetes.*"),
}


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return the operators' defaults where a file has no value."""
    if config.get("kind") == "TrainJob":
        return {} if config.get("spec.trainer.numNodes") else {"cluster.nodes": 1}
    return {}


def commands(config: SourceConfig) -> dict[str, list[ConfigEntry]]:
    """Path of a command -> what is in it."""
    found = {}
    for base in sorted(
        {path.rpartition(".")[0] for path in config.entries if path.endswith((".command", ".args"))}
    ):
        if not re.search(r"\.containers\.\d+$|\.trainer$", base) or ".initContainers" in base:
            continue
        words = [
            str(word)
            for part in ("command", "args")
            for word in _list(config.get(f"{base}.{part}"))
        ]
        line = next(
            (
                config.entries[f"{base}.{part}"].line
                for part in ("command", "args")
                if f"{base}.{part}" in config.entries
            ),
            None,
        )
        found[f"{base}.command"] = _read(words, line)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read(words: list[str], line: int | None) -> list[ConfigEntry]:
    name = words[0].rpartition("/")[2] if words else ""
    if name in ("bash", "sh") and any(word.startswith("-") and "c" in word for word in words[1:2]):
        inner = shell.read_script("\n".join(words[2:]))
        return [ConfigEntry(path=entry.path, value=entry.value, line=line) for entry in inner]
    return shell.read_words(words, line)
