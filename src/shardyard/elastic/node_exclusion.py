"""Exclusion of a node, and its agent's wait until the others have ended the attempt.

A node is excluded once three losses in a row began on it within an hour. Where the recipe asks
for it, a node with a straggler among its ranks is excluded too. Both happen only while
`elastic.min_nodes` are left, and for one node an hour at most: where several seem bad, it is
mostly something else. All agents exchange their losses when they meet, and reach the same
verdict.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from shardyard.elastic.agent_messages import AgentMessages, Node
from shardyard.elastic.device_watch import PROBLEM
from shardyard.elastic.hang_watch import Hang
from shardyard.elastic.restart_budget import HOUR_S, RestartBudget
from shardyard.elastic.worker_failures import Loss, LostNode, causes
from shardyard.rundir.jsonl import read_lines_backwards
from shardyard.rundir.layout import RunDir
from shardyard.rundir.state import end_of_attempt

LOSSES = 3
"""Losses in a row that began on one node, before the others continue without it."""
_GONE_S = 120.0
"""Without a sign of the others: as long as another node may take to be seen in place of a lost one,
with some to spare."""
_LOOK_S = 0.5


class NodeExcluded(Exception):  # noqa: N818  not an error
    """The others continue without this node."""


class NodeFailureHistory:
    """On which nodes the losses of an attempt began, and which were left out."""

    def __init__(self) -> None:
        self._loss_origins: list[tuple[Node | None, float]] = []
        """The node of each loss, None where it is not known, and when; the newest last."""
        self._excluded: list[tuple[Node, float]] = []

    @property
    def excluded_nodes(self) -> list[Node]:
        """Nodes that were left out, in order."""
        return [node for node, _ in self._excluded]

    @property
    def has_recent_exclusion(self) -> bool:
        """Whether a node was within the last hour."""
        return any(time.monotonic() - at_s < HOUR_S for _, at_s in self._excluded)

    def add(self, node: Node | None) -> None:
        """Note where the newest loss began."""
        self._loss_origins.append((node, time.monotonic()))

    def latest_streak(self) -> tuple[Node | None, int]:
        """The node on which the newest loss began, and how many in a row within an hour did."""
        node = self._loss_origins[-1][0] if self._loss_origins else None
        if node is None:
            return None, 0
        since_s = time.monotonic() - HOUR_S
        row = takewhile(
            lambda loss: loss[0] == node and loss[1] > since_s, self._loss_origins[::-1]
        )
        return node, len(list(row))

    def exclude(self, node: Node) -> None:
        """Record that the others continue without it."""
        self._excluded.append((node, time.monotonic()))
        self._loss_origins.clear()

    def to_json(self) -> dict[str, Any]:
        """For the others, as JSON: seconds ago, as clocks of two nodes differ."""
        now_s = time.monotonic()
        return {
            "left_out": [[asdict(node), now_s - at_s] for node, at_s in self._excluded],
            "began": [
                [None if node is None else asdict(node), now_s - at_s]
                for node, at_s in self._loss_origins[-LOSSES:]
            ],
        }

    def adopt(self, histories: Sequence[Mapping[str, Any]]) -> None:
        """Take over what all of a meeting hold: those that were there before know all of it."""
        most = max(histories, key=lambda each: (len(each["left_out"]), len(each["began"])))
        now_s = time.monotonic()
        self._excluded = [(Node(**node), now_s - ago_s) for node, ago_s in most["left_out"]]
        self._loss_origins = [
            (None if node is None else Node(**node), now_s - ago_s) for node, ago_s in most["began"]
        ]


def find_origin(
    losses: Sequence[Loss],
    lost: Sequence[LostNode],
    hangs: Sequence[Hang],
    *,
    ranks_per_node: int,
) -> int | None:
    """Return the group rank of the one node on which the end of a generation began.

    Returns:
        None: it began on several at once, as where a switch fails, or the place is unknown.
    """
    if lost:
        # Peers of a lost node report broken connections, which are no losses of their own.
        groups = {node.group_rank for node in lost}
    elif any(hang.rank is None for hang in hangs):
        return None
    else:
        hung = [hang.rank for hang in hangs if hang.rank is not None]
        ranks = hung or ([loss.rank for loss in causes(losses)] if losses else [])
        groups = {rank // ranks_per_node for rank in ranks}
    only = groups.pop() if len(groups) == 1 else -1
    return None if only < 0 else only


def lost_node(node: Node, nodes: Sequence[Node], *, ranks_per_node: int, cause: str) -> LostNode:
    """A node that is gone, with its place among those of a generation.

    Args:
        nodes: Of the generation; the lost one may have left it before.
    """
    group_rank = nodes.index(node) if node in nodes else -1
    first = group_rank * ranks_per_node
    ranks = tuple(range(first, first + ranks_per_node)) if group_rank >= 0 else ()
    return LostNode(
        node=node.name, node_rank=node.rank, group_rank=group_rank, ranks=ranks, cause=cause
    )


@dataclass(frozen=True, kw_only=True)
class RestartDecision:
    """Consequences of a loss."""

    should_restart: bool
    exclusion_reason: str = ""
    """Why the restart is without the node on which it began; empty: it is with it."""


class RestartPolicy:
    """Verdicts of one node's agent in one attempt; all agents of a run reach the same ones.

    Args:
        min_nodes: Fewest nodes with which the run continues.
    """

    def __init__(self, restarts: RestartBudget, *, min_nodes: int) -> None:
        self.restarts = restarts
        self.failure_history = NodeFailureHistory()
        self._min_nodes = min_nodes

    def decide(
        self,
        first: Loss | LostNode,
        *,
        node: Node | None,
        remaining: Sequence[Node],
        finished_step: int,
        hangs: Sequence[Hang] = (),
    ) -> RestartDecision:
        """Judge the end of a generation, once.

        Args:
            first: The loss that caused the others.
            node: Node on which it began; None: on several, or unknown.
            remaining: Nodes that are not lost.
            finished_step: The last of the generation.
            hangs: Hangs that the loss ended.
        """
        if isinstance(first, Loss) and first.is_final:  # of the request or a file, no node's fault
            return RestartDecision(should_restart=False)
        self.failure_history.add(node)
        _, row = self.failure_history.latest_streak()
        # The same failure twice on one node does not prove that it also happens on the others. If
        # the run can spare the node, a third loss decides.
        is_of_node = node is not None and row > 1 and not self.keep_reason(node, remaining)
        why = ""
        if is_of_node and row >= LOSSES:
            # The remaining nodes get back what the excluded one has used of elastic.max_restarts.
            self.restarts.refund(row - 1)
            why = f"{row} losses in a row within an hour began on it, the last one: {first.cause}"
        is_worth = self.restarts.should_restart(
            first, finished_step=finished_step, hangs=hangs, is_of_node=is_of_node
        )
        return RestartDecision(should_restart=is_worth, exclusion_reason=why if is_worth else "")

    def keep_reason(self, node: Node, remaining: Sequence[Node]) -> str:
        """Return why the run cannot continue without a node; empty: it can."""
        if sum(each != node for each in remaining) < self._min_nodes:
            return f"elastic.min_nodes={self._min_nodes} needs all {len(remaining)} nodes"
        if self.failure_history.has_recent_exclusion:
            return f"{self.failure_history.excluded_nodes[-1]} was within the last hour"
        return ""

    def describe_node_losses(self, remaining: Sequence[Node]) -> str:
        """Describe the node among several on which the latest losses began; empty if none."""
        node, row = self.failure_history.latest_streak()
        if node is None or row < 2 or {*remaining} <= {node}:
            return ""
        words = f"; the last {row} losses began on {node}"
        if why := self.keep_reason(node, remaining):
            return f"{words}, which would have been left out, but {why}"
        return f"{words}: continue without it"


def was_excluded(run: RunDir, attempt: int, node: Node) -> bool:
    """Whether a node that starts was left out of the attempt when its agent was another process."""
    return any(
        event["kind"] == "node_left_out"
        and event.get("attempt") == attempt
        and [event.get(key) for key in ("node", "node_rank", "machine")]
        == [node.name, node.rank, node.machine]
        for event in read_lines_backwards(run.events, with_any=('"node_left_out"',))
    )


def wait_for_end(
    run: RunDir,
    attempt: int,
    *,
    has_others: Callable[[], bool],
    is_to_stop: Callable[[], bool],
) -> dict[str, Any] | None:
    """Wait until the others have ended the attempt; the event that says so.

    A node that ended before them would be taken for lost by some schedulers, started again by
    others, and by some for the end of the job.

    Returns:
        None: this one is to stop before, or the others are gone without a word.
    """
    seen_s = time.monotonic()
    while (end := end_of_attempt(run, attempt)) is None and not is_to_stop():
        if has_others():
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > _GONE_S:
            return None
        time.sleep(_LOOK_S)
    return end


# ``ExclusionRules`` excludes a node for a verdict that the recipe names in `elastic.leave_out_for`;
# none by default. The limits of every exclusion apply: `elastic.min_nodes` remain, and at most one
# node is excluded in an hour. The node of a slow rank is excluded only if the others are faster
# without it. Otherwise the event gives the reason why the node stays.

SLOW_RANK = "slow_rank"
_DECISION = "left_out"


class ExclusionRules:
    """Verdict rules of one node's agent; the agent that writes events decides for all.

    Args:
        rules: Verdicts for which a node is excluded.
        bounds: Limits that hold for every excluded node.
    """

    def __init__(self, rules: Sequence[str], bounds: RestartPolicy) -> None:
        self._rules = rules
        self._bounds = bounds

    def on_slow_rank(
        self,
        rank: int,
        factor: float,
        node: Node,
        messages: AgentMessages,
        remaining: Sequence[Node],
    ) -> str:
        """Let all continue without the node of a newly slow rank, if a rule asks for it.

        Args:
            factor: Times as long as its step takes.

        Returns:
            Why the node stays although a rule applies; empty: it goes, or no rule applies.
        """
        if not self._is_triggered(SLOW_RANK, messages):
            return ""
        why = self._bounds.keep_reason(node, remaining) or _no_gain_reason(factor, len(remaining))
        if not why:
            cause = f"rank {rank} is a straggler, {factor:.1f} times as slow"
            self._decide(SLOW_RANK, node, cause, messages)
        return why

    def on_device(
        self,
        kind: str,
        problem: Mapping[str, Any],
        messages: AgentMessages,
        remaining: Sequence[Node],
    ) -> str:
        """The same, of what a node's telemetry found."""
        if kind != PROBLEM or not self._is_triggered(problem["problem"], messages):
            return ""
        node = next((n for n in messages.nodes if n.rank == problem["node_rank"]), None)
        if node is None:
            return ""  # it is not part of this generation
        why = self._bounds.keep_reason(node, remaining)
        if not why:
            device = problem["device"]
            where = "" if device is None else f"device {device}: "
            self._decide(problem["problem"], node, f"{where}{problem['cause']}", messages)
        return why

    def decided(self, messages: AgentMessages) -> tuple[Node, str, str] | None:
        """Return the node that all continue without, why, and the verdict; None: undecided."""
        if not self._rules or not (told := messages.decided(_DECISION)):
            return None
        node = next(n for n in messages.nodes if n.rank == told[0]["node_rank"])
        return node, told[0]["cause"], told[0]["verdict"]

    @property
    def words(self) -> str:
        """The rules, as a recipe says them."""
        return f"elastic.leave_out_for=[{', '.join(self._rules)}]"

    def _is_triggered(self, trigger: str, messages: AgentMessages) -> bool:
        return trigger in self._rules and not messages.decided(_DECISION)

    def _decide(self, trigger: str, node: Node, cause: str, messages: AgentMessages) -> None:
        told = {"node_rank": node.rank, "verdict": trigger, "cause": cause}
        messages.decide(_DECISION, [told])


def _no_gain_reason(factor: float, nodes: int) -> str:
    """Return why a step would take longer on only the other nodes; empty: it would not.

    The batch of a step is dealt out to one node less, which then compute as much longer.
    """
    without = nodes / (nodes - 1)
    if factor > without:
        return ""
    return (
        f"a step takes {factor:.2f} times as long with it, and {without:.2f} times without it on "
        f"{nodes - 1} of {nodes} nodes"
    )
