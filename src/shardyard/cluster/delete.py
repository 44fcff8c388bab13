"""What a removal would do, in its order; asked, and nothing changed."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.cluster.clients import World, refuse_other_account
from shardyard.cluster.cost_report import nodes_asked
from shardyard.cluster.create import LAUNCHER, LIMIT_S, POLL_S, busy_pods, entry_of
from shardyard.cluster.orphans import KINDS, SETTLE_S, Left, Unanswered, sweep
from shardyard.cluster.prices import standing_costs
from shardyard.cluster.resources import ForeignError, Part, State, every_part, parts_of, plane_of
from shardyard.errors import CapacityError, RequestError, ShardyardError
from shardyard.io.polling import wait_for
from shardyard.launchers.ledger import Entry
from shardyard.log import say, warn

# Remove a cluster, see that each part is gone, and ask AWS what is left all the same.


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a part stood at the end: who was asked, and when."""

    part: str
    word: str
    """As of ``State``, or ``not known``: nobody answered."""
    asked: str
    unix_s: float


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What a removal did."""

    seen: list[Seen]
    """Each part that was ever begun."""
    left: list[Left]
    unanswered: list[Unanswered]
    """Questions about what is left that nobody answered: something may be."""
    problems: list[str]
    """Parts that could not be removed, and why."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is there any more, and all who were asked say so."""
        gone = all(seen.word == "absent" for seen in self.seen)
        return gone and not self.left and not self.unanswered and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_clean": self.is_clean}


def remove(
    world: World,
    *,
    agree: Callable[[str], None],
    agree_to_lose: Callable[[str], None],
    poll_s: float = POLL_S,
    limit_s: float = LIMIT_S,
) -> Removed:
    """Remove what was made, the last first; repeatable.

    Args:
        agree: Asked once before; raises if the answer is no.
        agree_to_lose: Asked for the name of what holds data; raises unless it is given.
        limit_s: For each part to go, and for what it does by itself before.

    Raises:
        RequestError: Pods that use accelerators run there.
        AccessError: Something of the name is somebody else's.
    """
    refuse_other_account(world)
    ever = ever_begun(world)
    if not ever:
        say(f"nothing of {world.given.name} was made from here, says {world.ledger.path}")
    refuse_busy(world)
    standing = to_be_removed(world)
    names = ", ".join(f"{part.kind} {part.name(world.given)}" for part in standing)
    if standing:
        agree(f"remove {names}?")
    for part in standing:
        if part.holds_data and _is_there(part, world):
            agree_to_lose(part.name(world.given))
    problems = _take_down(standing, world, poll_s=poll_s, limit_s=limit_s)
    seen = [_look(part, world) for part in _downwards(ever)]
    swept = sweep(world, every_s=poll_s, within_s=min(limit_s, SETTLE_S))
    return Removed(
        seen=seen, left=list(swept.left), unanswered=list(swept.unanswered), problems=problems
    )


def ever_begun(world: World) -> list[Part]:
    """Each part that was begun at some time, gone or not, in the order of making."""
    kinds = {entry.kind for entry in world.ledger.begun()}
    return [part for part in every_part(world.given) if part.kind in kinds]


def to_be_removed(world: World) -> list[Part]:
    """Each part that is there or may be, in the order of removing."""
    ever = _downwards(ever_begun(world))
    return [part for part in ever if _is_begun(part, world) or _is_there(part, world)]


def _downwards(parts: list[Part]) -> list[Part]:
    """The last made first; what goes with the control plane is behind it."""
    down = parts[::-1]
    own = [part for part in down if not part.goes_with_cluster]
    return own + [part for part in down if part.goes_with_cluster]


def _take_down(parts: list[Part], world: World, *, poll_s: float, limit_s: float) -> list[str]:
    """Remove parts in their order; what did not go, and why."""
    problems: list[str] = []
    for part in [part for part in parts if not part.goes_with_cluster]:
        name = f"{part.kind} {part.name(world.given)}"
        try:
            state = _remove(part, world, poll_s=poll_s, limit_s=limit_s)
        except ShardyardError as error:
            problems.append(f"{name}: {error}")
        else:
            if state.word == "absent":
                continue
            problems.append(f"{name} is {state.word}: {state.why}".rstrip(": "))
        warn(problems[-1])
        if not part.is_inside:
            break  # what stands under it cannot go while it is there
    return problems


def _look(part: Part, world: World) -> Seen:
    """How a part stands behind all removals; what is back is written down again."""
    name = part.name(world.given)
    try:
        state = part_state(part, world)
    except ShardyardError as error:
        state = State(word="not known", why=str(error), asked=str(error))
    if state.word == "absent":
        _strike(part, world)
    elif not _is_begun(part, world):
        world.ledger.intend(part.kind, name, launcher=LAUNCHER)
    return Seen(part=f"{part.kind} {name}", word=state.word, asked=state.asked, unix_s=time.time())


def part_state(part: Part, world: World) -> State:
    """How a part stands; one inside the cluster is gone with its control plane."""
    if part.is_inside and (plane := plane_of(world.given).state(world)).word == "absent":
        return State(word="absent", asked=plane.asked)
    try:
        return part.state(world)
    except ForeignError as error:
        if _is_begun(part, world):
            raise
        # Ours is gone, by the ledger, and somebody made another of its name since.
        return State(word="absent", why=str(error), asked=f"tags of {part.name(world.given)}")


def _is_there(part: Part, world: World) -> bool:
    return part_state(part, world).word != "absent"


def _strike(part: Part, world: World) -> None:
    """Write down that it is gone."""
    if _is_begun(part, world):
        name = part.name(world.given)
        world.ledger.remove(Entry(kind=part.kind, name=name, launcher=LAUNCHER))


def _is_begun(part: Part, world: World) -> bool:
    """Whether the ledger says that it may be there."""
    return entry_of(part, world.ledger, part.name(world.given)) is not None


def _remove(part: Part, world: World, *, poll_s: float, limit_s: float) -> State:
    """Remove a part, and wait until it neither is there nor goes any more."""
    name = part.name(world.given)
    state = part_state(part, world)
    if state.word not in ("absent", "going"):
        _wait_for_its_end(part, world, poll_s=poll_s, limit_s=limit_s)
        say(f"removing {part.kind} {name}")
        part.remove(world)
    gone = wait_for(lambda: _gone(part, world), every_s=poll_s, within_s=limit_s)
    if gone is None:
        return part.state(world)
    if gone.word == "absent":
        _strike(part, world)
    return gone


def _gone(part: Part, world: World) -> State | None:
    """A state that does not change by itself any more; None: it is still going."""
    state = part_state(part, world)
    return state if state.word in ("absent", "failed") else None


def _wait_for_its_end(part: Part, world: World, *, poll_s: float, limit_s: float) -> None:
    """Until what a part does by itself is over.

    Raises:
        CapacityError: It is not in time.
    """
    unfinished = part.unfinished(world)
    if not unfinished:
        return
    say(f"waiting for what {part.name(world.given)} does: {unfinished}")
    if not wait_for(lambda: not part.unfinished(world), every_s=poll_s, within_s=limit_s):
        raise CapacityError(
            f"{part.name(world.given)} is not removed while it does what would be lost: "
            f"{part.unfinished(world)}. Run the same command again once that has ended, or end it "
            "(`aws fsx cancel-data-repository-task`)."
        )


def refuse_busy(world: World) -> None:
    """Pods with accelerators, and jobs, are somebody's run; removing its nodes would end it.

    Raises:
        RequestError: There are some.
        AccessError: What is there is somebody else's.
    """
    if world.given.kind == "eks":
        _refuse_pods(world)
        return
    for part in parts_of(world.given):
        is_there = part.state(world).word != "absent"
        if is_there and (held := part.held_by(world)):
            raise RequestError(f"{world.given.name} is not removed: {held}. Nothing was removed.")


def _refuse_pods(world: World) -> None:
    if plane_of(world.given).state(world).word == "absent":
        return
    busy = busy_pods(world)  # of a cluster that answers, however its stack is
    if busy:
        raise RequestError(
            f"{world.given.name} is not removed: {len(busy)} pods use its accelerators "
            f"({', '.join(busy[:5])}). End their runs first (`shardyard cancel`, `shardyard "
            "teardown`), or ask their owners. Nothing was removed."
        )


def refuse_wrong_name(name: str, given: str) -> None:
    """That what holds data is removed by its name alone.

    Raises:
        RequestError: Another name was given.
    """
    if name != given:
        raise RequestError(
            f"{name} holds data, which would be lost, so it is removed by its name alone, and "
            f"{given!r} is another. Nothing was removed. Give --delete-data {name}, after copying "
            "what you need: what lies outside the folder linked to a bucket is nowhere else."
        )


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
