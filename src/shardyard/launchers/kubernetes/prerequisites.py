"""What must be in a cluster before each target runs, at which version, and how it gets there.

One row a part. A part that its project releases is applied from the release's address by kubectl or
helm. No project's digest of these files is known here, so none is checked: HTTPS and the tag are
what is trusted.
"""

import shlex
from dataclasses import dataclass
from typing import Literal

from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.kubernetes.resources import EFA, demand_of

FSX_DRIVER = "fsx.csi.aws.com"

How = Literal["manifest", "kustomize", "chart"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """Where a project's release is, and what applies it."""

    how: How
    url: str
    """Of the manifest, of the kustomization, or of the chart's registry or repository."""
    read_on: str
    """Day of the newest commit of the source in which version and address were read."""
    chart: str = ""
    namespace: str = ""
    """Of a chart; manifests name their own."""
    version: str = ""
    """Of a chart; other addresses hold theirs."""

    def install(self, context: str) -> list[str]:
        """The command that installs it, as an argument list."""
        if self.how == "chart":
            where = [self.url] if self.url.startswith("oci:") else [self.chart, "--repo", self.url]
            return [
                "helm", "upgrade", "--install", self.chart, *where, "--version", self.version,
                "--namespace", self.namespace, "--create-namespace", "--kube-context", context,
            ]  # fmt: skip
        return ["kubectl", "apply", "--server-side", self._flag, self.url, "--context", context]

    def remove(self, context: str) -> list[str]:
        """The command that removes it; safe to repeat."""
        if self.how == "chart":
            return [
                "helm", "uninstall", self.chart, "--ignore-not-found",
                "--namespace", self.namespace, "--kube-context", context,
            ]  # fmt: skip
        return [
            "kubectl", "delete", "--ignore-not-found", self._flag, self.url, "--context", context,
        ]  # fmt: skip

    @property
    def _flag(self) -> str:
        return "-f" if self.how == "manifest" else "-k"


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """One part of a cluster."""

    name: str
    version: str
    provides: str
    """Kind that the API server serves then, or resource that nodes offer then."""
    why: str
    release: Release | None = None
    """None: rendered by us (etcd), or bound to a driver on the nodes and its vendor's."""
    image: str = ""
    """Part of the image's name by which a device plugin is known in any cluster."""

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


JOBSET = Prerequisite(
    name="JobSet",
    version="0.12.0",
    provides="JobSet",
    why="runs launch.kubernetes.target=jobset",
    release=Release(
        how="manifest",
        url="https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
        read_on="2026-08-18",
    ),
)
TRAINER = Prerequisite(
    name="Kubeflow Trainer",
    version="2.3.0",
    provides="TrainJob",
    why="runs launch.kubernetes.target=trainjob; brings JobSet with it",
    release=Release(
        how="chart",
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
    why="runs launch.kubernetes.target=pytorchjob",
    release=Release(
        how="kustomize",
        url="github.com/kubeflow/trainer/manifests/overlays/standalone?ref=v1.9.4",
        read_on="2026-08-21",
    ),
)
KUEUE = Prerequisite(
    name="Kueue",
    version="0.19.2",
    provides="LocalQueue",
    why="admits all pods of a job together (launch.kubernetes.queue)",
    release=Release(
        how="manifest",
        url="https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml",
        read_on="2026-08-22",
    ),
)
FSX = Prerequisite(
    name="FSx for Lustre driver",
    version="1.9.0",
    provides=FSX_DRIVER,
    why="mounts claims on FSx for Lustre; to create file systems it needs a role with fsx rights",
    release=Release(
        how="kustomize",
        url="github.com/kubernetes-sigs/aws-fsx-csi-driver/deploy/kubernetes/overlays/stable"
        "?ref=v1.9.0",
        read_on="2026-04-21",
    ),
)
ETCD = Prerequisite(
    name="etcd",
    version="3.5.21",
    provides="",
    why="where the nodes of launch.kubernetes.etcd meet",
)
DEVICE_PLUGINS = {
    "nvidia.com/gpu": Prerequisite(
        name="NVIDIA device plugin",
        version="0.20.0",
        provides="nvidia.com/gpu",
        why="offers a node's GPUs to pods",
        # Not the chart: its pods wait for labels that only Node Feature Discovery gives.
        release=Release(
            how="manifest",
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
        why="offers a node's EFA interfaces to pods; eksctl's own one lacks p6 and p5.4xlarge",
        release=Release(
            how="chart",
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
        why="offers a node's Gaudi devices to pods; its version must fit the driver of the nodes",
        image="habana",
    ),
    "amd.com/gpu": Prerequisite(
        name="AMD device plugin",
        version="of your ROCm driver",
        provides="amd.com/gpu",
        why="offers a node's AMD GPUs to pods; its version must fit the driver of the nodes",
        image="rocm/k8s-device-plugin",
    ),
}

_CONTROLLERS = {"jobset": JOBSET, "trainjob": TRAINER, "pytorchjob": TRAINING_OPERATOR}
ALL = (*_CONTROLLERS.values(), KUEUE, *DEVICE_PLUGINS.values(), FSX, ETCD)


def needed(request: LaunchRequest) -> tuple[Prerequisite, ...]:
    """What a recipe says of it, in the order in which it is installed; claims may need FSX too."""
    settings = request.recipe.launch.kubernetes
    found = [_CONTROLLERS[settings.target]]
    if settings.queue is not None:
        found.append(KUEUE)
    found += [DEVICE_PLUGINS[name] for name in demand_of(request).devices]
    if settings.etcd is not None:
        found.append(ETCD)
    return tuple(found)


def how_to_install(part: Prerequisite, context: str | None) -> str:
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
    return "Check that the context names a Kubernetes cluster."
