"""How far a node's neighbour has its snapshots: the agent notes it, the node's workers wait for it.

One number of eight bytes for each rank, each written in one store, and one for the node.
"""

import mmap

SENT_BYTES = 8
"""Of each number."""


class Sent:
    """Numbers in the agent's memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._fields = memoryview(memory).cast("q")

    @staticmethod
    def bytes_for(local_ranks: int) -> int:
        """Of the memory for the ranks of one node."""
        return SENT_BYTES * (1 + local_ranks)

    def begin(self) -> None:
        """No neighbour is there yet; of a new generation nothing is sent."""
        self._fields[0] = 0
        for place in range(1, len(self._fields)):
            self._fields[place] = -1

    def have_neighbour(self, is_there: bool) -> None:
        """Whether snapshots are sent to one from now on."""
        self._fields[0] = int(is_there)

    def note(self, local_rank: int, step: int) -> None:
        """The neighbour holds this rank's snapshot of a step."""
        self._fields[1 + local_rank] = step

    def step(self, local_rank: int) -> int:
        """Of the newest snapshot of this generation that the neighbour holds; -1: of none."""
        return int(self._fields[1 + local_rank])

    def is_awaited(self, local_rank: int, step: int) -> bool:
        """Whether the neighbour is there, and has this snapshot of a rank not yet."""
        return bool(self._fields[0]) and self.step(local_rank) < step
