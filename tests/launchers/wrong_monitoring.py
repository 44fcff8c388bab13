"""Wrong situations of `doctor --install monitoring` and `--install cloudwatch`."""

from tests.launchers.kubernetes.conftest import RECORDER
from tests.launchers.wrong_kubernetes import KubernetesDesk
from tests.launchers.wrong_situations import Situations

SITUATIONS = Situations("doctor --install monitoring, cloudwatch")
row = SITUATIONS.row

_ARN = "arn:aws:eks:us-east-1:123456789012:cluster/training"
_MONITORING = ("observe.prometheus=9400", "--install", "monitoring", "--yes")
_CLOUDWATCH = (f"launch.kubernetes.context={_ARN}", "--install", "cloudwatch", "--yes")
_CLUSTER = """\
name: ours
accelerator: H100 SXM
devices_per_node: 8
network_gbps: 3200
host_memory_gib: 2048
"""


class MonitoringDesk(KubernetesDesk):
    """With helm and eksctl, which do nothing but write down that they were called."""

    def programs(self, *names: str, refusal: str = "") -> None:
        """What is installed on this machine, and what it says."""
        folder = self.folder / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).write_text(RECORDER)
            (folder / name).chmod(0o755)
        self.environ.setenv("PATH", f"{folder}:/usr/bin:/bin")
        self.environ.setenv("CALLS", str(self.folder / "calls"))
        self.environ.setenv("REFUSAL", refusal)

    def in_ledgers(self) -> set[str]:
        """What was installed is listed beside the runs."""
        texts = [path.read_text() for path in self.runs.glob("installed-*.jsonl")]
        names = ("shardyard-run", "shardyard-cluster", "shardyard")
        return {name for name in names if any(f'"{name}"' in text for text in texts)}


@row(
    "word that is nothing to install",
    2,
    says="'grafana' cannot be installed; choose from needed, monitoring, cloudwatch",
    do="Recipe and settings come before --install",
)
def _(desk: MonitoringDesk) -> int:
    return desk.doctor("--install", "grafana", "--dry-run")


@row(
    "monitoring of a scheduler that installs nothing",
    2,
    says="Shardyard cannot install anything on slurm; its administrators",
    do="docs/monitoring.md how runs are watched there",
)
def _(desk: MonitoringDesk) -> int:
    (desk.folder / "ours").mkdir()
    (desk.folder / "ours" / "a.txt").write_text("text\n")
    words = desk._recipe(["data.source=ours"])
    return desk.shardyard("doctor", *words, "--on", "slurm", "--install", "monitoring")


@row(
    "monitoring without a launcher",
    2,
    says="--install and --uninstall need --on and a RECIPE",
    do="",
)
def _(desk: MonitoringDesk) -> int:
    return desk.shardyard("doctor", *desk._recipe([]), "--install", "monitoring")


@row(
    "nodes with devices that nothing tells from others",
    2,
    says="it is not known which nodes have devices, and DCGM's exporter does not start on others",
    do="Give launch.kubernetes.node_selector a label that nodes with devices have",
)
def _(desk: MonitoringDesk) -> int:
    file = desk.folder / "ours.yaml"
    file.write_text(_CLUSTER)
    devices = ("cluster.device=auto", "cluster.devices=auto", f"cluster.file={file}")
    return desk.doctor(*devices, *_MONITORING, "optim.global_batch=16")


@row(
    "helm is not installed",
    2,
    says="helm is not installed here, and the release is applied with it",
    do="run the command that --install --dry-run prints where it is",
)
def _(desk: MonitoringDesk) -> int:
    desk.programs("kubectl")
    return desk.doctor(*_MONITORING)


@row(
    "no right to install a chart",
    4,
    says='User "u" cannot create resource "clusterroles"',
    do="needs an administrator of the cluster",
)
def _(desk: MonitoringDesk) -> int:
    refusal = 'Error: clusterroles is forbidden: User "u" cannot create resource "clusterroles"'
    desk.programs("helm", refusal=refusal)
    return desk.doctor(*_MONITORING)


@row(
    "repository of charts out of reach",
    3,
    says="is not a valid chart repository or cannot be reached",
    do="Check that this machine reaches the cluster and the Internet",
)
def _(desk: MonitoringDesk) -> int:
    refusal = (
        'Error: looks like "https://prometheus-community.github.io/helm-charts" is not a valid '
        "chart repository or cannot be reached: dial tcp: lookup: no such host"
    )
    desk.programs("helm", refusal=refusal)
    return desk.doctor(*_MONITORING)


@row(
    "cluster that does not answer",
    3,
    says="the API server does not answer",
    do="Check the network, the VPN",
)
def _(desk: MonitoringDesk) -> int:
    desk.programs("helm")
    desk.take_down()
    return desk.doctor(*_MONITORING)


@row(
    "chart without its kinds",
    2,
    says="the cluster does not serve PrometheusRule (monitoring.coreos.com/v1)",
    do="then repeat `shardyard doctor RECIPE --on kubernetes --install monitoring`",
)
def _(desk: MonitoringDesk) -> int:
    desk.programs("helm")
    desk.server.served -= {"podmonitors", "prometheusrules"}
    return desk.doctor(*_MONITORING)


@row(
    "no right to make alert rules",
    4,
    says='User "u" cannot create resource "prometheusrules"',
    do="Have an administrator",
)
def _(desk: MonitoringDesk) -> int:
    desk.programs("helm")
    refusal = 'prometheusrules is forbidden: User "u" cannot create resource "prometheusrules"'
    desk.server.refusals["POST", "/prometheusrules"] = (403, refusal)
    return desk.doctor(*_MONITORING)


@row(
    "context that does not say which cluster of EKS it is",
    2,
    says="launch.kubernetes.context='test' does not say which EKS cluster it is",
    do="Name the context as `aws eks update-kubeconfig --name NAME` does",
)
def _(desk: MonitoringDesk) -> int:
    return desk.doctor("--install", "cloudwatch", "--dry-run")


@row(
    "no right to add an add-on",
    4,
    says="is not authorized to perform: eks:CreateAddon",
    do="needs an administrator of the cluster",
)
def _(desk: MonitoringDesk) -> int:
    desk.programs(
        "eksctl", refusal="AccessDeniedException: u is not authorized to perform: eks:CreateAddon"
    )
    desk.kubeconfig.write_text(desk.kubeconfig.read_text().replace("name: test", f"name: {_ARN}"))
    return desk.doctor(*_CLOUDWATCH)
