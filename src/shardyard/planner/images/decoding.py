"""How many images the cores of a node decode, and how many cores a training needs for that."""

import math
from dataclasses import dataclass

from shardyard.hardware.cluster import Cluster

DECODED_PER_WORKER_S = 130.0
"""Images that one worker process decodes, crops and flips in a second while its neighbours do so
too, of ImageNet's sizes. Where decoding is the limit: EfficientNet-B0 reaches 16,652 images/s on 8
A100 with 16 workers each, 130 a worker, and ResNet-50, with ten times its work, 16,621
(NVIDIA/DeepLearningExamples @0107cf27, PyTorch/Classification/ConvNets: efficientnet/README.md,
resnet50v1.5/README.md; workers and the PyTorch loader: configs.yml). Pillow-SIMD decoded there;
smaller or larger images go by their pixels, which nobody counts here."""

THREADS_SHARE = 0.8
"""Of a node's hardware threads, those that decode; the rest belong to the processes that train and
to the host. 64 workers kept that rate on the 80 threads of a DGX-1: 8,322 images/s of ResNet-50
(the same source)."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What cores decode against what devices train."""

    trained_per_s: float
    """Images that the devices take, if they are never made to wait."""
    decoded_per_s: float
    """Images that the cores of all nodes decode."""
    workers: int
    """Of one node, that decode."""
    needed: int
    """Of one node, that would keep its devices busy."""
    reason: str

    @property
    def is_bound(self) -> bool:
        """Whether the devices wait."""
        return self.decoded_per_s < self.trained_per_s


def workers_of(cluster: Cluster, threads: int | None) -> int | None:
    """What decodes on one node; None: nobody says how many hardware threads it has.

    Args:
        threads: Of each device's process, as the recipe asks; None: as many as there is room for.
    """
    if cluster.threads is None:
        return None
    if threads is not None:
        return min(threads * cluster.devices_per_node, cluster.threads)
    return max(1, int(THREADS_SHARE * cluster.threads))


def decoded_per_s(cluster: Cluster, threads: int | None) -> float | None:
    """Images that all nodes decode in a second; as ``workers_of``."""
    workers = workers_of(cluster, threads)
    return None if workers is None else cluster.nodes * workers * DECODED_PER_WORKER_S


def decoding_of(trained_per_s: float, cluster: Cluster, threads: int | None) -> Decoding | None:
    """Set one against the other; as ``workers_of``."""
    used = workers_of(cluster, threads)
    if used is None:
        return None
    return Decoding(
        trained_per_s=trained_per_s,
        decoded_per_s=cluster.nodes * used * DECODED_PER_WORKER_S,
        workers=used,
        needed=math.ceil(trained_per_s / cluster.nodes / DECODED_PER_WORKER_S),
        reason=f"{used} of {cluster.threads} hardware threads decode, "
        f"{DECODED_PER_WORKER_S:.0f} images/s each (NVIDIA/DeepLearningExamples, 128 workers)",
    )
