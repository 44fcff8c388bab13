"""Monitoring of a cluster's runs and devices: Prometheus and Grafana, or AWS's own service.

A PodMonitor gives Prometheus our runs' endpoints, and a PrometheusRule its alerts.
Grafana's sidecar takes dashboards from ConfigMaps with its label.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardyard.errors import RequestError
from shardyard.launchers.base import InstallablePart, LaunchRequest, Watchers
from shardyard.launchers.kubernetes.api import Api
from shardyard.launchers.kubernetes.install import released_part, runs
from shardyard.launchers.kubernetes.objects import to_yaml
from shardyard.launchers.kubernetes.ownership import MANAGED_BY
from shardyard.launchers.kubernetes.pod import placement
from shardyard.launchers.kubernetes.prerequisites import (
    CLOUDWATCH,
    DCGM,
    MONITORS,
    PROMETHEUS,
)
from shardyard.launchers.kubernetes.resources import demand_of
from shardyard.launchers.monitoring import alerts, dashboards
from shardyard.launchers.monitoring.alerts import counters
from shardyard.log import info, warn

NAME = "shardyard"
PORT = "metrics"
"""Name of the metrics port of a run's pods, if observe.prometheus gives it a number."""
_SIDECAR = ("grafana_dashboard", "1")
"""Label of ConfigMaps that kube-prometheus-stack's Grafana reads, in all namespaces."""
_NVIDIA = "nvidia.com/gpu"
_KINDS = {PROMETHEUS: "Deployment", DCGM: "DaemonSet", CLOUDWATCH: "DaemonSet"}
"""Part -> kind of object it runs as."""

OURS = "monitor, alert rules and dashboards"
"""Name of the part that is rendered by us."""

Object = dict[str, Any]


def watchers(request: LaunchRequest, kind: Watchers) -> list[InstallablePart]:
    """Return all parts, in the order of installation; no cluster is queried.

    Raises:
        RequestError: Which nodes have devices is not given, or of which EKS cluster the context is.
    """
    settings = request.recipe.launch.kubernetes
    if kind == "cloudwatch":
        assert CLOUDWATCH.release is not None
        return [released_part(CLOUDWATCH, CLOUDWATCH.release, settings.context)]
    if request.recipe.observe.prometheus is None:
        warn(
            "observe.prometheus is not set, so the run offers no metrics of its own: its dashboard "
            "stays empty. Set it to a port, such as observe.prometheus=9400."
        )
    assert PROMETHEUS.release is not None
    # First, because its operator brings the kinds of the monitor and of the rules.
    found = [released_part(PROMETHEUS, PROMETHEUS.release, settings.context)]
    if _NVIDIA in demand_of(request).devices:
        found.append(_device_exporter(request))
    else:
        info("the recipe's nodes have no NVIDIA devices: DCGM's exporter is left out")
    return [*found, _shardyard_part(render_objects(settings.namespace))]


def missing_watchers(parts: Sequence[InstallablePart], api: Api) -> list[InstallablePart]:
    """Return the parts of ``watchers`` that a cluster lacks, regardless of the installer."""
    installed = {row.label for row, runs_as in _KINDS.items() if runs(row, api, runs_as)}
    left = [part for part in parts if part.name not in installed and part.name != OURS]
    for part in parts:
        if part.name == OURS and (objects := _missing_objects(part.objects, api)):
            left.append(_shardyard_part(objects))
    return left


def _shardyard_part(objects: tuple[Object, ...]) -> InstallablePart:
    why = "find runs, tell of those that fail, and show them"
    return InstallablePart(name=OURS, purpose=why, text=to_yaml(objects), objects=objects)


def _missing_objects(objects: tuple[Object, ...], api: Api) -> tuple[Object, ...]:
    """Return the objects to create: none if the monitor exists, which is created last."""
    served = [kind for kind in MONITORS if api.serves(kind)]
    if "PodMonitor" in served:
        names = [item["metadata"]["name"] for item in api.everywhere("PodMonitor")]
        if NAME in names:
            return ()
    return tuple(
        item
        for item in objects
        if (item["kind"] in MONITORS and item["kind"] not in served)
        or api.get(item["kind"], item["metadata"]["name"]) is None
    )


def _device_exporter(request: LaunchRequest) -> InstallablePart:
    """DCGM's exporter on the recipe's nodes; on one without a device it would not start.

    Raises:
        RequestError: The recipe does not say which nodes those are.
    """
    where = placement(request, demand_of(request))
    if "nodeSelector" not in where:
        raise RequestError(
            "cluster.instance and launch.kubernetes.node_selector are not given, so it is not "
            "known which nodes have devices, and DCGM's exporter does not start on others. Give "
            "launch.kubernetes.node_selector a label that nodes with devices have."
        )
    # Its default list leaves out XID errors, which an alert reads.
    values: Object = {"customMetrics": counters()}
    values |= {key: where[key] for key in ("nodeSelector", "tolerations") if key in where}
    assert DCGM.release is not None
    release = replace(DCGM.release, values=values)
    return released_part(DCGM, release, request.recipe.launch.kubernetes.context)


def render_objects(namespace: str) -> tuple[Object, ...]:
    """Dashboards, rules and, last, the monitor; pure."""
    boards = [_board(board, namespace) for board in dashboards.ALL]
    rules = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _meta(NAME, namespace),
        "spec": alerts.render(),
    }
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _meta(NAME, namespace),
        "spec": {
            # One Prometheus serves the runs of all namespaces.
            "namespaceSelector": {"any": True},
            "selector": {"matchLabels": dict([MANAGED_BY])},
            "podMetricsEndpoints": [{"port": PORT, "interval": "15s"}],
        },
    }
    return (*boards, rules, monitor)


def _board(board: dashboards.Dashboard, namespace: str) -> Object:
    meta = _meta(board.name, namespace)
    meta["labels"] |= dict([_SIDECAR])
    text = json.dumps(dashboards.render(board), indent=1) + "\n"
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta,
        "data": {f"{board.name}.json": text},
    }  # fmt: skip


def _meta(name: str, namespace: str) -> Object:
    return {"name": name, "namespace": namespace, "labels": dict([MANAGED_BY])}
