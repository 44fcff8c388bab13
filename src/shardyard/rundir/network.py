"""Over what the nodes of a run really talked to each other: the newest event of kind `network`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir

Transport = Literal["efa", "infiniband", "sockets"]

WORDS: dict[Transport, str] = {
    "efa": "EFA", "infiniband": "InfiniBand or RoCE", "sockets": "TCP sockets"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Network:
    """What was used, and how that is known."""

    transport: Transport
    said_by: str
    """NCCL, whose log named it; or gloo, which has no other."""
    attempt: int
    interfaces: str = ""
    """By name or number: of gloo that which sent most; empty: nobody told."""

    @property
    def words(self) -> str:
        """Of the transport, as a person reads it."""
        return WORDS[self.transport] + (f" ({self.interfaces})" if self.interfaces else "")


def network_of(event: Mapping[str, Any]) -> Network | None:
    """Of an event of kind `network`; None: it names no transport that is known."""
    transport = event.get("transport")
    for known in get_args(Transport):
        if transport == known:
            attempt = event.get("attempt")
            return Network(
                transport=known,
                said_by=str(event.get("said_by")),
                attempt=attempt if isinstance(attempt, int) else 0,
                interfaces=str(event.get("interfaces") or ""),
            )
    return None


def read_network(run_dir: RunDir) -> Network | None:
    """The newest; None: the run has one node, or nothing has named its network yet."""
    for event in read_lines_backwards(run_dir.events, with_any=('"network"',)):
        if event.get("kind") == "network" and (found := network_of(event)) is not None:
            return found
    return None
