"""What a drill and the processes that it breaks agree on: read by both halves."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardyard.io.files import parse_json

FAULTS_VARIABLE = "SHARDYARD_FAULTS"
"""Environment variable with the faults that workers make by themselves (elastic/faults.py)."""

FAULT_MARK = "@shardyard-fault "
"""Begins a log line of a rank: which fault strikes it now, at which step, when."""

HOSTS_VARIABLE = "SHARDYARD_HOSTS"
"""Environment variable with the ``Hosts`` of a local job. Nothing but a drill sets it."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """What the nodes of a local job are put on, so that they are more than processes."""

    enter: list[list[str]]
    """By node: the words before its program, such as those that enter a namespace."""
    address: str
    """Where the others reach node 0."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def hosts_of(environment: Mapping[str, str], nodes: int) -> Hosts:
    """Those that the environment asks for, else this machine itself."""
    text = environment.get(HOSTS_VARIABLE)
    return Hosts(**parse_json(text)) if text else Hosts(enter=[[]] * nodes, address="127.0.0.1")
