"""The table of docs/monitoring.md, and the files for a Prometheus and a Grafana of one's own."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from shardyard.io.yaml import write_yaml
from shardyard.launchers.monitoring import alerts, dashboards
from shardyard.rundir.metrics import ALL


def table() -> str:
    """A Markdown table: a row a metric of a run."""
    lines = ["| metric | what |", "|---|---|"]
    for row in ALL:
        by = f" by `{row.label}`" if row.label else ""
        lines.append(f"| `{row.name}`{by} | {row.help} |")
    return "\n".join(lines) + "\n"


def _json(dashboard: dashboards.Dashboard) -> str:
    content: dict[str, Any] = dashboards.render(dashboard)
    return json.dumps(content, indent=1) + "\n"


FILES: dict[str, Callable[[], str]] = {
    **{f"{board.name}.json": partial(_json, board) for board in dashboards.ALL},
    "shardyard-alerts.yaml": lambda: write_yaml(alerts.render()),
}
"""File below docs/monitoring/ -> what makes it."""
