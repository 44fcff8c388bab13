"""What the planner says of published image-classification runs, and of the elastic vision system.

Nothing is fitted. Two parts, both printed by ``python -m benchmarks.source_systems``:

- images a second of ResNet-50 and EfficientNet on A100 and V100, as NVIDIA measured them;
- what EFA saves of an epoch, and how an epoch shrinks with nodes, as AWS describes it for
  EfficientNet-B7 on p4d.24xlarge and ResNet-50 on p3.8xlarge (Distributed training with Amazon EKS
  and Torch Distributed Elastic, 2022). Batch and number format are only partly stated there,
  so their effect is shown.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import accelerator_by_name, instance
from shardyard.hardware.cluster import Cluster, cluster_of, default_cluster
from shardyard.planner.collectives import BETWEEN_SHARE
from shardyard.planner.vision import VisionEstimate, VisionWorkload, estimate_vision

IMAGENET_IMAGES = 1_281_167

TF32_TFLOPS = 156
"""NVIDIA A100 datasheet; the share of it that products reach is taken from bf16. Convolutions of
fp32 tensors run in TF32 there unless it is switched off
(PyTorch: torch.backends.cudnn.allow_tf32)."""

SOCKETS_BUS_BYTES_PER_S = 2.38e9
"""Best all-reduce of two p4d.24xlarge without EFA, in the same document."""

NVIDIA_EXAMPLES = (
    "NVIDIA/DeepLearningExamples @48dc9ada, PyTorch/Classification/ConvNets, training performance "
    "in resnet50v1.5/README.md and efficientnet/README.md (container 21.03)"
)

Compute = Literal["fp32", "tf32", "fp16", "bf16"]
Optimizer = Literal["sgd", "rmsprop", "adamw"]


class Anchor(NamedTuple):
    """One published rate. The batch of EfficientNets is not printed beside it: ours."""

    model: str
    accelerator: str
    devices: int
    compute: Compute
    device_batch: int
    optimizer: Optimizer
    images_per_s: float


ANCHORS = (
    Anchor("resnet50", "A100 80GB", 1, "fp16", 256, "sgd", 2470),
    Anchor("resnet50", "A100 80GB", 8, "fp16", 256, "sgd", 16621),
    Anchor("resnet50", "A100 80GB", 1, "tf32", 256, "sgd", 938),
    Anchor("resnet50", "V100 16GB", 1, "fp16", 256, "sgd", 1200),
    Anchor("resnet50", "V100 16GB", 8, "fp16", 256, "sgd", 8322),
    Anchor("resnet50", "V100 16GB", 1, "fp32", 112, "sgd", 367),
    Anchor("resnet50", "V100 16GB", 8, "fp32", 112, "sgd", 2855),
    Anchor("efficientnet-b0", "A100 80GB", 1, "fp16", 256, "rmsprop", 2489),
    Anchor("efficientnet-b0", "V100 16GB", 1, "fp16", 128, "rmsprop", 1301),
    Anchor("efficientnet-b0", "V100 16GB", 1, "fp32", 64, "rmsprop", 655),
    Anchor("efficientnet-b4", "A100 80GB", 1, "fp16", 128, "rmsprop", 331),
    Anchor("efficientnet-b4", "A100 80GB", 8, "fp16", 128, "rmsprop", 2570),
    Anchor("efficientnet-b4", "V100 16GB", 1, "fp16", 32, "rmsprop", 204),
    Anchor("efficientnet-b4", "V100 16GB", 1, "fp32", 16, "rmsprop", 83),
)


def published_rates() -> list[dict[str, Any]]:
    """Each anchor with what is predicted, and the error."""
    rows = []
    for anchor in ANCHORS:
        accelerator = _with_tf32(accelerator_by_name(anchor.accelerator))
        cluster = default_cluster(accelerator, devices_per_node=anchor.devices, nodes=1)
        found = _estimate(
            anchor.model,
            cluster,
            batch=anchor.device_batch,
            compute=anchor.compute,
            optimizer=anchor.optimizer,
        )
        rows.append(
            {
                **anchor._asdict(),
                "predicted_images_per_s": round(found.samples_per_s, 1),
                "error": round(found.samples_per_s / anchor.images_per_s - 1, 3),
                "step_ms": {term.name: round(term.seconds * 1e3, 2) for term in found.time},
            }
        )
    return rows


def efa_gains() -> list[dict[str, Any]]:
    """Share of an epoch that EFA saves on two p4d.24xlarge, by batch and data workers.

    Stated: 5 to 8 % for relatively small models at batch 64, 15 to 18 % for EfficientNet-B7 at
    batch 1.
    """
    rows = []
    with_efa = _p4d(nodes=2)
    without = _over_sockets(with_efa)
    cases: list[tuple[str, int, float | None]] = [
        ("resnet18", 64, None), ("resnet50", 64, None), ("resnet50", 64, 400.0),
        ("efficientnet-b7", 1, None), ("efficientnet-b7", 4, None), ("efficientnet-b7", 8, None),
    ]  # fmt: skip
    for model, batch, loader in cases:
        found = [
            _estimate(model, cluster, batch=batch, compute="tf32", loader=loader)
            for cluster in (with_efa, without)
        ]
        rows.append(
            {
                "model": model,
                "device_batch": batch,
                "loader_images_per_s_per_device": loader,
                "step_ms_efa": round(found[0].step_s * 1e3, 1),
                "step_ms_sockets": round(found[1].step_s * 1e3, 1),
                "epoch_shorter_by": round(1 - found[0].step_s / found[1].step_s, 3),
            }
        )
    return rows


def epochs_by_nodes() -> list[dict[str, Any]]:
    """Time of one epoch against nodes, for both models of the document."""
    rows = []
    cases: tuple[tuple[str, str, int, Compute, tuple[int, ...]], ...] = (
        ("efficientnet-b7", "p4d.24xlarge", 1, "tf32", (1, 2, 3)),
        ("resnet50", "p3.8xlarge", 64, "fp32", (1, 2, 3, 4)),
    )
    for model, name, batch, compute, counts in cases:
        alone = 0.0
        for nodes in counts:
            cluster = _p4d(nodes) if name.startswith("p4d") else cluster_of(instance(name), nodes)
            found = _estimate(model, cluster, batch=batch, compute=compute)
            alone = alone or found.samples_per_s
            rows.append(
                {
                    "model": model,
                    "instance": name,
                    "nodes": nodes,
                    "device_batch": batch,
                    "images_per_s": round(found.samples_per_s, 1),
                    "epoch_min": round(found.epoch_s(IMAGENET_IMAGES) / 60, 1),
                    "efficiency": round(found.samples_per_s / alone / nodes, 3),
                }
            )
    return rows


def _estimate(
    model: str,
    cluster: Cluster,
    *,
    batch: int,
    compute: Compute,
    optimizer: Optimizer = "sgd",
    loader: float | None = None,
) -> VisionEstimate:
    workload = VisionWorkload(
        model=model,
        device_batch=batch,
        compute=compute,
        channels_last=compute in ("fp16", "bf16"),  # what the examples do, and PyTorch's default
        optimizer=optimizer,
        loader_samples_per_s=loader,
    )
    return estimate_vision(workload, cluster)


def _p4d(nodes: int) -> Cluster:
    cluster = cluster_of(instance("p4d.24xlarge"), nodes)
    return replace(cluster, accelerator=_with_tf32(cluster.accelerator))


def _over_sockets(cluster: Cluster) -> Cluster:
    """The same nodes, joined by what they measured without EFA."""
    rate = SOCKETS_BUS_BYTES_PER_S / BETWEEN_SHARE / cluster.devices_per_node
    link = replace(cluster.between, name="sockets", bytes_per_s=rate)
    return replace(cluster, between=link)


def _with_tf32(accelerator: Accelerator) -> Accelerator:
    """An A100 as it computes products of fp32 tensors."""
    if not accelerator.name.startswith("A100"):
        return accelerator
    peaks = {**accelerator.peak_tflops, "tf32": TF32_TFLOPS}
    reached = {**accelerator.achievable, "tf32": accelerator.achievable["bf16"]}
    return replace(accelerator, peak_tflops=peaks, achievable=reached)
