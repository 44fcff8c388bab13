"""The verbs through the official client against a server on a real socket."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import CapacityError, RequestError
from shardyard.launchers.base import JobState, SideJob
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.kubernetes.api_server import (
    RUNNING,
    TOKEN,
    ApiServer,
    exited,
    running_server,
)
from tests.launchers.kubernetes.requests import RUN_ID, request_for

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

CONDITION = {"type": "Completed", "status": "True", "message": "jobset completed successfully"}


class World:
    """A server, a launcher that knows it, a ledger."""

    def __init__(self, server: ApiServer, kubeconfig: Path, folder: Path) -> None:
        self.server = server
        self.kubeconfig = kubeconfig
        self.launcher = KubernetesLauncher(kubeconfig=kubeconfig, poll_s=0.02)
        self.ledger = Ledger(folder / "ledger.jsonl")

    def submit(self, *overrides: str, **changes: Any) -> Submission:
        rendered = self.launcher.render(request_for(*overrides, **changes))
        return self.launcher.submit(rendered, self.ledger)

    def live(self) -> list[tuple[str, str]]:
        return [(entry.kind, entry.name) for entry in self.ledger.live()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_server(tmp_path) as (server, kubeconfig):
        yield World(server, kubeconfig, tmp_path)


def set_conditions(world: World, *conditions: dict[str, str]) -> None:
    world.server.only("jobsets")["status"] = {"conditions": list(conditions)}


def test_a_submission_makes_the_config_map_and_then_the_job(world: World) -> None:
    job = world.submit()
    posts = [path.rpartition("/")[2] for method, path in world.server.requests if method == "POST"]
    assert posts == ["configmaps", "networkpolicies", "jobsets"]
    assert job.name == RUN_ID
    assert job.id == world.server.only("jobsets")["metadata"]["uid"]
    assert job.details["context"] == "test" and job.details["namespace"] == "default"
    config = world.server.only("configmaps")["metadata"]["name"]
    assert world.live() == [("ConfigMap", config), ("NetworkPolicy", config), ("JobSet", RUN_ID)]
    assert all(entry.is_confirmed for entry in world.ledger.live())
    assert "fieldValidation=Strict" in world.server.queries


def test_what_is_sent_is_what_was_printed(world: World) -> None:
    rendered = world.launcher.render(request_for())
    world.launcher.submit(rendered, world.ledger)
    sent = world.server.only("jobsets")
    del sent["metadata"]["uid"]
    assert sent == rendered.objects[-1]


def test_the_kubeconfig_is_only_read_and_its_token_only_sent(world: World) -> None:
    before = world.kubeconfig.read_bytes()
    world.submit()
    assert world.kubeconfig.read_bytes() == before
    assert world.server.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in world.ledger.path.read_text()


@pytest.mark.parametrize("target", ["trainjob", "pytorchjob"])
def test_the_other_targets_are_submitted_and_removed_too(world: World, target: str) -> None:
    job = world.submit(f"launch.kubernetes.target={target}")
    assert world.server.names(f"{target}s") == [RUN_ID]
    assert world.launcher.status(job).state is JobState.WAITING
    world.launcher.remove(job, world.ledger)
    assert world.server.objects == {}


def test_a_later_submission_of_a_run_has_a_name_of_its_own(world: World) -> None:
    world.submit()
    job = world.submit(submission=2)
    assert job.name == f"{RUN_ID}-s2"
    assert len(world.server.names("jobsets")) == 2


def test_an_uncertain_creation_stays_in_the_ledger_to_be_looked_for(world: World) -> None:
    world.server.refusals["POST", "/jobsets"] = (504, "gateway timeout")
    with pytest.raises(CapacityError):
        world.submit()
    states = {entry.kind: entry.is_confirmed for entry in world.ledger.live()}
    assert states == {"ConfigMap": True, "NetworkPolicy": True, "JobSet": False}


def test_a_job_waits_runs_and_succeeds(world: World) -> None:
    job = world.submit()
    assert world.launcher.status(job).reason == "its pods are not made yet"
    world.server.add_pod("p-0", job=job.name, rank=0, status=RUNNING, lines=[])
    running = world.launcher.status(job)
    assert (running.state, running.nodes) == (JobState.RUNNING, (("node 0", "running"),))
    set_conditions(world, CONDITION)
    ended = world.launcher.status(job)
    assert (ended.state, ended.exit_code) == (JobState.SUCCEEDED, 0)


def test_a_job_deleted_behind_our_back_is_gone(world: World) -> None:
    job = world.submit()
    world.server.objects.clear()
    status = world.launcher.status(job)
    assert status.state is JobState.GONE and "deleted" in status.reason


def test_another_job_of_the_same_name_is_not_ours(world: World) -> None:
    job = world.submit()
    world.server.only("jobsets")["metadata"]["uid"] = "another"
    assert world.launcher.status(job).state is JobState.GONE


def test_a_cancelled_job_is_known_as_cancelled_and_can_be_cancelled_again(world: World) -> None:
    job = world.submit()
    world.launcher.cancel(job)
    world.launcher.cancel(job)
    assert world.server.names("jobsets") == []
    assert world.launcher.status(job).state is JobState.CANCELLED


def test_a_new_submission_forgets_the_cancellation_of_the_last(world: World) -> None:
    world.launcher.cancel(world.submit())
    job = world.submit()
    world.server.objects.pop(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{RUN_ID}")
    assert world.launcher.status(job).state is JobState.GONE


def test_removal_leaves_nothing_and_is_safe_to_repeat(world: World) -> None:
    job = world.submit()
    config = job.details["config"]
    assert world.launcher.remove(job, world.ledger).removed == [
        f"JobSet {RUN_ID}",
        f"ConfigMap {config}",
        f"NetworkPolicy {config}",
    ]
    assert world.server.objects == {} and world.live() == []
    assert world.launcher.remove(job, world.ledger).removed == []


def test_an_object_of_an_interrupted_submission_is_removed_too(world: World) -> None:
    job = world.submit(nonce="n")
    interrupted = Ledger(world.ledger.path.with_name("interrupted.jsonl"))
    (written,) = [line for line in world.ledger.live() if line.kind == "JobSet"]
    interrupted.intend("JobSet", job.name, launcher="kubernetes", **written.details)
    assert world.launcher.remove(job, interrupted).removed == [f"JobSet {RUN_ID}"]


def test_a_pytorchjob_is_scaled_within_its_range(world: World) -> None:
    elastic = ["launch.kubernetes.target=pytorchjob", "elastic.min_nodes=1", "elastic.max_nodes=8"]
    job = world.submit(*elastic)
    assert world.launcher.resizes(job)
    world.launcher.resize(job, 5)
    worker = world.server.only("pytorchjobs")["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 5 and worker["restartPolicy"] == "OnFailure"
    with pytest.raises(RequestError, match=r"9 nodes are not between .*=1 and .*=8"):
        world.launcher.resize(job, 9)


def test_a_job_that_is_gone_cannot_be_scaled(world: World) -> None:
    job = world.submit("launch.kubernetes.target=pytorchjob")
    world.server.objects.clear()
    with pytest.raises(RequestError, match=r"is not in context.*Resume the run"):
        world.launcher.resize(job, 2)


def test_a_jobset_keeps_its_nodes(world: World) -> None:
    assert not world.launcher.resizes(world.submit())


def test_a_cluster_with_trainer_2_1_gets_its_fields(world: World) -> None:
    world.server.trainjob_fields = ["runtimeRef", "trainer", "podTemplateOverrides"]
    world.submit("launch.kubernetes.target=trainjob")
    assert "podTemplateOverrides" in world.server.only("trainjobs")["spec"]


# kubeflow/trainer v2.0, pkg/apis/trainer/v1alpha1/trainjob_types.go
_OF_POD_2_0 = {
    "targetJobs", "serviceAccountName", "nodeSelector", "tolerations", "volumes", "initContainers",
    "containers", "schedulingGates",
}  # fmt: skip
_OF_CONTAINER_2_0 = {"name", "env", "volumeMounts"}


def test_a_cluster_with_trainer_2_0_gets_its_fields(world: World) -> None:
    world.server.trainjob_fields = ["runtimeRef", "trainer", "podSpecOverrides"]
    world.submit("launch.kubernetes.target=trainjob")
    spec = world.server.only("trainjobs")["spec"]
    assert set(spec) == {"runtimeRef", "trainer", "podSpecOverrides"}
    (override,) = spec["podSpecOverrides"]
    assert set(override) <= _OF_POD_2_0
    assert override["targetJobs"] == [{"name": "node"}] and override["volumes"]
    (container,) = override["containers"]
    assert set(container) <= _OF_CONTAINER_2_0


def test_a_topology_is_refused_by_trainer_2_0(world: World) -> None:
    world.server.trainjob_fields = ["runtimeRef", "trainer", "podSpecOverrides"]
    wish = ("launch.kubernetes.queue=team", "launch.kubernetes.topology=required")
    with pytest.raises(RequestError, match=r"topology cannot be asked for.*topology=none"):
        world.submit("launch.kubernetes.target=trainjob", *wish)


def test_a_runtime_stays_while_another_run_uses_it(world: World) -> None:
    first = world.submit("launch.kubernetes.target=trainjob")
    world.submit("launch.kubernetes.target=trainjob", run_id="other-run")
    world.launcher.remove(first, world.ledger)
    assert world.server.names("clustertrainingruntimes") == ["shardyard-efa"]
    assert world.server.names("trainjobs") == ["other-run"]


def add_two_pods(world: World, job: Submission, status: dict[str, Any]) -> None:
    for rank in (1, 0):
        lines = [f"hello {rank}.{i}" for i in range(3)]
        world.server.add_pod(f"p-{rank}", job=job.name, rank=rank, status=status, lines=lines)


def test_logs_of_all_nodes_or_of_one(world: World) -> None:
    job = world.submit()
    add_two_pods(world, job, RUNNING)
    both = [(line.source, line.text) for line in world.launcher.logs(job, node=None, follow=False)]
    assert [source for source, _ in both] == ["node 0"] * 3 + ["node 1"] * 3
    one = [line.text for line in world.launcher.logs(job, node=1, follow=False)]
    assert one == ["hello 1.0", "hello 1.1", "hello 1.2"]


def test_following_goes_on_with_the_pods_of_a_restart_until_the_job_ends(world: World) -> None:
    job = world.submit()
    first = world.server.add_pod("a-0", job=job.name, rank=0, status=RUNNING, lines=["start"])
    follower = world.launcher.logs(job, node=None, follow=True)
    assert next(follower).text == "start"
    again = world.server.add_pod("b-0", job=job.name, rank=0, status=RUNNING, lines=["again"])
    first.ended.set()
    assert next(follower).text == "again"
    again.lines.append("done")
    assert next(follower).text == "done"
    set_conditions(world, CONDITION)
    again.ended.set()
    assert list(follower) == []


def test_the_exit_code_of_a_failed_job_is_that_of_the_pod_that_failed_first(world: World) -> None:
    job = world.submit()
    world.server.add_pod("p-0", job=job.name, rank=0, status=exited(143), lines=[])
    early = exited(2, "2026-01-01T00:09:00Z")
    world.server.add_pod("p-1", job=job.name, rank=1, status=early, lines=[])
    set_conditions(world, {"type": "Failed", "status": "True", "message": "hopeless"})
    status = world.launcher.status(job)
    assert (status.state, status.exit_code) == (JobState.FAILED, 2)


def test_an_image_by_tag_is_warned_of(world: World) -> None:
    rendered = world.launcher.render(request_for("launch.image=x.example/train:latest"))
    assert "by digest" in rendered.warnings[-1]
    assert world.launcher.render(request_for("cluster.nodes=1")).warnings == ()
    assert replace(rendered).target == {"namespace": "default", "context": "test"}


def test_jobs_of_ours_are_found_by_their_label_without_any_ledger(world: World) -> None:
    job = world.submit()
    over = world.submit(submission=2)
    foreign = {"name": "other", "uid": "u", "labels": {}}
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
    world.server.add(f"{path}/other", metadata=foreign)
    done = [{"type": "Completed", "status": "True", "message": "done"}]
    world.server.objects[f"{path}/{over.name}"]["status"] = {"conditions": done}
    (found,) = world.launcher.find(request_for().recipe)
    assert (found.id, found.name, found.run_id) == (job.id, job.name, RUN_ID)
    assert (found.state, found.where) == (JobState.WAITING, "context test, namespace default")
    assert found.end == f"kubectl --context test -n default delete jobsets {job.name}"


SIDE = SideJob(kind="export", arguments={"step": 7})


def side_job(world: World) -> Submission:
    return world.submit(side=SIDE, nodes=1, cluster=None)


def test_a_side_job_needs_no_controller_beside_kubernetes(world: World) -> None:
    world.server.served.clear()
    job = side_job(world)
    assert job.name == world.server.only("jobs")["metadata"]["name"] != RUN_ID
    assert job.details["kind"] == "Job"
    assert world.launcher.status(job).state is JobState.WAITING
    labels = {"batch.kubernetes.io/job-name": job.name}
    for number, code in enumerate((137, 2)):  # lost, and made again
        world.server.add(
            f"/api/v1/namespaces/default/pods/p{number}",
            metadata={"labels": labels, "uid": f"u{number}", "creationTimestamp": f"t{number}"},
            status=exited(code),
        )
    world.server.only("jobs")["status"] = {
        "conditions": [
            {"type": "FailureTarget", "status": "True"},
            {"type": "Failed", "status": "True", "message": "exit code 2"},
        ]
    }
    status = world.launcher.status(job)
    assert (status.state, status.exit_code) == (JobState.FAILED, 2)
    world.launcher.remove(job, world.ledger)
    assert world.server.names("jobs") == world.server.names("configmaps") == []


def test_a_side_job_and_the_training_are_removed_each_by_itself(world: World) -> None:
    training, side = world.submit(), side_job(world)
    world.launcher.remove(side, world.ledger)
    assert world.server.names("jobsets") == [RUN_ID]
    assert len(world.server.names("configmaps")) == 1
    world.launcher.remove(training, world.ledger)
    assert world.server.objects == {}
    assert world.ledger.live() == []


def test_lines_of_a_side_job_say_that_they_are_its(world: World) -> None:
    side_job(world)
    assert {entry.details["side"] for entry in world.ledger.live()} == {SIDE.label}
    world.ledger.path.unlink()
    world.submit()
    assert not any("side" in entry.details for entry in world.ledger.live())
