"""PyTorchJob of the training operator: workers that come and go one by one.

Fields: kubeflow.org/v1, operator 1.9. There is no Master: elasticPolicy excludes one. The operator
makes a service for each pod and points PET_RDZV_ENDPOINT to the first worker.
"""

from typing import Any

from shardyard.config.kubernetes_etcd import rendezvous_of
from shardyard.errors import RequestError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes import pod
from shardyard.launchers.kubernetes.etcd_certificate import show_certificate
from shardyard.launchers.kubernetes.gang import kueue_labels
from shardyard.launchers.kubernetes.restarts import time_limit_s

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
        request, name, config=config, env=_place(request, name), restarts=True
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
        # For what else reads the policy; our nodes meet where _place says.
        "rdzvId": name,
        "rdzvHost": f"{name}-worker-0",
        "rdzvPort": PORT,
    }
    return policy


def _place(request: LaunchRequest, name: str) -> list[pod.EnvVar]:
    """What `--place pytorchjob` reads beside PET_*, which the operator sets.

    The session stays the same while single pods restart: they join the others again. The operator's
    headless service for a pod has the pod's name, also for the one that is made in its place: by it
    the others find the node that serves the store once worker 0 is lost. The policy
    has no word for version 3 of etcd's API, so its nodes read where they meet here.
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
