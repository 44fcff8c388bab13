"""Two Grafana dashboards, of a run and of a cluster's devices: a row a panel, rendered as JSON.

Field names are those of Grafana's published types (npm @grafana/schema 13.2). Which Prometheus is
asked is chosen on the dashboard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from shardyard.launchers.monitoring.alerts import (
    CLOCK,
    COPY,
    DEVICES,
    POWER,
    TEMPERATURE,
    UTILISATION,
    XID,
)

_SCHEMA_VERSION = 39
"""Schema version of Grafana 11; newer ones read and upgrade it themselves."""
_COLUMNS = 24
"""Columns of Grafana's grid."""
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture: its queries, each with the name of what it finds."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """PromQL and legend."""
    unit: str = "short"
    """Grafana's name of it."""
    kind: Literal["timeseries", "stat"] = "timeseries"
    shows: Literal["value", "name"] = "value"
    """Text of a ``stat``: the value found, or its name."""
    note: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height on the grid."""
        return (4, 4) if self.kind == "stat" else (8, 8)


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice for the reader above the panels."""

    name: str
    label: str
    query: str
    includes_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One page."""

    name: str
    """Name of its file, and its address in Grafana."""
    title: str
    variable: Variable
    panels: tuple[Panel, ...]


def _of_run(metric: str, aggregation: str = "max") -> str:
    """Return the query for a metric of the run, the same on all nodes that share its folder."""
    return f'{aggregation}({metric}{{run_id="$run"}})'


def _by(labels: str, metric: str, more: str = "") -> str:
    return f'max by ({labels}) ({metric}{{run_id="$run"{more}}})'


_STATE = 'shardyard_run_state{run_id="$run"}'
_RANK = "node {{node}} rank {{local_rank}}"
_LOSSES = (
    ',kind=~"worker_lost|worker_hung|node_lost|node_left_out|straggler|slow_link|'
    'device_problem|program_error"'
)


def _device(title: str, metric: str, unit: str, *, note: str = "") -> Panel:
    """Return a panel of each device's metric, as its node's agent reports it."""
    query = _by("node, device", f"shardyard_device_{metric}")
    return Panel(
        title=title, queries=((query, "node {{node}} device {{device}}"),), unit=unit, note=note
    )


def _traffic(title: str, link: str) -> Panel:
    """Return a panel of the bytes each device sends and receives per second."""
    return Panel(
        title=title,
        queries=tuple(
            (
                f"max by (node, device) "
                # rate() needs two scrapes. They are 15 s apart, so some may be missed.
                f'(rate(shardyard_device_{link}_{way}_bytes_total{{run_id="$run"}}[2m]))',
                f"node {{{{node}}}} device {{{{device}}}} {way}",
            )
            for way in ("sent", "received")
        ),
        unit="Bps",
    )


RUN = Dashboard(
    name="shardyard-run",
    title="Shardyard: a run",
    variable=Variable(name="run", label="Run", query="label_values(shardyard_run_state, run_id)"),
    panels=(
        Panel(
            title="State",
            queries=(
                # The value is the attempt's number: the newest attempt has the largest.
                (f"topk(1, max by (state) (last_over_time({_STATE}[$__range])) > 0)", "{{state}}"),
            ),
            kind="stat",
            shows="name",
            note="Of its newest attempt, as last reported: one that was killed says running.",
        ),
        Panel(title="Step", queries=((_of_run("shardyard_step"), "step"),), kind="stat"),
        Panel(title="Loss", queries=((_of_run("shardyard_loss"), "loss"),), kind="stat"),
        Panel(
            title="Tokens read",
            queries=((_of_run("shardyard_tokens_total"), "tokens"),),
            kind="stat",
        ),
        Panel(
            title="Samples read",
            queries=((_of_run("shardyard_samples_total"), "samples"),),
            kind="stat",
        ),
        Panel(
            title="Cost",
            queries=((_of_run("shardyard_cost_usd"), "cost"),),
            unit="currencyUSD",
            kind="stat",
            note="At the prices of its plans; empty where no price is known.",
        ),
        Panel(title="Loss", queries=((_of_run("shardyard_loss"), "loss"),)),
        Panel(
            title="Tokens a second",
            queries=((_of_run("shardyard_tokens_per_second"), "tokens/s"),),
        ),
        Panel(
            title="Samples a second",
            queries=((_of_run("shardyard_samples_per_second"), "samples/s"),),
        ),
        Panel(
            title="MFU",
            queries=((_of_run("shardyard_mfu_ratio"), "MFU"),),
            unit="percentunit",
            note="Empty on devices whose peak is not known.",
        ),
        Panel(
            title="Where a step's time goes",
            queries=(
                (_of_run("shardyard_step_seconds"), "step"),
                (_of_run("shardyard_data_wait_seconds"), "of it waiting for data"),
                (_of_run("shardyard_checkpoint_blocked_seconds"), "then for a checkpoint"),
            ),
            unit="s",
        ),
        Panel(
            title="Since the newest step",
            # A node that does not see the run's folder counts from its own start.
            queries=((_of_run("shardyard_step_age_seconds", "min"), "age"),),
            unit="s",
        ),
        Panel(
            title="Learning rate", queries=((_of_run("shardyard_learning_rate"), "learning rate"),)
        ),
        Panel(
            title="Gradient norm",
            queries=((_of_run("shardyard_gradient_norm"), "before clipping"),),
        ),
        Panel(
            title="Peak memory of the fullest rank",
            queries=((_of_run("shardyard_peak_memory_bytes"), "allocated"),),
            unit="bytes",
        ),
        Panel(
            title="Losses and problems",
            queries=((_by("kind", "shardyard_events_total", _LOSSES), "{{kind}}"),),
            note="Since the beginning of the run; each loss is a restart.",
        ),
        Panel(title="Ranks", queries=((_of_run("shardyard_world_size"), "world size"),)),
        Panel(
            title="Steps that a loss would cost",
            queries=(
                (
                    f"{_of_run('shardyard_step')} - {_of_run('shardyard_checkpoint_step')}",
                    "since the newest durable checkpoint",
                ),
                (_of_run("shardyard_checkpoint_every_steps"), "between two checkpoints"),
            ),
        ),
        Panel(
            title="Age of the newest durable checkpoint",
            queries=((_of_run("shardyard_checkpoint_age_seconds", "min"), "age"),),
            unit="s",
        ),
        Panel(
            title="Compute of each rank's step",
            queries=((_by("node, local_rank", "shardyard_rank_compute_seconds"), _RANK),),
            unit="s",
            note="A rank that is always above the others slows all of them down.",
        ),
        Panel(
            title="Step of each rank",
            queries=((_by("node, local_rank", "shardyard_rank_step"), _RANK),),
        ),
        Panel(
            title="Price of all nodes",
            queries=((_of_run("shardyard_cost_usd_per_hour"), "$ an hour"),),
            unit="currencyUSD",
        ),
        _device("Devices at work", "utilisation_ratio", "percentunit"),
        _device("Their memory copies", "memory_copy_ratio", "percentunit"),
        _device("Their memory in use", "memory_used_bytes", "bytes"),
        _device("Their clocks, MHz", "sm_clock_megahertz", "none"),
        _device("Their temperatures", "temperature_celsius", "celsius"),
        _device("Their power", "power_watts", "watt"),
        _device("Memory errors not corrected", "ecc_errors_total", "none"),
        _traffic("Their traffic over PCIe", "pcie"),
        _traffic("Their traffic over NVLink", "nvlink"),
    ),
)


def _of_devices(title: str, metric: str, unit: str, *, scale: str = "", note: str = "") -> Panel:
    # A regular expression, because a reader may choose several nodes.
    query = f'max by (Hostname, gpu) ({metric}{{Hostname=~"$node"}}){scale}'
    legend = "{{Hostname}} GPU {{gpu}}"
    return Panel(title=title, queries=((query, legend),), unit=unit, note=note)


CLUSTER = Dashboard(
    name="shardyard-cluster",
    title="Shardyard: devices of the cluster",
    variable=Variable(
        name="node",
        label="Node",
        query=f"label_values({UTILISATION.name}, Hostname)",
        includes_all=True,
    ),
    panels=(
        _of_devices(
            "GPU utilisation",
            UTILISATION.name,
            "percent",
            note="Near 100 on every device, once weights are loaded.",
        ),
        _of_devices("Memory copy utilisation", COPY.name, "percent"),
        _of_devices("Newest XID error", XID.name, "none", note="0: there was none."),
        # DCGM reports MHz, and Grafana's unit is hertz.
        _of_devices("SM clock", CLOCK.name, "hertz", scale=" * 1e6"),
        _of_devices("Temperature", TEMPERATURE.name, "celsius"),
        _of_devices("Power", POWER.name, "watt"),
    ),
)
assert len(CLUSTER.panels) == len(DEVICES)

ALL = (RUN, CLUSTER)


def render(dashboard: Dashboard) -> dict[str, Any]:
    """The JSON that Grafana imports, or finds in a file or a ConfigMap."""
    return {
        # A fixed id, so that a later import replaces the page.
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["shardyard"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source(), _variable(dashboard.variable)]},
        "panels": list(_panels(dashboard.panels)),
    }


def _source() -> dict[str, Any]:
    return {
        # The reader chooses, because ids of data sources differ between installations.
        "name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus",
        "refresh": 1, "hide": 0, "multi": False, "includeAll": False,
    }  # fmt: skip


def _variable(variable: Variable) -> dict[str, Any]:
    definition: dict[str, Any] = {
        "name": variable.name, "label": variable.label, "type": "query", "datasource": _SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2, "sort": 2, "hide": 0,  # read anew with the time range; Z first, so newest
        "multi": variable.includes_all, "includeAll": variable.includes_all,
    }  # fmt: skip
    if variable.includes_all:
        definition |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return definition


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    """Left to right, and below where the row is full."""
    x = y = below = 0
    for number, panel in enumerate(panels, start=1):
        width, height = panel.size
        if x + width > _COLUMNS:
            x, y = 0, below
        yield _panel(panel, number, {"x": x, "y": y, "w": width, "h": height})
        x, below = x + width, max(below, y + height)


def _panel(panel: Panel, number: int, grid_position: dict[str, int]) -> dict[str, Any]:
    definition: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": grid_position,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": letter,
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
                # A name is of now; values are drawn, or the last of them shown.
                "instant": panel.shows == "name",
                "range": panel.shows != "name",
            }
            for letter, (expr, legend) in zip(ascii_uppercase, panel.queries, strict=False)
        ],
    }
    if panel.note:
        definition["description"] = panel.note
    if panel.kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "values": False}
        definition["options"] = {
            "reduceOptions": reduce,
            "textMode": panel.shows,
            "graphMode": "none",
        }
    return definition
