"""Kubernetes objects of a run: JobSet, TrainJob, PyTorchJob, or the Job of a side job.

Fields: jobset.sigs.k8s.io, API v1alpha2.
"""

import copy
import hashlib
import json
from typing import Any, Literal

from shardyard.config.endpoints import rendezvous_of
from shardyard.errors import RequestError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.etcd_certificate import show_certificate
from shardyard.launchers.kubernetes.names import JOB, SIDE_KIND
from shardyard.launchers.kubernetes.ownership import MANAGED_BY, origin_notes
from shardyard.launchers.kubernetes.policies import (
    jobset_failure_policy,
    kueue_labels,
    pod_failure_policy,
    reject_elastic,
    time_limit_s,
)
from shardyard.launchers.kubernetes.resources import demand_of

JOBSET_API_VERSION = "jobset.x-k8s.io/v1alpha2"

JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""Uid of the Job, which JobSet recreates at each restart: the same on all pods of one start."""


def jobset(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """The JobSet of a request.

    Raises:
        RequestError: The recipe asks what a JobSet cannot do.
    """
    reject_elastic(request)
    settings = request.recipe.launch.kubernetes
    meta = pod.metadata(request, name, job=name)
    meta["labels"] |= kueue_labels(request)
    template = pod.pod_template(
        request, name, config=config, env=_jobset_rank_variables(request, name), restarts=False
    )
    return {
        "apiVersion": JOBSET_API_VERSION,
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            # Nodes look each other up before any of their pods is ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": jobset_failure_policy(settings.max_restarts),
            "ttlSecondsAfterFinished": settings.ttl_s,
            "replicatedJobs": [
                {"name": JOB, "replicas": 1, "template": {"spec": _job(request, template)}}
            ],
        },
    }


def _job(request: LaunchRequest, template: dict[str, Any]) -> dict[str, Any]:
    container = template["spec"]["containers"][0]["name"]
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(container),
        "template": template,
    }
    limit_s = time_limit_s(request)
    if limit_s is not None:
        spec["activeDeadlineSeconds"] = limit_s
    return spec


def _jobset_rank_variables(request: LaunchRequest, name: str) -> list[pod.EnvVar]:
    """Return the variables of `--place jobset`; Kubernetes sets JOB_COMPLETION_INDEX itself."""
    return [
        {"name": "SHARDYARD_NODES", "value": str(request.nodes)},
        # Pod 0 in the headless service of the JobSet, which has the JobSet's name.
        {"name": "SHARDYARD_HOST", "value": f"{name}-{JOB}-0-0.{name}"},
        {"name": "SHARDYARD_SESSION", "valueFrom": pod.field(JOB_UID)},
    ]


# Kubeflow Trainer takes a TrainJob and the ClusterTrainingRuntime that it refers to.
#
# The API changed between minor versions without changing its name: `runtimePatches` from 2.2 on,
# `podTemplateOverrides` in 2.1, `podSpecOverrides` in 2.0. Objects are rendered for 2.3, and
# ``for_schema`` turns them into those of an older version.

TRAINJOB_API_VERSION = "trainer.kubeflow.org/v1alpha1"
CONTENT = "shardyard/content"
"""Annotation: digest of a runtime's spec, to know another one of the same name."""

RUNTIME_RIGHT = (
    "Have an administrator grant it: kubectl create clusterrole shardyard-runtimes "
    "--verb=get --resource=clustertrainingruntimes.trainer.kubeflow.org, then kubectl create "
    "clusterrolebinding shardyard-runtimes --clusterrole=shardyard-runtimes --user=USER"
)
"""Grants reading a runtime, a cluster-wide object, which no namespace's Role can allow."""

Schema = Literal["2.0", "2.1", "2.3"]
"""Version of TrainJob's fields; 2.3 includes 2.2, whose fields are the same."""


def runtime_name(request: LaunchRequest) -> str:
    """Name of the runtime; jobs with EFA have one of their own, for the right that EFA needs."""
    name = request.recipe.launch.kubernetes.runtime
    return f"{name}-efa" if demand_of(request).has_efa else name


def runtime(request: LaunchRequest) -> dict[str, Any]:
    """The ClusterTrainingRuntime: all that a TrainJob cannot say, the same for many runs."""
    spec = {
        # Empty, because 2.2 removed the fields of torch. Each TrainJob has its own number of nodes.
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {"spec": _jobset_spec(request)},
    }
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": TRAINJOB_API_VERSION,
        "kind": "ClusterTrainingRuntime",
        "metadata": {
            "name": runtime_name(request),
            "labels": {
                # Kubeflow's SDK finds runtimes by this label.
                "trainer.kubeflow.org/framework": "torch",
                MANAGED_BY[0]: MANAGED_BY[1],
            },
            "annotations": {CONTENT: digest, **origin_notes(request)},
        },
        "spec": spec,
    }


def has_content_of(existing: dict[str, Any], item: dict[str, Any]) -> bool:
    """Whether a runtime of the cluster has the content of one that was rendered."""
    notes = existing["metadata"].get("annotations", {})
    return bool(notes.get(CONTENT) == item["metadata"]["annotations"][CONTENT])


def _jobset_spec(request: LaunchRequest) -> dict[str, Any]:
    settings, demand = request.recipe.launch.kubernetes, demand_of(request)
    pods: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pod.grace_s(request.recipe),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod.pod_security(),
        "containers": [{"name": JOB, "securityContext": pod.container_security(demand)}],
    }
    if settings.priority_class is not None:
        pods["priorityClassName"] = settings.priority_class
    job = {
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(JOB),
        "template": {"metadata": {"annotations": dict(pod.STAYS)}, "spec": pods},
    }
    # No ttlSecondsAfterFinished: the controller would make the JobSet again (trainer#2981).
    return {
        "failurePolicy": jobset_failure_policy(settings.max_restarts),
        "replicatedJobs": [
            {
                "name": JOB,
                "template": {
                    "metadata": {
                        # By this label Trainer knows the job that gets its variables.
                        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                    },
                    "spec": job,
                },
            }
        ],
    }


def trainjob(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """The TrainJob of a request, for Trainer 2.2 and 2.3.

    Raises:
        RequestError: The recipe asks what a TrainJob cannot do.
    """
    reject_elastic(request)
    meta = pod.metadata(request, name, job=name)
    meta["labels"] |= kueue_labels(request)
    session = {"name": "SHARDYARD_SESSION", "valueFrom": pod.field(JOB_UID)}
    container = pod.container(request, demand_of(request), env=[session])
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": runtime_name(request),
        },
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "env": container["env"],
            "numNodes": request.nodes,
            # The whole request: up to Trainer 2.2 it replaces the runtime's, EFA included.
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {
                "manager": "shardyard/launch",
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {"replicatedJobs": [_pod_patch(request, name, config=config)]}
                    }
                },
            }
        ],
    }
    limit_s = time_limit_s(request)
    if limit_s is not None:
        spec["activeDeadlineSeconds"] = limit_s
    return {"apiVersion": TRAINJOB_API_VERSION, "kind": "TrainJob", "metadata": meta, "spec": spec}


def _pod_patch(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """Return the parts of the pod template that are this run's own and may be patched."""
    template = pod.pod_template(request, name, config=config, env=[], restarts=False)
    spec, container = template["spec"], template["spec"]["containers"][0]
    own = ("volumes", "nodeSelector", "affinity", "tolerations", "serviceAccountName")
    patched = {key: spec[key] for key in own if key in spec}
    # No env here: Trainer rejects patches of it and takes `trainer.env`.
    patched["containers"] = [{"name": JOB, "volumeMounts": container["volumeMounts"]}]
    pods = {"metadata": template["metadata"], "spec": patched}
    return {"name": JOB, "template": {"spec": {"template": pods}}}


def for_schema(job: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The TrainJob with the fields that a version of Trainer serves.

    Raises:
        RequestError: It says something that this version cannot.
    """
    if schema == "2.3":
        return job
    if schema == "2.0" and _asks_for_topology(job):
        raise RequestError(
            "launch.kubernetes.topology cannot be asked for: the cluster has Kubeflow Trainer 2.0, "
            "whose TrainJob gives pods no annotations. Use launch.kubernetes.topology=none, "
            "install Trainer 2.3, or use launch.kubernetes.target=jobset."
        )
    job = copy.deepcopy(job)
    spec = job["spec"]
    if "activeDeadlineSeconds" in spec:
        raise RequestError(
            "launch.time_limit, or the end of a capacity block, cannot be kept: the cluster has "
            f"Kubeflow Trainer {schema}, whose TrainJob has no time limit. Leave it out, install "
            "Trainer 2.3, or use launch.kubernetes.target=jobset."
        )
    (patch,) = spec.pop("runtimePatches")
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]["template"]
    target: dict[str, Any] = {"targetJobs": [{"name": JOB}]}
    if schema == "2.1":
        spec["podTemplateOverrides"] = [{**target, **pods}]
    else:  # no metadata of pods: they are found by the label that JobSet gives them
        spec["podSpecOverrides"] = [{**target, **pods["spec"]}]
    return job


def _asks_for_topology(job: dict[str, Any]) -> bool:
    """Whether a TrainJob of 2.3 gives its pods Kueue's hint."""
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    annotations = replicated["template"]["spec"]["template"]["metadata"]["annotations"]
    return any(name.startswith("kueue.") for name in annotations)


# The training operator starts and replaces the workers of a PyTorchJob one by one.
#
# Fields are those of kubeflow.org/v1, operator 1.9. There is no Master: elasticPolicy excludes one.
# The operator makes a service for each pod and points PET_RDZV_ENDPOINT to the first worker.

PYTORCHJOB_API_VERSION = "kubeflow.org/v1"
PORT = 29400

REPLICA_INDEX = "metadata.labels['training.kubeflow.org/replica-index']"


def node_range(request: LaunchRequest) -> tuple[int, int]:
    """Fewest and most nodes.

    Raises:
        RequestError: ``cluster.nodes`` is not between them.
    """
    elastic, nodes = request.recipe.elastic, request.nodes
    fewest = nodes if elastic.min_nodes == "auto" else elastic.min_nodes
    most = nodes if elastic.max_nodes == "auto" else elastic.max_nodes
    if not fewest <= nodes <= most:
        raise RequestError(
            f"cluster.nodes={nodes} is not between elastic.min_nodes={fewest} and "
            f"elastic.max_nodes={most}. The job starts with that many. Change one of the three."
        )
    return fewest, most


def pytorchjob(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """The PyTorchJob of a request.

    Raises:
        RequestError: The recipe asks what a PyTorchJob cannot do.
    """
    meta = pod.metadata(request, name, job=name)
    meta["labels"] |= kueue_labels(request)
    template = pod.pod_template(
        request, name, config=config, env=_pytorchjob_rank_variables(request, name), restarts=True
    )
    show_certificate(request.recipe.launch.kubernetes, template)
    del template["spec"]["restartPolicy"]  # the replica's own overrides it
    return {
        "apiVersion": PYTORCHJOB_API_VERSION,
        "kind": "PyTorchJob",
        "metadata": meta,
        "spec": {
            "elasticPolicy": _elastic_policy(request, name),
            "runPolicy": _run_policy(request),
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": request.nodes,
                    "restartPolicy": "OnFailure",
                    "template": template,
                }
            },
        },
    }


def _run_policy(request: LaunchRequest) -> dict[str, Any]:
    settings = request.recipe.launch.kubernetes
    _, most = node_range(request)
    policy: dict[str, Any] = {
        # Ended pods keep their logs. Running ones would hold nodes of a job that is over.
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": settings.ttl_s,
        # The operator adds up the restarts of all pods; a lost peer can restart each of them once.
        "backoffLimit": settings.max_restarts * most,
    }
    limit_s = time_limit_s(request)
    if limit_s is not None:
        policy["activeDeadlineSeconds"] = limit_s
    if settings.priority_class is not None:
        policy["schedulingPolicy"] = {"priorityClass": settings.priority_class}
    return policy


def _elastic_policy(request: LaunchRequest, name: str) -> dict[str, Any]:
    """Never `metrics`: an autoscaler on CPU use adds GPU nodes for loading data, not for need."""
    fewest, most = node_range(request)
    policy: dict[str, Any] = {
        "minReplicas": fewest,
        "maxReplicas": most,
        "maxRestarts": request.recipe.elastic.max_restarts,
        "rdzvBackend": "c10d",
        # Only other readers use these: our nodes meet where _pytorchjob_rank_variables says.
        "rdzvId": name,
        "rdzvHost": f"{name}-worker-0",
        "rdzvPort": PORT,
    }
    return policy


def _pytorchjob_rank_variables(request: LaunchRequest, name: str) -> list[pod.EnvVar]:
    """Return the variables of `--place pytorchjob`; the operator sets PET_* itself.

    The session stays the same while single pods restart: they join the others again. The
    operator's headless service for a pod has the pod's name, as does that of the pod that
    replaces it. By that name the others find the node that serves the store once worker 0 is
    lost. The policy cannot express version 3 of etcd's API, so its nodes read the rendezvous
    here.
    """
    settings = request.recipe.launch.kubernetes
    place = {"name": "SHARDYARD_RENDEZVOUS", "value": rendezvous_of(settings)}
    meet = [] if settings.etcd is None else [place]
    return [
        *meet,
        {"name": "SHARDYARD_HOST", "value": f"{name}-worker-0"},
        {"name": "SHARDYARD_PORT", "value": str(PORT)},
        {"name": "SHARDYARD_OWN_HOST", "valueFrom": pod.field("metadata.name")},
        {"name": "RANK", "valueFrom": pod.field(REPLICA_INDEX)},
        {"name": "SHARDYARD_SESSION", "value": name},
    ]


# A side job is one pod of a plain Job (batch/v1) without devices, as it has to run on a cluster
# that has neither JobSet nor Kubeflow.

JOB_API_VERSION = "batch/v1"
_RESTARTS = 1
"""Limit on retries: an evicted or lost pod is recreated once, and callers may ask again."""


def side_job(request: LaunchRequest, name: str, *, config: str) -> dict[str, Any]:
    """The Job of a request.

    Raises:
        RequestError: The recipe asks what a pod cannot have.
    """
    settings = request.recipe.launch.kubernetes
    template = pod.pod_template(request, name, config=config, env=[], restarts=False)
    spec: dict[str, Any] = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _RESTARTS,
        "podFailurePolicy": pod_failure_policy(template["spec"]["containers"][0]["name"]),
        "ttlSecondsAfterFinished": settings.ttl_s,
        "template": template,
    }
    limit_s = time_limit_s(request)
    if limit_s is not None:
        spec["activeDeadlineSeconds"] = limit_s
    return {
        "apiVersion": JOB_API_VERSION,
        "kind": SIDE_KIND,
        "metadata": pod.metadata(request, name, job=name),
        "spec": spec,
    }
