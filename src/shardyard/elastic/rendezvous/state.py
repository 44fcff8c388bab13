"""Shared state of torch's rendezvous, as JSON: a pickle would let its writer run code here."""

import json
import pickle
from collections.abc import Collection
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any

from shardyard.io.files import parse_json
from shardyard.torch_private import LONG_AGO, empty_rendezvous_state, rendezvous_node


def empty_state() -> bytes:
    """Return the state that a handler expects before any node has come."""
    return pickle.dumps(empty_rendezvous_state())


def to_json(pickled: bytes, *, signs: bool = False) -> bytes:
    """Convert the state that a handler of this process gives to its backend.

    Args:
        signs: Whether to include its heartbeats.
    """
    state = pickle.loads(pickled)
    last_call = None if state.deadline is None else state.deadline.isoformat()
    content = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "last_call": last_call,
        "participants": [[*_plain(node), state.participants[node]]
                         for node in sorted(state.participants)],
        "waiting": [_plain(node) for node in sorted(state.wait_list)],
        "spare": [_plain(node) for node in sorted(state.redundancy_list)],
    }  # fmt: skip
    if signs:
        heartbeats = sorted(state.last_heartbeats.items())
        content["signs"] = [[*_plain(node), time.isoformat()] for node, time in heartbeats]
    return json.dumps(content).encode()


def from_json(written: bytes, *, alive: Collection[str] | None = None) -> bytes:
    """Convert the shared JSON into a handler's state; its last call ends by its writer's clock.

    Args:
        alive: Names of the nodes that live; the handler counts the others as gone. None: the
            state has their heartbeats.
    """
    content = parse_json(written)
    state = empty_rendezvous_state()
    state.round, state.complete, state.closed = (
        int(content["round"]), bool(content["complete"]), bool(content["closed"]),
    )  # fmt: skip
    last_call = content["last_call"]
    state.deadline = None if last_call is None else datetime.fromisoformat(last_call)
    state.participants = {_node(each[:3]): int(each[3]) for each in content["participants"]}
    state.wait_list = {_node(each) for each in content["waiting"]}
    state.redundancy_list = {_node(each) for each in content["spare"]}
    if alive is None:
        state.last_heartbeats = {
            _node(each[:3]): datetime.fromisoformat(each[3]) for each in content["signs"]
        }
        return pickle.dumps(state)
    now = datetime.now(UTC)
    state.last_heartbeats = {
        node: now if repr(node) in alive else LONG_AGO
        for node in (*state.participants, *state.wait_list, *state.redundancy_list)
    }
    return pickle.dumps(state)


def is_closed(written: bytes) -> bool:
    """Whether the nodes are ending."""
    return bool(parse_json(written)["closed"])


def _plain(node: Any) -> list[Any]:
    """Address, process id and a number of its own."""
    return list(astuple(node))


def _node(plain: Any) -> Any:
    address, pid, number = plain
    return rendezvous_node(str(address), int(pid), int(number))
