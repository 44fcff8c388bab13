"""All that a dashboard or an alert may ask for: a run's metrics, and a cluster's devices.

A run's are those of our own exporter (rundir/run_metrics.py); devices' are fields of NVIDIA's DCGM,
which its exporter is told to collect by ``counters``, so that both ends read one list.
"""

from dataclasses import dataclass

from shardyard.rundir.run_metrics import ALL as RUN

RUN_LABELS = ("run_id", "node")
"""Of every sample of a run, beside a metric's own."""

# dcgm-exporter, internal/pkg/rendermetrics/render_metrics.go: what every sample of a GPU has.
DEVICE_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname")


@dataclass(frozen=True, kw_only=True)
class DeviceMetric:
    """A field of DCGM, which is the name of its metric too; all of these are gauges."""

    name: str
    help: str


UTILISATION = DeviceMetric(name="DCGM_FI_DEV_GPU_UTIL", help="GPU utilization (in %).")
COPY = DeviceMetric(name="DCGM_FI_DEV_MEM_COPY_UTIL", help="Memory utilization (in %).")
XID = DeviceMetric(name="DCGM_FI_DEV_XID_ERRORS", help="Value of the last XID error encountered.")
CLOCK = DeviceMetric(name="DCGM_FI_DEV_SM_CLOCK", help="SM clock frequency (in MHz).")
TEMPERATURE = DeviceMetric(name="DCGM_FI_DEV_GPU_TEMP", help="GPU temperature (in C).")
POWER = DeviceMetric(name="DCGM_FI_DEV_POWER_USAGE", help="Power draw (in W).")

DEVICES = (UTILISATION, COPY, XID, CLOCK, TEMPERATURE, POWER)
"""Names: dcgm-exporter, etc/default-counters.csv."""

LABELS = {
    **{row.name: {*RUN_LABELS, *([row.label] if row.label else [])} for row in RUN},
    **{row.name: set(DEVICE_LABELS) for row in DEVICES},
}
"""Every metric that somebody exports -> its labels."""


def counters() -> str:
    """The list that DCGM's exporter collects, in its form: field, kind, help."""
    return "".join(f"{row.name}, gauge, {row.help}\n" for row in DEVICES)
