"""One workload on one cluster: memory and time together. The shortest way into the model."""

from dataclasses import dataclass

from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.kernels import check_predictable
from shardyard.planner.memory import Fit, MemoryEstimate, fit, memory
from shardyard.planner.offload import host_shortage
from shardyard.planner.step_time import Parts, StepModel, TimeTerm, step_terms
from shardyard.planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of a step, for one rank and for all."""

    workload: Workload
    memory: MemoryEstimate
    fit: Fit
    parts: Parts
    devices: int

    @property
    def step_s(self) -> float:
        """One optimizer step."""
        return self.parts.step_s

    @property
    def terms(self) -> tuple[TimeTerm, ...]:
        """The step, term by term."""
        return step_terms(self.workload, self.parts)

    @property
    def samples_per_s(self) -> float:
        """All devices together."""
        return self.workload.global_batch / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """All devices together."""
        return self.samples_per_s * self.workload.seq_len

    @property
    def tokens_per_s_per_device(self) -> float:
        """The number to compare across sources."""
        return self.tokens_per_s / self.devices


def estimate(
    workload: Workload, cluster: ClusterHardware, calibration: Calibration | None = None
) -> Estimate:
    """Predict a workload.

    Raises:
        RequestError: The layout needs another number of devices, or no source gives a rate of the
            device that a time needs.
    """
    ranks = workload.layout.world_size
    check_predictable(cluster, ranks=ranks, compute=workload.formats.compute)
    model = StepModel(
        workload.shape,
        cluster,
        seq_len=workload.seq_len,
        formats=workload.formats,
        techniques=workload.techniques,
        trained=workload.trained,
        calibration=calibration,
    )
    needed = memory(workload)
    return Estimate(
        workload=workload,
        memory=needed,
        fit=host_shortage(workload, cluster)
        or fit(needed.device_bytes, cluster.accelerator.memory_bytes),
        parts=model.parts(
            workload.layout,
            micro_batch=workload.micro_batch,
            micro_batches=workload.micro_batches,
            recompute=workload.recompute,
        ),
        devices=ranks,
    )
