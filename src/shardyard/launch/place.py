"""Where a process stands among the nodes of its job, as each scheduler says it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """One node's place; read from the environment by ``place_in``."""

    node_rank: int
    nodes: int
    host: str
    """Where node 0 serves the rendezvous, as all nodes can reach it."""
    port: int
    session: str
    """The same on all nodes of one start of the job, and new at each (requeue, retry, restart)."""
