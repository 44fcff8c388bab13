"""Remove a cluster, see that each part is gone, and ask AWS what is left all the same."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.cluster.make import LAUNCHER, LIMIT_S, POLL_S, entry_of
from shardyard.cluster.steps import ControlPlane, Part, State, kubectl_json, parts_of
from shardyard.cluster.sweep import Left, left_of
from shardyard.cluster.world import World
from shardyard.errors import RequestError, ShardyardError
from shardyard.launchers.kubernetes.resources import device_resource
from shardyard.launchers.ledger import Entry
from shardyard.talk import say, warn
from shardyard.waiting import wait_for


@dataclass(frozen=True, kw_only=True)
class Seen:
    """That a part is gone: who was asked, and when."""

    part: str
    word: str
    asked: str
    unix_s: float


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What a removal did."""

    seen: list[Seen]
    left: list[Left]
    problems: list[str]
    """Parts that could not be removed, and why."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is there any more."""
        gone = all(seen.word == "absent" for seen in self.seen)
        return gone and not self.left and not self.problems

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

    Raises:
        RequestError: Pods that use accelerators run there.
        AccessError: Something of the name is somebody else's.
    """
    begun = [part for part in parts_of(world.given) if _is_begun(part, world)]
    if not begun:
        say(f"nothing of {world.given.name} was made from here, says {world.ledger.path}")
    _refuse_busy(world)
    names = ", ".join(f"{part.kind} {part.name(world.given)}" for part in reversed(begun))
    if begun:
        agree(f"remove {names}?")
    for part in begun:
        if part.holds_data and part.state(world).word != "absent":
            agree_to_lose(part.name(world.given))
    seen: list[Seen] = []
    problems: list[str] = []
    for part in reversed([part for part in begun if not part.goes_with_cluster]):
        try:
            state = _remove(part, world, poll_s=poll_s, limit_s=limit_s)
        except ShardyardError as error:
            problems.append(f"{part.kind} {part.name(world.given)}: {error}")
            warn(problems[-1])
            if not part.is_inside:
                break  # what stands under it cannot go while it is there
            continue
        seen.append(_seen(part, state, world))
        if state.word != "absent":
            problems.append(f"{part.kind} {part.name(world.given)} is {state.word}: {state.why}")
            if not part.is_inside:
                break
    inner = [part for part in begun if part.goes_with_cluster]
    if inner and (plane := ControlPlane().state(world)).word == "absent":
        for part in inner:
            _strike(part, world)
            seen.append(_seen(part, plane, world))
    return Removed(seen=seen, left=left_of(world), problems=problems)


def _seen(part: Part, state: State, world: World) -> Seen:
    name = f"{part.kind} {part.name(world.given)}"
    return Seen(part=name, word=state.word, asked=state.asked, unix_s=time.time())


def _strike(part: Part, world: World) -> None:
    """Write down that it is gone."""
    name = part.name(world.given)
    world.ledger.remove(Entry(kind=part.kind, name=name, launcher=LAUNCHER))


def _is_begun(part: Part, world: World) -> bool:
    return entry_of(part, world.ledger, part.name(world.given)) is not None


def _remove(part: Part, world: World, *, poll_s: float, limit_s: float) -> State:
    name = part.name(world.given)
    if part.is_inside:
        plane = ControlPlane().state(world)
        if plane.word == "absent":  # and so is all in it
            _strike(part, world)
            return State(word="absent", asked=plane.asked)
    state = part.state(world)
    if state.word not in ("absent", "going"):
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
    state = part.state(world)
    return state if state.word in ("absent", "failed") else None


def _refuse_busy(world: World) -> None:
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
    if ControlPlane().state(world).word != "there":
        return
    listed = kubectl_json(world, "pods", "--all-namespaces") or {"items": []}
    resource = device_resource(world.given.instance.accelerator)
    busy = [
        f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        for pod in listed["items"]
        if pod.get("status", {}).get("phase") in ("Pending", "Running") and _asks(pod, resource)
    ]
    if busy:
        raise RequestError(
            f"{world.given.name} is not removed: {len(busy)} pods use its accelerators "
            f"({', '.join(busy[:5])}). End their runs first (`shardyard cancel`, `shardyard "
            "teardown`), or ask their owners. Nothing was removed."
        )


def _asks(pod: dict[str, Any], resource: str) -> bool:
    return any(
        resource in container.get("resources", {}).get("requests", {})
        or resource in container.get("resources", {}).get("limits", {})
        for container in pod["spec"]["containers"]
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
