"""Rendered objects against the official schemas of their exact API versions.

The custom resources' definitions are the projects' own files and are not part of this repository:
SHARDYARD_CRDS names a folder that holds them. Tests that need one that is not there are skipped.
Checks are strict: a field that a schema does not know is an error, as it is for kubectl.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = "1.33"
_CRDS = os.environ.get("SHARDYARD_CRDS")

FILES = {
    ("JobSet", None): "jobset.yaml",
    ("PyTorchJob", None): "pytorchjob-v1.9.4.yaml",
    ("TrainJob", "2.1"): "trainjob-v2.1.0.yaml",
    ("TrainJob", "2.3"): "trainjob-v2.3.0.yaml",
    ("ClusterTrainingRuntime", "2.1"): "clustertrainingruntime-v2.1.0.yaml",
    ("ClusterTrainingRuntime", "2.3"): "clustertrainingruntime-v2.3.0.yaml",
    ("PodMonitor", None): "podmonitor.yaml",
    ("PrometheusRule", None): "prometheusrule.yaml",
}

# k8s.io/apimachinery, resource.Quantity
_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|[KMGTPE]i?|[eE][+-]?\d+)?")


def check_object(item: dict[str, Any], *, trainer: str = "2.3") -> None:
    """Fail with what is wrong; skip where the schema is not here."""
    kind = item["kind"]
    if kind in ("ConfigMap", "NetworkPolicy"):
        check_builtin(item)
        return
    schema = custom_schema(kind, trainer if "Train" in kind and "Py" not in kind else None)
    problems = list(_problems(item, schema))
    assert not problems, "\n".join(problems)


def custom_schema(kind: str, version: str | None) -> dict[str, Any]:
    """The schema of a custom resource, as strict as an API server with fieldValidation=Strict."""
    name = FILES[kind, version]
    if not _CRDS or not (Path(_CRDS) / name).is_file():
        pytest.skip(f"SHARDYARD_CRDS does not name a folder with {name}")
    return _strict_schema(Path(_CRDS) / name)


@cache
def _strict_schema(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents = [doc for doc in yaml.load_all(path.read_text(), Loader=loader) if doc]
    (version,) = documents[0]["spec"]["versions"]
    schema: dict[str, Any] = _strict(version["schema"]["openAPIV3Schema"])
    for name in ("apiVersion", "kind"):
        schema["properties"][name] = {"type": "string"}
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI v3 of a CRD as JSON schema: unknown fields refused, int-or-string spelled out."""
    found = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = _strict(schema[key])
    if "properties" in schema:
        found["properties"] = {k: _strict(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found


def _problems(item: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    jsonschema = pytest.importorskip("jsonschema")
    for error in jsonschema.Draft7Validator(schema).iter_errors(item):
        yield f"{error.json_path}: {error.message}"


def check_builtin(item: dict[str, Any]) -> None:
    """An object of Kubernetes itself."""
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(item, KUBERNETES, strict=True)


def check_pod(template: dict[str, Any]) -> None:
    """A pod template: its schema, and what no schema says."""
    check_builtin(
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "pod"}},
    )
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    (container,) = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert container["image"]
    names = [variable["name"] for variable in container["env"]]
    assert len(names) == len(set(names))
    resources = container["resources"]
    for quantity in [*resources["requests"].values(), *resources.get("limits", {}).values()]:
        assert _QUANTITY.fullmatch(quantity), quantity
    for key, value in template["metadata"]["labels"].items():
        assert len(value) <= 63 and len(key.rpartition("/")[2]) <= 63


def pod_of(objects: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The pod template that a job's controller would make."""
    job = objects[-1]
    if job["kind"] == "JobSet":
        found = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    elif job["kind"] == "PyTorchJob":
        found = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    else:
        found = _trainjob_pod(objects[-2], job)
    assert isinstance(found, dict)
    return found


def _trainjob_pod(runtime: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The runtime's template, what the TrainJob patches in it, and its trainer."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    base = replicated["template"]["spec"]["template"]["spec"]
    if "podTemplateOverrides" in job["spec"]:
        (patch,) = job["spec"]["podTemplateOverrides"]
    else:
        (patch,) = job["spec"]["runtimePatches"]
        (patch,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        patch = patch["template"]["spec"]["template"]
    trainer = job["spec"]["trainer"]
    (container,), (patched,) = base["containers"], patch["spec"]["containers"]
    whole = {
        **container, **patched, "image": trainer["image"], "command": trainer["command"],
        "env": trainer["env"], "resources": trainer["resourcesPerNode"],
    }  # fmt: skip
    spec = {**base, **patch["spec"], "containers": [whole]}
    return {"metadata": patch["metadata"], "spec": spec}
