"""What the doctor asks of a cluster, before it costs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.doctor.finding import Finding
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from tests.image.registries import answering
from tests.launchers.kubernetes.api_server import ApiServer, running_server, write_kubeconfig
from tests.launchers.kubernetes.requests import request_for

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

ZONE = "topology.kubernetes.io/zone"
IN_DEFAULT = "/api/v1/namespaces/default"


class Cluster:
    """A server with all that a run needs, and the doctor's findings."""

    def __init__(self, server: ApiServer, kubeconfig: Path, registry: str) -> None:
        self.server = server
        self.image = f"{registry}/it@sha256:{'0' * 64}"
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
        server.add(f"{IN_DEFAULT}/serviceaccounts/default")

    def add_node(self, name: str, *, zone: str = "a", gpus: int = 8, efa: int = 32) -> None:
        labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", ZONE: zone}
        allocatable = {
            "nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa),
            "cpu": "191450m", "memory": "1938410Mi", "hugepages-2Mi": "5120Mi",
        }  # fmt: skip
        self.server.add(
            f"/api/v1/nodes/{name}",
            metadata={"labels": labels},
            status={"allocatable": allocatable},
        )

    def add_claim(self, name: str, **spec: Any) -> None:
        spec = {"accessModes": ["ReadWriteMany"], "volumeName": "pv", **spec}
        self.server.add(f"{IN_DEFAULT}/persistentvolumeclaims/{name}", spec=spec)

    def findings(self, *overrides: str) -> list[Finding]:
        return self.launcher.checks(request_for(f"launch.image={self.image}", *overrides))

    def only_trouble(self, *overrides: str) -> Finding:
        (found,) = [one for one in self.findings(*overrides) if one.verdict != "ok"]
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_server(tmp_path) as (server, kubeconfig), answering(200, {}) as registry:
        yield Cluster(server, kubeconfig, registry)


def test_a_good_cluster_has_no_trouble_and_is_not_changed(cluster: Cluster) -> None:
    before = set(cluster.server.objects)
    cluster.server.add(f"{IN_DEFAULT}/secrets/hf", data={"token": "never read"})
    findings = cluster.findings("secrets.HF_TOKEN=k8s:hf/token")
    assert {one.verdict for one in findings} == {"ok"}
    assert {one.name for one in findings} >= {
        "credentials", "Kubernetes", "namespace", "JobSet", "rights", "quota", "nodes",
        "nvidia.com/gpu", "vpc.amazonaws.com/efa", "image", "claim runs", "secrets.HF_TOKEN",
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
    assert [one.verdict for one in cluster.findings() if one.name == "rights"] == ["problem"]


def test_a_right_that_only_side_jobs_need_is_a_warning(cluster: Cluster) -> None:
    cluster.server.forbidden = {"jobs"}
    found = cluster.only_trouble()
    assert (found.verdict, found.name) == ("warning", "side jobs")
    assert found.what.startswith("you may not create jobs, get jobs, delete jobs in the namespace")
    assert "Training needs it not; prepare --on, export" in found.mend
    assert [one.verdict for one in cluster.findings() if one.name == "rights"] == ["ok"]


def test_without_exec_training_is_possible_and_fetch_is_not(cluster: Cluster) -> None:
    cluster.server.forbidden = {"pods/exec"}
    found = cluster.only_trouble()
    assert (found.verdict, found.what) == (
        "warning", "you may not get pods/exec in the namespace default"
    )  # fmt: skip
    assert "shardyard fetch" in found.mend


def test_a_queue_that_is_not_there_would_keep_the_job_waiting(cluster: Cluster) -> None:
    found = cluster.only_trouble("launch.kubernetes.queue=team")
    assert "no such local queue" in found.what and "get localqueues" in found.mend
    cluster.server.add("/apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/team")
    assert {one.verdict for one in cluster.findings("launch.kubernetes.queue=team")} == {"ok"}


def test_too_few_nodes_are_a_warning_as_an_autoscaler_may_add_some(cluster: Cluster) -> None:
    found = cluster.only_trouble("cluster.nodes=5")
    assert found.verdict == "warning"
    assert found.what == "the cluster has 2 nodes of p5.48xlarge, and the run wants 5"


def test_a_claim_that_one_node_alone_can_mount(cluster: Cluster) -> None:
    cluster.add_claim("runs", accessModes=["ReadWriteOnce"])
    assert "one node can mount it" in cluster.only_trouble().what


def test_a_claim_that_is_not_bound_yet(cluster: Cluster) -> None:
    cluster.add_claim("runs", volumeName=None)
    assert cluster.only_trouble().what == "it is not bound yet"


def test_nodes_that_may_not_be_listed_are_a_warning(cluster: Cluster) -> None:
    cluster.server.refusals["GET", "/nodes"] = (403, "nodes is forbidden")
    found = [one for one in cluster.findings() if one.verdict != "ok"]
    assert [(one.name, one.verdict) for one in found] == [
        ("nodes", "warning"), ("side nodes", "warning")
    ]  # fmt: skip


def test_expired_credentials_are_one_problem(cluster: Cluster) -> None:
    cluster.server.refusals["GET", ""] = (401, "Unauthorized")
    cluster.server.refusals["POST", ""] = (401, "Unauthorized")
    (found,) = cluster.findings()
    assert found.verdict == "problem" and "Log in again" in found.what


def test_it_says_who_one_is_and_of_which_version_the_cluster_is(cluster: Cluster) -> None:
    found = {one.name: one.what for one in cluster.findings()}
    assert found["credentials"] == "context test is alice"
    assert found["Kubernetes"] == "1.33; launch.kubernetes.target=jobset needs 1.28"
    cluster.server.version = {"major": "1", "minor": "30"}
    old = cluster.only_trouble("launch.kubernetes.target=trainjob")
    assert old.what == (
        "the API server is of 1.30, and launch.kubernetes.target=trainjob needs 1.31"
    )


def test_a_namespace_that_is_not_there(cluster: Cluster) -> None:
    cluster.server.namespaces.clear()
    found = cluster.only_trouble()
    assert found.mend == "kubectl --context test create namespace default"


def test_a_controller_of_another_version_is_not_called_missing(cluster: Cluster) -> None:
    cluster.server.other_versions["jobset.x-k8s.io"] = "v1alpha1"
    found = cluster.only_trouble()
    assert "serves JobSet as jobset.x-k8s.io/v1alpha1, not as jobset.x-k8s.io/v1" in found.what
    assert "Others may use it" in found.mend


def test_a_trainjob_with_fields_of_another_version(cluster: Cluster) -> None:
    cluster.server.trainjob_fields = ["runtimeRef"]
    found = cluster.only_trouble("launch.kubernetes.target=trainjob")
    assert "neither runtimePatches" in found.what


@pytest.mark.parametrize(
    ("hard", "used", "verdict", "words"),
    [
        ({"requests.nvidia.com/gpu": "8"}, {}, "problem", "asks 16 of requests.nvidia.com/gpu; 8"),
        (
            {"requests.nvidia.com/gpu": "20"},
            {"requests.nvidia.com/gpu": "8"},
            "warning",
            "20 are allowed, of which 8 are in use",
        ),
        ({"requests.memory": "2Ti", "pods": "9"}, {}, "problem", "of requests.memory; 2Ti are"),
        ({"count/jobsets.jobset.x-k8s.io": "0"}, {}, "problem", "asks 1 of count/jobsets.jobset"),
        ({"limits.memory": "9Ti"}, {}, "warning", "our pods have no such limit"),
    ],
)
def test_a_quota_without_room(
    cluster: Cluster, *, hard: dict[str, str], used: dict[str, str], verdict: str, words: str
) -> None:
    status = {"hard": hard, "used": used}
    cluster.server.add(f"{IN_DEFAULT}/resourcequotas/team", spec={"hard": hard}, status=status)
    found = cluster.only_trouble()
    assert (found.name, found.verdict) == ("quota", verdict)
    assert words in found.what


def test_a_quota_with_room_is_good(cluster: Cluster) -> None:
    hard = {"requests.nvidia.com/gpu": "16", "requests.cpu": "400", "requests.memory": "1e13"}
    cluster.server.add(f"{IN_DEFAULT}/resourcequotas/team", spec={"hard": hard})
    assert {one.verdict for one in cluster.findings()} == {"ok"}


def test_an_image_by_tag_a_missing_pull_secret_and_other_processors(cluster: Cluster) -> None:
    account = f"{IN_DEFAULT}/serviceaccounts/default"
    cluster.server.add(account, imagePullSecrets=[{"name": "registry"}])
    for node in ("n0", "n1"):
        labels = cluster.server.objects[f"/api/v1/nodes/{node}"]["metadata"]["labels"]
        labels["kubernetes.io/arch"] = "arm64"
    tag = f"launch.image={cluster.image.partition('@')[0]}:1"
    troubles = [one for one in cluster.findings(tag) if one.verdict != "ok"]
    assert [(one.name, one.verdict) for one in troubles] == [
        ("image", "warning"), ("pull secret", "problem"), ("architecture", "warning"),
    ]  # fmt: skip
    assert "Secret registry" in troubles[1].what and "arm64" in troubles[2].what


def test_an_image_that_a_password_opens_is_right_with_a_pull_secret(cluster: Cluster) -> None:
    with answering(403, {}) as closed:
        image = f"launch.image={closed}/it@sha256:{'0' * 64}"
        found = cluster.only_trouble(image)
        assert (found.name, found.verdict) == ("image", "warning")
        assert "only to those with a password" in found.what
        account = f"{IN_DEFAULT}/serviceaccounts/default"
        cluster.server.add(account, imagePullSecrets=[{"name": "registry"}])
        assert cluster.only_trouble(image).name == "pull secret"


def test_an_image_that_is_not_there_is_a_problem(cluster: Cluster) -> None:
    with answering(404, {}) as empty:
        found = cluster.only_trouble(f"launch.image={empty}/it@sha256:{'0' * 64}")
    assert (found.name, found.verdict) == ("image", "problem")


def test_a_service_account_that_is_not_there(cluster: Cluster) -> None:
    found = cluster.only_trouble("launch.kubernetes.service_account=trainer")
    assert found.verdict == "problem" and "create serviceaccount trainer" in found.mend


def test_a_claim_whose_driver_is_not_installed(cluster: Cluster) -> None:
    cluster.server.objects["/api/v1/persistentvolumes/pv"]["spec"]["csi"] = {
        "driver": "fsx.csi.aws.com"
    }
    found = cluster.only_trouble()
    assert found.name == "FSx for Lustre driver" and "ref=v1.9.0" in found.mend
    cluster.server.add("/apis/storage.k8s.io/v1/csidrivers/fsx.csi.aws.com")
    assert {one.verdict for one in cluster.findings()} == {"ok"}


def test_an_etcd_that_is_not_there_and_one_that_is_elsewhere(cluster: Cluster) -> None:
    words = "launch.kubernetes.target=pytorchjob"
    found = cluster.only_trouble(words, "launch.kubernetes.etcd=etcd:2379")
    assert found.what.endswith("service etcd does not exist") and "--install" in found.mend
    away = cluster.findings(words, "launch.kubernetes.etcd=etcd.infra:2379")
    assert {one.verdict for one in away} == {"ok"}


def test_an_etcd_without_its_certificate_names_both_ways_out(cluster: Cluster) -> None:
    words = ("launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=etcd:2379")
    cluster.server.add("/api/v1/namespaces/default/services/etcd")
    found = cluster.only_trouble(*words)
    assert found.what.startswith("the namespace default has no Secret etcd-tls")
    assert "etcd_secret=null" in found.mend and "--uninstall, then --install" in found.mend
    cluster.server.add("/api/v1/namespaces/default/secrets/etcd-tls")
    assert {one.verdict for one in cluster.findings(*words)} == {"ok"}


def test_a_cluster_that_is_down_is_one_problem(tmp_path: Path) -> None:
    with running_server(tmp_path) as (server, _):
        port = server.port
    launcher = KubernetesLauncher(kubeconfig=write_kubeconfig(tmp_path, port))
    (found,) = launcher.checks(request_for())
    assert "does not answer" in found.what


def test_a_context_that_is_not_given_is_a_problem(cluster: Cluster) -> None:
    (found,) = cluster.findings("launch.kubernetes.context=null")
    assert found.name == "context" and "is not given" in found.what
