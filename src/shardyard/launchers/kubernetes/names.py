"""Names of objects: what Kubernetes accepts once every controller has added its suffixes."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.launchers.base import LaunchRequest

LONGEST = 63
"""Limit on a DNS label (RFC 1123), as pods, services and label values are."""
JOB = "node"
"""The one replicated job of a JobSet; Kubeflow Trainer's PET_MASTER_ADDR expects this name."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""DNS-1035, the strictest of what the three controllers ask."""
_POD_SUFFIX = 6
"""``-abcde``: five random characters that an Indexed Job puts behind the name of a pod."""


@dataclass(frozen=True, kw_only=True)
class JobTarget:
    """Names of the parts of one kind of job."""

    kind: str
    container: str
    longest_part: Callable[[str, int], int]
    """Characters of the longest name that job NAME with so many nodes leads to."""


def _jobset_pod(name: str, nodes: int) -> int:
    """<jobset>-<job>-<job index>-<pod index>-<random>; JobSet's webhook checks exactly this."""
    return len(f"{name}-{JOB}-0-{nodes - 1}") + _POD_SUFFIX


def _worker_pod(name: str, nodes: int) -> int:
    """<job>-worker-<index>, the name of the pod and of its service."""
    return len(f"{name}-worker-{nodes - 1}")


TARGETS: dict[str, JobTarget] = {
    "jobset": JobTarget(kind="JobSet", container="node", longest_part=_jobset_pod),
    "trainjob": JobTarget(kind="TrainJob", container="node", longest_part=_jobset_pod),
    "pytorchjob": JobTarget(kind="PyTorchJob", container="pytorch", longest_part=_worker_pod),
}


SIDE_KIND = "Job"
"""Kind of a side job: Kubernetes' own, which needs no additional controller."""


POD_LABELS = {
    "JobSet": "jobset.sigs.k8s.io/jobset-name",
    # A TrainJob's pods are those of the JobSet of its name.
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
    SIDE_KIND: "batch.kubernetes.io/job-name",
}
"""Label that a kind's controller gives the pods of a job: its name."""


def job_kind(request: LaunchRequest) -> str:
    """Return the kind of the object of a request's job."""
    if request.side is not None:
        return SIDE_KIND
    return TARGETS[request.recipe.launch.kubernetes.target].kind


def container_of(kind: str) -> str:
    """Return the name of the one container in the pods of a kind of job."""
    return next((target.container for target in TARGETS.values() if target.kind == kind), JOB)


def side_job_name(run_id: str, suffix: str) -> str:
    """Name of a side job's object: of a long run's name the beginning, as the suffix is unique."""
    longest = LONGEST - _POD_SUFFIX - len(suffix)
    name = _label_of(run_id)[:longest].rstrip("-") + suffix
    assert _LABEL.fullmatch(name), name
    return name


def _label_of(run_id: str) -> str:
    name = re.sub(r"[._]+", "-", run_id.lower()).strip("-")
    # A run's id may begin with a digit, and a DNS-1035 label may not.
    return name if name[:1].isalpha() else f"r-{name}"


def job_name(run_id: str, submission: int, *, target: str, nodes: int) -> str:
    """Name of the job object.

    Args:
        run_id: May hold capitals, dots and underscores, which names of objects may not.
        submission: Which one of the run this is, from 1; a later one needs a name of its own.
        target: Key of ``TARGETS``.
        nodes: The most that the job may get.

    Raises:
        RequestError: It, or a name that a controller makes of it, would be too long.
    """
    name = _label_of(run_id)
    suffix = "" if submission == 1 else f"-s{submission}"
    name += suffix
    # JobSet's webhook would say so only after the ConfigMap had been created.
    over = TARGETS[target].longest_part(name, nodes) - LONGEST
    if over > 0:
        raise RequestError(
            f"run.id={run_id!r} is too long for a {TARGETS[target].kind} of {nodes} nodes: its "
            f"pods' names would have {LONGEST + over} characters, and Kubernetes accepts "
            f"{LONGEST}. Use at most {len(name) - over - len(suffix)} characters: shorten run.name "
            f"by {over}, or give run.id."
        )
    assert _LABEL.fullmatch(name), name
    return name


def check_namespaced(recipe: Recipe) -> None:
    """Check the names of objects that the recipe refers to.

    Raises:
        RequestError: Kubernetes cannot have an object of that name.
    """
    settings = recipe.launch.kubernetes
    given = {
        "launch.kubernetes.namespace": settings.namespace,
        "launch.kubernetes.queue": settings.queue,
        "launch.kubernetes.priority_class": settings.priority_class,
        "launch.kubernetes.service_account": settings.service_account,
        "launch.kubernetes.runtime": settings.runtime,
    }
    given |= {f"launch.volumes[{i}].claim": v.claim for i, v in enumerate(recipe.launch.volumes)}
    for path, name in given.items():
        if name is None or re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            continue
        raise RequestError(
            f"{path}={name!r} is not a name of a Kubernetes object. Such names have lower-case "
            "letters, digits and inner hyphens, at most 63 characters. Give the name as kubectl "
            "shows it."
        )


_LABEL_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)"
_PREFIX = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL_NAME = re.compile(rf"(?:{_PREFIX}/)?{_LABEL_VALUE}")
"""Form of a label's name. Source: kubernetes.io, Labels and Selectors."""


def check_labels(recipe: Recipe) -> None:
    """Check the labels that nodes must have.

    Raises:
        RequestError: No node can have such a one.
    """
    kubernetes = recipe.launch.kubernetes
    asked = {
        "node_selector": kubernetes.node_selector,
        "side_node_selector": kubernetes.side_node_selector,
    }
    labels = [(setting, *label) for setting, found in asked.items() for label in found.items()]
    for setting, name, value in labels:
        if _LABEL_NAME.fullmatch(name) and re.fullmatch(f"{_LABEL_VALUE}?", value):
            continue
        raise RequestError(
            f"launch.kubernetes.{setting} has {name!r}: {value!r}, which no node's label can "
            "be. Names and values have letters, digits and inner hyphens, dots and underscores, at "
            "most 63; a name may have a prefix and a slash before it. Give one as `kubectl get "
            "nodes --show-labels` shows it."
        )
