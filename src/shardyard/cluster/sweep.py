"""What AWS has of a cluster after its removal, whoever made it: by tag, by name, by network.

eksctl and CloudFormation know what they made. What controllers in the cluster made, or what a
failed removal left, is found by asking each service. Who does not answer is named: a list that was
refused is not an empty one. Services tell late of what came and of what went, so they are asked
until two rounds running find nothing.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardyard.cluster.eksctl import OWNER_TAG
from shardyard.cluster.existing_spec import AdoptedCluster
from shardyard.cluster.kinds import (
    KINDS,
    NAME_TAGS,
    OVER,
    Kind,
    Traces,
    is_group,
    is_of_another,
    is_of_other_name,
    is_tagged,
    tags_of,
)
from shardyard.cluster.world import World
from shardyard.errors import ShardyardError
from shardyard.log import say

SETTLE_S = 300.0
"""So long services are asked again about what is gone by their own word."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """One thing that is there."""

    kind: str
    id: str
    cost: str
    """In words: what it costs while it stands, or that it costs nothing."""


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A question about what is left that got no answer."""

    kind: str
    asked: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What was found."""

    left: tuple[Left, ...]
    unanswered: tuple[Unanswered, ...]

    @property
    def is_clean(self) -> bool:
        """Whether all was answered, and nothing is there."""
        return not self.left and not self.unanswered


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a service has of one kind."""

    kind: Kind
    there: dict[str, Any]
    """Id -> what the service says of it, of all that is not over, whoever's."""
    left: tuple[Left, ...]


def sweep(world: World, *, every_s: float, within_s: float = SETTLE_S) -> Swept:
    """Everything of a cluster that AWS still has.

    Args:
        every_s: Seconds between two rounds.
        within_s: Seconds after which what is still told of counts as there.
    """
    until = time.monotonic() + within_s
    before: Swept | None = None
    while True:
        is_last = time.monotonic() >= until
        found = _round(world)
        if before is not None and found.is_clean and before.is_clean:
            return found
        if before is not None and is_last:
            return _both(before, found)
        if before is None or found != before:
            say(f"asked AWS what is left: {_words(found)}; asking again")
        before = found
        time.sleep(every_s)


def _both(before: Swept, found: Swept) -> Swept:
    """What one of two rounds saw is there: nothing says which of them was late."""
    unanswered = {one.kind: one for one in (*before.unanswered, *found.unanswered)}
    left = dict.fromkeys((*found.left, *before.left))
    return Swept(left=tuple(left), unanswered=tuple(unanswered.values()))


def _words(found: Swept) -> str:
    kinds = sorted({left.kind for left in found.left})
    unanswered = [f"no answer about {one.kind}" for one in found.unanswered]
    return ", ".join([*kinds, *unanswered]) or "nothing"


def _round(world: World) -> Swept:
    """Each kind asked once, and the tagging service about all."""
    traces = traces_of(world)
    answers, unanswered = [], []
    for kind in KINDS:
        try:
            answers.append(_ask(kind, world, traces))
        except ShardyardError as error:
            asked = f"{kind.service} {kind.call}"
            unanswered.append(Unanswered(kind=kind.name, asked=asked, why=str(error)))
    left = [left for answer in answers for left in answer.left]
    for key in _keys(world):
        try:
            left += _tagged(key, world, traces, answers)
        except ShardyardError as error:
            asked = "resourcegroupstaggingapi get_resources"
            unanswered.append(Unanswered(kind=f"tag {key}", asked=asked, why=str(error)))
    first = {(one.kind, one.id): one for one in reversed(left)}  # which says what it costs
    return Swept(left=tuple(reversed(first.values())), unanswered=tuple(unanswered))


def _keys(world: World) -> tuple[str, ...]:
    """Tags of what is the cluster's; of one that was adopted, of what was added to it."""
    if isinstance(world.given, AdoptedCluster):
        return (OWNER_TAG,)
    return (*NAME_TAGS, f"kubernetes.io/cluster/{world.given.name}")


def traces_of(world: World) -> Traces:
    """What the cluster's things are known by, of the ledger and of AWS.

    Raises:
        StorageError: The ledger was changed by something else.
    """
    vpcs, subnets = set(), set()
    for entry in world.ledger.all() if world.given.vpc.id is None else ():
        vpcs |= set(re.findall(r"vpc-[0-9a-f]{8,17}", entry.details.get("vpc", "")))
        subnets |= set(re.findall(r"subnet-[0-9a-f]{8,17}", entry.details.get("subnets", "")))
    known = Traces(
        given=world.given, owner=world.owner, vpcs=frozenset(vpcs), subnets=frozenset(subnets)
    )
    try:
        groups = frozenset(
            str(group["GroupId"])
            for group in world.listed("ec2", "describe_security_groups", "SecurityGroups")
            if is_group(group, known)
        )
    except ShardyardError:
        return known  # that they are not listed is told of their kind
    return Traces(
        given=known.given, owner=known.owner, vpcs=known.vpcs, subnets=known.subnets, groups=groups
    )


def _ask(kind: Kind, world: World, traces: Traces) -> _Answer:
    """All of a kind, and which of it is the cluster's.

    Raises:
        ShardyardError: It was not answered.
    """
    there: dict[str, Any] = {}
    left = []
    for item in world.listed(kind.service, kind.call, kind.at, **kind.params):
        if kind.id and kind.state(item) in OVER:
            continue
        id = str(item[kind.id] if kind.id else item)
        there[id] = item
        tags = tags_of(item)
        if not kind.is_of(item, traces):
            continue
        if kind.tags_call:
            tags = _asked_tags(kind, id, world)
            if _is_anothers(kind, tags, traces):
                continue
        if isinstance(world.given, AdoptedCluster) and tags.get(OWNER_TAG) != world.owner:
            continue  # it was there before, or is of what was
        left.append(_left(kind.name, id, kind.cost(item), tags, traces))
    return _Answer(kind=kind, there=there, left=tuple(left))


def _is_anothers(kind: Kind, tags: dict[str, str], traces: Traces) -> bool:
    """Of what is of all regions: the name may be that of a cluster in another one."""
    if kind.tags_decide and not is_tagged(tags, traces):
        return True
    return is_of_another(tags, traces) or is_of_other_name(tags, traces)


def _left(kind: str, id: str, cost: str, tags: dict[str, str], traces: Traces) -> Left:
    whose = "; of another making of the name" if is_of_another(tags, traces) else ""
    return Left(kind=kind, id=id, cost=cost + whose)


def _asked_tags(kind: Kind, id: str, world: World) -> dict[str, str]:
    call, _, key = kind.tags_call.partition(":")
    return tags_of({"Tags": list(world.listed(kind.service, call, "Tags", **{key: id}))})


def _tagged(key: str, world: World, traces: Traces, answers: list[_Answer]) -> Iterator[Left]:
    """What the tagging service knows by one tag, of whatever kind.

    It tells for hours of what is gone: of kinds that were asked, their own service's word counts.
    """
    value = traces.owner if key == OWNER_TAG else traces.given.name
    values = {} if "/cluster/" in key else {"Values": [value]}
    call = ("resourcegroupstaggingapi", "get_resources", "ResourceTagMappingList")
    for item in world.listed(*call, TagFilters=[{"Key": key, **values}]):
        arn = str(item["ResourceARN"])
        known = _known(arn, answers)
        if known is None:
            yield _left("tagged", arn, "look at it by its ARN", tags_of(item), traces)
            continue
        answer, id = known
        if id in answer.there:
            cost = answer.kind.cost(answer.there[id])
            yield _left(answer.kind.name, id, cost, tags_of(item), traces)


def _known(arn: str, answers: list[_Answer]) -> tuple[_Answer, str] | None:
    """Of which kind an ARN is, and its id there; None: of none that was answered."""
    _, _, service, _, _, resource = [*arn.split(":", 5), *[""] * 6][:6]
    for answer in answers:
        match = re.fullmatch(answer.kind.arn, f"{service}:{resource}") if answer.kind.arn else None
        if match:
            return answer, match.group(1)
    return None


def details_of_network(outputs: dict[str, str]) -> dict[str, str]:
    """What the ledger keeps of a network, from its stack's outputs, to find what stays in it."""
    subnets = [outputs[key] for key in ("SubnetsPrivate", "SubnetsPublic") if outputs.get(key)]
    return {"vpc": outputs["VPC"], "subnets": ",".join(subnets)}


def listed_of(world: World, kind: str) -> Iterator[Any]:
    """The cluster's things of one kind, as their service lists them.

    Raises:
        ShardyardError: It was not answered.
    """
    traces = traces_of(world)
    (found,) = (one for one in KINDS if one.name == kind)
    for item in world.listed(found.service, found.call, found.at, **found.params):
        if found.is_of(item, traces) and found.state(item) not in OVER:
            yield item
