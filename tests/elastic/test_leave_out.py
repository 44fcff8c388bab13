"""Which node is left out, when none is, and how its agent waits for the end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.elastic.agent_messages import Node
from shardyard.elastic.hang_watch import Activity, Hang
from shardyard.elastic.node_exclusion import (
    LOSSES,
    NodeFailureHistory,
    RestartPolicy,
    find_origin,
    wait_for_end,
    was_excluded,
)
from shardyard.elastic.restart_budget import RestartBudget
from shardyard.elastic.worker_failures import Loss, LostNode
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir

NODES = [Node("a", 0), Node("b", 1), Node("c", 2)]
BUG = Loss(
    rank=1, node="b", pid=7, exit_code=1, signal=None, cause="IndexError: 7 of 3", step=30
)  # fmt: skip
KILL = replace(BUG, exit_code=None, signal="SIGKILL", cause="killed by SIGKILL")
HANG = Hang(
    rank=1, node="b", pid=7, step=31, phase="step", collective="all_reduce",
    doing=Activity.SLEEPING,
    reason="it sleeps", quiet_s=3.6,
)  # fmt: skip
GONE = LostNode(node="b", node_rank=1, group_rank=1, ranks=(1,), cause="silent")


class Clock:
    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("node_exclusion", "restart_budget"):
        monkeypatch.setattr(f"shardyard.elastic.{module}.time.monotonic", lambda: clock.now_s)
    return clock


def judged(
    verdicts: RestartPolicy, loss: Loss | LostNode, node: Node | None, nodes: Sequence[Node] = NODES
) -> tuple[bool, str]:
    """Whether a restart is worth it, and why it is without the node."""
    verdict = verdicts.decide(loss, node=node, remaining=nodes, finished_step=30)
    if verdict.exclusion_reason and node is not None:
        verdicts.failure_history.exclude(node)
    return verdict.should_restart, verdict.exclusion_reason


@pytest.mark.parametrize("loss", [BUG, KILL, GONE])
def test_the_third_loss_in_a_row_has_its_node_left_out(loss: Loss | LostNode) -> None:
    """Also of the same failure, which would end the run at the second if it came elsewhere."""
    verdicts = RestartPolicy(RestartBudget(limit=3), min_nodes=2)
    assert [judged(verdicts, loss, NODES[1]) for _ in range(LOSSES - 1)] == [(True, "")] * 2
    is_worth, why = judged(verdicts, loss, NODES[1])
    assert is_worth
    assert why == f"3 losses in a row within an hour began on it, the last one: {loss.cause}"
    assert verdicts.failure_history.excluded_nodes == [NODES[1]]


@pytest.mark.parametrize("other", [NODES[0], None])
def test_a_loss_that_is_not_known_to_be_of_that_node_begins_the_row_anew(
    other: Node | None,
) -> None:
    verdicts = RestartPolicy(RestartBudget(limit=9), min_nodes=1)
    row = [NODES[1], NODES[1], other, NODES[1], NODES[1]]
    assert not any(judged(verdicts, KILL, node)[1] for node in row)
    assert judged(verdicts, KILL, NODES[1])[1]


def test_losses_of_more_than_an_hour_ago_do_not_count(clock: Clock) -> None:
    verdicts = RestartPolicy(RestartBudget(limit=9), min_nodes=1)
    for _ in range(4):
        assert judged(verdicts, KILL, NODES[1]) == (True, "")
        clock.now_s += 1801.0
    clock.now_s -= 1800.0
    assert judged(verdicts, KILL, NODES[1])[1]


def test_where_all_nodes_are_needed_the_same_failure_ends_the_run_and_the_words_name_the_node() -> (
    None
):
    verdicts = RestartPolicy(RestartBudget(limit=9), min_nodes=3)
    assert judged(verdicts, BUG, NODES[1]) == (True, "")
    assert judged(verdicts, BUG, NODES[1]) == (False, "")
    assert verdicts.restarts.is_crash_loop
    assert verdicts.describe_node_losses(NODES) == (
        "; the last 2 losses began on node 1 (b), which would have been left out, but "
        "elastic.min_nodes=3 needs all 3 nodes"
    )
    for _ in range(4):  # bad luck goes on until its budget is used up
        assert judged(verdicts, KILL, NODES[1]) == (True, "")


def test_no_node_is_named_where_there_is_one_or_it_failed_once() -> None:
    verdicts = RestartPolicy(RestartBudget(limit=9), min_nodes=1)
    assert verdicts.describe_node_losses(NODES) == ""
    judged(verdicts, KILL, NODES[1])
    assert verdicts.describe_node_losses(NODES) == ""
    judged(verdicts, KILL, NODES[1])
    assert (
        verdicts.describe_node_losses(NODES)
        == "; the last 2 losses began on node 1 (b): continue without it"
    )
    assert verdicts.describe_node_losses(NODES[1:2]) == ""


def test_the_same_failure_on_another_node_ends_the_run_at_once() -> None:
    """Then it was no fault of the node."""
    verdicts = RestartPolicy(RestartBudget(limit=9), min_nodes=1)
    for _ in range(LOSSES):
        assert judged(verdicts, BUG, NODES[1])[0]
    assert judged(verdicts, BUG, NODES[2], [NODES[0], NODES[2]]) == (False, "")
    assert verdicts.restarts.is_crash_loop


def test_of_several_nodes_that_seem_bad_one_an_hour_is_left_out(clock: Clock) -> None:
    """As where a rank is too large for any host, and moves to the next."""
    verdicts, after = RestartPolicy(RestartBudget(limit=9), min_nodes=1), [NODES[0], NODES[2]]
    for _ in range(LOSSES):
        assert judged(verdicts, KILL, NODES[1])[0]
    assert not any(judged(verdicts, KILL, NODES[2], after)[1] for _ in range(LOSSES))
    assert verdicts.describe_node_losses(after) == (
        "; the last 3 losses began on node 2 (c), which would have been left out, but node 1 (b) "
        "was within the last hour"
    )
    clock.now_s += 3600.0
    assert [bool(judged(verdicts, KILL, NODES[2], after)[1]) for _ in range(LOSSES)] == [
        False, False, True
    ]  # fmt: skip


def test_what_the_left_out_node_cost_of_the_budget_is_given_back() -> None:
    verdicts = RestartPolicy(RestartBudget(limit=2), min_nodes=1)
    for _ in range(LOSSES):
        assert judged(verdicts, KILL, NODES[1])[0]
        verdicts.restarts.record_restart(durable_step=None)
    assert verdicts.restarts.used() == 1


def test_an_error_that_no_restart_cures_leaves_nobody_out() -> None:
    verdicts = RestartPolicy(RestartBudget(limit=9), min_nodes=1)
    final = replace(BUG, is_final=True)
    assert [judged(verdicts, final, NODES[1]) for _ in range(4)] == [(False, "")] * 4


def test_nodes_that_meet_take_over_what_is_held_against_nodes(clock: Clock) -> None:
    """Also where clocks of theirs began at other times, and one has just come."""
    old, new = NodeFailureHistory(), NodeFailureHistory()
    old.exclude(NODES[2])
    for node in (NODES[0], None, NODES[1], NODES[1]):
        old.add(node)
        clock.now_s += 60.0
    told = [new.to_json(), old.to_json()]
    clock.now_s = 5.0
    new.adopt(told)
    assert new.excluded_nodes == [NODES[2]] and new.latest_streak() == (NODES[1], 2)
    assert new.has_recent_exclusion
    clock.now_s += 3600.0 - 61.0
    assert new.latest_streak() == (NODES[1], 1) and not new.has_recent_exclusion


def loss_of(rank: int, signal: str | None = None, t: float = 0.0) -> Loss:
    return replace(BUG, rank=rank, signal=signal, t=t)


@pytest.mark.parametrize(
    ("losses", "lost", "hangs", "node"),
    [
        ([loss_of(3, t=1.0), loss_of(0, t=2.0)], [], [], 1),  # the first exception
        ([loss_of(3, "SIGKILL"), loss_of(0)], [], [], 1),
        ([loss_of(2, "SIGKILL"), loss_of(3, "SIGKILL")], [], [], 1),  # as with their fork server
        ([loss_of(0, "SIGABRT"), loss_of(3, "SIGABRT")], [], [], None),
        ([loss_of(0)], [GONE], [], 1),
        ([], [GONE, replace(GONE, group_rank=0)], [], None),  # as where a switch fails
        ([], [replace(GONE, group_rank=-1)], [], None),  # it served the store and trained no more
        ([loss_of(3, "SIGKILL")], [], [replace(HANG, rank=3)], 1),
        ([loss_of(0, "SIGKILL")], [], [replace(HANG, rank=None)], None),
        ([], [], [], None),
    ],
)
def test_a_loss_is_held_against_a_node_where_it_began_there_alone(
    losses: list[Loss], lost: list[LostNode], hangs: list[Hang], node: int | None
) -> None:
    assert find_origin(losses, lost, hangs, ranks_per_node=2) == node


def test_a_node_that_is_started_again_knows_that_it_was_left_out(tmp_path: Path) -> None:
    run, me = RunDir(tmp_path), replace(NODES[1], machine="boot-1")
    events = EventWriter(run.events, attempt=2, generation=3)
    events.write("node_left_out", **me.event(), machine="boot-1", cause="", nodes_left=1)
    assert was_excluded(run, 2, me)
    assert not was_excluded(run, 3, me)
    others = (replace(me, rank=0), replace(me, name="a"), replace(me, machine="boot-2"))
    assert not any(was_excluded(run, 2, other) for other in others)


def test_it_waits_for_the_end_of_the_others_however_long(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    naps = []

    def sleep(_s: float) -> None:
        clock.now_s += 3600.0
        naps.append(clock.now_s)
        if len(naps) == 3:
            events = EventWriter(run.events, attempt=1, generation=3)
            events.write("attempt_ended", outcome="finished", exit_code=0, reason="finished")

    monkeypatch.setattr("shardyard.elastic.node_exclusion.time.sleep", sleep)
    end = wait_for_end(run, 1, has_others=lambda: True, is_to_stop=lambda: False)
    assert end is not None and (end["outcome"], len(naps)) == ("finished", 3)


@pytest.mark.parametrize("is_to_stop", [True, False])
def test_it_ends_before_where_it_is_asked_to_or_the_others_are_gone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_to_stop: bool
) -> None:
    def sleep(_s: float) -> None:
        clock.now_s += 1.0

    monkeypatch.setattr("shardyard.elastic.node_exclusion.time.sleep", sleep)
    began_s = clock.now_s
    assert not wait_for_end(
        RunDir(tmp_path), 1, has_others=lambda: False, is_to_stop=lambda: is_to_stop
    )
    assert (clock.now_s > began_s + 100) != is_to_stop
