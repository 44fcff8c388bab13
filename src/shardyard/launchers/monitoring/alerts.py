"""Alert rules for Prometheus, a row each, with what to do.

An agent's last report is read over the last hour, because an agent that ends takes its
endpoint with it. Prometheus then has no current data of the run, whether it finished or was
killed.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shardyard.rundir.metrics import ALL as RUN

# Metrics that a dashboard or an alert may use, so that none asks for one that is never exported.
#
# A run's metrics are those of rundir/metrics.py. A device's are fields of NVIDIA's DCGM, whose
# exporter collects what ``counters`` lists.

RUN_LABELS = ("run_id", "node")
"""Labels of every sample of a run, in addition to a metric's own."""

# Source: dcgm-exporter, internal/pkg/rendermetrics/render_metrics.go.
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


_REMEMBERED = "1h"
"""Period for which an end is reported; longer than a notification may be delayed."""

# A device continues after these XIDs, which mostly come from the program on it: no alert.
# Source: severity MONITOR in awslabs/awsome-distributed-ai, 2.gpu-cluster-healthcheck.
_HARMLESS_XIDS = (13, 31, 43, 63, 92, 94, 121, 126, 154)


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One rule."""

    name: str
    expr: str
    """Has one result for each run, or device, that is in this state."""
    after: str = "0s"
    """Duration of the state before the alert fires."""
    severity: Literal["critical", "warning"]
    summary: str
    todo: str


def _last_reported(states: str) -> str:
    """Return the query for each run's newest attempt whose agent last reported such a state.

    It covers the last hour.
    """
    metric = f'shardyard_run_state{{state=~"{states}"}}'
    return f"max by (run_id) (last_over_time({metric}[{_REMEMBERED}]))"


def _now(metric: str, aggregation: str = "max") -> str:
    return f"{aggregation} by (run_id) ({metric})"


_ENDING = "draining|drained|finished|failed"
_WORKING = _now('shardyard_run_state{state=~"running|draining"}') + " > 0"
# min: a node that does not see the run's folder counts from its own start.
_STEP_AGE = _now("shardyard_step_age_seconds", "min")
_USUAL_STEP_S = _now(f"avg_over_time(shardyard_step_seconds[{_REMEMBERED}])")
_PROBLEMS = 'shardyard_events_total{kind="device_problem"}'

ALERTS = (
    AlertRule(
        name="ShardyardRunFailed",
        # The value is the attempt's number, so a later attempt that did not fail ends the alert.
        expr=f"{_last_reported('failed')} > 0 unless on (run_id)"
        f" ({_last_reported('running|draining|drained|finished')} > {_last_reported('failed')})",
        severity="critical",
        summary="Run {{ $labels.run_id }} failed.",
        todo=(
            "`shardyard status {{ $labels.run_id }}` says why and which log to read. Fix "
            "that; `shardyard resume {{ $labels.run_id }}` continues from the newest "
            "checkpoint."
        ),
    ),
    AlertRule(
        name="ShardyardRunLost",
        expr=f"{_last_reported('running')} > 0 unless on (run_id) {_now('shardyard_run_state')}"
        f" unless on (run_id) ({_last_reported(_ENDING)} >= {_last_reported('running')})",
        after="5m",  # a scheduler's restart, or a drain between two scrapes that is taken up again
        severity="critical",
        summary="Run {{ $labels.run_id }} was training and no agent of it answers any more.",
        todo=(
            "Its nodes were killed or are out of reach, or it drained between two scrapes: "
            "`shardyard status {{ $labels.run_id }}` asks the scheduler. If it is not started "
            "again, `shardyard resume {{ $labels.run_id }}`; to end it, `shardyard teardown "
            "{{ $labels.run_id }}`, for lost nodes may bill."
        ),
    ),
    AlertRule(
        name="ShardyardRunStalled",
        # As node/budget.py tells it: 20 usual steps and 2 minutes; before the first, 10 minutes.
        expr=f"({_STEP_AGE} > clamp_min(20 * {_USUAL_STEP_S}, 120)"
        f" or {_STEP_AGE} > 600 unless on (run_id) {_USUAL_STEP_S}) and on (run_id) ({_WORKING})",
        after="1m",
        severity="warning",
        summary="Run {{ $labels.run_id }} has had no step for {{ $value | humanizeDuration }}.",
        todo="Devices are paid for and wait. `shardyard watch {{ $labels.run_id }}` and `shardyard "
        "logs {{ $labels.run_id }}` say in which phase it is. A long evaluation or compilation "
        "ends by itself; a hang is found by the run. launch.stop_idle_after ends such runs.",
    ),
    AlertRule(
        name="ShardyardCheckpointOld",
        expr=f"{_now('shardyard_checkpoint_age_seconds', 'min')}"
        f" > 3 * {_now('shardyard_checkpoint_every_steps')} * {_USUAL_STEP_S} + 600"
        f" and on (run_id) ({_WORKING})",
        after="1m",
        severity="warning",
        summary="The newest durable checkpoint of run {{ $labels.run_id }} is "
        "{{ $value | humanizeDuration }} old, three times what checkpoint.every means.",
        todo="A failure now loses all since then. `shardyard status {{ $labels.run_id }}` names "
        "checkpoints that were abandoned; look at the room and the speed of the run's folder.",
    ),
    AlertRule(
        name="ShardyardDeviceProblem",
        # Not increase(): an agent that is started again counts from the run's beginning.
        expr=f"max by (run_id) (last_over_time({_PROBLEMS}[{_REMEMBERED}]))"
        f" > min by (run_id) (min_over_time({_PROBLEMS}[{_REMEMBERED}]))",
        severity="critical",
        summary="Something is wrong with a device of run {{ $labels.run_id }}.",
        todo="`shardyard report {{ $labels.run_id }}` names node and device. Take that node out "
        "(drain it in the scheduler), have it checked, and resume the run without it.",
    ),
    AlertRule(
        name="ShardyardDeviceXid",
        # PromQL compares values with numbers only, so each number is excluded by itself.
        expr=f"{XID.name} > 0" + "".join(f" != {number}" for number in _HARMLESS_XIDS),
        severity="critical",
        summary="GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reports XID {{ $value }}.",
        todo=(
            "NVIDIA's list of XID errors says what it means. 48, 64, 74, 95, 119, 120: end the "
            "run's part there and reset the device. 79: reboot the node. 54: its power cable. If "
            "it comes back, have the node replaced. It is shown until the driver is reloaded."
        ),
    ),
)


def render() -> dict[str, Any]:
    """The content of a rules file, and of a PrometheusRule's spec."""
    return {"groups": [{"name": "shardyard", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: AlertRule) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.after,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.todo},
    }
