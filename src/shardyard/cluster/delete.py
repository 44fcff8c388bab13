"""Removal of a cluster: a read-only preview, the removal, and a last check of AWS."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.cluster.clients import World, check_same_account
from shardyard.cluster.cost_report import requested_nodes
from shardyard.cluster.create import LAUNCHER, LIMIT_S, POLL_S, busy_pods, entry_of
from shardyard.cluster.orphans import KINDS, SETTLE_S, FailedQuery, OrphanedResource, sweep
from shardyard.cluster.part import ClusterPart, NotOwnedError, State
from shardyard.cluster.part_order import every_part, parts_of, plane_of
from shardyard.cluster.prices import hourly_costs
from shardyard.errors import CapacityError, RequestError, ShardyardError
from shardyard.io.polling import wait_for
from shardyard.launchers.ledger import LedgerEntry
from shardyard.log import info, warn

# Remove a cluster, see that each part is gone, and ask AWS what is left all the same.


@dataclass(frozen=True, kw_only=True)
class FinalState:
    """Final state of a part, with who was asked, and when."""

    part: str
    word: str
    """Word of ``State``, or ``not known`` without an answer."""
    asked: str
    unix_s: float


@dataclass(frozen=True, kw_only=True)
class Removed:
    """Result of a removal."""

    seen: list[FinalState]
    """Each part that was ever begun."""
    left: list[OrphanedResource]
    unanswered: list[FailedQuery]
    """Questions about what is left without an answer: something may be left."""
    problems: list[str]
    """Parts that could not be removed, and why."""

    @property
    def is_clean(self) -> bool:
        """Whether all parts are gone, and every service has confirmed it."""
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
    check_same_account(world)
    ever = ever_started(world)
    if not ever:
        info(f"according to {world.ledger.path}, no part of {world.spec.name} was made from here")
    check_idle(world)
    standing = to_be_removed(world)
    names = ", ".join(f"{part.kind} {part.name(world.spec)}" for part in standing)
    if standing:
        agree(f"remove {names}?")
    for part in standing:
        if part.holds_data and _exists(part, world):
            agree_to_lose(part.name(world.spec))
    problems = _remove_parts(standing, world, poll_s=poll_s, limit_s=limit_s)
    seen = [_final_state(part, world) for part in _removal_order(ever)]
    swept = sweep(world, every_s=poll_s, within_s=min(limit_s, SETTLE_S))
    return Removed(
        seen=seen,
        left=list(swept.orphans),
        unanswered=list(swept.failed_queries),
        problems=problems,
    )


def ever_started(world: World) -> list[ClusterPart]:
    """Each part that was begun at some time, gone or not, in the order of making."""
    kinds = {entry.kind for entry in world.ledger.ever_intended()}
    return [part for part in every_part(world.spec) if part.kind in kinds]


def to_be_removed(world: World) -> list[ClusterPart]:
    """Each part that is there or may be, in the order of removing."""
    ever = _removal_order(ever_started(world))
    return [part for part in ever if _may_exist(part, world) or _exists(part, world)]


def _removal_order(parts: list[ClusterPart]) -> list[ClusterPart]:
    """The last made first; what goes with the control plane is behind it."""
    down = parts[::-1]
    own = [part for part in down if not part.goes_with_cluster]
    return own + [part for part in down if part.goes_with_cluster]


def _remove_parts(
    parts: list[ClusterPart], world: World, *, poll_s: float, limit_s: float
) -> list[str]:
    """Remove parts in their order; what did not go, and why."""
    errors: list[str] = []
    for part in [part for part in parts if not part.goes_with_cluster]:
        name = f"{part.kind} {part.name(world.spec)}"
        try:
            state = _remove(part, world, poll_s=poll_s, limit_s=limit_s)
        except ShardyardError as error:
            errors.append(f"{name}: {error}")
        else:
            if state.word == "absent":
                continue
            errors.append(f"{name} is {state.word}: {state.reason}".rstrip(": "))
        warn(errors[-1])
        if not part.is_inside:
            break  # what stands under it cannot go while it is there
    return errors


def _final_state(part: ClusterPart, world: World) -> FinalState:
    """Ask for a part's state after all removals; a part that is back is recorded again."""
    name = part.name(world.spec)
    try:
        state = part_state(part, world)
    except ShardyardError as error:
        state = State(word="not known", reason=str(error), source=str(error))
    if state.word == "absent":
        _record_removal(part, world)
    elif not _may_exist(part, world):
        world.ledger.intend(part.kind, name, launcher=LAUNCHER)
    return FinalState(
        part=f"{part.kind} {name}", word=state.word, asked=state.source, unix_s=time.time()
    )


def part_state(part: ClusterPart, world: World) -> State:
    """Return the state of a part; a part inside the cluster is gone with its control plane."""
    if part.is_inside and (plane := plane_of(world.spec).state(world)).word == "absent":
        return State(word="absent", source=plane.source)
    try:
        return part.state(world)
    except NotOwnedError as error:
        if _may_exist(part, world):
            raise
        # Ours is gone, by the ledger, and somebody made another of its name since.
        return State(word="absent", reason=str(error), source=f"tags of {part.name(world.spec)}")


def _exists(part: ClusterPart, world: World) -> bool:
    return part_state(part, world).word != "absent"


def _record_removal(part: ClusterPart, world: World) -> None:
    """Write down that it is gone."""
    if _may_exist(part, world):
        name = part.name(world.spec)
        world.ledger.remove(LedgerEntry(kind=part.kind, name=name, launcher=LAUNCHER))


def _may_exist(part: ClusterPart, world: World) -> bool:
    """Whether the ledger says that it may be there."""
    return entry_of(part, world.ledger, part.name(world.spec)) is not None


def _remove(part: ClusterPart, world: World, *, poll_s: float, limit_s: float) -> State:
    """Remove a part, and wait until it neither is there nor goes any more."""
    name = part.name(world.spec)
    state = part_state(part, world)
    if state.word not in ("absent", "going"):
        _wait_until_finished(part, world, poll_s=poll_s, limit_s=limit_s)
        info(f"removing {part.kind} {name}")
        part.remove(world)
    gone = wait_for(lambda: _terminal_state(part, world), every_s=poll_s, within_s=limit_s)
    if gone is None:
        return part.state(world)
    if gone.word == "absent":
        _record_removal(part, world)
    return gone


def _terminal_state(part: ClusterPart, world: World) -> State | None:
    """A state that does not change by itself any more; None: it is still going."""
    state = part_state(part, world)
    return state if state.word in ("absent", "failed") else None


def _wait_until_finished(part: ClusterPart, world: World, *, poll_s: float, limit_s: float) -> None:
    """Until what a part does by itself is over.

    Raises:
        CapacityError: It is not in time.
    """
    unfinished = part.unfinished(world)
    if not unfinished:
        return
    info(f"waiting for what {part.name(world.spec)} does: {unfinished}")
    if not wait_for(lambda: not part.unfinished(world), every_s=poll_s, within_s=limit_s):
        raise CapacityError(
            f"{part.name(world.spec)} is not removed while it does what would be lost: "
            f"{part.unfinished(world)}. Run the same command again once that has ended, or end it "
            "(`aws fsx cancel-data-repository-task`)."
        )


def check_idle(world: World) -> None:
    """Pods with accelerators, and jobs, are somebody's run; removing its nodes would end it.

    Raises:
        RequestError: There are some.
        AccessError: What is there is somebody else's.
    """
    if world.spec.kind == "eks":
        _check_no_busy_pods(world)
        return
    for part in parts_of(world.spec):
        is_there = part.state(world).word != "absent"
        if is_there and (held := part.in_use_by(world)):
            raise RequestError(f"{world.spec.name} is not removed: {held}. All of it was kept.")


def _check_no_busy_pods(world: World) -> None:
    if plane_of(world.spec).state(world).word == "absent":
        return
    busy = busy_pods(world)  # of a cluster that answers, however its stack is
    if busy:
        raise RequestError(
            f"{world.spec.name} is not removed: {len(busy)} pods use its accelerators "
            f"({', '.join(busy[:5])}). End their runs first (`shardyard cancel`, `shardyard "
            "teardown`), or ask their owners. All of it was kept."
        )


def check_confirmed_name(name: str, confirmed: str) -> None:
    """Check that a part with data is removed only by its own name.

    Raises:
        RequestError: Another name was given.
    """
    if name != confirmed:
        raise RequestError(
            f"{name} holds data, which would be lost, so it is removed only if you name it; "
            f"{confirmed!r} is another. All of it was kept. Copy what you need, then give "
            f"--delete-data {name}. Data outside the folder linked to a bucket exists only there."
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """The removal of one part."""

    part: str
    word: str
    """State of the part."""
    commands: tuple[str, ...]
    """Exactly what is run; none: it goes with the control plane, or is going already."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A removal that has not been done."""

    steps: tuple[Step, ...]
    """In their order."""
    refused: str
    """Reason for which it would be rejected now; empty: it would not."""
    data: tuple[str, ...]
    """Names of what holds data, each to be given with ``--delete-data``."""
    usd_per_hour: float
    """US dollars an hour that end with the removal, of known prices."""
    is_price_whole: bool
    asks_for: int
    """Number of resource kinds that AWS is queried for at the end."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def preview_removal(world: World) -> Preview:
    """Return what ``remove`` would do now.

    Raises:
        AccessError: A resource with one of the names is not ours.
    """
    check_same_account(world)
    refused = ""
    try:
        check_idle(world)
    except RequestError as error:
        refused = str(error)
    parts = to_be_removed(world)
    steps, data = [], []
    for part in parts:
        name, state = part.name(world.spec), part_state(part, world)
        if part.holds_data and state.word != "absent":
            data.append(name)
        is_done = state.word in ("absent", "going")
        acts = [] if is_done else part.removal(world)
        commands = tuple(act.words(world) for act in acts)
        steps.append(Step(part=f"{part.kind} {name}", word=state.word, commands=commands))
    kinds = {part.kind for part in parts}
    nodes = requested_nodes(world.spec, world.ledger)
    costs = [one for one in hourly_costs(world.spec, nodes=nodes) if one.part in kinds]
    return Preview(
        steps=tuple(steps),
        refused=refused,
        data=tuple(data),
        usd_per_hour=sum(one.usd_per_hour or 0.0 for one in costs),
        is_price_whole=all(one.usd_per_hour is not None for one in costs),
        asks_for=len(KINDS),
    )
