"""Parts that a cluster needs before each target runs, with their versions and installation.

One row a part. kubectl or helm applies a part that its project releases from the release's
address. No project's digest of these files is known here, so none is checked: the trust is
in HTTPS and the tag.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardyard.errors import RequestError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.resources import EFA, demand_of

# The name of a context tells the EKS cluster: `aws eks update-kubeconfig` uses the cluster's ARN,
# and eksctl USER@NAME.REGION.eksctl.io.
_FORMS = (
    re.compile(r"arn:aws[a-z-]*:eks:(?P<region>[a-z0-9-]+):\d+:cluster/(?P<name>[A-Za-z0-9_-]+)"),
    re.compile(r".+@(?P<name>[A-Za-z0-9_-]+)\.(?P<region>[a-z0-9-]+)\.eksctl\.io"),
)


def eks_cluster(context: str) -> tuple[str, str]:
    """Region and name.

    Raises:
        RequestError: The context has another name, which says neither.
    """
    for form in _FORMS:
        found = form.fullmatch(context)
        if found is not None:
            return found["region"], found["name"]
    raise RequestError(
        f"launch.kubernetes.context={context!r} does not say which EKS cluster it is, and add-ons "
        "are installed by EKS, not by the cluster. Name the context as `aws eks update-kubeconfig "
        "--name NAME` does (the cluster's ARN), or as eksctl does (USER@NAME.REGION.eksctl.io)."
    )


FSX_DRIVER = "fsx.csi.aws.com"

InstallMethod = Literal["manifest", "kustomize", "chart", "addon"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """Address of a project's release, and the program that applies it."""

    method: InstallMethod
    url: str
    """URL of the manifest, the kustomization, or the chart's registry or repository.

    For an add-on: the page that describes it.
    """
    read_on: str
    """Day on which version and address were read, or of the newest commit of where they were."""
    chart: str = ""
    """Or EKS's add-on."""
    namespace: str = ""
    """Namespace of a chart; others name their own."""
    version: str = ""
    """Version of a chart or add-on; other addresses hold theirs."""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of a chart that differ from its defaults."""
    waits: bool = False
    """Whether a chart must answer before the parts after it are installed."""

    def install(self, context: str) -> list[str]:
        """The command that installs it, as an argument list.

        Raises:
            RequestError: It is an add-on, and the context does not say of which EKS cluster.
        """
        match self.method:
            case "chart":
                # The address of an OCI registry names the chart; --repo takes other repositories.
                at = [self.url] if self.url.startswith("oci:") else [self.chart, "--repo", self.url]
                # As JSON, because --set would split a list of metrics at its commas.
                values = [f"{key}={json.dumps(value)}" for key, value in self.values.items()]
                return [
                    "helm", "upgrade", "--install", self.chart, *at, "--version", self.version,
                    *(word for value in values for word in ("--set-json", value)),
                    *(["--wait"] if self.waits else []),
                    "--namespace", self.namespace, "--create-namespace", "--kube-context", context,
                ]  # fmt: skip
            case "addon":
                return [
                    # eksctl makes the role that the add-on needs, and removes it with the add-on.
                    "eksctl", "create", "addon", *_addon(self.chart, context),
                    "--version", f"v{self.version}", "--auto-apply-pod-identity-associations",
                    "--wait",
                ]  # fmt: skip
            case "manifest" | "kustomize":
                return [
                    # A client-side apply keeps each object in an annotation of at most 256 KiB, and
                    # some kinds are larger than that.
                    "kubectl", "apply", "--server-side", self._flag, self.url, "--context", context,
                ]  # fmt: skip

    def remove(self, context: str) -> list[str]:
        """The command that removes it; safe to repeat."""
        match self.method:
            case "chart":
                return [
                    # --ignore-not-found is of helm 3.13 and makes a repeated removal succeed.
                    "helm", "uninstall", self.chart, "--ignore-not-found",
                    "--namespace", self.namespace, "--kube-context", context,
                ]  # fmt: skip
            case "addon":
                return ["eksctl", "delete", "addon", *_addon(self.chart, context)]
            case "manifest" | "kustomize":
                return [
                    "kubectl", "delete", "--ignore-not-found", self._flag, self.url,
                    "--context", context,
                ]  # fmt: skip

    @property
    def _flag(self) -> str:
        return "-f" if self.method == "manifest" else "-k"


def _addon(name: str, context: str) -> list[str]:
    region, cluster = eks_cluster(context)
    return ["--cluster", cluster, "--region", region, "--name", name]


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """One part of a cluster."""

    name: str
    version: str
    provides: str
    """Kind that the API server serves then, or resource that nodes offer then."""
    purpose: str
    release: Release | None = None
    """None: rendered by us (etcd), or bound to a driver on the nodes and its vendor's."""
    image: str = ""
    """Part of the image's name by which it is known in any cluster, regardless of the installer."""

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


JOBSET = Prerequisite(
    name="JobSet",
    version="0.12.0",
    provides="JobSet",
    purpose="runs launch.kubernetes.target=jobset",
    release=Release(
        method="manifest",
        url="https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
        read_on="2026-08-18",
    ),
)
TRAINER = Prerequisite(
    name="Kubeflow Trainer",
    version="2.3.0",
    provides="TrainJob",
    purpose="runs launch.kubernetes.target=trainjob; brings JobSet with it",
    release=Release(
        method="chart",
        url="oci://ghcr.io/kubeflow/charts/kubeflow-trainer",
        read_on="2026-08-21",
        chart="kubeflow-trainer",
        namespace="kubeflow-system",
        version="2.3.0",
    ),
)
TRAINING_OPERATOR = Prerequisite(
    name="Kubeflow training operator",
    version="1.9.4",
    provides="PyTorchJob",
    purpose="runs launch.kubernetes.target=pytorchjob",
    release=Release(
        method="kustomize",
        # The repository was renamed; version 1 of the operator still lives in it.
        url="github.com/kubeflow/trainer/manifests/overlays/standalone?ref=v1.9.4",
        read_on="2026-08-21",
    ),
)
KUEUE = Prerequisite(
    name="Kueue",
    version="0.19.2",
    provides="LocalQueue",
    purpose="admits all pods of a job together (launch.kubernetes.queue)",
    release=Release(
        method="manifest",
        url="https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml",
        read_on="2026-08-22",
    ),
)
VOLCANO = Prerequisite(
    name="Volcano",
    version="1.x",
    provides="PodGroup",
    purpose="places all pods of a job together (launch.kubernetes.scheduler=volcano)",
)
FSX = Prerequisite(
    name="FSx for Lustre driver",
    version="1.9.0",
    provides=FSX_DRIVER,
    purpose="mounts claims on FSx for Lustre; to create file systems it needs a role "
    "with fsx rights",
    release=Release(
        method="kustomize",
        url="github.com/kubernetes-sigs/aws-fsx-csi-driver/deploy/kubernetes/overlays/stable"
        "?ref=v1.9.0",
        read_on="2026-04-21",
    ),
)
ETCD = Prerequisite(
    name="etcd",
    version="3.5.21",
    provides="",
    purpose="where the nodes of launch.kubernetes.etcd meet",
)
DEVICE_PLUGINS = {
    "nvidia.com/gpu": Prerequisite(
        name="NVIDIA device plugin",
        version="0.20.0",
        provides="nvidia.com/gpu",
        purpose="offers a node's GPUs to pods",
        # Not the chart: its pods wait for labels that only Node Feature Discovery gives.
        release=Release(
            method="manifest",
            url="https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/v0.20.0/deployments/"
            "static/nvidia-device-plugin.yml",
            read_on="2026-08-21",
        ),
        image="nvidia/k8s-device-plugin",
    ),
    EFA: Prerequisite(
        name="EFA device plugin",
        version="0.5.30",
        provides=EFA,
        purpose="offers a node's EFA interfaces to pods; eksctl's own one lacks p6 and p5.4xlarge",
        release=Release(
            method="chart",
            url="https://aws.github.io/eks-charts",
            read_on="2026-08-03",
            chart="aws-efa-k8s-device-plugin",
            namespace="kube-system",
            version="0.5.30",
        ),
        image="aws-efa-k8s-device-plugin",
    ),
    "habana.ai/gaudi": Prerequisite(
        name="Gaudi device plugin",
        version="of your Gaudi driver",
        provides="habana.ai/gaudi",
        purpose="offers a node's Gaudi devices to pods; its version must fit the driver "
        "of the nodes",
        image="habana",
    ),
    "amd.com/gpu": Prerequisite(
        name="AMD device plugin",
        version="of your ROCm driver",
        provides="amd.com/gpu",
        purpose="offers a node's AMD GPUs to pods; its version must fit the driver of the nodes",
        image="rocm/k8s-device-plugin",
    ),
}

MONITORS = ("PodMonitor", "PrometheusRule")
"""Kinds that the Prometheus operator serves, from the release below or another installation."""
PROMETHEUS = Prerequisite(
    name="Prometheus and Grafana",
    version="81.4.5",
    provides="",
    purpose="reads runs and devices, evaluates alert rules, shows dashboards",
    release=Release(
        method="chart",
        url="https://prometheus-community.github.io/helm-charts",
        read_on="2026-11-23",
        chart="kube-prometheus-stack",
        namespace="monitoring",
        version="81.4.5",
        values={
            # The chart's own default is a word that everybody knows; none: Grafana's chart draws
            # one in the cluster, into the secret kube-prometheus-stack-grafana.
            "grafana": {"adminPassword": ""},
            # Take monitors and rules of all makers, not only those with this release's label.
            "prometheus": {
                "prometheusSpec": {
                    "podMonitorSelectorNilUsesHelmValues": False,
                    "serviceMonitorSelectorNilUsesHelmValues": False,
                    "ruleSelectorNilUsesHelmValues": False,
                }
            },
            # Out of reach in a managed control plane: their alerts would never end.
            "kubeControllerManager": {"enabled": False},
            "kubeScheduler": {"enabled": False},
            "kubeEtcd": {"enabled": False},
        },
        waits=True,  # its operator looks at rules before the API server takes them
    ),
    image="prometheus-operator/prometheus-operator",
)
DCGM = Prerequisite(
    name="DCGM exporter",
    version="4.8.1",
    provides="",
    purpose="tells Prometheus of NVIDIA devices",
    release=Release(
        method="chart",
        url="https://nvidia.github.io/dcgm-exporter/helm-charts",
        read_on="2026-11-23",
        chart="dcgm-exporter",
        namespace="monitoring",
        version="4.8.1",
    ),
    image="dcgm-exporter",
)
CLOUDWATCH = Prerequisite(
    name="CloudWatch observability",
    version="5.3.1-eksbuild.1",
    provides="",
    purpose="sends metrics of pods, nodes and devices to CloudWatch (ContainerInsights)",
    release=Release(
        method="addon",
        url="https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/"
        "install-CloudWatch-Observability-EKS-addon.html",
        read_on="2026-11-23",
        chart="amazon-cloudwatch-observability",
        version="5.3.1-eksbuild.1",
    ),
    image="cloudwatch-agent",
)

_CONTROLLERS = {"jobset": JOBSET, "trainjob": TRAINER, "pytorchjob": TRAINING_OPERATOR}
ALL = (
    *_CONTROLLERS.values(), KUEUE, VOLCANO, *DEVICE_PLUGINS.values(), FSX, ETCD, PROMETHEUS, DCGM,
    CLOUDWATCH,
)  # fmt: skip


def needed(request: LaunchRequest) -> tuple[Prerequisite, ...]:
    """Return the parts a recipe needs, in the order of installation; claims may need FSX too."""
    settings = request.recipe.launch.kubernetes
    found = [_CONTROLLERS[settings.target]]
    if settings.scheduler == "volcano":
        found.append(VOLCANO)
    elif settings.queue is not None:
        found.append(KUEUE)
    found += [DEVICE_PLUGINS[name] for name in demand_of(request).devices]
    if settings.etcd is not None:
        found.append(ETCD)
    return tuple(found)


def install_instructions(part: Prerequisite, context: str | None) -> str:
    """A sentence."""
    if part.release is None:
        return "Install it as its vendor says"
    return f"Install it: {shlex.join(part.release.install(context or 'CONTEXT'))}"


def install_command(kind: str, context: str | None) -> str:
    """The command that installs what serves a kind of job.

    Args:
        kind: Of ``launch.kubernetes.target``.
    """
    (part,) = (part for part in _CONTROLLERS.values() if part.provides == kind)
    assert part.release is not None, f"{part.name} is a controller"
    return shlex.join(part.release.install(context or "CONTEXT"))


def install_hint(kind: str, context: str | None = None) -> str:
    """A sentence: what serves a kind, and how it is installed."""
    for part in _CONTROLLERS.values():
        if part.provides == kind or (kind == "ClusterTrainingRuntime" and part is TRAINER):
            return (
                f"Install {part.label}: `shardyard doctor RECIPE --on kubernetes --install`, or "
                f"{install_command(part.provides, context)}"
            )
    for part in (KUEUE, VOLCANO):
        if part.provides == kind:
            return f"{part.label} serves it. {install_instructions(part, context)}"
    if kind in MONITORS:
        return (
            f"{PROMETHEUS.label} brings it, if its chart was installed whole. See `helm list "
            f"--namespace monitoring`, then repeat `shardyard doctor RECIPE --on "
            "kubernetes --install monitoring`."
        )
    return "Check that the context names a Kubernetes cluster."
