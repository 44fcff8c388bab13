"""What the agents of one generation tell each other, through the rendezvous store.

    shardyard/proposal/<g>  what the node with group rank g holds for the number of this generation
    shardyard/generation    that number, from the node of rank 0
    shardyard/workers/<g>   [{rank, node, pid}] of the node with group rank g
    shardyard/losses/<g>    what that node lost

Torch gives every rendezvous a store of its own, so no notice outlives its generation.
"""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError


class Notices:
    """One node's view of the notices of all nodes."""

    def __init__(self, store: Any, *, group_rank: int, num_nodes: int) -> None:
        self._store = store
        self._group_rank = group_rank
        self._others = [rank for rank in range(num_nodes) if rank != group_rank]

    def agree_on_generation(self, proposal: int) -> int:
        """The largest proposal, on every node: one that has just come knows of no earlier ones."""
        self._store.set(f"shardyard/proposal/{self._group_rank}", str(proposal))
        if self._group_rank == 0:
            theirs = [int(self._store.get(key)) for key in self._keys("proposal")]
            self._store.set("shardyard/generation", str(max([proposal, *theirs])))
        return int(self._store.get("shardyard/generation"))

    def publish(self, kind: str, entries: list[dict[str, Any]]) -> None:
        """Tell the other nodes."""
        self._store.set(f"shardyard/{kind}/{self._group_rank}", json.dumps(entries))

    def any_from_others(self, kind: str) -> bool:
        """Whether another node has published this kind of notice."""
        return any(self._store.check([key]) for key in self._keys(kind))

    def from_others(self, kind: str, *, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Entries of all other nodes that published within the time; the silent ones are absent."""
        keys = self._keys(kind)
        if keys and wait_s:
            with suppress(DistError):  # a node that is gone says nothing
                self._store.wait(keys, timedelta(seconds=wait_s))
        found = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return [entry for entries in found for entry in entries]

    def all_published(self, kind: str) -> bool:
        """Whether every other node has published this kind of notice."""
        return all(self._store.check([key]) for key in self._keys(kind))

    def _keys(self, kind: str) -> list[str]:
        return [f"shardyard/{kind}/{rank}" for rank in self._others]
