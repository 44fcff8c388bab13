"""A rule of the recipe has the others go on without a node, within bounds, and says so."""

from typing import Any, get_args

import pytest

from shardyard.config.schema.recipe import LeaveOutFor
from shardyard.elastic.agent_messages import Node
from shardyard.elastic.node_exclusion import SLOW_RANK, ExclusionRules, RestartPolicy
from shardyard.elastic.restart_budget import RestartBudget
from shardyard.telemetry.health import devices

NODES = [Node(f"n{rank}", rank) for rank in range(3)]
XID = {"node": "n1", "node_rank": 1, "device": 4, "problem": "xid", "cause": "XID 79: fell off"}


class Board:
    """The notices of a generation."""

    def __init__(self) -> None:
        self.nodes = NODES
        self.told: list[dict[str, Any]] = []

    def decide(self, kind: str, entries: list[dict[str, Any]]) -> None:
        assert kind == "left_out" and not self.told
        self.told = entries

    def decided(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "left_out"
        return self.told


def rules(*names: str, min_nodes: int = 2) -> ExclusionRules:
    return ExclusionRules(names, RestartPolicy(RestartBudget(3), min_nodes=min_nodes))


def test_each_verdict_that_names_a_node_can_be_a_rule() -> None:
    assert {*get_args(LeaveOutFor)} == {*get_args(devices.Kind), SLOW_RANK}


def test_a_device_that_a_rule_names_has_its_node_left_out_once() -> None:
    board, two = Board(), rules("ecc", "xid")
    assert two.on_device("device_problem", XID, board, NODES) == ""  # type: ignore[arg-type]
    assert two.decided(board) == (NODES[1], "device 4: XID 79: fell off", "xid")  # type: ignore[arg-type]
    other = {**XID, "node_rank": 2, "problem": "ecc"}
    assert two.on_device("device_problem", other, board, NODES) == ""  # type: ignore[arg-type]
    assert board.told[0]["node_rank"] == 1  # the others drain already
    assert two.words == "elastic.leave_out_for=[ecc, xid]"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("device_problem", {"problem": "slowed"}), ("device_well", {}), ("program_error", {}),
     ("device_problem", {"node_rank": 7})],
)  # fmt: skip
def test_what_no_rule_names_or_is_over_or_the_programs_leaves_nobody_out(
    kind: str, problem: dict[str, Any]
) -> None:
    board = Board()
    assert rules("xid").on_device(kind, {**XID, **problem}, board, NODES) == ""  # type: ignore[arg-type]
    assert board.told == [] and rules("xid").decided(board) is None  # type: ignore[arg-type]


def test_a_slow_rank_leaves_only_where_the_others_are_quicker_without_it() -> None:
    board, one = Board(), rules("slow_rank")
    words = "a step takes 1.40 times as long with it, and 1.50 times without it on 2 of 3 nodes"
    assert one.on_slow_rank(2, 1.4, NODES[2], board, NODES) == words  # type: ignore[arg-type]
    assert board.told == []
    assert one.on_slow_rank(2, 1.6, NODES[2], board, NODES) == ""  # type: ignore[arg-type]
    assert board.told == [
        {
            "node_rank": 2,
            "verdict": "slow_rank",
            "cause": "rank 2 is a straggler, 1.6 times as slow",
        }
    ]


def test_it_stays_where_too_few_are_left_and_within_an_hour_of_another_one() -> None:
    board, all_needed = Board(), rules("xid", min_nodes=3)
    why = all_needed.on_device("device_problem", XID, board, NODES)  # type: ignore[arg-type]
    assert why == "elastic.min_nodes=3 needs all 3 nodes"
    verdicts = RestartPolicy(RestartBudget(3), min_nodes=1)
    verdicts.failure_history.exclude(NODES[0])
    spent = ExclusionRules(("xid",), verdicts)
    why = spent.on_device("device_problem", XID, board, NODES[1:])  # type: ignore[arg-type]
    assert why == "node 0 (n0) was within the last hour" and board.told == []


def test_without_rules_the_store_is_not_even_asked() -> None:
    assert rules().decided(None) is None  # type: ignore[arg-type]
    assert rules().on_device("device_problem", XID, None, NODES) == ""  # type: ignore[arg-type]
