"""Kubeflow Trainer: a TrainJob, and the ClusterTrainingRuntime it refers to.

The API changed between minor versions without changing its name: `runtimePatches` from 2.2 on,
`podTemplateOverrides` in 2.1, `podSpecOverrides` in 2.0. Rendered for 2.3; ``for_schema`` turns
that into what a cluster with an older version serves.
"""

import copy
import hashlib
import json
from typing import Any, Literal

from shardyard.errors import RequestError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.gang import kueue_labels
from shardyard.launchers.kubernetes.jobset import JOB_UID
from shardyard.launchers.kubernetes.names import JOB
from shardyard.launchers.kubernetes.ownership import MANAGED_BY, origin_notes
from shardyard.launchers.kubernetes.resources import demand_of
from shardyard.launchers.kubernetes.restarts import (
    jobset_failure_policy,
    pod_failure_policy,
    refuse_elastic,
    time_limit_s,
)

TRAINJOB_API_VERSION = "trainer.kubeflow.org/v1alpha1"
CONTENT = "shardyard/content"
"""Annotation: digest of a runtime's spec, to know another one of the same name."""

RUNTIME_RIGHT = (
    "Have an administrator grant it: kubectl create clusterrole shardyard-runtimes "
    "--verb=get --resource=clustertrainingruntimes.trainer.kubeflow.org, then kubectl create "
    "clusterrolebinding shardyard-runtimes --clusterrole=shardyard-runtimes --user=USER"
)
"""What reads a runtime, an object of the whole cluster, which no Role of a namespace can allow."""

Schema = Literal["2.0", "2.1", "2.3"]
"""2.3 stands for 2.2 too, whose fields are the same."""


def runtime_name(request: LaunchRequest) -> str:
    """Name of the runtime; jobs with EFA have one of their own, for the right that EFA needs."""
    name = request.recipe.launch.kubernetes.runtime
    return f"{name}-efa" if demand_of(request).has_efa else name


def runtime(request: LaunchRequest) -> dict[str, Any]:
    """The ClusterTrainingRuntime: all that a TrainJob cannot say, the same for many runs."""
    spec = {
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
                "trainer.kubeflow.org/framework": "torch",
                MANAGED_BY[0]: MANAGED_BY[1],
            },
            "annotations": {CONTENT: digest, **origin_notes(request)},
        },
        "spec": spec,
    }


def has_content_of(found: dict[str, Any], item: dict[str, Any]) -> bool:
    """Whether a runtime of the cluster has the content of one that was rendered."""
    notes = found["metadata"].get("annotations", {})
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
    refuse_elastic(request)
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
    """What of the pod template is this run's own and may be patched."""
    template = pod.pod_template(request, name, config=config, env=[], restarts=False)
    spec, container = template["spec"], template["spec"]["containers"][0]
    own = ("volumes", "nodeSelector", "affinity", "tolerations", "serviceAccountName")
    patched = {key: spec[key] for key in own if key in spec}
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
