"""Requests of pods against what nodes can allocate."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.cluster.spec import SYSTEM_USD_PER_HOUR
from shardyard.config.schema.launch import Side
from shardyard.doctor.finding import Finding
from shardyard.errors import RequestError
from shardyard.launchers.base import SideJob
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.kubernetes.node_checks import check_nodes, check_side_nodes
from shardyard.launchers.kubernetes.state import status_of
from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.kubernetes.api_server import ApiServer, running_server
from tests.launchers.kubernetes.requests import request_for

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

# vCPUs, GiB and most pods of a type. Sources: EC2's instance types; eni-max-pods.txt of
# awslabs/amazon-eks-ami.
SYSTEM_NODES = {"c5.2xlarge": (8, 16, 58), "m5.8xlarge": (32, 128, 234)}


def allocatable(instance: str) -> dict[str, str]:
    """What an EKS node of a type can allocate.

    Sources: VM_MEMORY_OVERHEAD_PERCENT of Karpenter (7.5 %: hypervisor and kernel); bootstrap.sh
    of awslabs/amazon-eks-ami (255 + 11 MiB a pod for the kubelet; 110 millicores at most).
    """
    vcpus, gib, pods = SYSTEM_NODES[instance]
    memory_mib = int(gib * 1024 * 0.925) - (255 + 11 * pods) - 100
    return {"cpu": f"{vcpus * 1000 - 110}m", "memory": f"{memory_mib}Mi", "pods": str(pods)}


class World:
    """A server with nodes, a launcher that knows it, a ledger."""

    def __init__(self, server: ApiServer, kubeconfig: Path, folder: Path) -> None:
        self.server = server
        self.launcher = KubernetesLauncher(kubeconfig=kubeconfig)
        self.ledger = Ledger(folder / "ledger.jsonl")

    def node(self, name: str, kind: str, offers: dict[str, str], **spec: Any) -> None:
        labels = {"node.kubernetes.io/instance-type": kind}
        path, status = f"/api/v1/nodes/{name}", {"allocatable": offers}
        self.server.add(path, metadata={"labels": labels}, status=status, spec=spec)

    def submit(self, *overrides: str, **changes: Any) -> Submission:
        rendered = self.launcher.render(request_for(*overrides, **changes))
        return self.launcher.submit(rendered, self.ledger)

    def prepare(self, *overrides: str) -> Submission:
        return self.submit(*overrides, side=SideJob(kind="prepare", arguments={}))

    def side_nodes(self, *overrides: str) -> Finding:
        request = request_for(*overrides)
        (found,) = check_side_nodes(request, self.launcher._api_of(request))
        return found

    def nodes(self, *overrides: str) -> dict[str, Finding]:
        request = request_for(*overrides)
        found = check_nodes(request, self.launcher._api_of(request))
        return {one.name: one for one in found}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_server(tmp_path) as (server, kubeconfig):
        yield World(server, kubeconfig, tmp_path)


@pytest.mark.parametrize("instance", SYSTEM_USD_PER_HOUR)
def test_a_side_job_fits_on_each_node_that_cluster_create_makes(
    world: World, caplog: pytest.LogCaptureFixture, instance: str
) -> None:
    world.node("system", instance, allocatable(instance))
    assert world.side_nodes().verdict == "ok"
    world.prepare()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert Side().memory_gib == 12


def test_a_side_job_that_no_node_can_hold_is_reported_before_and_at_its_submission(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.node("system", "c5.2xlarge", allocatable("c5.2xlarge"))
    found = world.side_nodes("launch.side.memory_gib=16")
    assert found.verdict == "warning" and found.mend.endswith("launch.side.cpus=2")
    assert found.what == (
        "none of 1 nodes can hold the pod: system (c5.2xlarge) would have to give 16,384 MiB of "
        "memory, of which it can allocate 14,162 MiB"
    )
    world.prepare("launch.side.memory_gib=16")  # an autoscaler may add a larger one
    assert "16,384 MiB of memory" in caplog.text
    assert world.server.names("jobs")


def test_cores_are_compared_too_and_all_that_lacks_is_named(world: World) -> None:
    world.node("system", "c5.2xlarge", allocatable("c5.2xlarge"))
    found = world.side_nodes("launch.side.memory_gib=15", "launch.side.cpus=8")
    assert "8 of cpu, of which it can allocate 7890m and 15,360 MiB of memory" in found.what


@pytest.mark.parametrize(
    "spec",
    [
        {"unschedulable": True},
        {"taints": [{"key": "only", "value": "others", "effect": "NoSchedule"}]},
    ],
)
def test_nodes_that_pods_may_not_use_do_not_count(world: World, spec: dict[str, Any]) -> None:
    world.node("system", "c5.2xlarge", allocatable("c5.2xlarge"))
    world.node("large", "m5.8xlarge", allocatable("m5.8xlarge"), **spec)
    assert "none of 1 nodes" in world.side_nodes("launch.side.memory_gib=16").what


def test_a_taint_that_pods_tolerate_lets_a_node_count(world: World) -> None:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    world.node("gpus", "p5.48xlarge", {"cpu": "191", "memory": "1938410Mi"}, taints=[taint])
    assert world.side_nodes("launch.side.memory_gib=16").verdict == "ok"


OFFERED = {
    "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi",
    "cpu": "191450m", "memory": "1938410Mi",
}  # fmt: skip


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_a_training_that_no_node_of_its_type_could_hold_is_not_submitted(
    world: World, target: str
) -> None:
    words = f"launch.kubernetes.target={target}"
    world.node("n0", "p5.48xlarge", {**OFFERED, "hugepages-2Mi": "0"})
    with pytest.raises(RequestError, match=r"5,120 MiB of hugepages-2Mi.* can allocate 0 MiB"):
        world.submit(words)
    assert not world.server.names("configmaps")
    assert world.nodes(words)["requests"].verdict == "problem"
    world.server.objects.clear()
    world.node("n0", "p5.48xlarge", OFFERED)
    assert world.nodes(words)["requests"].verdict == "ok"
    world.submit(words)


def test_a_cluster_without_such_nodes_yet_gets_the_job(world: World) -> None:
    world.node("system", "c5.2xlarge", allocatable("c5.2xlarge"))
    world.submit()


def test_without_an_instance_type_a_larger_node_may_still_join(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.node("small", "t3.micro", {"cpu": "1", "memory": "512Mi"})
    world.submit("cluster.instance=null", "cluster.device=cpu", "cluster.devices=2")
    assert "2 of cpu, of which it can allocate 1" in caplog.text


def test_where_nodes_may_not_be_listed_the_job_is_submitted(world: World) -> None:
    world.server.refusals["GET", "/nodes"] = (403, "nodes is forbidden")
    world.submit()


def test_a_job_without_pods_says_what_keeps_its_controller(world: World) -> None:
    job = world.prepare()
    words = "pods is forbidden: exceeded quota: team, requested: pods=1, used: pods=9, limited: 9"
    path = "/api/v1/namespaces/default/events/one"
    world.server.add(path, message=words, type="Warning", involvedObject={"uid": job.id})
    assert world.launcher.status(job).reason == f"its pods are not made yet: {words}"
    world.server.refusals["GET", "/events"] = (403, "events is forbidden")
    assert world.launcher.status(job).reason == "its pods are not made yet"


def test_a_pod_that_found_no_node_is_unplaced_and_one_that_pulls_its_image_is_not() -> None:
    job = {"metadata": {"name": "j"}}
    no_room = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    waiting = {"metadata": {"name": "p"}, "status": {"conditions": [no_room]}}
    status = status_of("Job", job, [waiting], cancelled=False)
    assert status.is_unplaced and status.reason == "0/2 nodes are available"
    pulling = {"metadata": {"name": "p"}, "status": {"phase": "Pending"}}
    assert not status_of("Job", job, [pulling], cancelled=False).is_unplaced
