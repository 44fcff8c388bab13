"""Brings what each node's telemetry finds wrong with its devices to the node that writes events.

That one also compares what the nodes' network links are set to, which no node can judge alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardyard.elastic.agent_messages import Node, Notices
from shardyard.hardware.network_counters import link_bits_per_s
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.telemetry.health.devices import NetworkJudge

_LOOK_EVERY_S = 2.0
PROBLEM, WELL, PROGRAM = "device_problem", "device_well", "program_error"
"""Events: something is wrong with a device, or is over; a device tells an error that is mostly the
program's own."""

Findings = Callable[[], Sequence[Mapping[str, Any]]]
"""What a node's telemetry has found in this attempt so far, in order."""


class DeviceWatch:
    """One node's part of it.

    In each generation a node tells all that it has found in the attempt, as whoever writes events
    may have changed; what the file holds is not written twice.

    Args:
        link_bits_per_s: What this node's network links are set to; None: it does not say.
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
        self._notices: Notices | None = None
        self._findings = findings
        self._published = 0
        self._link_bits_per_s = link_bits_per_s
        self._told_link: list[dict[str, Any]] = []
        self._network = NetworkJudge()
        self._written: set[tuple[Any, ...]] | None = None
        self._looked_s = time.monotonic()

    def look(self, notices: Notices, *, writes: bool) -> list[tuple[str, dict[str, Any]]]:
        """Now and then, tell the others, or find what is to be written.

        Args:
            notices: Those of the generation.
            writes: Whether this node's agent writes events.

        Returns:
            Kinds and fields of events.
        """
        if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = time.monotonic()
        if notices is not self._notices:
            self._notices, self._published, self._written = notices, 0, None
            self._told_link = []
        mine = [{**found, **self._node.event()} for found in self._findings()]
        link = [{**self._node.event(), "bits_per_s": self._link_bits_per_s()}]
        if not writes:
            if link != self._told_link:
                notices.publish("links", link)
                self._told_link = link
            if len(mine) > self._published:
                notices.publish("findings", mine)
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
        of_network = self._judge_network([*link, *notices.from_others("links")])
        for found in [*mine, *notices.from_others("findings"), *of_network]:
            event = _event(found)
            if _key(event) not in self._written:
                self._written.add(_key(event))
                new.append((_kind(found), event))
        return new

    def _judge_network(self, links: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        speeds = {link["node_rank"]: link["bits_per_s"] for link in links}
        names = {link["node_rank"]: link["node"] for link in links}
        return [
            {**found.fields(), "node": names[rank], "node_rank": rank}
            for rank, found in self._network.look(time.time(), speeds).items()
        ]


def _kind(found: Mapping[str, Any]) -> str:
    if found["is_over"]:
        return WELL
    return PROGRAM if found["whose"] == "program" else PROBLEM


def _event(found: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the event; its own time and kind are those of when it is written."""
    return {
        "node": found["node"],
        "node_rank": found["node_rank"],
        "device": found["device"],
        "problem": found["kind"],
        "cause": found["cause"],
        "whose": found["whose"],
        "found_t": found["t"],
    }


def _key(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(event.get(key) for key in ("node_rank", "device", "problem", "found_t"))
