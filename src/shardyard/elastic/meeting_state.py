"""What the nodes of torch's rendezvous share, as JSON: a pickle lets its writer run code here."""

import json
import pickle
import time
from collections.abc import Collection
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from typing import Any

from shardyard.torch_private import LONG_AGO, empty_meeting, node_of_meeting


class LastCall:
    """The end of the last call for nodes, by a clock of this node that nobody sets.

    What a node writes is a mark; it ends so long after this node saw the mark first.
    """

    def __init__(self, lasts: timedelta) -> None:
        self._lasts_s = lasts.total_seconds()
        self._mark: str | None = None
        self._told: datetime | None = None
        self._ends_s = 0.0

    def deadline(self, mark: str | None) -> datetime | None:
        """When it ends, as torch compares it: by this node's wall clock, now."""
        if mark != self._mark:
            self._mark, self._ends_s = mark, time.monotonic() + self._lasts_s
        left = timedelta(seconds=self._ends_s - time.monotonic())
        self._told = None if mark is None else datetime.now(UTC) + left
        return self._told

    def mark(self, deadline: datetime | None) -> str | None:
        """Of the call that was told last, or of one that this node begins."""
        if deadline is None or deadline == self._told:
            return None if deadline is None else self._mark
        return deadline.isoformat()


def to_json(pickled: bytes, last_call: LastCall) -> bytes:
    """Of what a handler of this process gives to its backend; its signs of life are left out."""
    state = pickle.loads(pickled)
    content = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "last_call": last_call.mark(state.deadline),
        "participants": [[*_plain(node), state.participants[node]]
                         for node in sorted(state.participants)],
        "waiting": [_plain(node) for node in sorted(state.wait_list)],
        "spare": [_plain(node) for node in sorted(state.redundancy_list)],
    }  # fmt: skip
    return json.dumps(content).encode()


def from_json(written: bytes, last_call: LastCall, *, alive: Collection[str]) -> bytes:
    """As a handler expects it.

    Args:
        alive: Names of the nodes that live; the others are gone for the handler.
    """
    content = json.loads(written)
    state = empty_meeting()
    state.round, state.complete, state.closed = (
        int(content["round"]), bool(content["complete"]), bool(content["closed"]),
    )  # fmt: skip
    state.deadline = last_call.deadline(content["last_call"])
    state.participants = {_node(each[:3]): int(each[3]) for each in content["participants"]}
    state.wait_list = {_node(each) for each in content["waiting"]}
    state.redundancy_list = {_node(each) for each in content["spare"]}
    now = datetime.now(UTC)
    state.last_heartbeats = {
        node: now if repr(node) in alive else LONG_AGO
        for node in (*state.participants, *state.wait_list, *state.redundancy_list)
    }
    return pickle.dumps(state)


def is_closed(written: bytes) -> bool:
    """Whether the nodes are ending."""
    return bool(json.loads(written)["closed"])


def _plain(node: Any) -> list[Any]:
    """Address, process id and a number of its own."""
    return list(astuple(node))


def _node(plain: Any) -> Any:
    address, pid, number = plain
    return node_of_meeting(str(address), int(pid), int(number))
