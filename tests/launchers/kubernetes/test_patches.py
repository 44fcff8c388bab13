"""Patches of rendered objects: merged as kubectl and jsonpatch do it, valid, and never ours."""

import copy
import json
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.pass_through import check_pass_through
from shardyard.errors import RequestError
from shardyard.launchers.base import SideJob
from shardyard.launchers.kubernetes import patches
from shardyard.launchers.kubernetes.objects import render_objects
from shardyard.launchers.kubernetes.targets import Schema, for_schema
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.kubernetes.schemas import check_builtin, check_object, pod_of

TARGETS: dict[str, Schema] = {"jobset": "2.3", "trainjob": "2.3", "pytorchjob": "2.3"}
SIDECAR = {"name": "logs", "image": "busybox", "command": ["sh"]}
MERGES: dict[str, dict[str, Any]] = {
    "a field is set": {"spec": {"hostNetwork": True, "dnsConfig": {"nameservers": ["10.0.0.1"]}}},
    "a field is removed": {"spec": {"enableServiceLinks": None, "affinity": None}},
    "a container is added": {"spec": {"containers": [SIDECAR]}},
    "ours is changed by its name": {
        "spec": {"containers": [{"name": "node", "tty": True, "securityContext": {"runAsUser": 7}}]}
    },
    "a variable and a mount are added": {
        "spec": {
            "containers": [
                {
                    "name": "node",
                    "env": [{"name": "TEAM", "value": "nlp"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                }
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        }
    },
    "tolerations are replaced": {"spec": {"tolerations": [{"operator": "Exists"}]}},
    "a label is added": {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}},
}


def recipe_patch(**patch: Any) -> str:
    return f"launch.kubernetes.patches={json.dumps([patch])}"


def rendered(*overrides: str, target: str = "jobset") -> tuple[dict[str, Any], ...]:
    request = request_for(f"launch.kubernetes.target={target}", *overrides)
    assert list(check_pass_through(request.recipe)) == []
    return render_objects(request)


def _by_key(value: Any) -> Any:
    """Lists with a merge key in the order of their keys: kubectl puts new items first."""
    if isinstance(value, dict):
        return {
            key: sorted(_by_key(item), key=lambda one: str(one[patches._MERGE_KEYS[key]]))
            if key in patches._MERGE_KEYS and isinstance(item, list)
            else _by_key(item)
            for key, item in value.items()
        }
    return [_by_key(item) for item in value] if isinstance(value, list) else value


@pytest.mark.heavy
@pytest.mark.parametrize("name", MERGES)
def test_a_merge_is_that_of_kubectl(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    template = pod_of(rendered())
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
    pod["metadata"]["name"] = "pod"
    wanted = subprocess.run(
        ["kubectl", "patch", "--local", "--type=strategic", "-o", "json", "-f", "-",
         "-p", json.dumps(MERGES[name])],
        input=json.dumps(pod), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    patches.merge(pod, MERGES[name])
    assert _by_key(pod) == _by_key(json.loads(wanted))


OPERATIONS: list[list[dict[str, Any]]] = [
    [{"op": "add", "path": "/spec/priority", "value": 3}],
    [{"op": "add", "path": "/spec/tolerations/0", "value": {"operator": "Exists"}}],
    [{"op": "add", "path": "/spec/tolerations/-", "value": {"operator": "Exists"}}],
    [{"op": "remove", "path": "/spec/enableServiceLinks"}],
    [{"op": "replace", "path": "/spec/containers/0/env/0/value", "value": "x"}],
    [{"op": "add", "path": "/metadata/annotations/a~1b", "value": "c"},
     {"op": "test", "path": "/metadata/annotations/a~1b", "value": "c"}],
]  # fmt: skip


@pytest.mark.parametrize("operations", OPERATIONS)
def test_operations_are_those_of_rfc_6902(operations: list[dict[str, Any]]) -> None:
    jsonpatch = pytest.importorskip("jsonpatch")
    pod = copy.deepcopy(pod_of(rendered()))
    wanted = jsonpatch.apply_patch(pod, operations)
    for operation in operations:
        patches.apply_operation(pod, operation, "here")
    assert pod == wanted


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/spec/nothing"},
        {"op": "replace", "path": "/spec/containers/7/image", "value": "x"},
        {"op": "add", "path": "/spec/tolerations/9", "value": {}},
        {"op": "add", "path": "/spec/tolerations/01", "value": {}},
        {"op": "test", "path": "/spec/enableServiceLinks", "value": True},
        {"op": "add", "path": "/spec/enableServiceLinks/a", "value": 1},
    ],
)
def test_an_operation_that_rfc_6902_rejects_is_rejected(operation: dict[str, Any]) -> None:
    jsonpatch = pytest.importorskip("jsonpatch")
    pod = copy.deepcopy(pod_of(rendered()))
    with pytest.raises((jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError)):
        jsonpatch.apply_patch(pod, [operation])
    with pytest.raises(RequestError, match=r"^here: "):
        patches.apply_operation(pod, operation, "here")


@pytest.mark.parametrize("target", TARGETS)
def test_patched_objects_are_valid_by_schema(target: str) -> None:
    merge = {
        "spec": {
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            **({} if target == "trainjob" else {"initContainers": [SIDECAR]}),
        }
    }
    objects = rendered(
        recipe_patch(kind="Pod", merge=merge),
        "launch.kubernetes.labels={example.com/cost: '12', kueue.x-k8s.io/priority-class: high}",
        "launch.kubernetes.annotations={example.com/note: a text of mine}",
        target=target,
    )
    pod = pod_of(objects)
    assert pod["spec"].get("initContainers", []) == [SIDECAR] * (target != "trainjob")
    assert {"name": "scratch", "emptyDir": {}} in pod["spec"]["volumes"]
    for item in (*(one for one in objects if one["kind"] != "ClusterTrainingRuntime"), pod):
        assert item["metadata"]["labels"]["example.com/cost"] == "12"
        assert item["metadata"]["annotations"]["example.com/note"] == "a text of mine"
    *others, job = objects
    for item in (*others, for_schema(job, TARGETS[target]) if target == "trainjob" else job):
        check_object(item)


def test_objects_other_than_pods_are_patched_and_valid() -> None:
    policy = {"spec": {"ingress": [], "egress": [], "policyTypes": ["Ingress", "Egress"]}}
    suspend = [{"op": "add", "path": "/spec/suspend", "value": True}]
    changes = [
        {"kind": "NetworkPolicy", "merge": policy},
        {"kind": "JobSet", "operations": suspend},
    ]
    _, network_policy, job = rendered(f"launch.kubernetes.patches={json.dumps(changes)}")
    assert job["spec"]["suspend"] is True
    assert network_policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    check_builtin(network_policy)
    check_object(job)


def test_side_jobs_get_the_patches_of_pods_and_of_jobs() -> None:
    changes = [
        {"kind": "Pod", "merge": {"spec": {"hostNetwork": True}}},
        {"kind": "Job", "merge": {"spec": {"backoffLimit": 0}}},
        {"kind": "JobSet", "merge": {"spec": {"suspend": True}}},
    ]
    request = request_for(f"launch.kubernetes.patches={json.dumps(changes)}")
    side = SideJob(kind="export", arguments={"step": 7, "to": "/runs"})
    _, job = render_objects(replace(request, side=side, nodes=1, cluster=None))
    assert job["spec"]["backoffLimit"] == 0 and job["spec"]["template"]["spec"]["hostNetwork"]
    check_builtin(job)


POD, JOB = "Pod", "JobSet"


@pytest.mark.parametrize(
    ("kind", "merge", "words"),
    [
        (JOB, {"metadata": {"name": "mine"}}, "metadata.name"),
        (JOB, {"metadata": {"namespace": "mine"}}, "metadata.namespace"),
        (JOB, {"metadata": {"labels": None}}, "metadata.labels"),
        (JOB, {"metadata": {"labels": {"app.kubernetes.io/instance": "a"}}}, "labels"),
        (JOB, {"metadata": {"annotations": {"shardyard/run-id": "a"}}}, "annotations"),
        (JOB, {"metadata": None}, "metadata.name"),
        (JOB, {"metadata": {"finalizers": ["a/b"]}}, "finalizers"),
        (JOB, {"metadata": {"ownerReferences": []}}, "ownerReferences"),
        (JOB, {"kind": "Job"}, "kind"),
        (JOB, {"spec": {"replicatedJobs": [{"name": "b"}]}}, "replicatedJobs"),
        (POD, {"metadata": {"labels": {"app.kubernetes.io/name": "a"}}}, "labels"),
        (POD, {"spec": {"restartPolicy": "Always"}}, "restartPolicy"),
        (POD, {"spec": {"containers": [{"name": "node", "image": "mine"}]}}, "image"),
        (POD, {"spec": {"containers": [{"name": "node", "command": ["sh"]}]}}, "command"),
        (POD, {"spec": {"containers": [{"name": "node", "args": ["x"]}]}}, "args"),
        (
            POD,
            {"spec": {"containers": [{"name": "node", "env": [{"name": "HOME", "value": "/"}]}]}},
            r"env\[HOME\]",
        ),
        (POD, {"spec": {"containers": None}}, "image"),
        (POD, {"spec": None}, "restartPolicy"),
        (POD, {"spec": {"volumes": [{"name": "recipe", "configMap": None}]}}, r"volumes\[recipe\]"),
        (POD, {"spec": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}}, "hostPath"),
    ],
)
def test_what_teardown_and_the_run_need_is_kept(
    kind: str, merge: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=rf"patches\[0\] .*{words}"):
        rendered(recipe_patch(kind=kind, merge=merge))


@pytest.mark.parametrize(
    "merge",
    [
        {"spec": {"hostNetwork": True}},
        {"spec": {"initContainers": [SIDECAR]}},
        {"spec": {"containers": [{"name": "node", "env": [{"name": "A", "value": "b"}]}]}},
    ],
)
def test_a_trainjob_takes_only_its_own_fields(merge: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="which a TrainJob cannot change"):
        rendered(recipe_patch(kind="Pod", merge=merge), target="trainjob")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (recipe_patch(kind="TrainJob", merge={"a": 1}), "Use kind: JobSet"),
        (recipe_patch(kind="PodGroup", merge={"a": 1}), "volcano"),
        (recipe_patch(kind="Pod"), "changes nothing"),
        (recipe_patch(kind="Pod", merge={}, operations=OPERATIONS[0]), "has both"),
        (recipe_patch(kind="Pod", merge={"spec": {"$patch": "replace"}}), "Use operations"),
        (recipe_patch(kind="Pod", operations=[{"op": "move", "path": "/a"}]), "cannot be applied"),
        (recipe_patch(kind="Pod", operations=[{"op": "add", "path": "a", "value": 1}]), "/spec"),
        ("launch.kubernetes.labels={app.kubernetes.io/name: a}", "Leave it out"),
        ("launch.kubernetes.labels={a: 'b c'}", "Kubernetes rejects"),
        ("launch.kubernetes.labels={kueue.x-k8s.io/queue-name: a}", "launch.kubernetes.queue"),
        ("launch.kubernetes.annotations={shardyard/run-id: a}", "Leave it out"),
        ("launch.kubernetes.annotations={'a b': a}", "Kubernetes rejects"),
        ("launch.aws_batch.tags={'aws:a': b}", "Leave it out"),
        ("launch.aws_batch.tags={shardyard-run: b}", "Leave it out"),
        ("launch.aws_batch.tags={a: 'b;'}", "AWS rejects"),
        ("launch.aws_batch.share_identifier=a-b", "letters and digits"),
    ],
)
def test_a_wrong_pass_through_is_rejected(override: str, words: str) -> None:
    (problem,) = check_pass_through(load_recipe([], [override]))
    assert words in str(problem)
