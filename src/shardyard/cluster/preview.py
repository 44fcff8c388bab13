"""What a removal would do, in its order; asked, and nothing changed."""

from dataclasses import asdict, dataclass
from typing import Any

from shardyard.cluster.cost_report import nodes_asked
from shardyard.cluster.kinds import KINDS
from shardyard.cluster.prices import standing_costs
from shardyard.cluster.reach import refuse_other_account
from shardyard.cluster.remove import part_state, refuse_busy, to_be_removed
from shardyard.cluster.world import World
from shardyard.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Step:
    """The removal of one part."""

    part: str
    word: str
    """How it stands."""
    commands: tuple[str, ...]
    """Exactly what is run; none: it goes with the control plane, or is going already."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A removal that has not been done."""

    steps: tuple[Step, ...]
    """In their order."""
    refused: str
    """Why it would be refused now; empty: it would not."""
    data: tuple[str, ...]
    """Names of what holds data, each to be given with ``--delete-data``."""
    usd_per_hour: float
    """What is no more paid behind it, of known prices."""
    is_price_whole: bool
    asks_for: int
    """Kinds of things that AWS is asked for at the end."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def preview_removal(world: World) -> Preview:
    """What ``remove`` would do now.

    Raises:
        AccessError: Something of the name is somebody else's.
    """
    refuse_other_account(world)
    refused = ""
    try:
        refuse_busy(world)
    except RequestError as error:
        refused = str(error)
    parts = to_be_removed(world)
    steps, data = [], []
    for part in parts:
        name, state = part.name(world.given), part_state(part, world)
        if part.holds_data and state.word != "absent":
            data.append(name)
        is_done = state.word in ("absent", "going")
        acts = [] if is_done else part.removal(world)
        commands = tuple(act.words(world) for act in acts)
        steps.append(Step(part=f"{part.kind} {name}", word=state.word, commands=commands))
    kinds = {part.kind for part in parts}
    nodes = nodes_asked(world.given, world.ledger)
    costs = [one for one in standing_costs(world.given, nodes=nodes) if one.part in kinds]
    return Preview(
        steps=tuple(steps),
        refused=refused,
        data=tuple(data),
        usd_per_hour=sum(one.usd_per_hour or 0.0 for one in costs),
        is_price_whole=all(one.usd_per_hour is not None for one in costs),
        asks_for=len(KINDS),
    )
