"""The launcher's whole life against a real API server, under the Role of the documentation."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.errors import AccessError, CapacityError, RequestError
from shardyard.launchers.base import JobState, SideJob
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.kubernetes.api_server import running_server
from tests.launchers.kubernetes.control_plane import (
    ADMIN,
    ALICE,
    ControlPlane,
    running_control_plane,
    wait_for,
)
from tests.launchers.kubernetes.requests import IMAGE, request_for

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

pytestmark = pytest.mark.system

TARGETS = ("jobset", "trainjob", "pytorchjob")
GROUPS = {
    "jobset": "/apis/jobset.x-k8s.io/v1alpha2",
    "trainjob": "/apis/trainer.kubeflow.org/v1alpha1",
    "pytorchjob": "/apis/kubeflow.org/v1",
}
P5 = {
    "cpu": "191450m", "memory": "1938410Mi", "nvidia.com/gpu": "8", "pods": "100",
    "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi", "ephemeral-storage": "100Gi",
}  # fmt: skip
PYTORCHJOB = ("launch.kubernetes.target=pytorchjob", "elastic.min_nodes=1", "elastic.max_nodes=4")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with running_control_plane(tmp_path_factory.mktemp("kube")) as made:
        for number in range(2):
            made.node(f"n{number}", kind="p5.48xlarge", offers=P5)
        for target in TARGETS:
            made.namespace(target, target)
            for claim in ("runs", "data"):
                made.claim(claim, target)
        yield made


class World:
    """Alice in a namespace of her target."""

    def __init__(self, plane: ControlPlane, target: str, folder: Path) -> None:
        self.plane, self.target = plane, target
        self.launcher = KubernetesLauncher(
            kubeconfig=plane.kubeconfig(f"alice-{target}", ALICE), poll_s=0.1
        )
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.base = f"{GROUPS[target]}/namespaces/{target}/{target}s"
        self.core = f"/api/v1/namespaces/{target}"

    def words(self, *overrides: str) -> tuple[str, ...]:
        elastic = PYTORCHJOB[1:] if self.target == "pytorchjob" else ()
        return (
            f"launch.kubernetes.target={self.target}",
            f"launch.kubernetes.namespace={self.target}", *elastic, *overrides,
        )  # fmt: skip

    def submit(self, *overrides: str, **changes: Any) -> Submission:
        rendered = self.launcher.render(request_for(*self.words(*overrides), **changes))
        if self.target == "trainjob" and changes.get("side") is None:
            self.apply_runtime(rendered.objects)
        return self.launcher.submit(rendered, self.ledger)

    def apply_runtime(self, objects: tuple[dict[str, Any], ...]) -> None:
        """As an administrator does once."""
        (runtime,) = [each for each in objects if each["kind"] == "ClusterTrainingRuntime"]
        path = f"{GROUPS['trainjob']}/clustertrainingruntimes"
        assert self.plane.call("POST", path, runtime)[0] in (201, 409)

    def pods(self, job: Submission) -> list[dict[str, Any]]:
        """Pods that the Job controller of 1.20 made, with the label that newer ones give."""
        _, found = self.plane.call("GET", f"{self.core}/pods?labelSelector=job-name={job.name}")
        for pod in found["items"]:
            change = {"metadata": {"labels": {"batch.kubernetes.io/job-name": job.name}}}
            self.plane.call(
                "PATCH", f"{self.core}/pods/{pod['metadata']['name']}", change,
                kind="application/merge-patch+json",
            )  # fmt: skip
        return list(found["items"])

    def doctor(self, *overrides: str) -> dict[str, Any]:
        found = self.launcher.checks(request_for(*self.words(*overrides)))
        return {one.name: one for one in found}


@pytest.fixture(params=TARGETS)
def world(plane: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(plane, request.param, tmp_path)
    yield made
    within = made.core.removeprefix("/api/v1")
    for path in (
        made.base, f"{made.core}/configmaps", f"/apis/batch/v1{within}/jobs",
        f"/apis/networking.k8s.io/v1{within}/networkpolicies",
    ):  # fmt: skip
        plane.call("DELETE", f"{path}?propagationPolicy=Background")


@pytest.fixture
def jobset(plane: ControlPlane, tmp_path: Path) -> World:
    return World(plane, "jobset", tmp_path)


def test_a_run_is_submitted_looked_at_cancelled_submitted_again_and_removed(world: World) -> None:
    job = world.submit()
    assert world.plane.call("GET", f"{world.base}/{job.name}")[1]["metadata"]["uid"] == job.id
    assert world.launcher.status(job).state is JobState.WAITING
    assert [one.id for one in world.launcher.find(request_for(*world.words()).recipe)] == [job.id]
    assert list(world.launcher.logs(job, node=None, follow=False)) == []
    world.launcher.cancel(job)
    world.launcher.cancel(job)
    wait_for(lambda: world.launcher.status(job).state is JobState.CANCELLED)
    again = world.submit(submission=2)
    both = world.launcher.statuses([job, again])
    assert [getattr(one, "state", one) for one in both] == [JobState.CANCELLED, JobState.WAITING]
    for one in (again, job):
        world.launcher.remove(one, world.ledger)
    assert [one.kind for one in world.ledger.live()] == []
    left = world.launcher.statuses([job, again])
    assert [getattr(one, "state", one) for one in left] == [JobState.GONE] * 2


def test_the_documented_role_is_enough_for_the_doctor(world: World) -> None:
    if world.target == "trainjob":
        world.apply_runtime(world.launcher.render(request_for(*world.words())).objects)
    found = world.doctor()
    troubles = {
        name: one.what for name, one in found.items()
        if one.verdict != "ok" and ("cannot be asked" in one.what or "may not" in one.what)
    }  # fmt: skip
    assert troubles == {}
    assert found["rights"].verdict == found["namespace"].verdict == found["nodes"].verdict == "ok"
    assert found["quota"].verdict == found["requests"].verdict == "ok"
    assert found["credentials"].verdict == "ok"  # 1.20 serves no SelfSubjectReview
    assert ("runtime" in found) == (world.target == "trainjob")


def test_a_job_of_the_same_name_that_others_made_is_left_alone(world: World) -> None:
    job = world.submit()
    world.plane.call("DELETE", f"{world.base}/{job.name}")
    kind = {"jobset": "JobSet", "trainjob": "TrainJob", "pytorchjob": "PyTorchJob"}[world.target]
    foreign = {
        "apiVersion": GROUPS[world.target].removeprefix("/apis/"), "kind": kind,
        "metadata": {"name": job.name}, "spec": {},
    }  # fmt: skip
    made = world.plane.create(world.base, foreign)
    assert world.launcher.status(job).state is JobState.GONE
    world.launcher.cancel(job)
    removal = world.launcher.remove(job, world.ledger)
    assert removal.not_owned == [f"{kind} {job.name}"]
    uid = world.plane.call("GET", f"{world.base}/{job.name}")[1]["metadata"]["uid"]
    assert uid == made["metadata"]["uid"]


def test_a_run_that_is_submitted_twice_is_refused(world: World) -> None:
    world.submit()
    with pytest.raises(RequestError, match="exists already in context 'test'"):
        world.submit()


def test_an_elastic_job_is_scaled(plane: ControlPlane, tmp_path: Path) -> None:
    world = World(plane, "pytorchjob", tmp_path)
    job = world.submit()
    world.launcher.resize(job, 3)
    spec = plane.call("GET", f"{world.base}/{job.name}")[1]["spec"]
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
    with pytest.raises(RequestError, match="are not between"):
        world.launcher.resize(job, 5)
    world.launcher.remove(job, world.ledger)


def test_a_side_job_that_no_node_can_hold_says_what_the_scheduler_says(
    jobset: World, caplog: pytest.LogCaptureFixture
) -> None:
    side = SideJob(kind="prepare", arguments={})
    job = jobset.submit("launch.side.memory_gib=9999", side=side)
    assert "none of 2 nodes can hold the pod" in caplog.text
    wait_for(lambda: jobset.pods(job) and jobset.launcher.status(job).is_unplaced)
    assert "Insufficient memory" in jobset.launcher.status(job).reason
    jobset.launcher.remove(job, jobset.ledger)


def test_a_quota_keeps_a_job_and_the_controllers_words_are_its_reason(jobset: World) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    path = f"{jobset.core}/resourcequotas"
    jobset.plane.create(path, quota)
    wait_for(lambda: jobset.plane.call("GET", f"{path}/none")[1].get("status", {}).get("hard"))
    job = jobset.submit(side=SideJob(kind="export", arguments={"step": 1}))
    wait_for(lambda: "exceeded quota" in jobset.launcher.status(job).reason)
    assert jobset.doctor()["quota"].verdict == "problem"
    jobset.plane.call("DELETE", f"{path}/none")
    jobset.launcher.remove(job, jobset.ledger)


@pytest.mark.parametrize(
    ("node", "words"), [("lost", "node lost is not there"), ("n0", "dial tcp|lookup|unknown|no ")]
)
def test_the_log_of_a_pod_whose_node_is_not_reached_names_the_pod(
    jobset: World, node: str, words: str
) -> None:
    job = jobset.submit()
    pod = {
        "metadata": {
            "name": "p-0", "labels": {"jobset.sigs.k8s.io/jobset-name": job.name},
        },
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "node", "image": IMAGE}],
        },
    }  # fmt: skip
    jobset.plane.create(f"{jobset.core}/pods", pod)
    running = {"name": "node", "state": {"running": {}}, "restartCount": 0, "ready": True,
               "image": IMAGE, "imageID": ""}  # fmt: skip
    change = {"status": {"phase": "Running", "containerStatuses": [running]}}
    jobset.plane.call(
        "PATCH", f"{jobset.core}/pods/p-0/status", change, kind="application/merge-patch+json"
    )
    with pytest.raises(CapacityError, match=rf"the log of pod p-0 cannot be read.*({words})"):
        list(jobset.launcher.logs(job, node=0, follow=False))
    jobset.plane.call("DELETE", f"{jobset.core}/pods/p-0?gracePeriodSeconds=0")
    jobset.launcher.remove(job, jobset.ledger)


def test_wrong_credentials_are_named(plane: ControlPlane, jobset: World) -> None:
    for token, words in (
        ("wrong", "does not accept your credentials"),
        (None, "sends no credentials for this context"),
    ):
        launcher = KubernetesLauncher(kubeconfig=plane.kubeconfig("other", token))
        rendered = launcher.render(request_for(*jobset.words()))
        with pytest.raises(AccessError, match=words):
            launcher.submit(rendered, jobset.ledger)
    assert jobset.ledger.live() == []


def test_a_namespace_that_is_missing_and_one_without_rights_are_told_apart(
    plane: ControlPlane, jobset: World
) -> None:
    admin = KubernetesLauncher(kubeconfig=plane.kubeconfig("admin", ADMIN))
    words = jobset.words("launch.kubernetes.namespace=lost")
    with pytest.raises(RequestError, match=r"namespace='lost' is not in context.*create namespace"):
        admin.submit(admin.render(request_for(*words)), jobset.ledger)
    with pytest.raises(AccessError, match="Your role lacks this right"):
        jobset.launcher.submit(jobset.launcher.render(request_for(*words)), jobset.ledger)


def test_a_kind_that_is_not_served_is_no_right_that_is_lacking(jobset: World) -> None:
    found = jobset.doctor("launch.kubernetes.queue=team")
    assert "Kueue is missing" in found["Kueue"].what and "queue" not in found
    api = jobset.launcher._api_of(request_for(*jobset.words()))
    with pytest.raises(RequestError, match="does not serve LocalQueue"):
        api.get("LocalQueue", "team")


def test_a_trainjob_without_the_cluster_role_names_the_command_that_helps(
    plane: ControlPlane, tmp_path: Path
) -> None:
    world = World(plane, "trainjob", tmp_path)
    binding = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/shardyard-reader"
    _, kept = plane.call("GET", binding)
    plane.call("DELETE", binding)
    try:
        api = world.launcher._api_of(request_for(*world.words()))
        wait_for(lambda: not api.may("get", "clustertrainingruntimes",
                                     group="trainer.kubeflow.org", everywhere=True))  # fmt: skip
        with pytest.raises(AccessError, match="kubectl create clusterrole shardyard-runtimes"):
            world.submit()
        assert world.doctor()["runtime"].verdict == "problem"
    finally:
        plane.create(binding.rpartition("/")[0], {
            key: kept[key] for key in ("roleRef", "subjects")
        } | {"metadata": {"name": "shardyard-reader"}})  # fmt: skip


def test_a_config_map_that_is_too_large_names_its_largest_part(jobset: World) -> None:
    api = jobset.launcher._api_of(request_for(*jobset.words()))
    item = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "large"},
        "data": {"recipe.yaml": "x" * 1_100_000},
    }  # fmt: skip
    with pytest.raises(RequestError, match=r"largest parts are data.recipe.yaml \(1"):
        api.create(item)


def test_the_verbs_of_a_run_from_the_command_line(
    plane: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig("alice", ALICE)))
    runs = str(tmp_path / "runs")
    recipe = (
        "model.preset=llama-tiny", "data.source=/data/text", "run.steps=10",
        "optim.global_batch=8", "cluster.device=cpu", "cluster.devices=2", "cluster.nodes=2",
        f"launch.image={IMAGE}", "launch.run_dir=/runs", "run.id=first", f"run.dir={runs}",
        "launch.volumes=[{path: /runs, claim: runs}, {path: /data, claim: data}]",
        "launch.kubernetes.context=test", "launch.kubernetes.namespace=jobset",
    )  # fmt: skip

    def said(*words: str, code: int = 0) -> str:
        assert main(words) == code, capsys.readouterr()
        found = capsys.readouterr()
        return found.out + found.err

    said("launch", *recipe, "--on", "kubernetes", "--yes")
    assert "waiting" in said("status", "first", "--runs-dir", runs, code=0)
    assert "kubernetes: waiting" in said("runs", "--runs-dir", runs)
    said("cancel", "first", "--runs-dir", runs)
    wait_for(lambda: "kubernetes: cancelled" in said("runs", "--runs-dir", runs))
    said("resume", "first", "--runs-dir", runs, "--yes")
    said("cancel", "first", "--runs-dir", runs)
    said("teardown", "first", "--runs-dir", runs, "--yes")
    assert "no answer in time" not in said("runs", "--runs-dir", runs)


# Answers of our test server, without the parts that differ from call to call.


def _answers(ask: Any) -> dict[str, Any]:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {}}
    path = "/api/v1/namespaces/default/configmaps"
    metadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    return {
        "missing": ask("GET", f"{path}/none"),
        "created": ask("POST", path, config),
        "twice": ask("POST", path, config),
        "other uid": ask("DELETE", f"{path}/c", {
            "kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": "other"},
        }),
        "no namespace": ask("POST", "/api/v1/namespaces/lost/configmaps", config),
        "no metadata": ask("GET", f"{path}?labelSelector=a%3Db", None, metadata),
        "no objects": ask("GET", f"{path}?labelSelector=a%3Db"),
        "unknown kind": ask("GET", "/apis/kueue.x-k8s.io/v1beta2"),
        "deleted": ask("DELETE", f"{path}/c"),
    }  # fmt: skip


def test_the_test_server_answers_as_kubernetes_does(plane: ControlPlane, tmp_path: Path) -> None:
    with running_server(tmp_path) as (server, kubeconfig):
        server.served = set()
        ours = _answers(_asking(kubeconfig))
        del server
    real = _answers(_asking(plane.kubeconfig("compare", ADMIN)))
    assert ours == real


def _asking(kubeconfig: Path) -> Any:
    from kubernetes import config
    from kubernetes.client.exceptions import ApiException

    client = config.new_client_from_config(str(kubeconfig), context=_first_context(kubeconfig))

    def ask(method: str, path: str, body: Any = None, accept: str = "application/json") -> Any:
        try:
            answer = client.call_api(
                path, method, body=body, auth_settings=["BearerToken"],
                header_params={"Accept": accept, "Content-Type": "application/json"},
                _preload_content=False, _return_http_data_only=True,
            )  # fmt: skip
        except ApiException as error:
            return _form_of(error.status, error.body)
        return _form_of(answer.status, answer.data)

    return ask


def _first_context(kubeconfig: Path) -> str:
    assert kubeconfig.is_file()
    return "test"


def _form_of(status: int, body: Any) -> tuple[Any, ...]:
    """What the launcher reads of an answer."""
    import json

    try:
        content = json.loads(body)
    except ValueError:
        return (status, "text")
    items = content.get("items", "absent")
    named = bool((content.get("details") or {}).get("name"))
    return (status, named if status >= 400 else "", items)


def test_nothing_of_this_starts_where_the_programs_are_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(os.environ, "SHARDYARD_KUBE", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="make kubernetes builds them"):
        running_control_plane(tmp_path).__enter__()
