"""What the planner says of the elastic vision system, as AWS describes it.

What EFA saves of an epoch, and how an epoch shrinks with nodes: EfficientNet-B7 on p4d.24xlarge and
ResNet-50 on p3.8xlarge (Distributed training with Amazon EKS and Torch Distributed Elastic, 2022).
Batch and number format are only partly stated there, so their effect is shown. Nothing is fitted;
published rates are in ``planner_images.py``. Printed by ``python -m benchmarks.source_systems``.
"""

from dataclasses import replace
from math import ceil
from typing import Any

from benchmarks.planner_images import TRAIN, Case, Format, with_tf32
from shardyard.hardware.catalogue import instance
from shardyard.hardware.cluster import ClusterHardware, cluster_of, with_efa
from shardyard.planner.collectives import BETWEEN_SHARE
from shardyard.planner.images.time import ImageEstimate

SOCKETS_BUS_BYTES_PER_S = 2.38e9
"""Best all-reduce of two p4d.24xlarge without EFA, in the same document."""


STATED = {("resnet50", 64): (0.05, 0.08), ("efficientnet-b7", 1): (0.15, 0.18)}
"""Share of an epoch that EFA saves, in the same document. "Relatively small models" at batch 64 are
taken for ResNet-50."""


def efa_gains() -> list[dict[str, Any]]:
    """Share of an epoch on two p4d.24xlarge that four EFA, and one, save against sockets.

    By batch and data workers; a stated range that the plan misses says so.
    """
    rows = []
    type_ = instance("p4d.24xlarge")
    with_all = _p4d(nodes=2)
    clusters = {
        "efa": with_all, "one_efa": with_efa(with_all, type_, 1), "sockets": _over_sockets(with_all)
    }  # fmt: skip
    cases: list[tuple[str, int, float | None]] = [
        ("resnet18", 64, None), ("resnet50", 64, None), ("resnet50", 64, 400.0),
        ("efficientnet-b7", 1, None), ("efficientnet-b7", 4, None), ("efficientnet-b7", 8, None),
    ]  # fmt: skip
    for model, batch, loader in cases:
        step_s = {
            name: _estimate(model, cluster, batch=batch, compute="tf32", loader=loader).step_s
            for name, cluster in clusters.items()
        }
        stated = STATED.get((model, batch))
        saved = 1 - step_s["efa"] / step_s["sockets"]
        row: dict[str, Any] = {
            "model": model,
            "device_batch": batch,
            "loader_images_per_s_per_device": loader,
        }
        row |= {f"step_ms_{name}": round(1e3 * found, 1) for name, found in step_s.items()}
        row["epoch_shorter_by"] = round(saved, 3)
        row["epoch_shorter_by_with_one"] = round(1 - step_s["one_efa"] / step_s["sockets"], 3)
        row["stated"] = "" if stated is None else f"{stated[0]:.0%} to {stated[1]:.0%}"
        row["verdict"] = _verdict(saved, stated)
        rows.append(row)
    return rows


def _verdict(saved: float, stated: tuple[float, float] | None) -> str:
    if stated is None:
        return ""
    low, high = stated
    return "met" if low <= round(saved, 2) <= high else "MISSED"


def epochs_by_nodes() -> list[dict[str, Any]]:
    """Time of one epoch against nodes, for both models of the document."""
    rows = []
    cases: tuple[tuple[str, str, int, Format, tuple[int, ...]], ...] = (
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
                    "epoch_min": round(_epoch_s(found) / 60, 1),
                    "efficiency": round(found.samples_per_s / alone / nodes, 3),
                }
            )
    return rows


def _estimate(
    model: str,
    cluster: ClusterHardware,
    *,
    batch: int,
    compute: Format,
    loader: float | None = None,
) -> ImageEstimate:
    case = Case(model=model, devices=cluster.devices, batch=batch, number_format=compute)
    decoded = None if loader is None else loader * cluster.devices
    return case.on(cluster, decoded_per_s=decoded)


def _epoch_s(found: ImageEstimate) -> float:
    """One pass over ImageNet, without evaluation and saves."""
    return ceil(TRAIN / found.workload.global_batch) * found.step_s


def _p4d(nodes: int) -> ClusterHardware:
    cluster = cluster_of(instance("p4d.24xlarge"), nodes)
    return replace(cluster, accelerator=with_tf32(cluster.accelerator))


def _over_sockets(cluster: ClusterHardware) -> ClusterHardware:
    """The same nodes, joined by what they measured without EFA."""
    rate = SOCKETS_BUS_BYTES_PER_S / BETWEEN_SHARE / cluster.devices_per_node
    link = replace(cluster.between, name="sockets", bytes_per_s=rate)
    return replace(cluster, between=link)
