"""What must be in a cluster before each target runs, at which version, and how it gets there."""

from dataclasses import dataclass

from shardyard.launch.base import LaunchRequest
from shardyard.launch.kubernetes.resources import EFA, demand_of


@dataclass(frozen=True, kw_only=True)
class Prerequisite:
    """One part of a cluster."""

    name: str
    version: str
    provides: str
    """Kind that the API server serves then, or resource that nodes offer then."""
    why: str
    install: tuple[str, ...]
    """Commands; each takes kubectl's or helm's own --context or --kube-context."""


JOBSET = Prerequisite(
    name="JobSet",
    version="0.12.0",
    provides="JobSet",
    why="runs launch.kubernetes.target=jobset",
    install=(
        "kubectl apply --server-side -f "
        "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
    ),
)
TRAINER = Prerequisite(
    name="Kubeflow Trainer",
    version="2.3.0",
    provides="TrainJob",
    why="runs launch.kubernetes.target=trainjob; brings JobSet with it",
    install=(
        "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer "
        "--version 2.3.0 --namespace kubeflow-system --create-namespace",
    ),
)
TRAINING_OPERATOR = Prerequisite(
    name="Kubeflow training operator",
    version="1.9.4",
    provides="PyTorchJob",
    why="runs launch.kubernetes.target=pytorchjob",
    install=(
        "kubectl apply --server-side -k "
        "'github.com/kubeflow/trainer/manifests/overlays/standalone?ref=v1.9.4'",
    ),
)
KUEUE = Prerequisite(
    name="Kueue",
    version="0.19.2",
    provides="LocalQueue",
    why="admits all pods of a job together (launch.kubernetes.queue)",
    install=(
        "kubectl apply --server-side -f "
        "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml",
    ),
)
ETCD = Prerequisite(
    name="etcd",
    version="3.5",
    provides="",
    why="rendezvous of launch.kubernetes.etcd; 3.6 dropped the API that torch speaks",
    install=(),
)
DEVICE_PLUGINS = {
    "nvidia.com/gpu": Prerequisite(
        name="NVIDIA device plugin",
        version="0.20.0",
        provides="nvidia.com/gpu",
        why="offers a node's GPUs to pods",
        install=(
            "helm install nvidia-device-plugin nvidia-device-plugin "
            "--repo https://nvidia.github.io/k8s-device-plugin --version 0.20.0 "
            "--namespace nvidia-device-plugin --create-namespace",
        ),
    ),
    EFA: Prerequisite(
        name="EFA device plugin",
        version="0.5.30",
        provides=EFA,
        why="offers a node's EFA interfaces to pods; eksctl's own one lacks p6 and p5.4xlarge",
        install=(
            "helm install aws-efa-k8s-device-plugin aws-efa-k8s-device-plugin "
            "--repo https://aws.github.io/eks-charts --version 0.5.30 --namespace kube-system",
        ),
    ),
    "habana.ai/gaudi": Prerequisite(
        name="Gaudi device plugin",
        version="of your Gaudi driver",
        provides="habana.ai/gaudi",
        why="offers a node's Gaudi devices to pods; its version must fit the driver of the nodes",
        install=(),
    ),
    "aws.amazon.com/neuron": Prerequisite(
        name="Neuron device plugin",
        version="of your Neuron driver",
        provides="aws.amazon.com/neuron",
        why="offers a node's Trainium devices to pods; its version must fit the driver",
        install=(),
    ),
    "amd.com/gpu": Prerequisite(
        name="AMD device plugin",
        version="of your ROCm driver",
        provides="amd.com/gpu",
        why="offers a node's AMD GPUs to pods; its version must fit the driver of the nodes",
        install=(),
    ),
}

_CONTROLLERS = {"jobset": JOBSET, "trainjob": TRAINER, "pytorchjob": TRAINING_OPERATOR}


def needed(request: LaunchRequest) -> tuple[Prerequisite, ...]:
    """What a request needs, in the order in which it is installed."""
    settings = request.recipe.launch.kubernetes
    found = [_CONTROLLERS[settings.target]]
    if settings.queue is not None:
        found.append(KUEUE)
    found += [DEVICE_PLUGINS[name] for name in demand_of(request).devices]
    if settings.etcd is not None:
        found.append(ETCD)
    return tuple(found)


def install_hint(kind: str) -> str:
    """A sentence: what serves a kind, and how it is installed."""
    for part in _CONTROLLERS.values():
        if part.provides == kind or (kind == "ClusterTrainingRuntime" and part is TRAINER):
            return f"Install {part.name} {part.version}: {part.install[0]}"
    return "Check that the context names a Kubernetes cluster."


def install_script(parts: tuple[Prerequisite, ...]) -> str:
    """The commands for all parts, to read and to run; nothing is installed by this."""
    lines = []
    for part in parts:
        lines.append(f"# {part.name} {part.version}: {part.why}")
        lines += part.install or ("# Install it as its vendor says.",)
    return "\n".join(lines) + "\n"
