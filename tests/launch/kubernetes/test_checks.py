"""What the doctor asks of a cluster, before it costs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.launch.doctor import Finding
from shardyard.launch.kubernetes.launcher import KubernetesLauncher
from tests.launch.kubernetes.api_server import ApiServer, running_server, write_kubeconfig
from tests.launch.kubernetes.requests import request_for

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

ZONE = "topology.kubernetes.io/zone"
IN_DEFAULT = "/api/v1/namespaces/default"


class Cluster:
    """A server with all that a run needs, and the doctor's findings."""

    def __init__(self, server: ApiServer, kubeconfig: Path) -> None:
        self.server = server
        self.launcher = KubernetesLauncher(kubeconfig=kubeconfig)
        for index in range(2):
            self.add_node(f"n{index}")
        for claim in ("runs", "data"):
            self.add_claim(claim)
        volume = {
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["a"]}]}
                    ]
                }
            }
        }
        server.add("/api/v1/persistentvolumes/pv", spec=volume)

    def add_node(self, name: str, *, zone: str = "a", gpus: int = 8, efa: int = 32) -> None:
        labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", ZONE: zone}
        allocatable = {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)}
        self.server.add(
            f"/api/v1/nodes/{name}",
            metadata={"labels": labels},
            status={"allocatable": allocatable},
        )

    def add_claim(self, name: str, **spec: Any) -> None:
        spec = {"accessModes": ["ReadWriteMany"], "volumeName": "pv", **spec}
        self.server.add(f"{IN_DEFAULT}/persistentvolumeclaims/{name}", spec=spec)

    def findings(self, *overrides: str) -> list[Finding]:
        return self.launcher.checks(request_for(*overrides))

    def only_trouble(self, *overrides: str) -> Finding:
        (found,) = [one for one in self.findings(*overrides) if one.verdict != "ok"]
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_server(tmp_path) as (server, kubeconfig):
        yield Cluster(server, kubeconfig)


def test_a_good_cluster_has_no_trouble_and_is_not_changed(cluster: Cluster) -> None:
    before = set(cluster.server.objects)
    cluster.server.add(f"{IN_DEFAULT}/secrets/hf", data={"token": "never read"})
    findings = cluster.findings("secrets.HF_TOKEN=k8s:hf/token")
    assert {one.verdict for one in findings} == {"ok"}
    assert {one.name for one in findings} >= {
        "JobSet", "rights", "nodes", "nvidia.com/gpu", "vpc.amazonaws.com/efa", "claim runs",
        "secrets.HF_TOKEN",
    }  # fmt: skip
    assert set(cluster.server.objects) == {*before, f"{IN_DEFAULT}/secrets/hf"}


def test_a_missing_controller_comes_with_its_command(cluster: Cluster) -> None:
    cluster.server.served = set()
    found = cluster.only_trouble()
    assert found.verdict == "problem" and "serves no JobSet" in found.what
    assert "v0.12.0/manifests.yaml" in found.mend


def test_a_right_that_is_lacking_is_named(cluster: Cluster) -> None:
    cluster.server.forbidden = {"configmaps"}
    found = cluster.only_trouble()
    assert found.what.startswith("you may not create configmaps, get configmaps, ")


def test_a_queue_that_is_not_there_would_keep_the_job_waiting(cluster: Cluster) -> None:
    found = cluster.only_trouble("launch.kubernetes.queue=team")
    assert "no such local queue" in found.what and "get localqueues" in found.mend
    cluster.server.add("/apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/team")
    assert {one.verdict for one in cluster.findings("launch.kubernetes.queue=team")} == {"ok"}


def test_too_few_nodes_are_a_warning_as_an_autoscaler_may_add_some(cluster: Cluster) -> None:
    found = cluster.only_trouble("cluster.nodes=5")
    assert found.verdict == "warning"
    assert found.what == "the cluster has 2 nodes of p5.48xlarge, and the run wants 5"


def test_nodes_that_offer_less_than_the_catalogue_says_lack_a_plugin(cluster: Cluster) -> None:
    for name in ("n0", "n1"):
        cluster.add_node(name, efa=4)
    found = cluster.only_trouble()
    assert (found.name, found.verdict) == ("vpc.amazonaws.com/efa", "problem")
    assert "offers 4, and a pod asks for 32" in found.what
    assert "EFA device plugin 0.5.30" in found.mend


def test_a_claim_that_is_not_there(cluster: Cluster) -> None:
    del cluster.server.objects[f"{IN_DEFAULT}/persistentvolumeclaims/runs"]
    found = cluster.only_trouble()
    assert found.name == "claim runs" and "no such claim" in found.what


def test_a_claim_that_one_node_alone_can_mount(cluster: Cluster) -> None:
    cluster.add_claim("runs", accessModes=["ReadWriteOnce"])
    assert "one node alone can mount it" in cluster.only_trouble().what


def test_a_claim_in_another_zone_than_the_nodes(cluster: Cluster) -> None:
    for name in ("n0", "n1"):
        cluster.add_node(name, zone="b")
    troubles = [one for one in cluster.findings() if one.verdict != "ok"]
    assert {one.name for one in troubles} == {"claim runs", "claim data"}
    assert "its volume is in a, and the nodes are in b" in troubles[0].what


def test_a_claim_that_is_not_bound_yet(cluster: Cluster) -> None:
    cluster.add_claim("runs", volumeName=None)
    assert cluster.only_trouble().what == "it is not bound yet"


def test_a_missing_secret_comes_with_the_command_that_makes_it(cluster: Cluster) -> None:
    found = cluster.only_trouble("secrets.HF_TOKEN=k8s:hf/token")
    assert "no Secret hf" in found.what
    assert found.mend.endswith("create secret generic hf --from-file=token=/dev/stdin")


def test_nodes_that_may_not_be_listed_are_a_warning(cluster: Cluster) -> None:
    cluster.server.refusals["GET", "/nodes"] = (403, "nodes is forbidden")
    found = cluster.only_trouble()
    assert (found.name, found.verdict) == ("nodes", "warning")


def test_expired_credentials_are_one_problem(cluster: Cluster) -> None:
    cluster.server.refusals["GET", ""] = (401, "Unauthorized")
    cluster.server.refusals["POST", ""] = (401, "Unauthorized")
    findings = cluster.findings()
    assert findings[0].verdict == "problem" and "Log in again" in findings[0].what


def test_a_cluster_that_is_down_is_one_problem(tmp_path: Path) -> None:
    with running_server(tmp_path) as (server, _):
        port = server.port
    launcher = KubernetesLauncher(kubeconfig=write_kubeconfig(tmp_path, port))
    (found,) = launcher.checks(request_for())
    assert "does not answer" in found.what


def test_a_context_that_is_not_given_is_a_problem(cluster: Cluster) -> None:
    (found,) = cluster.findings("launch.kubernetes.context=null")
    assert found.name == "context" and "is not given" in found.what
