"""What watches runs is shown, put into a cluster and removed again, through the command line."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.control.install import Target, missing_on
from shardyard.errors import RequestError
from shardyard.launchers.base import InstallablePart, LaunchRequest
from shardyard.launchers.kubernetes.monitoring import PORT, render_objects
from shardyard.launchers.kubernetes.objects import render_objects as render_job
from shardyard.launchers.kubernetes.prerequisites import eks_cluster
from shardyard.launchers.ledger import Ledger
from shardyard.launchers.monitoring.alerts import counters
from tests.launchers.kubernetes.api_server import write_kubeconfig
from tests.launchers.kubernetes.conftest import Site, rented
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.kubernetes.schemas import check_object, pod_of

pytest.importorskip("kubernetes", reason="the Kubernetes client is an extra")

MONITORED = (*rented("observe.prometheus=9400"), "--install", "monitoring")
ARN = "arn:aws:eks:us-east-1:123456789012:cluster/training"
OPERATOR = "quay.io/prometheus-operator/prometheus-operator:v0.88.0"
EXPORTER = "nvcr.io/nvidia/k8s/dcgm-exporter:4.5.2-4.8.1-distroless"


def values_of(command: str) -> dict[str, Any]:
    """Of a helm command."""
    words = shlex.split(command)
    given = [words[place + 1] for place, word in enumerate(words) if word == "--set-json"]
    return {word.partition("=")[0]: json.loads(word.partition("=")[2]) for word in given}


def add_workload(site: Site, plural: str, image: str) -> None:
    spec = {"template": {"spec": {"containers": [{"image": image}]}}}
    site.server.add(f"/apis/apps/v1/namespaces/monitoring/{plural}/theirs", spec=spec)


def test_all_of_it_is_shown_without_a_cluster(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.kubeconfig = write_kubeconfig(site.runs.parent, port=1)
    assert site.doctor(*MONITORED, "--dry-run") == 0
    said = capsys.readouterr()
    stack, exporter, rest = said.out.split("\n", 2)
    assert stack.startswith(
        "helm upgrade --install kube-prometheus-stack kube-prometheus-stack --repo "
        "https://prometheus-community.github.io/helm-charts --version 81.4.5 "
    )
    assert exporter.startswith("helm upgrade --install dcgm-exporter dcgm-exporter --repo ")
    kinds = [item["kind"] for item in yaml.safe_load_all(rest)]
    assert kinds == ["ConfigMap", "ConfigMap", "PrometheusRule", "PodMonitor"]
    assert "what the target has already is unknown" in said.err
    assert site.calls() == [] and not site.runs.exists()


def test_no_password_stands_in_what_is_run(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.doctor(*MONITORED, "--dry-run") == 0
    stack, exporter, _ = capsys.readouterr().out.split("\n", 2)
    values = values_of(stack)
    assert values["grafana"] == {"adminPassword": ""}  # one is drawn in the cluster
    selectors = values["prometheus"]["prometheusSpec"]
    assert set(selectors.values()) == {False} and len(selectors) == 3
    assert values_of(exporter) == {
        "customMetrics": counters(),
        "nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }


@pytest.mark.heavy
def test_it_is_installed_written_down_and_removed_the_last_first(site: Site) -> None:
    assert site.doctor(*MONITORED, "--yes") == 0
    assert [call.split()[3] for call in site.calls()] == ["kube-prometheus-stack", "dcgm-exporter"]
    assert site.server.names("configmaps") == ["shardyard-run", "shardyard-cluster"]
    assert site.server.names("podmonitors") == site.server.names("prometheusrules") == ["shardyard"]
    assert site.ledger()[1::2] == [
        "created release Prometheus and Grafana 81.4.5",
        "created release DCGM exporter 4.8.1",
        "created ConfigMap shardyard-run",
        "created ConfigMap shardyard-cluster",
        "created PrometheusRule shardyard",
        "created PodMonitor shardyard",
    ]
    add_workload(site, "deployments", OPERATOR)
    add_workload(site, "daemonsets", EXPORTER)
    assert site.doctor(*MONITORED, "--yes") == 0
    assert len(site.calls()) == 2, "all of it is there"
    assert site.doctor(*rented(), "--uninstall", "--yes") == 0
    assert [call.split()[:3] for call in site.calls()[2:]] == [
        ["helm", "uninstall", "dcgm-exporter"],
        ["helm", "uninstall", "kube-prometheus-stack"],
    ]
    assert site.server.names("configmaps") == site.server.names("podmonitors") == []


def test_a_prometheus_that_is_there_gets_none_beside_it(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    add_workload(site, "deployments", OPERATOR)
    add_workload(site, "daemonsets", EXPORTER)
    assert site.doctor(*MONITORED, "--dry-run", "--json") == 0
    (missing,) = json.loads(capsys.readouterr().out)["missing"]
    assert missing["name"] == "monitor, alert rules and dashboards"


def test_the_monitor_of_another_namespace_stands_for_all(site: Site) -> None:
    add_workload(site, "deployments", OPERATOR)
    add_workload(site, "daemonsets", EXPORTER)
    path = "/apis/monitoring.coreos.com/v1/namespaces/team/podmonitors/shardyard"
    site.server.add(path)
    assert site.doctor(*MONITORED, "--yes") == 0
    assert not (site.runs / "installed-kubernetes-test.jsonl").exists()


def test_what_was_begun_is_finished(site: Site) -> None:
    add_workload(site, "deployments", OPERATOR)
    add_workload(site, "daemonsets", EXPORTER)
    site.server.add("/api/v1/namespaces/default/configmaps/shardyard-run")
    assert site.doctor(*MONITORED, "--yes") == 0
    assert site.ledger()[1::2] == [
        "created ConfigMap shardyard-cluster",
        "created PrometheusRule shardyard",
        "created PodMonitor shardyard",
    ]


def test_objects_that_went_with_their_kind_are_struck(site: Site) -> None:
    add_workload(site, "deployments", OPERATOR)
    add_workload(site, "daemonsets", EXPORTER)
    assert site.doctor(*MONITORED, "--yes") == 0
    for plural in ("podmonitors", "prometheusrules"):
        site.server.served.discard(plural)
    assert site.doctor("--uninstall", "--yes") == 0
    assert site.server.names("configmaps") == []


def test_nodes_without_nvidia_devices_get_no_exporter_and_a_run_without_metrics_is_told(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.doctor("--install", "monitoring", "--dry-run") == 0
    said = capsys.readouterr()
    assert "dcgm" not in said.out.partition("apiVersion")[0]
    assert "DCGM's exporter is left out" in said.err
    assert "warning: observe.prometheus is not set" in said.err


@pytest.mark.heavy
def test_cloudwatchs_add_on_is_eks_to_install_and_to_remove(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.kubeconfig.write_text(site.kubeconfig.read_text().replace("name: test", f"name: {ARN}"))
    (site.programs / "eksctl").symlink_to(site.programs / "helm")
    words = (f"launch.kubernetes.context={ARN}",)
    assert site.doctor(*words, "--install", "cloudwatch", "--yes") == 0
    where = "--cluster training --region us-east-1 --name amazon-cloudwatch-observability"
    assert site.calls() == [
        f"eksctl create addon {where} --version v5.3.1-eksbuild.1 "
        "--auto-apply-pod-identity-associations --wait"
    ]
    # Removed behind our back: eksctl fails, and that is what was wanted.
    monkeypatch.setenv("REFUSAL", "could not find addon or associated IAM stack(s) to delete")
    assert site.doctor(*words, "--uninstall", "--yes") == 0
    assert site.calls()[1:] == [f"eksctl delete addon {where}"]
    assert site.doctor(*words, "--uninstall", "--yes") == 0
    assert len(site.calls()) == 2


@pytest.mark.parametrize(
    ("context", "cluster"),
    [
        (ARN, ("us-east-1", "training")),
        ("arn:aws-cn:eks:cn-north-1:1:cluster/a_b", ("cn-north-1", "a_b")),
        ("me@example.com@training.eu-west-1.eksctl.io", ("eu-west-1", "training")),
    ],
)
def test_a_context_says_which_cluster_of_eks_it_is(context: str, cluster: tuple[str, str]) -> None:
    assert eks_cluster(context) == cluster


@pytest.mark.parametrize("context", ["test", "minikube", f"{ARN}/x", "training.eksctl.io"])
def test_another_context_is_refused(context: str) -> None:
    with pytest.raises(RequestError, match=r"does not say which EKS cluster.*update-kubeconfig"):
        eks_cluster(context)


@pytest.mark.parametrize("place", range(4))
def test_an_object_is_accepted_by_its_schema(place: int) -> None:
    check_object(render_objects("team")[place])


def test_the_monitor_finds_the_pods_of_a_run_by_what_they_have() -> None:
    pod = pod_of(render_job(request_for("observe.prometheus=9400")))
    (*_, monitor) = render_objects("team")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert [port["name"] for port in container["ports"]] == [PORT]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == PORT


def test_grafana_takes_dashboards_by_its_sidecars_label() -> None:
    for board in render_objects("team")[:2]:
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = board["data"].items()
        assert Path(name).suffix == ".json" and json.loads(text)["uid"] == Path(name).stem
        assert len(text.encode()) < 1_000_000


def test_a_launcher_that_installs_other_things_says_where_to_read(tmp_path: Path) -> None:
    class Plain:
        def target_name(self, request: LaunchRequest) -> str:
            return f"the machines of {request.run_id}"

        def missing(self, request: LaunchRequest) -> list[InstallablePart]:
            raise AssertionError(request)

        needed = missing

        def install(self, request: LaunchRequest, part: InstallablePart, ledger: Ledger) -> None:
            raise AssertionError(request, part, ledger)

        def uninstall(self, request: LaunchRequest, ledger: Ledger) -> list[str]:
            raise AssertionError(request, ledger)

    target = Target(launcher=Plain(), request=request_for(), ledger=Ledger(tmp_path / "ledger"))
    with pytest.raises(
        RequestError, match=r"installs no monitoring on the machines.*docs/monitoring\.md"
    ):
        missing_on(target, "monitoring")
