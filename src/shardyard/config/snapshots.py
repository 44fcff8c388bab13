"""How many copies of a rank's state snapshots keep in host memory, and what these are called."""

SLOTS = 3
"""Of one rank: a save may hold one for long while it writes its files, the other two take turns, so
that a worker that is killed in the middle of a copy leaves the snapshot before."""


def slot_labels(local_rank: int) -> list[str]:
    """What the memory of each slot of a rank is called on its node."""
    return [f"snapshot_{local_rank}_{slot}" for slot in range(SLOTS)]
