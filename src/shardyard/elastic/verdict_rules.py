"""Which verdicts a recipe has a node left out for, and why it stays where that cannot be.

`elastic.leave_out_for` names them; none by default. The bounds are those of every node that is left
out (`elastic/leave_out.py`): `elastic.min_nodes` are left, and one goes within an hour at most. A
slow rank's node goes only if the others are quicker without it than with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardyard.elastic.device_watch import PROBLEM
from shardyard.elastic.leave_out import Verdicts
from shardyard.elastic.notices import Node, Notices

SLOW_RANK = "slow_rank"
_DECISION = "left_out"


class VerdictRules:
    """Those of one node's agent; the one that writes events decides for all.

    Args:
        rules: Verdicts for which a node is left out.
        bounds: What holds for every node that is left out.
    """

    def __init__(self, rules: Sequence[str], bounds: Verdicts) -> None:
        self._rules = rules
        self._bounds = bounds

    def on_slow_rank(
        self, rank: int, factor: float, node: Node, notices: Notices, left: Sequence[Node]
    ) -> str:
        """Have all go on without the node of a rank that is slow from now on, if a rule says so.

        Args:
            factor: Times as long as its step takes.

        Returns:
            Why it stays although one does; empty: it goes, or none does.
        """
        if not self._asks_for(SLOW_RANK, notices):
            return ""
        why = self._bounds.why_stays(node, left) or _why_no_gain(factor, len(left))
        if not why:
            cause = f"rank {rank} is a straggler, {factor:.1f} times as slow"
            self._decide(SLOW_RANK, node, cause, notices)
        return why

    def on_device(
        self, kind: str, problem: Mapping[str, Any], notices: Notices, left: Sequence[Node]
    ) -> str:
        """The same, of what a node's telemetry found."""
        if kind != PROBLEM or not self._asks_for(problem["problem"], notices):
            return ""
        node = next((n for n in notices.nodes if n.rank == problem["node_rank"]), None)
        if node is None:
            return ""  # it is not part of this generation
        why = self._bounds.why_stays(node, left)
        if not why:
            device = problem["device"]
            where = "" if device is None else f"device {device}: "
            self._decide(problem["problem"], node, f"{where}{problem['cause']}", notices)
        return why

    def decided(self, notices: Notices) -> tuple[Node, str, str] | None:
        """The node that all go on without, why, and the verdict; None: nobody has said so."""
        if not self._rules or not (told := notices.decided(_DECISION)):
            return None
        node = next(n for n in notices.nodes if n.rank == told[0]["node_rank"])
        return node, told[0]["cause"], told[0]["verdict"]

    @property
    def words(self) -> str:
        """The rules, as a recipe says them."""
        return f"elastic.leave_out_for=[{', '.join(self._rules)}]"

    def _asks_for(self, verdict: str, notices: Notices) -> bool:
        return verdict in self._rules and not notices.decided(_DECISION)

    def _decide(self, verdict: str, node: Node, cause: str, notices: Notices) -> None:
        told = {"node_rank": node.rank, "verdict": verdict, "cause": cause}
        notices.decide(_DECISION, [told])


def _why_no_gain(factor: float, nodes: int) -> str:
    """Why a step would take longer on the other nodes alone; empty: it would not.

    The batch of a step is dealt out to one node less, which then compute as much longer.
    """
    without = nodes / (nodes - 1)
    if factor > without:
        return ""
    return (
        f"a step takes {factor:.2f} times as long with it, and {without:.2f} times without it on "
        f"{nodes - 1} of {nodes} nodes"
    )
