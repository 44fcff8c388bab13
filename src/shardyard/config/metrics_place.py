"""Where a node offers its metrics: ``observe.prometheus``."""

import os
import re
from dataclasses import dataclass

ADDRESS_VARIABLE = "SHARDYARD_METRICS_ADDRESS"
"""In a pod: its own address, at which Prometheus reaches it."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MetricsPlace:
    """An address to listen at."""

    host: str
    port: int
    """0: any that is free."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def metrics_place(setting: int | str | None) -> MetricsPlace | None:
    """The place of ``observe.prometheus``; a port alone is loopback, or in a pod the pod's."""
    if setting is None:
        return None
    if isinstance(setting, int):
        return MetricsPlace(os.environ.get(ADDRESS_VARIABLE, LOOPBACK), setting)
    host, _, port = setting.rpartition(":")
    return MetricsPlace(re.sub(r"^\[(.*)\]$", r"\1", host), int(port))
