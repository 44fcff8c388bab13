"""Which runs take snapshots, and how many copies in host memory these keep, under which labels."""

from shardyard.config.schema.base import Auto
from shardyard.config.schema.recipe import Recipe

STEPS_OF_A_FIXED_SIZE = 500
"""Between checkpoints of a run that keeps its number of nodes."""

SLOTS = 3
"""Of one rank: a save may hold one for long while it writes its files, the other two take turns, so
that a worker that is killed in the middle of a copy leaves the snapshot before."""

SLOTS_FOR_NEIGHBOUR = 2
"""For each rank of the node before: one that is whole, while the next one comes."""

SENT = "snapshot_sent"
"""Label of the memory that says how far a node's neighbour has its snapshots."""
ELSEWHERE = "snapshot_elsewhere"
"""Label of the memory that says what agents of other nodes hold."""


def is_elastic(recipe: Recipe) -> bool:
    """Whether the run may change its number of nodes."""
    fixed, elastic = recipe.cluster.nodes, recipe.elastic
    least = fixed if elastic.min_nodes == "auto" else elastic.min_nodes
    most = fixed if elastic.max_nodes == "auto" else elastic.max_nodes
    return least < most


def steps_between_snapshots(recipe: Recipe) -> int | Auto | None:
    """As the recipe asks, or as it stands for where it leaves that to the size of the run."""
    every = recipe.elastic.snapshot_every
    if every == "elastic":
        return "auto" if is_elastic(recipe) else None
    return every


def steps_between_checkpoints(recipe: Recipe) -> int | Auto:
    """The same of checkpoints."""
    every = recipe.checkpoint.every
    if every == "elastic":
        return "auto" if is_elastic(recipe) else STEPS_OF_A_FIXED_SIZE
    return every


def reason_of_snapshots(recipe: Recipe, lacking: str) -> tuple[int | str | None, str]:
    """Steps between snapshots where the size of the run says so, and why.

    Args:
        lacking: What a node has too little of for them; empty: nothing.
    """
    every = steps_between_snapshots(recipe)
    if every is None:
        return None, f"{_size(recipe)}: a fixed size"
    if lacking:
        return None, f"{lacking}: checkpoints only"
    return every, f"{_size(recipe)}: the others continue from memory when a node is lost"


def reason_of_checkpoints(recipe: Recipe) -> tuple[int | str, str]:
    """The same of checkpoints."""
    every = steps_between_checkpoints(recipe)
    if every == "auto":
        return every, f"{_size(recipe)}: by time, as far apart as loses the least (Daly)"
    return every, f"{_size(recipe)}: a fixed size"


def reason_of_neighbour(recipe: Recipe) -> tuple[bool, str]:
    """Whether a node keeps the snapshots of the one before, where the recipe leaves it open."""
    if recipe.elastic.snapshot_every is None:
        return False, "elastic.snapshot_every=null: there are no snapshots"
    if recipe.elastic.max_nodes == 1:
        return False, "one node has no neighbour"
    return True, "a lost node takes its own memory with it"


def _size(recipe: Recipe) -> str:
    return f"min_nodes={recipe.elastic.min_nodes}, max_nodes={recipe.elastic.max_nodes}"


def takes_snapshots(recipe: Recipe) -> bool:
    """Whether the run takes any, as far as the recipe says."""
    return steps_between_snapshots(recipe) is not None


def slot_labels(local_rank: int) -> list[str]:
    """What the memory of each slot of a rank is called on its node."""
    return [f"snapshot_{local_rank}_{slot}" for slot in range(SLOTS)]


def neighbour_labels(local_rank: int) -> list[str]:
    """The same of slots for a rank of the node before, by its local number there."""
    return [f"snapshot_neighbour_{local_rank}_{slot}" for slot in range(SLOTS_FOR_NEIGHBOUR)]


def snapshot_labels(recipe: Recipe) -> list[str]:
    """All that an agent owns for snapshots on its node; nothing where there are none."""
    elastic, devices = recipe.elastic, recipe.cluster.devices
    if not takes_snapshots(recipe):
        return []
    assert isinstance(devices, int)
    own = [label for local in range(devices) for label in slot_labels(local)]
    if elastic.snapshot_neighbour is not True:
        return own
    kept = [label for local in range(devices) for label in neighbour_labels(local)]
    return [*own, *kept, SENT, ELSEWHERE]


def copies(recipe: Recipe) -> int:
    """Of a rank's state in host memory, those that a node keeps for another among them."""
    if not takes_snapshots(recipe):
        return 0
    return SLOTS + (SLOTS_FOR_NEIGHBOUR if recipe.elastic.snapshot_neighbour is True else 0)
