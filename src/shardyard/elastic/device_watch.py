"""Transfer of telemetry's findings on a node's devices to the node that writes events.

That node also compares the settings of the nodes' network links, which no node can judge by
itself.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardyard.elastic.agent_messages import AgentMessages, Node
from shardyard.hardware.network_counters import link_bits_per_s
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.telemetry.health.devices import NetworkHealthMonitor

_LOOK_EVERY_S = 2.0
PROBLEM, WELL, PROGRAM = "device_problem", "device_well", "program_error"
"""Events: something is wrong with a device, or is over; a device tells an error that is mostly the
program's own."""

Findings = Callable[[], Sequence[Mapping[str, Any]]]
"""Function that returns telemetry's findings on a node in this attempt so far, in order."""


class DeviceWatch:
    """One node's part of the device watch.

    In each generation a node publishes all that it has found in the attempt, as another node
    may write events now; findings already in the file are not written twice.

    Args:
        link_bits_per_s: Setting of this node's network links; None: it does not report one.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        node: Node,
        findings: Findings,
        link_bits_per_s: Callable[[], int | None] = link_bits_per_s,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._node = node
        self._messages: AgentMessages | None = None
        self._findings = findings
        self._published = 0
        self._link_bits_per_s = link_bits_per_s
        self._published_link: list[dict[str, Any]] = []
        self._network = NetworkHealthMonitor()
        self._written: set[tuple[Any, ...]] | None = None
        self._polled_s = time.monotonic()

    def poll(self, messages: AgentMessages, *, writes: bool) -> list[tuple[str, dict[str, Any]]]:
        """Now and then, tell the others, or find what is to be written.

        Args:
            messages: Those of the generation.
            writes: Whether this node's agent writes events.

        Returns:
            Kinds and fields of events.
        """
        if time.monotonic() - self._polled_s < _LOOK_EVERY_S:
            return []
        self._polled_s = time.monotonic()
        if messages is not self._messages:
            self._messages, self._published, self._written = messages, 0, None
            self._published_link = []
        mine = [{**found, **self._node.event()} for found in self._findings()]
        link = [{**self._node.event(), "bits_per_s": self._link_bits_per_s()}]
        if not writes:
            if link != self._published_link:
                messages.publish("links", link)
                self._published_link = link
            if len(mine) > self._published:
                messages.publish("findings", mine)
                self._published = len(mine)
            return []
        if self._written is None:
            self._written = {
                _key(event)
                for event in read_lines(self._run.events)
                if event["kind"] in (PROBLEM, WELL, PROGRAM)
                and event.get("attempt") == self._attempt
            }
        new = []
        of_network = self._check_network([*link, *messages.from_others("links")])
        for found in [*mine, *messages.from_others("findings"), *of_network]:
            event = _event(found)
            if _key(event) not in self._written:
                self._written.add(_key(event))
                new.append((_kind(found), event))
        return new

    def _check_network(self, links: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        speeds = {link["node_rank"]: link["bits_per_s"] for link in links}
        names = {link["node_rank"]: link["node"] for link in links}
        return [
            {**found.fields(), "node": names[rank], "node_rank": rank}
            for rank, found in self._network.evaluate(time.time(), speeds).items()
        ]


def _kind(finding: Mapping[str, Any]) -> str:
    if finding["is_over"]:
        return WELL
    return PROGRAM if finding["whose"] == "program" else PROBLEM


def _event(finding: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the event; its own time and kind are those of when it is written."""
    return {
        "node": finding["node"],
        "node_rank": finding["node_rank"],
        "device": finding["device"],
        "problem": finding["kind"],
        "cause": finding["cause"],
        "whose": finding["whose"],
        "found_t": finding["t"],
    }


def _key(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(event.get(key) for key in ("node_rank", "device", "problem", "found_t"))
