"""Agents make blocks of their ranks' steps, tell each other, and one of them has them judged."""

from collections.abc import Iterator

import pytest

from shardyard.elastic.heartbeat import StepRecord
from shardyard.elastic.slowdown import Straggler, StragglerWatch, block_of
from shardyard.telemetry.health.ranks import RankBlock, Slowness


class Board:
    """What two agents tell each other."""

    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def publish(self, kind: str, entries: list[dict[str, object]]) -> None:
        assert kind == "blocks"
        self.told = entries

    def from_others(self, kind: str) -> list[dict[str, object]]:
        assert kind == "blocks"
        return self.told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("shardyard.elastic.slowdown.time.monotonic", lambda: now[0])
    return now


def steps(count: int, compute_s: float, *, begin: int = 2, every: int = 1) -> Iterator[StepRecord]:
    """As a rank notes them: the first of a process is not."""
    for step in range(begin, begin + count, every):
        yield StepRecord(step=step, compute_ns=int(compute_s * 1e9), data_ns=1000)


def watch(board: Board, rank: int) -> StragglerWatch:
    return StragglerWatch(
        board, node=f"n{rank}", ranks=[rank], world_size=2, ranks_of_stage=2  # type: ignore[arg-type]
    )  # fmt: skip


def told_of(
    clock: list[float], *, step_s: float, seconds: int, slow: float = 2.0
) -> list[Straggler]:
    """Of two nodes that look ten times a second, the second one some moments after the first."""
    board = Board()
    first, second = watch(board, 0), watch(board, 1)
    found: list[Straggler] = []
    for tick in range(10 * seconds):
        clock[0] = tick / 10
        due = int(clock[0] / step_s)
        for mine, compute_s in ((first, 0.1), (second, 0.1 * slow)):
            count = due - mine.latest_steps[0]
            noted = list(steps(count, compute_s, begin=mine.latest_steps[0] + 1))
            judges = mine is first
            if not judges and tick < 7:
                continue
            found += mine.poll([noted[-32:]], is_evaluator=judges)
    return found


@pytest.mark.parametrize("step_s", [0.011, 0.05, 0.3, 2.0])
def test_agents_tell_each_other_and_one_of_them_judges(clock: list[float], step_s: float) -> None:
    """Also of steps so quick that not every block can be told."""
    (told,) = told_of(clock, step_s=step_s, seconds=int(80 * step_s) + 25)
    slow = told.slowness
    assert (slow.what, slow.ranks, told.nodes, slow.is_since_start) == (
        "compute",
        (1,),
        ("n1",),
        True,
    )
    assert slow.factor == pytest.approx(2.0)


def test_nodes_that_are_alike_are_not_spoken_of(clock: list[float]) -> None:
    assert told_of(clock, step_s=0.05, seconds=25, slow=1.0) == []


def test_no_rank_is_judged_until_all_have_told_the_block(clock: list[float]) -> None:
    alone = watch(Board(), 1)
    for tick in range(100):
        clock[0] = float(tick)
        assert (
            alone.poll([list(steps(4, 0.2, begin=alone.latest_steps[0] + 1))], is_evaluator=True)
            == []
        )


def test_a_block_holds_each_of_its_steps_and_groups_that_are_in_all_of_them() -> None:
    noted = [
        StepRecord(
            step=9 + k, compute_ns=10**8 + k, data_ns=10**6,
            exchange_ns={"0-1-2": 10**7, **({"0-4-2": 1} if k else {})},
        )
        for k in range(8)
    ]  # fmt: skip
    assert block_of(noted, rank=3, node="n") == RankBlock(
        rank=3, node="n", block=1, compute_s=[0.1] * 8, data_s=[0.001] * 8,
        exchange_s={"0-1-2": [0.01] * 8},
    )  # fmt: skip


def test_a_block_of_which_steps_were_missed_is_left_out(clock: list[float]) -> None:
    board = Board()
    mine = watch(board, 0)
    clock[0] = 3.0
    mine.poll([[*steps(16, 0.1, begin=1, every=2), *steps(17, 0.1, begin=17)]], is_evaluator=False)
    assert [block["block"] for block in board.told] == [2, 3]


SLOW = Slowness(
    what="compute", ranks=(3,), step=80, factor=1.23456, duration_s=0.5, peers_s=0.405,
    is_over=False,
    is_since_start=False, is_intermittent=False,
)  # fmt: skip


def test_the_events_name_the_rank_or_the_ranks_that_a_link_joins() -> None:
    rank = Straggler(slowness=SLOW, nodes=("n1",))
    assert (rank.kind, rank.event()) == (
        "straggler",
        {"rank": 3, "node": "n1", "what": "compute", "step": 80, "factor": 1.2346,
         "is_over": False, "is_since_start": False, "compute_s": 0.5, "peers_s": 0.405,
         "is_held_up": False},
    )  # fmt: skip
    assert rank.is_slow_rank
    for differs in ({"is_over": True}, {"what": "data"}, {"what": "link"}):
        slow = Slowness(**{**SLOW.__dict__, **differs})
        assert not Straggler(slowness=slow, nodes=("n1",)).is_slow_rank
    slow = Slowness(**{**SLOW.__dict__, "what": "link", "ranks": (0, 8)})
    link = Straggler(slowness=slow, nodes=("n0", "n1"))
    assert (link.kind, link.event()) == (
        "slow_link",
        {"ranks": [0, 8], "nodes": ["n0", "n1"], "step": 80, "factor": 1.2346, "is_over": False,
         "is_since_start": False, "exchange_s": 0.5, "peers_s": 0.405},
    )  # fmt: skip
